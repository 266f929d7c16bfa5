// Norms over rows on the CPU, in float64 and in an order that the number of threads does not
// change.
#pragma once

#include "elementwise.h"
#include "norm/norm.h"

namespace cuda_ops {

namespace detail {

// y = (x - mean) scale. The mean is in two parts, since its rounding would be multiplied by scale.
struct RowStatistics {
  double first = 0, second = 0, scale = 0;

  double without_mean(double value) const { return (value - first) - second; }
};

template <class T>
RowStatistics statistics_of(const T* x, const Norm& p, bool centered) {
  RowStatistics row;
  const auto n = static_cast<double>(p.n);
  const auto mean_without = [&](double first) {
    double left = 0;
    for (int64_t i = 0; i < p.n; ++i) left += static_cast<double>(x[i]) - first;
    return left / n;
  };
  // Twice, since a sum of many numbers is rounded: equal ones are then exactly 0 without their
  // mean.
  for (int pass = 0; centered && pass < 2; ++pass) row.first += mean_without(row.first);
  if (centered) row.second = mean_without(row.first);
  double sum = 0;
  for (int64_t i = 0; i < p.n; ++i) {
    const double value = row.without_mean(static_cast<double>(x[i]));
    sum += value * value;
  }
  row.scale = 1 / std::sqrt(sum / n + p.eps);
  return row;
}

inline int64_t rows_grain(const Norm& p) { return 1 + 16384 / (p.n + 1); }

// Calls body(T{}, W{}) with the types of x and of the weights.
template <class Body>
void visit_norm_cpu(const Norm& p, Body&& body) {
  visit_floating_cpu(p.dtype, [&](auto tag) {
    if (p.weight_dtype == p.dtype) return body(tag, tag);
    body(tag, float{});
  });
}

}  // namespace detail

inline void norm_cpu(NormKind kind, const Norm& p) {
  detail::visit_norm_cpu(p, [&](auto tag, auto weight_tag) {
    using T = decltype(tag);
    using W = decltype(weight_tag);
    const auto* weight = static_cast<const W*>(p.weight);
    const auto* bias = static_cast<const W*>(p.bias);
    parallel_for(p.rows, detail::rows_grain(p), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(p.x) + row * p.x_step;
        T* out = static_cast<T*>(p.out) + row * p.out_step;
        if (kind == NormKind::kAddRms) {
          T* residual = static_cast<T*>(p.residual) + row * p.residual_step;
          for (int64_t i = 0; i < p.n; ++i) {
            residual[i] =
                static_cast<T>(static_cast<double>(residual[i]) + static_cast<double>(x[i]));
          }
          x = residual;
        }
        const auto found = detail::statistics_of(x, p, kind == NormKind::kLayer);
        for (int64_t i = 0; i < p.n; ++i) {
          double value = found.without_mean(static_cast<double>(x[i])) * found.scale;
          value *= static_cast<double>(weight[i]);
          if (bias != nullptr) value += static_cast<double>(bias[i]);
          out[i] = static_cast<T>(value);
        }
      }
    });
  });
}

inline void norm_gradient_cpu(NormKind kind, const NormGradient& p) {
  const Norm& norm = p.norm;
  std::vector<detail::RowStatistics> found(static_cast<size_t>(norm.rows));
  detail::visit_norm_cpu(norm, [&](auto tag, auto weight_tag) {
    using T = decltype(tag);
    using W = decltype(weight_tag);
    const auto* x = static_cast<const T*>(norm.x);
    const auto* grad_out = static_cast<const T*>(p.grad_out);
    const auto* weight = static_cast<const W*>(norm.weight);
    const int64_t n = norm.n;
    const auto value = [&](int64_t row, int64_t i) {
      return found[row].without_mean(static_cast<double>(x[row * n + i])) * found[row].scale;
    };
    const auto grad = [&](int64_t row, int64_t i) {
      return static_cast<double>(grad_out[row * n + i]);
    };
    parallel_for(norm.rows, detail::rows_grain(norm), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        found[row] = detail::statistics_of(x + row * n, norm, kind == NormKind::kLayer);
        double sum = 0, along = 0;
        for (int64_t i = 0; i < n; ++i) {
          const double g = grad(row, i) * static_cast<double>(weight[i]);
          along += g * value(row, i);
          if (kind == NormKind::kLayer) sum += g;
        }
        T* grad_x = static_cast<T*>(p.grad_x) + row * n;
        for (int64_t i = 0; i < n; ++i) {
          const double g = grad(row, i) * static_cast<double>(weight[i]);
          const double left = g - (sum + value(row, i) * along) / static_cast<double>(n);
          grad_x[i] = static_cast<T>(found[row].scale * left);
        }
      }
    });
    parallel_for(n, 1 + 16384 / (norm.rows + 1), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double of_weight = 0, of_bias = 0;
        for (int64_t row = 0; row < norm.rows; ++row) {
          of_weight += grad(row, i) * value(row, i);
          of_bias += grad(row, i);
        }
        static_cast<W*>(p.grad_weight)[i] = static_cast<W>(of_weight);
        if (p.grad_bias != nullptr) static_cast<W*>(p.grad_bias)[i] = static_cast<W>(of_bias);
      }
    });
  });
}

}  // namespace cuda_ops
