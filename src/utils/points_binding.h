// From a tensor to its Points: the binding's side of points.h.
#pragma once

#include <algorithm>

#include "tensor.h"
#include "points.h"

namespace cuda_ops {

// The argument `dim`, counted from 0. A tensor without dims counts as one with a single dim.
inline int64_t checked_dim(const Tensor& x, int64_t dim) {
  const int64_t rank = x.dim() > 0 ? x.dim() : 1;
  if (dim < -rank || dim >= rank) {
    refuse("dim", "a dim from " + std::to_string(-rank) + " to " + std::to_string(rank - 1),
           std::to_string(dim));
  }
  return dim < 0 ? dim + rank : dim;
}

// The points of `tensor` in row-major order; dim `dropped` stays at index 0.
inline Points points_of(const Tensor& tensor, int64_t dropped = -1) {
  Points points;
  points.data = tensor.const_data_ptr();
  points.dtype = dtype_of(tensor);
  for (int64_t d = tensor.dim(); d-- > 0;) {
    if (d == dropped) continue;
    if (tensor.size(d) != 1 && points.dims == kMaxDims) {
      throw OpError("expected at most " + std::to_string(kMaxDims) +
                    " dims other than 1, got shape " + shape_name(tensor));
    }
    points.add_dim(tensor.size(d), tensor.stride(d));
  }
  return points;
}

// The same points in the order of memory: any dense tensor becomes one line.
inline Points in_memory_order(const Points& points) {
  std::array<int, kMaxDims> order{};
  for (int d = 0; d < points.dims; ++d) order[d] = d;
  std::stable_sort(order.begin(), order.begin() + points.dims,
                   [&](int a, int b) { return points.strides[a] < points.strides[b]; });
  Points sorted;
  sorted.data = points.data;
  sorted.dtype = points.dtype;
  for (int d = 0; d < points.dims; ++d)
    sorted.add_dim(points.sizes[order[d]], points.strides[order[d]]);
  sorted.numel = points.numel;
  return sorted;
}

}  // namespace cuda_ops
