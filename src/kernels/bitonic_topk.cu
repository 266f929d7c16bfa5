// The first k of each row in order. A warp sorts each short row and writes k of its elements. For
// longer rows and k up to 64, reading is the floor, so most elements must cost no more than a
// comparison: a warp keeps the best so far in registers, puts anything better than the k-th of them
// into a queue, and sorts queue and best together when the queue is full (networks of
// sort_network.cuh). About k * ln(n / k) of n elements in random order ever get into the queue.
#include "ptx/capability.h"
#include "sort/sort_warp.cuh"
#include "sort/topk.h"

using namespace cuda_ops;

namespace {

// A key, and below it the index: all words differ, and the first of equal keys is the smallest.
template <class U>
using Word = std::conditional_t<sizeof(U) == 8, unsigned __int128, uint64_t>;
template <class U>
__device__ Word<U> word_of(U key, int64_t index) {
  return Word<U>(key) << 32 | uint32_t(index);
}

constexpr int kLoads = 8;   // loads of a lane before it looks at any
constexpr int kQueued = 4;  // loads between two updates of the best

// Sorts source(begin) ... source(end - 1): words[r] of lane l is number l * R + r. The first 16 * R
// are kept, and the first k wanted.
template <class W, int R, class Source>
__device__ void select(W (&words)[R], W* queue, int k, int64_t begin, int64_t end,
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
  for (int64_t at = begin; at < end; at += 32 * kLoads) {
    W next[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int64_t i = at + u * 32 + lane;
      next[u] = i < end ? source(i) : kNone;
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
  const int64_t end = n - begin < config.chunk ? n : begin + config.chunk;
  const int lane = threadIdx.x % 32, k = int(p.k);
  const U* data = static_cast<const U*>(p.sort.rows.data) + p.sort.rows.offset_at(row);
  W words[R];
  W* queue = queues[threadIdx.x / 32];
  if (from == nullptr) {
    select(words, queue, k, begin, end, [&](int64_t i) { return word_of(order.key(data[i]), i); });
  } else {
    select(words, queue, k, begin, end, [&](int64_t i) { return from[row * n + i]; });
  }
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
cudaError_t launch_topk(const TopkRows& p, cudaStream_t stream) {
  if (topk_sorts(p.sort.n, p.k)) {
    const SortConfig config = sort_config(p.sort.rows.numel, p.sort.n, sizeof(U), DeviceInfo{});
    return launch_warps<U>(p.sort, config, p.k, stream);
  }
  const Order<U> order = order_of<U>(p.sort.rows.dtype, p.sort.descending);
  const int64_t rows = p.sort.rows.numel;
  const DeviceInfo device = current_device();
  const Word<U>* from = nullptr;
  auto* to = static_cast<Word<U>*>(p.sort.workspace);
  Word<U>* other = nullptr;
  for (int64_t n = p.sort.n;;) {
    const TopkConfig config = topk_config(rows, n, p.k, device);
    const auto kernel = config.kept == 32 ? topk_kernel<U, 2> : topk_kernel<U, 4>;
    const int64_t blocks = (rows * config.chunks + kTopkWarps - 1) / kTopkWarps;
    const bool last = config.chunks == 1;
    kernel<<<unsigned(blocks), 32 * kTopkWarps, 0, stream>>>(p, order, config, n, from,
                                                             last ? nullptr : to);
    if (last) return cudaGetLastError();
    // The first place is the larger one, so the two take turns.
    if (other == nullptr) other = to + rows * config.chunks * p.k;
    from = to;
    to = other;
    other = const_cast<Word<U>*>(from);
    n = config.chunks * p.k;
  }
}

}  // namespace

// ----------------------------------------------------------------------------------

int64_t bitonic_topk_workspace(const TopkRows& p) {
  const SortRows& sort = p.sort;
  if (topk_sorts(sort.n, p.k)) return 0;
  const int64_t size = size_of(sort.rows.dtype);
  return topk_workspace_bytes(sort.rows.numel, sort.n, p.k, size, current_device());
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
