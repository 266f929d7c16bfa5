"""Work before a call of an operator, where ``CUDA_OPS_TUNE=on`` asks for tuning at first use.

They are part of the code that :mod:`cuda_ops.dispatch.public` generates, so without the variable
there is nothing to ask at a call.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.spec import OpSpec

#: By an operator's key, what is called with the arguments of each call before it.
before: dict[str, Callable[..., None]] = {}


def is_wanted() -> bool:
    return os.environ.get("CUDA_OPS_TUNE") == "on"


def asked(op: OpSpec, body: str, names: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the code of a public function that asks first, and the names it uses."""
    if any(argument.kwarg_only for argument in op.parsed.arguments):
        return body, names  # candidates are for positional arguments
    used = {
        "_before_call": functools.partial(_before_call, op.key),
        "_asks_not": torch.compiler.is_dynamo_compiling,
    }
    ask = f"if not _asks_not():\n    _before_call({', '.join(op.argument_names)})\n"
    return ask + body, names | used


def _before_call(key: str, *arguments: Any) -> None:
    if (work := before.get(key)) is not None:
        work(*arguments)
