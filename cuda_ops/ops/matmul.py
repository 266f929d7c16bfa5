"""``matmul``: what a signature line cannot say.

Autocast runs it in the lower precision, as it runs torch's; its gradient is two matrix products,
computed only if wanted; the fake works out the shape without walking over named dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive import checks, layout
from cuda_ops.hookspecs import hookimpl
from cuda_ops.signature import Group
from cuda_ops.spec import (
    AutocastPolicy,
    Autograd,
    BenchmarkCase,
    Claims,
    OpSpec,
    Peer,
    ShardingRule,
)

if TYPE_CHECKING:
    from cuda_ops.testing.samples import Layout, Sample

#: The operator of each ``precision``; those other than the first take float32 alone.
PRECISIONS = {"ieee": "matmul", "tf32": "matmul_tf32", "tf32x3": "matmul_tf32x3"}
_NAMES = tuple(PRECISIONS)  # unlike the dict, it can be asked for an unhashable value


@hookimpl
def cuda_ops_public(op: OpSpec) -> Callable[..., Any] | None:
    if op.name != "matmul":
        return None
    plain = op

    def matmul(a: torch.Tensor, b: torch.Tensor, *, precision: str = "ieee") -> torch.Tensor:
        if precision not in _NAMES:
            raise ValueError(
                f"cuda_ops.matmul: argument 'precision': expected one of "
                f"{', '.join(map(repr, PRECISIONS))}, got {precision!r}"
            )
        op = plain
        if precision != "ieee" and a.dtype is torch.float32 and not _autocasts(a.device.type):
            op = plain.siblings[PRECISIONS[precision]]
        # A vector is a row on the left and a column on the right, as for torch.matmul.
        row, column = a.dim() < 2, b.dim() < 2
        # An error should show the shape as it was passed; traced, the operator finds the error.
        if (row or column) and not torch.compiler.is_dynamo_compiling():
            sizes: dict[str, Any] = {}
            checks.bind_dims(plain, "a", Group(("k",) if row else ("m", "k")), a.shape, sizes)
            checks.bind_dims(plain, "b", Group(("k",) if column else ("k", "n")), b.shape, sizes)
        out: torch.Tensor = op.function(
            a.unsqueeze(0) if row else a, b.unsqueeze(-1) if column else b
        )
        if column:
            out = out.squeeze(-1)
        return out.squeeze(-1 if column else -2) if row else out

    matmul.__doc__ = _DOC
    return matmul


def _autocasts(device: str) -> bool:
    """Tells whether autocast is on; the meta device has none, and torch refuses the question."""
    return device != "meta" and torch.is_autocast_enabled(device)


_DOC = """Matrix product a @ b, with torch.matmul's rules for shapes.

Shapes: a (..., M, K) and b (..., K, N) of any strides; the result (..., M, N) is contiguous. Batch
dims broadcast; the result may have at most 16 that are not 1. A vector of K elements counts as a
row for a and as a column for b, and the result lacks that dim. K = 0 gives zeros.
Dtypes: float64, float32, float16 or bfloat16, the same for both. Sums run in float64 for float64
and in float32 for the others, and are rounded once.

Args:
    a, b: the factors.
    precision: for float32; other dtypes ignore it. "ieee" multiplies in float32; "tf32" rounds the
        factors to 10 bits and is about seven times as fast; "tf32x3" adds three products of such
        numbers and is about as exact as "ieee" for finite numbers.

Memory: on Hopper GPUs, during the call, copies of inputs whose layout the matrix units cannot read,
if copying makes the call faster; for "tf32x3" twice the size of both.
Errors: RuntimeError for an argument that is not a tensor or has no dims, different sizes of K, any
other dtype, mixed dtypes or devices, or batch dims that do not broadcast; ValueError for any other
precision.
Formula: out[m, n] = sum over k of a[m, k] * b[k, n].

