// One case of the matrix product, by the kernel that the arguments name, against sums in double.
#include "cases.h"

#include "gemm/gemm_fma.cuh"
#include "gemm/gemm_hopper.cuh"
#include "gemm/gemm_mma.cuh"
#include "gemm/gemm_pack.cuh"
#include "gemm/gemm_stream.cuh"
#include "ptx/capability.h"

using namespace cuda_ops;
using namespace emulator;

namespace {

// A batch of matrices whose rows, or columns, are `pitch` elements apart: a multiple of
// eight if `aligned`, else one more than that, which the copy engine cannot read.
struct Matrices {
  Matrices(DType dtype, int batch, int rows_, int columns_, bool by_column_, bool aligned)
      : rows(rows_),
        columns(columns_),
        by_column(by_column_),
        pitch(((by_column ? rows : columns) + 7) / 8 * 8 + (aligned ? 0 : 1)),
        tensor(dtype, size_t(batch * matrix())) {}

  MatrixStrides strides() const {
    return by_column ? MatrixStrides{1, pitch} : MatrixStrides{pitch, 1};
  }
  int64_t matrix() const { return int64_t(pitch) * (by_column ? columns : rows); }
  size_t at(int z, int row, int column) const {
    const MatrixStrides s = strides();
    return size_t(z * matrix() + row * s.row + column * s.col);
  }

  int rows, columns;
  bool by_column;
  int pitch;
  Tensor tensor;
};

// What PlaceEpilogue adds.
double place_value(int64_t m, int64_t n) { return double(m) - 0.5 * double(n % 16); }

// Adds to each sum what says where it is, and keeps half of it aside.
struct PlaceEpilogue {
  static constexpr bool kSecond = true;
  struct Columns {
    int16_t n, count;
  };
  using Inputs = Place;
  __device__ Columns columns(int64_t n, int count) const { return {int16_t(n), int16_t(count)}; }
  __device__ bool needs_place() const { return true; }
  __device__ Inputs inputs(const Columns&) const { return {}; }
  __device__ Inputs inputs(const Columns& columns, const Place& at) const {
    if (at.first && (columns.n != at.n || columns.count != 1 + at.second)) fail("other columns");
    return at;
  }
  template <class C>
  __device__ void operator()(C (&sums)[2], C (&aside)[2], const Inputs& at) const {
    for (int i = 0; i < 2; ++i) {
      sums[i] += C(place_value(at.m, at.n + i));
      aside[i] = sums[i] / 2;
    }
  }
};

template <class T>
cudaError_t run_hopper(const Arguments& arguments, const Matmul& p, void* second) {
  const bool swap = arguments.number("swap") != 0;
  const bool line_major_a = p.a.row < p.a.col, line_major_b = p.b.col < p.b.row;
  HopperConfig config =
      hopper_variant(p, int(sizeof(T)), current_device(), swap, arguments.number("tile"),
                     arguments.number("splits"), arguments.number("pair") != 0);
  config.line_major_a = swap ? line_major_b : line_major_a;
  config.line_major_b = swap ? line_major_a : line_major_b;
  std::printf("plan: hopper %s\n", config.text().c_str());
  if constexpr (sizeof(T) == 2) {
    if (second != nullptr)
      return gemm_hopper<T, false>(p, config, PlaceEpilogue{}, second, nullptr);
  }
  return gemm_hopper<T, false>(p, config, PlainEpilogue{}, nullptr, nullptr);
}

template <class T>
cudaError_t run_stream(const Arguments& arguments, const Matmul& p, void* second) {
  const StreamConfig config = stream_variant(p, arguments.number("splits"));
  std::printf("plan: stream %s\n", config.text().c_str());
  if (config.tile != arguments.number("tile") || config.swap != (arguments.number("swap") != 0)) {
    fail("the case says otherwise");
  }
  return second == nullptr ? gemm_stream<T>(p, config, PlainEpilogue{}, nullptr, nullptr)
                           : gemm_stream<T>(p, config, PlaceEpilogue{}, second, nullptr);
}

cudaError_t run(const Arguments& arguments, const Matmul& p, void* second) {
  const std::string kernel = arguments.text("kernel");
  const DType dtype = p.batch.dtype;
  const PlainEpilogue plain;
  const int tile = arguments.number("tile");
  if (kernel == "fma") {
    for (const FmaTileTime& fma : kFmaTiles) {
      if (fma.rows != tile || fma.columns != arguments.number("columns")) continue;
      const FmaConfig config = fma_config(p, fma, current_device(), false);
      std::printf("plan: fma %s\n", config.text().c_str());
      return gemm_fma<false>(p, config, plain, nullptr, nullptr);
    }
    fail("no tile of %d rows", tile);
  }
  if (kernel == "mma") {
    if (dtype == DType::kBFloat16) {
      return gemm_mma<BFloat16, MmaMode::kHalves>(p, plain, nullptr, tile, nullptr);
    }
    return is_split(p) ? gemm_mma<float, MmaMode::kTF32x3>(p, plain, nullptr, tile, nullptr)
                       : gemm_mma<float, MmaMode::kTF32>(p, plain, nullptr, tile, nullptr);
  }
  if (kernel == "stream") {
    return dtype == DType::kBFloat16 ? run_stream<BFloat16>(arguments, p, second)
                                     : run_stream<Half>(arguments, p, second);
  }
  if (kernel != "hopper") fail("kernel=%s", kernel.c_str());

  const bool pack = arguments.number("aligned") == 0;
  const GemmPack copies = pack_of(p, pack, pack);
  const Tensor workspace(dtype, size_t(copies.bytes() / size_of(dtype)));
  if (pack) {
    const cudaError_t error = dtype == DType::kBFloat16
                                  ? gemm_pack<BFloat16>(p, copies, workspace.data(), nullptr)
                                  : gemm_pack<float>(p, copies, workspace.data(), nullptr);
    check(error, "gemm_pack");
  }
  const Matmul view = packed(p, copies, workspace.data());
  if (dtype == DType::kBFloat16) return run_hopper<BFloat16>(arguments, view, second);
  return is_split(p) ? run_hopper<TF32x3>(arguments, view, nullptr)
                     : run_hopper<TF32>(arguments, view, nullptr);
}

}  // namespace

