// Rows, or blocks of them, as narrow numbers with a scale each: the plain description, and the
// arithmetic that both sides share. No torch, no CUDA.
#pragma once

#include "layout.h"
#include "narrow.h"
#include "ptx/device_info.h"
#include "rows/rows.h"

namespace cuda_ops {

// `rows` runs of `n` neighbors, each with one scale. In x, `runs` of them lie side by side before
// the next row begins, `x_step` elements after the one before; q is dense.
struct Quantize {
  const void* x = nullptr;
  void* q = nullptr;
  float* scale = nullptr;
  int64_t rows = 0, n = 0;
  int64_t runs = 1, x_step = 0;
  DType dtype = DType::kUnsupported;
  DType q_dtype = DType::kUnsupported;
};

// A whole number from -127 to 127, so that its range is as symmetric as that of the others.
struct Int8 {
  int8_t bits;
  static constexpr float kLargest = 127;

  // Takes the nearest integer to a number.
  CUDA_OPS_BOTH static Int8 saturated(int nearest) {
    return {int8_t(nearest < -127 ? -127 : nearest > 127 ? 127 : nearest)};
  }
};

// The scale of numbers up to `largest`; 1 where that is 0, or too small for a scale, and everything
// becomes 0.
template <class Q>
CUDA_OPS_BOTH float quantization_scale(float largest) {
  const float scale = largest / Q::kLargest;
  return scale == 0 ? 1.0f : scale;
}

inline RowConfig quantize_config(const Quantize& p, const DeviceInfo& device) {
  RowConfig config;
  const int64_t bytes = size_of(p.dtype);
  const bool whole = p.n * bytes % 16 == 0 && detail::whole_packs(p.x, p.x_step, bytes);
  config.pack = whole ? int(16 / bytes) : 1;
  const int64_t count = p.n / config.pack;
  detail::share_row(config, count, 4, 1024);
  detail::spread_row(config, p.rows, device.sms);
  detail::trim_row(config, count);
  config.blocks = (p.rows + config.rows() - 1) / config.rows();
  return config;
}

}  // namespace cuda_ops
