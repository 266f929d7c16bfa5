"""The benchmark kit apart from its clock: statistics, files, comparisons, tables, pictures.

What it rejects is in test_benchmark_cheats.py.
"""

from __future__ import annotations

import io
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ScratchOp
from rich.console import Console

from benchmarks import tables
from cuda_ops.benchmarking import command, plots
from cuda_ops.benchmarking.ceilings import Ceilings, arithmetic
from cuda_ops.benchmarking.clock import CpuClock, host_latency, rotated
from cuda_ops.benchmarking.compare import Settings, calls_for
from cuda_ops.benchmarking.environment import environment
from cuda_ops.benchmarking.kit import Kit, cases_of
from cuda_ops.benchmarking.peers import compiled, from_pair, imported, load_peers, torch_peers
from cuda_ops.benchmarking.regression import regressions
from cuda_ops.benchmarking.results import CaseResult, PeerResult, Report, mean_ratio
from cuda_ops.benchmarking.rotation import maker
from cuda_ops.benchmarking.stats import Interval, geometric_mean, median_interval, ratio_interval
from cuda_ops.benchmarking.table import rate_text, render, time_text
from cuda_ops.dev import reload
from cuda_ops.errors import BenchmarkError
from cuda_ops.registry import registry
from cuda_ops.spec import BenchmarkCase, Peer

CPU = torch.device("cpu")


def result(op: str = "f", case: str = "1K", us: float = 10.0, **more: Any) -> CaseResult:
    values: dict[str, Any] = {
        "pair": op, "reason": "small", "dtype": "float32", "bytes": 2**20, "flops": 0,
        "arithmetic": "fp32", "seconds": around(us * 1e-6), "floor_seconds": 5e-6,
        "bound": "memory", "calls": 2, "rounds": 9, "converged": True,
        "peers": {"eager": PeerResult(around(2 * us * 1e-6), around(2.0))},
    }  # fmt: skip
    return CaseResult(op, case=case, **{**values, **more})


def around(value: float, width: float = 0.01) -> Interval:
    return Interval(value, value * (1 - width), value * (1 + width))


def report(*results: CaseResult, device: str = "NVIDIA H200", **more: Any) -> Report:
    known = {"device": device, "driver": "1", "torch": "2", "date": "2026-01-01", "commit": "abc"}
    ceilings = {"memory": around(4e12), "fp32": around(5e13)}
    settings = {"precision": 0.01, "seconds": 3.0}
    return Report(known, ceilings, {}, 1.3, settings, list(results), **more)


# --- statistics -------------------------------------------------------------------------


def test_the_interval_contains_the_median_as_often_as_it_says() -> None:
    chance = random.Random(0)
    for count in (6, 15, 40):
        hits = 0
        for _ in range(2000):
            # Skewed as times are; the true median is known.
            samples = [chance.expovariate(1) for _ in range(count)]
            interval = median_interval(samples)
            hits += interval.low <= 0.6931 <= interval.high
            assert interval.low <= interval.value <= interval.high
        assert 0.94 <= hits / 2000 <= 0.99, count


def test_the_ratio_is_taken_within_rounds() -> None:
    drift = [1.0, 1.5, 2.0, 3.0, 2.5, 1.2, 1.1]
    interval = ratio_interval([2 * d for d in drift], drift)
    assert interval == Interval(2, 2, 2)
    with pytest.raises(ValueError, match="expected at least one sample"):
        median_interval([])


def test_twice_as_fast_and_half_as_fast_make_one() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)
    fast, slow = (result(peers={"p": PeerResult(ratio=around(r))}) for r in (4.0, 1.0))
    assert mean_ratio([fast, slow, result(peers={})], "p") == pytest.approx(2)
    assert mean_ratio([fast], "q") is None


# --- the device -------------------------------------------------------------------------


def test_the_environment_says_where_it_was() -> None:
    known = environment(CPU)
    assert known["device"].startswith("CPU (") and known["device"].endswith(" cores)")
    assert known["torch"] == torch.__version__ and known["threads"].isdigit()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", known["date"])
    assert known["commit"]


