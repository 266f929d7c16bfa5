"""``attention``: grouped heads, the dtype of the hidden lse, and torch's own as peers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cuda_ops.derive import rules
from cuda_ops.derive.arguments import bind
from cuda_ops.derive.checks import dtype_name, refuse
from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _tuned
from cuda_ops.spec import AutocastPolicy, BenchmarkCase, Candidates, Claims, OpSpec, Peer

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from cuda_ops.testing.samples import Sample
    from cuda_ops.testing.values import Values


# --- the public function ------------------------------------------------------------------


@hookimpl
def cuda_ops_public(op: OpSpec) -> Callable[..., Any] | None:
    if op.name != "attention":
        return None

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:
        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = op.function(*tensors, causal, scale)[0]  # without the lse
            return out

        groups = _groups(op, q, k, v)
        if groups == 1:
            return attend(q, k, v)
        split = q.unflatten(-3, (k.shape[-3], groups))
        if causal:
            return attend(split, k.unsqueeze(-3), v.unsqueeze(-3)).flatten(-4, -3)
        # All see the same keys, so that the queries of a group are rows of one head.
        rows = attend(split.flatten(-3, -2), k, v)
        out: torch.Tensor = rows.unflatten(-2, (groups, q.shape[-2]))
        return out.flatten(-4, -3)

    attention.__doc__ = _DOC
    return attention


def _groups(op: OpSpec, q: Any, k: Any, v: Any) -> int:
    """Returns how many heads of q share one of k and v, apart from heads that broadcast. What is no
    tensor is left to the operator to refuse.
    """
    if not all(isinstance(x, torch.Tensor) and x.dim() > 2 for x in (q, k, v)):
        return 1
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if heads == kv_heads or heads == 1 or kv_heads <= 1 or v.shape[-3] != kv_heads:
        return 1
    if heads % kv_heads:
        expected = f"a number of heads that divides the {heads} of 'q'"
        refuse(op, "k", expected, f"shape {list(k.shape)}")
    groups: int = heads // kv_heads
    return groups


_DOC = """Attention of each head, without a matrix of scores: softmax(q k^T scale) v.

Heads of q share those of k and v where these have fewer: head h of q goes with head h // (H / G).
The gradient computes the weights anew from the logarithm of their sum, which is kept beside the
arguments and the result. The same call gives the same bits every time.

Shapes: q [..., H, M, D], k and v [..., G, N, D], H a multiple of G, D from 1 to 256; the result
[..., H, M, D] is contiguous. Other dims to the left broadcast; there may be none. A tensor whose
last dim has stride 1, such as [B, S, H, D].transpose(1, 2), is read where it lies; any other is
copied first. Without keys, or where each score is -inf, the result is 0.
Dtypes: float64, float32, float16 or bfloat16, the same for all. Sums run in float64 for float64 and
in float32 for the others. Weights of float16 and bfloat16 are rounded before they are multiplied
with v, as tensor cores take them; float32 is multiplied without TF32.

Args:
    q, k, v: queries, keys and values.
    causal: query i sees the keys 0 to i alone, as with is_causal of torch's
        scaled_dot_product_attention: the first query is aligned with the first key.
    scale: the factor of q k^T, by default 1 / sqrt(D).

Memory: a number for each query, for the gradient; during the gradient, another one. Few queries of
many keys take up to 128 copies of the result, in the dtype that sums run in. Where H is more
than G, q may be copied first, or where `causal`, the gradients of k and v have H heads until
autograd adds them up.
Errors: RuntimeError for H that is no multiple of G, other sizes of D or N, D beyond 256, any other
dtype, mixed dtypes or devices, or dims to the left that do not broadcast; on a GPU before sm_80 no
kernel is found.
Formula: Dao, https://arxiv.org/abs/2307.08691.

