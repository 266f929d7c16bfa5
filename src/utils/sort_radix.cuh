// Long rows: a radix sort of 8 bits a pass, by three kernels each. Tiles count
// their digits, the counts are added up, tiles are sorted by digit in shared
// memory and go where the sums say. Nothing waits for another block, and the same
// input takes the same way every time.
//
// The first pass reads the input itself and knows the indices without reading any,
// the last one writes the results: 28 bytes a 16-bit key in two passes, 80 a 32-bit
// key in four. A library's sort of pairs is fed with indices and a copy of the
// keys first, and its indices are widened in the end. Keys of 8 bytes go their own
// way, of the same steps (sort_radix_wide.cuh).
#pragma once

#include <cuda_runtime.h>

#include "sort_network.cuh"
#include "warp.cuh"

namespace cuda_ops {

// What one pass reads and writes. Without `keys` it is the first one, without
// `out_keys` the last. Nothing is initialised: it may be in shared memory.
template <class U>
struct RadixPass {
  const U* keys;
  const uint32_t* indices;
  U* out_keys;
  uint32_t* out_indices;
  uint32_t* counts;  // of row, digit and tile; then of what is before it in its digit
  uint32_t* totals;  // of row and digit
  int64_t first;     // row
  int tiles;         // of a row
  int shift;
};

template <class U>
constexpr int kRadixItems = kRadixTile<sizeof(U)> / kRadixThreads;

// The tile's row, its first element there, and how many it has.
template <class U>
struct RadixTile {
  int64_t row, begin;
  int tile, count;

  // Of all rows' tiles the one with this number.
  __device__ RadixTile(const SortRows& p, const RadixPass<U>& pass, unsigned number)
      : row(number / pass.tiles), tile(number % pass.tiles) {
    constexpr int kTile = kRadixTile<sizeof(U)>;
    begin = int64_t(tile) * kTile;
    count = p.n - begin < kTile ? int(p.n - begin) : kTile;
  }
};

// Keys of a thread: a warp has neighbours, and its round r comes before round r + 1.
template <class U>
__device__ void load_keys(U (&keys)[kRadixItems<U>], const SortRows& p, const Order<U>& order,
                          const RadixPass<U>& pass, const RadixTile<U>& t) {
  const int first = threadIdx.x / 32 * 32 * kRadixItems<U> + threadIdx.x % 32;
  const U* from = pass.keys != nullptr
                      ? pass.keys + t.row * p.n
                      : static_cast<const U*>(p.rows.data) + p.rows.offset_at(pass.first + t.row);
#pragma unroll
  for (int r = 0; r < kRadixItems<U>; ++r) {
    const int i = first + r * 32;
    keys[r] = i < t.count ? from[t.begin + i] : U(0);
  }
  if (pass.keys != nullptr) return;
#pragma unroll
  for (int r = 0; r < kRadixItems<U>; ++r) keys[r] = order.key(keys[r]);
}

// Bit b for byte b.
template <class U>
__device__ uint32_t nonzero_bytes(U bits) {
  uint32_t bytes = 0;
#pragma unroll
  for (int b = 0; b < int(sizeof(U)); ++b) bytes |= uint32_t((bits >> 8 * b & 255) != 0) << b;
  return bytes;
}

// Calls `see` with each key too.
template <class U, class See>
__device__ void count_tile(uint32_t (&counts)[256], const SortRows& p, const Order<U>& order,
                           const RadixPass<U>& pass, const RadixTile<U>& t, const See& see) {
  if (threadIdx.x < 256) counts[threadIdx.x] = 0;
  U keys[kRadixItems<U>];
  load_keys(keys, p, order, pass, t);
  __syncthreads();
  const int first = threadIdx.x / 32 * 32 * kRadixItems<U> + threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kRadixItems<U>; ++r) {
    if (first + r * 32 >= t.count) continue;
    atomicAdd(&counts[uint32_t(keys[r] >> pass.shift) & 255], 1u);
    see(keys[r]);
  }
  __syncthreads();
  if (threadIdx.x < 256) {
    pass.counts[(t.row * 256 + threadIdx.x) * pass.tiles + t.tile] = counts[threadIdx.x];
  }
}

template <class U>
__global__ void __launch_bounds__(kRadixThreads)
    radix_count_kernel(const __grid_constant__ SortRows p, const Order<U> order,
                       const RadixPass<U> pass) {
  __shared__ uint32_t counts[256];
  count_tile(counts, p, order, pass, RadixTile<U>(p, pass, blockIdx.x), [](U) {});
}

