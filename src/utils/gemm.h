// Which kernel multiplies given matrices on a given GPU: a value, chosen by a pure
// function of sizes, strides, alignment and device. No torch, no CUDA.
//
//   hopper   TMA + wgmma     16-bit and tf32 on compute capability 9.0
//   mma      mma.sync        the same from 8.0 on; tf32x3; any alignment
//   simt     multiply-adds   float64, float32, and GPUs before 8.0
#pragma once

#include "gemm_hopper.h"

namespace cuda_ops {

struct GemmPlan {
  enum Family { kNothing, kHopper, kMma, kSimt } family = kNothing;
  int tile = 0;         // rows and columns, of kMma and kSimt
  HopperConfig hopper;  // of kHopper

  std::string text() const {
    switch (family) {
      case kNothing: return "nothing";
      case kHopper: return "hopper " + hopper.text();
      case kMma: return "mma " + std::to_string(tile);
      case kSimt: return "simt " + std::to_string(tile);
    }
    return "";
  }
};

// `capability` is 90 for 9.0. Large tiles reuse more of what they load; small ones
// serve where large ones would leave SMs idle. `k_major` leaves Hopper's kernels for
// other layouts out.
inline GemmPlan gemm_plan(const Matmul& p, int capability, bool k_major = false) {
  GemmPlan plan;
  if (p.m == 0 || p.n == 0 || p.batch.numel == 0) return plan;
  const DType dtype = p.batch.dtype;
  const bool halves = size_of(dtype) == 2;
  const bool tensor_cores =
      p.k > 0 && (halves || (dtype == DType::kFloat32 && p.precision != Precision::kIeee));
  if (tensor_cores && p.precision != Precision::kTF32x3 && capability == 90 && p.built_for_hopper) {
    plan.hopper = hopper_config(p, int(size_of(dtype)));
    const bool k_majors = !plan.hopper.line_major_a && !plan.hopper.line_major_b;
    if (plan.hopper.possible && (k_majors || !k_major)) {
      plan.family = GemmPlan::kHopper;
      return plan;
    }
  }
  plan.family = tensor_cores && capability >= 80 ? GemmPlan::kMma : GemmPlan::kSimt;
  const int64_t large = detail::ceil_div(p.m, 128) * detail::ceil_div(p.n, 128) * p.batch.numel;
  const bool may = plan.family == GemmPlan::kMma || dtype == DType::kFloat32;
  plan.tile = may && large >= 132 ? 128 : 64;
  return plan;
}

}  // namespace cuda_ops
