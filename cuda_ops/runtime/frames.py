"""Which lines of a stack are the user's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

import cuda_ops

_INNER = tuple(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (torch, cuda_ops))
#: The file name of a function that cuda_ops generates, such as ``<cuda_ops.silu>``.
_GENERATED = re.compile(r"<\w+\.\w+>")


def is_inner(filename: str) -> bool:
    """Returns whether a frame's file is one of torch or cuda_ops, generated code included.

    >>> is_inner("<cuda_ops.silu>"), is_inner("model.py")
    (True, False)
    """
    # A history of memory may come from another machine's torch.
    return (
        filename.startswith(_INNER)
        or _GENERATED.fullmatch(filename) is not None
        or "/torch/" in filename.replace("\\", "/")
    )
