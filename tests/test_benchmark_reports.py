"""What becomes of a benchmark's results: files, text, pictures, comparisons, tables."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from reports import around, rendered, report, result
from rich.console import Console
from rich.status import Status

from benchmarks import tables
from cuda_ops.benchmarking import command, plots
from cuda_ops.benchmarking.compare import Settings
from cuda_ops.benchmarking.kit import Kit
from cuda_ops.benchmarking.regression import regressions
from cuda_ops.benchmarking.results import CaseResult, PeerResult, Report
from cuda_ops.benchmarking.stats import Interval
from cuda_ops.benchmarking.table import ceilings_text, heading, rate_text
from cuda_ops.errors import BenchmarkError
from cuda_ops.output import time_text
from cuda_ops.registry import registry

CPU = torch.device("cpu")


# --- files, text, pictures -------------------------------------------------------------------


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    host = {"p": PeerResult(around(2e-5), around(2.0), around(5e-6)), "q": PeerResult(missing="!")}
    saved = report(
        result(peers=host, host=around(6e-6), notes=("a note",)),
        result(case="2K", seconds=None, error="wrong"),
        left_out={"f 4K": "too large"},
    )
    saved.save(tmp_path / "deep" / "run.json")
    assert Report.load(tmp_path / "deep" / "run.json") == saved
    (tmp_path / "other.json").write_text('{"results": 1}')
    for name, text in (
        ("other.json", "other.json is not the JSON of a benchmark run$"),
        ("absent.json", "absent.json: cannot be read: No such file or directory"),
    ):
        with pytest.raises(BenchmarkError, match=text):
            Report.load(tmp_path / name)


def test_a_report_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BenchmarkError, match=r"file/run\.json: cannot be written: "):
        report(result()).save(tmp_path / "file" / "run.json")


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
    # Each case was held against the ceiling of its own run.
    assert "measured ceilings: memory 210 GB/s, fp32 50 TFLOP/s; cold reads take 1.30x" in text
    several = report(result(), result(case="2K", floor_seconds=4e-6), result(floor_seconds=1e-6))
    assert ceilings_text(report(*several.results[:2])) == "memory 210 to 262 GB/s, fp32 50 TFLOP/s"
    assert ceilings_text(several) == "memory 210 GB/s to 1.05 TB/s, fp32 50 TFLOP/s"


def test_of_a_peer_that_has_some_cases_their_number_is_said() -> None:
    missing = {"eager": PeerResult(missing="ImportError: x")}
    some, none = [result(), result(case="2K", peers=missing)], [result(peers=missing)]
    assert "f: peer eager is missing in 1 of 2 cases: ImportError: x" in rendered(report(*some))
    assert "f: peer eager is missing: ImportError: x" in rendered(report(*none))
    assert tables._mean_and_least(some, "eager") == "2.00x (2.00; 1 of 2 cases)"
    assert tables._mean_and_least(some[:1], "eager") == "2.00x (2.00)"
    assert tables._mean_and_least(none, "eager") == ""


def test_a_peer_of_some_operators_of_a_page_says_whose_it_is() -> None:
    there, missing = PeerResult(around(2e-5), around(2.0)), PeerResult(missing="?")
    both = [result(peers={"eager": there, "cub": there})]
    of_pair = {"f": both, "g": [result("g", peers={"eager": there, "cub": missing})]}
    assert tables._whose(of_pair, "eager") == ""
    assert tables._whose(of_pair, "cub") == " (`f`)"
    assert tables._whose({**of_pair, "h": both}, "cub") == " (2 of 3)"
    some = [*both, result(case="2K", peers={"eager": missing})]
    assert tables._whose({"f": some}, "eager") == " (1 of 2 cases)"
    assert tables._whose({**of_pair, "f": some}, "cub") == " (`f`; 1 of 2 cases)"


@pytest.mark.slow
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
    some = replace(report(result()), settings={"precision": 0.01, "cases": "1K"})
    assert regressions(base, some) == []
    with pytest.raises(BenchmarkError, match="one of the runs was made with --clean-caches"):
        regressions(base, replace(base, settings={"precision": 0.01, "clean_caches": True}))


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
    """Takes hardly any time: one small case."""
    monkeypatch.setattr(command, "QUICK", Settings(0.5, 0.05, 2, 10))
    ask = registry().plugins.ask

    def fewer(hook: str, op: Any) -> Any:
        cases = ask(hook, op)
        return cases[:1] if hook == "cuda_ops_benchmarks" and cases else cases

    monkeypatch.setattr(registry().plugins, "ask", fewer)


@pytest.mark.alone
@pytest.mark.slow
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
    base = ["--fail-if-regressed", str(tmp_path / "base.json")]
    assert command.main([*options, "--clean-caches", *base]) == 2
    out = capsys.readouterr().out
    assert "caches held nothing unwritten" in out and "was made with --clean-caches" in out


@pytest.mark.alone
@pytest.mark.slow
def test_a_pipe_gets_no_word_of_what_goes_on(
    capsys: pytest.CaptureFixture[str], fast_command: None
) -> None:
    assert command.main(["silu", "--quick", "--peers", "eager"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("measured silu: 1 cases") and "first calls" not in out
    assert err == ""


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("seen", ["stdout", "stderr"])
def test_a_terminal_shows_what_goes_on_as_its_status(
    fast_command: None, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Status, "update", lambda self, text: told.append(text))
    consoles = {False: io.StringIO(), True: io.StringIO()}

    def console(stderr: bool = False, **options: Any) -> Console:
        terminal = stderr == (seen == "stderr")
        environ = {"TERM": "xterm"}
        return Console(file=consoles[stderr], force_terminal=terminal, _environ=environ, **options)

    monkeypatch.setattr(command, "Console", console)
    assert command.main(["silu", "--quick", "--peers", "eager"]) == 0
    assert told[:2] == ["building", "measuring the device"]
    parts = [text for text in told if text.startswith("silu 1K")]
    # How many calls depends on the machine; where they are two there is no such line.
    assert [text for text in parts if not text.endswith(" calls")] == [
        f"silu 1K float32: {part}"
        for part in (
            "making arguments",
            "estimating the time of cuda_ops",
            "the reference in float64",
            "first calls of cuda_ops",
            "first calls of eager",
            "timing in turns",
            "the device's ceilings and the host's latency",
        )
    ]
    assert bool(consoles[True].getvalue()) == (seen == "stderr")  # what hides the cursor


def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fast_command: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, measure = tmp_path / "run.json", Kit._measure_case

    def until_the_second(self: Kit, op: Any, *rest: Any) -> Any:
        if op.name == "silu_backward":
            raise KeyboardInterrupt
        return measure(self, op, *rest)

    monkeypatch.setattr(Kit, "_measure_case", until_the_second)
    options = ["silu", "--quick", "--peers", "eager", "--json", str(run)]
    assert command.main(options) == 130
    out = capsys.readouterr().out
    assert "1K float32" in out and "interrupted after 1 cases" in out
    assert Report.load(run).operators() == ["silu"]
    assert list(tmp_path.iterdir()) == [run]


def test_a_pipe_gets_the_whole_report_alone(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fast_command: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Kit, "_measure_case", lambda self, op, *rest: result(op.name))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        assert command.main(["silu", "--quick", "--json", str(pipe)]) == 0, capsys.readouterr()
        found = json.loads(read.result(timeout=10))
    assert [case["op"] for case in found["results"]][:2] == ["silu", "silu_backward"]
    assert list(tmp_path.iterdir()) == [pipe] and pipe.is_fifo()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_operator"], "no operator 'no_such_operator'"),
        (["silu", "--quick", "--peers", "nobody"], "has a peer nobody; known: compile, eager"),
        (["silu", "--quick", "--cases", "fp4$"], "no case has 'fp4$' in its label; known: "),
        (["silu", "--fail-if-regressed", "absent.json"], "absent.json: cannot be read: No such"),
        (["silu", "--json", "/"], "--json /: expected a file, got a folder"),
        (["silu", "--json", f"{__file__}/x.json"], f"a folder, got the file {__file__}"),
        (["silu", "--plot", __file__], "expected a folder, got a file"),
        (["silu", "--plot", f"{__file__}/x/y"], f"a folder, got the file {__file__}"),
    ],
)
def test_a_question_without_an_answer_has_its_own_status(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], fast_command: None
) -> None:
    assert command.main(arguments) == 2
    out = capsys.readouterr().out
    assert message in out and "measured silu" not in out


def test_a_label_of_several_operators_is_listed_once(
    capsys: pytest.CaptureFixture[str], fast_command: None
) -> None:
    assert command.main(["silu", "--cases", "fp4$"]) == 2  # and of silu_backward
    assert capsys.readouterr().out.count("1K float32") == 1


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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "path", tables.documents(), ids=lambda path: path.relative_to(tables.REPO).as_posix()
)
def test_committed_tables_are_the_generated_ones(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert tables.updated(text, path.parent) == text, "run python -m benchmarks.tables"


def test_some_document_has_each_table() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in tables.documents())
    names = set(re.findall(r"<!-- table: (.+?) -->", text))
    assert {name for name in names if not name.startswith("cases of ")} == set(tables._TABLES)


def test_a_typed_number_is_put_right_and_a_bad_marker_refused(tmp_path: Path) -> None:
    text = "<!-- table: operators -->\n| typed | 9.99 |\n<!-- end of table -->\n"
    new = tables.updated(text, tables.REPO)
    assert "9.99" not in new and "| [`silu`](docs/kernels/elementwise.md) |" in new
    assert tables.updated(new, tables.REPO) == new
    known = "known: 'working', 'families', 'operators', 'behind', 'cases'"
    with pytest.raises(BenchmarkError, match=f"no table 'nothing'; {known}"):
        tables.updated("<!-- table: nothing -->\n<!-- end of table -->", tmp_path)
    with pytest.raises(BenchmarkError, match="has no <!-- end of table -->"):
        tables.updated("<!-- table: cases -->\n", tmp_path)
    with pytest.raises(BenchmarkError, match="no committed run has nothing, naught"):
        tables.updated(
            "<!-- table: cases of silu, nothing, naught -->\n<!-- end of table -->", tmp_path
        )


def test_a_run_is_kept_by_pair_if_it_is_fit_to_be(tmp_path: Path) -> None:
    results, run = tmp_path / "h200", tmp_path / "run.json"
    report(result("f"), result("f_backward", pair="f"), result("g"),
           left_out={"g 1G": "too large"}).save(run)  # fmt: skip
    written = {path.relative_to(results).as_posix() for path in tables.keep(run, tmp_path)}
    assert written == {
        "operators/f.json", "operators/g.json", "plots/f/f_ratio.svg", "plots/g/g_ratio.svg",
        "plots/f/f_backward_ratio.svg", "plots/f/bandwidth.svg", "plots/g/bandwidth.svg",
    }  # fmt: skip
    kept = Report.load(results / "operators" / "f.json")
    assert kept.operators() == ["f", "f_backward"] and not kept.left_out
    for bad, message in (
        (report(result(error="wrong")), "f 1K failed: wrong"),
        (replace(report(result()), settings={"precision": 0.05}), "of a quick run"),
        (
            report(result(), device="NVIDIA A100"),
            "measured on NVIDIA A100, expected one of h200, h100",
        ),
    ):
        bad.save(run)
        with pytest.raises(BenchmarkError, match=message):
            tables.keep(run, tmp_path)
    report(result("f"), device="NVIDIA H100 80GB HBM3").save(run)
    assert tables.keep(run, tmp_path)[0] == tmp_path / "h100" / "operators" / "f.json"


def test_a_run_with_clean_caches_is_kept_apart(tmp_path: Path) -> None:
    results, run = tmp_path / "h200", tmp_path / "run.json"
    clean = replace(report(result()), settings={"precision": 0.01, "clean_caches": True})
    clean.save(run)
    assert tables.keep(run, tmp_path) == [results / "clean_caches" / "f.json"]
    assert "caches held nothing unwritten" in heading(clean)
    assert "unwritten" not in heading(report(result()))


@pytest.mark.parametrize("part", [{"cases": "2K"}, {"cases": "", "finished": False}])
def test_some_cases_take_their_place_among_the_kept_ones(
    tmp_path: Path, part: dict[str, Any]
) -> None:
    """Those that were asked for, or those that an interrupted run came to."""
    results, run = tmp_path / "h200", tmp_path / "run.json"
    report(result(), result(case="2K"), result(case="4K")).save(run)
    tables.keep(run, tmp_path)
    later = replace(report(result(case="2K", us=5.0)), settings={"precision": 0.01, **part})
    later.environment["commit"] = "7654321"
    later.save(run)
    tables.keep(run, tmp_path)
    kept = Report.load(results / "operators" / "f.json")
    assert [(r.case, r.commit) for r in kept.results] == [("1K", "abc"), ("2K", ""), ("4K", "abc")]
    assert kept.results[1].seconds == later.results[0].seconds and "cases" not in kept.settings
    assert "commit 7654321; abc: 2 cases.\n" in tables._of_pair("f", kept, tables.REPO)
    assert "eager" in kept.results[1].peers and not kept.results[1].peers["eager"].commit
    # A peer that was left out or unavailable this time stays, with its commit.
    more = {"compile": PeerResult(around(2e-5), around(2.0))}
    for commit, peers in (("fedcba9", more), ("0123456", {"eager": PeerResult(missing="no")})):
        alone = replace(later, results=[result(case="2K", us=5.0, peers=peers)])
        alone.environment["commit"] = commit
        alone.save(run)
        tables.keep(run, tmp_path)
        kept = Report.load(results / "operators" / "f.json")
        assert [*kept.results[1].peers] == ["eager", "compile"]
        assert kept.results[1].peers["eager"].commit == "7654321"
    assert (
        "commit 0123456; abc: 2 cases; 7654321: eager in 1 case; fedcba9: compile in 1 case. Peers"
        in tables._of_pair("f", kept, tables.REPO)
    )
    later.environment["torch"] = "3.0"
    later.save(run)
    with pytest.raises(BenchmarkError, match=r"measured with torch .*, these with 3\.0"):
        tables.keep(run, tmp_path)
