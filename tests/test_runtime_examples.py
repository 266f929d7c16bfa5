"""Programs of examples/runtime run, on a GPU or without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "examples" / "runtime"
#: What the programs that no other test runs say.
SAYS = {
    "prefetch_batches": "40 steps on",
    "pipeline_stages": "means: 127",
    "graph_a_step": "loss",
}
#: Functions that go with another one, whose example is enough.
BESIDE = {"best_block", "forget_regions", "memory_snapshot", "record_memory", "use_stored"}


@pytest.mark.parametrize("program", SAYS)
def test_an_example_runs(program: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAMS / f"{program}.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[program] in done.stdout


def test_there_is_an_example_for_each_function() -> None:
    from cuda_ops import runtime

    text = "\n".join(path.read_text(encoding="utf-8") for path in PROGRAMS.glob("*.py"))
    functions = [name for name in runtime.__all__ if name.islower() and name not in BESIDE]
    assert [name for name in functions if not re.search(rf"\b{name}\b", text)] == []