// A warp makes of a digit's counts, from tile `begin` on, the sums of those before, the first
// being `before`. Returns what is before `end`.
constexpr int kScanWarps = 4, kScanItems = 8;

__device__ inline uint32_t scan_counts(uint32_t* own, int begin, int end, uint32_t before) {
  const int lane = threadIdx.x % 32;
  for (; begin < end; begin += 32 * kScanItems) {
    uint32_t items[kScanItems], sum = 0;
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      const int i = begin + lane * kScanItems + k;
      items[k] = i < end ? own[i] : 0;
    }
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) sum += items[k];
    const uint32_t up_to = sum_up_to_lane(sum);
    uint32_t running = before + up_to - sum;
#pragma unroll
    for (int k = 0; k < kScanItems; ++k) {
      const int i = begin + lane * kScanItems + k;
      if (i < end) own[i] = running;
      running += items[k];
    }
    before += __shfl_sync(~0u, up_to, 31);
  }
  return before;
}

// A warp for each row and digit.
static __global__ void __launch_bounds__(32 * kScanWarps)
    radix_scan_kernel(uint32_t* counts, uint32_t* totals, int tiles) {
  const int64_t digit = int64_t(blockIdx.x) * kScanWarps + threadIdx.x / 32;
  const uint32_t total = scan_counts(counts + digit * tiles, 0, tiles, 0);
  if (threadIdx.x % 32 == 0) totals[digit] = total;
}

// The sum of those before, over 256 threads of the block; all threads must call.
template <class S>
__device__ S sum_before(S value, S (&sums)[8]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  S up_to = sum_up_to_lane(value);
  if (lane == 31 && warp < 8) sums[warp] = up_to;
  __syncthreads();
  for (int w = 0; w < warp && w < 8; ++w) up_to += sums[w];
  return up_to - value;
}

// How many keys of the warp come before each of this thread, among those with the same
// digit: round r of all lanes before round r + 1. `next` has room for the warp's number
// of keys with each digit.
template <int kItems, class DigitOf>
__device__ void rank_in_warp(uint16_t (&ranks)[kItems], uint16_t (&next)[256],
                             const DigitOf& digit_of) {
  const int lane = threadIdx.x % 32;
  for (int i = lane; i < 256; i += 32) next[i] = 0;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    const uint32_t digit = digit_of(r);
    const uint32_t same = lanes_alike<8>(digit);
    const uint16_t before = next[digit];
    ranks[r] = before + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (same >> lane == 1) next[digit] = ranks[r] + 1;  // the last of them
    __syncwarp();
  }
}

// The warps' numbers of keys with a digit become those of the warps before; returns all.
__device__ inline uint32_t add_up_warps(uint16_t (*numbers)[256], int warps, int digit) {
  uint32_t sum = 0;
  for (int w = 0; w < warps; ++w) {
    const uint32_t of_warp = numbers[w][digit];
    numbers[w][digit] = uint16_t(sum);
    sum += of_warp;
  }
  return sum;
}

template <class U>
struct RadixShared {
  static constexpr int kTile = kRadixTile<sizeof(U)>;
  U keys[kTile];
  uint32_t indices[kTile];
  uint16_t ranks[kRadixThreads / 32][256];  // of the next key of a warp with a digit
  uint32_t places[256];                     // of the tile's first key with a digit, in the row
  uint64_t sums[8];
};

