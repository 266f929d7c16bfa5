"""What every measurement says about itself: device, date, versions; and where it is kept."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from cuda_ops import toolchain

REPO = Path(__file__).resolve().parent.parent


def environment() -> dict[str, str]:
    """Device, date and versions of this run."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=REPO,
        check=False,
    )
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()}, no GPU)",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cuda": toolchain.cuda_version(),
        "python": platform.python_version(),
        # A copy without its history is told by whoever made it.
        "commit": commit.stdout.strip() or os.environ.get("CUDA_OPS_COMMIT", "unknown"),
    }


def save(path: str | None, results: Any) -> None:
    """Write ``{"environment": ..., "results": ...}`` as JSON, if a path was given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(
            json.dumps({"environment": environment(), "results": results}, indent=2) + "\n"
        )
