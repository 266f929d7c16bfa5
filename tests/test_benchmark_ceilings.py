"""What measurements are held against: ceilings for reads and copies, and none that is exceeded."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reports import around, rendered, report, result

from benchmarks import stored, tables
from cuda_ops.benchmarking import ceilings as kinds
from cuda_ops.benchmarking.ceilings import READS, Ceilings
from cuda_ops.benchmarking.clock import CpuClock
from cuda_ops.benchmarking.compare import Settings
from cuda_ops.benchmarking.kit import Kit
from cuda_ops.benchmarking.raised import kind_of, raised
from cuda_ops.benchmarking.results import CLIFF, PeerResult, Report, groups_of, mean_ratio
from cuda_ops.benchmarking.rotation import maker
from cuda_ops.benchmarking.table import ceilings_text, mean_rows
from cuda_ops.compile_ops import reload
from cuda_ops.registry import registry
from cuda_ops.spec import BenchmarkCase

CPU = torch.device("cpu")


# --- reads --------------------------------------------------------------------------------


def test_a_call_that_hardly_writes_is_held_against_reads() -> None:
    ceilings = Ceilings(CpuClock(CPU, lambda: None))
    ceilings.measured = {"memory": around(1e9), "read": around(2e9), "fp32": around(1e12)}
    case = BenchmarkCase("x", lambda device: (), bytes=10**6)
    assert (ceilings.floor(case).seconds, ceilings.floor(case).bound) == (1e-3, "memory")
    few = int(READS * 10**6) - 1
    assert (ceilings.floor(case, few).seconds, ceilings.floor(case, few).bound) == (5e-4, "read")
    assert ceilings.floor(case, few + 1).bound == "memory"
    heavy = replace(case, flops=10**10)
    assert ceilings.floor(heavy, few).bound == "compute"


def test_the_ceiling_of_reads_is_never_below_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(CpuClock(CPU, lambda: None))
    monkeypatch.setattr(kinds, "_copy_rate", lambda clock: around(3.0))
    for read, expected in ((2.0, 3.0), (4.0, 4.0)):
        ceilings.measured = {}
        monkeypatch.setattr(kinds, "_read_rate", lambda clock, rate=read: around(rate))
        assert ceilings.rate("read") == expected
        assert ceilings.measured["memory"].value == 3.0


def test_reads_are_measured_by_reading_alone_on_clean_caches() -> None:
    clock = CpuClock(CPU, lambda: None)
    flush = clock.flush
    rate = kinds._read_rate(clock)
    assert rate.low <= rate.value <= rate.high and rate.value > 0
    assert clock.flush is flush


@pytest.mark.parametrize(("op", "bound"), [("reduce_sum", "read"), ("silu", "memory")])
def test_the_kit_sees_what_a_call_writes(op: str, bound: str) -> None:
    reload(op)
    spec = registry().operators(op)[op].spec
    kit = Kit(CPU, Settings(precision=100.0, seconds=0.0))
    kit.ceilings.measured = {kind: around(1e14) for kind in ("memory", "read", "fp32")}
    case = BenchmarkCase("4096", maker((((4096,), torch.float32),)), bytes=4 * 4096)
    answers = {
        "cuda_ops_benchmarks": [case],
        "cuda_ops_reference": registry().plugins.ask("cuda_ops_reference", spec),
    }
    plugins: Any = SimpleNamespace(ask=lambda hook, op: answers.get(hook), peers=lambda op: {})
    (found,) = kit.measure(spec, plugins)
    assert not found.error and found.bound == bound


# --- never above --------------------------------------------------------------------------


def test_what_goes_above_a_ceiling_raises_it_for_its_run() -> None:
    slow, fast = result(us=10.0), result(case="2K", us=4.0)
    run = raised(report(slow, fast))
    assert [r.of_ceiling for r in run.results] == [pytest.approx(0.4), 1.0]
    assert run.raised == {"memory": "raised by 25.0% to what f 2K (cuda_ops) reached"}
    text = rendered(run)
    assert "the memory ceiling is raised by 25.0% to what f 2K (cuda_ops) reached" in text
    assert "100%" in text and "125%" not in text
    assert raised(run) == run  # there is nothing more to raise
    assert run.ceilings == report(slow).ceilings  # what was measured stays


def test_a_peer_that_goes_above_a_ceiling_raises_it_too() -> None:
    quick = PeerResult(around(2.5e-6), around(0.25))
    run = raised(report(result(us=10.0, peers={"theirs": quick})))
    assert run.results[0].of_ceiling == pytest.approx(0.25)
    assert "f 1K (theirs)" in run.raised["memory"]
    # One that an earlier run measured was not held against this ceiling.
    old = replace(quick, commit="1234567")
    assert raised(report(result(us=10.0, peers={"theirs": old}))).raised == {}


def test_each_kind_and_each_run_has_a_ceiling_of_its_own() -> None:
    heavy = result("g", us=4.0, flops=10**9, bound="compute")
    reads = result("h", us=4.5, bound="read")
    other_run = result("i", us=10.0, floor_seconds=6e-6)
    run = raised(report(result(us=10.0), heavy, reads, other_run))
    assert [kind_of(r) for r in run.results] == ["memory", "fp32", "read", "memory"]
    assert [round(r.of_ceiling, 9) for r in run.results] == [0.5, 1.0, 1.0, 0.6]
    assert sorted(run.raised) == ["fp32", "read"]
    assert "read 233 GB/s" in ceilings_text(run)


def test_nothing_committed_is_above_a_ceiling(tmp_path: Path) -> None:
    found = list(stored.reports().values())
    assert any(run.raised for run in found), "runs from before this was done were above"
    assert max(r.of_ceiling for run in found for r in run.results) <= 1
    run = report(result(us=4.0))
    run.save(tmp_path / "run.json")
    loaded = Report.load(tmp_path / "run.json")
    assert loaded.results[0].of_ceiling == 1.0
    loaded.save(tmp_path / "again.json")
    assert Report.load(tmp_path / "again.json") == loaded


def test_a_run_without_the_later_fields_can_be_read(tmp_path: Path) -> None:
    data = asdict(report(result()))
    del data["raised"]
    for entry in data["results"]:
        for name in ("group", "sustained", "memory", "commit"):
            del entry[name]
        for peer in entry["peers"].values():
            for name in ("sustained", "took", "memory", "commit"):
                del peer[name]
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert Report.load(tmp_path / "old.json") == report(result())


# --- means --------------------------------------------------------------------------------


def peered(ratio: float, **more: Any) -> Any:
    return result(peers={"eager": PeerResult(around(1e-5 * ratio), around(ratio))}, **more)


def test_a_cliff_counts_as_much_as_it_may_in_a_second_mean() -> None:
    results = [peered(1.0), peered(52.0, case="2K")]
    assert mean_ratio(results, "eager") == pytest.approx(52**0.5)
    assert mean_ratio(results, "eager", CLIFF) == pytest.approx(13**0.5)
    assert list(mean_rows(results, ["eager"])) == [
        ("geometric mean", ["7.21"]),
        ("the same, 13 at most", ["3.61"]),
    ]
    text = rendered(report(*results))
    assert "f: in the last mean a ratio above 13, a cliff of the peer's, counts as 13" in text
    assert tables._mean_and_least(results, "eager") == "7.21x (1.00; 3.61x capped)"
    assert list(mean_rows(results[:1], ["eager"])) == [("geometric mean", ["1.00"])]
    assert "cliff" not in rendered(report(results[0]))


def test_groups_have_means_of_their_own() -> None:
    results = [
        peered(1.0, group="many rows"),
        peered(4.0, case="2K", group="many rows"),
        peered(0.5, case="4K", group="few rows"),
        peered(0.5, case="8K"),
    ]
    assert {name: len(some) for name, some in groups_of(results).items()} == {
        "many rows": 2, "few rows": 1, "": 1,
    }  # fmt: skip
    assert list(mean_rows(results, ["eager"])) == [
        ("mean of many rows", ["2.00"]),
        ("mean of few rows", ["0.50"]),
        ("mean of the others", ["0.50"]),
        ("geometric mean", ["1.00"]),
    ]
    assert groups_of(results[:2]) == {}
    page = tables._of_pair("f", report(*results), tables.REPO)
    assert "| **mean of few rows** |  |  |  |  |  | **0.50** |" in page


def test_a_committed_run_without_groups_gets_those_of_todays_cases() -> None:
    labels = ("4096x4096x4096 bfloat16", "1x6144x4096 bfloat16, weight", "gone")
    run = report(*(peered(2.0, op="matmul", case=label) for label in labels))
    assert [r.group for r in stored.grouped(run).results] == ["M >= 4096", "M 1 to 64", ""]
    own = report(peered(2.0, op="matmul", case=labels[0], group="of its own"))
    assert stored.grouped(own) == own
    other = report(peered(2.0))
    assert stored.grouped(other) == other
