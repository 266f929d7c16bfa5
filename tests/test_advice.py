"""What messages tell their reader to run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import run_python

from cuda_ops.build.advice import dev_command
from cuda_ops.build.discovery import PACKAGE


@pytest.mark.parametrize(
    ("called", "command"),
    [
        ("/env/bin/cuda-ops", "cuda-ops"),
        ("compile_dev.py", "python compile_dev.py"),
        ("../my checkout/compile_dev.py", "python '../my checkout/compile_dev.py'"),
        (str(PACKAGE / "__main__.py"), "python -m cuda_ops dev"),
        (str(PACKAGE / "dev" / "__main__.py"), "python -m cuda_ops dev"),
        ("train.py", "python -m cuda_ops dev"),
        ("", "python -m cuda_ops dev"),
    ],
)
def test_the_command_is_called_as_its_reader_calls_it(
    called: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [called])
    assert dev_command() == command


def test_in_a_checkout_it_is_the_script_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(PACKAGE.parent)
    assert dev_command() == "python compile_dev.py"
    (tmp_path / "compile_dev.py").touch()  # another one of this name
    monkeypatch.chdir(tmp_path)
    assert dev_command() == "python -m cuda_ops dev"


def test_a_package_of_ones_own_is_told_of_the_module() -> None:
    done = run_python("-m", "cuda_ops", "dev", "--rows", "silu")
    assert "as in: python -m cuda_ops dev new my_op --rows" in done.stdout
