"""``compile_dev.py`` as a command; from Python it is in test_dev_python.py."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp, needs_nvcc, run_python
from rich.console import Console
from torch.utils import cpp_extension

from cuda_ops.build import toolchain
from cuda_ops.compile_ops import (
    NO_FAKE,
    Row,
    compile_ops,
    reload,
)
from cuda_ops.dev import main
from cuda_ops.dev.command import ITS_OWN, check, show, table, uncompared
from cuda_ops.dev.scaffold import new_pair
from cuda_ops.errors import BuildError, DiscoveryError, ResultError
from cuda_ops.registry import registry

X = torch.tensor([1.0, 2.0, 3.0])
Capture = pytest.CaptureFixture[str]


# --- the command line ------------------------------------------------------------------


def test_the_table_has_a_row_for_the_operator_and_the_exit_status_is_0(
    scratch_op: ScratchOp, capsys: Capture
) -> None:
    scratch_op.write("v * 2", "g * 2")
    assert main([scratch_op.name]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"built {scratch_op.name} in \d+\.\d s", out)
    plugin = scratch_op.root / "ops" / f"{scratch_op.name}.py"
    remedy = f"write cuda_ops_reference in {plugin} for another"
    assert out.splitlines()[-1] == f"no reference: {ITS_OWN}; {remedy}"
    header, row = (line.split() for line in out.splitlines()[-4:-2])
    assert header == ["op", "build", "devices", "fake", "autograd", "max", "error"]
    assert (row[0], row[3:]) == (scratch_op.name, ["cpu", "yes", "yes", "no", "reference"])
    assert main([scratch_op.name]) == 0
    assert capsys.readouterr().out.splitlines()[-3].split()[:2] == [scratch_op.name, "cached"]


@pytest.mark.slow
def test_verbose_shows_command_lines_beside_the_reason(
    scratch_op: ScratchOp, capsys: Capture
) -> None:
    for body, status in (("v * undeclared", 1), ("v * 3", 0)):
        scratch_op.write(body, "g * 3")
        assert main(["--json", "--verbose", scratch_op.name]) == status
        captured = capsys.readouterr()
        assert re.search(rf"(?m)^\S+ .*-c \S*{scratch_op.name}\.cpp", captured.err)
        assert ("undeclared" in json.loads(captured.out)[0]["error"]) == bool(status)


@pytest.mark.slow
def test_without_ninja_verbose_names_the_reason_too(
    scratch_op: ScratchOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    scratch_op.write("v * 2", "g * 2")
    assert main([scratch_op.name]) == 0  # leaves a build.ninja
    (tmp_path / "c++").symlink_to(str(shutil.which("c++")))
    monkeypatch.setenv("PATH", str(tmp_path))
    scratch_op.write("v * 3")
    assert main(["--verbose", scratch_op.name]) == 1
    assert "Ninja is required" in capsys.readouterr().out


@needs_nvcc
@pytest.mark.slow
def test_a_kernel_that_no_line_binds_is_said_to_be(scratch_op: ScratchOp, capsys: Capture) -> None:
    scratch_op.write("v * 2", "g * 2")
    (scratch_op.root / "kernels" / f"{scratch_op.name}.cu").write_text("// nothing yet\n")
    assert main([scratch_op.name]) == 0
    assert "cpu no .cuda<f>() of its .cu" in capsys.readouterr().out


@pytest.mark.slow
def test_one_failing_operator_is_status_1_with_its_compiler_lines_and_leaves_the_others(
    scratch_op: ScratchOp, capsys: Capture
) -> None:
    scratch_op.write("v * undeclared")
    other = ScratchOp(f"{scratch_op.name}other", scratch_op.root)
    other.write("v * 3")
    try:
        assert main(["--json", scratch_op.name, other.name]) == 1
        captured = capsys.readouterr()
        failed, worked = json.loads(captured.out)
        assert (failed["op"], worked["op"], worked["error"]) == (scratch_op.name, other.name, "")
        assert re.search(rf"{scratch_op.name}.cpp:\d+:\d+: error: .*undeclared", failed["error"])
        # The reader is spared the command lines and what ninja says.
        said = failed["error"].splitlines()[1:]
        assert all(re.search("error: |required from here", line) for line in said), said
        assert failed["error"] in captured.err
        assert not re.search(r"ninja|-std=|FAILED|Traceback", captured.err)
        assert re.search(rf"(?m)^{scratch_op.name} +failed +see below", captured.err)
        assert torch.equal(other.function(X), X * 3)
    finally:
        other.binding.unlink()


@pytest.mark.slow
def test_what_an_operator_calls_is_built_and_loaded_with_it(
    scratch_op: ScratchOp, capsys: Capture
) -> None:
    outer = ScratchOp(f"{scratch_op.name}outer", scratch_op.root)
    text = f"""
        #include "binding.h"
        #include "compose.h"
        using namespace cuda_ops;
        namespace {{
        Tensor f(const Tensor& x) {{ return call<Tensor>("cuda_ops::{scratch_op.name}", "", x); }}
        }}
        CUDA_OPS(library) {{
          library.op("{outer.name}(Tensor x) -> Tensor", "()->()").calls("{scratch_op.name}")
              .composite<f>();
        }}"""
    try:
        outer.binding.write_text(text.replace(f'calls("{scratch_op.name}")', 'calls("no_such")'))
        scratch_op.write("v * undeclared")
        assert main([outer.name]) == 1
        there_is_none = f"cuda_ops::{outer.name} calls 'no_such', and there is no such operator"
        assert there_is_none in capsys.readouterr().out
        outer.binding.write_text(text)
        assert main([outer.name]) == 1
        assert re.search(rf"{outer.name} calls '{scratch_op.name}': (.|\n)*undeclared",
                         capsys.readouterr().out)  # fmt: skip
        scratch_op.write("v * 2", "g * 2")
        assert main([outer.name]) == 0, capsys.readouterr().out
        assert torch.equal(outer.function(X), X * 2)
        assert {row.op for row in compile_ops([outer.name])} == {scratch_op.name, outer.name}
    finally:
        outer.binding.unlink()


def test_what_is_loaded_need_not_be_compared(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2", "g * 2")
    (loaded,) = compile_ops([scratch_op.name], compare=False)
    assert (loaded.error, loaded.max_error) == ("", None)
    assert list(table([loaded]).columns[-1].cells) == ["see its checks"]
    (compared,) = compile_ops([scratch_op.name])
    # On a CPU, two files alone are compared with themselves.
    assert (compared.max_error, compared.uncompared) == (None, "no reference")
    assert list(table([compared]).columns[-1].cells) == ["no reference"]
    plugin = scratch_op.root / "ops" / f"{scratch_op.name}.py"
    plugin.write_text(
        "from cuda_ops.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def cuda_ops_reference(op):\n"
        "    return lambda x: x * 2\n"
    )
    scratch_op.write("v * 2 ", "g * 2")
    (compared,) = compile_ops([scratch_op.name])
    assert (compared.max_error, compared.uncompared) == (0, "")
    assert list(table([compared]).columns[-1].cells) == ["0.0e+00"]


def test_a_wrong_gradient_is_told_and_the_operator_serves(
    scratch_op: ScratchOp, capsys: Capture
) -> None:
    scratch_op.write("v * 2", "g * 3")
    for _ in range(2):  # the second time from the file that keeps it
        assert main([scratch_op.name]) == 1
        out = capsys.readouterr().out
        assert re.search(rf"{scratch_op.name} +\S+.* yes +WRONG +no reference", out)
        wrong = r"gradient WRONG: 'x': got d out\S* / d x\S* = 3, expected 2; "
        more = f"python compile_dev.py --check {scratch_op.name} says more"
        assert re.search(rf"\n{scratch_op.name}: {wrong}{more}\n", out)
    reload(scratch_op.name)
    assert torch.equal(scratch_op.function(X), X * 2)
    scratch_op.write("v * 2", "g * 2")
    (row,) = compile_ops([scratch_op.name])
    assert (row.error, row.gradient) == ("", "ok")


def test_what_goes_into_a_pipe_has_a_row_in_a_line(capsys: Capture) -> None:
    rows = [Row("an_operator" * 5, "installed", devices="cpu cuda*", fake="its own " * 9,
                autograd="no, it writes its arguments", max_error=0.0)]  # fmt: skip
    show(rows, Console(soft_wrap=True))
    header, row = capsys.readouterr().out.splitlines()[:2]
    assert header.startswith("op") and row.rstrip().endswith("0.0e+00") and len(row) > 150


def test_no_cell_of_the_table_is_blank() -> None:
    rows = [
        Row("failed", error="why"),
        Row("guest", "cached", note="TORCH_LIBRARY guest: no fake"),
        Row("unchecked", "cached", devices="cpu", fake=NO_FAKE, autograd="no f_backward",
            uncompared="all refused: words, for Sample(())"),
        Row("lists", "cached", devices="cpu", fake="yes", autograd="yes", max_error=0.0,
            gradient="not checked: it takes lists"),
    ]  # fmt: skip
    cells = [list(column.cells) for column in table(rows).columns]
    assert [column[0] for column in cells[2:]] == ["see below"] * 4
    assert [column[1] for column in cells[3:]] == ["a guest has none"] * 3
    assert cells[-1][2] == "all refused"
    assert uncompared(rows) == [
        "unchecked: all refused: words, for Sample(())",
        "lists: gradient not checked: it takes lists",
    ]


def test_the_table_says_why_there_is_no_fake_and_no_gradient(scratch_op: ScratchOp) -> None:
    text = """
        #include "binding.h"
        using namespace cuda_ops;
        static Tensor same(const Tensor& x) { return contiguous(x); }
        CUDA_OPS(library) { library.op("NAME(Tensor x) -> Tensor", LINE)WORDS.cpu<same>(); }
        """.replace("NAME", scratch_op.name)
    for line, words, fake, autograd in (
        ('""', "", NO_FAKE, f"no {scratch_op.name}_backward"),
        ('"()->()"', '.no_gradient("x")', "yes", "no, by design"),
        ('"()->()"', ".dtypes(kInt64)", "yes", "no, integers only"),
    ):
        scratch_op.binding.write_text(text.replace("LINE", line).replace("WORDS", words))
        (row,) = compile_ops([scratch_op.name])
        assert (row.error, row.fake, row.autograd, row.gradient) == ("", fake, autograd, "none")
    listed = text.replace("(Tensor x)", "(Tensor[] xs)").replace(
        "const Tensor& x) { return contiguous(x)",
        "const std::vector<Tensor>& xs) { return contiguous(xs[0])",
    )
    scratch_op.binding.write_text(listed.replace("LINE", '""').replace("WORDS", ""))
    (row,) = compile_ops([scratch_op.name], compare=False)
    assert (row.error, row.autograd) == ("", "no, a list of tensors needs cuda_ops_autograd")


HALVES = """
from hypothesis import strategies as st

