// The tensor cores of sm_80 and later: 8 x 8 matrices of 16 bits from shared memory to registers,
// and products of 16 rows by 8 columns.
#pragma once

#include <cstdint>

#include "dtype.cuh"

namespace cuda_ops {

// Loads four matrices, whose rows of 16 bytes are at the addresses of 8 lanes each. words[i] is
// the two neighbors lane % 4 of row lane / 4 of matrix i.
__device__ inline void load_matrices(uint32_t shared, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

// The same with rows and columns of each matrix swapped on the way.
__device__ inline void load_transposed(uint32_t shared, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

// Adds a @ b to the sums. This thread has of a rows lane / 4 (words 0 and 2) and that + 8 (1 and
// 3), of b column lane / 4, and of the sums rows as of a, columns lane % 4 * 2 and the next.
#define CUDA_OPS_MMA(SHAPE, TYPE)                                           \
  asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPE "." TYPE      \
               ".f32 {%0, %1, %2, %3}, "                                    \
               "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"              \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
__device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           Half) {
  CUDA_OPS_MMA("m16n8k16", "f16");
}
__device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           BFloat16) {
  CUDA_OPS_MMA("m16n8k16", "bf16");
}
__device__ inline void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                           float) {
  CUDA_OPS_MMA("m16n8k8", "tf32");
}
#undef CUDA_OPS_MMA

}  // namespace cuda_ops
