// The plain description of attention and of its gradient, shared by bindings and kernels. No torch,
// no CUDA.
#pragma once

#include <algorithm>

#include "ptx/device_info.h"
#include "strided.h"

namespace cuda_ops {

constexpr int kMostHeadDim = 256;

// What all heads share: `queries` rows of q, `keys` rows of k and v, each of `dim` neighbors.
// Query i sees all keys, or those up to i where `causal`.
struct AttentionShape {
  int64_t queries = 0, keys = 0;
  int dim = 0;
  bool causal = false;
  double scale = 0;
  bool vectors = false;  // whether rows start at multiples of 16 bytes

  // How many keys the queries before `last` see.
  constexpr int64_t seen(int64_t last) const { return causal && last < keys ? last : keys; }

  // How many of `most` keys from `key` on query sees; below 0 where it ends before them.
  constexpr int seen_from(int64_t key, int64_t query, int most) const {
    const int64_t left = seen(query + 1) - key;
    return left < most ? int(left) : most;
  }
};

// Which kernel runs, how many blocks share the keys of a query, and how many keys each one takes.
struct AttentionPlan {
  bool hopper = false;
  int64_t splits = 1, keys = 0;
};

// out = softmax(q k^T scale) v for each head. Steps go from one row to the next, in elements.
// Results are dense, so the heads of `heads` are in the order in which results lie.
struct Attention {
  AttentionShape shape;
  Strided<3> heads;  // out; q, k, v
  int64_t q_step = 0, k_step = 0, v_step = 0;
  void* lse =
      nullptr;  // of each query the log of the sum of exp(q k^T scale), as it is computed in
  bool may_use_hopper = false;  // the library holds sm_90a code, and it is wanted
  AttentionPlan plan;
  // Where several blocks share the keys of a query: what each of them found, [splits, heads,
  // queries, dim] and [splits, heads, queries], as it is computed in. Workspaces.
  void *partial_out = nullptr, *partial_lse = nullptr;
};

struct AttentionGradient {
  AttentionShape shape;
  bool may_use_hopper = false;  // as in Attention
  Strided<5, 3> heads;          // grad_q, grad_k, grad_v; q, k, v, grad_out, out
  int64_t q_step = 0, k_step = 0, v_step = 0, grad_step = 0, out_step = 0;
  const void* lse = nullptr;
  void* delta = nullptr;  // workspace: of each query the sum of grad_out out, as it is computed in
};

// --- the launch configuration: a value, chosen without a GPU ------------------

constexpr int kAttentionAlignment = 128;  // of rows in shared memory, in bytes
constexpr int kAttentionShared = 96 * 1024 + kAttentionAlignment;  // every GPU from sm_80 on has it

// How a block works: each warp owns `blocks` times 16 rows of one side, and all walk over the other
// side's rows, `stream` at a time. Rows of `dim` elements lie in shared memory: one or two operands
// of the rows owned, and `stages` times two of those walked over. A block computes `columns` of the
// results.
struct AttentionTile {
  int size, dim;  // bytes of an element; 64, 128 or 256 elements a row
  int warps, blocks, stream, stages, owned, columns;

  constexpr int threads() const { return 32 * warps; }
  constexpr int rows() const { return 16 * blocks * warps; }
  constexpr int parts() const { return dim / columns; }
  // With what aligning rows takes.
  constexpr int shared_bytes() const {
    return (owned * rows() + 2 * stages * stream) * dim * size + kAttentionAlignment;
  }
};

constexpr int attention_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Sums take up to 128 registers a thread: 16 rows of so many columns.
constexpr int attention_columns(int size, int dim, int sums) {
  const int most = (size == 8 ? 512 : 1024) / 4 / sums;
  return dim < most ? dim : most;
}

// The forward owns queries. A fragment of k or v is multiplied with all 16-row blocks of a warp,
// so that two halve the reads of shared memory. For `few` queries a block is one warp with one such
// block, and an SM holds several, which wait for memory at once.
constexpr AttentionTile attention_tile(int size, int dim, bool few) {
  return {size,
          dim,
          few ? 1 : 8 / size,
          size == 2 && dim <= 128 && !few ? 2 : 1,
          128 / size,
          1,
          1,
          attention_columns(size, dim, 1)};
}

// Two blocks of 16 rows read keys and values twice, from the L2 cache; a tile of 64 or 128 rows
// would multiply rows that are not there.
constexpr bool attention_few(int64_t queries) { return queries <= 32; }

// A block of the kernels for Hopper: consuming warpgroups have 64 rows each, one more brings rows.
constexpr int kHopperConsumers = 2;
constexpr int kHopperRows = 64 * kHopperConsumers, kHopperThreads = 128 * (kHopperConsumers + 1);
constexpr int kHopperSwizzle = 1024;  // bytes at whose multiples boxes begin

// The forward owns queries; `keys()` keys and values come at a time, in two stages of each.
struct AttentionHopperTile {
  int dim;

