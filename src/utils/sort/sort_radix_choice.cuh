// Chooses the digit from which up to sort long rows of 8-byte keys (sort_radix_wide.cuh), by a
// sample of them: hardly any other key should have the same digits from there on.
#pragma once

#include <cuda_runtime.h>

#include "sort/sort_network.cuh"
#include "ptx/warp.cuh"

namespace cuda_ops {

constexpr int kRadixSamples = 2048;  // a power of 2
constexpr int kRadixSampledRows = 8;
constexpr float kRadixPartners = 1.25;  // expected number of others that share a key's digits

template <class U>
struct RadixSample {
  U keys[kRadixSamples];
  struct Found {
    uint32_t digits[sizeof(U)][256];  // how many distinct keys have a digit
    uint32_t alike[sizeof(U)];        // pairs of keys that have the same digit
    uint32_t highest[sizeof(U)];      // neighbors by the highest digit that differs
    uint32_t distinct, once, twice;   // keys, and keys that were drawn once and twice
  } found;
};

// Returns the digit from which up to sort rows of n keys.
template <class U>
__device__ int lowest_digit(const typename RadixSample<U>::Found& found, int64_t n) {
  const float pairs = .5f * found.distinct * (found.distinct - 1);
  float most = kRadixPartners / n;  // how likely two keys may be to share their digits
  // One other key with the digits of a key that has many copies is too much, so all such pairs
  // should be apart. Chao's estimate from keys drawn once and twice says how many keys there are if
  // all have copies.
  float apart = float(found.distinct - found.once) * n;
  if (found.twice > 0) {
    const float all = found.distinct + .5f * found.once * found.once / found.twice;
    if (all < .25f * n) apart = fmaxf(apart, all * all);
  }
  if (apart > 0) most = fminf(most, .125f / apart);
  // Digits that depend on each other tell keys apart less than the product of their likelihoods
  // says: then neighbors in the sample share more of them than they should.
  const float neighbors = 4 * pairs / n;
  uint32_t sharing = found.distinct - 1;
  float likely = 1;
  int lowest = 0;
  for (int digit = int(sizeof(U)) - 1; digit >= 0; --digit) {
    sharing -= found.highest[digit];
    if (found.alike[digit] >= pairs) continue;
    lowest = digit;
    likely *= fmaxf(found.alike[digit] / pairs, 1.f / 256);  // there are keys beyond the sample
    // A finish takes about as long as the one pass that it would save above digit 0.
    if (likely <= most && sharing <= neighbors && digit > 1) break;
  }
  return lowest;
}

// Runs as one block.
template <class U>
__device__ void choose_digits(RadixSample<U>& sample, RadixChoice& choice, const SortRows& p,
                              const Order<U>& order, int64_t first_row, int64_t rows) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  auto& found = sample.found;
  auto* words = reinterpret_cast<uint32_t*>(&found);
  for (int i = thread; i < int(sizeof(found) / 4); i += kRadixThreads) words[i] = 0;
  // Draws one of each stretch of columns.
  for (int i = thread; i < kRadixSamples; i += kRadixThreads) {
    const int64_t row = i % kRadixSampledRows * rows / kRadixSampledRows;
    const uint32_t within = __umulhi(uint32_t(i) * 0x9E3779B9u, uint32_t(p.n));
    const int64_t column = (i * p.n + within) / kRadixSamples;
    const U* data = static_cast<const U*>(p.rows.data) + p.rows.offset_at(first_row + row);
    sample.keys[i] = order.key(data[column]);
  }
  __syncthreads();

  // A bitonic sort: up to 32 apart, the keys of a warp's pairs are its own.
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

}  // namespace cuda_ops
