// Attention and its gradient on the CPU, in float64 and in an order that the number of threads does
// not change.
#pragma once

#include "attention/attention.h"
#include "elementwise.h"

namespace cuda_ops {

namespace detail {

// Where the rows of each operand of one head are.
template <class T, int Inputs, int Outputs>
struct AttentionHead {
  const Strided<Inputs, Outputs>& heads;
  std::array<int64_t, Inputs + Outputs> at;

  AttentionHead(const Strided<Inputs, Outputs>& of, int64_t head)
      : heads(of), at(of.offsets_at(head)) {}

  T* row(int operand, int64_t offset) const {
    return static_cast<T*>(heads.operands[operand].data) + at[operand] + offset;
  }
};

template <class T>
double dot(const T* a, const T* b, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

template <class T>
void add_scaled(std::vector<double>& sums, double by, const T* row) {
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += by * static_cast<double>(row[i]);
}

template <class T>
void store(T* row, const std::vector<double>& sums, double by) {
  for (size_t i = 0; i < sums.size(); ++i) row[i] = static_cast<T>(sums[i] * by);
}

// Calls body(head, row) for `rows` rows of each head, each of which costs as much as it sees.
template <class Body>
void for_each_row(int64_t heads, int64_t rows, int64_t cost, Body&& body) {
  if (heads * rows == 0) return;
  parallel_for(heads * rows, 1 + 16384 / (cost + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i / rows, i % rows);
  });
}

// Calls body(T{}, L{}) with the types of the operands and of the lse.
template <class Body>
void visit_attention_cpu(DType dtype, Body&& body) {
  visit_floating_cpu(dtype, [&](auto tag) {
    using T = decltype(tag);
    body(tag, std::conditional_t<std::is_same_v<T, double>, double, float>{});
  });
}

}  // namespace detail

inline void attend_cpu(const Attention& p) {
  const AttentionShape& shape = p.shape;
  const auto sum_over = static_cast<size_t>(shape.dim);
  detail::visit_attention_cpu(p.heads.dtype, [&](auto tag, auto lse_tag) {
    using T = decltype(tag);
    using L = decltype(lse_tag);
    detail::for_each_row(
        p.heads.numel, shape.queries, shape.keys * shape.dim, [&](int64_t head, int64_t query) {
          const detail::AttentionHead<T, 3, 1> of(p.heads, head);
          const int64_t seen = shape.seen(query + 1);
          std::vector<double> weights(static_cast<size_t>(seen)), sums(sum_over);
          double most = -INFINITY, total = 0;
          for (int64_t key = 0; key < seen; ++key) {
            weights[key] = shape.scale * detail::dot(of.row(1, query * p.q_step),
                                                     of.row(2, key * p.k_step), shape.dim);
            most = std::fmax(most, weights[key]);
          }
          const double base = most == -INFINITY ? 0 : most;
          for (int64_t key = 0; key < seen; ++key) {
            const double weight = std::exp(weights[key] - base);
            total += weight;
            detail::add_scaled(sums, weight, of.row(3, key * p.v_step));
          }
          detail::store(of.row(0, query * shape.dim), sums, total == 0 ? 0 : 1 / total);
          static_cast<L*>(p.lse)[head * shape.queries + query] =
              static_cast<L>(total == 0 ? -INFINITY : most + std::log(total));
        });
  });
}

inline void attention_gradient_cpu(const AttentionGradient& p) {
  const AttentionShape& shape = p.shape;
  const auto sum_over = static_cast<size_t>(shape.dim);
  std::vector<double> delta(static_cast<size_t>(p.heads.numel * shape.queries));
  detail::visit_attention_cpu(p.heads.dtype, [&](auto tag, auto lse_tag) {
    using T = decltype(tag);
    using L = decltype(lse_tag);
    using Head = detail::AttentionHead<T, 5, 3>;
    const auto weight_of = [&](const Head& of, int64_t head, int64_t query, int64_t key) {
      const auto lse =
          static_cast<double>(static_cast<const L*>(p.lse)[head * shape.queries + query]);
      const double score = shape.scale * detail::dot(of.row(3, query * p.q_step),
                                                     of.row(4, key * p.k_step), shape.dim);
      return lse == -INFINITY ? 0 : std::exp(score - lse);
    };
    const auto of_score = [&](const Head& of, int64_t head, int64_t query, int64_t key,
                              double weight) {
      const double of_weight =
          detail::dot(of.row(6, query * p.grad_step), of.row(5, key * p.v_step), shape.dim);
      return weight * (of_weight - delta[head * shape.queries + query]);
    };
    detail::for_each_row(
        p.heads.numel, shape.queries, shape.keys * shape.dim, [&](int64_t head, int64_t query) {
          const Head of(p.heads, head);
          delta[head * shape.queries + query] =
              detail::dot(of.row(6, query * p.grad_step), of.row(7, query * p.out_step), shape.dim);
          std::vector<double> sums(sum_over);
          for (int64_t key = 0; key < shape.seen(query + 1); ++key) {
            const double weight = weight_of(of, head, query, key);
            detail::add_scaled(sums, of_score(of, head, query, key, weight),
                               of.row(4, key * p.k_step));
          }
          detail::store(of.row(0, query * shape.dim), sums, shape.scale);
        });
    detail::for_each_row(
        p.heads.numel, shape.keys, shape.queries * shape.dim, [&](int64_t head, int64_t key) {
          const Head of(p.heads, head);
          std::vector<double> of_key(sum_over), of_value(sum_over);
          for (int64_t query = shape.causal ? key : 0; query < shape.queries; ++query) {
            const double weight = weight_of(of, head, query, key);
            detail::add_scaled(of_value, weight, of.row(6, query * p.grad_step));
            detail::add_scaled(of_key, of_score(of, head, query, key, weight),
                               of.row(3, query * p.q_step));
          }
          detail::store(of.row(1, key * shape.dim), of_key, shape.scale);
          detail::store(of.row(2, key * shape.dim), of_value, 1);
        });
  });
}

}  // namespace cuda_ops
