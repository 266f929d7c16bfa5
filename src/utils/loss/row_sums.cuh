// The sum of exponentials of a row of logits: of any row, by the lanes that share it, and of one
// that they hold in registers.
#pragma once

#include "loss/cross_entropy.h"
#include "math.cuh"
#include "rows/rows.cuh"

namespace cuda_ops {

template <class T>
constexpr int kPackOf = 16 / int(sizeof(T));

template <class C>
__device__ C infinity() {
  return C(INFINITY);
}

// The elements of a row before the first aligned pack, at most all.
template <class T>
__device__ int64_t elements_before_packs(const T* row, int64_t n) {
  const int64_t elements = int64_t(-reinterpret_cast<uintptr_t>(row) % 16) / int64_t(sizeof(T));
  return elements < n ? elements : n;
}

// --- sums over a row of any length ----------------------------------------------

// The sum of exponentials of what was added so far, over that of the largest. With kSmooth also the
// sum of the numbers, less `anchor` each so that a large offset of all does not cost digits.
template <class T, bool kSmooth>
struct RowSums {
  using C = compute_t<T>;
  using Math = MathFor<T>;
  C most = -infinity<C>(), sum = 0, total = 0;

  template <int kCount>
  __device__ void add(const C (&values)[kCount], C anchor) {
    C largest = values[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) largest = fmax(largest, values[i]);  // leaves NaN out
    if (largest > most) {
      sum *= Math::exp(most - largest);
      most = largest;
    }
    const C base = above_minus_infinity(most);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum += Math::exp(values[i] - base);
      if constexpr (kSmooth) total += values[i] - anchor;
    }
  }

  // Subtracted from -infinity, -infinity would give NaN in place of nothing.
  __device__ static C above_minus_infinity(C value) {
    return value == -infinity<C>() ? C(0) : value;
  }

  // Joins the sums of all lanes of a row; all of them get the result.
  __device__ void join(int lanes) {
    const C own = most;
    most = row_joined(own, lanes, -infinity<C>(), [](C a, C b) { return fmax(a, b); });
    C sums[2] = {sum * Accurate::exp(own - above_minus_infinity(most)), total};
    row_totals(sums, lanes);
    sum = sums[0];
    total = sums[1];
  }
};

// Adds up `n` neighbors. The next packs are on their way while the present ones are added.
template <class T, bool kSmooth>
__device__ RowSums<T, kSmooth> sums_of_row(const T* row, int64_t n, compute_t<T> anchor, int lane,
                                           int lanes) {
  using C = compute_t<T>;
  constexpr int kPack = kPackOf<T>;
  RowSums<T, kSmooth> sums;
  const int64_t head = elements_before_packs(row, n), count = (n - head) / kPack;
  const auto* packs = reinterpret_cast<const uint4*>(row + head);
  const auto add_pack = [&](uint4 raw) {
    C values[kPack];
    unpack_vector<T>(raw, values);
    sums.add(values, anchor);
  };
  // Packs past the row's end are left out one by one: a short row, and the end of a long one, are
  // on their way at once too.
  const uint4* next = packs + lane;
  int64_t left = count - lane;
  uint4 coming[kCrossEntropyPacks];
  const auto load = [&] {
#pragma unroll
    for (int u = 0; u < kCrossEntropyPacks; ++u) {
      if (u * lanes < left) coming[u] = load_once(next + u * lanes);
    }
  };
  load();
  while (left > 0) {
    uint4 present[kCrossEntropyPacks];
#pragma unroll
    for (int u = 0; u < kCrossEntropyPacks; ++u) present[u] = coming[u];
    const int64_t here = left;
    next += kCrossEntropyPacks * lanes;
    left -= kCrossEntropyPacks * lanes;
    load();
#pragma unroll
    for (int u = 0; u < kCrossEntropyPacks; ++u) {
      if (u * lanes < here) add_pack(present[u]);
    }
  }
  const auto add_one = [&](int64_t i) {
    const C value[1] = {to_compute(row[i])};
    sums.add(value, anchor);
  };
  for (int64_t i = lane; i < head; i += lanes) add_one(i);
  for (int64_t i = head + count * kPack + lane; i < n; i += lanes) add_one(i);
  return sums;
}

// --- sums over a row in registers -----------------------------------------------

// Joins `value` over the lanes of a row, at most 32; all of them get the result.
template <class C, class Join>
__device__ C joined_lanes(C value, int lanes, Join join) {
#pragma unroll
  for (int far = 16; far > 0; far /= 2) {
    const C other = __shfl_xor_sync(~0u, value, far);
    if (far < lanes) value = join(value, other);
  }
  return value;
}

template <class T>
__device__ uint4 pack_of_nothing() {
  T values[kPackOf<T>];
  for (T& value : values) value = from_compute<T>(-infinity<compute_t<T>>());
  uint4 pack;
  memcpy(&pack, values, sizeof(pack));
  return pack;
}

// The sums of a row of whole packs, of which a lane has kCrossEntropyPacks, `lanes` apart: those
// from `count` on are packs of nothing.
template <class T, bool kSmooth>
__device__ RowSums<T, kSmooth> sums_of_packs(const uint4 (&packs)[kCrossEntropyPacks], int count,
                                             int lane, int lanes) {
  using C = compute_t<T>;
  using Math = MathFor<T>;
  constexpr int kPack = kPackOf<T>;
  C values[kCrossEntropyPacks][kPack];
  RowSums<T, kSmooth> sums;
#pragma unroll
  for (int u = 0; u < kCrossEntropyPacks; ++u) {
    unpack_vector<T>(packs[u], values[u]);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sums.most = fmax(sums.most, values[u][i]);  // leaves NaN out
    }
  }
  const auto add = [](C a, C b) { return a + b; };
  sums.most = joined_lanes(sums.most, lanes, [](C a, C b) { return fmax(a, b); });
  const C base = RowSums<T, kSmooth>::above_minus_infinity(sums.most);
#pragma unroll
  for (int u = 0; u < kCrossEntropyPacks; ++u) {
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      sums.sum += Math::exp(values[u][i] - base);
      if constexpr (kSmooth) {
        if (lane + u * lanes < count) sums.total += values[u][i] - base;
      }
    }
  }
  sums.sum = joined_lanes(sums.sum, lanes, add);
  if constexpr (kSmooth) sums.total = joined_lanes(sums.total, lanes, add);
  return sums;
}

}  // namespace cuda_ops
