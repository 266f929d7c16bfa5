// Cumulative sums along a dim: bound by memory, x in and the sums out. A block keeps its part of x
// in registers while it finds out what comes before it, so each is read and written once.
#include <cstring>
#include <type_traits>

#include "ptx/capability.h"
#include "ptx/early_start.cuh"
#include "scan/look_back.cuh"
#include "scan/scan.h"

using namespace cuda_ops;

namespace {

// --- packs --------------------------------------------------------------------

// What numbers of a dtype are added up in, and what the sums are stored as. Unsigned, since sums of
// integers go round where they are too large.
template <class T> struct Summed {
  using Sum = compute_t<T>;
  using Result = T;
};
template <> struct Summed<int64_t> {
  using Sum = uint64_t;
  using Result = int64_t;
};
template <> struct Summed<int32_t> : Summed<int64_t> {};

template <class T>
using sum_t = typename Summed<T>::Sum;

template <class T>
__device__ sum_t<T> to_sum(T value) {
  if constexpr (std::is_same_v<sum_t<T>, uint64_t>) {
    return uint64_t(int64_t(value));
  } else {
    return to_compute(value);
  }
}

template <class T>
__device__ typename Summed<T>::Result from_sum(sum_t<T> sum) {
  using R = typename Summed<T>::Result;
  if constexpr (std::is_same_v<R, int64_t>) {
    return R(sum);
  } else {
    return from_compute<R>(sum);
  }
}

// The k-th of a pack, from its end where that is reversed. Chosen among values: an index that is
// not known when this is compiled would put the pack into memory.
template <class V, int kPack>
__device__ V kth(const V (&values)[kPack], int k, bool reverse) {
  const V forward = values[k], backward = values[kPack - 1 - k];
  return reverse ? backward : forward;
}

// Whole packs of 16 bytes come past the L1 cache, so before the wait for the kernel before.
template <class T, int kPack>
constexpr bool kFresh = sizeof(T) * kPack == 16;

template <class T, int kPack>
__device__ Elements<T, kPack> load_pack(const T* at) {
  Elements<T, kPack> pack;
  if constexpr (kFresh<T, kPack>) {
    const uint4 word = load_fresh(at);
    memcpy(&pack, &word, sizeof pack);
  } else {
    pack = *reinterpret_cast<const Elements<T, kPack>*>(at);
  }
  return pack;
}

// Between two uses of a pack: else the compiler keeps numbers of two bytes unpacked, in twice as
// many registers.
template <class T, int kPack>
__device__ void keep_packed(Elements<T, kPack>& pack) {
  if constexpr (sizeof(T) == 2 && sizeof pack == 16) {
    uint4 word;
    memcpy(&word, &pack, sizeof word);
    asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    memcpy(&pack, &word, sizeof word);
  }
}

template <class T, int kPack>
__device__ void store_pack(typename Summed<T>::Result* at, const sum_t<T> (&sums)[kPack],
                           bool reverse) {
  Elements<typename Summed<T>::Result, kPack> pack;
#pragma unroll
  for (int v = 0; v < kPack; ++v) {
    pack.values[v] = from_sum<T>(kth(sums, v, reverse));
  }
  if constexpr (kPack > 1) {
    uint4 word;
    memcpy(&word, &pack, sizeof word);
    // Said in PTX: the compiler takes a store for each number.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(word.x), "r"(word.y),
                 "r"(word.z), "r"(word.w)
                 : "memory");
  } else {
    *at = pack.values[0];
  }
}

// --- along rows ---------------------------------------------------------------

// Neighbors in memory that are rows of n, or a single row, in packs that begin at aligned
// addresses: the first and the last may have elements of others. Packs and elements count in the
// order of the sums, from the end where that is reversed.
template <class T, int kPack, class Index>
struct Run {
  using R = typename Summed<T>::Result;
  const T* x;
  R* out;
  Index count, packs;
  int lead;
  bool reverse;

  __device__ Run(const T* x, R* out, Index count, bool reverse)
      : x(x), out(out), count(count), reverse(reverse) {
    lead = int(reinterpret_cast<uintptr_t>(x) / sizeof(T) % kPack);
    packs = (lead + count + kPack - 1) / kPack;
  }

