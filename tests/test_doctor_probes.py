"""What the doctor asks of programs, of a child and of the parts of a machine."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cache import stat_as_if
from test_doctor import script

from cuda_ops.build import cache, toolchain
from cuda_ops.doctor import asking, caches, child, command, gather, machine
from cuda_ops.doctor.facts import Facts, Failure, Torch
from cuda_ops.doctor.operators import look
from cuda_ops.errors import DiscoveryError
from cuda_ops.namespaces import hidden_by
from cuda_ops.registry import Registry
from cuda_ops.runtime.tuning import key

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


# --- names that are none -----------------------------------------------------------------------


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


def test_a_name_of_several_operators_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object, name: str) -> str:
        raise DiscoveryError(f"operator {name!r}: expected a full name")

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(Registry, "key_in_command", refused)
    lines: list[dict[str, Any]] = []
    look(lines.append, {"names": ["silu"], "roots": [], "skip": []})
    monkeypatch.setattr(gather, "ask_child", told((lines, asking.Answer("", ""))))
    with pytest.raises(gather.UnknownError, match=r"^operator 'silu': expected a full name$"):
        gather._with_operators(Facts(), ["silu"], [])


def test_a_name_that_a_failed_plugin_would_have_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"plugins": {"name": "mine", "value": "mine.plugin"}},
        {"imported": "mine", "raised": "ImportError: no gone"},
        {"unknown": ["my_op"], "known": ["silu"]},
    ]
    monkeypatch.setattr(gather, "ask_child", told((lines, asking.Answer("", ""))))
    with pytest.raises(gather.UnknownError, match=r"'my_op'; known: silu; plugin 'mine' failed to"):
        gather._with_operators(Facts(), ["my_op"], [])


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
