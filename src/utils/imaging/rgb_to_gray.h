// The plain description of a colour conversion, shared by the binding and the
// kernel. No torch, no CUDA.
#pragma once

#include "points.h"

namespace cuda_ops {

// out[i] = gray of the three bytes at pixel i, `channel` apart.
struct RgbToGray {
  Points pixels;
  int64_t channel = 1;
  uint8_t* out = nullptr;
};

// 0.299 R + 0.587 G + 0.114 B, rounded to the nearest, halves up: exactly that,
// in 24 bits of fraction. The weights are rounded up, so that an exact half step
// is not lost; together they are off by less than 255 * 3 / 2^24,
// while the next sum of thousandths below a half is 1/1000 away.
constexpr uint32_t kRedWeight = 5016388, kGreenWeight = 9848226, kBlueWeight = 1912603;

// The gray value is the top byte.
constexpr uint32_t weighted(uint32_t red, uint32_t green, uint32_t blue) {
  return red * kRedWeight + green * kGreenWeight + blue * kBlueWeight + (1u << 23);
}

}  // namespace cuda_ops
