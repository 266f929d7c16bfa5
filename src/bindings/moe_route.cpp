// moe_route(router_logits, top_k): which experts each token goes to and how much each
// counts; moe_route_map: the same, sorted by expert.
#include <algorithm>
#include <cmath>
#include <limits>

#include "moe/moe_cpu.h"
#include "moe/moe_binding.h"

using namespace cuda_ops;

cudaError_t moe_route_launch(const MoeRoute& problem, cudaStream_t stream);
cudaError_t moe_route_backward_launch(const MoeRouteBackward& problem, cudaStream_t stream);
cudaError_t moe_route_map_launch(const MoeMap& problem, cudaStream_t stream);

namespace {

using MaybeTensor = std::optional<Tensor>;

// The arguments of one call, outputs allocated.
struct Routed {
  Tensor logits, weights, experts;
  MaybeTensor bias;
  MoeRoute problem;

  Routed(const Tensor& logits_, int64_t top_k, int64_t scoring, bool renormalize,
         const MaybeTensor& bias_)
      : logits(logits_) {
    const int64_t count = logits.size(1);
    if (bias_) bias = contiguous_as(*bias_, DType::kFloat64);
    const DType dtype = dtype_of(logits);
    weights = empty({logits.size(0), top_k}, compute_dtype(dtype), logits);
    experts = empty({logits.size(0), top_k}, DType::kInt64, logits);
    problem.dtype = dtype;
    problem.tokens = logits.size(0);
    problem.experts = count;
    problem.top_k = top_k;
    problem.logits = logits.const_data_ptr();
    problem.token_stride = logits.stride(0);
    problem.expert_stride = logits.stride(1);
    if (bias) problem.bias = static_cast<const double*>(bias->const_data_ptr());
    problem.scoring = static_cast<Scoring>(scoring);
    problem.renormalize = renormalize;
    problem.weights = weights.mutable_data_ptr();
    problem.chosen = static_cast<int64_t*>(experts.mutable_data_ptr());
  }
};

struct Gradient {
  Tensor grad_weights, weights, experts, grad_logits;
  MoeRouteBackward problem;

  Gradient(const Tensor& grad_weights_, const Tensor& logits, const Tensor& weights_,
           const Tensor& experts_, int64_t scoring, bool renormalize)
      : grad_weights(grad_weights_), weights(weights_), experts(experts_) {
    const int64_t tokens = logits.size(0), top_k = experts.size(1);
    const DType dtype = dtype_of(logits);
    grad_weights = contiguous_as(grad_weights, compute_dtype(dtype));
    weights = contiguous_as(weights, compute_dtype(dtype));
    experts = contiguous(experts);
    grad_logits = empty({tokens, logits.size(1)}, logits);
    MoeRoute& p = problem.route;
    p.dtype = dtype;
    p.tokens = tokens;
    p.experts = logits.size(1);
    p.top_k = top_k;
    p.logits = logits.const_data_ptr();
    p.token_stride = logits.stride(0);
    p.expert_stride = logits.stride(1);
    p.scoring = static_cast<Scoring>(scoring);
    p.renormalize = renormalize;
    p.weights = const_cast<void*>(weights.const_data_ptr());
    p.chosen = const_cast<int64_t*>(static_cast<const int64_t*>(experts.const_data_ptr()));
    problem.grad_weights = grad_weights.const_data_ptr();
    problem.grad_logits = grad_logits.mutable_data_ptr();
  }
};

// --- CPU ----------------------------------------------------------------------

// The scores of one row of logits, and the largest logit.
std::vector<double> scores_of(const std::vector<double>& logits, Scoring scoring) {
  std::vector<double> scores(logits.size());
  if (scoring == Scoring::kSigmoid) {
    std::transform(logits.begin(), logits.end(), scores.begin(), sigmoid);
    return scores;
  }
  double largest = logits[0], sum = 0;
  for (const double logit : logits) {
    if (logit > largest || logit != logit) largest = logit;
  }
  for (size_t e = 0; e < logits.size(); ++e) sum += scores[e] = std::exp(logits[e] - largest);
  for (double& score : scores) score /= sum;
  return scores;
}

// NaN comes before every number, and among equals the lower expert comes first.
bool goes_before(double a, double b) { return a > b || (a != a && b == b); }

template <class T>
std::vector<double> logits_of(const MoeRoute& p, int64_t token) {
  const T* row = static_cast<const T*>(p.logits) + token * p.token_stride;
  std::vector<double> logits(p.experts);
  for (int64_t e = 0; e < p.experts; ++e) logits[e] = double(row[e * p.expert_stride]);
  return logits;
}

std::tuple<Tensor, Tensor> moe_route_cpu(const Tensor& router_logits, int64_t top_k,
                                         int64_t scoring, bool renormalize,
                                         const MaybeTensor& expert_bias) {
  Routed call(router_logits, top_k, scoring, renormalize, expert_bias);
  const MoeRoute& p = call.problem;
  for_each_token(p.dtype, p.tokens, 64, [&](auto tag, auto compute, int64_t token) {
    using C = decltype(compute);
    const std::vector<double> logits = logits_of<decltype(tag)>(p, token);
    const std::vector<double> scores = scores_of(logits, p.scoring);
    std::vector<double> keys = logits;
    if (p.bias != nullptr) {
      for (int64_t e = 0; e < p.experts; ++e) keys[e] = scores[e] + p.bias[e];
    }
    std::vector<int64_t> order(p.experts);
    for (int64_t e = 0; e < p.experts; ++e) order[e] = e;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return goes_before(keys[a], keys[b]); });
    std::vector<double> weights(p.top_k);
    for (int64_t j = 0; j < p.top_k; ++j) weights[j] = logits[order[j]];
    if (p.renormalize && p.scoring == Scoring::kSoftmax) {
      weights = scores_of(weights, p.scoring);
    } else {
      double sum = p.renormalize ? 1e-20 : 1;
      for (int64_t j = 0; j < p.top_k; ++j) {
        weights[j] = scores[order[j]];
        if (p.renormalize) sum += weights[j];
      }
      for (double& weight : weights) weight /= sum;
    }
    if (std::any_of(logits.begin(), logits.end(), [](double v) { return std::isnan(v); })) {
      weights.assign(p.top_k, std::numeric_limits<double>::quiet_NaN());
    }
    for (int64_t j = 0; j < p.top_k; ++j) {
      static_cast<C*>(p.weights)[token * p.top_k + j] = C(weights[j]);
      p.chosen[token * p.top_k + j] = order[j];
    }
  });
  return {call.weights, call.experts};
}

