// Long rows of 8-byte keys: the radix sort of sort_radix.cuh by as few digits as tell keys
// apart.
//
//   choose   A sample of the keys says from which digit up to sort (sort_radix_choice.cuh).
//   sort     From that digit up. The first pass sees all keys and finds out which digits differ at
//            all; the others take no pass.
//   finish   Keys with the same digits are neighbors now, and each finds its place among those
//            few. Skipped if no digit is left that differs.
//   again    By all digits, if too many keys were alike and not in order.
//
// So the sample decides only how long the sort takes, never its result. Random keys are sorted by
// log2(n) bits, 4 digits of 8 for 2^27, and int64 below 2^20 by 3 without a finish. A pass moves
// 32 bytes a key, the finish 28.
//
// The host does not know which steps there will be. Either one launch takes them all, whose blocks
// run at the same time and wait for each other between two steps; or each possible step is a
// launch, which returns at once if it is not needed. The many launches cost about 1.2 us each; the
// single one has no more blocks an SM than its largest step, fewer than counting alone has.
#pragma once

#include <cooperative_groups.h>

#include "ptx/capability.h"
#include "sort/sort_radix.cuh"
#include "sort/sort_radix_choice.cuh"

namespace cuda_ops {

constexpr int kRadixAlike = 32;  // keys with the same digits that the finish puts in order
static_assert(sizeof(RadixSample<uint64_t>) <= sizeof(RadixShared<uint64_t>));

// --- steps of the sort ------------------------------------------------------------

// scan_counts() by the whole block, for a digit with many tiles.
__device__ inline uint32_t scan_counts_by_block(uint32_t* own, int tiles, uint32_t (&sums)[256]) {
  constexpr int kWarps = kRadixThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = (tiles + kWarps - 1) / kWarps;
  const int begin = warp * part < tiles ? warp * part : tiles;
  const int end = begin + part < tiles ? begin + part : tiles;
  uint32_t sum = 0;
#pragma unroll 8
  for (int i = begin + lane; i < end; i += 32) sum += own[i];
  sum = sum_up_to_lane(sum);
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  uint32_t before = 0;
  for (int w = 0; w < warp; ++w) before += sums[w];
  before = scan_counts(own, begin, end, before);
  __syncthreads();
  return before;  // in the last warp the sum of all
}

// Writes the results from keys in the order of all bits but the lowest `pass.shift`. Keys with the
// same bits are all put in order, or left as they are if they are many. Those may be in order
// already, as copies of one key are. If not, `unsorted` is raised.
template <class U>
__device__ void finish_tile(const SortRows& p, const Order<U>& order, const RadixPass<U>& pass,
                            const RadixTile<U>& t, uint32_t* unsorted) {
  const U* keys = pass.keys + t.row * p.n;
  const uint32_t* indices = pass.indices + t.row * p.n;
  const U* row = static_cast<const U*>(p.rows.data) + p.rows.offset_at(pass.first + t.row);
#pragma unroll 4
  for (int k = threadIdx.x; k < t.count; k += kRadixThreads) {
    const int64_t i = t.begin + k;
    const U key = keys[i];
    const uint32_t index = indices[i];
    const auto is_alike = [&](int64_t j) {
      return j >= 0 && j < p.n && keys[j] >> pass.shift == key >> pass.shift;
    };
    const bool after = is_alike(i - 1);
    int64_t place = i;
    if (after || is_alike(i + 1)) {
      int alike = 1, moves = 0;
      // Among many it need not count them all, so the count is bounded.
      if (is_alike(i - kRadixAlike) || is_alike(i + kRadixAlike)) {
        alike += kRadixAlike;
      } else {
        for (int64_t j = i - 1; is_alike(j); --j, ++alike) moves -= keys[j] > key;
        for (int64_t j = i + 1; is_alike(j); ++j, ++alike) moves += keys[j] < key;
      }
      if (alike <= kRadixAlike) {
        place += moves;
      } else if (after && keys[i - 1] > key) {
        *unsorted = 1;
      }
    }
    const int64_t out = (pass.first + t.row) * p.n + place;
    static_cast<U*>(p.values)[out] = value_of(key, order, row, index);
    p.indices[out] = index;
  }
}

// --- the step ---------------------------------------------------------------------

// Rows `first` and the next. Between two passes keys and indices are in the workspace, or in the
// memory of the results, by turns; before the last step they are in the workspace.
template <class U>
struct RadixRows {
  RadixPass<U> pass{};
  int64_t rows = 0;
  U* keys = nullptr;            // of the workspace
  uint32_t* indices = nullptr;  //
  RadixChoice* choice = nullptr;
};

// The places that a step reads and writes: 0 is the input or the results, 1 the workspace, 2 the
// memory of the results.
struct RadixStep {
  int shift = -1;  // -1: there is no such step
  int from = 0, to = 0;

