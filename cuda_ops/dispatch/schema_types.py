"""The types of a schema beside those of the C++ functions: which there are, and whether they agree.

``src/utils/entry.h`` lists the same ones (``SchemaType``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from cuda_ops.errors import ManifestError

#: C++ types by the words of a schema. Only arguments may be optional.
_CPP = {
    "Tensor": "Tensor", "int": "int64_t", "float": "double", "bool": "bool",
    "str": "std::string", "ScalarType": "ScalarType", "Device": "Device",
}  # fmt: skip
#: The forms beside a word alone and, as an argument, with ``?``.
_ARGUMENT_FORMS = (
    "Tensor[]", "Tensor?[]", "int[]", "float[]", "bool[]", "int[]?", "float[]?", "bool[]?",
)  # fmt: skip
_RETURNS = ("Tensor", "Tensor[]", "int")

#: What to write instead of types that torch knows and its stable ABI cannot pass, or that no kernel
#: needs.
_INSTEAD = {
    "number": "'float', or 'Tensor' without dims where a gradient or an exact integer matters",
    "number?": "'float?', or 'Tensor?'",
    "number[]": "'float[]', or a 'Tensor' with one dim",
    "complex": "two of 'float', or a complex 'Tensor' without dims",
    "str[]": "one 'str' for each, or an 'int[]' of indices",
    "ScalarType[]": "one 'ScalarType' for each",
    "Device[]": "one 'Device' for each",
    "Tensor[]?": "'Tensor[]', for which a caller passes [] where there is none",
    "Layout": "nothing: every tensor of a kernel is strided",
    "MemoryFormat": "a 'bool' or a 'str' with .one_of",
    "Generator": "a 'Tensor' that is .random, which the public function draws",
    "Stream": "nothing: launch() passes on the current stream",
    "Dict": "one argument for each value",
    "Tuple": "one argument for each value",
}
_INSTEAD_OF_RETURN = {
    "Tensor?": "'Tensor', without elements where there is none",
    "float": "'Tensor' without dims: torch.compile can pass on no other float",
    "bool": "an 'int' that is 0 or 1, or a 'Tensor' without dims",
    "str": "an 'int' that numbers the names",
    "int[]": "one 'int' for each, or a 'Tensor' with one dim",
    "float[]": "a 'Tensor' with one dim",
    "bool[]": "a 'Tensor' with one dim",
}


def schema_type(argument: torch._C.Argument) -> str:
    """Returns the type as a schema spells it: ``Tensor``, ``float?``, ``int[]``, ``Tensor?[]``."""
    return _spelled(str(argument.real_type))  # type calls every enum an int


def _spelled(text: str) -> str:
    for before, after in (("Optional[", "?"), ("List[", "[]")):
        if text.startswith(before):
            return _spelled(text[len(before) : -1]) + after
    return text


def refuse_types(op: str, parsed: torch._C.FunctionSchema) -> None:
    """Refuses types that no C++ function of a binding can have, and says what to write instead.
    ``op`` has its namespace.
    """
    for argument in parsed.arguments:
        kind = schema_type(argument)
        if kind.removesuffix("?") not in _CPP and kind not in _ARGUMENT_FORMS:
            known = ", ".join((*_CPP, *_ARGUMENT_FORMS))
            _refuse(
                op, f"argument {argument.name!r}", kind, _INSTEAD, f"{known}; each word also with ?"
            )
    for i, value in enumerate(parsed.returns):
        kind = schema_type(value)
        if kind not in _RETURNS:
            what = f"return {value.name!r}" if value.name else f"return {i}"
            _refuse(op, what, kind, _INSTEAD_OF_RETURN, ", ".join(_RETURNS))


def _refuse(op: str, what: str, kind: str, instead: dict[str, str], known: str) -> None:
    shown = kind.replace("number", "Scalar")
    way = instead.get(kind) or instead.get(kind.partition("[")[0].rstrip("?"))
    hint = f"write {way}" if way else f"known: {known}"
    raise ManifestError(f"{op}: {what} is {shown} in the schema, which no binding can have; {hint}")


def compare(
    op: str,
    kernel: dict[str, Any],
    arguments: list[str],
    returns: list[str],
    names: list[str],
    choices: Collection[str],
) -> None:
    """Refuses a C++ function whose types are not the schema's, position by position."""
    for what, declared, bound in (
        ("argument", arguments, kernel["arguments"]),
        ("return", returns, kernel["returns"]),
    ):
        if len(declared) != len(bound):
            raise ManifestError(
                f"{op}: the schema has {len(declared)} {what}s, the C++ function for "
                f"{kernel['key']} has {len(bound)}"
            )
        for i, (expected, actual) in enumerate(zip(declared, bound, strict=True)):
            label = f"{what} {names[i]!r}" if what == "argument" else f"return {i}"
            if actual == expected.replace("str", "enum") != expected and what == "argument":
                if names[i] not in choices:
                    raise ManifestError(
                        f"{op}: {label} is an enum in the C++ function for "
                        f'{kernel["key"]}: expected .one_of("{names[i]}", {{...}}) with the names '
                        "of its values in their order, got none"
                    )
                continue
            if expected != actual:
                raise ManifestError(
                    f"{op}: {label} is {expected} in the schema ({_cpp(expected)} in "
                    f"C++), but the C++ function for {kernel['key']} has {_cpp(actual)}; change "
                    "one of them"
                )


def _cpp(schema: str) -> str:
    for after, template in (("?", "optional"), ("[]", "vector")):
        if schema.endswith(after):
            return f"std::{template}<{_cpp(schema.removesuffix(after))}>"
    return _CPP.get(schema, schema)
