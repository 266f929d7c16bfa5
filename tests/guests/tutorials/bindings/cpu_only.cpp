#include <torch/extension.h>
#include <numeric>
#include <vector>
namespace tools {
double sigmoid(double v) { return 1 / (1 + std::exp(-v)); }
template <typename T> T twice(T v) { return v + v; }
}
// Sums each row.
torch::Tensor row_sums(torch::Tensor x, int64_t skip, float scale) {
  TORCH_CHECK(x.dim() == 2, "two dims");
  if (x.size(1) < 1) { AT_ERROR("no columns"); }
  auto rows = x.size(0), cols = x.size(1);
  auto out = torch::zeros({rows}, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "row_sums", [&] {
    auto* from = x.data_ptr<scalar_t>();
    auto* to = out.data_ptr<scalar_t>();
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<scalar_t> row(from + r * cols, from + (r + 1) * cols);
      to[r] += tools::twice(scalar_t(tools::sigmoid(std::accumulate(row.begin(), row.end(), scalar_t(0))) * scale));
    }
  });
  return out;
}
torch::Tensor d_sigmoid(torch::Tensor z) {
  auto s = torch::sigmoid(z);
  return (1 - s) * s;
}
torch::Tensor d_elu(torch::Tensor z, double alpha = 1.0) {
  auto e = z.exp();
  auto mask = (alpha * (e - 1)) < 0;
  return (z > 0).type_as(z) + mask.type_as(z) * (alpha * e);
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("row_sums", &row_sums, py::arg("x"), py::arg("skip") = std::max(1, 2), py::arg("scale") = 2.f);
  m.def("d_sigmoid", &d_sigmoid);
  m.def("d_elu", &d_elu);
}
