// moe_experts(x, w_gate_up, w_down, experts, weights): SwiGLU experts for tokens that
// are routed already, and their gradients.
#include <algorithm>
#include <cmath>

#include "tensor_moe.h"

using namespace cuda_ops;

cudaError_t moe_experts_launch(const MoeExperts& problem, cudaStream_t stream);
cudaError_t moe_experts_backward_launch(const MoeExpertsBackward& problem, cudaStream_t stream);
cudaError_t moe_experts_backward_w_gate_up_launch(const MoeExpertsBackward& problem,
                                                  cudaStream_t stream);

namespace {

// The arguments of one call, dense, with all sizes known.
struct Call {
  const char* op;
  Tensor x, w_gate_up, w_down, experts, weights;
  MapTensors map;
  MoeExperts problem;

  Call(const char* op_, const Tensor& x_, const Tensor& w_gate_up_, const Tensor& w_down_,
       const Tensor& experts_, const Tensor& weights_)
      : op(op_),
        x(checked(op, x_, w_gate_up_, w_down_, experts_, weights_)),
        w_gate_up(contiguous(w_gate_up_)),
        w_down(contiguous(w_down_)),
        experts(contiguous(experts_)),
        weights(dense_as(weights_, compute_dtype(dtype_of(x_)))),
        map(experts, w_down.size(0)) {
    problem.dtype = dtype_of(x);
    problem.tokens = x.size(0);
    problem.top_k = experts.size(1);
    problem.hidden = x.size(1);
    problem.inner = w_down.size(2);
    problem.map = map.map;
    problem.x = x.const_data_ptr();
    problem.weights = weights.const_data_ptr();
    problem.w_gate_up = w_gate_up.const_data_ptr();
    problem.w_down = w_down.const_data_ptr();
    problem.built_for_hopper = built_for_hopper();
  }

  static Tensor checked(const char* op, const Tensor& x, const Tensor& w_gate_up,
                        const Tensor& w_down, const Tensor& experts, const Tensor& weights) {
    check_floating(op, "x", x);
    if (x.dim() != 2) refuse(op, "x", "2 dims (T, H)", "shape " + shape_name(x));
    if (w_down.dim() != 3) {
      refuse(op, "w_down", "3 dims (E, H, I)", "shape " + shape_name(w_down));
    }
    if (experts.dim() != 2) {
      refuse(op, "experts", "2 dims (T, k)", "shape " + shape_name(experts));
    }
    const int64_t count = w_down.size(0), inner = w_down.size(2);
    const int64_t tokens = x.size(0), hidden = x.size(1), top_k = experts.size(1);
    if (count < 1 || count > kMostExperts) {
      refuse(op, "w_down", "from 1 to " + std::to_string(kMostExperts) + " experts",
             "shape " + shape_name(w_down));
    }
    check_shape(op, "w_gate_up", w_gate_up, "(E, 2I, H)", {count, 2 * inner, hidden});
    check_shape(op, "w_down", w_down, "(E, H, I)", {count, hidden, inner});
    check_shape(op, "experts", experts, "(T, k)", {tokens, top_k});
    check_shape(op, "weights", weights, "(T, k)", {tokens, top_k});
    check_dtype(op, "w_gate_up", w_gate_up, dtype_of(x));
    check_dtype(op, "w_down", w_down, dtype_of(x));
    check_dtype(op, "experts", experts, DType::kInt64);
    check_floating(op, "weights", weights);
    if (tokens * top_k >= kMostAssignments) {
      refuse(op, "experts", "fewer than 2^31 elements", "shape " + shape_name(experts));
    }
    return contiguous(x);
  }

  int64_t assignments() const { return problem.tokens * problem.top_k; }
  Tensor empty_out() const { return empty({problem.tokens, problem.hidden}, x); }
  Tensor empty_gate_up() const {
    return empty({problem.tokens, problem.top_k, 2 * problem.inner}, x);
  }
};

// What a backward pass returns; of what is not wanted, no elements.
struct Gradients {
  enum Wanted { kX = 1, kGateUp = 2, kDown = 4, kWeights = 8 };
  int64_t wanted;
  Tensor grad_out, gate_up, x, w_gate_up, w_down, weights;

