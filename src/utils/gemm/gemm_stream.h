// How a large matrix streams past a few vectors on tensor cores: sizes that kernels and
// plans share, and which variant of the dense kernel runs, a value chosen without a GPU by
// a pure function. No torch, no CUDA.
#pragma once

#include <string>

#include "gemm/gemm_hopper.h"

namespace cuda_ops {

constexpr int kStreamWarps = 8;

// Lines of the matrix for a warp. Wide tiles take two blocks of 16, so that vectors are used twice
// once they are read.
constexpr int stream_lines(int tile) { return tile == 8 ? 16 : 32; }

// Blocks that the registers of an SM hold.
constexpr int stream_resident(int tile) { return tile == 8 ? 3 : 2; }

struct StreamConfig {
  bool possible = false;
  bool swap = false;  // the vectors are columns of b
  int tile = 0;       // vectors; some may be beyond the last one
  int splits = 1;     // warps of a block that share the K of the same lines
  int64_t grid = 0;

  int lines() const { return kStreamWarps / splits * stream_lines(tile); }  // of a block

  std::string text() const {
    return std::string(swap ? "swapped " : "") + std::to_string(tile) + " splits " +
           std::to_string(splits);
  }
};

// The most rows, or columns, that the plan streams the other matrix past. Hopper's own kernel is
// faster for more (H200, 2026-11-22: 32 x 4096 x 4096 12.8 us, not 15.0), and for fewer where K
// is very long (1 x 8192 x 28672: 114.5 us, not 129.4). Tiles of 16 and 32 are for other GPUs,
// where the mma kernel would leave SMs idle: not measured there.
constexpr int64_t stream_vectors(bool hopper, int64_t k) {
  return !hopper ? 32 : k > 20480 ? 0 : 8;
}

// Describes a variant of the kernel for the smallest tile that holds the vectors; not possible if
// there is none.
inline StreamConfig stream_variant(const Matmul& p, int splits) {
  StreamConfig config;
  const int64_t vectors = p.m < p.n ? p.m : p.n, lines = p.m < p.n ? p.n : p.m;
  config.swap = p.n < p.m;
  config.tile = vectors <= 8 ? 8 : vectors <= 16 ? 16 : 32;
  config.splits = splits;
  const int64_t blocks = ceil_div(lines, config.lines());
  // Numbers of blocks, lines and k's have 31 bits.
  config.possible = vectors <= config.tile && lines < 1LL << 30 && p.k < 1LL << 30 &&
                    p.batch.numel < 1LL << 31 && blocks * p.batch.numel < 1LL << 31;
  config.grid = config.possible ? blocks * p.batch.numel : 0;
  return config;
}

// Puts all warps of a block on the same lines, while each has 4 KB to load; half of them where that
// makes at most one block for each SM, and all of them would make more without filling the SMs. On
// an H200 (2026-11-22) that is within 2 % of the fastest for up to 8 rows and every projection of
// Llama-3 that comes here.
inline StreamConfig stream_config(const Matmul& p, const DeviceInfo& device) {
  int splits = kStreamWarps;
  while (splits > 1 && p.k / splits < 128) splits /= 2;
  const StreamConfig all = stream_variant(p, splits), half = stream_variant(p, kStreamWarps / 2);
  const int64_t at_once = int64_t(device.sms) * stream_resident(all.tile);
  const bool uneven = all.grid > device.sms && all.grid < at_once * 9 / 10;
  return splits == kStreamWarps && uneven && half.grid <= device.sms ? half : all;
}

}  // namespace cuda_ops
