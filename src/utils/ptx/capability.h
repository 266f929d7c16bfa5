// Which GPU is current, and what it has.
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

// How many multiprocessors the current device has.
inline cudaError_t current_multiprocessors(int& count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace cuda_ops
