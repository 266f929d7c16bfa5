// Which kernels compute a mixture of experts on a given GPU: a value, chosen by a pure
// function of sizes, alignment and device. No torch, no CUDA.
//
//   stream   mma.sync, matrices straight from memory   16-bit, few assignments an expert
//   hopper   TMA, cp.async and wgmma                   16-bit, many, compute capability 9.0
//   mma      cp.async + mma.sync                       16-bit, many, from 8.0 on; any alignment
//   simt     multiply-adds                             float32, float64, and 16-bit before 8.0
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "gemm/gemm_stream.h"
#include "moe/moe.h"

namespace cuda_ops {

struct MoePlan {
  enum Family { kNothing, kStream, kHopper, kMma, kSimt } family = kNothing;
  // kStream: assignments of a tile, and how many warps share the K of each product.
  int tile = 0;
  int splits_gate_up = 1, splits_down = 1;
  bool map = true;     // assignments are sorted by expert first
  bool token = false;  // one token, whose results the second product adds up itself
  // kHopper: tiles of 192 rows.
  bool tall = false;

  std::string text() const {
    switch (family) {
      case kNothing: return "nothing";
      case kStream:
        return "stream " + std::to_string(tile) + " splits " + std::to_string(splits_gate_up) +
               (token ? " token" : " " + std::to_string(splits_down)) + (map ? "" : " no map");
      case kHopper: return tall ? "hopper tall" : "hopper";
      case kMma: return "mma";
      case kSimt: return "simt";
    }
    return "";
  }
};

// Up to this many assignments for each expert, a product waits for the matrices (132 SMs, 4 TB/s).
// Beyond, tiles of mma.sync keep the tensor cores busy about as long.
constexpr int64_t kMostStreamed = 24;
// The same where Hopper's kernel has enough tiles, kHopperTilesPerSm, to keep all SMs busy to the
// end: its ring has twice as many bytes on their way, and it reads rows once for more columns.
// Measured (H200, 2026-11-21): at 8 assignments an expert a streamed mixture takes longer than one
// of twice as many tokens by Hopper's kernel: 272 us and 225 for OLMoE.
constexpr int64_t kMostStreamedHopper = 4, kHopperTilesPerSm = 3;

// The range of assignments an expert for which Hopper's forward takes tiles of 192 rows and half as
// many columns: with random routing, many experts would have a second tile of 128, with few rows,
// for which they read their matrix again. Above, more would have a second tile of 192.
constexpr int64_t kLeastTall = 124, kMostTall = 176;

// Assignments that each block of a streaming kernel looks through on its own: the bits of one word.
constexpr int64_t kMostUnsorted = 64;

// Assignments of a streamed tile. All but the first tile of an expert read the matrix from the L2
// cache, so one tile is better, and random numbers of assignments exceed their mean.
constexpr int stream_tile(int64_t assignments, int64_t experts) {
  return assignments <= 4 * experts ? 8 : assignments <= 10 * experts ? 16 : 32;
}

// Warps of a block that share the K of the same lines: as few as fill the SMs several
// times over, since warps with other lines share the assignments in the L1 cache. Once the SMs are
// full, no more where a warp's part of K would waste over a tenth of its loads of 4 KB. Measured
// (H200, 2026-11-22): 8 tokens of Qwen3, I = 768, by 4 warps 127.4 us, by 2 124.4.
constexpr int stream_splits(int64_t groups, int64_t lines, int64_t k, int tile,
                            const DeviceInfo& device) {
  const int64_t warps = groups * ((lines + stream_lines(tile) - 1) / stream_lines(tile));
  const int64_t full = int64_t(device.sms) * kStreamWarps * stream_resident(tile);
  const int64_t load = 2048 / stream_lines(tile);  // k's of all lines of a warp
  const auto whole = [&](int splits) {
    const int64_t share = (k + 32 * splits - 1) / (32 * splits) * 32;
    return 10 * k >= 9 * splits * ((share + load - 1) / load * load);
  };
  int splits = 1;
  while (splits < kStreamWarps && warps * splits < device.sms * 128 && k / (2 * splits) >= 128 &&
         (warps * splits < full || whole(2 * splits))) {
    splits *= 2;
  }
  return splits;
}

// The same for one token's first product: if it takes less than three turns of blocks, as few warps
// as make it one turn that ends on all SMs at about the same time, since the second product begins
// there. Measured (H200, 2026-11-22): Qwen3 27.3 us, else 27.8; OLMoE 33.0, else 33.7.
constexpr int token_splits(int64_t groups, int64_t lines, int64_t k, const DeviceInfo& device) {
  constexpr int kTile = 8;
  const int64_t sms = device.sms, turn = sms * stream_resident(kTile);
  const auto blocks = [&](int splits) {
    const int64_t width = kStreamWarps / splits * stream_lines(kTile);
    return groups * ((lines + width - 1) / width);
  };
  const int splits = stream_splits(groups, lines, k, kTile, device);
  if (blocks(splits) >= 3 * turn) return splits;
  for (int fewer = splits; fewer > 0; fewer /= 2) {
    const int64_t all = blocks(fewer), of_an_sm = (all + sms - 1) / sms;
    if (all <= turn && 100 * all >= 95 * sms * of_an_sm) return fewer;
  }
  return splits;
}

namespace detail {

inline bool whole_vectors(std::initializer_list<const void*> operands) {
  for (const void* data : operands) {
    if (!is_aligned(data, 16)) return false;
  }
  return true;
}

inline bool whole_vectors(const MoeParts& parts) {
  return std::all_of(parts.data, parts.data + parts.count,
                     [](const void* data) { return is_aligned(data, 16); });
}

}  // namespace detail

inline MoePlan moe_plan(const MoeExperts& p, const DeviceInfo& device) {
  MoePlan plan;
  const int64_t assignments = p.map.assignments, experts = p.map.experts;
  if (p.tokens == 0 || p.hidden == 0) return plan;
  plan.family = size_of(p.dtype) == 2 && device.capability >= 80 ? MoePlan::kMma : MoePlan::kSimt;
  // Numbers of lines, and of blocks, then have 31 bits.
  constexpr int64_t kWidest = 1 << 22;
  const bool vectors =
      p.hidden % 8 == 0 && p.hidden < kWidest && p.inner % 8 == 0 && p.inner < kWidest &&
      detail::whole_vectors({p.x, p.w_gate_up, p.w_down, p.gate_up, p.activations, p.results}) &&
      detail::whole_vectors(p.out);
  if (plan.family == MoePlan::kSimt || assignments == 0 || p.inner == 0 || !vectors) return plan;
  const bool hopper = device.capability == 90 && p.built_for_hopper;
  const bool filled = hopper && experts * ((p.inner + 127) / 128) >= kHopperTilesPerSm * device.sms;
  if (assignments > (filled ? kMostStreamedHopper : kMostStreamed) * experts) {
    if (hopper) {
      plan.family = MoePlan::kHopper;
      plan.tall = assignments >= kLeastTall * experts && assignments <= kMostTall * experts;
    }
    return plan;
  }
  plan.family = MoePlan::kStream;
  plan.tile = stream_tile(assignments, experts);
  plan.map = assignments > kMostUnsorted;
  plan.token = p.tokens == 1 && p.top_k <= kMostChosen;  // its kernel has room for so many
  const int64_t groups = assignments < experts ? assignments : experts;
  plan.splits_gate_up = plan.token
                            ? token_splits(groups, 2 * p.inner, p.hidden, device)
                            : stream_splits(groups, 2 * p.inner, p.hidden, plan.tile, device);
  plan.splits_down = stream_splits(groups, p.hidden, p.inner, plan.tile, device);
  return plan;
}

// Plans the gradient, whose matrices lie the other way round: they are not streamed.
inline MoePlan moe_plan(const MoeExpertsBackward& b, const DeviceInfo& device) {
  MoePlan plan = moe_plan(b.forward, device);
  const bool whole = detail::whole_vectors(
      {b.grad_out, b.grad_gate_up, b.grad_x, b.grad_w_gate_up, b.grad_w_down});
  plan.tall = false;
  if (plan.family == MoePlan::kStream || (plan.family == MoePlan::kHopper && !whole)) {
    plan = MoePlan{};
    plan.family = MoePlan::kMma;  // both are from 8.0 on
  }
  return plan;
}

}  // namespace cuda_ops
