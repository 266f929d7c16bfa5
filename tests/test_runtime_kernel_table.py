"""The sums over kernels and copies of a trace, from events made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuda_ops.runtime.tracing.kernel_table import KernelTime, at_least, common, gpu_work, merged
from cuda_ops.runtime.tracing.table import short_name
from cuda_ops.runtime.tracing.traces import Trace


def _event(
    category: str,
    name: str,
    start: float,
    time: float,
    stream: int = 7,
    device: int = 0,
    **said: Any,
) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": device, "tid": stream,
        "ts": start, "dur": time, "args": {"device": device, "stream": stream, **said},
    }  # fmt: skip


def _kernel(name: str, start: float, time: float, stream: int = 7, **said: Any) -> dict[str, Any]:
    return _event("kernel", name, start, time, stream, **said)


def _copy(kind: str, start: float, time: float, stream: int, **said: Any) -> dict[str, Any]:
    return _event("gpu_memcpy", f"Memcpy {kind}", start, time, stream, **said)


def _shape(grid: int, registers: int, occupancy: float = 50) -> dict[str, Any]:
    return {
        "grid": [grid, 1, 1], "block": [128, 2, 1], "registers per thread": registers,
        "shared memory": 1024, "est. achieved occupancy %": occupancy,
    }  # fmt: skip


def test_kernels_of_a_name_are_added_up() -> None:
    work = gpu_work(
        [_kernel("a", 0, 10, **_shape(4, 32)), _kernel("b", 10, 30), _kernel("a", 40, 20)]
    )
    b, a = sorted(work.kernels, key=lambda row: row.name, reverse=True)
    assert (a.calls, b.calls) == (2, 1)
    assert a.seconds == pytest.approx(30e-6) and b.seconds == pytest.approx(30e-6)
    assert a.mean_seconds == pytest.approx(15e-6)
    assert a.share == b.share == pytest.approx(0.5)


def test_the_launch_that_took_most_time_is_shown() -> None:
    events = [
        _kernel("a", 0, 10, **_shape(4, 32)),
        _kernel("a", 10, 7, **_shape(8, 40, 75)),
        _kernel("a", 20, 7, **_shape(8, 40, 75)),
    ]
    assert gpu_work(events).kernels == [
        KernelTime(
            "a", 3, pytest.approx(24e-6), 1.0, (8, 1, 1), (128, 2, 1), 40, 1024, 0.75, shapes=2
        )
    ]


def test_what_the_profiler_did_not_say_is_none() -> None:
    (row,) = gpu_work([_kernel("a", 0, 1)]).kernels
    assert row.grid is row.block is row.registers is row.shared_bytes is row.occupancy is None
    (row,) = gpu_work([_kernel("a", 0, 1, **_shape(4, 32, -99))]).kernels
    assert row.registers == 32 and row.occupancy is None


def test_the_kernel_that_took_most_time_comes_first() -> None:
    work = gpu_work([_kernel("a", 0, 1), _kernel("b", 1, 5), _kernel("c", 6, 3)])
    assert [row.name for row in work.kernels] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("start", "stream", "device", "overlapped"),
    [
        pytest.param(10, 20, 0, 10, id="within a kernel"),
        pytest.param(25, 20, 0, 5, id="half of it after the kernel"),
        pytest.param(30, 20, 0, 0, id="begins when the kernel ends"),
        pytest.param(55, 20, 0, 6, id="from one kernel into the next"),
        pytest.param(10, 7, 0, 0, id="on the kernel's own stream"),
        pytest.param(10, 20, 1, 0, id="on another GPU"),
    ],
)
def test_copies_overlap_with_kernels(start: int, stream: int, device: int, overlapped: int) -> None:
    events = [
        _kernel("a", 0, 30),
        _kernel("a", 50, 10),
        _kernel("a", 64, 10),
        _copy("HtoD (Pinned -> Device)", start, 10, stream, device=device, bytes=4096),
    ]
    work = gpu_work(events)
    (copy,) = work.copies
    assert copy.kind == "HtoD (Pinned -> Device)"
    assert (copy.calls, copy.bytes) == (1, 4096)
    assert copy.seconds == pytest.approx(10e-6)
    assert copy.overlapped_seconds == pytest.approx(overlapped * 1e-6)
    assert copy.overlapped == work.overlap.copies == pytest.approx(overlapped / 10)


def test_time_counts_once_where_two_kernels_run_during_a_copy() -> None:
    work = gpu_work([_kernel("a", 0, 10, 1), _kernel("b", 0, 10, 2), _copy("DtoH", 5, 10, 3)])
    assert work.overlap.copy_overlapped_seconds == pytest.approx(5e-6)


def test_kinds_of_copies_are_apart() -> None:
    events = [
        _kernel("a", 0, 10, 1),
        _copy("HtoD", 0, 10, 2, bytes=100),
        _copy("HtoD", 10, 10, 2, bytes=100),
        _copy("DtoH", 20, 5, 3, bytes=8),
    ]
    into, out = gpu_work(events).copies
    assert (into.calls, into.bytes, into.overlapped) == (2, 200, pytest.approx(0.5))
    assert (out.calls, out.bytes, out.overlapped) == (1, 8, 0.0)


def test_the_time_of_several_streams() -> None:
    events = [
        _kernel("a", 0, 10, 1),
        _kernel("b", 6, 10, 2),
        _kernel("c", 8, 1, 3),
        _copy("HtoD", 30, 10, 4),
        _event("gpu_memset", "Memset (Device)", 50, 10, 1),
    ]
    overlap = gpu_work(events).overlap
    assert overlap.span_seconds == pytest.approx(60e-6)
    assert overlap.busy_seconds == pytest.approx((16 + 10 + 10) * 1e-6)
    assert overlap.busy == pytest.approx(36 / 60)
    assert overlap.kernel_seconds == pytest.approx(16e-6)
    assert overlap.two_kernels_seconds == pytest.approx(4e-6)
    assert overlap.kernels == pytest.approx(4 / 16)


def test_gpus_are_added() -> None:
    events = [_kernel("a", 0, 10), _kernel("a", 100, 10, device=1), _kernel("a", 120, 10, device=1)]
    overlap = gpu_work(events).overlap
    assert overlap.span_seconds == pytest.approx((10 + 30) * 1e-6)
    assert overlap.busy_seconds == pytest.approx(30e-6)
    assert overlap.two_kernels_seconds == 0


def test_other_events_do_not_count() -> None:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1}
    events = [
        launch,
        launch | {"cat": "cuda_driver", "name": "cuLaunchKernelEx"},
        launch | {"name": "cudaStreamSynchronize"},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 0, "dur": 9},
    ]
    work = gpu_work(events)
    assert work.kernels == [] and work.copies == []
    assert work.launched == 2
    assert work.overlap.busy == work.overlap.copies == work.overlap.kernels == 0.0


def test_intervals() -> None:
    assert merged([(5, 6), (0, 2), (1, 1.5), (2, 3)]) == [(0, 3), (5, 6)]
    assert common([(0, 10)], [(2, 3), (5, 12)]) == 6
    assert at_least(1, [[(0, 1)], [(1, 2)]]) == 2
    assert at_least(2, [[(0, 1)], [(1, 2)]]) == 0
    assert at_least(3, [[(0, 9)], [(1, 5)], [(4, 8)]]) == 1


def test_names_in_tables() -> None:
    assert short_name("void (anonymous namespace)::f<int>(int*, long)") == "f<int>"
    assert short_name("void f(void (*)(int), int)") == "f"
    long = short_name("first<" + "long, " * 40 + "Last>")
    assert long.startswith("first<long, ") and long.endswith("long, Last>") and len(long) <= 80


def test_tables_of_a_gpu() -> None:
    kernel = "void cuda_ops::flat_kernel<4, float, (anonymous namespace)::Silu<float> >(float*)"
    traced = Trace(None)
    traced._fill(
        [
            _kernel(kernel, 0, 30, **_shape(4, 32)),
            _kernel(kernel, 40, 20, **_shape(8, 32)),
            _kernel("void other(int)", 60, 10),
            _copy("HtoD (Pinned -> Device)", 20, 20, 8, bytes=2 << 20),
        ],
        [],
    )
    assert traced.why_no_gpu == ""
    text = traced.table(top=1)
    (row,) = (line for line in text.splitlines() if "Silu<float>" in line)
    cells = [cell.strip() for cell in row.strip("\u2502").split("\u2502")]
    assert cells == [
        "cuda_ops::flat_kernel<4, float, Silu<float> >", "2", "50.0 us", "25.0 us", "83.3%",
        "4x1x1 +1", "128x2x1", "32", "1.00 KiB", "50%",
    ]  # fmt: skip
    assert "Kernels not listed: 1, which took 10.0 us." in text
    (row,) = (line for line in text.splitlines() if "HtoD" in line)
    cells = [cell.strip() for cell in row.strip("\u2502").split("\u2502")]
    assert cells == [
        "HtoD (Pinned -> Device)", "1", "2.00 MiB", "20.0 us", "104.9 GB/s", "50.0%",
    ]  # fmt: skip
    assert (
        "The GPU was busy for 100.0% of 70.0 us; kernels ran during 50.0% of the time of copies."
        in text
    )


def test_kernels_that_were_launched_and_not_recorded_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1}
    traced = Trace(None)
    traced._fill([launch], [])
    assert "No GPU was traced: of 1 launches of kernels none was recorded" in traced.table()
    traced._fill([], [])
    assert "No GPU was traced: no kernel was launched." in traced.table()
