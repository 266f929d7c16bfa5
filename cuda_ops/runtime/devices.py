"""The device that an argument means."""

from __future__ import annotations

import torch


def resolved(device: torch.device | str | int | None) -> torch.device:
    """Returns a device with its number; by default the current GPU, or the CPU if there is none.

    >>> resolved("cpu")
    device(type='cpu')
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    index: int | None = where.index
    if where.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return where
