"""DTensor rules, registered when ``torch.distributed.tensor`` is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda_ops.dispatch.on_import import when_imported
from cuda_ops.spec import OpSpec


def register(op: OpSpec, rule: Callable[..., Any]) -> None:
    """Gives DTensor the sharding rule of an operator, now or once DTensor is imported."""

    def action() -> None:
        from torch.distributed.tensor.experimental import register_sharding

        register_sharding(op.overload)(rule)

    when_imported("torch.distributed.tensor", op.key, action)
