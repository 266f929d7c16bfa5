// softmax_cross_entropy(logits, labels): the loss of each row, or of all of them, and its gradient.
#include "binding.h"
#include "compose.h"
#include "loss/cross_entropy_cpu.h"
#include "rows/rows_binding.h"
#include "tuned.h"

using namespace cuda_ops;

int64_t softmax_cross_entropy_partials(const CrossEntropy& problem);
cudaError_t softmax_cross_entropy_launch(const CrossEntropy& problem, cudaStream_t stream);
cudaError_t softmax_cross_entropy_backward_launch(const CrossEntropyGradient& problem,
                                                  cudaStream_t stream);

namespace {

// --- what may be tuned -----------------------------------------------------------

Knob blocks_per_sm{"blocks_per_sm", CrossEntropy().blocks_per_sm, {4, 8, 16, 32}};

// --- from tensors to a problem --------------------------------------------------

struct Options {
  int64_t ignore_index;
  double smoothing;
  bool is_total = false, is_mean = false;
};

// The rows of logits and labels, which have the same loop dims, as memory that lasts as long as
// this.
struct Rows {
  Tensor logits, labels;
  CrossEntropy problem;

  Rows(const Tensor& logits_, const Tensor& labels_, const Options& options)
      : logits(even_rows(logits_)), labels(contiguous(labels_)) {
    if (!(options.smoothing >= 0 && options.smoothing <= 1)) {
      refuse("label_smoothing", "a number from 0 to 1", std::to_string(options.smoothing));
    }
    CrossEntropy& p = problem;
    p.logits = logits.const_data_ptr();
    p.labels = static_cast<const int64_t*>(labels.const_data_ptr());
    p.rows = labels.numel();
    p.n = logits.size(logits.dim() - 1);
    p.step = row_step(logits);
    p.ignore_index = options.ignore_index;
    p.smoothing = options.smoothing;
    p.is_total = options.is_total;
    p.is_mean = options.is_mean;
    p.dtype = dtype_of(logits);
    p.blocks_per_sm = blocks_per_sm.at(bucket_of(p.rows, p.n, p.dtype));
  }
};

// A GPU cannot refuse: there such a row becomes NaN.
void check_labels(const CrossEntropy& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const int64_t label = p.labels[row];
    if (label == p.ignore_index || (label >= 0 && label < p.n)) continue;
    refuse("labels",
           "indices from 0 to below " + std::to_string(p.n) + ", the size of dim 'v', or " +
               std::to_string(p.ignore_index) + " to ignore",
           std::to_string(label));
  }
}

struct Losses {
  Tensor loss, lse, count;
};

// Allocates the results and calls run(problem).
template <class Run>
Losses losses(const Tensor& logits, const Tensor& labels, const Options& options, Run run) {
  Rows rows(logits, labels, options);
  CrossEntropy& p = rows.problem;
  const std::vector<int64_t> loop = shape_of(labels);
  Losses made{empty(p.is_total ? std::vector<int64_t>{} : loop, logits),
              empty(loop, DType::kFloat64, logits),
              {}};
  p.loss = made.loss.mutable_data_ptr();
  p.lse = static_cast<double*>(made.lse.mutable_data_ptr());
  if (p.is_total) {
    made.count = empty({}, DType::kInt64, logits);
    p.count = static_cast<int64_t*>(made.count.mutable_data_ptr());
  }
  run(p);
  return made;
}

// Calls run(problem) for the gradient; `count` is null where each row has its loss. Without
// `grad_logits` the gradient is written over the logits.
template <class Run>
void gradient(const Tensor* grad_logits, const Tensor& grad_loss, const Tensor& logits,
              const Tensor& labels, const Tensor& lse, const Tensor* count, const Options& options,
              Run run) {
  const Rows rows(logits, labels, options);
  const Tensor grads = contiguous(grad_loss), sums = contiguous(lse);
  CrossEntropyGradient g;
  g.forward = rows.problem;
  g.forward.lse = const_cast<double*>(static_cast<const double*>(sums.const_data_ptr()));
  if (count != nullptr) {
    g.forward.count = const_cast<int64_t*>(static_cast<const int64_t*>(count->const_data_ptr()));
  }
  g.grad_loss = grads.const_data_ptr();
  const Tensor& out = grad_logits != nullptr ? *grad_logits : rows.logits;
  g.grad_logits = out.mutable_data_ptr();
  g.out_step = grad_logits != nullptr ? g.forward.n : g.forward.step;
  run(g);
  if (grad_logits == nullptr) copy_back(logits, rows.logits);
}

// --- CPU ----------------------------------------------------------------------

