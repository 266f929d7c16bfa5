// Warpgroup matrix multiply (wgmma) of sm_90a: 128 threads multiply a 64 x K16 by a
// K16 x N tile of shared memory into registers, asynchronously.
//
// Accumulators: thread t of the warpgroup holds, with lane = t % 32, warp = t / 32,
//
//   sums[4 * j + 0, 1]: row r,     columns c and c + 1      r = 16 * warp + lane / 4
//   sums[4 * j + 2, 3]: row r + 8, columns c and c + 1      c = 8 * j + 2 * (lane % 4)
//
// A may lie in registers instead, 16 of its columns an instruction: word 0 of a thread has row r,
// columns 2 * (lane % 4) and the next, word 1 row r + 8, words 2 and 3 the same 8 columns on. So
// sums become the left factor of another product where they are: with j even, words 0 to 3 of
// columns 8 * j on are sums[4 * j], [4 * j + 2], [4 * j + 4] and [4 * j + 6], each with its
// neighbor.
//
// Operands lie in shared memory as tma.cuh lays them down, in one of two ways,
// both made of atoms of 8 rows of 128 swizzled bytes (1024 bytes):
//
//   K-major: a row is one line (row of A, column of B), 128 bytes of K; atoms
//            follow each other along the lines.
//   line-major ("MN-major"): a row is one k, 128 bytes of lines; atoms follow each
//            other along K, and blocks of 128 bytes of lines are `block` bytes apart.
#pragma once

#include <cstdint>

#include "dtype.cuh"

