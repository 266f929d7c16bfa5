"""A function that becomes a CUDA graph for each kind of arguments."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from cuda_ops.errors import GraphError
from cuda_ops.runtime.arguments import check_count, check_flag
from cuda_ops.runtime.devices import resolved
from cuda_ops.runtime.graphs.calls import Call, Key, Training
from cuda_ops.runtime.graphs.captures import Capture, Refusal
from cuda_ops.runtime.graphs.in_turn import InTurn
from cuda_ops.runtime.graphs.places import Tensors
from cuda_ops.runtime.trees import record_streams, tensors_of


def graphed(
    function: Callable[..., Any] | None = None,
    *,
    warmup: int = 2,
    most: int = 16,
    views: bool = False,
    fallback: bool = False,
) -> Any:
    """Returns the function as CUDA graphs: one for each kind of arguments, made at its first calls.

    A kind is the shapes, strides, dtypes, device and ``requires_grad`` of the tensors, the values
    of all other arguments, the gradient mode, autocast, and what a module's parts and parameters
    say of training. The first ``warmup`` calls of a kind run as they are, on a side stream unless
    they train a module; a leaf that wants a gradient reaches the function as a view there. The next
    call is captured, and it and all later ones are replayed. So each call has its effects once, on
    what it writes and on random numbers, which go on from replay to replay. Arguments are copied
    into memory of the graph, what the function writes to them is copied back, and results are
    copies that may be kept.

    Gradients go through: the backward is a graph too, and parameters that the function reads
    beside its arguments get theirs. A call whose backward has not run yet is not disturbed by the
    next one, which gets a graph of its own. Second derivatives are not there.

    A replay repeats what the GPU did. What Python did is not done again: what the function reads
    beside its arguments has to stay where it is in memory, and a branch that was taken stays
    taken. Within another capture or under ``torch.compile`` the function is called as it is, and
    on a machine without a GPU too. Operators that are reloaded are captured again.

    A method is a function of its object, which is one of the other arguments and needs a hash: each
    object has graphs of its own, which keep it and do not see attributes that change. For a method
    of an ``nn.Module``, graph the module. A copy of what is returned begins without graphs.

    Args:
        function: takes and returns tensors of one GPU, in any nesting, and other values; with
            ``nn.Module`` its parameters must not be replaced. Without it, a decorator is returned.
        warmup: how many calls of a kind run before it is captured, at least 1.
        most: how many graphs are kept; the one that was not used for longest goes first.
        views: whether results are the graph's own memory, which its next replay overwrites. It
            saves a copy.
        fallback: whether what cannot be captured is called as it is, with one warning, instead of
            raising.

    Raises:
        TypeError: ``function`` is not callable, or ``views`` or ``fallback`` is no bool; and where
            the result is taken from an ``nn.Module`` as a method.
        ValueError: ``warmup`` or ``most`` is less than 1.
        GraphError: at a call: a kind cannot be captured, and why: an argument on a CPU, a wait for
            the GPU, results that change their shapes from call to call, and what CUDA refuses. A
            call that shows this as it runs has had its effects.

    Example:
        >>> step = graphed(lambda x, scale: torch.relu(x) * scale)
        >>> step(torch.tensor([-1.0, 2.0]), 3)
        tensor([0., 6.])
    """
    check_count("graphed", "warmup", warmup)
    check_count("graphed", "most", most)
    check_flag("graphed", "views", views)
    check_flag("graphed", "fallback", fallback)
    if function is None:
        return functools.partial(graphed, warmup=warmup, most=most, views=views, fallback=fallback)
    if not callable(function):
        raise TypeError(
            f"graphed: argument 'function': expected a function, got {type(function).__name__}"
        )
    return Graphed(function, warmup, most, views, fallback)


@dataclass
class _Kind:
    """What is known of one kind of arguments."""

    key: Key
    calls: int = 0
    #: Shapes of the results of the calls before the capture.
    shapes: list[tuple[int, ...]] | None = None
    captures: list[Any] = field(default_factory=list)
    #: Why it cannot be captured, once that is known.
    refused: str = ""


#: Calls of one kind at the same time, each with a graph of its own; what goes beyond runs eagerly.
_MOST_BUSY = 4
#: Kinds that are known at once, for each graph that is kept.
_KINDS_PER_GRAPH = 8


class Graphed:
    """What :func:`graphed` returns."""

    def __init__(
        self, function: Callable[..., Any], warmup: int, most: int, views: bool, fallback: bool
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._warmup, self._most = warmup, most
        self._views, self._fallback = views, fallback
        self._kinds: OrderedDict[Key, _Kind] = OrderedDict()
        #: The one that was used last, which is the last of these.
        self._recent: _Kind | None = None
        self._lock = threading.RLock()
        self._module = function if isinstance(function, torch.nn.Module) else None
        self._training = Training(self._module) if self._module is not None else None
        #: By device: the graphs' memory, the stream of captures, and the order of replays, which
        #: graphs that share memory need, and those that draw random numbers.
        self._pools: dict[torch.device, Any] = {}
        self._streams: dict[torch.device, Any] = {}
        self._in_turn: dict[torch.device, InTurn] = {}
        #: Calls that are on the stream of the captures, outside of the lock.
        self._warming = 0

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds to an object where the function itself does, as a method."""
        if instance is None or not hasattr(type(self._function), "__get__"):
            return self
        if isinstance(instance, torch.nn.Module):
            # As an argument it has one hash in training and out of it.
            raise TypeError(
                f"graphed: {self._name}: expected a function, or a method of an object that is no "
                f"nn.Module, got one of {type(instance).__name__}; call graphed(module) instead"
            )
        return types.MethodType(self, instance)

    def __reduce__(self) -> tuple[Any, ...]:
        # Graphs belong to this process and to the parameters at their places.
        given = self._function, self._warmup, self._most, self._views, self._fallback
        return type(self), given

    @property
    def graphs(self) -> int:
        """How many graphs there are."""
        return sum(len(kind.captures) for kind in self._kinds.values())

    @property
    def refusals(self) -> list[str]:
        """Why kinds of arguments were not captured."""
        return [kind.refused for kind in self._kinds.values() if kind.refused]

    def reset(self) -> None:
        """Forgets all graphs, so that the next calls warm up and are captured again."""
        with self._lock:
            while self._kinds:
                self._drop_oldest()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _captures():
            return self._function(*args, **kwargs)
        call = Call(self._function, args, kwargs)
        device = _device(call.tensors)
        read = self._training.key() if self._training is not None else ()
        return self._called(call, device, (device, *call.key(), *read))

    def _called(self, call: Call, device: torch.device, key: Key) -> Any:
        tensors, capture = call.tensors, None
        with self._lock:
            kind = self._kind(key)
            try:
                if kind.refused:
                    raise Refusal(kind.refused)
                if not kind.calls:
                    _check_devices(tensors, device)
                warms = kind.calls < self._warmup
                kind.calls += warms
                self._warming += warms
                watched = warms and kind.calls == self._warmup
                if not warms:
                    capture = self._free(kind, call, tensors, device)
                    if capture is not None:
                        return capture.replay(tensors, self._views)
            except Refusal as refusal:
                self._refuse(kind, refusal)
        # Not under the lock: the function may call us, in a thread of autograd too.
        if kind.refused or not warms:
            return call(tensors)
        # A parameter's gradient waits for the stream on which it was first read, as long as any
        # result is there: that must be the stream of the calls to come.
        here = self._module is not None and torch.is_grad_enabled()
        try:
            with _waits(watched) as waits:
                result = call(tensors) if here else _aside(call, tensors, self._stream(device))
        finally:
            with self._lock:
                self._warming -= 1
        with self._lock:
            if why := _why_not(kind, result, waits):
                self._refuse(kind, Refusal(why))
        return result

    def _kind(self, key: Key) -> _Kind:
        kind = self._recent
        if kind is not None and kind.key == key:  # without its hash, which takes longer
            return kind
        if (kind := self._kinds.get(key)) is not None:
            self._kinds.move_to_end(key)
        else:
            kind = self._kinds[key] = _Kind(key)
            self._forget()
        self._recent = kind
        return kind

    def _free(self, kind: _Kind, call: Call, tensors: Tensors, device: torch.device) -> Any:
        """Returns a capture that no backward waits for; ``None`` if there are too many others, or
        a call of another thread is on the stream of the captures, which would be recorded.
        """
        for capture in kind.captures:
            if not capture.busy:
                return capture
        if self._warming or len(kind.captures) >= _MOST_BUSY:
            return None
        capture = self._captured(call, tensors, device)
        kind.captures.append(capture)
        self._forget()
        return capture

    def _captured(self, call: Call, tensors: Tensors, device: torch.device) -> Any:
        own: Callable[[Tensors], Any] = call
        stands_for: dict[int, torch.Tensor] = {}
        if (module := self._module) is not None:
            # In the same memory, and without what earlier calls keep: a node of autograd that waits
            # on another stream, which no capture may do.
            aliases = {
                name: one.detach().requires_grad_(one.requires_grad)
                for name, one in module.named_parameters()
            }
            stands_for = {id(aliases[name]): one for name, one in module.named_parameters()}

            def called(*args: Any, **kwargs: Any) -> Any:
                return torch.func.functional_call(module, aliases, args, kwargs)

            own = functools.partial(call, function=called)
        # What a forward saves, and what is returned as it is, other graphs must not overwrite.
        alone = torch.is_grad_enabled() or self._views
        if not alone and device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
        pool = torch.cuda.graph_pool_handle() if alone else self._pools[device]
        in_turn = self._in_turn.setdefault(device, InTurn(device))
        try:
            with torch.cuda.device(device):
                return Capture(own, tensors, pool, self._stream(device), in_turn, stands_for)
        except Refusal:
            self._pools.pop(device, None)  # one whose capture failed cannot be used again
            raise

    def _refuse(self, kind: _Kind, refusal: Refusal) -> None:
        text = f"graphed: {self._name}: cannot be captured: {refusal}"
        first, kind.refused = not kind.refused, str(refusal)
        if not self._fallback:
            raise GraphError(f"{text}; fallback=True calls it as it is") from refusal.__cause__
        if first:
            warnings.warn(f"{text}; it is called as it is", RuntimeWarning, stacklevel=4)

    def _forget(self) -> None:
        """Drops what was not used for longest: graphs, and kinds that never got one."""
        while len(self._kinds) > 1 and (
            self.graphs > self._most or len(self._kinds) > _KINDS_PER_GRAPH * self._most
        ):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, kind = self._kinds.popitem(last=False)
        if kind is self._recent:
            self._recent = None
        for capture in kind.captures:
            capture.in_turn.synchronize()  # its memory goes with it
        if not self.graphs:
            self._pools.clear()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


