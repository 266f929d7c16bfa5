"""Makes sparse blocks of Hugging Face's models run the operators of :func:`cuda_ops.moe`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

from cuda_ops.integrations import routing
from cuda_ops.integrations.blocks import BLOCKS, REFUSED, Block
from cuda_ops.ops import _moe_parallel
from cuda_ops.ops._moe_checks import FLOATING, MOST_CHOSEN, MOST_EXPERTS


def use_moe(block: torch.nn.Module, group: Any = None) -> torch.nn.Module:
    """Makes a sparse block of one of Hugging Face's models run the operators of
    :func:`cuda_ops.moe`.

    The experts then run :func:`cuda_ops.moe_experts`, which keeps values for the gradient if one is
    wanted. Where cuda_ops can route as the gate does, the gate routes with
    :func:`cuda_ops.moe_route` and returns the same as before: logits, weights (float32 for 16-bit
    logits) and experts, best first. That is the softmax of Mixtral, Qwen-MoE, OLMoE and their like,
    renormalized or not, DeepSeek-V2's ``"greedy"`` choice, and the sigmoids of DeepSeek-V3, GLM-4
    and their like with a bias for the choice, if no group of experts is left out (``topk_group``
    is ``n_group``). Every other router stays as it is, such as DeepSeek-V3's own, which chooses 4
    of 8 groups.

    The block's own forward stays, and so do shared experts and their gates, parameters, hooks,
    recorded router logits and Mixtral's jitter. A copy made by ``copy.copy`` or
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
        block: a block of a class in :data:`cuda_ops.integrations.BLOCKS`, from a version of
            transformers that stacks experts' matrices, such as 5.
        group: the ranks that share the experts, a ProcessGroup or one dim of a DeviceMesh; None for
            a block that has all of them.

    Returns:
        The block, changed in place.

    Raises:
        ValueError: the block is of another class, has other parts or tensors than that class had
            when it was compared, has another activation than silu, has more experts than
            :func:`cuda_ops.moe` can, chooses none of them or more than it can, or one of its parts
            was given another forward;
            or its matrices are quantized, no parameters, or DTensors that are not sharded by expert
            along the group.
        RuntimeError: the group is none.

    Example::

        for layer in model.model.layers:  # of a MixtralForCausalLM, hidden states (B, S, H)
            use_moe(layer.mlp)
    """
    route, experts = _checked(block), block.get_submodule("experts")
    if group is not None:
        _shard(experts, group)  # first, since it may refuse
    # Unlike bound methods of functions from elsewhere, these can be pickled with the block.
    experts.forward = partial(_run_experts if group is None else _run_experts_of_ranks, experts)
    if route is not None:
        gate = block.get_submodule("gate")
        gate.forward = partial(route, gate)
    else:
        _give_back_gate(block)
    return block


def routes(block: torch.nn.Module) -> bool:
    """Tells whether :func:`use_moe` has the gate of a block route with cuda_ops."""
    return _checked(block) is not None


def runs_cuda_ops(block: torch.nn.Module, group: Any = None) -> bool:
    """Tells whether :func:`use_moe` has changed a block already, with a group or without."""
    forward = vars(block.get_submodule("experts")).get("forward")
    expected = _run_experts if group is None else _run_experts_of_ranks
    return getattr(forward, "func", None) is expected


def ranks_of(group: Any, by: str) -> Any:
    """Returns the ProcessGroup that the argument ``group`` says; an error names ``by``, to which it
    was given.

    Raises:
        RuntimeError: it is none.
    """
    from cuda_ops.ops import _moe_ranks, _moe_senders

    try:
        return _moe_ranks.process_group(group)
    except RuntimeError as error:
        raise RuntimeError(str(error).replace(_moe_senders.OP, by, 1)) from None


def _give_back_gate(block: torch.nn.Module) -> None:
    """Lets a gate route by itself again, if an earlier call could still route instead of it."""
    gate = block._modules.get("gate")
    if gate is not None and getattr(vars(gate).get("forward"), "func", None) in [*routing.TENSORS]:
        del gate.forward


def _shard(experts: torch.nn.Module, group: Any) -> None:
    """Makes DTensors of both matrices, sharded by expert along a group, unless they are."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    ranks = ranks_of(group, "use_moe")
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


# --- checks -----------------------------------------------------------------------------------


def _checked(block: torch.nn.Module) -> Callable[..., Any] | None:
    """Returns what is to route instead of the gate, or None if the block's own router stays."""
    name = type(block).__name__
    if name in REFUSED:
        raise ValueError(f"use_moe: {name} cannot run cuda_ops.moe: {REFUSED[name]}")
    if name not in BLOCKS:
        raise ValueError(
            f"use_moe: expected a block of a class in cuda_ops.integrations.BLOCKS, got {name}, "
            "which may route or add up in a way that cuda_ops.moe does not know"
        )
    known = BLOCKS[name]
    _check_parts(block, known)
    route = routing.chosen(known, block.get_submodule("gate")) if known.routing else None
    replaced = ("experts",) if route is None else ("gate", "experts")
    for part in replaced:
        _check_forward(name, part, block.get_submodule(part))
    tensors = {"experts.gate_up_proj", "experts.down_proj"}
    if route is not None:
        tensors |= routing.TENSORS[route]
    _check_tensors(block, replaced, tensors)
    count = _check_experts(name, block.get_submodule("experts"))
    if route is not None:
        _check_choices(name, block.get_submodule("gate"), count)
    return route


