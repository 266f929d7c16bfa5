"""Operators that are right, made with torch.library alone: the kit must pass every one.

Each is described to the kit in one call. The child processes of the kit run this file too.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from cuda_ops.spec import Claims
from cuda_ops.testing import Sample, TensorArg, describe

LIBRARY = torch.library.Library("good", "DEF")
WIDE = (torch.float64, torch.float32)
ALL = (*WIDE, torch.float16, torch.bfloat16)


def good(
    schema: str,
    signature: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    *,
    saved: Callable[..., Sequence[Any]] = lambda inputs, output: inputs,
    reference: Callable[..., Any] | None = None,
    dtypes: Sequence[torch.dtype] = WIDE,
    **described: Any,
) -> None:
    """Defines ``good::<name>``: results in memory of their own, contiguous, as the fake says."""
    name = schema.partition("(")[0]

    def fresh(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(fresh, value))
        return value.clone(memory_format=torch.contiguous_format)

    def kernel(*args: Any) -> Any:
        return fresh(forward(*args))

    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"good::{name}", kernel, lib=LIBRARY)
    if backward is not None:

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            values = saved(inputs, output)
            ctx.save_for_backward(*(v for v in values if isinstance(v, Tensor)))
            ctx.plain = [v for v in values if not isinstance(v, Tensor)]

        def gradients(ctx: Any, *grads: Any) -> Any:
            return backward(*grads, *ctx.saved_tensors, *ctx.plain)

        torch.library.register_autograd(
            f"good::{name}", gradients, setup_context=setup_context, lib=LIBRARY
        )
    describe(
        f"good::{name}",
        signature,
        reference=reference or forward,
        dtypes=dtypes,
        differentiable=backward is not None,
        **described,
    )


def output(inputs: Any, output: Any) -> Sequence[Any]:
    return (output,)


# --- elementwise -------------------------------------------------------------------------

good("exp(Tensor x) -> Tensor", "()->()", torch.exp, lambda g, y: g * y, saved=output)
good("tanh(Tensor x) -> Tensor", "()->()", torch.tanh, lambda g, y: g * (1 - y * y), saved=output,
     dtypes=ALL)  # fmt: skip
good("relu(Tensor x) -> Tensor", "()->()", torch.relu, lambda g, x: g * (x > 0), dtypes=ALL)
good("square(Tensor x) -> Tensor", "()->()", torch.square, lambda g, x: 2 * x * g)
good("sign(Tensor x) -> Tensor", "()->()", torch.sign, dtypes=ALL)
good("isfinite(Tensor x) -> Tensor", "()->()", torch.isfinite)
good("absolute(Tensor x) -> Tensor", "()->()", torch.abs, dtypes=(torch.int32, torch.int64))
good("bitwise_not(Tensor x) -> Tensor", "()->()", torch.bitwise_not, dtypes=(torch.uint8,))
good("logical_not(Tensor x) -> Tensor", "()->()", torch.logical_not, dtypes=(torch.bool,))
good("scale(Tensor x, float factor=2.0) -> Tensor", "()->()", lambda x, factor=2.0: x * factor,
     lambda g, x, factor=2.0: (g * factor, None))  # fmt: skip
good("shifted(Tensor x, int[] by=[1, 2]) -> Tensor", "()->()", lambda x, by=(1, 2): x + sum(by))
good("log(Tensor x) -> Tensor", "()->()", torch.log, lambda g, x: g / x)  # NaN below 0
good("power(Tensor x, int exponent) -> Tensor", "()->()", lambda x, exponent: x ** abs(exponent))

# --- broadcasting ------------------------------------------------------------------------


def _to(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.sum_to_size(like.shape)


good("mul(Tensor x, Tensor y) -> Tensor", "(),()->()", torch.mul,
     lambda g, x, y: (_to(g * y, x), _to(g * x, y)))  # fmt: skip
good("hypot2(Tensor x, Tensor y) -> Tensor", "(),()->()", lambda x, y: x * x + y * y,
     lambda g, x, y: (_to(2 * g * x, x), _to(2 * g * y, y)))  # fmt: skip
good("minimum(Tensor x, Tensor y) -> Tensor", "(),()->()", torch.minimum, dtypes=ALL)
good("addcmul(Tensor x, Tensor y, Tensor z) -> Tensor", "(),(),()->()",
     lambda x, y, z: x + y * z)  # fmt: skip

# --- reductions ----------------------------------------------------------------------------

good("sum(Tensor x) -> Tensor", "(n)->()", lambda x: x.sum(-1),
     lambda g, x: g[..., None].expand(x.shape))  # fmt: skip
good("mean_square(Tensor x) -> Tensor", "(n)->()", lambda x: (x * x).sum(-1),
     lambda g, x: 2 * x * g[..., None])  # fmt: skip
good("cumsum(Tensor x) -> Tensor", "(n)->(n)", lambda x: x.cumsum(-1),
     lambda g, x: g.flip(-1).cumsum(-1).flip(-1), claims=Claims(deterministic=False,
     reason="blocks of a GPU add up one long row in the order in which they end"))  # fmt: skip
good("softmax(Tensor x) -> Tensor", "(n)->(n)", lambda x: F.softmax(x, -1),
     lambda g, y: y * (g - (g * y).sum(-1, keepdim=True)), saved=output)  # fmt: skip
good("total_variation(Tensor x) -> Tensor", "(h,w)->()",
     lambda x: x.diff(dim=-1).abs().sum((-2, -1)) + x.diff(dim=-2).abs().sum((-2, -1)))  # fmt: skip
good("rgb_to_gray(Tensor x) -> Tensor", "(h,w,3)->(h,w)",
     lambda x: 0.5 * x[..., 0] + 0.25 * x[..., 1] + 0.25 * x[..., 2])  # fmt: skip

# --- products --------------------------------------------------------------------------------

good("dot(Tensor x, Tensor y) -> Tensor", "(n),(n)->()", lambda x, y: (x * y).sum(-1))
good("outer(Tensor x, Tensor y) -> Tensor", "(m),(n)->(m,n)",
     lambda x, y: x[..., :, None] * y[..., None, :])  # fmt: skip
good("bilinear(Tensor x, Tensor a, Tensor y) -> Tensor", "(m),(m,n),(n)->()",
     lambda x, a, y: (x[..., :, None] * a * y[..., None, :]).sum((-2, -1)))  # fmt: skip

# --- sorts, several outputs, indices ----------------------------------------------------------


def _sort(x: Tensor) -> tuple[Tensor, Tensor]:
    # torch's own sort on a GPU orders NaN among each other, by their bits.
    values, indices = torch.sort(x.masked_fill(x.isnan(), torch.nan), dim=-1, stable=True)
    return values, indices


good("sort(Tensor x) -> (Tensor, Tensor)", "(n)->(n),(n)", _sort)
good("argsort(Tensor x) -> Tensor", "(n)->(n)", lambda x: _sort(x)[1])
good(
    "largest(Tensor x) -> (Tensor, Tensor)", "(n)->(),()", lambda x: tuple(x.max(-1))
)  # fmt: skip  (no numbers have none)


def _root(x: Tensor, degree: float) -> Tensor:
    if degree <= 0:
        raise ValueError(f"degree: expected more than 0, got {degree}")
    return x.abs().clamp(min=1e-3) ** (1 / degree)


good("root(Tensor x, float degree) -> Tensor", "()->()", _root)
good("extrema(Tensor x, Tensor y) -> (Tensor, Tensor)", "(),()->(),()",
     lambda x, y: (torch.minimum(x, y), torch.maximum(x, y)))  # fmt: skip
good("frexp(Tensor x) -> (Tensor, Tensor)", "()->(),()", lambda x: tuple(torch.frexp(x)))


def _rows(rows: int, cols: int, count: int, seed: int) -> Sample:
    index = TensorArg((count,), torch.int64, below=rows)
    return Sample((TensorArg((rows, cols)), index), seed=seed)


SIZES = st.integers(1, 17)
good("take_rows(Tensor table, Tensor index) -> Tensor", "",
     lambda table, index: table.index_select(0, index),
     strategy=st.builds(_rows, SIZES, SIZES, SIZES, st.integers(0, 1000)))  # fmt: skip

# --- what looks wrong and is right -------------------------------------------------------------

# Two gradients that come in as they like, and one of them may be missing.
good("sin_cos(Tensor x) -> (Tensor, Tensor)", "()->(),()", lambda x: (x.sin(), x.cos()),
     lambda g, h, x: g * x.cos() - h * x.sin())  # fmt: skip

# The gradient of each row is one number, spread without a copy.
good("row_mean(Tensor x) -> Tensor", "(n)->()", lambda x: x.sum(-1) / max(1, x.shape[-1]),
     lambda g, x: (g / max(1, x.shape[-1]))[..., None].expand(x.shape))  # fmt: skip

# Rows of equal numbers: their mean by another order of roundings leaves nearly nothing, not 0.
good("centered(Tensor x) -> Tensor", "(n)->(n)",
     lambda x: x - (x / max(1, x.shape[-1])).sum(-1, keepdim=True),
     reference=lambda x: x - x.mean(-1, keepdim=True))  # fmt: skip


# Below -9, 1 + tanh(x) is 0 or 6e-8 in float32; a gate of a thousand makes 6e-5 of that.
good("gated(Tensor gate, Tensor x) -> Tensor", "(),()->()",
     lambda gate, x: gate * (1 + torch.tanh(x)),
     reference=lambda gate, x: gate * 2 * torch.sigmoid(2 * x))  # fmt: skip


def _waves(x: Tensor, quarter: float) -> Tensor:
    """cos(pi (2 i + 1) k / (2 n)), with what it is at odd numbers of quarter turns."""
    n = x.shape[-1]
    if n > 1024:  # n x n of them take long to make
        raise RuntimeError(f"good::cosines: argument 'x': expected rows of up to 1024, got {n}")
    turn = torch.arange(4 * n, device=x.device)
    cosines = torch.cos(math.pi * turn.double() / max(2 * n, 1))
    cosines = torch.where(turn % max(2 * n, 1) == n, quarter, cosines)
    return cosines[(2 * turn[:n, None] + 1) * turn[:n] % max(4 * n, 1)]


# A cosine of a quarter turn that is 0 makes NaN of an infinity, and one of 6e-17 leaves it.
good("cosines(Tensor x) -> Tensor", "(n)->(n)",
     lambda x: (x.double() @ _waves(x, 0.0)).to(x.dtype),
     reference=lambda x: x @ _waves(x, 6e-17))  # fmt: skip


def _in_scratch(x: Tensor) -> Tensor:
    scratch = torch.empty((*x.shape[:-1], x.shape[-1] + 8), dtype=x.dtype, device=x.device)
    scratch[..., : x.shape[-1]] = x  # the rest is never read
    return scratch[..., : x.shape[-1]].flip(-1)


good("reversed(Tensor x) -> Tensor", "(n)->(n)", _in_scratch, lambda g, x: _in_scratch(g),
     reference=lambda x: x.flip(-1))  # fmt: skip

_LOCK, _KEPT = threading.Lock(), dict[torch.device, Tensor]()


def _in_kept_buffer(x: Tensor) -> Tensor:
    """Works in a buffer that all calls on a CPU share, one at a time."""
    if x.device.type == "meta" or is_fake(x):
        return torch.empty_like(x)
    if x.is_cuda:  # a lock orders no streams
        return (x.double() * 3).to(x.dtype)
    with _LOCK:
        kept = _KEPT.get(x.device)
        if kept is None or kept.numel() < x.numel():
            kept = _KEPT[x.device] = x.new_empty(x.numel(), dtype=torch.float64)
        buffer = kept[: x.numel()].copy_(x.reshape(-1)).mul_(3)
        return buffer.to(x.dtype, copy=True).view(x.shape)


good("tripled(Tensor x) -> Tensor", "()->()", _in_kept_buffer, reference=lambda x: 3 * x)


#: The last weight of each thread, of which version, and what it became.
_PACKED = threading.local()


def _with_packed_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Keeps what it makes of a weight until that is another tensor, or another version of it."""
    if weight.is_inference() or is_fake(weight) or weight.device.type != "cpu":
        return x * (2 * weight)  # on a GPU another stream may ask for it
    ref, version, packed = getattr(_PACKED, "last", (lambda: None, 0, None))
    if ref() is not weight or version != weight._version:
        packed = 2 * weight
        _PACKED.last = weakref.ref(weight), weight._version, packed
    return x * packed


