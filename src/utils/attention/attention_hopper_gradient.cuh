// The gradient of attention on Hopper: the kernels of attention_gradient.cuh, built as that of
// attention_hopper.cuh. A consumer starts the scores of the next rows and the gradients of their
// weights, and turns scores into weights while the tensor cores do the second.
#pragma once

#include "attention/attention_gradient.cuh"
#include "attention/attention_hopper.cuh"

namespace cuda_ops {

template <class T, int kDim, AttentionSums kSums>
__global__ void __launch_bounds__(kHopperThreads, 1)
    attention_hopper_gradient_kernel(const __grid_constant__ TensorMap map_q,
                                     const __grid_constant__ TensorMap map_k,
                                     const __grid_constant__ TensorMap map_v,
                                     const __grid_constant__ TensorMap map_grad,
                                     const __grid_constant__ AttentionMoves<4> moves,
                                     const __grid_constant__ AttentionGradient p, int64_t tiles) {
#ifdef CUDA_OPS_HOPPER_ATTENTION
  constexpr AttentionHopperGradientTile kTile{kDim, kSums};
  constexpr bool kOfKeys = kTile.owns_keys();
  constexpr bool kHasGrads = kTile.has_grads(), kHasValues = kTile.has_values();
  constexpr int kStream = kTile.stream(), kStages = kTile.stages(), kColumnBlocks = kDim / 64;
  constexpr uint32_t kOwnBox = 64 * kSwizzleBytes;
  constexpr int kStageBytes = 2 * kTile.operand_bytes();
  // q, k, v and grad_out are inputs 0 to 3: what scores are made of, and their gradients.
  constexpr int kOwnScores = kOfKeys ? 1 : 0, kOwnGrads = kOfKeys ? 2 : 3;
  constexpr int kScores = 1 - kOwnScores, kGrads = 5 - kOwnGrads;
  const TensorMap& own_scores = kOfKeys ? map_k : map_q;
  const TensorMap& own_grads = kOfKeys ? map_v : map_grad;
  const TensorMap& of_scores = kOfKeys ? map_q : map_k;
  const TensorMap& of_grads = kOfKeys ? map_grad : map_v;

  extern __shared__ uint8_t shared[];
  const uint32_t memory = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t stages = memory + kTile.all_own_bytes();
  const uint32_t barriers = stages + kStages * kStageBytes;
  AttentionRing own_rows_of_tile{memory, barriers, barriers + 8, kTile.all_own_bytes(), 1};
  AttentionRing ring{stages, barriers + 16, barriers + 16 + 8 * kStages, kStageBytes, kStages};
  const int group = uniform(int(threadIdx.x) / 128), lane = int(threadIdx.x) % 32;

  if (threadIdx.x == 0) {
    for (const TensorMap* map : {&map_q, &map_k, &map_v, &map_grad}) tma_prefetch(*map);
    own_rows_of_tile.init();
    ring.init();
    mbarrier_init_fence();
  }
  __syncthreads();

  const AttentionShape& shape = p.shape;
  const int64_t own_rows = kOfKeys ? shape.keys : shape.queries;
  const int64_t row_tiles = (own_rows + kHopperRows - 1) / kHopperRows;
  struct Place {
    int64_t first, head;  // the first row
    int64_t begin, end;   // of the other side
  };
  const auto place_of = [&](int64_t tile) {
    // The rows that see the most of the other side begin: the last queries, the first keys.
    const int64_t row_tile = tile % row_tiles;
    const int64_t first = (kOfKeys ? row_tile : row_tiles - 1 - row_tile) * kHopperRows;
    // Queries before the first key see none of these keys.
    const int64_t begin = kOfKeys && shape.causal ? first / kStream * kStream : 0;
    return Place{first, tile / row_tiles, begin,
                 kOfKeys ? shape.queries : shape.seen(first + kHopperRows)};
  };

  if (group == 0) {
    // --- producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place place = place_of(tile);
        const AttentionBoxes<4> boxes(moves, p.heads, place.head);
        const uint32_t own_full = own_rows_of_tile.full;
        own_rows_of_tile.wait_empty();
        mbarrier_arrive_and_expect(own_full, uint32_t(kTile.all_own_bytes()));
        for (int i = 0; i < kHopperConsumers; ++i) {
          const uint32_t to = memory + i * kColumnBlocks * kOwnBox;
          const int64_t row = place.first + 64 * i;
          boxes.template load_rows<kDim>(own_scores, kOwnScores, to, own_full, row, 64);
          if constexpr (kHasGrads) {
            boxes.template load_rows<kDim>(own_grads, kOwnGrads, to + kTile.own_bytes(), own_full,
                                           row, 64);
          }
        }
        own_rows_of_tile.advance();
#pragma unroll 1
        for (int64_t row = place.begin; row < place.end; row += kStream, ring.advance()) {
          ring.wait_empty();
          const uint32_t to = ring.at(), barrier = ring.full + 8 * uint32_t(ring.stage);
          mbarrier_arrive_and_expect(barrier, uint32_t(kStageBytes));
          boxes.template load_rows<kDim>(of_scores, kScores, to, barrier, row, kStream);
          boxes.template load_rows<kDim>(of_grads, kGrads, to + kTile.operand_bytes(), barrier, row,
                                         kStream);
        }
      }
    }
  } else {
    // --- consumer
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = group - 1, warp = int(threadIdx.x) % 128 / 32;
    const float scale = float(shape.scale * kLog2E);
    const uint32_t own = memory + uint32_t(consumer * kColumnBlocks) * kOwnBox;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Place place = place_of(tile);
      const int64_t first = place.first + 64 * consumer, row = first + 16 * warp + lane / 4;
      const float* lse = static_cast<const float*>(p.lse) + place.head * shape.queries;
      const float* delta = static_cast<const float*>(p.delta) + place.head * shape.queries;
      // In units of log2. Queries that are not there, or saw no key, have no weights.
      const auto lse_of = [&](int64_t query) {
        const float found = query < shape.queries ? __ldg(lse + query) : -INFINITY;
        return found == -INFINITY ? INFINITY : found * float(kLog2E);
      };
      const auto delta_of = [&](int64_t query) {
        return query < shape.queries ? __ldg(delta + query) : 0.0f;
      };
      constexpr int kNumbers = kOfKeys ? kStream / 4 : 2;  // of queries that a thread meets
      float of_lse[kNumbers], of_delta[kNumbers];
      if constexpr (!kOfKeys) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          of_lse[half] = lse_of(row + 8 * half);
          of_delta[half] = delta_of(row + 8 * half);
        }
      }
      float weights[kStream / 2], grads[kStream / 2];
      float sums[kDim / 2] = {};       // of grad_q or grad_k
      float of_values[kDim / 2] = {};  // of grad_v
      uint32_t left[kStream / 16][4], left_of_values[kStream / 16][4];

      const auto wait_for_sums = [&] {
        if constexpr (kHasGrads) {
          wgmma_fence_sums(sums);
          wgmma_fence_sums(left);
        }
        if constexpr (kHasValues) {
          wgmma_fence_sums(of_values);
          wgmma_fence_sums(left_of_values);
        }
      };

      own_rows_of_tile.wait_full();
      AttentionRing previous = ring;
