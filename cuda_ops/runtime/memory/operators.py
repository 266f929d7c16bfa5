"""How much memory each operator allocates, by torch's profiler.

The profiler hears of each allocation from the allocator itself, those of C++ and of backward
included, on a GPU and on a CPU. The allocator's own history knows Python lines instead of
operators, and a GPU alone; a ``TorchDispatchMode`` would keep ``torch.compile`` from running, and
sees no memory that an operator frees before it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cuda_ops.output import size_text, table_lines
from cuda_ops.runtime import profilers

#: What the profiler calls an allocation.
_MEMORY = "[memory]"


@dataclass
class OperatorUse:
    """What all calls of one operator allocated, in bytes."""

    #: As the dispatcher has it: ``"cuda_ops::silu"``.
    name: str
    #: ``"cpu"`` or ``"cuda:0"``.
    device: str
    #: Calls that allocated or freed something there.
    calls: int = 0
    #: All that was allocated, freed again or not.
    allocated: int = 0
    #: What was still there when the calls returned: results, and what is saved for backward.
    kept: int = 0
    #: The most that one call had at once.
    peak: int = 0


@dataclass
class OperatorsUse:
    """What :func:`memory_by_operator` found: ``operators`` is filled when its block ends."""

    operators: tuple[OperatorUse, ...] = field(default_factory=tuple)

    def __iter__(self) -> Iterator[OperatorUse]:
        return iter(self.operators)

    def __len__(self) -> int:
        return len(self.operators)

    def __getitem__(self, name: str) -> OperatorUse:
        for use in self.operators:
            if use.name == name:
                return use
        raise KeyError(name)

    def __str__(self) -> str:
        if not self.operators:
            return "no operator allocated memory"
        header = ("operator", "device", "calls", "allocated", "kept", "peak of a call")
        rows = [
            (u.name, u.device, str(u.calls), *map(size_text, (u.allocated, u.kept, u.peak)))
            for u in self.operators
        ]
        return "\n".join(table_lines(header, rows, left=2))


@contextlib.contextmanager
def memory_by_operator() -> Iterator[OperatorsUse]:
    """Counts what each operator in the block allocates; the result is there when the block ends.

    Memory counts for the outermost operator, so that of a kernel's workspace is its operator's.
    Backward counts too. Seen are the thread that enters and those of autograd. torch has one
    profiler at a time, so the block must not run inside another one, nor start one.

    >>> with memory_by_operator() as found:
    ...     y = torch.ones(1000) + torch.ones(1000)
    >>> found["aten::ones"].calls, found["aten::ones"].kept, found["aten::add"].peak
    (2, 8000, 4000)

    Raises:
        RuntimeError: a trace or a profiler of torch is running already; in the block, where one
            starts there, in another thread too.
    """
    found = OperatorsUse()
    profilers.check_free("memory_by_operator")
    # Without acc_events torch 2.10 and 2.11 warn of what several cycles would lose; this is one.
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    profiler.start()
    try:
        with profilers.kept("memory_by_operator"):
            yield found
    finally:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        profiler.stop()
        found.operators = by_operator(_events(profiler))


@dataclass(frozen=True)
class Event:
    """A call, or with ``nbytes`` an allocation or, where that is negative, a free."""

    name: str
    thread: int
    start: int
    end: int
    nbytes: int = 0
    device: str = "cpu"


def by_operator(events: Sequence[Event]) -> tuple[OperatorUse, ...]:
    """Sums up events by the outermost operator around each allocation; largest peak first."""
    uses: dict[tuple[str, str], OperatorUse] = {}
    for thread in sorted({event.thread for event in events}):
        mine = [event for event in events if event.thread == thread]
        outermost = _outermost([event for event in mine if _is_operator(event.name)])
        changes = sorted((e for e in mine if e.name == _MEMORY), key=lambda event: event.start)
        position = 0
        for call in outermost:
            while position < len(changes) and changes[position].start < call.start:
                position += 1  # between operators: tensors that Python lets go
            inside: dict[str, list[int]] = {}
            while position < len(changes) and changes[position].start <= call.end:
                inside.setdefault(changes[position].device, []).append(changes[position].nbytes)
                position += 1
            for device, sizes in inside.items():
                use = uses.setdefault((call.name, device), OperatorUse(call.name, device))
                _add(use, sizes)
    return tuple(sorted(uses.values(), key=lambda use: (-use.peak, use.name, use.device)))


def _add(use: OperatorUse, sizes: list[int]) -> None:
    now = highest = 0
    for size in sizes:
        now += size
        highest = max(highest, now)
    use.calls += 1
    use.allocated += sum(size for size in sizes if size > 0)
    use.kept += now
    use.peak = max(use.peak, highest)


def _outermost(calls: list[Event]) -> list[Event]:
    found: list[Event] = []
    for call in sorted(calls, key=lambda event: (event.start, -event.end)):
        if not found or call.start >= found[-1].end:
            found.append(call)
    return found


def _is_operator(name: str) -> bool:
    """Whether the dispatcher called it: a name such as ``aten::add``, but no step of autograd."""
    space, separator, rest = name.partition("::")
    return bool(separator) and space.isidentifier() and rest.isidentifier() and space != "autograd"


def _events(profiler: profile) -> list[Event]:
    results: Any = profiler.profiler.kineto_results if profiler.profiler else None
    if results is None:
        return []
    found = []
    for event in results.events():
        name = event.name()
        thread, start = event.start_thread_id(), event.start_ns()
        if name == _MEMORY:
            kind = str(event.device_type()).rpartition(".")[2].lower()
            device = kind if kind == "cpu" else f"{kind}:{event.device_index()}"
            found.append(Event(name, thread, start, start, event.nbytes(), device))
        elif "CPU" in str(event.device_type()):
            found.append(Event(name, thread, start, event.end_ns()))
    return found
