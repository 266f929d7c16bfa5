"""Ranges for Nsight, one around each call of an operator, where ``CUDA_OPS_NVTX`` asks for them.

They are part of the code that :mod:`cuda_ops.dispatch.public` generates, so without the variable
there is nothing to ask at a call.
"""

from __future__ import annotations

import functools
import os
import textwrap
import warnings
from typing import Any

import torch

from cuda_ops.spec import OpSpec


@functools.cache
def is_wanted() -> bool:
    """Tells whether calls have ranges; decided when a process makes its first operator."""
    if os.environ.get("CUDA_OPS_NVTX", "0") in ("", "0"):
        return False
    if not torch.cuda.is_available():
        warnings.warn(
            "CUDA_OPS_NVTX is set, and torch sees no CUDA GPU: calls have no ranges", stacklevel=2
        )
        return False
    return True


def ranged(op: OpSpec, body: str, names: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the code of a public function with a range around it, and the names it uses.

    torch.compile sees the code without: its graphs call operators without Python.
    """
    used = {
        "_range_push": torch.cuda.nvtx.range_push,
        "_range_pop": torch.cuda.nvtx.range_pop,
        "_range_tracing": torch.compiler.is_dynamo_compiling,
    }
    # What a plugin made of an operator is Python around it: cuda_ops.matmul calls cuda_ops::matmul.
    name = f"{op.namespace}.{op.name}" if "_wrapper" in names else op.qualname
    around = (
        "if not _range_tracing():\n"
        f"    _range_push({name!r})\n"
        "    try:\n"
        f"{textwrap.indent(body, 8 * ' ')}\n"
        "    finally:\n"
        "        _range_pop()\n"
    )
    return around + body, names | used
