// Products of a mixture of experts on Hopper: small enough to be compiled for each fault that
// the emulator has to find.
#include "cases.h"

#include "gemm_grouped_hopper_weights.cuh"

using namespace cuda_ops;
using namespace emulator;

namespace {

// out = rows times a matrix, each assignment with a row of its own. `gather`: rows lie at their
// numbers; else at their positions, as in the result.
template <bool kGather>
void run_rows(std::mt19937& numbers) {
  constexpr int kRows = 200, kN = 264, kK = 840;
  Tensor a(DType::kBFloat16, kRows * kK), b(DType::kBFloat16, kN * kK);
  const Tensor out(DType::kBFloat16, kRows * kN);
  a.fill(numbers, 1);
  b.fill(numbers, 1);
  // All rows are one expert's, last first.
  std::vector<int32_t> order;
  for (int i = kRows; i-- > 0;) order.push_back(i);
  const std::vector<int32_t> offsets{0, kRows};

  GroupedRows p{order.data(),    offsets.data(), kRows,    1,     kN,         kK,
                kGather ? 1 : 0, a.data(),       b.data(), false, out.data(), !kGather};
  check(grouped_rows_hopper_launch<BFloat16, false, false, kGather>(p, nullptr), "the launch");
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
}

// out[e] = sum of outer products of e's rows. Every other expert with rows has nothing but NaN,
// which the others' results must not have; so have the rows of no expert.
void run_weights(std::mt19937& numbers, bool odd) {
  constexpr int kM = 136, kN = 264;
  const std::vector<int> counts{65, 63, 0, 130, 1, 64, 7};
  const int experts = int(counts.size()) - 1;
  std::vector<int32_t> offsets{0};
  for (const int count : counts) offsets.push_back(offsets.back() + count);
  const int assignments = offsets.back();
  Tensor a(DType::kBFloat16, size_t(assignments * kM)),
      b(DType::kBFloat16, size_t(assignments * kN));
  const Tensor out(DType::kBFloat16, size_t(experts * kM * kN));
  a.fill(numbers, 1);
  b.fill(numbers, 1);
  const std::vector<double> left = a.values(), right = b.values();
  const auto poisoned = [&](int e) { return e == experts || (e + (e > 2)) % 2 == int(odd); };
  for (int e = 0; e <= experts; ++e) {
    if (!poisoned(e)) continue;
    for (int i = offsets[e] * kM; i < offsets[e + 1] * kM; ++i) a.set(size_t(i), NAN);
    for (int i = offsets[e] * kN; i < offsets[e + 1] * kN; ++i) b.set(size_t(i), INFINITY);
  }
  GroupedWeights p{nullptr, offsets.data(), assignments, experts,   kM, kN, 0,
                   0,       a.data(),       b.data(),    out.data()};
  check(grouped_weights_hopper<BFloat16>(p, nullptr), "the launch");
  const std::vector<double> got = out.values();
  for (int e = 0; e < experts; ++e) {
    const auto begin = got.begin() + e * kM * kN;
    if (poisoned(e) && counts[size_t(e)] > 0) {
      if (!std::isnan(*begin)) fail("weights of NaN are %g", *begin);
      continue;
    }
    std::vector<double> wanted(kM * kN);
    for (int i = offsets[e]; i < offsets[e + 1]; ++i) {
      for (int m = 0; m < kM; ++m) {
        for (int n = 0; n < kN; ++n) {
          wanted[size_t(m * kN + n)] += left[size_t(i * kM + m)] * right[size_t(i * kN + n)];
        }
      }
    }
    compare("weights", {begin, begin + kM * kN}, wanted, kN, 5e-3);
  }
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  run_rows<true>(numbers);
  run_rows<false>(numbers);
  run_weights(numbers, false);
  run_weights(numbers, true);
  return 0;
}
