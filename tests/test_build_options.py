"""What a pair asks of its build, in its own text or in its root's build.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ScratchOp

import cuda_ops
from cuda_ops.build import commands, options, toolchain
from cuda_ops.build.discovery import Pair, discover
from cuda_ops.compile_ops import compile_ops
from cuda_ops.dev import main
from cuda_ops.errors import BuildError
from cuda_ops.registry import registry
from cuda_ops.testing import check_op
from cuda_ops.testing.checks import by_name

NATIVE = """
#include "binding.h"
using namespace cuda_ops;
double from_another_file();
Tensor NAME_cpu(const Tensor& x) {
  return elementwise_cpu([](double v) { return FACTOR * v + from_another_file(); }, x);
}
CUDA_OPS(library) {
  library.op("NAME(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<NAME_cpu>();
}
"""


def root_with(folder: Path, binding: str, toml: str = "", **files: str) -> Pair:
    texts = {"bindings/asked.cpp": binding, options.FILE: toml, **files}
    for name, text in texts.items():
        if text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    (pair,) = discover([folder])
    return pair


# --- what is read ----------------------------------------------------------------------


def test_texts_and_the_root_s_file_add_up(tmp_path: Path) -> None:
    for folder in ("headers", "more"):
        (tmp_path / folder).mkdir()
    pair = root_with(
        tmp_path,
        "// cuda_ops.build: cxx_flags -O3 '-DNAME=\"a b\"'\n"
        "// cuda_ops.build: include_dirs headers\nCUDA_OPS(library) {}\n",
        'defines = ["OF_ALL"]\n[pairs.asked]\ninclude_dirs = ["more"]\nlibraries = "m"\n'
        '[pairs.other]\ndefines = ["NOT_MINE"]\n',
        **{"kernels/asked.cu": "  // cuda_ops.build: nvcc_flags --use_fast_math -maxrregcount=64\n"
           "// cuda_ops.build: relocatable_device_code\n"},
    )  # fmt: skip
    asked = pair.options
    assert asked == options.Options(
        cxx_flags=("-O3", '-DNAME="a b"'),
        nvcc_flags=("--use_fast_math", "-maxrregcount=64"),
        defines=("OF_ALL",),
        include_dirs=(tmp_path / "more", tmp_path / "headers"),
        libraries=("m",),
        relocatable_device_code=True,
    )
    (line,) = asked.inexact()
    assert line.startswith("built with --use_fast_math: denormals become 0, and division, root")
    assert (tmp_path / "headers") in pair.include_dirs and "-DOF_ALL" in commands.cxx_flags(
        pair, ("8.0",)
    )
    nvcc = commands.nvcc_flags(pair, ("8.0",))
    assert nvcc[-2:] == ["--use_fast_math", "-maxrregcount=64"] and "-rdc=true" in nvcc


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("// cuda_ops.build: nvcc_flag -O1", r"asked.cpp:1: .* expected one of cxx_flags, nvcc"),
        ("// cuda_ops.build: libraries", "libraries: expected words behind it, got none"),
        ("// cuda_ops.build: defines 'open", "defines: No closing quotation: 'open"),
        ("// About it. cuda_ops.build: defines A", "to begin a comment of its own"),
        ("// cuda_ops.build: include_dirs nowhere", "expected a folder, got .*nowhere, which does"),
        ("// cuda_ops.build: sources no.cu", r"expected a file, got .*no\.cu, which does not"),
        ("// cuda_ops.build: include_dirs no-such-package:x", "pip install no-such-package"),
        ("// cuda_ops.build: include_dirs torch:nothing", "a path in package 'torch', got 'noth"),
        ("// cuda_ops.build: relocatable_device_code no", "expected nothing behind it"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_line(
    tmp_path: Path, text: str, message: str, roots_for_now: None
) -> None:
    pair = root_with(tmp_path, f"{text}\nCUDA_OPS(library) {{}}\n")
    with pytest.raises(BuildError, match=message):
        _ = pair.options
    assert main(["--root", str(tmp_path), "asked"]) == 1  # a failed row, and no traceback
    (row,) = compile_ops(["asked"])
    assert row.error and row.seconds == 0
    assert pair.files()


@pytest.mark.parametrize("toml", ["defines = 3", "[pairs]\nasked = 1", "nonsense = ["])
def test_a_root_s_file_of_another_form_is_refused(tmp_path: Path, toml: str) -> None:
    pair = root_with(tmp_path, "CUDA_OPS(library) {}\n")
    (tmp_path / options.FILE).write_text(toml)
    with pytest.raises(BuildError, match=r"build\.toml"):
        _ = pair.options


def test_torch_s_own_headers_are_found_and_not_read_for_changes(tmp_path: Path) -> None:
    pair = root_with(
        tmp_path, "// cuda_ops.build: include_dirs torch:include\nCUDA_OPS(library) {}\n"
    )
    (folder,) = pair.system_dirs
    assert (folder / "torch").is_dir() and folder not in pair.include_dirs
    assert any("torch" in part for part in pair.options.fingerprint())


def test_an_edit_of_what_is_asked_is_another_library(tmp_path: Path) -> None:
    pair = root_with(tmp_path, "CUDA_OPS(library) {}\n", "[pairs.other]\ndefines = ['A']\n")
    text, recipe = pair.read().hash, commands.recipe(pair, ("8.0",))
    for toml, changes in (("", False), ("[pairs.asked]\ndefines = ['A']\n", True)):
        (tmp_path / options.FILE).write_text(toml)
        assert (pair.read().hash != text) is changes
        assert (commands.recipe(pair, ("8.0",)) != recipe) is changes


# --- what is built ---------------------------------------------------------------------


@pytest.mark.slow
def test_a_native_pair_with_a_define_and_another_source(
    tmp_path: Path, quick_compiler: Path, monkeypatch: pytest.MonkeyPatch, roots_for_now: None
) -> None:
    monkeypatch.setenv("CXX", str(quick_compiler))
    binding = NATIVE.replace("NAME", "asked")
    asks = "// cuda_ops.build: defines FACTOR=3\n// cuda_ops.build: sources lib/more.cpp\n"
    more = {"lib/more.cpp": "double from_another_file() { return 0; }\n"}
    root_with(tmp_path, asks + binding, **more)
    registry().add_root(tmp_path)
    (row,) = compile_ops(["asked"])
    assert not row.error, row.error
    assert row.options == {
        "defines": ["FACTOR=3"], "sources": [str(tmp_path / "lib" / "more.cpp")],
    }  # fmt: skip
    x = torch.ones(2)
    assert cuda_ops.asked(x).tolist() == [3, 3]
    (tmp_path / options.FILE).write_text('[pairs.asked]\ncxx_flags = ["-ffast-math"]\n')
    (row,) = compile_ops(["asked"])
    assert row.built == "built"
    report = check_op("asked", devices=["cpu"], checks=[by_name("mutation")], isolate=False)
    for said in (str(report), "\n".join(row.hints)):
        assert "built with -ffast-math: NaN and infinity are not expected" in said
    (tmp_path / "lib" / "more.cpp").write_text("double from_another_file() { return 1; }\n")
    (row,) = compile_ops(["asked"], compare=False)
    assert row.built == "built" and cuda_ops.asked(x).tolist() == [4, 4]
    (tmp_path / "bindings" / "asked.cpp").write_text(asks.replace("=3", "=5") + binding)
    (row,) = compile_ops(["asked"], compare=False)
    assert row.built == "built" and cuda_ops.asked(x).tolist() == [6, 6]


DEVICE_CODE = """
// cuda_ops.build: relocatable_device_code
// cuda_ops.build: sources kernels/NAME_part.cu
"""


@pytest.mark.slow
# The device linker is a part of nvcc.
@pytest.mark.skipif(toolchain.cuda_home() is None, reason="needs a CUDA toolkit")
def test_device_code_is_linked_across_files(scratch_op: ScratchOp) -> None:
    name, kernels = scratch_op.name, scratch_op.root / "kernels"
    part = kernels / f"{name}_part.cu"
    part.write_text("__device__ float doubled(float x) { return 2 * x; }\n")
    scratch_op.write("2 * v", "2 * g")
    (kernels / f"{name}.cu").write_text(
        DEVICE_CODE.replace("NAME", name)
        + """
__device__ float doubled(float x);
__global__ void doubles(float* x) { x[threadIdx.x] = doubled(x[threadIdx.x]); }
void launch_it() { doubles<<<1, 32>>>(nullptr); }
"""
    )
    try:
        (row,) = compile_ops([name], compare=False)
        assert not row.error, row.error
        assert row.options["relocatable_device_code"] is True
        part.write_text("// gone\n")  # the device linker's own words reach the user
        (row,) = compile_ops([name], compare=False)
        assert "doubled" in row.error
    finally:
        part.unlink()
        (kernels / f"{name}.cu").unlink()


@pytest.mark.slow
def test_setup_py_builds_with_what_is_asked(tmp_path: Path, quick_compiler: Path) -> None:
    root = tmp_path / "pkg" / "src"
    asks = "// cuda_ops.build: defines FACTOR=3\n// cuda_ops.build: sources lib/more.cpp\n"
    root_with(root, asks + NATIVE.replace("NAME", "asked"),
              **{"lib/more.cpp": "double from_another_file() { return 1; }\n"})  # fmt: skip
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "setup.py").write_text(
        "from setuptools import setup\nfrom cuda_ops.packaging import operators\n"
        'setup(name="asked", **operators("pkg.src", "pkg/src"))\n'
    )
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tmp_path,
        env={**os.environ, "CXX": str(quick_compiler), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    (pair,) = discover([root])
    assert b"asked(Tensor x)" in pair.prebuilt.read_bytes()
