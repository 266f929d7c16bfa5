// Elementwise over lists on the device: bound by memory, and with small tensors by launches. So one
// launch has a table of many tensors among its parameters, and each block finds its own there.
#pragma once

#include "dtype.cuh"
#include "foreach/foreach.h"

namespace cuda_ops {

template <class T, int kInputs, class F>
__global__ void __launch_bounds__(kForeachThreads)
    foreach_kernel(const __grid_constant__ FlatTable<kInputs> table, const F f) {
  using C = compute_t<T>;
  constexpr int kPack = 16 / int(sizeof(T));
  constexpr int64_t kChunk = foreach_chunk(sizeof(T));
  const int block = int(blockIdx.x), thread = int(threadIdx.x);
  int at = 0, end = table.count;  // the last tensor that begins with this block or before
  while (end - at > 1) {
    const int middle = (at + end) / 2;
    (table.first[middle] <= block ? at : end) = middle;
  }
  const int64_t begin = (block - table.first[at]) * kChunk, left = table.numel[at] - begin;
  const int count = int(left < kChunk ? left : kChunk);
  const T* in[kInputs];
  T* const out = static_cast<T*>(table.out[at]) + begin;
  auto bits = reinterpret_cast<uintptr_t>(out);
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    in[k] = static_cast<const T*>(table.in[k][at]) + begin;
    bits |= reinterpret_cast<uintptr_t>(in[k]);
  }
  const auto apply = [&](const T(&values)[kInputs]) {
    if constexpr (kInputs == 1) {
      return from_compute<T>(f(to_compute(values[0])));
    } else {
      static_assert(kInputs == 2, "one input or two");
      return from_compute<T>(f(to_compute(values[0]), to_compute(values[1])));
    }
  };

  using Vector = Elements<T, kPack>;
  const int vectors = bits % 16 == 0 ? count / kPack : 0;
  Vector loaded[kForeachVectors][kInputs];
#pragma unroll
  for (int u = 0; u < kForeachVectors; ++u) {
    const int i = u * kForeachThreads + thread;
    if (i >= vectors) break;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) loaded[u][k] = reinterpret_cast<const Vector*>(in[k])[i];
  }
#pragma unroll
  for (int u = 0; u < kForeachVectors; ++u) {
    const int i = u * kForeachThreads + thread;
    if (i >= vectors) break;
    Vector results;
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      T values[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) values[k] = loaded[u][k].values[v];
      results.values[v] = apply(values);
    }
    reinterpret_cast<Vector*>(out)[i] = results;
  }
  // What is no whole vector: the end of a tensor, or all of one at another address.
#pragma unroll 4
  for (int i = vectors * kPack + thread; i < count; i += kForeachThreads) {
    T values[kInputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) values[k] = in[k][i];
    out[i] = apply(values);
  }
}

// out[i] = f(in[0][i], ...) for `count` tensors of `dtype`, none of them empty. `f` computes in
// double for float64 and in float for the others.
template <int kInputs, class F>
cudaError_t foreach_cuda(const Flat<kInputs>* flats, int64_t count, DType dtype,
                         cudaStream_t stream, const F& f) {
  return visit_floating(dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t i = 0; i < count;) {
      FlatTable<kInputs> table;
      while (i < count && table.add(flats[i], foreach_chunk(sizeof(T)))) ++i;
      foreach_kernel<T, kInputs><<<unsigned(table.blocks), kForeachThreads, 0, stream>>>(table, f);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

}  // namespace cuda_ops
