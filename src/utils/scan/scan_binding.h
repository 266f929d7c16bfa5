// From tensors to a Scan, and cumulative sums on the CPU: the binding's side of scan.h.
#pragma once

#include <algorithm>

#include "elementwise.h"
#include "points_binding.h"
#include "scan/scan.h"

namespace cuda_ops {

constexpr DType kScanned[] = {DType::kFloat64,  DType::kFloat32, DType::kFloat16,
                              DType::kBFloat16, DType::kInt32,   DType::kInt64};

namespace detail {

// Dims from the fastest to the slowest, as one with equal steps.
struct Line {
  int64_t size = 1, step = 0;
  bool even = true;

  void add(int64_t count, int64_t stride) {
    if (size == 1) step = stride;
    even = even && stride == step * size;
    size *= count;
  }
};

// Describes the problem; false if it cannot be told by these few numbers, or is better copied.
inline bool describe(Scan& p, const Tensor& x, const Tensor& out, int64_t dim) {
  std::vector<int64_t> order;  // dims from the fastest in `out` to the slowest
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) != 1) order.push_back(d);
  }
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return out.stride(a) < out.stride(b); });
  Line inner, outer;
  p.n = 1;
  // A dim of one element is beside all others: rows of one.
  bool above = std::find(order.begin(), order.end(), dim) == order.end();
  for (const int64_t d : order) {
    if (d == dim) {
      p.n = x.size(d);
      p.x_step = x.stride(d);
      above = true;
    } else {
      (above ? outer : inner).add(x.size(d), x.stride(d));
    }
  }
  p.x = x.const_data_ptr();
  p.inner = inner.size;
  p.outer = outer.size;
  p.x_outer = outer.size > 1 ? outer.step : p.n * p.inner;
  if (p.n == 1) p.x_step = p.inner;
  const bool neighbors = p.inner > 1 ? inner.step == 1 : p.x_step == 1;
  if (!inner.even || !outer.even || !neighbors) return false;
  // Short rows share a block if they are neighbors.
  constexpr int64_t kShortBytes = 1024;
  return p.inner > 1 || p.x_outer == p.n || p.n * size_of(dtype_of(x)) >= kShortBytes;
}

}  // namespace detail

// Allocates the sums of `x` and calls run(problem). They have the layout of x if that is dense.
template <class Run>
Tensor scanned(const Tensor& x, int64_t dim, bool reverse, Run run) {
  dim = checked_dim(x, dim);
  const DType dtype = dtype_of(x);
  Tensor out = empty_elementwise(scan_result(dtype), x);
  if (x.numel() == 0) return out;
  Scan p;
  p.reverse = reverse;
  p.dtype = dtype;
  p.out = out.mutable_data_ptr();
  Tensor read = x;
  if (!detail::describe(p, read, out, dim)) {
    const View like = writable_view(out);
    read = empty_strided(like.sizes, like.strides, like.dims, dtype, device_of(x));
    detail::check_torch(aoti_torch_copy_(read.get(), x.get(), 0), "copy a tensor");
    detail::describe(p, read, out, dim);
  }
  run(p);
  return out;
}

// In float64, or in integers that go round where they are too large.
inline void scan_cpu(const Scan& p) {
  visit_cpu<DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt64,
            DType::kInt32>(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr bool kInteger = std::is_integral_v<T>;
    using Sum = std::conditional_t<kInteger, uint64_t, double>;
    using Result = std::conditional_t<kInteger, int64_t, T>;
    constexpr int64_t kColumns = 64;  // side by side, so that neighbors are read together
    const int64_t strips = ceil_div(p.inner, kColumns);
    parallel_for(
        p.outer * strips, 1 + 16384 / (p.n * std::min(p.inner, kColumns)),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t outer = i / strips, first = i % strips * kColumns;
            const int64_t count = std::min(kColumns, p.inner - first);
            Sum sums[kColumns] = {};
            for (int64_t k = 0; k < p.n; ++k) {
              const int64_t row = p.reverse ? p.n - 1 - k : k;
              const T* x = static_cast<const T*>(p.x) + outer * p.x_outer + row * p.x_step + first;
              Result* out = static_cast<Result*>(p.out) + (outer * p.n + row) * p.inner + first;
              for (int64_t c = 0; c < count; ++c) {
                sums[c] += static_cast<Sum>(x[c]);
                out[c] = static_cast<Result>(sums[c]);
              }
            }
          }
        });
  });
}

}  // namespace cuda_ops