  __device__ bool exists() const { return shift >= 0; }

  template <class U>
  __device__ RadixPass<U> pass(const SortRows& p, const RadixRows<U>& r) const {
    U* const values = static_cast<U*>(p.values) + r.pass.first * p.n;
    auto* const indices = reinterpret_cast<uint32_t*>(p.indices + r.pass.first * p.n);
    RadixPass<U> pass = r.pass;
    pass.shift = shift;
    pass.keys = from == 0 ? nullptr : from == 1 ? r.keys : values;
    pass.indices = from == 1 ? r.indices : indices;
    pass.out_keys = to == 0 ? nullptr : to == 1 ? r.keys : values;
    pass.out_indices = to == 1 ? r.indices : indices;
    return pass;
  }
};

// Steps 0 to sizeof(U) - 1 are passes, each by the digit of its number, and sizeof(U) is the
// finish. Round 0 sorts from `lowest` up, round 1 by all digits, if that was not enough. The digits
// that differ are known once the first pass has counted, which needs to know only its input.
template <class U>
__device__ RadixStep radix_step(const RadixChoice& choice, int round, int number) {
  constexpr int kFinish = sizeof(U);
  if (round > 0 && choice.unsorted == 0) return {};
  const int lowest = round > 0 ? 0 : int(choice.lowest);
  const uint32_t below = (1u << lowest) - 1, finish = (choice.differ & below) != 0;
  const uint32_t steps = (choice.differ & ~below) | 1u << lowest | finish << kFinish;
  if ((steps >> number & 1) == 0) return {};
  const bool first = (steps & ((1u << number) - 1)) == 0;
  const int left = __popc(steps >> number) - 1;  // after this one
  const int from = first ? 0 : 1 + left % 2, to = left == 0 ? 0 : 2 - left % 2;
  return {8 * (number < kFinish ? number : lowest), from, to};
}

// --- the blocks' work in a step -------------------------------------------------------

// Calls `body(pass, tile)` for each tile of this block.
template <class U, class Body>
__device__ void each_tile(const SortRows& p, const RadixRows<U>& r, RadixStep step,
                          const Body& body) {
  __shared__ RadixPass<U> pass;  // in registers it would take the place of keys
  if (threadIdx.x == 0) pass = step.pass(p, r);
  __syncthreads();
  const unsigned tiles = unsigned(r.rows * r.pass.tiles);
  for (unsigned number = blockIdx.x; number < tiles; number += gridDim.x) {
    body(pass, RadixTile<U>(p, pass, number));
    __syncthreads();  // shared memory is free for the next one
  }
}

// The first pass, which reads the input, also finds out which digits differ.
template <class U>
__device__ void count_tiles(uint32_t (&counts)[256], const SortRows& p, const Order<U>& order,
                            const RadixRows<U>& r, RadixStep step) {
  each_tile(p, r, step, [&](const RadixPass<U>& pass, const RadixTile<U>& t) {
    const int64_t row = p.rows.offset_at(pass.first + t.row);
    const bool first = pass.keys == nullptr;
    const U reference = first ? order.key(static_cast<const U*>(p.rows.data)[row]) : U(0);
    U differences = 0;
    count_tile(counts, p, order, pass, t, [&](U key) { differences |= key ^ reference; });
    if (!first) return;
    const uint32_t differ = __reduce_or_sync(~0u, nonzero_bytes(differences));
    if (threadIdx.x % 32 == 0 && (differ & ~r.choice->differ) != 0) {
      atomicOr(&r.choice->differ, differ);
    }
  });
}

template <class U>
__device__ void scan_digits(uint32_t (&sums)[256], const RadixRows<U>& r) {
  constexpr int kWarps = kRadixThreads / 32;
  const int64_t digits = r.rows * 256;
  const int tiles = r.pass.tiles;
  if (tiles > 32 * kScanItems) {
    for (int64_t digit = blockIdx.x; digit < digits; digit += gridDim.x) {
      const uint32_t total = scan_counts_by_block(r.pass.counts + digit * tiles, tiles, sums);
      if (threadIdx.x == kRadixThreads - 1) r.pass.totals[digit] = total;
    }
    return;
  }
  for (int64_t digit = blockIdx.x + int64_t(threadIdx.x / 32) * gridDim.x; digit < digits;
       digit += int64_t(kWarps) * gridDim.x) {
    const uint32_t total = scan_counts(r.pass.counts + digit * tiles, 0, tiles, 0);
    if (threadIdx.x % 32 == 0) r.pass.totals[digit] = total;
  }
}

template <class U>
__device__ void scatter_tiles(RadixShared<U>& shared, const SortRows& p, const Order<U>& order,
                              const RadixRows<U>& r, RadixStep step) {
  each_tile(p, r, step, [&](const RadixPass<U>& pass, const RadixTile<U>& t) {
    scatter_tile(shared, p, order, pass, t);
  });
}

template <class U>
__device__ void finish_tiles(const SortRows& p, const Order<U>& order, const RadixRows<U>& r,
                             RadixStep step) {
  each_tile(p, r, step, [&](const RadixPass<U>& pass, const RadixTile<U>& t) {
    finish_tile(p, order, pass, t, &r.choice->unsorted);
  });
}

// --- one launch -------------------------------------------------------------------

template <class U>
__global__ void __launch_bounds__(kRadixThreads, 2)
    radix_rows_kernel(const __grid_constant__ SortRows p, const Order<U> order,
                      const __grid_constant__ RadixRows<U> r) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<RadixShared<U>*>(memory);
  const auto grid = cooperative_groups::this_grid();
  if (blockIdx.x == 0) {
    choose_digits(*reinterpret_cast<RadixSample<U>*>(memory), *r.choice, p, order, r.pass.first,
                  r.rows);
  }
  grid.sync();
  for (int round = 0; round < 2; ++round) {
    for (int number = 0; number <= int(sizeof(U)); ++number) {
      RadixStep step = radix_step<U>(*r.choice, round, number);
      if (!step.exists()) continue;
      if (number == int(sizeof(U))) {
        finish_tiles(p, order, r, step);
      } else {
        count_tiles(shared.places, p, order, r, step);
        grid.sync();
        scan_digits(shared.places, r);
        grid.sync();
        step = radix_step<U>(*r.choice, round, number);  // the first to count may have changed it
        scatter_tiles(shared, p, order, r, step);
      }
      grid.sync();
    }
  }
}

