#include <torch/extension.h>
__global__ void fill(int* out, int value, int n) {
  for (int k = threadIdx.x; k < n; k += blockDim.x) { int* at = out + k; *at = value; }
}
void fill_ints(torch::Tensor out, int value) { fill<<<1, 128>>>(out.data_ptr<int>(), value, out.numel()); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("fill_ints", &fill_ints); m.def("twice", [](torch::Tensor x) { return x * 2; }); }
