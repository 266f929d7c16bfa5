"""Names operators, and their arguments, in what torch says of a call."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from cuda_ops.derive.checks import refusal
from cuda_ops.spec import OpSpec

#: How torch refuses an argument that it cannot convert; the argument itself follows, printed.
_NOT_CONVERTED = re.compile(
    r"(\S+)\(\) Expected a value of type '(.+?)' for argument '(\w+)' but instead found type"
)
#: How operators refuse an argument.
_REFUSED = re.compile(r"(\w+)::(\w+): argument '(\w+)")
#: What errors call the types of schemas.
_WORDS = {
    "Tensor": "a tensor", "List[Tensor]": "a list of tensors", "float": "a number",
    "number": "a number", "int": "an int", "List[int]": "a list of ints", "bool": "a bool",
    "str": "a str", "Device": "a device",
}  # fmt: skip


@contextlib.contextmanager
def named(op: OpSpec) -> Iterator[None]:
    """Names the operator in an error that does not: torch knows the function of its own that
    failed, a cast or a reshape, which the caller has never called.
    """
    try:
        yield
    except RuntimeError as error:
        raise_named(op, error)


def raise_named(op: OpSpec, error: RuntimeError) -> NoReturn:
    """Raises an error again, with the operator's name in front if it is not in it."""
    # These two are what torch raises for a dtype or device that a function of its own lacks. Others
    # mean something to callers: what torch.utils.checkpoint raises, out of memory.
    if type(error) not in (RuntimeError, NotImplementedError) or op.name in str(error):
        raise error
    raise type(error)(f"{op.qualname}: {error}") from error


def retell(op: OpSpec, error: RuntimeError, values: Sequence[Any]) -> None:
    """Raises an error that names operator, argument, what was expected and what was given in the
    place of torch's for an argument of a wrong type, which prints the argument. Returns from any
    other.

    Args:
        op: the operator.
        error: what a call of it raised.
        values: the arguments of the call, all in the order of the schema.
    """
    found = _NOT_CONVERTED.match(str(error))
    if found and found[1] == op.qualname:
        optional = re.fullmatch(r"Optional\[(.+)\]", found[2])
        kind = optional[1] if optional else found[2]
        expected = _WORDS.get(kind, kind) + (" or None" if optional else "")
        value = values[op.argument_names.index(found[3])]
        actual = _type_of(value)
        if actual == "int" and expected.startswith(("an int", "a number")):  # too large a one
            expected = expected.replace("an int", "an int of 64 bits")
            expected = expected.replace("a number", "a number that a float64 holds")
            actual = str(value) if value.bit_length() <= 128 else f"{value.bit_length()} bits"
        raise RuntimeError(refusal(op, found[3], expected, actual)) from None


def retell_part(op: OpSpec, arguments: Collection[str], error: RuntimeError) -> None:
    """Raises an error in the name of the operator that was called, where another one that it calls
    refused an argument of the same name. Returns from any other.

    Args:
        op: the operator that was called.
        arguments: the names of its arguments, as its public function has them.
        error: what a call of it raised.
    """
    found = _REFUSED.match(str(error))
    # Arguments are refused by a plain RuntimeError, tangents by the other; what derives from them,
    # such as out of memory, means something to callers.
    if (
        found
        and type(error) in (RuntimeError, NotImplementedError)
        and (found[1], found[3] in arguments) == (op.namespace, True)
        and found[2] != op.name
    ):
        raise type(error)(op.qualname + str(error)[found.end(2) :]) from None


def _type_of(value: Any) -> str:
    """Returns what errors call a value of the wrong type."""
    if value is None:
        return "None"
    name = type(value).__name__
    if isinstance(value, (list, tuple)) and value:
        return f"{name} of {', '.join(sorted({_type_of(one) for one in value}))}"
    return name
