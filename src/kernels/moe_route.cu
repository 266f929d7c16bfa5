// Chooses the experts of each token. A group of lanes holds all scores of a token in registers,
// neighbors in each lane, as integers in the order of the scores. Each lane sorts its own; then
// top_k times the largest of the lanes' last ones is taken. Those instructions bind, not the one
// reading of the logits: few tokens have a whole warp each, which finishes soonest; among many, up
// to four share a warp, and what every lane does serves all of them.
#include "dtype.cuh"
#include "math.cuh"
#include "moe/moe.h"
#include "moe/moe_map.cuh"
#include "sort/sort_network.cuh"

using namespace cuda_ops;

namespace {

constexpr int kRouteWarps = 4;  // of a block
// Up to this many tokens each have a warp (H200, 2026-11-22: 2048 of 128 experts take as long
// either way, 1024 of 64 2.7 us, not 2.5, and 2048 of 256 4.0 us, not 4.2).
constexpr int64_t kFewTokens = 2048;
constexpr int64_t few_tokens(int64_t experts) { return experts > 64 ? kFewTokens : kFewTokens / 4; }

// Unsigned numbers in the order of the floats: NaN above all, -0 equal to 0. No key is 0, which
// stands for an expert that is taken or does not exist.
__device__ uint32_t order_key(float value) {
  if (value != value) return ~0u;
  const uint32_t bits = __float_as_uint(value == 0 ? 0.f : value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ uint64_t order_key(double value) {
  if (value != value) return ~uint64_t(0);
  const auto bits = uint64_t(__double_as_longlong(value == 0 ? 0. : value));
  return bits >> 63 ? ~bits : bits | uint64_t(1) << 63;
}
// 16 bits are enough for a type of two bytes: the upper half of the key. The lower half makes the
// first of equals the largest.
template <class T>
__device__ uint32_t order_key_first(T logit, int expert) {
  const float value = to_compute(logit);
  const uint32_t bits = value == 0 ? 0 : logit.bits;
  const uint32_t key = value != value ? 0xFFFFu : bits >> 15 ? ~bits & 0xFFFFu : bits | 0x8000u;
  return key << 16 | (0xFFFFu - uint32_t(expert));
}

// Returns the logit that a key was made of; -0 comes back as 0.
__device__ float logit_of_key(uint32_t key) {
  if (key == ~0u) return NAN;
  return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}
__device__ double logit_of_key(uint64_t key) {
  if (key == ~uint64_t(0)) return NAN;
  return __longlong_as_double(int64_t(key >> 63 ? key << 1 >> 1 : ~key));
}
template <class T>
__device__ float logit_of_key_first(uint32_t key) {
  key >>= 16;
  if (key == 0xFFFFu) return NAN;
  return to_compute(T{uint16_t(key >> 15 ? key & 0x7FFFu : ~key)});
}

// Returns the largest value of kLanes neighboring lanes.
template <int kLanes>
__device__ uint32_t lanes_largest(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kLanes == 32) {
    value = __reduce_max_sync(~0u, value);
  } else
#endif
  {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
      const uint32_t other = __shfl_xor_sync(~0u, value, unsigned(mask));
      value = other > value ? other : value;
    }
  }
  return value;
}
template <int kLanes>
__device__ uint64_t lanes_largest(uint64_t value) {
  const uint64_t high = lanes_largest<kLanes>(uint32_t(value >> 32));
  return high << 32 | lanes_largest<kLanes>(value >> 32 == high ? uint32_t(value) : 0);
}

// Returns NaN where any value is NaN.
template <int kLanes, class V>
__device__ V lanes_max(V value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    const V other = __shfl_xor_sync(~0u, value, unsigned(mask));
    value = other > value || other != other ? other : value;
  }
  return value;
}
// Bit i is the vote of the i-th of those lanes.
template <int kLanes>
__device__ uint32_t lanes_vote(bool vote) {
  const uint32_t votes = __ballot_sync(~0u, vote);
  if constexpr (kLanes == 32) return votes;
  return votes >> (threadIdx.x % 32 / kLanes * kLanes) & ((1u << kLanes % 32) - 1);
}

// How many of R neighbors are read or written at once.
template <class T, int R>
constexpr int kAtOnce = R * int(sizeof(T)) <= 16 ? R : 16 / int(sizeof(T));

