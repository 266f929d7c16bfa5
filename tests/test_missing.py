"""Without a C++ compiler an error names the package of this distribution that brings one."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ScratchOp

from cuda_ops.build import missing
from cuda_ops.errors import BuildError

SETUP = """
import sys; sys.path[:0] = [{repo!r}]
from setuptools import setup
from cuda_ops.packaging import operators
setup(name="pkg", version="1", **operators("pkg.src", "pkg/src"))
"""
REPO = Path(__file__).resolve().parent.parent


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.parametrize(
    ("system", "how"),
    [
        ({"ID": "debian"}, "as root: apt install g++"),
        ({"ID": "ubuntu", "ID_LIKE": "debian"}, "as root: apt install g++"),
        ({"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}, "as root: apt install g++"),
        ({"ID": "fedora"}, "as root: dnf install gcc-c++"),
        ({"ID": "rocky", "ID_LIKE": "rhel centos fedora"}, "as root: dnf install gcc-c++"),
        ({"ID": "alpine"}, "as root: apk add g++"),
        ({"ID": "endeavouros", "ID_LIKE": "arch"}, "as root: pacman -S gcc"),
        ({"ID": "opensuse-leap", "ID_LIKE": "suse opensuse"}, "as root: zypper install gcc-c++"),
        ({"ID": "haiku"}, "the package of g++ or clang++ for this system"),
        ({}, "the package of g++ or clang++ for this system"),
    ],
)
def test_the_package_is_that_of_the_distribution(
    system: dict[str, str], how: str, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: system)
    said = f"there is no C++ compiler 'c++'; install one ({how}), or set CXX to one"
    assert missing.cxx_problem() == said


def test_a_system_that_does_not_say_what_it_is_gets_the_general_words(
    no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> dict[str, str]:
        raise FileNotFoundError("/etc/os-release")

    monkeypatch.setattr(platform, "freedesktop_os_release", none)
    assert "install one (the package of g++ or clang++" in missing.cxx_problem()


def test_a_compiler_that_cxx_names_is_missed_by_that_name(
    no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "clang++-99 -m64")
    assert "no C++ compiler 'clang++-99', which CXX names" in missing.cxx_problem()


def test_where_there_is_a_compiler_there_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "mine"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert missing.cxx_problem() == ""


def test_a_build_says_so(scratch_op: ScratchOp, no_compiler: None) -> None:
    scratch_op.write("v")
    with pytest.raises(
        BuildError, match=rf"^{scratch_op.name}: there is no C\+\+ compiler 'c\+\+'"
    ):
        scratch_op.build()


@pytest.mark.slow
def test_pip_s_build_says_so_before_it_starts(scratch_op: ScratchOp, tmp_path: Path) -> None:
    scratch_op.write("v")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "src").symlink_to(scratch_op.root)
    (tmp_path / "setup.py").write_text(SETUP.format(repo=str(REPO)))
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: cuda_ops: there is no C++ compiler 'c++'; install one (")
    assert "Traceback" not in done.stderr and not (tmp_path / "build").exists()
