// A mixture of experts on the CPU, in float64: made to be right rather than fast. Each function is
// the launch of the same name on the CPU.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "elementwise.h"
#include "moe/moe.h"

namespace cuda_ops {

// Calls `body(tag, compute, token)` for each token; a thread takes at least `grain` of them.
template <class Body>
void for_each_token(DType dtype, int64_t tokens, int64_t grain, Body body) {
  visit_floating_cpu(dtype, [&](auto tag) {
    using C = std::conditional_t<std::is_same_v<decltype(tag), double>, double, float>;
    parallel_for(tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) body(tag, C(), token);
    });
  });
}

inline void moe_map_cpu(const MoeMap& p) {
  std::vector<int32_t> next(p.experts + 2);
  const auto bin = [&](int64_t i) {
    const int64_t expert = p.chosen[i];
    return expert >= 0 && expert < p.experts ? expert : p.experts;
  };
  for (int64_t i = 0; i < p.assignments; ++i) ++next[bin(i) + 1];
  for (int64_t e = 0; e <= p.experts; ++e) next[e + 1] += next[e];
  for (int64_t e = 0; e <= p.experts; ++e) p.offsets[e] = next[e];
  for (int64_t i = 0; i < p.assignments; ++i) p.order[next[bin(i)]++] = int32_t(i);
}

namespace detail {

inline double silu(double v) { return v * sigmoid(v); }

// y[i] = sum over j of matrix[i, j] * v[j], added to `out`.
template <class T, class V>
void add_product(std::vector<double>& out, const T* matrix, const V* v, int64_t columns) {
  for (size_t i = 0; i < out.size(); ++i) {
    for (int64_t j = 0; j < columns; ++j) out[i] += double(matrix[i * columns + j]) * double(v[j]);
  }
}

// y[j] = sum over i of v[i] * matrix[i, j].
template <class T, class V>
std::vector<double> transposed_product(const T* matrix, const V* v, int64_t rows, int64_t columns) {
  std::vector<double> out(columns);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) out[j] += double(v[i]) * double(matrix[i * columns + j]);
  }
  return out;
}

inline bool is_known(const MoeExperts& p, int64_t assignment) {
  const int64_t expert = p.map.chosen[assignment];
  return expert >= 0 && expert < p.map.experts;
}

// Where each assignment lies in the order of experts.
inline std::vector<int64_t> positions_of(const MoeMap& map) {
  std::vector<int64_t> positions(map.assignments);
  for (int64_t at = 0; at < map.assignments; ++at) positions[map.order[at]] = at;
  return positions;
}

// The gradients of weights and, at the position of each assignment, of gate and up and
// weight * silu(gate) * up.
inline void rows_backward_down_cpu(const MoeExpertsBackward& b,
                                   const std::vector<int64_t>& positions,
                                   std::vector<double>& activations) {
  const MoeExperts& p = b.forward;
  for_each_token(p.dtype, p.tokens, 1, [&](auto tag, auto compute, int64_t token) {
    using T = decltype(tag);
    using C = decltype(compute);
    const T* grad_out = static_cast<const T*>(b.grad_out) + token * p.hidden;
    for (int64_t i = token * p.top_k; i < (token + 1) * p.top_k; ++i) {
      T* grad_gates = static_cast<T*>(b.grad_gate_up) + positions[i] * 2 * p.inner;
      double along = 0;
      std::fill_n(grad_gates, 2 * p.inner, static_cast<T>(0.0));
      if (is_known(p, i)) {
        const int64_t expert = p.map.chosen[i];
        const T* w_down = static_cast<const T*>(p.w_down) + expert * p.inner * p.hidden;
        const T* gates = static_cast<const T*>(p.gate_up) + i * 2 * p.inner;
        const double weight = static_cast<const C*>(p.weights)[i];
        const auto grads = transposed_product(w_down, grad_out, p.hidden, p.inner);
        for (int64_t n = 0; n < p.inner; ++n) {
          const double gate = gates[n], up = gates[p.inner + n], s = sigmoid(gate);
          along += grads[n] * silu(gate) * up;
          grad_gates[n] = static_cast<T>(weight * grads[n] * up * (s + gate * s * sigmoid(-gate)));
          grad_gates[p.inner + n] = static_cast<T>(weight * grads[n] * silu(gate));
          activations[positions[i] * p.inner + n] = weight * silu(gate) * up;
        }
      }
      if (b.grad_weights != nullptr) static_cast<C*>(b.grad_weights)[i] = C(along);
    }
  });
}

// out[e] = sum over the positions of e's assignments of left(at)^T right(at).
template <class Left, class Right>
void add_outer_products(const MoeExperts& p, void* out, int64_t m, int64_t n, Left left,
                        Right right) {
  visit_floating_cpu(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.map.experts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) {
        std::vector<double> sums(m * n);
        for (int32_t at = p.map.offsets[e]; at < p.map.offsets[e + 1]; ++at) {
          for (int64_t row = 0; row < m; ++row) {
            const double value = left(tag, at, row);
            for (int64_t column = 0; column < n; ++column) {
              sums[row * n + column] += value * right(tag, at, column);
            }
          }
        }
        T* matrix = static_cast<T*>(out) + e * m * n;
        for (int64_t i = 0; i < m * n; ++i) matrix[i] = static_cast<T>(sums[i]);
      }
    });
  });
}

}  // namespace detail

