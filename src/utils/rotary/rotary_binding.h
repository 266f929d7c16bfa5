// From tensors to a Rotary, and the CPU kernel: the binding's side of rotary.h.
#pragma once

#include "elementwise.h"
#include "rotary/rotary.h"

namespace cuda_ops {

namespace detail {

// A row of the tables has one dim where a token has two, heads and their elements: one more of
// size 1.
struct TableView {
  std::vector<int64_t> sizes, strides;
  View view;

  explicit TableView(const Tensor& table) : view(table) {
    sizes.assign(view.sizes, view.sizes + view.dims);
    strides.assign(view.strides, view.strides + view.dims);
    sizes.push_back(1);
    strides.push_back(1);
    view.sizes = sizes.data();
    view.strides = strides.data();
    view.dims += 1;
    view.last_size = 1;
  }
};

// A table as kernels read it: in the dtype of x, or in what that is computed in, if both have it.
inline Tensor readable(const Tensor& table, const Tensor& other, const Tensor& x) {
  const DType wide = compute_dtype(dtype_of(x)), own = dtype_of(table);
  const bool known = own == dtype_of(other) && (own == wide || own == dtype_of(x));
  return known ? table : contiguous_as(table, wide);
}

inline int64_t last_stride(const Tensor& x) { return x.stride(x.dim() - 1); }

}  // namespace detail

// Calls run(problem) for x turned into `out`, which may be x itself.
template <class Run>
void rotate(const Tensor& out, const Tensor& x, const Tensor& cos, const Tensor& sin,
            bool interleaved, bool inverse, Run run) {
  if (out.numel() == 0) return;  // of however many tokens
  const Tensor cosines = detail::readable(cos, sin, x), sines = detail::readable(sin, cos, x);
  const detail::TableView of_cos(cosines), of_sin(sines);
  Rotary p;
  p.tokens = strided({writable_view(out)}, {View(x), of_cos.view, of_sin.view}, 2);
  p.heads = x.size(x.dim() - 2);
  p.dim = x.size(x.dim() - 1);
  p.pairs = cos.size(cos.dim() - 1);
  p.out_head = step_of(out, out.dim() - 2);
  p.x_head = step_of(x, x.dim() - 2);
  p.out_step = detail::last_stride(out);
  p.x_step = detail::last_stride(x);
  p.cos_step = detail::last_stride(cosines);
  p.sin_step = detail::last_stride(sines);
  p.dtype = dtype_of(x);
  p.table_dtype = dtype_of(cosines);
  p.interleaved = interleaved;
  p.inverse = inverse;
  p.in_place = out.get() == x.get();
  run(p);
}

// The same into a new tensor.
template <class Run>
Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, bool interleaved,
               bool inverse, Run run) {
  const detail::TableView of_cos(cos), of_sin(sin);
  auto shape = broadcast_shape({View(x), of_cos.view, of_sin.view}, 2);
  shape.push_back(x.size(x.dim() - 2));
  shape.push_back(x.size(x.dim() - 1));
  Tensor out = empty(shape, x);
  rotate(out, x, cos, sin, interleaved, inverse, run);
  return out;
}

inline void rotary_cpu(const Rotary& p) {
  const auto run = [&](auto tag, auto table) {
    using T = decltype(tag);
    using W = decltype(table);
    const auto& of = p.tokens.operands;
    parallel_for(
        p.tokens.numel, 1 + 16384 / (p.heads * p.dim + 1), [&](int64_t begin, int64_t end) {
          for (int64_t token = begin; token < end; ++token) {
            const auto at = p.tokens.offsets_at(token);
            const auto angle = [&](size_t k, int64_t step, int64_t j) {
              return static_cast<double>((static_cast<const W*>(of[k].data) + at[k])[j * step]);
            };
            for (int64_t head = 0; head < p.heads; ++head) {
              T* out = static_cast<T*>(of[0].data) + at[0] + head * p.out_head;
              const T* x = static_cast<const T*>(of[1].data) + at[1] + head * p.x_head;
              for (int64_t j = 0; j < p.pairs; ++j) {
                const int64_t first = p.interleaved ? 2 * j : j;
                const int64_t second = p.interleaved ? 2 * j + 1 : j + p.pairs;
                const auto a = static_cast<double>(x[first * p.x_step]);
                const auto b = static_cast<double>(x[second * p.x_step]);
                const double cosine = angle(2, p.cos_step, j);
                const double sine = (p.inverse ? -1 : 1) * angle(3, p.sin_step, j);
                out[first * p.out_step] = static_cast<T>(a * cosine - b * sine);
                out[second * p.out_step] = static_cast<T>(b * cosine + a * sine);
              }
              for (int64_t i = p.dim - p.copied(); i < p.dim; ++i) {
                out[i * p.out_step] = x[i * p.x_step];
              }
            }
          }
        });
  };
  visit_floating_cpu(p.dtype, [&](auto tag) {
    if (p.table_dtype == p.dtype) return run(tag, tag);
    run(tag, float{});
  });
}

}  // namespace cuda_ops
