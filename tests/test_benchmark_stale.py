"""Which committed measurements are older than the sources that they measured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stale
from cuda_ops.errors import BenchmarkError

KERNEL = (
    '#include "shared.h"\n// Doubles.\n__global__ void double_kernel(float* x) { x[0] *= 2; }\n'
)
BINDING = """#include "binding.h"
CUDA_OPS(library) {
  library.op("%s(Tensor x) -> Tensor", "()->()").calls("%s").help(R"(Doubles x.)");
}
"""


class Checkout:
    """A repository of its own with operators that call each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q")
        for name, called in (("doubled", "halved"), ("halved", "no_such_part"), ("other", "none")):
            self.write(f"src/bindings/{name}.cpp", BINDING % (name, called))
            self.write(f"src/kernels/{name}.cu", KERNEL)
        self.write("src/utils/shared.h", "int shared();\n")
        self.first = self.commit()

    def git(self, *arguments: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", *names, "-C", str(self.folder), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")
        return self.git("rev-parse", "--short", "HEAD")

    def measure(self, name: str, commit: str, results: Any = ()) -> None:
        text = json.dumps({"environment": {"commit": commit}, "results": list(results)})
        self.write(f"benchmarks/results/h200/{name}.json", text)

    def changed(self) -> dict[str, tuple[str, ...]]:
        return {Path(f.file).stem: f.changed for f in stale.find(self.folder)}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "repository")
    for name in ("doubled", "halved", "other"):
        made.measure(f"operators/{name}", made.first)
    return made


@pytest.fixture(autouse=True)
def without_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_stale_where_nothing_changed(checkout: Checkout) -> None:
    assert checkout.changed() == {"doubled": (), "halved": (), "other": ()}


def test_a_kernel_that_changed_makes_those_that_call_it_stale_too(checkout: Checkout) -> None:
    checkout.write("src/kernels/halved.cu", KERNEL.replace("*= 2", "/= 2"))
    changed = ("src/kernels/halved.cu",)  # before it is committed as well
    assert checkout.changed() == {"doubled": changed, "halved": changed, "other": ()}
    checkout.commit()
    assert checkout.changed() == {"doubled": changed, "halved": changed, "other": ()}
    checkout.measure("operators/halved", checkout.git("rev-parse", "--short", "HEAD"))
    assert checkout.changed()["halved"] == ()


def test_a_header_that_changed_makes_all_stale_that_include_it(checkout: Checkout) -> None:
    checkout.write("src/utils/shared.h", "long shared();\n")
    assert set(checkout.changed().values()) == {("src/utils/shared.h",)}


def test_a_change_that_no_kernel_includes_is_told_apart(checkout: Checkout) -> None:
    binding = (BINDING % ("other", "none")).replace("()->()", "(n)->(n)")
    checkout.write("src/bindings/other.cpp", binding)
    (found,) = [f for f in stale.find(checkout.folder) if f.is_stale]
    assert found.changed == ("src/bindings/other.cpp",) and found.kernels == ()
    checkout.write("src/utils/shared.h", "long shared();\n")
    found = next(f for f in stale.find(checkout.folder) if f.operators == ("other",))
    assert found.changed == ("src/bindings/other.cpp", "src/utils/shared.h")
    assert found.kernels == ("src/utils/shared.h",)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("src/kernels/other.cu", lambda text: text.replace("// Doubles.", "// Twice as much.")),
        ("src/kernels/other.cu", lambda text: text.replace("{ x[0]", "{\n  x[0]")),
        ("src/bindings/other.cpp", lambda text: text.replace("Doubles x", "Makes x twice")),
    ],
    ids=["comment", "layout", "help"],
)
def test_what_the_compiler_does_not_see_is_no_change(
    checkout: Checkout, name: str, change: Callable[[str], str]
) -> None:
    before = (checkout.folder / name).read_text(encoding="utf-8")
    assert change(before) != before
    checkout.write(name, change(before))
    assert checkout.changed()["other"] == ()


def test_a_header_that_moved_is_the_same_one(checkout: Checkout) -> None:
    moved = checkout.folder / "src/utils/deep/shared.h"
    moved.parent.mkdir()
    (checkout.folder / "src/utils/shared.h").rename(moved)
    checkout.write("src/kernels/other.cu", KERNEL.replace("shared.h", "deep/shared.h"))
    assert checkout.changed()["other"] == ("src/kernels/other.cu",)


