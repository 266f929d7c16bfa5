// Programmatic dependent launch (sm_90): a kernel's blocks start on SMs that the kernel
// before it on the stream leaves idle, so that its launch and its preparations cost no time.
// Streams and CUDA graphs alike; a kernel launched in the ordinary way waits as ever.
#pragma once

#include <cuda_runtime.h>

namespace cuda_ops {

// --- host ---------------------------------------------------------------------

// Of a kernel in which each thread calls wait_for_kernels_before before it touches global
// memory. A capture takes it from 12.3 on: older drivers get what changes nothing.
inline cudaLaunchAttribute early_launch() {
  static const bool supported = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12030;
  }();
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = supported;
  return attribute;
}

// --- device -------------------------------------------------------------------

// Until all work before this kernel is done and its writes are visible.
__device__ inline void wait_for_kernels_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel's blocks may start once all of this one's are here; after the wait, or
// blocks of more and more kernels would hold shared memory that those before could use.
__device__ inline void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace cuda_ops
