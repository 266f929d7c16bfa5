// SwiGLU experts for routed tokens, and their gradients. Forward:
//
//   map       which assignments each expert has              moe_map.cuh
//   gate_up   silu(gate) * up of rows of x                   gemm_grouped*.cuh
//   down      those rows times w_down                        by moe_plan.h
//   combine   each token's k results, weighted, in order     here
//
// The rows between the two products lie at the assignments' positions in the map's order, where an
// expert's rows are neighbors; where products are streamed, at their numbers. Results lie at the
// numbers: the sum over a token's results reads neighbors and needs neither a map nor atomics. The
// products gather the rows of tokens that they read; nothing copies them.
#include "gemm/gemm.cuh"
#include "moe/gemm_grouped.cuh"
#include "moe/gemm_grouped_hopper_weights.cuh"
#include "moe/gemm_grouped_stream.cuh"
#include "moe/moe_plan.h"

using namespace cuda_ops;

namespace {

constexpr int kThreads = 256;

// out[t] = sum over j of weights[t, j] * results[t * k + j]; without weights they are 1. With a
// map, results of no expert are zero and not read: where others have most experts, most are. Tokens
// of several parts take turns, so that no link waits while others, or this GPU's memory, are busy.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const MoeParts out, const T* results, const compute_t<T>* weights,
                   int64_t tokens, int64_t top_k, int64_t hidden, const MoeMap map) {
  using C = compute_t<T>;
  using V = Elements<T, kVector>;
  const int64_t vectors = hidden / kVector, step = int64_t(gridDim.x) * kThreads;
  wait_for_previous();
  let_next_start();
  const bool all = map.offsets == nullptr || map.offsets[map.experts] == map.assignments;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < tokens * vectors; i += step) {
    const int64_t token = out.turn(i / vectors), column = i % vectors;
    C sums[kVector] = {};
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t assignment = token * top_k + j;
      const C weight = weights == nullptr ? C(1) : weights[assignment];
      V v = {};
      if (all || uint64_t(map.chosen[assignment]) < uint64_t(map.experts)) {
        v = reinterpret_cast<const V*>(results)[assignment * vectors + column];
      }
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums[e] += weight * to_compute(v.values[e]);
    }
    V v;
#pragma unroll
    for (int e = 0; e < kVector; ++e) v.values[e] = from_compute<T>(sums[e]);
    reinterpret_cast<V*>(out.row<T>(token, hidden))[column] = v;
  }
}

// The gradient of silu(gate) * up; each warp takes the assignment at one position. `activations`
// comes in as grad_out @ w_down, without the weight, and leaves as weight * silu(gate) * up.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const MoeExpertsBackward b, int64_t assignments) {
  using C = compute_t<T>;
  using V = Elements<T, kVector>;
  const int64_t vectors = b.forward.inner / kVector, step = int64_t(gridDim.x) * (kThreads / 32);
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  for (int64_t i = int64_t(blockIdx.x) * (kThreads / 32) + warp; i < assignments; i += step) {
    const int64_t number = b.forward.map.order[i];
    const C weight = static_cast<const C*>(b.forward.weights)[number];
    const V* gates = static_cast<const V*>(b.forward.gate_up) + number * 2 * vectors;
    V* grad_gates = static_cast<V*>(b.grad_gate_up) + i * 2 * vectors;
    V* activations = static_cast<V*>(b.forward.activations) + i * vectors;
    C along = 0;
    for (int64_t n = lane; n < vectors; n += 32) {
      V gate = gates[n], up = gates[vectors + n], grad = activations[n];
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const C g = to_compute(gate.values[e]), u = to_compute(up.values[e]);
        const C through = to_compute(grad.values[e]);
        const Sigmoid<MathFor<T>, C> s(g);
        const C silu = g * s.value;
        along += through * silu * u;
        gate.values[e] = from_compute<T>(weight * through * u * (s.value + silu * s.complement));
        up.values[e] = from_compute<T>(weight * through * silu);
        grad.values[e] = from_compute<T>(weight * silu * u);
      }
      grad_gates[n] = gate;
      grad_gates[vectors + n] = up;
      activations[n] = grad;
    }
    along = lanes_total(along, 32);
    if (lane == 0 && b.grad_weights != nullptr) static_cast<C*>(b.grad_weights)[number] = along;
  }
}

