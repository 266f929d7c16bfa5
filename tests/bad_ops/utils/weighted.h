// x times a weight for each element of a row: what operators that free the weight's copy compute.
#pragma once

#include "bad.h"

namespace cuda_ops {

inline Tensor weighted_cpu(const Tensor& x_, const Tensor& weight_) {
  const Tensor x = contiguous(x_), weight = contiguous(weight_);
  Tensor out = empty(shape_of(x), x);
  visit_cpu<DType::kFloat64, DType::kFloat32>(dtype_of(x), [&](auto tag) {
    using T = decltype(tag);
    const T* in = static_cast<const T*>(x.const_data_ptr());
    const T* weights = static_cast<const T*>(weight.const_data_ptr());
    T* products = static_cast<T*>(out.mutable_data_ptr());
    for (int64_t i = 0; i < x.numel(); ++i) products[i] = in[i] * weights[i % weight.numel()];
  });
  return out;
}

}  // namespace cuda_ops