def test_the_floor_is_the_longer_of_memory_and_arithmetic() -> None:
    ceilings = Ceilings(CpuClock(CPU, lambda: None))
    ceilings.measured = {"memory": around(1e9), "fp32": around(1e12), "bf16": around(4e12)}
    case = BenchmarkCase("x", lambda device: (), bytes=10**6, flops=10**10)
    assert (ceilings.floor(case).seconds, ceilings.floor(case).bound) == (1e-2, "compute")
    light = replace(case, flops=10**6)
    assert (ceilings.floor(light).seconds, ceilings.floor(light).bound) == (1e-3, "memory")
    assert ceilings.floor(replace(case, dtype=torch.bfloat16)).seconds == 2.5e-3
    ceilings.refuse_impossible(case, 2.6e-3, calls=2)
    with pytest.raises(BenchmarkError, match=r"5 TFLOP/s, above the 4 TFLOP/s of the device"):
        ceilings.refuse_impossible(case, 2e-3, calls=2)


def test_arithmetic_follows_the_dtype_unless_said_otherwise() -> None:
    case = BenchmarkCase("x", lambda device: (), bytes=1)
    assert arithmetic(case) == arithmetic(replace(case, dtype=torch.float32)) == "fp32"
    assert arithmetic(replace(case, dtype=torch.float16)) == "fp16"
    assert arithmetic(replace(case, arithmetic="tf32", dtype=torch.float32)) == "tf32"
    with pytest.raises(BenchmarkError, match=r"arithmetic is one of 'bf16', .*, got 'int3'"):
        arithmetic(replace(case, arithmetic="int3"))


def test_short_calls_make_long_trains() -> None:
    clock = CpuClock(CPU, lambda: None)
    assert calls_for(1.0, clock) == 2
    assert calls_for(clock.train_seconds / 10, clock) == 10
    assert calls_for(0.0, clock) == 64


def test_host_latency_is_per_call_and_in_rotated_order() -> None:
    order: list[str] = []
    thunks = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = host_latency(thunks, CPU, rounds=2, calls=3)
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2, "c": 2}
    assert "".join(order[::3]) == "abcbcacababcbca"
    assert rotated(["a", "b", "c"], 4) == ["b", "c", "a"]


# --- peers ------------------------------------------------------------------------------