  // All but w_gate_up.
  Gradients(const Call& call, const Tensor& grad_out_, const Tensor& gate_up_, int64_t wanted_)
      : wanted(wanted_) {
    constexpr const char* kOp = "moe_experts_backward";
    const MoeExperts& p = call.problem;
    check_dtype(kOp, "grad_out", grad_out_, p.dtype);
    check_dtype(kOp, "gate_up", gate_up_, p.dtype);
    check_shape(kOp, "grad_out", grad_out_, "(T, H)", {p.tokens, p.hidden});
    check_shape(kOp, "gate_up", gate_up_, "(T, k, 2I)", {p.tokens, p.top_k, 2 * p.inner});
    check_between(kOp, "wanted", wanted, 0, 15);
    grad_out = contiguous(grad_out_);
    gate_up = contiguous(gate_up_);
    x = made(kX, call.x);
    w_down = made(kDown, call.w_down);
    weights = made(kWeights, call.weights);
  }

  // The largest is made when its time has come, where others have given their memory back;
  // null where it is not wanted.
  void* make_w_gate_up(const Call& call) {
    w_gate_up = made(kGateUp, call.w_gate_up);
    return wanted & kGateUp ? w_gate_up.mutable_data_ptr() : nullptr;
  }

  Tensor made(Wanted one, const Tensor& like) const {
    return wanted & one ? empty(shape_of(like), like) : empty({0}, like);
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> results(const Tensor& weights_argument) const {
    return {x, w_gate_up, w_down, dense_as(weights, dtype_of(weights_argument))};
  }
};

// --- CPU ----------------------------------------------------------------------

double silu(double v) { return v * sigmoid(v); }

// y[i] = sum over j of matrix[i, j] * v[j], added to `out`.
template <class T, class V>
void add_product(std::vector<double>& out, const T* matrix, const V* v, int64_t columns) {
  for (size_t i = 0; i < out.size(); ++i) {
    for (int64_t j = 0; j < columns; ++j) out[i] += double(matrix[i * columns + j]) * double(v[j]);
  }
}

// y[j] = sum over i of v[i] * matrix[i, j].
template <class T, class V>
std::vector<double> transposed_product(const T* matrix, const V* v, int64_t rows, int64_t columns) {
  std::vector<double> out(columns);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) out[j] += double(v[i]) * double(matrix[i * columns + j]);
  }
  return out;
}

// Calls `body(tag, compute, token)` for each token.
template <class Body>
void for_each_token(const MoeExperts& p, Body body) {
  visit_floating_cpu(p.dtype, [&](auto tag) {
    using C = std::conditional_t<std::is_same_v<decltype(tag), double>, double, float>;
    parallel_for(p.tokens, 1, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) body(tag, C(), token);
    });
  });
}

bool is_known(const MoeExperts& p, int64_t assignment) {
  const int64_t expert = p.map.chosen[assignment];
  return expert >= 0 && expert < p.map.experts;
}

void run_cpu(Call& call) {
  const MoeExperts& p = call.problem;
  for_each_token(p, [&](auto tag, auto compute, int64_t token) {
    using T = decltype(tag);
    const T* x = static_cast<const T*>(p.x) + token * p.hidden;
    std::vector<double> sums(p.hidden);
    for (int64_t i = token * p.top_k; i < (token + 1) * p.top_k; ++i) {
      std::vector<double> gate_up(2 * p.inner), activations(p.inner), result(p.hidden);
      if (is_known(p, i)) {
        const int64_t expert = p.map.chosen[i];
        const T* w_gate_up = static_cast<const T*>(p.w_gate_up) + expert * 2 * p.inner * p.hidden;
        const T* w_down = static_cast<const T*>(p.w_down) + expert * p.inner * p.hidden;
        add_product(gate_up, w_gate_up, x, p.hidden);
        for (int64_t n = 0; n < p.inner; ++n) {
          activations[n] = silu(gate_up[n]) * gate_up[p.inner + n];
        }
        add_product(result, w_down, activations.data(), p.inner);
      }
      const double weight = static_cast<const decltype(compute)*>(p.weights)[i];
      for (int64_t h = 0; h < p.hidden; ++h) sums[h] += weight * result[h];
      if (p.gate_up == nullptr) continue;
      T* kept = static_cast<T*>(p.gate_up) + i * 2 * p.inner;
      for (int64_t n = 0; n < 2 * p.inner; ++n) kept[n] = static_cast<T>(gate_up[n]);
    }
    T* out = static_cast<T*>(p.out) + token * p.hidden;
    for (int64_t h = 0; h < p.hidden; ++h) out[h] = static_cast<T>(sums[h]);
  });
}

