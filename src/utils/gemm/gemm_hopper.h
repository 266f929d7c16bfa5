// Which of the Hopper kernel's variants multiplies given matrices: a value,
// chosen without a GPU by a pure function. No torch, no CUDA.
#pragma once

#include <cstdio>
#include <string>

#include "division.h"
#include "gemm/matmul.h"
#include "ptx/device_info.h"

namespace cuda_ops {

struct HopperConfig {
  bool possible = false;  // the copy engine can read the operands
  bool line_major_a = false, line_major_b = false;
  bool swap = false;  // out^T = b^T a^T: the columns of out are the kernel's rows
  int tile_n = 0;     // columns of a tile, which has 128 rows
  bool pair = false;  // two blocks of a cluster share a tile of b
  int splits = 1;     // blocks of a cluster that share the K of one tile
  int64_t tiles = 0;
  int64_t grid = 0;
  double time = 0;  // estimated microseconds

  std::string text() const {
    if (!possible) return "none";
    char line[128];
    std::snprintf(line, sizeof line, "%s128x%d%s%s splits %d %sgrid %lld", swap ? "swapped " : "",
                  tile_n, line_major_a ? " A^T" : "", line_major_b ? " B^T" : "", splits,
                  pair ? "pairs " : "", static_cast<long long>(grid));
    return line;
  }
};

constexpr int kHopperTileM = 128;
constexpr int kHopperSplitTile = 128;  // columns of 3xTF32's tiles: three sums of each in registers

namespace detail {

enum class Lines { kNone, kKMajor, kLineMajor };

// How the copy engine can read an operand whose lines (rows of a, columns of b)
// are `line` elements apart and whose k are `k` apart.
inline Lines hopper_lines(const void* data, int64_t line, int64_t k, int64_t batch, int bytes,
                          int64_t lines, int64_t ks) {
  const auto whole = [&](int64_t stride) { return stride * bytes % 16 == 0 && stride < 1LL << 36; };
  if (!is_aligned(data, 16) || !whole(batch)) return Lines::kNone;
  if ((k == 1 || ks == 1) && (lines == 1 || (whole(line) && line > 0))) return Lines::kKMajor;
  const bool line_major = (line == 1 || lines == 1) && (ks == 1 || (whole(k) && k > 0));
  return line_major && bytes == 2 ? Lines::kLineMajor : Lines::kNone;
}

}  // namespace detail

// The lines that a tile loads at once, and where the last tile begins: multiples of eight, after
// which rows the swizzle repeats; eight columns are 16 bytes.
inline int hopper_box(int64_t lines, int tile) {
  return lines < tile ? int(ceil_div(lines, 8)) * 8 : tile;
}
inline int hopper_last(int64_t lines, int tile) {
  return lines < tile ? 0 : int(ceil_div(lines - tile, 8)) * 8;
}

// Microseconds that one block takes for a stage (128 bytes of K), alone on its SM. These and the
// constants below are fitted to times of an H200, 2026-11-22, with inputs from memory: what they
// choose takes 1.2 % longer than the best variant of each shape with more than 8 rows, in the
// geometric mean (benchmarks/tuning/matmul.cu). Wide tiles wait for the tensor cores, narrow
// ones for the latency of as many loads as they hold.
constexpr double hopper_stage_time(int tile_n) {
  return tile_n == 256   ? 0.69
         : tile_n == 224 ? 0.605
         : tile_n == 192 ? 0.52
         : tile_n == 160 ? 0.43
         : tile_n == 128 ? 0.345
         : tile_n == 64  ? 0.38
         : tile_n == 32  ? 0.31
                         : 0.305;
}

// By how much a tile is slower than one of 256 columns where a product takes so long, in
// microseconds, that power limits the clock: narrower tiles move more for each multiplication. The
// factors are the part that waves do not explain of nine bfloat16 products of 0.75 to 5 ms on an
// H200, 2026-11-22, each after 12 ms of rest; those of 192 columns and of narrow tiles are
// estimates. Without rest all tiles take equally long, and these factors cost up to 2 %.
constexpr double kHopperPowerTime = 250;
constexpr double hopper_power_factor(int tile_n) {
  return tile_n >= 256   ? 1
         : tile_n == 224 ? 1.015
         : tile_n == 192 ? 1.025
         : tile_n == 160 ? 1.035
                         : 1.08;
}

// The start and the end of the kernel; the exchange of a split, as such and for each column.
constexpr double kHopperFixedTime = 3.5;
constexpr double kHopperExchangeTime = 2.3, kHopperExchangeColumn = 1.5 / 128;

// TB/s of the L2 cache, and how long the stages of all blocks at work wait for it: 128 blocks of
// 128 x 128 do. Rows that start in the middle of its lines of 128 bytes touch twice as many lines.
constexpr double kHopperL2 = 10.7, kHopperBetweenLines = 1.6;
inline double hopper_load_time(const Matmul& p, const HopperConfig& config, int bytes,
                               const DeviceInfo& device) {
  const auto factor = [&](const MatrixStrides& s) {
    return (s.row > s.col ? s.row : s.col) * bytes % 128 == 0 ? 1 : kHopperBetweenLines;
  };
  const double a = factor(config.swap ? p.b : p.a), b = factor(config.swap ? p.a : p.b);
  const int64_t blocks = config.tiles * config.splits;
  const int box_a = hopper_box(config.swap ? p.n : p.m, kHopperTileM);
  const int box_b = hopper_box(config.swap ? p.m : p.n, config.tile_n);
  return 128 * (box_a * a + box_b * b / (config.pair ? 2 : 1)) *
         double(blocks < device.sms ? blocks : device.sms) / (kHopperL2 * 1e6);
}

// The stage time of 3xTF32: three products of 128 x 128.
constexpr double kHopperSplitTime = 0.95;

// Whether there is a kernel: each one takes a second to compile. 160 and 224 columns are for two
// K-major operands and sizes where the other tiles would leave a mostly empty last wave, such as
// 512 x 10240; a layer goes without tiles that would gain a few percent on some shapes.
constexpr bool hopper_tile(int tile_n, bool linear, bool k_major) {
  if (tile_n == 160 || tile_n == 224) return k_major;
  return !linear || (tile_n != 32 && tile_n != 192);
}

// Estimates the microseconds on an H200: waves of tiles at that rate, but never less than all bytes
// at the memory's bandwidth.
inline double hopper_estimate(const Matmul& p, const HopperConfig& config, int bytes,
                              const DeviceInfo& device) {
  const auto stages = double(ceil_div(p.k * bytes, 128));
  const double exchange = kHopperExchangeTime + kHopperExchangeColumn * config.tile_n;
  const int64_t blocks = config.tiles * config.splits;
  const auto waves = double(ceil_div(blocks, device.sms));
  const double products = is_split(p) ? kHopperSplitTime : hopper_stage_time(config.tile_n);
  const double loads = hopper_load_time(p, config, bytes, device);
  const double stage = products > loads ? products : loads;
  double busy = waves * (stages / config.splits * stage + 0.5);
  if (busy > kHopperPowerTime && !is_split(p)) busy *= hopper_power_factor(config.tile_n);
  const double read = (double(p.m) * p.k + double(p.n) * p.k) * (is_split(p) ? 2 : 1);
  const double all = (read + double(p.m) * p.n) * bytes * double(p.batch.numel) / 4.25e6;
  // Among two that wait for memory, the one with less to do is better.
  return (busy > all ? busy + 0.1 * all : all + 0.1 * busy) + kHopperFixedTime +
         (config.splits == 1 ? 0 : exchange);
}

// Whether all clusters of `splits` blocks find their SMs at once, if a block takes a whole one:
// those of a cluster are of one part of the chip. 33 clusters of three did on 132 SMs, 39 did not.
constexpr bool hopper_clusters_fit(int splits, int64_t tiles, const DeviceInfo& device) {
  return splits <= 2 || 4 * splits * tiles <= 3 * device.sms;
}

// Describes a variant of the kernel, with its grid and estimate; not possible if no grid holds it.
inline HopperConfig hopper_variant(const Matmul& p, int bytes, const DeviceInfo& device, bool swap,
                                   int tile_n, int splits, bool pair = false) {
  HopperConfig config;
  config.swap = swap;
  config.tile_n = tile_n;
  config.splits = splits;
  config.pair = pair;
  config.tiles = ceil_div(swap ? p.n : p.m, kHopperTileM * (pair ? 2 : 1)) *
                 ceil_div(swap ? p.m : p.n, tile_n) * p.batch.numel * (pair ? 2 : 1);
  const int64_t blocks = config.tiles * splits;
  // A block's tile plus the grid, where it looks for the next, is an int.
  config.possible = blocks < 1LL << 30;
  // Blocks of a split have one tile each, and those of narrow tiles do not stay.
  const bool one_each = splits > 1 || tile_n < 128;
  const int64_t most = pair ? device.sms / 2 * 2 : device.sms;
  config.grid = one_each || blocks < most ? blocks : most;
  config.time = hopper_estimate(p, config, bytes, device);
  return config;
}

// Chooses the fastest variant. `linear`: among the tiles that a layer has (hopper_tile).
inline HopperConfig hopper_config(const Matmul& p, int bytes, const DeviceInfo& device,
                                  bool linear) {
  using detail::Lines;
  HopperConfig best;
  const auto small = [](int64_t size) { return size > 0 && size < 1LL << 31; };
  const int64_t parts_k = is_split(p) ? 2 * p.k : p.k;  // the copy engine's coordinates are ints
  if (!small(p.m) || !small(p.n) || !small(parts_k) || p.batch.dims > 1) return best;
  if (p.out.col != 1 && p.n != 1) return best;
  const auto& operands = p.batch.operands;
  const auto batch_of = [&](int i) { return p.batch.dims == 0 ? 0 : operands[i].strides[0]; };
  const Lines a =
      detail::hopper_lines(operands[1].data, p.a.row, p.a.col, batch_of(1), bytes, p.m, p.k);
  const Lines b =
      detail::hopper_lines(operands[2].data, p.b.col, p.b.row, batch_of(2), bytes, p.n, p.k);
  if (a == Lines::kNone || b == Lines::kNone) return best;

  const auto consider = [&](bool swap, int tile_n, int splits, bool pair = false) {
    if (!hopper_tile(tile_n, linear, a == Lines::kKMajor && b == Lines::kKMajor)) return;
    if (is_split(p) && tile_n != kHopperSplitTile) return;
    HopperConfig config = hopper_variant(p, bytes, device, swap, tile_n, splits, pair);
    config.line_major_a = (swap ? b : a) == Lines::kLineMajor;
    config.line_major_b = (swap ? a : b) == Lines::kLineMajor;
    // Splits are for SMs that would idle: all of their blocks at work at once.
    if (!config.possible || (splits > 1 && config.grid > device.sms)) return;
    if (tile_n >= 128 && !hopper_clusters_fit(splits, config.tiles, device)) return;
    // Among two alike a pair loads less, which saves power; its blocks begin 0.1 us later.
    const bool preferred = pair && config.tile_n == best.tile_n && config.time > 15;
    const double most = preferred ? 1.001 * best.time : best.time;
    if (!best.possible || config.time < most) best = config;
  };
  const int64_t stages = ceil_div(p.k * bytes, 128);
  for (const int splits : {1, 2, 3}) {
    if (splits > 1 && stages < 4 * splits) break;
    for (const int tile_n : {256, 224, 192, 160, 128}) {
      consider(false, tile_n, splits);
      // A pair whose lower tile is beyond the matrix computes the upper one twice.
      if (splits == 1 && p.m > kHopperTileM && p.n > 64) consider(false, tile_n, splits, true);
    }
    for (const int tile_n : {16, 32, 64}) {
      if (p.m <= tile_n) consider(true, tile_n, splits);
      if (p.n <= tile_n) consider(false, tile_n, splits);
    }
  }
  return best;
}

}  // namespace cuda_ops
