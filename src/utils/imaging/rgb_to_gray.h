// The plain description of a color conversion, shared by the binding and the
// kernel. No torch, no CUDA.
#pragma once

#include "points.h"

namespace cuda_ops {

// 0.299 R + 0.587 G + 0.114 B, rounded to the nearest, halves up: exactly that,
// in 24 bits of fraction. The weights are rounded up, so that an exact half step
// is not lost; together they are off by less than 255 * 3 / 2^24,
// while the next sum of thousandths below a half is 1/1000 away.
constexpr uint32_t kRedWeight = 5016388, kGreenWeight = 9848226, kBlueWeight = 1912603;

// The weights of the first and the last channel; green lies between them in either order. They are
// numbers of the call, not of the kernel: one kernel serves both.
struct GrayWeights {
  uint32_t first, last;
};
constexpr GrayWeights kRgbWeights{kRedWeight, kBlueWeight}, kBgrWeights{kBlueWeight, kRedWeight};

// The gray value is the top byte.
constexpr uint32_t weighted(GrayWeights weights, uint32_t first, uint32_t green, uint32_t last) {
  return first * weights.first + green * kGreenWeight + last * weights.last + (1u << 23);
}

// out[i] = gray of the three bytes at pixel i, `channel` apart.
struct RgbToGray {
  Points pixels;
  int64_t channel = 1;
  uint8_t* out = nullptr;
  GrayWeights weights = kRgbWeights;
};

}  // namespace cuda_ops
