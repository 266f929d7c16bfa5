// One case of cumulative sums, against sums one after the other.
#include "cases.h"

#include "cumulative_sum.cu"

using namespace cuda_ops;
using namespace emulator;

namespace {

// The last parts of three lines, where the sums up to all but the last `back - 1` parts before are
// known, and of those their own alone: blocks run one after the other, so no launch comes to this.
void look_over(int back) {
  constexpr int kParts = 40, kLines = 3, kLanes = 2, kPack = 2, kWidth = kLanes * kPack;
  const Tensor states(DType::kInt32, kParts * kLines);
  const Tensor sums(DType::kFloat32, size_t(kParts) * kLines * 2 * kWidth);
  auto* const state = static_cast<uint32_t*>(states.data());
  std::vector<float> up_to(kLines * kWidth);
  for (int part = 0; part + 1 < kParts; ++part) {
    for (int i = 0; i < kLines * kWidth; ++i) {
      const int line = i / kWidth, block = part * kLines + line;
      const float own = float(part * part % 7 + i);
      up_to[size_t(i)] += own;
      const bool known = part < kParts - back;
      state[block] = known ? kSumUpTo : kOwnSum;
      if (!known) sums.set(size_t(block * 2) * kWidth + i % kWidth, own);
      if (known) sums.set(size_t(block * 2 + 1) * kWidth + i % kWidth, up_to[size_t(i)]);
    }
  }
  launch(kParts * kLines, 128, 0, nullptr, [&] {
    if (blockIdx.x < (kParts - 1) * kLines) return;
    static float shared[128 * kPack];
    const int line = int(blockIdx.x) % kLines, lane = int(threadIdx.x) % kLanes;
    const float own[kPack] = {1, 2};
    float earlier[kPack];
    look_back<float, kPack>({state, static_cast<float*>(sums.data()), kLines, kLanes}, kParts - 1,
                            own, shared, earlier);
    for (int v = 0; v < kPack; ++v) {
      const float wanted = up_to[size_t(line * kWidth + lane * kPack + v)];
      if (earlier[v] != wanted) fail("%d back: %g, not %g", back, earlier[v], wanted);
      __syncthreads();
      const size_t at = size_t(blockIdx.x * 2 + 1) * kWidth + size_t(lane * kPack + v);
      if (sums.get(at) != wanted + own[v]) fail("%d back: says %g", back, sums.get(at));
    }
    if (state[blockIdx.x] != kSumUpTo) fail("%d back: says state %u", back, state[blockIdx.x]);
  });
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  for (const int back : {1, 2, 31, 32, 33, 39}) look_over(back);
  const DType dtype = dtype_named(arguments.text("dtype"));
  const int outer = arguments.number("outer"), n = arguments.number("n");
  const int inner = arguments.number("inner"), gap = arguments.number("gap");
  const int start = arguments.number("start");  // elements of the allocations before x and the sums
  const bool whole = dtype == DType::kInt64 || dtype == DType::kInt32;

  Scan p;
  p.dtype = dtype;
  p.outer = outer;
  p.n = n;
  p.inner = inner;
  p.x_step = inner > 1 ? inner + gap : 1;
  p.x_outer = inner > 1 ? n * p.x_step : n + gap;
  p.reverse = arguments.number("reverse") != 0;
  const size_t size = size_t(outer) * n * inner, read = size_t(outer) * p.x_outer;
  const Tensor x(dtype, start + read), out(scan_result(dtype), start + size + 1);
  const auto element = [&](const Tensor& tensor, int64_t i) {
    return static_cast<char*>(tensor.data()) +
           i * int64_t(tensor.bytes() / (&tensor == &x ? start + read : start + size + 1));
  };
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  std::vector<double> drawn(read);
  for (size_t i = 0; i < read; ++i) {
    drawn[i] = double(int(numbers() % 9) - 4);  // small integers, so that sums are exact
    const auto integer = int64_t(drawn[i]);
    if (whole) {
      std::memcpy(element(x, int64_t(start + i)), &integer, size_t(size_of(dtype)));
    } else {
      x.set(start + i, drawn[i]);
    }
  }
  p.x = element(x, start);
  p.out = element(out, start);
  const auto bytes = size_t(cumulative_sum_workspace(p));
  const Tensor workspace(DType::kUInt8, bytes + 1);  // and one that stays as it is
  p.workspace = workspace.data();
  const ScanConfig config = scan_config(p, current_device());
  std::printf("plan: %s pack %d, lanes %d, warps %d, rows %d, threads %d, parts %d\n",
              config.columns ? "columns" : "rows", config.pack, config.lanes, config.warps,
              int(config.rows), config.threads, int(config.parts));
  check(cumulative_sum_launch(p, nullptr), "cumulative_sum_launch");
  if (static_cast<const uint8_t*>(workspace.data())[bytes] != 0xFF) fail("workspace overrun");

  const auto got = [&](int64_t i) {
    int64_t integer;
    std::memcpy(&integer, element(out, i), whole ? 8 : 0);
    return whole ? double(integer) : out.get(size_t(i));
  };
  for (int o = 0; o < outer; ++o) {
    for (int c = 0; c < inner; ++c) {
      double sum = 0;
      for (int k = 0; k < n; ++k) {
        const int64_t i = p.reverse ? n - 1 - k : k;
        sum += drawn[size_t(o * p.x_outer + i * p.x_step + c)];
        double wanted = sum;
        if (dtype == DType::kBFloat16) wanted = from_bf16(to_bf16(float(sum)));
        if (dtype == DType::kFloat16) wanted = from_f16(to_f16(float(sum)));
        const double found = got(start + (o * int64_t(n) + i) * inner + c);
        if (!(found == wanted)) {
          fail("sum %d of column %d of %d is wrong: %g, not %g", int(i), c, o, found, wanted);
        }
      }
    }
  }
  for (int64_t i = 0; i < start; ++i) {
    for (int b = 0; b < 2; ++b) {
      if (uint8_t(element(out, i)[b]) != 0xFF)
        fail("element %d before the sums is written", int(i));
    }
  }
  if (uint8_t(element(out, int64_t(start + size))[0]) != 0xFF) fail("the end is written over");
  return 0;
}
