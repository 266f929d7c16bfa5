"""The gradient that names spell, as in PyTorch's ``derivatives.yaml``.

The arguments of ``<op>_backward`` say what to save (inputs and outputs by name, ``grad_<output>``
for what comes in), its returns ``grad_<input>`` say where the gradients go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, repeat
from typing import Any

from cuda_ops.derive.arguments import bind, split, takes_lists
from cuda_ops.derive.no_gradient import (
    LOST,
    NoGradient,
    refusal,
    refuse_lost,
    refused,
    sizes_of,
)
from cuda_ops.errors import ManifestError
from cuda_ops.hookspecs import hookimpl
from cuda_ops.signature import Group, factor_and_name
from cuda_ops.spec import Autograd, OpSpec, ResultDType


@dataclass(frozen=True)
class _Formula:
    """Says how to call ``<op>_backward``: where each argument comes from and each return goes."""

    #: Per argument: the kind of its source and the position there.
    arguments: tuple[tuple[str, int], ...]
    #: Per return: the position of the operator's argument.
    targets: tuple[int, ...]


@hookimpl(trylast=True)
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    """Reads the formula that ``<op>_backward`` spells by its names; without one, refuses loudly."""
    sibling = op.siblings.get(f"{op.name}_backward")
    if op.is_composite or op.written or not _is_differentiable(op):
        _refuse_unused_backward(op, sibling)
        return None
    if sibling is None:
        _refuse_misspelt_backward(op)
        constants = _constants(op)
        if _is_constant_by_design(op):
            return refusal(f"{op.qualname} has no gradient, by design", constants)
        return refusal(
            f"{op.qualname} has no gradient: add {op.name}_backward(...) to {op.declared_in}",
            constants,
        )
    formula = _read_formula(op, sibling)
    if op.signature is not None:
        inputs = dict(zip(op.tensor_positions, op.signature.inputs, strict=True))
        sources = [formula.arguments[i] for i in sibling.tensor_positions]
        compare_lines(
            op, sibling,
            [inputs[i] if kind == "input" else op.signature.outputs[i] for kind, i in sources],
            [inputs[i] for i in formula.targets],
        )  # fmt: skip
    compare_kernels(op, sibling)
    for i in formula.targets:
        if (name := op.argument_names[i]) in op.no_gradient:
            raise ManifestError(
                f"{sibling.qualname}: return 'grad_{name}': expected none, as .no_gradient"
                f'("{name}") says that the argument has no gradient; remove one of them'
            )
    made = ByName(op, sibling, formula)
    return Autograd(made.setup_context, made.backward, inputs=formula.targets)


def why_none(op: OpSpec, formula: Autograd | None) -> str:
    """Says in a few words why an operator with this formula has no gradient; empty if it has."""
    if formula is None:
        if op.written:
            return "it writes its arguments"
        return "a list of tensors needs cuda_ops_autograd" if takes_lists(op) else "integers only"
    if not isinstance(formula.backward, NoGradient):
        return ""
    if _is_constant_by_design(op):
        return "by design"
    if f"add {op.name}_backward(" in formula.backward.reason:
        return f"no {op.name}_backward"
    return formula.backward.reason.removeprefix(f"{op.qualname} has no gradient: ")


class ByName:
    """The gradient that calls ``<op>_backward`` by its formula."""

    def __init__(self, op: OpSpec, sibling: OpSpec, formula: _Formula) -> None:
        self._op, self._formula = op, formula
        #: The operator that computes the gradient.
        self.sibling = sibling
        self._has_keywords = any(a.kwarg_only for a in sibling.parsed.arguments)
        tensors = set(op.tensor_positions)
        self._is_tensor = [kind == "output" or i in tensors for kind, i in formula.arguments]
        saved = [
            (source, is_tensor)
            for source, is_tensor in zip(formula.arguments, self._is_tensor, strict=True)
            if source[0] != "grad"
        ]
        self._saved_tensors = [source for source, is_tensor in saved if is_tensor]
        self._saved_values = [i for (_, i), is_tensor in saved if not is_tensor]
        self._taken = [i for kind, i in formula.arguments if kind == "grad"]
        self._constants = _constants(op)
        #: The outputs whose gradient would be lost.
        self._lost = [
            i
            for i, output in enumerate(op.parsed.returns)
            if "Tensor" in str(output.type) and i not in (*self._taken, *self._constants)
        ]
        self._untargeted = [
            i
            for i, argument in enumerate(op.parsed.arguments)
            if "Tensor" in str(argument.type) and i not in formula.targets
        ]
        self._positional = sum(not argument.kwarg_only for argument in op.parsed.arguments)

    @property
    def is_plain(self) -> bool:
        """Says whether all results are tensors, none of their gradients would be lost, and all
        tensors must be given, each by itself.
        """
        results = [str(result.type) for result in self._op.parsed.returns]
        taken = [str(argument.type) for argument in self._op.parsed.arguments]
        others = any("Tensor" in kind and kind != "Tensor" for kind in taken)
        return not self._lost and not others and all(kind == "Tensor" for kind in results)

    @property
    def sources(self) -> list[tuple[str, int, bool]]:
        """Where each argument of the gradient comes from, the position there, and whether it is a
        tensor.
        """
        pairs = zip(self._formula.arguments, self._is_tensor, strict=True)
        return [(kind, i, is_tensor) for (kind, i), is_tensor in pairs]

    @property
    def targets(self) -> tuple[int, ...]:
        """For each result of the gradient: the position of the argument that it belongs to."""
        return self._formula.targets

    @property
    def differentiable(self) -> list[bool]:
        """For each result of the operator: whether a gradient may come through it."""
        return [i not in self._constants for i in range(len(self._op.parsed.returns))]

    @property
    def without_gradient(self) -> list[int]:
        """The positions of tensors that the formula has no gradient for."""
        return self._untargeted

    def setup_context(
        self, ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None
    ) -> None:
        values = bind(self._op, inputs, keyword_only_inputs or {})
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(
            *((values if kind == "input" else outputs)[i] for kind, i in self._saved_tensors)
        )
        ctx.plain = [values[i] for i in self._saved_values]
        ctx.formula = self._formula
        ctx.sizes = {i: sizes_of(values[i]) for i in self._untargeted}
        if self._constants:
            ctx.mark_non_differentiable(*(outputs[i] for i in self._constants))
        if self._lost:
            # For an output that nothing depends on torch would hand in zeros, which would look
            # like a gradient that is lost.
            ctx.set_materialize_grads(False)
            ctx.outputs = {i: (outputs[i].shape, outputs[i].dtype) for i in self._taken}

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad  # the dispatcher leaves out arguments equal to their default
        if ctx.formula is not self._formula and ctx.formula != self._formula:
            raise RuntimeError(
                f"{self.sibling.qualname} takes other arguments since a reload, and what its "
                "forward kept is for those before: call the forward again"
            )
        if self._lost:
            given = [grad for grad in chain(*map(_as_list, grads)) if grad is not None]
            if not given:
                return (None,) * len(wanted)
            grads = self._complete(ctx, grads, given[0])
        gradients: list[Any] = [None] * self._positional
        for i in self._untargeted:
            if i < len(wanted):
                reason = f"{self._op.qualname} has no gradient for {self._way(i)}"
                gradients[i] = refused(grads[self._taken[0]], ctx.sizes[i], wanted[i], reason)
        tensor_values, plain_values = iter(ctx.saved_tensors), iter(ctx.plain)
        arguments = [
            grads[i] if kind == "grad" else next(tensor_values if is_tensor else plain_values)
            for (kind, i), is_tensor in zip(self._formula.arguments, self._is_tensor, strict=True)
        ]
        if self._has_keywords:
            positional, keywords = split(self.sibling, arguments)
            results = self.sibling.function(*positional, **keywords)
        else:
            results = self.sibling.function(*arguments)
        results = results if isinstance(results, (tuple, list)) else (results,)
        # Where loop dims broadcast, a result is larger than its input: torch's
        # engine sums every gradient to the shape of what it belongs to.
        for target, result in zip(self._formula.targets, results, strict=True):
            if target < len(wanted) and wanted[target]:
                gradients[target] = result
        return tuple(gradients[: len(wanted)])

    def _complete(self, ctx: Any, grads: Sequence[Any], some: Any) -> tuple[Any, ...]:
        """Refuses the gradients that the formula does not take; makes those that are missing."""
        made = list(grads)
        for i, (shape, dtype) in ctx.outputs.items():
            if made[i] is None:
                made[i] = some.new_zeros(shape, dtype=dtype)
        for i in self._lost:
            name = self._op.output_names[i]
            reason = (
                f"{self._op.qualname} {LOST} '{name}': take grad_{name} in {self.sibling.name}, "
                f'or write .no_gradient("{name}") in {self._op.declared_in} if that is by design'
            )
            for grad in _as_list(grads[i]):
                if grad is not None:
                    first = self._taken[0]
                    made[first] = refuse_lost(made[first], grad, reason)
        return tuple(made)

    def _way(self, argument: int) -> str:
        """Returns an argument that has no gradient, and the way to give it one."""
        name = self._op.argument_names[argument]
        if name in self._op.no_gradient:
            return f"'{name}', by design: pass {name}.detach()"
        if argument not in self._op.tensor_positions:
            return (
                f"'{name}': a list of tensors gets its gradient only from cuda_ops_autograd of a "
                "plugin"
            )
        return f"'{name}': return grad_{name} from {self.sibling.name} in {self._op.declared_in}"


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
            kind, i = found[0]
            if kind == "grad" and outputs[i] in op.constants:
                word = ".saved" if outputs[i] in op.saved else ".no_gradient"
                raise ManifestError(
                    f"{sibling.qualname}: argument '{name}': expected none, as {word}"
                    f'("{outputs[i]}") says that the output has no gradient; remove one of them'
                )
            return kind, i
        allowed = f"inputs {listed(names)}, outputs {listed(outputs)}, gradients {listed(grads)}"
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
            f"{listed(tuple(targets))}"
        )

    arguments = tuple(source(name) for name in sibling.argument_names)
    if all(kind != "grad" for kind, _ in arguments):
        raise ManifestError(
            f"{sibling.qualname}: expected an argument {' or '.join(map(repr, grads))}, got none"
        )
    return _Formula(
        arguments,
        tuple(target(value.name or "") for value in sibling.parsed.returns),
    )


def _takes_gradients(op: OpSpec) -> bool:
    return any(name.startswith("grad_") for name in op.argument_names)


def _refuse_unused_backward(op: OpSpec, sibling: OpSpec | None) -> None:
    """Refuses a gradient that nothing would ever call."""
    if sibling is None:
        return
    actual = "a composed one, whose gradient follows from its parts"
    if op.written:
        actual = "one that writes arguments, which has no gradient"
    elif not op.is_composite:
        actual = f"{op.schema!r}; for others define cuda_ops_autograd in a plugin"
    raise ManifestError(
        f"{sibling.qualname}: expected {op.name} to have an argument of type Tensor and a floating "
        f"dtype, which a gradient by name needs, got {actual}"
    )


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
        if suffix.endswith("_backward") and sibling.name.removesuffix("_backward") in op.siblings:
            continue  # the gradient of that one
        made = inputs & {value.name for value in sibling.parsed.returns}
        if made and _takes_gradients(sibling):
            raise ManifestError(
                f"{sibling.qualname}: returns {listed(tuple(sorted(made)))}: expected the name "
                f"'{op.name}_backward', which makes it the gradient of {op.name}"
            )


def compare_lines(
    op: OpSpec, sibling: OpSpec, of_arguments: Sequence[Group], of_returns: Sequence[Group]
) -> None:
    """Refuses signature lines that say different things about one tensor.

    ``of_arguments`` and ``of_returns`` are the dims that the line of ``op`` gives to the tensors
    that ``sibling``, its derivative, takes and returns.
    """
    if sibling.signature is None:
        return
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


def compare_kernels(op: OpSpec, sibling: OpSpec) -> None:
    """Refuses a derivative that lacks a kernel on a device where its operator has one."""
    for device, of_op, of_sibling in (
        ("cpu", "CPU" in op.keys, "CPU" in sibling.keys),
        ("cuda", op.has_cuda, sibling.has_cuda),
    ):
        if of_op and not of_sibling and not sibling.is_composite:
            raise ManifestError(
                f"{sibling.qualname}: expected .{device}<f>(), which {op.name} has, got none"
            )


def _is_differentiable(op: OpSpec) -> bool:
    return any(may_float(op, name) for name in op.tensor_names)


def may_float(op: OpSpec, argument: str) -> bool:
    """Tells whether a tensor argument may have a dtype that gradients exist for."""
    dtypes = op.allowed_dtypes(argument)
    return not dtypes or any(d.is_floating_point or d.is_complex for d in dtypes)


def output_may_float(op: OpSpec, output: str) -> bool:
    """Tells the same of an output, by what the binding says of its dtype."""
    rule = op.results.get(output, ResultDType())
    if rule.dtype is not None and (rule.dtype.is_floating_point or rule.dtype.is_complex):
        return True
    if rule.dtype is not None and not rule.like:
        return False
    return may_float(op, rule.like or next(iter(op.tensor_names), ""))


def _constants(op: OpSpec) -> list[int]:
    """Returns the positions of the outputs that have no gradient by design."""
    return [i for i, name in enumerate(op.output_names) if name in op.constants]


def _is_constant_by_design(op: OpSpec) -> bool:
    """Tells whether all floating inputs, or all floating outputs, have no gradient by design."""
    inputs = {name for name in op.tensor_names if may_float(op, name)}
    outputs = {name for name in op.output_names if output_may_float(op, name)}
    return inputs <= {*op.no_gradient} or set() < outputs <= {*op.constants}


def _as_list(grad: Any) -> Sequence[Any]:
    """Returns the gradients of one output, which may be a list of tensors."""
    return grad if isinstance(grad, (list, tuple)) else [grad]


def listed(names: Sequence[str]) -> str:
    """Returns names in quotes, or ``none``."""
    return ", ".join(f"'{name}'" for name in names) or "none"
