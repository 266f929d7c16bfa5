// Attention on Hopper: TMA copies, wgmma multiplies, and each warp does one of the two, as in
// FlashAttention-3 (Shah et al., https://arxiv.org/abs/2407.08608).
//
//   warpgroup 0   producer: one thread brings queries, and keys and values in a ring of two stages
//   warpgroup 1   consumer: queries  0 to  63 of the tile
//   warpgroup 2   consumer: queries 64 to 127
//
// A consumer starts the scores of the next keys, and the product of the last weights with their
// values; while the tensor cores do the second, it turns the scores into weights. Weights never
// leave registers: scores lie there as the left factor of a product does.
#pragma once

#include "attention/attention.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace cuda_ops {

// wgmma exists in code for sm_90a alone; other code gets an empty kernel, which is never chosen.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CUDA_OPS_HOPPER_ATTENTION 1
#endif

// --- inputs as the copy engine sees them ----------------------------------------

// Which coordinates move with those of a head: for each input, and each loop dim, 1, or 0 where the
// input is broadcast.
template <int kInputs>
struct AttentionMoves {
  int of[kInputs][kAttentionLoopDims];
};

// The coordinates of a head, whose input is then brought in boxes of 128 bytes of some rows.
template <int kInputs>
struct AttentionBoxes {
  const AttentionMoves<kInputs>& moves;
  int index[kAttentionLoopDims] = {};

  template <class Heads>
  __device__ AttentionBoxes(const AttentionMoves<kInputs>& inputs, const Heads& heads, int64_t head)
      : moves(inputs) {
#pragma unroll
    for (int d = 0; d < kAttentionLoopDims; ++d) {
      if (d >= heads.dims) continue;
      index[d] = int(head % heads.sizes[d]);
      head /= heads.sizes[d];
    }
  }
  __device__ void load(const TensorMap& map, int input, uint32_t to, uint32_t barrier, int column,
                       int64_t row) const {
    const int z[3] = {index[0] * moves.of[input][0], index[1] * moves.of[input][1],
                      index[2] * moves.of[input][2]};
    tma_load(map, to, barrier, column, int(row), z);
  }
  // As many rows as a box has, one block of 64 columns behind the other.
  template <int kDim>
  __device__ void load_rows(const TensorMap& map, int input, uint32_t to, uint32_t barrier,
                            int64_t row, int rows) const {
#pragma unroll
    for (int block = 0; block < kDim / 64; ++block) {
      load(map, input, to + uint32_t(block * rows * kSwizzleBytes), barrier, 64 * block, row);
    }
  }
};

// Describes an input, of which a box has `box` rows.
template <class T, int kInputs, class Problem>
cudaError_t attention_map(TensorMap& map, AttentionMoves<kInputs>& moves, const Problem& p,
                          int input, int64_t rows, int64_t step, int box) {
  constexpr auto kType =
      std::is_same_v<T, Half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const Operand& operand = p.heads.input(input);
  const int64_t row = (rows == 1 ? (p.shape.dim + 7) / 8 * 8 : step) * int64_t(sizeof(T));
  int64_t sizes[5] = {p.shape.dim, rows, 1, 1, 1}, strides[4] = {row, row, row, row};
  for (int d = 0; d < p.heads.dims; ++d) {
    if (operand.strides[d] == 0) continue;
    moves.of[input][d] = 1;
    sizes[d + 2] = p.heads.sizes[d];
    strides[d + 1] = operand.strides[d] * int64_t(sizeof(T));
  }
  return tensor_map<5>(map, kType, sizeof(T), operand.data, sizes, strides, box);
}

// --- stages ---------------------------------------------------------------------

// Stages in shared memory, and which of them a warp is at.
struct AttentionRing {
  uint32_t memory, full, empty;  // the first stage; barriers of stages
  int bytes, stages;             // bytes of a stage
  int stage = 0;
  uint32_t phase = 0;

  // One thread calls it, before a fence.
  __device__ void init() const {
    for (int s = 0; s < stages; ++s) {
      mbarrier_init(full + 8 * uint32_t(s), 1);
      mbarrier_init(empty + 8 * uint32_t(s), 4 * kHopperConsumers);  // consuming warps
    }
  }
  __device__ uint32_t at() const { return memory + uint32_t(stage * bytes); }
  __device__ void wait_full() const { mbarrier_wait(full + 8 * uint32_t(stage), phase); }
  __device__ void wait_empty() const { mbarrier_wait(empty + 8 * uint32_t(stage), phase ^ 1); }
  // Called by each consuming warp, once it has read the stage.
  __device__ void release() {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * uint32_t(stage));
    advance();
  }
  __device__ void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// --- products -------------------------------------------------------------------

