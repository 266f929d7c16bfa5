"""The plugin that answers last: everything the signature line and the schema already say.

A pair's own plugin overrides any of these. The gradient comes from naming, as
in PyTorch's ``derivatives.yaml``: the arguments of ``<op>_backward`` say what
to save (inputs and outputs by name, ``grad_<output>`` for what comes in), its
returns ``grad_<input>`` say where the gradients go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import repeat
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

from cuda_ops.benchmarking import rotation
from cuda_ops.errors import ManifestError
from cuda_ops.hookspecs import hookimpl
from cuda_ops.no_gradient import no_gradient, refusal
from cuda_ops.shapes import (
    bind,
    bind_dims,
    broadcast,
    empty_outputs,
    group_of,
    loop_dims,
    of_no_parts,
    rows_are_independent,
    tensor_arguments,
)
from cuda_ops.signature import factor_and_name
from cuda_ops.spec import AutocastPolicy, Autograd, BenchmarkCase, OpSpec, ShardingRule
from cuda_ops.testing import samples
from cuda_ops.testing.arguments import given, split

#: What is timed without core dims: the number of elements, and why.
_LOOP_NUMEL = {
    "1K": (2**10, "the launch is the whole cost"),
    "32K": (2**15, "a grid that does not fill a large GPU"),
    "1M": (2**20, "one short kernel, inside any cache"),
    "16M": (2**24, "beyond the cache, launch still visible"),
    "256M": (2**28, "memory bandwidth alone"),
    "1G": (2**30, "half of what 32 bits count"),
}
#: With one core dim: rows and their length. With several: all of them this long.
_ROW_SIZES = {
    (1, 1024): "one row, as when one token is decoded",
    (4096, 1024): "many short rows",
    (4096, 16384): "memory bandwidth alone",
    (16, 2**20): "few long rows",
}
_CORE_SIZES = {256: "small", 1024: "medium"}
#: In which dtypes, as far as the operator takes them; half types differ in arithmetic alone, so
#: the second one is timed at one size.
_TIMED_DTYPES = (torch.float32, torch.bfloat16)
_ONE_MORE = (torch.float16, "16M")


@hookimpl(trylast=True)
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any] | None:
    """Shapes from the signature, layout and dtype by the rule of ``shapes.empty_outputs``."""
    signature = op.signature
    if signature is None or _is_irregular(op):
        return None

    def fake(*args: Any, **kwargs: Any) -> Any:
        outputs = empty_outputs(op, signature, tensor_arguments(op, bind(op, args, kwargs)))
        return outputs if len(outputs) > 1 else outputs[0]

    return fake


# --- gradient --------------------------------------------------------------------


@dataclass(frozen=True)
class _Formula:
    """How to call ``<op>_backward``: where each argument comes from, where each return goes."""

    #: Per argument: the kind of its source and the position there.
    arguments: tuple[tuple[str, int], ...]
    #: Per return: the position of the operator's argument.
    targets: tuple[int, ...]


@hookimpl(trylast=True)
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    """The formula that ``<op>_backward`` spells by its names; without one, a loud refusal."""
    if _is_irregular(op) or not _is_differentiable(op):
        return None
    sibling = op.siblings.get(f"{op.name}_backward")
    if sibling is None:
        _refuse_misspelt_backward(op)
        return refusal(
            f"{op.qualname} has no gradient: add {op.name}_backward(...) to {op.stem}.cpp"
        )
    formula = _read_formula(op, sibling)
    _compare_lines(op, sibling, formula)
    _compare_kernels(op, sibling)
    saved = [source for source in formula.arguments if source[0] != "grad"]
    tensors = set(op.tensor_positions)
    positional = sum(not argument.kwarg_only for argument in op.parsed.arguments)
    without = [i for i in op.tensor_positions if i not in formula.targets]

    def is_tensor(source: tuple[str, int]) -> bool:
        return source[0] == "output" or source[1] in tensors

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None
    ) -> None:
        values = bind(op, inputs, keyword_only_inputs or {})
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(
            *((values if kind == "input" else outputs)[i] for kind, i in filter(is_tensor, saved))
        )
        ctx.plain = [values[source[1]] for source in saved if not is_tensor(source)]
        ctx.sizes = {i: values[i].shape for i in without if values[i] is not None}
        # An output that nothing depends on has no gradient; torch hands in zeros.
        ctx.set_materialize_grads(True)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad  # the dispatcher leaves out arguments equal to their default
        gradients: list[Any] = [None] * positional
        for i in without:
            if i < len(wanted) and wanted[i]:
                name = op.argument_names[i]
                reason = (
                    f"{op.qualname} has no gradient for '{name}': "
                    f"return grad_{name} from {sibling.name} in {op.stem}.cpp"
                )
                gradients[i] = no_gradient(grads[0], ctx.sizes[i], reason)
        tensor_values, plain_values = iter(ctx.saved_tensors), iter(ctx.plain)
        arguments = [
            grads[source[1]]
            if source[0] == "grad"
            else next(tensor_values if is_tensor(source) else plain_values)
            for source in formula.arguments
        ]
        results = sibling.function(*arguments)
        results = results if isinstance(results, (tuple, list)) else (results,)
        # Where loop dims broadcast, a result is larger than its input: torch's
        # engine sums every gradient to the shape of what it belongs to.
        for target, result in zip(formula.targets, results, strict=True):
            if target < len(wanted) and wanted[target]:
                gradients[target] = result
        return tuple(gradients[: len(wanted)])

    return Autograd(setup_context=setup_context, backward=backward, inputs=formula.targets)


def _read_formula(op: OpSpec, sibling: OpSpec) -> _Formula:
    names, outputs = op.argument_names, op.output_names
    grads = tuple(f"grad_{name}" for name in outputs)

    def source(name: str) -> tuple[str, int]:
        found = [
            (kind, known.index(name))
            for kind, known in (("input", names), ("output", outputs), ("grad", grads))
            if name in known
        ]
        if len(found) == 1:
            return found[0]
        allowed = f"inputs {_listed(names)}, outputs {_listed(outputs)}, gradients {_listed(grads)}"
        what = "means two things" if found else "is unknown"
        raise ManifestError(
            f"{sibling.qualname}: argument '{name}' {what}; allowed: {allowed}. "
            f"Rename it, or name the returns of {op.name}."
        )

    targets = {f"grad_{names[i]}": i for i in op.tensor_positions}

    def target(name: str) -> int:
        if name in targets:
            return targets[name]
        if not name and len(sibling.parsed.returns) == 1 and len(targets) == 1:
            return next(iter(targets.values()))
        called = f"return '{name}' is unknown" if name else "an unnamed return"
        raise ManifestError(
            f"{sibling.qualname}: {called}; name each return after the input it belongs to: "
            f"{_listed(tuple(targets))}"
        )

    return _Formula(
        tuple(source(name) for name in sibling.argument_names),
        tuple(target(value.name or "") for value in sibling.parsed.returns),
    )


def _takes_gradients(op: OpSpec) -> bool:
    return any(name.startswith("grad_") for name in op.argument_names)


def _refuse_misspelt_backward(op: OpSpec) -> None:
    prefix = f"{op.name}_"
    suffixes = [name.removeprefix(prefix) for name in op.siblings if name.startswith(prefix)]
    for close in get_close_matches("backward", suffixes, cutoff=0.8):
        raise ManifestError(
            f"{op.qualname}_{close}: expected '{op.name}_backward', which is the gradient of "
            f"{op.name}, got '{op.name}_{close}'"
        )
    if _takes_gradients(op):  # parts of a gradient are no gradients of it
        return
    inputs = {f"grad_{op.argument_names[i]}" for i in op.tensor_positions}
    for suffix in suffixes:
        sibling = op.siblings[prefix + suffix]
        made = inputs & {value.name for value in sibling.parsed.returns}
        if made and _takes_gradients(sibling):
            raise ManifestError(
                f"{sibling.qualname}: returns {_listed(tuple(sorted(made)))}: expected the name "
                f"'{op.name}_backward', which makes it the gradient of {op.name}"
            )


def _compare_lines(op: OpSpec, sibling: OpSpec, formula: _Formula) -> None:
    """Refuse signature lines that say different things of one tensor."""
    if op.signature is None or sibling.signature is None:
        return
    inputs = dict(zip(op.tensor_positions, op.signature.inputs, strict=True))
    outputs = op.signature.outputs
    sources = [formula.arguments[i] for i in sibling.tensor_positions]
    of_arguments = [inputs[i] if kind == "input" else outputs[i] for kind, i in sources]
    of_returns = [inputs[i] for i in formula.targets]
    names = [sibling.argument_names[i] for i in sibling.tensor_positions]
    renamed: dict[str, str] = {}
    for name, expected, actual, is_return in (
        *zip(names, of_arguments, sibling.signature.inputs, repeat(False)),
        *zip(sibling.output_names, of_returns, sibling.signature.outputs, repeat(True)),
    ):
        # A gradient of each row is summed to what serves all of them.
        loops = actual.loops == expected.loops or (is_return and actual.loops)
        alike = len(expected.core) == len(actual.core) and all(
            factor == other and renamed.setdefault(dim, here) == here
            for (factor, dim), (other, here) in zip(
                map(factor_and_name, expected.core), map(factor_and_name, actual.core), strict=True
            )
        )
        apart = len(set(renamed.values())) == len(renamed)
        if not (loops and alike and apart):
            raise ManifestError(
                f"{sibling.qualname}: {'return' if is_return else 'argument'} '{name}': expected "
                f"{expected} as in the signature line '{op.signature}' of {op.name}, got {actual} "
                f"in '{sibling.signature}'"
            )


def _compare_kernels(op: OpSpec, sibling: OpSpec) -> None:
    """Refuse a gradient that would end in torch's list of devices where its operator has run."""
    for device, of_op, of_sibling in (
        ("cpu", "CPU" in op.keys, "CPU" in sibling.keys),
        ("cuda", op.has_cuda, sibling.has_cuda),
    ):
        if of_op and not of_sibling and not sibling.is_composite:
            raise ManifestError(
                f"{sibling.qualname}: expected .{device}<f>(), which {op.name} has, got none"
            )


