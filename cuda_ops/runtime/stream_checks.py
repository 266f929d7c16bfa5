"""Finds tensors that a stream uses without having waited for the stream that writes them.

torch's CUDA sanitizer does the finding. It is made to be enabled once and for all, and to stop the
program at the first error; here it is on for a block, and says what to do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.cuda import _gpu_trace

from cuda_ops.errors import StreamRaceError
from cuda_ops.runtime.frames import is_inner


@dataclass(frozen=True)
class Use:
    """One use of a tensor by an operator."""

    #: In the dispatcher: ``"cuda_ops::silu"``.
    operator: str
    #: The operator's arguments that are the tensor; empty if it is a result alone.
    arguments: tuple[str, ...]
    writes: bool
    #: The stream's handle, as in ``torch.cuda.Stream.cuda_stream``; 0 is the default stream.
    stream: int
    #: File, line and function of the innermost code outside of torch and cuda_ops.
    where: str

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        names = ", ".join(map(repr, self.arguments))
        what = f"{verb} argument {names}" if names else "makes its result"
        return f"{self.operator} {what} on {_stream(self.stream)}, {self.where}"


@dataclass(frozen=True)
class Race:
    """Two uses of a tensor, of which the later one may run before the earlier one is done."""

    later: Use
    earlier: Use

    def __str__(self) -> str:
        return (
            f"{self.later}\n"
            f"  without having waited for what comes first:\n"
            f"  {self.earlier}\n"
            f"  Between them, let the stream that is behind wait: later_stream.wait_stream("
            "earlier_stream), or wait_event with an event that the other one records."
        )


class StreamChecks:
    """What :func:`check_streams` found."""

    def __init__(self) -> None:
        #: Whether operators were checked; if not, :attr:`why_not` says why.
        self.checked = False
        self.why_not = ""
        #: Each pair of places once, in the order in which they were found.
        self.races: list[Race] = []
        self._new: list[Race] = []

    def __str__(self) -> str:
        if not self.checked:
            return f"Streams were not checked: {self.why_not}."
        return "\n\n".join(map(str, self.races)) or "No stream used a tensor too early."

    def _add(self, error: Any) -> None:
        race = Race(_use(error.current_access), _use(error.previous_access))
        self._new.append(race)
        if race not in self.races:
            self.races.append(race)

    def _take_new(self) -> list[Race]:
        new, self._new = self._new, []
        return new


@contextlib.contextmanager
def check_streams(*, raise_errors: bool = True) -> Iterator[StreamChecks]:
    """Finds tensors in the block that a stream uses before another one is done with them.

    Every operator that this thread calls is checked, torch's own and those of backward passes too.
    Without a GPU the block just runs, and ``checked`` of the result is ``False``.

    Two uses of a tensor count as in order if events or synchronization put them in order, whether
    or not this run went well. What cannot be seen: kernels that are not launched by operators of
    torch, what fills the results of ``zeros_like`` and its relatives, replays of graphs, views that
    begin at another element than the tensor they share memory with, and which GPU a default stream
    belongs to.

    At the end the operators and callbacks of torch are as before, except for one thing that torch
    cannot undo: it goes on to tell Python of each allocation, event and synchronization, where
    nothing listens any more. So use it to look for errors, not in production.

    Args:
        raise_errors: whether to raise at the operator that comes too early; if not, the result has
            everything that was found.

    Raises:
        StreamRaceError: an operator used a tensor too early, and ``raise_errors`` is true.

    >>> import torch, cuda_ops.runtime
    >>> with cuda_ops.runtime.check_streams() as found:
    ...     y = torch.ones(3).exp()
    >>> found.races
    []
    """
    found = StreamChecks()
    if not torch.cuda.is_available():
        found.why_not = "torch sees no CUDA GPU"
        yield found
        return
    torch.cuda.synchronize()  # the sanitizer has not seen the start of what still runs
    found.checked = True
    with _sanitized(found, raise_errors) as mode, mode:
        yield found


@contextlib.contextmanager
def _sanitized(found: StreamChecks, raise_errors: bool) -> Iterator[Any]:
    """Makes torch's sanitizer report here, and takes its callbacks away again."""
    mode = _mode_class()(found, raise_errors)
    try:
        yield mode
    finally:
        _silence(mode.event_handler)


@functools.cache
def _mode_class() -> Any:
    """Returns a kind of torch's mode that collects what it finds."""
    base = _sanitizer().CUDASanitizerDispatchMode

    # The base is of a module that is loaded a second time, so no type is known.
    class Mode(base):  # type: ignore[misc, valid-type]
        def __init__(self, found: StreamChecks, raise_errors: bool) -> None:
            super().__init__()
            self.found, self.raise_errors = found, raise_errors
            analyze = self.event_handler._handle_kernel_launch

            def launch(*args: Any, **kwargs: Any) -> list[Any]:
                for error in analyze(*args, **kwargs):
                    found._add(error)
                return []  # torch's mode would print them all, and lose the operator's result

            self.event_handler._handle_kernel_launch = launch

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.record_stream.default:
                # It writes nothing, though its schema says so, which torch 2.10 believes.
                return func(*args, **(kwargs or {}))
            result = super().__torch_dispatch__(func, types, args, kwargs)
            new = self.found._take_new()
            if new and self.raise_errors:
                raise StreamRaceError(new[0])
            return result

    return Mode


@functools.cache
def _sanitizer() -> ModuleType:
    """Returns a copy of torch's module, of our own.

    When it is imported, the module makes a sanitizer for ``TORCH_CUDA_SANITIZER``, which listens
    from then on, at a cost for each allocation. In the copy it can be silenced, and an import by
    others still gets one that listens.
    """
    specification = importlib.util.find_spec("torch.cuda._sanitizer")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    _silence(module.cuda_sanitizer.dispatch.event_handler)
    return module


def _silence(handler: object) -> None:
    """Takes a sanitizer's callbacks out of torch's lists of what listens to events of CUDA."""
    for registry in vars(_gpu_trace).values():
        if isinstance(registry, torch._utils.CallbackRegistry):
            # A new list: another thread may be going through the present one.
            registry.callback_list = [
                listener
                for listener in registry.callback_list
                if getattr(listener, "__self__", None) is not handler
            ]


# --- words -----------------------------------------------------------------------------


def _use(access: Any) -> Use:
    return Use(
        str(access.operator).partition("(")[0],
        tuple(access.aliases),
        access.type.name == "WRITE",
        access.stream,
        _where(access.stack_trace),
    )


def _where(stack: traceback.StackSummary) -> str:
    for frame in reversed(stack):
        if not is_inner(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "in a backward pass"  # which runs in a thread without any other code of Python


def _stream(handle: int) -> str:
    return f"stream {handle:#x}" if handle else "the default stream"
