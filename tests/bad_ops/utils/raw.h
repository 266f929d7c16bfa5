// Two contiguous buffers, for kernels that know no better.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace cuda_ops {

struct Raw {
  DType dtype;
  const void* x;
  void* out;
  int64_t numel;
};

}  // namespace cuda_ops