// The gradients of weights and, for each assignment, of gate and up and weight * silu(gate) * up.
void run_backward_cpu(const MoeExpertsBackward& b, std::vector<double>& grad_gate_up,
                      std::vector<double>& activations) {
  const MoeExperts& p = b.forward;
  for_each_token(p, [&](auto tag, auto compute, int64_t token) {
    using T = decltype(tag);
    using C = decltype(compute);
    const T* grad_out = static_cast<const T*>(b.grad_out) + token * p.hidden;
    std::vector<double> grad_x(p.hidden);
    for (int64_t i = token * p.top_k; i < (token + 1) * p.top_k; ++i) {
      double along = 0;
      if (is_known(p, i)) {
        const int64_t expert = p.map.chosen[i];
        const T* w_gate_up = static_cast<const T*>(p.w_gate_up) + expert * 2 * p.inner * p.hidden;
        const T* w_down = static_cast<const T*>(p.w_down) + expert * p.inner * p.hidden;
        const T* gates = static_cast<const T*>(p.gate_up) + i * 2 * p.inner;
        const double weight = static_cast<const C*>(p.weights)[i];
        const auto grads = transposed_product(w_down, grad_out, p.hidden, p.inner);
        double* grad_gates = grad_gate_up.data() + i * 2 * p.inner;
        for (int64_t n = 0; n < p.inner; ++n) {
          const double gate = gates[n], up = gates[p.inner + n], s = sigmoid(gate);
          along += grads[n] * silu(gate) * up;
          grad_gates[n] = weight * grads[n] * up * (s + gate * s * sigmoid(-gate));
          grad_gates[p.inner + n] = weight * grads[n] * silu(gate);
          activations[i * p.inner + n] = weight * silu(gate) * up;
        }
        const auto back = transposed_product(w_gate_up, grad_gates, 2 * p.inner, p.hidden);
        for (int64_t h = 0; h < p.hidden; ++h) grad_x[h] += back[h];
      }
      if (b.grad_weights != nullptr) static_cast<C*>(b.grad_weights)[i] = C(along);
    }
    if (b.grad_x == nullptr) return;
    T* out = static_cast<T*>(b.grad_x) + token * p.hidden;
    for (int64_t h = 0; h < p.hidden; ++h) out[h] = static_cast<T>(grad_x[h]);
  });
}

// out[e] = sum over e's assignments i of left(i)^T right(i).
template <class Left, class Right>
void add_outer_products(const MoeExperts& p, void* out, int64_t m, int64_t n, Left left,
                        Right right) {
  visit_floating_cpu(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    parallel_for(p.map.experts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; ++e) {
        std::vector<double> sums(m * n);
        for (int32_t at = p.map.offsets[e]; at < p.map.offsets[e + 1]; ++at) {
          const int64_t i = p.map.order[at];
          for (int64_t row = 0; row < m; ++row) {
            const double value = left(tag, i, row);
            for (int64_t column = 0; column < n; ++column) {
              sums[row * n + column] += value * right(tag, i, column);
            }
          }
        }
        T* matrix = static_cast<T*>(out) + e * m * n;
        for (int64_t i = 0; i < m * n; ++i) matrix[i] = static_cast<T>(sums[i]);
      }
    });
  });
}

// Both forward operators, on the device that `run` is for.
Tensor forward(Call call, void (*run)(Call&)) {
  Tensor out = call.empty_out();
  call.problem.out = out.mutable_data_ptr();
  run(call);
  return out;
}

std::tuple<Tensor, Tensor> forward_keep(Call call, void (*run)(Call&)) {
  Tensor gate_up = call.empty_gate_up();
  call.problem.gate_up = gate_up.mutable_data_ptr();
  return {forward(std::move(call), run), gate_up};
}

