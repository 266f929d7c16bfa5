// The matrix product on Hopper: TMA copies, wgmma multiplies, and each warp does
// one of the two.
//
//   warpgroup 0   producer: one thread fills a ring of stages (registers handed over)
//   warpgroup 1   consumer: rows  0 to  63 of the tile, sums in registers
//   warpgroup 2   consumer: rows 64 to 127
//
// gemm_hopper_sums.cuh says what a stage is.
// Wide tiles (128 to 256): blocks stay and take tile after tile; the producer loads
// the next tile's stages while the consumers still write this one's result, which
// leaves through shared memory by TMA. In pairs, two blocks of a cluster have tiles below
// each other: each brings half of the tile of b, to both. Narrow tiles (16, 32, 64) stream
// the large operand, two blocks per SM. With `splits`, the blocks of a cluster share the K of
// one tile and add their sums through distributed shared memory, in the order of
// their ranks: the same bits every time, no workspace, no second launch.
#pragma once

#include "ptx/early_start.cuh"
#include "gemm/gemm_hopper_boxes.cuh"
#include "gemm/gemm_hopper_sums.cuh"
#include "gemm/tile_order.cuh"

namespace cuda_ops {

struct HopperArgs {
  void* out;
  void* second;
  int64_t out_row, out_batch;  // strides in elements; columns are next to each other
  int rows, cols;              // of the kernel's product; exchanged if `swap`
  int last_m, last_n;          // where the last tile begins
  int stage_bytes;
  int k_blocks, tiles_m, tiles_n, tiles, group, splits;  // a pair has one tile, twice as high
  int step_a, step_b;  // of the batch coordinate: 0 where an operand is broadcast
  bool swap, pair;
  bool by_tma;  // boxes of out leave by the copy engine
  bool quads;   // four neighbors of out from a multiple of four on are one vector
};

// --- kernel -------------------------------------------------------------------

// wgmma exists in code for sm_90a alone; other code gets an empty kernel, which is never chosen.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CUDA_OPS_HOPPER_CODE 1
#endif

struct TilePlace {
  int m, n, z;
};

template <int kTileN>
__device__ TilePlace tile_place(const HopperArgs& args, int rank, int tile) {
  const int matrix = args.tiles_m * args.tiles_n;
  const auto at = tile_in_bands(tile % matrix, args.tiles_m, args.tiles_n, args.group);
  const int row = args.pair ? 2 * at.row + rank : at.row;
  // The last tile begins where it ends with the matrix, and computes again, bit for bit, what the
  // one before it does: loads from beyond the matrix take longer than any others.
  const int m = row * kHopperTileM, n = at.column * kTileN;
  return {m < args.last_m ? m : args.last_m, n < args.last_n ? n : args.last_n, tile / matrix};
}

template <class T, int kTileN, bool kLineMajorA, bool kLineMajorB, class Epilogue>
__global__ void __launch_bounds__(HopperTile<T, kTileN, kLineMajorB>::kThreads,
                                  HopperTile<T, kTileN, kLineMajorB>::kNarrow ? 2 : 1)
    gemm_hopper_kernel(const __grid_constant__ TensorMap map_a,
                       const __grid_constant__ TensorMap map_b,
                       const __grid_constant__ TensorMap map_out,
                       const __grid_constant__ TensorMap map_second,
                       const __grid_constant__ HopperArgs args,
                       const __grid_constant__ Epilogue epilogue) {
#ifdef CUDA_OPS_HOPPER_CODE
  using Tile = HopperTile<T, kTileN, kLineMajorB>;
  using Out = typename HopperType<T>::Out;
  constexpr int kStages = Tile::kStages, kBlockK = Tile::kBlockK;

  extern __shared__ uint8_t shared[];
  const uint32_t memory = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t staging = memory + kStages * Tile::kStage;
  const uint32_t full = staging + Tile::kStaging, empty = full + 8 * kStages;
  HopperRing<Tile> ring{memory, full, empty, args.pair};
  const int group = uniform(int(threadIdx.x) / 128), lane = int(threadIdx.x) % 32;
  const bool swap = Tile::kNarrow && args.swap;  // wide tiles are never swapped

  // The blocks of a cluster share one tile, or a pair of them. Divisions, some 100 cycles each:
  // before the wait.
  const int first_tile = uniform(int(cluster_index())), tile_step = uniform(int(cluster_count()));
  const int rank = uniform(int(cluster_rank())), split = args.pair ? 0 : rank;
  const int k_begin = args.k_blocks * split / args.splits;
  const int k_end = args.k_blocks * (split + 1) / args.splits;
  TilePlace at = tile_place<kTileN>(args, rank, first_tile);
  const auto next_tile = [&](int& tile) {
    tile += tile_step;
    at = tile_place<kTileN>(args, rank, tile);
  };

  if (threadIdx.x == 0) {
    tma_prefetch(map_a);
    tma_prefetch(map_b);
    if (args.by_tma) tma_prefetch(map_out);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full + 8 * s, 1);
      mbarrier_init(empty + 8 * s, 4 * Tile::kConsumers * (args.pair ? 2 : 1));  // consuming warps
    }
    mbarrier_init_fence();
  }
  if (args.pair) cluster_meet();  // no block uses barriers of the other before
  wait_for_previous();
  __syncthreads();
  let_next_start();

  if (group == 0) {
    // --- producer
    if constexpr (!Tile::kNarrow) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int tile = first_tile; tile < args.tiles; next_tile(tile)) {
        const int za = at.z * args.step_a, zb = at.z * args.step_b;
#pragma unroll 1  // 40 registers
        for (int kb = k_begin; kb < k_end; ++kb, ring.advance()) {
          const uint32_t a = ring.a(), b = ring.b(), arrived = full + 8 * ring.stage;
          ring.wait_empty();
          mbarrier_arrive_and_expect(arrived, uint32_t(args.stage_bytes));
#pragma unroll
          for (int part = 0; part < Tile::kParts; ++part) {
            const int k = (kb + part * args.k_blocks) * kBlockK;
            const uint32_t a_part = a + uint32_t(part * Tile::kBytesA);
            const uint32_t b_part = b + uint32_t(part * Tile::kBytesB);
            if constexpr (kLineMajorA) {
#pragma unroll
              for (int i = 0; i < 2; ++i)
                tma_load(map_a, a_part + 8192 * i, arrived, at.m + 64 * i, k, za);
            } else {
              tma_load(map_a, a_part, arrived, k, at.m, za);
            }
            const auto load_b = [&](int line, int x, int y) {
              const uint32_t to = b_part + uint32_t(line * kSwizzleBytes);
              if (args.pair) {
                tma_load_multicast(map_b, to, arrived, x, y, zb, 3);
              } else {
                tma_load(map_b, to, arrived, x, y, zb);
              }
            };
            if constexpr (kLineMajorB) {
#pragma unroll
              for (int i = 0; i < Tile::kLinesB; i += 64) {
                if (!args.pair || i / 64 % 2 == rank) load_b(i, at.n + i, k);
              }
            } else {
              const int line = args.pair ? kTileN / 2 * rank : 0;
              load_b(line, k, at.n + line);
            }
          }
        }
      }
      // The other block still arrives at this one's barriers.
      for (int s = 0; args.pair && s < kStages; ++s, ring.advance()) ring.wait_empty();
    }
  } else {
    // --- consumer
    if constexpr (!Tile::kNarrow) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int consumer = group - 1, thread = int(threadIdx.x) % 128;
    int boxes = 0;  // stores begun, for the parity of their buffers
    constexpr bool kShareColumns = !Tile::kNarrow && !std::is_empty_v<typename Epilogue::Columns>;
    static_assert(!kShareColumns || sizeof(typename Epilogue::Columns) <= Tile::kColumnBytes);
    auto* shared_columns = reinterpret_cast<typename Epilogue::Columns*>(
                               shared + (empty + 8 * kStages - shared_address(shared))) +
                           consumer * kTileN / 2;
    for (int tile = first_tile; tile < args.tiles; next_tile(tile)) {
      const bool alone = !Tile::kNarrow && args.splits == 1;
      const int row = at.m + 64 * consumer + 16 * (thread / 32) + lane / 4;
      const int col = at.n + lane % 4 * 2;
      // Each thread reads one pair of columns for all of them, early enough for the values to be
      // there with the sums.
      const int own = at.n + 2 * thread;
      typename Epilogue::Columns columns{};
      if (kShareColumns && alone && 2 * thread < kTileN && own < args.cols) {
        columns = epilogue.columns(own, own + 1 < args.cols ? 2 : 1);
      }
      float sums[kTileN / 2];
      hopper_sums<T, kTileN, kLineMajorA, kLineMajorB>(ring, k_end - k_begin, consumer, sums);

      const int64_t matrix = at.z * args.out_batch;
      const auto place_of = [&](int m, int n, int ns) {
        return Place{matrix + m * args.out_row + n, m, n, n < ns, n + 1 < ns};
      };

      if (!alone) {
        // --- sums of all splits through shared memory, in place of the ring: this block's only
        // tile is done. Lines run along the rows of out, so that stores are coalesced.
        const int local = row - at.m;
        named_barrier(1, 128 * Tile::kConsumers);
        float* partial = reinterpret_cast<float*>(shared + (memory - shared_address(shared)));
#pragma unroll
        for (int i = 0; i < kTileN / 2; i += 2) {
          const int r = local + i / 2 % 2 * 8, c = lane % 4 * 2 + i / 4 * 8;
          if (swap) {
            partial[c * Tile::kPitchRows + r] = sums[i];
            partial[(c + 1) * Tile::kPitchRows + r] = sums[i + 1];
          } else {
            auto* pair = reinterpret_cast<float2*>(partial + r * Tile::kPitchCols + c);
            *pair = make_float2(sums[i], sums[i + 1]);
          }
        }
        named_barrier(1, 128 * Tile::kConsumers);
        if (args.splits > 1) {
          // One warp's fence covers what the barrier above has ordered.
          if (threadIdx.x / 32 == 4) {
            cluster_sync();
          } else {
            cluster_meet();
          }
        }
        // Each thread has quads, four neighbors of a row of out. The code is short, since each
        // block comes by once: fetching it takes longer than running it.
        const int line_length = swap ? Tile::kTileM : kTileN;
        constexpr int kQuads = Tile::kTileM * kTileN / 4, kThreads = 128 * Tile::kConsumers;
        constexpr int kBatch = Tile::kNarrow ? 2 : 4;  // as many as registers hold, of two blocks
        const int pitch = swap ? Tile::kPitchRows : Tile::kPitchCols;
        const int stride = kThreads * args.splits;
        const int ms = swap ? args.cols : args.rows, ns = swap ? args.rows : args.cols;
#pragma unroll 1
        for (int q = split * kThreads + int(threadIdx.x) - 128; q < kQuads; q += kBatch * stride) {
          int from[kBatch];  // in floats
          Place places[kBatch];
          typename Epilogue::Inputs inputs[kBatch][2];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int quad = q + i * stride;
            // Divides by constants: a division by a value known only at run time is long.
            const int line = swap ? 4 * quad / Tile::kTileM : 4 * quad / kTileN;
            const int along = 4 * quad - line * line_length;
            from[i] = line * pitch + along;
            const int m = swap ? at.n + line : at.m + line, n = (swap ? at.m : at.n) + along;
            places[i] = quad < kQuads && m < ms ? place_of(m, n, ns) : Place{};
            load_inputs(epilogue, places[i], ns - n, inputs[i]);
          }
          // Distributed shared memory is far away: many reads in flight.
          float totals[kBatch][4] = {};
#pragma unroll 1
          for (int r = 0; r < args.splits; r += 2) {
            float parts[2][kBatch][4] = {};
#pragma unroll
            for (int i = 0; i < 2 * kBatch; ++i) {
              const int block = r + i / kBatch;
              if (!places[i % kBatch].first || block >= args.splits) continue;
              const uint32_t address = in_block(memory + 4 * uint32_t(from[i % kBatch]), block);
              float (&part)[4] = parts[i / kBatch][i % kBatch];
              asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                           : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3])
                           : "r"(address));
            }
#pragma unroll
            for (int i = 0; i < 8 * kBatch; ++i) {
              totals[i / 4 % kBatch][i % 4] += parts[i / 4 / kBatch][i / 4 % kBatch][i % 4];
            }
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (!places[i].first) continue;
            finish_quad<Out>(epilogue, totals[i], inputs[i], places[i], ns - int(places[i].n),
                             args.quads, args.out, args.second);
          }
        }
      } else if constexpr (!Tile::kNarrow) {
        // --- boxes of 64 rows by 128 bytes, swizzled, two in flight
        if constexpr (kShareColumns) {
          if (2 * thread < kTileN) shared_columns[thread] = columns;
          named_barrier(1 + consumer, 128);
        }
        constexpr int kColumns = kSwizzleBytes / int(sizeof(Out)), kPerBox = kColumns / 2;
        const auto send = [&](const TensorMap& map, void* out,
                              const OutPair<Out>(&pairs)[kPerBox / 2], int first) {
          const uint32_t buffer = staging + uint32_t(2 * consumer + boxes++ % 2) * Tile::kBox;
          fill_box<Out>(buffer, pairs, consumer);
          const int first_m = at.m + 64 * consumer, first_n = at.n + first;
          if (!args.by_tma) {
            copy_box<Out>(static_cast<Out*>(out) + matrix, args.out_row, args.rows, args.cols,
                          buffer, first_m, first_n);
          } else if (thread == 0) {
            tma_store(map, buffer, first_n, first_m, at.z);
            tma_store_commit();
          }
        };
        constexpr int kPairs = kPerBox / 2;
        OutPair<Out> pairs[kPairs], asides[kPairs];
#pragma unroll
        for (int begin = 0; begin < kTileN; begin += kColumns) {
          // Where the tile is not a whole number of boxes the last one overlaps the one before,
          // and begins with what that one ended with.
          const int first = begin + kColumns <= kTileN ? begin : kTileN - kColumns;
          const int kept = (begin - first) / 4;
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            if (i >= kept) continue;
            pairs[i] = pairs[kPairs - kept + i];
            asides[i] = asides[kPairs - kept + i];
          }
          typename Epilogue::Inputs inputs[kPairs];
          const auto columns_of = [&](int j) {
            if constexpr (kShareColumns) return shared_columns[j / 4 * 4 + lane % 4];
            return typename Epilogue::Columns{};
          };
          if (epilogue.needs_place()) {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
              if (i < kept) continue;
              const int j = first / 2 + 2 * i, m = row + j / 2 % 2 * 8;
              const Place place = place_of(m, col + j / 4 * 8, m < args.rows ? args.cols : 0);
              inputs[i] = epilogue.inputs(columns_of(j), place);
            }
          } else {
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
              if (i >= kept) inputs[i] = epilogue.inputs(columns_of(first / 2 + 2 * i));
            }
          }
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            if (i < kept) continue;
            const int j = first / 2 + 2 * i;
            float pair[2] = {sums[j], sums[j + 1]}, aside[2];
            epilogue(pair, aside, inputs[i]);
            pairs[i] = from_compute(pair[0], pair[1], Out{});
            if constexpr (Epilogue::kSecond) asides[i] = from_compute(aside[0], aside[1], Out{});
          }
          send(map_out, args.out, pairs, first);
          if constexpr (Epilogue::kSecond) send(map_second, args.second, asides, first);
        }
      }
    }
    // The copy engine still reads this block's memory.
    if (thread == 0) tma_store_wait_read<0>();
  }
  // No block leaves while another one of its cluster may read its sums. The consumers
  // of a split have passed one such barrier already.
  if (args.splits > 1) {
    if (group == 0) cluster_meet();
    cluster_meet();
  }
