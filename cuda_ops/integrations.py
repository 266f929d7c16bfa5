"""Puts operators of cuda_ops into models of other libraries."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

import cuda_ops
from cuda_ops.ops import _moe_parallel
from cuda_ops.ops._moe_checks import MOST_CHOSEN, MOST_EXPERTS

#: The blocks that were compared, and what they are made of. Others look the same from outside and
#: are not: a shared expert, groups of experts, sigmoids or a factor show only in forward's code.
_BLOCKS = {
    "MixtralSparseMoeBlock": {"gate": "MixtralTopKRouter", "experts": "MixtralExperts"},
    "Qwen3MoeSparseMoeBlock": {"gate": "Qwen3MoeTopKRouter", "experts": "Qwen3MoeExperts"},
    "OlmoeSparseMoeBlock": {"gate": "OlmoeTopKRouter", "experts": "OlmoeExperts"},
}
_TENSORS = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")


def use_moe(block: torch.nn.Module, group: Any = None) -> torch.nn.Module:
    """Makes a sparse block of Hugging Face's Mixtral, Qwen3-MoE or OLMoE run the operators of
    :func:`cuda_ops.moe`.

    The gate then routes with :func:`cuda_ops.moe_route` and returns the same as before: logits,
    weights (float32 for 16-bit logits) and experts. The experts run :func:`cuda_ops.moe_experts`,
    which keeps values for the gradient if one is wanted. The block's own forward stays, and so do
    parameters, hooks, recorded router logits and Mixtral's jitter. A copy made by ``copy.copy`` or
    ``torch.nn.DataParallel`` runs with the original's tensors; one made by ``copy.deepcopy``, or
    within DistributedDataParallel, with its own.

    With a group, each of its ranks keeps some of the experts and brings its own tokens, which go to
    their experts and back: see ``group`` of :func:`cuda_ops.moe`. Both matrices become DTensors,
    sharded along that group, so that checkpoints of ``torch.distributed.checkpoint`` fit any number
    of ranks. Nothing is sent for that: all ranks must hold the same matrices, or none yet (on a
    meta device). Their gradients are sums over the losses of all ranks; where the loss is a mean
    over ranks, divide them by how many there are. Wrap the block in DistributedDataParallel or
    ``fully_shard`` without these two parameters.

    Args:
        block: ``MixtralSparseMoeBlock``, ``Qwen3MoeSparseMoeBlock`` or ``OlmoeSparseMoeBlock`` of a
            version of transformers that stacks experts' matrices, such as 5.
        group: the ranks that share the experts, a ProcessGroup or one dim of a DeviceMesh; None for
            a block that has all of them.

    Returns:
        The block, changed in place.

    Raises:
        ValueError: the block is of another class, has other parts or tensors than that class had
            when it was compared, has another activation than silu, has more experts or chooses more
            of them than :func:`cuda_ops.moe` can, or one of its parts was given another forward;
            or its matrices are DTensors that are not sharded by expert along the group.
        RuntimeError: the group is none.

    Example::

        for layer in model.model.layers:  # of a MixtralForCausalLM, hidden states (B, S, H)
            use_moe(layer.mlp)
    """
    _check(block)
    gate, experts = block.get_submodule("gate"), block.get_submodule("experts")
    # Unlike bound methods of functions from elsewhere, these can be pickled with the block.
    gate.forward = partial(_route, gate)
    if group is None:
        experts.forward = partial(_run_experts, experts)
    else:
        _shard(experts, group)
        experts.forward = partial(_run_experts_of_ranks, experts)
    return block


def _shard(experts: torch.nn.Module, group: Any) -> None:
    """Makes DTensors of both matrices, sharded by expert along a group, unless they are."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from cuda_ops.ops import _moe_ranks

    ranks = _moe_ranks.process_group(group)
    mesh = group if isinstance(group, DeviceMesh) else None
    for name in ("gate_up_proj", "down_proj"):
        whole = experts.get_parameter(name)
        if isinstance(whole, DTensor):
            if whole.placements != (Shard(0),) or whole.device_mesh.get_group() != ranks:
                raise ValueError(
                    f"use_moe: expected {name} sharded by expert along the group, (Shard(0),), "
                    f"got a DTensor {whole.placements} on {whole.device_mesh}"
                )
            continue
        mesh = mesh or DeviceMesh.from_group(ranks, _device_of(ranks, whole))
        own = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, torch.nn.Parameter(own, requires_grad=whole.requires_grad))


