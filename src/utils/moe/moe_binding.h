// What the bindings of a mixture of experts share.
#pragma once

#include "binding.h"
#include "moe/moe.h"
#include "workspace.h"

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
  Tensor order, offsets;
  Workspace counting;
  MoeMap map;

  // `chosen` is dense int64.
  MapTensors(const Tensor& chosen, int64_t experts)
      : order(empty({chosen.numel()}, DType::kInt32, chosen)),
        offsets(empty({experts + 1}, DType::kInt32, chosen)),
        counting(Workspace::bytes_of<int32_t>(moe_map_counts(chosen.numel(), experts)) +
                     Workspace::bytes_of<int32_t>(kMapProducts),
                 chosen),
        map{static_cast<const int64_t*>(chosen.const_data_ptr()),
            chosen.numel(),
            experts,
            static_cast<int32_t*>(order.mutable_data_ptr()),
            static_cast<int32_t*>(offsets.mutable_data_ptr()),
            counting.take<int32_t>(moe_map_counts(chosen.numel(), experts)),
            counting.take<int32_t>(kMapProducts)} {}
};

}  // namespace cuda_ops
