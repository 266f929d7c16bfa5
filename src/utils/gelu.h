// gelu in its tanh approximation and its derivatives, on the CPU in float64.
#pragma once

#include <cmath>

namespace cuda_ops {
namespace gelu {

constexpr double kScale = 1.5957691216057308;  // sqrt(8 / pi)
constexpr double kCubic = 0.044715;

// 0.5 * (1 + tanh(u)) is sigmoid(2u), and its slope that times the complement: no digits cancel.
struct Inner {
  double sigmoid, complement, slope;  // of sigmoid(v)
  double first, second;               // dv/dx, d2v/dx2

  explicit Inner(double x) {
    const double v = kScale * (x + kCubic * x * x * x), far = std::exp(-std::fabs(v));
    const double most = 1 / (1 + far), least = far * most;
    sigmoid = v < 0 ? least : most;
    complement = v < 0 ? most : least;
    slope = sigmoid * complement;
    first = kScale * (1 + 3 * kCubic * x * x);
    second = 6 * kScale * kCubic * x;
  }

  // The slope times `rest`, and 0 where the sigmoid is flat, however large the rest grows.
  double sloped(double rest) const { return slope == 0 ? 0 : slope * rest; }
};

inline double value(double x) { return x * Inner(x).sigmoid; }

inline double first(double x) {
  const Inner v(x);
  return v.sigmoid + v.sloped(x * v.first);
}

inline double second(double x) {
  const Inner v(x);
  const double bend = v.second + (v.complement - v.sigmoid) * v.first * v.first;
  return v.sloped(2 * v.first + x * bend);
}

}  // namespace gelu
}  // namespace cuda_ops
