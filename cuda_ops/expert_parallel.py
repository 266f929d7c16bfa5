"""Experts on one device or on several: what ``cuda_ops.moe`` does once tokens are routed.

Every device of the mesh dim along which DTensors of matrices are sharded by expert sees the same
tokens, runs them through its own experts, and the results are partial sums. Nothing is sent but
what DTensor moves for that: tokens gathered where they were sharded over the same dim, and the sum
where somebody asks for it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from cuda_ops.registry import function


def mixture(x: Any, w_gate_up: Any, w_down: Any, experts: Any, weights: Any) -> torch.Tensor:
    """Tokens x (T, H) through the experts (T, k) that were chosen for them, weighted.

    Where experts are sharded along a mesh dim the result is a partial sum along that, and along
    others it lies as ``x``.

    Raises:
        RuntimeError: ``w_down`` is sharded in another way, the experts along several mesh dims, or
            an argument is no DTensor of the same mesh.
    """
    run = _on_all if _is_sharded(w_gate_up) else _here
    return run(x, w_gate_up, w_down, experts, weights)


def _is_sharded(matrices: torch.Tensor) -> bool:
    # Nobody has a DTensor before this is imported, which takes longer than all of cuda_ops.
    dtensors = sys.modules.get("torch.distributed.tensor")
    return (
        dtensors is not None
        and isinstance(matrices, dtensors.DTensor)
        and any(placement.is_shard(0) for placement in matrices.placements)
    )


def _here(*inputs: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        kept: torch.Tensor = function("moe_experts_keep")(*inputs)[0]
        return kept
    out: torch.Tensor = function("moe_experts")(*inputs)
    return out


def _on_all(x: Any, w_gate_up: Any, w_down: Any, experts: Any, weights: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = w_gate_up.device_mesh, w_gate_up.placements
    for name, value in (("x", x), ("w_down", w_down), ("router_logits", weights)):
        if not isinstance(value, DTensor) or value.device_mesh != mesh:
            raise RuntimeError(
                f"cuda_ops::moe: argument '{name}': expected a DTensor on the mesh of 'w_gate_up', "
                f"got {f'one on {value.device_mesh}' if isinstance(value, DTensor) else 'a Tensor'}"
            )
    if w_down.placements != placements:
        raise RuntimeError(
            f"cuda_ops::moe: argument 'w_down': expected {list(placements)} as 'w_gate_up', "
            f"got {list(w_down.placements)}"
        )
    own = [dim for dim, placement in enumerate(placements) if placement.is_shard(0)]
    if len(own) > 1 or not all(p.is_replicate() for d, p in enumerate(placements) if d not in own):
        raise RuntimeError(
            "cuda_ops::moe: argument 'w_gate_up': expected experts sharded along one mesh dim and "
            f"replicated along others, got {list(placements)}"
        )

    def along(at_experts: Any, sharded: Any) -> list[Any]:
        elsewhere = [sharded if p.is_shard(0) else Replicate() for p in x.placements]
        return [at_experts if dim in own else place for dim, place in enumerate(elsewhere)]

    tokens, partial = along(Replicate(), Shard(0)), along(Partial(), Shard(0))
    of_matrices = along(Shard(0), Partial())

    def local(value: Any) -> torch.Tensor:
        moved: torch.Tensor = value.redistribute(mesh, tokens).to_local(grad_placements=partial)
        return moved

    _, (first, *_) = compute_local_shape_and_global_offset(w_down.shape, mesh, placements)
    out = _here(
        local(x),
        w_gate_up.to_local(grad_placements=of_matrices),
        w_down.to_local(grad_placements=of_matrices),
        # What is not from 0 to the number of own experts is an expert whose result is zero.
        experts.redistribute(mesh, tokens).to_local() - first,
        local(weights),
    )
    result: torch.Tensor = DTensor.from_local(
        out, mesh, partial, run_check=False, shape=x.shape, stride=(x.shape[1], 1)
    )
    return result
