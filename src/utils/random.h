// Random numbers by counter: the words of index i are a function of i and of a key alone, so
// neither the launch nor the layout of a tensor changes them, and a gradient makes them again
// instead of reading a mask. Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3", 2011. The same words on both sides; no torch, no CUDA.
#pragma once

#include <cmath>
#include <cstdint>

#include "narrow.h"

namespace cuda_ops {

// Four words of 32 bits, which four neighbors share: making them takes 20 multiplications and 40
// other instructions.
struct RandomBlock {
  uint32_t words[4];
};

namespace detail {

struct Product {
  uint32_t low, high;
};

CUDA_OPS_BOTH Product wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
  // Left to itself, the compiler masks and multiplies 64 bits.
  Product product;
  asm("{\n\t.reg .u64 wide;\n\tmul.wide.u32 wide, %2, %3;\n\tmov.b64 {%0, %1}, wide;\n\t}"
      : "=r"(product.low), "=r"(product.high)
      : "r"(a), "r"(b));
  return product;
#else
  const uint64_t wide = uint64_t(a) * b;
  return {uint32_t(wide), uint32_t(wide >> 32)};
#endif
}

}  // namespace detail

CUDA_OPS_BOTH RandomBlock philox(RandomBlock counter, uint32_t key0, uint32_t key1) {
  constexpr uint32_t kMultipliers[] = {0xD2511F53u, 0xCD9E8D57u};
  constexpr uint32_t kWeyl[] = {0x9E3779B9u, 0xBB67AE85u};
  constexpr int kRounds = 10;
  uint32_t (&c)[4] = counter.words;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < kRounds; ++round) {
    const detail::Product first = detail::wide_product(kMultipliers[0], c[0]);
    const detail::Product second = detail::wide_product(kMultipliers[1], c[2]);
    c[0] = second.high ^ c[1] ^ key0;
    c[1] = second.low;
    c[2] = first.high ^ c[3] ^ key1;
    c[3] = first.low;
    key0 += kWeyl[0];
    key1 += kWeyl[1];
  }
  return counter;
}

// A probability that draws are compared with, as a number of steps of 2^-24.
struct Chance {
  uint32_t steps;

  explicit Chance(double probability) : steps(uint32_t(std::ceil(probability * (1 << 24)))) {}
};

// The random number of one element.
struct Draw {
  uint32_t pair[2];  // its word, and that of the neighbor with which it shares two normal numbers
  uint32_t which;    // 0 or 1: its place in the pair

  // All 32 bits.
  CUDA_OPS_BOTH uint32_t bits() const { return which ? pair[1] : pair[0]; }

  // From 0 to below 1: the upper 24 bits, which a float holds exactly, times 2^-24.
  CUDA_OPS_BOTH float uniform() const { return float(bits() >> 8) * (1.0f / (1 << 24)); }

  // Whether uniform() is below the probability.
  CUDA_OPS_BOTH bool is_below(Chance chance) const { return bits() >> 8 < chance.steps; }

  // From 0 to below n, which is at least 1. No number is likelier than another by more than n /
  // 2^32 of its probability.
  CUDA_OPS_BOTH uint32_t below(uint32_t n) const { return uint32_t((uint64_t(bits()) * n) >> 32); }

  // With mean 0 and variance 1, by Box and Muller: sine and cosine for the two elements of a pair.
  // At most 5.8, as 2^-24 is the smallest number whose logarithm is taken.
  template <class C>
  CUDA_OPS_BOTH C normal() const {
    const C radius = std::sqrt(C(-2) * std::log(C((pair[0] >> 8) + 1) * C(1.0 / (1 << 24))));
    const C half_turns = C(pair[1] >> 8) * C(1.0 / (1 << 23));  // exact, unlike the angle
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
    return radius * (which ? ::sinpi(half_turns) : ::cospi(half_turns));
#else
    const C angle = half_turns * C(3.141592653589793);
    return radius * (which ? std::sin(angle) : std::cos(angle));
#endif
  }
};

// Where a random key lies: two numbers of 64 bits in the memory of the device that draws.
struct RandomKey {
  const int64_t* data;
  int64_t stride;
};

// The numbers of one key.
struct Random {
  uint64_t key, stream;

  CUDA_OPS_BOTH explicit Random(RandomKey from)
      : key(uint64_t(from.data[0])), stream(uint64_t(from.data[from.stride])) {}

  // Other numbers of the same key, for an operator that needs several for each element.
  CUDA_OPS_BOTH Random other(uint32_t n) const {
    Random result = *this;
    result.stream += n;
    return result;
  }

  // The words of the indices 4 * number to 4 * number + 3.
  CUDA_OPS_BOTH RandomBlock block(uint64_t number) const {
    return philox(
        {{uint32_t(number), uint32_t(number >> 32), uint32_t(stream), uint32_t(stream >> 32)}},
        uint32_t(key), uint32_t(key >> 32));
  }

  // The draw of an index, whose block has been made already.
  CUDA_OPS_BOTH static Draw draw(const RandomBlock& block, uint32_t index) {
    const bool upper = index & 2;
    return {{upper ? block.words[2] : block.words[0], upper ? block.words[3] : block.words[1]},
            index & 1};
  }

  CUDA_OPS_BOTH Draw at(uint64_t index) const { return draw(block(index / 4), uint32_t(index)); }
};

}  // namespace cuda_ops