Tensor moe_experts_cpu(const Tensor& x, const Tensor& w_gate_up, const Tensor& w_down,
                       const Tensor& experts, const Tensor& weights) {
  return forward({"moe_experts", x, w_gate_up, w_down, experts, weights}, run_cpu);
}

std::tuple<Tensor, Tensor> moe_experts_keep_cpu(const Tensor& x, const Tensor& w_gate_up,
                                                const Tensor& w_down, const Tensor& experts,
                                                const Tensor& weights) {
  return forward_keep({"moe_experts_keep", x, w_gate_up, w_down, experts, weights}, run_cpu);
}

// --- CPU and CUDA -------------------------------------------------------------

// The gradient's problem, without that of w_gate_up.
MoeExpertsBackward backward_problem(const Call& call, Gradients& grads) {
  MoeExpertsBackward b;
  b.forward = call.problem;
  b.forward.gate_up = const_cast<void*>(grads.gate_up.const_data_ptr());
  b.grad_out = grads.grad_out.const_data_ptr();
  if (grads.wanted & Gradients::kX) b.grad_x = grads.x.mutable_data_ptr();
  if (grads.wanted & Gradients::kDown) b.grad_w_down = grads.w_down.mutable_data_ptr();
  if (grads.wanted & Gradients::kWeights) b.grad_weights = grads.weights.mutable_data_ptr();
  return b;
}

using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Four moe_experts_backward_cpu(const Tensor& grad_out, const Tensor& x, const Tensor& w_gate_up,
                              const Tensor& w_down, const Tensor& experts, const Tensor& weights,
                              const Tensor& gate_up, int64_t wanted) {
  Call call("moe_experts_backward", x, w_gate_up, w_down, experts, weights);
  Gradients grads(call, grad_out, gate_up, wanted);
  MoeExpertsBackward b = backward_problem(call, grads);
  b.grad_w_gate_up = grads.make_w_gate_up(call);
  const MoeExperts& p = b.forward;
  std::vector<double> grad_gate_up(call.assignments() * 2 * p.inner);
  std::vector<double> activations(call.assignments() * p.inner);
  run_backward_cpu(b, grad_gate_up, activations);
  moe_map_cpu(p.map);
  const auto row = [&](const void* rows, int64_t size) {
    return [=, &p](auto tag, int64_t i, int64_t at) {
      return double(static_cast<const decltype(tag)*>(rows)[i / p.top_k * size + at]);
    };
  };
  if (b.grad_w_gate_up != nullptr) {
    const auto left = [&](auto, int64_t i, int64_t n) { return grad_gate_up[i * 2 * p.inner + n]; };
    add_outer_products(p, b.grad_w_gate_up, 2 * p.inner, p.hidden, left, row(p.x, p.hidden));
  }
  if (b.grad_w_down != nullptr) {
    const auto right = [&](auto, int64_t i, int64_t n) { return activations[i * p.inner + n]; };
    add_outer_products(p, b.grad_w_down, p.hidden, p.inner, row(b.grad_out, p.hidden), right);
  }
  return grads.results(weights);
}

// --- CUDA ---------------------------------------------------------------------

// Freed when the call returns: torch's allocator gives them to later work of this
// stream only.
struct Space {
  Tensor activations, results;

  // `shared`: both in the same place, as a gradient may have them.
  explicit Space(Call& call, bool shared = false)
      : activations(
            empty({call.assignments(), shared ? widest(call) : call.problem.inner}, call.x)),
        results(empty({shared ? 0 : call.assignments(), call.problem.hidden}, call.x)) {
    call.problem.activations = activations.mutable_data_ptr();
    call.problem.results = (shared ? activations : results).mutable_data_ptr();
  }
  static int64_t widest(const Call& call) {
    return std::max(call.problem.inner, call.problem.hidden);
  }
};

void run_cuda(Call& call) {
  const Space space(call);
  launch(call.op, call.x,
         [&](cudaStream_t stream) { return moe_experts_launch(call.problem, stream); });
}

Tensor moe_experts_cuda(const Tensor& x, const Tensor& w_gate_up, const Tensor& w_down,
                        const Tensor& experts, const Tensor& weights) {
  return forward({"moe_experts", x, w_gate_up, w_down, experts, weights}, run_cuda);
}

