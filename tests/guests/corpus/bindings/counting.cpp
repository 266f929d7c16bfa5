// A class that Python sees.
#include <pybind11/pybind11.h>

struct Counter {
  int count = 0;
  int next() { return ++count; }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<Counter>(m, "Counter").def(pybind11::init<>()).def("next", &Counter::next);
  m.def("version", [] { return 1; });
}