// Starts result = own @ other^T: 64 rows by kRows, over all of D. Blocks of 64 columns lie behind
// each other.
template <class T, int kDim, int kRows>
__device__ __forceinline__ void begin_product(uint32_t own, uint32_t other,
                                              float (&result)[kRows / 2]) {
  wgmma_fence_sums(result);
  wgmma_fence();
#pragma unroll
  for (int block = 0; block < kDim / 64; ++block) {
    const uint64_t a = wgmma_descriptor(own + block * 64 * kSwizzleBytes, 0);
    const uint64_t b = wgmma_descriptor(other + block * kRows * kSwizzleBytes, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Wgmma<T, kRows, false, false>::run(result, a + i * kWgmmaStep<false>,
                                         b + i * kWgmmaStep<false>, block > 0 || i > 0);
    }
  }
  wgmma_fence_sums(result);
}

// Starts sums += left @ rows: 64 by kRows, and kRows by D.
template <class T, int kDim, int kRows>
__device__ __forceinline__ void add_product(uint32_t (&left)[kRows / 16][4], uint32_t rows,
                                            float (&sums)[kDim / 2]) {
  const uint64_t b = wgmma_descriptor(rows, kRows * kSwizzleBytes);
  wgmma_fence_sums(sums);
  wgmma_fence_sums(left);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    WgmmaOfRegisters<T, kDim, true>::run(sums, left[i], b + i * kWgmmaStep<true>, true);
  }
  wgmma_fence_sums(sums);
}

// The left factor of a product, of what another one left in registers.
template <class T, int kRows>
__device__ __forceinline__ void pack_left(const float (&from)[kRows / 2],
                                          uint32_t (&left)[kRows / 16][4]) {
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    left[i / 4][i % 4] = from_compute(from[2 * i], from[2 * i + 1], T{});
  }
}

// --- launch ---------------------------------------------------------------------

// Runs a kernel that owns `rows` rows of each head.
template <class Kernel, class... Arguments>
cudaError_t run_hopper_attention(Kernel kernel, int shared_bytes, int64_t heads, int64_t rows,
                                 bool causal, cudaStream_t stream, const Arguments&... arguments) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const int64_t tiles = heads * ((rows + kHopperRows - 1) / kHopperRows);
  // Tiles of a causal product differ in length: a block takes the next one when it is done with the
  // last. Others are as long, and blocks that stay load the next rows early.
  const int64_t most = causal ? INT32_MAX : current_device().sms;
  const auto grid = unsigned(tiles < most ? tiles : most);
  kernel<<<grid, unsigned(kHopperThreads), unsigned(shared_bytes), stream>>>(arguments..., tiles);
  return cudaGetLastError();
}

// --- forward --------------------------------------------------------------------

constexpr float kFarScore = 1 << 24;  // in units of log2; numbers from here on are whole

