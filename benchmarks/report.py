"""Saves measurements that belong to no operator, with the environment they were made in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cuda_ops.benchmarking.environment import environment
from cuda_ops.errors import BenchmarkError

__all__ = ["REPO", "earlier", "environment", "save"]

REPO = Path(__file__).resolve().parent.parent


def earlier(path: str | None) -> dict[str, Any]:
    """Returns the results that a file has, so that a run of some parts keeps the others.

    ``environments`` among them has the environment of each part.

    Raises:
        BenchmarkError: the file is something else.
    """
    if not path or not Path(path).exists():
        return {"environments": {}}
    try:
        return {"environments": {}, **json.loads(Path(path).read_text(encoding="utf-8"))["results"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{path}: expected a file that --json wrote") from error


def save(path: str | None, results: Any) -> None:
    """Writes ``{"environment": ..., "results": ...}`` as JSON if a path was given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(
            json.dumps({"environment": environment(), "results": results}, indent=2) + "\n"
        )
