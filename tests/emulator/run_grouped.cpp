// One product of gathered rows on Hopper: small enough to be compiled for each fault that
// the emulator has to find.
#include "cases.h"

#include "gemm_grouped_hopper.cuh"

using namespace cuda_ops;
using namespace emulator;

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  constexpr int kRows = 200, kN = 264, kK = 840;
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  Tensor a(DType::kBFloat16, kRows * kK), b(DType::kBFloat16, kN * kK);
  const Tensor out(DType::kBFloat16, kRows * kN);
  a.fill(numbers, 1);
  b.fill(numbers, 1);
  // All rows are one expert's, last first.
  std::vector<int32_t> order;
  for (int i = kRows; i-- > 0;) order.push_back(i);
  const std::vector<int32_t> offsets{0, kRows};

  GroupedRows p{order.data(), offsets.data(), kRows, 1,         kN, kK, 1,
                a.data(),     b.data(),       false, out.data()};
  check(grouped_rows_hopper_launch<BFloat16, false, false>(p, nullptr), "the launch");
  const std::vector<double> rows = a.values(), columns = b.values();
  std::vector<double> wanted;
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kN; ++j) {
      double sum = 0;
      for (int q = 0; q < kK; ++q) sum += rows[size_t(i * kK + q)] * columns[size_t(j * kK + q)];
      wanted.push_back(sum);
    }
  }
  compare("out", out.values(), wanted, kN, 5e-3);
  return 0;
}