# --- what a call is -----------------------------------------------------------


_has_gpu = functools.cache(torch.cuda.is_available)


def _captures() -> bool:
    """Returns whether there is a GPU, whose current stream is not being captured already."""
    return _has_gpu() and not torch.cuda.is_current_stream_capturing()


def _device(tensors: Tensors) -> torch.device:
    """Returns the GPU of the first tensor on one; without any, the current one."""
    for tensor in tensors:
        if tensor.is_cuda:
            return tensor.device
    return resolved("cuda")


def _check_devices(tensors: Tensors, device: torch.device) -> None:
    for tensor in tensors:
        shown = f"a tensor of shape {tuple(tensor.shape)} among the arguments"
        if tensor.device != device:
            raise Refusal(f"{shown} is on {tensor.device}, and a graph runs on {device} alone")
        if tensor.layout != torch.strided:
            raise Refusal(
                f"{shown} has layout {tensor.layout}, and a graph needs memory of its own"
            )


def _why_not(kind: _Kind, result: Any, waits: list[str]) -> str:
    """Returns what a call that ran as it is has shown against a capture."""
    if waits:
        return f"it waits for the GPU at {waits[0]}"
    shapes = [tuple(tensor.shape) for tensor in tensors_of(result)]
    before, kind.shapes = kind.shapes, shapes
    if before not in (None, shapes):
        return f"its results change from call to call: shapes {before} before, {shapes} now"
    return ""


