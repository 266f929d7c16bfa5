"""Operators without Python: the library that registers a package's operators when it is opened."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp, needs_gpu

from cuda_ops import servers
from cuda_ops.__main__ import main
from cuda_ops.build.discovery import discover
from cuda_ops.dev import library
from cuda_ops.registry import all_operators, registry

REPO = Path(__file__).resolve().parent.parent
#: An operator of each kind: elementwise, along rows, of lists, composed, with a float's range.
OPS = ("silu", "rms_norm", "foreach_axpy", "scale_relu", "dropout")

#: What a process needs that has no cuda_ops. What it opens tells of itself on stderr.
HEAD = """
import sys, json, torch
ops, x = torch.ops.cuda_ops, torch.arange(6.0).reshape(2, 3)
"""
CALLS = (
    "ops.silu(x)",
    "ops.rms_norm(x, torch.ones(3), 1e-5)",
    "ops.foreach_axpy([x, x], [x, x], 0.5)[1]",
    "ops.scale_relu(x, 2.0)",
    "ops.dropout(x, torch.tensor([1, 2]), 0.5)",
)
REFUSED = (
    "ops.silu(x.int())",
    "ops.silu_backward(x, x.double())",
    "ops.silu_backward(x, x[:, :2])",
    "ops.rms_norm(x, torch.ones(4), 1e-5)",
    "ops.foreach_axpy([x], [x.int()], 0.5)",
    "ops.foreach_axpy([x], [x, x], 0.5)",
    "ops.scale_relu(x.int(), 2.0)",
    "ops.dropout(x, torch.tensor([1, 2]), 1.5)",
    "ops.dropout(x, torch.tensor([1, 2, 3]), 0.5)",
)
ON_TWO_DEVICES = ("ops.silu_backward(x, x.cuda())", "ops.foreach_axpy([x.cuda()], [x], 0.5)")
HAS_CUDA = 'torch._C._dispatch_has_kernel_for_dispatch_key("cuda_ops::silu", "CUDA")'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Operators and the library that registers them, ``libcuda_ops.so``."""
    folder = tmp_path_factory.mktemp("a server")
    assert library.write(OPS, folder) == folder / "libcuda_ops.so"
    return folder


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs Python elsewhere, where nothing but PYTHONPATH leads to cuda_ops."""
    command = [sys.executable, "-W", "error", "-c", HEAD + code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr
    return done


def answers(calls: Iterable[str], head: str, path: Path) -> list[Any]:
    """Returns what each call gives, or the error that it raises."""
    code = f"""
{head}
def answer(call):
    try:
        value = eval(call)
        return value.tolist() if isinstance(value, torch.Tensor) else value
    except RuntimeError as error:
        return str(error).partition("\\n")[0]
print(json.dumps([answer(call) for call in {list(calls)!r}]))
"""
    said: list[Any] = json.loads(run(code, path).stdout.splitlines()[-1])
    return said


OPENED = "torch.ops.load_library(sys.argv[1])\nassert 'cuda_ops' not in sys.modules"


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, tuple[Any, Any]]:
    """What each call gives without cuda_ops, and with it."""
    calls = [*CALLS, *REFUSED, HAS_CUDA, *(ON_TWO_DEVICES if torch.cuda.is_available() else ())]
    alone = answers(calls, OPENED, folder / "libcuda_ops.so")
    beside = answers(calls, "import cuda_ops", folder)
    return dict(zip(calls, zip(alone, beside, strict=True), strict=True))


# --- what it registers -----------------------------------------------------------------


def test_operators_work_without_cuda_ops_as_with_it(
    answered: dict[str, tuple[Any, Any]],
) -> None:
    for call in CALLS:
        alone, beside = answered[call]
        assert isinstance(alone, list) and alone == beside, f"{call}: {alone}, {beside}"


def test_bad_arguments_are_refused_in_the_same_words(
    answered: dict[str, tuple[Any, Any]],
) -> None:
    form = re.compile(r"cuda_ops::\w+: argument '.+': expected .+, got .+")
    for call in REFUSED:
        alone, beside = answered[call]
        assert form.match(alone) and alone == beside, f"{call}: {alone}, {beside}"


@needs_gpu
def test_tensors_on_two_devices_are_refused_in_the_same_words(
    answered: dict[str, tuple[Any, Any]],
) -> None:
    for call in ON_TWO_DEVICES:
        alone, beside = answered[call]
        assert "expected" in alone and "cuda:0" in alone and alone == beside, f"{call}: {alone}"


def test_cuda_kernels_are_registered_where_they_were_built(
    answered: dict[str, tuple[Any, Any]],
) -> None:
    built = "CUDA" in registry().operators("silu")["silu"].spec.keys
    assert answered[HAS_CUDA][0] is built


@needs_gpu
def test_cuda_kernels_run_on_the_current_stream(folder: Path) -> None:
    code = """
