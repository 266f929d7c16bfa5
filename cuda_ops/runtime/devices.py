"""The device that an argument means."""

from __future__ import annotations

import torch

Device = torch.device | str | int | None


def resolved(device: Device) -> torch.device:
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
    return torch.device("cpu") if where.type == "cpu" else where


def checked_device(function: str, device: Device) -> torch.device:
    """Returns the same.

    Raises:
        ValueError: it is neither a CPU nor a GPU; names the function, whose argument it is.
    """
    kind = None if device is None else torch.device(device).type
    if kind not in (None, "cpu", "cuda"):
        raise ValueError(
            f"{function}: argument 'device': expected a CPU or CUDA device, got {str(device)!r}"
        )
    return resolved(device)
