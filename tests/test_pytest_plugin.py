"""``pytest --cuda-ops``: what it collects, checks, replays and refuses, in any folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
GOOD = str(REPO / "tests" / "good_ops.py")

_END = "=== the end of a run:"
_RUNS = f"""
import json, sys, pytest
for options in json.loads(sys.argv[1]):
    status = pytest.main(options)
    for stream in (sys.stdout, sys.stderr):
        print("\\n{_END}", int(status), file=stream, flush=True)
"""


class Done(NamedTuple):
    """What a run of pytest left."""

    status: int
    out: str
    err: str


def run_pytest(*runs: Sequence[str], cwd: Path) -> list[Done]:
    """Each with its options, one after the other in a process that is not this one."""
    # pytest-benchmark, where it is installed, warns of processes that this test starts.
    plugins = ["-p", "cuda_ops.pytest_plugin", "-p", "no:benchmark"]
    # The plugin also works where warnings are errors.
    plugins += ["-W", "error::hypothesis.errors.HypothesisSideeffectWarning"]
    command = [sys.executable, "-c", _RUNS, json.dumps([[*plugins, *options] for options in runs])]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "CI": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)  # it is not a worker of this run
    ended = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    # Text and status of each run in turn, then nothing.
    out, err = (re.split(rf"\n{_END} (\d+)\n", text) for text in (ended.stdout, ended.stderr))
    return [Done(int(out[i + 1]), out[i], err[i]) for i in range(0, len(out) - 1, 2)]


@pytest.mark.slow
def test_a_described_operator_is_checked_anywhere(tmp_path: Path) -> None:
    (tmp_path / "test_never_collected.py").write_text("def test_wrong(): assert False\n")
    # Spread over processes too: their results come together in one summary.
    few = ("-v", "-n", "2", "-k", "layouts or streams")
    (done,) = run_pytest(("--cuda-ops", "good::relu", "--cuda-ops-file", GOOD, *few), cwd=tmp_path)
    assert done.status == 0, done.out
    assert re.search(r"PASSED .*good::relu::layouts\[cpu\]", done.out)
    if not torch.cuda.is_available():
        assert re.search(r"SKIPPED .*good::relu::streams\[cuda\]", done.out)
        assert re.search(r"not run \d+: no CUDA device", done.out)
    assert re.search(r"\d+ passed, 0 failed, \d+ not run", done.out)


@pytest.mark.slow
def test_an_operator_that_nothing_compares_fails_alone(tmp_path: Path) -> None:
    root = tmp_path / "src"
    (root / "bindings").mkdir(parents=True)
    (root / "bindings" / "kit_untold.cpp").write_text(
        '#include "binding.h"\n'
        "using namespace cuda_ops;\n"
        "namespace { Tensor f(const Tensor& x) { return contiguous(x); } }\n"
        'CUDA_OPS(library) { library.op("kit_untold(Tensor x) -> Tensor", "").cpu<f>(); }\n'
    )
    few = ("-v", "-k", "compared or public[cpu]")
    options = ("--cuda-ops", "kit_untold,silu", "--cuda-ops-root", str(root), *few)
    (done,) = run_pytest(options, cwd=tmp_path)
    assert done.status != 0
    assert "nothing compares this operator; no samples: give a signature line" in done.out
    assert "reproduce" not in done.out
    failed = re.findall(r"FAILED .*?(\w+::\w+\[\w+\])", done.out)
    assert set(failed) == {"kit_untold::compared[any]"}, done.out
    assert re.search(r"silu::public\[cpu\] PASSED", done.out)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("\nraise OSError\n")
    (tmp_path / "unreadable.py").write_text("\ndef f(:\n")
    (tmp_path / "ending.py").write_text("import sys\n\nsys.exit(3)\n")
    (tmp_path / "latin.txt").write_bytes(b"# once wrong\n# gr\xf6sser\n")
    refused = [
        (["sillu"], "no operator 'sillu'; did you mean 'silu'?"),
        (["silu", "--cuda-ops-profile", "weekly"], "known are quick, ci, dev, nightly"),
        (["silu", "--cuda-ops-file", "missing.py"], "missing.py is not a Python file"),
        (["silu", "--cuda-ops-file", "failing.py", "-n", "2"], 'failing.py", line 2'),
        (["silu", "--cuda-ops-file", "unreadable.py"], "unreadable.py:2: SyntaxError: invalid"),
        (["silu", "--cuda-ops-file", "ending.py"], "ending.py:3: expected a file that describes"),
        (["silu", "-o", "cuda_ops_regressions=latin.txt"], "latin.txt:2: expected text in UTF-8"),
    ]
    runs = run_pytest(*(["--cuda-ops", *options] for options, _ in refused), cwd=tmp_path)
    for done, (options, said) in zip(runs, refused, strict=True):
        assert done.status == pytest.ExitCode.USAGE_ERROR, options
        assert done.err.startswith("ERROR: ") and said in done.err


def test_the_option_may_be_given_for_each_operator(tmp_path: Path) -> None:
    options = ("--cuda-ops", "good::relu", "--cuda-ops", "good::exp", "--cuda-ops-file", GOOD)
    (done,) = run_pytest((*options, "--collect-only", "-q"), cwd=tmp_path)
    assert set(re.findall(r"^(good::\w+)::", done.out, re.MULTILINE)) == {"good::relu", "good::exp"}


@pytest.mark.slow
def test_lines_of_described_operators_are_replayed_and_malformed_ones_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ncuda_ops_regressions = right.txt\n")
    right = "# once wrong\n\ngood::relu::layouts[cpu] Sample((TensorArg((2,)),))\n"
    (tmp_path / "right.txt").write_text(right)
    (tmp_path / "malformed.txt").write_text(f"{right}silu layouts\n")
    (tmp_path / "unknown.txt").write_text(f"{right}silu::no[cpu]\n")
    settings = ("-c", str(tmp_path / "pytest.ini"), "-v", "-k", "regression")
    options = ("--cuda-ops", "good::relu", "--cuda-ops-file", GOOD, *settings)
    replayed, malformed, unknown = run_pytest(
        options,
        (*options, "-o", "cuda_ops_regressions=malformed.txt"),
        (*options, "-o", "cuda_ops_regressions=unknown.txt"),
        cwd=tmp_path,
    )
    assert re.search(r"regression::3 PASSED", replayed.out), replayed.out
    assert malformed.status == unknown.status == pytest.ExitCode.USAGE_ERROR
    assert "malformed.txt:4: 'silu layouts': expected OP::" in malformed.err
    assert "unknown.txt:4: no check 'no'" in unknown.err


@pytest.mark.slow
def test_the_sanitizer_is_skipped_where_nothing_runs_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "gpu.py").write_text(
        "from cuda_ops.testing import sanitizer\n"
        "from cuda_ops.testing.subject import Subject\n"
        "sanitizer.why_not = lambda: ''\n"
        "Subject.why_not = lambda subject, device: 'no CUDA kernel in this build'\n"
    )
    options = ("--cuda-ops", "silu", "--sanitize", "--cuda-ops-file", "gpu.py", "-rs")
    (done,) = run_pytest(options, cwd=tmp_path)
    assert done.status == 0 and "4 skipped" in done.out, done.out
    assert "silu: no CUDA kernel in this build" in done.out
