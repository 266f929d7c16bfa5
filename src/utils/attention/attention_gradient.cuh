// The gradient of attention: weights anew from the lse, in two kernels. One owns queries and adds
// up grad_q, one owns keys and adds up grad_k and grad_v. Each sum has one order, so no atomics are
// needed and results have the same bits every time. attention.cuh says what lies in which thread.
#pragma once

#include "attention/attention.cuh"

namespace cuda_ops {

constexpr int kDeltaThreads = 256, kDeltaRows = 64;  // of a block

// delta, a warp a query.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    attention_delta_kernel(const __grid_constant__ AttentionGradient p, int64_t tiles) {
  using C = compute_t<T>;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int64_t queries = p.shape.queries, row_tiles = (queries + kDeltaRows - 1) / kDeltaRows;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t head = tile / row_tiles, first = tile % row_tiles * kDeltaRows;
    const auto at = p.heads.offsets_at(head);
    const T* grad = static_cast<const T*>(p.heads.operands[6].data) + at[6];
    const T* out = static_cast<const T*>(p.heads.operands[7].data) + at[7];
    for (int row = warp; row < kDeltaRows && first + row < queries; row += kDeltaThreads / 32) {
      const int64_t query = first + row;
      C sum = 0;
      for (int i = lane; i < p.shape.dim; i += 32) {
        sum += to_compute(grad[query * p.grad_step + i]) * to_compute(out[query * p.out_step + i]);
      }
      sum = lanes_total(sum, 32);
      if (lane == 0) static_cast<C*>(p.delta)[head * queries + query] = sum;
    }
  }
}

