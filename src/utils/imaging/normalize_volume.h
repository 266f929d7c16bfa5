// The plain description of a volume's normalization, shared by the binding and
// the kernel. No torch, no CUDA.
#pragma once

#include <cmath>

#include "points.h"

namespace cuda_ops {

// Exact sums over a volume: their order cannot matter, however it is split.
struct Moments {
  uint64_t sum = 0, squares = 0;
};

// This many squares of uint16 add up in 64 bits.
constexpr int64_t kMostVoxels = int64_t(1) << 32;

// out = (x - mean) / divisor.
struct Scaling {
  double mean = 0, divisor = 1;
};

// The population's variance. Its numerator n * sum(x^2) - sum(x)^2 is exact in
// 128 bits, so it is 0 for a constant volume and for no other.
constexpr double variance(const Moments& m, uint64_t n) {
  __extension__ using Wide = unsigned __int128;
  const Wide exact = Wide(m.squares) * n - Wide(m.sum) * m.sum;
  const double numerator =
      double(uint64_t(exact >> 64)) * 18446744073709551616.0 + double(uint64_t(exact));
  return numerator / double(n) / double(n);
}

struct NormalizeVolume {
  Points voxels;        // all volumes, in row-major order
  int64_t volumes = 1;  // volumes of `each` voxels
  int64_t each = 0;
  bool own_statistics = false;
  bool to_half = false;  // else float32
  Scaling given;         // without own statistics
  void* out = nullptr;
  Moments* partials = nullptr;  // workspace of kMostPartials, with own statistics
};

// Two per block of a grid whose blocks are all resident.
constexpr int64_t kMostPartials = 2 * 1024;

}  // namespace cuda_ops