#endif
}

// --- launch -------------------------------------------------------------------

template <class T, int kTileN, bool kLineMajorA, bool kLineMajorB, class Epilogue>
cudaError_t hopper_launch(const Matmul& p, const HopperConfig& config, const Epilogue& epilogue,
                          void* second, cudaStream_t stream) {
  using Tile = HopperTile<T, kTileN, kLineMajorB>;
  using Type = HopperType<T>;
  using Out = typename Type::Out;
  constexpr int kElement = int(sizeof(T)), kOutElement = int(sizeof(Out));
  const auto& operands = p.batch.operands;
  const int64_t batch = p.batch.numel;
  const int64_t k_blocks = ceil_div(p.k, Tile::kBlockK);
  const auto batch_stride = [&](int i) { return p.batch.dims == 0 ? 0 : operands[i].strides[0]; };

  // (lines, K) of one operand, its parts next to each other; the batch is one matrix where
  // it is broadcast.
  const auto map_of = [&](TensorMap& map, int i, int64_t lines, int64_t line, int64_t k,
                          bool line_major, int box_lines) {
    const int64_t step = batch_stride(i), outer = line_major ? k : line;
    const int64_t ks = Tile::kParts == 1 ? p.k : Tile::kParts * k_blocks * Tile::kBlockK;
    const int64_t x = line_major ? lines : ks, y = line_major ? p.k : lines;
    // The stride of a dim of one is free in torch, and must be a multiple of 16 here.
    const int64_t row = y == 1 ? (x * kElement + 15) / 16 * 16 : outer * kElement;
    const int64_t z = step == 0 ? 1 : batch;
    // The next stage's 128 bytes come early with this one's, but not where rows start in the
    // middle of 128, or of a split of wide tiles: those were slower (docs/kernels/matmul.md).
    const bool ahead = row % kSwizzleBytes == 0 && (Tile::kNarrow || config.splits == 1);
    return tensor_map(
        map, Type::kMap, kElement, operands[i].data, x, y, z, row,
        step == 0 ? row : step * kElement, line_major ? Tile::kBlockK : box_lines,
        ahead ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  };
  TensorMap map_a, map_b, map_out, map_second;
  const int ia = config.swap ? 2 : 1, ib = 3 - ia;
  const int64_t lines_a = config.swap ? p.n : p.m, lines_b = config.swap ? p.m : p.n;
  const MatrixStrides &a = p.a, &b = p.b;
  // A box is never higher than the matrix; what is in shared memory behind it makes sums that
  // are not stored. Blocks of 64 lines side by side are loaded whole.
  const int box_a = kLineMajorA ? Tile::kTileM : hopper_box(lines_a, Tile::kTileM);
  const int box_b = kLineMajorB || config.pair ? Tile::kLinesB : hopper_box(lines_b, kTileN);
  cudaError_t error = map_of(map_a, ia, lines_a, config.swap ? b.col : a.row,
                             config.swap ? b.row : a.col, kLineMajorA, box_a);
  if (error != cudaSuccess) return error;
  error = map_of(map_b, ib, lines_b, config.swap ? a.row : b.col, config.swap ? a.col : b.row,
                 kLineMajorB, config.pair ? kTileN / 2 : box_b);
  if (error != cudaSuccess) return error;

  HopperArgs args{};
  args.out = operands[0].data;
  args.second = second;
  args.out_row = p.out.row;
  args.out_batch = batch_stride(0);
  args.rows = int(lines_a);
  args.cols = int(lines_b);
  args.last_m = hopper_last(lines_a, Tile::kTileM);
  args.last_n = hopper_last(lines_b, kTileN);
  args.stage_bytes = Tile::kParts * (box_a + box_b) * kSwizzleBytes;
  args.k_blocks = int(k_blocks);
  args.tiles_m = int(ceil_div(lines_a, Tile::kTileM * (config.pair ? 2 : 1)));
  args.tiles_n = int(ceil_div(lines_b, kTileN));
  args.tiles = int(args.tiles_m * args.tiles_n * batch);
  args.group = config.pair ? 8 : 16;
  args.splits = config.splits;
  args.step_a = batch_stride(ia) != 0;
  args.step_b = batch_stride(ib) != 0;
  args.swap = config.swap;
  args.pair = config.pair;

  const auto whole = [](const void* data) { return is_aligned(data, 16); };
  args.by_tma = !Tile::kNarrow && !config.swap && config.splits == 1 && whole(args.out) &&
                whole(second) && (p.m == 1 || p.out.row * kOutElement % 16 == 0) &&
                args.out_batch * kOutElement % 16 == 0;
  const auto of_quads = [](const void* data) { return is_aligned(data, 4 * kOutElement); };
  args.quads =
      of_quads(args.out) && of_quads(second) && p.out.row % 4 == 0 && args.out_batch % 4 == 0;
  if (args.by_tma) {
    const int64_t row = p.m == 1 ? (p.n * kOutElement + 15) / 16 * 16 : p.out.row * kOutElement;
    const int64_t z_stride = batch > 1 ? args.out_batch * kOutElement : row;
    error = tensor_map(map_out, Type::kOutMap, kOutElement, args.out, p.n, p.m, batch, row,
                       z_stride, 64);
    if (error != cudaSuccess) return error;
    if constexpr (Epilogue::kSecond) {
      error = tensor_map(map_second, Type::kOutMap, kOutElement, second, p.n, p.m, batch, row,
                         z_stride, 64);
      if (error != cudaSuccess) return error;
    }
  }

  const auto kernel = gemm_hopper_kernel<T, kTileN, kLineMajorA, kLineMajorB, Epilogue>;
  // For the current device; cheap when it is set already.
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kShared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {early_start()};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = unsigned(config.pair ? 2 : config.splits);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(unsigned(config.grid));
  launch.blockDim = dim3(Tile::kThreads);
  launch.dynamicSmemBytes = Tile::kShared;
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = config.pair || config.splits > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&launch, kernel, map_a, map_b, map_out, map_second, args, epilogue);
}

