"""Which compilers, architectures and flags a build takes."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from cuda_ops.build import commands, compiling, toolchain
from cuda_ops.build.discovery import BUILTIN_ROOT, discover
from cuda_ops.errors import BuildError


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("8.0;9.0a+PTX, 12.0", ("8.0", "9.0a+PTX", "12.0")),
        ("Hopper", ("9.0+PTX",)),
        ("Ampere;9.0a", ("8.0", "8.6+PTX", "9.0a")),
        ("Ampere+Tegra", ("8.7",)),
        ("native", ("8.6", "12.0a")),
        ("All", toolchain.RELEASE_ARCHS),
    ],
)
def test_an_arch_may_be_torch_s_name(
    text: str, archs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: [(12, 0), (8, 6)][i])
    assert toolchain.parse_archs(text) == archs


def test_torch_takes_each_name_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(cpp_extension._get_cuda_arch_flags)
    assert {*re.findall(r"'([A-Z][a-z]+(?:\+[A-Z][a-z]+)?)', '", source)} == {
        *toolchain._GENERATIONS
    }
    for name, archs in toolchain._GENERATIONS.items():
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", name)
        assert sorted(toolchain.gencode_flags(archs)) == cpp_extension._get_cuda_arch_flags()


def test_gpus_that_cannot_be_used_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: int) -> None:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    assert toolchain.gpu_archs() == ()
    assert toolchain.parse_archs("native") == (toolchain.DEFAULT_ARCH,)


def test_threads_may_ask_for_archs_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper;8.0")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(compiling.visible_archs) for _ in range(200)]
        found = {future.result() for future in asked}
    finally:
        sys.setswitchinterval(interval)
    assert found == {("9.0+PTX", "8.0")}
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "Hopper;8.0"


@pytest.mark.parametrize("text", ["8.0;Grace", "sm_90", "90", "Hopper+", "9.0b"])
def test_another_arch_is_refused_by_name(text: str) -> None:
    wrong = text.rpartition(";")[2]
    with pytest.raises(ValueError, match=rf"arch '{wrong}'".replace("+", r"\+")):
        toolchain.parse_archs(text)


def test_a_number_of_compilers_that_is_none_names_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAX_JOBS", "abc")
    with pytest.raises(ValueError, match="MAX_JOBS: expected a number of compilers, got 'abc'"):
        toolchain.operators_at_once()


def test_another_compiler_is_asked_for_its_own_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho mine 1.0 $1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", "/nonexistent")
    assert toolchain.cxx_version() == "none"
    monkeypatch.setenv("CXX", f"{compiler} -m64")
    assert toolchain.cxx_version() == "mine 1.0 -m64"


@pytest.mark.parametrize("variable", ["CXX", *commands.FLAGS])
def test_a_quote_left_open_names_its_variable(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pair,) = (pair for pair in discover([BUILTIN_ROOT]) if pair.stem == "silu")
    monkeypatch.setenv(variable, "-DX='")
    message = f'{variable}: expected words quoted as for a shell, got "-DX=\'": No closing'
    with pytest.raises(BuildError, match=message):
        commands.recipe(pair, ("8.0",))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A toolkit whose nvcc is missing, and no other one."""
    cached = (toolchain.cuda_home, toolchain.cuda_version, toolchain._release)
    for function in cached:
        function.cache_clear()
    (tmp_path / "bin").mkdir()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime_api.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(toolchain, "_SYSTEM", tmp_path / "none")
    monkeypatch.setattr(toolchain, "_ANSWER_SECONDS", 0.5)
    yield tmp_path
    for function in cached:
        function.cache_clear()


def test_a_toolkit_is_found_and_asked_for_its_release(home: Path) -> None:
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.1\n")
    nvcc.chmod(0o755)
    assert toolchain.cuda_home() == home and toolchain.cuda_version() == "13.0"


@pytest.mark.parametrize(
    ("text", "mode"),
    [("", 0o755), ("#!/bin/sh\n", 0o644), ("#!/bin/sh\nwhile :; do :; done\n", 0o755)],
    ids=["empty", "not executable", "hangs"],
)
def test_an_nvcc_that_does_not_work_is_none_and_said(
    home: Path, text: str, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(text)
    nvcc.chmod(mode)
    assert toolchain.cuda_home() is None and toolchain.cuda_version() == "none"
    said = f"cuda_ops: {nvcc} did not report its version and is ignored\n"
    assert capsys.readouterr().err == said


#: What torch, setuptools and nvcc.profile read besides, by why it is not part of a library's key.
_NOT_IN_THE_KEY = {
    "a recipe has the toolkit's release, the compiler's version and the archs": (
        *("CUDA_HOME", "CUDA_PATH", "PATH", "LD_LIBRARY_PATH", "TORCH_CUDA_ARCH_LIST"),
    ),
    "the same library, elsewhere, sooner or later": (
        *("TORCH_EXTENSIONS_DIR", "MAX_JOBS", "TORCH_NO_COMPILER_WRAPPER"),
    ),
    "what is checked or remembered, not what is built": (
        *("TORCH_DONT_CHECK_COMPILER_ABI", "TORCH_EXTENSION_SKIP_NVCC_GEN_DEPENDENCIES"),
    ),
    "for static libraries, or the preprocessor alone": ("AR", "ARFLAGS", "RANLIB", "CPP"),
    "for builds of Python itself": ("_PYTHON_PROJECT_BASE",),
    "of Windows": (
        *("WINDOWS_CUDA_HOME", "VCToolsInstallDir", "VSCMD_ARG_TGT_ARCH", "DISTUTILS_USE_SDK"),
    ),
    "for GPUs of others": (
        *("ROCM_HOME", "ROCM_PATH", "PYTORCH_ROCM_ARCH", "TORCH_XPU_ARCH_LIST"),
    ),
}


def _read_by_python(*files: Path) -> set[str]:
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    asked = (
        r"""(?:environ(?:\.get\(|\[)|getenv\()["'](\w+)["']|["'](\w+)["'] (?:not )?in os\.environ"""
    )
    return {name for names in re.findall(asked, text) for name in names if name}


def test_what_compilers_read_is_in_the_key_or_has_a_reason() -> None:
    found = _read_by_python(Path(cpp_extension.__file__))
    assert {"CXX", "CC", "CUDNN_PATH"} <= found
    if setuptools := importlib.util.find_spec("setuptools"):
        files = [*Path(setuptools.origin or "").parent.glob("_distutils/**/*.py")]
        found |= _read_by_python(*(f for f in files if f.stem == "sysconfig" or "unix" in f.stem))
        assert {"LDSHARED", "LDCXXSHARED"} <= found
    if home := toolchain.cuda_home():
        profile = (home / "bin" / "nvcc.profile").read_text()
        added = set(re.findall(r"^(\w+)\s*(?:\+=|=\+)", profile, re.MULTILINE))
        assert "PTXAS_FLAGS" in added
        found |= added
    elsewhere = [name for names in _NOT_IN_THE_KEY.values() for name in names]
    assert found - {*commands.VARIABLES} - {*elsewhere} == set()
    assert not {*commands.VARIABLES} & {*elsewhere}
