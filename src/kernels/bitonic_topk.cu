// The first k of each row in order. A warp sorts each short row and writes k of its elements. For
// longer rows and k up to 64, reading is the floor, so most elements must cost no more than a
// comparison: a warp keeps the best so far in registers, puts anything better than the k-th of them
// into a queue, and sorts queue and best together when the queue is full (networks of
// sort_network.cuh). About k * ln(n / k) of n elements in random order ever get into the queue.
// For larger k a block collects the elements up to a limit that a sample tells, and sorts them
// (topk_select.cuh).
#include "ptx/capability.h"
#include "sort/sort_warp.cuh"
#include "sort/topk_select.cuh"

using namespace cuda_ops;

namespace {

constexpr int kLoads = 8;   // loads of a lane before it looks at any
constexpr int kQueued = 4;  // loads between two updates of the best
constexpr int kPieceLoads = kTopkPiece / 32, kPieces = kLoads / kPieceLoads;

// Sorts `length` words: words[r] of lane l is number l * R + r. The first 16 * R
// are kept, and the first k wanted.
template <class W, int R, class Source>
__device__ void keep_best(W (&words)[R], W* queue, int k, const TopkConfig& config, uint32_t length,
                          const Source& source) {
  constexpr int kKept = 16 * R;
  constexpr W kNone = ~W(0);
  const int lane = threadIdx.x % 32;
  int queued = 0;
  W last = kNone;  // the k-th of the best
#pragma unroll
  for (int r = 0; r < R; ++r) words[r] = kNone;
  // The best are in the lower half of the lanes; the end of the queue goes into the upper.
  const auto sort_queue = [&] {
    __syncwarp();
    const int first = queued > kKept ? queued - kKept : 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int i = first + (lane - 16) * R + r;
      if (lane >= 16) words[r] = i < queued ? queue[i] : kNone;
    }
    __syncwarp();
    queued = first;
    sort_network<R, 32>(words, nullptr);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r == (k - 1) % R) last = exchange(words[r], (k - 1) / R ^ lane);
    }
  };
  const auto pieces = uint32_t(config.pieces), step = uint32_t(config.step);
  uint32_t piece = 0;
  for (uint32_t done = 0; done < pieces; done += kPieces) {
    uint32_t begins[kPieces];
    bool whole = true;  // no piece ends behind the chunk
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      // All have been met, and would be met again.
      begins[i] = done + i < pieces ? piece * kTopkPiece : length;
      whole &= begins[i] + kTopkPiece <= length;
      piece = piece + step < pieces ? piece + step : piece + step - pieces;
    }
    const auto place = [&](int u) { return begins[u / kPieceLoads] + u % kPieceLoads * 32 + lane; };
    typename Source::Loaded loaded[kLoads];
    visit_flag(whole, [&](auto is_whole) {
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const auto* from = source.own + begins[u / kPieceLoads] + lane;  // one for all of a piece
        const bool inside = is_whole.value || place(u) < length;
        loaded[u] = inside ? from[u % kPieceLoads * 32] : typename Source::Loaded(0);
      }
    });
    W next[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) next[u] = source.word(loaded[u], place(u));
    if (!whole) {
#pragma unroll
      for (int u = 0; u < kLoads; ++u) next[u] = place(u) < length ? next[u] : kNone;
    }
#pragma unroll
    for (int first = 0; first < kLoads; first += kQueued) {
      W least = kNone;
#pragma unroll
      for (int u = first; u < first + kQueued; ++u) least = next[u] < least ? next[u] : least;
      if (!__any_sync(~0u, least < last)) continue;
#pragma unroll
      for (int u = first; u < first + kQueued; ++u) {
        const bool better = next[u] < last;
        const uint32_t all = __ballot_sync(~0u, better);
        if (better) queue[queued + __popc(all & ((1u << lane) - 1))] = next[u];
        queued += __popc(all);
      }
      while (queued >= kKept) sort_queue();
    }
  }
  if (queued > 0) sort_queue();
}

