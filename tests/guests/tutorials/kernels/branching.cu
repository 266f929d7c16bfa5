#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
template <typename T>
__global__ void bend(const T* __restrict__ in, T* __restrict__ out, const float gain, const size_t n) {
  const size_t stride = blockDim.x * gridDim.x;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    const T v = in[i];
    out[i] = T(gain) * (v > T(0) ? v : T(0.25) * v);
  }
}
template <typename T>
void launch_bend(const T* in, T* out, float gain, size_t n) {
  int threads = 256;
  int blocks = std::min<int>((n + threads - 1) / threads, 1024);
  bend<T><<<blocks, threads>>>(in, out, gain, n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
at::Tensor branching_cuda(const at::Tensor& x, float gain) {
  auto xc = x.contiguous();
  auto y = at::empty_like(xc);
  if (xc.numel() == 0) return y;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "branching_cuda", [&] {
    launch_bend<scalar_t>(xc.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), gain, xc.numel());
  });
  return y;
}
