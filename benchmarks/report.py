"""Saves measurements that belong to no operator, with the environment they were made in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cuda_ops.benchmarking.environment import environment

__all__ = ["REPO", "earlier", "environment", "save"]

REPO = Path(__file__).resolve().parent.parent


def earlier(path: str | None) -> dict[str, Any]:
    """Returns the results that a file has, so that a run of some parts keeps the others.

    ``environments`` among them has the environment of each part.
    """
    if path and Path(path).exists():
        results: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))["results"]
        return {"environments": {}, **results}
    return {"environments": {}}


def save(path: str | None, results: Any) -> None:
    """Writes ``{"environment": ..., "results": ...}`` as JSON if a path was given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(
            json.dumps({"environment": environment(), "results": results}, indent=2) + "\n"
        )
