"""``compile_dev.py new``: a pair of files to begin with."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import run_python

from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.build.programs import environment
from cuda_ops.dev import main
from cuda_ops.dev.scaffold import ELEMENTWISE, FORMS, TEMPLATES, new_pair, project_root
from cuda_ops.errors import DiscoveryError


@pytest.mark.parametrize("form", [ELEMENTWISE, *FORMS])
@pytest.mark.slow
def test_new_scaffolds_a_pair_that_builds_and_passes_its_checks(
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    roots_for_now: None,
    quick_compiler: Path,
) -> None:
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(quick_compiler))
    root = ["--root", str(tmp_path / "mine")]
    of = [] if form == ELEMENTWISE else [f"--{form}"]
    assert main([*root, "new", "swish_clip", *of]) == 0
    next_line = f"next: python compile_dev.py --root {tmp_path / 'mine'} --watch swish_clip"
    assert capsys.readouterr().out.splitlines()[-1] == next_line
    checked = run_python("compile_dev.py", *root, "--check", "--verbose", "swish_clip")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "FAILED" not in checked.stdout
    binding = (tmp_path / "mine" / "bindings" / "swish_clip.cpp").read_text(encoding="utf-8")
    names = re.findall(r"op\(\s*\"(\w+)\(", binding)
    has_gradient = form not in ("in-place", "quantize")
    assert names == ["swish_clip", "swish_clip_backward"][: 1 + has_gradient]
    for name in names:
        report = checked.stdout.split(f"\n{name}\n")[1].partition(" not run\n")[0]
        assert re.search(r"ok +reference\[cpu\]: \d+ samples", report)
        assert re.search(r"ok +compile_dynamic\[cpu\]", report)
    assert main(["new", *root, "swish_clip", *of]) == 1
    error = r"error: .*swish_clip.cpp exists already; choose another name"
    assert re.search(error, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two words", "not a Python identifier; choose another"),
        ("2fast", "not a Python identifier"),
        ("class", "'class' is a keyword of Python; choose another"),
        ("../up", "not a Python identifier"),
        ("opé", "has letters beyond ASCII; choose another"),
        ("a" * 300, ": expected at most 100 letters, got 300; choose another"),
        ("_hidden", "starts with an underscore"),
        ("build", "taken by the module cuda_ops.build"),
    ],
)
def test_new_refuses_names_that_cannot_be_used(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DiscoveryError, match=message):
        new_pair(name, tmp_path)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("form", [ELEMENTWISE, *FORMS])
@pytest.mark.parametrize("name", ["mix", "swish_clip_of_rows_that_has_a_long_name"])
def test_clang_format_leaves_a_new_pair_as_it_is(form: str, name: str, tmp_path: Path) -> None:
    program = shutil.which("clang-format", path=environment()["PATH"])
    if program is None:
        pytest.skip("clang-format is not installed")
    shutil.copy(BUILTIN_ROOT.parent / ".clang-format", tmp_path)
    for path in new_pair(name, tmp_path / "src", form, "my_ops"):
        said = subprocess.run([program, path], capture_output=True, text=True, check=True)
        assert path.read_text(encoding="utf-8") == said.stdout


def test_a_new_pair_in_a_project_without_a_style_is_as_the_template(tmp_path: Path) -> None:
    kernel, _ = new_pair("swish_clip_of_rows_that_has_a_long_name", tmp_path)
    template = (TEMPLATES / "elementwise.cu.txt").read_text(encoding="utf-8")
    lines = kernel.read_text(encoding="utf-8").count("\n")
    assert lines == template.count("\n")


@pytest.mark.parametrize("command", ["new", "adopt", "clean"])
def test_commands_have_help_of_their_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert re.match(rf"usage: \S+ {command} \[-h\]", said)
    assert "--watch" not in said and ("--rows" in said) == (command == "new")


def test_new_writes_into_the_project_of_the_current_folder_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "planned"]) == 1
    said = capsys.readouterr().out
    assert f"error: {tmp_path}: expected a project with src/kernels/ or src/bindings/" in said
    assert not list(tmp_path.iterdir())
    (tmp_path / "src" / "bindings").mkdir(parents=True)
    assert main(["new", "planned"]) == 0
    assert (tmp_path / "src" / "kernels" / "planned.cu").is_file()
    next_line = f"next: python -m cuda_ops dev --root {tmp_path / 'src'} --watch planned"
    assert capsys.readouterr().out.splitlines()[-1] == next_line
    monkeypatch.chdir(tmp_path / "src")
    assert project_root() == tmp_path / "src"
    monkeypatch.chdir(BUILTIN_ROOT.parent)
    assert project_root() == BUILTIN_ROOT


def test_new_says_what_cannot_be_written_and_leaves_no_half_of_a_pair(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file")
    with pytest.raises(DiscoveryError, match=r"cannot write .*kernels: File exists"):
        new_pair("planned", tmp_path)
    assert not list(tmp_path.rglob("*.cpp"))


def test_new_leaves_a_gradient_to_its_operator(tmp_path: Path) -> None:
    new_pair("planned", tmp_path)
    with pytest.raises(DiscoveryError, match=r"gradient of planned and belongs into planned.cpp"):
        new_pair("planned_backward", tmp_path)


def test_new_never_overwrites(tmp_path: Path) -> None:
    kernel, binding = new_pair("planned", tmp_path)
    binding.unlink()
    kernel.write_text("mine")
    with pytest.raises(DiscoveryError, match=r"planned.cu exists already"):
        new_pair("planned", tmp_path)
    assert kernel.read_text() == "mine" and not binding.exists()
