"""Memory by region and operator, what a block keeps, snapshots, and a binding's workspace."""

from __future__ import annotations

import doctest
import gc
import importlib
import math
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import needs_gpu, needs_no_gpu, run_python

import cuda_ops
from cuda_ops.runtime import (
    assert_no_growth,
    forget_regions,
    memory_by_operator,
    memory_report,
    memory_snapshot,
    record_memory,
    region,
)
from cuda_ops.runtime.memory import regions
from cuda_ops.runtime.memory.growth import places_left
from cuda_ops.runtime.memory.operators import Event, OperatorUse, by_operator
from cuda_ops.runtime.memory.report import read_segments

EXAMPLE = Path(__file__).parent.parent / "examples" / "runtime" / "memory_by_region.py"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_regions() -> Iterator[None]:
    forget_regions()
    yield
    forget_regions()


# --- regions ------------------------------------------------------------------------


def test_a_region_counts_what_is_left_of_it() -> None:
    with region("kept", "cpu") as kept:
        x = torch.ones(16 * MIB, dtype=torch.uint8)
    with region("freed", "cpu") as freed:
        torch.ones(16 * MIB, dtype=torch.uint8)
    assert kept.left >= 16 * MIB > 8 * MIB > freed.left
    assert kept.allocated is None, "unknown on a CPU"
    with region("given back", "cpu") as back:
        del x
    assert back.left < -8 * MIB


def test_names_are_nested_and_runs_are_added_up() -> None:
    kept = []
    for _ in range(3):
        with region("step", "cpu"), region("forward", "cpu"):
            kept.append(torch.ones(4 * MIB, dtype=torch.uint8))
    found = {use.name: use for use in regions.regions("cpu")}
    assert list(found) == ["step", "step/forward"]
    assert [use.runs for use in found.values()] == [3, 3]
    assert all(12 * MIB <= use.left < 24 * MIB for use in found.values())


def test_a_region_ends_where_its_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), region("broken", "cpu") as broken:
        _ = 1 / 0
    assert broken.runs == 1 and regions.current_region() == ""


def test_a_region_may_be_in_itself() -> None:
    with region("a", "cpu"), region("a", "cpu"):
        assert regions.current_region() == "a/a"


def test_threads_have_regions_of_their_own() -> None:
    names, both = [], threading.Barrier(2, timeout=60)

    def work(name: str) -> None:
        with region(name, "cpu"):
            both.wait()
            with region("inner", "cpu"):
                names.append(regions.current_region())
            both.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == ["one/inner", "two/inner"]
    assert {u.name: u.runs for u in regions.regions()} == dict.fromkeys(
        ["one", "one/inner", "two", "two/inner"], 1
    )


def test_forgetting_leaves_regions_that_run() -> None:
    with region("running", "cpu") as running:
        with region("done", "cpu"):
            pass
        forget_regions()
    assert regions.regions() == (running,)


def test_peaks_are_folded_into_all_regions_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner region resets torch's peak, and the outer one and the report still know it."""
    gpu = _FakeAllocator()
    gpu.install(monkeypatch)
    gpu.allocate(100)
    with region("outer", "cuda:0") as outer:
        gpu.allocate(50)
        gpu.free(50)
        with region("inner", "cuda:0") as inner:
            gpu.allocate(20)
        gpu.allocate(10)
    assert (outer.peak, inner.peak) == (50, 20)
    assert (outer.allocated, inner.allocated) == (80, 20)
    assert (outer.left, inner.left) == (30, 20)
    assert gpu.peak == 130, "torch's own peak starts anew"
    assert regions.peak_of(torch.device("cuda:0")) == 150


class _FakeAllocator:
    """Statistics as torch's allocator keeps them."""

    def __init__(self) -> None:
        self.now = self.total = self.peak = 0

    def allocate(self, size: int) -> None:
        self.now += size
        self.total += size
        self.peak = max(self.peak, self.now)

    def free(self, size: int) -> None:
        self.now -= size

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def reset(device: Any) -> None:
            self.peak = self.now

        def stats(device: Any) -> dict[str, int]:
            return {
                "allocated_bytes.all.current": self.now,
                "allocated_bytes.all.allocated": self.total,
            }

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_stats", stats)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)


