"""What a binding says of gradients and to torch's compilers: ``.hidden``, ``.no_gradient``,
``.linear``, ``.tag``, ``.nondeterministic`` and ``.broadcast``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuda_ops.dispatch.schema_types import schema_type
from cuda_ops.errors import ManifestError
from cuda_ops.signature import Signature
from cuda_ops.spec import output_names

#: The tags of torch that say something of one operator's kernels. The others follow from its
#: schema, or belong to torch's own operators.
TAGS = (
    "cudagraph_unsafe", "data_dependent_output", "dynamic_output_shape", "flexible_layout",
    "needs_contiguous_strides", "needs_exact_strides", "needs_fixed_stride_order",
    "nondeterministic_bitwise", "nondeterministic_seeded", "pointwise", "reduction",
)  # fmt: skip
_DEVICES = ("", "cpu", "cuda")


def words_of(
    name: str,
    entry: dict[str, Any],
    parsed: torch._C.FunctionSchema,
    signature: Signature | None,
    composed: bool,
) -> dict[str, Any]:
    """Returns the fields of an ``OpSpec`` that these words set; ``name`` has its namespace.

    Raises:
        ManifestError: a word names what the operator does not have, or contradicts another one.
    """
    outputs = output_names(parsed.returns)
    tensors = [a.name for a in parsed.arguments if "Tensor" in str(a.type)]
    hidden, no_gradient, linear, tags, devices = (
        tuple(entry[key]) for key in ("hidden", "no_gradient", "linear", "tags", "nondeterministic")
    )
    _check_each(name, ".hidden", hidden, outputs, "return")
    shown = len(outputs) - len(hidden)
    if hidden and (not shown or set(outputs[shown:]) != set(hidden)):
        expected = "the results that cuda_ops returns before those that are hidden"
        raise refusal(name, hidden[0], expected, str(parsed).partition("-> ")[2], "return")
    _check_each(name, ".no_gradient", no_gradient, (*tensors, *outputs))
    for both in (one for one in no_gradient if one in tensors and one in outputs):
        raise refusal(name, both, "an output of another name, as .no_gradient would mean both",
                      repr(both))  # fmt: skip
    # What writes has no derivative, and no tangent of a list reaches an operator.
    single = [
        a.name
        for a in parsed.arguments
        if schema_type(a) in ("Tensor", "Tensor?") and not parsed.is_mutable
    ]
    for both in (argument for argument in linear if argument in no_gradient):
        expected = ".linear or .no_gradient, as the latter says that there is no derivative"
        raise refusal(name, both, expected, "both")
    _check_each(name, ".linear", linear, single)
    known = [tag for tag in TAGS if hasattr(torch.Tag, tag)]
    for tag in tags:
        if tag not in TAGS:
            raise ManifestError(f"{name}: .tag: expected one of {', '.join(known)}, got {tag!r}")
    for device in devices:
        if device not in _DEVICES:
            raise ManifestError(
                f'{name}: .nondeterministic: expected "cpu", "cuda" or nothing for '
                f"both, got {device!r}"
            )
    if composed and (no_gradient or linear or tags or devices):
        raise ManifestError(
            f"{name}: expected a composed operator without .no_gradient, .linear, .tag "
            "and .nondeterministic, as these follow from its parts, got one with them"
        )
    if entry["broadcast"]:
        loops = sum(group.loops for group in signature.inputs) if signature is not None else 0
        if composed or loops < 2:
            actual = "a composed one" if composed else f"{entry['signature']!r}"
            raise ManifestError(
                f"{name}: .broadcast: expected an operator with kernels and a signature "
                f"line in which several tensors have loop dims, got {actual}"
            )
    return {
        "hidden": hidden, "linear": linear,
        "no_gradient": tuple(one for one in no_gradient if one in tensors),
        "no_gradient_outputs": tuple(one for one in no_gradient if one in outputs),
        # An older torch lacks some of them, and with them what they ask for.
        "tags": tuple(tag for tag in dict.fromkeys(tags) if tag in known),
        "nondeterministic": devices,
    }  # fmt: skip


def _check_each(
    op: str, call: str, names: Sequence[str], known: Sequence[str], what: str = "argument"
) -> None:
    for i, name in enumerate(names):
        if name not in known:
            raise refusal(op, name, may_name(call, known), repr(name), what)
        if name in names[:i]:
            raise refusal(op, name, f"to be named once by {call}", "twice", what)


def may_name(call: str, known: Sequence[str]) -> str:
    """Returns what a call of the binding expects: one of these names."""
    return f"{' or '.join(map(repr, known)) or 'nothing'}, which {call} may name"


def refusal(
    op: str, name: str, expected: str, actual: str, what: str = "argument"
) -> ManifestError:
    """Returns the error of a binding that names an argument, or what else ``what`` says. ``op`` has
    its namespace.
    """
    return ManifestError(f"{op}: {what} {name!r}: expected {expected}, got {actual}")
