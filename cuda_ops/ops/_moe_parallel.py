"""Runs experts on one device or on several: what ``cuda_ops.moe`` does once tokens are routed.

Where matrices are DTensors sharded by expert along a mesh dim, tokens that are sharded along that
dim too go to their experts and back, as those of a process group do. Tokens that every device of
the dim has run through its own experts, and the results are partial sums, which DTensor adds up
where the caller needs them whole.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from cuda_ops.ops import _moe_checks
from cuda_ops.registry import function


def mixture(x: Any, w_gate_up: Any, w_down: Any, experts: Any, weights: Any) -> torch.Tensor:
    """Runs tokens x (T, H) through the experts (T, k) chosen for them, weighted.

    The result lies as ``x``; where experts are sharded along a mesh dim and tokens are not, it is a
    partial sum along that dim.

    Raises:
        RuntimeError: ``w_down`` is sharded in another way, or the experts along several mesh dims,
            or the matrices have other shapes.
    """
    run = _on_all if _is_sharded(w_gate_up) or _is_sharded(w_down) else _here
    return run(x, w_gate_up, w_down, experts, weights)


def check(**arguments: Any) -> None:
    """Checks the arguments of ``cuda_ops.moe`` before anything is sent: all must be DTensors of one
    mesh, or none.

    Raises:
        RuntimeError: names the argument that differs from the first DTensor.
    """
    meshes = {name: value.device_mesh for name, value in arguments.items() if is_dtensor(value)}
    if not meshes:
        return
    first, mesh = next(iter(meshes.items()))
    for name, value in arguments.items():
        if value is not None and meshes.get(name) != mesh:
            got = f"one on {meshes[name]}" if name in meshes else "a Tensor"
            _moe_checks.refuse(name, f"a DTensor on the mesh of '{first}'", got)


def is_dtensor(value: Any) -> bool:
    # No DTensor exists before this is imported, and the import takes longer than all of cuda_ops.
    dtensors = sys.modules.get("torch.distributed.tensor")
    return dtensors is not None and isinstance(value, dtensors.DTensor)


def _is_sharded(matrices: Any) -> bool:
    return is_dtensor(matrices) and any(place.is_shard(0) for place in matrices.placements)


def _here(*inputs: torch.Tensor) -> torch.Tensor:
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    # Exported and traced programs mostly infer, and have a gradient without the kept tensor too.
    # torch.compile knows this name for the question, which has no types.
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if wanted and not torch.compiler.is_exporting() and not traced:
        kept: torch.Tensor = function("moe_experts_keep")(*inputs)[0]
        return kept
    out: torch.Tensor = function("moe_experts")(*inputs)
    return out


def _on_all(x: Any, w_gate_up: Any, w_down: Any, experts: Any, weights: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, placements = w_gate_up.device_mesh, w_gate_up.placements
    if w_down.placements != placements:
        wanted = f"{list(placements)} as 'w_gate_up'"
        _moe_checks.refuse("w_down", wanted, f"{list(w_down.placements)}")
    # Checked here, where all ranks see the same: a single rank that refused its part would leave
    # the others waiting. torch.compile can trace this, unlike the checks of each part.
    _moe_checks.matrices(w_gate_up, w_down, x.shape[-1])
    count = w_down.shape[0]
    own = [dim for dim, placement in enumerate(placements) if placement.is_shard(0)]
    if len(own) > 1 or not all(p.is_replicate() for d, p in enumerate(placements) if d not in own):
        wanted = "experts sharded along one mesh dim and replicated along others"
        _moe_checks.refuse("w_gate_up", wanted, f"{list(placements)}")

    def along(at_experts: Any, sharded: Any) -> list[Any]:
        elsewhere = [sharded if p.is_shard(0) else Replicate() for p in x.placements]
        return [at_experts if dim in own else place for dim, place in enumerate(elsewhere)]

    sends = x.placements[own[0]].is_shard(0)
    tokens = along(Shard(0) if sends else Replicate(), Shard(0))
    results = tokens if sends else along(Partial(), Shard(0))
    of_matrices = along(Shard(0), Partial())

    def local(value: Any) -> torch.Tensor:
        moved: torch.Tensor = value.redistribute(mesh, tokens).to_local(grad_placements=results)
        return moved

    gate_up, down = (v.to_local(grad_placements=of_matrices) for v in (w_gate_up, w_down))
    chosen = experts.redistribute(mesh, tokens).to_local()
    if sends:
        from cuda_ops.ops import _moe_ranks

        group = mesh.get_group(own[0])
        out = _moe_ranks.routed(group, local(x), gate_up, down, chosen, local(weights), count)
    else:
        # Shard splits as torch.chunk does. torch.compile of torch 2.11 cannot trace the private
        # function that torch.distributed has for this.
        per_device = -(-count // mesh.size(own[0]))
        first = min(mesh.get_local_rank(own[0]) * per_device, count)
        gate_up, down = never_empty(gate_up), never_empty(down)
        out = _here(local(x), gate_up, down, chosen - first, local(weights))
    result: torch.Tensor = DTensor.from_local(
        out, mesh, results, run_check=False, shape=x.shape, stride=(x.shape[1], 1)
    )
    return result


def never_empty(matrices: torch.Tensor) -> torch.Tensor:
    """A rank without experts runs one that no token chose, and takes part in all that is sent."""
    if matrices.shape[0]:
        return matrices
    return torch.cat([matrices, matrices.new_zeros(1, *matrices.shape[1:])])  # has a gradient