Example:
>>> keys, values = torch.zeros(2, 4), torch.tensor([[0.0] * 4, [2.0] * 4])
>>> cuda_ops.attention(torch.ones(1, 4), keys, values)
tensor([[1., 1., 1., 1.]])
"""


# --- what the line does not say -----------------------------------------------------------


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    """Gives lse the dtype that it is computed in, and refuses another one in the gradient."""
    derived = rules.cuda_ops_fake(op)
    assert derived is not None

    def fake(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(op.argument_names, bind(op, args, kwargs), strict=True))
        outputs = derived(*args, **kwargs)
        dtype = _dtype_of_lse(values["q"].dtype)
        if op.name != "attention":
            if values["lse"].dtype != dtype:
                refuse(op, "lse", f"dtype {dtype_name(dtype)}", dtype_name(values["lse"].dtype))
            return outputs
        out, lse = outputs
        return out, lse.new_empty(lse.shape, dtype=dtype)

    return fake


def _dtype_of_lse(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy | None:
    return "lower_precision" if op.name == "attention" else None


@hookimpl
def cuda_ops_flops(op: OpSpec) -> Callable[..., int]:
    """Counts two products, or five for the gradient, as torch does: causal or not."""
    if op.name == "attention":
        return lambda q, k, v, *args, **kwargs: _flops(q, k, v)
    return lambda grad_out, q, k, v, *args, **kwargs: _flops(grad_out, q, k, v) * 5 // 2


def _flops(*shapes: Sequence[int]) -> int:
    q, k = shapes[-3], shapes[-2]
    heads = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    flops: int = 4 * math.prod(heads) * q[-2] * k[-2] * q[-1]
    return flops


# --- tuning -------------------------------------------------------------------------------


@hookimpl
def cuda_ops_candidates(op: OpSpec) -> Candidates | None:
    if op.name != "attention":
        return None

    def sizes(q: Any, k: Any, v: Any, causal: bool = False, scale: Any = None) -> tuple[int, int]:
        rows: int = q.shape[-2] * (1 if causal else _groups(op, q, k, v))
        return rows, k.shape[-2]

    return Candidates({"kernels of sm_80": {"hopper": 0}}, sizes)


@hookimpl
def cuda_ops_op_loaded(op: OpSpec, library: Path) -> None:
    if op.name == "attention":
        _tuned.use_stored(op, library)


# --- tests --------------------------------------------------------------------------------


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    return exact if op.name == "attention" else None


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Computes all scores, head by head where they are many; heads broadcast or come in groups."""
    if min(q.dim(), k.dim()) > 2 and k.shape[-3] not in (1, q.shape[-3]) and q.shape[-3] > 1:
        groups = q.shape[-3] // k.shape[-3]
        k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    loop = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    if math.prod(loop) * q.shape[-2] * k.shape[-2] <= _MOST_SCORES:
        return _exact(q, k, v, causal, scale)
    heads = [x.expand(*loop, -1, -1).reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    results = [
        checkpoint(_exact, *head, causal, scale, use_reentrant=False)  # keeps no scores
        for head in zip(*heads, strict=True)
    ]
    return torch.stack(results).reshape(*loop, *q.shape[-2:])


_MOST_SCORES = 1 << 26


def _exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    # As the kernels have it, a query that sees no key, for it scores each -inf, gets 0 and not NaN.
    none = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(none, 0.0) @ v


@hookimpl
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[Sample] | None:
    """Draws edge values without NaN and infinities, since those of a key that a query does not see,
    or hardly, may reach its result or not. For the gradient also draws an lse of its dtype, and
    scores that it may belong to.
    """
    from cuda_ops.testing.samples import TensorArg, strategy

    drawn = strategy(op)
    assert drawn is not None
    edges: tuple[Values, ...] = ("equal", "tiny", "large") if op.name == "attention" else _SMALL

    def fitting(sample: Sample) -> Sample:
        args = list(sample.args)
        if op.name != "attention":
            lse, first = op.argument_names.index("lse"), args[0]
            assert isinstance(first, TensorArg)
            args[lse] = replace(args[lse], dtype=_dtype_of_lse(first.dtype))
            args[-1] = None  # scale
            if first.dtype is torch.float16:  # any lse is no larger than scores that are nearly 0
                args[1] = replace(args[1], values="tiny")
        # A check of edge values would make special ones of normal ones; others draw normal ones.
        values = sample.values if sample.values in edges else edges[sample.seed % len(edges)]
        return replace(sample, args=tuple(args), values=values)

    return drawn.map(fitting)


_SMALL: tuple[Values, ...] = ("equal", "tiny")


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns several tiles of each side for each size of D that has kernels of its own, and few
    queries whose keys blocks share.
    """
    from cuda_ops.testing.samples import Sample, TensorArg

    def sample(m: int, n: int, d: int, dtype: torch.dtype, causal: bool) -> Sample:
        q, k, lse = (2, m, d), (2, n, d), TensorArg((2, m), _dtype_of_lse(dtype))
        if op.name == "attention":
            return Sample((*(TensorArg(shape, dtype) for shape in (q, k, k)), causal))
        grad_q_k_v_out = [TensorArg(shape, dtype) for shape in (q, q, k, k, q)]
        return Sample((*grad_q_k_v_out, lse, causal))

    dtypes = torch.bfloat16, torch.float32
    return [
        *(sample(150, 140, d, dtype, causal) for dtype in dtypes
          for d, causal in ((64, True), (33, False), (128, True), (200, False))),
        *(sample(3, 600, d, dtype, False) for dtype in dtypes for d in (64, 200)),
    ]  # fmt: skip


@hookimpl
def cuda_ops_claims(op: OpSpec) -> Claims:
    reason = "weights are rounded to the dtype of v before the second product"
    if op.name != "attention":
        reason += ", and gradients are differences of larger numbers"
    return Claims(tolerance=8.0, rounds_between=True, reason=reason)


# --- benchmarks ---------------------------------------------------------------------------


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer] | None:
    from cuda_ops.benchmarking.peers import torch_peers

    if op.name != "attention":
        return None
    backends = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION",
                "efficient": "EFFICIENT_ATTENTION"}  # fmt: skip
    only = {name: _only(backend) for name, backend in backends.items()}
    return {**torch_peers(torch_attention), **only}


def _with_groups(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Lets a function of grouped heads take groups as a dim, (B, G, H / G, M, D) and (B, G, 1, N,
    D), which is how they broadcast.
    """

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, **keywords: Any
    ) -> torch.Tensor:
        if q.dim() < 5:
            return function(q, k, v, causal, **keywords)
        heads = (x.flatten(-4, -3) for x in (q, k, v))
        out: torch.Tensor = function(*heads, causal, **keywords).unflatten(-3, q.shape[-4:-2])
        return out

    return attention


