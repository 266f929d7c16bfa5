"""Runs experts that several ranks have, each some of them, for tokens that each rank brings.

First the ranks agree on what each brings; then tokens go one of two ways (``_moe_senders.py``).
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from cuda_ops.derive import layout
from cuda_ops.derive.no_gradient import no_second_derivative
from cuda_ops.dispatch import autocast
from cuda_ops.dispatch.fast_path import is_undisturbed
from cuda_ops.distributed import ways
from cuda_ops.distributed.agreement import agreement_of, refusing_together
from cuda_ops.distributed.symmetric import is_elsewhere, memory_of
from cuda_ops.distributed.ways import Way
from cuda_ops.names import INTERNAL
from cuda_ops.ops import _moe, _moe_checks
from cuda_ops.ops._moe_checks import refuse
from cuda_ops.ops._moe_parallel import is_dtensor, never_empty
from cuda_ops.ops._moe_senders import OP, Dispatch, Gather, Layout, restored, row_bytes, sender_of
from cuda_ops.registry import function, registry

#: Gradients as ``moe_experts_backward`` counts them, of which ranks add up the first and last.
_X, _GATE_UP, _WEIGHTS = 1, 2, 8
_DTYPES = _moe_checks.FLOATING
#: What ranks tell each other of a call; after the first five it must be the same at all.
_NUMBERS = (
    "tokens", "experts", "gradients", "captures", "other GPU", "H", "I", "top_k",
    "logits of a token", "dtype", "dtype of weights", "kind of device", "call with gradients",
)  # fmt: skip


def mixture(
    group: Any,
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    scoring: str,
    expert_bias: torch.Tensor | None,
) -> torch.Tensor:
    """Does what ``cuda_ops.moe`` does where each rank of a group has its own tokens and experts.

    Raises:
        RuntimeError: at all ranks: an argument of one of them does not fit. Within a transform of
            torch.func, which would change what is sent.
    """
    ranks = process_group(group)
    with refusing_together(ranks, OP):
        _load()
        code = _moe.scoring_code("moe", scoring)
        x, router_logits, w_gate_up, w_down = _cast(x, router_logits, w_gate_up, w_down)
        _check(x, w_gate_up, w_down, router_logits=router_logits)
        rows, logits = layout.as_rows(x), layout.as_rows(router_logits)
        weights, experts = function("moe_route")(logits, top_k, code, renormalize, expert_bias)
    out = _on_ranks(ranks, rows, w_gate_up, w_down, experts, weights, logits.shape[1])
    return out if x.dim() == 2 else out.reshape(x.shape)


def routed(
    group: Any,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    total: int,
) -> torch.Tensor:
    """Runs this rank's tokens x (T, H) through the experts (T, k) chosen for them, of ``total`` at
    all ranks.

    Raises:
        RuntimeError: as :func:`mixture`.
    """
    ranks = process_group(group)
    with refusing_together(ranks, OP):
        _load()
        x, _, w_gate_up, w_down = _cast(x, weights, w_gate_up, w_down)
        _check(x, w_gate_up, w_down, experts=experts, weights=weights)
    return _on_ranks(ranks, x, w_gate_up, w_down, experts, weights, total)


#: What is called once ranks have agreed, when none may refuse any more.
_OPERATORS = (
    "moe_route", "moe_send_", "moe_experts", "moe_experts_into_", "moe_experts_keep",
    "moe_experts_backward_down", "moe_experts_backward_gate_up",
)  # fmt: skip


def _load() -> None:
    """Loads all operators of a call, of which one may not be built."""
    if torch.compiler.is_compiling() or not all(map(registry().loaded, _OPERATORS)):
        for name in _OPERATORS:
            function(name)


def _on_ranks(
    ranks: Any, x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    experts: torch.Tensor, weights: torch.Tensor, total: int,
) -> torch.Tensor:  # fmt: skip
    given = (x, w_gate_up, w_down, experts, weights, total, ranks.group_name)
    grad = torch.is_grad_enabled()
    wanted = _moe.wanted_bits(grad and v.requires_grad for v in (x, w_gate_up, w_down, weights))
    direct = is_undisturbed(x, w_gate_up, w_down, experts, weights)
    out: torch.Tensor
    if wanted:
        keep = _apply if direct else torch.ops._cuda_ops.moe_on_ranks_keep
        out = keep(*given, wanted)[0]
    else:
        out = (_forward if direct else torch.ops._cuda_ops.moe_on_ranks)(*given)
    return out


def _named(group: str) -> Any:
    # Private, as are the functions of torch that find a group by name; the stubs do not have it.
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(group)


def process_group(group: Any) -> Any:
    """Returns the ProcessGroup that the argument ``group`` says.

    Raises:
        RuntimeError: it is none, or this is within a transform of torch.func.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{OP}: transforms of torch.func do not reach other ranks")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            refuse("group", "one dim of a mesh", f"a mesh of {group.ndim} dims")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        refuse("group", "a ProcessGroup or one dim of a DeviceMesh", type(group).__name__)
    return group


