// The plain description of the first k of each row, shared by bindings and
// kernels. No torch, no CUDA.
#pragma once

#include "sort/sort.h"

namespace cuda_ops {

// The first `k` of each row of `sort`, in its order: largest means descending.
struct TopkRows {
  SortRows sort;  // values and indices have k elements a row
  int64_t k = 0;
};

constexpr int64_t kMostKept = 64;  // elements of a warp, in its registers
constexpr int kTopkWarps = 4;      // warps of a block

// Whether a warp sorts all of a row. On an H200 (2026-11-22) 65536 rows of 128 float32 keys take
// 63 us that way and 188 us to go through them for the best 8; 16384 rows of 1024 take 167 us,
// and 103 for the best 8 or 182 for the best 64.
constexpr bool topk_sorts(int64_t n, int64_t k) {
  return n <= 256 || (n <= kSortRun && k > kMostKept / 2);
}

// A warp takes `chunk` elements of a row and keeps k of them. The elements kept of a row with more
// than one chunk are a row again, until there is one chunk.
//
// It goes through the pieces of its chunk in steps, round and round. From end to end each element
// of an ascending row would be better than all before it, and be sorted in: an H200 (2026-11-25)
// takes 864 us for 1024 such rows of 32768, k 64, and 158 us for random ones. In steps rows in
// order are like random ones.
struct TopkConfig {
  int kept = 32;  // k, rounded up to a size there is code for
  int64_t chunk = 0, chunks = 1;
  int64_t pieces = 0, step = 1;  // of a chunk; from a piece to the one that is taken next
};

constexpr int kTopkPiece = 128;  // elements, which are read side by side: a line of 1-byte ones

// Elements of a row, at most: a place in it has 32 bits, with that of a piece that ends behind it.
constexpr int64_t kTopkLongest = (int64_t(1) << 32) - 1 - kTopkPiece;

// Returns a step with which all pieces are met, the first few of them far apart, and so on. The
// nth piece is then the best of all so far about as often as in random order, ln(pieces) times
// in all: as often as the quotients of Euclid's algorithm say, which are least near the golden
// ratio.
constexpr int64_t topk_step(int64_t pieces) {
  const int64_t first = 1 + int64_t(double(pieces) * 0.6180339887);
  int64_t best = 1, least = pieces;
  for (int64_t step = first; step < first + 16 && step < pieces; ++step) {
    int64_t quotients = 0, a = pieces, b = step;
    while (b > 0) {
      const int64_t quotient = a / b, rest = a - quotient * b;
      quotients += quotient;
      a = b;
      b = rest;
    }
    if (a == 1 && quotients < least) {
      best = step;
      least = quotients;
    }
  }
  return best;
}

// Chunks are for rows that are too few to fill a GPU with warps, 32 of them on
// each SM. Passes over what was kept cost less than long chunks of few warps.
constexpr TopkConfig topk_config(int64_t rows, int64_t n, int64_t k, const DeviceInfo& device) {
  constexpr int64_t kShortest = 1024;
  const int64_t warps = 32 * int64_t(device.sms);
  TopkConfig config;
  config.kept = k <= 32 ? 32 : 64;
  int64_t chunks = rows < warps ? warps / (rows > 0 ? rows : 1) : 1;
  if (chunks > n / kShortest) chunks = n / kShortest;
  if (chunks < 1) chunks = 1;
  config.chunk = (n + chunks - 1) / chunks;
  config.chunks = config.chunk > 0 ? (n + config.chunk - 1) / config.chunk : 1;
  config.pieces = (config.chunk + kTopkPiece - 1) / kTopkPiece;
  config.step = topk_step(config.pieces);
  return config;
}

// The elements that chunks keep, a key and an index each: 8 bytes, or 16.
constexpr int64_t topk_kept_bytes(int64_t rows, int64_t k, int64_t chunks, int64_t size) {
  return chunks > 1 ? rows * chunks * k * (size == 8 ? 16 : 8) : 0;
}

constexpr int64_t topk_workspace_bytes(int64_t rows, int64_t n, int64_t k, int64_t size,
                                       const DeviceInfo& device) {
  const int64_t chunks = topk_config(rows, n, k, device).chunks;
  const int64_t again = topk_config(rows, chunks * k, k, device).chunks;
  return topk_kept_bytes(rows, k, chunks, size) + topk_kept_bytes(rows, k, again, size);
}

}  // namespace cuda_ops
