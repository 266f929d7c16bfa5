// .cc, and a header in the repository's include/ folder.
#include <pybind11/pybind11.h>

#include <guest/limits.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("clamp", [](double x) { return x > guest::kMost ? guest::kMost : x; });
}