# --- operators ----------------------------------------------------------------------


def test_operators_are_counted_with_backward_and_what_they_call() -> None:
    x = torch.ones(1000, requires_grad=True)
    with memory_by_operator() as found:
        cuda_ops.silu(x).sum().backward()
    assert found["cuda_ops::silu"].kept == 4000
    assert found["cuda_ops::silu_backward"].calls == 1
    assert found["aten::sum"].kept == 4
    assert {use.device for use in found} == {"cpu"}
    names = {use.name for use in found}
    assert "aten::empty" not in names, "what an operator calls is the operator's"
    with pytest.raises(KeyError):
        found["aten::missing"]


def test_what_a_call_frees_again_is_its_peak() -> None:
    call = Event("cuda_ops::sort", 1, 10, 20)
    changes = [("alloc", 11, 300), ("alloc", 12, 50), ("free", 13, -300), ("outside", 21, -50)]
    events = [call, Event("aten::empty", 1, 10, 12)]
    events += [Event("[memory]", 1, at, at, size, "cuda:0") for _, at, size in changes]
    events += [Event("[memory]", 2, 15, 15, 999, "cuda:0")]  # another thread's
    assert by_operator(events) == (OperatorUse("cuda_ops::sort", "cuda:0", 1, 350, 50, 350),)


def test_steps_of_autograd_and_python_are_no_operators() -> None:
    events = [
        Event("autograd::engine::evaluate_function: MulBackward0", 1, 0, 100),
        Event("MulBackward0", 1, 1, 99),
        Event("torch::autograd::AccumulateGrad", 1, 2, 98),
        Event("aten::mul", 1, 10, 20),
        Event("[memory]", 1, 11, 11, 8),
    ]
    (use,) = by_operator(events)
    assert use == OperatorUse("aten::mul", "cpu", 1, 8, 8, 8)


def test_operators_are_a_table_and_part_of_the_report() -> None:
    with memory_by_operator() as found:
        pass
    assert str(found) == "no operator allocated memory"
    with memory_by_operator() as found:
        torch.ones(1 << 18)
    assert "aten::ones" in str(found) and "1.00 MiB" in str(found)
    assert str(found) in str(memory_report("cpu", found))


def test_two_profilers_at_once_are_refused() -> None:
    refused = pytest.raises(RuntimeError, match="memory_by_operator: expected no other trace")
    with memory_by_operator(), refused, memory_by_operator():
        pass
    with memory_by_operator() as found:
        with refused, torch.profiler.profile(acc_events=True):
            pytest.fail("the block ran")
        torch.ones(1000)
    assert found["aten::ones"].calls == 1


# --- the report ---------------------------------------------------------------------


def test_on_a_cpu_the_report_is_of_the_process() -> None:
    before = memory_report("cpu")
    x = torch.ones(32 * MIB, dtype=torch.uint8)
    with region("named", "cpu"):
        pass
    after = memory_report("cpu")
    assert after.allocated - before.allocated >= x.nbytes
    assert after.reserved <= after.peak and after.segments is None
    text = str(after)
    assert text.startswith("memory of cpu, by the C library's heap") and "named" in text
    assert "fragment" not in text and "idle" not in text


