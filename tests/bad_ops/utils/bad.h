// What the wrong operators share. Each is y = x but for its one bug, which its first line names.
#pragma once

#pragma GCC optimize("O0")  // a quarter less time to compile; speed is of no interest here

#include <cstring>

#include "binding.h"
#include "raw.h"

namespace cuda_ops {

constexpr DType kWide[] = {DType::kFloat64, DType::kFloat32};

inline Raw raw(const Tensor& out, const Tensor& x) {
  return {dtype_of(x), x.const_data_ptr(), out.mutable_data_ptr(), x.numel()};
}

// f(const T* x, T* out, n) with the type of the elements.
template <class F>
void visit_raw(const Raw& problem, F f) {
  if (problem.dtype == DType::kFloat64)
    f(static_cast<const double*>(problem.x), static_cast<double*>(problem.out), problem.numel);
  else
    f(static_cast<const float*>(problem.x), static_cast<float*>(problem.out), problem.numel);
}

// y = f(x), right in every way.
template <class F>
Tensor mapped(const Tensor& x, F f) {
  Tensor out = empty_elementwise(x);
  map_cpu(strided(out, x), f);
  return out;
}

// What a launcher makes of contiguous buffers, in the layout of x: right around a wrong kernel.
template <class Launcher>
Tensor flattened(const Tensor& x, Launcher launcher) {
  const Tensor dense = contiguous(x);
  Tensor flat = empty({x.sizes().begin(), x.sizes().end()}, x), out = empty_elementwise(x);
  launch(x, [&](cudaStream_t stream) { return launcher(raw(flat, dense), stream); });
  detail::check_torch(aoti_torch_copy_(out.get(), flat.get(), 0), "copy the result");
  return out;
}

inline Tensor copied(const Tensor& x) {
  return mapped(x, [](double v) { return v; });
}

}  // namespace cuda_ops