@hookimpl(trylast=True)
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy | None:
    """Tensors that have to share a dtype are promoted, as those of ``torch.add`` are: a weight in
    float32 meets what a layer before it computed in the autocast dtype.
    """
    several = len(op.tensor_positions) > 1
    promotes = several and torch.float32 in op.dtypes and not _is_irregular(op)
    return "promote" if promotes else None


# --- batching and sharding ---------------------------------------------------------


@hookimpl(trylast=True)
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any] | None:
    """A mapped dim becomes the outermost loop dim of one call; where it cannot, since a mapped
    argument or a result has none or rows are not independent, there is a call for each index.
    """
    if op.signature is None or op.parsed.is_mutable or op.is_composite:
        return None
    one_call = rows_are_independent(op) and all(group.loops for group in op.signature.outputs)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        values = bind(op, args, kwargs)
        mapped = {
            i: in_dims[i]
            for i in op.tensor_positions
            if i < len(in_dims) and in_dims[i] is not None
        }
        groups = {i: group_of(op, k) for k, i in enumerate(op.tensor_positions)}
        sizes: dict[str, Any] = {}
        for i, group in groups.items():  # else a mapped dim could pass for one of a row's
            if values[i] is not None:
                shape = [n for d, n in enumerate(values[i].shape) if mapped.get(i) != d]
                bind_dims(op, op.argument_names[i], group, shape, sizes)
        if not (one_call and all(groups[i].loops for i in mapped)):
            return _call_by_call(op, args, kwargs, mapped)
        ranks = {
            i: values[i].dim() - len(group.core) - (i in mapped)
            for i, group in groups.items()
            if values[i] is not None
        }
        rank = max(ranks.values())
        for i, dim in mapped.items():
            front = values[i].movedim(dim, 0)
            missing = [1] * (rank - ranks[i])
            values[i] = front.reshape(front.shape[0], *missing, *front.shape[1:])
        result = op.function(*values[: len(args)], **kwargs)
        return result, tuple(0 for _ in result) if isinstance(result, (tuple, list)) else 0

    return rule


