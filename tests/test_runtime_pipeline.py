"""Tests of pipeline: its threads with streams that a test makes up, and on a GPU."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import needs_gpu

from cuda_ops.errors import StageError
from cuda_ops.runtime import pipeline
from cuda_ops.runtime.overlap.pipelines import _beside_each_other


class FakeEvent:
    def synchronize(self) -> None:
        pass


class FakeReader:
    def record_event(self) -> FakeEvent:
        return FakeEvent()


class FakeLine:
    def run(self, stage: Any, item: Any, ready: FakeEvent) -> tuple[Any, FakeEvent]:
        return stage(item), FakeEvent()


class FakeStreams:
    """Has no streams: what a stage returns is there."""

    def __init__(self, count: int) -> None:
        self.lines = [FakeLine()] * count

    def fed(self) -> FakeEvent:
        return FakeEvent()

    def receive(self, ready: FakeEvent, shared: Any = None) -> FakeReader:
        return FakeReader()


def in_threads(stages: Any, inputs: Any, depth: int = 2) -> Iterator[Any]:
    named = {f"stage{k}": stage for k, stage in enumerate(stages)}
    return _beside_each_other(named, inputs, depth, FakeStreams(len(named)))


def left() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("cuda_ops.pipeline")]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_results_come_in_order(depth: int) -> None:
    def uneven(x: int) -> int:
        time.sleep(0.002 * (x % 3))
        return 2 * x

    assert list(in_threads([uneven, lambda x: x + 1], range(20), depth)) == [
        2 * x + 1 for x in range(20)
    ]
    assert left() == []


def test_stages_work_at_the_same_time() -> None:
    """The stages meet: one after the other, the first would wait for ever."""
    meeting = threading.Barrier(2, timeout=20)

    def meet(x: int) -> int:
        meeting.wait()
        return x

    # The last item has no partner in the first stage, nor the first one in the second.
    first = lambda x: meet(x) if x > 0 else x  # noqa: E731
    second = lambda x: meet(x) if x < 5 else x  # noqa: E731
    assert list(in_threads([first, second], range(6), 3)) == list(range(6))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_more_items_than_depth_are_on_their_way(depth: int) -> None:
    there, most = set(), 0

    def begin(x: int) -> torch.Tensor:
        nonlocal most
        there.add(x)
        most = max(most, len(there))
        return torch.tensor(x)

    for x in in_threads([begin, lambda x: x], range(12), depth):
        time.sleep(0.003)
        there.remove(x.item())
    assert most == depth


def test_an_exception_names_the_stage_and_comes_in_its_place() -> None:
    def fails(x: int) -> int:
        if x == 3:
            raise KeyError("missing")
        return x

    loop = in_threads([lambda x: x, fails, lambda x: x], range(10), 4)
    assert [next(loop) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StageError, match="stage stage1, item 3: KeyError: 'missing'") as raised:
        next(loop)
    assert isinstance(raised.value.__cause__, KeyError)
    assert left() == []


def test_an_exception_whose_text_raises_names_the_stage() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise KeyError("text")

    def fails(x: int) -> int:
        raise SilentError

    expected = "stage fails, item 0: SilentError: its text raises KeyError"
    with pytest.raises(StageError, match=expected) as raised:
        list(pipeline({"fails": fails}, [1], device="cpu"))
    assert isinstance(raised.value.__cause__, SilentError)


def test_an_exception_of_the_inputs_comes_as_it_is() -> None:
    def inputs() -> Iterator[int]:
        yield 1
        raise OSError("disk")

    loop = in_threads([lambda x: x], inputs())
    assert next(loop) == 1
    with pytest.raises(OSError, match="disk"):
        next(loop)


def test_an_early_end_ends_all_threads_and_the_inputs() -> None:
    closed = []

    def inputs() -> Iterator[int]:
        try:
            yield from range(1000)
        finally:
            closed.append(threading.current_thread().name)

    for x in in_threads([lambda x: x, lambda x: x], inputs(), 3):
        if x == 2:
            break
    assert closed == ["cuda_ops.pipeline.inputs"]
    assert left() == []


def test_the_gradient_mode_holds_in_the_stages() -> None:
    with torch.no_grad():
        assert list(in_threads([lambda x: torch.is_grad_enabled()], [0])) == [False]
    assert list(in_threads([lambda x: torch.is_grad_enabled()], [0])) == [True]


# --- the public function ------------------------------------------------------


def test_on_a_cpu_stages_are_called_in_the_callers_thread() -> None:
    names = list(pipeline([lambda x: threading.current_thread().name], range(2), device="cpu"))
    assert set(names) == {threading.current_thread().name}
    with pytest.raises(StageError, match=r"stage 0 \(float\), item 1: ValueError"):
        list(pipeline([float], ["1", "one"], device="cpu"))


@pytest.mark.parametrize(("stages", "options", "error", "text"), [
    ([], {}, ValueError, "argument 'stages': expected at least one, got none"),
    ({"a": 3}, {}, TypeError, "stage a: expected a function of one argument, got int"),
    ([abs], {"depth": 0}, ValueError, "argument 'depth': expected an int of 1 or more, got 0"),
    ([abs], {"priorities": [1, 2]}, ValueError, "expected one for each of 1 stages, got 2"),
    (int, {}, TypeError, r"'stages': expected an iterable, got type; write \[f\] for one"),
    (None, {}, TypeError, "^pipeline: argument 'stages': expected an iterable, got NoneType$"),
    ([abs], {"priorities": 0}, TypeError, "'priorities': expected a list of ints, got 0"),
    ([abs], {"priorities": "a"}, TypeError, "'priorities': expected a list of ints, got 'a'"),
    ([abs], {"priorities": [1.5]}, TypeError, r"expected a list of ints, got \[1.5\]"),
    ([abs], {"device": "mps"}, ValueError, "^pipeline: argument 'device': .* got 'mps'"),
    ([abs], {"device": "cuda:99"}, ValueError, "^pipeline: argument 'device': .*, and torch sees"),
])  # fmt: skip
def test_wrong_arguments_are_named(stages: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        pipeline(stages, [], **options)
    with pytest.raises(TypeError, match="argument 'inputs': expected an iterable, got int"):
        pipeline([abs], 3)


# --- on a GPU -----------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("priorities", [None, [0, -1, 0]])
def test_items_are_right_behind_slow_stages(priorities: list[int] | None) -> None:
    from cuda_ops.testing.stall import stall

    def slowly(change: Any) -> Any:
        def stage(x: torch.Tensor) -> torch.Tensor:
            stall(0.003)
            return change(x)

        return stage

    stages = {
        "copy": slowly(lambda x: x.to("cuda", non_blocking=True)),
        "double": slowly(lambda x: x * 2),
        "add": slowly(lambda x: x + 1),
    }
    inputs = (torch.full((1 << 18,), float(k)).pin_memory() for k in range(20))
    found = [x.mean() for x in pipeline(stages, inputs, depth=3, priorities=priorities)]
    assert torch.stack(found).tolist() == [2.0 * k + 1 for k in range(20)]


@needs_gpu
@pytest.mark.parametrize("taken_out", ["wait_event", "record_stream"])
def test_without_one_of_its_rules_items_are_wrong(
    taken_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda_ops.runtime.overlap import pipelines
    from cuda_ops.testing.stall import stall

    if taken_out == "record_stream":
        monkeypatch.setattr(pipelines, "record_streams", lambda item, stream: None)
    else:
        run = pipelines._Line.run

        def without(self: Any, stage: Any, item: Any, ready: Any) -> Any:
            self._stream.wait_event = lambda event: None
            return run(self, stage, item, ready)

        monkeypatch.setattr(pipelines._Line, "run", without)

    def late(x: torch.Tensor) -> torch.Tensor:
        stall(0.02)
        return x * 1

    def now(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    inputs = (torch.full((1 << 18,), float(k), device="cuda") for k in range(20))
    waits = taken_out == "wait_event"
    stages = {"first": late, "second": now} if waits else {"first": now, "second": late}
    with torch.cuda.stream(torch.cuda.Stream()):  # not the one that makes inputs
        results = [x.mean() for x in pipeline(stages, inputs, depth=4)]
        found = torch.stack(results).tolist()
    assert found != [float(k) for k in range(20)]


@needs_gpu
def test_memory_is_bounded() -> None:
    size = 16 << 20
    gc.collect()  # what other tests left would be freed meanwhile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stages = [lambda k: torch.full((size // 4,), float(k), device="cuda"), lambda x: x.add_(1)]
    for k, x in enumerate(pipeline(stages, range(20), depth=3)):
        assert x[0] == k + 1
    del x
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 3 * size + (1 << 20)
    assert torch.cuda.memory_allocated() == before