from cuda_ops.hookspecs import hookimpl
from cuda_ops.testing import Sample, TensorArg


@hookimpl
def cuda_ops_samples(op):
    return st.sampled_from([1, 2, 8, 9]).map(lambda n: Sample((TensorArg((n,)),)))


@hookimpl
def cuda_ops_reference(op):
    def same(x):
        if len(x) < 4:
            raise ValueError("short")
        return x

    return same
"""


def test_what_refuses_every_sample_is_quoted(scratch_op: ScratchOp, capsys: Capture) -> None:
    scratch_op.write('(refuse("x", "something else", "this"), v)')
    assert main([scratch_op.name]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{scratch_op.name} .* all refused\s*\n", out)
    refusal = f"cuda_ops::{scratch_op.name}: argument 'x': expected something else, got this"
    assert f"\n{scratch_op.name}: all refused: {refusal}, for Sample((TensorArg(" in out
    scratch_op.write("v")
    text, start = scratch_op.binding.read_text(), "Tensor out = empty_elementwise(x);"
    refusing = 'if (x.numel() < 4) refuse("x", "something else", "this"); '
    scratch_op.binding.write_text(text.replace(start, refusing + start, 1))
    plugin = scratch_op.root / "ops" / f"{scratch_op.name}.py"
    plugin.write_text(HALVES)
    for _ in range(2):  # the second time from the file that keeps it
        assert main([scratch_op.name]) == 0
        out = capsys.readouterr().out
        assert re.search(rf"{scratch_op.name} .* 0.0e\+00\s*\n", out), out
        assert re.search(rf"\n{scratch_op.name}: 2 of 4 samples refused: {refusal}, for Samp", out)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x * 2 + 5, r"the error is \S+ times the tolerance"),
        (lambda x: (x * 2).expand(2, *x.shape), r"shape \[.*\], expected \[2, "),
        (lambda x: x * math.nan, "the error is inf times the tolerance"),
    ],
)
@pytest.mark.quick(1)
def test_a_wrong_operator_fails_and_stays_loaded(
    wrong: Any,
    message: str,
    scratch_op: ScratchOp,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = registry().plugins.ask

    def answer(hook: str, op: Any, *rest: Any) -> Any:
        mine = hook == "cuda_ops_reference" and op.name == scratch_op.name
        return wrong if mine else ask(hook, op, *rest)

    monkeypatch.setattr(registry().plugins, "ask", answer)
    scratch_op.write("v * 2", "g * 2")
    assert main([scratch_op.name]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"cuda_ops::{scratch_op.name}: wrong on \w+: {message}", out), out
    assert torch.equal(scratch_op.function(X), X * 2)
    with pytest.raises(ResultError, match=message):
        reload(scratch_op.name)


@pytest.mark.parametrize(
    ("made", "fake", "real"),
    [
        ("empty(shape_of(x), DType::kFloat64, x)", "torch.float32", "torch.float64"),
        ("empty({x.numel() + 1}, x)", r"\(\(.*", r"\(\(\d+,\)"),
    ],
)
@pytest.mark.quick(1)
def test_a_result_that_the_fake_does_not_foretell_fails_the_row(
    made: str, fake: str, real: str, scratch_op: ScratchOp, capsys: Capture
) -> None:
    scratch_op.write("v * 2", "g * 2")
    text = scratch_op.binding.read_text()
    body = f"{{ Tensor other = {made}; return other; }}"
    scratch_op.binding.write_text(
        re.sub(r"(forward\(const Tensor& x\)) {.*?\n}", rf"\1 {body}", text, flags=re.S)
    )
    assert main([scratch_op.name]) == 1
    message = rf"{scratch_op.name}: wrong on \w+: the fake says .*{fake}.* output is .*{real}"
    assert re.search(message, capsys.readouterr().out)


@pytest.mark.slow
def test_an_input_may_have_no_gradient(scratch_op: ScratchOp, capsys: Capture) -> None:
    scratch_op.write("v * 2", "g * 2", parameter=", const Tensor& y", schema=", Tensor y")
    text = scratch_op.binding.read_text()
    for old, new in (
        ("empty_elementwise(x)", "empty_elementwise(x, y)"),
        ("strided(out, x), [=](double v)", "strided(out, x, y), [=](double v, double)"),
        ("empty_elementwise(grad_out, x)", "empty_elementwise(grad_out, x, y)"),
        ("strided(grad_x, grad_out, x), [=](double g, double v)",
         "strided(grad_x, grad_out, x, y), [=](double g, double v, double)"),
        ('"(),()->()"', '"(),(),()->()"'),
        ('"()->()"', '"(),()->()"'),
    ):  # fmt: skip
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    scratch_op.binding.write_text(text)
    assert main(["--check", scratch_op.name]) == 0, capsys.readouterr().out
    assert re.search(r"yes +of x", capsys.readouterr().out)


@pytest.mark.slow
def test_a_crash_shows_whose_it_was_and_check_has_no_share_in_it(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("*(volatile int*)nullptr", "g")
    died = run_python("compile_dev.py", "--root", str(scratch_op.root), scratch_op.name)
    assert f'File "<cuda_ops.{scratch_op.name}>"' in died.stderr, died.stderr
    assert f"died in {scratch_op.name}: the comparison with its reference on cpu." in died.stderr
    # The checks run in a process of their own, which may die.
    monkeypatch.setattr("cuda_ops.dev.command.check", lambda rows, *_: rows[0].max_error is None)
    assert main(["--check", scratch_op.name]) == 0


@pytest.mark.slow
def test_check_prints_failures_and_a_line_for_each_operator(
    scratch_op: ScratchOp, capsys: Capture
) -> None:
    scratch_op.write("v * 2", "g * 3")
    assert main(["--check", scratch_op.name]) == 1
    lines = capsys.readouterr().out.splitlines()
    name, others = scratch_op.name, r"not run: .*\d+ for \d+ other reasons"
    itself = rf"\(compared with itself\), \d+ {others}"
    (start,) = (i for i, line in enumerate(lines) if line.startswith(f"{name}: "))
    assert re.fullmatch(rf"{name}: \d+ FAILED, \d+ passed {itself}", lines[start])
    assert lines[start + 1] == "FAILED  gradcheck[cpu]: the gradient is wrong"
    assert re.search(r"'x': got d out\S* / d x\S* = 3, expected 2", lines[start + 2])
    assert any(re.fullmatch(rf"{name}_backward: \d+ passed {itself}", line) for line in lines)
    assert not any(line.startswith(("ok ", "not run ")) for line in lines)
    assert lines[-2].startswith("not looked at: ")
    assert lines[-1].startswith(f"FAILED  {name}: gradcheck[cpu]")
    check([Row(scratch_op.name)], Console(soft_wrap=True), verbose=True)
    assert "ok      layouts[cpu]: " in capsys.readouterr().out


def test_torchs_guess_of_a_toolkit_is_not_asked(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvcc on PATH may be a script, beside which there are no headers."""
    scratch_op.write()
    kernel = scratch_op.root / "kernels" / f"{scratch_op.name}.cu"
    kernel.parent.mkdir(exist_ok=True)
    kernel.touch()
    used = []

    def load(**arguments: Any) -> None:
        used.append((cpp_extension.CUDA_HOME, arguments["with_cuda"]))
        raise RuntimeError("far enough")

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/guessed")
    monkeypatch.setattr(cpp_extension, "load", load)
    monkeypatch.setattr(toolchain, "cuda_home", lambda: Path("/toolkit"))
    monkeypatch.setattr(toolchain, "cuda_version", lambda: "13.0")
    with pytest.raises(BuildError, match="far enough"):
        scratch_op.build()
    assert used == [("/toolkit", True)]