template <class T, int kDim>
__global__ void __launch_bounds__(kHopperThreads, 1)
    attention_hopper_kernel(const __grid_constant__ TensorMap map_q,
                            const __grid_constant__ TensorMap map_k,
                            const __grid_constant__ TensorMap map_v,
                            const __grid_constant__ AttentionMoves<3> moves,
                            const __grid_constant__ Attention p, int64_t tiles) {
#ifdef CUDA_OPS_HOPPER_ATTENTION
  constexpr AttentionHopperTile kTile{kDim};
  constexpr int kKeys = kTile.keys(), kStages = AttentionHopperTile::kStages;
  constexpr int kColumnBlocks = kDim / 64;  // of 128 bytes
  constexpr uint32_t kQueryBox = 64 * kSwizzleBytes;

  extern __shared__ uint8_t shared[];
  const uint32_t memory = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t barriers = memory + kTile.query_bytes() + 2 * kStages * kTile.stage_bytes();
  AttentionRing queries_of_tile{memory, barriers, barriers + 8, kTile.query_bytes(), 1};
  AttentionRing keys{memory + kTile.query_bytes(), barriers + 16, barriers + 16 + 8 * kStages,
                     kTile.stage_bytes(), kStages};
  AttentionRing values{keys.memory + kStages * kTile.stage_bytes(), keys.empty + 8 * kStages,
                       keys.empty + 16 * kStages, kTile.stage_bytes(), kStages};
  const int group = uniform(int(threadIdx.x) / 128), lane = int(threadIdx.x) % 32;

  if (threadIdx.x == 0) {
    tma_prefetch(map_q);
    tma_prefetch(map_k);
    tma_prefetch(map_v);
    queries_of_tile.init();
    keys.init();
    values.init();
    mbarrier_init_fence();
  }
  __syncthreads();

  const AttentionShape& shape = p.shape;
  const int64_t row_tiles = (shape.queries + kHopperRows - 1) / kHopperRows;
  struct Place {
    int64_t split, first, head;  // the first query
    int64_t begin, end;          // keys
  };
  const auto place_of = [&](int64_t tile) {
    const int64_t place = tile / p.plan.splits, split = tile % p.plan.splits;
    // The last queries see the most keys, so they begin.
    const int64_t first = (row_tiles - 1 - place % row_tiles) * kHopperRows;
    const int64_t begin = split * p.plan.keys, seen = shape.seen(first + kHopperRows);
    return Place{split, first, place / row_tiles, begin,
                 seen < begin + p.plan.keys ? seen : begin + p.plan.keys};
  };

  if (group == 0) {
    // --- producer
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Place place = place_of(tile);
        const AttentionBoxes<3> boxes(moves, p.heads, place.head);
        const auto fill = [&](AttentionRing& ring, const TensorMap& map, int input, int64_t key) {
          ring.wait_empty();
          const uint32_t barrier = ring.full + 8 * uint32_t(ring.stage);
          mbarrier_arrive_and_expect(barrier, uint32_t(kTile.stage_bytes()));
          boxes.template load_rows<kDim>(map, input, ring.at(), barrier, key, kKeys);
          ring.advance();
        };
        queries_of_tile.wait_empty();
        mbarrier_arrive_and_expect(queries_of_tile.full, uint32_t(kTile.query_bytes()));
        for (int i = 0; i < kHopperConsumers; ++i) {
          boxes.template load_rows<kDim>(map_q, 0, memory + i * kColumnBlocks * kQueryBox,
                                         queries_of_tile.full, place.first + 64 * i, 64);
        }
        queries_of_tile.advance();
#pragma unroll 1
        for (int64_t key = place.begin; key < place.end; key += kKeys) {
          fill(keys, map_k, 1, key);
          fill(values, map_v, 2, key);
        }
      }
    }
  } else {
    // --- consumer
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = group - 1, warp = int(threadIdx.x) % 128 / 32;
    const float scale = float(shape.scale * kLog2E);
    const uint32_t queries = memory + uint32_t(consumer * kColumnBlocks) * kQueryBox;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Place place = place_of(tile);
      const int64_t first = place.first + 64 * consumer, row = first + 16 * warp + lane / 4;
      float scores[kKeys / 2], sums[kDim / 2], most[2] = {-INFINITY, -INFINITY}, total[2] = {};
      uint32_t weights[kKeys / 16][4];
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) sums[i] = 0;

      const auto begin_scores = [&] {
        keys.wait_full();
        begin_product<T, kDim, kKeys>(queries, uint32_t(uniform(int(keys.at()))), scores);
        wgmma_commit();
      };
      const auto begin_sums = [&] {
        values.wait_full();
        add_product<T, kDim, kKeys>(weights, uint32_t(uniform(int(values.at()))), sums);
        wgmma_commit();
      };
      // Turns the scores of keys from `key` on into weights, and returns what they shrink earlier
      // ones by.
      const auto weigh = [&](int64_t key, bool hides, float (&shrunk)[2]) {
        if (hides) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int64_t seen = shape.seen(row + 8 * half + 1);
            const int64_t left = (seen < place.end ? seen : place.end) - key;
            const int count = (left < kKeys ? int(left) : kKeys) - lane % 4 * 2;
#pragma unroll
            for (int c = 0; c < kKeys / 4; ++c) {
              if (c / 2 * 8 + c % 2 >= count) scores[c / 2 * 4 + 2 * half + c % 2] = -INFINITY;
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float largest = most[half];
#pragma unroll
          for (int c = 0; c < kKeys / 4; ++c) {
            largest = fmaxf(largest, scores[c / 2 * 4 + 2 * half + c % 2]);
          }
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
          // No score is above -inf yet: there is no difference to it. A product of its own, so that
          // weights shrink by exactly 1 while the largest score stays.
          const float base = largest == -INFINITY ? 0.0f : __fmul_rn(largest, scale);
          float offset = base, shrink = __fmul_rn(most[half], scale) - base;
          // What a multiply-add keeps of the product of the largest score, and `base` has rounded
          // away, is a power of two or more: take differences before the product.
          if (fabsf(base) >= kFarScore) {
            offset = 0;
            shrink = (most[half] - largest) * scale;
#pragma unroll
            for (int c = 0; c < kKeys / 4; ++c) scores[c / 2 * 4 + 2 * half + c % 2] -= largest;
          }
          shrunk[half] = Coarse::power(shrink);
          most[half] = largest;
          float added = 0;
#pragma unroll
          for (int c = 0; c < kKeys / 4; ++c) {
            float& score = scores[c / 2 * 4 + 2 * half + c % 2];
            score = Coarse::power(score * scale - offset);
            added += score;
          }
          total[half] = total[half] * shrunk[half] + added;
        }
      };
      // Whether some query of this warpgroup does not see all keys of a stage.
      const auto hides = [&](int64_t key) {
        return place.end - key < kKeys || shape.seen_from(key, first, kKeys) < kKeys;
      };

      queries_of_tile.wait_full();
      float shrunk[2];
      if (place.begin < place.end) {
        begin_scores();
        wgmma_wait<0>();
        wgmma_fence_sums(scores);
        keys.release();
        weigh(place.begin, hides(place.begin), shrunk);
        pack_left<T, kKeys>(scores, weights);
      }
      const auto step = [&](int64_t key, bool some_hidden) {
        begin_scores();
        begin_sums();
        wgmma_wait<1>();
        wgmma_fence_sums(scores);
        keys.release();
        weigh(key, some_hidden, shrunk);
        wgmma_wait_after(total[0] + total[1], -scale, barriers);
        wgmma_wait<0>();
        wgmma_fence_sums(sums);
        wgmma_fence_sums(weights);
        values.release();
#pragma unroll
        for (int i = 0; i < kDim / 2; ++i) sums[i] *= shrunk[i / 2 % 2];
        pack_left<T, kKeys>(scores, weights);
      };
      int64_t key = place.begin + kKeys;