template <class U>
__device__ void scatter_tile(RadixShared<U>& shared, const SortRows& p, const Order<U>& order,
                             const RadixPass<U>& pass, const RadixTile<U>& t) {
  constexpr int kItems = kRadixItems<U>, kWarps = kRadixThreads / 32;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int first = warp * 32 * kItems + lane;
  U keys[kItems];
  load_keys(keys, p, order, pass, t);

  // What is behind the row's end has the last digit, and comes last among it.
  uint16_t ranks[kItems];
  const auto digit_of = [&](U key, int i) {
    return i < t.count ? uint32_t(key >> pass.shift) & 255 : 255;
  };
  rank_in_warp(ranks, shared.ranks[warp], [&](int r) { return digit_of(keys[r], first + r * 32); });
  __syncthreads();

  // Both sums over the digits at once: of this tile, and of the whole row.
  uint64_t counts = 0;
  if (thread < 256) {
    const uint32_t of_tile = add_up_warps(shared.ranks, kWarps, thread);
    counts = uint64_t(pass.totals[t.row * 256 + thread]) << 16 | of_tile;
  }
  counts = sum_before(counts, shared.sums);
  if (thread < 256) {
    const uint32_t in_tile = counts & 0xffff;
    const uint32_t before = pass.counts[(t.row * 256 + thread) * pass.tiles + t.tile];
    for (int w = 0; w < kWarps; ++w) shared.ranks[w][thread] += in_tile;
    shared.places[thread] = uint32_t(counts >> 16) + before - in_tile;
  }
  __syncthreads();
  // Read this late, since there are no registers for them before.
  const uint32_t* indices = pass.keys != nullptr ? pass.indices + t.row * p.n + t.begin : nullptr;
#pragma unroll
  for (int r = 0; r < kItems; ++r) {
    const int i = first + r * 32;
    const int place = shared.ranks[warp][digit_of(keys[r], i)] + ranks[r];
    shared.keys[place] = keys[r];
    shared.indices[place] = indices != nullptr && i < t.count ? indices[i] : uint32_t(t.begin + i);
  }
  __syncthreads();

  const U* row = static_cast<const U*>(p.rows.data) + p.rows.offset_at(pass.first + t.row);
  U* const out_keys = pass.out_keys;
  uint32_t* const out_indices = pass.out_indices;
  const int shift = pass.shift;
#pragma unroll 4
  for (int i = thread; i < t.count; i += kRadixThreads) {
    const U key = shared.keys[i];
    const uint32_t index = shared.indices[i];
    const uint32_t place = shared.places[uint32_t(key >> shift) & 255] + i;
    const int64_t out = t.row * p.n + place;
    if (out_keys != nullptr) {
      out_keys[out] = key;
      out_indices[out] = index;
    } else {
      static_cast<U*>(p.values)[pass.first * p.n + out] = value_of(key, order, row, index);
      p.indices[pass.first * p.n + out] = index;
    }
  }
}

template <class U>
__global__ void __launch_bounds__(kRadixThreads, 2)
    radix_scatter_kernel(const __grid_constant__ SortRows p, const Order<U> order,
                         const RadixPass<U> pass) {
  extern __shared__ uint4 memory[];
  scatter_tile(*reinterpret_cast<RadixShared<U>*>(memory), p, order, pass,
               RadixTile<U>(p, pass, blockIdx.x));
}

// Between two passes keys and indices are in the workspace, or in the memory of
// the results, by turns; before the last one in the workspace.
template <class U>
cudaError_t launch_radix(const SortRows& p, const SortConfig& config, cudaStream_t stream) {
  const Order<U> order = order_of<U>(p.rows.dtype, p.descending);
  char* at = static_cast<char*>(p.workspace);
  const RadixWorkspace bytes = radix_workspace(config, p.n, sizeof(U));
  U* keys = reinterpret_cast<U*>(at + bytes.keys);
  auto* indices = reinterpret_cast<uint32_t*>(at + bytes.indices);
  RadixPass<U> pass{};
  pass.counts = reinterpret_cast<uint32_t*>(at + bytes.counts);
  pass.totals = reinterpret_cast<uint32_t*>(at);
  pass.tiles = int(config.tiles);
  const cudaError_t error =
      cudaFuncSetAttribute(radix_scatter_kernel<U>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           int(sizeof(RadixShared<U>)));
  if (error != cudaSuccess) return error;
  for (pass.first = 0; pass.first < p.rows.numel; pass.first += config.rows_at_once) {
    const int64_t left = p.rows.numel - pass.first;
    const int64_t rows = left < config.rows_at_once ? left : config.rows_at_once;
    const unsigned blocks = unsigned(rows * config.tiles);
    pass.keys = nullptr;
    for (int number = 0; number < int(sizeof(U)); ++number) {
      const bool last = number + 1 == sizeof(U), here = number % 2 == 0;
      pass.shift = 8 * number;
      pass.out_keys = last ? nullptr : here ? keys : static_cast<U*>(p.values) + pass.first * p.n;
      pass.out_indices = here ? indices : reinterpret_cast<uint32_t*>(p.indices + pass.first * p.n);
      radix_count_kernel<U><<<blocks, kRadixThreads, 0, stream>>>(p, order, pass);
      radix_scan_kernel<<<unsigned(rows * 256 / kScanWarps), 32 * kScanWarps, 0, stream>>>(
          pass.counts, pass.totals, pass.tiles);
      radix_scatter_kernel<U>
          <<<blocks, kRadixThreads, sizeof(RadixShared<U>), stream>>>(p, order, pass);
      pass.keys = pass.out_keys;
      pass.indices = pass.out_indices;
    }
  }
  return cudaGetLastError();
}

}  // namespace cuda_ops
