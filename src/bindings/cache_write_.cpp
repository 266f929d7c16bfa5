// cache_write_(key, value, key_cache, value_cache, slots): rows of new tokens written to their
// slots of a paged cache, in its dtype.
#include "binding.h"
#include "cache/cache_write.h"

using namespace cuda_ops;

cudaError_t cache_write_launch(const CacheWrite& problem, cudaStream_t stream);

namespace {

constexpr DType kCached[] = {DType::kFloat64,  DType::kFloat32,    DType::kFloat16,
                             DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2};

CacheRows rows_of(const Tensor& rows, const Tensor& cache, const std::optional<Tensor>& scale) {
  CacheRows part;
  part.rows = rows.const_data_ptr();
  part.cache = cache.mutable_data_ptr();
  part.scale = scale ? static_cast<const float*>(scale->const_data_ptr()) : nullptr;
  part.heads = rows.size(1);
  part.dim = rows.size(2);
  part.token_step = step_of(rows, 0);
  part.row_head = step_of(rows, 1);
  part.row_step = rows.stride(2);
  part.block_step = step_of(cache, 0);
  part.slot_step = step_of(cache, 1);
  part.cache_head = step_of(cache, 2);
  part.cache_step = cache.stride(3);
  part.cache_dtype = dtype_of(cache);
  part.merge_heads();
  return part;
}

CacheWrite problem_of(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                      const Tensor& value_cache, const Tensor& slots,
                      const std::optional<Tensor>& key_scale,
                      const std::optional<Tensor>& value_scale) {
  CacheWrite p;
  p.parts[0] = rows_of(key, key_cache, key_scale);
  p.parts[1] = rows_of(value, value_cache, value_scale);
  p.slots = static_cast<const int64_t*>(slots.const_data_ptr());
  p.slots_step = step_of(slots, 0);
  p.tokens = slots.size(0);
  p.blocks = key_cache.size(0);
  p.block = key_cache.size(1);
  p.dtype = dtype_of(key);
  return p;
}

// A number as the cache has it.
template <class C>
C stored(double value) {
  if constexpr (std::is_same_v<C, torch::headeronly::Float8_e4m3fn>) {
    return C(Float8E4M3::saturated(static_cast<float>(value)).bits, C::from_bits());
  } else if constexpr (std::is_same_v<C, torch::headeronly::Float8_e5m2>) {
    return C(Float8E5M2::saturated(static_cast<float>(value)).bits, C::from_bits());
  } else {
    return static_cast<C>(value);
  }
}

template <class T, class C>
void write_rows(const CacheWrite& p, const CacheRows& part) {
  for (int64_t token = 0; token < p.tokens; ++token) {
    const int64_t slot = p.slots[token * p.slots_step];
    if (slot < 0 || slot >= p.blocks * p.block) continue;
    const T* from = static_cast<const T*>(part.rows) + token * part.token_step;
    C* to = static_cast<C*>(part.cache) + slot / p.block * part.block_step +
            slot % p.block * part.slot_step;
    for (int64_t head = 0; head < part.heads; ++head) {
      for (int64_t i = 0; i < part.dim; ++i) {
        const T& read = from[head * part.row_head + i * part.row_step];
        C& written = to[head * part.cache_head + i * part.cache_step];
        if constexpr (std::is_same_v<T, C>) {
          if (part.scale == nullptr) {
            written = read;
            continue;
          }
        }
        const auto value = static_cast<double>(read);
        written = stored<C>(part.scale == nullptr ? value : value / double(*part.scale));
      }
    }
  }
}

void cache_write_cpu(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                     const Tensor& value_cache, const Tensor& slots,
                     const std::optional<Tensor>& key_scale,
                     const std::optional<Tensor>& value_scale) {
  const CacheWrite p =
      problem_of(key, value, key_cache, value_cache, slots, key_scale, value_scale);
  // Tokens in their order: of several with one slot the last one is kept.
  parallel_for(2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      visit_floating_cpu(p.dtype, [&](auto row) {
        visit_cpu<DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                  DType::kFloat8E4M3, DType::kFloat8E5M2>(p.parts[i].cache_dtype, [&](auto cached) {
          write_rows<decltype(row), decltype(cached)>(p, p.parts[i]);
        });
      });
    }
  });
}

void cache_write_cuda(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                      const Tensor& value_cache, const Tensor& slots,
                      const std::optional<Tensor>& key_scale,
                      const std::optional<Tensor>& value_scale) {
  const CacheWrite p =
      problem_of(key, value, key_cache, value_cache, slots, key_scale, value_scale);
  launch(key, [&](cudaStream_t stream) { return cache_write_launch(p, stream); });
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("cache_write_(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
          "Tensor slots, Tensor? key_scale=None, Tensor? value_scale=None) -> ()",
          "[t,h,d],[t,h,e],[n,b,h,d],[n,b,h,e],[t],[],[]->")
      .dtypes(kFloating)
      .dtypes("key_cache", kCached)
      .dtypes("value_cache", kCached)
      .dtypes("slots", kInt64)
      .dtypes("key_scale", DType::kFloat32)
      .dtypes("value_scale", DType::kFloat32)
      .doc(R"(Writes the keys and values of new tokens to their slots of a paged cache, in place.

Slot s is row s % block of block s / block. A token whose slot is negative or not in the cache is
skipped. Where several have the same slot, one of them is kept: the last one on a CPU, any on a GPU.
There is no gradient: call it under torch.no_grad().

Shapes: key [T, heads, D], value [T, heads, E], key_cache [blocks, block, heads, D] and value_cache
[blocks, block, heads, E] of any strides, slots [T], the scales [].
Dtypes: float64, float32, float16 or bfloat16, the same for key and value; the caches may have any of
these, float8_e4m3fn or float8_e5m2. slots is int64, the scales are float32.
Errors: RuntimeError for any other dtype, mixed devices, shapes that do not fit, caches that share
memory, or an argument that requires a gradient.
Formula: the number x is stored as x / scale, or as it is without a scale; the quotient is taken in
float64 where x or the cache has that, and in float32 otherwise. In eight bits what is too
large becomes the largest number, and infinities too.

Example:
>>> key = value = torch.tensor([[[1.0]], [[2.0]]])
>>> keys, values = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)
>>> cuda_ops.cache_write_(key, value, keys, values, torch.tensor([3, -1]))
>>> keys.flatten()
tensor([0., 0., 0., 1.]))")
      .cpu<cache_write_cpu>()
      .cuda<cache_write_cuda>();
}
