// What the programs that run kernels share: a case's arguments, tensors, comparisons.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "device.h"
#include "dtype.h"

namespace emulator {

// --- arguments ------------------------------------------------------------------

// `name=value` each, all of them given. `seed`, `timing` and `fault` are the emulator's.
class Arguments {
 public:
  Arguments(int count, char** texts) {
    for (int i = 1; i < count; ++i) {
      const std::string text = texts[i];
      const size_t equal = text.find('=');
      if (equal == std::string::npos) fail("argument %s: expected name=value", texts[i]);
      values_[text.substr(0, equal)] = text.substr(equal + 1);
    }
    seed(uint64_t(number("seed")));
    fault = number("fault");
    timing = text("timing") == "late" ? Timing::kLate : Timing::kEarly;
  }
  std::string text(const std::string& name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) fail("argument %s is missing", name.c_str());
    return found->second;
  }
  int number(const std::string& name) const { return std::atoi(text(name).c_str()); }

 private:
  std::map<std::string, std::string> values_;
};

inline cuda_ops::DType dtype_named(const std::string& name) {
  for (int i = 0; i < int(cuda_ops::DType::kUnsupported); ++i) {
    if (name == cuda_ops::name(cuda_ops::DType(i))) return cuda_ops::DType(i);
  }
  fail("dtype=%s", name.c_str());
}

// --- tensors --------------------------------------------------------------------

// Elements of NaN until they are written, in memory that kernels may read. It starts at a
// multiple of 16 and not of 32.
class Tensor {
 public:
  Tensor(cuda_ops::DType dtype, size_t count)
      : dtype_(dtype), count_(count), memory_(bytes() + 48, 0xFF) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory_.data());
    data_ = reinterpret_cast<uint8_t*>(((begin + 31) & ~uintptr_t(31)) + 16);
    allow_reads(data_, bytes());
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return count_ * size_t(cuda_ops::size_of(dtype_)); }

  double get(size_t i) const {
    if (dtype_ == cuda_ops::DType::kFloat64) return reinterpret_cast<const double*>(data_)[i];
    if (dtype_ == cuda_ops::DType::kFloat32) return reinterpret_cast<const float*>(data_)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(data_)[i];
    return dtype_ == cuda_ops::DType::kFloat16 ? from_f16(bits) : from_bf16(bits);
  }
  void set(size_t i, double value) const {
    auto* const halves = reinterpret_cast<uint16_t*>(data_);
    switch (dtype_) {
      case cuda_ops::DType::kFloat16: halves[i] = to_f16(float(value)); break;
      case cuda_ops::DType::kBFloat16: halves[i] = to_bf16(float(value)); break;
      case cuda_ops::DType::kFloat64: reinterpret_cast<double*>(data_)[i] = value; break;
      default: reinterpret_cast<float*>(data_)[i] = float(value);
    }
  }
  std::vector<double> values() const {
    std::vector<double> all(count_);
    for (size_t i = 0; i < count_; ++i) all[i] = get(i);
    return all;
  }
  void fill(std::mt19937& numbers, double scale) {
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < count_; ++i) set(i, scale * normal(numbers));
  }

 private:
  cuda_ops::DType dtype_;
  size_t count_;
  std::vector<uint8_t> memory_;
  uint8_t* data_;
};

// --- comparisons ----------------------------------------------------------------

// Fails at the worst element if its error exceeds `tolerance` times (its size + twice the
// root mean square of its row); a row of zeros has to be exact.
inline void compare(const char* what, const std::vector<double>& got,
                    const std::vector<double>& wanted, size_t row_length, double tolerance) {
  double worst = 0;
  size_t worst_at = 0;
  for (size_t begin = 0; begin < wanted.size(); begin += row_length) {
    double squares = 0;
    for (size_t i = begin; i < begin + row_length; ++i) squares += wanted[i] * wanted[i];
    const double scale = std::sqrt(squares / double(row_length));
    // Beside an infinity any error would be small.
    if (!std::isfinite(scale)) fail("%s: a row of what is expected is not finite", what);
    for (size_t i = begin; i < begin + row_length; ++i) {
      double error = std::fabs(got[i] - wanted[i]);
      if (std::isnan(error)) error = INFINITY;  // NaN compares with nothing, the next one either
      const double relative = error == 0 ? 0 : error / (std::fabs(wanted[i]) + 2 * scale);
      if (relative > worst) worst = relative, worst_at = i;
    }
  }
  std::printf("%s: error %.2g of %.2g\n", what, worst, tolerance);
  if (worst > tolerance) {
    std::printf("%s is wrong at row %zu, column %zu: got %g, wanted %g\n", what,
                worst_at / row_length, worst_at % row_length, got[worst_at], wanted[worst_at]);
    std::exit(1);
  }
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail("%s returned error %d", what, int(error));
}

// Calls `body` with an unsigned integer as wide as the elements of `dtype`.
template <class Body>
void visit_keys_of(cuda_ops::DType dtype, Body&& body) {
  switch (size_of(dtype)) {
    case 1: return body(uint8_t{});
    case 2: return body(uint16_t{});
    case 4: return body(uint32_t{});
    default: return body(uint64_t{});
  }
}

}  // namespace emulator
