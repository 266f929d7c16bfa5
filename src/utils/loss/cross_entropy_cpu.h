// Cross entropy on the CPU, in float64 and in an order that the number of threads does not change.
#pragma once

#include <limits>

#include "elementwise.h"
#include "loss/cross_entropy.h"

namespace cuda_ops {

namespace detail {

inline int64_t logits_grain(const CrossEntropy& p) { return 1 + 16384 / (p.n + 1); }

template <class T>
double row_loss(const CrossEntropy& p, int64_t row) {
  const T* logits = static_cast<const T*>(p.logits) + row * p.step;
  const auto at = [&](int64_t i) { return static_cast<double>(logits[i]); };
  double most = -std::numeric_limits<double>::infinity(), sum = 0, total = 0;
  for (int64_t i = 0; i < p.n; ++i) most = std::fmax(most, at(i));
  const double base = std::isinf(most) && most < 0 ? 0 : most;
  for (int64_t i = 0; i < p.n; ++i) {
    sum += std::exp(at(i) - base);
    total += at(i) - base;
  }
  const double log_sum = std::log(sum), loss = log_sum - (at(p.labels[row]) - most);
  p.lse[row] = most + log_sum;
  if (p.smoothing == 0) return loss;
  const double mean = (base - most) + total / static_cast<double>(p.n);
  return (1 - p.smoothing) * loss + p.smoothing * (log_sum - mean);
}

}  // namespace detail

// `labels` are in range.
inline void cross_entropy_cpu(const CrossEntropy& p) {
  std::vector<double> losses(static_cast<size_t>(p.rows));
  const auto is_ignored = [&](int64_t row) { return p.labels[row] == p.ignore_index; };
  visit_floating_cpu(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.rows, detail::logits_grain(p), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (is_ignored(row)) {
          p.lse[row] = 0;
        } else {
          losses[row] = detail::row_loss<T>(p, row);
        }
      }
    });
    T* const out = static_cast<T*>(p.loss);
    double sum = 0;
    int64_t count = 0;
    for (int64_t row = 0; row < p.rows; ++row) {
      if (!p.is_total) out[row] = static_cast<T>(losses[row]);
      sum += losses[row];
      count += !is_ignored(row);
    }
    if (!p.is_total) return;
    *p.count = count;
    out[0] = static_cast<T>(p.is_mean ? sum / static_cast<double>(count) : sum);
  });
}

inline void cross_entropy_gradient_cpu(const CrossEntropyGradient& g) {
  const CrossEntropy& p = g.forward;
  visit_floating_cpu(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    const double even = p.smoothing / static_cast<double>(p.n);
    parallel_for(p.rows, detail::logits_grain(p), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* logits = static_cast<const T*>(p.logits) + row * p.step;
        T* out = static_cast<T*>(g.grad_logits) + row * g.out_step;
        const int64_t label = p.labels[row];
        if (label == p.ignore_index) {
          std::fill(out, out + p.n, static_cast<T>(0));
          continue;
        }
        auto scale = static_cast<double>(static_cast<const T*>(g.grad_loss)[p.is_total ? 0 : row]);
        if (p.is_mean) scale /= static_cast<double>(*p.count);
        for (int64_t i = 0; i < p.n; ++i) {
          const double probability = std::exp(static_cast<double>(logits[i]) - p.lse[row]);
          const double at_label = i == label ? 1 - p.smoothing : 0;
          out[i] = static_cast<T>(scale * (probability - even - at_label));
        }
      }
    });
  });
}

}  // namespace cuda_ops
