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

#include <type_traits>

#include "sort/sort_network.cuh"
#include "sort/sort_rank.cuh"

namespace cuda_ops {

// The inputs and outputs of one pass. Without `keys` it is the first one, without `out_keys` the
// last. Nothing is initialized: it may be in shared memory.
template <class U>
struct RadixPass {
  const U* keys;
  const uint32_t* indices;
  U* out_keys;
  uint32_t* out_indices;
  uint32_t* counts;  // by row, digit and tile; then the sums over the tiles before
  uint32_t* totals;  // by row and digit
  int64_t first;     // row
  int tiles;         // of a row
  int shift;
};

template <class U>
constexpr int kRadixItems = kRadixTile<sizeof(U)> / kRadixThreads;

// A key in registers. The compiler would keep a narrow key twice, the second time cut to its width.
template <class U>
using RadixWord = std::conditional_t<(sizeof(U) < 4), uint32_t, U>;

// The tile's row, its first element there, and how many it has.
template <class U>
struct RadixTile {
  int64_t row, begin;
  int tile, count;

  // The tile with this number among all rows' tiles.
  __device__ RadixTile(const SortRows& p, const RadixPass<U>& pass, unsigned number)
      : row(number / pass.tiles), tile(number % pass.tiles) {
    constexpr int kTile = kRadixTile<sizeof(U)>;
    begin = int64_t(tile) * kTile;
    count = p.n - begin < kTile ? int(p.n - begin) : kTile;
  }
  __device__ bool is_full() const { return count == kRadixTile<sizeof(U)>; }
};

// Where the keys of a thread begin: a warp has neighbors, and its round r comes before round r
// + 1.
template <class U>
__device__ int first_of_thread() {
  return threadIdx.x / 32 * 32 * kRadixItems<U> + threadIdx.x % 32;
}

// From `from` on, where the tile is in memory. Only the last tile of a row looks where the row
// ends.
template <class U, class Word, class T>
__device__ void load_items(Word (&items)[kRadixItems<U>], const T* from, const RadixTile<U>& t) {
  const int first = first_of_thread<U>();
  from += first;
  if (t.is_full()) {
#pragma unroll
    for (int r = 0; r < kRadixItems<U>; ++r) items[r] = from[r * 32];
  } else {
#pragma unroll
    for (int r = 0; r < kRadixItems<U>; ++r) {
      items[r] = first + r * 32 < t.count ? from[r * 32] : T(0);
    }
  }
}

// Behind the row's end is the highest key, which has the last digit, and comes last among it.
template <class U>
__device__ void load_keys(RadixWord<U> (&keys)[kRadixItems<U>], const SortRows& p,
                          const Order<U>& order, const RadixPass<U>& pass, const RadixTile<U>& t) {
  const int first = first_of_thread<U>();
  const U* from = pass.keys != nullptr
                      ? pass.keys + t.row * p.n
                      : static_cast<const U*>(p.rows.data) + p.rows.offset_at(pass.first + t.row);
  load_items(keys, from + t.begin, t);
  if (pass.keys == nullptr) {
#pragma unroll
    for (int r = 0; r < kRadixItems<U>; ++r) keys[r] = order.key(U(keys[r]));
  }
  if (t.is_full()) return;
#pragma unroll
  for (int r = 0; r < kRadixItems<U>; ++r) {
    if (first + r * 32 >= t.count) keys[r] = U(~U(0));
  }
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
  RadixWord<U> keys[kRadixItems<U>];
  load_keys(keys, p, order, pass, t);
  __syncthreads();
  const int first = first_of_thread<U>();
  const Digit<U> digit_of(pass.shift);
#pragma unroll
  for (int r = 0; r < kRadixItems<U>; ++r) {
    atomicAdd(&counts[digit_of(keys[r])], 1u);
    if (first + r * 32 < t.count) see(U(keys[r]));
  }
  __syncthreads();
  if (threadIdx.x < 256) {
    const uint32_t behind = threadIdx.x == 255 ? kRadixTile<sizeof(U)> - t.count : 0;
    pass.counts[(t.row * 256 + threadIdx.x) * pass.tiles + t.tile] = counts[threadIdx.x] - behind;
  }
}

template <class U>
__global__ void __launch_bounds__(kRadixThreads, 3)
    radix_count_kernel(const __grid_constant__ SortRows p, const Order<U> order,
                       const RadixPass<U> pass) {
  __shared__ uint32_t counts[256];
  count_tile(counts, p, order, pass, RadixTile<U>(p, pass, blockIdx.x), [](U) {});
}

// Replaces a digit's counts, from tile `begin` on, by the sums of those before, the first being
// `before`. By one warp. Returns the sum before `end`.
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

template <class U>
struct alignas(16) RadixShared {
  static constexpr int kTile = kRadixTile<sizeof(U)>, kWarps = kRadixThreads / 32;
  U keys[kTile];
  uint32_t indices[kTile];
  uint16_t ranks[kWarps][256];  // of the next key of a warp with a digit
  uint32_t places[256];         // of the tile's first key with a digit, in the row
  uint32_t sums[8];
  // Hides them from the compiler, which would keep values computed with them before: digits in
  // local memory, and offsets for two arrays that cost more than two addresses.
  int shift;
  uint32_t index_bytes;
};

// Hides the parts of an address in global memory. Else the compiler adds up a key's place in the
// row first, for all arrays, and takes three more instructions for each address.
template <class T>
__device__ T* of_unknown_origin(T* address) {
  size_t bits = __cvta_generic_to_global(address);
  asm volatile("" : "+l"(bits));
  return static_cast<T*>(__cvta_global_to_generic(bits));
}

// Writes the tile from shared memory, where it is in order.
template <class U>
__device__ void write_tile(const RadixShared<U>& shared, const SortRows& p, const Order<U>& order,
                           const RadixPass<U>& pass, const RadixTile<U>& t) {
  const int thread = threadIdx.x;
  const Digit<U> digit_of(pass.shift);
  // Round r: its part of an address is known at compile time.
  const auto each = [&](const auto& body) {
    if (t.is_full()) {
#pragma unroll
      for (int r = 0; r < kRadixItems<U>; ++r) body(r * kRadixThreads);
    } else {
      for (int i = 0; thread + i < t.count; i += kRadixThreads) body(i);
    }
  };
  const U* const keys = shared.keys + thread;
  const uint32_t* const indices = shared.indices + thread;
  const int64_t row = t.row * p.n + thread;
  if (pass.out_keys != nullptr) {
    U* const out_keys = of_unknown_origin(pass.out_keys + row);
    char* const out_indices = of_unknown_origin(reinterpret_cast<char*>(pass.out_indices + row));
    const uint32_t index_bytes = shared.index_bytes;
    each([&](int i) {
      const U key = keys[i];
      const uint32_t place = shared.places[digit_of(key)];
      (out_keys + place)[i] = key;
      reinterpret_cast<uint32_t*>(out_indices + uint64_t(place) * index_bytes)[i] = indices[i];
    });
    return;
  }
  const U* from = static_cast<const U*>(p.rows.data) + p.rows.offset_at(pass.first + t.row);
  U* const values = of_unknown_origin(static_cast<U*>(p.values) + pass.first * p.n + row);
  int64_t* const out_indices = of_unknown_origin(p.indices + pass.first * p.n + row);
  each([&](int i) {
    const U key = keys[i];
    const uint32_t index = indices[i], place = shared.places[digit_of(key)];
    (values + place)[i] = value_of(key, order, from, index);
    (out_indices + place)[i] = index;
  });
}

template <class U>
__device__ void scatter_tile(RadixShared<U>& shared, const SortRows& p, const Order<U>& order,
                             const RadixPass<U>& pass, const RadixTile<U>& t) {
  constexpr int kItems = kRadixItems<U>;
  const int thread = threadIdx.x, warp = thread / 32, first = first_of_thread<U>();
  // Each of the first 128 threads has two neighboring digits. The sums before the tile in the row
  // are on their way while the keys are.
  uint32_t totals[2] = {}, before[2] = {};
  if (thread < 128) {
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const int64_t digit = t.row * 256 + 2 * thread + d;
      totals[d] = pass.totals[digit];
      before[d] = pass.counts[digit * pass.tiles + t.tile];
    }
  }
  RadixWord<U> keys[kItems];
  load_keys(keys, p, order, pass, t);
  const uint32_t in_row = sum_before<128>(totals[0] + totals[1], shared.sums);
  if (thread < 128) {
    shared.places[2 * thread] = in_row + before[0];
    shared.places[2 * thread + 1] = in_row + totals[0] + before[1];
  }