def _call_by_call(
    op: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any], mapped: dict[int, int]
) -> tuple[Any, Any]:
    """One call for each index of the mapped dim."""

    def call(*values: Any) -> Any:
        return op.function(*values, **kwargs)

    def part(at: int) -> list[Any]:
        return [v.select(mapped[i], at) if i in mapped else v for i, v in enumerate(args)]

    count = next(args[i].shape[dim] for i, dim in mapped.items())
    if not count:
        return of_no_parts(call, args, [mapped.get(i) for i in range(len(args))])
    results = [call(*part(at)) for at in range(count)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


@hookimpl(trylast=True)
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]] | None:
    """Loop dims shard, core dims replicate; what is the sum over loop dims is a partial one."""
    signature = op.signature
    if signature is None or _is_irregular(op):
        return None
    shardable = rows_are_independent(op)

    def rule(*args: Any, **kwargs: Any) -> list[ShardingRule]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        values = bind(op, args, kwargs)
        shapes = {
            i: loop_dims(op, k, values[i].shape)
            for k, i in enumerate(op.tensor_positions)
            if values[i] is not None
        }
        loop = broadcast(op, tensor_arguments(op, values))

        def placement(i: int, d: int) -> Any:
            if i not in shapes:
                return None
            own = d - (len(loop) - len(shapes[i]))
            return Shard(own) if own >= 0 and shapes[i][own] != 1 else Replicate()

        passed = len(args) + len(kwargs)
        outputs = signature.outputs
        replicated = [Replicate() if i in shapes else None for i in range(passed)]
        return [([Replicate()] * len(outputs), replicated)] + [
            (
                [Shard(d) if group.loops else Partial() for group in outputs],
                [placement(i, d) for i in range(passed)],
            )
            for d, size in enumerate(loop)
            if size != 1 and shardable
        ]

    return rule


