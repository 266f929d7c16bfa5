// What the bindings of a mixture of experts share: checks in one voice, and tensors
// in the type that another one computes in.
#pragma once

#include "binding.h"
#include "moe/moe.h"

namespace cuda_ops {

// The type in which values of `dtype` are added up.
inline DType compute_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

inline bool is_floating(DType dtype) {
  for (const DType one : kFloating) {
    if (one == dtype) return true;
  }
  return false;
}

// `tensor`, dense and of `dtype`: itself where it is that already.
inline Tensor dense_as(const Tensor& tensor, DType dtype) {
  if (dtype_of(tensor) == dtype) return contiguous(tensor);
  Tensor copy = empty(shape_of(tensor), dtype, tensor);
  detail::check_torch(aoti_torch_copy_(copy.get(), tensor.get(), 0), "copy a tensor");
  return copy;
}

// Refuses another shape; `dims` is how the caller knows it, "(T, k)".
inline void check_shape(const char* op, const char* argument, const Tensor& tensor,
                        const char* dims, const std::vector<int64_t>& expected) {
  bool same = tensor.dim() == int64_t(expected.size());
  for (size_t d = 0; same && d < expected.size(); ++d) same = tensor.size(d) == expected[d];
  if (same) return;
  refuse(op, argument, std::string("shape ") + dims + " = " + shape_name(expected),
         "shape " + shape_name(tensor));
}

inline void check_dtype(const char* op, const char* argument, const Tensor& tensor,
                        DType expected) {
  if (dtype_of(tensor) != expected) {
    refuse(op, argument, std::string("dtype ") + name(expected), dtype_name(tensor));
  }
}

inline void check_floating(const char* op, const char* argument, const Tensor& tensor) {
  if (!is_floating(dtype_of(tensor))) {
    refuse(op, argument, "dtype float64, float32, float16 or bfloat16", dtype_name(tensor));
  }
}

inline void check_between(const char* op, const char* argument, int64_t value, int64_t least,
                          int64_t most) {
  if (value < least || value > most) {
    refuse(op, argument, "from " + std::to_string(least) + " to " + std::to_string(most),
           std::to_string(value));
  }
}

inline void check_dims(const char* op, const char* argument, const Tensor& tensor, int64_t count,
                       const char* dims) {
  if (tensor.dim() == count) return;
  refuse(op, argument, std::to_string(count) + " dims " + dims, "shape " + shape_name(tensor));
}

// Of matrices or logits, whose dim `dim` counts experts.
inline void check_expert_count(const char* op, const char* argument, const Tensor& tensor,
                               int64_t dim) {
  if (tensor.size(dim) >= 1 && tensor.size(dim) <= kMostExperts) return;
  refuse(op, argument, "from 1 to " + std::to_string(kMostExperts) + " experts",
         "shape " + shape_name(tensor));
}

inline void check_countable(const char* op, const Tensor& experts) {
  if (experts.numel() < kMostAssignments) return;
  refuse(op, "experts", "fewer than 2^31 elements", "shape " + shape_name(experts));
}

// The index map's own memory: order, offsets, and what it counts with.
struct MapTensors {
  Tensor order, offsets, counts;
  MoeMap map;

  // `chosen` is dense int64.
  MapTensors(const Tensor& chosen, int64_t experts)
      : order(empty({chosen.numel()}, DType::kInt32, chosen)),
        offsets(empty({experts + 1}, DType::kInt32, chosen)),
        counts(
            empty({moe_map_counts(chosen.numel(), experts) + kMapProducts}, DType::kInt32, chosen)),
        map{static_cast<const int64_t*>(chosen.const_data_ptr()),
            chosen.numel(),
            experts,
            static_cast<int32_t*>(order.mutable_data_ptr()),
            static_cast<int32_t*>(offsets.mutable_data_ptr()),
            static_cast<int32_t*>(counts.mutable_data_ptr()),
            static_cast<int32_t*>(counts.mutable_data_ptr()) +
                moe_map_counts(chosen.numel(), experts)} {}
};

}  // namespace cuda_ops
