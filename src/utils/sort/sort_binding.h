// From a tensor and a dim to the rows that are sorted along it: the binding's
// side of sort.h.
#pragma once

#include <algorithm>
#include <numeric>

#include "elementwise.h"
#include "sort/sort.h"
#include "points_binding.h"

namespace cuda_ops {

constexpr DType kSortable[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                               DType::kUInt8,   DType::kInt8,    DType::kInt16,   DType::kInt32,
                               DType::kInt64,   DType::kBool};

// A new tensor of the shape of `x`, but for `length` elements along `dim`, which
// are neighbors in memory: what is written row by row needs no copy after that.
inline Tensor empty_rows(const Tensor& x, int64_t dim, int64_t length, DType dtype) {
  const auto shape = x.sizes();
  std::vector<int64_t> sizes(shape.begin(), shape.end()), strides(sizes.size());
  int64_t stride = 1;
  const auto lay = [&](size_t d) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  };
  if (!sizes.empty()) {
    sizes[dim] = length;
    lay(dim);
  }
  for (size_t d = sizes.size(); d-- > 0;) {
    if (d != static_cast<size_t>(dim)) lay(d);
  }
  return empty_strided(sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()), dtype,
                       device_of(x));
}

// `x` with neighbors along `dim`: itself, or a copy.
inline Tensor with_rows(const Tensor& x, int64_t dim) {
  if (x.dim() == 0 || x.size(dim) <= 1 || x.stride(dim) == 1) return x;
  Tensor copy = empty_rows(x, dim, x.size(dim), dtype_of(x));
  detail::check_torch(aoti_torch_copy_(copy.get(), x.get(), 0), "copy a tensor");
  return copy;
}

inline SortRows rows_along(const Tensor& x, int64_t dim, bool descending) {
  SortRows p;
  p.rows = points_of(x, dim);
  p.n = x.dim() > 0 ? x.size(dim) : 1;
  p.descending = descending;
  return p;
}

template <class Body>
void visit_bits(DType dtype, Body&& body) {
  switch (size_of(dtype)) {
    case 1: return body(uint8_t{});
    case 2: return body(uint16_t{});
    case 4: return body(uint32_t{});
    default: return body(uint64_t{});
  }
}

// The first `kept` of each row in order, on the CPU, for rows of any stride.
inline void sort_rows_cpu(const SortRows& p, int64_t stride, int64_t kept) {
  if (kept == 0) return;  // of however many rows
  visit_bits(p.rows.dtype, [&](auto bits) {
    using U = decltype(bits);
    const Order<U> order = order_of<U>(p.rows.dtype, p.descending);
    parallel_for(p.rows.numel, 1 + 16384 / (p.n + 1), [&](int64_t begin, int64_t end) {
      std::vector<U> keys(p.n);
      std::vector<int64_t> places(p.n);
      for (int64_t row = begin; row < end; ++row) {
        const U* data = static_cast<const U*>(p.rows.data) + p.rows.offset_at(row);
        for (int64_t i = 0; i < p.n; ++i) keys[i] = order.key(data[i * stride]);
        std::iota(places.begin(), places.end(), 0);
        std::stable_sort(places.begin(), places.end(),
                         [&](int64_t a, int64_t b) { return keys[a] < keys[b]; });
        for (int64_t i = 0; i < kept; ++i) {
          static_cast<U*>(p.values)[row * kept + i] = data[places[i] * stride];
          p.indices[row * kept + i] = places[i];
        }
      }
    });
  });
}

}  // namespace cuda_ops
