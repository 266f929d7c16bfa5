"""The benchmark kit apart from its clock: statistics, the device, peers, one operator.

What becomes of its results is in test_benchmark_reports.py, what it rejects in
test_benchmark_cheats.py.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ScratchOp
from reports import around, rendered, result
from torch._subclasses import FakeTensorMode

from cuda_ops.benchmarking.ceilings import Ceilings, arithmetic
from cuda_ops.benchmarking.clock import CpuClock, host_latency, rotated
from cuda_ops.benchmarking.compare import Settings, calls_for
from cuda_ops.benchmarking.environment import cub_version, environment
from cuda_ops.benchmarking.kit import Kit, cases_of
from cuda_ops.benchmarking.peers import compiled, from_pair, imported, load_peers, torch_peers
from cuda_ops.benchmarking.results import PeerResult, mean_ratio
from cuda_ops.benchmarking.rotation import maker
from cuda_ops.benchmarking.stats import Interval, geometric_mean, median_interval, ratio_interval
from cuda_ops.benchmarking.training import with_gradients
from cuda_ops.build import toolchain
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.compile_ops import reload
from cuda_ops.errors import BenchmarkError
from cuda_ops.registry import all_operators, registry
from cuda_ops.spec import BenchmarkCase, Peer

CPU = torch.device("cpu")


# --- statistics -------------------------------------------------------------------------


def test_the_interval_contains_the_median_as_often_as_it_says() -> None:
    chance = random.Random(0)
    for count in (6, 15, 40):
        hits = 0
        for _ in range(2000):
            # Skewed as times are; the true median is known.
            samples = [chance.expovariate(1) for _ in range(count)]
            interval = median_interval(samples)
            hits += interval.low <= 0.6931 <= interval.high
            assert interval.low <= interval.value <= interval.high
        assert 0.94 <= hits / 2000 <= 0.99, count


def test_the_ratio_is_taken_within_rounds() -> None:
    drift = [1.0, 1.5, 2.0, 3.0, 2.5, 1.2, 1.1]
    interval = ratio_interval([2 * d for d in drift], drift)
    assert interval == Interval(2, 2, 2)
    with pytest.raises(ValueError, match="expected at least one sample"):
        median_interval([])


def test_twice_as_fast_and_half_as_fast_make_one() -> None:
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)
    fast, slow = (result(peers={"p": PeerResult(ratio=around(r))}) for r in (4.0, 1.0))
    assert mean_ratio([fast, slow, result(peers={})], "p") == pytest.approx(2)
    assert mean_ratio([fast], "q") is None


# --- the device -------------------------------------------------------------------------


def test_the_environment_says_where_it_was() -> None:
    known = environment(CPU)
    assert known["device"].startswith("CPU (") and known["device"].endswith(" cores)")
    assert known["torch"] == torch.__version__ and known["threads"].isdigit()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", known["date"])
    assert known["commit"]


def test_the_version_of_cub_is_that_of_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "cuda_home", lambda: tmp_path)
    assert cub_version() == "not installed"
    for folder, number, version in (("", 200_800, "2.8.0"), ("cccl", 301_402, "3.14.2")):
        header = tmp_path / "include" / folder / "cub" / "version.cuh"
        header.parent.mkdir(parents=True)
        header.write_text(f"// text\n#define CUB_VERSION {number} // one value\n")
        assert cub_version() == version  # that of cccl comes first
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)
    assert cub_version() == "not installed"


def test_the_floor_is_the_longer_of_memory_and_arithmetic() -> None:
    ceilings = Ceilings(CpuClock(CPU, lambda: None))
    ceilings.measured = {"memory": around(1e9), "fp32": around(1e12), "bf16": around(4e12)}
    case = BenchmarkCase("x", lambda device: (), bytes=10**6, flops=10**10)
    assert (ceilings.floor(case).seconds, ceilings.floor(case).bound) == (1e-2, "compute")
    light = replace(case, flops=10**6)
    assert (ceilings.floor(light).seconds, ceilings.floor(light).bound) == (1e-3, "memory")
    assert ceilings.floor(replace(case, dtype=torch.bfloat16)).seconds == 2.5e-3
    ceilings.refuse_impossible(case, "ours", 2.6e-3, calls=2)
    with pytest.raises(
        BenchmarkError, match=r"ours: 2e\+03 us .* 5 TFLOP/s, above the 4 TFLOP/s of"
    ):
        ceilings.refuse_impossible(case, "ours", 2e-3, calls=2)


def test_arithmetic_follows_the_dtype_unless_said_otherwise() -> None:
    case = BenchmarkCase("x", lambda device: (), bytes=1)
    assert arithmetic(case) == arithmetic(replace(case, dtype=torch.float32)) == "fp32"
    assert arithmetic(replace(case, dtype=torch.float16)) == "fp16"
    assert arithmetic(replace(case, arithmetic="tf32", dtype=torch.float32)) == "tf32"
    with pytest.raises(BenchmarkError, match=r"arithmetic is one of 'bf16', .*, got 'int3'"):
        arithmetic(replace(case, arithmetic="int3"))


def test_short_calls_make_long_trains() -> None:
    clock = CpuClock(CPU, lambda: None)
    assert calls_for(1.0, clock) == 2
    assert calls_for(clock.train_seconds / 10, clock) == 10
    assert calls_for(0.0, clock) == 64


def test_host_latency_is_per_call_and_in_rotated_order() -> None:
    order: list[str] = []
    thunks = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = host_latency(thunks, CPU, rounds=2, calls=3)
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2, "c": 2}
    assert "".join(order[::3]) == "abcbcacababcbca"
    assert rotated(["a", "b", "c"], 4) == ["b", "c", "a"]


# --- peers ------------------------------------------------------------------------------


def test_a_peer_that_cannot_be_had_is_missing_with_its_reason() -> None:
    def broken() -> Any:
        raise RuntimeError("needs a moon\nand a sun")

    ready, missing = load_peers(
        {
            "eager": F.silu,
            "here": imported("torch.nn.functional:silu"),
            "adapted": imported("torch.nn:functional", lambda module: module.relu),
            "absent": imported("no_such_package.ops:silu"),
            "nameless": imported("torch.nn.functional:no_such_function"),
            "broken": Peer(broken),
        }
    )
    assert ready == {"eager": F.silu, "here": F.silu, "adapted": F.relu}
    assert missing["absent"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert "no_such_function" in missing["nameless"]
    assert missing["broken"] == "RuntimeError: needs a moon"


def test_torch_is_a_peer_twice_and_every_case_is_compiled_anew() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert list(torch_peers(double)) == ["eager", "compile"]
    peer = compiled(double, backend="eager")
    for size in range(1, 12):  # more than torch compiles of one function
        assert peer.load()(torch.ones(size)).sum() == 2 * size


@pytest.mark.slow
def test_a_peer_may_be_a_pair_of_its_own(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    assert torch.equal(from_pair(scratch_op.root, scratch_op.name).load()(torch.ones(3)),
                       torch.full((3,), 2.0))  # fmt: skip
    _, missing = load_peers({"gone": from_pair(scratch_op.root, "no_such_pair")})
    assert "no operator 'no_such_pair'" in missing["gone"]


# --- one operator -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silu() -> Any:
    reload("silu")
    return registry().operators("silu")["silu"].spec


def plugins(
    cases: list[BenchmarkCase] | None, reference: Any = F.silu, peers: dict[str, Any] | None = None
) -> Any:
    answers = {"cuda_ops_benchmarks": cases, "cuda_ops_reference": reference}
    return SimpleNamespace(ask=lambda hook, op: answers.get(hook), peers=lambda op: peers or {})


def small(numel: int = 4096, **more: Any) -> BenchmarkCase:
    inputs = maker((((numel,), torch.float32),))
    return BenchmarkCase(f"{numel}", inputs, bytes=8 * numel, dtype=torch.float32, **more)


def test_a_run_measures_checks_and_names_what_is_missing(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=100.0, seconds=0.1))
    peers = {"eager": F.silu, "wrong": torch.relu, "absent": imported("no_such_package:silu")}
    (found,) = kit.measure(silu, plugins([small(reason="why", peers=peers)]))
    assert not found.error and found.converged and found.rounds >= 6
    assert (found.op, found.pair, found.dtype, found.reason) == ("silu", "silu", "float32", "why")
    assert found.seconds is not None and found.of_ceiling > 0
    assert found.peers["eager"].ratio is not None
    assert found.peers["absent"].missing.startswith("ModuleNotFoundError")
    assert found.peers["wrong"].missing.startswith("wrong differs from the reference")
    text = rendered(kit.report([found]))
    assert "silu: peer absent is missing: ModuleNotFoundError" in text
    assert re.search(r"^4096 +[\d.]+ us +[\d.]+ GB/s +\d+% +[\d.]+ ±[\d.]+ +missing", text, re.M)


def test_peers_of_the_operator_join_those_of_a_case(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    answers = plugins([small(peers={"p": torch.relu})], peers={"p": F.silu, "eager": F.silu})
    (found,) = kit.measure(silu, answers)
    assert list(found.peers) == ["p", "eager"]
    assert found.peers["p"].missing  # the case's own goes before


def test_keywords_reach_operator_peers_and_reference() -> None:
    reload("normalize_volume")
    op = registry().operators("normalize_volume")["normalize_volume"].spec
    case = BenchmarkCase(
        "8^3", maker((((8, 8, 8), torch.uint8),)), bytes=8**3 * 5, keywords={"maximum": 255.0}
    )  # fmt: skip

    def scaled(x: torch.Tensor, *, maximum: float) -> torch.Tensor:
        return x / maximum

    (found,) = Kit(CPU, Settings(precision=1.0, seconds=0.0)).measure(
        op, plugins([case], scaled, {"eager": scaled})
    )
    assert not found.error
    assert found.peers["eager"].ratio is not None


def test_a_peer_that_rounds_by_another_rule_may_be_off_and_says_so() -> None:
    reload("rgb_to_gray")
    op = registry().operators("rgb_to_gray")["rgb_to_gray"].spec
    case = BenchmarkCase("9x9", maker((((9, 9, 3), torch.uint8),)), bytes=9 * 9 * 4)
    reference = registry().plugins.ask("cuda_ops_reference", op)

    def darker(by: int) -> Any:
        return Peer(lambda: lambda image: reference(image).clamp(min=by) - by, off_by=1)

    peers = {"one": darker(1), "two": darker(2)}
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    (found,) = kit.measure(op, plugins([case], reference, peers))
    assert found.peers["one"].ratio is not None
    assert "differs" in found.peers["two"].missing
    assert "one rounds by another rule: off by 1 at most" in found.notes


def test_of_a_peer_the_first_results_may_be_compared_alone() -> None:
    reload("bitonic_topk")
    op = registry().operators("bitonic_topk")["bitonic_topk"].spec
    case = BenchmarkCase("9x9", maker((((9, 9), torch.float32), 3)), bytes=9 * 9 * 4)
    reference = registry().plugins.ask("cuda_ops_reference", op)

    def other_indices(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = reference(x, k)
        return values.clone(), indices + 1

    def other_values(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = reference(x, k)
        return values + 1, indices.clone()

    peers = {
        "lenient": Peer(lambda: other_indices, compared=1),
        "strict": Peer(lambda: other_indices),
        "wrong": Peer(lambda: other_values, compared=1),
    }
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    (found,) = kit.measure(op, plugins([case], reference, peers))
    assert found.peers["lenient"].ratio is not None
    assert "differs" in found.peers["strict"].missing
    assert "differs" in found.peers["wrong"].missing
    assert "lenient: only its first result compared" in found.notes


def test_a_chosen_peer_is_the_only_one(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0), peers={"eager"})
    answers = plugins([small(peers={"eager": F.silu, "relu": torch.relu})])
    (found,) = kit.measure(silu, answers)
    assert list(found.peers) == ["eager"]
    assert set(cases_of(silu, answers)[0].peers) == {"eager", "relu"}


def test_what_is_not_measured_is_named(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    assert kit.measure(silu, plugins(None)) == []
    assert kit.left_out["silu"].startswith("no cases: give a signature line")
    assert kit.measure(silu, plugins([small()], None)) == []
    assert kit.left_out["silu"] == "nothing to check results with: implement cuda_ops_reference"
    without_cpu = replace(silu, keys=("CUDA",))
    assert kit.measure(without_cpu, plugins([small()])) == []
    assert kit.left_out["silu"] == "no CPU kernel in this build"
    large, heavy = replace(small(), bytes=2**40), replace(small(), label="heavy", flops=10**15)
    assert kit.measure(silu, plugins([large, heavy])) == []
    assert kit.left_out["silu 4096"] == "1048576 MiB, too large for a CPU (300 MiB)"
    assert kit.left_out["silu heavy"] == "1.0e+15 FLOPs, too many for a CPU (1e+09)"
    assert "left out: silu heavy: 1.0e+15 FLOPs" in rendered(kit.report([]))


def test_one_case_that_fails_leaves_the_others(silu: Any) -> None:
    def inputs(device: torch.device) -> tuple[Any, ...]:
        raise ArithmeticError("no numbers today")

    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    bad = BenchmarkCase("bad", inputs, bytes=1)
    failed, found = kit.measure(silu, plugins([bad, small()]))
    assert failed.error == "ArithmeticError: no numbers today" and not found.error
    text = rendered(kit.report([failed, found]))
    assert "error silu bad: ArithmeticError: no numbers today" in text


def test_few_cases_are_the_ends_of_each_dtype(silu: Any) -> None:
    cases = [small(size) for size in (64, 1024, 256)]
    kit = Kit(CPU, Settings(precision=1.0, seconds=0.0))
    found = kit.measure(silu, plugins(cases), few=True)
    assert [case.case for case in found] == ["64", "1024"]


def test_a_wide_interval_is_said_to_be_wide(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=0.0, seconds=0.0))
    (found,) = kit.measure(silu, plugins([small(peers={"eager": F.silu})]))
    assert not found.converged and found.rounds == 6
    assert "~ an interval is wider than 0% after 0 s" in rendered(kit.report([found]))


def test_incoming_gradients_of_a_reference_are_rounded_like_those_of_an_operator() -> None:
    x = torch.tensor([1.001, 2.003], dtype=torch.float64)
    out, grad = with_gradients(lambda v: 3 * v, like=[torch.bfloat16])(x)
    assert torch.equal(out, 3 * x)
    assert torch.equal(grad, 3 * (3 * x).bfloat16().double())


def test_every_case_has_arguments_that_its_operator_takes() -> None:
    """On fake tensors: a run of all cases takes an hour of a GPU."""
    count = 0
    for operator in all_operators(lambda pair: pair.root == BUILTIN_ROOT).values():
        for case in cases_of(operator.spec, registry().plugins):
            if operator.spec.name == "moe":  # its logits are counted as they are made
                continue
            with FakeTensorMode(), torch.no_grad():
                operator.spec.overload(*case.make_inputs(CPU), **case.keywords)
            count += 1
    assert count > 300
