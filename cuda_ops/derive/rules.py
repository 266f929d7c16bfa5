"""The plugin that answers last: what the signature line and the schema already say.

A pair's own plugin overrides any of these. The gradient is in :mod:`cuda_ops.derive.gradient`, the
batching rule in :mod:`cuda_ops.derive.batching`; samples, reference and benchmark cases come from
the kits that use them, ``derived.py`` in :mod:`cuda_ops.testing` and :mod:`cuda_ops.benchmarking`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.derive.arguments import bind, loop_dims, rows_are_independent, tensor_arguments
from cuda_ops.derive.batching import cuda_ops_vmap as cuda_ops_vmap
from cuda_ops.derive.gradient import cuda_ops_autograd as cuda_ops_autograd
from cuda_ops.derive.layout import broadcast, empty_outputs
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import AutocastPolicy, OpSpec, ShardingRule


@hookimpl(trylast=True)
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any] | None:
    """Takes shapes from the signature, layout and dtype from :mod:`cuda_ops.derive.layout`."""
    signature = op.signature
    if signature is None or op.is_irregular:
        return None

    def fake(*args: Any, **kwargs: Any) -> Any:
        outputs = empty_outputs(op, signature, bind(op, args, kwargs))
        return outputs if len(outputs) > 1 else outputs[0]

    return fake


@hookimpl(trylast=True)
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy | None:
    """Promotes tensors that have to share a dtype, as ``torch.add`` does: a weight in float32 meets
    what a layer before it computed in the autocast dtype.
    """
    sharing = op.sharing
    if len(sharing) < 2 or torch.float32 not in op.dtypes or op.is_irregular:
        return None
    return dict.fromkeys(sharing, "promote") if op.dtypes_of else "promote"


@hookimpl(trylast=True)
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]] | None:
    """Shards loop dims and replicates core dims; a sum over loop dims becomes a partial one."""
    signature = op.signature
    if signature is None or op.is_irregular:
        return None
    shardable = rows_are_independent(op)

    def rule(*args: Any, **kwargs: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        values = bind(op, args, kwargs)
        shapes = {
            i: loop_dims(op, k, values[i].shape)
            for k, i in enumerate(op.tensor_positions)
            if values[i] is not None
        }
        loop = broadcast(op, tensor_arguments(op, values))

        def placement(i: int, d: int) -> Any:
            if i not in shapes:
                return None
            own = d - (len(loop) - len(shapes[i]))
            return Shard(own) if own >= 0 and shapes[i][own] != 1 else Replicate()

        passed = len(args) + len(kwargs)
        outputs = signature.outputs
        replicated = [Replicate() if i in shapes else None for i in range(passed)]
        return [([Replicate()] * len(outputs), replicated)] + [
            (
                [Shard(d) if group.loops else Partial() for group in outputs],
                [placement(i, d) for i in range(passed)],
            )
            for d, size in enumerate(loop)
            if size != 1 and shardable
        ]

    return rule
