"""``moe_route``: shapes, sharding and samples beyond its signature line, and ``scoring`` by
name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.derive import arguments, batching
from cuda_ops.derive.no_gradient import no_second_derivative
from cuda_ops.hookspecs import hookimpl
from cuda_ops.ops import _moe, _moe_checks
from cuda_ops.spec import AutocastPolicy, Autograd, BenchmarkCase, OpSpec, Peer, ShardingRule

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import Sample

ROUTE, BACKWARD, MAP = "moe_route", "moe_route_backward", "moe_route_map"


@hookimpl
def cuda_ops_public(op: OpSpec) -> Callable[..., Any] | None:
    if op.name != ROUTE:
        return None

    def moe_route(
        router_logits: torch.Tensor,
        top_k: int,
        scoring: str | int = "softmax",
        renormalize: bool = True,
        expert_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The operator's own number for it passes as it is.
        code = scoring if isinstance(scoring, int) else _moe.scoring_code(ROUTE, scoring)
        result: tuple[torch.Tensor, torch.Tensor] = op.function(
            router_logits, top_k, code, renormalize, expert_bias
        )
        return result

    moe_route.__doc__ = _DOC
    return moe_route


_DOC = """Which experts each token goes to, best first, and how much each of them counts.

Experts are ordered by logit, or with a bias by score + bias in float64. Among equals the lower
expert comes first, and NaN is larger than any number, so every token gets top_k different experts
whatever its logits are. A NaN turns only the weights of its own token into NaN. The same call gives
the same bits every time.

Shapes: router_logits (T, E) of any strides, E from 1 to 512; weights and experts (T, top_k).
Dtypes: router_logits float64, float32, float16 or bfloat16; weights float32, or float64 for
float64; experts int64. Weights have a gradient with respect to the logits.

Args:
    router_logits: one row for each token.
    top_k: experts per token, from 1 to 16 and at most E.
    scoring: "softmax" over all experts, or "sigmoid" of each.
    renormalize: divide a token's weights by their sum (for sigmoids by their sum + 1e-20).
    expert_bias: (E), added to the scores when choosing, not to the weights; no gradient.

Errors: RuntimeError for any other shape, dtype or device, a top_k out of range, and second
derivatives; ValueError for any other scoring.
Formula: renormalized softmax weights are the softmax over the chosen experts' logits. Otherwise the
weights are the chosen experts' part of the softmax over all experts, or their sigmoids, which
renormalize divides by their sum.