// --- a launch for each step ----------------------------------------------------------

template <class U>
__global__ void __launch_bounds__(kRadixThreads)
    radix_choose_kernel(const __grid_constant__ SortRows p, const Order<U> order,
                        const __grid_constant__ RadixRows<U> r) {
  __shared__ RadixSample<U> sample;
  choose_digits(sample, *r.choice, p, order, r.pass.first, r.rows);
}

template <class U>
__global__ void __launch_bounds__(kRadixThreads, 3)  // one register more would leave two blocks
    radix_count_step_kernel(const __grid_constant__ SortRows p, const Order<U> order,
                            const __grid_constant__ RadixRows<U> r, int round, int number) {
  __shared__ uint32_t counts[256];
  const RadixStep step = radix_step<U>(*r.choice, round, number);
  if (step.exists()) count_tiles(counts, p, order, r, step);
}

template <class U>
__global__ void __launch_bounds__(kRadixThreads)
    radix_scan_step_kernel(const __grid_constant__ RadixRows<U> r, int round, int number) {
  __shared__ uint32_t sums[256];
  if (radix_step<U>(*r.choice, round, number).exists()) scan_digits(sums, r);
}

template <class U>
__global__ void __launch_bounds__(kRadixThreads, 2)
    radix_scatter_step_kernel(const __grid_constant__ SortRows p, const Order<U> order,
                              const __grid_constant__ RadixRows<U> r, int round, int number) {
  extern __shared__ uint4 memory[];
  const RadixStep step = radix_step<U>(*r.choice, round, number);
  if (!step.exists()) return;
  scatter_tiles(*reinterpret_cast<RadixShared<U>*>(memory), p, order, r, step);
}

template <class U>
__global__ void __launch_bounds__(kRadixThreads, 4)
    radix_finish_step_kernel(const __grid_constant__ SortRows p, const Order<U> order,
                             const __grid_constant__ RadixRows<U> r) {
  const RadixStep step = radix_step<U>(*r.choice, 0, sizeof(U));
  if (step.exists()) finish_tiles(p, order, r, step);
}

// --- launchers ------------------------------------------------------------------------