@_with_groups
def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Runs torch's own, which chooses among its backends."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[-3] != k.shape[-3]
    )


def _only(backend: str) -> Callable[..., torch.Tensor]:
    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch_attention(*args, **kwargs)

    return attention


#: B, H, G, M, N, D, causal and why.
_POINTS = (
    (4, 16, 16, 4096, 4096, 64, False, "heads of 64"),
    (2, 16, 16, 4096, 4096, 128, False, "heads of 128"),
    (2, 16, 16, 4096, 4096, 128, True, "a prompt"),
    (1, 32, 8, 8192, 8192, 128, True, "a prompt of Llama-3 8B"),
    (1, 64, 8, 2048, 2048, 128, True, "a prompt of Llama-3 70B"),
    (1, 8, 8, 4096, 4096, 256, True, "heads of 256"),
    (8, 16, 16, 512, 512, 64, False, "short sequences"),
    (2, 16, 16, 1000, 1003, 80, False, "no multiple of a tile"),
    (8, 32, 8, 1, 4096, 128, False, "a token that is decoded"),
    (1, 32, 8, 1, 32768, 128, False, "a token after a long context"),
    (64, 32, 8, 1, 2048, 128, False, "a token of many sequences"),
    (4, 32, 32, 8, 4096, 128, False, "several tokens at once"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    """Returns none for the gradient, which cases of ``attention`` time together with it."""
    if op.name != "attention":
        return []
    public = cuda_ops_public(op)
    assert public is not None
    function = _with_groups(public)
    return [
        *(_case(function, *point, torch.bfloat16) for point in _POINTS),
        _case(function, *_POINTS[2], torch.float16),
        _case(function, 1, 8, 8, 1024, 1024, 64, False, "without tensor cores", torch.float32),
        *(_case(function, *point, torch.bfloat16, backward=True) for point in _POINTS[:6]),
    ]


def _case(
    function: Callable[..., Any],
    batch: int,
    heads_of_q: int,
    heads_of_k: int,
    m: int,
    n: int,
    d: int,
    causal: bool,
    reason: str,
    dtype: torch.dtype,
    backward: bool = False,
) -> BenchmarkCase:
    """Makes a case; tensors lie as projections leave them, with heads next to each other."""
    from cuda_ops.benchmarking.rotation import random_tensor

    def inputs(device: torch.device) -> tuple[torch.Tensor, ...]:
        def heads(rows: int, *counts: int) -> torch.Tensor:
            made = random_tensor((batch, rows, *counts, d), dtype, device)
            return made.movedim(1, -2)

        if heads_of_k == heads_of_q:
            return heads(m, heads_of_q), heads(n, heads_of_k), heads(n, heads_of_k)
        groups = heads_of_q // heads_of_k
        return heads(m, heads_of_k, groups), heads(n, heads_of_k, 1), heads(n, heads_of_k, 1)

    of_q, of_k = batch * heads_of_q * m * d, batch * heads_of_k * n * d
    flops = _flops((batch, heads_of_q, m, d), (1, 1, n, d), (1, 1, n, d)) // (2 if causal else 1)
    group = "" if heads_of_q == heads_of_k else f"/{heads_of_k}"
    return BenchmarkCase(
        f"{batch}x{heads_of_q}{group}x{m}x{n}x{d} {str(dtype).removeprefix('torch.')}"
        + (" causal" if causal else "") + (", forward and backward" if backward else ""),
        inputs,
        # The gradient reads q, k, v, the result and its gradient, and writes three.
        bytes=(2 + 4 * backward) * (of_q + of_k) * dtype.itemsize,
        flops=flops * 7 // 2 if backward else flops,
        keywords={"causal": causal},
        function=function,
        reason=reason,
        dtype=dtype,
        backward=backward,
    )  # fmt: skip
