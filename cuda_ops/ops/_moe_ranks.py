"""Runs experts that several ranks have, each some of them, for tokens that each rank brings.

Two ways. ``gather``: every rank gets all tokens, runs its own experts, and sends each rank the
sums for its tokens. ``dispatch``: a token goes once to each rank that has one of its experts. Both
add up the ranks' sums in one fixed order, in float32 at least: the same bits each time.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from cuda_ops.derive import layout
from cuda_ops.derive.no_gradient import no_second_derivative
from cuda_ops.dispatch import autocast
from cuda_ops.distributed import ways
from cuda_ops.distributed.agreement import agreement_of, refusing_together
from cuda_ops.distributed.collectives import Collectives, filled
from cuda_ops.distributed.symmetric import (
    GATHERED,
    RETURNED,
    Memory,
    Shaped,
    is_elsewhere,
    memory_of,
    room,
)
from cuda_ops.distributed.ways import Way
from cuda_ops.names import INTERNAL
from cuda_ops.ops import _moe, _moe_checks
from cuda_ops.ops._moe_checks import MOST_PARTS, refuse
from cuda_ops.ops._moe_parallel import is_dtensor, never_empty
from cuda_ops.registry import function

_OP = "cuda_ops::moe"
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
    with refusing_together(ranks, _OP):
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
    with refusing_together(ranks, _OP):
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
    for name in _OPERATORS:
        function(name)


def _on_ranks(
    ranks: Any, x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    experts: torch.Tensor, weights: torch.Tensor, total: int,
) -> torch.Tensor:  # fmt: skip
    given = (x, w_gate_up, w_down, experts, weights, total, ranks.group_name)
    grad = torch.is_grad_enabled()
    wanted = _moe.wanted_bits(grad and v.requires_grad for v in (x, w_gate_up, w_down, weights))
    out: torch.Tensor
    if wanted:
        out = torch.ops._cuda_ops.moe_on_ranks_keep(*given, wanted)[0]
    else:
        out = torch.ops._cuda_ops.moe_on_ranks(*given)
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
        raise RuntimeError(f"{_OP}: transforms of torch.func do not reach other ranks")
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


@dataclass(frozen=True)
class Layout:
    """Tokens and experts by rank."""

    group: Any
    rank: int
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    #: The gradients that any rank wants, which all then compute.
    wanted: int
    #: Whether any rank captures a graph, where no host can wait and no memory be shared anew.
    captures: bool
    #: Memory that the ranks share, if they do.
    memory: Memory | None

    @property
    def ends(self) -> list[int]:
        """The end of each rank's experts."""
        return [sum(self.experts[: rank + 1]) for rank in range(len(self.experts))]

    @property
    def firsts(self) -> list[int]:
        """The number of each rank's first expert."""
        return [sum(self.experts[:rank]) for rank in range(len(self.experts))]


def _agreed(group: Any, device: torch.device, numbers: Sequence[int]) -> Layout:
    """Returns what the ranks have, once all fit together.

    Raises:
        RuntimeError: at all ranks: they do not.
    """
    agreement = agreement_of(group)
    rows = agreement.exchange(_OP, numbers)
    tokens, experts, wanted, captures, elsewhere = _fitting(tuple(map(tuple, rows)))
    # Decided together: what one rank does alone would leave the others waiting.
    memory = None if elsewhere else memory_of(group, device)
    return Layout(group, agreement.rank, tokens, experts, wanted, captures, memory)


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
                f"{_OP}: expected the same {name} at all ranks, got {[*columns[name]]} by rank"
            )
    experts, logits = columns["experts"], columns["logits of a token"][0]
    if sum(experts) != logits:
        raise RuntimeError(
            f"{_OP}: argument 'router_logits': expected logits of all {sum(experts)} experts, "
            f"{' + '.join(map(str, experts))} by rank, got {logits} of a token"
        )
    wanted = functools.reduce(operator.or_, columns["gradients"])
    return (
        columns["tokens"], experts, wanted, any(columns["captures"]), any(columns["other GPU"])
    )  # fmt: skip