#pragma unroll 1
      for (int64_t other = place.begin; other < place.end; other += kStream) {
        const int64_t column = other + lane % 4 * 2;
        if constexpr (kOfKeys) {  // loaded here, to be there when scores are
#pragma unroll
          for (int c = 0; c < kNumbers; ++c) {
            of_lse[c] = lse_of(column + c / 2 * 8 + c % 2);
            of_delta[c] = delta_of(column + c / 2 * 8 + c % 2);
          }
        }
        ring.wait_full();
        const uint32_t stage = uint32_t(uniform(int(ring.at())));
        begin_product<T, kDim, kStream>(own, stage, weights);
        wgmma_commit();
        if constexpr (kHasGrads) {
          begin_product<T, kDim, kStream>(own + kTile.own_bytes(), stage + kTile.operand_bytes(),
                                          grads);
          wgmma_commit();
        }
        wgmma_wait<kHasGrads ? 1 : 0>();  // the weights, and the sums of the stage before
        wgmma_fence_sums(weights);
        wait_for_sums();
        if (other > place.begin) previous.release();

        float total = 0;
#pragma unroll
        for (int i = 0; i < kStream / 2; ++i) {
          const int which = kOfKeys ? i / 4 * 2 + i % 2 : i / 2 % 2;
          weights[i] = Coarse::power(weights[i] * scale - of_lse[which]);
          total += weights[i];
        }
        if constexpr (kHasGrads) {
          wgmma_wait_after(total, -scale, barriers);
          wgmma_wait<0>();
          wgmma_fence_sums(grads);
        }
        const bool all_seen = kOfKeys ? !shape.causal || first + 63 <= other
                                      : shape.seen_from(other, first, kStream) == kStream;
        if (!all_seen) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int64_t mine = row + 8 * half;
            // Columns are seen from here on, or up to here.
            const int limit = !kOfKeys ? shape.seen_from(column, mine, kStream)
                              : shape.causal && mine > column ? int(mine - column)
                                                              : 0;
#pragma unroll
            for (int c = 0; c < kStream / 4; ++c) {
              const int at = c / 2 * 8 + c % 2;
              const bool is_seen = kOfKeys ? at >= limit : at < limit;
              if (!is_seen) weights[c / 2 * 4 + 2 * half + c % 2] = 0;
            }
          }
        }
        if constexpr (kHasValues) pack_left<T, kStream>(weights, left_of_values);
        if constexpr (kHasGrads) {
#pragma unroll
          for (int i = 0; i < kStream / 2; ++i) {
            const int which = kOfKeys ? i / 4 * 2 + i % 2 : i / 2 % 2;
            grads[i] = weights[i] * (grads[i] - of_delta[which]);
          }
          pack_left<T, kStream>(grads, left);
        }
        if constexpr (kHasValues) {
          add_product<T, kDim, kStream>(left_of_values, stage + kTile.operand_bytes(), of_values);
        }
        if constexpr (kHasGrads) add_product<T, kDim, kStream>(left, stage, sums);
        wgmma_commit();
        previous = ring;
        ring.advance();
      }
      own_rows_of_tile.release();
      wgmma_wait<0>();
      wait_for_sums();
      if (place.begin < place.end) previous.release();

      const auto at = p.heads.offsets_at(place.head);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (row + 8 * half >= own_rows) continue;
        const auto result = [&](int i) {
          return static_cast<T*>(p.heads.operands[i].data) + at[i] + (row + 8 * half) * shape.dim;
        };
        const float by = float(shape.scale);
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          const int to = 8 * j + lane % 4 * 2, from = 4 * j + 2 * half;
          if constexpr (kHasGrads) {
            store_neighbors(result(kOfKeys ? 1 : 0), to, shape.dim, sums[from] * by,
                            sums[from + 1] * by);
          }
          if constexpr (kHasValues) {
            store_neighbors(result(2), to, shape.dim, of_values[from], of_values[from + 1]);
          }
        }
      }
    }
  }
