// One case of moe_experts, forward and maybe backward, against sums in double. Twice, for
// the same bits from two orders of events.
#include "cases.h"

#include "moe_experts.cu"

using namespace emulator;

namespace {

struct Problem {
  explicit Problem(const Arguments& arguments)
      : tokens(arguments.number("tokens")),
        hidden(arguments.number("hidden")),
        inner(arguments.number("inner")),
        experts(arguments.number("experts")),
        top_k(arguments.number("top_k")),
        routing(arguments.text("routing")),
        dtype(dtype_named(arguments.text("dtype"))),
        tolerance(dtype == DType::kFloat16 ? 6e-3 : 3e-2),
        numbers(unsigned(arguments.number("seed"))) {
    for (int i = 0; i < assignments(); ++i) {
      chosen.push_back(routing == "tails" ? tail(i) : choice());
      weights.push_back(float(numbers() % 1000) / 1000);
    }
    x.fill(numbers, 1);
    grad_out.fill(numbers, 1);
    w_gate_up.fill(numbers, 1 / std::sqrt(hidden));
    w_down.fill(numbers, 1 / std::sqrt(inner));
  }

  int assignments() const { return tokens * top_k; }
  // An expert's last stage of 64 rows has 1, 63, none, 64, 1 and 2 of its own.
  int64_t tail(int i) const {
    constexpr int kEnds[] = {1, 64, 64, 128, 193};
    int64_t e = 0;
    while (e < 5 && i >= kEnds[e]) ++e;
    return e;
  }
  // The expert of an assignment, or below 0 for none.
  int64_t expert(int i) const {
    const int64_t e = chosen[size_t(i)];
    return e < experts ? e : -1;
  }

  int64_t choice() {
    const auto drawn = int64_t(numbers() % unsigned(experts));
    if (routing == "one") return experts / 2;
    if (routing == "invalid") return int64_t(numbers() % unsigned(experts + 3)) - 1;
    if (routing == "some") return numbers() % 4 == 0 ? experts - 1 : drawn % 3 == 1 ? 0 : drawn;
    if (routing != "even") fail("routing=%s", routing.c_str());
    return drawn;
  }

  int tokens, hidden, inner, experts, top_k;
  std::string routing;
  DType dtype;
  double tolerance;
  std::mt19937 numbers;
  std::vector<int64_t> chosen;
  std::vector<float> weights;
  Tensor x{dtype, size_t(tokens) * hidden}, grad_out{dtype, size_t(tokens) * hidden};
  Tensor w_gate_up{dtype, size_t(experts) * 2 * inner * hidden};
  Tensor w_down{dtype, size_t(experts) * hidden * inner};
};

// sums += scale * matrix vector
void add_product(double* sums, const double* matrix, const double* vector, int rows, int columns,
                 double scale) {
  for (int r = 0; r < rows; ++r) {
    double sum = 0;
    for (int c = 0; c < columns; ++c) sum += matrix[size_t(r) * columns + c] * vector[c];
    sums[r] += scale * sum;
  }
}
// sums += matrix^T vector
void add_transposed(double* sums, const double* matrix, const double* vector, int rows,
                    int columns) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) sums[c] += matrix[size_t(r) * columns + c] * vector[r];
  }
}
// sums += rows columns^T
void add_outer(double* sums, const double* rows, const double* columns, int row_count,
               int column_count) {
  for (int r = 0; r < row_count; ++r) {
    for (int c = 0; c < column_count; ++c)
      sums[size_t(r) * column_count + c] += rows[r] * columns[c];
  }
}

double sigmoid_of(double value) { return 1 / (1 + std::exp(-value)); }

struct Forward {
  std::vector<double> gate_up, activations, out;

