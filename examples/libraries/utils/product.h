// What both examples share: the sizes of products of dense matrices, and their CPU kernel.
#pragma once

#include "elementwise.h"
#include "binding.h"

// `batch` products (M, K) (K, N), one behind the other.
struct Product {
  int64_t batch = 0, m = 0, n = 0, k = 0;
};

// a (..., M, K) and b (..., K, N) have the same loop dims.
inline Product product_of(const cuda_ops::Tensor& a, const cuda_ops::Tensor& b) {
  const int64_t last = a.dim() - 1;
  Product p{1, a.size(last - 1), b.size(last), a.size(last)};
  for (int64_t d = 0; d + 2 < a.dim(); ++d) p.batch *= a.size(d);
  return p;
}

inline cuda_ops::Tensor empty_product(const cuda_ops::Tensor& a, const cuda_ops::Tensor& b) {
  const auto sizes = a.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = b.size(b.dim() - 1);
  return cuda_ops::empty(shape, a);
}

// The sums run in float64.
inline cuda_ops::Tensor product_cpu(const cuda_ops::Tensor& a, const cuda_ops::Tensor& b) {
  using namespace cuda_ops;
  const Tensor out = empty_product(a, b), x = contiguous(a), y = contiguous(b);
  const Product p = product_of(a, b);
  visit_floating_cpu(dtype_of(a), [&](auto tag) {
    using T = decltype(tag);
    const auto* left = static_cast<const T*>(x.const_data_ptr());
    const auto* right = static_cast<const T*>(y.const_data_ptr());
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    parallel_for(p.batch * p.m, 1 + 16384 / (p.n * p.k + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* const first = right + row / p.m * p.k * p.n;
        for (int64_t j = 0; j < p.n; ++j) {
          double sum = 0;
          for (int64_t c = 0; c < p.k; ++c) {
            sum +=
                static_cast<double>(left[row * p.k + c]) * static_cast<double>(first[c * p.n + j]);
          }
          to[row * p.n + j] = static_cast<T>(sum);
        }
      }
    });
  });
  return out;
}
