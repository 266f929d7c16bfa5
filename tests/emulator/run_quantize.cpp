// quantize and dequantize_int4 to the bit, for rows and blocks of every kind of length.
#include "cases.h"

#include "dequantize_int4.cu"
#include "quantize.cu"

using namespace emulator;

namespace {

struct Case {
  size_t rows, runs, n, gap;  // runs of n numbers in each row, and elements between rows
};

uint8_t code_of(DType dtype, float value) {
  if (dtype == DType::kFloat8E4M3) return Float8E4M3::saturated(value).bits;
  if (dtype == DType::kFloat8E5M2) return Float8E5M2::saturated(value).bits;
  return uint8_t(Int8::saturated(int(std::nearbyint(value))).bits);
}

float scale_of(DType dtype, float largest) {
  if (dtype == DType::kFloat8E4M3) return quantization_scale<Float8E4M3>(largest);
  if (dtype == DType::kFloat8E5M2) return quantization_scale<Float8E5M2>(largest);
  return quantization_scale<Int8>(largest);
}

void run_case(std::mt19937& numbers, DType dtype, DType narrow, Case c, double size) {
  const size_t step = c.runs * c.n + c.gap, count = c.rows * c.runs;
  Tensor x(dtype, c.rows * step + 1);
  x.fill(numbers, size);
  const Tensor scale(DType::kFloat32, count);
  std::vector<uint8_t> q(count * c.n + 16, 0xA5);
  Quantize p;
  p.x = x.data();
  // The results begin at a multiple of 16, as torch's do.
  uint8_t* const out = q.data() + (-reinterpret_cast<uintptr_t>(q.data()) % 16);
  p.q = out;
  p.scale = static_cast<float*>(scale.data());
  p.rows = int64_t(count);
  p.n = int64_t(c.n);
  p.runs = c.gap > 0 ? int64_t(c.runs) : 1;
  p.x_step = c.gap > 0 ? int64_t(step) : int64_t(c.n);
  p.dtype = dtype;
  p.q_dtype = narrow;
  check(quantize_launch(p, nullptr), "launch");
  for (size_t run = 0; run < count; ++run) {
    const auto at = [&](size_t i) {
      return float(x.get(run / c.runs * step + run % c.runs * c.n + i));
    };
    float largest = 0;
    for (size_t i = 0; i < c.n; ++i) largest = std::max(largest, std::fabs(at(i)));
    const float wanted = scale_of(narrow, largest), got = p.scale[run];
    if (got != wanted) fail("the scale of run %zu is %g, not %g", run, got, wanted);
    for (size_t i = 0; i < c.n; ++i) {
      const uint8_t code = code_of(narrow, at(i) / wanted);
      if (out[run * c.n + i] == code) continue;
      fail("run %zu, column %zu is %d, not %d", run, i, out[run * c.n + i], code);
    }
  }
}

void run_int4(std::mt19937& numbers, DType dtype, size_t bytes, size_t block, bool with_zeros,
              size_t offset) {
  std::vector<uint8_t> q(bytes + 32);
  uint8_t* const codes = q.data() + (-reinterpret_cast<uintptr_t>(q.data()) % 16) + offset;
  for (size_t i = 0; i < bytes; ++i) codes[i] = uint8_t(numbers());
  allow_reads(q.data(), q.size());
  Tensor scale(dtype, 2 * bytes / block), zeros(dtype, 2 * bytes / block);
  scale.fill(numbers, 1);
  zeros.fill(numbers, 4);
  const Tensor out(dtype, 2 * bytes);
  DequantizeInt4 p;
  p.q = codes;
  p.scale = scale.data();
  p.zero_point = with_zeros ? zeros.data() : nullptr;
  p.out = out.data();
  p.bytes = int64_t(bytes);
  p.block = int64_t(block);
  p.dtype = dtype;
  check(dequantize_int4_launch(p, nullptr), "launch");
  std::vector<double> wanted(2 * bytes);
  for (size_t i = 0; i < 2 * bytes; ++i) {
    const double value = with_zeros ? double(uint4_at(codes[i / 2], i % 2)) - zeros.get(i / block)
                                    : double(int4_at(codes[i / 2], i % 2));
    wanted[i] = value * scale.get(i / block);
  }
  compare("int4", out.values(), wanted, block, dtype == DType::kBFloat16 ? 1e-2 : 1e-6);
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const DType narrow : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
      for (const Case c : {Case{3, 1, 1, 0},
                           {9, 1, 40, 0},
                           {5, 4, 32, 0},
                           {5, 4, 32, 8},
                           {3, 3, 7, 2},
                           {2, 1, 1000, 3},
                           {2, 2, 1024, 16},
                           {3, 1, 9000, 0},
                           {1, 1, 40000, 0}}) {
        run_case(numbers, dtype, narrow, c, 1);
      }
      // Also where the quotients are those of IEEE divisions.
      const Case few{3, 1, 64, 0};
      if (dtype != DType::kFloat16) {
        for (const double size : {1e-30, 1e-25, 1e20, 1e30}) {
          run_case(numbers, dtype, narrow, few, size);
        }
      }
    }
  }
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    for (const bool zeros : {false, true}) {
      for (const size_t block : {1, 2, 6, 8, 32, 128}) {
        run_int4(numbers, dtype, 3 * 128, block, zeros, 0);
        run_int4(numbers, dtype, 3 * 128 * 9, block, zeros, 1);
        run_int4(numbers, dtype, 3 * 128 * 9, block, zeros, 0);
      }
    }
  }
  return 0;
}
