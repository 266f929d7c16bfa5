// out = epilogue(a @ b) by the kernel that gemm_plan chooses. Kernel files call this.
#pragma once

#include "ptx/capability.h"
#include "gemm/gemm.h"
#include "gemm/gemm_fma.cuh"
#include "gemm/gemm_hopper.cuh"
#include "gemm/gemm_mma.cuh"
#include "gemm/gemm_pack.cuh"
#include "gemm/gemm_simt.cuh"
#include "gemm/gemm_stream.cuh"
#include "gemm/gemv.cuh"

namespace cuda_ops {

// kLinear, here and below: for x @ weight^T as a layer has it. Hopper kernels for two K-major
// operands alone, fewer tiles and no tf32 are an eighth of the kernels to compile; the other
// families, or copies, take anything else.
template <bool kLinear = false>
GemmPlan current_plan(const Matmul& problem) {
  return gemm_plan(fold_batch(problem), current_device(), kLinear);
}

// Runs current_plan's choice, for elements of T, the type of the problem's dtype.
// `workspace`: plan.pack.bytes() of device memory, aligned as torch's allocator does, and
// free again for later work on the stream. `second` is the second output of an epilogue that has
// one, laid out as the first.
template <class T, bool kLinear = false, class Epilogue>
cudaError_t gemm(const Matmul& problem, const GemmPlan& plan, void* workspace,
                 const Epilogue& epilogue, void* second, cudaStream_t stream) {
  const Matmul p = fold_batch(problem);
  switch (plan.family) {
    case GemmPlan::kNothing: return cudaSuccess;
    case GemmPlan::kSimt: return gemm_simt<T>(p, epilogue, second, stream);
    case GemmPlan::kFma:
      if constexpr (sizeof(T) == 4) {
        return gemm_fma<kLinear>(p, plan.fma, epilogue, second, stream);
      }
      break;
    case GemmPlan::kGemv:
      if constexpr (sizeof(T) == 4) return gemv(p, epilogue, second, plan.swap, stream);
      break;
    case GemmPlan::kStream:
      if constexpr (sizeof(T) == 2) return gemm_stream<T>(p, plan.stream, epilogue, second, stream);
      break;
    case GemmPlan::kHopper:
      if constexpr (sizeof(T) == 2 || (sizeof(T) == 4 && !kLinear)) {
        if (plan.pack.any()) {
          const cudaError_t error = gemm_pack<T>(p, plan.pack, workspace, stream);
          if (error != cudaSuccess) return error;
        }
        const Matmul view = packed(p, plan.pack, workspace);
        const auto run = [&](auto tag) {
          return gemm_hopper<decltype(tag), kLinear>(view, plan.hopper, epilogue, second, stream);
        };
        if constexpr (sizeof(T) == 2)
          return run(T{});
        else
          return is_split(p) ? run(TF32x3{}) : run(TF32{});
      }
      break;
    case GemmPlan::kMma:
      if constexpr (sizeof(T) == 2) {
        return gemm_mma<T, MmaMode::kHalves>(p, epilogue, second, plan.tile, stream);
      } else if constexpr (sizeof(T) == 4 && !kLinear) {
        return is_split(p) ? gemm_mma<T, MmaMode::kTF32x3>(p, epilogue, second, plan.tile, stream)
                           : gemm_mma<T, MmaMode::kTF32>(p, epilogue, second, plan.tile, stream);
      }
  }
  return cudaErrorInvalidValue;
}

}  // namespace cuda_ops
