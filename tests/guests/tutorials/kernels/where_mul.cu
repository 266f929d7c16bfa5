#include <torch/extension.h>
template <typename T>
__global__ void k(const T* a, const bool* mask, T* out, T scale, int64_t n) {
  const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = mask[i] ? a[i] * scale : T(0);
}
torch::Tensor where_mul(const torch::Tensor& a, const torch::Tensor& mask, at::Scalar scale) {
  TORCH_CHECK(a.numel() == mask.numel(), "as many");
  TORCH_CHECK(a.is_cuda() && mask.is_cuda());
  TORCH_CHECK(mask.scalar_type() == torch::kBool, "mask");
  torch::Tensor out = torch::empty_like(a);
  AT_DISPATCH_ALL_TYPES(a.scalar_type(), "where_mul", [&]() {
    k<<<(a.numel() + 255) / 256, 256>>>(a.data_ptr<scalar_t>(), mask.data_ptr<bool>(), out.data_ptr<scalar_t>(), scale.to<scalar_t>(), a.numel());
  });
  return out;
}
torch::Tensor where_mul_backward(torch::Tensor grad_out, torch::Tensor mask, at::Scalar scale) { return where_mul(grad_out, mask, scale); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("where_mul", &where_mul);
  m.def("where_mul_backward", &where_mul_backward);
}
