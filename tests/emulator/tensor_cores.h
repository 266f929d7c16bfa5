// wgmma and mma.sync, in place of the sections of wgmma.cuh and mma.cuh that spell
// their registers. Layouts are those of the PTX manual, and of the comments there.
#pragma once

#include <type_traits>

#include "dtype.cuh"
#include "ptx.h"

namespace emulator {

// --- factors --------------------------------------------------------------------

// The lower 13 bits of a float are not looked at.
inline float from_tf32(uint32_t bits) {
  bits &= ~0x1FFFu;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A factor as an instruction sees it: its bits, and their value.
template <class T>
struct Factor {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  static float value(uint32_t bits) {
    if (std::is_same_v<T, cuda_ops::Half>) return from_f16(uint16_t(bits));
    if (std::is_same_v<T, cuda_ops::BFloat16>) return from_bf16(uint16_t(bits));
    return from_tf32(bits);
  }
};

// --- wgmma ----------------------------------------------------------------------

struct Operand {
  Operand(uint64_t descriptor, bool by_lines)
      : start(field(descriptor, 0)),
        leading(field(descriptor, 16)),
        stride(field(descriptor, 32)),
        line_major(by_lines) {
    if (descriptor >> 62 != 1) fail("a descriptor without the swizzle of 128 bytes");
  }
  static uint32_t field(uint64_t descriptor, int shift) {
    return uint32_t(descriptor >> shift & 0x3FFF) << 4;
  }

  uint32_t start, leading, stride;
  bool line_major;
};

// The 16 bytes that hold an address before the swizzle, which moves them together.
template <class Bits>
std::array<Bits, 16 / sizeof(Bits)> wgmma_sixteen(uint32_t at) {
  at ^= (at >> 7 & 7) << 4;
  if (at < kFirstShared || at + 16 > kEndShared) fail("wgmma reads shared address %x", at);
  if (block->written_by[at / 16] != 0) check_visible(at);  // which says by whom
  std::array<Bits, 16 / sizeof(Bits)> values;
  std::memcpy(&values, &block->memory[at], sizeof values);
  return values;
}

// The 32 bytes of K that one line of an operand has.
template <class T>
void wgmma_line(float* values, const Operand& operand, int line) {
  using Bits = typename Factor<T>::Bits;
  constexpr int kBytes = sizeof(Bits), kPer16 = 16 / kBytes;
  if (operand.line_major) {
    const uint32_t place = uint32_t(line % 64 * kBytes);
    for (int k = 0; k < 32 / kBytes; ++k) {
      const uint32_t at = operand.start + uint32_t(line / 64) * operand.leading +
                          uint32_t(k / 8) * operand.stride + uint32_t(k % 8 * 128) +
                          place / 16 * 16;
      values[k] = Factor<T>::value(wgmma_sixteen<Bits>(at)[place % 16 / kBytes]);
    }
  } else {
    const uint32_t at =
        operand.start + uint32_t(line / 8) * operand.stride + uint32_t(line % 8 * 128);
    for (int part = 0; part < 2; ++part) {
      const auto bits = wgmma_sixteen<Bits>(at + 16 * uint32_t(part));
      for (int i = 0; i < kPer16; ++i) values[part * kPer16 + i] = Factor<T>::value(bits[i]);
    }
  }
}

// The 32 bytes of K that a thread's two rows of A have.
template <class T>
using TwoRows = std::array<std::array<float, 32 / sizeof(typename Factor<T>::Bits)>, 2>;

// This thread's part of 64 x `columns` sums.
template <class T>
void wgmma_product(float* sums, int columns, const TwoRows<T>& rows, const Operand& b,
                   bool accumulate) {
  constexpr int kDepth = 32 / int(sizeof(typename Factor<T>::Bits));
  const int lane = thread % 32;
  float column[kDepth];
  for (int i = 0; i < columns / 4; ++i) {
    wgmma_line<T>(column, b, i / 2 * 8 + lane % 4 * 2 + i % 2);
    for (int half = 0; half < 2; ++half) {
      float& sum = sums[i / 2 * 4 + 2 * half + i % 2];
      if (!accumulate) sum = 0;
      for (int k = 0; k < kDepth; ++k) sum += rows[half][k] * column[k];
    }
  }
}

template <class T>
TwoRows<T> wgmma_rows(const Operand& a) {
  TwoRows<T> rows;
  for (int half = 0; half < 2; ++half) {
    wgmma_line<T>(rows[half].data(), a, 16 * (thread / 32 % 4) + thread % 32 / 4 + 8 * half);
  }
  return rows;
}

// Made of registers, where lane 4 * r + q has of row r, and r + 8, words q and q + 4.
template <class T>
TwoRows<T> wgmma_rows(const uint32_t (&a)[4]) {
  const Words* all = exchange({{a[0], a[1], a[2], a[3]}});
  TwoRows<T> rows;
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < 16; ++k) {
      const Words& of = all[thread % 32 / 4 * 4 + k / 2 % 4];
      rows[half][k] = Factor<T>::value(of.w[half + k / 8 * 2] >> k % 2 * 16);
    }
  }
  return rows;
}

template <class Product>
void run_product(const Product& product) {
  if (timing == Timing::kEarly) {
    product();
  } else {
    async().products.add(product);
  }
}

// --- mma.sync -------------------------------------------------------------------

// 16 x 8 sums of 32 bytes of K; lane 4 * r + q holds row r (of a), column r (of b) and the
// words q and q + 4 of K.
template <class T>
void mma_product(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const Words* all = exchange({{a[0], a[1], a[2], a[3], b0, b1}});
  const int lane = thread % 32, per_word = 4 / int(sizeof(typename Factor<T>::Bits));
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 8 * per_word; ++k) {
      const int q = k / per_word % 4, upper = k / per_word / 4, shift = k % per_word * 16;
      sums[i] += Factor<T>::value(all[4 * row + q].w[i / 2 + 2 * upper] >> shift) *
                 Factor<T>::value(all[4 * column + q].w[4 + upper] >> shift);
    }
  }
}

}  // namespace emulator

namespace cuda_ops {

template <class T>
void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T) {
  emulator::mma_product<T>(sums, a, b0, b1);
}

template <class T, int kN, bool kLineMajorA, bool kLineMajorB>
struct Wgmma {
  static void run(float (&sums)[kN / 2], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(sizeof(T) == 2 || !(kLineMajorA || kLineMajorB), "tf32 is K-major");
    const auto product = [=, to = &sums[0]] {
      const emulator::Operand rows{a, kLineMajorA};
      emulator::wgmma_product<T>(to, kN, emulator::wgmma_rows<T>(rows), {b, kLineMajorB},
                                 accumulate);
    };
    emulator::run_product(product);
  }
};

template <class T, int kN, bool kLineMajorB>
struct WgmmaOfRegisters {
  static void run(float (&sums)[kN / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    emulator::run_product([=, rows = emulator::wgmma_rows<T>(a), to = &sums[0]] {
      emulator::wgmma_product<T>(to, kN, rows, {b, kLineMajorB}, accumulate);
    });
  }
};

}  // namespace cuda_ops
