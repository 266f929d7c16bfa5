// The plain descriptions of a mixture of experts, shared by bindings and kernels:
// T tokens choose k of E experts each. No torch, no CUDA.
//
// One choice of one token is an assignment, number t * k + j. By an index map experts find their
// assignments, and an assignment its position in the order of experts. The rows between two
// products lie at positions, where an expert's rows are neighbors, unless they are streamed. Rows
// that callers see, except between the halves of a gradient, and rows that are added up over a
// token's assignments, lie at their numbers.
#pragma once

#include "dtype.h"
#include "layout.h"
#include "ptx/device_info.h"

namespace cuda_ops {

constexpr int64_t kMostExperts = 512;  // a warp keeps those of a token: 16 a lane
constexpr int64_t kMostChosen = 16;
constexpr int64_t kMostAssignments = int64_t(1) << 31;  // a number has 32 bits

enum class Scoring : int32_t { kSoftmax, kSigmoid };

// A router's choice by its logits: for each token its top_k experts, best first, and their weights.
struct MoeRoute {
  DType dtype = DType::kUnsupported;
  int64_t tokens = 0, experts = 0, top_k = 0;
  const void* logits = nullptr;  // T rows of E
  int64_t token_stride = 0, expert_stride = 0;
  const double* bias = nullptr;  // one for each expert, added to scores to choose by, or null
  Scoring scoring = Scoring::kSoftmax;
  bool renormalize = true;
  void* weights = nullptr;  // T rows of top_k, in the type that dtype computes in
  int64_t* chosen = nullptr;
};

// The gradient of the weights, back to the logits.
struct MoeRouteBackward {
  MoeRoute route;  // without bias; weights and chosen are inputs
  const void* grad_weights = nullptr;
  void* grad_logits = nullptr;  // dense
};

// Assignments by expert: order[offsets[e]] ... order[offsets[e + 1] - 1] are those of
// expert e, in ascending order. Those of no expert, an index outside range(E), are behind
// offsets[E].
struct MoeMap {
  const int64_t* chosen = nullptr;
  int64_t assignments = 0, experts = 0;
  int32_t* order = nullptr;
  int32_t* offsets = nullptr;  // E + 1
  int32_t* counts = nullptr;   // moe_map_counts() numbers
  // For each of up to kMapProducts later products: how many tiles were taken beyond each block's
  // first. Zero when the map is there.
  int32_t* taken = nullptr;
};
constexpr int kMapProducts = 2;

// A block counts and places a chunk of assignments. There are up to 128 chunks, and every block
// adds up the counts of all of them; up to kMapStep assignments are one chunk, which needs no
// counts.
constexpr int kMapThreads = 512, kMapRounds = 8, kMapStep = kMapThreads * kMapRounds;

constexpr int64_t moe_map_chunk(int64_t assignments) {
  constexpr int64_t kMostChunks = 128;
  if (assignments <= kMapStep) return kMapStep;
  const int64_t even = (assignments + kMostChunks - 1) / kMostChunks;
  return (even + kMapThreads - 1) / kMapThreads * kMapThreads;
}
constexpr int64_t moe_map_chunks(int64_t assignments) {
  const int64_t chunk = moe_map_chunk(assignments);
  return (assignments + chunk - 1) / chunk;
}
// Counts of a chunk: one for each expert and one for none, as whole vectors of 16 bytes.
constexpr int moe_map_bins(int64_t experts) { return int(experts + 1 + 3) / 4 * 4; }
constexpr int64_t moe_map_counts(int64_t assignments, int64_t experts) {
  return moe_map_chunks(assignments) * moe_map_bins(experts);
}

// Where the rows of tokens go: to one tensor, or an equal number to each of several, in order.
// constexpr, so that kernels can call it too.
constexpr int kMostParts = 16;
struct MoeParts {
  void* data[kMostParts] = {};  // dense rows each
  int count = 0;
  int64_t rows = 0;  // of each, where there are several

  MoeParts() = default;
  // Not explicit, as a pointer to one whole result is what most callers have.
  MoeParts(void* whole) : data{whole}, count(1) {}  // NOLINT(google-explicit-constructor)

  template <class T>
  constexpr T* row(int64_t token, int64_t columns) const {
    return count == 1 ? static_cast<T*>(data[0]) + token * columns
                      : static_cast<T*>(data[token / rows]) + token % rows * columns;
  }
  // The token that comes at a place if parts take turns.
  constexpr int64_t turn(int64_t place) const {
    return count == 1 ? place : place % count * rows + place / count;
  }
};

// out[t] = sum over j of weights[t, j] * expert(chosen[t, j])(x[t]), where
//   expert(e)(x) = (silu(gate) * up) @ w_down[e]^T,   gate, up = x @ w_gate_up[e]^T.
// All matrices are dense rows.
struct MoeExperts {
  DType dtype = DType::kUnsupported;
  int64_t tokens = 0, top_k = 0, hidden = 0, inner = 0;
  MoeMap map;
  const void* x = nullptr;          // (T, H)
  const void* weights = nullptr;    // (T, k), in the type that dtype computes in
  const void* w_gate_up = nullptr;  // (E, 2I, H): gate is the first I rows
  const void* w_down = nullptr;     // (E, H, I)
  void* gate_up = nullptr;          // (T * k, 2I), or null: not kept
  void* activations = nullptr;      // (T * k, I), at positions, at numbers where the plan streams
  void* results = nullptr;          // (T * k, H)
  MoeParts out;                     // (T, H)
  bool built_for_hopper = false;    // the library holds sm_90a code
};

// Gradients of the same; null where one is not wanted.
struct MoeExpertsBackward {
  // gate_up is an input; activations and results are workspace.
  MoeExperts forward;
  const void* grad_out = nullptr;  // (T, H)
  void* grad_gate_up = nullptr;    // (T * k, 2I), at positions
  void* grad_x = nullptr;
  void* grad_weights = nullptr;
  void* grad_w_gate_up = nullptr;
  void* grad_w_down = nullptr;
};

// The side of a square tile of a product of gathered rows. Large tiles reuse more of
// what they load; small ones waste less where experts have few assignments, and serve
// where large ones would leave SMs idle.
constexpr int grouped_tile(int64_t assignments, int64_t experts, int64_t columns,
                           const DeviceInfo& device) {
  const int64_t large = assignments / 128 * ((columns + 127) / 128);
  return assignments >= 96 * experts && large >= device.sms ? 128 : 64;
}

// The most tiles of rows that any routing has: each expert with assignments, and the group of none,
// may leave all but one row of a tile empty.
constexpr int64_t grouped_row_tiles(int64_t assignments, int64_t experts, int tile) {
  const int64_t groups = experts + 1 < assignments ? experts + 1 : assignments;
  return (assignments + (tile - 1) * groups) / tile;
}

}  // namespace cuda_ops