  static constexpr int kStages = 2, kElement = 2;
  // Scores and sums lie in registers: 128 sums a thread leave room for fewer scores.
  constexpr int keys() const { return dim == 256 ? 64 : 128; }
  constexpr int query_bytes() const { return kHopperRows * dim * kElement; }
  constexpr int stage_bytes() const { return keys() * dim * kElement; }  // of keys, or of values
  constexpr int shared_bytes() const {
    return kHopperSwizzle + query_bytes() + 2 * kStages * stage_bytes() + 8 * (2 + 4 * kStages);
  }
};

// The dims of a batch that the copy engine knows, beside rows and columns.
constexpr int kAttentionLoopDims = 3;

// Whether the copy engine can walk over the heads of an input, and over its rows.
template <class Heads>
bool attention_rows_fit_hopper(const Heads& heads, const AttentionShape& shape, int input,
                               int64_t rows, int64_t step) {
  const auto fits = [](int64_t stride) { return stride >= 0 && 2 * stride < int64_t(1) << 40; };
  bool fit = rows > 0 && rows < INT32_MAX - 256 && fits(step) && (rows == 1 || step >= shape.dim);
  for (int d = 0; d < heads.dims; ++d) {
    fit = fit && heads.sizes[d] <= INT32_MAX && fits(heads.input(input).strides[d]);
  }
  return fit;
}

// Also whether weights are no smaller for a larger score, as the kernels for Hopper have it.
template <class Problem>
bool attention_fits_hopper(const Problem& p, DeviceInfo device) {
  return device.capability == 90 && p.may_use_hopper && size_of(p.heads.dtype) == 2 &&
         p.shape.vectors && p.heads.dims <= kAttentionLoopDims && p.shape.scale > 1e-30 &&
         p.shape.scale < 1e30 &&
         attention_rows_fit_hopper(p.heads, p.shape, 0, p.shape.queries, p.q_step) &&
         attention_rows_fit_hopper(p.heads, p.shape, 1, p.shape.keys, p.k_step) &&
         attention_rows_fit_hopper(p.heads, p.shape, 2, p.shape.keys, p.v_step);
}

// What a kernel of the gradient adds up. It owns rows of queries or of keys, and those of the other
// side come `stream()` at a time, two operands of each. D of 256 has too many sums for both of keys
// and of values, which then have a kernel each.
enum class AttentionSums { kOfQueries, kOfKeys, kOfValues, kOfKeysAndValues };

struct AttentionHopperGradientTile {
  int dim;
  AttentionSums sums;

