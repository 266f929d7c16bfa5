"""Ranks that agree before they send: each knows the others' sizes, and all refuse together."""

from __future__ import annotations

import contextlib
import datetime
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from cuda_ops.distributed.collectives import all_gather

#: Seconds that ranks wait for each other.
TIMEOUT = "CUDA_OPS_RANKS_TIMEOUT"
_DEFAULT_TIMEOUT = 600.0
#: Seconds in which ranks that have given up say so to each other.
_LAST_WORDS = 5.0
#: Numbers of an exchange; as many as there are ranks, if that is more.
_LEAST_NUMBERS = 15


class Agreement:
    """What the ranks of one process group use to agree.

    It is a group of its own, on the CPU: sizes are needed on the host, and must not wait for what
    a GPU has still to do.
    """

    def __init__(self, group: Any) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self._seconds = _timeout()
        self._calls = 0
        self._group = dist.new_group(
            self.ranks, backend="gloo", use_local_synchronization=True,
            timeout=datetime.timedelta(seconds=self._seconds),
        )  # fmt: skip

    def exchange(self, op: str, numbers: Sequence[int], refusal: str = "") -> list[list[int]]:
        """Returns what each rank brought, by rank.

        Args:
            op: the operator, for texts.
            numbers: as many at every rank, 15 or one for each rank at most.
            refusal: why this rank does not go on; empty if it does.

        Raises:
            RuntimeError: a rank refuses, which all of them then do; or it did not come in time.
        """
        self._calls += 1
        # Always as many: gloo ends a process that gets more than it waits for, and a rank that
        # refuses comes to another exchange than those that go on.
        width = max(_LEAST_NUMBERS, self.size) + 1
        mine = torch.zeros(width, dtype=torch.int64)
        mine[0] = len(refusal)
        mine[1 : len(numbers) + 1] = torch.tensor(numbers, dtype=torch.int64)
        texts: list[Any] = [None] * self.size
        try:
            rows: list[list[int]] = all_gather(mine.unsqueeze(0), self._group).tolist()
            if refused := any(row[0] for row in rows):
                dist.all_gather_object(texts, refusal, group=self._group)
        except RuntimeError as error:  # gloo's, of a rank that has ended or did not come
            raise RuntimeError(self._missing(op)) from error
        if refused:
            raise RuntimeError(_refused(op, texts))
        return [row[1 : len(numbers) + 1] for row in rows]

    def _missing(self, op: str) -> str:
        """Returns which ranks did not come: those that come here too say so in the store."""
        # torch exports it without saying so.
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"cuda_ops/{'-'.join(map(str, self.ranks))}/{self._calls}",
            dist.distributed_c10d._get_default_store(),
        )
        store.set(str(self.rank), "waited")
        absent = []
        for rank in range(self.size):
            try:
                store.wait([str(rank)], datetime.timedelta(seconds=_LAST_WORDS))
            except Exception:  # what a store raises differs by kind
                absent.append(rank)
        which = ", ".join(map(str, absent)) or "one that has come since"
        return (
            f"{op}: ranks of the group that did not come to call {self._calls}: {which} "
            f"(of {self.size}; waited {self._seconds:g} s or until one ended; {TIMEOUT} sets it)"
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
    if not seconds > 0:
        raise ValueError(f"{TIMEOUT}: expected seconds above 0, got {given!r}")
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
    except (RuntimeError, TypeError, ValueError) as error:
        with contextlib.suppress(RuntimeError):
            agreement_of(group).exchange(op, (), str(error) or type(error).__name__)
        raise
