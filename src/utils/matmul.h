// The plain description of a batched matrix product, shared by the binding and
// the kernel. No torch, no CUDA.
#pragma once

#include "strided.h"

namespace cuda_ops {

// Elements to step per row and per column. A transpose is the two swapped.
struct MatrixStrides {
  int64_t row = 0;
  int64_t col = 0;
};

// out[m, n] = sum over k of a[m, k] * b[k, n], once per point of `batch`: the
// batch is a strided problem whose operands (out, a, b) are matrices.
struct Matmul {
  int64_t m = 0, n = 0, k = 0;
  Strided<2> batch;
  MatrixStrides out, a, b;
};

}  // namespace cuda_ops
