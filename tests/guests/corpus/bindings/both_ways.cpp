// Operators for torch, and a function for Python beside them.
#include <pybind11/pybind11.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

using torch::stable::Tensor;

Tensor copied(const Tensor& x) { return torch::stable::clone(x); }

STABLE_TORCH_LIBRARY(guest_both_ways, m) { m.def("copied(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(guest_both_ways, CPU, m) { m.impl("copied", TORCH_BOX(&copied)); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("version", [] { return 1; });
}
