// Cross entropy of rows of logits, bound by memory: the forward reads the logits once and keeps a
// number for each row, the gradient reads them once more and writes as much.
#include "loss/cross_entropy.h"
#include "loss/row_sums.cuh"
#include "ptx/capability.h"

using namespace cuda_ops;

namespace {

constexpr int kPacks = kCrossEntropyPacks, kThreads = kCrossEntropyThreads;

template <class T>
__device__ compute_t<T> anchor_of(const T* row) {
  const compute_t<T> first = to_compute(row[0]);
  return first - first == 0 ? first : 0;  // not an infinity or NaN
}

// The logit of a label; one outside of the row is NaN, and nothing is read.
template <class T>
__device__ compute_t<T> logit_of(const CrossEntropy& p, const T* logits, int64_t label) {
  return label < 0 || label >= p.n ? compute_t<T>(NAN) : to_compute(logits[label]);
}

// Stores what the gradient needs of a row that is not ignored; returns its loss. `chosen` is the
// logit of its label, and `anchor` what `sums` has less of each number in its total.
template <class Sums, class C>
__device__ double finish_row(const CrossEntropy& p, int64_t row, C chosen, const Sums& sums,
                             C anchor) {
  const double most = double(sums.most), log_sum = log(double(sums.sum));
  p.lse[row] = most + log_sum;
  // Both less the largest logit, so that an offset of all logits costs no digits.
  double loss = log_sum - (double(chosen) - most);
  if (p.smoothing > 0) {
    const double mean = double(anchor) - most + double(sums.total) / double(p.n);
    loss = (1 - p.smoothing) * loss + p.smoothing * (log_sum - mean);
  }
  return loss;
}

template <class T>
__device__ void store_loss(const CrossEntropy& p, int64_t at, double loss) {
  static_cast<T*>(p.loss)[at] = from_compute<T>(compute_t<T>(loss));
}

// The losses of rows, added up by the threads of a block as they come.
struct Losses {
  double sums[2] = {0, 0};  // of losses, and of rows that are not ignored

  template <class T>
  __device__ void add(const CrossEntropy& p, int64_t row, bool is_ignored, double loss) {
    if (is_ignored) p.lse[row] = 0;
    if (p.is_total) {
      sums[0] += loss;
      sums[1] += is_ignored ? 0 : 1;
    } else {
      store_loss<T>(p, row, loss);
    }
  }

