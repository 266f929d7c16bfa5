"""What the test kit draws and runs: samples that print, and the list of checks."""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from cuda_ops.build.compiling import build
from cuda_ops.errors import PluginError
from cuda_ops.registry import registry
from cuda_ops.testing import CHECKS, PROFILES, Sample, TensorArg, check_op, draw
from cuda_ops.testing.__main__ import main, parse_line
from cuda_ops.testing.case import Case
from cuda_ops.testing.checks import QUICK, by_name
from cuda_ops.testing.checks.empty import each_dim_empty
from cuda_ops.testing.draw import Draw, chosen, covering, follows_line
from cuda_ops.testing.report import CheckEntry, not_looked_at
from cuda_ops.testing.runner import run_check
from cuda_ops.testing.samples import LAYOUTS, OVERLAPPING, DeviceArg, Layout
from cuda_ops.testing.subject import Subject, find, subject_of
from cuda_ops.testing.worker import perform

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


@pytest.mark.parametrize(
    "line",
    [
        "torch.os.system('exit 3') or Sample(())",
        "Sample((torch.load('x'),))",
        "Sample((torch.load,))",
        "Sample(([].__class__,))",
        "Sample((2 ** 9 ** 9,))",
        "Sample((lambda: 1,))",
        "Sample(tuple(x for x in ()))",
        "Sample(values=f'{1}')",
    ],
)
def test_code_in_a_line_is_refused_and_not_run(line: str) -> None:
    with pytest.raises(ValueError, match="expected a sample and nothing else"):
        Sample.parse(line)


def test_whatever_a_sample_may_hold_can_be_read() -> None:
    held = (TensorArg((2,), torch.int64, below=3), DeviceArg(), None, True, -2, -0.5, math.inf,
            1 - 2j, "none", [1, -1], (), torch.float16, torch.channels_last)  # fmt: skip
    sample = Sample((*held, [TensorArg((2,))]), "special", 1)
    assert Sample.parse(repr(sample)) == sample


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
    assert "no operator 'sillu'; did you mean 'silu'?" in capsys.readouterr().err
    assert main(["replay", "elsewhere::f::layouts[cpu]"]) == 2
    assert "elsewhere::f is not described" in capsys.readouterr().err


# --- the list of checks ----------------------------------------------------------------------


def test_what_indexes_what_is_not_made_from_the_signature_line() -> None:
    add = find("add")
    assert follows_line(add)
    indices = Sample((TensorArg((3, 4)), TensorArg((3, 4), torch.int64, below=3)))
    assert not follows_line(replace(add, strategy=st.just(indices)))


def test_distinct_indices_fill_any_layout_that_shares_no_memory() -> None:
    for layout in ("contiguous", "transposed", "sliced", "stepped", "offset"):
        arg = TensorArg((3, 4), torch.int64, layout, below=13, distinct=True)
        (made,) = Sample((arg,)).make()
        assert made.unique().numel() == 12 and made.min() >= 0 and made.max() < 13
        assert Sample.parse(repr(Sample((arg,)))) == Sample((arg,))
    wrong: list[dict[str, Any]] = [{}, {"below": 11}]
    wrong += [{"below": 12, "layout": layout} for layout in OVERLAPPING]
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


def test_all_checks_choose_from_what_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    drawing = draw._round

    def counted(subject: Subject, number: int, count: int) -> list[Sample]:
        drawn.append(number)
        return drawing(subject, number, count)

    monkeypatch.setattr(draw, "_round", counted)
    checks = [by_name(name) for name in ("registration", "reference", "layouts", "gradcheck")]
    assert check_op("silu", checks=checks, devices=["cpu"], isolate=False).passed
    assert drawn == [0]


def test_more_is_drawn_where_too_few_fit() -> None:
    subject = replace(find("bitonic_topk"))  # its own samples are rarely empty
    assert len(chosen(subject, Draw(1))) == 1 and len(subject.rounds) == 1
    assert len(chosen(subject, Draw(4, range(1)))) == 4 and len(subject.rounds) > 1


def test_a_layout_that_no_stride_shows_counts_as_none() -> None:
    def shown(shape: tuple[int, ...], layout: Layout) -> set[draw.Trait]:
        return set().union(*draw._traits(Sample((TensorArg(shape, layout=layout),))))

    assert shown((3, 1), "transposed") == shown((3, 1), "contiguous")
    assert shown((3, 0), "transposed") == shown((3, 0), "contiguous")
    assert shown((3, 2), "transposed") != shown((3, 2), "contiguous")


def test_empty_calls_have_sizes_and_dtypes_of_the_fastest_kernels() -> None:
    shapes = {(arg.dtype, *arg.shape) for sample in each_dim_empty(find("matmul").op)
              for arg in sample.tensors}  # fmt: skip
    assert {(torch.float32, 0, 5, 5), (torch.float16, 0, 64, 64)} < shapes
    assert {(torch.float16, 3, 4, 0, 64), (torch.float16, 3, 4, 64, 0)} < shapes


def test_an_operator_s_own_samples_are_emptied_dim_by_dim() -> None:
    found = chosen(find("moe_experts"), by_name("empty").draw)
    shapes = [tuple(arg.shape for arg in sample.tensors) for sample in found]
    # x has tokens and hidden, w_gate_up experts, inner and hidden, experts tokens and those chosen.
    assert any(x[0] == 0 for x, *_ in shapes) and any(x[0] and x[1] == 0 for x, *_ in shapes)
    assert any(gate_up[1] == 0 for _, gate_up, *_ in shapes)
    assert any(experts[0] and experts[1] == 0 for *_, experts, _ in shapes)
    assert all(gate_up[0] for _, gate_up, *_ in shapes), "indices that count in nothing"


def test_no_sample_is_run_twice() -> None:
    lines: list[str] = []
    layouts = by_name("layouts")
    drawn = replace(layouts.draw, beside=None)  # what comes beside is not counted
    check = replace(layouts, draw=drawn, body=lambda case: lines.append(repr(case.sample)))
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "--junit", "absent.xml"], "absent.xml: No such file or directory"),
        (["report", "--junit", "text.xml"], "text.xml: expected what pytest --junitxml writes: "),
        (["report", "--junit", "other.xml"], "other.xml: expected tests of operators, got none"),
        (["fuzz", "silu", "--by-chance", "--json", "absent/a.json"], "absent/a.json: No such file"),
        (["fuzz", "--by-chance", "--again", "absent: cuda_ops.absent()"], "no operator 'absent'"),
        (["sanitize", "silu", "--ledger", "absent.txt"], "absent.txt"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_file_that_cannot_be_used_is_one_line(
    arguments: list[str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("text.xml").write_text("no XML")
    Path("other.xml").write_text("<testsuites/>")
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "soon"])
def test_no_time_to_fuzz_is_refused(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["fuzz", "silu", "--by-chance", "--minutes", minutes])
    assert f"expected a number above 0, got '{minutes}'" in capsys.readouterr().err
