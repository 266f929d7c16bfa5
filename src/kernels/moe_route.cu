// Which experts a token goes to, and which tokens an expert gets. A warp has all
// scores of a token in registers, E / 32 a lane, as integers in the order of the scores,
// and finds the largest one top_k times. Those rounds bind, not the one reading of the logits;
// the warp's one instruction for a maximum takes less than five shuffles.
#include "dtype.cuh"
#include "math.cuh"
#include "moe.h"
#include "moe_map.cuh"

using namespace cuda_ops;

namespace {

constexpr int kRouteWarps = 4;  // of a block

// Unsigned numbers in the order of the floats: NaN above all, -0 equal to 0. No key
// is 0, which stands for an expert that is taken or not there.
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
// Of a type of two bytes 16 bits are enough: the upper half of the key. The lower one makes
// the first of equals the largest.
template <class T>
__device__ uint32_t order_key_first(T logit, int expert) {
  const float value = to_compute(logit);
  const uint32_t bits = value == 0 ? 0 : logit.bits;
  const uint32_t key = value != value ? 0xFFFFu : bits >> 15 ? ~bits & 0xFFFFu : bits | 0x8000u;
  return key << 16 | (0xFFFFu - uint32_t(expert));
}

// The largest value of a warp.
__device__ uint32_t warp_largest(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, value);
#else
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    value = max(value, __shfl_xor_sync(~0u, value, unsigned(mask)));
  }
  return value;
#endif
}
__device__ uint64_t warp_largest(uint64_t value) {
  const uint32_t high = warp_largest(uint32_t(value >> 32));
  const uint32_t low = warp_largest(value >> 32 == high ? uint32_t(value) : 0);
  return uint64_t(high) << 32 | low;
}

// Of the first kLanes lanes, for those.
template <int kLanes = 32, class V>
__device__ V warp_sum(V value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2)
    value += __shfl_xor_sync(~0u, value, unsigned(mask));
  return value;
}
// NaN where any is.
template <int kLanes = 32, class V>
__device__ V warp_max(V value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    const V other = __shfl_xor_sync(~0u, value, unsigned(mask));
    value = other > value || other != other ? other : value;
  }
  return value;
}

// The logits of a token and what softmax needs of them.
template <class T, class C, int R>
struct Token {
  const T* row;
  T raw[R];  // of experts lane, lane + 32, ...
  C largest, sum;

  __device__ Token(const MoeRoute& p, int64_t token, int lane)
      : row(static_cast<const T*>(p.logits) + token * p.token_stride) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int expert = r * 32 + lane;
      raw[r] = expert < p.experts ? row[expert * p.expert_stride]
                                  : from_compute<T>(compute_t<T>(-INFINITY));
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
    return __any_sync(~0u, own);
  }
  __device__ void prepare_softmax(const MoeRoute& p, int lane) {
    C own = logit(0), own_sum = 0;
#pragma unroll
    for (int r = 1; r < R; ++r) own = logit(r) > own || logit(r) != logit(r) ? logit(r) : own;
    largest = warp_max(own);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r * 32 + lane < p.experts) own_sum += exp(logit(r) - largest);
    }
    sum = warp_sum(own_sum);
  }
  __device__ C score(const MoeRoute& p, C logit) const {
    return p.scoring == Scoring::kSigmoid ? sigmoid<Accurate>(logit) : exp(logit - largest) / sum;
  }
};

// The expert with the largest key, the lowest of equals, whose key becomes 0.
template <bool kFirst, class U, int R>
__device__ int take_best(U (&keys)[R], int lane) {
  U own = keys[0];
#pragma unroll
  for (int r = 1; r < R; ++r) own = keys[r] > own ? keys[r] : own;
  const U best = warp_largest(own);
  if constexpr (kFirst) {
#pragma unroll
    for (int r = 0; r < R; ++r) keys[r] = keys[r] == best ? 0 : keys[r];
    return int(0xFFFFu - (best & 0xFFFFu));
  } else {
    uint32_t before = 0;  // how many experts the lane's first one of them is before the end
#pragma unroll
    for (int r = R - 1; r >= 0; --r) before = keys[r] == best ? 32 * R - (r * 32 + lane) : before;
    const int expert = 32 * R - int(warp_largest(before));
#pragma unroll
    for (int r = 0; r < R; ++r) keys[r] = r * 32 + lane == expert ? 0 : keys[r];
    return expert;
  }
}