# --- testing and timing --------------------------------------------------------------


@hookimpl(trylast=True)
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    """The CPU kernel in float64."""
    if "CPU" not in op.keys and not op.is_composite:
        return None
    floating = [dtype for dtype in op.dtypes if dtype.is_floating_point]
    return None if floating and torch.float64 not in floating else op.overload


@hookimpl(trylast=True)
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[samples.Sample] | None:
    """Shapes that fit the signature, then dtype, layout, values, seed."""
    return samples.strategy(op)


@hookimpl(trylast=True)
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    """Growing sizes in the dtypes that are used most; bytes are sizes in + sizes out."""
    signature = op.signature
    if signature is None:
        return None
    dims = signature.names
    points: list[tuple[str, str, tuple[int, ...], dict[str, int]]]
    if len(dims) == 1 and any(group.loops for group in signature.inputs):
        points = [
            (f"{rows}x{n}", why, (rows,), {dims[0]: n}) for (rows, n), why in _ROW_SIZES.items()
        ]
    elif dims:
        names = "=".join(dims)
        points = [
            (f"{names}={n}", why, (), dict.fromkeys(dims, n)) for n, why in _CORE_SIZES.items()
        ]
    else:
        points = [(label, why, (numel,), {}) for label, (numel, why) in _LOOP_NUMEL.items()]
    timed = [dtype for dtype in _TIMED_DTYPES if dtype in op.dtypes]
    cases = [
        _case(op, *point, dtype)
        for dtype in timed or op.dtypes[:1] or _TIMED_DTYPES[:1]
        for point in points
    ]
    extra, size = _ONE_MORE
    return cases + [_case(op, *p, extra) for p in points if p[0] == size and extra in op.dtypes]


def _case(
    op: OpSpec,
    label: str,
    reason: str,
    loop: tuple[int, ...],
    sizes: dict[str, int],
    dtype: torch.dtype,
) -> BenchmarkCase:
    assert op.signature is not None
    groups = iter(op.signature.inputs)
    args, keywords = split(
        op,
        tuple(
            (next(groups).shape(loop, sizes), dtype)
            if i in op.tensor_positions
            else samples.example_scalar(argument)
            for i, argument in enumerate(given(op))
        ),
    )
    everything = (*op.signature.inputs, *op.signature.outputs)
    numel = sum(math.prod(group.shape(loop, sizes)) for group in everything)
    return BenchmarkCase(
        f"{label} {str(dtype).removeprefix('torch.')}",
        rotation.maker(args),
        bytes=numel * dtype.itemsize,
        keywords=keywords,
        reason=reason,
        dtype=dtype,
    )


def _is_irregular(op: OpSpec) -> bool:
    """Composed of other operators, or writing into its arguments: names and dims say nothing."""
    return op.is_composite or op.parsed.is_mutable


def _is_differentiable(op: OpSpec) -> bool:
    floating = not op.dtypes or any(dtype.is_floating_point for dtype in op.dtypes)
    return floating and bool(op.tensor_positions)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
