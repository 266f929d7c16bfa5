// Integers of a launch configuration that may be tuned: each has a default and a few legal values.
// A binding declares them and reads one as it describes a problem:
//
//   inline Knob rows_per_block{"rows_per_block", 4, {1, 2, 4, 8}};
//   // ...
//   p.rows_per_block = rows_per_block.at(bucket_of(p.rows, p.n, p.dtype));
//
// The plain description then has the number, and the configuration stays a pure function of it and
// of the device. Read a knob once a call: a workspace is sized by one reading and used by the same,
// though another thread may choose anew in between. `cuda_ops.runtime.tune` chooses; without it
// every reading is the default. No torch, no CUDA.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "dtype.h"

namespace cuda_ops {

// Problems in one bucket get one choice: sizes within a factor of two, of one dtype.
constexpr int kSizes = 32;  // powers of two that are told apart; all above count as the last
constexpr int kBuckets = kSizes * kSizes * (int(DType::kUnsupported) + 1);

// How many bits a size takes, up to kSizes - 1: 0 for 0, 1 for 1, 2 for 2 and 3.
constexpr int size_bits(int64_t size) {
  int bits = 0;
  while (size > 0 && bits < kSizes - 1) {
    size /= 2;
    ++bits;
  }
  return bits;
}

constexpr int bucket_of(int64_t rows, int64_t columns, DType dtype) {
  return (int(dtype) * kSizes + size_bits(rows)) * kSizes + size_bits(columns);
}

class Knob {
 public:
  static constexpr int kMostValues = 16;

  template <int kLegal>
  Knob(const char* name, int standard, const int (&legal)[kLegal]) : name_(name) {
    static_assert(kLegal < kMostValues, "a knob has at most 15 legal values beside its default");
    values_[count_++] = standard;
    for (const int value : legal) {
      if (value != standard) values_[count_++] = value;
    }
    next_ = first();
    first() = this;
  }
  Knob(const Knob&) = delete;
  Knob& operator=(const Knob&) = delete;

  // The value for a bucket: a relaxed load, as a choice is one byte and orders nothing else.
  int at(int bucket) const { return values_[chosen_[bucket].load(std::memory_order_relaxed)]; }

  // Returns whether `value` is legal, and then takes it for the bucket.
  bool choose(int bucket, int value) {
    for (int i = 0; i < count_; ++i) {
      if (values_[i] != value) continue;
      chosen_[bucket].store(uint8_t(i), std::memory_order_relaxed);
      return true;
    }
    return false;
  }

  const char* name() const { return name_; }
  int count() const { return count_; }
  int value(int index) const { return values_[index]; }  // the default is the first
  const Knob* next() const { return next_; }

  // The knobs of this library: each links itself in as the library is opened.
  static Knob*& first() {
    static Knob* knob = nullptr;
    return knob;
  }

  static Knob* named(const char* name) {
    Knob* knob = first();
    while (knob != nullptr && std::strcmp(knob->name_, name) != 0) knob = knob->next_;
    return knob;
  }

 private:
  const char* name_;
  int count_ = 0;
  int values_[kMostValues] = {};
  std::atomic<uint8_t> chosen_[kBuckets] = {};  // indices of values_; 0 is the default
  Knob* next_ = nullptr;
};

}  // namespace cuda_ops

// --- what the library shows: found by name, so that the manifest's form stays as it is ----------

// Inline, as each file that includes this has one; `used`, as no C++ code calls it.
#define CUDA_OPS_KNOBS extern "C" inline __attribute__((used, visibility("default")))

// Returns the name of a knob, the newest first; null past the last one.
CUDA_OPS_KNOBS const char* cuda_ops_knob_name(int index) {
  const ::cuda_ops::Knob* knob = ::cuda_ops::Knob::first();
  while (knob != nullptr && index-- > 0) knob = knob->next();
  return knob == nullptr ? nullptr : knob->name();
}

// Writes the legal values, the default first, to `values`, which has room for 16; returns how many
// there are, -1 for no such knob.
CUDA_OPS_KNOBS int cuda_ops_knob_values(const char* name, int* values) {
  const ::cuda_ops::Knob* knob = ::cuda_ops::Knob::named(name);
  if (knob == nullptr) return -1;
  for (int i = 0; i < knob->count(); ++i) values[i] = knob->value(i);
  return knob->count();
}

CUDA_OPS_KNOBS int cuda_ops_knob_bucket(int64_t rows, int64_t columns, const char* dtype) {
  for (int i = 0; i < int(::cuda_ops::DType::kUnsupported); ++i) {
    const auto known = static_cast<::cuda_ops::DType>(i);
    if (std::strcmp(::cuda_ops::name(known), dtype) == 0) {
      return ::cuda_ops::bucket_of(rows, columns, known);
    }
  }
  return ::cuda_ops::bucket_of(rows, columns, ::cuda_ops::DType::kUnsupported);
}

// Returns 0 on success, 1 for no such knob or bucket; `value` is then untouched.
CUDA_OPS_KNOBS int cuda_ops_knob_get(const char* name, int bucket, int* value) {
  const ::cuda_ops::Knob* knob = ::cuda_ops::Knob::named(name);
  if (knob == nullptr || bucket < 0 || bucket >= ::cuda_ops::kBuckets) return 1;
  *value = knob->at(bucket);
  return 0;
}

// Returns 0 on success, 1 for no such knob or bucket, 2 for a value that is not legal.
CUDA_OPS_KNOBS int cuda_ops_knob_set(const char* name, int bucket, int value) {
  ::cuda_ops::Knob* knob = ::cuda_ops::Knob::named(name);
  if (knob == nullptr || bucket < 0 || bucket >= ::cuda_ops::kBuckets) return 1;
  return knob->choose(bucket, value) ? 0 : 2;
}
