// Packed integers of four bits, with a scale for each block of them: the plain description. No
// torch, no CUDA.
#pragma once

#include "dtype.h"

namespace cuda_ops {

// All tensors are dense. A row is whole blocks, so number i of all belongs to block i / `block`.
struct DequantizeInt4 {
  const uint8_t* q = nullptr;
  const void* scale = nullptr;
  const void* zero_point = nullptr;  // null: the integers have a sign
  void* out = nullptr;
  int64_t bytes = 0;                  // of q
  int64_t block = 1;                  // numbers
  DType dtype = DType::kUnsupported;  // of scale, zero_point and out
};

}  // namespace cuda_ops