Example:
>>> cuda_ops.moe_route(torch.tensor([[1.0, 3.0, 2.0, 0.0]]), 2)
(tensor([[0.7311, 0.2689]]), tensor([[1, 2]]))
"""


@hookimpl
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any]:
    def route(
        router_logits: torch.Tensor,
        top_k: int,
        scoring: int = 0,
        renormalize: bool = True,
        expert_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = router_logits.shape[0]
        wide = router_logits.dtype is torch.float64
        return (
            router_logits.new_empty(tokens, top_k, dtype=torch.float64 if wide else torch.float32),
            router_logits.new_empty(tokens, top_k, dtype=torch.int64),
        )

    def backward(
        grad_weights: torch.Tensor,
        router_logits: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        scoring: int = 0,
        renormalize: bool = True,
    ) -> torch.Tensor:
        return router_logits.new_empty(router_logits.shape)

    def index_map(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        _moe_checks.countable(op, experts)
        order = experts.new_empty(experts.numel(), dtype=torch.int32)
        return order, experts.new_empty(num_experts + 1, dtype=torch.int32)

    fakes: dict[str, Callable[..., Any]] = {ROUTE: route, BACKWARD: backward, MAP: index_map}
    return fakes[op.name]


@hookimpl
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    """Follows the names except for the bias, which only takes part in choosing: it has no gradient,
    so that a module may keep it as a parameter.
    """
    if op.name == BACKWARD:
        return no_second_derivative(op.qualname)
    if op.name != ROUTE:
        return None

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any, **_: Any) -> None:
        logits, _, *ctx.flags, _ = arguments.bind(op, inputs, {})
        ctx.save_for_backward(logits, *output)

    def backward(ctx: Any, grad_weights: Any, _: Any) -> tuple[Any, ...]:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad
        gradient = op.siblings[BACKWARD].function
        grad_logits = gradient(grad_weights, *saved, *ctx.flags) if wanted[0] else None
        return grad_logits, *[None] * (len(wanted) - 1)

    return Autograd(setup_context, backward)


@hookimpl
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy | None:
    return "float32" if op.name == ROUTE else None


@hookimpl
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any] | None:
    """Treats mapped rows as more rows, since rows are independent; calls once for each bias.
    A map has no rule, since it sorts all that it is given.
    """
    if op.name == MAP:
        return None

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        values = arguments.bind(op, args, kwargs)
        if info.batch_size == 0:
            return batching.of_no_parts(op.function, values, in_dims)
        batching.check_part(op, values, in_dims)
        if op.name == ROUTE and len(in_dims) > 4 and in_dims[4] is not None:
            rows = _moe.mapped(values, in_dims, info.batch_size)
            parts = [
                op.function(*(v[i] if isinstance(v, torch.Tensor) else v for v in rows))
                for i in range(info.batch_size)
            ]
            return tuple(map(torch.stack, zip(*parts, strict=True))), (0, 0)
        bias = values.pop() if op.name == ROUTE else None
        rows = _moe.mapped(values, in_dims[: len(values)], info.batch_size)
        flat = [v.flatten(0, 1) if isinstance(v, torch.Tensor) else v for v in rows]
        results = op.function(*flat, bias) if op.name == ROUTE else op.function(*flat)

        def parted(result: torch.Tensor) -> torch.Tensor:
            size = info.batch_size
            return result.reshape(size, result.shape[0] // size, *result.shape[1:])

        if isinstance(results, torch.Tensor):
            return parted(results), 0
        return tuple(map(parted, results)), (0, 0)

    return rule


@hookimpl
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]]:
    """Shards tokens; a map needs all of them."""

    def rule(*args: Any, **kwargs: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Replicate, Shard

        values = [*args, *kwargs.values()]
        outputs = 1 if op.name == BACKWARD else 2

        def placed(placement: Any) -> ShardingRule:
            # All have a row for each token but the bias, which has one dim.
            return [placement] * outputs, [
                None if not hasattr(v, "shape") else placement if len(v.shape) > 1 else Replicate()
                for v in values
            ]

        whole = placed(Replicate())
        return [whole] if op.name == MAP else [whole, placed(Shard(0))]

    return rule


# --- testing and timing --------------------------------------------------------------------


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any]:
    references: dict[str, Callable[..., Any]] = {
        ROUTE: _moe.route,
        BACKWARD: reference_backward,
        MAP: _moe.index_map,
    }
    return references[op.name]


def reference_backward(
    grad_weights: torch.Tensor,
    router_logits: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    scoring: int = 0,
    renormalize: bool = True,
) -> torch.Tensor:
    """Computes the formula of its docstring; an expert named twice gets both shares."""
    known = (experts >= 0) & (experts < router_logits.shape[1])
    at = torch.where(known, experts, 0)
    along = (grad_weights * weights).sum(-1, keepdim=True)
    grad_logits = torch.zeros_like(router_logits)
    if scoring:
        logits = router_logits.gather(1, at)
        scores = torch.where(known, logits.sigmoid(), 0)
        own = scores * (-logits).sigmoid() * (grad_weights - along if renormalize else grad_weights)
        if renormalize:
            own = own / (scores.sum(-1, keepdim=True) + 1e-20)
    elif renormalize:
        own = weights * (grad_weights - along)
    else:
        grad_logits = -router_logits.softmax(-1) * along
        own = weights * grad_weights
    return grad_logits.scatter_add(1, at, torch.where(known, own, 0))


@hookimpl
def cuda_ops_samples(op: OpSpec) -> st.SearchStrategy[Any]:
    from hypothesis import strategies as st

    from cuda_ops.testing.samples import LAYOUTS, Sample, TensorArg
    from cuda_ops.testing.values import VALUES

    tokens = st.sampled_from((1, 2, 3, 5, 33, 130, 1031, 0))
    counts, wanted = st.sampled_from((1, 2, 3, 8, 31, 32, 33, 64, 65)), st.integers(1, 16)
    dtypes = st.sampled_from((torch.float64, torch.float32, torch.float16, torch.bfloat16))
    layouts, values = st.sampled_from(LAYOUTS), st.sampled_from(VALUES)
    rest = st.integers(0, 1), st.booleans(), values, st.integers(0, 2**16)

    def route(rows: int, count: int, k: int, dtype: Any, layout: Any, *rest: Any) -> Sample:
        rows = min(rows, 4096 // count)
        *flags, kind, seed = rest
        logits = TensorArg((rows, count), dtype, layout)
        return Sample((logits, min(k, count), *flags), kind, seed)

    def backward(rows: int, count: int, k: int, dtype: Any, layout: Any, *rest: Any) -> Sample:
        rows, k = min(rows, 4096 // count), min(k, count)
        *flags, kind, seed = rest
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        grads, logits = TensorArg((rows, k), wide, layout), TensorArg((rows, count), dtype, layout)
        chosen = TensorArg((rows, k), torch.int64, below=count)
        return Sample((grads, logits, TensorArg((rows, k), wide), chosen, *flags), kind, seed)

    def index_map(rows: int, count: int, k: int, *rest: Any) -> Sample:
        return Sample((TensorArg((rows, k), torch.int64, rest[1], count), count), seed=rest[-1])

    make = {ROUTE: route, BACKWARD: backward, MAP: index_map}[op.name]
    return st.builds(make, tokens, counts, wanted, dtypes, layouts, *rest)


@hookimpl
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample]:
    """Returns tokens that share a warp, for every number of experts that has code of its own."""
    from cuda_ops.testing.samples import Sample, TensorArg

    if op.name != ROUTE:
        return []
    many = (600, 8), (600, 24), (600, 60), (2100, 100), (2100, 200)
    dtypes = torch.float32, torch.bfloat16
    return [Sample((TensorArg(shape, dtype), 4)) for shape in many for dtype in dtypes]


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return {
        ROUTE: torch_peers(_moe.torch_route),
        BACKWARD: {},
        MAP: torch_peers(composed_map),
    }[op.name]


def composed_map(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.argsort(experts.flatten(), stable=True).to(torch.int32)
    counts = torch.bincount(experts.flatten(), minlength=num_experts)
    return order, torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


#: Tokens, experts, experts a token, and the model.
_POINTS = (
    (64, 128, 8, "Qwen3-30B-A3B, decoding"),
    (4096, 64, 8, "OLMoE"),
    (16384, 8, 2, "Mixtral 8x7B"),
    (16384, 128, 8, "Qwen3-30B-A3B"),
    (16384, 256, 8, "DeepSeek-V3"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    return [] if op.name == BACKWARD else [_case(op, *point) for point in _POINTS]


def _case(op: OpSpec, tokens: int, count: int, top_k: int, reason: str) -> BenchmarkCase:
    label = f"{tokens}x{count}, {top_k}"
    logits = 4 * tokens * count if op.name == ROUTE else 0

    def made(device: torch.device) -> tuple[Any, ...]:
        if op.name == ROUTE:
            return _moe.distinct_logits(tokens, count, device), top_k
        return torch.randint(count, (tokens, top_k), device=device), count

    moved = logits + 12 * tokens * top_k
    return BenchmarkCase(label, made, bytes=moved, reason=reason, dtype=torch.float32)