def _aside(call: Callable[[Tensors], Any], tensors: Tensors, stream: Any) -> Any:
    """Calls on a side stream, between what the current one had and will have to do."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    given = [_on_this_stream(tensor) for tensor in tensors]
    with torch.cuda.stream(stream):
        result = call(given)
    current.wait_stream(stream)
    record_streams(result, current)
    return result


def _on_this_stream(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor; in place of a leaf that wants a gradient, a view of it.

    What adds to a leaf's gradient belongs to the stream on which the leaf was first read, and stays
    there as long as any result does. A view is read elsewhere, and the leaf on the current stream.
    """
    if tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled():
        return tensor.view_as(tensor)
    return tensor


#: What torch says, at the line of the user, where a call makes the host wait.
_WAITS = "called a synchronizing"


#: Held by the one thread that changes how the process warns.
_watching = threading.Lock()


@contextlib.contextmanager
def _waits(watched: bool) -> Iterator[list[str]]:
    """Yields where the body makes the host wait for the GPU, which torch warns of if it is asked.

    Only the last call before a capture is watched: the first may wait while it loads a library.
    """
    found: list[str] = []
    if not watched or not _watching.acquire(blocking=False):
        yield found
        return
    try:
        with _noted(found):
            yield found
    finally:
        _watching.release()


class _Late:
    """Stands for the pattern of a filter of warnings: matches the warning of a wait that another
    thread began while a call was watched, and that is told once nothing is.
    """

    def match(self, text: str) -> bool:
        return _WAITS in text and torch.cuda.get_sync_debug_mode() == 0


_LATE: Any = ("ignore", _Late(), UserWarning, None, 0)


@contextlib.contextmanager
def _noted(found: list[str]) -> Iterator[None]:
    # The mode is that of all threads, and so are the filters below, which end with it.
    if _LATE not in warnings.filters:
        cast(Any, warnings.filters).insert(0, _LATE)
    mine, before = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(
            message: Any,
            category: Any,
            filename: str,
            lineno: int,
            file: Any = None,
            line: Any = None,
        ) -> None:
            if _WAITS not in str(message):
                show(message, category, filename, lineno, file, line)
            elif threading.get_ident() == mine:  # other threads may wait
                found.append(f"{filename}:{lineno}")

        warnings.filterwarnings("always", message=f".*{_WAITS}")
        # Said once of the mode itself.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
