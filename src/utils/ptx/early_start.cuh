// Kernels that start before the end of the one before them in the stream (PTX ISA,
// griddepcontrol), so that launches take no time of their own.
//
// A kernel of launch_early may start when every block of the one before has called
// let_next_start or is done. Its threads call wait_for_previous before they touch any global
// memory, even memory that no kernel in between wrote: the L1 cache of an SM is not cleaned for a
// kernel that starts in the middle of another one. let_next_start comes after that; a kernel that
// is launched in order may call it at once. The one exception: data that the kernel before had to
// wait for itself, and does not write, is there when this one starts. Loads that go past the L1
// cache (ld.relaxed.gpu) may read it before the wait.
#pragma once

#include <cuda_runtime.h>

#include "ptx/capability.h"

namespace cuda_ops {

__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, and returns the address of the data it waited for: loads of constants (__ldg), which
// the compiler may move, then cannot come before.
template <class V>
__device__ V* after_previous(V* data) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : "+l"(data) : : "memory");
#endif
  return data;
}

// Loads 16 bytes before waiting for the kernel before, which has not written them: from the L2
// cache, since the L1 cache was not cleaned for this one. They are not read again, and the rest of
// their 128 comes into the L2 cache.
__device__ inline uint4 load_fresh(const void* from) {
  uint4 word;
  asm volatile("ld.relaxed.gpu.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(from)
               : "memory");
  return word;
}

// The attribute of such a launch. Captures take it from driver 12.3 on: for older ones it changes
// nothing.
inline cudaLaunchAttribute early_start() {
  static const bool supported = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
  }();
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = supported;
  return attribute;
}

// Whether there is code for exactly this GPU, which then waits as above: code that the driver
// compiles from older PTX does not.
inline bool starts_early(int capability) {
#ifdef __CUDA_ARCH_LIST__
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    if (arch == 10 * capability) return capability >= 90;
  }
  return false;
#else
  return capability >= 90;
#endif
}

// Launches a kernel early, or in order on other GPUs.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), unsigned blocks, int threads,
                         int shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute early = early_start();
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(blocks);
  launch.blockDim = dim3(unsigned(threads));
  launch.dynamicSmemBytes = size_t(shared_bytes);
  launch.stream = stream;
  launch.attrs = &early;
  launch.numAttrs = starts_early(current_device().capability) ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, Parameters(arguments)...);
}

}  // namespace cuda_ops
