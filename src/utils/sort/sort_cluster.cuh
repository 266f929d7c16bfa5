// Rows that fit the shared memory of a cluster, for GPUs of compute capability 9.0: a radix
// sort of 8 bits a pass in one launch. A row is read once and written once; between two
// passes its keys and indices lie in the blocks' shared memory, each block having its
// share of the row.
//
// In a pass a block sorts its share by the digit and shows the others how many keys of
// each it has; then it knows where its own belong, and writes them there. They are sorted first,
// since the network between SMs wants whole 32 bytes, as memory does. 65536 keys of 4 bytes take
// 16 blocks 31 us, four passes (H200, 2026-11-21).
#pragma once

#include <atomic>

#include "ptx/mbarrier.cuh"
#include "sort/sort_radix.cuh"

namespace cuda_ops {

// Side by side and without a gap: one store to another block.
template <class U>
struct alignas(sizeof(U) == 8 ? 16 : 8) Placed {
  using Word = std::conditional_t<sizeof(U) == 8, uint64_t, uint32_t>;
  Word key, index;
};

// Lies in front of the block's share of the row.
struct alignas(16) ClusterShared {
  uint32_t counts[kWideClusterBlocks][256];   // of a block's keys with a digit; bytes_differ << 16
  uint16_t ranks[kClusterThreads / 32][256];  // of the next key of a warp with a digit
  uint32_t places[256];  // of the block's first key with a digit, in the block; then in the row
  uint32_t sums[8];
  uint32_t bytes_differ;  // bit b: byte b of some key is not that of the row's first key
};

// Replaces each warp's number of keys with a digit by the sum over the warps before; returns the
// sum over all.
__device__ inline uint32_t scan_warps(uint16_t (*numbers)[256], int warps, int digit) {
  uint32_t sum = 0;
  for (int w = 0; w < warps; ++w) {
    const uint32_t of_warp = numbers[w][digit];
    numbers[w][digit] = uint16_t(sum);
    sum += of_warp;
  }
  return sum;
}

template <class U>
constexpr int64_t cluster_shared_bytes(const SortConfig& config) {
  return sizeof(ClusterShared) + int64_t(config.threads) * config.items * sizeof(Placed<U>);
}

template <class U, int kItems>
__global__ void __launch_bounds__(kClusterThreads)
    cluster_sort_kernel(const __grid_constant__ SortRows p, const Order<U> order,
                        const int blocks) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<ClusterShared*>(memory);
  auto* share = reinterpret_cast<Placed<U>*>(&shared + 1);
  const int threads = blockDim.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int rank = cluster_rank(), size = threads * kItems, begin = rank * size;
  const int left = int(p.n) - begin, count = left < 0 ? 0 : left < size ? left : size;
  const uint32_t inverse = 0xffffffffu / size + 1;  // exact: quotients of less than 2^17
  const int64_t number = blockIdx.x / blocks;
  const U* row = static_cast<const U*>(p.rows.data) + p.rows.offset_at(number);

  // In order of digits, each block beginning elsewhere, so that not all write to one block at a
  // time.
  const int start = begin / blocks / 32 * 32 + thread - threads;
  const auto next = [&](int i) { return i + threads < size ? i + threads : i + threads - size; };

