"""Packages of a user's own: what ``init`` writes, and commands that run in their folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_ops.__main__ import main
from cuda_ops.build import compiling
from cuda_ops.dev import init
from cuda_ops.dev.scaffold import new_pair
from cuda_ops.errors import DiscoveryError

REPO = Path(__file__).resolve().parent.parent
EXAMPLE = REPO / "examples" / "third_party"
PAIR = ("src/bindings/{}.cpp", "src/kernels/{}.cu")


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, with cuda_ops from this checkout."""
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), str(REPO)]))
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, timeout=500,
        env={**os.environ, **environment, "PYTHONPATH": path},
    )  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    init.new_project(tmp_path / "my_ops", "first")
    return tmp_path / "my_ops"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# --- init ------------------------------------------------------------------------------


def test_init_writes_a_package_and_says_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my_ops", "--op", "first"]) == 0
    said = capsys.readouterr().out.splitlines()
    wrote = {line.removeprefix("wrote my_ops/") for line in said if line.startswith("wrote ")}
    expected = {name.replace("@package@", "my_ops") for name in init.FILES}
    expected |= {f"my_ops/{path.format('first')}" for path in PAIR}
    assert wrote == expected == files(tmp_path / "my_ops")
    assert said[-4:] == [
        "next:",
        "  cd my_ops",
        "  python -m cuda_ops dev --watch first",
        "  pip install --no-build-isolation --no-deps -e . && pytest",
    ]
    assert [*tmp_path.iterdir()] == [tmp_path / "my_ops"]
    for path, text in init.texts("my_ops", "first").items():
        assert "@package@" not in path + text and "@op@" not in path + text
    binding = tmp_path / "my_ops" / "my_ops" / PAIR[0].format("first")
    assert "CUDA_OPS(my_ops, library)" in binding.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "op", "message"),
    [
        ("my-ops", "first", "package name 'my-ops' is not a Python identifier of ASCII letters"),
        ("class", "first", "package name 'class' is a keyword of Python"),
        ("_my_ops", "first", "package name '_my_ops' starts with an underscore"),
        ("torch", "first", "package name 'torch' is that of torch itself; choose another"),
        ("cuda_ops", "first", "package name 'cuda_ops' is that of cuda_ops itself"),
        ("aten", "first", "package name 'aten' is one that torch has itself"),
        ("pluggy", "first", "package name 'pluggy' is that of a module which is installed here, "),
        ("json", "first", "package name 'json' is that of a module which is installed here, "),
        ("my_ops", "two words", "'two words' is not a Python identifier; choose another with --op"),
        ("my_ops", "new", "operator name 'new' is a command of compile_dev.py"),
        ("my_ops", "plugin", "'plugin' is taken by the module my_ops.plugin"),
    ],
)
def test_init_refuses_names_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, op: str, message: str
) -> None:
    assert main(["init", str(tmp_path / name), "--op", op]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said
    assert not list(tmp_path.iterdir())


def test_init_writes_into_an_empty_folder_and_into_no_other(tmp_path: Path) -> None:
    empty, full = tmp_path / "my_ops", tmp_path / "others"
    empty.mkdir()
    assert init.new_project(empty)
    full.mkdir()
    (full / "notes").touch()
    with pytest.raises(DiscoveryError, match=r"others: expected no folder or an empty one, got"):
        init.new_project(full)
    with pytest.raises(DiscoveryError, match=r"notes: expected no folder or an empty one, got a f"):
        init.new_project(full / "notes")
    assert [*full.iterdir()] == [full / "notes"]


def test_init_fills_the_folder_that_a_shell_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "my_ops"
    here.mkdir()
    monkeypatch.chdir(here)
    assert main(["init", "."]) == 0
    assert Path.cwd() == here and Path("setup.py").is_file()  # not one that is gone
    assert "  cd " not in capsys.readouterr().out
    assert not list(tmp_path.rglob(".my_ops-*"))


def test_init_leaves_nothing_behind_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*arguments: object, **named: object) -> None:
        new_pair(*arguments, **named)  # type: ignore[arg-type]
        raise OSError(28, "No space left on device", "my_op.cu")

    monkeypatch.setattr(init, "new_pair", full_disk)
    with pytest.raises(DiscoveryError, match=r"my_op\.cu: cannot be written: No space left"):
        init.new_project(tmp_path / "my_ops")
    assert not list(tmp_path.iterdir())


