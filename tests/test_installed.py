"""The dev build takes what ``pip install`` built, where that is what it would build itself."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from fake_builds import COMPILED, LIBRARY, compiled

from cuda_ops.build import commands, compiling, provenance, toolchain
from cuda_ops.build.discovery import Pair
from cuda_ops.build.provenance import Provenance
from cuda_ops.compile_ops import compile_ops
from cuda_ops.dev import main
from cuda_ops.errors import BuildError
from cuda_ops.registry import registry

REPO = Path(__file__).resolve().parent.parent
X = torch.tensor([1.0, 2.0, 3.0])
HERE = ("9.0a",)


def install(folder: Path, root: str = ".", inplace: bool = True) -> None:
    """What ``pip install -e .``, or ``pip wheel .``, runs for the operators of a root."""
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    package = "scratch" if root == "." else f"scratch.{root}"
    (folder / "setup.py").write_text(
        "from setuptools import setup\n"
        "from cuda_ops.packaging import operators\n"
        f'setup(name="scratch", **operators("{package}", "{root}"))\n'
    )
    command = [sys.executable, "setup.py", "build_ext", *["--inplace"] * inplace]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_what_pip_built_is_loaded_until_an_edit_and_again_after_it(
    scratch_op: ScratchOp, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("v * 2", "g * 2")
    install(scratch_op.root)
    assert main(["--json", scratch_op.name]) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)
    assert row["built"] == "installed" and row["uncompared"] == "no reference"
    assert captured.err.splitlines()[-3].split()[:2] == [scratch_op.name, "installed"]
    assert torch.equal(scratch_op.function(X), X * 2)

    scratch_op.write("v * 3", "g * 3")
    assert scratch_op.reload().origin == "built"
    assert torch.equal(scratch_op.function(X), X * 3)
    scratch_op.write("v * 2", "g * 2")
    assert scratch_op.reload().origin == "installed"
    assert torch.equal(scratch_op.function(X), X * 2)

    scratch_op.write("v * 4", "g * 4")
    install(scratch_op.root)  # replaces a file that this process has taken
    assert scratch_op.reload().origin == "installed"
    assert torch.equal(scratch_op.function(X), X * 4)
    monkeypatch.setenv("CUDA_OPS_CACHE", str(scratch_op.root / "another_cache"))
    scratch_op.write("v * 5", "g * 5")
    (row,) = compile_ops([scratch_op.name])
    assert row.built == "built" and row.uncompared == "no reference"
    assert torch.equal(scratch_op.function(X), X * 5)


#: It names its own file in every way that a kernel can.
_KERNEL = """
#include <cassert>
__global__ void f(int i, const char** file) {
  assert(i);
  *file = i > 1 ? __FILE__ : __builtin_FILE();
}
void named_launch() { f<<<1, 1>>>(1, nullptr); throw __FILE__; }
"""

#: It names its own file, those of torch's headers name theirs.
_BINDING = """
#include "binding.h"
using namespace cuda_ops;
namespace {
Tensor named(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 1, __FILE__);
  return empty_elementwise(x);
}
}
CUDA_OPS(library) { library.op("named(Tensor x) -> Tensor", "()->()").cpu<named>(); }
"""


_FIRST_CALL = """
import sys
from pathlib import Path
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
import torch, cuda_ops
from cuda_ops.registry import registry
registry().add_root(Path({root!r}))
assert torch.equal(getattr(cuda_ops, {name!r})(torch.ones(3)), torch.full((3,), 2.0))
print(*{{Path(file).stem for file in opened if Path(file).parent.name in ("kernels", "bindings")}})
"""


@pytest.mark.slow
def test_a_first_call_starts_no_compiler_and_reads_no_other_operator(
    scratch_op: ScratchOp, tmp_path: Path
) -> None:
    scratch_op.write("v * 2", "g * 2")
    install(scratch_op.root)
    called = tmp_path / "called"
    for name in ("c++", "g++", "cc", "nvcc", "ninja"):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\necho "$0 $@" >> {called}\nexit 1\n')
        script.chmod(0o755)
    unset = ("CXX", "CUDA_HOME", "CUDA_PATH", "PYTORCH_NVCC")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHONPATH": str(REPO),
        "CUDA_OPS_CACHE": str(tmp_path / "empty"),
    }
    code = _FIRST_CALL.format(root=str(scratch_op.root), name=scratch_op.name)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [scratch_op.name]
    assert not called.exists(), called.read_text()


def _no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    for variable in ("HOME", "XDG_CACHE_HOME", "CUDA_OPS_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def _variable(name: str, value: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setenv(name, value)


HERE_AND_THERE = {
    "no home": _no_home,
    "no such user": _variable("CUDA_OPS_CACHE", "~nosuchuser/x"),
    "a file for a folder": _variable("CUDA_OPS_CACHE", __file__),
    "another torch's archs": _variable("TORCH_CUDA_ARCH_LIST", "Kepler+Tegra"),
}


@pytest.mark.parametrize("change", HERE_AND_THERE.values(), ids=list(HERE_AND_THERE))
@pytest.mark.parametrize("binding", ["CUDA_OPS(library) {}", "PYBIND11_MODULE(name, m) {}"])
def test_an_installed_library_needs_nothing_of_the_machine(
    scratch_op: ScratchOp,
    binding: str,
    change: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scratch_op.binding.write_text(binding)
    pair = registry().rescan()[scratch_op.name]
    library = installed(pair)
    change(monkeypatch)
    monkeypatch.setattr(toolchain, "_asked", lambda *command: pytest.fail(f"asks {command}"))
    for function in (toolchain.cuda_home, toolchain.cuda_version):
        function.cache_clear()
    assert compiling.find_library(pair, pair.read()) == library


def test_building_without_a_home_says_what_to_set(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("v")
    _no_home(monkeypatch)
    with pytest.raises(BuildError, match=r"no folder to build in: .* Set CUDA_OPS_CACHE"):
        scratch_op.build()


def test_a_guest_s_library_serves_the_torch_that_it_was_built_against(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.binding is not None
    pair.binding.write_text("PYBIND11_MODULE(name, m) {}")
    guest = registry().rescan()[pair.stem]
    built = compiling.build(guest, HERE)
    monkeypatch.setattr(toolchain, "_asked", lambda *command: pytest.fail(f"asks {command}"))
    assert compiling.find_library(guest, guest.read()) == built.path
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert compiling.find_library(guest, guest.read()) is None


@pytest.mark.slow
def test_a_wheel_holds_no_path_of_the_machine_that_built_it(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX")  # its precompiled header holds paths
    project = tmp_path / "a, b"
    shutil.copytree(scratch_op.root / "utils", project / "src" / "utils")
    for folder, text in {
        "kernels/named.cu": _KERNEL,
        "bindings/named.cpp": _BINDING,
    }.items():
        (project / "src" / folder).parent.mkdir()
        (project / "src" / folder).write_text(text)
    install(project, root="src", inplace=False)
    (library,) = project.glob("build/lib*/scratch/src/lib/named.abi3.so")
    contents = library.read_bytes()
    folders = [tmp_path, REPO, Path(torch.__file__).parent, toolchain.cuda_home() or "/home/"]
    folders.append(sysconfig.get_path("include"))
    assert [folder for folder in folders if str(folder).encode() in contents] == []
    assert b"src/bindings/named.cpp" in contents


@pytest.fixture
def pair(scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """A pair with a kernel, on a machine with a toolkit; its builds publish nothing of use."""
    monkeypatch.setattr(compiling, "_compile", compiled)
    monkeypatch.setattr(toolchain, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(toolchain, "cuda_version", lambda: "13.0")
    scratch_op.write("v", include='#include "scratch_factor.h"')
    (scratch_op.root / "utils" / "scratch_factor.h").write_text("// 1")
    (scratch_op.root / "kernels" / f"{scratch_op.name}.cu").touch()
    return registry().rescan()[scratch_op.name]


def installed(pair: Pair, archs: tuple[str, ...] = HERE, contents: bytes = LIBRARY) -> Path:
    """A library as pip leaves it."""
    pair.prebuilt.parent.mkdir(exist_ok=True)
    pair.prebuilt.write_bytes(contents)
    provenance.write(pair.prebuilt, provenance.of(pair, archs))
    return pair.prebuilt


def test_a_library_that_fits_is_published_as_it_is(pair: Pair) -> None:
    library = installed(pair)
    built = compiling.build(pair, HERE)
    assert built.origin == "installed"
    assert built.path.read_bytes() == library.read_bytes()
    assert built.resources is None and built.warnings == ()  # pip keeps no log of nvcc's
    assert compiling.build(pair, HERE).origin == "installed"  # as long as pip's is the same
    library.write_bytes(library.read_bytes() + b"of another build")
    assert compiling.build(pair, HERE).origin == "cached"
    library.unlink()
    assert compiling.build(pair, HERE).origin == "cached"


@pytest.mark.parametrize(
    ("built", "wanted", "serves"),
    [
        (("8.0", "9.0a"), ("9.0a",), True),
        (("8.0", "12.0+PTX"), ("12.0",), True),
        (("9.0a",), ("9.0a", "8.0"), False),
        (("12.0",), ("12.0+PTX",), False),
        (("9.0",), ("9.0a",), False),
        (("12.0+PTX",), ("12.0a",), False),
    ],
)
def test_its_gpus_must_be_among_those_that_were_built_for(
    pair: Pair, built: tuple[str, ...], wanted: tuple[str, ...], serves: bool
) -> None:
    installed(pair, built)
    assert (compiling.build(pair, wanted).origin == "installed") is serves


def _edit(pair: Pair) -> None:
    (pair.root / "utils" / "scratch_factor.h").write_text("// 2")


def _cut_short(pair: Pair) -> None:
    pair.prebuilt.write_bytes(pair.prebuilt.read_bytes()[:-8])


def _damage(pair: Pair) -> None:
    pair.prebuilt.write_bytes(pair.prebuilt.read_bytes().replace(b"ELF", b"elf"))


def _without_provenance(pair: Pair) -> None:
    pair.prebuilt.write_bytes(LIBRARY)


def _empty(pair: Pair) -> None:
    pair.prebuilt.write_bytes(b"")


def _gone(pair: Pair) -> None:
    pair.prebuilt.unlink()


@pytest.mark.parametrize("change", [_edit, _cut_short, _damage, _without_provenance, _empty, _gone])
def test_a_library_of_another_text_or_in_doubt_is_left_alone(
    pair: Pair, change: Callable[[Pair], None]
) -> None:
    installed(pair)
    change(pair)
    assert compiling.build(pair, HERE).path.read_bytes().startswith(COMPILED)


@pytest.mark.parametrize(
    ("module", "name", "now"),
    [
        (toolchain, "cuda_version", lambda: "13.1"),
        (toolchain, "cxx_version", lambda: "another compiler"),
        (toolchain, "cuda_home", lambda: None),
        (commands, "nvcc_flags", lambda pair, archs, debug: ["--use_fast_math"]),
        (commands, "link_flags", lambda pair: ["-lm"]),
    ],
)
def test_other_compilers_or_flags_build_it_again(
    pair: Pair, module: Any, name: str, now: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(pair)
    monkeypatch.setattr(module, name, now)
    assert compiling.build(pair, HERE).origin == "built"


@pytest.mark.parametrize("variable", commands.VARIABLES)
def test_what_compilers_read_from_the_environment_is_part_of_the_key(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    plain = installed(pair)
    assert compiling.build(pair, HERE).origin == "installed"
    monkeypatch.setenv(variable, "-lm" if variable in commands.FLAGS else "/")
    other = compiling.build(pair, HERE)
    assert other.origin == "built"
    assert compiling.find_library(pair, pair.read()) == other.path
    monkeypatch.delenv(variable)
    plain.unlink()
    ordinary = compiling.build(pair, HERE)
    assert ordinary.origin == "cached" and ordinary.path != other.path
    os.utime(other.path, (time.time() + 3600,) * 2)
    assert compiling.find_library(pair, pair.read()) == ordinary.path
    ordinary.path.unlink()
    assert compiling.find_library(pair, pair.read()) == other.path


def test_flags_of_the_environment_reach_the_compiler_and_the_linker(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("v * FACTOR")
    monkeypatch.setenv("CPPFLAGS", "-DFACTOR='(1 + 1)'")
    monkeypatch.setenv("LDFLAGS", "-Wl,--defsym=chosen=1")
    assert b"chosen" in scratch_op.reload().path.read_bytes()
    assert torch.equal(scratch_op.function(X), X * 2)
    monkeypatch.setenv("CXXFLAGS", "-DFACTOR=3")  # comes later
    monkeypatch.delenv("CPPFLAGS")
    scratch_op.reload()
    assert torch.equal(scratch_op.function(X), X * 3)


def test_the_library_that_a_build_asked_for_last_is_the_one_that_a_call_takes(pair: Pair) -> None:
    first = compiling.build(pair, HERE)
    second = compiling.build(pair, (*HERE, "8.0"))
    os.utime(first.path, (1e9, 1e9))
    assert compiling.find_library(pair, pair.read()) == second.path
    assert compiling.build(pair, HERE).origin == "cached"
    assert compiling.find_library(pair, pair.read()) == first.path


def test_an_operator_without_a_kernel_fits_every_gpu_and_toolkit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.kernel is not None
    pair.kernel.unlink()
    composed = registry().rescan()[pair.stem]
    installed(composed, ("8.0",))
    monkeypatch.setattr(toolchain, "cuda_version", lambda: "13.1")
    assert compiling.build(composed, HERE).origin == "installed"


def test_files_saved_while_the_installed_library_is_looked_at(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed(pair).read_bytes()
    parse, edits = provenance.parse, [lambda: _edit(pair)]

    def edited_meanwhile(contents: bytes, library: Path) -> Provenance | None:
        if edits and library == pair.prebuilt:
            edits.pop()()
        return parse(contents, library)

    monkeypatch.setattr(provenance, "parse", edited_meanwhile)
    built = compiling.build(pair, HERE)
    # The library is published for the text that it was made from, and the new text is built.
    assert built.path == compiling.library_path(pair, HERE)
    assert built.path.read_bytes().startswith(COMPILED)
    published = {path.read_bytes() for path in built.path.parent.glob(f"{pair.stem}-*.so")}
    assert published == {library, built.path.read_bytes()}


def test_pip_replaces_the_installed_library_while_it_is_looked_at(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed(pair).read_bytes()
    parse = provenance.parse

    def replaced_meanwhile(contents: bytes, library: Path) -> Provenance | None:
        pair.prebuilt.write_bytes(b"of another text")
        return parse(contents, library)

    monkeypatch.setattr(provenance, "parse", replaced_meanwhile)
    assert compiling.build(pair, HERE).path.read_bytes() == library


def test_a_first_use_writes_nothing_where_pip_installed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = installed(pair)
    monkeypatch.setattr(os, "utime", lambda *_: pytest.fail("writes the time of its use"))
    assert compiling.find_library(pair, pair.read()) == library


# --- damaged files -------------------------------------------------------------------


def _truncate(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:4096])


def _overwrite(library: Path) -> None:
    text = bytearray(library.read_bytes())
    text[4096:8192] = b"\xff" * 4096
    library.write_bytes(text)


def _folder(library: Path) -> None:
    library.unlink()
    library.mkdir()
    (library / "file").touch()


DAMAGES = {
    "cut short": (_truncate, r"expected at least \d+ bytes, got 4096"),
    "overwritten": (_overwrite, "expected SHA-256 [0-9a-f]{64}, got [0-9a-f]{64}"),
    "empty": (lambda library: library.write_bytes(b""), "expected an ELF library, got 0 other"),
    "a folder": (_folder, "expected a library, got a folder"),
}
damages = pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=list(DAMAGES))


@pytest.fixture
def built_once(pair: Pair) -> Path:
    """A library in the cache. torch.ops.load_library dies of one that was cut short."""
    return compiling.build(pair, HERE).path


@damages
def test_a_damaged_library_of_the_cache_is_built_again(
    pair: Pair,
    built_once: Path,
    damage: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(built_once)
    with (
        pytest.warns(UserWarning, match=rf"{pair.stem}: ignored {built_once}: {said}"),
        pytest.raises(BuildError, match=r"is not built: run python compile_dev\.py"),
    ):
        registry().load(pair.stem)
    built = compiling.build(pair, HERE)
    assert built.origin == "built" and built.path == built_once
    assert re.search(rf"{built_once}: {said}.*: damaged, built again", capsys.readouterr().err)
    assert compiling.build(pair, HERE).origin == "cached"


@damages
def test_a_damaged_library_that_pip_installed_is_an_error_with_its_remedy(
    pair: Pair, damage: Callable[[Path], None], said: str
) -> None:
    prebuilt = installed(pair)
    damage(prebuilt)
    remedy = "run pip install --force-reinstall --no-deps .*, or python compile_dev.py --root"
    with pytest.raises(BuildError, match=rf"cuda_ops.{pair.stem}: {prebuilt}: {said}.*{remedy}"):
        registry().load(pair.stem)


def test_a_large_library_is_judged_by_its_size_alone(built_once: Path) -> None:
    assert provenance.read(built_once) is not None
    _overwrite(built_once)
    assert provenance.read(built_once, hashed=1 << 10) is not None
    _truncate(built_once)
    with pytest.raises(provenance.DamagedError, match="expected at least"):
        provenance.read(built_once, hashed=1 << 10)


def test_a_stripped_library_is_whole(scratch_op: ScratchOp) -> None:
    scratch_op.write("v")
    library = scratch_op.build().path
    subprocess.run(["strip", library], check=True)
    assert provenance.read(library) is None
