// dequantize_int4(q, scale, block, zero_point): packed integers of four bits times their scales.
#include "binding.h"
#include "quantize/dequantize.h"

using namespace cuda_ops;

cudaError_t dequantize_int4_launch(const DequantizeInt4& problem, cudaStream_t stream);

namespace {

using MaybeTensor = std::optional<Tensor>;

void check_blocks(const Tensor& q, const Tensor& scale, int64_t block) {
  const int64_t size = 2 * q.size(q.dim() - 1);
  const std::string numbers = std::to_string(size);
  if (block < 1 || size % block != 0) {
    refuse("block", "a divisor of " + numbers + ", the numbers in a row of 'q'",
           std::to_string(block));
  }
  if (scale.size(scale.dim() - 1) == size / block) return;
  refuse("scale",
         "dim 'g' of (..., g) to be " + std::to_string(size / block) + ", one for each " +
             std::to_string(block) + " of " + numbers + " numbers",
         "shape " + shape_name(scale));
}

// Allocates the result and calls run(problem).
template <class Run>
Tensor dequantized(const Tensor& q, const Tensor& scale, int64_t block,
                   const MaybeTensor& zero_point, Run run) {
  check_blocks(q, scale, block);
  const Tensor codes = contiguous(q), factors = contiguous(scale);
  const MaybeTensor zeros = zero_point ? MaybeTensor(contiguous(*zero_point)) : std::nullopt;
  std::vector<int64_t> shape = shape_of(q);
  shape.back() *= 2;
  Tensor out = empty(shape, scale);
  DequantizeInt4 p;
  p.q = static_cast<const uint8_t*>(codes.const_data_ptr());
  p.scale = factors.const_data_ptr();
  p.zero_point = zeros ? zeros->const_data_ptr() : nullptr;
  p.out = out.mutable_data_ptr();
  p.bytes = codes.numel();
  p.block = block;
  p.dtype = dtype_of(scale);
  run(p);
  return out;
}

Tensor dequantize_int4_cpu(const Tensor& q, const Tensor& scale, int64_t block,
                           const MaybeTensor& zero_point) {
  return dequantized(q, scale, block, zero_point, [](const DequantizeInt4& p) {
    visit_floating_cpu(p.dtype, [&](auto tag) {
      using T = decltype(tag);
      const auto* scales = static_cast<const T*>(p.scale);
      const auto* zeros = static_cast<const T*>(p.zero_point);
      parallel_for(p.bytes, 16384, [&](int64_t begin, int64_t end) {
        for (int64_t at = 2 * begin; at < 2 * end; ++at) {
          const uint8_t pair = p.q[at / 2];
          const int half = static_cast<int>(at % 2);
          const int64_t from = at / p.block;
          const double value = zeros == nullptr
                                   ? int4_at(pair, half)
                                   : uint4_at(pair, half) - static_cast<double>(zeros[from]);
          static_cast<T*>(p.out)[at] = static_cast<T>(value * static_cast<double>(scales[from]));
        }
      });
    });
  });
}

Tensor dequantize_int4_cuda(const Tensor& q, const Tensor& scale, int64_t block,
                            const MaybeTensor& zero_point) {
  return dequantized(q, scale, block, zero_point, [&](const DequantizeInt4& p) {
    launch(q, [&](cudaStream_t stream) { return dequantize_int4_launch(p, stream); });
  });
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("dequantize_int4(Tensor q, Tensor scale, int block, Tensor? zero_point=None) -> Tensor",
          "(h),(g),(g)->(2h)")
      .dtypes(kFloating)
      .dtypes("q", DType::kUInt8)
      .broadcast()
      .returns("out", "scale")
      .no_gradient("scale")
      .no_gradient("zero_point")
      .doc(R"(Integers of four bits, packed two in a byte, times the scale of their block.

The first of two is in the low half of the byte. Without zero_point the integers are from -8 to 7, in
two's complement; with it they are from 0 to 15, less the zero point of their block.

Shapes: q (..., N / 2), scale and zero_point (..., N / block), of any strides; the result (..., N) is
contiguous. Loop dims broadcast.
Dtypes: q uint8; scale float64, float32, float16 or bfloat16, which zero_point and the result have
too. There is no gradient.

Args:
    q: the packed integers.
    scale: one number for each block.
    block: how many neighbors of the last dim share a scale, a divisor of N.
    zero_point: one number for each block, not necessarily an integer.

Errors: RuntimeError for any other dtype, a block that does not divide N, another number of scales,
mixed devices, or shapes that do not broadcast.
Formula: (q - zero_point) scale, in float64 for float64 and in float32 for the others.

Example:
>>> cuda_ops.dequantize_int4(torch.tensor([0x21, 0xF8], dtype=torch.uint8), torch.tensor([0.5]), 4)
tensor([ 0.5000,  1.0000, -4.0000, -0.5000]))")
      .cpu<dequantize_int4_cpu>()
      .cuda<dequantize_int4_cuda>();
}
