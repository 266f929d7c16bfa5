// rgb_to_gray(image): luma of 8-bit images, interleaved (HWC) or planar (CHW), in RGB or BGR.
#include "imaging/rgb_to_gray.h"

#include "binding.h"
#include "points_binding.h"

using namespace cuda_ops;

cudaError_t rgb_to_gray_launch(const RgbToGray& problem, cudaStream_t stream);

namespace {

constexpr DType kBytes[] = {DType::kUInt8};

enum class Order { kRgb, kBgr };

Tensor empty_gray(const Tensor& image, int64_t channels) {
  std::vector<int64_t> shape(image.sizes().begin(), image.sizes().end());
  shape.erase(shape.begin() + channels);
  return empty(shape, image);
}

// `channels` is the dim that holds red, green and blue.
RgbToGray conversion(const Tensor& out, const Tensor& image, int64_t channels, Order order) {
  return {points_of(image, channels), image.stride(channels),
          static_cast<uint8_t*>(out.mutable_data_ptr()),
          order == Order::kBgr ? kBgrWeights : kRgbWeights};
}

Tensor convert_cpu(const Tensor& image, int64_t channels, Order order) {
  Tensor out = empty_gray(image, channels);
  const RgbToGray p = conversion(out, image, channels, order);
  parallel_for(p.pixels.numel, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto* at = static_cast<const uint8_t*>(p.pixels.data) + p.pixels.offset_at(i);
      p.out[i] =
          static_cast<uint8_t>(weighted(p.weights, at[0], at[p.channel], at[2 * p.channel]) >> 24);
    }
  });
  return out;
}

Tensor convert_cuda(const Tensor& image, int64_t channels, Order order) {
  Tensor out = empty_gray(image, channels);
  launch(image, [&](cudaStream_t stream) {
    return rgb_to_gray_launch(conversion(out, image, channels, order), stream);
  });
  return out;
}

Tensor rgb_to_gray_cpu(const Tensor& image, Order order) {
  return convert_cpu(image, image.dim() - 1, order);
}

Tensor rgb_to_gray_cuda(const Tensor& image, Order order) {
  return convert_cuda(image, image.dim() - 1, order);
}

Tensor rgb_to_gray_chw_cpu(const Tensor& image, Order order) {
  return convert_cpu(image, image.dim() - 3, order);
}

Tensor rgb_to_gray_chw_cuda(const Tensor& image, Order order) {
  return convert_cuda(image, image.dim() - 3, order);
}

}  // namespace

CUDA_OPS(library) {
  library.op("rgb_to_gray(Tensor image, str order=\"RGB\") -> Tensor", "(h,w,3)->(h,w)")
      .dtypes(kBytes)
      .one_of("order", {"RGB", "BGR"})
      .doc(R"(Gray value of interleaved RGB or BGR images: 0.299 R + 0.587 G + 0.114 B.

The exact weighted sum, rounded to the nearest integer, halves up. torchvision's rgb_to_grayscale
truncates instead, and takes 0.2989 for red: it is never above this operator and at most 1 below.
OpenCV's cvtColor rounds, with weights in 14 or 15 bits: it differs by at most 1, for about 1 color
in 800 with 15 bits and 1 in 530 with 14.

Shapes: image (..., H, W, 3) of any strides; the result (..., H, W) is contiguous.
Dtypes: uint8. Integers have no gradient.

Args:
    image: the pixels.
    order: "RGB", or "BGR" for images as OpenCV's imread returns them. Nothing is copied for it, as
        image.flip(-1) would.

Errors: RuntimeError for any other dtype or order, fewer than three dims, or a last dim that is not 3.
Formula: the luma of ITU-R BT.601, https://www.itu.int/rec/R-REC-BT.601.

Example:
>>> cuda_ops.rgb_to_gray(torch.tensor([[[255, 0, 0], [0, 255, 0]]], dtype=torch.uint8))
tensor([[ 76, 150]], dtype=torch.uint8)
>>> cuda_ops.rgb_to_gray(torch.tensor([[[255, 0, 0]]], dtype=torch.uint8), "BGR")
tensor([[29]], dtype=torch.uint8))")
      .cpu<rgb_to_gray_cpu>()
      .cuda<rgb_to_gray_cuda>();
  library.op("rgb_to_gray_chw(Tensor image, str order=\"RGB\") -> Tensor", "(3,h,w)->(h,w)")
      .dtypes(kBytes)
      .one_of("order", {"RGB", "BGR"})
      .doc(
          R"(Gray value of planar RGB or BGR images: 0.299 R + 0.587 G + 0.114 B, as rgb_to_gray.

Shapes: image (..., 3, H, W) of any strides; the result (..., H, W) is contiguous.
Dtypes: uint8. Integers have no gradient.

Args:
    image: the pixels.
    order: "RGB" or "BGR", the order of the three planes.

Errors: RuntimeError for any other dtype or order, fewer than three dims, or a third dim from the end
that is not 3.
Formula: the luma of ITU-R BT.601, https://www.itu.int/rec/R-REC-BT.601.)")
      .cpu<rgb_to_gray_chw_cpu>()
      .cuda<rgb_to_gray_chw_cuda>();
}
