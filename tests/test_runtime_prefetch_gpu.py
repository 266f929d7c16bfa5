"""Tests of prefetch and to_host on a GPU, whose streams are kept busy."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import needs_gpu
from test_runtime_prefetch import batches

from cuda_ops.runtime import prefetch, to_host
from cuda_ops.runtime.overlap import turns
from cuda_ops.runtime.overlap.lanes import CudaLane
from cuda_ops.runtime.overlap.prefetching import _Sent


def on_gpu(count: int, size: int) -> Iterator[torch.Tensor]:
    """Makes batches in memory of the thread's own stream."""
    for k in range(count):
        yield torch.full((size,), float(k), device="cuda")


def late_loop(loader: Any, size: int, view: bool = False, stalled: bool = True) -> list[float]:
    """Returns means of batches that a stalled stream gets to after the host has gone far ahead."""
    from cuda_ops.testing.stall import stall

    loop, found = torch.cuda.Stream(), []
    with torch.cuda.stream(loop):
        torch.zeros(size, device="cuda").double().mean()  # loads kernels, which takes long
        torch.cuda.synchronize()
        for x in prefetch(loader, "cuda", 2):
            if view:
                held = x[: size // 2]
                del x
            if stalled:
                stall(0.03)
            found.append((held if view else x).double().mean())
            held = x = None
            time.sleep(0.005)  # the thread goes on before the next batch ends
        return torch.stack(found).tolist()


@needs_gpu
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("made", [batches, on_gpu])
def test_batches_are_right_behind_a_stalled_stream(made: Any, view: bool) -> None:
    assert late_loop(made(12, 1 << 20), 1 << 20, view) == [float(k) for k in range(12)]


@needs_gpu
@pytest.mark.parametrize("taken_out", ["wait_for_copies", "wait_event", "follow", "record_stream"])
def test_without_one_of_its_rules_batches_are_wrong(
    taken_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda_ops.testing.stall import stall

    send = CudaLane.send

    def late(self: Any, batch: Any) -> Any:
        with torch.cuda.stream(self._stream):
            stall(0.1 if taken_out == "wait_event" else 0.02)
        return send(self, batch)

    if taken_out == "wait_for_copies":
        # The copies come late, and the pinned memory is written again before they run.
        monkeypatch.setattr(CudaLane, "send", late)
        monkeypatch.setattr(_Sent, "wait_for_copies", lambda self: None)
    elif taken_out == "wait_event":
        monkeypatch.setattr(CudaLane, "send", late)
        monkeypatch.setattr(
            CudaLane, "receive", lambda self, ready, shared=None: torch.cuda.current_stream()
        )
    elif taken_out == "follow":
        monkeypatch.setattr(CudaLane, "follow", lambda self, reader: None)
    else:
        monkeypatch.setattr(turns, "record_streams", lambda tree, stream: None)
    # Nothing else may hold the stream where it is to read too early.
    found = late_loop(
        (on_gpu if taken_out == "record_stream" else batches)(12, 1 << 20), 1 << 20,
        stalled=taken_out != "wait_event",
    )  # fmt: skip
    assert found != [float(k) for k in range(12)]


@needs_gpu
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("depth", [2, 3])
def test_no_more_memory_than_depth_batches_is_taken(depth: int, view: bool) -> None:
    from cuda_ops.testing.stall import stall

    size = 16 << 20
    gc.collect()  # what other tests left would be freed meanwhile
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    places = set()
    for x in prefetch(batches(12, size // 4), "cuda", depth):
        if view:
            x = x.view(2, -1)
        stall(0.005)
        x.add_(1)
        places.add(x.data_ptr())
    del x
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= depth * size
    assert torch.cuda.memory_allocated() == before
    assert len(places) <= depth  # nor does any memory wait for an event to be used again


@needs_gpu
def test_the_host_does_not_wait_for_the_loop() -> None:
    from cuda_ops.testing.stall import stall

    def runs_ahead() -> bool:
        """Whether the loop gets a fourth batch while the GPU has not done with the first."""
        first = torch.cuda.Event()
        for k, x in enumerate(prefetch([torch.ones(1 << 10).pin_memory()] * 4, "cuda", 2)):
            if k == 3:
                return not first.query()
            stall(0.3)
            x.add_(1)
            if k == 0:
                first.record()
        raise AssertionError

    runs_ahead()  # loads kernels, and may wait for that
    torch.cuda.synchronize()
    assert runs_ahead()


@needs_gpu
def test_an_early_end_leaves_nothing_on_the_gpu() -> None:
    gc.collect()  # what other tests left would be freed meanwhile
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for x in prefetch(batches(50, 1 << 20), "cuda"):  # noqa: B007  # x is what is left when the loop ends early
        break
    del x
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@needs_gpu
def test_all_kinds_of_tensors_reach_the_gpu() -> None:
    cpu = [
        {"x": torch.randn(2, 3).t(), "pinned": torch.ones(3).pin_memory(), "n": 1},
        {"x": torch.zeros(0, 3), "pinned": torch.ones(3, device="cuda"), "n": 2},
        {"x": torch.eye(3).to_sparse(), "pinned": torch.tensor(True), "n": 3},
    ]
    for given, found in zip(cpu, prefetch(cpu, "cuda"), strict=True):
        assert found["n"] == given["n"]
        for key in ("x", "pinned"):
            assert found[key].is_cuda
            assert found[key].layout == given[key].layout
            assert torch.equal(found[key].cpu().to_dense(), given[key].cpu().to_dense())
    assert next(iter(prefetch(cpu, "cuda")))["x"].stride() == (1, 3)


@needs_gpu
def test_a_host_copy_waits_for_itself_alone() -> None:
    from cuda_ops.testing.stall import stall

    x = torch.full((1 << 20,), 1.0, device="cuda")
    to_host(x * 3).result()  # loads kernels and pins memory
    handle = to_host(x)
    x.add_(1)  # does not show
    stalled = torch.cuda.Stream()
    stalled.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stalled):
        stall(0.5)
        late = to_host(x * 3)
    assert not late.done()
    assert handle.result()[0] == 1
    assert not late.done()
    assert late.result()[-1] == 6
    assert handle.result().is_pinned()


@needs_gpu
def test_a_host_copy_in_a_capture_is_refused() -> None:
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)  # torch warns of an empty graph
        with pytest.raises(RuntimeError, match="captured into a CUDA graph"):
            to_host(x)


@needs_gpu
def test_a_trace_shows_copies_beside_kernels() -> None:
    from cuda_ops.runtime import trace

    x = torch.randn(2048, 2048, device="cuda")

    def loop() -> None:
        for batch in prefetch([torch.zeros(8 << 20).pin_memory() for _ in range(8)], "cuda"):
            for _ in range(20):
                torch.mm(x, x)
            batch.add_(1)

    loop()
    with trace() as traced:
        loop()
    assert sum(row.calls for row in traced.copies if row.kind.startswith("HtoD")) == 8
    assert traced.overlap.copies > 0.5