const auto run_cpu = [](const CrossEntropy& p) {
  check_labels(p);
  cross_entropy_cpu(p);
};

const auto run_backward_cpu = [](const CrossEntropyGradient& g) {
  check_labels(g.forward);
  cross_entropy_gradient_cpu(g);
};

// --- CUDA ---------------------------------------------------------------------

auto on_cuda(const Tensor& like) {
  return [&like](CrossEntropy& p) {
    launch(like, [&](cudaStream_t stream) {
      // Freed when this returns: torch's allocator gives it to later work of this stream only.
      const Tensor partials = empty({softmax_cross_entropy_partials(p)}, DType::kFloat64, like);
      p.partials = static_cast<double*>(partials.mutable_data_ptr());
      return softmax_cross_entropy_launch(p, stream);
    });
  };
}

auto backward_on_cuda(const Tensor& like) {
  return [&like](const CrossEntropyGradient& g) {
    launch(like,
           [&](cudaStream_t stream) { return softmax_cross_entropy_backward_launch(g, stream); });
  };
}

// --- a loss for each row --------------------------------------------------------

using OfRows = std::tuple<Tensor, Tensor>;

OfRows rows_cpu(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                double label_smoothing, bool) {
  const Losses made = losses(logits, labels, {ignore_index, label_smoothing}, run_cpu);
  return {made.loss, made.lse};
}

OfRows rows_cuda(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                 double label_smoothing, bool) {
  const Losses made = losses(logits, labels, {ignore_index, label_smoothing}, on_cuda(logits));
  return {made.loss, made.lse};
}

template <class Run>
Tensor rows_gradient(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                     const Tensor& lse, const Options& options, Run run) {
  Tensor grad_logits = empty(shape_of(logits), logits);
  gradient(&grad_logits, grad_loss, logits, labels, lse, nullptr, options, run);
  return grad_logits;
}

Tensor rows_backward_cpu(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                         const Tensor& lse, int64_t ignore_index, double label_smoothing) {
  return rows_gradient(grad_loss, logits, labels, lse, {ignore_index, label_smoothing},
                       run_backward_cpu);
}

Tensor rows_backward_cuda(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                          const Tensor& lse, int64_t ignore_index, double label_smoothing) {
  return rows_gradient(grad_loss, logits, labels, lse, {ignore_index, label_smoothing},
                       backward_on_cuda(logits));
}

void rows_overwrite_cpu(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                        const Tensor& lse, int64_t ignore_index, double label_smoothing) {
  gradient(nullptr, grad_loss, logits, labels, lse, nullptr, {ignore_index, label_smoothing},
           run_backward_cpu);
}

void rows_overwrite_cuda(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                         const Tensor& lse, int64_t ignore_index, double label_smoothing) {
  gradient(nullptr, grad_loss, logits, labels, lse, nullptr, {ignore_index, label_smoothing},
           backward_on_cuda(logits));
}

// --- one loss for all rows ------------------------------------------------------

using OfAll = std::tuple<Tensor, Tensor, Tensor>;

OfAll total_cpu(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                double label_smoothing, bool mean, bool) {
  const Losses made = losses(logits, labels, {ignore_index, label_smoothing, true, mean}, run_cpu);
  return {made.loss, made.lse, made.count};
}

OfAll total_cuda(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                 double label_smoothing, bool mean, bool) {
  const Losses made =
      losses(logits, labels, {ignore_index, label_smoothing, true, mean}, on_cuda(logits));
  return {made.loss, made.lse, made.count};
}

template <class Run>
Tensor total_gradient(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                      const Tensor& lse, const Tensor& count, const Options& options, Run run) {
  Tensor grad_logits = empty(shape_of(logits), logits);
  gradient(&grad_logits, grad_loss, logits, labels, lse, &count, options, run);
  return grad_logits;
}

Tensor total_backward_cpu(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                          const Tensor& lse, const Tensor& count, int64_t ignore_index,
                          double label_smoothing, bool mean) {
  return total_gradient(grad_loss, logits, labels, lse, count,
                        {ignore_index, label_smoothing, true, mean}, run_backward_cpu);
}

Tensor total_backward_cuda(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                           const Tensor& lse, const Tensor& count, int64_t ignore_index,
                           double label_smoothing, bool mean) {
  return total_gradient(grad_loss, logits, labels, lse, count,
                        {ignore_index, label_smoothing, true, mean}, backward_on_cuda(logits));
}

void total_overwrite_cpu(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                         const Tensor& lse, const Tensor& count, int64_t ignore_index,
                         double label_smoothing, bool mean) {
  gradient(nullptr, grad_loss, logits, labels, lse, &count,
           {ignore_index, label_smoothing, true, mean}, run_backward_cpu);
}

