// The facts about a GPU that plans depend on: a value, so that plans are pure functions of sizes
// and device and can be made for a GPU that is not there. No torch, no CUDA.
#pragma once

#include <cstdio>
#include <cstring>

namespace cuda_ops {

struct DeviceInfo {
  int capability = 0;               // 90 for 9.0
  int sms = 1;                      // multiprocessors; never 0, since plans divide by it
  int shared_memory_per_block = 0;  // bytes that a kernel may ask for
};

struct NamedDevice {
  const char* name;
  DeviceInfo info;
};

// The SXM modules, by NVIDIA's specifications.
constexpr NamedDevice kNamedDevices[] = {
    {"A100", {80, 108, 163 * 1024}},
    {"H100", {90, 132, 227 * 1024}},
    {"H200", {90, 132, 227 * 1024}},
    {"B200", {100, 148, 227 * 1024}},
};

// Reads the name of a device, or its capability, SMs and KB of shared memory per block, as in
// "8.9,142,99". Returns false if `text` is neither.
inline bool device_named(const char* text, DeviceInfo& info) {
  for (const NamedDevice& device : kNamedDevices) {
    if (std::strcmp(device.name, text) == 0) {
      info = device.info;
      return true;
    }
  }
  int major = 0, minor = 0, sms = 0, kilobytes = 0, length = 0;
  const int found = std::sscanf(text, "%d.%d,%d,%d%n", &major, &minor, &sms, &kilobytes, &length);
  if (found != 4 || text[length] != '\0' || sms < 1) return false;
  info = {10 * major + minor, sms, 1024 * kilobytes};
  return true;
}

}  // namespace cuda_ops
