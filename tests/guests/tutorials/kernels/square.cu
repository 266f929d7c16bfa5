#include <torch/extension.h>
__global__ void square_kernel(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * x[i];
}
__global__ void square_grad_kernel(const float* g, const float* x, float* gx, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) gx[i] = 2 * x[i] * g[i];
}
void launch_square(const float* x, float* y, int n) {
  const int threads = 256;
  square_kernel<<<(n + threads - 1) / threads, threads>>>(x, y, n);
}
void launch_square_grad(const float* g, const float* x, float* gx, int n) {
  square_grad_kernel<<<64, 256>>>(g, x, gx, n);
}
