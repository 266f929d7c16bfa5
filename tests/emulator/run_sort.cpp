// One case of a sort by clusters or of a radix sort of long rows, against std::stable_sort. Twice,
// for the same bits from two orders of events.
#include "cases.h"

#include "sort/sort_cluster.cuh"
#include "sort/sort_radix_wide.cuh"

#include <numeric>

using namespace cuda_ops;
using namespace emulator;

namespace {

// Keys as `kind` says: the bits of what some way of sorting finds hard.
uint64_t bits_of(const std::string& kind, DType dtype, std::mt19937_64& numbers, int i) {
  const uint64_t drawn = numbers();
  if (kind == "equal") return 5;
  if (kind == "few") return drawn % 3;                          // of the last byte alone
  if (kind == "gaps") return (drawn & 0x0100ff0001000100) | 7;  // of bytes that are not neighbors
  if (kind == "sorted") return uint64_t(i);
  if (kind == "high") return drawn << 56 >> (64 - 8 * size_of(dtype));  // of the first byte alone
  if (kind == "small") return drawn & 0xfffff;
  if (kind == "values") return (drawn % 3 + 1) * 0x9e3779b97f4a7c15;
  // The sample of the radix sort has the first column, and then none up to half a thousandth of n.
  const bool unseen = i > 0 && i < 16;
  if (kind == "unseen high") return unseen ? drawn : drawn >> 16;
  if (kind == "unseen low") return drawn % 3 << 40 | (unseen ? drawn >> 16 & 255 : 0);
  if (kind == "neighbors") return (uint64_t(i / 4) * 0x9e3779b97f4a7c15 >> 24 << 24) | drawn % 3;
  // One key in 32 belongs to a group, whose keys share the first two bytes; random keys differ.
  for (const int length : {32, 33}) {
    if (kind != "groups of " + std::to_string(length)) continue;
    if (i % 32 != 0) return drawn | uint64_t(1) << 48;
    return uint64_t(i / 32 % (704 / length) * 2002) << 48 | (drawn & 0xff);
  }
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
  const bool radix = arguments.text("path") == "radix";
  // A device without clusters or shared memory leaves all rows of more than 1024 to the radix sort.
  SortConfig config = radix
                          ? sort_config(rows, n, size_of(dtype), DeviceInfo{})
                          : cluster_config(rows, n, size_of(dtype), arguments.number("wide") != 0);
  if (config.path != (radix ? SortConfig::kRadix : SortConfig::kCluster)) fail("not of this path");
  if (radix) {
    config.rows_at_once = std::min(config.rows_at_once, int64_t(arguments.number("rows_at_once")));
    // Rows of this many elements are too long to emulate: 1 and 0 say otherwise, -1 leaves it.
    const int separate = arguments.number("separate");
    if (separate >= 0) config.separate = separate != 0;
  }
  const auto bytes = size_t(sort_workspace_bytes(config, n, size_of(dtype)));
  const Tensor workspace(DType::kUInt8, bytes + 1);  // and one that stays as it is
  p.workspace = workspace.data();

  const Order<U> order = order_of<U>(dtype, p.descending);
  std::vector<int64_t> wanted(size_t(rows) * n);
  for (int row = 0; row < rows; ++row) {
    const U* const from = bits + size_t(row) * step;
    const auto begin = wanted.begin() + std::ptrdiff_t(row) * n;
    std::iota(begin, begin + n, 0);
    std::stable_sort(begin, begin + n,
                     [&](int64_t a, int64_t b) { return order.key(from[a]) < order.key(from[b]); });
  }
  for (int time = 0; time < 2; ++time) {
    std::fill(indices.begin(), indices.end(), -1);
    if (!radix) {
      check(launch_cluster<U>(p, config, nullptr), "launch_cluster");
    } else if constexpr (sizeof(U) == 8) {
      check(launch_radix_wide<U>(p, config, nullptr), "launch_radix_wide");
    } else {
      check(launch_radix<U>(p, config, nullptr), "launch_radix");
    }
    if (static_cast<const uint8_t*>(workspace.data())[bytes] != 0xFF) fail("workspace overrun");
    for (int row = 0; row < rows; ++row) {
      const U* const from = bits + size_t(row) * step;
      for (int i = 0; i < n; ++i) {
        const size_t out = size_t(row) * n + i;
        const auto got = static_cast<long long>(indices[out]);
        const auto right = static_cast<long long>(wanted[out]);
        if (got != right) fail("index %d of row %d is wrong: %lld, not %lld", i, row, got, right);
        if (static_cast<const U*>(values.data())[out] != from[right]) {
          fail("value %d of row %d is not that of its index", i, row);
        }
      }
    }
  }
  if (!radix) {
    std::printf("%d blocks of %d threads, %d items\n", config.cluster, config.threads,
                config.items);
  } else if (sizeof(U) == 8) {
    const auto* const choice = reinterpret_cast<const RadixChoice*>(
        static_cast<const char*>(p.workspace) + radix_workspace(config, n, 8).choice);
    std::printf("from digit %u of %02x%s\n", choice->lowest, choice->differ,
                choice->unsorted != 0 ? ", again" : "");
    std::printf("%s\n", config.separate ? "a launch for each step" : "one launch");
  }
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  const DType dtype = dtype_named(arguments.text("dtype"));
  visit_keys_of(dtype, [&](auto key) { run<decltype(key)>(arguments, dtype); });
  return 0;
}