def _check_parts(block: torch.nn.Module, known: Block) -> None:
    name = type(block).__name__
    parts = {part: type(module).__name__ for part, module in block.named_children()}
    expected = dict.fromkeys(known.parts, "") | {"experts": known.experts}
    if known.gate:
        expected["gate"] = known.gate
    some = {part for part in parts if part in known.optional}
    # The code of parts that stay is their own, so their classes do not matter.
    if parts.keys() - some != expected.keys() or any(
        of_class and parts[part] != of_class for part, of_class in expected.items()
    ):
        listed = ", ".join(f"{part} {of_class}".strip() for part, of_class in expected.items())
        got = ", ".join(f"{part} {of_class}" for part, of_class in parts.items())
        raise ValueError(f"use_moe: expected {name} to be made of {listed}, got {got or 'nothing'}")


def _check_forward(name: str, part: str, module: torch.nn.Module) -> None:
    forward = vars(module).get("forward")
    # Code that wraps a forward for a while puts back the class's own, bound to the module.
    own = MethodType(type(module).forward, module)
    if forward != own and getattr(forward, "func", forward) not in _FORWARDS:
        raise ValueError(
            f"use_moe: expected {part} of {name} to have its class's forward, got one that was "
            f"set on it, {forward!r}, which would be lost: call use_moe before"
        )


def _check_tensors(block: torch.nn.Module, parts: Iterable[str], expected: set[str]) -> None:
    modules = [(part, block.get_submodule(part)) for part in parts]
    tensors = {
        f"{part}.{key}"
        for part, module in modules
        for key, _ in (*module.named_parameters(), *module.named_buffers())
    }
    if tensors != expected:
        wanted, got = (", ".join(sorted(one)) for one in (expected, tensors))
        raise ValueError(f"use_moe: expected {type(block).__name__} to have {wanted}, got {got}")


def _check_choices(name: str, gate: torch.nn.Module, experts: int) -> None:
    chosen: Any = getattr(gate, "top_k", None)
    if not isinstance(chosen, int):
        raise ValueError(
            f"use_moe: expected the gate of {name} to have an int top_k, got {chosen!r}"
        )
    most = min(MOST_CHOSEN, experts)
    if not 1 <= chosen <= most:
        raise ValueError(f"use_moe: expected {name} to choose 1 to {most} experts, got {chosen}")


def _check_experts(name: str, experts: torch.nn.Module) -> int:
    """Returns how many there are."""
    for key in ("gate_up_proj", "down_proj"):
        matrices: Any = getattr(experts, key)
        if not isinstance(matrices, torch.nn.Parameter) or matrices.dim() != 3:
            raise ValueError(
                f"use_moe: expected {key} of {name} to be a Parameter with 3 dims, got a "
                f"{type(matrices).__name__} with {matrices.dim()}"
            )
    if len(matrices) > MOST_EXPERTS:
        raise ValueError(
            f"use_moe: expected {name} to have at most {MOST_EXPERTS} experts, got {len(matrices)}"
        )
    if matrices.dtype not in FLOATING:
        dtypes = ", ".join(map(str, FLOATING))
        raise ValueError(
            f"use_moe: expected matrices of {name} of one of {dtypes}, got {matrices.dtype}"
        )
    activation = getattr(experts, "act_fn", None)
    if not _is_silu(activation):
        raise ValueError(f"use_moe: expected experts of {name} to have silu, got {activation}")
    return len(matrices)


def _is_silu(activation: Any) -> bool:
    probe = torch.linspace(-4, 4, 9, device="cpu")  # with data under a meta device too
    try:
        return torch.allclose(activation(probe.clone()), F.silu(probe))
    except (RuntimeError, TypeError):  # none at all, or one that wants another shape
        return False


# --- what runs instead ------------------------------------------------------------------------


def _run_experts(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Runs as the experts' forward."""
    matrices = experts.gate_up_proj, experts.down_proj
    _moe_parallel.check(
        w_gate_up=matrices[0],
        w_down=matrices[1],
        x=hidden_states,
        experts=top_k_index,
        weights=top_k_weights,
    )
    out = _moe_parallel.mixture(hidden_states, *matrices, top_k_index, top_k_weights)
    return out.to(hidden_states.dtype)  # autocast may have lowered it


def _run_experts_of_ranks(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Runs as the experts' forward, where each rank of a group has some of them."""
    from cuda_ops.ops import _moe_ranks

    gate_up, down = experts.gate_up_proj, experts.down_proj
    group, count = down.device_mesh.get_group(), down.shape[0]
    out = _moe_ranks.routed(
        group, hidden_states, gate_up.to_local(), down.to_local(), top_k_index, top_k_weights, count
    )
    return out.to(hidden_states.dtype)


#: What ``forward`` of a part may be where it is not its class's own.
_FORWARDS = (None, *routing.TENSORS, _run_experts, _run_experts_of_ranks)