#: What a binding may get wrong: outside of ``CUDA_OPS`` and in it, a line and what is said of it.
OUTSIDE = {
    "Tensor one(const Tensor& x, double y) { return elementwise_cpu(same, x, y); }":
        "f takes one double for each tensor, and then the scalars",
    "std::tuple<Tensor, Tensor> two(const Tensor& x) { return elementwise_cpu<2>(same, x); }":
        "two outputs: f returns Results<double, 2>{{first, second}}",
    "Tensor three(const Tensor& x) { return elementwise_cpu(pair, x); }":
        "one output: f returns a number; for two write <2>",
    "Tensor four(const Tensor& x) { return elementwise_cuda(launcher, x); }":
        "the launcher takes the Strided problem, then the scalars and the stream",
}  # fmt: skip
INSIDE = {
    "op.cpu<narrow>();": "a schema's float is double in C++, and its int is int64_t",
    "op.cpu<short_int>();": "a schema's float is double in C++, and its int is int64_t",
    "op.cpu<pointer>();": "no schema has this C++ type",
}


@pytest.mark.slow
@pytest.mark.parametrize("is_inside", [False, True])
def test_what_a_template_refuses_names_the_line_that_asked_for_it(
    scratch_op: ScratchOp, is_inside: bool
) -> None:
    text = [
        '#include "binding.h"',
        "using namespace cuda_ops;",
        "cudaError_t launcher(const Strided<1>&, double, cudaStream_t);",
        "double same(double v) { return v; }",
        "Results<double, 2> pair(double v) { return {{v, v}}; }",
        "Tensor narrow(const Tensor& x, float) { return x; }",
        "Tensor short_int(const Tensor& x, std::optional<int>) { return x; }",
        "Tensor pointer(const Tensor& x, const char*) { return x; }",
        'CUDA_OPS(library) { auto& op = library.op("f(Tensor x) -> Tensor", "()->()");',
        "}",
    ]
    mistakes, at = (INSIDE, -1) if is_inside else (OUTSIDE, -2)
    text[at:at] = mistakes
    scratch_op.binding.write_text("\n".join(text).replace('"f(', f'"{scratch_op.name}('))
    (row,) = compile_ops([scratch_op.name])
    asked, said = (row.error.partition("does not compile:\n")[2].splitlines()[i::2] for i in (0, 1))
    lines = [text.index(mistake) + 1 for mistake in mistakes]
    for line, found in zip(lines, asked, strict=True):
        place = rf"{scratch_op.name}\.cpp:{line}:\d+: +required from here"
        assert re.search(place, found), row.error
    for sentence, found in zip(mistakes.values(), said, strict=True):
        assert re.search(f"error: .*: {re.escape(sentence)}", found), row.error


