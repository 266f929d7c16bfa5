// Which GPU is current.
#pragma once

#include <cuda_runtime_api.h>

namespace cuda_ops {

// The compute capability of the current device, 90 for 9.0.
inline int current_capability() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

}  // namespace cuda_ops
