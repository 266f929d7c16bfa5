__global__ void forward_kernel(float* x) { x[threadIdx.x] += 1; }

int flash_fwd(int n) {
  if (n < 0) forward_kernel<<<1, 1, 0, nullptr>>>(nullptr);
  return n + 1;
}
