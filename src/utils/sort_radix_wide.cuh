// Long rows of 8-byte keys: the radix sort of sort_radix.cuh by as few digits as tell keys
// apart, and all of it in one launch, whose blocks run at the same time and wait for each
// other between two steps.
//
//   choose   A sample of the keys says from which digit up to sort: so that a key should have
//            hardly any others with the same digits there.
//   sort     From that digit up. The first pass sees all keys and finds out which digits differ
//            at all; others take no pass.
//   finish   Keys with the same digits are neighbours now, and each finds its place among those
//            few. Skipped if no digit is left that differs.
//   again    By all digits, if too many keys were alike and not in order.
//
// So the sample decides how long it takes, never what comes out. Random keys are sorted by
// log2(n) bits, 4 digits of 8 for 2^27, and int64 below 2^20 by 3 without a finish. A pass moves
// 32 bytes a key, the finish 28.
#pragma once

#include <cooperative_groups.h>

#include "sort_radix.cuh"

namespace cuda_ops {

constexpr int kRadixSamples = 2048;  // a power of 2
constexpr int kRadixSampledRows = 8;
constexpr int kRadixAlike = 32;         // keys with the same digits that the finish puts in order
constexpr float kRadixPartners = 1.25;  // expected number of others that share a key's digits

// --- which digits ---------------------------------------------------------------

template <class U>
struct RadixSample {
  U keys[kRadixSamples];
  struct Found {
    uint32_t digits[sizeof(U)][256];  // how many distinct keys have a digit
    uint32_t alike[sizeof(U)];        // pairs of them that have the same
    uint32_t highest[sizeof(U)];      // neighbours by the highest digit that differs
    uint32_t distinct, once, twice;   // keys, and those that were drawn so often
  } found;
};
static_assert(sizeof(RadixSample<uint64_t>) <= sizeof(RadixShared<uint64_t>));

// From where up to sort rows of n keys.
template <class U>
__device__ int lowest_digit(const typename RadixSample<U>::Found& found, int64_t n) {
  const float pairs = .5f * found.distinct * (found.distinct - 1);
  float most = kRadixPartners / n;  // how likely two keys may be to share their digits
  // Another key with the digits of one that has many copies is one too many: so many pairs should
  // all be apart. How many keys there are if all have copies: Chao's estimate from those drawn once
  // and twice.
  float apart = float(found.distinct - found.once) * n;
  if (found.twice > 0) {
    const float all = found.distinct + .5f * found.once * found.once / found.twice;
    if (all < .25f * n) apart = fmaxf(apart, all * all);
  }
  if (apart > 0) most = fminf(most, .125f / apart);
  // Digits that depend on each other tell less than the product of their likelihoods says: then
  // neighbours in the sample share more of them than there should be.
  const float neighbors = 4 * pairs / n;
  uint32_t sharing = found.distinct - 1;
  float likely = 1;
  int lowest = 0;
  for (int digit = int(sizeof(U)) - 1; digit >= 0; --digit) {
    sharing -= found.highest[digit];
    if (found.alike[digit] >= pairs) continue;
    lowest = digit;
    likely *= fmaxf(found.alike[digit] / pairs, 1.f / 256);  // for there are keys not in the sample
    // A finish takes about as long as the one pass that it would save above digit 0.
    if (likely <= most && sharing <= neighbors && digit > 1) break;
  }
  return lowest;
}

// By one block.
template <class U>
__device__ void choose_digits(RadixSample<U>& sample, RadixChoice& choice, const SortRows& p,
                              const Order<U>& order, int64_t first_row, int64_t rows) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  auto& found = sample.found;
  auto* words = reinterpret_cast<uint32_t*>(&found);
  for (int i = thread; i < int(sizeof(found) / 4); i += kRadixThreads) words[i] = 0;
  // One of each stretch of columns.
  for (int i = thread; i < kRadixSamples; i += kRadixThreads) {
    const int64_t row = i % kRadixSampledRows * rows / kRadixSampledRows;
    const uint32_t within = __umulhi(uint32_t(i) * 0x9E3779B9u, uint32_t(p.n));
    const int64_t column = (i * p.n + within) / kRadixSamples;
    const U* data = static_cast<const U*>(p.rows.data) + p.rows.offset_at(first_row + row);
    sample.keys[i] = order.key(data[column]);
  }
  __syncthreads();

