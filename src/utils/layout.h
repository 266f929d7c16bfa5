// What every plain description of a tensor's memory shares. No torch, no CUDA.
#pragma once

#include <cstdint>

namespace cuda_ops {

// The most dims that a kernel walks, those of size 1 left out.
constexpr int kMaxDims = 16;

inline bool is_aligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

}  // namespace cuda_ops