// The logits of a token, R neighbors in each of kLanes lanes, and what softmax needs of them.
template <class T, class C, int R, int kLanes>
struct Token {
  const T* row;
  int first, count;  // the lane's experts
  T raw[R];
  C largest, sum;

  // `vectors`: rows are dense and aligned.
  __device__ Token(const MoeRoute& p, int64_t token, bool vectors)
      : row(static_cast<const T*>(p.logits) + token * p.token_stride),
        first(int(threadIdx.x) % kLanes * R),
        count(int(p.experts) - first) {
    if (vectors && count >= R) {
      constexpr int kCount = kAtOnce<T, R>;
#pragma unroll
      for (int r = 0; r < R; r += kCount) {
        const auto some = *reinterpret_cast<const Elements<T, kCount>*>(row + first + r);
#pragma unroll
        for (int i = 0; i < kCount; ++i) raw[r + i] = some.values[i];
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      raw[r] =
          r < count ? row[(first + r) * p.expert_stride] : from_compute<T>(compute_t<T>(-INFINITY));
    }
  }
  __device__ C logit(int r) const { return C(to_compute(raw[r])); }
  __device__ C logit_of(const MoeRoute& p, int64_t expert) const {
    return C(to_compute(row[expert * p.expert_stride]));
  }
  __device__ bool any_nan() const {
    bool own = false;
#pragma unroll
    for (int r = 0; r < R; ++r) own |= logit(r) != logit(r);
    return lanes_vote<kLanes>(own) != 0;
  }
  __device__ void prepare_softmax() {
    C own = logit(0), own_sum = 0;
#pragma unroll
    for (int r = 1; r < R; ++r) own = logit(r) > own || logit(r) != logit(r) ? logit(r) : own;
    largest = lanes_max<kLanes>(own);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r < count) own_sum += exp(logit(r) - largest);
    }
    sum = lanes_total(own_sum, kLanes);
  }
  __device__ C score(Scoring scoring, C logit) const {
    return scoring == Scoring::kSigmoid ? sigmoid<Accurate>(logit) : exp(logit - largest) / sum;
  }
};

