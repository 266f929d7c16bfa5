// Which of its tiles the kernel of ordinary multiply-adds takes: sizes that kernel and plan
// share, and an estimate of each, by a pure function. No torch, no CUDA.
#pragma once

#include <string>

#include "gemm_hopper.h"

namespace cuda_ops {

// Most of K's time on one SM, an H200 at 1.98 GHz, 2026-11-22: 256^3 to 1024^3, all operands row
// by row. Two of the smallest blocks share an SM.
struct FmaTileTime {
  int rows, columns;
  double start, each, pair;  // microseconds; for one k of one tile, and of two at a time
};
constexpr FmaTileTime kFmaTiles[] = {
    {256, 128, 4, 0.184, 0.367}, {128, 128, 4, 0.099, 0.198}, {128, 64, 4, 0.051, 0.102},
    {64, 64, 4, 0.0277, 0.0554}, {32, 64, 3, 0.0172, 0.0344}, {32, 32, 3, 0.0117, 0.0197},
};

struct FmaConfig {
  int rows = 0, columns = 0;              // of a tile
  bool quads_a = false, quads_b = false;  // are copied 4 lines at a time, else one
  double time = 0;                        // estimated, microseconds

  std::string text() const {
    const std::string quads = std::string(quads_a ? " a" : "") + (quads_b ? " b" : "");
    return std::to_string(rows) + "x" + std::to_string(columns) +
           (quads.empty() ? "" : " quads of") + quads;
  }
};

inline FmaConfig fma_config(const Matmul& p, const FmaTileTime& tile, bool linear) {
  FmaConfig config;
  config.rows = tile.rows;
  config.columns = tile.columns;
  // A layer's operands are K-major but for views of others: fewer kernels to compile.
  const auto quads = [&](int operand, const MatrixStrides& strides, int64_t line, int64_t k) {
    return !linear && line < k && whole_vectors(p, operand, strides);
  };
  config.quads_a = quads(1, p.a, p.a.row, p.a.col);
  config.quads_b = quads(2, p.b, p.b.col, p.b.row);
  const int64_t tiles =
      detail::ceil_div(p.m, tile.rows) * detail::ceil_div(p.n, tile.columns) * p.batch.numel;
  const int64_t waves = detail::ceil_div(tiles, kHopperSms);
  const double of_k = double(waves / 2) * tile.pair + double(waves % 2) * tile.each;
  config.time = tile.start + of_k * double(p.k);
  return config;
}

// The fastest of the tiles that the GPU has shared memory for. `linear`: of the one that
// gemm.cuh has for a layer.
inline FmaConfig fma_config(const Matmul& p, int capability, bool linear) {
  FmaConfig best;
  for (const FmaTileTime& tile : kFmaTiles) {
    const bool square = tile.rows == tile.columns;  // these take less than 99 KB, others 203
    if ((capability != 90 || linear) && !square) continue;
    if (linear && tile.rows == 32) continue;
    const FmaConfig config = fma_config(p, tile, linear);
    if (best.rows == 0 || config.time < best.time) best = config;
  }
  return best;
}

}  // namespace cuda_ops
