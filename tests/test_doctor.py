"""The doctor on a machine where much is wrong, and on this one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_gpu
from filelock import FileLock

from cuda_ops.build import provenance, toolchain
from cuda_ops.build.discovery import survey
from cuda_ops.build.provenance import Provenance
from cuda_ops.compile_ops import reload
from cuda_ops.doctor import command, gather, machine
from cuda_ops.doctor.facts import Facts, Operator, Torch
from cuda_ops.registry import registry

REPO = Path(__file__).resolve().parent.parent
NATIVE = '#include "binding.h"\nCUDA_OPS(library) { library.op("NAME(Tensor x) -> Tensor", ""); }\n'
GUEST = "#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n"
#: By operator: what its library does.
LIBRARIES = {
    "crashes": "#include <cstdlib>\n__attribute__((constructor)) void f() { abort(); }",
    "bare": "int bare;",  # it has no manifest
    "edited": "int edited;",
    "later": 'extern "C" void aoti_torch_of_a_later_torch();\n'
    "void f() { aoti_torch_of_a_later_torch(); }",
    "linked": "namespace c10 { void no_torch_has_this(); }\nvoid f() { c10::no_torch_has_this(); }",
}
GUESTS = ("linked", "older")


@dataclass(frozen=True)
class Machine:
    """A folder with everything that the doctor looks at."""

    folder: Path
    environment: dict[str, str]

    @property
    def root(self) -> Path:
        return self.folder / "operators"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def doctor(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cuda_ops", "doctor", "--root", str(self.root), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip


def script(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def plugin(site: Path, name: str, text: str) -> None:
    """Installs a package with an entry point, as pip leaves it."""
    (site / f"{name}.py").write_text(text)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[cuda_ops]\n{name} = {name}\n")


def operators(root: Path) -> None:
    for folder in ("bindings", "kernels", "lib"):
        (root / folder).mkdir(parents=True)
    names = (*LIBRARIES, "cut", "unbuilt", "older", "testing")
    for name in names:
        text = GUEST if name in GUESTS else NATIVE.replace("NAME", name)
        (root / "bindings" / f"{name}.cpp").write_text(text)
    for name, text in LIBRARIES.items():
        source, library = root / f"{name}.cpp", root / "lib" / f"{name}.abi3.so"
        source.write_text(text)
        subprocess.run(["c++", "-shared", "-fPIC", "-o", library, source], check=True)
    for pair in survey([root])[0].values():
        if pair.prebuilt.exists() and pair.stem not in GUESTS:
            text = "0" * 16 if pair.stem == "edited" else pair.read().hash
            provenance.write(pair.prebuilt, Provenance(text, "0" * 16, ()))
    whole = (root / "lib" / "bare.abi3.so").read_bytes()
    (root / "lib" / "cut.abi3.so").write_bytes(whole[:1000])


def cached(folder: Path, root: Path) -> None:
    """A cache with a guest of another torch, what no source needs, and what others may write."""
    library = folder / "lib"
    library.mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (pair,) = (pair for pair in survey([root])[0].values() if pair.stem == "older")
    key = "0" * 24
    (library / f"older-{pair.read().hash}-torch2_10_0_cpu_py310_{key}.so").write_bytes(b"")
    (library / f"gone-{'1' * 16}-{key}.so").write_bytes(bytes(3000))
    (library / "open").touch()
    (library / "open").chmod(0o666)


@pytest.fixture(scope="session")
def broken(folder_of_all: Path) -> Machine:
    """Where much is wrong; all workers share it."""
    folder = folder_of_all / "a broken machine"
    unset = ("CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_OPS_DEBUG")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {
        "PATH": str(folder / "bin"),
        "PYTHONPATH": f"{folder / 'site'}:{REPO}",
        "CUDA_OPS_CACHE": str(folder / "cache"),
    }
    with FileLock(f"{folder}.lock"):
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a failed attempt
            _break(folder)
            (folder / "whole").touch()
    return Machine(folder, environment)


def _break(folder: Path) -> None:
    toolkit, site = folder / "cuda", folder / "site"
    script(toolkit / "bin" / "nvcc", f"echo '#$ TOP={toolkit}'; echo release 12.9, V12.9.1")
    (toolkit / "include").mkdir()
    (toolkit / "include" / "cuda_runtime_api.h").touch()
    script(folder / "bin" / "nvcc", f'exec "{toolkit}/bin/nvcc" "$@"')
    operators(folder / "operators")
    cached(folder / "cache", folder / "operators")
    site.mkdir()
    plugin(site, "raises_at_once", "raise OSError('no such licence')")
    plugin(site, "is_fine", "")


@pytest.fixture(scope="session")
def said(broken: Machine) -> dict[str, Any]:
    kept = broken.folder / "said.json"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            done = broken.doctor("--json")
            assert done.returncode == 1, done.stderr
            kept.write_text(done.stdout)
    read: dict[str, Any] = json.loads(kept.read_text())
    return read


def about(said: dict[str, Any], fault: str, name: str = "") -> dict[str, Any]:
    """The finding of this fault, about one operator of ours if several have it."""
    listed = [one for one in said["findings"] if one["fault"] == fault]
    listed = [one for one in listed if not name or name in one["about"]]
    assert len(listed) == 1, (fault, [one["fault"] for one in said["findings"]])
    found: dict[str, Any] = listed[0]
    return found


def operator(said: dict[str, Any], key: str) -> dict[str, Any]:
    (found,) = (one for one in said["operators"] if one["key"] == key)
    return dict(found)


def test_no_probe_failed(said: dict[str, Any]) -> None:
    assert said["failures"] == [] and said["torch"]["version"] == torch.__version__
    assert {one["level"] for one in said["findings"]} <= {"broken", "warning", "note"}


def test_a_wrapper_around_nvcc(broken: Machine, said: dict[str, Any]) -> None:
    toolkit = broken.folder / "cuda"
    assert said["toolkit"]["home"] == str(toolkit) and said["toolkit"]["version"] == "12.9"
    one = about(said, "nvcc-is-a-script")
    assert str(broken.folder / "bin" / "nvcc") in one["what"]
    assert one["command"] == f"export CUDA_HOME={toolkit}"


def test_a_path_without_a_compiler_and_ninja(said: dict[str, Any]) -> None:
    one = about(said, "no-compiler")
    assert one["level"] == "broken" and one["what"] == "there is no C++ compiler 'c++'"
    assert "or set CXX to one" in one["command"]
    assert re.search(
        r"export PATH=\S+:\$PATH|pip install ninja", about(said, "no-ninja")["command"]
    )


def test_a_stale_entry_of_the_cache(said: dict[str, Any]) -> None:
    assert said["cache"]["stale"] == 2 and said["cache"]["stale_size"] == 3000
    assert about(said, "cache-stale")["command"] == "python -m cuda_ops clean"


def test_what_others_may_write_in_the_cache(broken: Machine, said: dict[str, Any]) -> None:
    one = about(said, "cache-foreign")
    assert f"{broken.cache}/lib/open: a cache holds code" in one["what"]
    assert one["command"].startswith("chmod -R go-w ")


def test_an_installed_plugin_that_fails(said: dict[str, Any]) -> None:
    one = about(said, "plugin-failed")
    assert one["about"] == ["raises_at_once"] and "OSError: no such licence" in one["why"]
    assert "pip uninstall raises_at_once" in one["command"]
    loaded = {one["name"]: one["problem"] == "" for one in said["plugins"]}
    assert loaded["is_fine"] and not loaded["raises_at_once"]


def test_an_operator_whose_name_is_taken(said: dict[str, Any]) -> None:
    one = about(said, "operator-hidden")
    assert one["about"] == ["testing"] and "is taken by the module cuda_ops.testing" in one["what"]
    assert one["command"] == "rename the file"


def test_a_library_that_crashes_costs_itself_alone(broken: Machine, said: dict[str, Any]) -> None:
    one = about(said, "library-crashes")
    assert one["what"] == "crashes: opening its library was ended by SIGABRT"
    assert one["about"] == ["crashes"] and one["level"] == "broken"
    assert operator(said, "crashes")["loads"] == "crashes"
    assert operator(said, "edited")["loads"] == "no"  # it comes later
    library = broken.root / "lib" / "crashes.abi3.so"
    assert operator(said, "crashes")["library"] == str(library)


def test_a_library_that_was_cut_short(broken: Machine, said: dict[str, Any]) -> None:
    one = about(said, "library-damaged")
    assert one["about"] == ["cut"] and one["level"] == "broken"
    assert re.search(r"cut.abi3.so: expected at least \d+ bytes, got 1000$", one["what"])
    assert f"--root '{broken.root}' cut" in one["command"]
    assert operator(said, "cut")["library"] == ""


def test_guests_of_another_torch(said: dict[str, Any]) -> None:
    one = about(said, "guest-of-another-torch", "older")
    assert one["why"] == "it was built for torch 2.10.0+cpu, Python 3.10"
    one = about(said, "guest-of-another-torch", "linked")
    assert "undefined symbol: _ZN3c1017no_torch_has_thisEv" in one["why"]
    assert torch.__version__ in one["what"]


def test_libraries_that_do_not_serve(said: dict[str, Any]) -> None:
    assert "bare.abi3.so has no manifest" in about(said, "library-does-not-load", "bare")["why"]
    assert "unbuilt" in about(said, "not-built", "unbuilt")["about"]
    assert "edited" in about(said, "source-differs")["about"]
    assert operator(said, "edited")["is_current"] is False
    assert operator(said, "bare")["is_current"] is True
    assert about(said, "later-symbols")["about"] == ["later"]
    assert operator(said, "later")["later_symbols"] == ["aoti_torch_of_a_later_torch"]


def test_the_doctor_makes_and_changes_nothing(broken: Machine, said: dict[str, Any]) -> None:
    files = sorted(path.name for path in broken.cache.rglob("*"))
    assert len(files) == 4 and files[0] == f"gone-{'1' * 16}-{'0' * 24}.so"
    assert {path.suffix for path in (broken.root / "lib").iterdir()} == {".so"}


@pytest.mark.slow
def test_the_report_names_the_same(broken: Machine, said: dict[str, Any]) -> None:
    done = broken.doctor("crashes", "cut")
    assert done.returncode == 1 and done.stderr == ""
    rows = dict(re.findall(r"^(crashes|cut) +(.+?) *$", done.stdout, re.MULTILINE))
    assert rows["cut"] == "none" and rows["crashes"].endswith("crashes")
    assert "  mend: export CUDA_HOME=" in done.stdout
    broken_ones = re.findall(r"^broken ", done.stdout, re.MULTILINE)
    assert re.search(rf"^{len(broken_ones)} broken\.", done.stdout, re.MULTILINE)


# --- what takes the doctor's own ground away -------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "text", "why", "mend"),
    [
        ("torch/__init__.py", "raise OSError('libcudart.so.13: cannot open shared object file')",
         "said: OSError: libcudart.so.13: cannot open", "pip install --force-reinstall torch"),
        ("sitecustomize.py", "import sys\nsys.modules['torch'] = None",
         "ModuleNotFoundError", "pip install torch"),
    ],
    ids=["broken", "missing"],
)  # fmt: skip
def test_a_torch_that_is_broken_or_missing(
    broken: Machine, tmp_path: Path, file: str, text: str, why: str, mend: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    environment = {**broken.environment, "PYTHONPATH": f"{tmp_path}:{REPO}"}
    done = Machine(broken.folder, environment).doctor("--json")
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    one = about(said, "no-torch")
    assert why in one["why"] and one["command"] == mend
    assert about(said, "nvcc-is-a-script")  # the rest was looked at
    assert said["failures"] == []


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["os.abort()", "os._exit(0)"])
def test_a_plugin_that_ends_the_process(broken: Machine, tmp_path: Path, ends: str) -> None:
    plugin(tmp_path, "fatal", f"import os\n{ends}")
    environment = {**broken.environment, "PYTHONPATH": f"{tmp_path}:{REPO}"}
    done = Machine(broken.folder, environment).doctor("--json")
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    one = about(said, "plugin-failed")
    how = "was ended by SIGABRT" if "abort" in ends else "ended the process"
    assert one["about"] == ["fatal"] and one["why"] == f"importing it {how}"
    assert about(said, "no-compiler") and said["operators"] == []


def test_a_project_that_cannot_be_read_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[project\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "torch_and_driver", lambda: (Torch(), machine.Driver()))
    (failure,) = gather.gather().failures
    assert failure.probe == "project" and "pyproject.toml: cannot be read" in failure.problem


# --- this machine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here() -> tuple[int, dict[str, Any]]:
    reload("relu", "silu")
    done = subprocess.run(
        [sys.executable, "-m", "cuda_ops", "doctor", "relu", "silu", "--json"], cwd=REPO,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


def test_operators_that_were_just_built_are_well(here: tuple[int, dict[str, Any]]) -> None:
    status, said = here
    assert [one["key"] for one in said["operators"]] == ["relu", "silu"]
    for one in said["operators"]:
        assert one["loads"] == "yes" and one["is_current"] is True and one["problem"] == ""
        assert one["library"] == str(registry().library_of(one["key"]))
        assert one["later_symbols"] == one["cpp_symbols"] == []
    broken = [one for one in said["findings"] if one["level"] == "broken"]
    assert status == bool(broken)
    assert not [one for one in broken if {"relu", "silu"} & {*one["about"]}]
    assert said["compiler"]["problem"] == "" and said["toolkit"]["version"] in (
        "", toolchain.cuda_version(),
    )  # fmt: skip


def test_a_machine_without_a_gpu_is_no_error(
    here: tuple[int, dict[str, Any]], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    well = Facts(torch=Torch("2.13.0+cpu"), operators=(Operator("silu", library="/x.so"),))
    monkeypatch.setattr(command, "gather", lambda names, roots: well)
    assert command.main([]) == 0
    assert "none here: only CPU kernels run" in capsys.readouterr().out


@needs_gpu
def test_the_gpus_are_those_of_torch(here: tuple[int, dict[str, Any]]) -> None:
    _, said = here
    major, minor = torch.cuda.get_device_capability(0)
    assert said["torch"]["gpus"][0] == {
        "name": torch.cuda.get_device_name(0), "capability": f"{major}.{minor}",
    }  # fmt: skip
    assert len(said["torch"]["gpus"]) == torch.cuda.device_count()
    assert float(said["driver"]["cuda"]) >= 12
