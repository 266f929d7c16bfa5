"""What sends the tokens of ``moe`` to experts that other ranks have, and their results back.

``Gather``: every rank gets all tokens, runs its own experts, and sends each rank the sums for its
tokens. ``Dispatch``: a token goes once to each rank that has one of its experts. Both add up the
ranks' sums in one fixed order, in float32 at least: the same bits each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cuda_ops.distributed.agreement import agreement_of
from cuda_ops.distributed.collectives import Collectives, Wait, filled
from cuda_ops.distributed.symmetric import GATHERED, RETURNED, Memory, Shaped, memory_of, room
from cuda_ops.distributed.ways import WIRE, Way
from cuda_ops.ops._moe_checks import MOST_PARTS
from cuda_ops.registry import function

OP = "cuda_ops::moe"
#: Seconds on the wire that are not worth a second call of an operator to the host.
_SOON = 20e-6


@dataclass(frozen=True)
class Layout:
    """Tokens and experts by rank. What keeps it is the memory that ranks share, so it holds neither
    that nor the group.
    """

    rank: int
    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    #: The gradients that any rank wants, which all then compute.
    wanted: int
    #: Whether any rank captures a graph, where no host can wait and no memory be shared anew.
    captures: bool

    @property
    def ends(self) -> list[int]:
        """The end of each rank's experts."""
        return [sum(self.experts[: rank + 1]) for rank in range(len(self.experts))]

    @property
    def firsts(self) -> list[int]:
        """The number of each rank's first expert."""
        return [sum(self.experts[:rank]) for rank in range(len(self.experts))]


