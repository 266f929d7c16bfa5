"""The derivative in forward mode: what ``torch.func.jvp`` and dual numbers get.

``<op>_jvp`` spells it by its names, as ``<op>_backward`` does the gradient. Without it a tensor
that the operator is ``.linear`` in gives way to its tangent, and where each result is computed from
one element of each tensor, the gradient of that element is the derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from cuda_ops.derive.arguments import split
from cuda_ops.derive.gradient import compare_kernels, compare_lines, listed
from cuda_ops.derive.layout import is_elementwise
from cuda_ops.derive.no_gradient import NoGradient
from cuda_ops.errors import ManifestError
from cuda_ops.spec import Autograd, OpSpec

_Values = Sequence[Any]


@dataclass(frozen=True)
class ForwardMode:
    """A derivative in forward mode.

    ``rule(values, outputs, tangents)`` gets one value for each argument, all outputs, and for each
    argument its tangent or ``None``; it returns a tangent or ``None`` for each output. ``inputs``
    are the positions of the arguments whose tangents it takes.
    """

    inputs: tuple[int, ...]
    rule: Callable[[_Values, _Values, _Values], list[Any]]

    def tangents(
        self, op: OpSpec, values: _Values, outputs: _Values, tangents: _Values
    ) -> list[Any]:
        """Applies the rule.

        Raises:
            NotImplementedError: an argument has a tangent, or an output needs one, that the rule
                does not know.
        """
        for i, tangent in enumerate(tangents):
            if tangent is not None and i not in self.inputs:
                refuse_tangent(op, i)
        found = self.rule(values, outputs, tangents)
        for name, output, tangent in zip(op.output_names, outputs, found, strict=True):
            if tangent is None and name not in op.constants and _is_differentiable(output):
                raise NotImplementedError(
                    f"{op.qualname}: expected tangent_{name} from {op.name}_jvp, as '{name}' is of "
                    f"{output.dtype}, got none"
                )
        return found


def forward_mode(op: OpSpec, autograd: Autograd | None) -> ForwardMode | None:
    """Returns the derivative in forward mode that an operator has, if any.

    Raises:
        ManifestError: ``<op>_jvp`` has names, dims or kernels that do not fit.
    """
    if (sibling := op.siblings.get(f"{op.name}_jvp")) is not None:
        return _by_name(op, sibling)
    if op.is_composite or op.written:
        return None
    linear = [op.argument_names.index(name) for name in op.linear]
    elementwise = [i for i in _elementwise(op, autograd) if i not in linear]
    if not linear and not elementwise:
        return None
    terms: dict[int, Callable[..., list[Any]]] = dict.fromkeys(linear, _linear_term)
    if autograd is not None:
        terms |= {i: _Elementwise(autograd) for i in elementwise}

    def rule(values: _Values, outputs: _Values, tangents: _Values) -> list[Any]:
        total: list[Any] = [None] * len(outputs)
        for i, tangent in enumerate(tangents):
            if tangent is None:
                continue
            for k, term in enumerate(terms[i](op, i, values, outputs, tangent)):
                total[k] = term if total[k] is None or term is None else total[k] + term
        return total

    return ForwardMode(tuple(sorted(terms)), rule)


def refuse_tangent(op: OpSpec, position: int) -> NoReturn:
    """Refuses the tangent of an argument that has no derivative.

    Raises:
        NotImplementedError: names the operator and the argument.
    """
    name = op.argument_names[position]
    if op.written:
        raise NotImplementedError(
            f"{op.qualname}: argument {name!r}: expected no tangent, as the operator writes "
            f"{op.written_text}; pass {name}.detach()"
        )
    if name in op.no_gradient:
        way = f"the argument has no derivative by design; pass {name}.detach()"
    elif op.is_composite:
        way = "it is one for torch.func.jvp, which asks the operators that this one calls"
    elif position not in op.tensor_positions:
        way = "a list of tensors has no derivative in forward mode"
    else:
        way = (
            f"the operator has no derivative in forward mode for it; take tangent_{name} in "
            f"{op.name}_jvp in {op.declared_in}"
        )
    raise NotImplementedError(
        f"{op.qualname}: argument {name!r}: expected no tangent, as {way}; torch.func.grad, "
        "torch.func.vjp and backward do without"
    )


def _is_differentiable(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and (output.is_floating_point() or output.is_complex())


# --- <op>_jvp -----------------------------------------------------------------------


def _by_name(op: OpSpec, sibling: OpSpec) -> ForwardMode:
    if op.is_composite or op.written:
        actual = "one that writes arguments" if op.written else "a composed one"
        raise ManifestError(
            f"{sibling.qualname}: expected {op.name} to have a derivative of its own, got {actual}"
        )
    sources = [_source(op, sibling, name) for name in sibling.argument_names]
    taken = tuple(i for kind, i in sources if kind == "tangent")
    if not taken:
        expected = listed([f"tangent_{name}" for name in op.tensor_names])
        raise ManifestError(f"{sibling.qualname}: expected an argument {expected}, got none")
    for i in taken:
        if (name := op.argument_names[i]) in op.no_gradient:
            raise ManifestError(
                f"{sibling.qualname}: argument 'tangent_{name}': expected none, as .no_gradient"
                f'("{name}") says that the argument has no derivative; remove one of them'
            )
    targets = [_target(op, sibling, value.name or "") for value in sibling.parsed.returns]
    if op.signature is not None:
        groups = {
            "output": dict(enumerate(op.signature.outputs)),
            "input": dict(zip(op.tensor_positions, op.signature.inputs, strict=True)),
        }
        groups["tangent"] = groups["input"]
        given = [sources[i] for i in sibling.tensor_positions]
        compare_lines(
            op, sibling, [groups[kind][i] for kind, i in given],
            [groups["output"][i] for i in targets],
        )  # fmt: skip
    compare_kernels(op, sibling)
    optional = [str(argument.type).startswith("Optional") for argument in sibling.parsed.arguments]

    def rule(values: _Values, outputs: _Values, tangents: _Values) -> list[Any]:
        def passed(kind: str, i: int, may_miss: bool) -> Any:
            if kind != "tangent":
                return (values if kind == "input" else outputs)[i]
            if tangents[i] is None and not may_miss and values[i] is not None:
                return torch.zeros_like(values[i])
            return tangents[i]

        arguments = [passed(*s, may) for s, may in zip(sources, optional, strict=True)]
        positional, keywords = split(sibling, arguments)
        results = sibling.function(*positional, **keywords)
        results = results if isinstance(results, (tuple, list)) else (results,)
        found: list[Any] = [None] * len(outputs)
        for i, result in zip(targets, results, strict=True):
            found[i] = result
        return found

    return ForwardMode(taken, rule)


def _source(op: OpSpec, sibling: OpSpec, name: str) -> tuple[str, int]:
    """Returns where an argument of ``<op>_jvp`` comes from, and the position there."""
    tangents = {f"tangent_{op.argument_names[i]}": i for i in op.tensor_positions}
    found = [("input", i) for i, known in enumerate(op.argument_names) if known == name]
    found += [("output", i) for i, known in enumerate(op.output_names) if known == name]
    found += [("tangent", tangents[name])] if name in tangents else []
    if len(found) == 1:
        return found[0]
    what = "means two things" if found else "is unknown"
    raise ManifestError(
        f"{sibling.qualname}: argument '{name}' {what}; allowed: inputs "
        f"{listed(op.argument_names)}, outputs {listed(op.output_names)}, tangents "
        f"{listed(list(tangents))}. Rename it, or name the returns of {op.name}."
    )


def _target(op: OpSpec, sibling: OpSpec, name: str) -> int:
    """Returns the position of the output that a return of ``<op>_jvp`` is the tangent of."""
    outputs = [output for output in op.output_names if output not in op.constants]
    for output in outputs:
        if name == f"tangent_{output}" or (not name and len(outputs) == 1):
            return op.output_names.index(output)
    called = f"return '{name}' is unknown" if name else "an unnamed return"
    raise ManifestError(
        f"{sibling.qualname}: {called}; name each return after the output it belongs to: "
        f"{listed([f'tangent_{output}' for output in outputs])}"
    )


# --- derived --------------------------------------------------------------------------


def _linear_term(
    op: OpSpec, position: int, values: _Values, outputs: _Values, tangent: torch.Tensor
) -> list[Any]:
    positional, keywords = split(op, [*values[:position], tangent, *values[position + 1 :]])
    found = op.function(*positional, **keywords)
    found = found if isinstance(found, (tuple, list)) else (found,)
    return [
        term if name not in op.constants and _is_differentiable(term) else None
        for name, term in zip(op.output_names, found, strict=True)
    ]


def _elementwise(op: OpSpec, autograd: Autograd | None) -> list[int]:
    """Returns the positions of the arguments whose derivative is their gradient."""
    if op.signature is None or not is_elementwise(op) or autograd is None:
        return []
    if isinstance(autograd.backward, NoGradient):
        return []
    if any("List[Tensor]" in str(argument.type) for argument in op.parsed.arguments):
        return []
    inputs = op.tensor_positions if autograd.inputs is None else autograd.inputs
    return [i for i in inputs if op.argument_names[i] not in (*op.no_gradient, op.random)]


@dataclass(frozen=True)
class _Elementwise:
    """Calls the gradient with a tangent in place of ``grad_<output>``: the Jacobian of one element
    by one element is a number, so that both products with it are the same.
    """

    autograd: Autograd

    def __call__(
        self, op: OpSpec, position: int, values: _Values, outputs: _Values, tangent: torch.Tensor
    ) -> list[Any]:
        if tangent.is_complex() or any(output.is_complex() for output in outputs):
            raise NotImplementedError(
                f"{op.qualname}: argument {op.argument_names[position]!r}: expected a real tangent "
                f"and a real result, got a complex one; add {op.name}_jvp(...) to {op.declared_in}"
            )
        # A formula may sum to the shape of an input that is broadcast, so none is.
        shape = outputs[0].shape
        whole = [
            value.expand(shape) if isinstance(value, torch.Tensor) and name != op.random else value
            for name, value in zip(op.argument_names, values, strict=True)
        ]
        positional, keywords = split(op, whole)
        found: list[Any] = []
        for name, output in zip(op.output_names, outputs, strict=True):
            if name in op.constants or not _is_differentiable(output):
                found.append(None)
                continue
            ctx = _Context(tuple(i == position for i in range(len(positional))))
            extra = {"keyword_only_inputs": keywords} if keywords else {}
            output_or_all = outputs[0] if len(outputs) == 1 else tuple(outputs)
            self.autograd.setup_context(ctx, tuple(positional), output_or_all, **extra)
            grads = [torch.zeros_like(other) if other is not output else None for other in outputs]
            grads = [
                tangent.to(output.dtype).expand(shape) if grad is None else grad for grad in grads
            ]
            results = self.autograd.backward(ctx, *grads)
            results = results if isinstance(results, (tuple, list)) else (results,)
            found.append(results[position].to(output.dtype))
        return found


class _Context:
    """The ``ctx`` of one call of a gradient's formula, outside of autograd."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_non_differentiable(self, *outputs: torch.Tensor) -> None: ...

    def maybe_clear_saved_tensors(self) -> None: ...
