// moe_send_(x, experts, weights, firsts, xs, chosen, scales): a rank's tokens, their experts and
// weights, written to tensors of each rank.
#include <cstring>

#include "binding.h"
#include "foreach/foreach_binding.h"
#include "moe/moe_send.h"

using namespace cuda_ops;

cudaError_t moe_send_launch(const MoeSend& problem, cudaStream_t stream);

namespace {

// No signature line describes lists, so what one says of the other arguments is checked here.
void check_choice(const Tensor& x, const Tensor& experts, const Tensor& weights) {
  const auto refuse_shape = [](const char* name, const std::string& expected, const Tensor& given) {
    refuse(name, expected, "shape " + shape_name(given));
  };
  if (x.dim() != 2) refuse_shape("x", "2 dims", x);
  if (experts.dim() != 2) refuse_shape("experts", "2 dims", experts);
  const std::vector<int64_t> shape = {x.size(0), experts.size(1)};
  if (shape_of(experts) != shape) refuse_shape("experts", "shape " + shape_name(shape), experts);
  if (shape_of(weights) != shape) refuse_shape("weights", "shape " + shape_name(shape), weights);
}

// `original` is contiguous. A call has up to 48 copies, and the host should take no longer than the
// GPU: text is made of what is refused alone.
SendPart part_of(const char* name, const Tensors& copies, const char* original_name,
                 const Tensor& original, size_t ranks) {
  if (copies.size() != ranks) {
    refuse(name, "as many tensors as 'firsts' has numbers, " + std::to_string(ranks),
           std::to_string(copies.size()));
  }
  const View read = original;
  SendPart part;
  part.from = read.data;
  part.bytes = original.numel() * size_of(read.dtype);
  for (size_t r = 0; r < ranks; ++r) {
    const View copy = writable_view(copies[r]);
    const auto refuse_copy = [&](const std::string& expected, const std::string& actual) {
      refuse(element_name(name, r), expected + " like '" + original_name + "'", actual);
    };
    if (copy.dtype != read.dtype) {
      refuse_copy("dtype " + dtype_name(original), dtype_name(copies[r]));
    }
    if (copy.dims != read.dims || !std::equal(copy.sizes, copy.sizes + copy.dims, read.sizes)) {
      refuse_copy("shape " + shape_name(read), "shape " + shape_name(copy));
    }
    if (!copies[r].is_contiguous()) {
      refuse(element_name(name, r), "a contiguous tensor", "one that is not");
    }
    part.to[r] = copy.data;
  }
  return part;
}

// Calls run(problem).
template <class Run>
void send(const Tensor& x_, const Tensor& experts_, const Tensor& weights_,
          const std::vector<int64_t>& firsts, const Tensors& xs, const Tensors& chosen,
          const Tensors& scales, Run run) {
  check_choice(x_, experts_, weights_);
  if (firsts.empty() || firsts.size() > kMostRanks) {
    refuse("firsts", "1 to " + std::to_string(kMostRanks) + " numbers",
           std::to_string(firsts.size()));
  }
  const Tensor x = contiguous(x_), experts = contiguous(experts_), weights = contiguous(weights_);
  MoeSend p;
  p.ranks = static_cast<int>(firsts.size());
  std::copy(firsts.begin(), firsts.end(), p.firsts);
  p.x = part_of("xs", xs, "x", x, firsts.size());
  p.experts = part_of("chosen", chosen, "experts", experts, firsts.size());
  p.weights = part_of("scales", scales, "weights", weights, firsts.size());
  run(p);
}

void copy_to_all(const SendPart& part, int ranks) {
  parallel_for(part.bytes, 1 << 16, [&](int64_t begin, int64_t end) {
    for (int r = 0; r < ranks; ++r) {
      std::memcpy(static_cast<char*>(part.to[r]) + begin,
                  static_cast<const char*>(part.from) + begin, static_cast<size_t>(end - begin));
    }
  });
}

void moe_send_cpu(const Tensor& x, const Tensor& experts, const Tensor& weights,
                  const std::vector<int64_t>& firsts, const Tensors& xs, const Tensors& chosen,
                  const Tensors& scales) {
  send(x, experts, weights, firsts, xs, chosen, scales, [](const MoeSend& p) {
    copy_to_all(p.x, p.ranks);
    copy_to_all(p.weights, p.ranks);
    const auto* const indices = static_cast<const uint64_t*>(p.experts.from);
    for (int r = 0; r < p.ranks; ++r) {
      auto* const to = static_cast<uint64_t*>(p.experts.to[r]);
      for (int64_t i = 0; i < p.experts.bytes / 8; ++i) {
        to[i] = indices[i] - static_cast<uint64_t>(p.firsts[r]);
      }
    }
  });
}

void moe_send_cuda(const Tensor& x, const Tensor& experts, const Tensor& weights,
                   const std::vector<int64_t>& firsts, const Tensors& xs, const Tensors& chosen,
                   const Tensors& scales) {
  send(x, experts, weights, firsts, xs, chosen, scales, [&](const MoeSend& p) {
    launch(x, [&](cudaStream_t stream) { return moe_send_launch(p, stream); });
  });
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("moe_send_(Tensor x, Tensor experts, Tensor weights, int[] firsts, Tensor(a!)[] xs, "
          "Tensor(b!)[] chosen, Tensor(c!)[] scales) -> ()",
          "")
      .dtypes(kFloating)
      .dtypes("experts", kInt64)
      .dtypes("weights", kFloating)
      .doc(R"(Writes tokens, their experts and weights to tensors of each rank, in one launch.

What moe calls where GPUs of one host write into each other's memory: rank r numbers its experts
from firsts[r], so those of others are negative or too large there.

Shapes: x (T, H), experts and weights (T, k) of any strides; a copy is made of what is not
contiguous. firsts has a number for each rank, 1 to 16 of them; xs, chosen and scales have as many
tensors, which are contiguous, in the shapes of x, experts and weights.
Dtypes: x and weights float64, float32, float16 or bfloat16 each, experts int64; xs, chosen and
scales those of x, experts and weights.
Errors: RuntimeError for any other dtype, number of tensors, shape or layout, mixed devices, tensors
to write that share memory, or an argument that requires a gradient.
Formula: xs[r] = x, chosen[r] = experts - firsts[r], scales[r] = weights.

Example:
>>> x, experts, weights = torch.ones(1, 2), torch.tensor([[3, 0]]), torch.tensor([[0.75, 0.25]])
>>> xs, chosen, scales = ([torch.empty_like(t) for _ in range(2)] for t in (x, experts, weights))
>>> cuda_ops.moe_send_(x, experts, weights, [0, 2], xs, chosen, scales)
>>> chosen
[tensor([[3, 0]]), tensor([[ 1, -2]])])")
      .cpu<moe_send_cpu>()
      .cuda<moe_send_cuda>();
}
