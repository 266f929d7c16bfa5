// Which of its tiles the kernel of ordinary multiply-adds takes: sizes that kernel and plan
// share, and an estimate of each, by a pure function. No torch, no CUDA.
#pragma once

#include <string>

#include "gemm/gemm_hopper.h"

namespace cuda_ops {

// A tile's rows, columns and k's of a stage, and its time on the SMs of an H200 in microseconds: to
// begin and end, with the launch, and for each k with one block on an SM and with two, which share
// it only where tiles are smallest. Measured by benchmarks/tuning/multiply_adds.cu, 2026-11-22.
struct FmaTileTime {
  int rows, columns, block_k;
  double ends, each, pair;
};
constexpr FmaTileTime kFmaTiles[] = {
    {256, 128, 8, 10.6, 0.1776, 0.3553}, {128, 128, 8, 5.4, 0.0973, 0.1946},
    {128, 64, 16, 4.5, 0.052, 0.1034},   {64, 64, 16, 3.7, 0.0281, 0.0562},
    {32, 64, 32, 3.4, 0.0153, 0.0307},   {32, 32, 32, 2.7, 0.0099, 0.0182},
};
constexpr double kFmaLaunch = 2.2;  // the part of `ends` that comes once, not for each wave

// Whether a tile takes no more shared memory than most GPUs have: 99 KB.
constexpr bool fma_fits_anywhere(int rows, int columns) { return rows == columns; }

struct FmaConfig {
  int rows = 0, columns = 0;              // of a tile
  bool quads_a = false, quads_b = false;  // copied 4 lines at a time, else one
  double time = 0;                        // estimated, microseconds

  std::string text() const {
    const std::string quads = std::string(quads_a ? " a" : "") + (quads_b ? " b" : "");
    return std::to_string(rows) + "x" + std::to_string(columns) +
           (quads.empty() ? "" : " quads of") + quads;
  }
};

inline FmaConfig fma_config(const Matmul& p, const FmaTileTime& tile, const DeviceInfo& device,
                            bool linear) {
  FmaConfig config;
  config.rows = tile.rows;
  config.columns = tile.columns;
  // A layer's operands are K-major except for views of others: fewer kernels to compile.
  const auto quads = [&](int operand, const MatrixStrides& strides, int64_t line, int64_t k) {
    return !linear && line < k && whole_vectors(p, operand, strides);
  };
  config.quads_a = quads(1, p.a, p.a.row, p.a.col);
  config.quads_b = quads(2, p.b, p.b.col, p.b.row);
  const auto up = [](int64_t size, int64_t step) { return ceil_div(size, step); };
  const int64_t tiles = up(p.m, tile.rows) * up(p.n, tile.columns) * p.batch.numel;
  const int64_t waves = up(tiles, device.sms), k = up(p.k, tile.block_k) * tile.block_k;
  const double of_k = double(waves / 2) * tile.pair + double(waves % 2) * tile.each;
  config.time = kFmaLaunch + double(waves) * (tile.ends - kFmaLaunch) + of_k * double(k);
  return config;
}

// Chooses the fastest tile for the GPU. `linear`: among those that gemm.cuh has for a layer.
inline FmaConfig fma_config(const Matmul& p, const DeviceInfo& device, bool linear) {
  FmaConfig best;
  for (const FmaTileTime& tile : kFmaTiles) {
    const bool anywhere = fma_fits_anywhere(tile.rows, tile.columns);
    if ((device.capability != 90 || linear) && !anywhere) continue;
    if (linear && tile.rows == 32) continue;
    const FmaConfig config = fma_config(p, tile, device, linear);
    if (best.rows == 0 || config.time < best.time) best = config;
  }
  return best;
}

// The table's k's of a stage, for the kernel to compare with its own.
constexpr int fma_block_k(int rows, int columns) {
  for (const FmaTileTime& tile : kFmaTiles) {
    if (tile.rows == rows && tile.columns == columns) return tile.block_k;
  }
  return 0;
}

}  // namespace cuda_ops