class Gather:
    """Sends all tokens to all ranks, as many rows of each rank as the largest has."""

    def __init__(self, wire: Memory | Collectives, tokens: Sequence[int], own: int) -> None:
        self._wire, self._tokens, self._own, self._most = wire, tokens, own, max(tokens)
        #: Where a kernel writes tokens and results, and where those of all ranks then lie: the same
        #: in each call, as long as the boxes are. To ask the memory for them takes the host longer.
        self._gathered: tuple[list[list[torch.Tensor]], list[torch.Tensor]] | None = None
        self._returned: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None

    @property
    def by_memory(self) -> bool:
        """Whether tokens go by memory that ranks share."""
        return isinstance(self._wire, Memory)

    def counts(self) -> list[int]:
        kind = _MEMORY if self.by_memory else _COLLECTIVES
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
        x, weights = filled(x, self._most), filled(weights, self._most)
        order = self._wire.order
        if self._gathered is None:
            shaped = self._all(experts, x, weights)
            there, here = self._wire.places(GATHERED, shaped, self._most)
            self._gathered = [[there[to][part] for to in order] for part in range(3)], here
        else:
            self._wire.follow(GATHERED)
        (chosen, xs, scales), here = self._gathered
        counted = [firsts[to] for to in order]
        with _below_autograd():
            function("moe_send_")(x, experts, weights, counted, xs, chosen, scales)
        self._wire.begin_barrier(GATHERED)()
        return here

    def products(
        self, run: Callable[..., torch.Tensor], into: Callable[..., None], *arrived: torch.Tensor
    ) -> torch.Tensor:
        """Runs products of the rows that came, and returns this rank's sums."""
        if not isinstance(self._wire, Memory) or len(self._tokens) > MOST_PARTS:
            return self.begin_back(run(*arrived), aside=False)()[0]
        if self._returned is None:
            there, (sums,) = self._wire.places(RETURNED, self._all(arrived[1]), self._most)
            self._returned = [place for (place,) in there], self._by_rank(sums)
        else:
            self._wire.follow(RETURNED)
        outs, by_rank = self._returned
        with _below_autograd():
            into(*arrived, outs)
        self._wire.begin_barrier(RETURNED)()
        return _sum(by_rank)

    def _all(self, *parts: torch.Tensor) -> list[Shaped]:
        """Describes parts of as many rows as all ranks have together."""
        count = len(self._tokens) * self._most
        return [((count, *part.shape[1:]), part.dtype) for part in parts]

    def is_soon_back(self, row_bytes: int) -> bool:
        """Returns whether rows are on the wire for less time than a second call takes the host."""
        return (len(self._tokens) - 1) * self._most * row_bytes / WIRE < _SOON

    def again(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' rows of what lies as tokens do."""
        return self._wire.begin_all_gather((rows,), self._most)()[0]

    def begin_back(self, *partials: torch.Tensor, aside: bool = True) -> Wait:
        """Begins to send back what this rank has for the rows of all; returns what waits for the
        sums over ranks for its own rows.
        """
        arrived = self._wire.begin_all_to_all(partials, aside=aside)
        return lambda: [_sum(self._by_rank(one)) for one in arrived()]

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
            chosen, *came = arrived()
            partial = run(chosen - first, *came)
            going.append(self._wire.begin_all_to_all([partial], chunk, aside=True))
        found, before = [], 0
        for arrived in going:
            (rows,) = arrived()
            found.append(_sum(self._by_rank(rows, before)))
            before += rows.shape[0] // len(self._tokens)
        return torch.cat(found)

    def _by_rank(self, parts: torch.Tensor, before: int = 0) -> list[torch.Tensor]:
        """Returns what :func:`_sum` takes: this rank's rows alone, without those ``before``. The
        sum would be a view if they were cut off after it, and autograd lets no caller write to one.
        """
        ranks = len(self._tokens)
        each = parts.shape[0] // ranks
        own = min(each, max(0, self._own - before))
        by_rank = parts.view(ranks, each, *parts.shape[1:])
        if own < each:
            by_rank = by_rank[:, :own]
        return [*by_rank] if ranks == 2 else [by_rank]


def _sum(by_rank: list[torch.Tensor]) -> torch.Tensor:
    """Adds up results of two ranks, or the first dim of those of all, in float32 at least: rounded
    once.
    """
    if len(by_rank) == 2:
        return torch.add(*by_rank)
    # Without a dtype, autocast would set one.
    return by_rank[0].sum(0, dtype=by_rank[0].dtype)


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
    def of(group: Any, known: Layout, experts: torch.Tensor) -> Dispatch:
        ends = torch.tensor(known.ends, device=experts.device)
        owners = torch.bucketize(experts, ends, right=True)
        goes = torch.stack([(owners == rank).any(1) for rank in range(len(known.ends))])
        to, token = goes.nonzero(as_tuple=True)  # by rank, and by token for each
        token = token.clone()  # from the middle of what torch makes, where programs expect a start
        sent = torch.bincount(to, minlength=len(known.ends)).tolist()
        matrix = agreement_of(group).exchange(OP, sent)
        received = [row[known.rank] for row in matrix]
        return Dispatch(group, experts.shape[0], token, sent, received)

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

    def is_soon_back(self, row_bytes: int) -> bool:
        """Returns true: the host waits in any case."""
        return True

    def again(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows of the tokens that have experts here, of all ranks in order."""
        return self._all_to_all(rows[self.token], self._received, self._sent)

    def begin_back(self, *partials: torch.Tensor, aside: bool = True) -> Wait:
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


def sender_of(
    group: Any, memory: Memory | None, known: Layout, chosen: Way, x: torch.Tensor,
    experts: torch.Tensor, weights: torch.Tensor,
) -> Gather | Dispatch:  # fmt: skip
    """Returns what sends the tokens of a call and the gradients of them, by ``memory`` if the ranks
    share some.
    """
    if chosen.name == "dispatch" and not known.captures:
        return Dispatch.of(group, known, experts)
    if memory is not None:
        rows, of_weights = len(known.tokens) * max(known.tokens), row_bytes(weights)
        ends = 3 * room((1,), torch.uint8) * chosen.chunks  # where parts of chunks end
        boxes = {
            "gathered": rows * (row_bytes(x) + row_bytes(experts) + of_weights) + ends,
            "returned": rows * (row_bytes(x) + of_weights) + ends,
        }
        if not memory.fits(**boxes) and known.captures:
            memory = None
        elif not memory.fits(**boxes):
            memory.grow(agreement_of(group), OP, **boxes)
    # The memory keeps this, and is to go with its group, not when the collector finds a cycle.
    wire: Any = Collectives(group) if memory is None else weakref.proxy(memory)
    return Gather(wire, known.tokens, experts.shape[0])


def row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


def restored(group: Any, own: int, token: torch.Tensor, counts: list[int]) -> Gather | Dispatch:
    """Returns what sends gradients as tokens were sent, by its :meth:`counts`."""
    kind, ranks = counts[0], len(counts) // 2
    ours, others = counts[1 : ranks + 1], counts[ranks + 1 :]
    if kind == _DISPATCH:
        return Dispatch(group, own, token, ours, others)
    wire = memory_of(group, token.device) if kind == _MEMORY else Collectives(group)
    assert wire is not None
    return Gather(wire, ours, own)
