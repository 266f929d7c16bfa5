"""The workspace of a binding: parts that are aligned, apart, and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ScratchOp, needs_gpu, needs_nvcc

from cuda_ops.registry import registry
from cuda_ops.runtime import assert_no_growth

BINDING = """
#include "binding.h"
#include "workspace.h"
using namespace cuda_ops;
cudaError_t twice_launch(const float* x, float* out, float* first, float* second, int64_t n,
                         cudaStream_t stream);
namespace {
// Takes a parts of 8 bytes and then b parts of 1 byte.
Tensor cut(const Tensor& x, int64_t bytes, int64_t a, int64_t b) {
  Workspace made(bytes, x);
  Workspace work = std::move(made);
  const auto* first = work.take<double>(a);
  const auto* second = work.take<int8_t>(b);
  const int64_t found[6] = {
      int64_t(reinterpret_cast<uintptr_t>(first) % 256),
      int64_t(reinterpret_cast<uintptr_t>(second) % 256),
      first && second ? second - reinterpret_cast<const int8_t*>(first) : -1,
      work.left(), work.bytes(), work.data() == nullptr};
  Tensor out = empty({6}, DType::kInt64, x);
  for (int i = 0; i < 6; ++i) static_cast<int64_t*>(out.mutable_data_ptr())[i] = found[i];
  return out;
}
Tensor twice_cpu(const Tensor& x) {
  return elementwise_cpu([](double v) { return 2 * v; }, x);
}
Tensor twice_cuda(const Tensor& x) {
  const Tensor dense = contiguous(x);
  Tensor out = empty(shape_of(x), x);
  const int64_t n = x.numel();
  launch(x, [&](cudaStream_t stream) {
    Workspace work(2 * Workspace::bytes_of<float>(n), x);
    float* const first = work.take<float>(n);
    float* const second = work.take<float>(n);
    return twice_launch(static_cast<const float*>(dense.const_data_ptr()),
                        static_cast<float*>(out.mutable_data_ptr()), first, second, n, stream);
  });
  return out;
}
constexpr DType kFloat[] = {DType::kFloat32};
}
CUDA_OPS(library) {
  library.op("@_cut(Tensor given, int bytes, int a, int b) -> Tensor", "[n]->[6]")
      .dtypes(kInt64).cpu<cut>();
  library.op("@(Tensor x) -> Tensor", "[n]->[n]").dtypes(kFloat)
      .cpu<twice_cpu>().cuda<twice_cuda>();
}
"""
KERNEL = """
#include <cstdint>
#include <cuda_runtime.h>
namespace {
__global__ void scale(const float* x, float* out, int64_t n, float factor) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] * factor;
}
}
cudaError_t twice_launch(const float* x, float* out, float* first, float* second, int64_t n,
                         cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const unsigned blocks = unsigned((n + 255) / 256);
  scale<<<blocks, 256, 0, stream>>>(x, first, n, 4);
  scale<<<blocks, 256, 0, stream>>>(first, second, n, 0.25f);
  scale<<<blocks, 256, 0, stream>>>(second, out, n, 2);
  return cudaGetLastError();
}
"""


@pytest.fixture(scope="module")
def pair(scratch_root: Path) -> Iterator[str]:
    scratch = ScratchOp("scratch_workspace", scratch_root)
    binding = BINDING.replace("@", scratch.name)
    with scratch.built(binding, kernel=KERNEL, compare=False):
        yield scratch.name


def cut(pair: str, size: int, a: int, b: int) -> list[int]:
    found: list[int] = registry().public(f"{pair}_cut")(torch.zeros(1).long(), size, a, b).tolist()
    return found


def test_parts_are_aligned_and_apart(pair: str) -> None:
    assert cut(pair, 1024, 1, 1) == [0, 0, 256, 512, 1024, 0]
    assert cut(pair, 1024, 32, 1)[:3] == [0, 0, 256]
    assert cut(pair, 1024, 33, 1)[:3] == [0, 0, 512]


def test_the_last_part_may_end_at_the_last_byte(pair: str) -> None:
    assert cut(pair, 257, 32, 1) == [0, 0, 256, 0, 257, 0]
    assert cut(pair, 8, 1, 0)[3] == 0


def test_no_bytes_take_no_memory_and_no_elements_are_null(pair: str) -> None:
    assert cut(pair, 0, 0, 0) == [0, 0, -1, 0, 0, 1]
    assert cut(pair, 512, 0, 1)[2:] == [-1, 256, 512, 0]


@pytest.mark.parametrize(
    ("size", "a", "b", "text"),
    [
        (7, 1, 0, "take.. of 1 elements of 8 bytes, 7 of 7 bytes are left"),
        (256, 1, 1, "take.. of 1 elements of 1 bytes, 0 of 256 bytes are left"),
        (256, -1, 0, "take.. of -1 elements of 8 bytes"),
        (256, 2**61, 0, "elements of 8 bytes, 256 of 256 bytes are left"),
        (-1, 0, 0, "Workspace: expected bytes from 0 on, got -1"),
    ],
)
def test_more_than_there_is_is_refused(pair: str, size: int, a: int, b: int, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        cut(pair, size, a, b)


@needs_gpu
@needs_nvcc
def test_a_workspace_is_right_on_several_streams_and_in_a_graph(pair: str) -> None:
    twice = registry().public(pair)
    x = torch.randn(1 << 20, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            streams[i % 4].wait_stream(torch.cuda.default_stream())
            results.append(twice(x + i))
    torch.cuda.synchronize()
    assert all(torch.equal(result, (x + i) * 2) for i, result in enumerate(results))
    graph, given = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        replayed = twice(given)
    others = [torch.zeros(1 << 20, device="cuda") for _ in range(8)]
    given.copy_(x + 1)
    graph.replay()
    assert torch.equal(replayed, (x + 1) * 2) and not any(o.any() for o in others)


@needs_gpu
@needs_nvcc
def test_a_workspace_is_freed_when_the_call_returns(pair: str) -> None:
    twice, x = registry().public(pair), torch.randn(1 << 20, device="cuda")
    with assert_no_growth(warm=lambda: twice(x)):
        for _ in range(3):
            twice(x)
