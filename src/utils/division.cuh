// Division of indices by a number that the host knows.
#pragma once

#include "elementwise.cuh"

namespace cuda_ops {

// n / divisor for n from 0 to `most`: by a multiplication where both fit 32 bits. One division of
// 64 bits takes 100 instructions.
struct IndexDivider {
  int64_t divisor = 1;
  bool is_narrow = true;
  Divider narrow;

  IndexDivider() = default;
  IndexDivider(int64_t divisor, int64_t most)
      : divisor(divisor), is_narrow(divisor <= INT32_MAX && most <= INT32_MAX) {
    if (is_narrow) narrow = Divider(uint32_t(divisor));
  }

  __device__ int64_t operator()(int64_t n) const {
    return is_narrow ? narrow(uint32_t(n)) : n / divisor;
  }
};

}  // namespace cuda_ops
