// From tensors to a Norm: the binding's side of norm.h.
#pragma once

#include "norm/norm_cpu.h"
#include "rows/rows_binding.h"

namespace cuda_ops {

// A weight has the dtype of x, or that in which a half x is computed.
inline void check_weight(const Tensor& x, const Tensor& weight) {
  const DType dtype = dtype_of(x), wide = compute_dtype(dtype), actual = dtype_of(weight);
  if (actual == dtype || actual == wide) return;
  refuse("weight",
         std::string("dtype ") + name(dtype) + " like 'x'" +
             (wide == dtype ? "" : std::string(" or ") + name(wide)),
         name(actual));
}

inline void check_bias(const Tensor& weight, const Tensor& bias) {
  if (dtype_of(bias) == dtype_of(weight)) return;
  refuse("bias", std::string("dtype ") + name(dtype_of(weight)) + " like 'weight'",
         name(dtype_of(bias)));
}

// `x` has even rows, `weight` is dense.
inline Norm norm_of(const Tensor& x, const Tensor& weight, double eps) {
  Norm p;
  p.x = x.const_data_ptr();
  p.weight = weight.const_data_ptr();
  p.n = x.size(x.dim() - 1);
  p.rows = p.n > 0 ? x.numel() / p.n : 0;
  p.x_step = row_step(x);
  p.eps = eps;
  p.dtype = dtype_of(x);
  p.weight_dtype = dtype_of(weight);
  return p;
}

}  // namespace cuda_ops
