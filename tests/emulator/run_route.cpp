// One case of moe_route and of the map of what it chose, against a stable sort in double.
// Logits are multiples of a quarter, so that many are equal, some are -0 and one may be NaN.
#include "cases.h"

#include "moe_route.cu"

using namespace emulator;

namespace {

// Experts of a token, best first.
std::vector<int> best_first(const std::vector<double>& keys) {
  std::vector<int> order(keys.size());
  for (size_t e = 0; e < keys.size(); ++e) order[e] = int(e);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const double left = keys[size_t(a)], right = keys[size_t(b)];
    return left > right || (left != left && right == right);
  });
  return order;
}

void check_map(const MoeMap& map) {
  std::vector<int32_t> wanted, offsets(size_t(map.experts) + 1);
  for (int64_t e = 0; e <= map.experts; ++e) {
    offsets[size_t(e)] = int32_t(wanted.size());
    for (int64_t i = 0; i < map.assignments; ++i) {
      const bool known = map.chosen[i] >= 0 && map.chosen[i] < map.experts;
      if (e < map.experts ? map.chosen[i] == e : !known) wanted.push_back(int32_t(i));
    }
  }
  if (!std::equal(wanted.begin(), wanted.end(), map.order)) fail("the map's order is wrong");
  if (!std::equal(offsets.begin(), offsets.end(), map.offsets)) fail("the offsets are wrong");
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  capability = arguments.number("capability");
  const auto tokens = size_t(arguments.number("tokens"));
  const auto experts = size_t(arguments.number("experts"));
  const auto top_k = size_t(arguments.number("top_k"));
  const bool sigmoid = arguments.number("sigmoid"), renormalize = arguments.number("renormalize");
  const DType dtype = dtype_named(arguments.text("dtype"));
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  const DType of_weights = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
  const Tensor logits(dtype, tokens * experts), weights(of_weights, tokens * top_k);
  const bool transposed = arguments.number("transposed");
  const auto place = [&](size_t t, size_t e) {
    return transposed ? e * tokens + t : t * experts + e;
  };
  for (size_t i = 0; i < tokens * experts; ++i) {
    logits.set(i, numbers() % 16 == 0 ? -0. : (int(numbers() % 33) - 16) / 4.);
  }
  std::vector<double> bias(arguments.number("bias") ? experts : 0);
  for (double& value : bias) value = double(numbers() % 100) / 200;
  // By scores and a bias it would not come first, as all of them are NaN.
  if (bias.empty()) logits.set(place(0, experts / 2), NAN);
  std::vector<int64_t> chosen(tokens * top_k);

  MoeRoute p;
  p.dtype = dtype;
  p.tokens = int64_t(tokens);
  p.experts = int64_t(experts);
  p.top_k = int64_t(top_k);
  p.logits = logits.data();
  p.token_stride = transposed ? 1 : p.experts;
  p.expert_stride = transposed ? p.tokens : 1;
  p.bias = bias.empty() ? nullptr : bias.data();
  p.scoring = sigmoid ? Scoring::kSigmoid : Scoring::kSoftmax;
  p.renormalize = renormalize;
  p.weights = weights.data();
  p.chosen = chosen.data();
  check(moe_route_launch(p, nullptr), "moe_route_launch");

  std::vector<double> wanted(tokens * top_k);
  for (size_t t = 0; t < tokens; ++t) {
    std::vector<double> row(experts), scores(experts);
    double sum = 0, largest = -INFINITY;
    for (size_t e = 0; e < experts; ++e) row[e] = logits.get(place(t, e));
    for (const double logit : row) largest = logit != logit ? logit : std::max(largest, logit);
    for (const double logit : row) sum += std::exp(logit - largest);
    for (size_t e = 0; e < experts; ++e) {
      scores[e] = sigmoid ? 1 / (1 + std::exp(-row[e])) : std::exp(row[e] - largest) / sum;
    }
    std::vector<double> keys = row;
    for (size_t e = 0; e < bias.size(); ++e) keys[e] = scores[e] + bias[e];
    const std::vector<int> order = best_first(keys);
    double total = 0;
    for (size_t j = 0; j < top_k; ++j) total += scores[size_t(order[j])];
    if (largest != largest) total = NAN;  // one NaN makes all weights of its token NaN
    for (size_t j = 0; j < top_k; ++j) {
      const size_t i = t * top_k + j;
      if (chosen[i] != order[j]) {
        fail("token %zu, choice %zu: expert %d instead of %d", t, j, int(chosen[i]), order[j]);
      }
      wanted[i] = scores[size_t(order[j])] / (renormalize || total != total ? total : 1);
    }
  }
  std::vector<double> got = weights.values();
  for (size_t j = 0; j < top_k; ++j) {  // of the first token, which has the NaN
    if ((got[j] != got[j]) != (wanted[j] != wanted[j])) fail("weight %zu is %g", j, got[j]);
    if (got[j] != got[j]) got[j] = wanted[j] = 0;
  }
  compare("weights", got, wanted, top_k, 1e-6);

  // Some of no expert.
  for (int64_t& expert : chosen) expert = numbers() % 20 == 0 ? p.experts - 1 - expert * 2 : expert;
  const auto assignments = int64_t(chosen.size());
  std::vector<int32_t> map_order(chosen.size()), offsets(experts + 1);
  std::vector<int32_t> counts(size_t(moe_map_counts(assignments, p.experts)));
  std::vector<int32_t> taken(kMapProducts, 1);
  const MoeMap map{chosen.data(),  assignments,   p.experts,   map_order.data(),
                   offsets.data(), counts.data(), taken.data()};
  check(moe_route_map_launch(map, nullptr), "moe_route_map_launch");
  check_map(map);
  for (const int32_t count : taken) {
    if (count != 0) fail("taken is %d, wanted 0", count);
  }
  return 0;
}
