// quantize(x, dtype, block): rows, or blocks of them, as narrow numbers with a scale each.
#include "binding.h"
#include "quantize/quantize.h"
#include "rows/rows_binding.h"

using namespace cuda_ops;

cudaError_t quantize_launch(const Quantize& problem, cudaStream_t stream);

namespace {

constexpr DType kWide[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr DType kNarrow[] = {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8};

using Quantized = std::tuple<Tensor, Tensor>;

// Allocates both results and calls run(problem).
template <class Run>
Quantized quantized(const Tensor& x, ScalarType dtype, std::optional<int64_t> block, Run run) {
  std::vector<int64_t> shape = shape_of(x);
  const int64_t size = shape.back(), n = block.value_or(size);
  if (block && (n < 1 || size % n != 0)) {
    refuse("block", "a divisor of " + std::to_string(size) + ", the size of dim 'n'",
           std::to_string(n));
  }
  Tensor q = empty(shape, dtype_of(dtype), x);
  shape.back() = block ? size / n : 1;
  Tensor scale = empty(shape, DType::kFloat32, x);
  const Tensor rows = even_rows(x);
  Quantize p;
  p.x = rows.const_data_ptr();
  p.q = q.mutable_data_ptr();
  p.scale = static_cast<float*>(scale.mutable_data_ptr());
  p.rows = scale.numel();
  p.n = n;
  p.runs = shape.back();
  p.x_step = row_step(rows);
  if (p.x_step == size) {  // dense: every run is as far from the next
    p.runs = 1;
    p.x_step = n;
  }
  p.dtype = dtype_of(x);
  p.q_dtype = dtype_of(q);
  run(p);
  return {q, scale};
}

// --- CPU ----------------------------------------------------------------------

// As on a GPU in float32, so that both agree to the bit.
int8_t narrowed(float value, Int8) {
  if (std::isnan(value)) return 0;
  return Int8::saturated(int(std::nearbyint(std::min(std::max(value, -128.f), 128.f)))).bits;
}

template <class Q>
uint8_t narrowed(float value, Q) {
  return Q::saturated(value).bits;
}

template <class T, class Q>
void quantize_row(const Quantize& p, int64_t row, Q q) {
  const T* x = static_cast<const T*>(p.x) + row / p.runs * p.x_step + row % p.runs * p.n;
  float largest = 0;
  for (int64_t i = 0; i < p.n; ++i) {
    const float size = std::abs(static_cast<float>(x[i]));
    if (size > largest || size != size) largest = size;  // a NaN stays
  }
  const float scale = p.scale[row] = quantization_scale<Q>(largest);
  auto* out = static_cast<uint8_t*>(p.q) + row * p.n;
  for (int64_t i = 0; i < p.n; ++i) {
    out[i] = static_cast<uint8_t>(narrowed(static_cast<float>(x[i]) / scale, q));
  }
}

Quantized quantize_cpu(const Tensor& x, ScalarType dtype, std::optional<int64_t> block) {
  return quantized(x, dtype, block, [](const Quantize& p) {
    visit_cpu<DType::kFloat32, DType::kFloat16, DType::kBFloat16>(p.dtype, [&](auto tag) {
      using T = decltype(tag);
      parallel_for(p.rows, 1 + 16384 / (p.n + 1), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          if (p.q_dtype == DType::kFloat8E4M3) {
            quantize_row<T>(p, row, Float8E4M3{});
          } else if (p.q_dtype == DType::kFloat8E5M2) {
            quantize_row<T>(p, row, Float8E5M2{});
          } else {
            quantize_row<T>(p, row, Int8{});
          }
        }
      });
    });
  });
}

// --- CUDA ---------------------------------------------------------------------

Quantized quantize_cuda(const Tensor& x, ScalarType dtype, std::optional<int64_t> block) {
  return quantized(x, dtype, block, [&](const Quantize& p) {
    launch(x, [&](cudaStream_t stream) { return quantize_launch(p, stream); });
  });
}

}  // namespace

CUDA_OPS(library) {
  // With blocks there are as many scales in a row, which the plugin says.
  library
      .op("quantize(Tensor x, ScalarType dtype, int? block=None) -> (Tensor q, Tensor scale)",
          "(n)->(n),(1)")
      .dtypes(kWide)
      .dtypes("dtype", kNarrow)
      .returns("q", "dtype")
      .returns("scale", DType::kFloat32)
      .no_gradient("x")
      .doc(
          R"(Narrow numbers and a scale for each row, or for each block of a row: x is about q scale.

The scale makes the largest magnitude of the row the largest number of the dtype: 448 in
float8_e4m3fn, 57344 in float8_e5m2, 127 in int8. Quotients are rounded to the nearest, ties to even,
on CPU and GPU to the same bits. A row of zeros has scale 1. A NaN makes the scale of its row NaN, and
with it all of the row (0 in int8). An infinity makes the scale infinite: it becomes NaN (0 in int8)
and finite numbers 0.

Shapes: x (..., N) of any strides; q (..., N) and scale (..., 1), or (..., N / block), contiguous.
Dtypes: x float32, float16 or bfloat16; q has the given dtype, scale is float32. There is no gradient.

Args:
    x: the numbers.
    dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8.
    block: how many neighbors of the last dim share a scale, a divisor of N; None for all of them.

Errors: RuntimeError for any other dtype, no dims, or a block that does not divide N.
Formula: scale = max|x| / largest and q = round(x / scale), both in float32.

Example:
>>> cuda_ops.quantize(torch.tensor([[0.5, -2.0, 1.0, 254.0]]), torch.int8)
(tensor([[  0,  -1,   0, 127]], dtype=torch.int8), tensor([[2.]])))")
      .cpu<quantize_cpu>()
      .cuda<quantize_cuda>();
}
