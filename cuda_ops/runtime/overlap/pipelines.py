"""Stages that work on different items at the same time, each on a stream of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cuda_ops.errors import StageError
from cuda_ops.runtime.arguments import check_count, check_iterable, is_int
from cuda_ops.runtime.devices import checked_device
from cuda_ops.runtime.overlap.turns import (
    Event,
    Reader,
    Turn,
    Turns,
    join,
    memory_of,
    start,
)
from cuda_ops.runtime.trees import record_streams, tensors_of

Stage = Callable[[Any], Any]


def pipeline(
    stages: Sequence[Stage] | Mapping[str, Stage],
    inputs: Iterable[Any],
    depth: int = 2,
    priorities: Sequence[int] | None = None,
    device: torch.device | str | int | None = None,
) -> Iterator[Any]:
    """Returns what the stages make of each input, one stage after the other, in order.

    Each stage has a thread and a stream, on which it is called with what the stage before
    returned. A stage's stream waits for that item and for nothing else, so copies, kernels and
    work of the host for different items run at the same time. The stream that is current where a
    result is asked for waits for that result. The memory of an item is not given to others while
    a later stage may still read it.

    At most ``depth`` items are between their input and the end of their use in the loop. An
    exception of a stage or of the inputs is raised where its result would have come; nothing
    after it runs on, and a loop that ends early ends the threads.

    The gradient mode and context variables of the caller hold in the stages. Autocast belongs to
    a thread: enter it inside of a stage.

    Args:
        stages: functions of one argument, or a dict of them, whose keys name them in errors.
        inputs: any iterable; it is iterated in a thread of its own.
        depth: how many items at once, at least 1; as many as stages keep all of them busy.
        priorities: of the streams, one for each stage, lower numbers first, as
            ``torch.cuda.Stream`` takes them.
        device: the GPU of the streams; by default the current one, or the CPU where there is none.
            On a CPU the stages are called one after the other in the caller's thread.

    Raises:
        TypeError: a stage is not callable, the stages or the inputs are not iterable, or the
            priorities are no list of ints.
        ValueError: there are no stages, ``depth`` is no int of 1 or more, the number of priorities
            is not that of the stages, or ``device`` is neither a CPU nor a GPU of this machine.
        StageError: a stage raised; ``__cause__`` is what it raised.

    Example:
        >>> list(pipeline({"double": lambda x: 2 * x, "add": lambda x: x + 1}, [1, 2, 3]))
        [3, 5, 7]
    """
    named = _named(stages)
    check_iterable("pipeline", "inputs", inputs)
    check_count("pipeline", "depth", depth)
    if priorities is not None:
        _check_priorities(priorities, len(named))
    where = checked_device("pipeline", device)
    if where.type != "cuda":
        return _one_after_the_other(named, inputs)
    lines = [_Line(where, priority) for priority in priorities or [0] * len(named)]
    return _beside_each_other(named, inputs, depth, _Streams(where, lines))


def _check_priorities(priorities: object, stages: int) -> None:
    if not isinstance(priorities, Sequence) or not all(map(is_int, priorities)):
        raise TypeError(
            f"pipeline: argument 'priorities': expected a list of ints, got {priorities!r}"
        )
    if len(priorities) != stages:
        raise ValueError(
            f"pipeline: argument 'priorities': expected one for each of {stages} stages, got "
            f"{len(priorities)}"
        )


def _named(stages: Sequence[Stage] | Mapping[str, Stage]) -> dict[str, Stage]:
    check_iterable("pipeline", "stages", stages, one="[f]")
    if isinstance(stages, Mapping):
        named = {str(name): stage for name, stage in stages.items()}
    else:
        named = {
            f"{k} ({getattr(stage, '__name__', type(stage).__name__)})": stage
            for k, stage in enumerate(stages)
        }
    if not named:
        raise ValueError("pipeline: argument 'stages': expected at least one, got none")
    for name, stage in named.items():
        if not callable(stage):
            raise TypeError(
                f"pipeline: stage {name}: expected a function of one argument, got "
                f"{type(stage).__name__}"
            )
    return named


def _one_after_the_other(stages: Mapping[str, Stage], inputs: Iterable[Any]) -> Iterator[Any]:
    for number, item in enumerate(inputs):
        for name, stage in stages.items():
            item = _called(name, stage, item, number)
        yield item


def _called(name: str, stage: Stage, item: Any, number: int) -> Any:
    try:
        return stage(item)
    except Exception as error:
        raise StageError(
            f"pipeline: stage {name}, item {number}: {type(error).__name__}: {_text(error)}"
        ) from error


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception as raised:
        return f"its text raises {type(raised).__name__}"


class _Line:
    """The stream of one stage."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)

    def run(self, stage: Stage, item: Any, ready: Any) -> tuple[Any, Event]:
        """Returns what a stage returns, and an event behind its work."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            record_streams(item, self._stream)
            return stage(item), self._stream.record_event()


class _Streams(Reader):
    """The streams of all stages; a test has others."""

    def __init__(self, device: torch.device, lines: Sequence[_Line]) -> None:
        super().__init__(device)
        self.lines = lines

    def fed(self) -> Event:
        """Returns an event behind what the inputs' thread has put on the GPU."""
        event: Event = torch.cuda.current_stream(self._device).record_event()
        return event


