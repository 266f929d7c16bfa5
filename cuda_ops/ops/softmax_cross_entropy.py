"""``softmax_cross_entropy``: which of its operators a reduction needs, and what to compare and time
it with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from cuda_ops.derive import gradient, rules
from cuda_ops.derive.arguments import bind
from cuda_ops.derive.checks import is_repeated, names_text, refuse
from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _tuned
from cuda_ops.spec import Autograd, BenchmarkCase, Candidates, Claims, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from cuda_ops.testing.samples import Sample

OP = "softmax_cross_entropy"
ROWS, TOTAL = f"{OP}_rows", f"{OP}_total"
OVERWRITE = "overwrite_logits"


@hookimpl
def cuda_ops_public(op: OpSpec) -> Callable[..., Any] | None:
    """Calls the part that is wanted: up to torch 2.12 the composed operator cannot say why a part
    refuses something.
    """
    if op.name != OP:
        return None

    def softmax_cross_entropy(
        logits: torch.Tensor,
        labels: torch.Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        overwrite_logits: bool = False,
    ) -> torch.Tensor:
        if reduction == "none":
            part, *options = op.siblings[ROWS], overwrite_logits
        elif reduction in op.choices["reduction"]:
            rows = logits.shape[:-1]
            if (
                logits.dim() and labels.shape != rows
            ):  # a column of labels would give a wrong loss without a word
                expected = f"shape {list(rows)}, that of 'logits' without its last dim"
                refuse(op, "labels", expected, f"shape {list(labels.shape)}")
            part, *options = op.siblings[TOTAL], reduction == "mean", overwrite_logits
        else:
            refuse(op, "reduction", names_text(op.choices["reduction"]), repr(reduction))
        made = part.function(logits, labels, ignore_index, label_smoothing, *options)
        loss: torch.Tensor = made[0]
        return loss

    softmax_cross_entropy.__doc__ = op.doc
    return softmax_cross_entropy


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    """Adds to the gradient by name that it may be written over the logits."""
    if op.name not in (ROWS, TOTAL):
        return None
    derived = gradient.cuda_ops_autograd(op)
    assert derived is not None
    overwrite, at = op.siblings[f"{op.name}_overwrite_"], op.argument_names.index(OVERWRITE)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **keywords: Any) -> None:
        derived.setup_context(ctx, inputs, output, **keywords)
        logits, lse = inputs[0], output[1]
        ctx.overwrites = (
            bind(op, inputs, {})[at]
            and logits.shape[:-1] == lse.shape
            and not is_repeated(logits)  # one number would have the gradients of several
        )

    def backward(ctx: Any, *grads: Any) -> Any:
        # Compilers plan memory themselves, and a derivative of this one needs the logits.
        if not ctx.overwrites or torch.is_grad_enabled() or _is_traced():
            return derived.backward(ctx, *grads)
        logits, *saved = ctx.saved_tensors
        written = logits.detach()  # its changes count as those of the logits
        overwrite.function(grads[0], written, *saved, *ctx.plain)
        return written, *[None] * (len(ctx.needs_input_grad) - 1)

    return Autograd(setup_context, backward, derived.inputs)


def _is_traced() -> bool:
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
    )


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any] | None:
    """Refuses the label_smoothing that the binding refuses."""
    derived = rules.cuda_ops_fake(op)
    if derived is None:
        return None

    def fake(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(op.argument_names, bind(op, args, kwargs), strict=True))
        smoothing = values["label_smoothing"]
        made = derived(*args, **kwargs)
        if not 0 <= smoothing <= 1:
            refuse(op, "label_smoothing", "a number from 0 to 1", repr(smoothing))
        return made

    return fake


# --- testing and timing --------------------------------------------------------------------


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    references: dict[str, Callable[..., Any]] = {
        OP: torch_cross_entropy, ROWS: reference_rows, TOTAL: reference_total,
    }  # fmt: skip
    return references.get(op.name)


def torch_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    overwrite_logits: bool = False,
) -> torch.Tensor:
    """Broadcasts and flattens what torch's function does not take."""
    loop = torch.broadcast_shapes(logits.shape[:-1], labels.shape)
    loss = F.cross_entropy(
        logits.expand(*loop, logits.shape[-1]).reshape(-1, logits.shape[-1]),
        labels.expand(loop).reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    return loss.reshape(loop) if reduction == "none" else loss


def reference_rows(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    overwrite_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = logits.double().logsumexp(-1).masked_fill(logits.isposinf().any(-1), torch.nan)
    lse = torch.where(labels == ignore_index, 0, lse)
    return torch_cross_entropy(logits, labels, ignore_index, label_smoothing, "none"), lse


def reference_total(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    mean: bool = True,
    overwrite_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss = torch_cross_entropy(
        logits, labels, ignore_index, label_smoothing, "mean" if mean else "sum"
    )
    _, lse = reference_rows(logits, labels, ignore_index, label_smoothing)
    return loss, lse, (labels.expand(lse.shape) != ignore_index).sum()


@hookimpl
def cuda_ops_claims(op: OpSpec) -> Claims:
    if "lse" not in op.output_names:
        return Claims()
    return Claims(
        rounds_between=True,
        reason="a GPU sums in what it computes the logits in; the lse is float64 for its range",
    )


@hookimpl
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[Sample] | None:
    """Gives the derived samples a smoothing from 0 to 1, and a mean rows that count. The composed
    operator has those of its rows, whose arguments it shares.
    """
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import strategy

    drawn = strategy(op.siblings[ROWS] if op.is_composite else op)
    if drawn is None:
        return None
    at = op.argument_names.index("label_smoothing")

    def fitting(sample: Sample, reduction: str) -> Sample:
        args = list(sample.args)
        ignored = args[at - 1] if op.name.startswith(ROWS) else -100
        args[at - 1 : at + 1] = [ignored, min(abs(args[at]), 1.0)]
        if OVERWRITE in op.argument_names:  # the checks use their arguments again
            args[-1] = False
        if op.is_composite:
            args.insert(-1, reduction)
            if reduction != "none":  # then nothing broadcasts
                loop = torch.broadcast_shapes(args[0].shape[:-1], args[1].shape)
                for i, shape in enumerate(((*loop, args[0].shape[-1]), loop)):
                    if args[i].shape != shape:
                        args[i] = replace(args[i], shape=tuple(shape), layout="contiguous")
        return replace(sample, args=tuple(args))

    return st.builds(fitting, drawn, st.sampled_from(("mean", "sum", "none")))


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns rows for each family of kernels: parts of a warp, blocks, several blocks a row."""
    from cuda_ops.testing.samples import Sample, TensorArg

    if op.name not in (ROWS, TOTAL):
        return []
    return [
        Sample((TensorArg((rows, n), dtype), TensorArg((rows,), torch.int64, below=n)))
        for dtype in (torch.float32, torch.bfloat16)
        for rows, n in ((300, 24), (70, 1000), (70, 1001), (40, 5000), (2, 40_001))
    ]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer] | None:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(torch_cross_entropy) if op.name == OP else None


@hookimpl
def cuda_ops_candidates(op: OpSpec) -> Candidates | None:
    def sizes(logits: torch.Tensor, *_: Any) -> tuple[int, int] | None:
        return _tuned.row_sizes(logits)

    return Candidates(_tuned.BLOCKS, sizes) if op.name == OP else None


@hookimpl
def cuda_ops_op_loaded(op: OpSpec, library: Path) -> None:
    if op.name == OP:
        _tuned.use_stored(op, library)


#: Rows, classes and why.
_POINTS = (
    (4096, 32_000, "Llama 2"),
    (4096, 50_257, "GPT-2, no row is whole 16-byte vectors"),
    (4096, 128_256, "Llama 3"),
    (2048, 151_936, "Qwen 3"),
    (512, 262_144, "Gemma 3, few rows"),
    (16, 128_256, "a few rows alone"),
    (1 << 16, 1000, "the classes of ImageNet"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    if op.name != OP:
        return []
    half, wide = torch.bfloat16, torch.float32
    return [
        *(_case(*point, half) for point in _POINTS),
        *(_case(*point, wide) for point in _POINTS[:2]),
        *(_case(*point, half, backward=True) for point in _POINTS),
        _case(*_POINTS[2], half, label_smoothing=0.1),
    ]


def _case(
    rows: int,
    classes: int,
    reason: str,
    dtype: torch.dtype,
    backward: bool = False,
    label_smoothing: float = 0.0,
) -> BenchmarkCase:
    from cuda_ops.benchmarking import rotation

    name = str(dtype).removeprefix("torch.")
    labels = rotation.Random((rows,), torch.int64, classes)
    return BenchmarkCase(
        f"{rows}x{classes} {name}"
        + (f", smoothing {label_smoothing}" if label_smoothing else "")
        + (", forward and backward" if backward else ""),
        rotation.maker((((rows, classes), dtype), labels, -100, label_smoothing)),
        bytes=rows * ((3 if backward else 1) * classes * dtype.itemsize + 8),
        reason=reason,
        dtype=dtype,
        arithmetic="fp32",
        backward=backward,
    )
