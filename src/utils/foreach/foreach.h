// Elementwise over lists: one launch for many tensors of any sizes. No torch, no CUDA.
#pragma once

#include "dtype.h"
#include "layout.h"

namespace cuda_ops {

// out[i] = f(in[0][i], ...) of one tensor each, all dense in the same order.
template <int kInputs>
struct Flat {
  const void* in[kInputs] = {};
  void* out = nullptr;
  int64_t numel = 0;
};

// --- the launch configuration: a value, chosen without a GPU ------------------

// A block takes 16 KB of each operand at a time, four vectors a thread: it first looks up which
// tensor they are of.
constexpr int kForeachThreads = 256;
constexpr int kForeachVectors = 4;
constexpr int64_t foreach_chunk(int element_bytes) {
  return int64_t(kForeachThreads) * kForeachVectors * 16 / element_bytes;
}

// What a kernel gets as its parameters, at most 4 KB before CUDA 12.1 and older drivers: so many
// tensors a launch.
constexpr int most_flats(int inputs) { return 4000 / (8 * (inputs + 2) + 4); }

template <int kInputs>
struct FlatTable {
  static constexpr int kMost = most_flats(kInputs);
  const void* in[kInputs][kMost];
  void* out[kMost];
  int64_t numel[kMost];
  int32_t first[kMost];  // the block that begins with each tensor
  int32_t count = 0, blocks = 0;

  // False, and nothing done, where there is no room.
  bool add(const Flat<kInputs>& flat, int64_t chunk) {
    const int64_t more = (flat.numel + chunk - 1) / chunk;
    if (count == kMost || (count > 0 && more > INT32_MAX - blocks)) return false;
    for (int k = 0; k < kInputs; ++k) in[k][count] = flat.in[k];
    out[count] = flat.out;
    numel[count] = flat.numel;
    first[count++] = blocks;
    blocks += int32_t(more);
    return true;
  }
};

}  // namespace cuda_ops
