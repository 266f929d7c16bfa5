// The plain description of tokens that a rank sends to others, shared by binding and kernel. No
// torch, no CUDA.
#pragma once

#include "division.h"
#include "layout.h"

namespace cuda_ops {

constexpr int kMostRanks = 16;

// Contiguous memory, and where each rank gets a copy of it.
struct SendPart {
  const void* from = nullptr;
  void* to[kMostRanks] = {};
  int64_t bytes = 0;
};

struct MoeSend {
  SendPart x, experts, weights;
  int64_t firsts[kMostRanks] = {};  // subtracted from the experts of each rank
  int ranks = 0;
};

// --- the launch configuration: a value, chosen without a GPU ------------------

// Each thread has up to four loads on their way before it stores the first. Four such blocks on a
// multiprocessor ask for more bytes at once than the memory needs to be busy, and more blocks would
// only wait for the links. All three are estimates, not measured yet.
constexpr int kSendThreads = 256;
constexpr int kSendLoads = 4;
constexpr int kSendBlocksPerSm = 4;

// A part as blocks see it: accesses of `width` bytes, in chunks of as many as a block has at once.
struct SendGrain {
  int width = 0;
  int64_t accesses = 0, chunks = 0;
};

struct SendConfig {
  SendGrain x, experts, weights;
  int loads = 1;  // of a thread at once
  int64_t chunks = 0, blocks = 0;
};

namespace detail {

// The widest access that every address is aligned for, and that divides the bytes, so that no ends
// are left over. An odd number of 16-bit elements goes one by one: no model has such rows.
inline int send_width(const SendPart& part, int ranks) {
  for (int width = 16; width > 2; width /= 2) {
    bool fits = part.bytes % width == 0 && is_aligned(part.from, width);
    for (int r = 0; r < ranks; ++r) fits = fits && is_aligned(part.to[r], width);
    if (fits) return width;
  }
  return 2;
}

inline SendGrain send_grain(const SendPart& part, int ranks, int loads) {
  SendGrain grain;
  grain.width = send_width(part, ranks);
  grain.accesses = part.bytes / grain.width;
  grain.chunks = ceil_div(grain.accesses, int64_t(kSendThreads) * loads);
  return grain;
}

inline SendConfig send_chunks(const MoeSend& p, int loads) {
  SendConfig config;
  config.x = send_grain(p.x, p.ranks, loads);
  config.experts = send_grain(p.experts, p.ranks, loads);
  config.weights = send_grain(p.weights, p.ranks, loads);
  config.loads = loads;
  config.chunks = config.x.chunks + config.experts.chunks + config.weights.chunks;
  return config;
}

}  // namespace detail

// Few tokens are spread over more multiprocessors, one access a thread, as a multiprocessor can
// send only so much at a time.
inline SendConfig send_config(const MoeSend& p, int sms) {
  SendConfig config = detail::send_chunks(p, kSendLoads);
  if (config.chunks < sms) config = detail::send_chunks(p, 1);
  const int64_t most = int64_t(sms > 0 ? sms : 1) * kSendBlocksPerSm;
  config.blocks = config.chunks < most ? config.chunks : most;
  return config;
}

}  // namespace cuda_ops
