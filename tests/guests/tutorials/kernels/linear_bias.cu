#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
__global__ void linear_kernel(const float* x, const float* w, const float* bias, float* out, int n, int k, int m) {
  int col = blockIdx.x * blockDim.x + threadIdx.x;
  int row = blockIdx.y;
  if (col >= m || row >= n) return;
  float sum = bias ? bias[col] : 0.f;
  for (int i = 0; i < k; ++i) sum += x[row * k + i] * w[col * k + i];
  out[row * m + col] = sum;
}
std::tuple<torch::Tensor, torch::Tensor> linear_bias(torch::Tensor x, torch::Tensor w, c10::optional<torch::Tensor> bias, int64_t repeat) {
  TORCH_CHECK(x.dim() == 2 && w.dim() == 2, "expected matrices");
  TORCH_CHECK(x.size(1) == w.size(1), "inner dims differ");
  TORCH_CHECK(repeat >= 1 && repeat < 100, "repeat");
  int n = x.size(0), k = x.size(1), m = w.size(0);
  auto options = torch::TensorOptions().dtype(torch::kFloat32).device(x.device());
  torch::Tensor out = torch::empty({n, m}, options);
  torch::Tensor flags = torch::zeros({repeat}, options.dtype(torch::kInt32));
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for (int64_t r = 0; r < repeat; ++r) {
    linear_kernel<<<dim3((m + 127) / 128, n), 128, 0, stream.stream()>>>(
        x.data_ptr<float>(), w.data_ptr<float>(),
        bias.has_value() ? bias.value().data_ptr<float>() : nullptr,
        out.data_ptr<float>(), n, k, m);
  }
  AT_CUDA_CHECK(cudaGetLastError());
  return std::make_tuple(out, flags);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("linear_bias", &linear_bias, py::arg("x"), py::arg("w"), py::arg("bias") = py::none(), py::arg("repeat") = 1);
}
