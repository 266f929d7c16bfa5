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
        ValueError: it is neither a CPU nor a GPU of this machine; names the function, whose
            argument it is.
    """
    why = _why_not(device)
    if why is not None:
        shown = str(device) if isinstance(device, torch.device) else device
        raise ValueError(
            f"{function}: argument 'device': expected a CPU or CUDA device of this machine, got "
            f"{shown!r}{why}"
        )
    return resolved(device)


def _why_not(device: object) -> str | None:
    """Returns why a device cannot be used here, as the end of an error; ``None`` if it can."""
    if device is None:
        return None
    if isinstance(device, int) and not isinstance(device, bool):
        # torch cannot read a number where there is no GPU.
        kind, index = "cuda", device
    elif isinstance(device, (str, torch.device)):
        try:
            where = torch.device(device)
        except RuntimeError:
            return ""
        kind, index = where.type, where.index or 0
    else:
        return ""
    if kind == "cpu":
        return None
    if kind != "cuda":
        return ""
    if not torch.cuda.is_available():
        return ", and torch sees no GPU here; pass 'cpu'"
    count = torch.cuda.device_count()
    return None if 0 <= index < count else f", and torch sees {count} GPU{'s' * (count > 1)} here"