template <class T>
cudaError_t swiglu_backward(const MoeExpertsBackward& b, cudaStream_t stream) {
  constexpr int kVector = 16 / int(sizeof(T));
  const int64_t assignments = b.forward.map.assignments;
  const int64_t blocks = (assignments + kThreads / 32 - 1) / (kThreads / 32);
  if (blocks == 0) return cudaSuccess;
  const MoeExperts& p = b.forward;
  const bool vectors =
      p.inner % kVector == 0 && detail::whole_vectors({p.gate_up, b.grad_gate_up, p.activations});
  const auto kernel = vectors ? swiglu_backward_kernel<T, kVector> : swiglu_backward_kernel<T, 1>;
  kernel<<<grouped_grid(blocks), kThreads, 0, stream>>>(b, assignments);
  return cudaGetLastError();
}

template <class T>
cudaError_t combine(const MoeExperts& p, bool has_map, const MoeParts& out, const void* weights,
                    cudaStream_t stream) {
  constexpr int kVector = 16 / int(sizeof(T));
  const auto run = [&](auto kernel, int vector) {
    const int64_t blocks = (p.tokens * (p.hidden / vector) + kThreads - 1) / kThreads;
    if (blocks == 0) return cudaSuccess;
    return launch_early(kernel, grouped_grid(blocks), kThreads, 0, stream, out,
                        static_cast<const T*>(p.results), static_cast<const compute_t<T>*>(weights),
                        p.tokens, p.top_k, p.hidden, has_map ? p.map : MoeMap{});
  };
  return p.hidden % kVector == 0 && detail::whole_vectors(out)
             ? run(combine_kernel<T, kVector>, kVector)
             : run(combine_kernel<T, 1>, 1);
}

struct Rows {
  const void* data;
  RowsAt at;
};

// Describe the products of one call.
GroupedRows rows_of(const MoeExperts& p, int64_t n, int64_t k, const Rows& a, const void* b,
                    bool line_major_b, void* out, bool at_positions) {
  return {p.map.order,
          p.map.offsets,
          int32_t(p.map.assignments),
          int32_t(p.map.experts),
          n,
          k,
          a.at,
          a.data,
          b,
          line_major_b,
          out,
          at_positions,
          nullptr,
          p.map.taken};
}
GroupedWeights weights_of(const MoeExperts& p, int64_t m, int64_t n, const Rows& a, const Rows& b,
                          void* out) {
  return {p.map.order,
          p.map.offsets,
          int32_t(p.map.assignments),
          int32_t(p.map.experts),
          m,
          n,
          a.at,
          b.at,
          a.data,
          b.data,
          out};
}

template <class T, bool kGated = false>
cudaError_t rows_product(const MoePlan& plan, const GroupedRows& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (plan.family == MoePlan::kHopper) {
      return grouped_rows_hopper<T, kGated>(p, plan.tall, stream);
    }
  }
  return grouped_rows<T, kGated>(p, plan.family == MoePlan::kMma, stream);
}

template <class T>
cudaError_t weights_product(const MoePlan& plan, const GroupedWeights& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (plan.family == MoePlan::kHopper) return grouped_weights_hopper<T>(p, stream);
  }
  return grouped_weights<T>(p, plan.family == MoePlan::kMma, stream);
}

// Runs both products by the kernels of the plan, in order.
template <class T>
cudaError_t forward(const MoeExperts& p, cudaStream_t stream) {
  const DeviceInfo device = current_device();
  const MoePlan plan = moe_plan(p, device);
  // Streamed products may have no map, and read few rows.
  const bool at_positions = plan.family != MoePlan::kStream;
  cudaError_t error = plan.map ? moe_map(p.map, stream) : cudaSuccess;
  if (error != cudaSuccess) return error;
  const Rows x{p.x, RowsAt::tokens(p.top_k)};
  GroupedRows gate_up =
      rows_of(p, p.inner, p.hidden, x, p.w_gate_up, false, p.activations, at_positions);
  gate_up.second = p.gate_up;
  const Rows between{p.activations, at_positions ? RowsAt::positions() : RowsAt::numbers()};
  GroupedRows down = rows_of(p, p.hidden, p.inner, between, p.w_down, false, p.results, false);
  down.taken = p.map.taken + 1;          // the second product of this map
  gate_up.clears = down.clears = false;  // nothing reads them
  if (plan.family == MoePlan::kStream) {
    if constexpr (sizeof(T) == 2) {
      const StreamRows first{gate_up, p.map, plan.map, plan.splits_gate_up};
      error = stream_rows<T, true>(first, plan.tile, stream);
      if (error != cudaSuccess) return error;
      if (plan.token) {
        down.out = p.out.data[0];
        return stream_token<T>(down, p.map, p.weights, stream);
      }
      const auto early = unsigned(device.sms * stream_resident(plan.tile));
      const StreamRows second{down, p.map, plan.map, plan.splits_down, early};
      error = stream_rows<T, false>(second, plan.tile, stream);
    }
  } else {
    error = rows_product<T, true>(plan, gate_up, stream);
    if (error == cudaSuccess) error = rows_product<T>(plan, down, stream);
  }
  return error == cudaSuccess ? combine<T>(p, plan.map, p.out, p.weights, stream) : error;
}