Tensor moe_route_backward_cpu(const Tensor& grad_weights, const Tensor& router_logits,
                              const Tensor& weights, const Tensor& experts, int64_t scoring,
                              bool renormalize) {
  Gradient call(grad_weights, router_logits, weights, experts, scoring, renormalize);
  const MoeRoute& p = call.problem.route;
  for_each_token(p.dtype, p.tokens, 64, [&](auto tag, auto compute, int64_t token) {
    using T = decltype(tag);
    using C = decltype(compute);
    const C* grads = static_cast<const C*>(call.problem.grad_weights) + token * p.top_k;
    const C* kept = static_cast<const C*>(p.weights) + token * p.top_k;
    const int64_t* chosen = p.chosen + token * p.top_k;
    const std::vector<double> logits = logits_of<T>(p, token);
    const std::vector<double> scores = scores_of(logits, p.scoring);
    std::vector<double> out(p.experts);
    const auto known = [&](int64_t j) { return chosen[j] >= 0 && chosen[j] < p.experts; };
    double along = 0, sum = 1e-20;
    for (int64_t j = 0; j < p.top_k; ++j) {
      along += double(grads[j]) * double(kept[j]);
      if (known(j)) sum += scores[chosen[j]];
    }
    const bool sigmoids = p.scoring == Scoring::kSigmoid, everywhere = !sigmoids && !p.renormalize;
    if (everywhere) {
      for (int64_t e = 0; e < p.experts; ++e) out[e] = -scores[e] * along;
    }
    for (int64_t j = 0; j < p.top_k; ++j) {
      if (!known(j)) continue;
      const double logit = logits[chosen[j]], grad = grads[j];
      const double share = sigmoid(logit) / (p.renormalize ? sum : 1);
      const double factor = sigmoids ? share * sigmoid(-logit) : double(kept[j]);
      const double inward = everywhere || (sigmoids && !p.renormalize) ? grad : grad - along;
      out[chosen[j]] += factor * inward;
    }
    T* row = static_cast<T*>(call.problem.grad_logits) + token * p.experts;
    for (int64_t e = 0; e < p.experts; ++e) row[e] = static_cast<T>(out[e]);
  });
  return call.grad_logits;
}

std::tuple<Tensor, Tensor> moe_route_map_cpu(const Tensor& experts, int64_t num_experts) {
  const Tensor chosen = contiguous_choice(experts);
  MapTensors made(chosen, num_experts);
  moe_map_cpu(made.map);
  return {made.order, made.offsets};
}