# --- the two ways --------------------------------------------------------------------------


class Gather:
    """Sends all tokens to all ranks, as many rows of each rank as the largest has."""

    def __init__(self, wire: Memory | Collectives, tokens: Sequence[int], own: int) -> None:
        self._wire, self._tokens, self._own, self._most = wire, tokens, own, max(tokens)

    def counts(self) -> list[int]:
        kind = _MEMORY if isinstance(self._wire, Memory) else _COLLECTIVES
        return [kind, *self._tokens, *[0] * len(self._tokens)]

    def tokens(
        self, firsts: Sequence[int], rank: int, experts: torch.Tensor, x: torch.Tensor,
        weights: torch.Tensor,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Returns all ranks' experts, as this rank counts its own from 0, and rows and weights."""
        experts = filled(experts, self._most, -1)
        if not isinstance(self._wire, Memory) or len(firsts) > MOST_PARTS:
            experts, x, weights = self._wire.begin_all_gather((experts, x, weights), self._most)()
            return [experts - firsts[rank], x, weights]
        sent = experts, filled(x, self._most), filled(weights, self._most)
        there, here = self._wire.places(GATHERED, self._all(*sent), self._most)
        # Each rank begins with another one, and ends with itself.
        order = [(rank + step) % len(firsts) for step in range(1, len(firsts) + 1)]
        chosen, xs, scales = ([there[to][part] for to in order] for part in range(3))
        counted = [firsts[to] for to in order]
        with _below_autograd():
            function("moe_send_")(sent[1], sent[0], sent[2], counted, xs, chosen, scales)
        self._wire.begin_barrier(GATHERED)()
        return here

    def products(
        self, run: Callable[..., torch.Tensor], into: Callable[..., None], *arrived: torch.Tensor
    ) -> torch.Tensor:
        """Runs products of the rows that came, and returns this rank's sums."""
        if not isinstance(self._wire, Memory) or len(self._tokens) > MOST_PARTS:
            return self.begin_back(run(*arrived), aside=False)()[0]
        there, (sums,) = self._wire.places(RETURNED, self._all(arrived[1]), self._most)
        with _below_autograd():
            into(*arrived, [place for (place,) in there])
        self._wire.begin_barrier(RETURNED)()
        return self._summed(sums)[: self._own]

    def _all(self, *parts: torch.Tensor) -> list[Shaped]:
        """Describes parts of as many rows as all ranks have together."""
        count = len(self._tokens) * self._most
        return [((count, *part.shape[1:]), part.dtype) for part in parts]

    def again(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' rows of what lies as tokens do."""
        return self._wire.begin_all_gather((rows,), self._most)()[0]

    def begin_back(
        self, *partials: torch.Tensor, aside: bool = True
    ) -> Callable[[], list[torch.Tensor]]:
        """Begins to send back what this rank has for the rows of all; returns what waits for the
        sums over ranks for its own rows.
        """
        arrived = self._wire.begin_all_to_all(partials, aside=aside)
        return lambda: [self._summed(one)[: self._own] for one in arrived()]

    def overlapped(
        self, chunks: int, run: Callable[..., torch.Tensor], first: int, experts: torch.Tensor,
        *parts: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Runs products of the rows of all ranks, a chunk at a time: while one is computed the next
        comes and the one before goes back.
        """
        full = [filled(experts, self._most, -1), *(filled(part, self._most) for part in parts)]
        coming = [
            self._wire.begin_all_gather(part, part[0].shape[0], chunk, aside=True)
            for chunk, part in enumerate(zip(*(p.tensor_split(chunks) for p in full), strict=True))
        ]
        going = []
        for chunk, arrived in enumerate(coming):
            chosen, *rows = arrived()
            partial = run(chosen - first, *rows)
            going.append(self._wire.begin_all_to_all([partial], chunk, aside=True))
        return torch.cat([self._summed(*arrived()) for arrived in going])[: self._own]

    def _summed(self, parts: torch.Tensor) -> torch.Tensor:
        ranks = len(self._tokens)
        if ranks == 2:  # which rounds once too
            return torch.add(*parts.chunk(2)) if len(parts) else parts.clone()
        each = parts.view(ranks, parts.shape[0] // ranks, *parts.shape[1:])
        return each.sum(0, dtype=_wide(parts.dtype)).to(parts.dtype)


class Dispatch:
    """Sends a token once to each rank that has one of its experts.

    How many go where is known once the router has run: the host waits for it, once a call.
    """

    def __init__(
        self, group: Any, own: int, token: torch.Tensor, sent: list[int], received: list[int]
    ) -> None:
        self._group, self._own, self.token = group, own, token
        self._sent, self._received = sent, received

    @staticmethod
    def of(known: Layout, experts: torch.Tensor) -> Dispatch:
        ends = torch.tensor(known.ends, device=experts.device)
        owners = torch.bucketize(experts, ends, right=True)
        goes = torch.stack([(owners == rank).any(1) for rank in range(len(known.ends))])
        to, token = goes.nonzero(as_tuple=True)  # by rank, and by token for each
        token = token.clone()  # from the middle of what torch makes, where programs expect a start
        sent = torch.bincount(to, minlength=len(known.ends)).tolist()
        matrix = agreement_of(known.group).exchange(_OP, sent)
        received = [row[known.rank] for row in matrix]
        return Dispatch(known.group, experts.shape[0], token, sent, received)

    def counts(self) -> list[int]:
        return [_DISPATCH, *self._sent, *self._received]

    def tokens(
        self, firsts: Sequence[int], rank: int, experts: torch.Tensor, x: torch.Tensor,
        weights: torch.Tensor,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Returns what :meth:`Gather.tokens` does, of the tokens that have experts here."""
        chosen, rows, scales = map(self.again, (experts, x, weights))
        return [chosen - firsts[rank], rows, scales]

    def products(
        self, run: Callable[..., torch.Tensor], into: Callable[..., None], *arrived: torch.Tensor
    ) -> torch.Tensor:
        """Runs products of the rows that came, and returns this rank's sums."""
        return self._back(run(*arrived))

    def again(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the tokens that have experts here, of all ranks in order."""
        return self._all_to_all(rows[self.token], self._received, self._sent)

    def begin_back(
        self, *partials: torch.Tensor, aside: bool = True
    ) -> Callable[[], list[torch.Tensor]]:
        """Sends back what :meth:`Gather.begin_back` does."""
        found = [self._back(partial) for partial in partials]
        return lambda: found

    def _back(self, partial: torch.Tensor) -> torch.Tensor:
        parts = self._all_to_all(partial.contiguous(), self._sent, self._received)
        total = partial.new_zeros(self._own, *partial.shape[1:], dtype=_wide(partial.dtype))
        tokens = self.token.split(self._sent)
        for token, part in zip(tokens, parts.split(self._sent), strict=True):
            total[token] += part  # each token once
        return total.to(partial.dtype)

    def _all_to_all(self, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows, received, sent, group=self._group)
        return found


#: No gradient is recorded where tokens are sent, and no version counts what other GPUs write; to
#: ask for both takes the host longer than the call.
_below_autograd: Any = torch._C._AutoDispatchBelowADInplaceOrView


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


#: What sends, as `counts` begins: the collectives of torch.distributed, memory that ranks share, or
#: a dispatch.
_COLLECTIVES, _MEMORY, _DISPATCH = range(3)


def _sender(
    known: Layout, chosen: Way, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> Gather | Dispatch:
    """Returns what sends the tokens of a call and the gradients of them."""
    if chosen.name == "dispatch" and not known.captures:
        return Dispatch.of(known, experts)
    memory, agreement = known.memory, agreement_of(known.group)
    if memory is not None:
        rows, of_weights = len(known.tokens) * max(known.tokens), _row_bytes(weights)
        ends = 3 * room((1,), torch.uint8) * chosen.chunks  # where parts of chunks end
        boxes = {
            "gathered": rows * (_row_bytes(x) + _row_bytes(experts) + of_weights) + ends,
            "returned": rows * (_row_bytes(x) + of_weights) + ends,
        }
        if not memory.fits(**boxes) and known.captures:
            memory = None
        elif not memory.fits(**boxes):
            memory.grow(agreement, _OP, **boxes)
    return Gather(memory or Collectives(known.group), known.tokens, experts.shape[0])


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


def _restored(group: Any, own: int, token: torch.Tensor, counts: list[int]) -> Gather | Dispatch:
    kind, ranks = counts[0], len(counts) // 2
    ours, others = counts[1 : ranks + 1], counts[ranks + 1 :]
    if kind == _DISPATCH:
        return Dispatch(group, own, token, ours, others)
    wire = memory_of(group, token.device) if kind == _MEMORY else Collectives(group)
    assert wire is not None
    return Gather(wire, ours, own)


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
    """Returns what all ranks know of a call, and how it is sent."""
    ranks = _named(group)
    numbers = [
        experts.shape[0], w_down.shape[0], wanted,
        x.is_cuda and torch.cuda.is_current_stream_capturing(), is_elsewhere(ranks, x.device),
        x.shape[1], w_down.shape[2], experts.shape[1], total, _DTYPES.index(x.dtype),
        _DTYPES.index(weights.dtype), x.is_cuda, wanted > 0,
    ]  # fmt: skip
    known = _agreed(ranks, x.device, numbers)
    chosen = ways.way(known.tokens, known.experts, experts.shape[1], _row_bytes(x))
    return known, chosen, _sender(known, chosen, x, experts, weights)


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
    if known.memory is not None and isinstance(sent, Gather):  # where the next tokens will lie
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
    sent = _restored(_named(group), grad_out.shape[0], token, sizes)
    gate_up, down = never_empty(w_gate_up), never_empty(w_down)
    between, of_down, of_weights = function("moe_experts_backward_down")(
        sent.again(grad_out), down, chosen, scales, kept, of_all
    )
    halves = function("moe_experts_backward_gate_up")
    of_x = halves(between, rows, gate_up, chosen, of_all & _X)[0]
    # What any rank wants is sent by all of them, or some would wait for the others.
    partials = [one for one, bit in ((of_x, _X), (of_weights, _WEIGHTS)) if of_all & bit]
    going = sent.begin_back(*partials)
    of_gate_up = halves(between, rows, gate_up, chosen, of_all & _GATE_UP)[1]  # meanwhile
    summed = iter(going())
    return _moe.of_wanted(
        wanted,
        next(summed) if of_all & _X else of_x,
        of_gate_up[: w_gate_up.shape[0]],
        of_down[: w_down.shape[0]],
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
    grads = torch.ops._cuda_ops.moe_on_ranks_backward(
        grad_out, rows, w_gate_up, w_down, *others, ctx.group, ctx.wanted
    )
    of_x, of_gate_up, of_down, of_weights = (
        grad if ctx.wanted & 1 << i else None for i, grad in enumerate(grads)
    )
    return of_x, of_gate_up, of_down, None, of_weights, None, None, None


torch.library.register_fake(f"{INTERNAL}::moe_on_ranks", _fake, lib=_library)
torch.library.register_fake(f"{INTERNAL}::moe_on_ranks_keep", _fake_kept, lib=_library)
torch.library.register_fake(f"{INTERNAL}::moe_on_ranks_backward", _fake_backward, lib=_library)
torch.library.register_autograd(
    f"{INTERNAL}::moe_on_ranks_keep", _gradient, setup_context=_setup_context, lib=_library
)
_second = no_second_derivative(f"{_OP}_backward")
torch.library.register_autograd(
    f"{INTERNAL}::moe_on_ranks_backward", _second.backward, setup_context=_second.setup_context,
    lib=_library,
)  # fmt: skip
