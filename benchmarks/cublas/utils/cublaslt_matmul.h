#pragma once

#include <cstddef>

#include "dtype.h"

// out (m, n) = a (m, k) @ b (k, n), row by row. A factor is contiguous, or the transpose of a
// contiguous matrix.
struct CublasLtMatmul {
  cuda_ops::DType dtype;
  const void *a, *b;
  void* out;
  int64_t m, n, k;
  bool a_transposed, b_transposed;
  // Float32 alone: multiply in TF32.
  bool tf32;
  // Which of the algorithms that the library suggests, from 0 on.
  int algorithm;
  void* workspace;
  std::size_t workspace_bytes;
};

// How many suggestions are asked for.
constexpr int kCublasLtAlgorithms = 10;