  static constexpr int kElement = 2;
  constexpr bool owns_keys() const { return sums != AttentionSums::kOfQueries; }
  // The gradient of values needs weights alone, not their gradients.
  constexpr bool has_grads() const { return sums != AttentionSums::kOfValues; }
  constexpr bool has_values() const {
    return sums == AttentionSums::kOfValues || sums == AttentionSums::kOfKeysAndValues;
  }
  constexpr int stream() const {
    return (dim == 256 && has_grads()) || (dim == 128 && owns_keys()) ? 32 : 64;
  }
  constexpr int own_bytes() const { return kHopperRows * dim * kElement; }  // of one operand
  constexpr int all_own_bytes() const { return (has_grads() ? 2 : 1) * own_bytes(); }
  constexpr int operand_bytes() const { return stream() * dim * kElement; }  // of a stage
  constexpr int stages() const { return stream() == 64 ? 2 : dim == 256 ? 3 : 4; }
  constexpr int shared_bytes() const {
    return kHopperSwizzle + all_own_bytes() + 2 * stages() * operand_bytes() +
           8 * (2 + 2 * stages());
  }
};

inline bool attention_fits_hopper_gradient(const AttentionGradient& p, DeviceInfo device) {
  return attention_fits_hopper(p, device) &&
         attention_rows_fit_hopper(p.heads, p.shape, 3, p.shape.queries, p.grad_step);
}

constexpr int kMostAttentionSplits = 128;
// What a block finds is written and read again: little, beside the keys and values of so many.
constexpr int64_t kLeastAttentionKeys = 256;

// Where there are too few heads and queries to fill a GPU, as when a token is decoded, blocks share
// the keys too (Dao et al., Flash-Decoding,
// https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
inline AttentionPlan attention_plan(const Attention& p, DeviceInfo device) {
  const AttentionShape& shape = p.shape;
  const bool few = attention_few(shape.queries);
  const int dim = attention_dim(shape.dim), size = int(size_of(p.heads.dtype));
  AttentionPlan plan;
  plan.hopper = !few && attention_fits_hopper(p, device);
  plan.keys = shape.seen(shape.queries);
  const AttentionTile tile = attention_tile(size, dim, few);
  const int rows = plan.hopper ? kHopperRows : tile.rows();
  const int stream = plan.hopper ? AttentionHopperTile{dim}.keys() : tile.stream;
  const int64_t row_tiles = (shape.queries + rows - 1) / rows;
  const int64_t tiles = p.heads.numel * row_tiles * (plan.hopper ? 1 : tile.parts());
  if (tiles == 0 || plan.keys == 0) return plan;
  int64_t resident = plan.hopper ? 1 : 2;
  // Blocks of one warp wait for memory most of the time, so that as many as fit work at once.
  if (few) resident = device.shared_memory_per_block / tile.shared_bytes();
  int64_t splits = device.sms * resident / tiles;
  splits = std::min({splits, plan.keys / kLeastAttentionKeys, int64_t(kMostAttentionSplits)});
  if (splits <= 1) return plan;
  const int64_t steps = (plan.keys + stream - 1) / stream;
  const int64_t each = (steps + splits - 1) / splits * stream;
  plan.splits = (plan.keys + each - 1) / each;
  plan.keys = each;
  return plan;
}

// The gradient owns queries (`sums` 1: grad_q) or keys (2: grad_k and grad_v).
constexpr AttentionTile attention_gradient_tile(int size, int dim, int sums) {
  const int stream = 8192 / size / dim;
  AttentionTile tile{
      size, dim, 8 / size, 1, stream < 8 ? 8 : stream, 2, 2, attention_columns(size, dim, sums)};
  if (tile.shared_bytes() > kAttentionShared) tile.stages = 1;
  return tile;
}

constexpr bool attention_fits(int size) {
  for (int dim = 64; dim <= kMostHeadDim; dim *= 2) {
    if (attention_tile(size, dim, false).shared_bytes() > kAttentionShared) return false;
    for (int sums = 1; sums <= 2; ++sums) {
      if (attention_gradient_tile(size, dim, sums).shared_bytes() > kAttentionShared) return false;
    }
  }
  return true;
}
static_assert(attention_fits(2) && attention_fits(4) && attention_fits(8),
              "every GPU from sm_80 on runs every kernel");

// --- alignment ------------------------------------------------------------------

// Whether the rows of an operand, and of each head, start at multiples of 16 bytes.
template <int Inputs, int Outputs>
bool has_aligned_rows(const Strided<Inputs, Outputs>& heads, int input, int64_t step) {
  const Operand& operand = heads.input(input);
  const auto whole = [&](int64_t elements) { return elements * size_of(heads.dtype) % 16 == 0; };
  bool aligned = is_aligned(operand.data, 16) && whole(step);
  for (int d = 0; d < heads.dims; ++d) aligned = aligned && whole(operand.strides[d]);
  return aligned;
}

}  // namespace cuda_ops
