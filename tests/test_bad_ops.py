"""Tests the kit on wrong operators: it must reject each one and name the right class."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cuda_ops.build.compiling import build
from cuda_ops.registry import registry
from cuda_ops.testing import CHECKS, PROFILES, CheckEntry
from cuda_ops.testing.__main__ import parse_line
from cuda_ops.testing.runner import planned, run_check
from cuda_ops.testing.subject import Subject, find
from cuda_ops.testing.worker import Worker

ROOT = Path(__file__).parent / "bad_ops"
#: The check that must fail first, by operator, on a CPU and on a GPU, "a or b" where chance says
#: which; ``None``: cannot show there.
EXPECTED: dict[str, tuple[str | None, str | None]] = {
    "bad_abi": ("abi", "abi"),
    "bad_new_symbol": ("abi", "abi"),
    "bad_behind": ("bounds", None),
    "bad_unwritten_tail": ("unwritten", None),
    "bad_index_dtype": ("indices", None),
    "bad_row_distance": ("layouts", None),
    "bad_windows": ("layouts", None),
    "bad_inner_width": ("far_strides", None),
    "bad_largest": ("numerics", None),
    "bad_one_dtype": ("reference", None),
    "bad_large": ("large", None),
    "bad_long_rows": ("large", None),
    "bad_long_result": ("large", None),
    "bad_leak_strided": ("leaks", None),
    "bad_leak_early": ("leaks", None),
    "bad_signed_index": ("indices", None),
    "bad_races": ("repeats", "repeats"),
    "bad_early": (None, "early_start"),
    "bad_threads": ("threads", None),
    "bad_parallel": ("parallel", None),
    "bad_hidden_rows": ("numerics", None),
    "bad_frames": ("registration", None),
    "bad_bounds": ("bounds", "bounds"),
    "bad_workspace": (None, "workspaces"),
    "bad_index": ("indices", None),
    "bad_by_torch": ("by_torch", None),
    "bad_by_torch_number": ("by_torch", None),
    "bad_layouts": ("layouts", "layouts"),
    "bad_gradient_layouts": ("gradient_layouts", "gradient_layouts"),
    "bad_gradient_rows": ("gradient_layouts", None),
    "bad_gradient_inputs": ("gradient_layouts", None),
    "bad_index_width": ("far_strides", "far_strides"),
    "bad_far_rows": (None, "far_rows"),
    "bad_numerics": ("numerics", "numerics"),
    "bad_scalar": ("scalars", None),
    "bad_scalar_gradient": ("scalars", None),
    "bad_keyword": ("reference", None),
    "bad_dims": ("scalars", None),
    "bad_integer": ("scalars", None),
    "bad_refusal": ("scalars", None),
    "bad_size_pair": ("sizes", None),
    "bad_streams": (None, "streams"),
    "bad_copies": (None, "streams"),
    "bad_join": (None, "streams"),
    "bad_devices": (None, "devices"),
    "bad_graphs": (None, "graphs"),
    "bad_alignment": (None, "alignment"),
    "bad_empty": ("empty", "empty"),
    "bad_list": ("lists", None),
    "bad_list_dtype": ("mixed_lists", None),
    "bad_fake": ("registration", None),
    "bad_mutation": ("mutation", None),
    "bad_gaps": ("gaps", None),
    "bad_launches": (None, "launches"),
    "bad_shared": (None, "boundaries"),
    "bad_block": (None, "boundaries"),
    "bad_waves": (None, "boundaries"),
    "bad_unwritten": ("unwritten", "unwritten"),
    "bad_temporary": ("temporaries", None),
    # Both find it, if blocks happen to read what others wrote; under the name of its own class.
    "bad_freed_copy": (None, "layouts or freed_copies"),
    "bad_freed_weight": (None, "freed_copies"),
    "bad_partial_sums": ("rounding", None),
    "bad_gradient_temporary": ("temporaries", None),
    "bad_autograd": ("gradient_declared", None),
    "bad_gradient": ("gradcheck", None),
    "bad_gradient_zero": ("gradient_edges", None),
    "bad_gradient_tie": ("gradient_edges", None),
    "bad_gradient_size": ("gradient_sizes", None),
    "bad_gradient_outputs": ("gradient_outputs", None),
    "bad_jvp": ("jvp", None),
    "bad_checkpoint": ("checkpoint", None),
    "bad_independence": ("independence", None),
    "bad_draws": ("draws", None),
    "bad_default": ("public", None),
    "bad_default_value": ("defaults", None),
    "bad_policy": ("autocast", None),
    "bad_dtypes": ("autocast", None),
    "bad_vmap": ("vmap", None),
    "bad_sharding": ("dtensor", None),
    "bad_sizes": ("compile_dynamic", None),
    "bad_reinplaced": ("reinplaced", None),
    "bad_leak": ("leaks", None),
    "bad_state": ("state", None),
    "bad_saved": ("saved", None),
    "bad_frozen": ("frozen", None),
    "bad_variance": ("numerics", None),
    "bad_long_strides": ("layouts", None),
    "bad_shared_unwritten": (None, "unwritten"),
    "bad_graph_workspace": (None, "graphs"),
    "bad_result": ("reference", None),
    "bad_sum": ("reference", None),
    "bad_hang": ("reference", None),
}
#: Names of guests, which register themselves.
REGISTERED_AS = {"bad_reinplaced": "bad_guest::bad_reinplaced"}
ON_CPU = [name for name, (cpu, _) in EXPECTED.items() if cpu and name != "bad_hang"]
ON_CUDA = [name for name, (_, cuda) in EXPECTED.items() if cuda]


@pytest.fixture(autouse=True)
def _root(quick_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry().add_root(ROOT)
    monkeypatch.setenv("CXX", str(quick_compiler))


@functools.cache
def loaded(name: str) -> Subject:
    """Builds and loads an operator for its own test, so that workers share the builds."""
    # Not through compile_ops, which calls each operator in this process.
    registry().load(name, build(registry().rescan()[name]).path)
    return find(REGISTERED_AS.get(name, name))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker(120) as worker:
        yield worker


def first_failure(name: str, device: str, worker: Worker) -> CheckEntry:
    """Returns the failure that a user sees first."""
    for check, where in planned(CHECKS, [device]):
        entry = run_check(check, loaded(name), where, PROFILES["ci"], worker)
        if entry.passed is False:
            return entry
    raise AssertionError(f"{name} passes every check on {device}")


def test_every_wrong_operator_is_expected_to_fail_somewhere() -> None:
    assert set(EXPECTED) == {path.stem for path in (ROOT / "bindings").glob("*.cpp")}
    classes = {check.name: check.number for check in CHECKS}
    caught = {classes[n] for pair in EXPECTED.values() for names in pair if names
              for n in names.split(" or ")}  # fmt: skip
    assert set(range(1, 16)) <= caught


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.quick("bad_result")
def test_is_rejected_on_the_cpu(name: str, worker: Worker) -> None:
    _is_rejected(name, "cpu", EXPECTED[name][0], worker)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.quick("bad_bounds")
def test_is_rejected_on_a_gpu(name: str, worker: Worker) -> None:
    _is_rejected(name, "cuda", EXPECTED[name][1], worker)


def _is_rejected(name: str, device: str, check: str | None, worker: Worker) -> None:
    entry = first_failure(name, device, worker)
    assert check is not None and entry.check in check.split(" or "), str(entry)
    first_line = (ROOT / "bindings" / f"{name}.cpp").read_text().splitlines()[0]
    if number := re.match(r"// Class (\d+):", first_line):
        assert entry.label in {one.title for one in CHECKS if one.number == int(number[1])}


@pytest.mark.slow
def test_the_printed_line_reproduces_the_failure_in_a_new_process(worker: Worker) -> None:
    entry = first_failure("bad_unwritten", "cpu", worker)
    words = shlex.split(entry.reproduce)
    assert words[:4] == ["python", "-m", "cuda_ops.testing", "replay"]
    done = subprocess.run(
        [sys.executable, *words[1:]], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED  unwritten[cpu]: unwritten output" in done.stdout


@pytest.mark.slow
def test_a_wrong_gradient_is_told_by_a_number(worker: Worker) -> None:
    detail = first_failure("bad_gradient", "cpu", worker).detail
    numbers = re.fullmatch(r"'x': got d out\S* / d x\S* = (\S+), expected (\S+)", detail)
    assert numbers is not None and float(numbers[1]) != float(numbers[2]), detail


@pytest.mark.slow
def test_shrinking_works_across_the_process_boundary(worker: Worker) -> None:
    entry = first_failure("bad_numerics", "cpu", worker)
    _, _, _, sample = parse_line(shlex.split(entry.reproduce)[-1])
    assert sample.values == "special" and sample.numel <= 16


@pytest.mark.slow
def test_a_crash_is_reported_and_survived(worker: Worker) -> None:
    entry = first_failure("bad_empty", "cpu", worker)
    assert "the process died of SIG" in entry.detail
    assert "bad_empty" in entry.detail
    assert first_failure("bad_result", "cpu", worker).check == "reference"


@pytest.mark.slow
def test_a_hang_is_reported_with_the_operator_and_the_stack() -> None:
    profile = replace(PROFILES["ci"], timeout=3.0)
    with Worker(profile.timeout) as worker:
        check = next(check for check in CHECKS if check.name == "reference")
        entry = run_check(check, loaded("bad_hang"), "cpu", profile, worker)
    assert entry.passed is False
    assert "bad_hang: still running after 3 s; its stack:" in entry.detail
    assert "checks/numerics.py" in entry.detail
