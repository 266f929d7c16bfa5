// Tensors as rows of neighbors: the binding's side of rows.h.
#pragma once

#include "tensor.h"

namespace cuda_ops {

// Whether each row is one run of neighbors and rows are equally far apart.
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

// After even rows were written: gives `x` what a copy of it holds.
inline void copy_back(const Tensor& x, const Tensor& rows) {
  if (x.get() == rows.get()) return;
  detail::check_torch(aoti_torch_copy_(x.get(), rows.get(), 0), "copy a tensor");
}

}  // namespace cuda_ops
