#pragma once

#include <cstddef>

#include "dtype.h"

// `rows` sums of `n` contiguous elements each.
// Without a workspace the launch only says how many bytes it needs.
struct CubSum {
  cuda_ops::DType dtype;
  const void* data;
  void* out;
  int64_t rows, n;
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};