  // Where a pack begins in memory.
  __device__ Index begin(Index pack) const {
    return (reverse ? packs - 1 - pack : pack) * kPack - lead;
  }
  // The index of its first element.
  __device__ Index first(Index pack) const {
    return reverse ? count - kPack - begin(pack) : begin(pack);
  }

  // Whether so many packs have no elements of others. Asked for a whole warp, so that a branch for
  // each load does not keep the next one waiting.
  __device__ bool are_whole(Index pack, int many) const {
    if (pack + many > packs) return false;
    const Index one = begin(pack), other = begin(pack + many - 1);
    return (one < other ? one : other) >= 0 && (one < other ? other : one) + kPack <= count;
  }

  __device__ Elements<T, kPack> load(Index pack) const {
    const Index at = begin(pack);
    if (pack < packs && at >= 0 && at + kPack <= count) return load_pack<T, kPack>(x + at);
    Elements<T, kPack> part{};
    if constexpr (kPack > 1) {
      if (pack < packs) {
#pragma unroll
        for (int v = 0; v < kPack; ++v) {
          if (at + v >= 0 && at + v < count) part.values[v] = x[at + v];
        }
      }
    }
    return part;
  }

  __device__ void store(Index pack, const sum_t<T> (&sums)[kPack]) const {
    const Index at = begin(pack);
    if (at >= 0 && at + kPack <= count) {
      store_pack<T, kPack>(out + at, sums, reverse);
    } else {
#pragma unroll
      for (int v = 0; v < kPack; ++v) {
        if (at + v >= 0 && at + v < count) out[at + v] = from_sum<T>(kth(sums, v, reverse));
      }
    }
  }

  // The sums within a pack, from `place` of a row on. Without rows there is one that has begun
  // before.
  template <bool kRows>
  __device__ void sums_of(const Elements<T, kPack>& pack, int place, int n,
                          sum_t<T> (&sums)[kPack]) const {
    sum_t<T> sum = 0;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const auto value = to_sum(kth(pack.values, k, reverse));
      sum = kRows && place == 0 ? value : sum + value;
      sums[k] = sum;
      if constexpr (kRows) place = place + 1 == n ? 0 : place + 1;
    }
  }
};

// kParts: the block has a part of a row; else whole rows, side by side in memory. A warp has
// neighboring packs, 32 at a time.
template <class T, int kPack, bool kParts>
__global__ void __launch_bounds__(kScanThreads, 2)
    rows_kernel(const __grid_constant__ Scan p, const ScanConfig config) {
  using C = sum_t<T>;
  constexpr int kPacks = scan_row_packs(kPack);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int64_t part = kParts ? blockIdx.x / config.lines : 0;
  const int64_t row = kParts ? blockIdx.x % config.lines : blockIdx.x * config.rows;
  const int64_t left = p.outer - row;
  const int64_t rows = kParts ? 1 : left < config.rows ? left : config.rows;
  using Index = std::conditional_t<kParts, int64_t, int>;  // within a run
  const Run<T, kPack, Index> run(static_cast<const T*>(p.x) + row * p.x_outer,
                                 static_cast<typename Summed<T>::Result*>(p.out) + row * p.n,
                                 Index(rows * p.n), p.reverse);
  const Index base = Index(part * config.part) + warp * 32 * kPacks + lane;
  const int n = int(p.n);
  const auto place_of = [&](Index pack) {
    return kParts ? 1 : int(unsigned(int(run.first(pack)) + kPack * n) % unsigned(n));
  };

  const bool whole = run.are_whole(base - lane, 32 * kPacks);
  if (kParts && !(kFresh<T, kPack> && whole)) wait_for_previous();
  Elements<T, kPack> loaded[kPacks];
  if (whole) {
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      loaded[u] = load_pack<T, kPack>(run.x + run.begin(base + u * 32));
    }
  } else {
#pragma unroll
    for (int u = 0; u < kPacks; ++u) loaded[u] = run.load(base + u * 32);
  }
  if (kParts) wait_for_previous();

  // The sum of what comes before each pack in its row, as far as the warp has it: all of it, unless
  // the row has begun before the warp's first pack.
  C before[kPacks], carry = 0;
  unsigned begun_before = 0;  // a bit for each pack
  bool begun = false;         // a row begins in the warp
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int place = place_of(base + u * 32);
    C sums[kPack];
    run.template sums_of<!kParts>(loaded[u], place, n, sums);
    const unsigned beginning = kParts ? 0 : __ballot_sync(~0u, place == 0 || place + kPack > n);
    const unsigned below = beginning & ((1u << lane) - 1), here = below | (beginning & 1u << lane);
    const int first = here == 0 ? 0 : 31 - __clz(int(here));  // from which lane on sums are added
    C up_to = sums[kPack - 1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const C other = __shfl_up_sync(~0u, up_to, unsigned(step));
      if (lane - step >= first) up_to += other;
    }
    const C previous = __shfl_up_sync(~0u, up_to, 1u);
    before[u] = lane == 0 ? C(0) : previous;
    if (below == 0) {
      before[u] += carry;
      if (!begun) begun_before |= 1u << u;
    }
    const C last = __shfl_sync(~0u, up_to, 31);
    carry = beginning == 0 ? carry + last : last;
    begun = begun || beginning != 0;
  }

  constexpr int kWarps = kScanThreads / 32;
  __shared__ C carries[kWarps];
  __shared__ bool begins[kWarps];
  if (lane == 0) {
    carries[warp] = carry;
    begins[warp] = begun;
  }
  __syncthreads();
  C start = 0;  // what comes before the warp
  for (int w = 0; w < warp; ++w) start = begins[w] ? carries[w] : start + carries[w];
  if constexpr (kParts) {
    C own[1] = {0}, earlier[1];
    for (int w = 0; w < int(blockDim.x) / 32; ++w) own[0] += carries[w];
    look_back<1>(parts_of<C>(p.workspace, config), part, own, earlier);
    start = earlier[0] + start;
  }

