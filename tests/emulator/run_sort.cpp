// One case of a sort by clusters, against std::stable_sort. Twice, for the same bits from
// two orders of events.
#include "cases.h"

#include "sort_cluster.cuh"

#include <numeric>

using namespace cuda_ops;
using namespace emulator;

namespace {

// Keys as `kind` says: the bits of what some way of sorting finds hard.
uint64_t bits_of(const std::string& kind, DType dtype, std::mt19937_64& numbers, int i) {
  const uint64_t drawn = numbers();
  if (kind == "equal") return 5;
  if (kind == "few") return drawn % 3;                          // of the last byte alone
  if (kind == "gaps") return (drawn & 0x0100ff0001000100) | 7;  // of bytes that are not neighbours
  if (kind == "sorted") return uint64_t(i);
  if (kind == "high") return drawn << 56 >> (64 - 8 * size_of(dtype));  // of the first byte alone
  if (kind != "special") return drawn;
  // Zeros and NaNs of both signs and any payload, whose values their keys do not tell.
  const int width = 8 * int(size_of(dtype));
  const uint64_t sign = (drawn & 1) << (width - 1),
                 infinity = order_of<uint64_t>(dtype, false).infinity;
  switch (drawn >> 1 & 3) {
    case 0: return sign;
    case 1: return sign | infinity | (drawn >> 8 & 3);
    default: return drawn >> (64 - width);
  }
}

template <class U>
void run(const Arguments& arguments, DType dtype) {
  const int rows = arguments.number("rows"), n = arguments.number("n");
  const int step = n + 5;  // from a row to the next
  const Tensor x(dtype, size_t(rows) * step), values(dtype, size_t(rows) * n);
  std::vector<int64_t> indices(size_t(rows) * n);
  auto* const bits = static_cast<U*>(x.data());
  std::mt19937_64 numbers(unsigned(arguments.number("seed")));
  for (int i = 0; i < rows * step; ++i) {
    bits[i] = U(bits_of(arguments.text("kind"), dtype, numbers, i));
  }

  SortRows p;
  p.rows.data = x.data();
  p.rows.dtype = dtype;
  p.rows.numel = 1;
  p.rows.add_dim(rows, step);
  p.n = n;
  p.descending = arguments.number("descending") != 0;
  p.values = values.data();
  p.indices = indices.data();
  const SortConfig config = cluster_config(rows, n, size_of(dtype), arguments.number("wide") != 0);
  if (config.path != SortConfig::kCluster) fail("no cluster takes such rows");
  std::printf("%d blocks of %d threads, %d items\n", config.cluster, config.threads, config.items);

  const Order<U> order = order_of<U>(dtype, p.descending);
  std::vector<int64_t> wanted(static_cast<size_t>(n));
  for (int time = 0; time < 2; ++time) {
    std::fill(indices.begin(), indices.end(), -1);
    check(launch_cluster<U>(p, config, nullptr), "launch_cluster");
    for (int row = 0; row < rows; ++row) {
      const U* const from = bits + size_t(row) * step;
      std::iota(wanted.begin(), wanted.end(), 0);
      std::stable_sort(wanted.begin(), wanted.end(), [&](int64_t a, int64_t b) {
        return order.key(from[a]) < order.key(from[b]);
      });
      for (int i = 0; i < n; ++i) {
        const size_t out = size_t(row) * n + i;
        const auto got = static_cast<long long>(indices[out]);
        const auto right = static_cast<long long>(wanted[i]);
        if (got != right) fail("index %d of row %d is wrong: %lld, not %lld", i, row, got, right);
        if (static_cast<const U*>(values.data())[out] != from[right]) {
          fail("value %d of row %d is not that of its index", i, row);
        }
      }
    }
  }
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  const DType dtype = dtype_named(arguments.text("dtype"));
  switch (size_of(dtype)) {
    case 1: run<uint8_t>(arguments, dtype); break;
    case 2: run<uint16_t>(arguments, dtype); break;
    case 4: run<uint32_t>(arguments, dtype); break;
    default: run<uint64_t>(arguments, dtype);
  }
  return 0;
}