def _cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Casts as autocast says: the operators that it knows are called with parts of them."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return autocast.cast(_moe.AUTOCAST, device, tuple(_moe.AUTOCAST), tensors, {})[0]


def _check(x: Any, w_gate_up: Any, w_down: Any, **of_tokens: Any) -> None:
    """Checks what a rank alone can: once ranks have agreed, none may refuse any more."""
    given = {**of_tokens, "w_gate_up": w_gate_up, "w_down": w_down}
    for name, value in {"x": x, **given}.items():
        if is_dtensor(value) or value.is_nested:
            wanted = "a plain tensor where 'group' is given"
            refuse(name, wanted, "a nested one" if value.is_nested else "a DTensor")
    if x.dim() < 1 or x.dtype not in _DTYPES:
        refuse("x", "(..., H) of a floating dtype", f"{x.dtype} of shape {[*x.shape]}")
    for name, value in given.items():
        if value.device != x.device:
            refuse(name, f"a tensor on {x.device} like 'x'", f"one on {value.device}")
    for name in ("w_gate_up", "w_down"):
        if given[name].dtype != x.dtype:
            refuse(name, f"{x.dtype} as 'x'", f"{given[name].dtype}")
        if given[name].dim() != 3:
            refuse(name, "3 dims", f"shape {[*given[name].shape]}")
    _moe_checks.matrices(w_gate_up, w_down, x.shape[-1], ", E of this rank")
    if "experts" in of_tokens and of_tokens["experts"].dtype != torch.int64:
        refuse("experts", "int64", f"{of_tokens['experts'].dtype}")
    for name, value in of_tokens.items():
        if [*value.shape[:-1]] != [*x.shape[:-1]]:
            last = "E of all ranks" if name == "router_logits" else "top_k"
            wanted = f"shape (..., {last}), the leading dims of 'x' {[*x.shape[:-1]]}"
            refuse(name, wanted, f"shape {[*value.shape]}")


# --- what all ranks know -------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _fitting(
    rows: tuple[tuple[int, ...], ...],
) -> tuple[tuple[int, ...], tuple[int, ...], int, bool, bool]:
    """Returns tokens and experts by rank, the gradients that any rank wants, and whether one
    captures a graph or has its memory on another GPU.
    """
    columns = dict(zip(_NUMBERS, zip(*rows, strict=True), strict=True))
    for name in _NUMBERS[5:]:
        if len(set(columns[name])) > 1:
            raise RuntimeError(
                f"{OP}: expected the same {name} at all ranks, got {[*columns[name]]} by rank"
            )
    experts, logits = columns["experts"], columns["logits of a token"][0]
    if sum(experts) != logits:
        raise RuntimeError(
            f"{OP}: argument 'router_logits': expected logits of all {sum(experts)} experts, "
            f"{' + '.join(map(str, experts))} by rank, got {logits} of a token"
        )
    wanted = functools.reduce(operator.or_, columns["gradients"])
    return (
        columns["tokens"], experts, wanted, any(columns["captures"]), any(columns["other GPU"])
    )  # fmt: skip


# --- operators -----------------------------------------------------------------------------

