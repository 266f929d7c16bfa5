// One case of cumulative sums, against sums one after the other.
#include "cases.h"

#include "cumulative_sum.cu"

using namespace cuda_ops;
using namespace emulator;

namespace {

// The last parts of three lines, where the sums up to all but the last `back - 1` groups before are
// known, and of those their own alone: blocks run one after the other, so no launch comes to this.
void look_over(int back, int place) {
  constexpr int kGroups = 33, kLines = 2, kLanes = 2, kPack = 2, kWidth = kLanes * kPack;
  const int part = (kGroups - 1) * kPartsOfGroup + place, count = part + 1;
  ScanConfig config;
  config.columns = true;
  config.pack = kPack;
  config.lanes = kLanes;
  config.lines = kLines;
  config.parts = count;
  config.blocks = int64_t(count) * kLines;
  const Tensor workspace(DType::kUInt8, size_t(ScanRoom(config, sizeof(float)).bytes));
  const Parts<float> parts = parts_of<float>(workspace.data(), config);
  std::vector<float> up_to(kLines * kWidth), own(kLines * kWidth);
  for (int p = 0; p < part; ++p) {
    const int group = p / kPartsOfGroup;
    const bool is_last = p % kPartsOfGroup == kPartsOfGroup - 1;
    for (int i = 0; i < kLines * kWidth; ++i) {
      const int line = i / kWidth, column = i % kWidth, block = p * kLines + line;
      const float value = float(p * p % 7 + i);
      own[size_t(i)] += value;
      up_to[size_t(i)] += value;
      if (group == kGroups - 1) {  // of the others nothing but their groups' sums is looked at
        parts.states[block] = kOwnSum;
        parts.sums[block * kWidth + column] = value;
      } else if (is_last) {
        const bool known = group < kGroups - back;
        const int at = group * kLines + line;
        parts.group_states[at] = known ? kSumUpTo : kOwnSum;
        parts.group_sums[(at * 2 + known) * kWidth + column] =
            known ? up_to[size_t(i)] : own[size_t(i)];
      }
      if (is_last) own[size_t(i)] = 0;
    }
  }
  launch(count * kLines, 64, 0, nullptr, [&] {
    if (blockIdx.x < unsigned(part) * kLines) return;
    const int line = int(blockIdx.x) % kLines, lane = int(threadIdx.x) % kLanes;
    const float mine[kPack] = {1, 2};
    float earlier[kPack];
    look_back<kWidth>(parts, part, mine, earlier);
    const bool is_last = place == kPartsOfGroup - 1;
    const int group = (kGroups - 1) * kLines + line;
    for (int v = 0; v < kPack; ++v) {
      const float wanted = up_to[size_t(line * kWidth + lane * kPack + v)];
      if (earlier[v] != wanted) fail("%d back: %g, not %g", back, earlier[v], wanted);
      __syncthreads();
      if (parts.sums[blockIdx.x * kWidth + lane * kPack + v] != mine[v]) fail("own sum not said");
      const float said = parts.group_sums[(group * 2 + 1) * kWidth + lane * kPack + v];
      if (is_last && said != wanted + mine[v]) fail("%d back: says %g", back, said);
    }
    if (parts.states[blockIdx.x] != kOwnSum) fail("says nothing of its part");
    if (is_last && parts.group_states[group] != kSumUpTo) fail("%d back: not up to here", back);
  });
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  for (const int back : {1, 32}) look_over(back, kPartsOfGroup - 1);
  for (const int place : {0, 30}) look_over(2, place);
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
