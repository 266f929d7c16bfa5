// How a large matrix streams past a few vectors on tensor cores: sizes that kernels and
// plans share, and which variant of the dense kernel runs, a value chosen without a GPU by
// a pure function. No torch, no CUDA.
#pragma once

#include <string>

#include "gemm_hopper.h"

namespace cuda_ops {

constexpr int kStreamWarps = 8;

// Lines of the matrix for a warp. Wide tiles take two blocks of 16, so that what is read
// of the vectors is used twice.
constexpr int stream_lines(int tile) { return tile == 8 ? 16 : 32; }

// Blocks that the registers of an SM hold.
constexpr int stream_resident(int tile) { return tile == 8 ? 3 : 2; }

struct StreamConfig {
  bool possible = false;
  bool swap = false;  // the vectors are columns of b
  int tile = 0;       // vectors, of which some may be beyond the last one
  int splits = 1;     // warps of a block that share the K of the same lines
  int ranks = 1;      // blocks of a cluster that do, of compute capability 9.0
  int64_t grid = 0;
  double time = 0;  // estimated microseconds

  std::string text() const {
    return std::string(swap ? "swapped " : "") + std::to_string(tile) + " splits " +
           std::to_string(splits) + (ranks > 1 ? " x " + std::to_string(ranks) : "");
  }
};

// The most rows, or columns, that the plan streams the other matrix past, 64 KB of which
// each SM has on their way. Not timed yet.
constexpr int64_t kStreamVectors = 32;

// Bytes a microsecond: of memory, from the L2 cache to all SMs, and to one; of one block
// of warps that wait 1 us for each 32 KB. Estimates.
constexpr double kStreamMemory = 4.25e6, kStreamCache = 5.5e6, kStreamSm = 75e3;
constexpr double kStreamBlock = 32e3;
constexpr double kStreamStart = 3, kStreamExchange = 1;  // us

// Estimated microseconds on an H200: the memory's, the cache's or the busiest SM's,
// whichever is most. Every block reads all vectors, so lines are shared out among few
// blocks and K among many, up to where the sums' way to one block costs more.
inline double stream_estimate(const Matmul& p, const StreamConfig& config) {
  const int64_t vectors = p.m < p.n ? p.m : p.n, lines = p.m < p.n ? p.n : p.m;
  const int64_t width = kStreamWarps / config.splits * stream_lines(config.tile);
  const double share = 2.0 * double(p.k) / config.ranks;  // bytes of a line, or of a vector
  const double block = double(width + vectors) * share;
  const double rounds = double(detail::ceil_div(config.grid, kHopperSms));
  const double together =
      rounds < stream_resident(config.tile) ? rounds : stream_resident(config.tile);
  const double waiting = rounds * double(width) * share / (together * kStreamBlock);
  const double loading = rounds * block / kStreamSm;
  const double cache = double(config.grid) * block / kStreamCache;
  const double all =
      double(lines + vectors) * 2.0 * double(p.k) * double(p.batch.numel) / kStreamMemory;
  double most = all, others = 0;
  for (const double time : {waiting, loading, cache}) {
    others += time < most ? time : most;
    most = time < most ? most : time;
  }
  // Of two that take as long as memory, the one with less to do.
  return most + 0.03 * others + kStreamStart + (config.ranks > 1 ? kStreamExchange : 0);
}

// A variant of the kernel for the least tile that holds the vectors; not possible if there
// is none.
inline StreamConfig stream_variant(const Matmul& p, int splits, int ranks) {
  StreamConfig config;
  const int64_t vectors = p.m < p.n ? p.m : p.n, lines = p.m < p.n ? p.n : p.m;
  config.swap = p.n < p.m;
  config.tile = vectors <= 8 ? 8 : vectors <= 16 ? 16 : 32;
  config.splits = splits;
  config.ranks = ranks;
  const int64_t width = kStreamWarps / splits * stream_lines(config.tile);
  const int64_t blocks = detail::ceil_div(lines, width) * ranks;
  // Numbers of blocks, lines and k's have 31 bits.
  config.possible = vectors <= config.tile && lines < 1LL << 30 && p.k < 1LL << 30 &&
                    blocks < 1LL << 31 && blocks * p.batch.numel < 1LL << 31;
  config.grid = blocks * p.batch.numel;
  if (config.possible) config.time = stream_estimate(p, config);
  return config;
}

// `clusters`: the GPU has them.
inline StreamConfig stream_config(const Matmul& p, bool clusters) {
  StreamConfig best;
  for (int ranks = 1; ranks <= (clusters ? 8 : 1); ranks *= 2) {
    for (int splits = 1; splits <= kStreamWarps; splits *= 2) {
      // A warp has 4 KB to load at least.
      if (ranks * splits > 1 && p.k / (ranks * splits) < 128) continue;
      const StreamConfig config = stream_variant(p, splits, ranks);
      if (config.possible && (!best.possible || config.time < best.time)) best = config;
    }
  }
  return best;
}

}  // namespace cuda_ops