namespace cuda_ops {

// 32-bit floats of which the tensor cores use the upper 19 bits.
struct TF32 {
  float value;
};

// --- descriptors --------------------------------------------------------------

// The descriptor of an operand for wgmma; addresses and strides in units of 16 bytes.
//   bits 0-13 start, 16-29 leading offset, 32-45 stride offset, 62-63 swizzle (1: 128 bytes)
// stride offset: from one atom to the next. leading offset: line-major alone, from
// one block of lines to the next.
__device__ inline uint64_t wgmma_descriptor(uint32_t shared, uint32_t block_bytes) {
  return uint64_t((shared & 0x3FFFF) >> 4) | uint64_t(block_bytes >> 4) << 16 |
         uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// From one instruction's K to the next: 32 bytes inside of the swizzled row, or
// 16 rows of 128 bytes.
template <bool kLineMajor>
constexpr uint64_t kWgmmaStep = (kLineMajor ? 16 * 128 : 32) >> 4;

// --- order --------------------------------------------------------------------

// Called before the first wgmma and whenever other instructions touched the sums.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the last `kPending` groups are done.
template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps ptxas from moving the next wait in front of what leads to `value`, a number that is never
// below `least`: instructions that need no products then run beside them. A store that never
// happens, to any `shared` address, has to come before the wait. ptxas must not know that it never
// does: `least` comes from an argument of the kernel.
__device__ inline void wgmma_wait_after(float value, float least, uint32_t shared) {
  asm volatile(
      "{\n.reg .pred never;\n"
      "setp.lt.f32 never, %1, %2;\n"
      "@never st.shared.f32 [%0], %1;\n}" ::"r"(shared),
      "f"(value), "f"(least)
      : "memory");
}

// Keeps the compiler from moving its own uses of the sums across the wait.
template <int kCount>
__device__ void wgmma_fence_sums(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// The same for words that are the left factor of a product.
template <int kCount>
__device__ void wgmma_fence_sums(uint32_t (&words)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kCount; ++i) asm volatile("" : "+r"(words[i / 4][i % 4])::"memory");
}

// --- the instruction ----------------------------------------------------------

// sums (64 x kN) = A B + (accumulate ? sums : 0), for 32 bytes of K.
template <class T, int kN, bool kLineMajorA, bool kLineMajorB>
struct Wgmma;

// The same with A in registers. They may be written again once the product has been waited for.
template <class T, int kN, bool kLineMajorB>
struct WgmmaOfRegisters;

// The registers of an instruction have to be spelled out. %0 to %7, %8 to %15, ...
// clang-format off
#define CUDA_OPS_R4(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d
#define CUDA_OPS_REGS_4 \
  CUDA_OPS_R4(0, 1, 2, 3)
#define CUDA_OPS_REGS_8 \
  CUDA_OPS_REGS_4 ", " CUDA_OPS_R4(4, 5, 6, 7)
#define CUDA_OPS_REGS_16 \
  CUDA_OPS_REGS_8 ", " CUDA_OPS_R4(8, 9, 10, 11) ", " CUDA_OPS_R4(12, 13, 14, 15)
#define CUDA_OPS_REGS_32 \
  CUDA_OPS_REGS_16 ", " CUDA_OPS_R4(16, 17, 18, 19) ", " CUDA_OPS_R4(20, 21, 22, 23) ", " CUDA_OPS_R4(24, 25, 26, 27) ", " CUDA_OPS_R4(28, 29, 30, 31)
#define CUDA_OPS_REGS_48 \
  CUDA_OPS_REGS_32 ", " CUDA_OPS_R4(32, 33, 34, 35) ", " CUDA_OPS_R4(36, 37, 38, 39) ", " CUDA_OPS_R4(40, 41, 42, 43) ", " CUDA_OPS_R4(44, 45, 46, 47)
#define CUDA_OPS_REGS_64 \
  CUDA_OPS_REGS_48 ", " CUDA_OPS_R4(48, 49, 50, 51) ", " CUDA_OPS_R4(52, 53, 54, 55) ", " CUDA_OPS_R4(56, 57, 58, 59) ", " CUDA_OPS_R4(60, 61, 62, 63)
#define CUDA_OPS_REGS_80 \
  CUDA_OPS_REGS_64 ", " CUDA_OPS_R4(64, 65, 66, 67) ", " CUDA_OPS_R4(68, 69, 70, 71) ", " CUDA_OPS_R4(72, 73, 74, 75) ", " CUDA_OPS_R4(76, 77, 78, 79)
#define CUDA_OPS_REGS_96 \
  CUDA_OPS_REGS_80 ", " CUDA_OPS_R4(80, 81, 82, 83) ", " CUDA_OPS_R4(84, 85, 86, 87) ", " CUDA_OPS_R4(88, 89, 90, 91) ", " CUDA_OPS_R4(92, 93, 94, 95)
#define CUDA_OPS_REGS_112 \
  CUDA_OPS_REGS_96 ", " CUDA_OPS_R4(96, 97, 98, 99) ", " CUDA_OPS_R4(100, 101, 102, 103) ", " CUDA_OPS_R4(104, 105, 106, 107) ", " CUDA_OPS_R4(108, 109, 110, 111)
#define CUDA_OPS_REGS_128 \
  CUDA_OPS_REGS_112 ", " CUDA_OPS_R4(112, 113, 114, 115) ", " CUDA_OPS_R4(116, 117, 118, 119) ", " CUDA_OPS_R4(120, 121, 122, 123) ", " CUDA_OPS_R4(124, 125, 126, 127)

#define CUDA_OPS_SUM4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CUDA_OPS_SUM8(i) CUDA_OPS_SUM4(i), CUDA_OPS_SUM4(i + 4)
#define CUDA_OPS_SUM16(i) CUDA_OPS_SUM8(i), CUDA_OPS_SUM8(i + 8)
#define CUDA_OPS_SUM32(i) CUDA_OPS_SUM16(i), CUDA_OPS_SUM16(i + 16)
#define CUDA_OPS_SUM64(i) CUDA_OPS_SUM32(i), CUDA_OPS_SUM32(i + 32)
#define CUDA_OPS_SUM80(i) CUDA_OPS_SUM64(i), CUDA_OPS_SUM16(i + 64)
#define CUDA_OPS_SUM96(i) CUDA_OPS_SUM64(i), CUDA_OPS_SUM32(i + 64)
#define CUDA_OPS_SUM112(i) CUDA_OPS_SUM96(i), CUDA_OPS_SUM16(i + 96)
#define CUDA_OPS_SUM128(i) CUDA_OPS_SUM64(i), CUDA_OPS_SUM64(i + 64)

// COUNT sums a thread; A, B, P, TA, TB: the numbers of the operands after them.
#define CUDA_OPS_WGMMA16(T, TYPE, N, COUNT, A, B, P, TA, TB)                                    \
  template <bool kLineMajorA, bool kLineMajorB>                                                 \
  struct Wgmma<T, N, kLineMajorA, kLineMajorB> {                                                \
    __device__ static void run(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate) {    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                             \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {"         \
                   CUDA_OPS_REGS_##COUNT "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}" \
                   : CUDA_OPS_SUM##COUNT(0)                                                     \
                   : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kLineMajorA)),               \
                     "n"(int(kLineMajorB)));                                                    \
    }                                                                                           \
  };
// tf32 has 8 of K in 32 bytes, and takes K-major operands alone.
#define CUDA_OPS_WGMMA32(N, COUNT, A, B, P)                                                     \
  template <>                                                                                   \
  struct Wgmma<TF32, N, false, false> {                                                         \
    __device__ static void run(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate) {    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                             \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {"                  \
                   CUDA_OPS_REGS_##COUNT "}, %" #A ", %" #B ", p, 1, 1;\n}"                     \
                   : CUDA_OPS_SUM##COUNT(0)                                                     \
                   : "l"(a), "l"(b), "r"(int(accumulate)));                                     \
    }                                                                                           \
  };
// A0 to A3: the numbers of the words of A.
#define CUDA_OPS_WGMMA_RS(T, TYPE, N, COUNT, A0, A1, A2, A3, B, P, TB)                         \
  template <bool kLineMajorB>                                                                  \
  struct WgmmaOfRegisters<T, N, kLineMajorB> {                                                 \
    __device__ static void run(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b,          \
                               bool accumulate) {                                              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {"        \
                   CUDA_OPS_REGS_##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B   \
                   ", p, 1, 1, %" #TB ";\n}"                                                   \
                   : CUDA_OPS_SUM##COUNT(0)                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), \
                     "n"(int(kLineMajorB)));                                                   \
    }                                                                                          \
  };
#define CUDA_OPS_WGMMA_OF_REGISTERS(N, COUNT, A0, A1, A2, A3, B, P, TB)             \
  CUDA_OPS_WGMMA_RS(Half, "f16", N, COUNT, A0, A1, A2, A3, B, P, TB)                \
  CUDA_OPS_WGMMA_RS(BFloat16, "bf16", N, COUNT, A0, A1, A2, A3, B, P, TB)

CUDA_OPS_WGMMA_OF_REGISTERS(64, 32, 32, 33, 34, 35, 36, 37, 38)
CUDA_OPS_WGMMA_OF_REGISTERS(128, 64, 64, 65, 66, 67, 68, 69, 70)
CUDA_OPS_WGMMA_OF_REGISTERS(256, 128, 128, 129, 130, 131, 132, 133, 134)

#define CUDA_OPS_WGMMA(N, COUNT, A, B, P, TA, TB)                   \
  CUDA_OPS_WGMMA16(Half, "f16", N, COUNT, A, B, P, TA, TB)          \
  CUDA_OPS_WGMMA16(BFloat16, "bf16", N, COUNT, A, B, P, TA, TB)     \
  CUDA_OPS_WGMMA32(N, COUNT, A, B, P)

CUDA_OPS_WGMMA(8, 4, 4, 5, 6, 7, 8)
CUDA_OPS_WGMMA(16, 8, 8, 9, 10, 11, 12)
CUDA_OPS_WGMMA(32, 16, 16, 17, 18, 19, 20)
CUDA_OPS_WGMMA(64, 32, 32, 33, 34, 35, 36)
CUDA_OPS_WGMMA(128, 64, 64, 65, 66, 67, 68)
CUDA_OPS_WGMMA(160, 80, 80, 81, 82, 83, 84)
CUDA_OPS_WGMMA(192, 96, 96, 97, 98, 99, 100)
CUDA_OPS_WGMMA(224, 112, 112, 113, 114, 115, 116)
CUDA_OPS_WGMMA(256, 128, 128, 129, 130, 131, 132)

#undef CUDA_OPS_WGMMA_OF_REGISTERS
#undef CUDA_OPS_WGMMA_RS
#undef CUDA_OPS_WGMMA
#undef CUDA_OPS_WGMMA32
#undef CUDA_OPS_WGMMA16
#undef CUDA_OPS_SUM128
#undef CUDA_OPS_SUM112
#undef CUDA_OPS_SUM96
#undef CUDA_OPS_SUM80
#undef CUDA_OPS_SUM64
#undef CUDA_OPS_SUM32
#undef CUDA_OPS_SUM16
#undef CUDA_OPS_SUM8
#undef CUDA_OPS_SUM4
#undef CUDA_OPS_REGS_128
#undef CUDA_OPS_REGS_112
#undef CUDA_OPS_REGS_96
#undef CUDA_OPS_REGS_80
#undef CUDA_OPS_REGS_64
#undef CUDA_OPS_REGS_48
#undef CUDA_OPS_REGS_32
#undef CUDA_OPS_REGS_16
#undef CUDA_OPS_REGS_8
#undef CUDA_OPS_REGS_4
#undef CUDA_OPS_R4
// clang-format on

}  // namespace cuda_ops
