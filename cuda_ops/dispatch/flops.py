"""FLOPs for ``torch.utils.flop_counter``, registered when it is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.dispatch.on_import import when_imported
from cuda_ops.errors import PluginError
from cuda_ops.spec import OpSpec


def register(op: OpSpec, formula: Callable[..., int]) -> None:
    """Gives FlopCounterMode the formula of an operator: FLOPs of the arguments, each tensor
    replaced by its shape.
    """

    def counted(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        try:
            return formula(*args, **kwargs)
        except Exception as error:
            raise PluginError(
                f"{op.qualname}: the formula of cuda_ops_flops raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def action() -> None:
        from torch.utils import flop_counter
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        packet = getattr(getattr(torch.ops, op.namespace), op.name)
        flop_counter.flop_registry.pop(packet, None)  # left by the plugin before a reload
        registered = flop_counter.register_flop_formula(packet)(counted)
        # A counter has a copy, and its block may be the first to use the operator.
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, flop_counter._FlopCounterMode):
                mode.counter.flop_registry[packet] = registered

    when_imported("torch.utils.flop_counter", op.key, action)
