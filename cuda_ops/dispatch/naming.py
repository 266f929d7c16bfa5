"""Names operators in what torch says of functions that it calls for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from cuda_ops.spec import OpSpec


@contextlib.contextmanager
def named(op: OpSpec) -> Iterator[None]:
    """Names the operator in an error that does not: torch knows the function of its own that
    failed, a cast or a reshape, which the caller has never called.
    """
    try:
        yield
    except RuntimeError as error:
        raise_named(op, error)


def raise_named(op: OpSpec, error: RuntimeError) -> NoReturn:
    """Raises an error again, with the operator's name in front if it is not in it."""
    # These two are what torch raises for a dtype or device that a function of its own lacks. Others
    # mean something to callers: what torch.utils.checkpoint raises, out of memory.
    if type(error) not in (RuntimeError, NotImplementedError) or op.name in str(error):
        raise error
    raise type(error)(f"{op.qualname}: {error}") from error
