#include <torch/extension.h>
#include <c10/cuda/CUDAGuard.h>
#include "row_max.cuh"
constexpr int kThreads = 256;
template <typename scalar_t>
__global__ void row_softmax_kernel(const scalar_t* __restrict__ x, scalar_t* __restrict__ y, int64_t rows, int64_t n) {
  int64_t row = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (row >= rows) return;
  const scalar_t most = row_max(x + row * n, n);
  scalar_t sum = 0;
  for (int64_t k = 0; k < n; ++k) sum += exp(x[row * n + k] - most);
  for (int64_t k = 0; k < n; ++k) y[row * n + k] = exp(x[row * n + k] - most) / sum;
}
torch::Tensor row_softmax(const torch::Tensor& x, double temperature) {
  TORCH_CHECK(x.dim() == 2, "x must have two dims");
  TORCH_CHECK(temperature > 0, "temperature must be positive");
  const at::cuda::OptionalCUDAGuard guard(device_of(x));
  auto x_ = x.contiguous();
  const int64_t rows = x_.size(0), n = x_.size(1);
  auto y = torch::empty_like(x_);
  AT_DISPATCH_FLOATING_TYPES_AND_HALF(x_.scalar_type(), "row_softmax", [&] {
    row_softmax_kernel<scalar_t><<<(rows + kThreads - 1) / kThreads, kThreads, 0, at::cuda::getCurrentCUDAStream()>>>(
        x_.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), rows, n);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return y;
}