// --- CUDA ---------------------------------------------------------------------

std::tuple<Tensor, Tensor> moe_route_cuda(const Tensor& router_logits, int64_t top_k,
                                          int64_t scoring, bool renormalize,
                                          const MaybeTensor& expert_bias) {
  Routed call(router_logits, top_k, scoring, renormalize, expert_bias);
  launch(router_logits,
         [&](cudaStream_t stream) { return moe_route_launch(call.problem, stream); });
  return {call.weights, call.experts};
}

Tensor moe_route_backward_cuda(const Tensor& grad_weights, const Tensor& router_logits,
                               const Tensor& weights, const Tensor& experts, int64_t scoring,
                               bool renormalize) {
  Gradient call(grad_weights, router_logits, weights, experts, scoring, renormalize);
  launch(router_logits,
         [&](cudaStream_t stream) { return moe_route_backward_launch(call.problem, stream); });
  return call.grad_logits;
}

std::tuple<Tensor, Tensor> moe_route_map_cuda(const Tensor& experts, int64_t num_experts) {
  const Tensor chosen = contiguous_choice(experts);
  MapTensors made(chosen, num_experts);
  launch(experts, [&](cudaStream_t stream) { return moe_route_map_launch(made.map, stream); });
  return {made.order, made.offsets};
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("moe_route(Tensor router_logits, SymInt top_k, int scoring=0, bool renormalize=True, "
          "Tensor? expert_bias=None) -> (Tensor weights, Tensor experts)",
          "[t,e],[e]->[t,top_k],[t,top_k]")
      .dtypes(kFloating)
      .dtypes("expert_bias", kFloating)
      .range("e", 1, kMostExperts)
      .range("top_k", 1, kMostChosen)
      .at_most("top_k", "e")
      .range("scoring", 0, 1)
      .cpu<moe_route_cpu>()
      .cuda<moe_route_cuda>();
  library
      .op("moe_route_backward(Tensor grad_weights, Tensor router_logits, Tensor weights, "
          "Tensor experts, int scoring=0, bool renormalize=True) -> Tensor grad_router_logits",
          "[t,k],[t,e],[t,k],[t,k]->[t,e]")
      .dtypes(kFloating)
      .dtypes("grad_weights", kFloating)
      .dtypes("weights", kFloating)
      .dtypes("experts", kInt64)
      .range("e", 1, kMostExperts)
      .range("k", 1, kMostChosen)
      .range("scoring", 0, 1)
      .doc(R"(The gradient of moe_route's weights, back to the logits.

Shapes: grad_weights, weights and experts (T, k), router_logits (T, E); the result (T, E).
Dtypes: router_logits float64, float32, float16 or bfloat16; the result has the same.
Errors: RuntimeError for any other shape or dtype.
Formula: with s the scores, w the weights and g their gradient, softmax gives w_j (g_j - <g, w>) if
renormalized, otherwise s_e (g_e - <g, w>) for all e; sigmoid gives s_j (1 - s_j) (g_j - <g, w>) /
sum(s) if renormalized, otherwise s_j (1 - s_j) g_j.)")
      .cpu<moe_route_backward_cpu>()
      .cuda<moe_route_backward_cuda>();
  library
      .op("moe_route_map(Tensor experts, SymInt num_experts) -> (Tensor order, Tensor offsets)", "")
      .dtypes("experts", kInt64)
      .range("num_experts", 1, kMostExperts)
      .doc(R"(Sorts assignments by expert, without comparing keys or waiting for the device.

order[offsets[e]] to order[offsets[e + 1] - 1] are the places of e in experts, counted in row-major
order and ascending. Places whose index is below 0 or at least num_experts come last, from
order[offsets[-1]] on.

Shapes: experts of any shape with N elements; order (N), offsets (num_experts + 1).
Dtypes: experts int64; both results int32.
Errors: RuntimeError for any other dtype, 2^31 or more elements, or num_experts outside 1 to 512.
Formula: order is a stable sort of the places by expert; offsets[e] counts those of experts 0 to e -
1.

Example:
>>> torch.ops.cuda_ops.moe_route_map(torch.tensor([2, 0, 2]), 3)
(tensor([1, 0, 2], dtype=torch.int32), tensor([0, 1, 1, 3], dtype=torch.int32)))")
      .cpu<moe_route_map_cpu>()
      .cuda<moe_route_map_cuda>();
}
