"""The benchmark kit rejects operators that look fast and are not.

Each cheat here is registered as any operator is; on a machine with a GPU it runs there too.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_gpu

from cuda_ops.benchmarking import clock as clocks
from cuda_ops.benchmarking.clock import CpuClock, Train, make_clock, prove_cold
from cuda_ops.benchmarking.compare import Settings
from cuda_ops.benchmarking.kit import Kit
from cuda_ops.benchmarking.results import CaseResult
from cuda_ops.benchmarking.rotation import Rotation, maker
from cuda_ops.benchmarking.training import with_gradients
from cuda_ops.benchmarking.verify import Verifier
from cuda_ops.errors import BenchmarkError
from cuda_ops.signature import parse_signature
from cuda_ops.spec import BenchmarkCase, OpSpec

CUDA = torch.cuda.is_available()
DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if CUDA else [])]
LIBRARY = torch.library.Library("cuda_ops", "FRAGMENT")
NUMEL = 2**16
_numbers = itertools.count()

on_every_device = pytest.mark.parametrize(
    "device",
    [pytest.param(d, marks=[pytest.mark.alone] * (d.type == "cuda")) for d in DEVICES],
    ids=str,
)


@pytest.fixture(scope="module")
def kits() -> dict[str, Kit]:
    fast = Settings(precision=1.0, seconds=0.05, latency_rounds=2, latency_calls=10)
    return {device.type: Kit(device, fast) for device in DEVICES}


def operator(
    kernel: Callable[..., Any], schema: str = "(Tensor x) -> Tensor", signature: str = "()->()"
) -> OpSpec:
    """Registers ``kernel`` under a new name, for every device."""
    name = f"benchmark_cheat_{next(_numbers)}"
    text = name + schema
    LIBRARY.define(text)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    parsed = torch._C.parse_schema(text)
    line = parse_signature(signature)
    floating = (torch.float32,)
    return OpSpec(name, "cheats", text, parsed, line, floating, "", ("CPU", "CUDA"), True)


def case(numel: int = NUMEL, **more: Any) -> BenchmarkCase:
    described = maker((((numel,), torch.float32),))
    return BenchmarkCase(f"{numel} float32", described, bytes=8 * numel, **more)


def measured(
    kits: dict[str, Kit],
    device: torch.device,
    kernel: Callable[..., Any],
    which: BenchmarkCase | None = None,
    reference: Callable[..., Any] = F.silu,
) -> CaseResult:
    answers = {"cuda_ops_benchmarks": [which or case()], "cuda_ops_reference": reference}
    plugins: Any = SimpleNamespace(ask=lambda hook, op: answers.get(hook), peers=lambda op: {})
    (result,) = kits[device.type].measure(operator(kernel), plugins)
    return result


@on_every_device
def test_an_honest_operator_passes(kits: dict[str, Kit], device: torch.device) -> None:
    result = measured(kits, device, F.silu, case(peers={"eager": F.silu}))
    assert not result.error
    assert result.seconds is not None and result.seconds.low > 0
    ratio = result.peers["eager"].ratio
    # The same kernel twice. The bounds are wide for a machine that others use too.
    assert ratio is not None and 0.25 < ratio.value < 4
    assert (result.host is not None) == (device.type == "cuda")


# --- cheats ----------------------------------------------------------------------------


def cached_by_shape() -> Callable[[torch.Tensor], torch.Tensor]:
    known: dict[Any, torch.Tensor] = {}

    def kernel(x: torch.Tensor) -> torch.Tensor:
        if x.shape not in known:
            known[x.shape] = F.silu(x)
        return known[x.shape].clone()

    return kernel


def cached_by_address() -> Callable[[torch.Tensor], torch.Tensor]:
    known: dict[int, torch.Tensor] = {}

    def kernel(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in known:
            known[x.data_ptr()] = F.silu(x)
        return known[x.data_ptr()].clone()

    return kernel


def one_output_for_all() -> Callable[[torch.Tensor], torch.Tensor]:
    known: dict[Any, torch.Tensor] = {}

    def kernel(x: torch.Tensor) -> torch.Tensor:
        out = known.setdefault((x.shape, x.device), torch.empty_like(x))
        return torch.ops.aten.silu.out(x, out=out)

    return kernel


def half_of_the_work(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    half = x.numel() // 2
    out[:half] = F.silu(x[:half])
    return out


def all_but_the_end(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:-7] = F.silu(x[:-7])
    return out


def in_half_precision(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x.to(torch.bfloat16)).to(torch.float32)


def scaled_argument(x: torch.Tensor) -> torch.Tensor:
    out = F.silu(x)
    x.mul_(0.5)
    return out


def one_element_of_the_argument(x: torch.Tensor) -> torch.Tensor:
    out = F.silu(x)
    x[3] = 0
    return out


def its_argument(x: torch.Tensor) -> torch.Tensor:
    return x.copy_(F.silu(x)).view_as(x)


class Later(torch.Tensor):
    """Computes when it is looked at."""


def lazily(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x).as_subclass(Later)


def in_a_thread(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)

    def work() -> None:
        time.sleep(0.05)
        out.copy_(F.silu(x))

    threading.Thread(target=work).start()
    return out


CHEATS = {
    "cached by shape": (cached_by_shape(), "differs from the reference by"),
    "cached by address": (cached_by_address(), "differs from the reference by"),
    "one output for all": (one_output_for_all(), "memory that an argument or another result"),
    "half of the work": (half_of_the_work, "differs from the reference by"),
    "all but the end": (all_but_the_end, "differs from the reference by"),
    "half precision": (in_half_precision, "differs from the reference by"),
    "scales its argument": (scaled_argument, "changes its argument 'x'"),
    "one element of its argument": (one_element_of_the_argument, "changes its argument 'x'"),
    "writes into its argument": (its_argument, "memory that an argument or another result"),
    "a lazy result": (lazily, "returns Later, expected a plain Tensor"),
}


@on_every_device
@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("numel", [NUMEL, 2**21], ids=["all compared", "parts compared"])
def test_a_cheat_is_rejected(
    kits: dict[str, Kit], device: torch.device, name: str, numel: int
) -> None:
    kernel, message = CHEATS[name]
    result = measured(kits, device, kernel, case(numel))
    assert message in result.error
    assert result.seconds is None


def test_work_in_another_thread_is_rejected(kits: dict[str, Kit]) -> None:
    result = measured(kits, torch.device("cpu"), in_a_thread)
    assert "differs from the reference by" in result.error


@on_every_device
def test_a_cheating_peer_is_missing_and_named(kits: dict[str, Kit], device: torch.device) -> None:
    result = measured(kits, device, F.silu, case(peers={"wrong": torch.relu, "eager": F.silu}))
    assert not result.error
    assert result.peers["wrong"].missing.startswith("wrong differs from the reference by")
    assert result.peers["wrong"].ratio is None
    assert result.peers["eager"].ratio is not None


@on_every_device
def test_a_rate_above_the_device_is_an_error(kits: dict[str, Kit], device: torch.device) -> None:
    too_many = replace(case(2**12), bytes=2**28)
    assert "of the device (memory)" in measured(kits, device, F.silu, too_many).error
    too_many = replace(case(2**12), flops=9 * 10**8)
    assert "of the device (fp32)" in measured(kits, device, F.silu, too_many).error


# --- on a GPU ----------------------------------------------------------------------------


def without_waiting(x: torch.Tensor) -> torch.Tensor:
    """Starts at once, on whatever the argument holds by then."""
    with torch.cuda.stream(SIDE[0]):
        return F.silu(x)


def without_joining(x: torch.Tensor) -> torch.Tensor:
    """Waits for its argument, but nothing waits for its result."""
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        return F.silu(x)


def joined(x: torch.Tensor) -> torch.Tensor:
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        out = F.silu(x)
    torch.cuda.current_stream().wait_stream(SIDE[0])
    return out


SIDE = [torch.cuda.Stream()] if CUDA else []


@needs_gpu
@pytest.mark.alone
@pytest.mark.parametrize("numel", [NUMEL, 2**24])
@pytest.mark.parametrize("kernel", [without_waiting, without_joining])
def test_work_on_another_stream_is_rejected(
    kits: dict[str, Kit], kernel: Callable[..., Any], numel: int
) -> None:
    result = measured(kits, torch.device("cuda"), kernel, case(numel))
    assert "uses another stream" in result.error or "differs from the reference" in result.error


@needs_gpu
@pytest.mark.alone
def test_another_stream_that_is_joined_is_fine(kits: dict[str, Kit]) -> None:
    assert not measured(kits, torch.device("cuda"), joined).error


@needs_gpu
@pytest.mark.alone
def test_an_operator_that_waits_for_the_gpu_is_noted(kits: dict[str, Kit]) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        assert math.isfinite(x[0].item())
        return F.silu(x)

    result = measured(kits, torch.device("cuda"), kernel)
    assert not result.error
    assert result.notes == ("cuda_ops waits for the device: host time is included",)


@needs_gpu
@pytest.mark.alone
def test_a_reference_on_the_device_finds_the_cheat_too(kits: dict[str, Kit]) -> None:
    """Above 10 GFLOP."""

    def without_last_column(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(a @ b)
        out[:, :-1] = a @ b[:, :-1]
        return out

    square = ((2048, 2048), torch.float32)
    product = BenchmarkCase("x", maker((square, square)), bytes=3 * 2**24, flops=2 * 2048**3)
    answers = {"cuda_ops_benchmarks": [product], "cuda_ops_reference": torch.matmul}
    plugins: Any = SimpleNamespace(ask=lambda hook, op: answers.get(hook), peers=lambda op: {})
    schema, signature = "(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)"
    for kernel, error in ((torch.matmul, ""), (without_last_column, "differs from the reference")):
        (result,) = kits["cuda"].measure(operator(kernel, schema, signature), plugins)
        assert error in result.error and bool(error) == bool(result.error)


@needs_gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    ("clean", "least"), [(False, clocks.COLD_OVER_WARM), (True, clocks.CLEAN_OVER_WARM)]
)
def test_the_flush_evicts_and_its_absence_is_noticed(clean: bool, least: float) -> None:
    clock = make_clock(torch.device("cuda"), clean)
    assert prove_cold(clock, least) >= least
    clock.flush = lambda: None
    with pytest.raises(BenchmarkError, match="the cache flush does not evict"):
        prove_cold(clock, least)


@needs_gpu
@pytest.mark.alone
def test_a_clean_flush_leaves_nothing_for_readers_to_write() -> None:
    device = torch.device("cuda")
    x = torch.randn(2, clocks.cache_bytes(device) // 4, device=device)  # twice the cache
    out = torch.empty(2, device=device)
    times: dict[bool, list[float]] = {False: [], True: []}
    made = {clean: make_clock(device, clean) for clean in times}
    for _ in range(20):
        for clean, clock in made.items():
            train = clock.train(lambda x: torch.amax(x, dim=1, out=out), [(x,)])
            times[clean].append(train.seconds)
    # A cache full of unwritten lines is half of what is read.
    assert min(times[False]) > 1.15 * min(times[True])


# --- the parts, without a clock -------------------------------------------------------------


class _ScriptedClock(CpuClock):
    """Takes as long as the flush says."""

    def __init__(self, cold: float) -> None:
        self.cold = self.taken = cold
        super().__init__(torch.device("cpu"), self._cold_flush)

    def _cold_flush(self) -> None:
        self.taken = self.cold

    def train(self, function: Any, arguments: Any, prepare: Any = lambda: None) -> Train:
        self.taken = 1.0
        self.flush()
        return Train(self.taken, [])


def test_the_proof_needs_cold_reads_to_be_slower() -> None:
    assert prove_cold(_ScriptedClock(2.0)) == 2.0
    with pytest.raises(BenchmarkError, match=r"cold reads take 1\.05 times as long as warm ones"):
        prove_cold(_ScriptedClock(1.05))


def test_values_move_on_with_every_train_and_arguments_keep_their_layout() -> None:
    def make_inputs(device: torch.device) -> tuple[Any, ...]:
        return torch.randn(4, 6).t(), torch.randn(3, 1).expand(3, 5), 2.0

    rotation = Rotation(BenchmarkCase("x", make_inputs, bytes=1), torch.device("cpu"), 3)
    for _ in range(4):
        rotation.advance()
        for value in range(3):
            transposed, expanded, scalar = rotation.arguments[rotation.copy_with(value)]
            assert torch.equal(transposed, rotation.values[value][0])
            assert torch.equal(expanded, rotation.values[value][1])
            assert transposed.stride() == (1, 6) and expanded.stride() == (1, 0) and scalar == 2.0
    assert rotation.changed_argument(0, frozenset()) is None
    rotation.arguments[0][1][1].fill_(7)
    assert rotation.changed_argument(0, frozenset()) == 1
    assert rotation.changed_argument(0, frozenset({1})) is None


PRODUCT = "(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)"


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def all_but_sixteen(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[:, :-16] @ b[:-16]


@on_every_device
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("kernel", [product, all_but_sixteen])
def test_a_sum_that_leaves_a_part_out_is_rejected(
    kits: dict[str, Kit], device: torch.device, kernel: Callable[..., Any], backward: bool
) -> None:
    """In long sums of few bits a single result may be far off, but not all of them together."""
    half = torch.bfloat16
    inputs = maker((((64, 1024), half), ((1024, 64), half)))
    case = BenchmarkCase("product", inputs, bytes=1, dtype=half, backward=backward)
    # It has no registration of its own: the gradient is torch's.
    op = replace(operator(kernel, *PRODUCT), dtypes=(half,))
    rotation = Rotation(case, device, 2)
    step = with_gradients(kernel) if backward else kernel
    verifier = Verifier(op, with_gradients(product) if backward else product, rotation)
    results = [step(*arguments) for arguments in rotation.arguments]
    if kernel is product:
        assert verifier.check(results) <= 1
    else:
        with pytest.raises(BenchmarkError, match="what rounding explains"):
            verifier.check(results)


def test_inputs_of_changing_shapes_are_refused() -> None:
    sizes = itertools.count(1)
    changing = BenchmarkCase("x", lambda device: (torch.randn(next(sizes)),), bytes=1)
    with pytest.raises(BenchmarkError, match="make_inputs must return the same shapes"):
        Rotation(changing, torch.device("cpu"), 2)


def test_parts_of_broadcast_arguments_fit_together() -> None:
    def kernel(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    def make_inputs(device: torch.device) -> tuple[Any, ...]:
        return torch.randn(2**16, 40), torch.randn(40)

    op = operator(kernel, "(Tensor x, Tensor y) -> Tensor", "(),()->()")
    rotation = Rotation(BenchmarkCase("x", make_inputs, bytes=1), torch.device("cpu"), 2)
    verifier = Verifier(op, torch.add, rotation)
    outputs = [kernel(*args) for args in rotation.arguments]
    assert verifier.check(outputs) <= 1
    outputs[0][-1, -1] += 1  # the last element of all is always looked at
    outputs[1][-1, -1] += 1
    with pytest.raises(BenchmarkError, match="differs from the reference"):
        verifier.check(outputs)