#pragma unroll 1
      for (; key < place.end && !hides(key); key += kKeys) step(key, false);
#pragma unroll 1
      for (; key < place.end; key += kKeys) step(key, true);
      queries_of_tile.release();
      if (place.begin < place.end) {
        begin_sums();
        wgmma_wait<0>();
        wgmma_fence_sums(sums);
        values.release();
      }

      const int64_t out = p.heads.offsets_at(place.head)[0];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float whole = lanes_total(total[half], 4);
        if (row + 8 * half >= shape.queries) continue;
        store_attended<T, kDim>(p, sums, half, place.split, place.head, out, row + 8 * half, 0,
                                most[half] * scale, whole);
      }
    }
  }
#endif
}

template <class T, int kDim>
cudaError_t launch_attention_hopper(const Attention& p, cudaStream_t stream) {
  constexpr AttentionHopperTile kTile{kDim};
  AttentionMoves<3> moves{};
  TensorMap q, k, v;
  const int keys = kTile.keys();
  cudaError_t error = attention_map<T>(q, moves, p, 0, p.shape.queries, p.q_step, 64);
  if (error == cudaSuccess) error = attention_map<T>(k, moves, p, 1, p.shape.keys, p.k_step, keys);
  if (error == cudaSuccess) error = attention_map<T>(v, moves, p, 2, p.shape.keys, p.v_step, keys);
  if (error != cudaSuccess) return error;
  return run_hopper_attention(attention_hopper_kernel<T, kDim>, kTile.shared_bytes(),
                              p.heads.numel * p.plan.splits, p.shape.queries, p.shape.causal,
                              stream, q, k, v, moves, p);
}

}  // namespace cuda_ops