torch.ops.load_library(sys.argv[1])
x = torch.randn(1 << 20, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # refuses what goes to another stream
        y = ops.silu(x)
    graph.replay()
torch.testing.assert_close(y, torch.nn.functional.silu(x))
"""
    run(code, folder / "libcuda_ops.so")


@pytest.mark.slow
def test_every_operator_of_ours_is_registered_with_its_schema(tmp_path: Path) -> None:
    operators = all_operators(lambda pair: pair.namespace == "cuda_ops")
    beside = {}
    for key in dict.fromkeys(operator.spec.stem for operator in operators.values()):
        pair, opened = registry().pairs()[key], registry().library_of(key)
        assert opened is not None
        beside[pair] = tmp_path / pair.prebuilt.name
        beside[pair].symlink_to(opened)
    assert servers.write(beside, tmp_path / "libcuda_ops.so") == {}
    code = """
torch.ops.load_library(sys.argv[1])
print(json.dumps([str(getattr(ops, name).default._schema) for name in sys.argv[2:]]))
"""
    done = run(code, tmp_path / "libcuda_ops.so", *operators)
    assert done.stderr == ""
    assert json.loads(done.stdout) == [str(op.spec.parsed) for op in operators.values()]


# --- files that are not as they were ------------------------------------------------------


def test_a_bad_file_costs_its_own_operators_alone(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "silu.abi3.so").unlink()
    contents = (broken / "rms_norm.abi3.so").read_bytes()
    (broken / "rms_norm.abi3.so").write_bytes(contents[: len(contents) // 2])
    (broken / "scale_relu.abi3.so").write_text("no library")
    shutil.copy(broken / "dropout.abi3.so", broken / "foreach_axpy.abi3.so")
    code = """
torch.ops.load_library(sys.argv[1])
print([hasattr(ops, name) for name in sys.argv[2:]])
"""
    done = run(code, broken / "libcuda_ops.so", *OPS)
    assert done.stdout.strip() == "[False, False, False, False, True]"
    said = sorted(done.stderr.splitlines())
    assert len(said) == 4, done.stderr
    for line, op, problem in zip(
        said,
        ("foreach_axpy", "rms_norm", "scale_relu", "silu"),
        (
            "was built from other sources; build both again",
            f"is damaged: expected a whole library, got {len(contents) // 2} bytes; install",
            "is damaged: expected a whole library, got 10 bytes; install it again",
            "No such file or directory",
        ),
        strict=True,
    ):
        assert line.startswith(f"libcuda_ops.so: cuda_ops::{op}"), line
        assert f"cannot be used: {broken / op}.abi3.so" in line and problem in line


def test_a_second_library_with_the_same_operators_leaves_them(folder: Path, tmp_path: Path) -> None:
    """It is opened by a link, which leads to the operators beside the file itself."""
    shutil.copytree(folder, tmp_path / "second")
    second = tmp_path / "linked.so"
    second.symlink_to(tmp_path / "second" / "libcuda_ops.so")
    code = """
torch.ops.load_library(sys.argv[1])
torch.ops.load_library(sys.argv[2])
print(ops.silu(x).shape)
"""
    done = run(code, folder / "libcuda_ops.so", second)
    assert "cuda_ops::silu, cuda_ops::silu_backward" in done.stderr
    assert "this process has them already, and keeps those that it has" in done.stderr


# --- beside cuda_ops in Python ------------------------------------------------------------

#: What only Python has, also by a name that was looked up before.
FROM_PYTHON = """
import cuda_ops
y = x.clone().requires_grad_()
cuda_ops.silu(y).sum().backward()
before(y).sum().backward()
print(y.grad.shape, before(x.to("meta")).device)
print(torch.compile(cuda_ops.silu, backend="aot_eager", fullgraph=True)(x).shape)
print(torch.vmap(cuda_ops.rms_norm, (0, None, None))(x, torch.ones(3), 1e-5).shape)
print(cuda_ops.scale_relu(x, 2.0).shape)
"""


@pytest.mark.parametrize(
    "first",
    [
        "torch.ops.load_library(sys.argv[1])",
        "import cuda_ops; cuda_ops.silu(x); torch.ops.load_library(sys.argv[1])",
    ],
    ids=["library first", "cuda_ops first"],
)
def test_cuda_ops_works_before_and_after_it(folder: Path, first: str) -> None:
    code = f"{first}\nbefore = ops.silu\nbefore(x)\n{FROM_PYTHON}"
    done = run(code, folder / "libcuda_ops.so")
    assert done.stdout.splitlines() == [
        "torch.Size([2, 3]) meta", *["torch.Size([2, 3])"] * 3,
    ]  # fmt: skip
    lines = done.stderr.splitlines()
    if "cuda_ops.silu" not in first:
        assert lines == []
    else:
        assert lines[-1].startswith("libcuda_ops.so: cuda_ops::silu,")
        assert "rms_norm" not in lines[-1]


RELOADED = """
torch.ops.load_library(sys.argv[1])
name = sys.argv[3]
before = getattr(ops, name)
import pathlib, cuda_ops
from cuda_ops.dev import add_root, reload
add_root(sys.argv[2])
binding = pathlib.Path(sys.argv[2], "bindings", name + ".cpp")
text = binding.read_text()
def both(changed):
    binding.write_text(changed)
    try:
        reload(name)
        print((before(x)[0, 1].item(), getattr(cuda_ops, name)(x)[0, 1].item()))
    except cuda_ops.errors.ManifestError as error:
        print(error)
both(text)
both(text.replace("v * 2", "v * 3"))
both(text.replace("Tensor x", "Tensor y").replace("grad_x", "grad_y"))
"""


@pytest.mark.slow
def test_a_reload_reaches_those_that_called_before_python_came(
    scratch_op: ScratchOp, tmp_path: Path
) -> None:
    """All but one with another schema, which the process has for life."""
    scratch_op.write("v * 2")
    registry().rescan()
    path = library.write([scratch_op.name], tmp_path)
    done = run(RELOADED, path, scratch_op.root, scratch_op.name)
    same, changed, refused = done.stdout.splitlines()
    assert (same, changed) == ("(2.0, 2.0)", "(3.0, 3.0)")
    assert refused == (
        f"cuda_ops::{scratch_op.name}: its schema or its tags changed, and a library for C++ has "
        "registered those before in this process; restart it to use the new ones"
    )


def test_another_schema_than_that_of_the_library_is_refused(folder: Path) -> None:
    code = """
torch.ops.load_library(sys.argv[1])
import dataclasses, cuda_ops
from cuda_ops.dispatch import taken_over
from cuda_ops.dispatch.library import open_library
op = open_library(__import__("pathlib").Path(sys.argv[2]), "silu").ops["silu"]
print(sorted(taken_over.slots_of(op)))
other = torch._C.parse_schema("cuda_ops::silu(Tensor x, int more) -> Tensor")
for changed in (dict(parsed=other), dict(tags=("pointwise",))):
    try:
        taken_over.slots_of(dataclasses.replace(op, **changed))
    except cuda_ops.errors.ManifestError as error:
        print(error)
"""
    path = folder / "libcuda_ops.so"
    found, schema, tags = run(code, path, folder / "silu.abi3.so").stdout.splitlines()
    assert "'CPU'" in found
    start = f"cuda_ops::silu: {path} has registered it in this process with"
    assert schema == (
        f"{start} other arguments: expected cuda_ops::silu(Tensor x, int more) -> Tensor, got "
        "cuda_ops::silu(Tensor x) -> Tensor; build both from the same sources"
    )
    assert tags.startswith(
        f"{start}out its tags, which cannot be changed; import cuda_ops and call"
    )


# --- packages and the command -------------------------------------------------------------


@pytest.mark.slow
def test_a_package_of_others_brings_its_own(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    example = REPO / "examples" / "third_party"
    ignored = shutil.ignore_patterns("build", "lib", "*.cu", "*.egg-info")  # no nvcc: CPU alone
    project = shutil.copytree(example, tmp_path / "project", ignore=ignored)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    built = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    path = project / "cuda_ops_leaky" / "src" / "lib" / "libcuda_ops_leaky.so"
    code = """
torch.ops.load_library(sys.argv[1])
leaky_clip = torch.ops.cuda_ops_leaky.leaky_clip
print(leaky_clip(torch.tensor([-1.0, 2, 9]), 0.1, 6.0))
try:
    leaky_clip(x.int(), 0.1, 6.0)
except RuntimeError as error:
    print(str(error).partition("\\n")[0])
"""
    said = run(code, path).stdout.splitlines()
    assert said[0] == "tensor([-0.1000,  2.0000,  6.0000])"
    assert said[1].startswith("cuda_ops_leaky::leaky_clip: argument 'x': expected dtype float64")
    found = subprocess.run(
        [sys.executable, "-m", "cuda_ops", "library", "--package", "cuda_ops_leaky"],
        cwd=project, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.strip() == str(path), found.stderr


PLACED = """
#include "binding.h"
using namespace cuda_ops;
namespace {
Tensor filled(int64_t count, double value, Device device) {
  Tensor out = empty({count}, DType::kFloat64, device);
  std::fill_n(static_cast<double*>(out.mutable_data_ptr()), count, value);
  return out;
}
Tensor ones(int64_t count, const std::optional<Device>& device) {
  return filled(count, 1, *device);  // which has one, whatever the caller gave
}
}
CUDA_OPS(library) {
  library.op("NAME(int count, *, Device? device=None) -> Tensor", "->(count)")
      .returns("out", DType::kFloat64).range("count", 0, 9).cpu<ones>();
  library.op("NAME_of(int count, float value, Device device) -> Tensor", "->(count)")
      .returns("out", DType::kFloat64).cpu<filled>();
}
"""


@pytest.mark.slow
def test_a_device_argument_chooses_the_kernel(scratch_op: ScratchOp, tmp_path: Path) -> None:
    """It does so where no argument is a tensor, as in Python."""
    scratch_op.binding.write_text(PLACED.replace("NAME", scratch_op.name))
    registry().rescan()
    path = library.write([scratch_op.name], tmp_path)
    name = f"ops.{scratch_op.name}"
    calls = [f"{name}(2)", f"{name}(2, device='cpu')", f"{name}_of(3, 0.5, 'cpu')",
             f"{name}_of(3, 0.5, 'cuda:0')", f"{name}(10)"]  # fmt: skip
    alone = answers(calls, OPENED, path)
    added = (
        f"import cuda_ops\nfrom cuda_ops.dev import add_root\nadd_root({str(scratch_op.root)!r})"
    )
    assert alone == answers(calls, added, path)
    assert alone[:3] == [[1, 1], [1, 1], [0.5, 0.5, 0.5]]
    start = f"cuda_ops::{scratch_op.name}"
    assert alone[3:] == [
        f"{start}_of: argument 'device': expected a device of type cpu, got cuda",
        f"{start}: argument 'count': expected from 0 to 9, got 10",
    ]


def test_what_registers_itself_is_left_out_and_named(tmp_path: Path) -> None:
    (tmp_path / "bindings").mkdir()
    (tmp_path / "bindings" / "guest.cpp").write_text("PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}")
    (tmp_path / "guest.so").touch()
    (tmp_path / "lib.so").touch()  # of an earlier build, which had others
    (guest,) = discover([tmp_path])
    (problem,) = servers.write({guest: tmp_path / "guest.so"}, tmp_path / "lib.so").values()
    assert problem.startswith("a guest registers itself, or is a module of Python")
    assert not (tmp_path / "lib.so").exists()


def test_the_command_prints_the_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["library", "-o", str(tmp_path / "out"), "silu"]) == 0
    path = tmp_path / "out" / "libcuda_ops.so"
    assert capsys.readouterr().out.strip() == str(path)
    assert sorted(file.name for file in path.parent.iterdir()) == ["libcuda_ops.so", "silu.abi3.so"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["silu"], "error: OP, --root and --arch: expected -o DIR, where to write operators"),
        (["--package", "pluggy"], "error: package 'pluggy': expected a file lib/libpluggy.so, got"),
        (["-o", "out", "no_such_op"], "error: no operator 'no_such_op'; known: add, "),
        (["-o", "out", "--package", "pluggy"], "error: --package: expected no -o, got -o out"),
    ],
)
def test_a_call_of_the_command_that_makes_no_sense(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["library", *arguments]) == 1
    assert capsys.readouterr().err.startswith(said)


# --- a program without Python ------------------------------------------------------------


@pytest.mark.slow
def test_the_example_serves_a_model(folder: Path, tmp_path: Path) -> None:
    """By the commands of its README, but for those of CMake, which may not be here."""
    text = (REPO / "examples" / "cpp" / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- without CMake -->\n```sh\n(.*?)```", text, re.DOTALL)
    opened = f"{folder}/libcuda_ops.so"
    script = "set -e\n" + block.replace("$(python -m cuda_ops library)", opened)
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPO),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    project = shutil.copytree(REPO / "examples" / "cpp", tmp_path / "cpp")
    done = subprocess.run(
        ["bash", "-c", script], cwd=project, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("wrote ")]
    assert re.match(r"cpu model: largest error \d", said[0]), said
    assert re.match(r"cpu silu: largest error \d", said[1]), said
    assert said[2].startswith("cuda_ops::silu: argument 'x': expected dtype float64"), said
    assert said[3].startswith("cuda model" if torch.cuda.is_available() else "cuda: not run"), said
    # Without the operators it has to fail.
    bare = subprocess.run(
        [project / "serve", folder / "silu.abi3.so", project / "model"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert bare.returncode == 1 and "cuda_ops::" in bare.stderr, bare.stdout + bare.stderr
