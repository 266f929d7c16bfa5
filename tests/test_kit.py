"""The machinery of the test kit: samples that print, processes that die, reports.

Its plugin for pytest is in test_pytest_plugin.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest
import torch
from hypothesis import strategies as st

from cuda_ops.build.compiling import build
from cuda_ops.errors import CudaOpsError, PluginError
from cuda_ops.registry import operators_of, registry
from cuda_ops.spec import Claims
from cuda_ops.testing import (
    CHECKS,
    PROFILES,
    Sample,
    TensorArg,
    check_op,
    describe,
)
from cuda_ops.testing.__main__ import main, parse_line, replay
from cuda_ops.testing.case import Case, Check, NotRunError
from cuda_ops.testing.checks import QUICK, by_name
from cuda_ops.testing.checks.abi import runs_on, undefined_symbols
from cuda_ops.testing.draw import Draw, chosen, covering, follows_line
from cuda_ops.testing.memory import much_memory
from cuda_ops.testing.report import (
    CheckEntry,
    CheckReport,
    markdown,
    not_looked_at,
    not_run_counts,
    read_junit,
)
from cuda_ops.testing.runner import run_check
from cuda_ops.testing.samples import LAYOUTS
from cuda_ops.testing.subject import Origin, Subject, find, subject_of
from cuda_ops.testing.worker import (
    IN_WORKER,
    Outcome,
    Worker,
    _telling,
    load_origin,
    perform,
)

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def silu() -> None:
    registry().load("silu", build(registry().pairs()["silu"]).path)


# --- samples and lines ------------------------------------------------------------------


def test_a_sample_prints_without_defaults_or_quotes_that_a_shell_minds() -> None:
    sample = Sample((TensorArg((2, 3), layout="sliced"), 0.5, None), "special", 7)
    assert repr(sample) == (
        'Sample((TensorArg((2, 3), layout="sliced"), 0.5, None), values="special", seed=7)'
    )
    assert Sample.parse(repr(sample)) == sample
    infinite = Sample((float("inf"),))
    assert Sample.parse(repr(infinite)) == infinite


@pytest.mark.parametrize("line", ["1", "Sample(", "__import__('os')", "Sample((nothing,))"])
def test_what_is_no_sample_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="does not describe a sample"):
        Sample.parse(line)


def test_one_argument_without_its_comma_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not a tuple; a single one needs a comma, Sample\(\(x,"):
        Sample.parse('Sample((TensorArg((2,), layout="stepped")))')


def test_the_line_in_the_document_can_be_replayed() -> None:
    text = (REPO / "docs" / "testing.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"reproduce: .* replay '(.*)'", text)
    arg = TensorArg((2,), dtype=torch.float64, layout="stepped")
    assert parse_line(line)[3] == Sample((arg,))


def test_a_line_names_operator_check_device_and_sample() -> None:
    line = "good::exp::layouts[cuda:1] Sample((TensorArg((3,)),))"
    assert parse_line(line) == ("good::exp", "layouts", "cuda:1", Sample((TensorArg((3,)),)))
    assert parse_line("silu::abi[any]") == ("silu", "abi", "any", Sample(()))
    with pytest.raises(ValueError, match=r"expected OP::CHECK\[DEVICE\] Sample"):
        parse_line("silu layouts")


def test_replay_says_what_became_of_the_sample(capsys: pytest.CaptureFixture[str]) -> None:
    line = 'silu::layouts[cpu] Sample((TensorArg((2, 3), layout="stepped"),))'
    assert main(["replay", line]) == 0
    assert main(["replay", "--here", line]) == 0
    assert capsys.readouterr().out == "ok      layouts[cpu]: 1 sample\n" * 2
    assert main(["replay", "silu::nothing[cpu]"]) == 2
    assert "no check 'nothing'; known: abi, " in capsys.readouterr().err
    assert main(["replay", "sillu::layouts[cpu]"]) == 2
    assert "no operator 'sillu'; known: " in capsys.readouterr().err
    assert main(["replay", "elsewhere::f::layouts[cpu]"]) == 2
    assert "elsewhere::f is not described" in capsys.readouterr().err


# --- the list of checks ----------------------------------------------------------------------


def test_what_indexes_what_is_not_made_from_the_signature_line() -> None:
    add = find("add")
    assert follows_line(add)
    indices = Sample((TensorArg((3, 4)), TensorArg((3, 4), torch.int64, below=3)))
    assert not follows_line(replace(add, strategy=st.just(indices)))


def test_distinct_indices_fill_any_layout_but_expanded() -> None:
    for layout in ("contiguous", "transposed", "sliced", "stepped", "offset"):
        arg = TensorArg((3, 4), torch.int64, layout, below=13, distinct=True)
        (made,) = Sample((arg,)).make()
        assert made.unique().numel() == 12 and made.min() >= 0 and made.max() < 13
        assert Sample.parse(repr(Sample((arg,)))) == Sample((arg,))
    wrong: list[dict[str, Any]] = [{}, {"below": 11}, {"below": 12, "layout": "expanded"}]
    for rest in wrong:
        with pytest.raises(ValueError, match="'distinct': expected at most 'below' elements"):
            TensorArg((3, 4), torch.int64, distinct=True, **rest)


def test_indices_are_tried_where_samples_have_some_with_a_signature_line_too() -> None:
    add, indices = find("add"), by_name("indices")
    labels = Sample((TensorArg((3, 4)), TensorArg((3, 4), torch.int64, below=3)))
    assert indices.excuse(add, "cpu").startswith("no index tensors")
    assert not indices.excuse(replace(add, strategy=st.just(labels)), "cpu")


@pytest.mark.parametrize("name", ["moe", "scale_relu"])
def test_a_composed_operator_is_mapped_if_its_parts_are(name: str) -> None:
    excuse, hooks = by_name("vmap").excuse, registry().plugins
    assert not excuse(find(name), "cpu")
    unmapped = replace(find(name).op, calls=("moe_route", "moe_route_map"))
    assert "cuda_ops_vmap of the operators it calls" in excuse(subject_of(unmapped, hooks), "cpu")


def test_layouts_are_tried_where_samples_name_none() -> None:
    adapt = by_name("layouts").draw.adapt
    adapted = adapt(Sample((TensorArg((3, 4)), TensorArg((5,), layout="offset"))))
    assert [arg.layout for arg in adapted.tensors] == ["transposed", "stepped"]
    some = Sample((TensorArg((3, 4)), TensorArg((5,), layout="sliced")))
    assert adapt(some) == some
    nonsense: Any = "nonsense"
    with pytest.raises(ValueError, match=r"'layout': expected one of .*, got 'nonsense'"):
        TensorArg((3,), layout=nonsense)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([Sample((TensorArg((3,)),))], "a Hypothesis strategy, got list"),
        (st.just(3), "a strategy of Sample, got one of int"),
        (st.just(Sample((TensorArg((3,)),))), "arguments a, b, got 1 in Sample"),
    ],
)
def test_samples_that_no_call_can_take_are_refused(answer: object, message: str) -> None:
    asked = "cuda_ops_samples"
    hooks: Any = SimpleNamespace(ask=lambda hook, op: answer if hook == asked else None)
    with pytest.raises(PluginError, match=f"cuda_ops::add: hook cuda_ops_samples: .*{message}"):
        chosen(subject_of(find("add").op, hooks), Draw(1))


@pytest.mark.parametrize(
    ("name", "least"), [("silu", 0), ("add", 0), ("rms_norm", 1), ("matmul", 2)]
)
def test_each_dtype_and_each_layout_is_drawn(name: str, least: int) -> None:
    found = covering(find(name), Draw(adapt=lambda sample: sample), 40)
    assert len({repr(sample) for sample in found}) == len(found)
    args = [arg for sample in found for arg in sample.tensors]
    assert {arg.dtype for arg in args} == set(find(name).op.dtypes)
    assert {arg.layout for arg in args} == set(LAYOUTS)
    assert {len(arg.shape) for arg in args} >= set(range(least, 5))


def test_no_sample_is_run_twice() -> None:
    lines: list[str] = []
    check = replace(by_name("layouts"), body=lambda case: lines.append(repr(case.sample)))
    assert check_op("silu", checks=[check], devices=["cpu"], isolate=False).passed
    assert len(lines) == len(set(lines)) == PROFILES["quick"].examples


def test_a_check_may_end_after_a_time_and_says_so() -> None:
    profile = replace(PROFILES["nightly"], seconds=0.0)
    entry = run_check(by_name("reference"), find("relu"), "cpu", profile, perform)
    assert entry.passed and 0 < entry.count < 100, str(entry)
    assert entry.detail.startswith("stopped after 0 s")


def test_samples_that_are_too_large_are_named_and_nothing_else_passes() -> None:
    sizes = st.sampled_from((5000, 6000))
    large = sizes.map(lambda n: Sample((TensorArg((n,)), TensorArg((n,)))))
    both = st.one_of(large, st.just(Sample((TensorArg((3,)), TensorArg((3,))))))
    add = find("add")
    unsigned = replace(add, op=replace(add.op, signature=None))  # so samples are the plugin's alone
    checks = [by_name("reference")]
    entries = [
        check_op(
            replace(unsigned, strategy=strategy), checks=checks, devices=["cpu"], isolate=False
        ).entries[0]
        for strategy in (large, both)
    ]
    assert [entry.passed for entry in entries] == [False, True]
    named = "2 drawn samples have more than 4096 elements: Sample((TensorArg((5000,)), "
    assert f"nothing was compared: {named}" in entries[0].detail
    assert named in entries[1].detail


def test_a_sample_that_takes_too_long_is_not_run() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        end = time.process_time() + 1e-9 * x.numel() ** 2 * 2
        while time.process_time() < end:
            pass
        return x.clone()

    subject = replace(find("silu"), reference=lambda x: slow(torch.nn.functional.silu(x)))
    case = Case(subject, "cpu", Sample((TensorArg((65537,)),)))
    outcome = perform(by_name("large"), case)
    assert outcome.status == "not run" and outcome.detail.startswith("65537 in one dim would take")


def test_a_run_says_what_it_did_not_look_at() -> None:
    entries = [CheckEntry("layouts", "cpu", True)]
    line = not_looked_at(entries, ["layouts", "leaks", "dtensor"])
    assert line.startswith("not looked at: leaks, dtensor (pytest --cuda-ops runs them); ")
    assert line.endswith("compute-sanitizer (pytest --cuda-ops --sanitize runs it)")
    assert ("CUDA kernels (no GPU here)" in line) is not torch.cuda.is_available()


def test_only_what_has_a_gradient_is_asked_for_one() -> None:
    add = replace(find("add"), differentiable=(0,))
    case = Case(add, "cpu", chosen(add, Draw(1))[0])
    assert [leaf.requires_grad for leaf in case.leaves()] == [True, False]
    assert [leaf.requires_grad for leaf in case.leaves(even_refused=True)] == [True, True]


def test_every_class_has_a_check_and_a_row_in_the_document() -> None:
    assert {check.number for check in CHECKS} == {None, *range(1, 16)}
    assert len({check.name for check in CHECKS}) == len(CHECKS) > len(QUICK) > 10
    text = (REPO / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d*) ?\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted((str(check.number or ""), check.name) for check in CHECKS)


def test_every_profile_is_in_the_document() -> None:
    text = (REPO / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (yes|no) \|", text, re.MULTILINE)
    assert rows == [
        (p.name, str(p.examples), "yes" if p.derandomize else "no") for p in PROFILES.values()
    ]


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
    report = check_op("silu", checks=[by_name("layouts")])
    assert report.passed and report.entries[0].count == PROFILES["quick"].examples
    with pytest.raises(CudaOpsError, match="no operator 'sillu'"):
        check_op("sillu")


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
        samples = chosen(subject, by_name("gradcheck").draw)
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
