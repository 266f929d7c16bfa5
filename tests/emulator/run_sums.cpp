// Sums over rows and of everything under every choice that tuning may make: rows that one block
// takes, and rows that are split, once or twice.
#include "cases.h"

#include "reduce_sum.cu"
#include "sum_rows.cu"

using namespace emulator;

namespace {

using Partials = int64_t (*)(const RowSums&);
using Launch = cudaError_t (*)(const RowSums&, cudaStream_t);

// Returns whether rows were split.
bool run_case(const Tensor& x, DType dtype, size_t rows, size_t n, const RowSums& choice,
              bool is_total) {
  RowSums p = choice;
  p.rows.data = x.data();
  p.rows.dtype = dtype;
  p.rows.add_dim(int64_t(rows), int64_t(n));
  p.n = int64_t(n);
  const size_t size = is_total ? 1 : rows;
  const Tensor out(dtype, size);
  p.out = out.data();
  const Partials partials_of = is_total ? reduce_sum_partials : sum_rows_partials;
  const Launch launch = is_total ? reduce_sum_launch : sum_rows_launch;
  std::vector<double> partials(size_t(partials_of(p)), NAN);
  allow_reads(partials.data(), partials.size() * 8);
  p.partials = partials.data();
  check(launch(p, nullptr), "launch");
  std::vector<double> wanted(size, 0.0);
  for (size_t i = 0; i < rows * n; ++i) wanted[is_total ? 0 : i / n] += x.get(i);
  // A lost number is near 1: the rounding of a sum in 16 bits may hide it, that in 32 does not.
  compare("sums", out.values(), wanted, size, dtype == DType::kFloat32 ? 2e-2 : 4);
  return row_sums_config(p, current_device()).splits > 1;
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  int split = 0, whole = 0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& [rows, n] : {std::pair<size_t, size_t>{1, 70001}, {3, 40000}, {20, 9000}}) {
      Tensor x(dtype, rows * n);
      x.fill(numbers, 1);
      for (const int blocks : {4, 8, 16, 32}) {
        for (const int bytes : {32, 64, 128, 256}) {
          RowSums choice;
          choice.blocks_per_sm = blocks;
          choice.split_bytes = bytes;
          for (const bool is_total : {false, true}) {
            ++(run_case(x, dtype, rows, n, choice, is_total) ? split : whole);
          }
        }
      }
    }
  }
  if (split == 0 || whole == 0) fail("%d split, %d not: expected some of both", split, whole);
  return 0;
}