  // Writes the result of all rows; a mean over none is NaN.
  template <class T>
  __device__ void store(const CrossEntropy& p) {
    row_totals(sums, int(blockDim.x));
    if (threadIdx.x > 0) return;
    *p.count = int64_t(sums[1]);
    store_loss<T>(p, 0, p.is_mean ? sums[0] / sums[1] : sums[0]);
  }
};

// --- the forward ----------------------------------------------------------------

// Hands the sums of a block's losses to total_kernel.
__device__ void store_block(const CrossEntropy& p, Losses& losses) {
  if (!p.is_total) return;
  row_totals(losses.sums, int(blockDim.x));
  if (threadIdx.x > 0) return;
  p.partials[2 * int64_t(blockIdx.x)] = losses.sums[0];
  p.partials[2 * int64_t(blockIdx.x) + 1] = losses.sums[1];
}

template <class T, bool kSmooth>
__global__ void __launch_bounds__(kThreads, cross_entropy_resident(sizeof(T)))
    cross_entropy_kernel(const __grid_constant__ CrossEntropy p,
                         const __grid_constant__ CrossEntropyConfig config) {
  using C = compute_t<T>;
  const int lanes = config.lanes, rows = int(blockDim.x) / lanes;
  const int lane = int(threadIdx.x) % lanes, group = int(threadIdx.x) / lanes;
  const unsigned parts = unsigned(config.parts), part = blockIdx.x % parts;
  Losses losses;
  const int64_t step = int64_t(gridDim.x / parts) * rows;
  // Past the last row, lanes go along with those of their warp that have one, and write nothing.
  const auto row_from = [&](int64_t first) {
    return first + group < p.rows ? first + group : p.rows - 1;
  };
  int64_t first = int64_t(blockIdx.x / parts) * rows;
  // Labels come a row ahead: logits that wait for them would come a memory latency later.
  int64_t next_label = p.labels[row_from(first)];
  for (; first < p.rows; first += step) {
    const bool is_row = first + group < p.rows;
    const int64_t row = row_from(first), label = next_label;
    next_label = p.labels[row_from(first + step)];
    const bool is_ignored = label == p.ignore_index;
    const auto* logits = static_cast<const T*>(p.logits) + row * p.step;
    const int64_t begin = int64_t(part) * config.per_part;
    const int64_t rest = p.n - begin, n = rest < config.per_part ? rest : config.per_part;
    const bool is_read = is_row && !is_ignored && n > 0;
    const C anchor = kSmooth && is_read ? anchor_of(logits) : C(0);
    const bool is_whole = is_row && !is_ignored && parts == 1;
    const C chosen = is_whole ? logit_of(p, logits, label) : C(0);
    auto sums = sums_of_row<T, kSmooth>(logits + begin, is_read ? n : 0, anchor, lane, lanes);
    sums.join(lanes);
    if (lane > 0 || !is_row) continue;
    if (parts > 1) {
      double* const joined = p.partials + 3 * (row * parts + part);
      joined[0] = double(sums.most);
      joined[1] = double(sums.sum);
      joined[2] = double(sums.total);
    } else {
      const double loss = is_ignored ? 0 : finish_row(p, row, chosen, sums, anchor);
      losses.add<T>(p, row, is_ignored, loss);
    }
  }
  if (parts == 1) store_block(p, losses);
}

// --- the forward of short rows --------------------------------------------------

// A group of lanes has rows one behind the other, and goes through as many of them as it has lanes;
// then each lane finishes one: a logarithm in float64 takes as long for a lane as for a warp.
template <class T, bool kSmooth>
__global__ void __launch_bounds__(kThreads, cross_entropy_resident(sizeof(T)))
    short_rows_kernel(const __grid_constant__ CrossEntropy p,
                      const __grid_constant__ CrossEntropyConfig config) {
  const int lanes = config.lanes, lane = int(threadIdx.x) % lanes;
  const int count = int(p.n) / kPackOf<T>;
  const int64_t group = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  const int64_t begin = group * config.per_group;
  Losses losses;
  for (int64_t done = 0; done < config.per_group; done += lanes) {  // the same in all lanes
    const int64_t left = config.per_group - done, first = begin + done, row = first + lane;
    const int batch = left < lanes ? int(left) : lanes;
    const bool is_row = lane < batch && row < p.rows;
    const int64_t label = is_row ? p.labels[row] : p.ignore_index;
    const bool is_read = is_row && label != p.ignore_index;
    uint4 coming[kPacks];
    const auto load = [&](int i) {
      const bool is_next = __shfl_sync(~0u, is_read, i, lanes);
      const auto* logits = static_cast<const T*>(p.logits) + (first + i) * p.step;
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        coming[u] = pack_of_nothing<T>();
        if (!is_next || lane + u * lanes >= count) continue;
        coming[u] = load_once(reinterpret_cast<const uint4*>(logits) + lane + u * lanes);
      }
    };
    load(0);
    const auto* own = static_cast<const T*>(p.logits) + row * p.step;
    const auto chosen = is_read ? logit_of(p, own, label) : compute_t<T>(0);
    RowSums<T, kSmooth> mine;
    for (int i = 0; i < batch; ++i) {
      uint4 present[kPacks];
#pragma unroll
      for (int u = 0; u < kPacks; ++u) present[u] = coming[u];
      if (i + 1 < batch) load(i + 1);
      const auto sums = sums_of_packs<T, kSmooth>(present, count, lane, lanes);
      if (lane == i) mine = sums;
    }
    if (is_row) {
      const auto anchor = mine.above_minus_infinity(mine.most);
      losses.add<T>(p, row, !is_read, is_read ? finish_row(p, row, chosen, mine, anchor) : 0);
    }
  }
  store_block(p, losses);
}

