// Copies of operands that Hopper's copy engine cannot read as they lie: their place in memory that
// the caller lends, and their cost. No torch, no CUDA.
//
//   a copy   [matrix][line][K filled up with zeros to 128 bytes], lines being rows of a or
//            columns of b, so that it is K-major in any case
//   3xTF32   [matrix][line][high parts, filled up | low parts, filled up]
//
// An operand that is the same for all of the batch is copied once; one that is the same
// along some of its dims, as often as it is used.
#pragma once

#include "gemm/gemm_hopper.h"

namespace cuda_ops {

struct GemmPack {
  bool a = false, b = false;         // the operands that are copied
  int64_t bytes_a = 0, bytes_b = 0;  // of the copies; b's follow a's

  bool any() const { return a || b; }
  int64_t bytes() const { return bytes_a + bytes_b; }
};

// Elements of one part of a line, and from one line of a copy to the next.
inline int64_t packed_part(const Matmul& p) {
  const int64_t whole = 128 / size_of(p.batch.dtype);
  return ceil_div(p.k, whole) * whole;
}
inline int64_t packed_line(const Matmul& p) { return packed_part(p) * (is_split(p) ? 2 : 1); }

inline int64_t packed_matrices(const Matmul& p, int operand) {
  return batch_step(p, operand) == 0 ? 1 : p.batch.numel;
}

inline GemmPack pack_of(const Matmul& p, bool a, bool b) {
  const int64_t line = packed_line(p) * size_of(p.batch.dtype);
  return {a, b, a ? packed_matrices(p, 1) * p.m * line : 0,
          b ? packed_matrices(p, 2) * p.n * line : 0};
}

// Returns the problem whose operands are the copies at `workspace`, and the originals of the rest.
inline Matmul packed(const Matmul& p, const GemmPack& pack, void* workspace) {
  Matmul view = p;
  view.batch.dims = p.batch.numel == 1 ? 0 : 1;
  view.batch.sizes[0] = p.batch.numel;
  for (int i = 0; i < 3; ++i) view.batch.operands[i].strides[0] = batch_step(p, i);
  const int64_t line = packed_line(p);
  const auto put = [&](int operand, int64_t lines, int64_t skipped) {
    Operand& copy = view.batch.operands[operand];
    copy.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(workspace) + skipped);
    copy.strides[0] = packed_matrices(p, operand) == 1 ? 0 : lines * line;
  };
  if (pack.a) {
    put(1, p.m, 0);
    view.a = {line, 1};
  }
  if (pack.b) {
    put(2, p.n, pack.bytes_a);
    view.b = {1, line};
  }
  return fold_batch(view);
}

// Estimates the microseconds of the copies, fitted to times of an H200, 2026-11-21.
inline double pack_time(const Matmul& p, const GemmPack& pack) {
  const double elements = double(pack.a ? packed_matrices(p, 1) * p.m : 0) +
                          double(pack.b ? packed_matrices(p, 2) * p.n : 0);
  return 6 + (elements * double(p.k * size_of(p.batch.dtype)) + double(pack.bytes())) / 4.4e6;
}

// Returns the copies that are needed. `k_major`: for a kernel that reads nothing else.
inline GemmPack needed_pack(const Matmul& p, bool k_major) {
  const auto needed = [&](int operand, int64_t line, int64_t k, int64_t lines) {
    const int64_t step = batch_step(p, operand);
    if (is_split(p) || step < 0) return true;
    const auto how = detail::hopper_lines(p.batch.operands[operand].data, line, k, step,
                                          int(size_of(p.batch.dtype)), lines, p.k);
    return how == detail::Lines::kNone || (k_major && how == detail::Lines::kLineMajor);
  };
  return pack_of(p, needed(1, p.a.row, p.a.col, p.m), needed(2, p.b.col, p.b.row, p.n));
}

}  // namespace cuda_ops
