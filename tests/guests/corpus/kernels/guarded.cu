#include <cuda_fp16.h>

__global__ void halve(__half* x) { x[threadIdx.x] = __hmul(x[threadIdx.x], __float2half(0.5f)); }

int guarded_blocks(int n) {
  if (n < 0) halve<<<1, 1, 0, nullptr>>>(nullptr);
  return (n + 127) / 128;
}
