// The plain description of gelu(x @ weight^T + bias), shared by the binding and the
// kernel. No torch, no CUDA.
#pragma once

#include "gemm/matmul.h"

namespace cuda_ops {

struct LinearGelu {
  Matmul product;                  // out = x @ weight^T
  const void* bias = nullptr;      // of the columns of out, or laid out as out, or null
  bool bias_as_out = false;        //
  void* preactivation = nullptr;   // laid out as out: also keep the values before gelu
  const void* grad_out = nullptr;  // laid out as out: out = grad_out * the slope of gelu
};

}  // namespace cuda_ops
