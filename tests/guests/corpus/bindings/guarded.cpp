// Code for the GPU that is there where the build says so, as repositories guard it.
#include <pybind11/pybind11.h>

#if defined(WITH_CUDA) && defined(USE_CUDA)
int guarded_blocks(int n);
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
#if defined(WITH_CUDA) && defined(USE_CUDA)
  m.def("blocks", &guarded_blocks);
#endif
#ifdef TORCH_API_INCLUDE_EXTENSION_H
  m.attr("as_torch_builds_it") = true;
#endif
}
