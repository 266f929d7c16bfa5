// A define that setup.py passes, here build.toml.
#include <pybind11/pybind11.h>

#ifndef GUEST_FACTOR
#error "pass -DGUEST_FACTOR"
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scaled", [](double x) { return GUEST_FACTOR * x; });
}