int main(int count, char** texts) {
  const Arguments arguments(count, texts);
  const int batch = arguments.number("batch"), m = arguments.number("m");
  const int n = arguments.number("n"), k = arguments.number("k");
  const bool aligned = arguments.number("aligned") != 0;
  const bool float32 = arguments.text("dtype") == "float32";
  const DType dtype = dtype_named(arguments.text("dtype"));
  const std::string precision = arguments.text("precision");
  Matrices a(dtype, batch, m, k, arguments.text("a") == "columns", aligned);
  Matrices b(dtype, batch, k, n, arguments.text("b") == "columns", aligned);
  Matrices out(dtype, batch, m, n, false, aligned), second(dtype, batch, m, n, false, aligned);
  std::mt19937 numbers(unsigned(arguments.number("seed")));
  a.tensor.fill(numbers, 1);
  b.tensor.fill(numbers, 1);

  Matmul p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.batch.dtype = dtype;
  p.batch.numel = batch;
  p.batch.dims = batch == 1 ? 0 : 1;
  p.batch.sizes[0] = batch;
  Matrices* const matrices[3] = {&out, &a, &b};
  for (int i = 0; i < 3; ++i) {
    p.batch.operands[size_t(i)].data = matrices[i]->tensor.data();
    p.batch.operands[size_t(i)].strides[0] = matrices[i]->matrix();
  }
  p.out = out.strides();
  p.a = a.strides();
  p.b = b.strides();
  p.precision = precision == "tf32"     ? Precision::kTF32
                : precision == "tf32x3" ? Precision::kTF32x3
                                        : Precision::kIeee;
  const bool keeps = arguments.text("epilogue") == "place";
  check(run(arguments, p, keeps ? second.tensor.data() : nullptr), "the launch");

  const std::vector<double> in_a = a.tensor.values(), in_b = b.tensor.values();
  std::vector<double> got, wanted, kept, halves;
  for (int z = 0; z < batch; ++z) {
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double sum = 0;
        for (int q = 0; q < k; ++q) sum += in_a[a.at(z, i, q)] * in_b[b.at(z, q, j)];
        if (keeps) sum += place_value(i, j);
        wanted.push_back(sum);
        halves.push_back(sum / 2);
        kept.push_back(second.tensor.get(out.at(z, i, j)));
        got.push_back(out.tensor.get(out.at(z, i, j)));
      }
    }
  }
  const double tolerance = !float32 ? 5e-3 : precision == "tf32" ? 1e-3 : 1e-6;
  compare("out", got, wanted, size_t(n), tolerance);
  if (keeps) compare("second", kept, halves, size_t(n), tolerance);
  for (int z = 0; z < batch; ++z) {
    for (int i = 0; i < m; ++i) {
      for (int j = n; j < out.pitch; ++j) {
        const bool untouched = std::isnan(out.tensor.get(out.at(z, i, j)));
        if (!untouched) fail("row %d is written beyond its end", i);
      }
    }
  }
  return 0;
}
