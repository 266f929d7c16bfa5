"""The doctor on a machine where much is wrong, and on this one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_gpu
from filelock import FileLock
from test_cache import stat_as_if

from cuda_ops.build import cache, provenance, toolchain
from cuda_ops.build.discovery import survey
from cuda_ops.build.provenance import Provenance
from cuda_ops.compile_ops import reload
from cuda_ops.doctor import asking, caches, child, command, gather, machine
from cuda_ops.doctor.facts import Facts, Failure, Operator, Torch
from cuda_ops.doctor.operators import look
from cuda_ops.namespaces import hidden_by
from cuda_ops.registry import registry
from cuda_ops.runtime.tuning import key

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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no_such"], "error: no operator 'no_such'; known: silu, relu\n"),
        (["--root", "/no such folder"], "error: --root: /no such folder: operator root does not"),
    ],
)
def test_a_call_that_makes_no_sense(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    lines = [{"unknown": ["no_such"], "known": ["silu", "relu"]}]
    monkeypatch.setattr(gather, "ask_child", told((lines, asking.Answer("", ""))))
    monkeypatch.setattr(machine, "torch_and_driver", lambda: (Torch("2.13.0"), machine.Driver()))
    assert command.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(text) and len(err.splitlines()) == 1


def test_a_name_that_is_no_operator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    lines: list[dict[str, Any]] = []
    look(lines.append, {"names": ["silu", "no_such"], "roots": [], "skip": []})
    assert lines[-1]["unknown"] == ["no_such"] and "silu" in lines[-1]["known"]


def test_a_name_that_a_failed_plugin_would_have_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"plugins": {"name": "mine", "value": "mine.plugin"}},
        {"imported": "mine", "raised": "ImportError: no gone"},
        {"unknown": ["my_op"], "known": ["silu"]},
    ]
    monkeypatch.setattr(gather, "ask_child", told((lines, asking.Answer("", ""))))
    with pytest.raises(gather.UnknownError, match=r"'my_op'; known: silu; plugin 'mine' failed to"):
        gather._with_operators(Facts(), ["my_op"], [])


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


# --- programs that do not answer -------------------------------------------------------------


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    script(tmp_path / "hangs", f"sleep 600 & echo $! > '{tmp_path}/child'; wait")
    answer = asking.ask([str(tmp_path / "hangs")], 3)  # a busy machine starts it late
    assert answer.hangs and answer.problem == "gave no answer within 3 s"
    started = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _runs(started):
        time.sleep(0.01)
    assert not _runs(started)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # killed, and not yet waited for


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo no; exit 3", "ended with status 3 and said: no"),
        ("exit 3", "ended with status 3 and said: nothing"),
        (f"kill -{signal.SIGSEGV.value} $$", "was ended by SIGSEGV"),
    ],
)
def test_a_program_that_fails_says_how(tmp_path: Path, text: str, problem: str) -> None:
    script(tmp_path / "fails", text)
    assert asking.ask([str(tmp_path / "fails")], 30).problem == problem
    assert asking.ask([str(tmp_path / "none")], 30).problem.endswith(
        "does not start: No such file or directory"
    )


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an nvidia-smi of the test's is the only one."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(machine, "_KERNEL", tmp_path / "none")
    monkeypatch.setattr(machine, "_PCI", tmp_path / "pci")
    return tmp_path / "nvidia-smi"


def test_what_nvidia_smi_says_is_read(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    script(smi, "echo 'NVIDIA H100 80GB HBM3, 9.0, 580.82.07'; echo 'A, B, 8.0, 580.82.07'")
    device = smi.parent / "pci" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    driver = machine._driver("13.0", ())
    assert [(gpu.name, gpu.capability) for gpu in driver.gpus] == [
        ("NVIDIA H100 80GB HBM3", "9.0"), ("A, B", "8.0"),
    ]  # fmt: skip
    assert (driver.version, driver.cuda, driver.cards) == ("580.82.07", "13.0", 1)
    assert driver.visible == "1" and driver.problem == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sleep 600", "gave no answer within 0.5 s"),
        ("echo No devices were found", "said: No devices were found"),
        ("echo it has failed; exit 9", "ended with status 9 and said: it has failed"),
    ],
)
def test_an_nvidia_smi_that_has_no_answer(
    smi: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    if text.startswith("sleep"):  # the others may be slow to start
        monkeypatch.setattr(machine, "_SMI_SECONDS", 0.5)
    script(smi, text)
    driver = machine._driver("", ())
    assert driver.problem == problem and driver.gpus == ()


def told(*runs: tuple[list[dict[str, Any]], asking.Answer]) -> Any:
    """Stands in for the processes that look at operators, one after the other."""
    answers = iter(runs)
    return lambda probe, request: next(answers)


def test_a_library_that_hangs_is_left_out_in_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = [{"operator": {"key": key, "library": f"/{key}.so"}} for key in ("a", "b", "c")]
    opened = {"opened": "a", "problem": ""}
    hanging = asking.Answer("", "gave no answer within 60 s", hangs=True)
    runs = (
        ([*first, {"opening": "a"}, opened, {"opening": "b"}], hanging),
        ([*first, {"opening": "c"}, {"opened": "c", "problem": "no"}], asking.Answer("", "")),
    )
    monkeypatch.setattr(gather, "ask_child", told(*runs))
    facts = gather._with_operators(Facts(), [], [])
    assert [(op.key, op.loads) for op in facts.operators] == [
        ("a", "yes"), ("b", "hangs"), ("c", "no"),
    ]  # fmt: skip
    assert facts.operators[1].problem == "opening its library gave no answer within 60 s"


def test_what_a_child_cannot_look_at_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = ([{"raised": "OSError: disk"}], asking.Answer("", ""))
    monkeypatch.setattr(gather, "ask_child", told(raised))
    assert gather._with_operators(Facts(), [], []).failures == (
        Failure("operators", "OSError: disk"),
    )
    ended: tuple[list[dict[str, Any]], asking.Answer] = ([], asking.Answer("", "was ended by X"))
    monkeypatch.setattr(gather, "ask_child", told(ended))
    (failure,) = gather._with_operators(Facts(), [], []).failures
    assert failure.problem == "looking at them was ended by X"


def test_a_probe_that_raises_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("odd machine")

    for name in ("torch_and_driver", "toolkit", "compiler", "ninja"):
        monkeypatch.setattr(machine, name, broken)
    facts = gather.gather()
    assert [one.probe for one in facts.failures] == ["torch", "toolkit", "compiler", "ninja"]
    assert facts.failures[0].problem == "RuntimeError: odd machine"
    monkeypatch.setattr(machine, "torch_and_driver", lambda: (Torch("2.13.0"), machine.Driver()))
    for name in ("_cache", "_with_operators"):
        monkeypatch.setattr(gather, name, broken)
    probes = {one.probe for one in gather.gather().failures}
    assert {"cache", "operators"} <= probes


# --- the parts, in this process --------------------------------------------------------------


def test_a_child_tells_what_it_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exits(*_: Any) -> None:
        sys.exit("enough")

    monkeypatch.setitem(child.PROBES, "gpus", exits)
    assert child.main(str(tmp_path / "told"), "gpus", "{}") == 0
    assert json.loads((tmp_path / "told").read_text()) == {"raised": "SystemExit: enough"}


@pytest.mark.parametrize("usable", [True, False])
def test_a_child_tells_of_torch_driver_and_gpus(
    usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError("CUDA unknown error\nand more")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9 - index, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(key, "driver_version", lambda: 12080)
    lines: list[dict[str, Any]] = []
    child.gpus(lines.append, {})
    monkeypatch.setattr(machine, "ask_child", told((lines, asking.Answer("", ""))))
    monkeypatch.setattr(machine, "_cards", lambda: 0)
    monkeypatch.setenv("PATH", "/no programs")  # no nvidia-smi
    of_torch, driver = machine.torch_and_driver()
    assert (of_torch.version, of_torch.cuda) == (torch.__version__, "13.0")
    names = [(gpu.name, gpu.capability) for gpu in of_torch.gpus]
    assert names == ([("GPU 0", "9.0"), ("GPU 1", "8.0")] if usable else [])
    assert of_torch.problem == ("" if usable else "CUDA unknown error")
    assert driver.cuda == "12.8" and driver.gpus == of_torch.gpus and not of_torch.fails


@pytest.mark.parametrize(
    ("raised", "ended", "how"),
    [
        ([], "gave no answer within 60 s", "gave no answer within 60 s"),
        ([{"raised": "RuntimeError: odd GPU"}], "", "raised RuntimeError: odd GPU"),
    ],
)
def test_starting_cuda_may_hang_or_raise(
    raised: list[dict[str, Any]], ended: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"torch": {"version": "2.11.0", "cuda": "13.0"}}, {"driver": "13.0"}, *raised]
    answer = asking.Answer("", ended, hangs=bool(ended))
    monkeypatch.setattr(machine, "ask_child", told((lines, answer)))
    monkeypatch.setenv("PATH", "/no programs")
    of_torch, driver = machine.torch_and_driver()
    assert of_torch.fails and of_torch.problem == f"starting CUDA {how}"
    assert (of_torch.version, driver.cuda) == ("2.11.0", "13.0")


def test_another_user_s_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    (folder / "lib").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    monkeypatch.setenv("CUDA_OPS_CACHE", str(folder))
    assert caches.look().foreign == ()
    stat_as_if({folder / "lib": 12345}, monkeypatch)
    (text,) = caches.look().foreign
    assert "root to own it, got user 12345; run rm -r " in text


def test_a_cache_that_is_none_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path / "not" / "there"))
    found = caches.look()
    assert (found.entries, found.problem) == (0, "") and found.writable
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path / "file"))
    assert caches.look().problem.startswith("CUDA_OPS_CACHE: expected a folder that can be written")
    monkeypatch.setenv("CUDA_OPS_CACHE", "~no_such_user/cache")
    assert "there is no such user" in caches.look().problem


def test_what_clean_would_remove_is_what_it_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    (tmp_path / "lib").mkdir(mode=0o700)
    (tmp_path / "lib" / f"gone-{'1' * 16}-{'0' * 24}.so").touch()
    assert [needed for _, needed in cache.entries()] == [False]
    removed, kept = cache.clean()
    assert len(removed) == 1 and kept == [] and cache.entries() == []


@pytest.fixture
def no_cached_toolkit() -> Iterator[None]:
    cached = (toolchain.cuda_home, toolchain.cuda_version, toolchain._release)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def test_a_toolkit_that_is_none_is_told_and_not_printed(
    no_cached_toolkit: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (line,) = (one for one in machine.toolkit().passed_over if str(tmp_path) in one)
    assert line.startswith("CUDA_HOME: expected a folder with bin/nvcc")
    assert capsys.readouterr().err == ""


def test_a_compiler_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "mine", "exit 1")
    monkeypatch.setenv("CXX", str(tmp_path / "mine"))
    assert machine.compiler().problem == f"{tmp_path}/mine: expected its version, got no answer"
    monkeypatch.setenv("CXX", "c++ '")
    assert machine.compiler().command == "set CXX to a command, or unset CXX"
    script(tmp_path / "ninja", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert machine.ninja().problem.startswith(f"{tmp_path}/ninja: ended with status 1")


def test_what_comes_before_an_operator_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "doctored_ops"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from cuda_ops.namespaces import expose\n"
        "__getattr__, __dir__ = expose('doctored_ops', __name__)\nscale = 3\n"
    )
    (package / "norm.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    __import__("doctored_ops")
    assert hidden_by("doctored_ops", "norm") == "the module doctored_ops.norm"
    assert hidden_by("doctored_ops", "scale").startswith("doctored_ops.scale, which")
    assert hidden_by("doctored_ops", "other") == ""


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
