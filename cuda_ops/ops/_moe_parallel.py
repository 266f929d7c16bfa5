"""Runs experts on one device or on several: what ``cuda_ops.moe`` does once tokens are routed.

Where matrices are DTensors sharded by expert along a mesh dim, every device of that dim sees the
same tokens and runs them through its own experts; the results are partial sums. Only DTensor sends
anything: it gathers tokens that were sharded over the same dim, and adds up the sums where the
caller needs them whole.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from cuda_ops.registry import function


def mixture(x: Any, w_gate_up: Any, w_down: Any, experts: Any, weights: Any) -> torch.Tensor:
    """Runs tokens x (T, H) through the experts (T, k) chosen for them, weighted.

    Where experts are sharded along a mesh dim the result is a partial sum along that, and along
    others it lies as ``x``.

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
            raise RuntimeError(
                f"cuda_ops::moe: argument '{name}': expected a DTensor on the mesh of '{first}', "
                f"got {f'one on {meshes[name]}' if name in meshes else 'a Tensor'}"
            )


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
        raise RuntimeError(
            f"cuda_ops::moe: argument 'w_down': expected {list(placements)} as 'w_gate_up', "
            f"got {list(w_down.placements)}"
        )
    # Checked here, where all ranks see the same: a single rank that refused its part would leave
    # the others waiting. torch.compile can trace this, unlike the checks of each part.
    (count, _, inner), hidden = w_down.shape, x.shape[-1]
    expected = {
        "w_gate_up": (w_gate_up, "(E, 2I, H)", [count, 2 * inner, hidden]),
        "w_down": (w_down, "(E, H, I)", [count, hidden, inner]),
    }
    for name, (matrices, dims, shape) in expected.items():
        if list(matrices.shape) != shape:
            raise RuntimeError(
                f"cuda_ops::moe: argument '{name}': expected shape {dims} = {shape}, "
                f"got shape {list(matrices.shape)}"
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

    # Shard splits as torch.chunk does. torch.compile of torch 2.11 cannot trace the private
    # function that torch.distributed has for this.
    per_device = -(-count // mesh.size(own[0]))
    first = min(mesh.get_local_rank(own[0]) * per_device, count)
    matrices = [v.to_local(grad_placements=of_matrices) for v in (w_gate_up, w_down)]
    if matrices[0].shape[0] == 0:
        # A device without experts adds the zeros of an expert that no token chose, and takes part
        # in everything that is sent for gradients.
        matrices = [torch.cat([v, v.new_zeros(1, *v.shape[1:])]) for v in matrices]
    # An index outside of this device's own experts is an expert whose result is zero.
    chosen = experts.redistribute(mesh, tokens).to_local() - first
    out = _here(local(x), *matrices, chosen, local(weights))
    result: torch.Tensor = DTensor.from_local(
        out, mesh, partial, run_check=False, shape=x.shape, stride=(x.shape[1], 1)
    )
    return result
