// Long rows: CUB's radix sort, fed with keys in the order of sort.h and 32-bit
// indices, so that a pass moves 4 bytes less per index than torch's, and 8- and
// 16-bit keys take one and two passes. Its headers take most of the build.
#pragma once

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_segmented_radix_sort.cuh>

#include "sort.h"

namespace cuda_ops {

constexpr int kRadixThreads = 256, kRadixItems = 8;

// Rows first, first + 1, ...: the keys, each element's place in its row, and
// where rows begin, the last one's end included.
template <class U>
__global__ void __launch_bounds__(kRadixThreads)
    radix_keys_kernel(const __grid_constant__ SortRows p, const Order<U> order, int64_t first,
                      int64_t count, U* keys, uint32_t* indices, int* starts) {
  const int64_t base = int64_t(blockIdx.x) * kRadixThreads * kRadixItems + threadIdx.x;
  const U* data = static_cast<const U*>(p.rows.data);
  U loaded[kRadixItems];
#pragma unroll
  for (int k = 0; k < kRadixItems; ++k) {
    const int64_t i = base + k * kRadixThreads;
    const int64_t row = count > p.n ? i / p.n : 0;
    loaded[k] = i < count ? data[p.rows.offset_at(first + row) + i - row * p.n] : U(0);
  }
#pragma unroll
  for (int k = 0; k < kRadixItems; ++k) {
    const int64_t i = base + k * kRadixThreads;
    if (i >= count) break;
    const int64_t row = count > p.n ? i / p.n : 0;
    keys[i] = order.key(loaded[k]);
    indices[i] = uint32_t(i - row * p.n);
    if (starts != nullptr && i == row * p.n) starts[row] = int(i);
    if (starts != nullptr && i == count - 1) starts[row + 1] = int(count);
  }
}

template <class U>
__global__ void __launch_bounds__(kRadixThreads)
    radix_values_kernel(const __grid_constant__ SortRows p, const Order<U> order, int64_t first,
                        int64_t count, const U* keys, const uint32_t* indices) {
  const int64_t base = int64_t(blockIdx.x) * kRadixThreads * kRadixItems + threadIdx.x;
  const U* data = static_cast<const U*>(p.rows.data);
#pragma unroll
  for (int k = 0; k < kRadixItems; ++k) {
    const int64_t i = base + k * kRadixThreads;
    if (i >= count) break;
    const U key = keys[i];
    const uint32_t index = indices[i];
    U value = order.bits(key);
    if (!order.is_unique(key)) {
      value = data[p.rows.offset_at(first + (count > p.n ? i / p.n : 0)) + index];
    }
    static_cast<U*>(p.values)[first * p.n + i] = value;
    p.indices[first * p.n + i] = index;
  }
}

// Each sort goes back and forth between two buffers. One of the keys' is the
// output of values, one of the indices' that of indices; the workspace holds the
// other ones, where rows begin, and what CUB needs.
template <class U>
struct RadixBuffers {
  U *keys = nullptr, *other_keys = nullptr;
  uint32_t *indices = nullptr, *other_indices = nullptr;
  int* starts = nullptr;
  void* temporary = nullptr;
  size_t temporary_bytes = 0;
  int64_t bytes = 0;
};

template <class U>
cudaError_t radix_sort(const SortConfig& config, RadixBuffers<U>& b, int64_t n, int64_t rows,
                       bool& swapped, cudaStream_t stream) {
  cub::DoubleBuffer<U> keys(b.keys, b.other_keys);
  cub::DoubleBuffer<uint32_t> indices(b.indices, b.other_indices);
  const cudaError_t error =
      config.path == SortConfig::kSegments
          ? cub::DeviceSegmentedRadixSort::SortPairs(b.temporary, b.temporary_bytes, keys, indices,
                                                     int(rows * n), int(rows), b.starts,
                                                     b.starts + 1, 0, 8 * sizeof(U), stream)
          : cub::DeviceRadixSort::SortPairs(b.temporary, b.temporary_bytes, keys, indices,
                                            uint32_t(n), 0, 8 * sizeof(U), stream);
  swapped = keys.selector != 0;
  return error;
}

template <class U>
cudaError_t radix_buffers(const SortRows& p, const SortConfig& config, RadixBuffers<U>& b) {
  const int64_t count = config.rows_at_once * p.n;
  bool swapped = false;
  const cudaError_t error =
      radix_sort<U>(config, b, p.n, config.rows_at_once, swapped, nullptr);
  char* at = static_cast<char*>(p.workspace);
  const auto take = [&](int64_t bytes) {
    char* part = at + b.bytes;
    b.bytes += (bytes + 255) / 256 * 256;
    return part;
  };
  b.other_keys = reinterpret_cast<U*>(take(count * sizeof(U)));
  b.other_indices = reinterpret_cast<uint32_t*>(take(count * 4));
  b.starts = reinterpret_cast<int*>(take((config.rows_at_once + 1) * 4));
  b.temporary = take(int64_t(b.temporary_bytes));
  return error;
}

template <class U>
cudaError_t launch_radix(const SortRows& p, const SortConfig& config, cudaStream_t stream) {
  const Order<U> order = order_of<U>(p.rows.dtype, p.descending);
  RadixBuffers<U> b;
  cudaError_t error = radix_buffers(p, config, b);
  U* const spare_keys = b.other_keys;
  uint32_t* const spare_indices = b.other_indices;
  for (int64_t first = 0; first < p.rows.numel && error == cudaSuccess;
       first += config.rows_at_once) {
    const int64_t left = p.rows.numel - first;
    const int64_t rows = left < config.rows_at_once ? left : config.rows_at_once;
    const int64_t count = rows * p.n;
    const unsigned blocks = unsigned((count + kRadixThreads * kRadixItems - 1) /
                                     (kRadixThreads * kRadixItems));
    b.keys = static_cast<U*>(p.values) + first * p.n;
    auto* widened = reinterpret_cast<uint32_t*>(p.indices + first * p.n);
    // 8-bit keys take one pass, wider ones an even number: sorted indices had better
    // be in the workspace, since they are not widened in place.
    b.indices = sizeof(U) == 1 ? widened : spare_indices;
    b.other_indices = sizeof(U) == 1 ? spare_indices : widened;
    radix_keys_kernel<U><<<blocks, kRadixThreads, 0, stream>>>(
        p, order, first, count, b.keys, b.indices,
        config.path == SortConfig::kSegments ? b.starts : nullptr);
    bool swapped = false;
    error = radix_sort<U>(config, b, p.n, rows, swapped, stream);
    if (error != cudaSuccess) break;
    uint32_t* sorted = swapped ? b.other_indices : b.indices;
    if (sorted == widened) {  // CUB took another number of passes, as it does for few elements
      error = cudaMemcpyAsync(spare_indices, sorted, count * 4, cudaMemcpyDeviceToDevice, stream);
      sorted = spare_indices;
    }
    radix_values_kernel<U><<<blocks, kRadixThreads, 0, stream>>>(
        p, order, first, count, swapped ? spare_keys : b.keys, sorted);
    if (error == cudaSuccess) error = cudaGetLastError();
  }
  return error;
}

}  // namespace cuda_ops
