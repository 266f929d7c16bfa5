"""DTensor rules, registered when ``torch.distributed.tensor`` is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.dispatch.on_import import when_imported


def register(name: str, rule: Callable[..., Any]) -> None:
    """Gives DTensor the sharding rule of ``cuda_ops::<name>``, now or once DTensor is imported."""

    def action() -> None:
        from torch.distributed.tensor.experimental import register_sharding

        register_sharding(getattr(torch.ops.cuda_ops, name).default)(rule)

    when_imported("torch.distributed.tensor", name, action)
