// From a tensor to a launch: the right device, the stream PyTorch is using on
// it, and an error that says what the driver said.
#pragma once

#include "tensor.h"

// CUDA_OPS_CUDA is 1 when the pair's .cu is part of this build. Without a CUDA
// toolkit the binding still compiles: the CUDA entry is then dropped, and
// these two names are all that its body needs.
#if CUDA_OPS_CUDA
#include <cuda_runtime_api.h>

#include "ptx/capability.h"
#else
struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t : int { cudaSuccess = 0 };
#endif

#ifndef CUDA_OPS_ARCHS
#define CUDA_OPS_ARCHS "none"
#endif

namespace cuda_ops {

// Whether the kernels of this library include code for sm_90a.
inline bool built_for_hopper() {
  return std::string(CUDA_OPS_ARCHS).find("9.0a") != std::string::npos;
}

// What the loader lends a library. The current stream lives in libtorch_cuda,
// which a CPU-only torch does not have, so a library must not link against it.
struct Host {
  AOTITorchError (*current_cuda_stream)(int32_t device_index, void** stream) = nullptr;
};

inline Host host;

#if CUDA_OPS_CUDA
// Calls `launcher(stream)` with the device of `like` current and its current
// stream, and raises what the launcher returns as an error.
template <class Launcher>
void launch(const Tensor& like, Launcher&& launcher) {
  struct DeviceGuard {
    DeviceGuardHandle handle = nullptr;
    ~DeviceGuard() {
      if (handle != nullptr) aoti_torch_delete_device_guard(handle);
    }
  } guard;
  const int32_t device = like.get_device_index();
  int32_t current = -1;
  detail::check_torch(aoti_torch_get_current_device_index(&current), "read the current device");
  if (device != current) {
    detail::check_torch(aoti_torch_create_device_guard(device, &guard.handle), "set the device");
  }
  void* stream = nullptr;
  if (host.current_cuda_stream == nullptr) {
    throw std::runtime_error("cuda_ops: loaded under a torch without CUDA");
  }
  detail::check_torch(host.current_cuda_stream(device, &stream), "read the current stream");
  const cudaError_t error = launcher(static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return;
  std::string text = cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    const std::string where = "the device is cuda:" + std::to_string(device);
    if (current_device().capability < 80) {
      text += "; cuda_ops needs compute capability 8.0 or later, " + where;
    } else {
      text += "; this build holds code for " CUDA_OPS_ARCHS ", " + where +
              ". Rebuild with TORCH_CUDA_ARCH_LIST or compile_dev.py --arch set to its capability.";
    }
  }
  throw OpError(text);
}
#elif defined(CUDA_OPS_CUDA)
template <class Launcher>
void launch(const Tensor&, Launcher&&) {
  throw OpError(
      "this library was built without its CUDA kernel; install a CUDA toolkit and run "
      "python compile_dev.py");
}
#else
// The loader lends the stream to the libraries of CUDA_OPS(library) alone.
template <class Launcher>
void launch(const Tensor&, Launcher&&) {
  static_assert(
      sizeof(Launcher) == 0,
      "launch() needs CUDA_OPS(library); elsewhere, launch the kernel yourself on torch's "
      "at::cuda::getCurrentCUDAStream()");
}
#endif

}  // namespace cuda_ops
