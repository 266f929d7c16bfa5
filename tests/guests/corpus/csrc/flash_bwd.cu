__global__ void backward_kernel(float* x) { x[threadIdx.x] -= 1; }

int flash_bwd(int n) {
  if (n < 0) backward_kernel<<<1, 1, 0, nullptr>>>(nullptr);
  return n - 1;
}
