"""Ranks that agree before they send: each knows the others' sizes, and all refuse together."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cuda_ops.distributed.board import MOST, Board, Gone
from cuda_ops.distributed.collectives import all_gather

#: Seconds that ranks wait for each other.
TIMEOUT = "CUDA_OPS_RANKS_TIMEOUT"
_DEFAULT_TIMEOUT = 600.0
_LONGEST = 1e6
#: Seconds in which ranks that have given up say so to each other.
_LAST_WORDS = 5.0
#: Numbers of an exchange; as many as there are ranks, if that is more.
_LEAST_NUMBERS = 15


class Agreement:
    """What the ranks of one process group use to agree.

    It is a group of its own, on the CPU: sizes are needed on the host, and must not wait for what
    a GPU has still to do. Ranks of one host show them to each other in memory that they share,
    which takes microseconds; what is said there is the same.
    """

    def __init__(self, group: Any) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self.seconds = _timeout()
        self._calls = 0
        # Always as many: gloo ends a process that gets more than it waits for, and a rank that
        # refuses comes to another exchange than those that go on.
        self._width = max(_LEAST_NUMBERS, self.size) + 1
        try:
            self.group = dist.new_group(
                self.ranks, backend="gloo", use_local_synchronization=True,
                timeout=datetime.timedelta(seconds=self.seconds),
            )  # fmt: skip
            self._board = Board.of(self.group, self._width)
        except RuntimeError as error:  # of the store, or of gloo
            raise RuntimeError(self._missing("cuda_ops")) from error

    @property
    def one_host(self) -> bool:
        """Whether the ranks share a host."""
        return self._board is not None

    def exchange(self, op: str, numbers: Sequence[int], refusal: str = "") -> list[Sequence[int]]:
        """Returns what each rank brought, by rank.

        Args:
            op: the operator, for texts.
            numbers: as many at every rank, 15 or one for each rank at most.
            refusal: why this rank does not go on; empty if it does.

        Raises:
            RuntimeError: a rank refuses, which all of them then do; or it did not come in time.
        """
        self._calls += 1
        if too_large := [number for number in numbers if not 0 <= number < MOST]:
            refusal = refusal or f"expected sizes of 0 to {MOST - 1}, got {too_large[0]}"
        mine = [0] * self._width
        mine[0] = len(refusal)
        if not refusal:
            mine[1 : len(numbers) + 1] = numbers
        try:
            rows = self._shown(mine)
            texts = self.gather(refusal) if any(row[0] for row in rows) else []
        except (RuntimeError, Gone) as error:  # gloo's, of a rank that has ended or did not come
            raise RuntimeError(self._missing(op)) from error
        if texts:
            raise RuntimeError(_refused(op, texts))
        return [row[1 : len(numbers) + 1] for row in rows]

    def gather(self, value: object) -> list[Any]:
        """Returns what each rank brings, by rank: any value, slowly."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _shown(self, numbers: list[int]) -> Sequence[Sequence[int]]:
        if self._board is not None:
            return self._board.exchange(numbers, self.seconds)
        rows: list[list[int]] = all_gather(
            torch.tensor([numbers], device="cpu"), self.group
        ).tolist()
        return rows

    def _missing(self, op: str) -> str:
        """Returns which ranks did not come: those that come here too say so in the store."""
        # torch exports it without saying so.
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"cuda_ops/{'-'.join(map(str, self.ranks))}/{self._calls}",
            dist.distributed_c10d._get_default_store(),
        )
        store.set(str(self.rank), "waited")
        absent, until = [], time.monotonic() + _LAST_WORDS
        for rank in range(self.size):
            left = max(0.1, until - time.monotonic())  # for all of them together
            try:
                store.wait([str(rank)], datetime.timedelta(seconds=left))
            except Exception:  # what a store raises differs by kind
                absent.append(rank)
        which = ", ".join(map(str, absent)) or "one that has come since"
        return (
            f"{op}: ranks of the group that did not come to call {self._calls}: {which} "
            f"(of {self.size}; waited {self.seconds:g} s or until one ended; {TIMEOUT} sets it)"
        )


def _refused(op: str, texts: Sequence[str]) -> str:
    rank, text = next((rank, text) for rank, text in enumerate(texts) if text)
    return f"{op}: rank {rank} of the group refuses: {text}"


def _timeout() -> float:
    given = os.environ.get(TIMEOUT, "")
    try:
        seconds = float(given) if given else _DEFAULT_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds <= _LONGEST:
        raise ValueError(f"{TIMEOUT}: expected seconds from 0.001 to {_LONGEST:g}, got {given!r}")
    return seconds


_agreements: weakref.WeakKeyDictionary[Any, Agreement] = weakref.WeakKeyDictionary()


def agreement_of(group: Any) -> Agreement:
    """Returns the agreement of a group's ranks. The first call makes it, by all of them."""
    found = _agreements.get(group)
    if found is None:
        found = _agreements[group] = Agreement(group)
    return found


@contextlib.contextmanager
def refusing_together(group: Any, op: str) -> Iterator[None]:
    """Lets an error inside reach the ranks that wait at :meth:`Agreement.exchange`."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(RuntimeError):
            agreement_of(group).exchange(op, (), str(error) or type(error).__name__)
        raise
