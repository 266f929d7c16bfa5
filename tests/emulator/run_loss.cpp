// softmax_cross_entropy and its gradient, for rows of every kind of length, ignored and invalid
// labels, and rows that begin anywhere.
#include "cases.h"

#include "softmax_cross_entropy.cu"

using namespace emulator;

namespace {

struct Case {
  size_t rows, n, gap;  // gap: elements between rows
  double smoothing;
};

void compare_numbers(const char* what, std::vector<double> got, std::vector<double> wanted,
                     size_t n, double tolerance) {
  // What is the same and not finite counts as 0: beside an infinity any error would be small. What
  // is not finite in one alone is an infinite error.
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isfinite(got[i]) && std::isfinite(wanted[i])) continue;
    const bool is_same = got[i] == wanted[i] || (std::isnan(got[i]) && std::isnan(wanted[i]));
    got[i] = is_same ? 0 : INFINITY;
    wanted[i] = 0;
  }
  compare(what, got, wanted, n, tolerance);
}

void run_case(std::mt19937& numbers, DType dtype, double tolerance, Case c) {
  const size_t step = c.n + c.gap;
  Tensor logits(dtype, c.rows * step + 1);
  logits.fill(numbers, 3);
  std::vector<int64_t> labels(c.rows), count(1, -1);
  std::vector<double> lse(c.rows, NAN);
  for (size_t row = 0; row < c.rows; ++row) {
    labels[row] = c.n > 0 ? int64_t(numbers() % c.n) : 0;
    if (row % 5 == 2) labels[row] = -100;
    if (row % 7 == 3) labels[row] = int64_t(c.n);
    if (row % 3 == 1 && c.n > 0) logits.set(row * step + numbers() % c.n, -INFINITY);
  }
  allow_reads(labels.data(), labels.size() * 8);
  allow_reads(lse.data(), lse.size() * 8);
  allow_reads(count.data(), 8);
  for (const bool is_total : {false, true}) {
    // Without rows that are out of range the sum of all is a number.
    if (is_total) {
      for (int64_t& label : labels) label = label == int64_t(c.n) ? 0 : label;
    }
    const size_t size = is_total ? 1 : c.rows;
    const Tensor loss(dtype, size), grad_logits(dtype, c.rows * c.n);
    Tensor grad_loss(dtype, size);
    grad_loss.fill(numbers, 1);
    CrossEntropyGradient g;
    CrossEntropy& p = g.forward;
    p.logits = logits.data();
    p.labels = labels.data();
    p.loss = loss.data();
    p.lse = lse.data();
    p.count = count.data();
    p.rows = int64_t(c.rows);
    p.n = int64_t(c.n);
    p.step = int64_t(step);
    p.ignore_index = -100;
    p.smoothing = c.smoothing;
    p.is_total = p.is_mean = is_total;
    p.dtype = dtype;
    std::vector<double> partials(size_t(softmax_cross_entropy_partials(p)), NAN);
    allow_reads(partials.data(), partials.size() * 8);
    p.partials = partials.data();
    check(softmax_cross_entropy_launch(p, nullptr), "launch");
    g.grad_loss = grad_loss.data();
    g.grad_logits = grad_logits.data();
    g.out_step = int64_t(c.n);
    check(softmax_cross_entropy_backward_launch(g, nullptr), "backward launch");

    std::vector<double> losses(c.rows), sums(c.rows), grads(c.rows * c.n);
    int64_t counted = 0;
    for (const int64_t label : labels) counted += label != -100;
    for (size_t row = 0; row < c.rows; ++row) {
      if (labels[row] == -100) continue;
      double sum = 0, mean = 0;
      const auto at = [&](size_t i) { return logits.get(row * step + i); };
      for (size_t i = 0; i < c.n; ++i) {
        sum += std::exp(at(i));
        mean += at(i) / double(c.n);
      }
      const double wanted = sums[row] = std::log(sum);
      const bool is_known = labels[row] < int64_t(c.n);
      losses[row] = is_known ? (1 - c.smoothing) * (wanted - at(size_t(labels[row]))) : NAN;
      if (c.smoothing > 0) losses[row] += c.smoothing * (wanted - mean);
      const double scale = grad_loss.get(is_total ? 0 : row) / (is_total ? double(counted) : 1);
      for (size_t i = 0; i < c.n; ++i) {
        const double target = double(int64_t(i) == labels[row]) * (1 - c.smoothing);
        grads[row * c.n + i] =
            is_known ? scale * (std::exp(at(i) - wanted) - c.smoothing / double(c.n) - target)
                     : NAN;
      }
    }
    if (is_total) {
      double sum = 0;
      for (const double one : losses) sum += one;
      losses.assign(1, sum / double(counted));
      if (count[0] != counted) fail("count is %d, not %d", int(count[0]), int(counted));
    }
    compare_numbers("loss", loss.values(), losses, size, tolerance);
    compare_numbers("lse", lse, sums, c.rows, dtype == DType::kFloat64 ? 1e-13 : 1e-6);
    compare_numbers("grad_logits", grad_logits.values(), grads, c.n, 4 * tolerance);
    if (!is_total) continue;
    g.grad_logits = logits.data();
    g.out_step = p.step;
    check(softmax_cross_entropy_backward_launch(g, nullptr), "backward launch in place");
    std::vector<double> written(c.rows * c.n);
    for (size_t i = 0; i < written.size(); ++i) {
      written[i] = logits.get(i / c.n * step + i % c.n);
    }
    compare_numbers("in place", written, grad_logits.values(), c.n, tolerance);
  }
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  const std::pair<DType, double> precisions[] = {{DType::kFloat64, 1e-12},
                                                 {DType::kFloat32, 4e-6},
                                                 {DType::kFloat16, 2e-3},
                                                 {DType::kBFloat16, 2e-2}};
  for (const auto& [dtype, tolerance] : precisions) {
    for (const Case c : {Case{1, 1, 0, 0},
                         {9, 10, 0, 0.1},
                         {4, 33, 1, 0},
                         {40, 100, 3, 0},
                         {3, 1021, 0, 0.1},
                         {5, 1500, 5, 0},
                         {2, 9001, 0, 0},
                         {3, 20480, 1, 0.1},
                         {600, 520, 0, 0},
                         {700, 24, 0, 0},
                         {700, 32, 0, 0.1},
                         {1, 1024, 0, 0},
                         {50, 256, 8, 0.1},
                         {0, 64, 0, 0},
                         {0, 9001, 0, 0.1},
                         {5, 0, 0, 0}}) {
      run_case(numbers, dtype, tolerance, c);
    }
  }
  return 0;
}
