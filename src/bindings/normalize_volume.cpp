// normalize_volume(x): 8- or 16-bit volumes as floating numbers, by a maximum,
// by a mean and a standard deviation, or by each volume's own.
#include "imaging/normalize_volume.h"

#include "binding.h"
#include "points_binding.h"

using namespace cuda_ops;

cudaError_t normalize_volume_launch(const NormalizeVolume& problem, cudaStream_t stream);

namespace {

constexpr DType kVoxels[] = {DType::kUInt16, DType::kUInt8};
constexpr DType kResults[] = {DType::kFloat32, DType::kFloat16};
using Number = std::optional<double>;
using Chosen = std::optional<ScalarType>;

// Wide enough for any image, and no intermediate result overflows.
void check_divisor(const char* argument, const Number& value) {
  if (value && !(*value >= 1e-30 && *value <= 1e30)) {
    refuse(argument, "a number from 1e-30 to 1e30", std::to_string(*value));
  }
}

Scaling given_scaling(const Number& maximum, const Number& mean, const Number& std) {
  if (maximum && (mean || std)) refuse("maximum", "None beside mean and std", "both");
  if (mean && !std) refuse("std", "a number beside mean", "None");
  if (std && !mean) refuse("mean", "a number beside std", "None");
  check_divisor("maximum", maximum);
  check_divisor("std", std);
  if (mean && !(std::abs(*mean) <= 1e30)) {
    refuse("mean", "a number from -1e30 to 1e30", std::to_string(*mean));
  }
  if (maximum) return {0, *maximum};
  return std ? Scaling{*mean, *std} : Scaling{};
}

NormalizeVolume problem_of(const Tensor& x, const Number& maximum, const Number& mean,
                           const Number& std, const Chosen& dtype) {
  NormalizeVolume p;
  p.to_half = dtype == ScalarType::Half;
  p.given = given_scaling(maximum, mean, std);
  p.own_statistics = !maximum && !std;
  p.voxels = points_of(x);
  p.each = x.size(x.dim() - 3) * x.size(x.dim() - 2) * x.size(x.dim() - 1);
  if (p.own_statistics) {
    p.volumes = p.each > 0 ? p.voxels.numel / p.each : 0;
    if (p.each > kMostVoxels) {
      refuse("x", "at most 2^32 voxels a volume", "shape " + shape_name(x));
    }
  } else {
    p.each = p.voxels.numel;
  }
  return p;
}

Tensor empty_result(const Tensor& x, NormalizeVolume& p) {
  Tensor out = empty(shape_of(x), p.to_half ? DType::kFloat16 : DType::kFloat32, x);
  p.out = out.mutable_data_ptr();
  return out;
}

// --- CPU ----------------------------------------------------------------------

template <class In>
Moments moments_cpu(const NormalizeVolume& p, int64_t first) {
  constexpr int64_t kChunk = 65536;
  std::vector<Moments> parts((p.each + kChunk - 1) / kChunk);
  parallel_for(static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kChunk; i < std::min(end * kChunk, p.each); ++i) {
      const uint64_t v = static_cast<const In*>(p.voxels.data)[p.voxels.offset_at(first + i)];
      parts[i / kChunk].sum += v;
      parts[i / kChunk].squares += v * v;
    }
  });
  Moments total;
  for (const Moments& part : parts) {
    total.sum += part.sum;
    total.squares += part.squares;
  }
  return total;
}

template <class In, class Out>
void normalize(const NormalizeVolume& p) {
  for (int64_t volume = 0; volume < p.volumes; ++volume) {
    const int64_t first = volume * p.each;
    Scaling scaling = p.given;
    if (p.own_statistics) {
      const Moments m = moments_cpu<In>(p, first);
      const double spread = variance(m, static_cast<uint64_t>(p.each));
      scaling.mean = static_cast<double>(m.sum) / static_cast<double>(p.each);
      scaling.divisor = spread > 0 ? std::sqrt(spread) : 1;  // constant: x - mean is 0
    }
    parallel_for(p.each, 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = first + begin; i < first + end; ++i) {
        const double v = static_cast<const In*>(p.voxels.data)[p.voxels.offset_at(i)];
        static_cast<Out*>(p.out)[i] = static_cast<Out>((v - scaling.mean) / scaling.divisor);
      }
    });
  }
}

Tensor normalize_volume_cpu(const Tensor& x, Number maximum, Number mean, Number std,
                            Chosen dtype) {
  using torch::headeronly::Half;
  NormalizeVolume p = problem_of(x, maximum, mean, std, dtype);
  Tensor out = empty_result(x, p);
  if (p.voxels.dtype == DType::kUInt8) {
    p.to_half ? normalize<uint8_t, Half>(p) : normalize<uint8_t, float>(p);
  } else {
    p.to_half ? normalize<uint16_t, Half>(p) : normalize<uint16_t, float>(p);
  }
  return out;
}

// --- CUDA ---------------------------------------------------------------------

Tensor normalize_volume_cuda(const Tensor& x, Number maximum, Number mean, Number std,
                             Chosen dtype) {
  NormalizeVolume p = problem_of(x, maximum, mean, std, dtype);
  Tensor out = empty_result(x, p);
  // Written before it is read, so it need not be zero; kept until the launch is queued.
  const Tensor partials = empty({p.own_statistics ? 2 * kMostPartials : 0}, DType::kInt64, x);
  p.partials = static_cast<Moments*>(partials.mutable_data_ptr());
  launch(x, [&](cudaStream_t stream) { return normalize_volume_launch(p, stream); });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("normalize_volume(Tensor x, float? maximum=None, *, float? mean=None, float? std=None, "
          "ScalarType? dtype=None) -> Tensor",
          "(d,h,w)->(d,h,w)")
      .dtypes(kVoxels)
      .dtypes("dtype", kResults)
      .returns("out", "dtype", DType::kFloat32)
      .doc(R"(Volumes of 8- or 16-bit voxels as floating-point numbers.

Computes x / maximum, or (x - mean) / std. Without these arguments it normalizes each volume by its
own mean and population standard deviation (divided by N, not N - 1), in one pass over memory if the
volume stays in the cache; a constant volume gives zeros.

Shapes: x (..., D, H, W) of any strides; the result has the same shape and is contiguous.
Dtypes: uint16 or uint8; the result is float32 (the default) or float16, as dtype says. Integers
have no gradient. Statistics are exact integer sums, so every run gives the same result. The rest
runs in float32: results are within 2 units in the last place, and x / maximum is correctly rounded.
Errors: RuntimeError for any other dtype, fewer than three dims, maximum together with mean or std,
mean without std or std without mean, maximum or std outside 1e-30 to 1e30 (so 0 and NaN too), mean
beyond 1e30, and, without any of them, volumes of more than 2^32 voxels.
Formula: the standard score, (x - mean) / std.

Example:
>>> cuda_ops.normalize_volume(torch.tensor([[[0, 5], [10, 20]]], dtype=torch.uint8), 20.0)
tensor([[[0.0000, 0.2500],
         [0.5000, 1.0000]]]))")
      .cpu<normalize_volume_cpu>()
      .cuda<normalize_volume_cuda>();
}