@needs_nvcc
@pytest.mark.slow
def test_a_kernel_whose_function_does_not_fit_is_refused_in_a_sentence(
    scratch_op: ScratchOp,
) -> None:
    scratch_op.write("v", key="cpu")
    kernel = scratch_op.root / "kernels" / f"{scratch_op.name}.cu"
    kernel.parent.mkdir(exist_ok=True)
    text = """
        #include "elementwise.cuh"
        using namespace cuda_ops;
        struct One { template <class C> __device__ C operator()(C x) const { return x; } };
        struct Two {
          template <class C> __device__ Results<C, 2> operator()(C x) const { return {{x, x}}; }
        };
        cudaError_t run(const Strided<INPUTS, OUTPUTS>& problem, cudaStream_t stream) {
          return map_cuda(problem, stream, FUNCTION{});
        }
        """
    for inputs, outputs, function, said in (
        ("1", "2", "One", "two outputs: f returns Results<C, 2>{{first, second}}"),
        ("1", "1", "Two", "one output: f returns a number"),
        ("2", "1", "One", "f takes one value for each tensor"),
    ):
        made = text.replace("INPUTS", inputs).replace("OUTPUTS", outputs)
        kernel.write_text(made.replace("FUNCTION", function))
        (row,) = compile_ops([scratch_op.name])
        assert row.error.count(f'error: static assertion failed with "{said}"') == 1, row.error
        assert f" at line 9 of {kernel}" in row.error
        assert row.error.count("error:") == 1, row.error