// Sets `blocks` to as many as run at the same time, times `waves`, or as there is work for. Allows
// the kernel `shared_bytes`.
template <class... Parameters>
cudaError_t resident_grid(unsigned& blocks, void (*kernel)(Parameters...), int shared_bytes,
                          int64_t work, int waves) {
  int of_sm = 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) {
    error =
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, kernel, kRadixThreads, shared_bytes);
  }
  const int64_t most = int64_t(current_device().sms) * of_sm * waves;
  blocks = unsigned(work < most ? work : most);
  return error;
}

template <class U>
cudaError_t launch_radix_at_once(const SortRows& p, const RadixRows<U>& r, cudaStream_t stream) {
  constexpr int kShared = sizeof(RadixShared<U>);
  unsigned blocks = 0;  // they wait for each other: all must be resident
  const cudaError_t error =
      resident_grid(blocks, radix_rows_kernel<U>, kShared, r.rows * r.pass.tiles, 1);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(kRadixThreads);
  launch.dynamicSmemBytes = kShared;
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  return cudaLaunchKernelEx(&launch, radix_rows_kernel<U>, p,
                            order_of<U>(p.rows.dtype, p.descending), r);
}

// A block for each tile would take long to start and end where there is no step. Two waves share
// the tiles more evenly than one.
constexpr int kRadixWaves = 2;

// The same launches for any keys.
template <class U>
cudaError_t launch_radix_steps(const SortRows& p, const RadixRows<U>& r, cudaStream_t stream) {
  constexpr int kShared = sizeof(RadixShared<U>);
  const Order<U> order = order_of<U>(p.rows.dtype, p.descending);
  const int64_t tiles = r.rows * r.pass.tiles, digits = r.rows * 256;
  unsigned count = 0, scan = 0, scatter = 0, finish = 0;  // blocks
  cudaError_t error = resident_grid(count, radix_count_step_kernel<U>, 0, tiles, kRadixWaves);
  if (error == cudaSuccess) {
    error = resident_grid(scan, radix_scan_step_kernel<U>, 0, digits, 1);
  }
  if (error == cudaSuccess) {
    error = resident_grid(scatter, radix_scatter_step_kernel<U>, kShared, tiles, kRadixWaves);
  }
  if (error == cudaSuccess) {
    error = resident_grid(finish, radix_finish_step_kernel<U>, 0, tiles, kRadixWaves);
  }
  if (error != cudaSuccess) return error;
  radix_choose_kernel<U><<<1, kRadixThreads, 0, stream>>>(p, order, r);
  for (int round = 0; round < 2; ++round) {
    for (int number = 0; number < int(sizeof(U)); ++number) {
      radix_count_step_kernel<U><<<count, kRadixThreads, 0, stream>>>(p, order, r, round, number);
      radix_scan_step_kernel<U><<<scan, kRadixThreads, 0, stream>>>(r, round, number);
      radix_scatter_step_kernel<U>
          <<<scatter, kRadixThreads, kShared, stream>>>(p, order, r, round, number);
    }
    if (round == 0) {
      radix_finish_step_kernel<U><<<finish, kRadixThreads, 0, stream>>>(p, order, r);
    }
  }
  return cudaGetLastError();
}

template <class U>
cudaError_t launch_radix_wide(const SortRows& p, const SortConfig& config, cudaStream_t stream) {
  char* at = static_cast<char*>(p.workspace);
  const RadixWorkspace bytes = radix_workspace(config, p.n, sizeof(U));
  RadixRows<U> r;
  r.pass.totals = reinterpret_cast<uint32_t*>(at);
  r.pass.counts = reinterpret_cast<uint32_t*>(at + bytes.counts);
  r.pass.tiles = int(config.tiles);
  r.keys = reinterpret_cast<U*>(at + bytes.keys);
  r.indices = reinterpret_cast<uint32_t*>(at + bytes.indices);
  r.choice = reinterpret_cast<RadixChoice*>(at + bytes.choice);

  cudaError_t error = cudaSuccess;
  for (; error == cudaSuccess && r.pass.first < p.rows.numel; r.pass.first += config.rows_at_once) {
    const int64_t left = p.rows.numel - r.pass.first;
    r.rows = left < config.rows_at_once ? left : config.rows_at_once;
    error = config.separate ? launch_radix_steps<U>(p, r, stream)
                            : launch_radix_at_once<U>(p, r, stream);
  }
  return error;
}

}  // namespace cuda_ops
