// moe_experts(x, w_gate_up, w_down, experts, weights): SwiGLU experts for tokens that
// are routed already, and their gradients.
#include "foreach/foreach_binding.h"
#include "moe/moe_cpu.h"
#include "moe/moe_binding.h"

using namespace cuda_ops;

cudaError_t moe_experts_launch(const MoeExperts& problem, cudaStream_t stream);
cudaError_t moe_experts_backward_down_launch(const MoeExpertsBackward& problem,
                                             cudaStream_t stream);
cudaError_t moe_experts_backward_x_launch(const MoeExpertsBackward& problem, cudaStream_t stream);
cudaError_t moe_experts_backward_w_gate_up_launch(const MoeExpertsBackward& problem,
                                                  cudaStream_t stream);

namespace {

// --- arguments ------------------------------------------------------------------

MoeExperts sized(DType dtype, const Tensor& experts, const MapTensors& map, int64_t hidden,
                 int64_t inner) {
  MoeExperts p;
  p.dtype = dtype;
  p.tokens = experts.size(0);
  p.top_k = experts.size(1);
  p.hidden = hidden;
  p.inner = inner;
  p.map = map.map;
  p.built_for_hopper = built_for_hopper();
  return p;
}

// The arguments of one call, dense, with all sizes known.
struct Call {
  Tensor x, w_gate_up, w_down, experts, weights;
  MapTensors map;
  MoeExperts problem;

