// Elementwise operators, the binding's side: the output every input broadcasts
// to, the problem as plain numbers, and the loop that the CPU runs.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>

#include "strided.h"
#include "tensor.h"

namespace cuda_ops {
namespace detail {

// Every element of the storage span is used exactly once.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

inline bool same_layout(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != b.size(d) || a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// The shape that the inputs broadcast to, their last `core_dims` left out.
inline std::vector<int64_t> broadcast_shape(const char* op,
                                            std::initializer_list<const Tensor*> inputs,
                                            int64_t core_dims = 0) {
  std::vector<int64_t> shape;
  for (const Tensor* input : inputs) {
    const auto rank = static_cast<size_t>(input->dim() - core_dims);
    if (rank > shape.size()) shape.insert(shape.begin(), rank - shape.size(), 1);
    for (size_t d = 0; d < rank; ++d) {
      int64_t& size = shape[shape.size() - rank + d];
      const int64_t actual = input->size(static_cast<int64_t>(d));
      if (size == 1) {
        size = actual;
      } else if (actual != 1 && actual != size) {
        throw std::runtime_error(std::string("cuda_ops::") + op + ": shapes " +
                                 shape_name(**inputs.begin()) + " and " + shape_name(*input) +
                                 " do not broadcast");
      }
    }
  }
  return shape;
}

}  // namespace detail

// The output of an elementwise operator: the shape its inputs broadcast to.
// Where all inputs share one dense layout the output keeps it, as torch does
// (channels_last in, channels_last out); otherwise it is contiguous.
template <class... Inputs>
Tensor empty_elementwise(const char* op, const Tensor& first, const Inputs&... rest) {
  if ((detail::same_layout(first, rest) && ...) && detail::is_dense(first)) {
    return empty_strided(first.sizes().data(), first.strides().data(), first.dim(), dtype_of(first),
                         device_of(first));
  }
  return empty(detail::broadcast_shape(op, {&first, &rest...}), first);
}

namespace detail {

// Inputs broadcast to `out`, all of them without their last `core_dims`.
template <class... Inputs>
Strided<sizeof...(Inputs)> strided_loop(int64_t core_dims, const Tensor& out,
                                        const Inputs&... inputs) {
  Strided<sizeof...(Inputs)> problem;
  problem.dtype = dtype_of(out);
  problem.numel = 1;
  problem.dims = static_cast<int>(out.dim() - core_dims);
  if (problem.dims > kMaxDims) {
    throw std::runtime_error("cuda_ops: at most " + std::to_string(kMaxDims) +
                             (core_dims > 0 ? " batch dims, got " : " dims, got ") +
                             std::to_string(problem.dims));
  }
  const Tensor* tensors[] = {&out, &inputs...};
  for (size_t k = 0; k <= sizeof...(Inputs); ++k) {
    const Tensor& tensor = *tensors[k];
    Operand& operand = problem.operands[k];
    operand.data = k == 0 ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
    const int lead = problem.dims - static_cast<int>(tensor.dim() - core_dims);
    for (int d = lead; d < problem.dims; ++d) {
      const bool broadcast = tensor.size(d - lead) == 1;
      operand.strides[problem.dims - 1 - d] = broadcast ? 0 : tensor.stride(d - lead);
    }
  }
  for (int d = 0; d < problem.dims; ++d) {
    problem.sizes[problem.dims - 1 - d] = out.size(d);
    problem.numel *= out.size(d);
  }
  problem.coalesce();
  return problem;
}

}  // namespace detail

// The problem out = f(inputs...), inputs broadcast to `out`.
template <class... Inputs>
Strided<sizeof...(Inputs)> strided(const Tensor& out, const Inputs&... inputs) {
  return detail::strided_loop(0, out, inputs...);
}

namespace detail {

template <class T, int Inputs, class F, size_t... I>
void cpu_rows(const Strided<Inputs>& problem, int64_t begin, int64_t end, const F& f,
              std::index_sequence<I...>) {
  const int64_t row = problem.dims > 0 ? problem.sizes[0] : 1;
  const auto& operands = problem.operands;
  while (begin < end) {
    const auto at = problem.offsets_at(begin);
    const int64_t count = std::min(row - begin % row, end - begin);
    T* out = static_cast<T*>(operands[0].data) + at[0];
    const T* in[] = {static_cast<const T*>(operands[I + 1].data) + at[I + 1]...};
    for (int64_t i = 0; i < count; ++i) {
      out[i * operands[0].strides[0]] =
          static_cast<T>(f(static_cast<double>(in[I][i * operands[I + 1].strides[0]])...));
    }
    begin += count;
  }
}

template <class Body>
void parallel_for(int64_t count, int64_t grain, Body&& body) {
  check_torch(torch_parallel_for(
                  0, count, grain,
                  [](int64_t begin, int64_t end, void* context) {
                    (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end);
                  },
                  &body),
              "run a parallel loop");
}

}  // namespace detail

// Calls `body(T{})` with the C++ type of a floating dtype, on the CPU.
template <class Body>
void visit_floating_cpu(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat64: return body(double{});
    case DType::kFloat32: return body(float{});
    case DType::kFloat16: return body(torch::headeronly::Half{});
    case DType::kBFloat16: return body(torch::headeronly::BFloat16{});
    default: throw std::runtime_error(std::string("cuda_ops: no CPU kernel for ") + name(dtype));
  }
}

// out[i] = f(inputs[i]...), computed in float64 whatever the dtype: the CPU
// kernel is also the reference that the CUDA kernel is compared with.
template <int Inputs, class F>
void map_cpu(const Strided<Inputs>& problem, F f) {
  constexpr int64_t kGrain = 16384;
  visit_floating_cpu(problem.dtype, [&](auto tag) {
    using T = decltype(tag);
    detail::parallel_for(problem.numel, kGrain, [&](int64_t begin, int64_t end) {
      detail::cpu_rows<T>(problem, begin, end, f, std::make_index_sequence<Inputs>{});
    });
  });
}

}  // namespace cuda_ops