// Reads the rows, or what was kept of their chunks; writes the results, or what is kept. Each chunk
// has a warp.
template <class U, int R>
__global__ void __launch_bounds__(32 * kTopkWarps)
    topk_kernel(const __grid_constant__ TopkRows p, const Order<U> order, const TopkConfig config,
                int64_t n, const Word<U>* from, Word<U>* to) {
  using W = Word<U>;
  __shared__ W queues[kTopkWarps][16 * R + 32 * kQueued];
  const int64_t number = int64_t(blockIdx.x) * kTopkWarps + threadIdx.x / 32;
  const int64_t row = number / config.chunks;
  if (row >= p.sort.rows.numel) return;
  const int64_t begin = number % config.chunks * config.chunk;
  const auto length = uint32_t(n - begin < config.chunk ? n - begin : config.chunk);
  const int lane = threadIdx.x % 32, k = int(p.k);
  const U* data = static_cast<const U*>(p.sort.rows.data) + p.sort.rows.offset_at(row);
  W words[R];
  W* queue = queues[threadIdx.x / 32];
  with_source<U>(data, order, from, row, n, begin,
                 [&](const auto& source) { keep_best(words, queue, k, config, length, source); });
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int place = lane * R + r;
    if (place >= k) break;
    if (to != nullptr) {
      to[number * k + place] = words[r];
    } else {
      const uint32_t index = uint32_t(words[r]);
      const U value = value_of(U(words[r] >> 32), order, data, index);
      static_cast<U*>(p.sort.values)[row * k + place] = value;
      p.sort.indices[row * k + place] = index;
    }
  }
}

template <class U>
cudaError_t launch_queues(const TopkRows& p, const TopkConfig& config, int64_t n,
                          const Word<U>* from, Word<U>* to, cudaStream_t stream) {
  const auto kernel = config.kept == 32 ? topk_kernel<U, 2> : topk_kernel<U, 4>;
  const int64_t blocks = (p.sort.rows.numel * config.chunks + kTopkWarps - 1) / kTopkWarps;
  kernel<<<unsigned(blocks), 32 * kTopkWarps, 0, stream>>>(
      p, order_of<U>(p.sort.rows.dtype, p.sort.descending), config, n, from, to);
  return cudaGetLastError();
}

template <class U>
cudaError_t launch_topk(const TopkRows& p, cudaStream_t stream) {
  using W = Word<U>;
  const int64_t rows = p.sort.rows.numel;
  if (topk_sorts(p.sort.n, p.k)) {
    const SortConfig config = sort_config(rows, p.sort.n, sizeof(U), DeviceInfo{});
    return launch_warps<U>(p.sort, config, p.k, stream);
  }
  const DeviceInfo device = current_device();
  const W* from = nullptr;
  auto* to = static_cast<W*>(p.sort.workspace);
  W* other = nullptr;
  for (int64_t n = p.sort.n;;) {
    int64_t chunks = 0;
    const auto place = [&] { return chunks == 1 ? nullptr : to; };
    cudaError_t error = cudaSuccess;
    if (p.k > kMostKept) {
      const TopkSelect config = select_config(rows, n, p.k, sizeof(U), device);
      chunks = config.chunks;
      error = launch_select<U>(p, config, n, from, place(), device, stream);
    } else {
      const TopkConfig config = topk_config(rows, n, p.k, device);
      chunks = config.chunks;
      error = launch_queues<U>(p, config, n, from, place(), stream);
    }
    if (error != cudaSuccess || chunks == 1) return error;
    // The first place is the larger one, so the two take turns.
    if (other == nullptr) other = to + rows * chunks * p.k;
    from = to;
    to = other;
    other = const_cast<W*>(from);
    n = chunks * p.k;
  }
}

}  // namespace

// ----------------------------------------------------------------------------------

// Whether all of each row is better sorted by bitonic_sort.
bool bitonic_topk_sorts_all(const TopkRows& p) {
  const int64_t size = size_of(p.sort.rows.dtype), n = p.sort.n;
  if (topk_sorts(n, p.k)) return false;
  if (n > kTopkLongest) return true;
  return p.k > kMostKept && !topk_selects(p.sort.rows.numel, n, p.k, size, current_device());
}

int64_t bitonic_topk_workspace(const TopkRows& p) {
  const int64_t size = size_of(p.sort.rows.dtype), n = p.sort.n, rows = p.sort.rows.numel;
  if (topk_sorts(n, p.k)) return 0;
  return p.k > kMostKept ? select_workspace_bytes(rows, n, p.k, size, current_device())
                         : topk_workspace_bytes(rows, n, p.k, size, current_device());
}

cudaError_t bitonic_topk_launch(const TopkRows& p, cudaStream_t stream) {
  if (p.sort.rows.numel == 0 || p.k == 0) return cudaSuccess;
  switch (size_of(p.sort.rows.dtype)) {
    case 1: return launch_topk<uint8_t>(p, stream);
    case 2: return launch_topk<uint16_t>(p, stream);
    case 4: return launch_topk<uint32_t>(p, stream);
    case 8: return launch_topk<uint64_t>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}