  Call(const Tensor& x_, const Tensor& w_gate_up_, const Tensor& w_down_, const Tensor& experts_,
       const Tensor& weights_)
      : x(contiguous(x_)),
        w_gate_up(contiguous(w_gate_up_)),
        w_down(contiguous(w_down_)),
        experts(contiguous_choice(experts_)),
        weights(contiguous_as(weights_, compute_dtype(dtype_of(x_)))),
        map(experts, w_down.size(0)),
        problem(sized(dtype_of(x), experts, map, x.size(1), w_down.size(2))) {
    problem.x = x.const_data_ptr();
    problem.weights = weights.const_data_ptr();
    problem.w_gate_up = w_gate_up.const_data_ptr();
    problem.w_down = w_down.const_data_ptr();
  }
};

// The gradients that are asked for; the results of the others have no elements.
enum Wanted { kX = 1, kGateUp = 2, kDown = 4, kWeights = 8 };

Tensor made(int64_t wanted, Wanted one, const Tensor& like) {
  return wanted & one ? empty(shape_of(like), like) : empty({0}, like);
}

// --- CUDA ---------------------------------------------------------------------

// Space is freed when a function returns: torch's allocator gives it to later work of this
// stream only.

void run_cuda(Call& call) {
  MoeExperts& p = call.problem;
  Tensor activations = empty({p.map.assignments, p.inner}, call.x);
  Tensor results = empty({p.map.assignments, p.hidden}, call.x);
  p.activations = activations.mutable_data_ptr();
  p.results = results.mutable_data_ptr();
  launch(call.x, [&](cudaStream_t stream) { return moe_experts_launch(p, stream); });
}

void down_cuda(MoeExpertsBackward& b, const Tensor& like) {
  Tensor activations = empty({b.forward.map.assignments, b.forward.inner}, like);
  b.forward.activations = activations.mutable_data_ptr();
  launch(like, [&](cudaStream_t stream) { return moe_experts_backward_down_launch(b, stream); });
}

void x_cuda(MoeExpertsBackward& b, const Tensor& like) {
  const int64_t rows = b.grad_x == nullptr ? 0 : b.forward.map.assignments;
  Tensor results = empty({rows, b.forward.hidden}, like);
  b.forward.results = results.mutable_data_ptr();
  launch(like, [&](cudaStream_t stream) { return moe_experts_backward_x_launch(b, stream); });
  b.forward.results = nullptr;
}

void w_gate_up_cuda(MoeExpertsBackward& b, const Tensor& like) {
  launch(like,
         [&](cudaStream_t stream) { return moe_experts_backward_w_gate_up_launch(b, stream); });
}

// --- both ---------------------------------------------------------------------

// The functions of a device. A gradient takes the steps in this order; the last one uses the map
// that the step before has made.
using Step = void (*)(MoeExpertsBackward& b, const Tensor& like);
struct Device {
  void (*run)(Call&);
  Step down, x, w_gate_up;
};
constexpr Device kCpu{
    [](Call& call) { moe_experts_cpu(call.problem); },
    [](MoeExpertsBackward& b, const Tensor&) { moe_experts_backward_down_cpu(b); },
    [](MoeExpertsBackward& b, const Tensor&) { moe_experts_backward_x_cpu(b); },
    [](MoeExpertsBackward& b, const Tensor&) { moe_experts_backward_w_gate_up_cpu(b); },
};
constexpr Device kCuda{run_cuda, down_cuda, x_cuda, w_gate_up_cuda};

template <const Device& kDevice>
Tensor forward(Call call) {
  Tensor out = empty(shape_of(call.x), call.x);
  call.problem.out = out.mutable_data_ptr();
  kDevice.run(call);
  return out;
}

template <const Device& kDevice>
Tensor moe_experts(const Tensor& x, const Tensor& w_gate_up, const Tensor& w_down,
                   const Tensor& experts, const Tensor& weights) {
  return forward<kDevice>({x, w_gate_up, w_down, experts, weights});
}

template <const Device& kDevice>
std::tuple<Tensor, Tensor> moe_experts_keep(const Tensor& x, const Tensor& w_gate_up,
                                            const Tensor& w_down, const Tensor& experts,
                                            const Tensor& weights) {
  Call call(x, w_gate_up, w_down, experts, weights);
  const MoeExperts& p = call.problem;
  Tensor gate_up = empty({p.tokens, p.top_k, 2 * p.inner}, call.x);
  call.problem.gate_up = gate_up.mutable_data_ptr();
  return {forward<kDevice>(std::move(call)), gate_up};
}

// No signature line describes lists, so what one says of the others is checked here.
void check_shape(const char* name, const Tensor& x, const std::vector<int64_t>& expected) {
  if (shape_of(x) == expected) return;
  std::string text;
  for (const int64_t size : expected) text += (text.empty() ? "" : ", ") + std::to_string(size);
  refuse(name, "shape [" + text + "]", "shape " + shape_name(x));
}

void check_dims(const char* name, const Tensor& x, size_t dims) {
  if (shape_of(x).size() != dims) {
    refuse(name, std::to_string(dims) + " dims", "shape " + shape_name(x));
  }
}

void check_dtype(const std::string& name, const Tensor& x, const char* like, const Tensor& other) {
  if (dtype_of(x) == dtype_of(other)) return;
  refuse(name, "dtype " + dtype_name(other) + " like '" + like + "'", dtype_name(x));
}

void check_floating(const char* name, const Tensor& x) {
  if (std::find(std::begin(kFloating), std::end(kFloating), dtype_of(x)) == std::end(kFloating)) {
    refuse(name, "dtype float64, float32, float16 or bfloat16", dtype_name(x));
  }
}

void check_mixture(const Tensor& x, const Tensor& w_gate_up, const Tensor& w_down,
                   const Tensor& experts, const Tensor& weights) {
  check_floating("x", x);
  check_dtype("w_gate_up", w_gate_up, "x", x);
  check_dtype("w_down", w_down, "x", x);
  if (dtype_of(experts) != DType::kInt64) refuse("experts", "dtype int64", dtype_name(experts));
  check_floating("weights", weights);
  check_dims("x", x, 2);
  check_dims("w_down", w_down, 3);
  check_dims("experts", experts, 2);
  const int64_t count = w_down.size(0), inner = w_down.size(2);
  if (count < 1 || count > kMostExperts) {
    refuse("w_down", "1 to " + std::to_string(kMostExperts) + " experts", std::to_string(count));
  }
  check_shape("w_down", w_down, {count, x.size(1), inner});
  check_shape("w_gate_up", w_gate_up, {count, 2 * inner, x.size(1)});
  check_shape("experts", experts, {x.size(0), experts.size(1)});
  check_shape("weights", weights, shape_of(experts));
}

// Refuses lists that the rows of tokens cannot be shared out to.
MoeParts parts_of(const Tensors& outs, const Tensor& x) {
  const auto count = int64_t(outs.size()), tokens = x.size(0);
  if (count < 1 || count > kMostParts || tokens % count != 0) {
    refuse("outs",
           "1 to " + std::to_string(kMostParts) + " tensors that share out the " +
               std::to_string(tokens) + " rows of 'x'",
           std::to_string(count));
  }
  MoeParts parts;
  for (const Tensor& out : outs) {
    const std::string name = element_name("outs", size_t(parts.count));
    check_dtype(name, out, "x", x);
    check_shape(name.c_str(), out, {tokens / count, x.size(1)});
    if (!out.is_contiguous()) refuse(name, "a contiguous tensor", "one that is not");
    parts.data[parts.count++] = out.mutable_data_ptr();
  }
  parts.rows = tokens / count;
  return parts;
}

template <const Device& kDevice>
void moe_experts_into(const Tensor& x, const Tensor& w_gate_up, const Tensor& w_down,
                      const Tensor& experts, const Tensor& weights, const Tensors& outs) {
  check_mixture(x, w_gate_up, w_down, experts, weights);
  const MoeParts parts = parts_of(outs, x);
  Call call(x, w_gate_up, w_down, experts, weights);
  call.problem.out = parts;
  kDevice.run(call);
}

using Three = std::tuple<Tensor, Tensor, Tensor>;

template <const Device& kDevice>
Three moe_experts_backward_down(const Tensor& grad_out_, const Tensor& w_down_,
                                const Tensor& experts_, const Tensor& weights_,
                                const Tensor& gate_up_, int64_t wanted) {
  const Tensor grad_out = contiguous(grad_out_), w_down = contiguous(w_down_);
  const Tensor experts = contiguous_choice(experts_), gate_up = contiguous(gate_up_);
  const Tensor weights = contiguous_as(weights_, compute_dtype(dtype_of(grad_out)));
  const MapTensors map(experts, w_down.size(0));
  MoeExpertsBackward b;
  MoeExperts& p = b.forward;
  p = sized(dtype_of(grad_out), experts, map, grad_out.size(1), w_down.size(2));
  p.weights = weights.const_data_ptr();
  p.w_down = w_down.const_data_ptr();
  p.gate_up = const_cast<void*>(gate_up.const_data_ptr());
  b.grad_out = grad_out.const_data_ptr();

  Tensor grad_gate_up = empty({p.tokens, p.top_k, 2 * p.inner}, grad_out);
  Tensor grad_w_down = made(wanted, kDown, w_down);
  Tensor grad_weights = made(wanted, kWeights, weights);
  b.grad_gate_up = grad_gate_up.mutable_data_ptr();
  if (wanted & kDown) b.grad_w_down = grad_w_down.mutable_data_ptr();
  if (wanted & kWeights) b.grad_weights = grad_weights.mutable_data_ptr();
  kDevice.down(b, grad_out);
  return {grad_gate_up, grad_w_down, contiguous_as(grad_weights, dtype_of(weights_))};
}

template <const Device& kDevice>
std::tuple<Tensor, Tensor> moe_experts_backward_gate_up(const Tensor& grad_gate_up_,
                                                        const Tensor& x_, const Tensor& w_gate_up_,
                                                        const Tensor& experts_, int64_t wanted) {
  if (!(wanted & (kX | kGateUp))) return {empty({0}, x_), empty({0}, w_gate_up_)};
  const Tensor grad_gate_up = contiguous(grad_gate_up_), x = contiguous(x_);
  const Tensor w_gate_up = contiguous(w_gate_up_), experts = contiguous_choice(experts_);
  const MapTensors map(experts, w_gate_up.size(0));
  MoeExpertsBackward b;
  MoeExperts& p = b.forward;
  p = sized(dtype_of(x), experts, map, x.size(1), w_gate_up.size(1) / 2);
  p.x = x.const_data_ptr();
  p.w_gate_up = w_gate_up.const_data_ptr();
  b.grad_gate_up = const_cast<void*>(grad_gate_up.const_data_ptr());

  Tensor grad_x = made(wanted, kX, x);
  if (wanted & kX) b.grad_x = grad_x.mutable_data_ptr();
  kDevice.x(b, x);
  // The largest comes last, after the others have given their memory back.
  Tensor grad_w_gate_up = made(wanted, kGateUp, w_gate_up);
  if (wanted & kGateUp) b.grad_w_gate_up = grad_w_gate_up.mutable_data_ptr();
  if (b.grad_w_gate_up != nullptr) kDevice.w_gate_up(b, x);
  return {grad_x, grad_w_gate_up};
}

template <const Device& kDevice>
std::tuple<Tensor, Tensor, Tensor, Tensor> moe_experts_backward(
    const Tensor& grad_out, const Tensor& x, const Tensor& w_gate_up, const Tensor& w_down,
    const Tensor& experts, const Tensor& weights, const Tensor& gate_up, int64_t wanted) {
  const auto [grad_gate_up, grad_w_down, grad_weights] =
      moe_experts_backward_down<kDevice>(grad_out, w_down, experts, weights, gate_up, wanted);
  const auto [grad_x, grad_w_gate_up] =
      moe_experts_backward_gate_up<kDevice>(grad_gate_up, x, w_gate_up, experts, wanted);
  return {grad_x, grad_w_gate_up, grad_w_down, grad_weights};
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("moe_experts(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor experts, Tensor weights) "
          "-> Tensor",
          "[t,h],[e,2i,h],[e,h,i],[t,k],[t,k]->[t,h]")
      .dtypes(kFloating)
      .dtypes("experts", kInt64)
      .dtypes("weights", kFloating)
      .range("e", 1, kMostExperts)
      .doc(R"(SwiGLU experts for routed tokens: each token's k results, weighted and added up.

An index outside range(E) means an expert whose result is zero, so a rank that has only some of the
experts may number them from 0 and pass on its part of the sum. The same call gives the same bits
every time.

Shapes: x (T, H), w_gate_up (E, 2I, H) with the gate first and w_down (E, H, I) as Hugging Face
keeps them, experts and weights (T, k) as moe_route gives them; the result (T, H). E from 1 to 512.
Dtypes: x and both matrices float64, float32, float16 or bfloat16, the same for all; weights any of
these, experts int64. Products are summed in float32, or in float64 for float64.
Memory: (I + H) elements for each of the T * k assignments, and their map. Arguments that are not
contiguous are copied. The gradient runs the forward pass again; moe_experts_keep returns what makes
that unnecessary, and moe keeps it.
Errors: RuntimeError for any other shape, dtype or device, for T * k of 2^31 or more, and for second
derivatives.
Formula: out[t] = sum over j of weights[t, j] * ((silu(gate) * up) @ w_down[e]^T) with e = experts[t,
j] and gate, up = x[t] @ w_gate_up[e]^T.

Example:
>>> x, experts, weights = torch.ones(1, 2), torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.75]])
>>> cuda_ops.moe_experts(x, torch.ones(2, 2, 2), torch.ones(2, 2, 1), experts, weights)
tensor([[3.5232, 3.5232]]))")
      .cpu<moe_experts<kCpu>>()
      .cuda<moe_experts<kCuda>>();
  library
      .op("moe_experts_into_(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor experts, "
          "Tensor weights, Tensor(a!)[] outs) -> ()",
          "")
      .doc(
          R"(moe_experts, its rows shared out to tensors: the first to the first of them, and so on.

What moe calls where GPUs of one host write into each other's memory: the sums of a rank's tokens go
to that rank as they are made.

Shapes: as in moe_experts; outs 1 to 16 contiguous tensors (T / n, H), for n of them.
Dtypes: as in moe_experts; outs that of x.
Errors: as in moe_experts, and RuntimeError for outs of another number, shape, dtype, device or
layout, and for one that requires a gradient.
Formula: as in moe_experts; outs[r][t] is row r * T / n + t.)")
      .cpu<moe_experts_into<kCpu>>()
      .cuda<moe_experts_into<kCuda>>();
  library
      .op("moe_experts_keep(Tensor x, Tensor w_gate_up, Tensor w_down, Tensor experts, "
          "Tensor weights) -> (Tensor out, Tensor gate_up)",
          "[t,h],[e,2i,h],[e,h,i],[t,k],[t,k]->[t,h],[t,k,2i]")
      .dtypes(kFloating)
      .dtypes("experts", kInt64)
      .dtypes("weights", kFloating)
      .range("e", 1, kMostExperts)
      .doc(
          R"(moe_experts and also the gate and up of every assignment, (T, k, 2I), for its gradient.

Shapes: as in moe_experts; gate_up (T, k, 2I).
Dtypes: as in moe_experts; gate_up has that of x.
Errors: as in moe_experts.
Formula: as in moe_experts; gate_up[t, j] = x[t] @ w_gate_up[e]^T.)")
      .cpu<moe_experts_keep<kCpu>>()
      .cuda<moe_experts_keep<kCuda>>();
  library
      .op("moe_experts_backward(Tensor grad_out, Tensor x, Tensor w_gate_up, Tensor w_down, "
          "Tensor experts, Tensor weights, Tensor gate_up, int wanted=15) -> (Tensor grad_x, "
          "Tensor grad_w_gate_up, Tensor grad_w_down, Tensor grad_weights)",
          "[t,h],[t,h],[e,2i,h],[e,h,i],[t,k],[t,k],[t,k,2i]->[t,h],[e,2i,h],[e,h,i],[t,k]")
      .dtypes(kFloating)
      .dtypes("experts", kInt64)
      .dtypes("weights", kFloating)
      .range("e", 1, kMostExperts)
      .range("wanted", 0, 15)
      .doc(R"(Gradients of moe_experts, from the results of moe_experts_keep.

`wanted` is the sum of 1 for x, 2 for w_gate_up, 4 for w_down and 8 for weights; a gradient that is
not wanted has no elements. An expert without tokens gets zeros. The same call gives the same bits
every time.

Shapes: as in moe_experts_keep, grad_out (T, H); each result has the shape of its argument.
Dtypes: as in moe_experts; each result has the dtype of its argument.
Errors: as in moe_experts.
Formula: the chain rule for moe_experts.)")
      .cpu<moe_experts_backward<kCpu>>()
      .cuda<moe_experts_backward<kCuda>>();
  library
      .op("moe_experts_backward_down(Tensor grad_out, Tensor w_down, Tensor experts, "
          "Tensor weights, Tensor gate_up, int wanted=15) -> (Tensor grad_gate_up, "
          "Tensor grad_w_down, Tensor grad_weights)",
          "[t,h],[e,h,i],[t,k],[t,k],[t,k,2i]->[t,k,2i],[e,h,i],[t,k]")
      .dtypes(kFloating)
      .dtypes("experts", kInt64)
      .dtypes("weights", kFloating)
      .range("e", 1, kMostExperts)
      .range("wanted", 0, 15)
      .doc(R"(The first half of moe_experts_backward, after which gate_up is no longer needed.

The T * k rows of grad_gate_up are ordered by expert and then by token, as moe_route_map orders
them; rows of no expert come last. `wanted` is as in moe_experts_backward, but only 4 and 8 count.

Shapes: as in moe_experts_backward; grad_gate_up (T, k, 2I).
Dtypes: as in moe_experts_backward; grad_gate_up has that of grad_out.
Errors: as in moe_experts.
Formula: the chain rule for moe_experts.)")
      .cpu<moe_experts_backward_down<kCpu>>()
      .cuda<moe_experts_backward_down<kCuda>>();
  library
      .op("moe_experts_backward_gate_up(Tensor grad_gate_up, Tensor x, Tensor w_gate_up, "
          "Tensor experts, int wanted=15) -> (Tensor grad_x, Tensor grad_w_gate_up)",
          "[t,k,2i],[t,h],[e,2i,h],[t,k]->[t,h],[e,2i,h]")
      .dtypes(kFloating)
      .dtypes("experts", kInt64)
      .range("e", 1, kMostExperts)
      .range("wanted", 0, 15)
      .doc(R"(The second half of moe_experts_backward, from what moe_experts_backward_down returns.

`wanted` is as in moe_experts_backward, but only 1 and 2 count.

Shapes: grad_gate_up (T, k, 2I), its rows ordered by expert, the others as in moe_experts; each
result has the shape of its argument.
Dtypes: as in moe_experts; grad_gate_up has that of x.
Errors: as in moe_experts.
Formula: the chain rule for moe_experts.)")
      .cpu<moe_experts_backward_gate_up<kCpu>>()
      .cuda<moe_experts_backward_gate_up<kCuda>>();
}