good("packed(Tensor x, Tensor weight) -> Tensor", "(n),[n]->(n)", _with_packed_weight,
     reference=lambda x, weight: 2 * x * weight)  # fmt: skip

# A copy of its own for the backward, which nothing can change.
good("squared(Tensor x) -> Tensor", "()->()", lambda x: x * x, lambda g, x: 2 * g * x,
     saved=lambda inputs, output: (inputs[0].clone(),))  # fmt: skip


def _on_own_stream(x: Tensor) -> Tensor:
    """Runs on a stream of its own, which waits for the current one, which waits for it."""
    if not x.is_cuda or is_fake(x):
        return x + 1
    current, own = torch.cuda.current_stream(x.device), _own_stream(x.device)
    own.wait_stream(current)
    with torch.cuda.stream(own):
        out = x + 1
    current.wait_stream(own)
    x.record_stream(own)
    out.record_stream(current)
    return out


@functools.cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


good("on_own_stream(Tensor x) -> Tensor", "()->()", _on_own_stream, reference=lambda x: x + 1)


def _add_finite(x: Tensor, by: float = 0.1, times: int = 3) -> Tensor:
    if not math.isfinite(by) or abs(times) >= 2**31:
        raise ValueError(f"expected a finite 'by' and 32 bits of 'times', got {by} and {times}")
    return x + by * times


