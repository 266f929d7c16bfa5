// One case of the first k of each row, against std::stable_sort.
#include "cases.h"

#include "bitonic_topk.cu"

#include <numeric>

using namespace cuda_ops;
using namespace emulator;

namespace {

template <class U>
void run(const Arguments& arguments, DType dtype) {
  const int rows = arguments.number("rows"), n = arguments.number("n"), k = arguments.number("k");
  const int step = n + 3;  // from a row to the next
  const Tensor x(dtype, size_t(rows) * step), values(dtype, size_t(rows) * k);
  std::vector<int64_t> indices(size_t(rows) * k, -1);
  auto* const bits = static_cast<U*>(x.data());
  std::mt19937_64 numbers(unsigned(arguments.number("seed")));
  // Few values are often equal; sorted ones are all better than those before; close ones have the
  // same leading bits, but for one key, so that a warp sorts them digit by digit.
  const std::string kind = arguments.text("kind");
  for (int i = 0; i < rows * step; ++i) {
    const uint64_t drawn = numbers();
    bits[i] = U(kind == "few"      ? drawn % 5
                : kind == "sorted" ? uint64_t(i % step)
                : kind == "close"  ? (i % step == 7 ? ~uint64_t(0) / 2 : drawn % 251)
                                   : drawn);
  }

  TopkRows p;
  p.k = k;
  p.sort.rows.data = x.data();
  p.sort.rows.dtype = dtype;
  p.sort.rows.numel = 1;
  p.sort.rows.add_dim(rows, step);
  p.sort.n = n;
  p.sort.descending = arguments.number("descending") != 0;
  p.sort.values = values.data();
  p.sort.indices = indices.data();
  const auto bytes = size_t(bitonic_topk_workspace(p));
  const Tensor workspace(DType::kUInt8, bytes + 1);  // and one that stays as it is
  p.sort.workspace = workspace.data();
  std::printf("plan: chunks %d\n", int(topk_config(rows, n, k, current_device()).chunks));
  check(bitonic_topk_launch(p, nullptr), "bitonic_topk_launch");
  if (static_cast<const uint8_t*>(workspace.data())[bytes] != 0xFF) fail("workspace overrun");

  const Order<U> order = order_of<U>(dtype, p.sort.descending);
  std::vector<int64_t> wanted(static_cast<size_t>(n));
  for (int row = 0; row < rows; ++row) {
    const U* const from = bits + size_t(row) * step;
    std::iota(wanted.begin(), wanted.end(), 0);
    std::stable_sort(wanted.begin(), wanted.end(),
                     [&](int64_t a, int64_t b) { return order.key(from[a]) < order.key(from[b]); });
    for (int i = 0; i < k; ++i) {
      const size_t out = size_t(row) * k + i;
      const auto got = static_cast<long long>(indices[out]);
      const auto right = static_cast<long long>(wanted[i]);
      if (got != right) fail("index %d of row %d is wrong: %lld, not %lld", i, row, got, right);
      if (static_cast<const U*>(values.data())[out] != from[right]) {
        fail("value %d of row %d is not that of its index", i, row);
      }
    }
  }
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  const DType dtype = dtype_named(arguments.text("dtype"));
  visit_keys_of(dtype, [&](auto key) { run<decltype(key)>(arguments, dtype); });
  return 0;
}
