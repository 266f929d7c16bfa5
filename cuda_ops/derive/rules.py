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
from cuda_ops.derive.checks import refuse
from cuda_ops.derive.gradient import cuda_ops_autograd as cuda_ops_autograd
from cuda_ops.derive.layout import broadcast, empty_outputs
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import AutocastPolicy, OpSpec, ShardingRule


@hookimpl(trylast=True)
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any] | None:
    """Takes shapes from the signature, layout and dtype from :mod:`cuda_ops.derive.layout`."""
    signature = op.signature
    if signature is None or op.is_composite:
        return None

    def fake(*args: Any, **kwargs: Any) -> Any:
        outputs = empty_outputs(op, signature, bind(op, args, kwargs))
        return outputs if len(outputs) > 1 else next(iter(outputs), None)

    return fake


@hookimpl(trylast=True)
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy | None:
    """Promotes tensors that have to share a dtype, as ``torch.add`` does: a weight in float32 meets
    what a layer before it computed in the autocast dtype.
    """
    sharing = op.sharing
    irregular = op.is_composite or op.written  # a copy would be written
    if len(sharing) < 2 or torch.float32 not in op.dtypes or irregular:
        return None
    alone = len(sharing) < len(op.tensor_names)
    return dict.fromkeys(sharing, "promote") if alone else "promote"


@hookimpl(trylast=True)
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]] | None:
    """Shards loop dims and replicates core dims; a sum over loop dims becomes a partial one."""
    signature = op.signature
    if signature is None or op.is_composite or op.device_position is not None:
        return None
    shardable = rows_are_independent(op)

    def rule(*args: Any, **kwargs: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        values = bind(op, args, kwargs)
        stays = _placements_of_written(op, values)
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
        rules: list[ShardingRule] = [([Replicate()] * len(outputs), replicated)]
        rules += [
            (
                [Shard(d) if group.loops else Partial() for group in outputs],
                [placement(i, d) for i in range(passed)],
            )
            for d, size in enumerate(loop)
            if size != 1 and shardable
        ]
        fitting = [
            rule for rule in rules if all(rule[1][i] == stays[i] for i in stays if i < passed)
        ]
        if not fitting:
            i, where = next(iter(stays.items()))
            expected = " or ".join(dict.fromkeys(str(placed[i]) for _, placed in rules))
            refuse(op, op.argument_names[i], f"placement {expected}, as it is written", str(where))
        return fitting

    return rule


def _placements_of_written(op: OpSpec, values: list[Any]) -> dict[int, Any]:
    """Returns how the DTensors that are written are placed: a redistributed copy would be written
    in their stead, and the result lost.
    """
    found = {}
    for i in op.written:
        if (placements := getattr(values[i], "placements", None)) is None:
            continue
        if len(set(placements)) > 1:
            expected = "the same placement along every dim of the mesh, as it is written"
            refuse(op, op.argument_names[i], expected, str(placements))
        found[i] = placements[0]
    return found
