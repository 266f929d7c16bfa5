// Which kernel multiplies given matrices on a given GPU: a value, chosen by a pure
// function of sizes, strides, alignment and device. No torch, no CUDA.
//
//   gemv     plain loads     up to 2 rows (or columns) of 16-bit or float32, K-major
//   hopper   TMA + wgmma     16-bit and tf32 on compute capability 9.0
//   mma      mma.sync        the same from 8.0 on; tf32x3; any alignment
//   fma      multiply-adds   large float32 from 8.0 on
//   simt     multiply-adds   float64, small float32, and GPUs before 8.0
#pragma once

#include "gemm_hopper.h"

namespace cuda_ops {

struct GemmPlan {
  enum Family { kNothing, kGemv, kHopper, kMma, kFma, kSimt } family = kNothing;
  int tile = 0;         // rows and columns, of kMma, kFma and kSimt
  bool swap = false;    // kGemv: the vectors are columns of b
  HopperConfig hopper;  // of kHopper

  std::string text() const {
    switch (family) {
      case kNothing: return "nothing";
      case kHopper: return "hopper " + hopper.text();
      case kGemv: return swap ? "gemv swapped" : "gemv";
      case kFma: return "fma 128";
      case kMma: return "mma " + std::to_string(tile);
      case kSimt: return "simt " + std::to_string(tile);
    }
    return "";
  }
};

// Rows that plain loads keep up with; from 3 on tensor cores do (an H200: 4 rows by
// plain loads took 1.6 times as long as torch).
constexpr int64_t kGemvVectors = 2;

// Whether gemv can read a line-by-K operand: dense K of whole aligned vectors.
inline bool gemv_lines(const Matmul& p, int operand, int64_t line, int64_t k, int64_t lines) {
  const int64_t bytes = size_of(p.batch.dtype);
  const auto whole = [&](int64_t stride) { return stride * bytes % 16 == 0; };
  if (reinterpret_cast<uintptr_t>(p.batch.operands[operand].data) % 16 != 0) return false;
  for (int d = 0; d < p.batch.dims; ++d) {
    if (!whole(p.batch.operands[operand].strides[d])) return false;
  }
  return k == 1 && whole(p.k) && (lines == 1 || whole(line));
}

// `capability` is 90 for 9.0. Large tiles reuse more of what they load; small ones
// serve where large ones would leave SMs idle. `linear`: of the kernels that gemm.cuh
// has for a layer.
inline GemmPlan gemm_plan(const Matmul& p, int capability, bool linear = false) {
  GemmPlan plan;
  if (p.m == 0 || p.n == 0 || p.batch.numel == 0) return plan;
  const DType dtype = p.batch.dtype;
  const bool halves = size_of(dtype) == 2;
  const int64_t vectors = p.m < p.n ? p.m : p.n, lines = p.m < p.n ? p.n : p.m;
  if (vectors <= kGemvVectors && p.k > 0 && size_of(dtype) <= 4 &&
      lines * p.batch.numel < 1LL << 31 && gemv_lines(p, 1, p.a.row, p.a.col, p.m) &&
      gemv_lines(p, 2, p.b.col, p.b.row, p.n)) {
    plan.family = GemmPlan::kGemv;
    plan.swap = p.n < p.m;
    return plan;
  }
  const bool tensor_cores =
      p.k > 0 && (halves || (dtype == DType::kFloat32 && p.precision != Precision::kIeee));
  if (tensor_cores && p.precision != Precision::kTF32x3 && capability == 90 && p.built_for_hopper) {
    plan.hopper = hopper_config(p, int(size_of(dtype)), linear);
    const bool k_majors = !plan.hopper.line_major_a && !plan.hopper.line_major_b;
    if (plan.hopper.possible && (k_majors || !linear)) {
      plan.family = GemmPlan::kHopper;
      return plan;
    }
  }
  plan.family = tensor_cores && capability >= 80 ? GemmPlan::kMma : GemmPlan::kSimt;
  const int64_t large = detail::ceil_div(p.m, 128) * detail::ceil_div(p.n, 128) * p.batch.numel;
  plan.tile = plan.family == GemmPlan::kMma && large >= 132 ? 128 : 64;
  if (dtype == DType::kFloat32 && plan.family == GemmPlan::kSimt && large >= 64 &&
      capability >= 80) {
    plan.family = GemmPlan::kFma;
    plan.tile = 128;
  }
  return plan;
}

}  // namespace cuda_ops