def segment(total: int, *blocks: tuple[int, str], pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    used = sum(size for size, state in blocks if state == "active_allocated")
    return {
        "total_size": total, "allocated_size": used, "segment_pool_id": pool, "device": 0,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }  # fmt: skip


SEGMENTS = [
    segment(20, (8, "active_allocated"), (7, "inactive"), (5, "active_awaiting_free")),
    segment(30, (30, "inactive")),
    segment(40, (10, "active_allocated"), (30, "inactive"), pool=(0, 2)),
    segment(64, (64, "inactive"), pool=(0, 2)),
    segment(2, (2, "active_allocated"), pool=(1, 0)),
]


def test_segments_say_fragmentation_and_private_pools() -> None:
    found = read_segments(SEGMENTS)
    assert found.count == 5
    assert found.inactive_split == 37, "a segment that is all free can be given back"
    assert found.largest_free == 30, "free blocks of a private pool serve nothing else"
    assert [(p.id, p.reserved, p.allocated, p.segments) for p in found.pools] == [
        ((0, 2), 104, 10, 2),
        ((1, 0), 2, 2, 1),
    ]
    assert read_segments([]).largest_free == 0


def test_the_report_of_a_gpu_says_it_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's numbers are made up; a test below asks a GPU."""
    gpu = _FakeAllocator()
    gpu.install(monkeypatch)
    gpu.allocate(3 * MIB)
    stats = torch.cuda.memory_stats(0) | {
        "reserved_bytes.all.current": 8 * MIB, "num_alloc_retries": 2, "num_ooms": 1,
    }  # fmt: skip
    other = segment(99, (99, "active_allocated")) | {"device": 1}
    large = [segment(8 * MIB, (3 * MIB, "active_allocated"), (5 * MIB, "inactive")), other]
    large += [segment(MIB, (MIB, "active_allocated"), pool=(0, 3))]
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: large)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * MIB, 100 * MIB))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    found = memory_report("cuda:0")
    assert found.fragmentation == 5 / 8
    idle = "idle between blocks in use: 5.00 MiB, 62% of what is held; largest free block: 5.00 MiB"
    for line in (
        "memory of cuda:0, by torch's caching allocator, backend native",
        "in use by tensors: 3.00 MiB",
        "held by the allocator: 8.00 MiB",
        "free on the device: 60.0 MiB of 100 MiB",
        "contexts, libraries and other processes: 32.0 MiB",
        f"{idle}; 2 segments",
        "private pool (0, 3): 1.00 MiB held, 1.00 MiB in use, 1 segments",
        "allocations that emptied the cache first: 2; that failed: 1",
    ):
        assert line in str(found)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert "this backend does not tell" in str(memory_report("cuda:0"))


# --- growth -------------------------------------------------------------------------


def test_a_leak_fails_with_bytes_kind_and_region() -> None:
    leak = []

    def leaks() -> None:
        with region("cache", "cpu"):
            leak.append(torch.ones(8 * MIB, dtype=torch.uint8))

    failing = pytest.raises(AssertionError)
    with region("test", "cpu"), failing as failed, assert_no_growth(device="cpu"):
        leaks()
    text = str(failed.value)
    assert text.startswith(
        f"assert_no_growth: {8 * MIB} bytes more are in use on cpu in region 'test' than before, "
        "expected at most 0 more"
    )
    assert "8.00 MiB in uint8 of shape [8388608]" in text
    assert "more in use after region 'test/cache'" in text


def test_a_function_that_warms_up_a_cache_passes_after_its_first_call() -> None:
    cache: dict[str, torch.Tensor] = {}

    def cached() -> torch.Tensor:
        if "table" not in cache:
            cache["table"] = torch.arange(1000)
        return cache["table"] * 2

    with pytest.raises(AssertionError, match="8000 bytes"), assert_no_growth(device="cpu"):
        cached()
    cache.clear()
    with assert_no_growth(device="cpu", warm=cached):
        for _ in range(5):
            cached()


def test_a_leak_of_every_call_is_no_warm_up() -> None:
    leak: list[torch.Tensor] = []

    def call() -> None:
        leak.append(torch.ones(10))

    with pytest.raises(AssertionError, match="40 bytes"), assert_no_growth(device="cpu", warm=call):
        call()


def test_growth_up_to_the_tolerance_passes() -> None:
    kept = []
    with assert_no_growth(40, "cpu"):
        kept.append(torch.ones(10))
    refused = pytest.raises(AssertionError, match="expected at most 39 more")
    with refused, assert_no_growth(39, "cpu"):
        kept.append(torch.ones(10))