#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const Index pack = base + u * 32;
    keep_packed(loaded[u]);
    if (pack >= run.packs) break;
    const int place = place_of(pack);
    C sums[kPack];
    run.template sums_of<!kParts>(loaded[u], place, n, sums);
    const C add = begun_before & 1u << u ? start + before[u] : before[u];
    const int ends = kParts ? kPack : place == 0 ? 0 : n - place;  // where the next row begins
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      if (k < ends) sums[k] = add + sums[k];
    }
    run.store(pack, sums);
  }
}

// --- along columns ------------------------------------------------------------

// Each thread has scan_steps() packs, one below the other. `lanes` threads side by side are a
// group, and the groups of a warp, and then the warps of a line, continue each other.
template <class T, int kPack, bool kParts>
__global__ void __launch_bounds__(kScanThreads, 2)
    columns_kernel(const __grid_constant__ Scan p, const ScanConfig config) {
  using C = sum_t<T>;
  constexpr int kSteps = scan_steps(kPack);
  constexpr int kWarps = kScanThreads / 32, kWidth = most_scan_lanes(kPack) * kPack;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const int lanes = config.lanes, group = lane / lanes, side = lane % lanes;
  const int first_warp = warp / config.warps * config.warps;  // of the line
  const int64_t part = kParts ? blockIdx.x / config.lines : 0;
  const int64_t line =
      kParts ? blockIdx.x % config.lines
             : int64_t(blockIdx.x) * (int(blockDim.x) / 32 / config.warps) + warp / config.warps;
  const int64_t packs = p.inner / kPack, lines = (packs + lanes - 1) / lanes;
  const int64_t outer = line / lines, column = line % lines * lanes + side;
  const bool is_column = outer < p.outer && column < packs;
  const int64_t first = part * config.part + ((warp - first_warp) * (32 / lanes) + group) * kSteps;
  const int64_t left = is_column && first < p.n ? p.n - first : 0;
  const int steps = left < kSteps ? int(left) : kSteps;
  const int64_t start_row = p.reverse ? p.n - 1 - first : first, down = p.reverse ? -1 : 1;
  const T* const x = static_cast<const T*>(p.x) + outer * p.x_outer + column * kPack;

  if (kParts && !kFresh<T, kPack>) wait_for_previous();
  Elements<T, kPack> loaded[kSteps];
  if (steps == kSteps) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      loaded[s] = load_pack<T, kPack>(x + (start_row + s * down) * p.x_step);
    }
  } else {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      loaded[s] = {};
      if (s < steps) loaded[s] = load_pack<T, kPack>(x + (start_row + s * down) * p.x_step);
    }
  }
  if (kParts && kFresh<T, kPack>) wait_for_previous();

  C total[kPack] = {}, before[kPack];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) total[v] += to_sum(loaded[s].values[v]);
  }
  for (int step = lanes; step < 32; step *= 2) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) {
      const C other = __shfl_up_sync(~0u, total[v], unsigned(step));
      if (lane >= step) total[v] += other;
    }
  }
  __shared__ C totals[kWarps][kWidth];
