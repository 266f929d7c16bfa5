// Which memory a tensor takes, and whether two tensors share some: an argument that is written
// shares none with another one, nor with itself.
#pragma once

#include <cstdint>
#include <numeric>

#include "tensor.h"

namespace cuda_ops {
namespace detail {

// The bytes from the first element to the last.
struct Extent {
  uintptr_t begin = 0, end = 0;
  bool is_dense = true;  // each byte belongs to one element
  // What it is if some bytes belong to several elements, as far as two dims tell; else null.
  const char* repeated = nullptr;

  explicit Extent(const View& tensor) {
    int64_t last = 0, numel = 1;
    for (int d = 0; d < tensor.dims; ++d) {
      const int64_t size = tensor.size(d);
      numel *= size;
      if (size < 2) continue;
      last += (size - 1) * tensor.strides[d];
      if (tensor.strides[d] == 0) repeated = "one with stride 0";
      for (int before = 0; before < d && repeated == nullptr; ++before) {
        if (meet(tensor, before, d)) repeated = "one of overlapping rows";
      }
    }
    if (numel == 0) {
      repeated = nullptr;
      return;
    }
    begin = reinterpret_cast<uintptr_t>(tensor.data);
    end = begin + static_cast<uintptr_t>((last + 1) * size_of(tensor.dtype));
    is_dense = last + 1 == numel;
  }

  // Whether steps along two dims lead to one element: a * stride = b * other stride.
  static bool meet(const View& tensor, int a, int b) {
    const int64_t x = tensor.strides[a], y = tensor.strides[b], common = std::gcd(x, y);
    return common > 0 && y / common < tensor.size(a) && x / common < tensor.size(b);
  }

  // Whether both have some byte for certain. Tensors with gaps may lie within each other's, which
  // torch does not follow up either.
  bool shares_memory_with(const Extent& other) const {
    const bool apart = end <= other.begin || other.end <= begin;  // or one has no elements
    return !apart && ((is_dense && other.is_dense) || begin == other.begin);
  }
};

}  // namespace detail
}  // namespace cuda_ops