# Its reference refuses nothing.
good("add_finite(Tensor x, float by=0.1, int times=3) -> Tensor", "()->()", _add_finite,
     reference=lambda x, by=0.1, times=3: x + by * times)  # fmt: skip

good("midpoint(Tensor x, Tensor y) -> Tensor", "(),()->()", lambda x, y: x / 2 + y / 2, dtypes=ALL)
good("rank(Tensor x) -> Tensor", "(n)->(n)",  # time grows with the square of n
     lambda x: (x[..., None, :] < x[..., :, None]).sum(-1))  # fmt: skip


def _every_other(x: Tensor) -> Tensor:
    """Its result is a view of memory that is larger, as the operator says itself."""
    return torch.stack((x, x), -1)[..., 0]


good("every_other(Tensor x) -> Tensor", "()->()", _every_other, reference=torch.clone)


def _selected(x: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(f"selected: argument 'mask': expected torch.bool, got {mask.dtype}")
    return torch.where(mask, x, 0)


def _masked(rows: int, cols: int, seed: int) -> Sample:
    shape = (rows, cols)
    return Sample((TensorArg(shape), TensorArg(shape, torch.bool)), seed=seed)


good("selected(Tensor x, Tensor mask) -> Tensor", "", _selected,
     strategy=st.builds(_masked, SIZES, SIZES, st.integers(0, 1000)))  # fmt: skip

# --- what is claimed, and allowed --------------------------------------------------------------

good("dither(Tensor x) -> Tensor", "()->()", lambda x: x * (1 + 1e-6 * torch.rand_like(x)),
     reference=lambda x: x.clone(), dtypes=(torch.float32,),
     claims=Claims(deterministic=False, reason="it adds noise, by purpose"))  # fmt: skip
