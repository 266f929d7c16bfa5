// What a CPU runs in place of an operator's own kernel, `.cpu<f, g>()`: torch's operators, called
// so that the result has the layout that the operator's own kernel gives it.
#pragma once

#include "compose.h"
#include "elementwise.h"

namespace cuda_ops {

// out = op(inputs...) elementwise, by the overload of torch's operator that takes `out` last.
template <class... Inputs>
Tensor elementwise_by_torch(const char* op, const char* overload, const Inputs&... inputs) {
  Tensor out = empty_elementwise(inputs...);
  strided(out, inputs...);  // refuses what the kernel does, so that all devices do
  call<Tensor>(op, overload, inputs..., out);
  return out;
}

// A result of torch's that may lie otherwise than an elementwise operator's: without a value if so.
template <class... Inputs>
std::optional<Tensor> as_elementwise(const Tensor& out, const Tensor& first,
                                     const Inputs&... rest) {
  const View view = first;
  const bool keeps = detail::is_dense(view) && (detail::same_layout(view, View(rest)) && ... &&
                                                detail::same_layout(view, View(out)));
  return keeps ? std::optional(out) : std::nullopt;
}

// Several of torch's operators in a row round once too: 16-bit numbers go through them in float32.
inline Tensor widened(const Tensor& x) {
  if (size_of(dtype_of(x)) > 2) return x;
  const std::optional<torch::headeronly::MemoryFormat> as_is;
  return call<Tensor>("aten::to", "dtype", x, ScalarType::Float, false, false, as_is);
}

// Rounds `x`, of the same shape, to the dtype of `out`.
inline void write_rounded(const Tensor& out, const Tensor& x) {
  detail::check_torch(aoti_torch_copy_(out.get(), x.get(), 0), "copy a tensor");
}

// The sums of x over some dims, in `out`. With 16 bits torch rounds parts of a long sum.
inline void sum_by_torch(const Tensor& x, const std::vector<int64_t>& dims, const Tensor& out) {
  std::optional<ScalarType> dtype;
  const auto over = std::optional(dims);
  if (size_of(dtype_of(x)) > 2) {
    call<Tensor>("aten::sum", "IntList_out", x, over, false, dtype, out);
  } else {
    dtype = ScalarType::Float;
    write_rounded(out, call<Tensor>("aten::sum", "dim_IntList", x, over, false, dtype));
  }
}

}  // namespace cuda_ops