  explicit Forward(const Problem& p)
      : gate_up(size_t(p.assignments()) * 2 * p.inner),
        activations(size_t(p.assignments()) * p.inner),
        out(size_t(p.tokens) * p.hidden) {
    const auto x = p.x.values(), w_gate_up = p.w_gate_up.values(), w_down = p.w_down.values();
    for (int i = 0; i < p.assignments(); ++i) {
      const int64_t e = p.expert(i);
      if (e < 0) continue;
      double* const gates = &gate_up[size_t(i) * 2 * p.inner];
      double* const a = &activations[size_t(i) * p.inner];
      add_product(gates, &w_gate_up[size_t(e) * 2 * p.inner * p.hidden],
                  &x[size_t(i / p.top_k) * p.hidden], 2 * p.inner, p.hidden, 1);
      for (int n = 0; n < p.inner; ++n) a[n] = gates[n] * sigmoid_of(gates[n]) * gates[p.inner + n];
      add_product(&out[size_t(i / p.top_k) * p.hidden], &w_down[size_t(e) * p.hidden * p.inner], a,
                  p.hidden, p.inner, p.weights[size_t(i)]);
    }
  }
};

struct Backward {
  std::vector<double> x, w_gate_up, w_down, weights;

  Backward(const Problem& p, const std::vector<double>& gate_up)
      : x(size_t(p.tokens) * p.hidden),
        w_gate_up(size_t(p.experts) * 2 * p.inner * p.hidden),
        w_down(size_t(p.experts) * p.hidden * p.inner),
        weights(size_t(p.assignments())) {
    const auto in = p.x.values(), grad_out = p.grad_out.values();
    const auto to_gate_up = p.w_gate_up.values(), down = p.w_down.values();
    for (int i = 0; i < p.assignments(); ++i) {
      const int64_t e = p.expert(i);
      if (e < 0) continue;
      const size_t token = size_t(i / p.top_k) * p.hidden;
      const size_t at_down = size_t(e) * p.hidden * p.inner, at_gate_up = 2 * at_down;
      std::vector<double> through(size_t(p.inner)), weighted(size_t(p.inner));
      std::vector<double> grad(size_t(2 * p.inner));
      add_transposed(through.data(), &down[at_down], &grad_out[token], p.hidden, p.inner);
      const double weight = p.weights[size_t(i)];
      for (int n = 0; n < p.inner; ++n) {
        const double gate = gate_up[size_t(i) * 2 * p.inner + n];
        const double up = gate_up[size_t(i) * 2 * p.inner + p.inner + n];
        const double s = sigmoid_of(gate), silu = gate * s, flow = through[size_t(n)];
        weights[size_t(i)] += flow * silu * up;
        weighted[size_t(n)] = weight * silu * up;
        grad[size_t(n)] = weight * flow * up * (s + silu * (1 - s));
        grad[size_t(p.inner + n)] = weight * flow * silu;
      }
      add_transposed(&x[token], &to_gate_up[at_gate_up], grad.data(), 2 * p.inner, p.hidden);
      add_outer(&w_gate_up[at_gate_up], grad.data(), &in[token], 2 * p.inner, p.hidden);
      add_outer(&w_down[at_down], &grad_out[token], weighted.data(), p.hidden, p.inner);
    }
  }
};

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  capability = arguments.number("capability");
  Problem p(arguments);
  const auto tensor = [&](size_t rows, int columns) { return Tensor(p.dtype, rows * columns); };
  const auto assignments = size_t(p.assignments());

  std::vector<int32_t> order(assignments), offsets(size_t(p.experts) + 1);
  std::vector<int32_t> counts(size_t(moe_map_counts(p.assignments(), p.experts)));
  std::vector<int32_t> taken(kMapProducts, 1 << 30);  // whatever memory held
  const Tensor gate_up = tensor(assignments, 2 * p.inner), out = tensor(p.tokens, p.hidden);
  const Tensor activations = tensor(assignments, p.inner), results = tensor(assignments, p.hidden);
  MoeExperts moe;
  moe.dtype = p.dtype;
  moe.tokens = p.tokens;
  moe.top_k = p.top_k;
  moe.hidden = p.hidden;
  moe.inner = p.inner;
  moe.map = {p.chosen.data(), p.assignments(), p.experts,   order.data(),
             offsets.data(),  counts.data(),   taken.data()};
  moe.x = p.x.data();
  moe.weights = p.weights.data();
  moe.w_gate_up = p.w_gate_up.data();
  moe.w_down = p.w_down.data();
  moe.gate_up = arguments.number("keep") ? gate_up.data() : nullptr;
  moe.activations = activations.data();
  moe.results = results.data();
  moe.out = out.data();
  moe.built_for_hopper = true;

  std::printf("plan: %s\n", moe_plan(moe, current_device()).text().c_str());
  check(moe_experts_launch(moe, nullptr), "moe_experts_launch");
  Forward wanted(p);
  compare("out", out.values(), wanted.out, size_t(p.hidden), p.tolerance);
  const MoePlan::Family family = moe_plan(moe, current_device()).family;
  if (family != MoePlan::kStream) {
    const std::vector<double> by_number = wanted.activations;
    for (size_t i = 0; i < by_number.size(); ++i) {
      const auto inner = size_t(p.inner);
      wanted.activations[i] = by_number[size_t(order[i / inner]) * inner + i % inner];
    }
  }
  if (family == MoePlan::kHopper) {  // those of no expert, the last, are neither written nor read
    wanted.activations.resize(size_t(offsets[size_t(p.experts)]) * size_t(p.inner));
  }
  compare("activations", activations.values(), wanted.activations, size_t(p.inner), p.tolerance);
  if (moe.gate_up != nullptr) {
    compare("gate_up", gate_up.values(), wanted.gate_up, size_t(2 * p.inner), p.tolerance);
  }
  const std::vector<double> first = out.values();
  check(moe_experts_launch(moe, nullptr), "moe_experts_launch");
  compare("out of another order of events", out.values(), first, size_t(p.hidden), 0);
  if (!arguments.number("backward")) return 0;

  // From what was kept, rounded, as in autograd.
  for (size_t i = 0; i < wanted.gate_up.size(); ++i) gate_up.set(i, wanted.gate_up[i]);
  const Tensor grad_gate_up = tensor(assignments, 2 * p.inner), grad_x = tensor(p.tokens, p.hidden);
  const Tensor grad_w_gate_up = tensor(size_t(p.experts) * 2 * p.inner, p.hidden);
  const Tensor grad_w_down = tensor(size_t(p.experts) * p.hidden, p.inner);
  const Tensor grad_weights(DType::kFloat32, assignments);
  MoeExpertsBackward back;
  back.forward = moe;
  back.forward.gate_up = gate_up.data();
  const Tensor space = tensor(assignments, p.inner), rows = tensor(assignments, p.hidden);
  back.forward.activations = space.data();
  back.grad_out = p.grad_out.data();
  back.grad_gate_up = grad_gate_up.data();
  back.grad_x = grad_x.data();
  back.grad_weights = grad_weights.data();
  back.grad_w_gate_up = grad_w_gate_up.data();
  back.grad_w_down = grad_w_down.data();

  std::printf("backward plan: %s\n", moe_plan(back, current_device()).text().c_str());
  check(moe_experts_backward_down_launch(back, nullptr), "moe_experts_backward_down_launch");
  back.forward.activations = nullptr;
  back.forward.results = rows.data();
  check(moe_experts_backward_x_launch(back, nullptr), "moe_experts_backward_x_launch");
  back.forward.results = nullptr;
  check(moe_experts_backward_w_gate_up_launch(back, nullptr),
        "moe_experts_backward_w_gate_up_launch");
  const Backward grads(p, gate_up.values());
  const auto matrix = size_t(p.inner) * size_t(p.hidden);
  compare("grad_x", grad_x.values(), grads.x, size_t(p.hidden), p.tolerance);
  compare("grad_w_gate_up", grad_w_gate_up.values(), grads.w_gate_up, 2 * matrix, p.tolerance);
  compare("grad_w_down", grad_w_down.values(), grads.w_down, matrix, p.tolerance);
  compare("grad_weights", grad_weights.values(), grads.weights, assignments, p.tolerance);
  return 0;
}