inline void moe_experts_cpu(const MoeExperts& p) {
  for_each_token(p.dtype, p.tokens, 1, [&](auto tag, auto compute, int64_t token) {
    using T = decltype(tag);
    const T* x = static_cast<const T*>(p.x) + token * p.hidden;
    std::vector<double> sums(p.hidden);
    for (int64_t i = token * p.top_k; i < (token + 1) * p.top_k; ++i) {
      std::vector<double> gate_up(2 * p.inner), activations(p.inner), result(p.hidden);
      if (detail::is_known(p, i)) {
        const int64_t expert = p.map.chosen[i];
        const T* w_gate_up = static_cast<const T*>(p.w_gate_up) + expert * 2 * p.inner * p.hidden;
        const T* w_down = static_cast<const T*>(p.w_down) + expert * p.inner * p.hidden;
        detail::add_product(gate_up, w_gate_up, x, p.hidden);
        for (int64_t n = 0; n < p.inner; ++n) {
          activations[n] = detail::silu(gate_up[n]) * gate_up[p.inner + n];
        }
        detail::add_product(result, w_down, activations.data(), p.inner);
      }
      const double weight = static_cast<const decltype(compute)*>(p.weights)[i];
      for (int64_t h = 0; h < p.hidden; ++h) sums[h] += weight * result[h];
      if (p.gate_up == nullptr) continue;
      T* kept = static_cast<T*>(p.gate_up) + i * 2 * p.inner;
      for (int64_t n = 0; n < 2 * p.inner; ++n) kept[n] = static_cast<T>(gate_up[n]);
    }
    T* out = p.out.row<T>(token, p.hidden);
    for (int64_t h = 0; h < p.hidden; ++h) out[h] = static_cast<T>(sums[h]);
  });
}

inline void moe_experts_backward_down_cpu(const MoeExpertsBackward& b) {
  const MoeExperts& p = b.forward;
  moe_map_cpu(p.map);
  std::vector<double> activations(p.map.assignments * p.inner);
  detail::rows_backward_down_cpu(b, detail::positions_of(p.map), activations);
  if (b.grad_w_down == nullptr) return;
  const auto left = [&](auto tag, int64_t at, int64_t h) {
    const int64_t token = p.map.order[at] / p.top_k;
    return double(static_cast<const decltype(tag)*>(b.grad_out)[token * p.hidden + h]);
  };
  const auto right = [&](auto, int64_t at, int64_t n) { return activations[at * p.inner + n]; };
  detail::add_outer_products(p, b.grad_w_down, p.hidden, p.inner, left, right);
}

// Computes the map, and grad_x where it is wanted.
inline void moe_experts_backward_x_cpu(const MoeExpertsBackward& b) {
  const MoeExperts& p = b.forward;
  moe_map_cpu(p.map);
  if (b.grad_x == nullptr) return;
  const std::vector<int64_t> positions = detail::positions_of(p.map);
  for_each_token(p.dtype, p.tokens, 1, [&](auto tag, auto, int64_t token) {
    using T = decltype(tag);
    std::vector<double> grad_x(p.hidden);
    for (int64_t i = token * p.top_k; i < (token + 1) * p.top_k; ++i) {
      if (!detail::is_known(p, i)) continue;
      const T* w_gate_up =
          static_cast<const T*>(p.w_gate_up) + p.map.chosen[i] * 2 * p.inner * p.hidden;
      const T* grad_gates = static_cast<const T*>(b.grad_gate_up) + positions[i] * 2 * p.inner;
      const auto back = detail::transposed_product(w_gate_up, grad_gates, 2 * p.inner, p.hidden);
      for (int64_t h = 0; h < p.hidden; ++h) grad_x[h] += back[h];
    }
    T* out = static_cast<T*>(b.grad_x) + token * p.hidden;
    for (int64_t h = 0; h < p.hidden; ++h) out[h] = static_cast<T>(grad_x[h]);
  });
}

// Runs after the one for x, whose map it needs.
inline void moe_experts_backward_w_gate_up_cpu(const MoeExpertsBackward& b) {
  const MoeExperts& p = b.forward;
  const auto left = [&](auto tag, int64_t at, int64_t n) {
    return double(static_cast<const decltype(tag)*>(b.grad_gate_up)[at * 2 * p.inner + n]);
  };
  const auto right = [&](auto tag, int64_t at, int64_t h) {
    const int64_t token = p.map.order[at] / p.top_k;
    return double(static_cast<const decltype(tag)*>(p.x)[token * p.hidden + h]);
  };
  detail::add_outer_products(p, b.grad_w_gate_up, 2 * p.inner, p.hidden, left, right);
}

}  // namespace cuda_ops