std::tuple<Tensor, Tensor> moe_experts_keep_cuda(const Tensor& x, const Tensor& w_gate_up,
                                                 const Tensor& w_down, const Tensor& experts,
                                                 const Tensor& weights) {
  return forward_keep({"moe_experts_keep", x, w_gate_up, w_down, experts, weights}, run_cuda);
}

Four moe_experts_backward_cuda(const Tensor& grad_out, const Tensor& x, const Tensor& w_gate_up,
                               const Tensor& w_down, const Tensor& experts, const Tensor& weights,
                               const Tensor& gate_up, int64_t wanted) {
  Call call("moe_experts_backward", x, w_gate_up, w_down, experts, weights);
  Gradients grads(call, grad_out, gate_up, wanted);
  Tensor grad_gate_up = call.empty_gate_up();
  MoeExpertsBackward b;
  {
    const Space space(call, true);
    b = backward_problem(call, grads);
    b.grad_gate_up = grad_gate_up.mutable_data_ptr();
    launch(call.op, x, [&](cudaStream_t stream) { return moe_experts_backward_launch(b, stream); });
  }
  b.forward.activations = b.forward.results = nullptr;
  b.grad_w_gate_up = grads.make_w_gate_up(call);
  if (b.grad_w_gate_up != nullptr) {
    launch(call.op, x,
           [&](cudaStream_t stream) { return moe_experts_backward_w_gate_up_launch(b, stream); });
  }
  return grads.results(weights);
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("moe_experts(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor experts, Tensor weights) "
          "-> Tensor",
          "")
      .doc(R"(SwiGLU experts for routed tokens: each token's k results, weighted and added up.

An index outside of range(E) is an expert whose result is zero, so a rank that has a part of the
experts may number them from 0 and send its own part of the sum on. The same call gives the same
bits every time.

Shapes: x (T, H), w_gate_up (E, 2I, H) with the gate first and w_down (E, H, I) as Hugging Face
keeps them, experts and weights (T, k) as moe_route gives them; the result (T, H). E from 1 to 512.
Dtypes: x and both matrices float64, float32, float16 or bfloat16, the same for all; weights any of
these, experts int64. Products are added up in float32, in float64 for float64.
Memory: (I + H) elements for each of the T * k assignments, and their map. Arguments that are not
contiguous are copied.
Errors: RuntimeError for another shape or dtype, or T * k from 2^31 on.
Formula: out[t] = sum over j of weights[t, j] * ((silu(gate) * up) @ w_down[e]^T) with e = experts[t,
j] and gate, up = x[t] @ w_gate_up[e]^T.)")
      .cpu<moe_experts_cpu>()
      .cuda<moe_experts_cuda>();
  library
      .op("moe_experts_keep(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor experts, "
          "Tensor weights) -> (Tensor out, Tensor gate_up)",
          "")
      .doc(R"(moe_experts, and the gates and ups of every assignment, (T, k, 2I), for its gradient.

Shapes: those of moe_experts; gate_up (T, k, 2I).
Dtypes: those of moe_experts; gate_up has that of x.
Errors: those of moe_experts.
Formula: that of moe_experts; gate_up[t, j] = x[t] @ w_gate_up[e]^T.)")
      .cpu<moe_experts_keep_cpu>()
      .cuda<moe_experts_keep_cuda>();
  library
      .op("moe_experts_backward(Tensor grad_out, Tensor x, Tensor w_gate_up, Tensor w_down, "
          "Tensor experts, Tensor weights, Tensor gate_up, int wanted=15) -> (Tensor grad_x, "
          "Tensor grad_w_gate_up, Tensor grad_w_down, Tensor grad_weights)",
          "")
      .doc(R"(Gradients of moe_experts from what moe_experts_keep kept.

`wanted` adds up 1 for x, 2 for w_gate_up, 4 for w_down and 8 for weights; of the others the result
has no elements. An expert without tokens gets zeros. The same call gives the same bits every time.

Shapes: those of moe_experts_keep, grad_out (T, H); each result has the shape of its argument.
Dtypes: those of moe_experts; each result has the dtype of its argument.
Errors: those of moe_experts.
Formula: the chain rule for moe_experts.)")
      .cpu<moe_experts_backward_cpu>()
      .cuda<moe_experts_backward_cuda>();
}