def test_each_commit_of_a_file_is_judged_by_itself(checkout: Checkout) -> None:
    checkout.write("src/kernels/other.cu", KERNEL.replace("*= 2", "+= x[0]"))
    second = checkout.commit()
    peers = {"cub": {"commit": ""}, "triton": {"commit": checkout.first}}
    results = [
        {"case": "1K", "commit": "", "peers": peers},
        {"case": "2K", "commit": checkout.first, "peers": {}},
    ]
    checkout.measure("operators/other", second, results)
    found = {f.commit: f for f in stale.find(checkout.folder) if f.operators == ("other",)}
    assert found[second].changed == () and found[second].parts == "1 case"
    assert found[checkout.first].is_stale
    assert found[checkout.first].parts == "1 beside triton, 1 case"


def test_measurements_of_no_operator_are_left_out_and_some_have_one(checkout: Checkout) -> None:
    checkout.measure("dev_loop", "nonsense")
    for name in ("bindings/silu.cpp", "kernels/silu.cu"):
        checkout.write(f"src/{name}", BINDING % ("silu", "none") if "cpp" in name else KERNEL)
    checkout.measure("call_overhead", checkout.commit())
    assert checkout.changed()["call_overhead"] == ()
    checkout.write("src/kernels/silu.cu", KERNEL.replace("2", "3"))
    changed = checkout.changed()
    assert changed["call_overhead"] == ("src/kernels/silu.cu",) and "dev_loop" not in changed


def test_each_part_of_a_run_has_a_commit_of_its_own(checkout: Checkout) -> None:
    checkout.write("src/bindings/moe.cpp", BINDING % ("moe", "none"))
    checkout.write("src/kernels/moe.cu", KERNEL)
    first = checkout.commit()
    checkout.write("src/kernels/moe.cu", KERNEL.replace("2", "3"))
    parts = {"copies": {"commit": checkout.commit()}, "graphs": {"commit": first}}
    text = json.dumps({"environment": {"commit": first}, "results": {"environments": parts}})
    checkout.write("benchmarks/results/h200/runtime.json", text)
    found = {f.parts: f for f in stale.find(checkout.folder) if "runtime" in f.file}
    assert found["graphs"].is_stale and not found["copies"].is_stale


def test_a_file_of_operators_that_nothing_names_is_refused(checkout: Checkout) -> None:
    checkout.measure("what_is_this", checkout.first)
    with pytest.raises(BenchmarkError, match=r"what_is_this\.json: expected a file named after"):
        stale.find(checkout.folder)


def test_what_git_cannot_tell_is_said(checkout: Checkout) -> None:
    checkout.measure("operators/other", "1234567")
    checkout.measure("operators/halved", f"{checkout.first} with changes")
    found = {Path(f.file).stem: f for f in stale.find(checkout.folder)}
    assert found["other"].unknown.startswith("no commit of this repository")
    assert found["halved"].unknown == "measured with changes that no commit has"
    assert not found["other"].is_stale and not found["doubled"].unknown


def test_the_command_says_what_is_stale_and_its_status(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stale, "REPO", checkout.folder)
    assert stale.main([]) == 0
    assert capsys.readouterr().out == (
        "0 stale, 0 of them by a kernel; 0 unknown, 3 with the sources of today\n"
    )
    checkout.write("src/kernels/other.cu", KERNEL.replace("2", "3"))
    assert stale.main([]) == 1
    out = capsys.readouterr().out
    assert "h200/operators/other.json" in out and "other.cu" in out and "halved" not in out
    assert "1 stale, 1 of them by a kernel; 0 unknown, 2 with the sources of today" in out
    assert stale.main(["--json"]) == 1
    entries = json.loads(capsys.readouterr().out)
    assert [entry["stale"] for entry in entries] == [False, False, True]
    assert entries[2]["changed"] == ["src/kernels/other.cu"]
    for name in ("doubled", "halved", "other"):
        checkout.measure(f"operators/{name}", "1234567")
    assert stale.main([]) == 2
    assert "0 stale, 0 of them by a kernel; 3 unknown" in capsys.readouterr().out


def test_without_git_it_says_so(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stale, "REPO", checkout.folder)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        assert stale.main([]) == 2
    assert "git is not installed" in capsys.readouterr().err
    (checkout.folder / ".git").rename(checkout.folder / "no_git")
    assert stale.main([]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_file_that_names_no_commit_is_refused(checkout: Checkout) -> None:
    checkout.write("benchmarks/results/h200/operators/other.json", "{}")
    with pytest.raises(
        BenchmarkError, match=r"other\.json: expected a measurement with its commit"
    ):
        stale.find(checkout.folder)