  // A bitonic sort: up to 32 apart, pairs of a warp are of keys that it alone has.
  for (int size = 2; size <= kRadixSamples; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      for (int pair = thread; pair < kRadixSamples / 2; pair += kRadixThreads) {
        const int i = pair / step * 2 * step + pair % step, j = i + step;
        const bool up = (i & size) == 0;
        compare_exchange(sample.keys[up ? i : j], sample.keys[up ? j : i]);
      }
      if (step > 32 || (step == 1 && size > 32)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }

  for (int i = thread; i < kRadixSamples; i += kRadixThreads) {
    const U key = sample.keys[i];
    const auto is_here = [&](int j) { return j < kRadixSamples && sample.keys[j] == key; };
    if (i > 0 && is_here(i - 1)) continue;
    atomicAdd(&found.distinct, 1u);
    if (!is_here(i + 1)) {
      atomicAdd(&found.once, 1u);
    } else if (!is_here(i + 2)) {
      atomicAdd(&found.twice, 1u);
    }
    int highest = 0;
#pragma unroll
    for (int d = 0; d < int(sizeof(U)); ++d) {
      atomicAdd(&found.digits[d][uint32_t(key >> 8 * d) & 255], 1u);
      if (i > 0 && (key ^ sample.keys[i - 1]) >> 8 * d != 0) highest = d;
    }
    if (i > 0) atomicAdd(&found.highest[highest], 1u);
  }
  __syncthreads();
  if (warp < int(sizeof(U))) {
    uint32_t alike = 0;
    for (int digit = lane; digit < 256; digit += 32) {
      const uint32_t count = found.digits[warp][digit];
      alike += count * (count - 1) / 2;
    }
    alike = sum_up_to_lane(alike);
    if (lane == 31) found.alike[warp] = alike;
  }
  __syncthreads();
  if (thread == 0) choice = {uint32_t(lowest_digit<U>(found, p.n)), 0, 0};
}

// --- steps of the sort ------------------------------------------------------------

// scan_counts() by the block, of a digit with many tiles.
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

// From keys in the order of all bits but the lowest `pass.shift` to the results. Keys with the same
// bits are either put in order, all of them, or left as they are, if they are many. Those may be
// in order: copies of one key are. If not, `unsorted` is raised.
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
      // Amid many it need not count them, and there is an end to those that it counts.
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

// --- the kernel -------------------------------------------------------------------

// Rows `first` and the next. Between two passes keys and indices are in the workspace, or in the
// memory of the results, by turns; before what writes the results they are in the workspace.
template <class U>
struct RadixRows {
  RadixPass<U> pass;
  int64_t rows = 0;
  U* keys = nullptr;            // of the workspace
  uint32_t* indices = nullptr;  //
  RadixChoice* choice = nullptr;
};

// A pass in one register: nine pointers are too many to keep. A place is 0 for the input or the
// results, 1 for the workspace, 2 for the memory of the results.
struct RadixStep {
  uint32_t word;

  __device__ RadixStep(int shift, int from, int to) : word(shift | from << 8 | to << 16) {}