def _device_of(ranks: Any, matrix: torch.Tensor) -> str:
    """Returns the kind of device on which a group shares a matrix: its own, if the group knows it.
    Else it is on a meta device, or on the CPU for NCCL.
    """
    kinds = {device.type for device in ranks._device_types}  # torch shows them nowhere else
    if matrix.device.type in kinds:
        return matrix.device.type
    # gloo alone says that it knows GPUs too.
    config = torch.distributed.distributed_c10d.get_backend_config(ranks)
    return "cuda" if "nccl" in config and torch.cuda.is_available() else "cpu"


def _check(block: torch.nn.Module) -> None:
    name = type(block).__name__
    if name not in _BLOCKS:
        raise ValueError(
            f"use_moe: expected one of {', '.join(_BLOCKS)}, got {name}, "
            "which may route or add up in a way that cuda_ops.moe does not know"
        )
    parts = {part: type(module).__name__ for part, module in block.named_children()}
    if parts != _BLOCKS[name]:
        raise ValueError(f"use_moe: expected {name} to be made of {_BLOCKS[name]}, got {parts}")
    for part in _BLOCKS[name]:
        module = block.get_submodule(part)
        forward = vars(module).get("forward")
        # Code that wraps a forward for a while puts back the class's own, bound to the module.
        own = MethodType(type(module).forward, module)
        if forward != own and getattr(forward, "func", forward) not in _FORWARDS:
            raise ValueError(
                f"use_moe: expected {part} of {name} to have its class's forward, got one that was "
                f"set on it, {forward!r}, which would be lost: call use_moe before"
            )
    tensors = [key for key, _ in (*block.named_parameters(), *block.named_buffers())]
    if set(tensors) != set(_TENSORS):
        listed = ", ".join(sorted(tensors))
        raise ValueError(f"use_moe: expected {name} to have {', '.join(_TENSORS)}, got {listed}")
    chosen: Any = getattr(block.get_submodule("gate"), "top_k", None)
    if not isinstance(chosen, int):
        raise ValueError(
            f"use_moe: expected the gate of {name} to have an int top_k, got {chosen!r}"
        )
    count = len(block.get_parameter("experts.down_proj"))
    if chosen > MOST_CHOSEN or count > MOST_EXPERTS:
        raise ValueError(
            f"use_moe: expected {name} to choose at most {MOST_CHOSEN} of at most {MOST_EXPERTS} "
            f"experts, got {chosen} of {count}"
        )
    probe = torch.linspace(-4, 4, 9, device="cpu")  # with data under a meta device too
    activation = getattr(block.get_submodule("experts"), "act_fn", None)
    if not callable(activation) or not torch.allclose(activation(probe.clone()), F.silu(probe)):
        raise ValueError(f"use_moe: expected experts of {name} to have silu, got {activation}")


def _route(gate: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Runs as the gate's forward."""
    logits = F.linear(hidden_states.flatten(0, -2), gate.weight)
    # Mixtral always divides by the sum and has no attribute for it.
    renormalize = bool(getattr(gate, "norm_topk_prob", True))
    weights, experts = cuda_ops.moe_route(logits, gate.top_k, renormalize=renormalize)
    return logits, weights, experts


def _run_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Runs as the experts' forward."""
    matrices = experts.gate_up_proj, experts.down_proj
    _moe_parallel.check(
        w_gate_up=matrices[0],
        w_down=matrices[1],
        x=hidden_states,
        experts=top_k_index,
        weights=weights,
    )
    out = _moe_parallel.mixture(hidden_states, *matrices, top_k_index, weights)
    return out.to(hidden_states.dtype)  # autocast may have lowered it


def _run_experts_of_ranks(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Runs as the experts' forward, where each rank of a group has some of them."""
    from cuda_ops.ops import _moe_ranks

    gate_up, down = experts.gate_up_proj, experts.down_proj
    group, count = down.device_mesh.get_group(), down.shape[0]
    out = _moe_ranks.routed(
        group, hidden_states, gate_up.to_local(), down.to_local(), top_k_index, weights, count
    )
    return out.to(hidden_states.dtype)


#: What ``forward`` of a part may be where it is not its class's own.
_FORWARDS = (None, _route, _run_experts, _run_experts_of_ranks)
