"""The machinery of the test kit: processes that die, and reports.

What it draws is in test_kit_samples.py, its plugin for pytest in test_pytest_plugin.py.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest
import torch
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

from cuda_ops.benchmarking.compare import QUICK
from cuda_ops.benchmarking.kit import Kit
from cuda_ops.build.compiling import build
from cuda_ops.build.elf import runs_on, undefined_symbols
from cuda_ops.errors import CudaOpsError
from cuda_ops.registry import operators_of, registry
from cuda_ops.spec import Claims
from cuda_ops.testing import (
    PROFILES,
    Sample,
    TensorArg,
    check_op,
    describe,
)
from cuda_ops.testing.__main__ import main, replay
from cuda_ops.testing.case import Case, Check, NotRunError
from cuda_ops.testing.checks import by_name
from cuda_ops.testing.draw import Draw, chosen
from cuda_ops.testing.memory import much_memory
from cuda_ops.testing.report import (
    CheckEntry,
    CheckReport,
    markdown,
    not_run_counts,
    read_junit,
)
from cuda_ops.testing.runner import why_not
from cuda_ops.testing.subject import ITSELF, Origin, Subject, find
from cuda_ops.testing.worker import (
    IN_WORKER,
    UNJUDGED,
    Outcome,
    Worker,
    _telling,
    load_origin,
    perform,
)


@pytest.fixture(scope="module", autouse=True)
def silu() -> None:
    registry().load("silu", build(registry().pairs()["silu"]).path)


# --- the library and the GPU -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("9.0a", (9, 0), True),
        ("9.0a", (10, 0), False),
        ("8.0", (8, 9), True),
        ("8.9", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0 8.6+PTX", (12, 0), True),
        ("12.0+PTX", (9, 0), False),
    ],
)
def test_code_for_a_gpu(archs: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(archs, capability) is runs


def test_a_library_leaves_only_stable_symbols_open() -> None:
    path = Path(find("silu").origin.library)
    names = dict(undefined_symbols(path.read_bytes()))
    assert "torch_library_impl" in names and "aoti_torch_empty_strided" in names


# --- running -------------------------------------------------------------------------------------


def test_an_operator_can_be_checked_by_name_in_a_process_of_its_own() -> None:
    report = check_op("silu", checks=[by_name("registration")])
    assert report.passed and report.entries[0].count == PROFILES["quick"].examples
    with pytest.raises(CudaOpsError, match="no operator 'sillu'"):
        check_op("sillu")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"devices": "cpu"}, "'devices': expected a list of 'cpu', 'cuda' or 'cuda:N', got 'cpu'"),
        ({"devices": ["gpu"]}, "'devices': expected a list of .*, got 'gpu'"),
        ({"devices": ["cpu", "CPU"]}, "'devices': expected a list of .*, got 'CPU'"),
        ({"devices": ["cuda:"]}, "'devices': expected a list of .*, got 'cuda:'"),
        ({"devices": [torch.device("meta")]}, "'devices': expected a list of .*, got 'meta'"),
        ({"devices": []}, "'devices': expected a list of .*, got none"),
        ({"devices": None}, "'devices': expected a list of .*, got None"),
        ({"checks": []}, "'checks': expected at least one check, got none"),
        (
            {"checks": "public"},
            "'checks': expected a list of checks or of their names, got 'public'",
        ),
        ({"checks": by_name("public")}, "'checks': expected a list of .* names, got 'public'"),
        ({"checks": [3]}, "'checks': expected a list of checks or of their names, got 3"),
        (
            {"checks": ["streams"], "devices": ["cpu"]},
            "'checks': expected one that runs on 'cpu', got 'streams'",
        ),
        ({"profile": "quik"}, "'profile': expected a Profile, or 'quick', .*'nightly', got 'quik'"),
        ({"profile": None}, "'profile': expected a Profile, or 'quick', .*, got None"),
        ({"op": torch.relu}, "'op': expected the name of an operator, or what .* got .* 'relu'"),
        ({"op": None}, "'op': expected the name of an operator, or what .* got NoneType None"),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(value),
)
def test_what_would_check_nothing_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^check_op: argument {text}"):
        check_op(**{"op": "silu", "isolate": False, **given})


def test_a_check_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no check 'pubic'; known: abi, "):
        check_op("silu", checks=["pubic"])


def test_checks_devices_and_profiles_may_be_named() -> None:
    named: dict[str, Any] = {"checks": ["registration"], "profile": "quick", "isolate": False}
    report = check_op("silu", devices=[torch.device("cpu")], **named)
    (entry,) = report.entries
    assert entry.passed and (entry.check, entry.device) == ("registration", "cpu")


def test_an_operator_that_refuses_everything_fails() -> None:
    def nothing(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("nothing at all")

    with torch.library._scoped_library("refusing", "DEF") as library:
        library.define("everything(Tensor x) -> Tensor")
        library.impl("everything", nothing, "CompositeExplicitAutograd")
        subject = describe("refusing::everything", "()->()", reference=nothing)
        (entry,) = check_op(
            subject, checks=[by_name("reference")], devices=["cpu"], isolate=False
        ).entries
    assert entry.passed is False and "every sample is refused" in entry.detail
    assert "what it takes: RuntimeError: nothing at all, for Sample((TensorArg((" in entry.detail


@pytest.fixture
def reciprocal() -> Iterator[Subject]:
    """It refuses 0, as its reference does, and rows that are not adjacent in memory."""

    def divided(x: torch.Tensor, by: int) -> torch.Tensor:
        if by == 0:
            raise ValueError("by 0")
        return x / by

    def of_contiguous(x: torch.Tensor, by: int) -> torch.Tensor:
        if not x.is_contiguous():
            raise RuntimeError("these strides")
        return divided(x, by)

    x = TensorArg((3, 2), torch.float64)
    with torch.library._scoped_library("refusing", "DEF") as library:
        library.define("divided(Tensor x, int by) -> Tensor")
        library.impl("divided", of_contiguous, "CompositeExplicitAutograd")
        # Hypothesis begins with the smallest.
        samples = st.integers(0, 9).map(lambda by: Sample((x, by)))
        yield describe("refusing::divided", reference=divided, strategy=samples)


def test_few_samples_have_more_than_one_element() -> None:
    """A gradient of a sum that runs the wrong way is right for one."""
    for name in ("cumulative_sum", "bitonic_topk"):
        subject = find(name)
        samples = chosen(subject, replace(by_name("gradcheck").draw, choices=False))
        assert len(samples) == 3
        assert all(sample.numel > 1 for sample in samples), samples


def test_others_are_drawn_in_place_of_samples_that_are_refused(reciprocal: Subject) -> None:
    few = replace(by_name("reference"), draw=Draw(1))
    (sample,) = chosen(reciprocal, few.draw)
    assert sample.args[1] == 0
    report = check_op(reciprocal, checks=[few], devices=["cpu"], isolate=False)
    (entry,) = report.entries
    assert entry.passed and entry.count == 1, str(report)
    assert entry.refusal == f"ValueError: by 0, for {sample}"
    assert f"by its reference too: {entry.refusal}" in str(report)
    again = replay(f"refusing::divided::reference[cpu] {sample}", isolate=False)
    assert again.passed is None and again.reason.endswith(f"too: {entry.refusal}")


def test_a_check_that_gets_no_sample_quotes_the_smallest_refused_one(reciprocal: Subject) -> None:
    samples = st.integers(1, 3).map(lambda n: Sample((TensorArg((n, 2), torch.float64), 0)))
    few = replace(by_name("empty"), draw=Draw(3))
    report = check_op(
        replace(reciprocal, strategy=samples), checks=[few], devices=["cpu"], isolate=False
    )
    (entry,) = report.entries
    assert entry.passed is None and entry.refusal.startswith("ValueError: by 0, for Sample")
    assert "TensorArg((1, 2)" in entry.refusal
    line = f"not run empty[cpu]: {entry.detail}: {entry.refusal}"
    assert line in str(report) and markdown([report]).endswith(f"1. {line[8:]}\n")
    (counted,) = not_run_counts([entry, entry])
    assert counted == f"not run 2: {entry.detail}: {entry.refusal}"


def test_what_only_a_variant_of_a_sample_meets_is_no_refusal(reciprocal: Subject) -> None:
    def nothing(x: torch.Tensor, by: int) -> torch.Tensor:
        raise ValueError("nothing at all")

    case = Case(replace(reciprocal, reference=nothing), "cpu", Sample((TensorArg((3, 2)), 2)))

    def transposed(case: Case) -> None:
        x, by = case.arguments()
        case.call(x.t(), by)

    check = replace(by_name("layouts"), body=transposed)
    assert perform(check, case) == Outcome("failed", "RuntimeError: these strides")
    refused = replace(case, sample=Sample((TensorArg((3, 2)), 0)))
    assert perform(check, refused).status == "not run"


def test_after_a_hang_nothing_else_is_waited_for() -> None:
    class Hangs(Worker):
        def __call__(self, check: Check, case: Case) -> Outcome:
            return Outcome("failed", "still running", True, True)

    checks = [by_name("layouts"), by_name("reference")]
    with Hangs(1) as worker:
        report = check_op("silu", checks=checks, devices=["cpu"], isolate=worker)
    assert [(e.check, e.passed) for e in report.entries] == [
        ("layouts", False),
        ("reference", None),
    ]
    assert report.entries[1].detail == "the operator hung in layouts"


def test_what_ends_four_checks_is_not_asked_further() -> None:
    class Dies(Worker):
        def __call__(self, check: Check, case: Case) -> Outcome:
            return Outcome("failed", "the process died", fatal=True, died=True)

    names = ("empty", "bounds", "reference", "layouts", "numerics", "opcheck")
    with Dies(1) as worker:
        report = check_op(
            "silu", checks=[by_name(name) for name in names], devices=["cpu"], isolate=worker
        )
    assert [e.passed for e in report.entries] == [False] * 4 + [None] * 2
    reason = f"the operator ended the process in {', '.join(names[:4])}"
    assert [e.detail for e in report.entries[4:]] == [reason] * 2


TALKATIVE = """
import os, time, torch
from cuda_ops.testing import describe

