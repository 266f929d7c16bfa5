"""Streams that use a tensor too early are found, and torch is left as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_gpu, needs_no_gpu
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import cuda_ops
from cuda_ops.runtime import check_streams
from cuda_ops.runtime.frames import is_inner
from cuda_ops.runtime.stream_checks import StreamChecks, StreamRaceError, _sanitized

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "runtime" / "check_streams.py"
SILU = "cuda_ops::silu(Tensor x) -> Tensor"
ADD_ = "aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)"


def _listeners() -> dict[str, list[Any]]:
    return {
        name: list(value.callback_list)
        for name, value in vars(_gpu_trace).items()
        if hasattr(value, "callback_list")
    }


def _fire(registry: str, *values: int) -> None:
    getattr(_gpu_trace, f"{registry}Callbacks").fire_callbacks(*values)


# --- events by hand --------------------------------------------------------------------


@pytest.fixture
def found() -> StreamChecks:
    found = StreamChecks()
    found.checked = True
    return found


@pytest.fixture
def handler(found: StreamChecks) -> Iterator[Any]:
    with _sanitized(found, raise_errors=False) as mode:
        yield mode.event_handler


def _silu(handler: Any, stream: int, x: int, out: int) -> list[Any]:
    launched: list[Any] = handler._handle_kernel_launch(
        stream, {x}, {out}, {out}, SILU, {x: ["x"], out: []}
    )
    return launched


def _add_(handler: Any, stream: int, x: int) -> None:
    handler._handle_kernel_launch(stream, set(), {x}, {x}, ADD_, {x: ["self"]})


def test_a_read_before_the_write_is_done(handler: Any, found: StreamChecks) -> None:
    _silu(handler, 1, 100, 200)
    _silu(handler, 2, 200, 300)
    (race,) = found.races
    assert race.later.operator == race.earlier.operator == "cuda_ops::silu"
    assert race.later.arguments == ("x",) and not race.later.writes and race.later.stream == 2
    assert race.earlier.arguments == () and race.earlier.writes and race.earlier.stream == 1
    assert race.later.where.startswith(f"{__file__}:") and race.later.where.endswith("in _silu")


def test_a_write_before_a_read_is_done(handler: Any, found: StreamChecks) -> None:
    _silu(handler, 1, 100, 200)
    _add_(handler, 2, 100)
    (race,) = found.races
    assert race.later.operator == "aten::add_.Tensor" and race.later.writes
    assert race.earlier.arguments == ("x",) and not race.earlier.writes


def test_two_writes(handler: Any, found: StreamChecks) -> None:
    _add_(handler, 1, 100)
    _add_(handler, 0, 100)
    (race,) = found.races
    assert race.later.writes and race.earlier.writes
    assert "on the default stream" in str(race) and "on stream 0x1" in str(race)


@pytest.mark.parametrize("how", ["event", "device", "stream", "host waits for event"])
def test_no_race_after_waiting(handler: Any, found: StreamChecks, how: str) -> None:
    """The events come the way of torch's own, through its lists of listeners."""
    _silu(handler, 1, 100, 200)
    if "event" in how:
        _fire("EventCreation", 7)
        _fire("EventRecord", 7, 1)
    if how == "event":
        _fire("EventWait", 7, 2)
    elif how == "device":
        _fire("DeviceSynchronization")
    elif how == "stream":
        _fire("StreamSynchronization", 1)
    else:
        _fire("EventSynchronization", 7)
    _silu(handler, 2, 200, 300)
    assert found.races == []
    assert str(found) == "No stream used a tensor too early."


def test_an_event_recorded_before_the_write_orders_nothing(
    handler: Any, found: StreamChecks
) -> None:
    _fire("EventCreation", 7)
    _fire("EventRecord", 7, 1)
    _silu(handler, 1, 100, 200)
    _fire("EventWait", 7, 2)
    _silu(handler, 2, 200, 300)
    assert len(found.races) == 1


def test_memory_that_was_freed_and_allocated_again_is_another_tensor(
    handler: Any, found: StreamChecks
) -> None:
    _fire("MemoryAllocation", 200)
    _silu(handler, 1, 100, 200)
    _fire("MemoryDeallocation", 200)
    _fire("MemoryAllocation", 200)
    _silu(handler, 2, 200, 300)
    assert found.races == []


def test_a_pair_of_places_is_listed_once(handler: Any, found: StreamChecks) -> None:
    for x in (100, 1100, 2100):
        _silu(handler, 1, x, x + 1)
        _silu(handler, 2, x + 1, x + 2)
    assert len(found.races) == 1


def test_an_error_says_what_to_do(handler: Any, found: StreamChecks) -> None:
    _silu(handler, 1, 100, 200)
    _silu(handler, 2, 200, 300)
    error = StreamRaceError(found.races[0])
    text = str(error)
    assert text.startswith("check_streams: cuda_ops::silu reads argument 'x' on stream 0x2, ")
    assert "cuda_ops::silu makes its result on stream 0x1, " in text
    assert "wait_stream" in text
    assert error.race == found.races[0]


