// One case of the first k of each row, against std::stable_sort.
#include "cases.h"

// Fails where a kernel asks for other bytes than before: a thread that asks for few, between those
// of another one and its launch, would make that launch fail.
template <class Kernel>
cudaError_t checked_attribute(Kernel* kernel, cudaFuncAttribute attribute, int bytes) {
  static std::map<const void*, int> asked;
  const auto first = asked.emplace(reinterpret_cast<const void*>(kernel), bytes).first;
  if (first->second != bytes) {
    emulator::fail("a kernel asks for %d bytes of shared memory, then %d", first->second, bytes);
  }
  return cudaFuncSetAttribute(kernel, attribute, bytes);
}
#define cudaFuncSetAttribute checked_attribute
#include "bitonic_topk.cu"
#undef cudaFuncSetAttribute

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
  const std::string kind = arguments.text("kind");
  const DeviceInfo device = current_device();
  const auto warps = topk_config(rows, n, k, device);
  const auto blocks = select_config(rows, n, k, size_of(dtype), device);
  const Order<U> order = order_of<U>(dtype, arguments.number("descending") != 0);
  // Places in a row that the samples of its chunks have.
  std::vector<bool> seen(size_t(step), false);
  for (int64_t chunk = 0; chunk < blocks.chunks && blocks.sample_bits > 0; ++chunk) {
    const int64_t begin = n * chunk / blocks.chunks, end = n * (chunk + 1) / blocks.chunks;
    for (uint32_t i = 0; i < 1u << blocks.sample_bits; ++i) {
      seen[size_t(begin + sample_place(i, blocks.sample_bits, uint32_t(end - begin)))] = true;
    }
  }
  // Few values are often equal; sorted ones are all better than those before; close ones have the
  // same leading bits, but for one key. Some are zeros and NaNs of both signs. A sample may be of
  // the best keys, or of the worst ones.
  for (int i = 0; i < rows * step; ++i) {
    const uint64_t drawn = numbers();
    const int at = i % step;
    uint64_t wanted = drawn;
    if (kind == "few") wanted = drawn % 5;
    if (kind == "equal") wanted = 5;
    if (kind == "sorted") wanted = uint64_t(at);
    if (kind == "reversed") wanted = uint64_t(step - at);
    if (kind == "close") wanted = at == 7 ? ~uint64_t(0) / 2 : drawn % 251;
    // About a dozen share the leading bits, or a hundred; the last eight tell them apart.
    if (kind == "centers") {
      wanted = drawn % uint64_t(n / 12 + 1) << (8 * sizeof(U) - 8) | (drawn >> 32 & 255);
    }
    if (kind == "crowds") {
      wanted = drawn % uint64_t(n / 100 + 1) << (8 * sizeof(U) - 4) | (drawn >> 32 & 255);
    }
    if (kind == "special" && drawn % 4 < 2) {
      const uint64_t sign = (drawn >> 2 & 1) << (8 * sizeof(U) - 1);
      wanted = drawn % 4 == 0 ? sign : sign | order.infinity | (drawn >> 8 & 3);
    }
    // One in a hundred of the others is best, and the rest are alike: all digits must be looked at.
    const U middle = U(U(1) << (8 * sizeof(U) - 2));  // keys that are not NaN
    const int rank = drawn % 100 == 0 ? 1 : 2;
    if (kind == "best seen") wanted = order.bits(U(middle + (seen[at] ? 0 : rank)));
    if (kind == "worst seen") wanted = order.bits(U(middle + (seen[at] ? 3 : rank)));
    bits[i] = U(wanted);
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
  if (k <= kMostKept || topk_sorts(n, k)) {
    std::printf("plan: chunks %d\n", int(warps.chunks));
  } else {
    if (blocks.list == 0) fail("k is too large to be selected");
    std::printf("plan: blocks %d, list %d, sample %d\n", int(blocks.chunks), blocks.list,
                blocks.sample_bits > 0 ? 1 << blocks.sample_bits : 0);
  }
  check(bitonic_topk_launch(p, nullptr), "bitonic_topk_launch");
  if (static_cast<const uint8_t*>(workspace.data())[bytes] != 0xFF) fail("workspace overrun");

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