@torch.library.custom_op("talkative::{name}", mutates_args=())
def {name}(x: torch.Tensor) -> torch.Tensor:
    print(*range(100), sep="\\n", flush=True)
    {end}

describe("talkative::{name}", "()->()", reference=torch.clone, differentiable=False)
"""


#: An operator that is right, and a reference that never ends.
PONDERING = """
import time
import torch
from cuda_ops.testing import describe

@torch.library.custom_op("pondering::f", mutates_args=())
def f(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

describe("pondering::f", "()->()", reference=lambda x: time.sleep(600), differentiable=False)
"""


@pytest.mark.parametrize(
    ("name", "end", "said"),
    [
        ("hang", "time.sleep(60)", "its stack"),
        ("crash", "os.abort()", "Fatal Python error: Aborted"),
        ("leave", "print('no licence', flush=True); os._exit(3)", "no licence"),
    ],
)
@pytest.mark.slow
def test_last_words_are_not_lost_among_what_an_operator_prints(
    name: str, end: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / f"talkative_{name}.py"
    file.write_text(TALKATIVE.format(name=name, end=end))
    load_origin(Origin(file=str(file)))
    # The limit of a hang leaves time to import what the check needs beside other workers.
    with Worker(15.0 if name == "hang" else 60.0) as worker:
        case = Case(find(f"talkative::{name}"), "cpu", Sample((TensorArg((2,)),)))
        outcome = worker(by_name("reference"), case)
    assert outcome.fatal and said in outcome.detail
    assert "numerics.py" in outcome.detail or name == "leave"


@pytest.mark.slow
def test_a_reference_that_takes_long_is_no_hang_of_the_operator(tmp_path: Path) -> None:
    file = tmp_path / "pondering.py"
    file.write_text(PONDERING)
    load_origin(Origin(file=str(file)))
    with Worker(15.0) as worker:
        case = Case(find("pondering::f"), "cpu", Sample((TensorArg((2,)),)))
        outcome = worker(by_name("reference"), case)
    assert outcome.label == UNJUDGED and outcome.fatal and not outcome.hung
    assert "the kit was still computing the reference and comparing after 15 s" in outcome.detail


@pytest.mark.parametrize(("turns", "answers"), [(8, True), (100, False)])
def test_a_case_may_take_longer_than_the_limit_of_one_turn(
    monkeypatch: pytest.MonkeyPatch, turns: int, answers: bool
) -> None:
    """What goes on to say whose turn it is does not hang, until it has taken far too long."""
    script = (
        "import sys, time\n"
        f"for turn in range({turns}):\n"
        '    print(\'{"judging": true}\\n{"judging": false}\', flush=True)\n'
        "    time.sleep(0.2)\n"
        'print(\'{"status": "passed"}\', flush=True)\n'
    )
    monkeypatch.setattr("cuda_ops.testing.worker._MOST_TIMEOUTS", 3)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        found = Worker(1.0)._exchange(process, None, 1.0)
        process.kill()
    assert (found == {"status": "passed"}) == answers


@pytest.mark.slow
def test_an_operator_may_be_described_in_a_module_of_a_package(tmp_path: Path) -> None:
    folder = tmp_path / "packaged" / "ops"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder.parent / "doubled.py").write_text("def double(x):\n    return x * 2\n")
    source = TALKATIVE.format(name="packaged", end="return double(x)")
    source = source.replace("torch.clone", "double")
    (folder / "double.py").write_text(f"from ..doubled import double\n{source}")
    load_origin(Origin(file=str(folder / "double.py")))
    report = check_op("talkative::packaged", checks=[by_name("layouts")], devices=["cpu"])
    assert report.passed, report


def test_a_file_that_fails_fails_again(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text("raise OSError('no licence')\n")
    for _ in range(2):
        with pytest.raises(OSError, match="no licence"):
            load_origin(Origin(file=str(file)))
    with pytest.raises(ValueError, match=r"missing\.py is not a Python file"):
        load_origin(Origin(file=str(tmp_path / "missing.py")))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"x = 1\ndef f(:\n", ":2: SyntaxError: invalid syntax"),
        (b"def f():\nx = 1\n", ":2: IndentationError: expected an indented block"),
        (b"x = '\xff'\n", ":1: SyntaxError: (unicode error) 'utf-8' codec can't decode byte 0xff"),
        (b"import sys\n\nsys.exit(3)\n", ":3: expected a file that describes operators, got one "),
        (b"import nonsensical", ": {folder}/nonsensical.py:3: SyntaxError: invalid syntax"),
    ],
)
def test_a_file_that_python_cannot_run_is_one_line(
    source: bytes,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nonsensical.py").write_text("\n\nx = = 1\n")
    file = tmp_path / "unreadable.py"
    file.write_bytes(source)
    assert main(["report", "silu", "--file", str(file)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {file}{said.format(folder=tmp_path)}"), err
    assert err.count("\n") == 1 and out == ""


def test_what_no_file_describes_is_checked_in_this_process_alone() -> None:
    exec(TALKATIVE.format(name="notebook", end="return x.clone()"), {"__name__": "__main__"})
    with pytest.raises(CudaOpsError, match="talkative::notebook is described outside of any file"):
        check_op("talkative::notebook")
    few = [by_name("layouts")]
    assert check_op("talkative::notebook", checks=few, devices=["cpu"], isolate=False).passed


def test_checks_at_the_top_of_a_describing_file_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(IN_WORKER, "1")
    with pytest.raises(RuntimeError, match="__name__"):
        check_op("silu")


@pytest.mark.slow
def test_what_takes_long_is_named_with_its_stack() -> None:
    code = """
import time
from cuda_ops.testing.announce import announced
def slow():
    time.sleep(2)
for what in ("the first", "the second"):
    with announced(what, seconds=0.5):
        slow()
with announced("the last", seconds=60):
    pass
"""
    # In a process of its own: pytest has the one timer that shows stacks.
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    for what in ("the first", "the second"):
        assert f"{what} has taken 0.5 s" in said
    assert said.count(" in slow\n") == 2 and "the last" not in said, said


def test_reports_that_tests_recorded_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = (
        CheckEntry("layouts", "cpu", True, count=3),
        CheckEntry("streams", "cuda", None, "no"),
    )
    reports = [CheckReport("g", entries, "on a GPU"), CheckReport("f", entries, "on a GPU")]
    properties = "".join(
        f"<property name='cuda_ops_report' value={quoteattr(json.dumps(report.as_json()))}/>"
        for report in reports
    )
    file = tmp_path / "tests.xml"
    file.write_text(
        f"<testsuites><testcase><properties>{properties}</properties></testcase></testsuites>"
    )
    assert read_junit(file) == reports[::-1]
    assert main(["report", "--junit", str(file)]) == 0
    table = capsys.readouterr().out
    assert table.startswith("on a GPU.") and "| layouts[cpu] | 3 | 3 |" in table


def test_sharding_is_not_checked_where_torch_cannot_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    check, subject = by_name("dtensor"), find("add_rms_norm_")
    assert why_not(check, subject, "cpu") == ""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0"))
    assert "before 2.11 cannot share out" in why_not(check, subject, "cpu")
    assert why_not(check, find("rms_norm"), "cpu") == ""


@pytest.mark.parametrize("name", ["absent", "cuda_ops::"])
def test_an_unknown_operator_is_refused_before_others_are_checked(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "relu", name]) == 2
    said = capsys.readouterr().err
    assert "error: no operator " in said and "checked relu" not in said


@pytest.mark.usefixtures("ctrl_c")
def test_a_report_that_is_interrupted_has_what_was_checked() -> None:
    """Ctrl-C in the command's process alone ends the others too, which say nothing."""
    later = ["rotary_embedding", "layer_norm", "moe_experts_backward"]  # of a minute and more
    command = ["report", "relu", *later, "--profile", "quick", "--jobs", "2"]
    running = subprocess.Popen(
        [sys.executable, "-m", "cuda_ops.testing", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    lines = []
    for line in running.stderr:
        lines.append(line)
        if line.startswith("checked "):
            running.send_signal(signal.SIGINT)
            break
    table, said = running.communicate(timeout=60)
    assert running.returncode == 130, "".join(lines) + said
    assert lines[-1].startswith("checked relu") and lines[-1].endswith(": passed\n")
    assert re.fullmatch(r"(checked .*\n)*interrupted; operators checked: \d\n", said)
    assert "| relu" in table and "moe_experts_backward" not in table


@pytest.mark.parametrize("command", ["fuzz", "mutate"])
@pytest.mark.parametrize("minutes", ["-1", "0", "nan", "inf", "few"])
def test_minutes_are_above_zero(
    command: str, minutes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([command, "--minutes", minutes])
    assert refused.value.code == 2
    expected = f"argument --minutes: expected a number above 0, got {minutes!r}"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["report", "--jobs", "0"], "--jobs"),
        (["fuzz", "--jobs", "-1"], "--jobs"),
        (["mutate", "--jobs", "none"], "--jobs"),
        (["mutate", "--limit", "0"], "--limit"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    expected = f"argument {name}: expected a whole number from 1 on, got {arguments[-1]!r}"
    assert expected in capsys.readouterr().err


def test_a_report_counts_samples_that_once_failed_with_their_check(tmp_path: Path) -> None:
    ran, once = (
        CheckEntry("layouts", "cpu", True, count=3),
        CheckEntry("layouts", "cpu", True, count=1),
    )
    failed = CheckEntry("streams", "cuda", False, "no")
    left_out = CheckEntry("streams", "cuda", None, "no GPU")
    reports = [
        CheckReport("f", entries)
        for entries in ((once,), (ran,), (left_out,), (failed,), (left_out,))
    ]
    properties = "".join(
        f"<property name='cuda_ops_report' value={quoteattr(json.dumps(report.as_json()))}/>"
        for report in reports
    )
    file = tmp_path / "tests.xml"
    file.write_text(f"<testsuites><testcase>{properties}</testcase></testsuites>")
    (merged,) = read_junit(file)
    assert merged.entries == (replace(ran, count=4), failed)


def test_a_pair_is_named_for_all_its_operators_each_once() -> None:
    names = operators_of(["relu", "relu_backward", "scale_relu", "other::library"])
    assert names == ["relu", "relu_backward", "scale_relu", "other::library"]


def test_a_report_counts_what_was_not_run() -> None:
    entries = (
        CheckEntry("layouts", "cpu", True, count=3),
        CheckEntry("layouts", "cuda", None, "no CUDA device"),
        CheckEntry("vmap", "cuda", None, "no CUDA device"),
        CheckEntry("vmap", "cpu", False, "wrong", "the rule", reproduce="python ..."),
    )
    report = CheckReport("f", entries)
    assert not report.passed and report.failures == entries[3:]
    assert "not run layouts[cuda], vmap[cuda]: no CUDA device" in str(report)
    assert str(report).endswith("1 passed, 1 failed, 2 not run")
    assert report.summary().splitlines() == [
        "f: 1 FAILED, 1 passed, 2 not run: 2 for 1 reason",
        *str(entries[3]).splitlines(),
    ]
    kept = [CheckEntry(name, "cuda", None, "no CUDA device") for name in "abcde"]
    itself = CheckEntry("reference", "cpu", True, ITSELF)
    few = (CheckEntry("lists", "cpu", None, "no lists"), CheckEntry("jvp", "cpu", None, "no jvp"))
    summary = CheckReport("f", (itself, *kept, *few), notes=("fast math",)).summary()
    reasons = "7 not run: 5 no CUDA device, 2 for 2 other reasons"
    assert summary == f"f: 1 passed (compared with itself), {reasons}\nfast math"
    other = CheckReport("g", (replace(entries[0], count=5), replace(entries[3], passed=None)))
    table = markdown([report, other, CheckReport("h", entries[:1])])
    assert "| layouts[cpu] | 3 | 5 | 3 |" in table
    assert "| vmap[cpu] | **FAILED** | (2) | not asked for |" in table
    assert table.endswith("1. layouts[cuda], vmap[cuda]: no CUDA device\n2. vmap[cpu]: wrong\n")


def test_a_claim_needs_its_reason() -> None:
    with pytest.raises(ValueError, match="give the reason"):
        Claims(deterministic=False)
    assert not Claims(deterministic=False, reason="atomics").deterministic


def test_describe_compares_the_signature_with_the_schema() -> None:
    library = torch.library.Library("kit", "FRAGMENT")
    library.define("two(Tensor x, Tensor y) -> Tensor")
    with pytest.raises(ValueError, match="has 1 tensor arguments, the schema has 2"):
        describe("kit::two", "()->()", reference=torch.add)
    with pytest.raises(ValueError, match="give a signature line, or a strategy"):
        describe("kit::two", reference=torch.add)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        *(
            ({"name": name}, "'name': expected an operator that torch.library knows, such as")
            for name in ("aten::nosuch", "silu", "", torch.ops.aten.relu)
        ),
        ({"signature": 3}, r"'signature': expected a line such as '\(n\)->\(n\)', got 3"),
        ({"reference": 1}, "'reference': expected a function, got 1"),
        ({"dtypes": []}, r"'dtypes': expected a list of dtypes, at least one, got \[\]"),
        ({"dtypes": torch.float32}, "'dtypes': expected a list of .*, got torch.float32"),
        ({"dtypes": ["float32"]}, "'dtypes': expected a list of dtypes"),
        ({"strategy": 1}, "'strategy': expected a Hypothesis strategy, got 1"),
        ({"sharding": 1}, "'sharding': expected a function, got 1"),
        ({"claims": 1}, "'claims': expected Claims, got 1"),
        ({"kernel_samples": [1]}, r"'kernel_samples': expected a list of Sample, got \[1\]"),
        (
            {"autocast": "a"},
            "'autocast': expected 'lower_precision', 'float32' or 'promote', or .*'a'",
        ),
        ({"autocast": 3}, "'autocast': expected .*, got 3"),
        ({"autocast": {"x": "float32"}}, "'autocast': expected .*, got {'x': 'float32'}"),
    ],
    ids=str,
)
def test_describe_names_what_it_does_not_take(given: dict[str, Any], text: str) -> None:
    right = {"name": "aten::relu", "signature": "()->()", "reference": torch.relu}
    with pytest.raises(ValueError, match=f"^describe: argument {text}"):
        describe(**{**right, **given})


def test_describe_counts_the_outputs_of_the_line() -> None:
    with pytest.raises(ValueError, match="has 2 outputs, the schema has 1"):
        describe("aten::relu", "()->(),()", reference=torch.relu)


@pytest.mark.parametrize("device", ["tpu", "meta", None, 3.5])
def test_a_kit_of_benchmarks_names_a_device_that_it_does_not_take(device: Any) -> None:
    text = "^Kit: argument 'device': expected 'cpu', 'cuda', 'cuda:N' or such a torch.device, got "
    with pytest.raises(ValueError, match=f"{text}{device!r}"):
        Kit(device)


def test_a_kit_of_benchmarks_takes_a_device_by_name() -> None:
    assert Kit("cpu", QUICK).device == torch.device("cpu")


# --- the memory of a GPU --------------------------------------------------------------------------


@pytest.fixture
def eighty_gigabytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Answers what the kit asks about memory as an idle GPU of 80 GB would."""
    gpu = SimpleNamespace(total_memory=80e9, uuid="none")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80e9, 80e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, index: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.usefixtures("eighty_gigabytes")
@pytest.mark.slow
def test_a_gpu_s_memory_is_given_out_in_parts() -> None:
    with pytest.raises(NotRunError, match="70 GB of memory wanted, the GPU has 80"):
        much_memory("cuda", 70e9).__enter__()
    with much_memory("cuda", 30e9), much_memory("cuda", 30e9), pytest.raises(NotRunError) as late:
        much_memory("cuda", 5e9, patience=0.1).__enter__()
    assert "other tests had" in str(late.value)
    with pytest.raises(NotRunError, match="which was not enough"), much_memory("cuda", 60e9):
        raise torch.OutOfMemoryError
    with much_memory("cuda", 60e9, patience=0.1):
        pass  # all of it was given back


def test_of_a_crash_what_tells_is_kept() -> None:
    head = "Fatal Python error"
    said = ["loading", f"{head}: Aborted", "  File 'op.py'", "Extension modules: numpy, torch"]
    assert _telling(said, head) == said[1:3]
