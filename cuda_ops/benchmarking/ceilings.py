"""What the device can do: its measured ceilings and its physical ones.

Percentages refer to the measured ceilings: a large copy by torch, a reduction that reads and writes
next to nothing, and large matrix products by its BLAS, in the same run. No measurement may exceed
the physical ones. One that exceeds a measured one raises it, see :mod:`.raised`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cuda_ops.errors import BenchmarkError
from cuda_ops.spec import BenchmarkCase

from .clock import Clock, Flush, cache_bytes
from .stats import Interval, median_interval

#: The kinds of arithmetic, with the dtype of a matrix product of this kind.
ARITHMETIC = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# Dense FLOPs per clock and SM, by compute capability, from NVIDIA's architecture whitepapers:
# published peak / (SMs x boost clock).
_FLOPS_PER_CLOCK = {
    (8, 0): {"bf16": 2048, "fp16": 2048, "tf32": 1024, "fp32": 128, "fp64": 128},
    (8, 6): {"bf16": 1024, "fp16": 1024, "tf32": 512, "fp32": 256, "fp64": 4},
    (8, 9): {"bf16": 1024, "fp16": 1024, "tf32": 512, "fp32": 256, "fp64": 4},
    (9, 0): {"bf16": 4096, "fp16": 4096, "tf32": 2048, "fp32": 256, "fp64": 256},
    (10, 0): {"bf16": 8192, "fp16": 8192, "tf32": 4096, "fp32": 256, "fp64": 256},
}
# How far above the measured ceiling a result may be if the physical one is not known. On a CPU some
# caches are out of the flush's reach, and the clock varies.
_SLACK = {"cuda": 1.5, "cpu": 4.0}
_ROUNDS = 10
#: A call that writes less than this share of the bytes that it moves is one that reads: its ceiling
#: is that of a kernel which reads alone.
READS = 1 / 8


@dataclass(frozen=True)
class Floor:
    """The shortest time a case can take at the measured ceilings."""

    seconds: float
    #: ``"memory"`` (``"read"`` for a call that hardly writes) or ``"compute"``, whichever takes
    #: longer.
    bound: str


class Ceilings:
    """The ceilings of one device; each is measured when it is first asked for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Bytes read and written per second, or FLOPs per second, by kind.
        self.measured: dict[str, Interval] = {}
        #: The same physically, as far as it is known; no measurement can be above it.
        self.physical: dict[str, float] = _physical(clock.device)

    def rate(self, kind: str) -> float:
        """Returns the measured ceiling: ``"memory"`` (a copy) or ``"read"`` in bytes/s, a kind of
        arithmetic in FLOP/s.
        """
        if kind not in self.measured:
            if kind == "memory":
                self.measured[kind] = _copy_rate(self._clock)
            elif kind == "read":
                # A reduction that is slower than a copy would be no ceiling for reads.
                self.rate("memory")
                rates = self.measured["memory"], _read_rate(self._clock)
                self.measured[kind] = max(rates, key=lambda rate: rate.value)
            else:
                self.measured[kind] = _matmul_rate(self._clock, kind)
        return self.measured[kind].value

    def limit(self, kind: str) -> float:
        """Returns the physical ceiling, or the measured one with slack."""
        if kind in self.physical:
            return self.physical[kind]
        measured = self.rate(kind)
        if kind not in ("memory", "read"):
            # A library may be slow in one kind, but no kind is slower than float32 on a device.
            measured = max(measured, self.rate("fp32"))
        return measured * _SLACK[self._clock.device.type]

    def floor(self, case: BenchmarkCase, written: int | None = None) -> Floor:
        """Returns the shortest time that a call of the case can take.

        Args:
            case: the case.
            written: how many of its bytes a call writes; where that is hardly any, the ceiling is
                that of reads.
        """
        kind = "read" if written is not None and written < READS * case.bytes else "memory"
        memory = case.bytes / self.rate(kind)
        compute = case.flops / self.rate(arithmetic(case)) if case.flops else 0.0
        return Floor(max(memory, compute), "compute" if compute > memory else kind)

    def refuse_impossible(self, case: BenchmarkCase, name: str, seconds: float, calls: int) -> None:
        """Refuses a time of a call of ``name``, one of ``calls``, that the device cannot reach.

        Raises:
            BenchmarkError: more bytes or FLOPs per second than the device can move or do.
        """
        # What the last calls wrote may still be in the cache: writing it took no time.
        moved = case.bytes - cache_bytes(self._clock.device) / calls
        done = {"memory": moved, arithmetic(case): float(case.flops)}
        for kind, amount in done.items():
            if amount > 0 and amount / seconds > self.limit(kind):
                unit = "B" if kind == "memory" else "FLOP"
                what = "bytes" if kind == "memory" else "flops"
                raise BenchmarkError(
                    f"{name}: {seconds * 1e6:.3g} us a call would be {amount / seconds / 1e12:.3g} "
                    f"T{unit}/s, above the {self.limit(kind) / 1e12:.3g} T{unit}/s of the device "
                    f"({kind}): work is left out or not timed, or the case states too many {what}"
                )


