"""Saves measurements that belong to no operator, with the environment they were made in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cuda_ops.benchmarking.environment import environment

__all__ = ["REPO", "environment", "save"]

REPO = Path(__file__).resolve().parent.parent


def save(path: str | None, results: Any) -> None:
    """Writes ``{"environment": ..., "results": ...}`` as JSON if a path was given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(
            json.dumps({"environment": environment(), "results": results}, indent=2) + "\n"
        )