_library = torch.library.Library(INTERNAL, "FRAGMENT")
# A graph that one rank replays and another records would leave them waiting for each other: to have
# one, capture it at all ranks.
_TAGS = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe
_library.define(
    "moe_on_ranks(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor experts, Tensor weights, "
    "SymInt total, str group) -> Tensor",
    tags=_TAGS,
)
# Beside the result, what its gradient needs.
_library.define(
    "moe_on_ranks_keep(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor experts, Tensor weights, "
    "SymInt total, str group, int wanted) "
    "-> (Tensor out, Tensor rows, Tensor chosen, Tensor scales, Tensor kept, Tensor token, "
    "Tensor counts)",
    tags=_TAGS,
)
_library.define(
    "moe_on_ranks_backward(Tensor grad_out, Tensor rows, Tensor w_gate_up, Tensor w_down, "
    "Tensor chosen, Tensor scales, Tensor kept, Tensor token, Tensor counts, str group, "
    "int wanted) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def _known(
    x: torch.Tensor, w_down: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor,
    total: int, group: str, wanted: int,
) -> tuple[Layout, Way, Gather | Dispatch]:  # fmt: skip
    """Returns what all ranks know of a call, once all fit together, and how it is sent.

    Raises:
        RuntimeError: at all ranks: they do not.
    """
    ranks = _named(group)
    agreement = agreement_of(ranks)
    numbers = [
        experts.shape[0], w_down.shape[0], wanted,
        x.is_cuda and torch.cuda.is_current_stream_capturing(), is_elsewhere(ranks, x.device),
        x.shape[1], w_down.shape[2], experts.shape[1], total, _DTYPES.index(x.dtype),
        _DTYPES.index(weights.dtype), x.is_cuda, wanted > 0,
    ]  # fmt: skip
    rows = tuple(map(tuple, agreement.exchange(OP, numbers)))
    tokens, experts_of, wanted_by, captures, elsewhere = _fitting(rows)
    # Decided together: what one rank does alone would leave the others waiting.
    memory = None if elsewhere else memory_of(ranks, x.device)
    chosen = ways.way(tokens, experts_of, experts.shape[1], row_bytes(x))
    plan: tuple[Layout, Way, Gather | Dispatch] | None = None
    if memory is not None:
        plan = memory.kept((rows, chosen))
    if plan is None:
        known = Layout(agreement.rank, tokens, experts_of, wanted_by, captures)
        sent = sender_of(ranks, memory, known, chosen, x, experts, weights)
        plan = known, chosen, sent
        if memory is not None and isinstance(sent, Gather) and sent.by_memory:
            memory.keep((rows, chosen), plan)
    return plan


