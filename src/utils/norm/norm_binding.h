// From tensors to a Norm: the binding's side of norm.h.
#pragma once

#include "norm/norm_cpu.h"
#include "points_binding.h"

namespace cuda_ops {

// Whether each row is one run of neighbours and rows are equally far apart.
inline bool has_even_rows(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  if (x.size(last) > 1 && x.stride(last) != 1) return false;
  int64_t faster = 0, step = 0, size = 1;  // of the dims so far
  for (int64_t d = last; d-- > 0;) {
    if (x.size(d) == 1) continue;
    if (faster++ > 0 && x.stride(d) != step * size) return false;
    if (faster == 1) step = x.stride(d);
    size *= x.size(d);
  }
  return true;
}

// The step from one row of such a tensor to the next.
inline int64_t row_step(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  for (int64_t d = last; d-- > 0;) {
    if (x.size(d) != 1) return x.stride(d);
  }
  return x.size(last);
}

// The same values with even rows: `x` itself, or a copy.
inline Tensor even_rows(const Tensor& x) {
  return has_even_rows(x) ? x : contiguous(x, shape_of(x));
}

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