// --- the forward, joined --------------------------------------------------------

constexpr int kFinishThreads = 1024;

// Adds up the blocks' sums, in the same order every time.
template <class T>
__global__ void __launch_bounds__(kFinishThreads)
    total_kernel(const __grid_constant__ CrossEntropy p, const int64_t blocks) {
  Losses losses;
#pragma unroll 4
  for (int64_t b = threadIdx.x; b < blocks; b += kFinishThreads) {
    losses.sums[0] += p.partials[2 * b];
    losses.sums[1] += p.partials[2 * b + 1];
  }
  losses.store<T>(p);
}

// Joins the parts of rows, which are few: one block does.
template <class T>
__global__ void __launch_bounds__(kFinishThreads)
    join_kernel(const __grid_constant__ CrossEntropy p, const int64_t parts, const int lanes) {
  const int rows = kFinishThreads / lanes;
  const int lane = int(threadIdx.x) % lanes, group = int(threadIdx.x) / lanes;
  Losses losses;
  for (int64_t first = 0; first < p.rows; first += rows) {
    const bool is_row = first + group < p.rows;
    const int64_t row = is_row ? first + group : p.rows - 1;
    RowSums<double, true> sums;
    for (int64_t part = lane; part < parts; part += lanes) {
      const double* const joined = p.partials + 3 * (row * parts + part);
      const double most = fmax(sums.most, joined[0]), base = sums.above_minus_infinity(most);
      sums.sum = sums.sum * exp(sums.most - base) + joined[1] * exp(joined[0] - base);
      sums.total += joined[2];
      sums.most = most;
    }
    sums.join(lanes);
    if (lane > 0 || !is_row) continue;
    const int64_t label = p.labels[row];
    const bool is_ignored = label == p.ignore_index;
    double loss = 0;
    if (!is_ignored) {
      const auto* logits = static_cast<const T*>(p.logits) + row * p.step;
      const auto chosen = logit_of(p, logits, label);
      loss = finish_row(p, row, chosen, sums, anchor_of(logits));
    }
    losses.add<T>(p, row, is_ignored, loss);
  }
  if (p.is_total) losses.store<T>(p);
}

// --- the gradient ---------------------------------------------------------------

// With p the softmax: grad_loss (p - smoothing / n), and at the label less 1 - smoothing.
template <class T>
struct LogitGradient {
  using C = compute_t<T>;
  // The lse in two parts, since C may be float: what is left of a logit without the first has no
  // more than its own error.
  C first, second, scale, even, at_label;

  __device__ LogitGradient(const CrossEntropyGradient& g, int64_t row, int64_t label) {
    const CrossEntropy& p = g.forward;
    const double lse = p.lse[row];
    first = C(lse);
    second = first - first == 0 ? C(lse - double(first)) : C(0);  // not for an infinity
    scale = to_compute(static_cast<const T*>(g.grad_loss)[p.is_total ? 0 : row]);
    if (p.is_mean) scale /= C(*p.count);
    if (label < 0 || label >= p.n) scale = C(NAN);
    even = C(p.smoothing / double(p.n));
    at_label = C(1 - p.smoothing);
  }

