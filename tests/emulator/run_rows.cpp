// The pair of rows that `compile_dev.py new` writes, a softmax, for rows of every kind of length.
#include "cases.h"

#include "by_rows.cu"

using namespace emulator;

namespace {

struct Precision {
  DType dtype;
  double tolerance;
};

std::vector<double> softmax_of(const std::vector<double>& x, size_t n) {
  std::vector<double> out(x.size());
  for (size_t first = 0; first < x.size(); first += n) {
    double sum = 0;
    for (size_t k = first; k < first + n; ++k) sum += std::exp(x[k]);
    for (size_t k = first; k < first + n; ++k) out[k] = std::exp(x[k]) / sum;
  }
  return out;
}

std::vector<double> gradient_of(const std::vector<double>& grad_out, const std::vector<double>& out,
                                size_t n) {
  std::vector<double> grad(out.size());
  for (size_t first = 0; first < out.size(); first += n) {
    double sum = 0;
    for (size_t k = first; k < first + n; ++k) sum += grad_out[k] * out[k];
    for (size_t k = first; k < first + n; ++k) grad[k] = out[k] * (grad_out[k] - sum);
  }
  return grad;
}

void run_rows(std::mt19937& numbers, Precision precision, size_t rows, size_t n) {
  const auto [dtype, tolerance] = precision;
  Tensor x(dtype, rows * n), grad_out(dtype, rows * n);
  const Tensor out(dtype, rows * n), grad_x(dtype, rows * n);
  x.fill(numbers, 1);
  grad_out.fill(numbers, 1);
  check(by_rows_launch(dtype, int64_t(rows), int64_t(n), x.data(), out.data(), nullptr), "launch");
  compare("out", out.values(), softmax_of(x.values(), n), n, tolerance);
  check(by_rows_backward_launch(dtype, int64_t(rows), int64_t(n), grad_out.data(), out.data(),
                                grad_x.data(), nullptr),
        "backward launch");
  const std::vector<double> wanted = gradient_of(grad_out.values(), out.values(), n);
  compare("grad_x", grad_x.values(), wanted, n, tolerance);
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  for (const Precision precision : {Precision{DType::kFloat64, 1e-13},
                                    {DType::kFloat32, 2e-6},
                                    {DType::kFloat16, 2e-3},
                                    {DType::kBFloat16, 2e-2}}) {
    for (const size_t n : {7, 31, 32, 33, 200}) {
      for (const size_t rows : {1, 4, 9}) run_rows(numbers, precision, rows, n);
    }
  }
  return 0;
}
