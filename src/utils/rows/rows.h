// How threads share rows of neighbors, for operators that need all of a row for each of its
// results, such as norms. No torch, no CUDA.
#pragma once

#include "dtype.h"
#include "layout.h"

namespace cuda_ops {

// --- the launch configuration: a value, chosen without a GPU ------------------

// A pack is 16 or 8 bytes, or one element where rows are not whole aligned packs. The threads of a
// row keep it in registers, up to so many packs each; longer rows are read again.
struct RowConfig {
  int pack = 1;     // elements
  int threads = 0;  // of a block
  int lanes = 0;    // threads a row: part of a warp, or the block
  int packs = 0;    // of a thread, least_packs times a power of two; 0: the row does not fit
  int64_t blocks = 0;

  int rows() const { return threads / lanes; }  // of a block at a time
};

constexpr int kRowThreads = 128;  // a block of several rows

namespace detail {

// Rows of up to 32 lanes share a block; longer ones have one of up to `most_threads`.
inline void share_row(RowConfig& config, int64_t count, int most_packs, int most_threads,
                      int least_packs = 1) {
  config.threads = config.lanes = kRowThreads;
  if (count <= 32 * most_packs) {
    // Few lanes, since adding up across lanes takes more instructions than loading does; but as
    // many as share a line of 128 bytes, in packs of 16.
    config.lanes = 1;
    while (config.lanes < 8 && config.lanes * least_packs < count) config.lanes *= 2;
    while (config.lanes * most_packs < count) config.lanes *= 2;
  } else {
    while (config.lanes < most_threads && config.lanes * most_packs < count) config.lanes *= 2;
    config.threads = config.lanes;
  }
  config.packs = least_packs;
  while (config.packs < most_packs && config.packs * config.lanes < count) config.packs *= 2;
  if (int64_t(config.packs) * config.lanes < count) config.packs = 0;
}

// Few long rows: more threads each, so that a multiprocessor still has enough loads in flight.
inline void spread_row(RowConfig& config, int64_t rows, int sms, int least_packs = 1) {
  while (config.lanes > 32 && config.lanes < 1024 && config.packs > least_packs &&
         rows * config.threads < 1024 * int64_t(sms)) {
    config.lanes = config.threads *= 2;
    config.packs /= 2;
  }
}

// A block of one row has no more warps than its packs take: 1025 packs, four each, are 9 warps, not
// the 16 of the next power of two.
inline void trim_row(RowConfig& config, int64_t count) {
  if (config.lanes <= 32 || config.packs == 0) return;
  const int64_t needed = (count + config.packs - 1) / config.packs;
  config.lanes = config.threads = int((needed + 31) / 32 * 32);
}

// Whether rows at such steps of elements of `size` bytes begin at multiples of `bytes`.
inline bool whole_packs(const void* data, int64_t step, int64_t size, int64_t bytes = 16) {
  return is_aligned(data, bytes) && step * size % bytes == 0;
}

}  // namespace detail

}  // namespace cuda_ops
