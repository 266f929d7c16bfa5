"""Samples and a reference for operators whose plugin gives none.

They answer the hooks last, and are imported when a hook is first asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis.strategies import SearchStrategy

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import OpSpec
from cuda_ops.testing import samples


@hookimpl(trylast=True)
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    """Returns the CPU kernel, which is called in float64 or the widest dtype that it takes."""
    return op.overload if "CPU" in op.keys or op.is_composite else None


@hookimpl(trylast=True)
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[samples.Sample] | None:
    """Draws shapes that fit the signature, then dtype, layout, values, seed."""
    return samples.strategy(op)
