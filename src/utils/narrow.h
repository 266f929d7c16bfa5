// Numbers of eight and of four bits: the bits in memory, and how they become a
// float and are made of one. The same code runs on both sides, so a CPU kernel
// agrees with its GPU one to the bit. No torch; not cuda_fp8.h, which alone costs
// nvcc 0.45 s (CUDA 13.0, 2-core CPU).
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define CUDA_OPS_BOTH __host__ __device__ inline
#else
#define CUDA_OPS_BOTH inline
#endif

namespace cuda_ops {
namespace detail {

CUDA_OPS_BOTH uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
CUDA_OPS_BOTH float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// A number without its sign, of kMantissa bits behind an exponent that is 0 for subnormal ones.
template <int kMantissa, int kBias>
CUDA_OPS_BOTH float widen(uint32_t magnitude) {
  constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  constexpr uint32_t kUnit = uint32_t(128 - kBias - kMantissa) << 23;  // the smallest number's bits
  if (magnitude < 1u << kMantissa) return float(magnitude) * float_of(kUnit);
  return float_of((magnitude << (23 - kMantissa)) + kRebias);
}

// The nearest such number, ties to even; `magnitude` holds the bits of a finite float.
template <int kMantissa, int kBias>
CUDA_OPS_BOTH uint32_t round(uint32_t magnitude) {
  constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  if (magnitude < uint32_t(128 - kBias) << 23) {
    // The sum is rounded to a multiple of the smallest number.
    constexpr uint32_t kMagic = uint32_t(151 - kBias - kMantissa) << 23;
    return bits_of(float_of(magnitude) + float_of(kMagic)) - kMagic;
  }
  constexpr int kDropped = 23 - kMantissa;
  const uint32_t odd = magnitude >> kDropped & 1;
  return (magnitude - kRebias + (1u << (kDropped - 1)) - 1 + odd) >> kDropped;
}

constexpr uint32_t kInfinity = 0x7f800000;

}  // namespace detail

// `nearest` is torch's cast as of 2.13: what is too large becomes the largest number, infinities
// too (NaN in torch 2.11). NaN stays one.
struct Float8E4M3 {
  uint8_t bits;
  static constexpr float kLargest = 448;

  CUDA_OPS_BOTH static Float8E4M3 nearest(float value) {
    const uint32_t all = detail::bits_of(value), magnitude = all & 0x7fffffff;
    const uint32_t sign = all >> 24 & 0x80;
    if (magnitude > detail::kInfinity) return {uint8_t(sign | 0x7f)};
    constexpr uint32_t kFirstAbove = 0x43f00000;  // 480
    const uint32_t code = magnitude < kFirstAbove ? detail::round<3, 7>(magnitude) : 0x7f;
    return {uint8_t(sign | (code < 0x7e ? code : 0x7e))};
  }
  CUDA_OPS_BOTH static Float8E4M3 saturated(float value) { return nearest(value); }

  CUDA_OPS_BOTH float value() const {
    const uint32_t magnitude = bits & 0x7f, sign = uint32_t(bits & 0x80) << 24;
    const float wide =
        magnitude == 0x7f ? detail::float_of(0x7fc00000) : detail::widen<3, 7>(magnitude);
    return detail::float_of(detail::bits_of(wide) | sign);
  }
};

// `nearest` is torch's cast: what is too large becomes an infinity. `saturated` makes it the
// largest number, infinities too.
struct Float8E5M2 {
  uint8_t bits;
  static constexpr float kLargest = 57344;

  CUDA_OPS_BOTH static Float8E5M2 nearest(float value) { return made(value, 0x7c); }
  CUDA_OPS_BOTH static Float8E5M2 saturated(float value) { return made(value, 0x7b); }

  CUDA_OPS_BOTH float value() const {
    const uint32_t magnitude = bits & 0x7f, sign = uint32_t(bits & 0x80) << 24;
    if (magnitude >= 0x7c) {
      return detail::float_of(sign | detail::kInfinity | (magnitude & 3) << 21);
    }
    return detail::float_of(detail::bits_of(detail::widen<2, 15>(magnitude)) | sign);
  }

 private:
  CUDA_OPS_BOTH static Float8E5M2 made(float value, uint32_t most) {
    const uint32_t all = detail::bits_of(value), magnitude = all & 0x7fffffff;
    const uint32_t sign = all >> 24 & 0x80;
    if (magnitude > detail::kInfinity) return {uint8_t(sign | 0x7f)};
    constexpr uint32_t kFirstAbove = 0x47800000;  // 65536
    const uint32_t code = magnitude < kFirstAbove ? detail::round<2, 15>(magnitude) : 0x7c;
    return {uint8_t(sign | (code < most ? code : most))};
  }
};

// 2^(bits - 127): the scale of a block. There is no sign, no zero and no infinity; 255 is NaN.
struct Float8E8M0 {
  uint8_t bits;

  // torch's cast: the sign is dropped, zero becomes 2^-127, infinities and what is too large NaN.
  // Half a step goes up.
  CUDA_OPS_BOTH static Float8E8M0 nearest(float value) {
    const uint32_t magnitude = detail::bits_of(value) & 0x7fffffff;
    const uint32_t exponent = magnitude >> 23, fraction = magnitude & 0x7fffff;
    if (exponent == 255) return {255};
    const bool up = exponent > 0 ? fraction >= 0x400000 : fraction > 0x400000;
    return {uint8_t(exponent + up)};
  }

  CUDA_OPS_BOTH float value() const {
    if (bits == 255) return detail::float_of(0x7fc00000);
    return detail::float_of(bits == 0 ? 0x00400000 : uint32_t(bits) << 23);
  }
};

// --- two in a byte, the first in the low half, as torch has them -----------------

CUDA_OPS_BOTH uint8_t pair_of_4(uint32_t first, uint32_t second) {
  return uint8_t((first & 15) | (second & 15) << 4);
}
// Integer `i` (0 or 1) of a byte, with a sign and without; pack them with pair_of_4.
CUDA_OPS_BOTH int int4_at(uint8_t pair, int i) { return int8_t(pair << (4 - 4 * i)) >> 4; }
CUDA_OPS_BOTH int uint4_at(uint8_t pair, int i) { return pair >> 4 * i & 15; }

struct Float4E2M1x2 {
  uint8_t bits;
  static constexpr float kLargest = 6;

  // The nearest numbers, ties to even. What is too large becomes 6, and so does NaN: there is none.
  CUDA_OPS_BOTH static Float4E2M1x2 saturated(float first, float second) {
    return {pair_of_4(made(first), made(second))};
  }

  CUDA_OPS_BOTH float value(int i) const {
    const uint32_t code = uint32_t(uint4_at(bits, i));
    const uint32_t wide = detail::bits_of(detail::widen<1, 1>(code & 7));
    return detail::float_of(wide | (code & 8) << 28);
  }

 private:
  CUDA_OPS_BOTH static uint32_t made(float value) {
    const uint32_t all = detail::bits_of(value), magnitude = all & 0x7fffffff;
    if (magnitude > detail::kInfinity) return 7;
    constexpr uint32_t kFirstAbove = 0x41000000;  // 8
    const uint32_t code = magnitude < kFirstAbove ? detail::round<1, 1>(magnitude) : 7;
    return (code < 7 ? code : 7) | (all >> 28 & 8);
  }
};

}  // namespace cuda_ops
