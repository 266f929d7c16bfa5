#include <stdio.h>
#include <torch/extension.h>
#include <torch/types.h>
#include "leet_math.cuh"
#define FLOAT4(value) (reinterpret_cast<float4 *>(&(value))[0])
#define STRINGFY(str) #str
#define TORCH_BINDING_COMMON_EXTENSION(func) \
  m.def(STRINGFY(func), &func, STRINGFY(func));
#define CHECK_TORCH_TENSOR_DTYPE(T, th_type) \
  if (((T).options().dtype() != (th_type))) { \
    std::cout << "Tensor Info:" << (T).options() << std::endl; \
    throw std::runtime_error("values must be " #th_type); \
  }
__global__ void relu_f32x4_kernel(float *x, float *y, int N) {
  int idx = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (idx < N) {
    float4 reg_x = FLOAT4(x[idx]);
    float4 reg_y;
    reg_y.x = leet::top(0.0f, reg_x.x);
    reg_y.y = leet::top(0.0f, reg_x.y);
    reg_y.z = leet::top(0.0f, reg_x.z);
    reg_y.w = leet::top(0.0f, reg_x.w);
    FLOAT4(y[idx]) = reg_y;
  }
}
__global__ void relu_f32_kernel(float *x, float *y, int N) {
  int idx = blockIdx.x * blockDim.x + threadIdx.x;
  if (idx < N)
    y[idx] = fmaxf(0.0f, x[idx]);
}
void relu_f32(torch::Tensor x, torch::Tensor y) {
  CHECK_TORCH_TENSOR_DTYPE(x, torch::kFloat32)
  CHECK_TORCH_TENSOR_DTYPE(y, torch::kFloat32)
  const int ndim = x.dim();
  if (ndim != 2) {
    int N = 1;
    for (int i = 0; i < ndim; ++i) { N *= x.size(i); }
    dim3 block(256 / 1);
    dim3 grid((N + 256 - 1) / 256);
    relu_f32_kernel<<<grid, block>>>(reinterpret_cast<float *>(x.data_ptr()), reinterpret_cast<float *>(y.data_ptr()), N);
  }
}
void relu_flat(torch::Tensor x, torch::Tensor y) {
  const int device = x.get_device();
  cudaSetDevice(device);
  const int N = x.numel();
  relu_f32_kernel<<<(N + 255) / 256, 256>>>(reinterpret_cast<float *>(x.data_ptr()), reinterpret_cast<float *>(y.data_ptr()), N);
}
torch::Tensor relu_x4(torch::Tensor x) {
  const auto sizes = x.sizes();
  auto y = torch::empty({sizes[0], sizes[1]}, torch::dtype(torch::kFloat32).device(x.device()));
  const int N = sizes[0] * sizes[1];
  relu_f32x4_kernel<<<leet::blocks(N, 1024), 256>>>(x.contiguous().data_ptr<float>(), y.data_ptr<float>(), N);
  return y;
}
#if 1
torch::Tensor choosing(torch::Tensor x) {
  auto y = torch::empty_like(x);
#if CUDA_VERSION > 11000
  relu_f32_kernel<<<1, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
#else
  relu_f32_kernel<<<2, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
#endif
  return y;
}
#endif
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  TORCH_BINDING_COMMON_EXTENSION(relu_x4)
  TORCH_BINDING_COMMON_EXTENSION(relu_f32)
  TORCH_BINDING_COMMON_EXTENSION(relu_flat)
  TORCH_BINDING_COMMON_EXTENSION(choosing)
}
