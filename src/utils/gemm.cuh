// out = epilogue(a @ b) by whichever kernel gemm_plan chooses: what a `.cu` calls.
#pragma once

#include "gemm.h"
#include "gemm_fma.cuh"
#include "gemm_hopper.cuh"
#include "gemm_mma.cuh"
#include "gemm_simt.cuh"
#include "gemv.cuh"

namespace cuda_ops {

// The compute capability of the current device, 90 for 9.0.
inline int current_capability() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

// For elements of T, the type of the problem's dtype. `second` is the output of an
// epilogue with two, laid out as the first. kLinear is for x @ weight^T as a layer has
// it: Hopper kernels for two K-major operands alone, fewer tiles and no tf32, an eighth
// of the kernels to compile; anything else is right by the other families.
template <class T, bool kLinear = false, class Epilogue>
cudaError_t gemm(const Matmul& problem, const Epilogue& epilogue, void* second,
                 cudaStream_t stream) {
  const Matmul p = fold_batch(problem);
  const GemmPlan plan = gemm_plan(p, current_capability(), kLinear);
  switch (plan.family) {
    case GemmPlan::kNothing: return cudaSuccess;
    case GemmPlan::kSimt: return gemm_simt<T>(p, epilogue, second, stream);
    case GemmPlan::kFma:
      if constexpr (sizeof(T) == 4) return gemm_fma(p, epilogue, second, stream);
      break;
    case GemmPlan::kGemv:
      if constexpr (sizeof(T) <= 4) return gemv<T>(p, epilogue, second, plan.swap, stream);
      break;
    case GemmPlan::kHopper:
      if constexpr (sizeof(T) == 2) {
        return gemm_hopper<T, kLinear>(p, plan.hopper, epilogue, second, stream);
      } else if constexpr (sizeof(T) == 4 && !kLinear) {
        return gemm_hopper<TF32, false>(p, plan.hopper, epilogue, second, stream);
      }
      break;
    case GemmPlan::kMma:
      if constexpr (sizeof(T) == 2) {
        return gemm_mma<T, MmaMode::kHalves>(p, epilogue, second, plan.tile, stream);
      } else if constexpr (sizeof(T) == 4 && !kLinear) {
        return p.precision == Precision::kTF32
                   ? gemm_mma<T, MmaMode::kTF32>(p, epilogue, second, plan.tile, stream)
                   : gemm_mma<T, MmaMode::kTF32x3>(p, epilogue, second, plan.tile, stream);
      }
  }
  return cudaErrorInvalidValue;
}

}  // namespace cuda_ops
