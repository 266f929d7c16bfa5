// Reads an argument after it has written to another, which Inductor may give the same memory. A
// guest, since a binding copies what it reads from memory that it writes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/macros/Macros.h>

#include <vector>

using torch::stable::Tensor;

namespace {

std::vector<double*> elements(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.scalar_type() == torch::headeronly::ScalarType::Double);
  std::vector<double*> found(tensor.numel(), static_cast<double*>(tensor.data_ptr()));
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    int64_t rest = i;
    for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
      found[i] += rest % tensor.size(d) * tensor.stride(d);
      rest /= tensor.size(d);
    }
  }
  return found;
}

void bad_reinplaced_cpu(const Tensor& y, const Tensor& x) {
  const std::vector<double*> ys = elements(y), xs = elements(x);
  for (double* element : ys) *element *= 2;
  for (size_t i = 0; i < ys.size(); ++i) *ys[i] += *xs[i];
}

}  // namespace

STABLE_TORCH_LIBRARY(bad_guest, m) { m.def("bad_reinplaced(Tensor(a!) y, Tensor x) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(bad_guest, CPU, m) {
  m.impl("bad_reinplaced", TORCH_BOX(&bad_reinplaced_cpu));
}