// The order is that of the logits, which is that of the scores before they are
// rounded; with a bias that of score + bias in float64. Among equals the lower expert
// comes first.
template <class T, int R, int kLanes, bool kBias>
__global__ void __launch_bounds__(32 * kRouteWarps)
    moe_route_kernel(const MoeRoute p, const bool vectors) {
  using C = compute_t<T>;
  constexpr bool kFirst = sizeof(T) == 2 && !kBias;
  constexpr int kChosen = kLanes < int(kMostChosen) ? kLanes : int(kMostChosen);
  wait_for_previous();
  let_next_start();
  const int64_t own = (int64_t(blockIdx.x) * (32 * kRouteWarps) + threadIdx.x) / kLanes;
  const int64_t token = own < p.tokens ? own : p.tokens - 1;
  const int lane = int(threadIdx.x) % kLanes, top_k = int(p.top_k);
  Token<T, C, R, kLanes> row(p, token, vectors);
  const bool whole_softmax = p.scoring == Scoring::kSoftmax && !p.renormalize;
  if (whole_softmax) row.prepare_softmax();
  // NaN is among the chosen logits unless a bias chose others; a sigmoid depends on one logit.
  const bool poisoned = (kBias || p.scoring == Scoring::kSigmoid) && row.any_nan();

  using Wide = std::conditional_t<kBias, double, C>;
  using Key = decltype(order_key(Wide()));
  Key keys[R], sorted[R];
  if constexpr (kBias) {
    Token<T, double, R, kLanes> wide(p, token, vectors);
    if (p.scoring == Scoring::kSoftmax) wide.prepare_softmax();
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const double bias = r < row.count ? p.bias[row.first + r] : 0;
      keys[r] = order_key(wide.score(p.scoring, wide.logit(r)) + bias);
    }
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if constexpr (kFirst) {
        keys[r] = order_key_first(row.raw[r], row.first + r);
      } else {
        keys[r] = order_key(row.logit(r));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (r >= row.count) keys[r] = 0;
    sorted[r] = keys[r];
  }
  sort_registers<1, 1>(sorted);  // the largest last

  // Lane j keeps what is chosen in round j, and which lane's it was.
  Key key = 0;
  int from = 0;
  for (int j = 0; j < top_k; ++j) {
    const Key best = lanes_largest<kLanes>(sorted[R - 1]);
    bool mine = sorted[R - 1] == best;
    if constexpr (!kFirst) {
      // Lower lanes have lower experts.
      const int first = __ffs(int(lanes_vote<kLanes>(mine))) - 1;
      mine = lane == first;
      if (lane == j) from = first;
    }
    if (lane == j) key = best;
#pragma unroll
    for (int r = R - 1; r >= 0; --r) {
      if (mine) sorted[r] = r > 0 ? sorted[r > 0 ? r - 1 : 0] : 0;
    }
  }
  int expert;
  if constexpr (kFirst) {
    expert = int(0xFFFFu - (key & 0xFFFFu));
  } else {
    // Finds which of that lane's it was. Equal keys of one lane were chosen one after the other.
    const Key key_before = __shfl_up_sync(~0u, key, 1, kLanes);
    const int from_before = __shfl_up_sync(~0u, from, 1, kLanes);
    const bool again = lane > 0 && key_before == key && from_before == from;
    const uint32_t others = ~lanes_vote<kLanes>(again) & ((2u << lane) - 1);
    uint32_t alike = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      alike |= uint32_t(__shfl_sync(~0u, keys[r], from, kLanes) == key) << r;
    }
    for (int skip = lane - (31 - __clz(int(others))); skip > 0; --skip) alike &= alike - 1;
    expert = from * R + __ffs(int(alike)) - 1;
  }

  const bool mine = lane < top_k;
  C logit = C(-INFINITY);
  if (mine) {
    if constexpr (kBias) {
      logit = row.logit_of(p, expert);
    } else if constexpr (kFirst) {
      logit = logit_of_key_first<T>(key);
    } else {
      logit = logit_of_key(key);
    }
  }
  C weight = 0;
  if (p.scoring == Scoring::kSoftmax && p.renormalize) {
    // A softmax over all, divided by the sum of the chosen, is a softmax over the chosen. Without
    // a bias the first of them is the largest.
    const C largest = kBias ? lanes_max<kChosen>(logit) : __shfl_sync(~0u, logit, 0, kLanes);
    weight = mine ? exp(logit - largest) : C(0);
    weight /= lanes_total(weight, kChosen);
  } else {
    weight = mine ? row.score(p.scoring, logit) : C(0);
    // All scores may round to zero; they then stay zero.
    if (p.renormalize) weight /= lanes_total(weight, kChosen) + C(1e-20);
  }
  if (poisoned) weight = C(NAN);
  if (!mine || own >= p.tokens) return;
  const int64_t at = token * top_k + lane;
  static_cast<C*>(p.weights)[at] = weight;
  p.chosen[at] = expert;
}

// d weights / d logits. With s the scores and n their sum over the chosen,
//   softmax, renormalized   w_j (g_j - <g, w>)             of the chosen alone
//   softmax                 s_e (g_e - <g, w>)             of all, g_e = 0 unless chosen
//   sigmoid, renormalized   s_j (1 - s_j) (g_j - <g, w>) / n
//   sigmoid                 s_j (1 - s_j) g_j
template <class T, int R>
__global__ void __launch_bounds__(32 * kRouteWarps)
    moe_route_backward_kernel(const MoeRouteBackward b, const bool vectors) {
  using C = compute_t<T>;
  const MoeRoute& p = b.route;
  const int64_t token = int64_t(blockIdx.x) * kRouteWarps + threadIdx.x / 32;
  if (token >= p.tokens) return;
  const int lane = int(threadIdx.x) % 32;
  const bool mine = lane < p.top_k, sigmoids = p.scoring == Scoring::kSigmoid;
  const int64_t at = token * p.top_k + lane;
  const C grad = mine ? static_cast<const C*>(b.grad_weights)[at] : C(0);
  C weight = mine ? static_cast<const C*>(p.weights)[at] : C(0);
  const int64_t chosen = mine ? p.chosen[at] : -1;
  const bool known = chosen >= 0 && chosen < p.experts;

  Token<T, C, R, 32> row(p, token, vectors);
  const C logit = known ? row.logit_of(p, chosen) : C(-INFINITY);
  const C along = lanes_total(grad * weight, 32);
  const bool everywhere = !sigmoids && !p.renormalize;
  C own;  // what this lane's choice adds to its expert's gradient
  if (sigmoids) {
    const Sigmoid<Accurate, C> s(logit);
    const C total = p.renormalize ? lanes_total(mine ? s.value : C(0), 32) + C(1e-20) : C(1);
    // A share of the total is at most 1; a gradient divided by it may overflow.
    own = s.value / total * s.complement * (p.renormalize ? grad - along : grad);
  } else {
    own = weight * (everywhere ? grad : grad - along);
  }
  if (everywhere) row.prepare_softmax();

  C grads[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    grads[r] = everywhere ? -row.score(p.scoring, row.logit(r)) * along : C(0);
  }
  for (int j = 0; j < p.top_k; ++j) {
    const int64_t expert = __shfl_sync(~0u, (long long)(known ? chosen : -1), j);
    const C value = __shfl_sync(~0u, own, j);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row.first + r == expert) grads[r] += value;
    }
  }
  T* out = static_cast<T*>(b.grad_logits) + token * p.experts + row.first;
  constexpr int kCount = kAtOnce<T, R>;
  if (row.count >= R && p.experts % kCount == 0) {
#pragma unroll
    for (int r = 0; r < R; r += kCount) {
      Elements<T, kCount> some;
#pragma unroll
      for (int i = 0; i < kCount; ++i) some.values[i] = from_compute<T>(grads[r + i]);
      *reinterpret_cast<Elements<T, kCount>*>(out + r) = some;
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (r < row.count) out[r] = from_compute<T>(grads[r]);
  }
}