def arithmetic(case: BenchmarkCase) -> str:
    """Returns the kind of arithmetic that bounds a case.

    Raises:
        BenchmarkError: the case names an unknown kind.
    """
    if case.arithmetic:
        if case.arithmetic not in ARITHMETIC:
            known = ", ".join(map(repr, ARITHMETIC))
            raise BenchmarkError(
                f"case {case.label!r}: arithmetic is one of {known}, got {case.arithmetic!r}"
            )
        return case.arithmetic
    by_dtype = {dtype: kind for kind, dtype in ARITHMETIC.items()}  # float32: fp32, the later one
    return by_dtype.get(case.dtype or torch.float32, "fp32")


def _copy_rate(clock: Clock) -> Interval:
    numel = 2**28 if clock.device.type == "cuda" else 2**24
    source = torch.randn(numel, device=clock.device)
    target = torch.empty_like(source)
    taken = _times(clock, target.copy_, (source,))
    return _rate(2 * source.nbytes, taken)


def _read_rate(clock: Clock) -> Interval:
    """Measures the fastest of the reductions that torch has for this, on caches without a line that
    waits to be written: only the buffer is paid for.
    """
    numel = 2**28 if clock.device.type == "cuda" else 2**24
    source = torch.randn(numel, device=clock.device)
    rows = source.view(-1, 2**14)
    one, many = source.new_empty(()), source.new_empty(rows.shape[0])
    reductions = (
        lambda x: torch.amax(x, dim=0, out=one),
        lambda x: torch.sum(x, dim=0, out=one),
        lambda x: torch.amax(x.view(rows.shape), dim=1, out=many),
        lambda x: torch.sum(x.view(rows.shape), dim=1, out=many),
    )
    flush, clock.flush = clock.flush, Flush(clock.device, clean=True)
    try:
        taken = [_times(clock, reduction, (source,)) for reduction in reductions]
    finally:
        clock.flush = flush
    return _rate(source.nbytes, min(taken, key=lambda times: times.value))


def _matmul_rate(clock: Clock, kind: str) -> Interval:
    size = (8192 if kind in ("bf16", "fp16", "tf32") else 4096) if _is_gpu(clock) else 512
    a, b = (torch.randn(size, size, device=clock.device, dtype=ARITHMETIC[kind]) for _ in range(2))
    out = torch.empty_like(a)
    with allow_tf32(kind == "tf32"):
        taken = _times(clock, lambda x, y: torch.mm(x, y, out=out), (a, b))
    return _rate(2 * size**3, taken)


def _times(clock: Clock, function: Any, arguments: tuple[Any, ...]) -> Interval:
    for _ in range(3):
        clock.train(function, [arguments])
    return median_interval([clock.train(function, [arguments]).seconds for _ in range(_ROUNDS)])


def _rate(amount: int, taken: Interval) -> Interval:
    return Interval(amount / taken.value, amount / taken.high, amount / taken.low)


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Runs float32 matrix products in TF32, or strictly in float32; restores the setting."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _is_gpu(clock: Clock) -> bool:
    return clock.device.type == "cuda"


# --- physical ----------------------------------------------------------------------

# CUdevice_attribute, from cuda.h
_CLOCK_KHZ, _MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS = 13, 36, 37


def _physical(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    limits: dict[str, float] = {}
    # Two transfers per clock: DDR. H200: 2 x 3.201 GHz x 6144 bits = 4.92 TB/s.
    memory = 2 * _attribute(device, _MEMORY_CLOCK_KHZ) * 1e3
    if rate := memory * _attribute(device, _MEMORY_BUS_BITS) / 8:
        limits["memory"] = rate
    properties = torch.cuda.get_device_properties(device)
    clocks = properties.multi_processor_count * _attribute(device, _CLOCK_KHZ) * 1e3
    if clocks:
        per_clock = _FLOPS_PER_CLOCK.get((properties.major, properties.minor), {})
        limits |= {kind: clocks * flops for kind, flops in per_clock.items()}
    return limits


def _attribute(device: torch.device, number: int) -> int:
    """Asks the driver for an attribute of the device; returns 0 if it is not known."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    handle, value = ctypes.c_int(), ctypes.c_int()
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
    if driver.cuDeviceGet(ctypes.byref(handle), index):
        return 0
    if driver.cuDeviceGetAttribute(ctypes.byref(value), number, handle):
        return 0
    return value.value