# --- operators, on streams that are stood in for ----------------------------------------


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Lets the sanitizer take CPU tensors for those of a GPU; returns the present stream."""
    now = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    return now


def _on_two_streams(streams: SimpleNamespace) -> torch.Tensor:
    x = torch.ones(4)
    y = cuda_ops.silu(x)
    streams.cuda_stream = 2
    z: torch.Tensor = cuda_ops.relu(y)
    return z


def test_our_operators_are_named(streams: SimpleNamespace) -> None:
    with check_streams(raise_errors=False) as found:
        z = _on_two_streams(streams)
    assert found.checked and z.shape == (4,)
    (race,) = found.races
    assert race.later.operator == "cuda_ops::relu" and race.later.arguments == ("x",)
    assert race.earlier.operator == "cuda_ops::silu" and race.earlier.arguments == ()
    assert race.later.where.endswith("in _on_two_streams")
    assert race.earlier.where.endswith("in _on_two_streams")


def test_the_operator_that_comes_too_early_raises(streams: SimpleNamespace) -> None:
    before = _listeners()
    early = pytest.raises(StreamRaceError, match="cuda_ops::relu reads argument 'x'")
    with early, check_streams():
        _on_two_streams(streams)
    assert _listeners() == before
    assert _get_current_dispatch_mode_stack() == []


def test_a_gradient_is_checked(streams: SimpleNamespace) -> None:
    x = torch.ones(4, requires_grad=True)
    with check_streams(raise_errors=False) as found:
        y = cuda_ops.silu(x)
        streams.cuda_stream = 2
        y.backward(torch.ones(4))
        streams.cuda_stream = 3
        assert x.grad is not None
        x.grad.mul_(2)
    later = {race.later.operator for race in found.races}
    assert "aten::mul_.Tensor" in later
    (race,) = (race for race in found.races if race.later.operator == "aten::mul_.Tensor")
    assert race.earlier.operator == "cuda_ops::silu_backward"


def test_blocks_may_be_nested_and_repeated(streams: SimpleNamespace) -> None:
    before = _listeners()
    for _ in range(2):
        streams.cuda_stream = 1
        with check_streams(raise_errors=False) as outer, check_streams(raise_errors=False) as inner:
            _on_two_streams(streams)
        assert len(outer.races) == len(inner.races) == 1
    assert _listeners() == before


def test_an_error_of_the_block_is_passed_on(streams: SimpleNamespace) -> None:
    before = _listeners()
    with pytest.raises(KeyError), check_streams():
        raise KeyError("x")
    assert _listeners() == before
    assert _get_current_dispatch_mode_stack() == []


def test_the_sanitizer_of_torch_still_listens_when_it_is_imported_later() -> None:
    """Ours is a copy: silencing it must not silence the one that a user turns on."""
    code = """
import torch
from torch.cuda import _gpu_trace
from cuda_ops.runtime.stream_checks import StreamChecks, _sanitized
with _sanitized(StreamChecks(), False):
    print(len(_gpu_trace.EventWaitCallbacks.callback_list))
print(len(_gpu_trace.EventWaitCallbacks.callback_list))
import torch.cuda._sanitizer as theirs
(listener,) = _gpu_trace.EventWaitCallbacks.callback_list
print(listener.__self__ is theirs.cuda_sanitizer.dispatch.event_handler)
with _sanitized(StreamChecks(), False):
    print(len(_gpu_trace.EventWaitCallbacks.callback_list))
print(_gpu_trace.EventWaitCallbacks.callback_list == [listener])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0", "True", "2", "True"]


# --- without a GPU, and with one ---------------------------------------------------------


@needs_no_gpu
def test_without_a_gpu_the_block_runs_and_says_so() -> None:
    before = _listeners()
    with check_streams() as found:
        y = cuda_ops.silu(torch.zeros(3))
    assert torch.equal(y, torch.zeros(3))
    assert not found.checked and found.races == []
    assert found.why_not == "torch sees no CUDA GPU"
    assert str(found) == "Streams were not checked: torch sees no CUDA GPU."
    assert _listeners() == before


def test_the_example_runs() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    gpu = torch.cuda.is_available()
    assert ("reads argument 'x'" if gpu else "Streams were not checked") in done.stdout


def test_the_generated_name_of_a_function_is_no_place() -> None:
    """An operator's file name, such as that of the function in the stack of a real call."""
    code = cuda_ops.silu.__code__.co_filename
    assert is_inner(code)


@needs_gpu
def test_a_planted_race_on_a_gpu() -> None:
    before = _listeners()
    x = torch.ones(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    with check_streams(raise_errors=False) as found:
        y = cuda_ops.silu(x)
        with torch.cuda.stream(side):
            z = cuda_ops.relu(y)
    torch.cuda.synchronize()
    assert z.shape == x.shape
    (race,) = found.races
    assert race.later.operator == "cuda_ops::relu" and race.later.stream == side.cuda_stream
    assert race.earlier.operator == "cuda_ops::silu"
    assert race.earlier.stream == torch.cuda.default_stream().cuda_stream
    assert race.later.where.startswith(f"{__file__}:")
    assert _listeners() == before


@needs_gpu
def test_a_planted_race_raises_on_a_gpu() -> None:
    x = torch.ones(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    early = pytest.raises(StreamRaceError, match="cuda_ops::relu reads argument 'x'")
    with early, check_streams():
        y = cuda_ops.silu(x)
        with torch.cuda.stream(side):
            cuda_ops.relu(y)
    torch.cuda.synchronize()


@needs_gpu
def test_what_waits_is_no_race_on_a_gpu() -> None:
    x = torch.ones(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    with check_streams() as found:
        y = cuda_ops.silu(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = cuda_ops.relu(y)
        torch.cuda.current_stream().wait_stream(side)
        z.add_(1)
    assert found.checked and found.races == []


@needs_gpu
def test_a_race_of_a_gradient_on_a_gpu() -> None:
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    with check_streams(raise_errors=False) as found:
        cuda_ops.silu(x).sum().backward()
        assert x.grad is not None
        with torch.cuda.stream(side):
            x.grad.mul_(2)
    torch.cuda.synchronize()
    assert "aten::mul_.Tensor" in {race.later.operator for race in found.races}
