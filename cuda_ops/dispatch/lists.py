"""Lists of tensors for :class:`torch.autograd.Function`, which sees no tensor inside a list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cuda_ops.derive.arguments import is_list, takes_lists
from cuda_ops.spec import OpSpec

#: For each value the length of its list, or ``None`` if it is none.
_Lengths = list[int | None]


@dataclass
class _Form:
    """How the arguments and the results of one call nest."""

    arguments: _Lengths
    results: _Lengths


def has_lists(op: OpSpec) -> bool:
    """Says whether arguments or results of the operator are lists of tensors."""
    return takes_lists(op) or any(map(is_list, op.parsed.returns))


def one_by_one(functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Returns the functions of an autograd.Function in a form that gets and returns what lists hold
    one by one. The first argument is new, see :func:`calling`.
    """

    def forward(form: _Form, *leaves: Any) -> Any:
        result = functions["forward"](*_nested(leaves, form.arguments))
        return tuple(_leaves(result, form))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.form = form = inputs[0]
        results = _nested(output, form.results)
        given = tuple(_nested(inputs[1:], form.arguments))
        functions["setup_context"](ctx, given, results[0] if len(results) == 1 else tuple(results))

    def backward(ctx: Any, *grads: Any) -> Any:
        lengths = ctx.form.arguments
        of_leaves = ctx.needs_input_grad
        ctx.needs_input_grad = tuple(_nested(of_leaves[1:], lengths))
        try:
            gradients = functions["backward"](ctx, *_nested(grads, ctx.form.results))
        finally:
            ctx.needs_input_grad = of_leaves  # for another backward of the same graph
        flat: list[Any] = [None]
        for gradient, length in zip(gradients, lengths, strict=False):  # None for defaults
            if length is None:
                flat.append(gradient)
            else:
                flat += [None] * length if gradient is None else gradient
        return tuple(flat)

    def vmap(info: Any, in_dims: tuple[Any, ...], form: _Form, *leaves: Any) -> Any:
        dims = tuple(_nested(in_dims[1:], form.arguments))
        result, out_dims = functions["vmap"](info, dims, *_nested(leaves, form.arguments))
        flat = tuple(_leaves(result, form))
        outs = out_dims if isinstance(out_dims, tuple) else (out_dims,) * len(form.results)
        flat_dims: list[Any] = []
        for out, length in zip(outs, form.results, strict=True):
            flat_dims += out if isinstance(out, list) else [out] * (1 if length is None else length)
        return flat, tuple(flat_dims)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        def some(given: Any) -> Any:  # of a list, one that says whether it has any
            if not isinstance(given, list):
                return given
            there = [tangent for tangent in given if tangent is not None]
            return next((one for one in there if not ctx.has_zeros or one.any()), None)

        nested = _nested(tangents[1:], ctx.form.arguments)
        result = functions["jvp"](ctx, *map(some, nested))
        results = result if isinstance(result, tuple) else (result,)
        flat: list[Any] = []
        for tangent, length in zip(results, ctx.form.results, strict=True):
            flat += [tangent] if length is None else [None] * length if tangent is None else tangent
        return tuple(flat)

    return {
        **functions,
        "jvp": jvp,
        "forward": forward,
        "setup_context": setup_context,
        "backward": backward,
        "vmap": vmap,
    }


def calling(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arguments with lists that calls ``apply`` of an autograd.Function made
    of :func:`one_by_one`.
    """

    def call(*values: Any) -> Any:
        form = _Form([_length(value) for value in values], [])
        results = _nested(apply(form, *_flat(values)), form.results)
        return results[0] if len(results) == 1 else tuple(results)

    return call


def _leaves(result: Any, form: _Form) -> list[Any]:
    results = result if isinstance(result, tuple) else (result,)
    form.results[:] = [_length(value) for value in results]
    return _flat(results)


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, (list, tuple)) else None


def _flat(values: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += value if isinstance(value, (list, tuple)) else [value]
    return flat


def _nested(leaves: Sequence[Any], lengths: _Lengths) -> list[Any]:
    left: Iterator[Any] = iter(leaves)
    return [
        next(left) if length is None else [next(left) for _ in range(length)] for length in lengths
    ]