// Calls `body(integral constants of the two layouts)`.
template <bool kKMajor, class Body>
cudaError_t visit_hopper_layout(const HopperConfig& config, Body&& body) {
  if constexpr (kKMajor) {
    return body(std::false_type{}, std::false_type{});
  } else {
    if (config.line_major_a) {
      return config.line_major_b ? body(std::true_type{}, std::true_type{})
                                 : body(std::true_type{}, std::false_type{});
    }
    return config.line_major_b ? body(std::false_type{}, std::true_type{})
                               : body(std::false_type{}, std::false_type{});
  }
}

template <class T, bool kLinear, class Epilogue>
cudaError_t gemm_hopper(const Matmul& p, const HopperConfig& config, const Epilogue& epilogue,
                        void* second, cudaStream_t stream) {
  constexpr bool kKMajor = kLinear || kHopperKMajor<T>;
  return visit_hopper_layout<kKMajor>(config, [&](auto line_major_a, auto line_major_b) {
    constexpr bool kA = decltype(line_major_a)::value, kB = decltype(line_major_b)::value;
    const auto launched = [&](auto tile_n) {
      constexpr int kTileN = decltype(tile_n)::value;
      constexpr bool kSplit = HopperType<T>::kParts == 2;
      if constexpr (!hopper_tile(kTileN, kLinear, !kA && !kB) ||
                    (kSplit && kTileN != kHopperSplitTile)) {
        return cudaErrorInvalidValue;
      } else {
        return hopper_launch<T, kTileN, kA, kB>(p, config, epilogue, second, stream);
      }
    };
    switch (config.tile_n) {
      case 16: return launched(std::integral_constant<int, 16>{});
      case 32: return launched(std::integral_constant<int, 32>{});
      case 64: return launched(std::integral_constant<int, 64>{});
      case 128: return launched(std::integral_constant<int, 128>{});
      case 160: return launched(std::integral_constant<int, 160>{});
      case 192: return launched(std::integral_constant<int, 192>{});
      case 224: return launched(std::integral_constant<int, 224>{});
      case 256: return launched(std::integral_constant<int, 256>{});
      default: return cudaErrorInvalidValue;
    }
  });
}

}  // namespace cuda_ops
