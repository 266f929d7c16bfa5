"""The device memory that the benchmark kit measures, which cases ask for it, and its tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_gpu
from reports import around, rendered, report, result
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import tables
from cuda_ops.benchmarking import kit as kits
from cuda_ops.benchmarking.compare import Settings
from cuda_ops.benchmarking.memory import Memory, memory_of
from cuda_ops.benchmarking.results import PeerResult, Report
from cuda_ops.benchmarking.rotation import maker
from cuda_ops.compile_ops import reload
from cuda_ops.ops import moe
from cuda_ops.registry import registry
from cuda_ops.spec import BenchmarkCase

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
#: The size of the tensor that calls are given: whole blocks of a GPU's allocator too.
SIZE = 16 << 20


# --- what is counted --------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Stands in for a GPU's allocator: counts the live storages that operators returned."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}
        self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self._peak = max(self._peak, self.allocated())
        return results

    def allocated(self, device: Any = None) -> int:
        return sum(size for storage, size in self._sizes.items() if not storage.expired())

    def peak(self, device: Any = None) -> int:
        return self._peak

    def reset_peak(self, device: Any = None) -> None:
        self._peak = self.allocated()


@pytest.fixture(params=["counted", pytest.param("cuda", marks=needs_gpu)])
def x(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.Tensor]:
    """16 MiB on a GPU, or on the CPU with its memory counted as that of a GPU."""
    if request.param == "cuda":
        yield torch.ones(SIZE // 4, device=CUDA)
        return
    counted = Counted()
    for name, stand_in in {
        "memory_allocated": counted.allocated,
        "max_memory_allocated": counted.peak,
        "reset_peak_memory_stats": counted.reset_peak,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with counted:
        yield torch.ones(SIZE // 4)


@pytest.mark.slow
def test_the_peak_has_results_and_what_is_alive_beside_them(x: torch.Tensor) -> None:
    assert memory_of(torch.exp, (x,), CUDA, False) == Memory(SIZE)
    assert memory_of(lambda x: (x.exp() + 1, x.sin()), (x,), CUDA, False) == Memory(2 * SIZE)
    summed = memory_of(lambda x: x.exp().sum(), (x,), CUDA, False)
    assert summed is not None and SIZE <= summed.peak < 2 * SIZE
    assert memory_of(lambda x: x.mul_(1), (x,), CUDA, False) == Memory(0)


def test_what_was_there_or_stays_from_the_first_call_on_does_not_count(x: torch.Tensor) -> None:
    workspace: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        if not workspace:
            workspace.append(torch.empty(4 * SIZE, dtype=torch.uint8, device=x.device))
        return x.exp()

    assert memory_of(call, (x,), CUDA, False) == Memory(SIZE)


@pytest.mark.slow
def test_training_keeps_what_backward_needs_beside_the_results(x: torch.Tensor) -> None:
    # Kept are exp's result, which is also sin's argument, sin's own, cos of it and their product.
    assert memory_of(lambda x: x.exp().sin(), (x,), CUDA, True) == Memory(4 * SIZE, SIZE)
    # Only the result, and beside it the gradient.
    assert memory_of(torch.exp, (x,), CUDA, True) == Memory(2 * SIZE, 0)
    assert not x.requires_grad


def test_a_cpu_has_no_memory_to_count() -> None:
    assert memory_of(torch.exp, (torch.ones(3),), CPU, False) is None


# --- where it is asked for ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_case_that_asks_has_the_memory_of_everyone_that_was_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reload("silu")
    asked = []

    def known(
        function: Any, args: tuple[Any, ...], device: Any, backward: bool, fixed: Any
    ) -> Memory:
        asked.append((len(args), args[0].shape, device, backward))
        # Forward alone, which is what a step of training consists of here.
        return Memory(function(*args).nbytes, 0 if backward else None)

    monkeypatch.setattr(kits, "memory_of", known)
    inputs = maker((((64,), torch.float32),))
    cases = [
        BenchmarkCase(f"{memory} {backward}", inputs, 512, memory=memory, backward=backward)
        for memory, backward in ((True, False), (True, True), (False, True))
    ]
    peers = {"eager": torch.nn.functional.silu, "wrong": torch.relu}
    answers = {"cuda_ops_benchmarks": cases, "cuda_ops_reference": torch.nn.functional.silu}
    plugins: Any = SimpleNamespace(ask=lambda hook, op: answers.get(hook), peers=lambda op: peers)
    kit = kits.Kit(CPU, Settings(precision=1.0, seconds=0.0))
    found = kit.measure(registry().operators("silu")["silu"].spec, plugins)
    assert not any(result.error for result in found)
    memory = [(r.memory, r.peers["eager"].memory, r.peers["wrong"].memory) for r in found]
    forward, training = Memory(256), Memory(256, 0)
    assert memory == [(forward, forward, None), (training, training, None), (None, None, None)]
    assert asked == [(1, (64,), CPU, backward) for backward in (False, False, True, True)]


def test_on_a_cpu_a_case_that_asks_is_only_timed() -> None:
    reload("silu")
    case = BenchmarkCase("64", maker((((64,), torch.float32),)), 512, memory=True)
    answers = {"cuda_ops_benchmarks": [case], "cuda_ops_reference": torch.nn.functional.silu}
    plugins: Any = SimpleNamespace(ask=lambda hook, op: answers.get(hook), peers=lambda op: {})
    kit = kits.Kit(CPU, Settings(precision=1.0, seconds=0.0))
    (found,) = kit.measure(registry().operators("silu")["silu"].spec, plugins)
    assert not found.error and found.seconds and found.memory is None
    assert "memory at its peak" not in rendered(kit.report([found]))


def test_mixtures_of_many_tokens_ask() -> None:
    cases = moe.cuda_ops_benchmarks(SimpleNamespace(name="moe"))
    for case in cases:
        (tokens,) = re.findall(r"T=(\d+) ", case.label)
        assert case.memory == (int(tokens) >= 4096), case.label
    assert {case.backward for case in cases if case.memory} == {True, False}


# --- files and tables ---------------------------------------------------------------------------

PEERS = {
    "eager": PeerResult(around(2e-5), around(2.0), memory=Memory(300 << 20, 96 << 20)),
    "bare": PeerResult(around(2e-5), around(2.0), memory=Memory(360 << 20, 0)),
    "gone": PeerResult(missing="no gradient"),
}
TRAINED = result(case="2K, trained", memory=Memory(120 << 20, 32 << 20), peers=PEERS)
FORWARD = result(
    case="2K",
    memory=Memory(1 << 20),
    peers={"eager": PeerResult(around(2e-5), around(2.0), memory=Memory(5 << 18))},
)


def test_memory_comes_back_from_a_file_and_older_files_have_none(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    saved = report(FORWARD, TRAINED, result())
    saved.save(path)
    assert Report.load(path) == saved
    data = json.loads(path.read_text())
    for case in data["results"]:
        for entry in (case, *case["peers"].values()):
            del entry["memory"]
    path.write_text(json.dumps(data))
    assert [r.memory for r in Report.load(path).results] == [None] * 3


def test_the_tables_have_memory_where_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = report(result(), FORWARD, TRAINED, result("g"))
    assert rendered(run).count("memory at its peak") == 1
    for line in (
        "case MiB cuda_ops eager bare gone",
        "2K peak 1.0 1.2 (1.25x)",
        "2K, trained peak 120 300 (2.50x) 360 (3.00x) missing",
        "2K, trained kept 32.0 96.0 (3.00x) 0.0 (0.00x) missing",
    ):
        assert line in [" ".join(row.split()) for row in rendered(run).splitlines()]
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = tables._of_pair("f", run, tmp_path)
    assert text.count("Memory at its peak") == 1
    assert "| case | MiB | cuda_ops | eager | bare | gone |" in text
    assert "| 2K | peak | 1.0 | 1.2 (1.25x) |  |  |" in text
    assert "| 2K, trained | kept | 32.0 | 96.0 (3.00x) | 0.0 (0.00x) | missing |" in text
    text = tables._of_pair("g", report(result("g")), tmp_path)
    assert "Memory" not in text


def test_a_ratio_to_nothing_is_left_out() -> None:
    kept = {"eager": PeerResult(around(2e-5), around(2.0), memory=Memory(2 << 20, 1 << 20))}
    text = rendered(report(result(memory=Memory(1 << 20, 0), peers=kept)))
    assert " ".join(text.split()).endswith("1K peak 1.0 2.0 (2.00x) 1K kept 0.0 1.0")