#endif
}

// All kernels; delta is there.
template <class T, int kDim>
cudaError_t launch_attention_hopper_gradient(const AttentionGradient& p, cudaStream_t stream) {
  const auto run = [&](auto sums) {
    constexpr AttentionHopperGradientTile kTile{kDim, sums.value};
    constexpr bool kOfKeys = kTile.owns_keys();
    constexpr int kOfKeysBox = kOfKeys ? 64 : kTile.stream();
    constexpr int kOfQueriesBox = kOfKeys ? kTile.stream() : 64;
    AttentionMoves<4> moves{};
    TensorMap q, k, v, grad;
    const auto map = [&](TensorMap& made, int input, int64_t rows, int64_t step, int box) {
      return attention_map<T>(made, moves, p, input, rows, step, box);
    };
    cudaError_t error = map(q, 0, p.shape.queries, p.q_step, kOfQueriesBox);
    if (error == cudaSuccess) error = map(k, 1, p.shape.keys, p.k_step, kOfKeysBox);
    if (error == cudaSuccess) error = map(v, 2, p.shape.keys, p.v_step, kOfKeysBox);
    if (error == cudaSuccess) error = map(grad, 3, p.shape.queries, p.grad_step, kOfQueriesBox);
    if (error != cudaSuccess) return error;
    return run_hopper_attention(
        attention_hopper_gradient_kernel<T, kDim, sums.value>, kTile.shared_bytes(), p.heads.numel,
        kOfKeys ? p.shape.keys : p.shape.queries, p.shape.causal, stream, q, k, v, grad, moves, p);
  };
  using Sums = AttentionSums;
  cudaError_t error;
  if constexpr (kDim == 256) {
    error = run(std::integral_constant<Sums, Sums::kOfKeys>{});
    if (error == cudaSuccess) error = run(std::integral_constant<Sums, Sums::kOfValues>{});
  } else {
    error = run(std::integral_constant<Sums, Sums::kOfKeysAndValues>{});
  }
  return error == cudaSuccess ? run(std::integral_constant<Sums, Sums::kOfQueries>{}) : error;
}

}  // namespace cuda_ops
