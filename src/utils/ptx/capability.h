// The current GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "ptx/device_info.h"

namespace cuda_ops {

// Describes the current device, asking the driver once. Without a device the capability is 0.
inline DeviceInfo current_device() {
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess) return {};
  // Each device is one word, so that threads need no lock; 0 is not known yet.
  constexpr int kMostKnown = 64;
  static std::atomic<uint64_t> known[kMostKnown];
  uint64_t packed = index < kMostKnown ? known[index].load(std::memory_order_relaxed) : 0;
  if (packed == 0) {
    const auto ask = [&](cudaDeviceAttr attribute) {
      int value = 0;
      const bool answered = cudaDeviceGetAttribute(&value, attribute, index) == cudaSuccess;
      return answered ? uint64_t(value) : uint64_t(0);
    };
    const uint64_t capability = 10 * ask(cudaDevAttrComputeCapabilityMajor) +
                                ask(cudaDevAttrComputeCapabilityMinor),
                   sms = ask(cudaDevAttrMultiProcessorCount),
                   shared = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    if (capability == 0 || sms == 0) return {};
    packed = capability << 48 | sms << 32 | shared;
    if (index < kMostKnown) known[index].store(packed, std::memory_order_relaxed);
  }
  return {int(packed >> 48), int(packed >> 32 & 0xffff), int(packed & 0xffffffff)};
}

}  // namespace cuda_ops