// Calls `run(std::integral_constant<int, R>)` with the number of logits that a lane of a warp
// keeps.
template <class Run>
cudaError_t visit_experts(int64_t experts, Run run) {
  if (experts <= 64) return run(std::integral_constant<int, 2>{});
  if (experts <= 128) return run(std::integral_constant<int, 4>{});
  if (experts <= 256) return run(std::integral_constant<int, 8>{});
  return run(std::integral_constant<int, 16>{});
}

// Whether a lane may read its R logits as vectors.
template <class T, int R>
bool logits_in_vectors(const MoeRoute& p) {
  constexpr int kCount = kAtOnce<T, R>;
  return p.expert_stride == 1 && p.token_stride % kCount == 0 &&
         is_aligned(p.logits, kCount * sizeof(T));
}

unsigned route_blocks(const MoeRoute& p, int lanes) {
  const int64_t tokens = 32 * kRouteWarps / lanes;
  return unsigned((p.tokens + tokens - 1) / tokens);
}

template <class T, int R, int kLanes>
cudaError_t route(const MoeRoute& p, cudaStream_t stream) {
  const auto run = [&](auto kernel) {
    return launch_early(kernel, route_blocks(p, kLanes), 32 * kRouteWarps, 0, stream, p,
                        logits_in_vectors<T, R>(p));
  };
  if constexpr (kLanes == 32) {
    if (p.bias != nullptr) return run(moe_route_kernel<T, R, kLanes, true>);
  }
  return run(moe_route_kernel<T, R, kLanes, false>);
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t moe_route_launch(const MoeRoute& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  return visit_floating(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    // A lane keeps at most one choice. float64 and a bias are rare: no code of their own.
    if constexpr (sizeof(T) <= 4) {
      const bool shared = p.top_k <= (p.experts <= 128 ? 8 : 16) && p.experts <= 256;
      if (shared && p.tokens > few_tokens(p.experts) && p.bias == nullptr) {
        if (p.experts <= 8) return route<T, 1, 8>(p, stream);
        if (p.experts <= 32) return route<T, 4, 8>(p, stream);
        if (p.experts <= 64) return route<T, 8, 8>(p, stream);
        if (p.experts <= 128) return route<T, 16, 8>(p, stream);
        return route<T, 16, 16>(p, stream);
      }
    }
    return visit_experts(p.experts, [&](auto registers) {
      return route<T, decltype(registers)::value, 32>(p, stream);
    });
  });
}

cudaError_t moe_route_backward_launch(const MoeRouteBackward& b, cudaStream_t stream) {
  if (b.route.tokens == 0) return cudaSuccess;
  return visit_floating(b.route.dtype, [&](auto tag) {
    using T = decltype(tag);
    return visit_experts(b.route.experts, [&](auto registers) {
      constexpr int R = decltype(registers)::value;
      moe_route_backward_kernel<T, R><<<route_blocks(b.route, 32), 32 * kRouteWarps, 0, stream>>>(
          b, logits_in_vectors<T, R>(b.route));
      return cudaGetLastError();
    });
  });
}

cudaError_t moe_route_map_launch(const MoeMap& p, cudaStream_t stream) {
  return moe_map(p, stream);
}