def test_a_peer_that_cannot_be_had_is_missing_with_its_reason() -> None:
    def broken() -> Any:
        raise RuntimeError("needs a moon\nand a sun")

    ready, missing = load_peers(
        {
            "eager": F.silu,
            "here": imported("torch.nn.functional:silu"),
            "adapted": imported("torch.nn:functional", lambda module: module.relu),
            "absent": imported("no_such_package.ops:silu"),
            "nameless": imported("torch.nn.functional:no_such_function"),
            "broken": Peer(broken),
        }
    )
    assert ready == {"eager": F.silu, "here": F.silu, "adapted": F.relu}
    assert missing["absent"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert "no_such_function" in missing["nameless"]
    assert missing["broken"] == "RuntimeError: needs a moon"


def test_torch_is_a_peer_twice_and_every_case_is_compiled_anew() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert list(torch_peers(double)) == ["eager", "compile"]
    peer = compiled(double, backend="eager")
    for size in range(1, 12):  # more than torch compiles of one function
        assert peer.load()(torch.ones(size)).sum() == 2 * size


def test_a_peer_may_be_a_pair_of_its_own(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    assert torch.equal(from_pair(scratch_op.root, scratch_op.name).load()(torch.ones(3)),
                       torch.full((3,), 2.0))  # fmt: skip
    _, missing = load_peers({"gone": from_pair(scratch_op.root, "no_such_pair")})
    assert "no operator 'no_such_pair'" in missing["gone"]


# --- one operator -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silu() -> Any:
    reload("silu")
    return registry().operators("silu")["silu"].spec


def plugins(
    cases: list[BenchmarkCase] | None, reference: Any = F.silu, peers: dict[str, Any] | None = None
) -> Any:
    answers = {"cuda_ops_benchmarks": cases, "cuda_ops_reference": reference}
    return SimpleNamespace(ask=lambda hook, op: answers.get(hook), peers=lambda op: peers or {})


def small(numel: int = 4096, **more: Any) -> BenchmarkCase:
    inputs = maker((((numel,), torch.float32),))
    return BenchmarkCase(f"{numel}", inputs, bytes=8 * numel, dtype=torch.float32, **more)


def test_a_run_measures_checks_and_names_what_is_missing(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=100.0, seconds=0.1))
    peers = {"eager": F.silu, "wrong": torch.relu, "absent": imported("no_such_package:silu")}
    (found,) = kit.measure(silu, plugins([small(reason="why", peers=peers)]))
    assert not found.error and found.converged and found.rounds >= 6
    assert (found.op, found.pair, found.dtype, found.reason) == ("silu", "silu", "float32", "why")
    assert found.seconds is not None and found.of_ceiling > 0
    assert found.peers["eager"].ratio is not None
    assert found.peers["absent"].missing.startswith("ModuleNotFoundError")
    assert found.peers["wrong"].missing.startswith("wrong differs from the reference")
    text = rendered(kit.report([found]))
    assert "silu: peer absent is missing: ModuleNotFoundError" in text
    assert re.search(r"^4096 +[\d.]+ us +[\d.]+ GB/s +\d+% +[\d.]+ ±[\d.]+ +missing", text, re.M)


def test_peers_of_the_operator_join_those_of_a_case(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    answers = plugins([small(peers={"p": torch.relu})], peers={"p": F.silu, "eager": F.silu})
    (found,) = kit.measure(silu, answers)
    assert list(found.peers) == ["p", "eager"]
    assert found.peers["p"].missing  # the case's own goes before


def test_keywords_reach_operator_peers_and_reference() -> None:
    reload("normalize_volume")
    op = registry().operators("normalize_volume")["normalize_volume"].spec
    case = BenchmarkCase(
        "8^3", maker((((8, 8, 8), torch.uint8),)), bytes=8**3 * 5, keywords={"maximum": 255.0}
    )  # fmt: skip

    def scaled(x: torch.Tensor, *, maximum: float) -> torch.Tensor:
        return x / maximum

    (found,) = Kit(CPU, Settings(precision=1.0, seconds=0.0)).measure(
        op, plugins([case], scaled, {"eager": scaled})
    )
    assert not found.error
    assert found.peers["eager"].ratio is not None


def test_a_peer_that_rounds_by_another_rule_may_be_off_and_says_so() -> None:
    reload("rgb_to_gray")
    op = registry().operators("rgb_to_gray")["rgb_to_gray"].spec
    case = BenchmarkCase("9x9", maker((((9, 9, 3), torch.uint8),)), bytes=9 * 9 * 4)
    reference = registry().plugins.ask("cuda_ops_reference", op)

    def darker(by: int) -> Any:
        return Peer(lambda: lambda image: reference(image).clamp(min=by) - by, off_by=1)

    peers = {"one": darker(1), "two": darker(2)}
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    (found,) = kit.measure(op, plugins([case], reference, peers))
    assert found.peers["one"].ratio is not None
    assert "differs" in found.peers["two"].missing
    assert "one rounds by another rule: 1 off at most" in found.notes


def test_of_a_peer_the_first_results_may_be_compared_alone() -> None:
    reload("bitonic_topk")
    op = registry().operators("bitonic_topk")["bitonic_topk"].spec
    case = BenchmarkCase("9x9", maker((((9, 9), torch.float32), 3)), bytes=9 * 9 * 4)
    reference = registry().plugins.ask("cuda_ops_reference", op)

    def other_indices(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = reference(x, k)
        return values.clone(), indices + 1

    def other_values(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = reference(x, k)
        return values + 1, indices.clone()

    peers = {
        "lenient": Peer(lambda: other_indices, compared=1),
        "strict": Peer(lambda: other_indices),
        "wrong": Peer(lambda: other_values, compared=1),
    }
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    (found,) = kit.measure(op, plugins([case], reference, peers))
    assert found.peers["lenient"].ratio is not None
    assert "differs" in found.peers["strict"].missing
    assert "differs" in found.peers["wrong"].missing
    assert "lenient: of its results the first 1 compared" in found.notes


def test_a_chosen_peer_is_the_only_one(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0), peers={"eager"})
    answers = plugins([small(peers={"eager": F.silu, "relu": torch.relu})])
    (found,) = kit.measure(silu, answers)
    assert list(found.peers) == ["eager"]
    assert set(cases_of(silu, answers)[0].peers) == {"eager", "relu"}


def test_what_is_not_measured_is_named(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    assert kit.measure(silu, plugins(None)) == []
    assert kit.left_out["silu"].startswith("no cases: give a signature line")
    assert kit.measure(silu, plugins([small()], None)) == []
    assert kit.left_out["silu"] == "nothing to check results with: implement cuda_ops_reference"
    without_cpu = replace(silu, keys=("CUDA",))
    assert kit.measure(without_cpu, plugins([small()])) == []
    assert kit.left_out["silu"] == "no CPU kernel in this build"
    large, heavy = replace(small(), bytes=2**40), replace(small(), label="heavy", flops=10**15)
    assert kit.measure(silu, plugins([large, heavy])) == []
    assert kit.left_out["silu 4096"] == "1048576 MiB, too large for a CPU (300 MiB)"
    assert kit.left_out["silu heavy"] == "1.0e+15 FLOPs, too many for a CPU (1e+09)"
    assert "left out: silu heavy: 1.0e+15 FLOPs" in rendered(kit.report([]))


def test_one_case_that_fails_leaves_the_others(silu: Any) -> None:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        raise ArithmeticError("no numbers today")

    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    bad = BenchmarkCase("bad", inputs, bytes=1)
    failed, found = kit.measure(silu, plugins([bad, small()]))
    assert failed.error == "ArithmeticError: no numbers today" and not found.error
    text = rendered(kit.report([failed, found]))
    assert "error silu bad: ArithmeticError: no numbers today" in text


def test_few_cases_are_the_ends_of_each_dtype(silu: Any) -> None:
    cases = [small(size) for size in (64, 1024, 256)]
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    found = kit.measure(silu, plugins(cases), few=True)
    assert [case.case for case in found] == ["64", "1024"]


def test_a_wide_interval_is_said_to_be_wide(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=0.0, seconds=0.0))
    (found,) = kit.measure(silu, plugins([small(peers={"eager": F.silu})]))
    assert not found.converged and found.rounds == 6
    assert "~ an interval is wider than 0% after 0 s" in rendered(kit.report([found]))


# --- files, text, pictures -------------------------------------------------------------------


def rendered(report: Report) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(report))
    console.file.close()
    return console.export_text()


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    host = {"p": PeerResult(around(1e-6), around(2.0), around(5e-6)), "q": PeerResult(missing="!")}
    saved = report(
        result(peers=host, host=around(6e-6), notes=("a note",)),
        result(case="2K", seconds=None, error="wrong"),
        left_out={"f 4K": "too large"},
    )
    saved.save(tmp_path / "deep" / "run.json")
    assert Report.load(tmp_path / "deep" / "run.json") == saved
    (tmp_path / "other.json").write_text('{"results": 1}')
    for name in ("other.json", "absent.json"):
        with pytest.raises(BenchmarkError, match=f"{name} is not the JSON of a benchmark run"):
            Report.load(tmp_path / name)


def test_numbers_read_well() -> None:
    assert [time_text(s) for s in (2.284e-6, 45.64e-6, 521e-6, 999.7e-6, 1.234e-3, 2)] == [
        "2.28 us",
        "45.6 us",
        "521 us",
        "1.00 ms",
        "1.23 ms",
        "2.00 s",
    ]
    assert rate_text(result(us=2.0, bytes=8 * 10**6)) == "4000 GB/s"
    fast = result(us=1000.0, flops=6 * 10**11, bound="compute")
    assert rate_text(fast) == "600 TFLOP/s"
    text = rendered(report(result(host=around(6.5e-6), peers={
        "eager": PeerResult(around(2e-5), Interval(2.0, 1.97, 2.01), around(5.2e-6)),
        "compile": PeerResult(missing="ImportError: x")})))  # fmt: skip
    assert re.search(r"1K +10.0 us +105 GB/s +50% +6.5 \(eager 5.2\) +2.00 ±0.03 +missing", text)
    assert "measured ceilings: memory 4 TB/s, fp32 50 TFLOP/s; cold reads take 1.30x" in text


def test_pictures_are_drawn_and_repeatable(tmp_path: Path) -> None:
    compute = result("g", "big", flops=10**9, bound="compute")
    run = report(result(case="1K"), result(case="2K", bytes=2**22), compute)
    written = plots.draw(run, tmp_path / "a")
    names = [path.name for path in written]
    assert names == ["roofline.svg", "f_ratio.svg", "g_ratio.svg", "bandwidth.svg"]
    ratio = (tmp_path / "a" / "f_ratio.svg").read_text()
    assert "cuda_ops.f, NVIDIA H200" in ratio and ">2K<" in ratio
    for first, second in zip(written, plots.draw(run, tmp_path / "b"), strict=True):
        assert first.read_bytes() == second.read_bytes()
    with pytest.raises(BenchmarkError, match="there is nothing to draw"):
        plots.draw(report(), tmp_path)


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchmarkError, match=r"plots need matplotlib: pip install"):
        plots.draw(report(result()), tmp_path)


# --- regressions -----------------------------------------------------------------------------


def test_a_slower_case_is_named_with_both_times() -> None:
    before = report(result(us=10.0), result(case="2K", us=20.0))
    (found,) = regressions(before, report(result(us=12.0), result(case="2K", us=20.5)))
    assert str(found) == (
        "f 1K: 10.0 us (9.90 us to 10.1 us) before, 12.0 us (11.9 us to 12.1 us) now (+20%)"
    )


@pytest.mark.parametrize(
    "after",
    [around(8e-6), around(10.3e-6), around(11e-6, width=0.2)],
    ids=["faster", "3 %", "wide"],
)
def test_noise_is_no_regression(after: Interval) -> None:
    assert regressions(report(result(us=10.0)), report(result(seconds=after))) == []


def test_what_cannot_be_compared_is_refused() -> None:
    base = report(result(), result(case="2K"), result("g"))
    with pytest.raises(BenchmarkError, match="measured on NVIDIA H200, this run on NVIDIA A100"):
        regressions(base, report(result(), device="NVIDIA A100"))
    with pytest.raises(BenchmarkError, match="no case is in both runs"):
        regressions(base, report(result("h")))
    with pytest.raises(BenchmarkError, match="measured before and not now: f 2K"):
        regressions(base, report(result()))
    assert regressions(base, report(result(), left_out={"f 2K": "too large"})) == []


@pytest.mark.parametrize(
    ("gone", "left_out"),
    [
        (result("f_backward", pair="f"), {"f_backward": "no CUDA kernel in this build"}),
        (result("f_backward", pair="f"), {}),
        (result("g_backward", pair="g"), {"g": "expected ';' before '}' token"}),
    ],
    ids=["left out", "removed", "not built"],
)
def test_an_operator_that_is_gone_was_lost(gone: CaseResult, left_out: dict[str, str]) -> None:
    with pytest.raises(BenchmarkError, match=f"measured before and not now: {gone.op} 1K"):
        regressions(report(result(), gone), report(result(), left_out=left_out))
    assert regressions(report(result(), result("not_asked_for")), report(result())) == []


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def fast_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clock time to speak of, and with one small case."""
    monkeypatch.setattr(command, "QUICK", Settings(0.5, 0.05, 2, 10))
    ask = registry().plugins.ask

    def fewer(hook: str, op: Any) -> Any:
        cases = ask(hook, op)
        return cases[:1] if hook == "cuda_ops_benchmarks" and cases else cases

    monkeypatch.setattr(registry().plugins, "ask", fewer)


def test_the_command_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fast_command: None
) -> None:
    run, pictures = tmp_path / "run.json", tmp_path / "plots"
    options = ["silu", "--quick", "--peers", "eager"]
    status = command.main([*options, "--json", str(run), "--plot", str(pictures)])
    out = capsys.readouterr().out
    assert status == 0, out
    assert re.search(r"measured silu_backward: 1 cases in \d+\.\d s", out)
    assert "1K float32" in out and f"wrote {pictures}" in out
    saved = Report.load(run)
    assert saved.operators()[:2] == ["silu", "silu_backward"]
    assert (pictures / "silu_ratio.svg").is_file()
    # The same code against a run that was a thousand times faster, and one as much slower.
    for factor, status, line in (
        (1e-3, 1, "slower silu 1K float32: "),
        (1e3, 0, "not slower than"),
    ):
        base = replace(saved, results=[
            replace(r, seconds=r.seconds.scaled(factor)) for r in saved.results if r.seconds
        ])  # fmt: skip
        base.save(tmp_path / "base.json")
        actual = command.main([*options, "--fail-if-regressed", str(tmp_path / "base.json")])
        out = capsys.readouterr().out
        assert actual == status and line in out, out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_operator"], "no operator 'no_such_operator'"),
        (["silu", "--quick", "--peers", "nobody"], "has a peer nobody; known: compile, eager"),
        (["silu", "--fail-if-regressed", "absent.json"], "absent.json is not the JSON"),
    ],
)
def test_a_question_without_an_answer_has_its_own_status(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], fast_command: None
) -> None:
    assert command.main(arguments) == 2
    out = capsys.readouterr().out
    assert message in out and "measured silu" not in out


def test_what_a_named_pair_calls_is_not_measured_with_it() -> None:
    ops, left_out = command._operators(["bitonic_topk"])
    assert ([op.name for op in ops], left_out) == (["bitonic_topk"], {})


def test_a_base_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fast_command: None
) -> None:
    run, same = tmp_path / "run.json", tmp_path / "folder" / ".." / "run.json"
    report(result()).save(run)
    before = run.read_bytes()
    assert command.main(["silu", "--json", str(same), "--fail-if-regressed", str(run)]) == 2
    assert "--json would write over the base" in capsys.readouterr().out
    assert run.read_bytes() == before


def test_what_cannot_be_built_or_measured_is_no_success(
    scratch_op: ScratchOp, capsys: pytest.CaptureFixture[str], fast_command: None
) -> None:
    options = ["--quick", "--peers", "eager"]
    scratch_op.write("this is no formula")
    assert command.main([scratch_op.name, *options]) == 2
    out = capsys.readouterr().out
    assert f"left out: {scratch_op.name}: " in out and "error: nothing was measured" in out
    assert command.main(["silu", scratch_op.name, *options]) == 1
    assert "measured silu: 1 cases" in capsys.readouterr().out


# --- the tables of the documents -----------------------------------------------------------------


@pytest.mark.parametrize("path", tables.documents(), ids=lambda path: path.name)
def test_committed_tables_are_the_generated_ones(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert tables.updated(text, path.parent) == text, "run python -m benchmarks.tables"


def test_some_document_has_each_table() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in tables.documents())
    assert set(re.findall(r"<!-- table: (.+?) -->", text)) == set(tables._TABLES)


def test_a_typed_number_is_put_right_and_a_bad_marker_refused(tmp_path: Path) -> None:
    text = "<!-- table: operators -->\n| typed | 9.99 |\n<!-- end of table -->\n"
    new = tables.updated(text, tables.REPO)
    assert "9.99" not in new and "| [`silu`](docs/kernels/elementwise.md) |" in new
    assert tables.updated(new, tables.REPO) == new
    known = "known: 'working', 'operators', 'cases'"
    with pytest.raises(BenchmarkError, match=f"no table 'nothing'; {known}"):
        tables.updated("<!-- table: nothing -->\n<!-- end of table -->", tmp_path)
    with pytest.raises(BenchmarkError, match="has no <!-- end of table -->"):
        tables.updated("<!-- table: cases -->\n", tmp_path)


def test_a_run_is_kept_by_pair_if_it_is_fit_to_be(tmp_path: Path) -> None:
    results, run = tmp_path / "h200", tmp_path / "run.json"
    report(result("f"), result("f_backward", pair="f"), result("g"),
           left_out={"g 1G": "too large"}).save(run)  # fmt: skip
    written = {path.relative_to(results).as_posix() for path in tables.keep(run, results)}
    assert written == {
        "operators/f.json", "operators/g.json", "plots/f/f_ratio.svg", "plots/g/g_ratio.svg",
        "plots/f/f_backward_ratio.svg", "plots/f/bandwidth.svg", "plots/g/bandwidth.svg",
    }  # fmt: skip
    kept = Report.load(results / "operators" / "f.json")
    assert kept.operators() == ["f", "f_backward"] and not kept.left_out
    for bad, message in (
        (report(result(error="wrong")), "f 1K failed: wrong"),
        (replace(report(result()), settings={"precision": 0.05}), "of a quick run"),
        (report(result(), device="NVIDIA A100"), "measured on a100, .*h200 is of another device"),
    ):
        bad.save(run)
        with pytest.raises(BenchmarkError, match=message):
            tables.keep(run, results)