def test_the_example_is_what_init_writes() -> None:
    package, op = "cuda_ops_leaky", "leaky_clip"
    texts = init.texts(package, op)
    tracked = {*texts, *(f"{package}/{path.format(op)}" for path in PAIR)}
    assert all((EXAMPLE / path).is_file() for path in tracked)
    own = {path for path in files(EXAMPLE) if Path(path).suffix in (".py", ".cu", ".cpp", ".toml")}
    assert {path for path in own if "build" not in Path(path).parts} <= tracked
    example = {path: (EXAMPLE / path).read_text(encoding="utf-8") for path in texts}
    alike = [".gitignore", ".github/workflows/test.yml", "setup.py", f"{package}/__init__.py"]
    for path in alike:
        assert example[path] == texts[path], path
    said = [*texts["pyproject.toml"].splitlines(), 'license = "Apache-2.0"']
    differing = {*said} ^ {*example["pyproject.toml"].splitlines()}
    assert all(line.startswith("description = ") for line in differing), differing


# --- commands in its folder ------------------------------------------------------------


def test_commands_find_the_project_of_their_folder(project: Path) -> None:
    code = """
import subprocess, sys
from cuda_ops.__main__ import main
main(["new", "second"])
from cuda_ops.registry import registry
listed = "from cuda_ops.registry import registry; print(*registry().pairs())"
child = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, cwd="/",
                       env={"PYTHONPATH": ":".join(sys.path)}, check=True).stdout
from cuda_ops.dev import project
folder = project.enter()
root = registry().rescan()["my_ops::second"].root
print(project.operators(folder), root, child.count("my_ops::"))
"""
    done = run("-c", code, folder=project)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    root = project / "my_ops" / "src"
    assert said[:2] == [f"wrote {root}/kernels/second.cu", f"wrote {root}/bindings/second.cpp"]
    assert said[2].endswith(" --watch my_ops::second") and "--root" not in said[2]
    assert said[3] == f"['my_ops::first', 'my_ops::second'] {root} 2"


def test_a_short_name_is_the_projects_operator(tmp_path: Path) -> None:
    project = tmp_path / "my_ops"
    init.new_project(project, "silu")  # which cuda_ops has, too
    code = """
from cuda_ops.dev import project
from cuda_ops.registry import registry
project.enter()
print(registry().key_in_command("silu"), registry().key_in_command("relu"))
from cuda_ops.dev import command
command.compile_ops = lambda names, **_: print(names) or []
command.main(["--check", "silu"])
"""
    done = run("-c", code, folder=project)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["my_ops::silu relu", "['my_ops::silu']"]


def test_the_tests_of_a_project_are_those_of_all_its_operators(project: Path) -> None:
    new_pair("my_softmax", project / "my_ops" / "src", "rows")
    info = project / "my_ops-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_ops\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[cuda_ops]\nmy_ops = my_ops.plugin\n")
    listed = run("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests",
                 folder=project, PYTHONPATH=str(project))  # fmt: skip
    assert listed.returncode == 0, listed.stdout + listed.stderr
    for name in ("first", "my_softmax"):
        assert f"test_the_checks_of_cuda_ops_pass[my_ops::{name}]" in listed.stdout


@pytest.mark.parametrize("op", ["f", "first", "an_operator_of_a_long_name"])
def test_the_columns_of_a_readme_are_even(op: str) -> None:
    blocks = init.texts("my_ops", op)["README.md"].split("```")[1::2]
    assert len(blocks) == 2
    for block in blocks:
        lines = [line for line in block.split("\n") if line]
        gaps = [gap for line in lines if (gap := re.search(r" {3,}", line))]
        assert len(gaps) == len(lines) and len({gap.end() for gap in gaps}) == 1


def test_a_process_that_uses_operators_already_finds_the_project_too(project: Path) -> None:
    code = """
import os, sys
os.chdir("/")
import cuda_ops
from cuda_ops.dev import main, project
from cuda_ops.dev.library import chosen
from cuda_ops.registry import registry
registry().pairs()
os.chdir(sys.argv[1])
main(["new", "second"])
folder = project.enter()
print(project.operators(folder), chosen([], []))
"""
    done = run("-c", code, str(project), folder=project.parent)
    assert done.returncode == 0, done.stderr
    keys = "['my_ops::first', 'my_ops::second']"
    assert done.stdout.splitlines()[-1] == f"{keys} {keys}"