class _Turn(Turn):
    """The turn of an item, over once the loop's stream has done with it too.

    The stages take memory as they like, on streams of their own, and ``record_stream`` keeps what
    crosses until the GPU is done. If the host did not wait for that, items would be started
    beside memory that nothing can use yet, and more of it would be taken than for ``depth`` items.
    """

    consumed: Event | None = None

    def ending(self) -> None:
        if self.reader is not None:
            self.consumed = self.reader.record_event()

    def wait(self) -> None:
        super().wait()
        if self.consumed is not None:
            self.consumed.synchronize()


@dataclass
class _Item:
    """What goes from stage to stage: in a box, so that nothing else holds it."""

    number: int
    box: list[Any]
    ready: Event
    turn: _Turn


#: What follows the last item: an exception, or nothing.
_End = BaseException | None


def _beside_each_other(
    stages: Mapping[str, Stage], inputs: Iterable[Any], depth: int, streams: _Streams
) -> Iterator[Any]:
    run = _Run(stages, inputs, depth, streams)
    try:
        yield from run
    finally:
        run.close()


class _Run:
    """A thread for the inputs, one for each stage, and the loop that receives results."""

    def __init__(
        self, stages: Mapping[str, Stage], inputs: Iterable[Any], depth: int, streams: _Streams
    ) -> None:
        self._inputs, self._depth, self._streams = inputs, depth, streams
        #: The loop takes no more; or a stage has failed, and only what is ahead of it goes on.
        self._ended, self._failed = threading.Event(), threading.Event()
        self._turns: list[_Turn | None] = [None] * depth
        self._queues: list[queue.SimpleQueue[_Item | _End]]
        self._queues = [queue.SimpleQueue() for _ in range(len(stages) + 1)]
        self._threads = [start(self._feed, "pipeline.inputs")]
        for k, (name, stage) in enumerate(stages.items()):
            work = self._stage_work(name, stage, k)
            self._threads.append(start(work, f"pipeline.{name}"))

    def _feed(self) -> None:
        error: _End = None
        inputs: Any = None
        try:
            inputs = iter(self._inputs)
            for number, item in enumerate(inputs):
                before = self._turns[number % self._depth]
                if before is not None:
                    before.wait()
                if self._ended.is_set() or self._failed.is_set():
                    break
                turn = _Turn()
                self._turns[number % self._depth] = turn
                box, item = [item], None
                self._queues[0].put(_Item(number, box, self._streams.fed(), turn))
        except BaseException as raised:
            error = raised
        try:
            if hasattr(inputs, "close"):  # a generator, which has to end in its own thread
                inputs.close()
        except BaseException as raised:
            error = raised
        self._queues[0].put(error)

    def _stage_work(self, name: str, stage: Stage, k: int) -> Callable[[], None]:
        line, taken, given = self._streams.lines[k], self._queues[k], self._queues[k + 1]

        def work() -> None:
            end: _End = None
            while isinstance(item := taken.get(), _Item) and not self._ended.is_set():
                number = item.number

                def call(value: Any, number: int = number) -> Any:
                    return _called(name, stage, value, number)

                try:
                    made, item.ready = line.run(call, item.box.pop(), item.ready)
                except BaseException as raised:
                    end = raised
                    break
                item.box.append(made)
                made = None
                given.put(item)
            else:
                end = None if isinstance(item, _Item) else item
            if end is not None:
                self._failed.set()
            given.put(end)

        return work

    def __iter__(self) -> Iterator[Any]:
        turns = Turns(self._depth)
        while True:
            turns.requested()
            item = self._queues[-1].get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            item.turn.reader = self._streams.receive(item.ready, item.box[0])
            item.turn.release_after(memory_of(tensors_of(item.box[0])))
            turns.begin(item.turn)
            box, item = item.box, None
            yield box.pop()

    def close(self) -> None:
        """Ends the threads; results that nothing asked for are dropped."""
        self._ended.set()
        join(self._threads, self._let_go, "pipeline: a stage or the inputs")

    def _let_go(self) -> None:
        for turn in self._turns:
            if turn is not None:
                turn.release()
