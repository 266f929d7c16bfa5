#include <torch/extension.h>
torch::Tensor row_softmax(const torch::Tensor& x, double temperature);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("row_softmax", &row_softmax, "softmax of rows", py::arg("x"), py::arg("temperature") = 1.0);
}
