// The binding of three files: its kernel and its code for the CPU are called as it is, and more.
#include <pybind11/pybind11.h>

double lltm_cpu(double x);
int lltm_blocks(int n);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &lltm_cpu);
  m.def("blocks", &lltm_blocks);
}