  // A warp has neighbors, and its round r comes before round r + 1.
  const int first = warp * 32 * kItems + lane;
  U keys[kItems], differences = 0;
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    const int i = first + r * 32;
    keys[r] = i < count ? row[begin + i] : U(0);
  }
  if (thread == 0) shared.bytes_differ = 0;
  cluster_sync();  // all blocks run: their memory may be written
  const U reference = order.key(row[0]);
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    const bool in_row = first + r * 32 < count;
    // Behind the row's end is the highest key, which comes last in its block and stays there.
    keys[r] = in_row ? order.key(keys[r]) : U(~U(0));
    differences |= in_row ? keys[r] ^ reference : U(0);
    share[first + r * 32] = {keys[r], uint32_t(begin + first + r * 32)};
  }
  const uint32_t in_warp = __reduce_or_sync(~0u, nonzero_bytes(differences));
  if (lane == 0) atomicOr(&shared.bytes_differ, in_warp);

  uint32_t bytes = 0;  // to sort by: those that differ in the row, known after the first pass
  for (int byte = 0;;) {
    int shift = 8 * byte;
    const auto digit_of = [&](int r) { return uint32_t(keys[r] >> shift) & 255; };
    uint32_t ranks[kItems];
    rank_in_warp(ranks, shared.ranks[warp], digit_of);
    __syncthreads();

    uint32_t of_block = 0;
    if (thread < 256) {
      of_block = scan_warps(shared.ranks, threads / 32, thread);
      for (int b = 0; b < blocks; ++b) {
        *in_block(&shared.counts[rank][thread], b) = of_block | shared.bytes_differ << 16;
      }
    }
    const uint32_t in_share = sum_before<256>(of_block, shared.sums);
    if (thread < 256) shared.places[thread] = in_share;
    // Digits are taken from the keys again, and indices read this late: there are no
    // registers for them before.
    asm volatile("" : "+r"(shift));
    uint32_t indices[kItems];
#pragma unroll
    for (int r = 0; r < kItems; ++r) {
      indices[r] = uint32_t(share[first + r * 32].index);
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kItems; ++r) {
      const uint32_t digit = digit_of(r);
      const int place = shared.places[digit] + shared.ranks[warp][digit] + ranks[r];
      share[place] = {keys[r], indices[r]};
    }
    __syncthreads();
    int i = start;
#pragma unroll
    for (int r = 0; r < kItems; ++r) {
      i = next(i);
      const Placed<U> placed = share[i];
      keys[r] = U(placed.key);
      indices[r] = uint32_t(placed.index);
    }
    cluster_sync();  // all counts are there, and the shares may be overwritten

    if (byte == 0) {
      for (int b = 0; b < blocks; ++b) bytes |= shared.counts[b][0] >> 16;
    }
    uint32_t of_row = 0, in_blocks = 0;
    if (thread < 256) {
      for (int b = 0; b < blocks; ++b) {
        const uint32_t of_other = shared.counts[b][thread] & 0xffff;
        in_blocks += b < rank ? of_other : 0;
        of_row += of_other;
      }
    }
    const uint32_t in_row = sum_before<256>(of_row, shared.sums);
    if (thread < 256) shared.places[thread] = in_row + in_blocks - in_share;
    __syncthreads();

    const bool last = bytes >> byte <= 1;
    i = start;
#pragma unroll
    for (int r = 0; r < kItems; ++r) {
      i = next(i);
      if (i >= count) continue;
      const int place = shared.places[digit_of(r)] + i;
      if (last) {
        const int64_t out = number * p.n + place;
        static_cast<U*>(p.values)[out] = value_of(keys[r], order, row, indices[r]);
        p.indices[out] = indices[r];
      } else {
        const uint32_t block = __umulhi(place, inverse);
        in_block(share, block)[place - block * size] = {keys[r], indices[r]};
      }
    }
    if (last) return;
    cluster_sync();
    do {
      ++byte;
    } while (!(bytes >> byte & 1));
#pragma unroll
    for (int r = 0; r < kItems; ++r) keys[r] = U(share[first + r * 32].key);
  }
#endif
}

// Calls `body(kernel, launch configuration)`.
template <class U, class Body>
cudaError_t visit_cluster_kernel(const SortConfig& config, Body&& body) {
  auto kernel = cluster_sort_kernel<U, 8>;
  if constexpr (sizeof(U) < 8) {
    if (config.items == 16) kernel = cluster_sort_kernel<U, 16>;
  }
  const int64_t bytes = cluster_shared_bytes<U>(config);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (error == cudaSuccess && config.cluster > kClusterBlocks) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = unsigned(config.cluster);
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  attributes[1].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(config.blocks));
  launch.blockDim = dim3(unsigned(config.threads));
  launch.dynamicSmemBytes = size_t(bytes);
  launch.attrs = attributes;
  launch.numAttrs = 2;
  return body(kernel, launch);
}

template <class U>
cudaError_t launch_cluster(const SortRows& p, const SortConfig& config, cudaStream_t stream) {
  return visit_cluster_kernel<U>(config, [&](auto kernel, cudaLaunchConfig_t& launch) {
    launch.stream = stream;
    return cudaLaunchKernelEx(&launch, kernel, p, order_of<U>(p.rows.dtype, p.descending),
                              config.cluster);
  });
}

// Returns how many clusters of kWideClusterBlocks full blocks the current device runs at once.
inline int wide_clusters(int device) {
  // Plus one, by device: the driver takes as long to answer as a short row takes to be sorted.
  static std::atomic<int> known[64];
  if (device < 64 && known[device] > 0) return known[device] - 1;
  int clusters = 0;
  SortConfig config;
  config.items = 8;
  config.threads = kClusterThreads;
  config.blocks = config.cluster = kWideClusterBlocks;
  const cudaError_t error =
      visit_cluster_kernel<uint32_t>(config, [&](auto kernel, cudaLaunchConfig_t& launch) {
        return cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch);
      });
  if (error != cudaSuccess) {
    cudaGetLastError();  // a device without clusters is not an error of the caller's
    return 0;
  }
  if (device < 64) known[device] = clusters + 1;
  return clusters;
}

}  // namespace cuda_ops
