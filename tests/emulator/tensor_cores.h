// wgmma and mma.sync, in place of the sections of wgmma.cuh and gemm_mma.cuh that spell
// their registers. Layouts are those of the PTX manual, and of the comments there.
#pragma once

#include <type_traits>

#include "dtype.cuh"
#include "ptx.h"

namespace emulator {

// --- factors --------------------------------------------------------------------

struct Factors {
  int bytes;
  float (*value)(uint32_t bits);
};

// The lower 13 bits of a float are not looked at.
inline float from_tf32(uint32_t bits) {
  bits &= ~0x1FFFu;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
Factors factors_of() {
  if (std::is_same_v<T, cuda_ops::Half>) {
    return {2, [](uint32_t bits) { return from_f16(uint16_t(bits)); }};
  }
  if (std::is_same_v<T, cuda_ops::BFloat16>) {
    return {2, [](uint32_t bits) { return from_bf16(uint16_t(bits)); }};
  }
  return {4, from_tf32};
}

// --- wgmma ----------------------------------------------------------------------

struct Operand {
  uint64_t descriptor;
  bool line_major;
};

inline float wgmma_element(const Factors& factors, const Operand& operand, int line, int k) {
  const uint64_t d = operand.descriptor;
  const auto field = [&](int shift) { return uint32_t(d >> shift & 0x3FFF) << 4; };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  if (d >> 62 != 1) fail("a descriptor without the swizzle of 128 bytes");
  uint32_t at = start;
  if (operand.line_major) {
    at += uint32_t(line / 64) * leading + uint32_t(k / 8) * stride;
    at += uint32_t(k % 8 * 128 + line % 64 * factors.bytes);
  } else {
    at += uint32_t(line / 8) * stride + uint32_t(line % 8 * 128 + k * factors.bytes);
  }
  at ^= (at >> 7 & 7) << 4;
  check_visible(at);
  return factors.value(factors.bytes == 2 ? load_shared<uint16_t>(at) : load_shared<uint32_t>(at));
}

// This thread's part of 64 x `columns` sums.
inline void wgmma_product(const Factors& factors, float* sums, int columns, const Operand& a,
                          const Operand& b, bool accumulate) {
  const int lane = thread % 32, warp = thread / 32 % 4, ks = 32 / factors.bytes;
  float rows[2][16], column[16];
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < ks; ++k) {
      rows[half][k] = wgmma_element(factors, a, 16 * warp + lane / 4 + 8 * half, k);
    }
  }
  for (int i = 0; i < columns / 4; ++i) {
    const int n = i / 2 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < ks; ++k) column[k] = wgmma_element(factors, b, n, k);
    for (int half = 0; half < 2; ++half) {
      float& sum = sums[i / 2 * 4 + 2 * half + i % 2];
      if (!accumulate) sum = 0;
      for (int k = 0; k < ks; ++k) sum += rows[half][k] * column[k];
    }
  }
}

// --- mma.sync -------------------------------------------------------------------

// 16 x 8 sums of 32 bytes of K; lane 4 * r + q holds row r (of a), column r (of b) and the
// words q and q + 4 of K.
inline void mma_product(const Factors& factors, float (&sums)[4], const uint32_t (&a)[4],
                        uint32_t b0, uint32_t b1) {
  const Words* all = exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  const int lane = thread % 32, per_word = 4 / factors.bytes;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 8 * per_word; ++k) {
      const int q = k / per_word % 4, upper = k / per_word / 4, shift = k % per_word * 16;
      sums[i] += factors.value(all[4 * row + q].w[i / 2 + 2 * upper] >> shift) *
                 factors.value(all[4 * column + q].w[4 + upper] >> shift);
    }
  }
}

}  // namespace emulator

namespace cuda_ops {

template <class T>
void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  emulator::mma_product(emulator::factors_of<T>(), sums, a, b0, b1);
}

template <class T, int kN, bool kLineMajorA, bool kLineMajorB>
struct Wgmma {
  static void run(float (&sums)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(sizeof(T) == 2 || !(kLineMajorA || kLineMajorB), "tf32 is K-major");
    const auto product = [=, to = &sums[0]] {
      emulator::wgmma_product(emulator::factors_of<T>(), to, kN, {a, kLineMajorA}, {b, kLineMajorB},
                              accumulate);
    };
    if (emulator::timing == emulator::Timing::kEarly)
      product();
    else
      emulator::async().products.add(product);
  }
};

}  // namespace cuda_ops
