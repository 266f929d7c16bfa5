// One tensor as plain numbers, for operators that write their outputs in
// row-major order: point i of the output, and where its input lies. No torch,
// no CUDA.
#pragma once

#include <array>
#include <cstdint>

#include "dtype.h"
#include "layout.h"

namespace cuda_ops {

// Dims run from the fastest to the slowest and are merged where memory allows
// it, so a contiguous tensor has one dim, or none if it holds a single point.
struct Points {
  const void* data = nullptr;
  DType dtype = DType::kUnsupported;
  int64_t numel = 1;
  int dims = 0;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<int64_t, kMaxDims> strides{};  // in elements

  // The offset of point i is i * step.
  constexpr bool is_line(int64_t step) const {
    return dims == 0 || (dims == 1 && strides[0] == step);
  }

  // Every offset is a multiple of `bytes` from an address that is one.
  bool is_aligned(int64_t bytes) const {
    if (!cuda_ops::is_aligned(data, bytes)) return false;
    for (int d = 0; d < dims; ++d) {
      if (strides[d] * size_of(dtype) % bytes != 0) return false;
    }
    return true;
  }

  // Where point `index` lies, in elements. constexpr, so that kernels can call
  // it too; a 64-bit division costs them five times a 32-bit one.
  constexpr int64_t offset_at(int64_t index) const {
    if (dims <= 1) return index * strides[0];
    return numel <= UINT32_MAX ? walk(static_cast<uint32_t>(index)) : walk(index);
  }

  // Adds a dim that is slower than those there.
  constexpr void add_dim(int64_t size, int64_t stride) {
    numel *= size;
    if (size == 1) return;
    if (dims > 0 && stride == strides[dims - 1] * sizes[dims - 1]) {
      sizes[dims - 1] *= size;
      return;
    }
    sizes[dims] = size;
    strides[dims++] = stride;
  }

 private:
  template <class Index>
  constexpr int64_t walk(Index index) const {
    int64_t offset = 0;
    for (int d = 0; d < dims - 1; ++d) {
      const Index above = index / static_cast<Index>(sizes[d]);
      offset += static_cast<int64_t>(index - above * static_cast<Index>(sizes[d])) * strides[d];
      index = above;
    }
    return offset + static_cast<int64_t>(index) * strides[dims - 1];
  }
};

}  // namespace cuda_ops