#pragma unroll
  for (int v = 0; v < kPack; ++v) {
    const C above = __shfl_up_sync(~0u, total[v], unsigned(lanes));
    before[v] = group == 0 ? C(0) : above;
    if (lane >= 32 - lanes) totals[warp][side * kPack + v] = total[v];
  }
  __syncthreads();
  C start[kPack] = {};  // what comes before the warp
  for (int w = first_warp; w < warp; ++w) {
#pragma unroll
    for (int v = 0; v < kPack; ++v) start[v] += totals[w][side * kPack + v];
  }
  if constexpr (kParts) {
    C own[kPack] = {}, earlier[kPack];
    for (int w = 0; w < int(blockDim.x) / 32; ++w) {
#pragma unroll
      for (int v = 0; v < kPack; ++v) own[v] += totals[w][side * kPack + v];
    }
    look_back<kWidth>(parts_of<C>(p.workspace, config), part, own, earlier);
#pragma unroll
    for (int v = 0; v < kPack; ++v) start[v] = earlier[v] + start[v];
  }

  auto* const out =
      static_cast<typename Summed<T>::Result*>(p.out) + outer * p.n * p.inner + column * kPack;
#pragma unroll
  for (int v = 0; v < kPack; ++v) before[v] = start[v] + before[v];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (s >= steps) break;
    keep_packed(loaded[s]);
#pragma unroll
    for (int v = 0; v < kPack; ++v) before[v] += to_sum(loaded[s].values[v]);
    store_pack<T, kPack>(out + (start_row + s * down) * p.inner, before, false);
  }
}

// --- parts --------------------------------------------------------------------

constexpr int kForgetThreads = 256;

// Before a launch nothing is known of any part or group.
__global__ void __launch_bounds__(kForgetThreads) forget_kernel(uint32_t* states, int64_t count) {
  let_next_start();
  const int64_t i = int64_t(blockIdx.x) * kForgetThreads + threadIdx.x;
  if (i < count) states[i] = kNothing;
}

template <class T, int kPack>
cudaError_t launch_scan(const Scan& p, const ScanConfig& config, cudaStream_t stream) {
  const auto blocks = unsigned(config.blocks);
  if (config.parts == 1) {
    auto* kernel = config.columns ? columns_kernel<T, kPack, false> : rows_kernel<T, kPack, false>;
    kernel<<<blocks, config.threads, 0, stream>>>(p, config);
    return cudaGetLastError();
  }
  auto* const states = static_cast<uint32_t*>(p.workspace);
  const int64_t count = ScanRoom(config, 0).states;
  const auto forgetting = unsigned(ceil_div(count, kForgetThreads));
  forget_kernel<<<forgetting, kForgetThreads, 0, stream>>>(states, count);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  auto* kernel = config.columns ? columns_kernel<T, kPack, true> : rows_kernel<T, kPack, true>;
  return launch_early(kernel, blocks, config.threads, 0, stream, p, config);
}

}  // namespace

// -----------------------------------------------------------------------------

int64_t cumulative_sum_workspace(const Scan& problem) {
  return scan_workspace(problem, current_device());
}

cudaError_t cumulative_sum_launch(const Scan& problem, cudaStream_t stream) {
  const ScanConfig config = scan_config(problem, current_device());
  return visit<DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt64,
               DType::kInt32>(problem.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kPack = int(16 / sizeof(typename Summed<T>::Result));
    return config.pack > 1 ? launch_scan<T, kPack>(problem, config, stream)
                           : launch_scan<T, 1>(problem, config, stream);
  });
}
