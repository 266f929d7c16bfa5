// The plain description of a volume's normalisation, shared by the binding and
// the kernel. No torch, no CUDA.
#pragma once

#include <cmath>

#include "view.h"

namespace cuda_ops {

// What squares of uint16 may be added up in 64 bits.
constexpr int64_t kMostVoxels = int64_t(1) << 32;

// Exact sums over a volume, so their order and split cannot matter.
struct Moments {
  uint64_t sum = 0, squares = 0;
};

// out = ((x - whole) - rest) / divisor in float32. The mean comes in two parts:
// in one float32 a mean near 2^15 would be off by 2^-9, which a small standard
// deviation makes large; x - whole is exact.
struct Affine {
  float whole = 0, rest = 0, divisor = 1;

  constexpr Affine() = default;
  constexpr Affine(double mean, double scale)
      : whole(static_cast<float>(static_cast<int64_t>(mean))),
        rest(static_cast<float>(mean - whole)),
        divisor(static_cast<float>(scale)) {}
};

__extension__ using Wide = unsigned __int128;

// The mean and the population's standard deviation. The variance's numerator
// n * sum(x^2) - sum(x)^2 is exact, so a constant volume is known as one: it is
// divided by 1, and x - mean is 0.
constexpr Moments kNothing{};
constexpr double spread_squared(const Moments& m, uint64_t n) {
  const Wide numerator = Wide(m.squares) * n - Wide(m.sum) * m.sum;
  return static_cast<double>(static_cast<uint64_t>(numerator >> 64)) * 18446744073709551616.0 +
         static_cast<double>(static_cast<uint64_t>(numerator));
}

struct NormalizeVolume {
  View voxels;               // of all volumes, in row-major order
  int64_t volumes = 1;       // that many of `each` voxels
  int64_t each = 0;
  bool own_statistics = false;
  bool half_out = false;     // else float32
  double mean = 0, divisor = 1;  // without own statistics
  void* out = nullptr;
  Moments* partials = nullptr;   // workspace: kMostPartials values
};

constexpr int64_t kMostPartials = 2 * 1024;

}  // namespace cuda_ops
