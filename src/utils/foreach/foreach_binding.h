// From lists of tensors to Flats: the binding's side of foreach.h.
#pragma once

#include "elementwise.h"
#include "foreach/foreach.h"

namespace cuda_ops {

using Tensors = std::vector<Tensor>;

// `name` with an index, for errors: "ys[3]".
inline std::string element_name(const char* name, size_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

// The tensors of both lists go together one by one: as many of them, floating, of the same dtype
// and shape.
inline void check_pairs(const char* name, const Tensors& xs, const char* other, const Tensors& ys) {
  if (xs.size() != ys.size()) {
    refuse(
        other,
        std::string("as many tensors as in '") + name + "', which has " + std::to_string(xs.size()),
        std::to_string(ys.size()));
  }
  for (size_t i = 0; i < xs.size(); ++i) {
    const Tensor &x = xs[i], &y = ys[i];
    if (std::find(std::begin(kFloating), std::end(kFloating), dtype_of(x)) == std::end(kFloating)) {
      refuse(element_name(name, i), "dtype float64, float32, float16 or bfloat16", dtype_name(x));
    }
    if (dtype_of(y) != dtype_of(x)) {
      refuse(element_name(other, i),
             "dtype " + dtype_name(x) + " like '" + element_name(name, i) + "'", dtype_name(y));
    }
    const View a = x, b = y;
    if (a.dims != b.dims || !std::equal(a.sizes, a.sizes + a.dims, b.sizes)) {
      refuse(element_name(other, i),
             "shape " + shape_name(a) + " like '" + element_name(name, i) + "'",
             "shape " + shape_name(b));
    }
  }
}

// Calls run(flats, count, dtype) for the tensors of each dtype: outs[i] = f(inputs[0][i], ...),
// where each of `outs` is dense. Inputs in another layout are copied.
template <size_t kInputs, class Run>
void foreach_flat(const Tensors& outs, const Tensors* const (&inputs)[kInputs], Run run) {
  std::vector<Flat<int(kInputs)>> flats[std::size(kFloating)];
  Tensors copies;  // until the last launch
  for (size_t i = 0; i < outs.size(); ++i) {
    const View out = writable_view(outs[i]);
    Flat<int(kInputs)> flat;
    flat.out = out.data;
    flat.numel = outs[i].numel();
    if (flat.numel == 0) continue;
    for (size_t k = 0; k < kInputs; ++k) {
      const Tensor& input = (*inputs[k])[i];
      const View view = input;
      flat.in[k] = view.data;
      if (detail::same_layout(view, out)) continue;
      copies.push_back(
          empty_strided(out.sizes, out.strides, out.dims, out.dtype, device_of(input)));
      detail::check_torch(aoti_torch_copy_(copies.back().get(), input.get(), 0), "copy a tensor");
      flat.in[k] = copies.back().const_data_ptr();
    }
    const auto* const at = std::find(std::begin(kFloating), std::end(kFloating), out.dtype);
    flats[at - std::begin(kFloating)].push_back(flat);
  }
  for (size_t d = 0; d < std::size(kFloating); ++d) {
    if (flats[d].empty()) continue;
    run(flats[d].data(), static_cast<int64_t>(flats[d].size()), kFloating[d]);
  }
}

// The twin of foreach_cuda: `f` computes in double.
template <int kInputs, class F>
void foreach_cpu(const Flat<kInputs>* flats, int64_t count, DType dtype, const F& f) {
  visit_floating_cpu(dtype, [&](auto tag) {
    using T = decltype(tag);
    for (const Flat<kInputs>* flat = flats; flat < flats + count; ++flat) {
      const auto value = [&](int k, int64_t i) {
        return static_cast<double>(static_cast<const T*>(flat->in[k])[i]);
      };
      parallel_for(flat->numel, 16384, [&](int64_t begin, int64_t end) {
        T* const out = static_cast<T*>(flat->out);
        for (int64_t i = begin; i < end; ++i) {
          if constexpr (kInputs == 1) {
            out[i] = static_cast<T>(f(value(0, i)));
          } else {
            static_assert(kInputs == 2, "one input or two");
            out[i] = static_cast<T>(f(value(0, i), value(1, i)));
          }
        }
      });
    }
  });
}

}  // namespace cuda_ops