def test_the_checkout_comes_before_an_installed_copy(project: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(project / "my_ops", site / "my_ops")
    info = site / "my_ops-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_ops\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[cuda_ops]\nmy_ops = my_ops.plugin\n")
    code = "from cuda_ops.dev import project; print(*project.roots(project.enter()))"
    done = run("-c", code, folder=project, PYTHONPATH=str(site))
    assert done.stdout.strip() == str(project / "my_ops" / "src"), done.stderr


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("pyproject.toml", "[project", "pyproject.toml: cannot be read: "),
        (
            "pyproject.toml",
            "[project.entry-points]\ncuda_ops = 'my_ops.plugin'",
            "pyproject.toml, cuda_ops: expected a table, as in [project.entry-points.cuda_ops], ",
        ),
        ("my_ops/plugin.py", "import gone", "my_ops = 'my_ops.plugin': plugin 'my_ops' (my_ops.pl"),
        ("my_ops/plugin.py", "", "expected cuda_ops_roots of its plugin to name a folder in "),
        ("my_ops/src/bindings/first.cpp", None, "nothing binds this kernel; write "),
    ],
)
def test_a_broken_project_is_told(project: Path, path: str, text: str | None, message: str) -> None:
    if text is None:
        (project / path).unlink()
    else:
        (project / path).write_text(text)
    done = run("-m", "cuda_ops", "dev", folder=project)
    assert done.returncode in (1, 2) and message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_the_doctor_asks_pip_for_no_package_that_is_a_folder(project: Path) -> None:
    (project / "my_ops" / "plugin.py").write_text("import gone")
    done = run("-m", "cuda_ops", "doctor", "--json", folder=project)
    assert done.returncode == 1, done.stderr
    found = [one for one in json.loads(done.stdout)["findings"] if one["about"] == ["my_ops"]]
    assert [one["command"] for one in found] == ["edit the plugin's file"]


def test_a_project_without_an_operator_says_how_to_write_one(project: Path) -> None:
    for path in PAIR:
        (project / "my_ops" / path.format("first")).unlink()
    done = run("-m", "cuda_ops", "dev", folder=project)
    assert done.returncode == 1 and "python -m cuda_ops new my_op writes one" in done.stdout


def test_a_folder_without_an_entry_point_is_no_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    code = "from cuda_ops.dev import project; print(project.enter())"
    assert run("-c", code, folder=tmp_path).stdout == "None\n"


# --- from nothing to an installed wheel -------------------------------------------------


def installed(project: Path, target: Path) -> None:
    """Builds a project's wheel, for one architecture, and installs it into a folder."""
    pip = ["-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", "dist", "."]
    archs = ";".join(compiling.visible_archs())
    done = run(*pip, *wheel, folder=project, TORCH_CUDA_ARCH_LIST=archs)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (project / "dist").glob("my_ops-0.1.0-cp310-abi3-*.whl")
    done = run(*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(made),
               folder=project)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_new_project_builds_and_its_wheel_passes_its_tests(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    if run("-m", "pip", "--version", folder=tmp_path).returncode:
        pytest.skip("pip is not installed")
    cache = {"CUDA_OPS_CACHE": str(tmp_path / "cache")}
    built = run("-m", "cuda_ops", "dev", folder=project, **cache)
    assert built.returncode == 0, built.stdout + built.stderr
    row = next(line for line in built.stdout.splitlines() if line.startswith("my_ops::first  "))
    assert "yes   yes" in row and "cpu" in row and "silu" not in built.stdout
    again = run("-m", "cuda_ops", "dev", folder=project, **cache)
    assert "cached" in again.stdout
    timed = run("-m", "cuda_ops", "benchmarking", "first", "--quick", "--cases", "1K float32",
                "--peers", "eager", folder=project, **cache)  # fmt: skip
    assert timed.returncode == 0 and timed.stderr == "", timed.stdout + timed.stderr
    assert "my_ops::first: eager is the reference of the plugin" in timed.stdout
    assert "my_ops::first_backward: eager is autograd of the reference of first" in timed.stdout
    installed(project, tmp_path / "site")
    tests = tmp_path / "elsewhere"
    shutil.copytree(project / "tests", tests)
    empty = {"CUDA_OPS_CACHE": str(tmp_path / "empty"), "PYTHONPATH": str(tmp_path / "site")}
    checked = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tests),
                  "-c", os.devnull, str(tests), folder=tests, **empty)  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "passed" in checked.stdout
    code = (
        "import torch, my_ops; from cuda_ops.registry import registry\n"
        "print(my_ops.first(torch.tensor([-2.0, 0.5, 3.0])).tolist())\n"
        "print(registry().library_of('my_ops::first'))"
    )
    used = run("-c", code, folder=tests, **empty)
    assert used.returncode == 0, used.stderr
    values, library = used.stdout.splitlines()
    assert values == "[-1.0, 0.5, 1.0]"
    assert Path(library) == tmp_path / "site" / "my_ops" / "src" / "lib" / "first.abi3.so"
