// Kernels of tutorial_silu.cpp and tutorial_silu.cu, as they are, and launchers for the binding.
#include <cstdint>

#include "dtype.cuh"

using cuda_ops::DType;
using cuda_ops::visit;

namespace {

template <typename scalar_t>
__global__ void tutorial_silu_kernel(const scalar_t* x, scalar_t* y, int64_t n) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = x[i] / (1 + exp(-x[i]));
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t tutorial_silu_launch(DType dtype, const void* x, void* y, int64_t n,
                                 cudaStream_t stream) {
  return visit<DType::kFloat64, DType::kFloat32>(dtype, [&](auto tag) {
    using scalar_t = decltype(tag);
    tutorial_silu_kernel<scalar_t><<<(n + 255) / 256, 256, 0, stream>>>(
        static_cast<const scalar_t*>(x), static_cast<scalar_t*>(y), n);
    return cudaGetLastError();
  });
}