@torch.library.impl(_library, "moe_on_ranks", "CompositeExplicitAutograd")
def _forward(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, experts: torch.Tensor,
    weights: torch.Tensor, total: int, group: str,
) -> torch.Tensor:  # fmt: skip
    known, chosen_way, sent = _known(x, w_down, experts, weights, total, group, 0)
    gate_up, down = never_empty(w_gate_up), never_empty(w_down)

    # An index outside of this rank's experts is one whose result is zero.
    def run(chosen: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = function("moe_experts")(rows, gate_up, down, chosen, scales)
        return out

    def into(
        chosen: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor, outs: list[torch.Tensor]
    ) -> None:
        function("moe_experts_into_")(rows, gate_up, down, chosen, scales, outs)

    chunks = min(chosen_way.chunks, max(known.tokens))
    if isinstance(sent, Gather) and chunks > 1:
        first = known.firsts[known.rank]
        return sent.overlapped(chunks, run, first, experts, x, weights)
    arrived = sent.tokens(known.firsts, known.rank, experts, x, weights)
    return sent.products(run, into, *arrived)


@torch.library.impl(_library, "moe_on_ranks_keep", "CompositeExplicitAutograd")
def _forward_kept(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, experts: torch.Tensor,
    weights: torch.Tensor, total: int, group: str, wanted: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    known, _, sent = _known(x, w_down, experts, weights, total, group, wanted)
    arrived = sent.tokens(known.firsts, known.rank, experts, x, weights)
    if isinstance(sent, Gather) and sent.by_memory:  # where the next tokens will lie
        arrived = [one.clone() for one in arrived]
    chosen, rows, scales = arrived
    partial, kept = function("moe_experts_keep")(
        rows, never_empty(w_gate_up), never_empty(w_down), chosen, scales
    )
    token = sent.token if isinstance(sent, Dispatch) else experts.new_empty(0)
    counts = torch.tensor([*sent.counts(), known.wanted])
    (out,) = sent.begin_back(partial, aside=False)()
    return out, rows, chosen, scales, kept, token, counts


@torch.library.impl(_library, "moe_on_ranks_backward", "CompositeExplicitAutograd")
def _backward(
    grad_out: torch.Tensor, rows: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    chosen: torch.Tensor, scales: torch.Tensor, kept: torch.Tensor, token: torch.Tensor,
    counts: torch.Tensor, group: str, wanted: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    *sizes, of_all = counts.tolist()
    sent = restored(_named(group), grad_out.shape[0], token, sizes)
    gate_up, down = never_empty(w_gate_up), never_empty(w_down)
    between, of_down, of_weights = function("moe_experts_backward_down")(
        sent.again(grad_out), down, chosen, scales, kept, of_all
    )
    halves = function("moe_experts_backward_gate_up")
    # Where little is sent, a second call of it takes the host longer than the wire would.
    soon = sent.is_soon_back(row_bytes(grad_out))
    first = of_all & (_X | _GATE_UP if soon else _X)
    of_x, of_gate_up = halves(between, rows, gate_up, chosen, first)
    # What any rank wants is sent by all of them, or some would wait for the others.
    partials = [one for one, bit in ((of_x, _X), (of_weights, _WEIGHTS)) if of_all & bit]
    going = sent.begin_back(*partials, aside=not soon)
    if not soon:
        of_gate_up = halves(between, rows, gate_up, chosen, of_all & _GATE_UP)[1]  # meanwhile
    summed = iter(going())
    return _moe.of_wanted(
        wanted,
        next(summed) if of_all & _X else of_x,
        of_gate_up if gate_up is w_gate_up else of_gate_up[:0],
        of_down if down is w_down else of_down[:0],
        next(summed) if of_all & _WEIGHTS else of_weights,
    )


def _fake(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_kept(
    x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, experts: torch.Tensor,
    weights: torch.Tensor, total: int, group: str, wanted: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    context = torch.library.get_ctx()
    count: Any = context.new_dynamic_size()
    return (
        x.new_empty(x.shape),
        x.new_empty(count, x.shape[1]),
        experts.new_empty(count, experts.shape[1]),
        weights.new_empty(count, experts.shape[1]),
        x.new_empty(count, experts.shape[1], w_gate_up.shape[1]),
        experts.new_empty(context.new_dynamic_size()),
        # Not of the group's size: torch caches compiled graphs by the group's name alone.
        torch.empty(context.new_dynamic_size(), dtype=torch.int64, device="cpu"),
    )


def _fake_backward(
    grad_out: torch.Tensor, rows: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    chosen: torch.Tensor, scales: torch.Tensor, kept: torch.Tensor, token: torch.Tensor,
    counts: torch.Tensor, group: str, wanted: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    of_weights = scales.new_empty(grad_out.shape[0], scales.shape[1])
    made = (grad_out, w_gate_up, w_down, of_weights)
    return _moe.of_wanted(wanted, *(v.new_empty(v.shape) for v in made))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, w_gate_up, w_down, *_ = inputs
    ctx.group, ctx.wanted = inputs[-2:]
    ctx.save_for_backward(w_gate_up, w_down, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad_out: Any, *_: Any) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 8
    w_gate_up, w_down, rows, *others = ctx.saved_tensors
    given = grad_out, rows, w_gate_up, w_down, *others
    direct = not torch.is_grad_enabled() and is_undisturbed(*given)
    backward: Any = _backward if direct else torch.ops._cuda_ops.moe_on_ranks_backward
    grads = backward(*given, ctx.group, ctx.wanted)
    of_x, of_gate_up, of_down, of_weights = (
        grad if ctx.wanted & 1 << i else None for i, grad in enumerate(grads)
    )
    return of_x, of_gate_up, of_down, None, of_weights, None, None, None


class _InPython(torch.autograd.Function):
    """``moe_on_ranks_keep`` without the dispatcher, which takes the host as long as everything
    else. It saves the same tensors: a recomputation may go the other way.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _forward_kept(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_gradient)


# Below checks for functorch, which `is_undisturbed` has ruled out.
_apply: Any = super(torch.autograd.Function, _InPython).apply
torch.library.register_fake(f"{INTERNAL}::moe_on_ranks", _fake, lib=_library)
torch.library.register_fake(f"{INTERNAL}::moe_on_ranks_keep", _fake_kept, lib=_library)
torch.library.register_fake(f"{INTERNAL}::moe_on_ranks_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    f"{INTERNAL}::moe_on_ranks_keep", _gradient, setup_context=_setup_context, lib=_library
)
_second = no_second_derivative(f"{OP}_backward")
torch.library.register_autograd(
    f"{INTERNAL}::moe_on_ranks_backward", _second.backward, setup_context=_second.setup_context,
    lib=_library,
)  # fmt: skip
