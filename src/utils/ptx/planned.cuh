// The GPUs that device code is compiled for: kernels and loops that no plan chooses on them are
// left empty there, which saves their build time. A program that runs kernels beside any plan, to
// time or to emulate them, defines CUDA_OPS_EVERY_KERNEL.
#pragma once

namespace cuda_ops {

// The code runs on compute capability 8.0 or later: 16-bit products use tensor cores, unless K is
// 0, and float32 uses gemm_fma.cuh.
#if __CUDA_ARCH__ >= 800 && !defined(CUDA_OPS_EVERY_KERNEL)
constexpr bool kPlannedFrom80 = true;
#else
constexpr bool kPlannedFrom80 = false;
#endif

// The code runs on 9.0 alone, in a library that has the Hopper kernels.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(CUDA_OPS_EVERY_KERNEL)
constexpr bool kPlannedForHopper = true;
#else
constexpr bool kPlannedForHopper = false;
#endif

}  // namespace cuda_ops
