// Division of sizes, rounded up: blocks for so many elements. No torch, no CUDA.
#pragma once

#include <cstdint>

namespace cuda_ops {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace cuda_ops
