// From a tensor to a View: the binding's side of view.h.
#pragma once

#include <algorithm>

#include "tensor.h"
#include "view.h"

namespace cuda_ops {

// The points of `tensor` in row-major order; dim `dropped` stays at index 0.
inline View view_of(const Tensor& tensor, int64_t dropped = -1) {
  if (tensor.dim() > View::kMaxDims) {
    throw std::runtime_error("cuda_ops: at most " + std::to_string(View::kMaxDims) + " dims, got " +
                             std::to_string(tensor.dim()));
  }
  View view;
  view.data = tensor.const_data_ptr();
  view.dtype = dtype_of(tensor);
  for (int64_t d = tensor.dim(); d-- > 0;) {
    if (d != dropped) view.add_dim(tensor.size(d), tensor.stride(d));
  }
  return view;
}

// The same points in the order of memory: any dense tensor becomes one line.
inline View in_memory_order(const View& view) {
  std::array<int, View::kMaxDims> order{};
  for (int d = 0; d < view.dims; ++d) order[d] = d;
  std::stable_sort(order.begin(), order.begin() + view.dims,
                   [&](int a, int b) { return view.strides[a] < view.strides[b]; });
  View sorted;
  sorted.data = view.data;
  sorted.dtype = view.dtype;
  for (int d = 0; d < view.dims; ++d) sorted.add_dim(view.sizes[order[d]], view.strides[order[d]]);
  sorted.numel = view.numel;
  return sorted;
}

}  // namespace cuda_ops
