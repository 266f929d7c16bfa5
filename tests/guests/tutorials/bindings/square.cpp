#include <torch/extension.h>
void launch_square(const float* x, float* y, int n);
void launch_square_grad(const float* g, const float* x, float* gx, int n);
torch::Tensor forward(torch::Tensor x) {
  TORCH_CHECK(x.is_cuda() && x.is_contiguous());
  auto y = torch::empty_like(x);
  launch_square(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  return y;
}
torch::Tensor backward(torch::Tensor grad_output, torch::Tensor x) {
  auto grad = torch::empty_like(x);
  launch_square_grad(grad_output.data_ptr<float>(), x.data_ptr<float>(), grad.data_ptr<float>(), x.numel());
  return grad;
}
void scale_(torch::Tensor& x, float by);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward);
  m.def("backward", &backward);
  m.def("scale_", &scale_);
}