// With g = grad_out and a = silu(gate) * up of every assignment:
//   grad_a  = weight * (g @ w_down)        grad_weight = <g @ w_down, a>
//   grad_w_down    = sum of g^T (weight * a)
//   grad_x  = sum of grad_gate_up @ w_gate_up
//   grad_w_gate_up = sum of grad_gate_up^T x
template <class T>
cudaError_t backward_down(const MoeExpertsBackward& b, cudaStream_t stream) {
  const MoeExperts& p = b.forward;
  const MoePlan plan = moe_plan(b, current_device());
  const Rows grad_out{b.grad_out, RowsAt::tokens(p.top_k)};
  const Rows activations{p.activations, RowsAt::positions()};
  cudaError_t error = moe_map(p.map, stream);
  if (error != cudaSuccess) return error;
  error = rows_product<T>(
      plan, rows_of(p, p.inner, p.hidden, grad_out, p.w_down, true, p.activations, true), stream);
  if (error != cudaSuccess) return error;
  error = swiglu_backward<T>(b, stream);
  if (error != cudaSuccess) return error;
  if (b.grad_w_down == nullptr) return cudaSuccess;
  return weights_product<T>(
      plan, weights_of(p, p.hidden, p.inner, grad_out, activations, b.grad_w_down), stream);
}

template <class T>
cudaError_t backward_x(const MoeExpertsBackward& b, cudaStream_t stream) {
  const MoeExperts& p = b.forward;
  const MoePlan plan = moe_plan(b, current_device());
  const Rows grad_gate_up{b.grad_gate_up, RowsAt::positions()};
  cudaError_t error = moe_map(p.map, stream);
  if (error != cudaSuccess || b.grad_x == nullptr) return error;
  GroupedRows rows =
      rows_of(p, p.hidden, 2 * p.inner, grad_gate_up, p.w_gate_up, true, p.results, false);
  rows.clears = false;
  error = rows_product<T>(plan, rows, stream);
  return error == cudaSuccess ? combine<T>(p, true, b.grad_x, nullptr, stream) : error;
}

template <class T>
cudaError_t backward_w_gate_up(const MoeExpertsBackward& b, cudaStream_t stream) {
  const MoeExperts& p = b.forward;
  const Rows grad_gate_up{b.grad_gate_up, RowsAt::positions()};
  const Rows x{p.x, RowsAt::tokens(p.top_k)};
  return weights_product<T>(moe_plan(b, current_device()),
                            weights_of(p, 2 * p.inner, p.hidden, grad_gate_up, x, b.grad_w_gate_up),
                            stream);
}

}  // namespace

// -----------------------------------------------------------------------------

cudaError_t moe_experts_launch(const MoeExperts& p, cudaStream_t stream) {
  return visit_floating(p.dtype, [&](auto tag) { return forward<decltype(tag)>(p, stream); });
}

// Computes grad_gate_up, grad_weights and grad_w_down.
cudaError_t moe_experts_backward_down_launch(const MoeExpertsBackward& b, cudaStream_t stream) {
  return visit_floating(b.forward.dtype,
                        [&](auto tag) { return backward_down<decltype(tag)>(b, stream); });
}

// Computes the map, and grad_x where it is wanted.
cudaError_t moe_experts_backward_x_launch(const MoeExpertsBackward& b, cudaStream_t stream) {
  return visit_floating(b.forward.dtype,
                        [&](auto tag) { return backward_x<decltype(tag)>(b, stream); });
}

// Runs after the launch for x, whose map it needs.
cudaError_t moe_experts_backward_w_gate_up_launch(const MoeExpertsBackward& b,
                                                  cudaStream_t stream) {
  return visit_floating(b.forward.dtype,
                        [&](auto tag) { return backward_w_gate_up<decltype(tag)>(b, stream); });
}