// grad_q, or with kOfKeys grad_k and grad_v. With weights P and G = P (grad_out v^T - delta) scale:
// grad_q = G k, grad_k = G^T q and grad_v = P^T grad_out. The transposes are computed as such, so
// that they lie in registers as factors do.
template <class T, int kDim, bool kOfKeys>
__global__ void __launch_bounds__(attention_gradient_tile(sizeof(T), kDim, 1 + kOfKeys).threads())
    attention_gradient_kernel(const __grid_constant__ AttentionGradient p, int64_t tiles) {
#if __CUDA_ARCH__ >= 800
  using C = compute_t<T>;
  using Rows = AttentionRows<T, kDim>;
  constexpr AttentionTile kTile = attention_gradient_tile(sizeof(T), kDim, 1 + kOfKeys);
  constexpr int kStream = kTile.stream, kColumns = kTile.columns, kStages = kTile.stages;
  constexpr int kThreads = kTile.threads(), kOwned = kTile.rows(), kParts = kTile.parts();
  constexpr int kStageBytes = kStream * Rows::kBytes;
  extern __shared__ __align__(16) uint8_t memory_of_block[];
  uint8_t* const shared = aligned_rows(memory_of_block);
  // k and v, or q and grad_out: the left factors of scores and of their gradients.
  const Rows own_scores{shared}, own_grads{shared + kOwned * Rows::kBytes};
  uint8_t* const ring = shared + 2 * kOwned * Rows::kBytes;
  const AttentionShape& shape = p.shape;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32 * 16;
  const int64_t own_rows = kOfKeys ? shape.keys : shape.queries;
  const int64_t other_rows = kOfKeys ? shape.queries : shape.keys;
  const int64_t row_tiles = (own_rows + kOwned - 1) / kOwned;
  const C scale = C(shape.scale * kLog2E);

  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    // The rows that see the most of the other side begin: the last queries, the first keys.
    const int64_t part = tile % kParts, row_tile = tile / kParts % row_tiles;
    const int64_t first = (kOfKeys ? row_tile : row_tiles - 1 - row_tile) * kOwned;
    const int64_t head = tile / kParts / row_tiles;
    const auto at = p.heads.offsets_at(head);
    const auto memory = [&](int i) {
      return static_cast<const T*>(p.heads.operands[i].data) + at[i];
    };
    const T *q = memory(3), *k = memory(4), *v = memory(5), *grad = memory(6);
    const C* lse = static_cast<const C*>(p.lse) + head * shape.queries;
    const C* delta = static_cast<const C*>(p.delta) + head * shape.queries;

    // In units of log2. Queries that are not there, or saw no key, have no weights.
    const auto lse_of = [&](int64_t query) {
      const C found = query < shape.queries ? lse[query] : C(-INFINITY);
      return found == -INFINITY ? C(INFINITY) : found * C(kLog2E);
    };
    const auto delta_of = [&](int64_t query) {
      return query < shape.queries ? delta[query] : C(0);
    };
    const auto fetch = [&](int64_t step) {
      const Rows rows{ring + step % kStages * 2 * kStageBytes}, more{rows.memory + kStageBytes};
      rows.template fetch<kStream, kThreads>(kOfKeys ? q : k, kOfKeys ? p.q_step : p.k_step,
                                             step * kStream, other_rows, shape.dim, shape.vectors);
      more.template fetch<kStream, kThreads>(kOfKeys ? grad : v, kOfKeys ? p.grad_step : p.v_step,
                                             step * kStream, other_rows, shape.dim, shape.vectors);
    };

    // Queries before the first key see none of these keys.
    const int64_t begin = kOfKeys && shape.causal ? first / kStream : 0;
    const int64_t last = kOfKeys ? shape.queries : shape.seen(first + kOwned);
    const int64_t end = (last + kStream - 1) / kStream;

    __syncthreads();  // the last tile's rows have been read
    own_scores.template fetch<kOwned, kThreads>(kOfKeys ? k : q, kOfKeys ? p.k_step : p.q_step,
                                                first, own_rows, shape.dim, shape.vectors);
    own_grads.template fetch<kOwned, kThreads>(kOfKeys ? v : grad, kOfKeys ? p.v_step : p.grad_step,
                                               first, own_rows, shape.dim, shape.vectors);
    if (begin < end) fetch(begin);
    cp_async_commit();

    C own_lse[2] = {}, own_delta[2] = {};
    if constexpr (!kOfKeys) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        own_lse[half] = lse_of(first + warp + 8 * half + lane / 4);
        own_delta[half] = delta_of(first + warp + 8 * half + lane / 4);
      }
    }
    C sums[1][kColumns / 8][4] = {};                     // of grad_q or grad_k
    C of_values[1][kOfKeys ? kColumns / 8 : 1][4] = {};  // of grad_v

    for (int64_t step = begin; step < end; ++step) {
      const Rows rows{ring + step % kStages * 2 * kStageBytes}, more{rows.memory + kStageBytes};
      cp_async_wait<0>();
      __syncthreads();  // this stage is there, and the one before has been read
      if (kStages == 2 && step + 1 < end) fetch(step + 1);
      cp_async_commit();

      // Loaded here, to be there when scores are.
      C column_lse[kOfKeys ? kStream / 4 : 1], column_delta[kOfKeys ? kStream / 4 : 1];
      const int64_t other = step * kStream + lane % 4 * 2;
      if constexpr (kOfKeys) {
#pragma unroll
        for (int c = 0; c < kStream / 4; ++c) {
          column_lse[c] = lse_of(other + c / 2 * 8 + c % 2);
          column_delta[c] = delta_of(other + c / 2 * 8 + c % 2);
        }
      }
      C weights[1][kStream / 8][4] = {}, grads[1][kStream / 8][4] = {};
      multiply_rows<T, kDim, 1, kStream>(own_scores, warp, rows, weights);
      multiply_rows<T, kDim, 1, kStream>(own_grads, warp, more, grads);
#pragma unroll
      for (int i = 0; i < kStream / 2; ++i) {
        const int c = i / 4 * 2 + i % 2, half = i / 2 % 2;
        C& weight = (&weights[0][0][0])[i];
        weight = attention_power<T>(weight * scale -
                                    (kOfKeys ? column_lse[kOfKeys ? c : 0] : own_lse[half]));
      }
      // Whether the first query sees the last key.
      const int64_t own = first + warp, stream = step * kStream;
      const bool all_seen = kOfKeys ? !shape.causal || own + 15 <= stream
                                    : shape.seen_from(stream, own, kStream) == kStream;
      if (!all_seen) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t row = own + lane / 4 + 8 * half;
          // Columns are seen from here on, or up to here.
          const int limit = !kOfKeys                      ? shape.seen_from(other, row, kStream)
                            : shape.causal && row > other ? int(row - other)
                                                          : 0;
#pragma unroll
          for (int c = 0; c < kStream / 4; ++c) {
            const int column = c / 2 * 8 + c % 2;
            const bool is_seen = kOfKeys ? column >= limit : column < limit;
            if (!is_seen) weights[0][c / 2][2 * half + c % 2] = 0;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kStream / 2; ++i) {
        const int c = i / 4 * 2 + i % 2, half = i / 2 % 2;
        C& of_score = (&grads[0][0][0])[i];
        of_score = (&weights[0][0][0])[i] *
                   (of_score - (kOfKeys ? column_delta[kOfKeys ? c : 0] : own_delta[half]));
      }
      if constexpr (kOfKeys) {
        multiply_columns<T, kDim, 1, kStream, kColumns>(weights, more, int(part) * kColumns,
                                                        of_values);
      }
      multiply_columns<T, kDim, 1, kStream, kColumns>(grads, rows, int(part) * kColumns, sums);
      if (kStages == 1 && step + 1 < end) {
        __syncthreads();  // this stage has been read
        fetch(step + 1);
        cp_async_commit();
      }
    }
    cp_async_wait<0>();

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first + warp + 8 * half + lane / 4;
      if (row >= own_rows) continue;
      const auto result = [&](int i) {
        return static_cast<T*>(p.heads.operands[i].data) + at[i] + row * shape.dim;
      };
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int column = int(part) * kColumns + 8 * j + lane % 4 * 2;
        store_neighbors(result(kOfKeys ? 1 : 0), column, shape.dim,
                        sums[0][j][2 * half] * C(shape.scale),
                        sums[0][j][2 * half + 1] * C(shape.scale));
        if constexpr (kOfKeys) {
          store_neighbors(result(2), column, shape.dim, of_values[0][j][2 * half],
                          of_values[0][j][2 * half + 1]);
        }
      }
    }
  }
#endif
}

}  // namespace cuda_ops
