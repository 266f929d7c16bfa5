// Sums over rows on the CPU, in float64 and in an order that the number of
// threads does not change.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "elementwise.h"
#include "reduce/reduce.h"

namespace cuda_ops {

namespace detail {

// Each of `rows` sums has `n` points, of which value(row, k) is one: partial
// sums of a fixed number of points first, so that threads share a long row.
template <class T, class Value>
void row_totals(int64_t rows, int64_t n, T* out, const Value& value) {
  constexpr int64_t kChunk = 16384;
  const int64_t chunks = n > 0 ? (n + kChunk - 1) / kChunk : 1;
  std::vector<double> partials(static_cast<size_t>(rows * chunks));
  parallel_for(rows * chunks, 1 + kChunk / (n / chunks + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / chunks, first = i % chunks * kChunk;
      for (int64_t k = first; k < std::min(first + kChunk, n); ++k) partials[i] += value(row, k);
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t c = 0; c < chunks; ++c) sum += partials[row * chunks + c];
    out[row] = static_cast<T>(sum);
  }
}

}  // namespace detail

inline void row_sums_cpu(const RowSums& p) {
  visit_floating_cpu(p.rows.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto value = [&](int64_t row, int64_t k) {
      const T* data = static_cast<const T*>(p.rows.data);
      return static_cast<double>(data[p.rows.offset_at(row) + k * p.stride]);
    };
    detail::row_totals(p.rows.numel, p.n, static_cast<T*>(p.out), value);
  });
}

inline void total_cpu(const Points& x, void* out) {
  visit_floating_cpu(x.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto value = [&](int64_t, int64_t i) {
      return static_cast<double>(static_cast<const T*>(x.data)[x.offset_at(i)]);
    };
    detail::row_totals(1, x.numel, static_cast<T*>(out), value);
  });
}

}  // namespace cuda_ops
