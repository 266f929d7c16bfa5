// What the bindings of a mixture of experts share.
#pragma once

#include "binding.h"
#include "moe/moe.h"

namespace cuda_ops {

// Returns `experts`, contiguous. Kernels keep positions in it in 31 bits.
inline Tensor contiguous_choice(const Tensor& experts) {
  if (experts.numel() >= kMostAssignments) {
    refuse("experts", "fewer than 2^31 elements", "shape " + shape_name(experts));
  }
  return contiguous(experts);
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
