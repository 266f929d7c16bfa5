// From tensors to an Attention: the binding's side of attention.h.
#pragma once

#include "attention/attention_cpu.h"
#include "binding.h"

namespace cuda_ops {

// The same values with the elements of each row adjacent: `x` itself, or a copy.
inline Tensor dense_rows(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.size(last) == 1 || x.stride(last) == 1 ? x : contiguous(x, shape_of(x));
}

inline AttentionShape shape_of_attention(const Tensor& q, const Tensor& k, bool causal,
                                         std::optional<double> scale) {
  AttentionShape shape;
  shape.queries = q.size(q.dim() - 2);
  shape.keys = k.size(k.dim() - 2);
  const int64_t dim = q.size(q.dim() - 1);
  shape.dim = static_cast<int>(dim);
  shape.causal = causal;
  shape.scale = scale ? *scale : 1 / std::sqrt(static_cast<double>(dim));
  return shape;
}

// Results have the loop dims of all tensors together.
inline std::vector<int64_t> with_core(std::vector<int64_t> loop,
                                      std::initializer_list<int64_t> core) {
  loop.insert(loop.end(), core);
  return loop;
}

}  // namespace cuda_ops
