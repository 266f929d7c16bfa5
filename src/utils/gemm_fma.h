// Which of its tiles the kernel of ordinary multiply-adds takes: sizes that kernel and plan
// share, and an estimate of each, by a pure function. No torch, no CUDA.
#pragma once

#include <string>

#include "gemm_hopper.h"

namespace cuda_ops {

// What tiles take on the SMs of an H200, in microseconds: to start and end, and for each k, of one
// block on an SM and of two, which share it only where tiles are smallest. Measured by
// benchmarks/tuning/multiply_adds.cu, 2026-11-22.
struct FmaTileTime {
  int rows, columns;
  double start, each, pair;
};
constexpr FmaTileTime kFmaTiles[] = {
    {256, 128, 5, 0.188, 0.376},  {128, 128, 5, 0.1, 0.2},     {128, 64, 4, 0.054, 0.108},
    {64, 64, 3.7, 0.0285, 0.057}, {32, 64, 3.2, 0.016, 0.032}, {32, 32, 2.7, 0.0096, 0.0177},
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