  __device__ C operator()(C logit, bool is_label) const {
    const C probability = MathFor<T>::exp(logit - first - second);
    return scale * (probability - even - (is_label ? at_label : C(0)));
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_gradient_kernel(const __grid_constant__ CrossEntropyGradient g, const int lanes,
                                  const unsigned chunks) {
  using C = compute_t<T>;
  constexpr int kPack = kPackOf<T>;
  const CrossEntropy& p = g.forward;
  const int rows = kThreads / lanes, lane = int(threadIdx.x) % lanes;
  const int64_t chunk = int64_t(blockIdx.x % chunks);
  const int64_t row = int64_t(blockIdx.x / chunks) * rows + int(threadIdx.x) / lanes;
  if (row >= p.rows) return;
  const int64_t label = p.labels[row];
  const bool is_ignored = label == p.ignore_index;
  const auto* logits = static_cast<const T*>(p.logits) + row * p.step;
  T* const out = static_cast<T*>(g.grad_logits) + row * g.out_step;
  const LogitGradient<T> gradient(g, row, label);
  const auto one = [&](int64_t i) {
    const C value = is_ignored ? C(0) : gradient(to_compute(logits[i]), i == label);
    out[i] = from_compute<T>(value);
  };
  const int64_t first = chunk * kPacks * lanes;  // packs
  if (reinterpret_cast<uintptr_t>(logits) % 16 != reinterpret_cast<uintptr_t>(out) % 16) {
    const int64_t behind = (first + kPacks * lanes) * kPack;
    for (int64_t i = first * kPack + lane; i < p.n && i < behind; i += lanes) one(i);
    return;
  }
  const int64_t head = elements_before_packs(logits, p.n), count = (p.n - head) / kPack;
  const auto* packs = reinterpret_cast<const uint4*>(logits + head);
  uint4 raw[kPacks];
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int64_t at = first + lane + u * lanes;
    if (at < count && !is_ignored) raw[u] = load_once(packs + at);
  }
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int64_t at = first + lane + u * lanes;
    if (at >= count) break;
    C values[kPack] = {};
    if (!is_ignored) {
      unpack_vector<T>(raw[u], values);
      const int64_t from_pack = label - head - at * kPack;
      const int of_label = from_pack >= 0 && from_pack < kPack ? int(from_pack) : -1;
#pragma unroll
      for (int v = 0; v < kPack; ++v) values[v] = gradient(values[v], v == of_label);
    }
    store_pack<T, kPack>(out + head, at, values);
  }
  if (chunk > 0) return;
  for (int64_t i = lane; i < head; i += lanes) one(i);
  for (int64_t i = head + count * kPack + lane; i < p.n; i += lanes) one(i);
}

}  // namespace

int64_t softmax_cross_entropy_partials(const CrossEntropy& p) {
  return cross_entropy_partials(p, current_device());
}

cudaError_t softmax_cross_entropy_launch(const CrossEntropy& p, cudaStream_t stream) {
  const CrossEntropyConfig config = cross_entropy_config(p, current_device());
  return visit_floating(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.rows > 0) {
      auto* kernel =
          p.smoothing > 0 ? cross_entropy_kernel<T, true> : cross_entropy_kernel<T, false>;
      if (config.per_group > 0) {
        kernel = p.smoothing > 0 ? short_rows_kernel<T, true> : short_rows_kernel<T, false>;
      }
      kernel<<<unsigned(config.blocks), config.threads, 0, stream>>>(p, config);
      if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    }
    if (config.parts > 1) {
      int lanes = 1;
      while (lanes < 32 && lanes < config.parts) lanes *= 2;
      join_kernel<T><<<1, kFinishThreads, 0, stream>>>(p, config.parts, lanes);
    } else if (p.is_total) {
      total_kernel<T><<<1, kFinishThreads, 0, stream>>>(p, config.blocks);
    }
    return cudaGetLastError();
  });
}

cudaError_t softmax_cross_entropy_backward_launch(const CrossEntropyGradient& g,
                                                  cudaStream_t stream) {
  const CrossEntropy& p = g.forward;
  if (p.rows == 0 || p.n == 0) return cudaSuccess;
  const CrossEntropyGradientConfig config = cross_entropy_gradient_config(p);
  return visit_floating(p.dtype, [&](auto tag) {
    cross_entropy_gradient_kernel<decltype(tag)><<<unsigned(config.blocks), kThreads, 0, stream>>>(
        g, config.lanes, unsigned(config.chunks));
    return cudaGetLastError();
  });
}