def test_views_count_once_and_cycles_are_collected() -> None:
    x = torch.ones(1000)
    with assert_no_growth(device="cpu"):
        views = [x[i:] for i in range(10)]
        cycle: list[Any] = [torch.ones(1000)]
        cycle.append(cycle)
        del cycle
    assert len(views) == 10


def test_gradients_that_only_torch_holds_count() -> None:
    w = torch.ones(10, requires_grad=True)
    with pytest.raises(AssertionError, match="40 bytes"), assert_no_growth(device="cpu"):
        (w * 2).sum().backward()


def test_an_error_of_the_block_stays_that_error() -> None:
    kept = []

    def keep_and_fail() -> None:
        kept.append(torch.ones(10))
        _ = 1 / 0

    with pytest.raises(ZeroDivisionError), assert_no_growth(device="cpu"):
        keep_and_fail()


def test_places_are_the_innermost_lines_outside_of_torch() -> None:
    inner = {"filename": "/env/site-packages/torch/nn/linear.py", "line": 1, "name": "forward"}
    own = {"filename": "/home/model.py", "line": 7, "name": "step"}
    block = {"size": 512, "frames": [inner, own]}
    after = {1: block, 2: block, 3: {"size": 99}, 4: {"size": 7, "frames": [inner]}}
    assert places_left({3: block}, after) == [
        "  1.00 KiB at /home/model.py:7 in step",
        "  7 B at /env/site-packages/torch/nn/linear.py:1 in forward",
    ]
    assert places_left({}, {3: {"size": 99}}) == [
        "  99 B at a place that the history does not know"
    ]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: memory_report("meta"), "memory_report: argument 'device': .* got 'meta'"),
        (lambda: region("", "cpu").__enter__(), "region: argument 'name': expected some text"),
        (lambda: region("a", "meta").__enter__(), "region: argument 'device': .* got 'meta'"),
        (lambda: assert_no_growth(-1).__enter__(), "argument 'tolerance': .* got -1"),
        (
            lambda: assert_no_growth(device="meta").__enter__(),
            "assert_no_growth: argument 'device'",
        ),
        (
            lambda: record_memory("f", most=0).__enter__(),
            "record_memory: argument 'most': .* got 0",
        ),
        (
            lambda: record_memory("f", most=cast("int", "a")).__enter__(),
            "record_memory: argument 'most': expected an int of 1 or more, got 'a'",
        ),
        (lambda: record_memory("f", stacks="c").__enter__(), "'stacks': .* got 'c'"),
        (lambda: assert_no_growth(cast("int", "a")).__enter__(), "'tolerance': .* got 'a'"),
        (lambda: assert_no_growth(cast("int", math.nan)).__enter__(), "'tolerance': .* got nan"),
        (
            lambda: assert_no_growth(device="cuda:99").__enter__(),
            "assert_no_growth: argument 'device': .*, and torch sees ",
        ),
        (lambda: memory_report("cuda:99"), "memory_report: argument 'device': .*, and torch sees"),
        (lambda: memory_report("foo"), "memory_report: argument 'device': .* got 'foo'"),
        (lambda: region("a", "cuda:99").__enter__(), "region: argument 'device': .*, and torch"),
    ],
)
def test_nonsense_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda one: region(one).__enter__(), "region: argument 'name': expected some text"),
        (lambda one: assert_no_growth(warm=one).__enter__(), "assert_no_growth: argument 'warm'"),
        (lambda one: record_memory(one).__enter__(), "record_memory: argument 'file'"),
        (memory_snapshot, "memory_snapshot: argument 'file': expected a path"),
        (lambda one: memory_report("cpu", one), "memory_report: argument 'operators'"),
    ],
)
def test_what_is_of_another_kind_is_refused(call: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^{text}.*, got int$"):
        call(1)


@needs_no_gpu
def test_without_a_gpu_snapshots_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "memory.pickle"
    with pytest.raises(RuntimeError, match="memory_snapshot: expected a CUDA device"):
        memory_snapshot(file)
    refused = pytest.raises(RuntimeError, match="record_memory: expected a CUDA device")
    with refused, record_memory(file):
        pass
    assert not file.exists()


@needs_gpu
def test_a_gpus_regions_operators_and_report_agree() -> None:
    torch.ones(1, device="cuda")
    gc.collect()
    before = memory_report("cuda")
    with memory_by_operator() as found, region("kept") as kept:
        # Has a size that the allocator cuts to the byte.
        x = torch.ones(MIB, dtype=torch.uint8, device="cuda")
        with region("freed") as freed:
            torch.ones(MIB, dtype=torch.uint8, device="cuda")
    assert kept.left == MIB and kept.peak == kept.allocated == 2 * MIB
    assert freed.left == 0 and freed.peak == freed.allocated == MIB
    after = memory_report("cuda", found)
    assert after.allocated - before.allocated == x.nbytes
    assert after.peak >= before.allocated + 2 * MIB
    on_gpu = [use for use in found if use.device.startswith("cuda")]
    assert [(use.name, use.calls, use.allocated) for use in on_gpu] == [("aten::ones", 2, 2 * MIB)]
    assert after.segments is None or 0 <= after.fragmentation <= 1
    assert "kept/freed" in str(after) and "aten::ones" in str(after)


@needs_gpu
def test_a_graphs_pool_is_told_apart() -> None:
    x = torch.ones(4 * MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    torch.cuda.empty_cache()  # as a capture does, which drops pools of dead graphs
    pools = {pool.id for pool in memory_report().segments.pools}
    with torch.cuda.graph(graph):
        y = x + 1
    assert len({pool.id for pool in memory_report().segments.pools} - pools) == 1
    assert y.shape == x.shape


@needs_gpu
def test_a_leak_on_a_gpu_names_the_line(tmp_path: Path) -> None:
    leak = []
    with pytest.raises(AssertionError) as failed, assert_no_growth():
        leak.append(torch.ones(MIB, dtype=torch.uint8, device="cuda"))
    assert f"{MIB} bytes more are in use on cuda:" in str(failed.value)
    assert f"at {__file__}:" in str(failed.value)
    ours = torch.ones(MIB, device="cuda")
    with pytest.raises(AssertionError, match=re.escape(f"at {__file__}:")), assert_no_growth():
        leak.append(cuda_ops.silu(ours))
    with assert_no_growth(warm=lambda: leak[0].float().sum()):
        leak[0].float().sum()


@needs_gpu
def test_snapshots_are_what_torchs_viewer_reads(tmp_path: Path) -> None:
    file = tmp_path / "memory.pickle"
    kept = []

    def keep_and_fail() -> None:
        kept.append(torch.ones(MIB, device="cuda"))
        _ = 1 / 0

    with pytest.raises(ZeroDivisionError), record_memory(file):
        keep_and_fail()
    found = pickle.loads(file.read_bytes())
    events = [event for trace in found["device_traces"] for event in trace]
    assert any(e["action"] == "alloc" and e["size"] == kept[0].nbytes for e in events)
    assert any(frame["filename"] == __file__ for e in events for frame in e.get("frames", ()))
    assert not torch._C._cuda_isHistoryEnabled()
    assert memory_snapshot(tmp_path / "now.pickle").stat().st_size > 0


@pytest.mark.slow
def test_the_example_runs() -> None:
    done = run_python(str(EXAMPLE))
    assert done.returncode == 0, done.stderr
    assert "step/forward" in done.stdout and "cuda_ops::silu" in done.stdout
    assert "a step keeps no memory" in done.stdout and "1048576 bytes more" in done.stdout


@pytest.mark.parametrize(
    "name",
    ["gpus.links", "gpus.peers", "memory.growth", "memory.history", "memory.operators",
     "memory.regions", "memory.report", "timing.copies", "timing.event_costs", "timing.timer"],
)  # fmt: skip
def test_examples_in_docstrings_are_true(name: str) -> None:
    module = importlib.import_module(f"cuda_ops.runtime.{name}")
    found = doctest.testmod(module, extraglobs={"torch": torch})
    assert found.failed == 0 and (found.attempted or name == "timing.copies")
