// Rows sorted with their indices. The floor is to read a key and to write it with
// its 8-byte index, 16 bytes for float32, which an H200 does in one cycle of one
// SM; so instructions decide, and what to do depends on the length of the row:
//
//   up to 1024    a warp sorts a row or several in registers (sort_warp.cuh)
//   up to 32768   a block sorts runs of 1024 that way and merges them in shared memory
//   up to 131072  on Hopper, a radix sort in the shared memory of a cluster of
//                 blocks, as long as there are few such rows (sort_cluster.cuh)
//   longer        a radix sort of all rows together (sort_radix.cuh; for 8-byte keys
//                 sort_radix_wide.cuh)
#include "ptx/capability.h"
#include "sort/sort_cluster.cuh"
#include "sort/sort_network.cuh"
#include "sort/sort_radix_wide.cuh"
#include "sort/sort_warp.cuh"

using namespace cuda_ops;

namespace {

// --- rows of up to 32768: a block each --------------------------------------------

// Entries at, at + 1, ... kItems of the merger of two sorted lists that follow
// each other: a of them and then b. All keys of the first come before equal ones
// of the second, which is what makes it stable.
template <int kItems, class U>
__device__ void merge(uint32_t (&merged)[kItems], const Entry<U>* list, const U* keys, int begin,
                      int a, int b, int at) {
  // A whole entry is smaller where the key is, or the key is equal and the index.
  const auto load = [&](int i, Entry<U>& entry) {
    entry = list[padded<U>(i)];
    if constexpr (kExact<U>) {
      return entry;
    } else {
      return keys[entry];
    }
  };
  Entry<U> entry_a, entry_b;
  int low = at > b ? at - b : 0, high = at < a ? at : a;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (load(begin + middle, entry_a) <= load(begin + a + at - 1 - middle, entry_b)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  int i = begin + low, j = begin + a + at - low;
  const int end_i = begin + a, end_j = begin + a + b, last = end_j - 1;
  auto key_a = load(i < last ? i : last, entry_a);
  auto key_b = load(j < last ? j : last, entry_b);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const bool take_a = j >= end_j || (i < end_i && key_a <= key_b);
    merged[k] = take_a ? entry_a : entry_b;
    const int next = take_a ? ++i : ++j;
    Entry<U> entry;
    const auto key = load(next < last ? next : last, entry);
    key_a = take_a ? key : key_a;
    entry_a = take_a ? entry : entry_a;
    key_b = take_a ? key_b : key;
    entry_b = take_a ? entry_b : entry;
  }
}

template <class U, int kItems>
__global__ void __launch_bounds__(kSortThreads)
    block_sort_kernel(const __grid_constant__ SortRows p, const Order<U> order) {
  constexpr int R = kSortRun / 32;
  extern __shared__ uint4 shared[];
  const int n = int(p.n), runs = (n + kSortRun - 1) / kSortRun;
  const int thread = threadIdx.x, lane = thread % 32;
  U* keys = reinterpret_cast<U*>(shared);
  auto* list = reinterpret_cast<Entry<U>*>(keys + (kExact<U> ? 0 : runs * kSortRun));
  const U* row = static_cast<const U*>(p.rows.data) + p.rows.offset_at(blockIdx.x);

  for (int run = thread / 32; run < runs; run += blockDim.x / 32) {
    const int first = run * kSortRun, length = n - first < kSortRun ? n - first : kSortRun;
    U loaded[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int i = r * 32 + lane;
      loaded[r] = i < length ? row[first + i] : U(0);
    }
    uint32_t entries[R];
    if constexpr (kExact<U>) {  // keys become words at once, which lanes exchange in the list
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int i = r * 32 + lane;
        entries[r] = i < length ? exact_word(order.key(loaded[r]), i) : ~0u;
      }
      sort_network<R, 32>(entries, list + padded<U>(first));
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r) keys[first + r * 32 + lane] = order.key(loaded[r]);
      __syncwarp();
      sort_run<R, 32, false>(entries, keys + first, list + padded<U>(first), nullptr, length);
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < R; ++r) entries[r] += first;
    store_entries<U, R>(list, first + lane * R, entries);
  }
  __syncthreads();

  for (int width = kSortRun; width < n; width *= 2) {
    const int at = thread * kItems, begin = at / (2 * width) * (2 * width);
    uint32_t merged[kItems];
    if (at < n) {
      const int a = n - begin < width ? n - begin : width;
      const int b = n - begin - a < width ? n - begin - a : width;
      merge<kItems, U>(merged, list, keys, begin, a, b, at - begin);
    }
    __syncthreads();
    if (at < n) store_entries<U, kItems>(list, at, merged);
    __syncthreads();
  }

  const int64_t out = int64_t(blockIdx.x) * n;
#pragma unroll 4
  for (int i = thread; i < n; i += blockDim.x) {
    const Entry<U> entry = list[padded<U>(i)];
    const int index = entry & 0xffff;
    static_cast<U*>(p.values)[out + i] = value_of(key_of<U>(entry, keys), order, row, index);
    p.indices[out + i] = index;
  }
}

// --- launchers --------------------------------------------------------------------

template <class U>
cudaError_t launch_blocks(const SortRows& p, const SortConfig& config, cudaStream_t stream) {
  const auto kernel = config.items == 32 ? block_sort_kernel<U, 32> : block_sort_kernel<U, 64>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.shared_bytes));
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(config.blocks), config.threads, config.shared_bytes, stream>>>(
      p, order_of<U>(p.rows.dtype, p.descending));
  return cudaGetLastError();
}

template <class U>
cudaError_t launch_sort(const SortRows& p, const SortConfig& config, cudaStream_t stream) {
  switch (config.path) {
    case SortConfig::kNothing: return cudaSuccess;
    case SortConfig::kWarp: return launch_warps<U>(p, config, p.n, stream);
    case SortConfig::kBlock: return launch_blocks<U>(p, config, stream);
    case SortConfig::kCluster: return launch_cluster<U>(p, config, stream);
    case SortConfig::kRadix:
      if constexpr (sizeof(U) == 8) {
        return launch_radix_wide<U>(p, config, stream);
      } else {
        return launch_radix<U>(p, config, stream);
      }
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

// ----------------------------------------------------------------------------------

// Chooses how to sort on the current device.
cudaError_t bitonic_sort_plan(const SortRows& p, SortConfig& config) {
  const DeviceInfo device = current_device();
  SortClusters clusters;
  int current = 0;
  const cudaError_t error = cudaGetDevice(&current);
  if (p.n > kClusterShortest &&
      p.n <= kClusterElements) {  // no cluster is chosen for other lengths
    clusters.possible = p.built_for_hopper && device.capability == 90;
    clusters.wide = clusters.possible ? wide_clusters(current) : 0;
  }
  config = sort_config(p.rows.numel, p.n, size_of(p.rows.dtype), device, clusters);
  return error;
}

cudaError_t bitonic_sort_launch(const SortRows& p, const SortConfig& config, cudaStream_t stream) {
  switch (size_of(p.rows.dtype)) {
    case 1: return launch_sort<uint8_t>(p, config, stream);
    case 2: return launch_sort<uint16_t>(p, config, stream);
    case 4: return launch_sort<uint32_t>(p, config, stream);
    case 8: return launch_sort<uint64_t>(p, config, stream);
    default: return cudaErrorInvalidValue;
  }
}
