"""Cases whose calls share an argument that would not fit twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_benchmark_cheats import on_every_device, operator

from cuda_ops.benchmarking import capacity
from cuda_ops.benchmarking.compare import Settings
from cuda_ops.benchmarking.kit import Kit
from cuda_ops.benchmarking.results import CaseResult
from cuda_ops.benchmarking.rotation import Rotation
from cuda_ops.errors import BenchmarkError
from cuda_ops.ops import moe
from cuda_ops.registry import registry
from cuda_ops.spec import BenchmarkCase

CPU = torch.device("cpu")
FAST = Settings(precision=1.0, seconds=0.05, latency_rounds=2, latency_calls=10)


def inputs(device: torch.device) -> tuple[Any, ...]:
    return torch.randn(64, 256, device=device), None


def matrix(device: torch.device) -> Mapping[int, torch.Tensor]:
    return {1: torch.randn(256, 512, device=device)}


CASE = BenchmarkCase("shared", inputs, bytes=1, make_shared=matrix)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def widening(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A reference, which gets the shared argument as it is."""
    assert (x.dtype, w.dtype) == (torch.float64, torch.float32)
    return x @ w.to(x.dtype)


def measured(
    device: torch.device,
    kernel: Callable[..., Any] = product,
    case: BenchmarkCase = CASE,
) -> CaseResult:
    answers = {"cuda_ops_benchmarks": [case], "cuda_ops_reference": widening}
    plugins: Any = SimpleNamespace(ask=lambda hook, op: answers.get(hook), peers=lambda op: {})
    op = operator(kernel, "(Tensor x, Tensor w) -> Tensor", "(m,k),(k,n)->(m,n)")
    (result,) = Kit(device, FAST).measure(op, plugins)
    return result


@pytest.fixture
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "cache_bytes", lambda device: 1)


@on_every_device
@pytest.mark.usefixtures("small_caches")
def test_all_calls_have_it_and_the_reference_its_own_dtype(device: torch.device) -> None:
    result = measured(device)
    assert not result.error and result.seconds


@on_every_device
@pytest.mark.usefixtures("small_caches")
def test_a_kernel_that_changes_it_is_rejected(device: torch.device) -> None:
    def doubling(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result = x @ w
        w[-1, -1] *= 2
        return result

    assert "changes its argument 'w', which its schema denies" in measured(device, doubling).error


@on_every_device
@pytest.mark.usefixtures("small_caches")
def test_a_kernel_that_changes_it_once_is_rejected(device: torch.device) -> None:
    def clamping(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.clamp_(-0.5, 0.5)

    assert "changes its argument 'w', which its schema denies" in measured(device, clamping).error


@on_every_device
@pytest.mark.usefixtures("small_caches")
def test_a_kernel_that_leaves_a_part_of_it_out_is_rejected(device: torch.device) -> None:
    def less(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x[:, :-16] @ w[:-16]

    assert "differs from the reference" in measured(device, less).error


@on_every_device
def test_what_caches_may_keep_is_refused(device: torch.device) -> None:
    assert "make_shared has 0 MiB, which the caches may keep" in measured(device).error


@pytest.mark.usefixtures("small_caches")
def test_a_gradient_of_it_is_refused() -> None:
    error = measured(CPU, case=replace(CASE, backward=True)).error
    assert "make_shared is for cases without backward" in error


@pytest.mark.usefixtures("small_caches")
def test_a_size_that_cannot_be_known_is_an_error_of_the_case() -> None:
    def of_values(device: torch.device) -> Mapping[int, torch.Tensor]:
        size = int(torch.full((), 512, device=device))
        return {1: torch.randn(256, size, device=device)}

    assert "meta" in measured(CPU, case=replace(CASE, make_shared=of_values)).error


@pytest.mark.parametrize(
    "shared",
    [lambda device: {0: torch.randn(64, 256)}, lambda device: {2: torch.randn(64, 256)}],
    ids=["another argument", "none of them"],
)
def test_a_place_that_is_taken_is_named(shared: Any) -> None:
    position = next(iter(shared(CPU)))
    with pytest.raises(BenchmarkError, match=f"make_shared has argument {position}, where make_"):
        Rotation(replace(CASE, make_shared=shared), CPU, 2)


def test_it_is_one_tensor_for_all_copies_and_counts_for_none() -> None:
    rotation = Rotation(CASE, CPU, 3)
    rotation.advance()
    for sets in (rotation.values, rotation.arguments):
        assert len({id(w) for _, w in sets}) == 1 and len({id(x) for x, _ in sets}) == 3
    assert rotation.bytes_per_copy == 64 * 256 * 4
    assert rotation.changed_argument(0, frozenset()) is None
    rotation.arguments[0][1][3].neg_()
    assert rotation.changed_argument(2, frozenset()) == 1
    rotation.advance()
    assert rotation.changed_argument(2, frozenset()) is None
    another = Rotation(CASE, CPU, 5, rotation.shared)
    assert another.arguments[4][1] is rotation.arguments[0][1]


def test_it_has_numbers_of_its_own() -> None:
    rotation = Rotation(CASE, CPU, 2)
    assert not any((x[0] == w.flatten()[:256]).any() for x, w in rotation.values)


@pytest.mark.usefixtures("built_mixture")
def test_a_whole_model_is_left_out_where_it_does_not_fit() -> None:
    """It is left out before it is made."""
    kit = Kit(CPU, FAST, cases="^DeepSeek-V3, T=")
    assert not kit.measure(registry().operators("moe")["moe"].spec, registry().plugins)
    assert len(kit.left_out) == 6
    assert all("MiB, too large for a CPU" in reason for reason in kit.left_out.values())


@pytest.mark.usefixtures("small_caches", "built_mixture")
@pytest.mark.slow
def test_a_mixture_is_right_with_one_set_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "WHOLE", {"DeepSeek-V3": (64, 32, 16, 4)})
    plugins: Any = SimpleNamespace(
        ask=lambda hook, op: getattr(moe, hook)(op), peers=moe.cuda_ops_peers
    )
    kit = Kit(CPU, FAST, peers=("grouped_mm",), cases="^DeepSeek-V3, T=(1|8|64) ")
    results = kit.measure(registry().operators("moe")["moe"].spec, plugins)
    assert [result.error for result in results] == [""] * 3
    assert all(result.peers["grouped_mm"].ratio for result in results)
