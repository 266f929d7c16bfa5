// Which of the Hopper kernel's variants multiplies given matrices: a value,
// chosen without a GPU by a pure function. No torch, no CUDA.
#pragma once

#include <cstdio>
#include <string>

#include "matmul.h"

namespace cuda_ops {

struct HopperConfig {
  bool possible = false;  // what the copy engine can read
  bool line_major_a = false, line_major_b = false;
  bool swap = false;  // out^T = b^T a^T: the columns of out are the kernel's rows
  int tile_n = 0;     // columns of a tile, which has 128 rows
  int cluster = 1;    // blocks below each other that share the tile of b
  int splits = 1;     // blocks of a cluster that share the K of one tile
  int64_t tiles = 0;
  int64_t grid = 0;

  std::string text() const {
    if (!possible) return "none";
    char line[128];
    std::snprintf(line, sizeof line, "%s128x%d%s%s cluster %d splits %d grid %lld",
                  swap ? "swapped " : "", tile_n, line_major_a ? " A^T" : "",
                  line_major_b ? " B^T" : "", cluster, splits, static_cast<long long>(grid));
    return line;
  }
};

constexpr int kHopperTileM = 128;
constexpr int kHopperSms = 132;  // of an H100 or H200: what the estimates were measured on

namespace detail {

enum class Lines { kNone, kKMajor, kLineMajor };

// How the copy engine can read an operand whose lines (rows of a, columns of b)
// are `line` elements apart and whose k are `k` apart.
inline Lines hopper_lines(const void* data, int64_t line, int64_t k, int64_t batch, int bytes,
                          int64_t lines, int64_t ks) {
  const auto whole = [&](int64_t stride) { return stride * bytes % 16 == 0 && stride < 1LL << 36; };
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || !whole(batch)) return Lines::kNone;
  if ((k == 1 || ks == 1) && (lines == 1 || (whole(line) && line > 0))) return Lines::kKMajor;
  const bool line_major = (line == 1 || lines == 1) && (ks == 1 || (whole(k) && k > 0));
  return line_major && bytes == 2 ? Lines::kLineMajor : Lines::kNone;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace detail

// Estimated microseconds on an H200: waves of tiles at the rate of the tensor cores
// or of one SM's loads, but never less than all bytes at the memory's bandwidth.
inline double hopper_estimate(const Matmul& p, const HopperConfig& config, int bytes) {
  const double per_block_k = 128.0 / bytes;  // K of a stage: 128 bytes
  const double k_blocks = double(detail::ceil_div(p.k * bytes, 128));
  const bool narrow = config.tile_n < 128;
  const double slots = kHopperSms * (narrow ? 2 : 1);
  const double blocks = double(config.tiles) * config.splits;
  const double waves = double(detail::ceil_div(int64_t(blocks), int64_t(slots)));
  // 5.6 MFLOP/us is 740 TFLOP/s of the chip; a 128-wide tile reads more of shared
  // memory per product. One SM takes in some 60 KB/us, shared by its blocks.
  const double rate = (config.tile_n >= 256 ? 5.6e6 : 5.0e6) * (bytes == 4 ? 0.5 : 1);
  const double flops = 2.0 * kHopperTileM * config.tile_n * per_block_k / rate;
  const double loaded = (kHopperTileM + double(config.tile_n)) * 128 / 60e3;
  const double one = (flops > loaded ? flops : loaded) * (narrow && blocks > kHopperSms ? 2 : 1);
  const double all = (double(p.m) * p.k + double(p.n) * p.k + double(p.m) * p.n) * bytes *
                     double(p.batch.numel) / 4.2e6;
  // The start of a wave, its epilogue, and the exchange of partial sums.
  const double overhead = 1.0 + 0.004 * config.tile_n + (config.splits > 1 ? 1.5 : 0.0);
  const double busy = waves * (k_blocks / config.splits * one + overhead);
  return (busy > all ? busy : all + overhead) + 2;
}

inline HopperConfig hopper_config(const Matmul& p, int bytes) {
  using detail::Lines;
  HopperConfig best;
  const auto small = [](int64_t size) { return size > 0 && size < 1LL << 31; };
  if (!small(p.m) || !small(p.n) || !small(p.k) || p.batch.dims > 1) return best;
  if (p.out.col != 1 && p.n != 1) return best;
  const auto& operands = p.batch.operands;
  const auto batch_of = [&](int i) { return p.batch.dims == 0 ? 0 : operands[i].strides[0]; };
  const Lines a =
      detail::hopper_lines(operands[1].data, p.a.row, p.a.col, batch_of(1), bytes, p.m, p.k);
  const Lines b =
      detail::hopper_lines(operands[2].data, p.b.col, p.b.row, batch_of(2), bytes, p.n, p.k);
  if (a == Lines::kNone || b == Lines::kNone) return best;

  double least = 0;
  const auto consider = [&](bool swap, int tile_n, int cluster, int splits) {
    HopperConfig config;
    config.possible = true;
    config.swap = swap;
    config.line_major_a = (swap ? b : a) == Lines::kLineMajor;
    config.line_major_b = (swap ? a : b) == Lines::kLineMajor;
    config.tile_n = tile_n;
    config.cluster = cluster;
    config.splits = splits;
    const int64_t tiles_m = detail::ceil_div(swap ? p.n : p.m, kHopperTileM * cluster) * cluster;
    const int64_t tiles_n = detail::ceil_div(swap ? p.m : p.n, tile_n);
    config.tiles = tiles_m * tiles_n * p.batch.numel;
    if (config.tiles * splits >= 1LL << 31) return;
    const bool one_each = splits > 1 || tile_n < 128;
    const int64_t most = one_each ? 1LL << 31 : kHopperSms / cluster * cluster;
    config.grid = config.tiles * splits < most ? config.tiles * splits : most;
    const double time = hopper_estimate(p, config, bytes);
    if (!best.possible || time < least) {
      best = config;
      least = time;
    }
  };
  const int64_t k_blocks = detail::ceil_div(p.k * bytes, 128);
  // Two blocks share a tile of b where that leaves no SM idle.
  const bool pair = detail::ceil_div(p.m, kHopperTileM) % 2 == 0 || p.m >= 32 * kHopperTileM;
  consider(false, 256, pair ? 2 : 1, 1);
  for (const int splits : {1, 2, 4, 8}) {
    if (splits > 1 && k_blocks < 4 * splits) break;
    consider(false, 128, 1, splits);
    for (const int tile_n : {16, 64}) {
      if (p.m <= 2 * tile_n) consider(true, tile_n, 1, splits);
      if (p.n <= 2 * tile_n) consider(false, tile_n, 1, splits);
    }
  }
  return best;
}

}  // namespace cuda_ops
