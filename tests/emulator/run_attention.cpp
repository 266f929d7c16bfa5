// Attention and its gradient: sequences with two heads each, which lie between the rows of q and
// share those of k and v.
#include "cases.h"

#include "attention.cu"

using namespace emulator;

namespace {

constexpr size_t kHeads = 2;

struct Sizes {
  size_t batch, m, n, d, pitch;  // elements from one row, or one head, to the next
  bool causal;

  size_t seen(size_t query) const { return causal ? std::min(n, query + 1) : n; }
};

using Rows = std::vector<double>;

double dot(const Rows& a, size_t at, const Rows& b, size_t from, size_t d) {
  double sum = 0;
  for (size_t i = 0; i < d; ++i) sum += a[at + i] * b[from + i];
  return sum;
}

struct Wanted {
  Rows out, grad_q, grad_k, grad_v;
};

// What each head of dense results should be; `grad` is as large as the result.
Wanted wanted(const Sizes& s, double scale, const Rows& q, const Rows& k, const Rows& v,
              const Rows& grad) {
  const size_t heads = s.batch * kHeads;
  Wanted w{Rows(heads * s.m * s.d), Rows(heads * s.m * s.d), Rows(heads * s.n * s.d),
           Rows(heads * s.n * s.d)};
  for (size_t head = 0; head < heads; ++head) {
    const size_t batch = head / kHeads, begin = head * s.m * s.d, keys = head * s.n * s.d;
    for (size_t i = 0; i < s.m; ++i) {
      const size_t at = ((batch * s.m + i) * kHeads + head % kHeads) * s.pitch;
      const size_t out = begin + i * s.d;
      const auto row = [&](size_t j) { return (batch * s.n + j) * s.pitch; };
      Rows weights(s.seen(i));
      double most = -INFINITY, total = 0, delta = 0;
      for (size_t j = 0; j < weights.size(); ++j) {
        weights[j] = scale * dot(q, at, k, row(j), s.d);
        most = std::max(most, weights[j]);
      }
      for (double& weight : weights) total += weight = std::exp(weight - most);
      for (size_t j = 0; j < weights.size(); ++j) {
        weights[j] /= total;
        for (size_t c = 0; c < s.d; ++c) w.out[out + c] += weights[j] * v[row(j) + c];
      }
      for (size_t c = 0; c < s.d; ++c) delta += grad[out + c] * w.out[out + c];
      for (size_t j = 0; j < weights.size(); ++j) {
        const double g = scale * weights[j] * (dot(grad, out, v, row(j), s.d) - delta);
        for (size_t c = 0; c < s.d; ++c) {
          w.grad_q[out + c] += g * k[row(j) + c];
          w.grad_k[keys + j * s.d + c] += g * q[at + c];
          w.grad_v[keys + j * s.d + c] += weights[j] * grad[out + c];
        }
      }
    }
  }
  return w;
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  const auto size = [&](const char* name) { return size_t(arguments.number(name)); };
  const size_t batch = size("batch"), d = size("d"), pitch = size("pitch");
  const Sizes s{batch, size("m"), size("n"), d, pitch > 0 ? pitch : d, size("causal") != 0};
  const DType dtype = dtype_named(arguments.text("dtype"));
  const bool half = size_of(dtype) == 2;
  const DType wide = compute_dtype(dtype);
  const size_t heads = s.batch * kHeads;
  const auto n = [](size_t value) { return int64_t(value); };
  std::mt19937 numbers(unsigned(arguments.number("seed")));

  Tensor q(dtype, s.batch * s.m * kHeads * s.pitch), k(dtype, s.batch * s.n * s.pitch);
  Tensor v(dtype, s.batch * s.n * s.pitch), grad(dtype, heads * s.m * s.d);
  for (Tensor* tensor : {&q, &k, &v, &grad}) tensor->fill(numbers, arguments.number("size"));
  const Tensor out(dtype, heads * s.m * s.d), lse(wide, heads * s.m), delta(wide, heads * s.m);
  const Tensor grad_q(dtype, heads * s.m * s.d), grad_k(dtype, heads * s.n * s.d),
      grad_v(dtype, heads * s.n * s.d);

  // From one head to the next, and from one sequence to the next.
  const auto operand = [&](const Tensor& tensor, size_t head, size_t batch) {
    cuda_ops::Operand made;
    made.data = tensor.data();
    made.strides[0] = n(head);
    made.strides[1] = n(batch);
    return made;
  };
  const auto dense = [&](const Tensor& tensor, size_t rows) {
    return operand(tensor, rows * s.d, kHeads * rows * s.d);
  };
  const auto describe = [&](auto& p, auto... operands) {
    p.shape = {n(s.m), n(s.n), int(s.d), s.causal, 0.25, true};
    p.heads.dtype = dtype;
    p.heads.numel = n(heads);
    p.heads.dims = 2;
    p.heads.sizes[0] = kHeads;
    p.heads.sizes[1] = s.batch;
    p.heads.operands = {operands...};
    p.q_step = n(kHeads * s.pitch);
    p.k_step = p.v_step = n(s.pitch);
    for (const auto& [input, step] : {std::pair{0, p.q_step}, {1, p.k_step}, {2, p.v_step}}) {
      p.shape.vectors = p.shape.vectors && has_aligned_rows(p.heads, input, step);
    }
  };
  const cuda_ops::Operand of_q = operand(q, s.pitch, s.m * kHeads * s.pitch);
  const cuda_ops::Operand of_k = operand(k, 0, s.n * s.pitch), of_v = operand(v, 0, s.n * s.pitch);
  Attention p;
  describe(p, dense(out, s.m), of_q, of_k, of_v);
  p.lse = lse.data();
  p.may_use_hopper = arguments.number("hopper") != 0;
  p.plan = attention_plan(p);
  if (const auto each = int64_t(arguments.number("split")); each > 0) {
    p.plan.splits = (p.shape.seen(n(s.m)) + each - 1) / each;
    p.plan.keys = each;
  }
  const auto rows = size_t(p.plan.splits) * heads * s.m;
  const Tensor partial_out(wide, rows * s.d), partial_lse(wide, rows);
  p.partial_out = partial_out.data();
  p.partial_lse = partial_lse.data();
  check(attention_launch(p, nullptr), "launch");

  const double exact = dtype == DType::kFloat64    ? 1e-13
                       : dtype == DType::kFloat32  ? 3e-5
                       : dtype == DType::kBFloat16 ? 2e-2
                                                   : 3e-3;
  std::printf("vectors=%d hopper=%d splits=%d\n", int(p.shape.vectors), int(p.plan.hopper),
              int(p.plan.splits));
  const Wanted w = wanted(s, 0.25, q.values(), k.values(), v.values(), grad.values());
  compare("out", out.values(), w.out, s.m * s.d, exact);
  if (arguments.number("size") > 1) return 0;  // the lse of large scores is not exact enough

  AttentionGradient g;
  describe(g, dense(grad_q, s.m), dense(grad_k, s.n), dense(grad_v, s.n), of_q, of_k, of_v,
           dense(grad, s.m), dense(out, s.m));
  g.grad_step = g.out_step = n(s.d);
  g.shape.vectors = g.shape.vectors && has_aligned_rows(g.heads, 3, g.grad_step);
  g.may_use_hopper = p.may_use_hopper;
  g.lse = lse.data();
  g.delta = delta.data();
  const bool for_hopper = attention_fits_hopper_gradient(g, current_device());
  std::printf("gradient hopper=%d\n", int(for_hopper));
  check(attention_backward_launch(g, nullptr), "launch of the gradient");

  const double loose = half ? 3 * exact : exact;
  compare("grad_q", grad_q.values(), w.grad_q, s.m * s.d, loose);
  compare("grad_k", grad_k.values(), w.grad_k, s.n * s.d, loose);
  compare("grad_v", grad_v.values(), w.grad_v, s.n * s.d, loose);
  return 0;
}
