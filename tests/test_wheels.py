"""NVIDIA's compiler wheels, which ``pip install "cuda_ops[nvcc]"`` brings, make a toolkit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ScratchOp
from torch.utils import cpp_extension

from cuda_ops import packaging
from cuda_ops.build import commands, toolchain, wrappers
from cuda_ops.build.discovery import BUILTIN_ROOT, discover
from cuda_ops.dev import main
from cuda_ops.dev.scaffold import new_pair

REPO = Path(__file__).resolve().parent.parent
ANSWERS = "#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n"


def forget() -> None:
    for function in (toolchain.cuda_home, toolchain.cuda_version, toolchain._release):
        function.cache_clear()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages, and no toolkit anywhere."""
    forget()
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(toolchain, "_SYSTEM", tmp_path / "usr_local")
    monkeypatch.setattr(sys, "path", [str(folder)])
    yield folder
    forget()


def wheels(packages: Path, release: str = "13.0", without: str = "") -> Path:
    """Installs files as the wheels of a release have them, but those of one."""
    home = packages / "nvidia" / f"cu{release.partition('.')[0]}"
    for wheel, part in {**toolchain._WHEELS, "the header": toolchain._HEADER}.items():
        if wheel != without:
            (home / part).parent.mkdir(parents=True, exist_ok=True)
            (home / part).touch()
    if without != "nvidia-cuda-nvcc":
        nvcc(home, release)
    return home


def nvcc(home: Path, release: str) -> Path:
    program = home / "bin" / "nvcc"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(ANSWERS.format(release=release))
    program.chmod(0o755)
    (home / "include").mkdir(exist_ok=True)
    (home / "include" / "cuda_runtime_api.h").touch()
    return home


def test_without_a_toolkit_there_is_none(packages: Path) -> None:
    assert toolchain.cuda_home() is None


def test_wheels_are_found_where_there_is_no_toolkit(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = wheels(packages)
    assert toolchain.cuda_home() == home and toolchain.cuda_version() == "13.0"
    (pair,) = (pair for pair in discover([BUILTIN_ROOT]) if pair.stem == "silu")
    assert f"-L{home}/lib" in commands.link_flags(pair)  # they have no lib64
    assert capsys.readouterr().err == ""


def test_of_two_releases_the_newest_is_taken(packages: Path) -> None:
    wheels(packages, "9.0")
    newest = wheels(packages, "13.0")
    assert toolchain.cuda_home() == newest


def test_the_order_is_what_is_said_then_the_machine_s_then_wheels(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [wheels(packages)]
    expected.append(nvcc(tmp_path / "usr_local" / "cuda", "12.8"))
    for name in ("CUDA_PATH", "CUDA_HOME"):
        expected.append(nvcc(tmp_path / name, "13.1"))
    found = []
    for home in expected:
        if home.name.startswith("CUDA_"):
            monkeypatch.setenv(home.name, str(home))
        elif home.name == "cu13":
            monkeypatch.setattr(toolchain, "_SYSTEM", tmp_path / "nothing")
        else:
            monkeypatch.setattr(toolchain, "_SYSTEM", tmp_path / "usr_local")
        forget()
        found.append(toolchain.cuda_home())
    assert found == expected


@pytest.mark.parametrize("wheel", [name for name in toolchain._WHEELS if "nvcc" not in name])
def test_a_wheel_that_is_missing_is_named(
    packages: Path, wheel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home = wheels(packages, without=wheel)
    assert toolchain.cuda_home() is None
    said = f'{home} lacks {wheel} and is ignored; run pip install "cuda_ops[nvcc]"'
    assert capsys.readouterr().err == f"cuda_ops: {said}\n"


def test_wheels_that_torch_brings_without_nvcc_are_no_toolkit_and_no_news(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels(packages, without="nvidia-cuda-nvcc")
    assert toolchain.cuda_home() is None and capsys.readouterr().err == ""


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_variable_that_names_no_toolkit_is_passed_over_and_said(
    packages: Path,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = wheels(packages)
    monkeypatch.setenv(variable, "/opt/gone")
    assert toolchain.cuda_home() == home
    expected = "a folder with bin/nvcc and include/cuda_runtime_api.h"
    said = f"{variable}: expected {expected}, got '/opt/gone', which is ignored"
    assert capsys.readouterr().err == f"cuda_ops: {said}\n"


def test_a_guest_links_the_static_runtime_where_the_shared_one_has_no_name(
    packages: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = wheels(packages)
    (home / "lib" / "libcudart.so.13").touch()
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert packaging._missing_libraries() == ("cudart",)
    folder = wrappers.stub_libraries()
    assert folder is not None and [path.name for path in folder.iterdir()] == ["libcudart.so"]
    shutil.rmtree(tmp_path / "cache")
    (home / "lib" / "libcudart.so").touch()
    assert packaging._missing_libraries() == ()
    assert wrappers.stub_libraries() is None


def _with_wheels_alone() -> dict[str, str]:
    """Returns an environment in which no other nvcc than that of the wheels is found."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    hidden = [folder for folder in folders if not (Path(folder) / "nvcc").exists()]
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH")}
    return {**environment, "PATH": os.pathsep.join(hidden)}


_COMPILED = """
import sys
from pathlib import Path
from cuda_ops.build import toolchain
toolchain._SYSTEM = Path("/nonexistent")
from cuda_ops.dev import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_wheels_compile_a_kernel(tmp_path: Path) -> None:
    if not toolchain._wheel_homes():
        # 300 MB, which tests do not download.
        pytest.skip('the wheels are not installed here: pip install "cuda_ops[nvcc]"')
    for folder, suffix in (("kernels", "cu"), ("bindings", "cpp")):
        (tmp_path / "root" / folder).mkdir(parents=True)
        text = (BUILTIN_ROOT / folder / f"silu.{suffix}").read_text().replace("silu", "mine")
        (tmp_path / "root" / folder / f"mine.{suffix}").write_text(text)
    environment = {
        **_with_wheels_alone(),
        "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path]),
        "CUDA_OPS_CACHE": str(tmp_path / "cache"),
    }
    command = ["-c", _COMPILED, "--root", str(tmp_path / "root"), "--verbose", "mine"]
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("mine "))
    assert "cpu cuda" in row and "no nvcc" not in row
    assert f"-L{toolchain._wheel_homes()[0]}/lib -lcudart_static" in done.stderr
    (library,) = (tmp_path / "cache" / "lib").glob("*.so")
    assert b".nv_fatbin" in library.read_bytes()


def test_torch_takes_what_was_found(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = wheels(packages)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    toolchain.use_cuda_home()
    assert str(home) == cpp_extension.CUDA_HOME


@pytest.mark.slow
def test_without_a_toolkit_the_table_says_how_to_get_one(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)
    monkeypatch.delenv("CXX")  # which has a precompiled header for a build with CUDA
    new_pair(scratch_op.name, scratch_op.root)
    assert main([scratch_op.name]) == 0
    out = capsys.readouterr().out
    assert "cpu no nvcc" in out
    assert "No CUDA toolkit here, so .cu files were not compiled: install one, or run pip" in out
    assert 'pip install "cuda_ops[nvcc]"' in out
