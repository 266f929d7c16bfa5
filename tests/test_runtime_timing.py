"""Timing functions in turns, and what timing by events costs."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import needs_gpu, run_python

from cuda_ops.benchmarking import clock, compare
from cuda_ops.errors import BenchmarkError
from cuda_ops.runtime import Timer, event_overhead, time_kernel
from cuda_ops.runtime.timing.copies import Copies
from cuda_ops.runtime.timing.event_costs import EventOverhead

EXAMPLE = Path(__file__).parent.parent / "examples" / "runtime" / "time_an_operator.py"
X = torch.ones(64)
#: In place of an argument of any other type.
WORD = cast("Any", "a")


def test_each_candidate_has_a_time_and_a_ratio_over_the_first() -> None:
    found = Timer({"relu": torch.relu, "neg": torch.neg}, (X,)).run(seconds=0.05)
    assert list(found) == ["relu", "neg"]
    assert found["relu"].ratio is None and found["neg"].ratio is not None
    for timing in found.values():
        assert 0 < timing.seconds.low <= timing.median <= timing.seconds.high
        assert timing.rounds >= 6 and timing.calls >= 2
    low, high = found["neg"].ratio.low, found["neg"].ratio.high
    assert low <= found["neg"].ratio.value <= high


def test_ratios_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock drifts by a factor of ten, and the ratio stays that of a round."""
    drift = itertools.count()  # both candidates of a round have the same
    factor = {"once": 1.0, "twice": 2.0}
    trains: list[str] = []

    def train(self: Any, function: Callable[[], str], arguments: Any, prepare: Any) -> clock.Train:
        name = function(*arguments[0])
        trains.append(name)
        return clock.Train(factor[name] * (1 + (next(drift) // 2) % 10) * 1e-3, [])

    monkeypatch.setattr(clock.CpuClock, "train", train)
    timer = Timer({"once": lambda: "once", "twice": lambda: "twice"}, cold=False)
    found = timer.run(seconds=0.01, precision=0.4)
    assert found["twice"].ratio is not None
    ratio, once = found["twice"].ratio, found["once"].seconds
    assert ratio.low == pytest.approx(2) and ratio.high == pytest.approx(2)
    assert once.high > 1.5 * once.low
    turns = trains[-12:]
    assert {"".join(name[0] for name in turns[i : i + 2]) for i in range(0, 12, 2)} == {"ot", "to"}


def test_the_clock_is_said() -> None:
    found = time_kernel(torch.relu, X, seconds=0.05)
    assert re.fullmatch(r"host time: the wall clock around trains of \d+ calls", found.clock)
    assert found.name == "relu" and found.host is None
    assert "cold" in str(found) and found.clock in str(found)
    assert "warm" in str(time_kernel(torch.relu, X, cold=False, seconds=0.05))


def test_results_are_a_table_and_json() -> None:
    found = Timer({"[relu]": torch.relu, "broken": lambda x: 1 / 0}, (X,)).run(seconds=0.05)
    text = str(found)
    assert "[relu]" in text and "ZeroDivisionError" in text and "cold caches" in text
    loaded = json.loads(json.dumps(found.as_dict()))
    assert loaded["timings"]["[relu]"]["seconds"]["value"] == found["[relu]"].median
    assert loaded["clock"] == found.clock and list(loaded["missing"]) == ["broken"]


def test_an_error_of_the_first_candidate_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        time_kernel(lambda: 1 / 0)


def test_cold_calls_have_arguments_of_their_own_and_warm_ones_share_them() -> None:
    seen: list[set[int]] = []

    def watch(x: torch.Tensor) -> None:
        seen[-1].add(x.data_ptr())

    for cold in (True, False):
        seen.append(set())
        calls = time_kernel(watch, torch.ones(256), cold=cold, seconds=0.05).calls
        assert X.data_ptr() not in seen[-1]
        # The first estimate has two copies, which may come again in the same memory.
        assert calls <= len(seen[-1]) <= calls + 2 if cold else len(seen[-1]) <= 2


def test_caches_are_flushed_before_each_cold_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    flushes = 0
    flush = clock.Flush.__call__

    def count(self: clock.Flush) -> None:
        nonlocal flushes
        flushes += 1
        flush(self)

    monkeypatch.setattr(clock.Flush, "__call__", count)
    time_kernel(torch.relu, X, cold=False, seconds=0.02)
    assert flushes == 0
    found = time_kernel(torch.relu, X, seconds=0.02)
    assert flushes >= found.rounds


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(24.0)[1::3],
        torch.arange(3.0).expand(5, 3),
        torch.arange(3.0)[1:],
        torch.empty(0, 4),
        torch.tensor(2.0),
        torch.ones(3, requires_grad=True),
    ],
    ids=["transposed", "stepped", "expanded", "offset", "empty", "scalar", "gradient"],
)
def test_copies_keep_values_strides_and_alignment(x: torch.Tensor) -> None:
    copies = Copies((x, [x], 3), torch.device("cpu"), 2, True)
    for one, (same,), number in copies.arguments:
        assert torch.equal(one, x) and number == 3
        assert one is same, "one tensor that is passed twice stays one"
        assert one is not x and one.requires_grad == x.requires_grad
        assert one.stride() == x.stride()
        assert x.numel() == 0 or one.data_ptr() % 16 == x.data_ptr() % 16


def test_what_a_call_writes_to_is_restored_before_the_next_train() -> None:
    seen: set[float] = set()

    def add(x: torch.Tensor) -> None:
        seen.add(x[0].item())
        x += 1

    x = torch.zeros(8)
    time_kernel(add, x, seconds=0.02)
    assert seen == {0.0} and x[0] == 0


def test_leaves_that_want_gradients_can_be_timed() -> None:
    w = torch.ones(4, 4, requires_grad=True)
    assert time_kernel(torch.mm, w, w, seconds=0.02).median > 0
    assert w.grad is None


def test_keywords_are_passed() -> None:
    got: list[int] = []
    time_kernel(lambda x, dim: got.append(dim), X, keywords={"dim": 7}, seconds=0.02)
    assert set(got) == {7}


def test_time_is_limited_and_narrow_intervals_end_it_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        clock.CpuClock, "train", lambda self, f, arguments, prepare: clock.Train(1e-3, [])
    )
    quick = Timer({"f": lambda: None}).run(seconds=3600)["f"]
    assert quick.converged and quick.rounds == 6
    times = iter(range(1, 10**6))
    monkeypatch.setattr(
        clock.CpuClock, "train", lambda self, f, arguments, prepare: clock.Train(next(times), [])
    )
    late = Timer({"f": lambda: None}).run(seconds=1e-9, precision=1e-9)["f"]
    assert not late.converged and late.rounds == 6


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Timer({}), ValueError, "Timer: argument 'functions': expected at least one"),
        (
            lambda: Timer([torch.relu]),
            TypeError,
            "argument 'functions': expected a mapping .* list",
        ),
        (lambda: Timer({"f": 3}), TypeError, "expected something to call for 'f', got int"),
        (lambda: Timer({1: abs}), TypeError, "Timer: argument 'functions': expected a str .* 1$"),
        (lambda: Timer({"f": torch.relu}, X), TypeError, "argument 'args': .* got Tensor"),
        (
            lambda: Timer({"f": torch.relu}, (X.to_sparse(),)),
            ValueError,
            "'args': expected strided tensors, got torch.sparse_coo",
        ),
        (lambda: Timer({"f": torch.relu}, device="meta"), ValueError, "'device': .* got 'meta'"),
        (lambda: time_kernel(3), TypeError, "time_kernel: argument 'function': .* got int"),
        (lambda: time_kernel(torch.relu, X, seconds=0), ValueError, "'seconds': .* got 0"),
        (lambda: time_kernel(torch.relu, X, seconds=-1), ValueError, "'seconds': .* got -1"),
        (lambda: time_kernel(torch.relu, X, seconds=float("nan")), ValueError, "'seconds'.*nan"),
        (lambda: time_kernel(torch.relu, X, precision=0), ValueError, "'precision': .* got 0"),
        (lambda: event_overhead("meta"), ValueError, "event_overhead: argument 'device'"),
        (lambda: event_overhead("cuda:99"), ValueError, "^event_overhead: .*, and torch sees "),
        (lambda: event_overhead("foo"), ValueError, "^event_overhead: argument 'device': .*'foo'"),
        (lambda: event_overhead("cpu", calls=0), ValueError, "'calls': .* from 1 to 300, got 0"),
        (lambda: event_overhead("cpu", calls=WORD), ValueError, "'calls': .* got 'a'"),
        (lambda: event_overhead("cpu", rounds=WORD), ValueError, "'rounds': .* got 'a'"),
        (lambda: event_overhead("cpu", calls=301), ValueError, "'calls': .* got 301"),
        (lambda: event_overhead("cpu", rounds=0), ValueError, "'rounds': .* 1 or more, got 0"),
        (lambda: time_kernel(abs, X, seconds=0), ValueError, "^time_kernel: .*'seconds': .* got 0"),
        (lambda: time_kernel(abs, X, seconds=WORD), ValueError, "^time_kernel: .* got 'a'"),
        (
            lambda: time_kernel(abs, X, keywords=WORD),
            TypeError,
            "^time_kernel: .* got str",
        ),
        (lambda: time_kernel(abs, X, device="meta"), ValueError, "^time_kernel: .* got 'meta'"),
        (lambda: time_kernel(abs, X, device="cuda:99"), ValueError, "^time_kernel: .*torch sees "),
        (lambda: time_kernel(abs, X.to_sparse()), ValueError, "^time_kernel: argument 'args'"),
        (lambda: Timer({"f": abs}, (X,), WORD), TypeError, "^Timer: argument 'keywords': .* str$"),
        (lambda: Timer({"f": abs}, (X,)).run(seconds=WORD), ValueError, "^Timer.run: .* got 'a'"),
    ],
)
def test_nonsense_is_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("always", [False, True])
def test_a_candidate_that_leaves_the_device_working_is_refused(
    monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    """Unless the device works on after a train of nothing as well: that is another process."""

    def train(self: clock.CpuClock, f: Any, arguments: Any, prepare: Any = None) -> clock.Train:
        return clock.Train(1e-3, [], tail=1.0 if always or prepare else 0.0)

    monkeypatch.setattr(clock.CpuClock, "train", train)
    monkeypatch.setattr(compare, "_PATIENCE_SECONDS", 0.0)
    refused = pytest.raises(BenchmarkError, match="uses another stream")
    with contextlib.nullcontext() if always else refused:
        Timer({"f": lambda: None}).run(seconds=0.01)


def test_on_a_cpu_event_overhead_measures_the_wall_clock() -> None:
    found = event_overhead("cpu", calls=20, rounds=3)
    assert found.about.startswith("no GPU:")
    assert [row.timing for row in found] == ["coarse", "fine"] * 3
    for coarse, fine in zip(found[::2], found[1::2], strict=True):
        assert coarse.train == fine.train
        assert coarse.host_per_event is None and coarse.device_per_call is None
        expected = (fine.host_per_call - coarse.host_per_call) / 2
        assert fine.host_per_event == pytest.approx(expected)
        assert fine.measured <= fine.host_per_call
    assert json.loads(json.dumps(found.as_dict()))["rows"][0]["train"] == "empty function"


def test_rows_of_event_overhead_make_a_table() -> None:
    found = event_overhead("cpu", calls=2, rounds=1)
    about, header, *rows = str(found).splitlines()
    assert about == found.about and header.split()[:3] == ["train", "timing", "events"]
    assert len(rows) == len(found) and all("perf_counter" in row for row in rows)
    assert len({row.index("perf_counter") for row in rows}) == 1
    assert str(EventOverhead((), "nothing")).splitlines()[0] == "nothing"


@needs_gpu
@pytest.mark.alone
def test_a_gpu_is_timed_by_events() -> None:
    x = torch.randn(1 << 20, device="cuda")
    found = Timer({"relu": torch.relu, "neg": torch.neg}, (x,)).run(seconds=0.3)
    assert found.clock.startswith("device time: two CUDA events")
    assert 0.2 < found["neg"].ratio.value < 5
    assert found["relu"].host is not None and found["relu"].host.value > 0
    warm = time_kernel(torch.relu, x, cold=False, seconds=0.3)
    assert warm.median > 0 and not warm.cold


@needs_gpu
@pytest.mark.alone
def test_event_overhead_on_a_gpu_has_every_way_for_every_train() -> None:
    found = event_overhead(calls=50, rounds=3)
    assert len(found) == 18
    for train in {row.train for row in found}:
        rows = [row for row in found if row.train == train]
        assert [row.timing for row in rows] == ["none", "coarse", *["fine"] * 4]
        assert {row.events for row in rows if row.timing == "fine"} == {
            "timing", "timing, blocking", "no timing", "no timing, blocking",
        }  # fmt: skip
        assert all(row.device_per_call > 0 for row in rows[1:])
        assert rows[0].device_per_call is None
    large = [row for row in found if row.train.startswith("large")]
    assert large[1].device_per_call > large[1].host_per_call


@pytest.mark.slow
@pytest.mark.alone
def test_the_example_runs() -> None:
    done = run_python(str(EXAMPLE))
    assert done.returncode == 0, done.stderr
    assert "95 % interval" in done.stdout and "warm" in done.stdout and "fine" in done.stdout
