"""The suite beside plugins of pytest that it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
#: As pytest-benchmark 5.1 does beside xdist.
PLUGIN = """
import warnings
import pytest

def pytest_configure(config):
    warnings.warn(pytest.PytestWarning("disabled"))
    warnings.warn("a word from the start", UserWarning)

@pytest.fixture
def noisy():
    warnings.warn("a word from a fixture", DeprecationWarning)
"""
TEST = """
import warnings

def test_noisy(noisy): pass
def test_warns(): warnings.warn("of our own")
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_a_plugin_warns_of_ends_no_run(tmp_path: Path, workers: str) -> None:
    (tmp_path / "pytest_noisy.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-c", REPO / "pyproject.toml", "-n", workers]
    command += ["-p", "pytest_noisy", "-p", "no:cacheprovider", "test_it.py"]
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed, " in done.stdout, done.stdout + done.stderr
    assert "UserWarning: of our own" in done.stdout
