// gelu in its tanh approximation and its derivatives, on the CPU in float64.
#pragma once

#include <cmath>

namespace cuda_ops {
namespace gelu {

constexpr double kScale = 0.7978845608028654;  // sqrt(2 / pi)
constexpr double kCubic = 0.044715;

inline double value(double v) {
  return 0.5 * v * (1 + std::tanh(kScale * (v + kCubic * v * v * v)));
}

inline double first(double v) {
  const double t = std::tanh(kScale * (v + kCubic * v * v * v));
  const double inner = kScale * (1 + 3 * kCubic * v * v);
  return 0.5 * (1 + t) + (std::fabs(t) == 1 ? 0 : 0.5 * v * (1 - t * t) * inner);
}

inline double second(double v) {
  const double t = std::tanh(kScale * (v + kCubic * v * v * v));
  const double inner = kScale * (1 + 3 * kCubic * v * v);
  const double bend = 6 * kScale * kCubic * v - 2 * t * inner * inner;
  return std::fabs(t) == 1 ? 0 : (1 - t * t) * (inner + 0.5 * v * bend);
}

}  // namespace gelu
}  // namespace cuda_ops
