"""Puts an operator's name in front of what torch says in code of ours that leads to its kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cuda_ops.spec import OpSpec


@contextlib.contextmanager
def named(op: OpSpec) -> Iterator[None]:
    """Names the operator in a plain ``RuntimeError`` that does not: torch knows the function of its
    own that failed, a cast or a reshape, which the caller has never called.
    """
    try:
        yield
    except RuntimeError as error:
        # Others mean something to callers: what torch.utils.checkpoint raises, out of memory.
        if type(error) is not RuntimeError or op.name in str(error):
            raise
        raise RuntimeError(f"{op.qualname}: {error}") from error