  if (thread == 0) {
    shared.shift = pass.shift;
    shared.index_bytes = sizeof(uint32_t);
  }
  const Digit<U> digit_of(pass.shift);
  uint32_t ranks[kItems];
  rank_in_warp(ranks, shared.ranks[warp], [&](int r) { return digit_of(keys[r]); });
  __syncthreads();

  const uint32_t of_tile = thread < 128 ? add_up_warps(shared.ranks, thread) : 0;
  const uint32_t lower = of_tile & 0xffff;
  const uint32_t in_tile = sum_before<128>(lower + (of_tile >> 16), shared.sums);
  if (thread < 128) {
    place_warps(shared.ranks, thread, in_tile | (in_tile + lower) << 16);
    shared.places[2 * thread] -= in_tile;
    shared.places[2 * thread + 1] -= in_tile + lower;
  }
  __syncthreads();
  const Digit<U> same_digit_of(shared.shift);
#pragma unroll
  for (int r = 0; r < kItems; ++r) ranks[r] += shared.ranks[warp][same_digit_of(keys[r])];
#pragma unroll
  for (int r = 0; r < kItems; ++r) shared.keys[ranks[r]] = U(keys[r]);
  // Read this late, since registers for them would push keys into local memory before.
  uint32_t indices[kItems];
  if (pass.keys != nullptr) {
    load_items(indices, pass.indices + t.row * p.n + t.begin, t);
  } else {
#pragma unroll
    for (int r = 0; r < kItems; ++r) indices[r] = uint32_t(t.begin + first + r * 32);
  }
#pragma unroll
  for (int r = 0; r < kItems; ++r) shared.indices[ranks[r]] = indices[r];
  __syncthreads();
  write_tile(shared, p, order, pass, t);
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
