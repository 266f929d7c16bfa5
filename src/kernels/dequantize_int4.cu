// Packed integers of four bits become numbers: bound by memory, of which the result is nearly all.
#include "layout.h"
#include "quantize/dequantize.h"
#include "rows/rows.cuh"

using namespace cuda_ops;

namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 4;  // a thread's, before it needs the first of them

// Bytes of q that a thread reads at once.
template <int kCount>
using Codes =
    std::conditional_t<kCount == 4, uint32_t, std::conditional_t<kCount == 2, uint16_t, uint8_t>>;

// The integers of kCount bytes as numbers; `at` is where the scale of each is.
template <class T, int kCount, class At>
__device__ void dequantize(Codes<kCount> codes, const DequantizeInt4& p, At at,
                           compute_t<T> (&values)[2 * kCount]) {
  const auto* scales = static_cast<const T*>(p.scale);
  const auto* zeros = static_cast<const T*>(p.zero_point);
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i) {
    const auto byte = uint8_t(codes >> (8 * (i / 2)));
    const auto from = at(i);
    compute_t<T> value;
    if (zeros == nullptr) {
      value = compute_t<T>(int4_at(byte, i % 2));
    } else {
      value = compute_t<T>(uint4_at(byte, i % 2)) - to_compute(zeros[from]);
    }
    values[i] = value * to_compute(scales[from]);
  }
}

// Each pack of bytes becomes 16 bytes of the result, all from one block; `packs` of them share a
// scale.
template <class T, class Index>
__global__ void __launch_bounds__(kThreads)
    dequantize_packs(const __grid_constant__ DequantizeInt4 p, const Index packs) {
  constexpr int kPack = 16 / int(sizeof(T)), kCount = kPack / 2;
  const int64_t count = p.bytes / kCount;
  const int64_t first = int64_t(blockIdx.x) * kThreads * kLoads + threadIdx.x;
  Codes<kCount> codes[kLoads];
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    const int64_t at = first + u * kThreads;
    if (at < count) codes[u] = reinterpret_cast<const Codes<kCount>*>(p.q)[at];
  }
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    const int64_t at = first + u * kThreads;
    if (at >= count) break;
    const Index block = Index(at) / packs;
    compute_t<T> values[kPack];
    dequantize<T, kCount>(codes[u], p, [&](int) { return block; }, values);
    store_pack<T, kPack>(p.out, at, values);
  }
}

// Bytes whose two numbers may belong to different blocks.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_bytes(const __grid_constant__ DequantizeInt4 p) {
  const int64_t at = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= p.bytes) return;
  compute_t<T> values[2];
  dequantize<T, 1>(p.q[at], p, [&](int i) { return (2 * at + i) / p.block; }, values);
#pragma unroll
  for (int i = 0; i < 2; ++i) static_cast<T*>(p.out)[2 * at + i] = from_compute<T>(values[i]);
}

}  // namespace

cudaError_t dequantize_int4_launch(const DequantizeInt4& p, cudaStream_t stream) {
  if (p.bytes == 0) return cudaSuccess;
  return visit_floating(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kPack = 16 / int(sizeof(T));
    const auto blocks = [&](int64_t a_block) {
      return unsigned((p.bytes + a_block - 1) / a_block);
    };
    if (p.block % kPack != 0 || !is_aligned(p.q, kPack / 2)) {
      dequantize_bytes<T><<<blocks(kThreads), kThreads, 0, stream>>>(p);
    } else if (p.bytes < int64_t(1) << 32) {
      dequantize_packs<T, uint32_t><<<blocks(kThreads * kLoads * kPack / 2), kThreads, 0, stream>>>(
          p, uint32_t(p.block / kPack));
    } else {
      dequantize_packs<T, uint64_t><<<blocks(kThreads * kLoads * kPack / 2), kThreads, 0, stream>>>(
          p, uint64_t(p.block / kPack));
    }
    return cudaGetLastError();
  });
}
