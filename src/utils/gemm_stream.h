// How a large matrix streams past a few vectors on tensor cores: sizes that kernels and
// plans share, and which variant of the dense kernel runs, a value chosen without a GPU by
// a pure function. No torch, no CUDA.
#pragma once

#include <initializer_list>
#include <string>

#include "gemm_hopper.h"

namespace cuda_ops {

constexpr int kStreamWarps = 8;

// Lines of the matrix for a warp. Wide tiles take two blocks of 16, so that what is read
// of the vectors is used twice.
constexpr int stream_lines(int tile) { return tile == 8 ? 16 : 32; }

// Blocks that the registers of an SM hold.
constexpr int stream_resident(int tile) { return tile == 8 ? 3 : tile == 64 ? 1 : 2; }

// Tiles from this one on have so many sums that the matrix is loaded to shared memory, not to
// registers: to a ring of stages for each warp. Of the widest tile's block these are 96 KB,
// and 99 KB are all there is on GPUs of capability 8.6 and 8.9.
constexpr int kStreamRing = 64;
constexpr int kStreamStages = 3, kStreamSteps = 2;  // a stage is kStreamSteps times 32 k's
constexpr int stream_stage(int tile) { return kStreamSteps * stream_lines(tile) * 64; }

// Bytes of shared memory of a warp: the ring, and then its sums, rows of lines or of vectors
// with padding against bank conflicts.
constexpr int stream_shared(int tile, bool ring) {
  const int lines = stream_lines(tile), longer = lines > tile ? lines : tile;
  const int sums = 4 * (lines * tile + 4 * longer);
  const int stages = ring ? kStreamStages * stream_stage(tile) : 0;
  return stages > sums ? stages : sums;
}

// What a block has on its way from memory.
constexpr int stream_bytes(int tile) {
  const int warp = tile < kStreamRing ? 4096 : (kStreamStages - 1) * stream_stage(tile);
  return kStreamWarps * warp;
}

struct StreamConfig {
  bool possible = false;
  bool swap = false;  // the vectors are columns of b
  int tile = 0;       // vectors, of which some may be beyond the last one
  int splits = 1;     // warps of a block that share the K of the same lines
  int ranks = 1;      // blocks of a cluster that do, of compute capability 9.0
  int64_t grid = 0;
  double time = 0;  // estimated microseconds

  int lines() const { return kStreamWarps / splits * stream_lines(tile); }  // of a block

  std::string text() const {
    return std::string(swap ? "swapped " : "") + std::to_string(tile) + " splits " +
           std::to_string(splits) + (ranks > 1 ? " x " + std::to_string(ranks) : "");
  }
};

// The most rows, or columns, that the plan streams the other matrix past. Not timed yet.
constexpr int64_t kStreamVectors = 64;

// Bytes a microsecond: of memory, from the L2 cache to all SMs, and to one. Microseconds
// from a load to its use, of start and end, and of the exchange of sums in a cluster.
// Estimates.
constexpr double kStreamMemory = 4.3e6, kStreamCache = 5.5e6, kStreamSm = 75e3;
constexpr double kStreamWait = 1.3, kStreamStart = 3, kStreamExchange = 1;

// Estimated microseconds on an H200: the memory's, the cache's or the busiest SM's,
// whichever is most. Every block reads all vectors, so few blocks with many lines, and K
// shared out to a cluster, are best for the cache; small blocks for the last wave, which
// is to be no shorter of bytes on their way than the others.
inline double stream_estimate(const Matmul& p, const StreamConfig& config) {
  const int64_t vectors = p.m < p.n ? p.m : p.n;
  const double share = 2.0 * double(p.k) / config.ranks;  // bytes of a line, or of a vector
  const double lines = double(config.lines()) * share, block = lines + double(vectors) * share;
  const int64_t wave = int64_t(kHopperSms) * stream_resident(config.tile);
  const auto time_of = [&](int64_t blocks) {
    const double rate = double(blocks) * stream_bytes(config.tile) / kStreamWait;
    return double(blocks) * lines / (rate < kStreamMemory ? rate : kStreamMemory);
  };
  const int64_t left = config.grid % wave;
  const double memory = double(config.grid / wave) * time_of(wave) + (left > 0 ? time_of(left) : 0);
  const double cache = double(config.grid) * block / kStreamCache;
  const double one = double(detail::ceil_div(config.grid, kHopperSms)) * block / kStreamSm;
  double most = memory;
  for (const double time : {cache, one}) most = time > most ? time : most;
  // Of two that take as long, the one with less to do.
  return most + 0.03 * (memory + cache + one) + kStreamStart +
         (config.ranks > 1 ? kStreamExchange : 0);
}

// A variant of the kernel for the least tile that holds the vectors; not possible if there
// is none.
inline StreamConfig stream_variant(const Matmul& p, int splits, int ranks) {
  StreamConfig config;
  const int64_t vectors = p.m < p.n ? p.m : p.n, lines = p.m < p.n ? p.n : p.m;
  config.swap = p.n < p.m;
  config.tile = vectors <= 8 ? 8 : vectors <= 16 ? 16 : vectors <= 32 ? 32 : 64;
  config.splits = splits;
  config.ranks = ranks;
  const int64_t blocks = detail::ceil_div(lines, config.lines()) * ranks;
  // Numbers of blocks, lines and k's have 31 bits.
  config.possible = vectors <= config.tile && lines < 1LL << 30 && p.k < 1LL << 30 &&
                    p.batch.numel < 1LL << 31 && blocks * p.batch.numel < 1LL << 31;
  config.grid = config.possible ? blocks * p.batch.numel : 0;
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
