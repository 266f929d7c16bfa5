// gelu in its tanh approximation by torch's operators. By aten::gelu it would take a str, which
// torch's C interface leaks.
#pragma once

#include "by_torch.h"
#include "gelu.h"

namespace cuda_ops {

// (1 + tanh(y)) / 2 is sigmoid(2 y).
inline Tensor gelu_by_torch(const Tensor& x) {
  const Tensor cubic = mul(mul(x, x), scalar(gelu::kScale * gelu::kCubic, x));
  const Tensor y = mul(add(cubic, scalar(gelu::kScale, x)), x);
  return mul(call<Tensor>("aten::sigmoid", "", y), x);
}

}  // namespace cuda_ops