Example:
>>> cuda_ops.matmul(torch.ones(2, 3), torch.arange(6.0).reshape(3, 2))
tensor([[6., 9.],
        [6., 9.]])
"""


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    def fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        loop = layout.broadcast(op, [a, b])
        name, factor = ("b", b) if a.dim() < b.dim() else ("a", a)
        checks.check_batch(op, name, factor, loop)
        return a.new_empty((*loop, a.shape[-2], b.shape[-1]))

    def fake_backward(
        grad_out: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        loop = layout.broadcast(op, [grad_out, a, b])
        checks.check_batch(op, "grad_out", grad_out, loop)
        return tuple(x.new_empty((*loop, *x.shape[-2:])) for x in (a, b))

    return fake_backward if op.name == "matmul_backward" else fake


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    if op.name not in PRECISIONS.values():
        return None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        a, b = inputs
        of_a, of_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if of_b else None, b if of_a else None)
        ctx.shared = a.dim() == 2 < b.dim(), b.dim() == 2 < a.dim()

    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        shared_a, shared_b = ctx.shared
        grad_a = grad_b = None
        # For other broadcast dims autograd sums the result to the input's shape.
        if ctx.needs_input_grad[0]:
            pair = grad_out.mT, b.mT
            # As rows, both are copied; as matrices, their products are added up.
            (n, m), k = pair[0].shape[-2:], b.shape[-2]
            left, right = _rows(*pair) if shared_a and n * (m + k) <= m * k else pair
            grad_a = op.function(left.mT, right)
        if ctx.needs_input_grad[1]:
            left, right = _rows(a, grad_out) if shared_b else (a, grad_out)
            grad_b = op.function(left.mT, right)
        return grad_a, grad_b

    return Autograd(setup_context, backward)


def _rows(*batches: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Makes each batch one matrix, so that the gradient of a factor that all of it shares is one
    product and not a sum of many. Batches stay if that would send a DTensor's sharded rows.
    """
    for batch in batches:
        for place in getattr(batch, "placements", ()):
            if place.is_shard() and 0 < place.dim < batch.dim() - 1:
                return batches
    return tuple(layout.as_rows(batch) for batch in batches)


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy | None:
    return "lower_precision" if op.name in ("matmul", "matmul_backward") else None


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]] | None:
    """Shards as torch.mm does: a batch dim of both, rows of a, columns of b, or K of both, which
    gives partial sums.
    """
    if op.name not in PRECISIONS.values():
        return None

    def rule(a: Any, b: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        rank_a, rank_b = len(a.shape), len(b.shape)
        rank = max(rank_a, rank_b)
        whole = Replicate()

        def batch(shape: Any, d: int) -> Any:
            own = d - (rank - len(shape))
            return Shard(own) if own >= 0 and shape[own] != 1 else whole

        return [
            ([whole], [whole, whole]),
            ([Shard(rank - 2)], [Shard(rank_a - 2), whole]),
            ([Shard(rank - 1)], [whole, Shard(rank_b - 1)]),
            ([Partial()], [Shard(rank_a - 1), Shard(rank_b - 2)]),
            *(([Shard(d)], [batch(a.shape, d), batch(b.shape, d)]) for d in range(rank - 2)),
        ]

    return rule


@hookimpl
def cuda_ops_flops(op: OpSpec) -> Callable[..., int]:
    if op.name != "matmul_backward":
        return product_flops
    return lambda grad_out, a, b: 2 * product_flops(a, b)


def product_flops(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the FLOPs of the product of factors of these shapes."""
    batch: Sequence[int] = torch.broadcast_shapes(a[:-2], b[:-2])
    return 2 * math.prod(batch) * math.prod(a[-2:]) * b[-1]


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return gradients if op.name == "matmul_backward" else torch.matmul


#: M, N, K of products that run each family of kernels, and which of a and b is K-major ("k") or
#: line-major ("l"). tests/test_matmul.py compares them with the plan, so that none is missing.
_KERNELS: dict[str, tuple[tuple[int, int, int, str, torch.dtype], ...]] = {
    "matmul": (
        (100, 20_000, 136, "kk", torch.bfloat16),  # wide tiles
        (2000, 2104, 200, "kk", torch.float16),  # pairs of them, more than SMs
        (304, 264, 1041, "ll", torch.bfloat16),  # three parts of K
        (520, 1000, 2056, "kk", torch.float16),  # two
        (264, 16, 264, "kl", torch.float16),  # narrow tiles
        (24, 6000, 1544, "kk", torch.bfloat16),  # two parts, and swapped
        (264, 24, 1041, "lk", torch.bfloat16),  # three, after a copy of b, of a, of both
        (24, 264, 1041, "kl", torch.float16),
        (24, 264, 1041, "kk", torch.bfloat16),
        (3, 520, 1032, "kk", torch.bfloat16),  # streams
        (520, 3, 264, "kk", torch.float16),
        (1544, 1544, 21, "kk", torch.bfloat16),  # mma.sync's large tile
        (1, 520, 264, "kk", torch.float32),  # vectors
        (520, 2, 264, "kk", torch.float32),
        (3072, 1408, 200, "ll", torch.float32),  # multiply-adds, from the largest tile on
        (1530, 1400, 200, "kk", torch.float32),
        (1536, 704, 200, "lk", torch.float32),
        (640, 632, 400, "kl", torch.float32),
        (500, 500, 400, "kk", torch.float32),
    ),
    "matmul_tf32": (
        (100, 20_000, 136, "kk", torch.float32),
        (2000, 2104, 136, "kk", torch.float32),
        (260, 264, 520, "kk", torch.float32),
        (520, 1000, 1032, "kk", torch.float32),
        (264, 16, 264, "kk", torch.float32),
        (24, 264, 1032, "kk", torch.float32),
        (24, 6000, 1032, "kk", torch.float32),
        (1000, 1500, 520, "kl", torch.float32),
        (1000, 1500, 520, "lk", torch.float32),
        (260, 264, 1041, "kk", torch.float32),
        (1544, 1544, 21, "kk", torch.float32),
    ),
    "matmul_tf32x3": (
        (376, 4920, 136, "kk", torch.float32),
        (504, 2104, 520, "kl", torch.float32),
        (640, 1000, 520, "lk", torch.float32),
        (520, 520, 1032, "ll", torch.float32),
    ),
}


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns none for the gradient, which is two products by the kernels of ``matmul``."""
    from cuda_ops.testing.samples import Sample, TensorArg

    layouts: dict[str, Layout] = {"k": "contiguous", "l": "transposed"}
    return [
        Sample((
            TensorArg((m, k), dtype, layouts[order[0]]),
            TensorArg((k, n), dtype, layouts["l" if order[1] == "k" else "k"]),
        ))
        for m, n, k, order, dtype in _KERNELS.get(op.name, ())
    ]  # fmt: skip


@hookimpl
def cuda_ops_claims(op: OpSpec) -> Claims | None:
    if op.name == "matmul_tf32":
        return Claims(tolerance=512.0, reason="factors are rounded to 2^-11, not to 2^-24")
    return None


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import EAGER, torch_peers

    # What allows TF32 is a setting, which a compiled graph cannot change.
    if op.name == "matmul_tf32":
        return {EAGER: torch.matmul, "eager tf32": torch_tf32}
    if op.name == "matmul_tf32x3":
        return {EAGER: torch.matmul}
    return torch_peers(torch_backward if op.name == "matmul_backward" else torch_matmul)


#: N and K of the projections of Llama-3's layers: qkv, attention's output, gate and up, down.
_LAYERS = {
    "Llama-3 8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Llama-3 70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
}
#: Tokens: those that are decoded at once, parts of a prompt, prompts.
_TOKENS = {
    "Llama-3 8B": (1, 4, 16, 64, 128, 512, 2048, 4096, 8192),
    "Llama-3 70B": (1, 16, 64, 512, 4096),
}
#: M, N, K and why.
_SQUARES = (
    (256, 256, 256, "far too small to fill a GPU"),
    (1024, 1024, 1024, "one wave of tiles on a large GPU"),
    (4096, 4096, 4096, "compute alone"),
)
_ODD = (
    (1000, 1000, 1000, "no multiple of a tile"),
    (4096, 4097, 4096, "a column more than tiles"),
    (4095, 4095, 4095, "rows that start anywhere"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    half, single = torch.bfloat16, torch.float32
    large = (4096, 14336, 4096, "Llama-3 8B, up projection of 4096 tokens")
    if op.name == "matmul_backward":
        points = (*_SQUARES, large)
        return [_case(op, *point, dtype) for dtype in (half, single) for point in points]
    if op.name != "matmul":
        squares = [_case(op, *p, single, layer) for p in _SQUARES for layer in (True, False)]
        return [*squares, _case(op, *large, single, True)]
    return [
        *(_case(op, *point, half) for point in (*_SQUARES, *_ODD)),
        *(_case(op, *point, torch.float16, True) for point in (_SQUARES[-1], large)),
        *(_case(op, *point, single) for point in (*_SQUARES, large)),
        *(
            _case(op, tokens, n, k, f"{model}, {tokens} tokens", half, True)
            for model, projections in _LAYERS.items()
            for n, k in projections
            for tokens in _TOKENS[model]
        ),
    ]


def _case(
    op: OpSpec, m: int, n: int, k: int, reason: str, dtype: torch.dtype, layer: bool = False
) -> BenchmarkCase:
    """Makes a case; with ``layer``, b is the transpose of a weight as layers keep it."""
    from cuda_ops.benchmarking.rotation import random_tensor

    backward = op.name == "matmul_backward"

    def inputs(device: torch.device) -> tuple[torch.Tensor, ...]:
        a = random_tensor((m, k), dtype, device)
        b = random_tensor((n, k) if layer else (k, n), dtype, device)
        factors = a, b.mT if layer else b
        return (random_tensor((m, n), dtype, device), *factors) if backward else factors

    name = str(dtype).removeprefix("torch.")
    numel = m * k + k * n
    return BenchmarkCase(
        f"{m}x{n}x{k} {name}" + (", weight" if layer else ""),
        inputs,
        # The gradient reads three matrices, writes two and multiplies twice.
        bytes=(numel * (1 + backward) + m * n) * dtype.itemsize,
        flops=product_flops((m, k), (k, n)) * (1 + backward),
        reason=reason,
        group=_group(m, n, k, dtype),
        dtype=dtype,
        arithmetic="tf32" if "tf32" in op.name else "",
    )


def _group(m: int, n: int, k: int, dtype: torch.dtype) -> str:
    """Returns the part of the cases that a product is averaged with: by the rows of a, which decide
    whether arithmetic or memory is the limit.
    """
    if dtype is torch.float32:
        return "float32"
    if any(size % 64 for size in (n, k)) or (m > 64 and m % 64):
        return "odd shapes"
    if m >= 4096:
        return "M >= 4096"
    if m >= 512:
        return "M 512 to 2048"
    return "M 128 and 256" if m >= 128 else "M 1 to 64"


def torch_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.matmul(a, b)


def torch_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Runs ``torch.matmul`` with TF32 allowed."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32"
    try:
        return torch.matmul(a, b)
    finally:
        settings.fp32_precision = before


def torch_backward(
    grad_out: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs what autograd runs for ``torch.matmul`` of two matrices."""
    return grad_out @ b.mT, a.mT @ grad_out


def gradients(grad_out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Computes the gradients of each factor's matrices; no batch dim is summed."""
    batch = torch.broadcast_shapes(grad_out.shape[:-2], a.shape[:-2], b.shape[:-2])
    return tuple(g.expand(*batch, *g.shape[-2:]) for g in torch_backward(grad_out, a, b))