// The order is that of the logits, which is that of the scores before they are
// rounded; with a bias that of score + bias in float64. Of equals the lower expert
// comes first.
template <class T, int R, bool kBias>
__global__ void __launch_bounds__(32 * kRouteWarps) moe_route_kernel(const MoeRoute p) {
  using C = compute_t<T>;
  constexpr bool kFirst = sizeof(T) == 2 && !kBias;
  constexpr int kChosen = int(kMostChosen);
  wait_for_previous();
  let_next_start();
  const int64_t token = int64_t(blockIdx.x) * kRouteWarps + threadIdx.x / 32;
  if (token >= p.tokens) return;
  const int lane = int(threadIdx.x) % 32;
  Token<T, C, R> row(p, token, lane);
  const bool whole_softmax = p.scoring == Scoring::kSoftmax && !p.renormalize;
  if (whole_softmax) row.prepare_softmax(p, lane);
  // A softmax of what is chosen has the NaN unless a bias chose others; a sigmoid is of one logit.
  const bool poisoned = (kBias || p.scoring == Scoring::kSigmoid) && row.any_nan();

  using Key = std::conditional_t<kBias, double, C>;
  decltype(order_key(Key())) keys[R];
  if constexpr (kBias) {
    Token<T, double, R> wide(p, token, lane);
    if (p.scoring == Scoring::kSoftmax) wide.prepare_softmax(p, lane);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int expert = r * 32 + lane;
      const double bias = expert < p.experts ? p.bias[expert] : 0;
      keys[r] = expert < p.experts ? order_key(wide.score(p, wide.logit(r)) + bias) : 0;
    }
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int expert = r * 32 + lane;
      if constexpr (kFirst) {
        keys[r] = expert < p.experts ? order_key_first(row.raw[r], expert) : 0;
      } else {
        keys[r] = expert < p.experts ? order_key(row.logit(r)) : 0;
      }
    }
  }

  // Lane j keeps what is chosen in round j.
  int expert = 0;
  for (int j = 0; j < p.top_k; ++j) {
    const int best = take_best<kFirst>(keys, lane);
    if (lane == j) expert = best;
  }

  const bool mine = lane < p.top_k;
  const C logit = mine ? row.logit_of(p, expert) : C(-INFINITY);
  C weight = 0;
  if (p.scoring == Scoring::kSoftmax && p.renormalize) {
    // Softmax of all, divided by the sum of the chosen: softmax of the chosen. Without a
    // bias the first of them is the largest.
    const C largest = kBias ? warp_max<kChosen>(logit) : __shfl_sync(~0u, logit, 0);
    weight = mine ? exp(logit - largest) : C(0);
    weight /= warp_sum<kChosen>(weight);
  } else {
    weight = mine ? row.score(p, logit) : C(0);
    // All scores may round to zero, which then is what they stay.
    if (p.renormalize) weight /= warp_sum<kChosen>(weight) + C(1e-20);
  }
  if (poisoned) weight = C(NAN);
  if (!mine) return;
  static_cast<C*>(p.weights)[token * p.top_k + lane] = weight;
  p.chosen[token * p.top_k + lane] = expert;
}

// d weights / d logits. With s the scores and n their sum over the chosen,
//   softmax, renormalized   w_j (g_j - <g, w>)             of the chosen alone
//   softmax                 s_e (g_e - <g, w>)             of all, g_e = 0 unless chosen
//   sigmoid, renormalized   s_j (1 - s_j) (g_j - <g, w>) / n
//   sigmoid                 s_j (1 - s_j) g_j
template <class T, int R>
__global__ void __launch_bounds__(32 * kRouteWarps)
    moe_route_backward_kernel(const MoeRouteBackward b) {
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

  Token<T, C, R> row(p, token, lane);
  const C logit = known ? row.logit_of(p, chosen) : C(-INFINITY);
  const C along = warp_sum(grad * weight);
  const bool everywhere = !sigmoids && !p.renormalize;
  C own;  // what the choice that this lane has adds to its expert's
  if (sigmoids) {
    const Sigmoid<Accurate, C> s(logit);
    const C total = p.renormalize ? warp_sum(mine ? s.value : C(0)) + C(1e-20) : C(1);
    own = s.value * s.complement * (p.renormalize ? (grad - along) / total : grad);
  } else {
    own = weight * (everywhere ? grad : grad - along);
  }
  if (everywhere) row.prepare_softmax(p, lane);

  C grads[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    grads[r] = everywhere ? -row.score(p, row.logit(r)) * along : C(0);
  }
  for (int j = 0; j < p.top_k; ++j) {
    const int64_t expert = __shfl_sync(~0u, (long long)(known ? chosen : -1), j);
    const C value = __shfl_sync(~0u, own, j);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r * 32 + lane == expert) grads[r] += value;
    }
  }
  T* out = static_cast<T*>(b.grad_logits) + token * p.experts;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (r * 32 + lane < p.experts) out[r * 32 + lane] = from_compute<T>(grads[r]);
  }
}

// Calls `run(std::integral_constant<int, R>)` with the logits that a lane keeps.
template <class Run>
cudaError_t visit_experts(int64_t experts, Run run) {
  if (experts <= 64) return run(std::integral_constant<int, 2>{});
  if (experts <= 128) return run(std::integral_constant<int, 4>{});
  if (experts <= 256) return run(std::integral_constant<int, 8>{});
  return run(std::integral_constant<int, 16>{});
}

unsigned route_blocks(const MoeRoute& p) {
  return unsigned((p.tokens + kRouteWarps - 1) / kRouteWarps);
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t moe_route_launch(const MoeRoute& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  return visit_floating(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    return visit_experts(p.experts, [&](auto registers) {
      constexpr int R = decltype(registers)::value;
      const auto kernel = p.bias ? moe_route_kernel<T, R, true> : moe_route_kernel<T, R, false>;
      return launch_early(kernel, route_blocks(p), 32 * kRouteWarps, 0, stream, p);
    });
  });
}

cudaError_t moe_route_backward_launch(const MoeRouteBackward& b, cudaStream_t stream) {
  if (b.route.tokens == 0) return cudaSuccess;
  return visit_floating(b.route.dtype, [&](auto tag) {
    using T = decltype(tag);
    return visit_experts(b.route.experts, [&](auto registers) {
      constexpr int R = decltype(registers)::value;
      moe_route_backward_kernel<T, R><<<route_blocks(b.route), 32 * kRouteWarps, 0, stream>>>(b);
      return cudaGetLastError();
    });
  });
}

cudaError_t moe_route_map_launch(const MoeMap& p, cudaStream_t stream) {
  return moe_map(p, stream);
}
