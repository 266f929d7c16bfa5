"""The suite beside plugins of pytest that it does not know, and on a busy machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
#: Modules of pytest's plugins: some warn while it starts, as pytest-benchmark 5.1 beside xdist.
MODULES = [
    "_hypothesis_pytestplugin",
    "allure_pytest.plugin",
    "anyio.pytest_plugin",
    "coverage.control",
    "faker.contrib.pytest.plugin",
    "flaky.flaky_pytest_plugin",
    "pytest_benchmark.session",
    "syrupy",
    "typeguard._pytest_plugin",
    "xdist.dsession",
    "/site-packages/xdist/dsession",  # as a file
]
PLUGIN = """
import warnings
import pytest

def warn(category):
    for module in {modules}:
        warnings.warn_explicit(f"a word of {{module}}", category, f"{{module}}.py", 1, module)

def pytest_configure(config):
    warn(pytest.PytestWarning)
    warn(UserWarning)

@pytest.fixture
def noisy():
    warn(DeprecationWarning)
"""
TEST = """
import warnings

def test_noisy(noisy): pass
def test_warns(): warnings.warn("of our own")
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest in a folder with the suite's settings."""
    command = [sys.executable, "-m", "pytest", "-c", str(REPO / "pyproject.toml")]
    path = os.pathsep.join([str(folder), str(REPO / "tests"), *filter(None, sys.path)])
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *options],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_a_plugin_warns_of_ends_no_run(tmp_path: Path, workers: str) -> None:
    (tmp_path / "noisy.py").write_text(PLUGIN.format(modules=MODULES))
    (tmp_path / "test_it.py").write_text(TEST)
    done = run(tmp_path, "-n", workers, "-p", "noisy", "test_it.py")
    assert "1 failed, 1 passed, " in done.stdout, done.stdout + done.stderr
    assert "UserWarning: of our own" in done.stdout


BUSY = """
import os
os.getloadavg, os.cpu_count = (lambda: (0, {load}, 0)), (lambda: 2)
from limits import pytest_timeout_set_timer
"""
SLOW = """
import time
def test_slow(): time.sleep(1.5)
def test_hangs(): time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("load", "ended"), [(1, ["slow", "hangs"]), (8, ["hangs"])])
def test_a_limit_counts_what_others_took_of_the_machine(
    tmp_path: Path, load: int, ended: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text(BUSY.format(load=load))
    (tmp_path / "test_it.py").write_text(SLOW)
    limits = ["-o", "timeout=1", "-o", "faulthandler_timeout=2"]  # the second ends the process
    done = run(tmp_path, *limits, "-n", "0", "test_it.py")
    failed = re.findall(r"^FAILED .*::test_(\w+) - Failed: Timeout", done.stdout, re.M)
    assert failed == ended, done.stdout + done.stderr


DYING = """
import os
def test_dies(): os._exit(3)
def test_goes_on(): pass
"""


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((REPO / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(DYING)
    done = run(tmp_path, "-n", "1", "test_it.py")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
