// Products of a mixture of experts on Hopper: rows with matrices, or gradients of weights. Small,
// so that each fault shows soon.
#include "cases.h"

#include "moe/gemm_grouped_hopper_weights.cuh"

using namespace cuda_ops;
using namespace emulator;

namespace {

// out = rows times a matrix, each assignment with a row of its own. `gather`: rows lie at their
// numbers; else at their positions, as in the result.
template <class Tile, bool kGather>
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

  std::vector<int32_t> taken{0};
  GroupedRows p{order.data(),
                offsets.data(),
                kRows,
                1,
                kN,
                kK,
                kGather ? RowsAt::numbers() : RowsAt::positions(),
                a.data(),
                b.data(),
                false,
                out.data(),
                !kGather,
                nullptr,
                taken.data()};
  check(grouped_rows_hopper_launch<BFloat16, Tile, false, false, kGather>(p, nullptr),
        "the launch");
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

// out[e] = sum of outer products of e's rows, with those of a or, `turned`, of b at their numbers.
// Every other expert with rows has nothing but NaN, which the others' results must not have; so
// have the rows of no expert.
void run_weights(std::mt19937& numbers, bool turned, bool odd) {
  constexpr int kGathered = 136, kPlaced = 264;
  const int m = turned ? kPlaced : kGathered, n = turned ? kGathered : kPlaced;
  const std::vector<int> counts{65, 63, 0, 130, 1, 64, 7};
  const int experts = int(counts.size()) - 1;
  std::vector<int32_t> offsets{0};
  for (const int count : counts) offsets.push_back(offsets.back() + count);
  const int assignments = offsets.back();
  std::vector<int32_t> order;
  for (int i = 0; i < assignments; ++i) order.push_back(i);
  std::shuffle(order.begin(), order.end(), numbers);
  Tensor gathered(DType::kBFloat16, size_t(assignments * kGathered)),
      placed(DType::kBFloat16, size_t(assignments * kPlaced));
  const Tensor out(DType::kBFloat16, size_t(experts * m * n));
  gathered.fill(numbers, 1);
  placed.fill(numbers, 1);
  const std::vector<double> by_number = gathered.values(), by_position = placed.values();
  const auto poisoned = [&](int e) { return e == experts || (e + (e > 2)) % 2 == int(odd); };
  for (int e = 0; e <= experts; ++e) {
    if (!poisoned(e)) continue;
    for (int i = offsets[e]; i < offsets[e + 1]; ++i) {
      for (int c = 0; c < kGathered; ++c) gathered.set(size_t(order[i] * kGathered + c), NAN);
      for (int c = 0; c < kPlaced; ++c) placed.set(size_t(i * kPlaced + c), INFINITY);
    }
  }
  GroupedWeights p{order.data(),
                   offsets.data(),
                   assignments,
                   experts,
                   m,
                   n,
                   turned ? RowsAt::positions() : RowsAt::numbers(),
                   turned ? RowsAt::numbers() : RowsAt::positions(),
                   gathered.data(),
                   placed.data(),
                   out.data()};
  if (turned) std::swap(p.a, p.b);
  check(grouped_weights_hopper<BFloat16>(p, nullptr), "the launch");
  const std::vector<double> got = out.values();
  for (int e = 0; e < experts; ++e) {
    const auto begin = got.begin() + e * m * n;
    if (poisoned(e) && counts[size_t(e)] > 0) {
      if (!std::isnan(*begin)) fail("weights of NaN are %g", *begin);
      continue;
    }
    std::vector<double> wanted(size_t(m * n));
    for (int i = offsets[e]; i < offsets[e + 1]; ++i) {
      const double* one = &by_number[size_t(order[i] * kGathered)];
      const double* other = &by_position[size_t(i * kPlaced)];
      if (turned) std::swap(one, other);
      for (int row = 0; row < m; ++row) {
        for (int c = 0; c < n; ++c) wanted[size_t(row * n + c)] += one[row] * other[c];
      }
    }
    compare("weights", {begin, begin + m * n}, wanted, size_t(n), 5e-3);
  }
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  if (arguments.text("products") == "rows") {
    run_rows<GroupedHopper, true>(numbers);
    run_rows<GroupedHopper, false>(numbers);
    run_rows<TallGroupedHopper, true>(numbers);
    run_rows<TallGroupedHopper, false>(numbers);
  } else {
    for (const bool turned : {false, true}) {
      for (const bool odd : {false, true}) run_weights(numbers, turned, odd);
    }
  }
  return 0;
}