  template <class U>
  __device__ RadixPass<U> pass(const SortRows& p, const RadixRows<U>& r) const {
    const int from = word >> 8 & 255, to = word >> 16;
    U* const values = static_cast<U*>(p.values) + r.pass.first * p.n;
    auto* const indices = reinterpret_cast<uint32_t*>(p.indices + r.pass.first * p.n);
    RadixPass<U> pass = r.pass;
    pass.shift = word & 255;
    pass.keys = from == 0 ? nullptr : from == 1 ? r.keys : values;
    pass.indices = from == 1 ? r.indices : indices;
    pass.out_keys = to == 0 ? nullptr : to == 1 ? r.keys : values;
    pass.out_indices = to == 1 ? r.indices : indices;
    return pass;
  }
};

// Calls `body(pass, tile)` for each tile of this block.
template <class U, class Body>
__device__ void each_tile(const SortRows& p, const RadixRows<U>& r, RadixStep step,
                          const Body& body) {
  const unsigned tiles = unsigned(r.rows * r.pass.tiles);
  for (unsigned number = blockIdx.x; number < tiles; number += gridDim.x) {
    asm volatile("" : "+r"(step.word));  // taken apart where it is needed, not before the loop
    const RadixPass<U> pass = step.pass(p, r);
    body(pass, RadixTile<U>(p, pass, number));
    __syncthreads();  // shared memory is free for the next one
  }
}

// In the first pass, which reads the input, it finds out which digits differ.
template <class U>
__device__ void count_tiles(RadixShared<U>& shared, const SortRows& p, const Order<U>& order,
                            const RadixRows<U>& r, RadixStep step) {
  each_tile(p, r, step, [&](const RadixPass<U>& pass, const RadixTile<U>& t) {
    const int64_t row = p.rows.offset_at(pass.first + t.row);
    const bool first = pass.keys == nullptr;
    const U reference = first ? order.key(static_cast<const U*>(p.rows.data)[row]) : U(0);
    U differences = 0;
    count_tile(shared.places, p, order, pass, t, [&](U key) { differences |= key ^ reference; });
    if (!first) return;
    const uint32_t differ = __reduce_or_sync(~0u, nonzero_bytes(differences));
    if (threadIdx.x % 32 == 0 && (differ & ~r.choice->differ) != 0) {
      atomicOr(&r.choice->differ, differ);
    }
  });
}

template <class U>
__device__ void scan_digits(RadixShared<U>& shared, const RadixRows<U>& r) {
  constexpr int kWarps = kRadixThreads / 32;
  const int64_t digits = r.rows * 256;
  const int tiles = r.pass.tiles;
  if (tiles > 32 * kScanItems) {
    for (int64_t digit = blockIdx.x; digit < digits; digit += gridDim.x) {
      const uint32_t total =
          scan_counts_by_block(r.pass.counts + digit * tiles, tiles, shared.places);
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
  for (int lowest = int(r.choice->lowest);; lowest = 0) {
    uint32_t digits = 1;  // bit d: sort by digit lowest + d; others are known after the first count
    int steps = 0;        // that are left: passes, and a finish
    int from = 0;
    for (int d = 0; digits >> d != 0; ++d) {
      if ((digits >> d & 1) == 0) continue;
      const int shift = 8 * (lowest + d);
      count_tiles(shared, p, order, r, RadixStep(shift, from, 0));
      grid.sync();
      if (d == 0) {
        const uint32_t differ = r.choice->differ;
        digits |= differ >> lowest;
        steps = __popc(digits) + ((differ & ((1u << lowest) - 1)) != 0);
      }
      scan_digits(shared, r);
      grid.sync();
      --steps;
      const int to = steps == 0 ? 0 : 2 - steps % 2;
      each_tile(p, r, RadixStep(shift, from, to),
                [&](const RadixPass<U>& pass, const RadixTile<U>& t) {
                  scatter_tile(shared, p, order, pass, t);
                });
      grid.sync();
      from = to;
    }
    if (steps == 0) return;
    each_tile(p, r, RadixStep(8 * lowest, from, 0),
              [&](const RadixPass<U>& pass, const RadixTile<U>& t) {
                finish_tile(p, order, pass, t, &r.choice->unsorted);
              });
    grid.sync();
    if (r.choice->unsorted == 0) return;
  }
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

  // Blocks that wait for each other must all be resident.
  constexpr auto kernel = radix_rows_kernel<U>;
  constexpr int kShared = sizeof(RadixShared<U>);
  int device = 0, sms = 0, of_sm = 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_sm, kernel, kRadixThreads, kShared);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t launch{};
  launch.blockDim = dim3(kRadixThreads);
  launch.dynamicSmemBytes = kShared;
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  for (r.pass.first = 0; r.pass.first < p.rows.numel; r.pass.first += config.rows_at_once) {
    const int64_t left = p.rows.numel - r.pass.first;
    r.rows = left < config.rows_at_once ? left : config.rows_at_once;
    const int64_t blocks = r.rows * config.tiles, resident = int64_t(sms) * of_sm;
    launch.gridDim = dim3(unsigned(blocks < resident ? blocks : resident));
    error = cudaLaunchKernelEx(&launch, kernel, p, order_of<U>(p.rows.dtype, p.descending), r);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda_ops