void total_overwrite_cuda(const Tensor& grad_loss, const Tensor& logits, const Tensor& labels,
                          const Tensor& lse, const Tensor& count, int64_t ignore_index,
                          double label_smoothing, bool mean) {
  gradient(nullptr, grad_loss, logits, labels, lse, &count,
           {ignore_index, label_smoothing, true, mean}, backward_on_cuda(logits));
}

// --- either ---------------------------------------------------------------------

enum class Reduction { kMean, kSum, kNone };

Tensor softmax_cross_entropy(const Tensor& logits, const Tensor& labels, int64_t ignore_index,
                             double label_smoothing, Reduction reduction, bool overwrite_logits) {
  if (reduction == Reduction::kNone) {
    return std::get<0>(call<OfRows>("cuda_ops::softmax_cross_entropy_rows", "", logits, labels,
                                    ignore_index, label_smoothing, overwrite_logits));
  }
  return std::get<0>(call<OfAll>("cuda_ops::softmax_cross_entropy_total", "", logits, labels,
                                 ignore_index, label_smoothing, reduction == Reduction::kMean,
                                 overwrite_logits));
}

}  // namespace

CUDA_OPS(library) {
  library
      .op("softmax_cross_entropy(Tensor logits, Tensor labels, int ignore_index=-100, float "
          "label_smoothing=0.0, str reduction=\"mean\", bool overwrite_logits=False) -> Tensor",
          "")
      .one_of("reduction", {"mean", "sum", "none"})
      .calls("softmax_cross_entropy_rows")
      .calls("softmax_cross_entropy_total")
      .doc(R"(Cross entropy of the softmax over the last dim, as torch.nn.functional.cross_entropy.

The logits are read once, and once more for the gradient; no copy of them is made, and of the forward
a float64 is kept for each row. The same call gives the same bits every time, unless tuning has
chosen anew for rows of such sizes in between: then few long rows may round otherwise.

Shapes: logits (..., V), of any strides, labels (...); the result has no dims, or (...) with
reduction "none", where loop dims broadcast. Where rows are not equally far apart, or their elements not
adjacent, logits are copied first.
Dtypes: logits float64, float32, float16 or bfloat16, and the result the same; labels int64. Sums run
in float64 for float64 and in float32 for the others.

Args:
    logits: one row for each label.
    labels: indices from 0 to below V, or ignore_index.
    ignore_index: rows with this label have no loss and no gradient, and do not count in a mean.
    label_smoothing: from 0 to 1, how much of the wanted probability all V classes share.
    reduction: "mean" over the rows that are not ignored, NaN if there are none; "sum"; or "none".
    overwrite_logits: write the gradient over the logits, which hold it after the backward pass: one
        tensor of their size less. Another backward pass through them raises. Without effect under
        torch.compile and torch.func, for a second derivative, and where rows of logits share memory.

Errors: RuntimeError for any other dtype, shapes that do not fit, mixed devices, a label_smoothing out
of range, second derivatives, and on the CPU a label out of range. On a GPU the loss of such a row is
NaN, and its gradient too.
Formula: the mean of (1 - s) (lse - x[label]) + s (lse - mean(x)), lse = log(sum(exp(x))).

Example:
>>> cuda_ops.softmax_cross_entropy(torch.zeros(2, 8), torch.tensor([3, -100]))
tensor(2.0794))")
      .composite<softmax_cross_entropy>();
  library
      .op("softmax_cross_entropy_rows(Tensor logits, Tensor labels, int ignore_index=-100, float "
          "label_smoothing=0.0, bool overwrite_logits=False) -> (Tensor loss, Tensor lse)",
          "(v),()->(),()")
      .dtypes(kFloating)
      .dtypes("labels", kInt64)
      .broadcast()
      .below("labels", "v")
      .returns("lse", DType::kFloat64)
      .hidden("lse")
      .doc(
          R"(Cross entropy of each row, and the log of its sum of exponentials, 0 for an ignored row.

Shapes: logits (..., V) and labels (...), where loop dims broadcast; loss and lse (...).
Dtypes: logits float64, float32, float16 or bfloat16, and loss the same; labels int64, lse float64.
Errors: as for softmax_cross_entropy.
Formula: that of softmax_cross_entropy with reduction "none".)")
      .cpu<rows_cpu>()
      .cuda<rows_cuda>();
  library
      .op("softmax_cross_entropy_rows_backward(Tensor grad_loss, Tensor logits, Tensor labels, "
          "Tensor lse, int ignore_index=-100, float label_smoothing=0.0) -> Tensor grad_logits",
          "(),(v),(),()->(v)")
      .dtypes(kFloating)
      .dtypes("labels", kInt64)
      .broadcast()
      .below("labels", "v")
      .dtypes("lse", DType::kFloat64)
      .doc(R"(Gradient of softmax_cross_entropy_rows.

Shapes: logits (..., V), grad_loss, labels and lse (...), where loop dims broadcast; the result
(..., V).
Dtypes: as for softmax_cross_entropy_rows; grad_loss and the result have that of logits.
Errors: as for softmax_cross_entropy.
Formula: grad_loss (exp(x - lse) - s / V), and at the label less (1 - s) grad_loss.)")
      .cpu<rows_backward_cpu>()
      .cuda<rows_backward_cuda>();
  library
      .op("softmax_cross_entropy_rows_overwrite_(Tensor grad_loss, Tensor(a!) logits, Tensor "
          "labels, Tensor lse, int ignore_index=-100, float label_smoothing=0.0) -> ()",
          "(),(v),(),()->")
      .dtypes(kFloating)
      .dtypes("labels", kInt64)
      .broadcast()
      .below("labels", "v")
      .dtypes("lse", DType::kFloat64)
      .doc(R"(Writes the gradient of softmax_cross_entropy_rows over the logits.

Shapes: logits (..., V), which have all loop dims; grad_loss, labels and lse (...).
Dtypes: as for softmax_cross_entropy_rows; grad_loss has that of logits.
Errors: as for softmax_cross_entropy.
Formula: that of softmax_cross_entropy_rows_backward.)")
      .cpu<rows_overwrite_cpu>()
      .cuda<rows_overwrite_cuda>();
  library
      .op("softmax_cross_entropy_total(Tensor logits, Tensor labels, int ignore_index=-100, float "
          "label_smoothing=0.0, bool mean=True, bool overwrite_logits=False) -> (Tensor loss, "
          "Tensor "
          "lse, Tensor count)",
          "(v),()->[],(),[]")
      .dtypes(kFloating)
      .dtypes("labels", kInt64)
      .broadcast()
      .below("labels", "v")
      .returns("lse", DType::kFloat64)
      .returns("count", DType::kInt64)
      .hidden("lse")
      .hidden("count")
      .doc(R"(Cross entropy of all rows together, with what its gradient needs.

Shapes: logits (..., V) and labels (...), where loop dims broadcast; loss and count have no dims, lse
is (...).
Dtypes: logits float64, float32, float16 or bfloat16, and loss the same; labels and count int64, lse
float64.
Errors: as for softmax_cross_entropy.
Formula: the sum of softmax_cross_entropy_rows, or that over count, the rows that are not ignored.)")
      .cpu<total_cpu>()
      .cuda<total_cuda>();
  library
      .op("softmax_cross_entropy_total_backward(Tensor grad_loss, Tensor logits, Tensor labels, "
          "Tensor lse, Tensor count, int ignore_index=-100, float label_smoothing=0.0, bool "
          "mean=True) -> Tensor grad_logits",
          "[],(v),(),(),[]->(v)")
      .dtypes(kFloating)
      .dtypes("labels", kInt64)
      .broadcast()
      .below("labels", "v")
      .dtypes("lse", DType::kFloat64)
      .dtypes("count", kInt64)
      .doc(R"(Gradient of softmax_cross_entropy_total.

Shapes: grad_loss and count without dims, logits (..., V), labels and lse (...), where loop dims
broadcast; the result (..., V).
Dtypes: as for softmax_cross_entropy_total; grad_loss and the result have that of logits.
Errors: as for softmax_cross_entropy.
Formula: that of softmax_cross_entropy_rows_backward with grad_loss, or grad_loss / count.)")
      .cpu<total_backward_cpu>()
      .cuda<total_backward_cuda>();
  library
      .op("softmax_cross_entropy_total_overwrite_(Tensor grad_loss, Tensor(a!) logits, Tensor "
          "labels, Tensor lse, Tensor count, int ignore_index=-100, float label_smoothing=0.0, "
          "bool mean=True) -> ()",
          "[],(v),(),(),[]->")
      .dtypes(kFloating)
      .dtypes("labels", kInt64)
      .broadcast()
      .below("labels", "v")
      .dtypes("lse", DType::kFloat64)
      .dtypes("count", kInt64)
      .doc(R"(Writes the gradient of softmax_cross_entropy_total over the logits.

Shapes: logits (..., V), which have all loop dims; labels and lse (...), grad_loss and count without
dims.
Dtypes: as for softmax_cross_entropy_total; grad_loss has that of logits.
Errors: as for softmax_cross_entropy.
Formula: that of softmax_cross_entropy_total_backward.)")
      .cpu<total_overwrite_cpu>()
      .cuda<total_overwrite_cuda>();
}
