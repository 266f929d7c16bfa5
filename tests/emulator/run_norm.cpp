// Norms and their gradients, for rows of every kind of length: ordinary ones, rows of equal
// numbers, and rows whose first pack is far from all others.
#include "cases.h"

#include "add_rms_norm_.cu"
#include "layer_norm.cu"
#include "rms_norm.cu"

using namespace emulator;

namespace {

struct Case {
  DType dtype;
  double tolerance;
  bool is_layer;
  size_t rows, n, gap;  // gap: elements between rows of x
};

struct Wanted {
  std::vector<double> out, grad_x, grad_weight, grad_bias;
};

constexpr double kEps = 1e-5;

Wanted computed(const Case& c, const Tensor& x, const std::vector<double>& grad_out,
                const std::vector<double>& weight, const std::vector<double>& bias) {
  const size_t n = c.n;
  Wanted w{std::vector<double>(c.rows * n), std::vector<double>(c.rows * n), std::vector<double>(n),
           std::vector<double>(n)};
  for (size_t row = 0; row < c.rows; ++row) {
    const auto at = [&](size_t i) { return x.get(row * (n + c.gap) + i); };
    const double* const grad = &grad_out[row * n];
    double mean = 0, variance = 0, shift = 0, along = 0;
    for (size_t i = 0; i < n; ++i) mean += c.is_layer ? (at(i) - at(0)) / double(n) : 0;
    if (c.is_layer) mean += at(0);
    for (size_t i = 0; i < n; ++i) variance += (at(i) - mean) * (at(i) - mean) / double(n);
    const double scale = 1 / std::sqrt(variance + kEps);
    for (size_t i = 0; i < n; ++i) {
      const double y = (at(i) - mean) * scale, g = grad[i] * weight[i];
      shift += c.is_layer ? g / double(n) : 0;
      along += g * y / double(n);
    }
    for (size_t i = 0; i < n; ++i) {
      const double y = (at(i) - mean) * scale;
      w.out[row * n + i] = y * weight[i] + (c.is_layer ? bias[i] : 0);
      w.grad_x[row * n + i] = scale * (grad[i] * weight[i] - shift - y * along);
      w.grad_weight[i] += grad[i] * y;
      w.grad_bias[i] += grad[i];
    }
  }
  return w;
}

void run_case(std::mt19937& numbers, const Case& c) {
  const size_t step = c.n + c.gap, size = c.rows * c.n;
  Tensor x(c.dtype, c.rows * step), weight(c.dtype, c.n), bias(c.dtype, c.n);
  Tensor grad_out(c.dtype, size);
  for (Tensor* tensor : {&x, &weight, &bias, &grad_out}) tensor->fill(numbers, 1);
  for (size_t row = 0; row < c.rows; ++row) {
    for (size_t i = 0; i < c.n; ++i) {
      if (row % 4 == 1 && i < 8) x.set(row * step + i, 50);  // the first pack is far from the mean
      if (row % 4 == 2) x.set(row * step + i, 3.140625);
    }
  }
  const Tensor out(c.dtype, size), grad_x(c.dtype, size);
  const Tensor grad_weight(c.dtype, c.n), grad_bias(c.dtype, c.n);
  NormGradient g;
  Norm& p = g.norm;
  p.x = x.data();
  p.weight = weight.data();
  p.bias = c.is_layer ? bias.data() : nullptr;
  p.out = out.data();
  p.rows = int64_t(c.rows);
  p.n = int64_t(c.n);
  p.x_step = int64_t(step);
  p.out_step = p.n;
  p.eps = kEps;
  p.dtype = p.weight_dtype = c.dtype;
  g.grad_out = grad_out.data();
  g.grad_x = grad_x.data();
  g.grad_weight = grad_weight.data();
  g.grad_bias = c.is_layer ? grad_bias.data() : nullptr;
  const NormGradientConfig config = norm_gradient_config(g, current_device());
  std::printf("%s: pack %d, packs %d, lanes %d of %d, stages %d, blocks %d\n", name(c.dtype),
              config.pack, config.packs, config.lanes, config.threads, config.stages,
              int(config.blocks));
  std::vector<double> partials(size_t(norm_partials(g, current_device())), NAN);
  allow_reads(partials.data(), partials.size() * 8);
  g.partials = partials.data();
  check((c.is_layer ? layer_norm_launch : rms_norm_launch)(p, nullptr), "launch");
  check((c.is_layer ? layer_norm_backward_launch : rms_norm_backward_launch)(g, nullptr),
        "backward launch");
  const Wanted w = computed(c, x, grad_out.values(), weight.values(), bias.values());
  compare("out", out.values(), w.out, c.n, c.tolerance);
  // A row of equal numbers has nothing but what rounding leaves, times 1 / sqrt(eps).
  compare("grad_x", grad_x.values(), w.grad_x, c.n, 4 * c.tolerance);
  compare("grad_weight", grad_weight.values(), w.grad_weight, c.n, 4 * c.tolerance);
  if (c.is_layer) compare("grad_bias", grad_bias.values(), w.grad_bias, c.n, 4 * c.tolerance);
}

void run_add(std::mt19937& numbers, const Case& c) {
  Tensor x(c.dtype, c.rows * c.n), residual(c.dtype, c.rows * c.n), weight(c.dtype, c.n);
  for (Tensor* tensor : {&x, &residual, &weight}) tensor->fill(numbers, 1);
  std::vector<double> sum = x.values(), out(c.rows * c.n);
  for (size_t i = 0; i < sum.size(); ++i) {
    const Tensor rounded(c.dtype, 1);
    rounded.set(0, sum[i] + residual.get(i));
    sum[i] = rounded.get(0);
  }
  for (size_t row = 0; row < c.rows; ++row) {
    double squares = 0;
    for (size_t i = 0; i < c.n; ++i) squares += sum[row * c.n + i] * sum[row * c.n + i];
    const double scale = 1 / std::sqrt(squares / double(c.n) + kEps);
    for (size_t i = 0; i < c.n; ++i)
      out[row * c.n + i] = sum[row * c.n + i] * scale * weight.get(i);
  }
  Norm p;
  p.x = p.out = x.data();
  p.weight = weight.data();
  p.residual = residual.data();
  p.rows = int64_t(c.rows);
  p.n = p.x_step = p.out_step = p.residual_step = int64_t(c.n);
  p.eps = kEps;
  p.dtype = p.weight_dtype = c.dtype;
  check(add_rms_norm_launch(p, nullptr), "launch");
  compare("x", x.values(), out, c.n, c.tolerance);
  compare("residual", residual.values(), sum, c.n, c.tolerance);
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  const DType dtype = dtype_named(arguments.text("dtype"));
  const double tolerance = dtype == DType::kFloat64   ? 1e-13
                           : dtype == DType::kFloat32 ? 4e-6
                           : dtype == DType::kFloat16 ? 2e-3
                                                      : 2e-2;
  Case c{dtype,
         tolerance,
         false,
         size_t(arguments.number("rows")),
         size_t(arguments.number("n")),
         size_t(arguments.number("gap"))};
  for (const bool is_layer : {false, true}) {
    c.is_layer = is_layer;
    run_case(numbers, c);
  }
  if (c.gap == 0) run_add(numbers, c);
  return 0;
}