@pytest.mark.slow
def test_reload_builds_what_is_in_use_alone(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2", "g * 2")
    # In a process of its own: in this one the operators of other tests are in use, and some hang.
    code = f"""
from pathlib import Path
import torch
from cuda_ops.compile_ops import compile_ops, reload
from cuda_ops.registry import registry
registry().add_root(Path({str(scratch_op.root)!r}))
compile_ops([{scratch_op.name!r}])
binding = Path({str(scratch_op.binding)!r})
binding.write_text(binding.read_text().replace("v * 2", "v * 3"))
print([row.op for row in reload()], registry().public({scratch_op.name!r})(torch.ones(())).item())
"""
    done = run_python("-c", code)
    assert done.stdout == f"['{scratch_op.name}'] 3.0\n", done.stdout + done.stderr


def test_compiler_lines_with_brackets_are_printed_whole(
    scratch_op: ScratchOp, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = BuildError("a.h:1:2: error: no match [with T = int] [/T] [-Wnarrowing]")

    def broken(*_: object, **__: object) -> None:
        raise error

    scratch_op.write("v")
    monkeypatch.setattr("cuda_ops.build.compiling.build", broken)
    assert main([scratch_op.name]) == 1
    assert str(error) in capsys.readouterr().out


@pytest.mark.slow
def test_json_is_all_there_is_on_stdout_even_without_a_result_to_compare(
    scratch_op: ScratchOp,
) -> None:
    scratch_op.write("v", key="cuda", include="#include <cstdio>")
    text = scratch_op.binding.read_text()  # C code prints too
    scratch_op.binding.write_text(text + 'static int printed = std::puts("from C++");\n')
    plugin = scratch_op.root / "ops" / f"{scratch_op.name}.py"
    plugin.write_text("print('from a plugin')\n")
    done = run_python("compile_dev.py", "--root", str(scratch_op.root), "--json", scratch_op.name)
    assert done.returncode == 0, done.stderr

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    (row,) = json.loads(done.stdout, parse_constant=refuse)
    assert row["op"] == scratch_op.name and row["built"] == "built" and row["error"] == ""
    if not torch.cuda.is_available():
        assert row["max_error"] is None
        assert row["uncompared"] == "no reference: implement cuda_ops_reference"
    assert scratch_op.name in done.stderr  # the table
    assert "from C++\n" in done.stderr and "from a plugin\n" in done.stderr


@pytest.mark.slow
def test_a_reference_that_raises_is_that_operators_error(
    scratch_op: ScratchOp, capsys: Capture
) -> None:
    plugin = scratch_op.root / "ops" / f"{scratch_op.name}.py"
    plugin.write_text(
        "from cuda_ops.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def cuda_ops_reference(op):\n"
        "    return lambda x: [][0]\n"
    )
    scratch_op.write("v")
    try:
        assert main([scratch_op.name]) == 1
    finally:
        plugin.unlink()
    said = (
        f"{scratch_op.name}: the kit could not compare the result: the reference raised IndexError"
    )
    assert said in capsys.readouterr().out
    assert torch.equal(scratch_op.function(X), X)


def test_a_pair_whose_name_is_taken_is_said_to_be(
    tmp_path: Path, capsys: Capture, roots_for_now: None
) -> None:
    mine = tmp_path / "bindings" / "silu.cpp"
    mine.parent.mkdir()
    mine.write_text("CUDA_OPS(library) { this does not compile }")
    error = f"{mine}: operator 'silu' is already defined by .*silu.cpp; rename one of them"
    assert main(["--root", str(tmp_path), "silu"]) == 1
    assert re.search(error, capsys.readouterr().out)
    assert main(["--root", str(tmp_path), "relu"]) == 0
    with pytest.raises(DiscoveryError, match=r"'relu' is already defined by .*relu\.cpp; choose"):
        new_pair("relu", tmp_path)


@pytest.mark.parametrize("line", ["n,n->n", "n)", "(99999999999999999999)->(n)", "](", "->"])
@pytest.mark.quick(1)
def test_a_malformed_line_is_refused(scratch_op: ScratchOp, line: str) -> None:
    scratch_op.write()
    text = scratch_op.binding.read_text()
    scratch_op.binding.write_text(text.replace('"()->()"', f'"{line}"'))
    (row,) = compile_ops([scratch_op.name])
    assert re.search("expected (groups|inputs)|is not a dim name or a size", row.error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_op"], r"no operator 'no_such_op'; known: .*silu"),
        (["silu", "[/x]"], r"no operator '\[/x\]'"),
        (["--arch", "banana", "silu"], "banana"),
        (["silv"], r"no operator 'silv'; did you mean 'silu'\?"),
        (["--root", "/no/such/folder", "silu"], r"/no/such/folder: operator root does not exist"),
        (["--root", __file__, "silu"], r"test_dev.py: expected a folder with kernels/ .* a file"),
        (["--verbose", "new"], "expected one name"),
        (["--verbose", "new", "two", "names"], "expected one name"),
        (["--rows", "silu"], "--rows: expected new, as in: python compile_dev.py new my_op --rows"),
    ],
)
def test_what_is_unknown_is_an_error_of_one_line_and_status_1(
    arguments: list[str], message: str, capsys: Capture, roots_for_now: None
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert re.search(rf"error: (?s:.*){message}", captured.out)
    assert "Traceback" not in captured.out + captured.err
