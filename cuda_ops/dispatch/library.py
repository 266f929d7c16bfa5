"""An operator's shared library: open it, read its manifest, believe nothing unchecked.

Opening registers nothing. The manifest lists schemas, signature lines, dtypes, ranges,
and for every kernel its C++ types, since the stable ABI itself checks only how
many arguments there are: an ``int`` read as a ``double`` would go unnoticed.
C++ then gets the rules to check at each call, from :mod:`cuda_ops.dispatch.check_rules`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import keyword
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuda_ops.build.discovery import illegal_name
from cuda_ops.dispatch.check_rules import MOST_NAMES, Rules, rules_of
from cuda_ops.errors import ManifestError
from cuda_ops.signature import Signature, parse_signature
from cuda_ops.spec import OpSpec, Range, ResultDType, output_names

#: The form of the manifest, and of what a library is handed, as ``src/utils/manifest.h`` has it.
FORMAT = 3
#: The rules that libraries check by; they stay for the life of the process, like the libraries.
_kept: list[Rules] = []


class _Host(ctypes.Structure):
    """``cuda_ops::Host`` in src/utils/launch.h."""

    _fields_ = [("current_cuda_stream", ctypes.c_void_p)]


@dataclass(frozen=True)
class Kernel:
    """One C++ function under one dispatch key; addresses are in this process."""

    op: str
    key: str
    call: int
    trampoline: int
    slot: int


@dataclass(frozen=True)
class Library:
    """An opened and validated operator library. It is never closed: graphs may hold its code."""

    path: Path
    stem: str
    archs: str
    source_hash: str
    ops: dict[str, OpSpec]
    kernels: tuple[Kernel, ...]
    _handle: ctypes.CDLL

    def register(self, kernel: Kernel) -> None:
        """Gives the dispatcher the trampoline of a kernel, for the life of the process."""
        if self._handle.cuda_ops_register(
            kernel.op.encode(), kernel.key.encode(), ctypes.c_void_p(kernel.trampoline)
        ):
            raise ManifestError(f"{self.path}: torch refused {kernel.key} kernel of {kernel.op!r}")

    def store(self, slot: int, call: int) -> None:
        """Points a slot, of this library or of an older one, at a function (0: at nothing)."""
        self._handle.cuda_ops_store(ctypes.c_void_p(slot), ctypes.c_void_p(call))


def open_library(path: Path, stem: str) -> Library:
    """Opens ``path`` and checks its manifest.

    Raises:
        ManifestError: the file does not load, or schema, signature line and C++
            types contradict each other. The message names operator and argument.
    """
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise ManifestError(
            f"{stem}: {path.name} does not load: {_explain(str(error), stem)}"
        ) from error
    try:
        manifest_function = handle.cuda_ops_manifest
    except AttributeError:
        raise ManifestError(
            f"{stem}: {path.name} has no manifest; write CUDA_OPS(library)"
        ) from None
    manifest_function.restype = ctypes.c_char_p
    handle.cuda_ops_register.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
    handle.cuda_ops_store.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    handle.cuda_ops_store.restype = None
    manifest: dict[str, Any] = json.loads(manifest_function(ctypes.byref(_host())).decode())
    if manifest["format"] != FORMAT:
        raise ManifestError(
            f"{stem}: {path.name}: expected a manifest of format {FORMAT}, got "
            f"{manifest['format']}: another version of cuda_ops built it; build it again"
        )
    handle.cuda_ops_check.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    handle.cuda_ops_check.restype = None
    ops: dict[str, OpSpec] = {}
    kernels: list[Kernel] = []
    slots: dict[int, tuple[str, str]] = {}
    for entry in manifest["ops"]:
        op = _validated(entry, stem, ops)
        ops[op.name] = op
        _kept.append(rules_of(op))
        handle.cuda_ops_check(entry["checks"], ctypes.byref(_kept[-1]))
        for kernel in entry["kernels"]:
            other, key = slots.setdefault(kernel["slot"], (op.name, kernel["key"]))
            if (other, key) != (op.name, kernel["key"]):
                raise ManifestError(
                    f"cuda_ops::{op.name}: its {kernel['key']} function also serves {other!r} as "
                    f"its {key} function; give each operator a function of its own on each device"
                )
            kernels.append(
                Kernel(op.name, kernel["key"], kernel["call"], kernel["trampoline"], kernel["slot"])
            )
    if stem not in ops:
        raise ManifestError(
            f"{stem}.cpp defines {', '.join(sorted(ops)) or 'no operator'}; expected {stem!r}"
        )
    return Library(
        path, stem, manifest["archs"], manifest["source_hash"], ops, tuple(kernels), handle
    )


@functools.cache
def _host() -> _Host:
    cuda = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    if not cuda.exists():
        return _Host(None)
    function = ctypes.CDLL(str(cuda)).aoti_torch_get_current_cuda_stream
    return _Host(ctypes.cast(function, ctypes.c_void_p))


def _explain(error: str, stem: str) -> str:
    if "undefined symbol" in error:
        symbol = error.rsplit("undefined symbol:", 1)[-1].strip()
        if not symbol.startswith("_Z") and stem not in symbol:  # a C function of others
            return (
                f"undefined symbol {symbol}; define it in {stem}.cu or {stem}.cpp, or name the "
                "library that has it in LDFLAGS, such as LDFLAGS=-lz"
            )
        return (
            f"undefined symbol {symbol}; declare the launcher in {stem}.cpp exactly as {stem}.cu "
            "defines it, and keep the binding's functions in an anonymous namespace"
        )
    return error


#: Keywords of the functions that torch calls with an operator's keyword-only arguments, and of
#: those of torch.compile, which call one that writes with keywords alone.
_TORCH_S_OWN = ("keyset", "out_shape", "self")
_TORCH_S_OWN_WHERE_WRITTEN = ("dispatch_key", "mode")


def _validated(entry: dict[str, Any], stem: str, siblings: dict[str, OpSpec]) -> OpSpec:
    schema: str = entry["schema"]
    try:
        parsed = torch._C.parse_schema(f"cuda_ops::{schema}")
    except RuntimeError as error:
        raise ManifestError(
            f"{stem}.cpp: schema {schema!r} does not parse: {str(error).strip()}"
        ) from None
    name = parsed.name.removeprefix("cuda_ops::")
    if name != stem and not name.startswith(f"{stem}_"):
        raise ManifestError(
            f"{stem}.cpp: operator {name!r} must be named {stem!r} or start with '{stem}_', "
            "so that the file name leads to it"
        )
    if problem := illegal_name(name, "choose another"):
        raise ManifestError(f"{stem}.cpp: {problem}")
    if name in siblings:
        raise ManifestError(f"{stem}.cpp: operator {name!r} is defined twice")
    for argument in parsed.returns:
        if argument.alias_info is not None:
            raise ManifestError(
                f"cuda_ops::{name}: schema {schema!r}: expected returns that are new tensors, got "
                "one with (a); return nothing, '-> ()': the caller has what is written"
            )
    for argument in parsed.arguments:
        if argument.alias_info is not None and not argument.alias_info.is_write:
            raise ManifestError(
                f"cuda_ops::{name}: argument {argument.name!r}: expected a type without (a), or "
                f"(a!) for one that is written, got {schema!r}"
            )
    writes = parsed.is_mutable
    for argument in parsed.arguments:
        if argument.kwarg_only and "Tensor" in str(argument.type) and not writes:
            raise ManifestError(
                f"cuda_ops::{name}: argument {argument.name!r}: expected a tensor to be before the "
                f"'*', got {schema!r}, which torch.vmap cannot map"
            )
    for argument in parsed.arguments:
        if keyword.iskeyword(argument.name):
            expected, actual = "a name that Python can pass", "one of its keywords"
            raise _refusal(name, argument.name, expected, actual)
        if argument.name.startswith("_"):  # so are the names that the public function needs itself
            expected = "a name that does not start with an underscore"
            raise _refusal(name, argument.name, expected, repr(argument.name))
        if (argument.kwarg_only and argument.name in _TORCH_S_OWN) or (
            writes and argument.name in _TORCH_S_OWN_WHERE_WRITTEN
        ):
            expected = "another name, as torch passes a keyword of this one"
            raise _refusal(name, argument.name, expected, repr(argument.name))
    _refuse_form(name, schema, parsed, entry["kernels"])
    arguments = [schema_type(argument) for argument in parsed.arguments]
    returns = [schema_type(value) for value in parsed.returns]
    for kernel in entry["kernels"]:
        _compare(name, kernel, arguments, returns, [a.name for a in parsed.arguments])
    if not entry["kernels"] and not entry["has_cuda"]:
        raise ManifestError(
            f"cuda_ops::{name}: no kernel; add .cpu<f>(), .cuda<f>() or .composite<f>()"
        )
    names = [argument.name for argument in parsed.arguments]
    tensors, ints, scalar_types = (
        [n for n, t in zip(names, arguments, strict=True) if t in (kind, f"{kind}?")]
        for kind in ("Tensor", "int", "ScalarType")
    )
    signature = _signature(name, entry["signature"], arguments, returns, ints)
    listed = _by_name(name, ".dtypes", entry["dtypes_of"], (*tensors, *scalar_types))
    dtypes_of = {argument: _dtypes(dtypes) for argument, dtypes in listed.items()}
    indices = [
        argument
        for argument in tensors
        if all(map(_is_integer, dtypes_of.get(argument, _dtypes(entry["dtypes"])) or (torch.half,)))
    ]
    op = OpSpec(
        name=name,
        stem=stem,
        schema=schema,
        parsed=parsed,
        signature=signature,
        dtypes=_dtypes(entry["dtypes"]),
        doc=entry["doc"],
        keys=tuple(kernel["key"] for kernel in entry["kernels"]),
        has_cuda=entry["has_cuda"],
        calls=tuple(entry["calls"]),
        siblings=siblings,
        dtypes_of=dtypes_of,
        ranges=_ranges(name, entry["ranges"], ints, signature),
        limits=_dims_by_name(name, ".at_most", entry["limits"], ints, signature),
        saved=tuple(entry["saved"]),
        results=_results(
            name, entry["results"], output_names(parsed.returns), (*tensors, *scalar_types)
        ),
        belows=_dims_by_name(name, ".below", entry["belows"], indices, signature),
    )
    for output in op.saved:
        if output not in op.output_names:
            expected = _may_name(".saved", op.output_names)
            raise ManifestError(f"{op.qualname}: expected {expected}, got {output!r}")
    return op


def _refuse_form(
    name: str, schema: str, parsed: torch._C.FunctionSchema, kernels: Sequence[dict[str, Any]]
) -> None:
    """Refuses what torch parses but cannot define, differentiate or call."""
    returns = output_names(parsed.returns)
    counts = Counter(a.name for a in parsed.arguments) | Counter(returns)
    twice = [repeated for repeated, count in counts.items() if count > 1]
    composed = any(kernel["key"] == "CompositeImplicitAutograd" for kernel in kernels)
    expected = actual = ""
    if parsed.overload_name:
        expected = "a name without a dot"
        actual = f"overload {parsed.overload_name!r}; write {name}_{parsed.overload_name}"
    elif "..." in schema:
        expected, actual = "every argument and return by name", "'...'"
    elif twice:
        expected, actual = "names that differ", f"{twice[0]!r} twice"
    elif not returns and not parsed.is_mutable:
        expected = "a return, as torch can neither differentiate nor compile a call without one"
        actual = "'()'; write '-> Tensor', or (a!) after the type of what the operator writes"
    elif composed and parsed.is_mutable:
        expected, actual = "a composed operator to write nothing", "(a!)"
    elif not composed and not any("Tensor" in str(a.type) for a in parsed.arguments):
        expected = "a tensor argument, whose device says which kernel to call"
        actual = "none; add one, such as 'Tensor like'"
    if expected:
        raise ManifestError(
            f"cuda_ops::{name}: schema {schema!r}: expected {expected}, got {actual}"
        )


def _dtypes(names: Sequence[str]) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in names)


def _by_name(
    op: str,
    call: str,
    listed: Sequence[Sequence[Any]],
    known: Sequence[str],
    what: str = "argument",
) -> dict[str, Any]:
    """Returns the values of each ``[name, *values]``; refuses unknown and repeated names."""
    found: dict[str, Any] = {}
    for name, *values in listed:
        if name not in known:
            raise _refusal(op, name, _may_name(call, known), repr(name), what)
        if name in found:
            raise _refusal(op, name, f"to be named once by {call}", "twice", what)
        found[name] = values[0] if len(values) == 1 else values
    return found


def _ranges(
    op: str, listed: Sequence[Sequence[Any]], ints: Sequence[str], signature: Signature | None
) -> dict[str, Range]:
    dims = signature.names if signature is not None else ()
    for name, least, most in listed:
        if name in dims and name in ints:
            raise _refusal(op, name, "a dim of another name, as .range would mean both", repr(name))
        if least > most:
            raise _refusal(op, name, "the smaller number first in .range", f"{least}, {most}")
    found = _by_name(op, ".range", listed, (*ints, *dims))
    return {name: Range(*limits) for name, limits in found.items()}


def _dims_by_name(
    op: str,
    call: str,
    listed: Sequence[Sequence[Any]],
    arguments: Sequence[str],
    signature: Signature | None,
) -> dict[str, str]:
    """Returns the dim of the signature line that each of these arguments is bound to."""
    dims = signature.names if signature is not None else ()
    found = _by_name(op, call, listed, arguments)
    for name, dim in found.items():
        if dim not in dims:
            raise _refusal(op, name, _may_name(call, dims), repr(dim))
    return found


def _results(
    op: str, listed: Sequence[Sequence[str]], outputs: Sequence[str], arguments: Sequence[str]
) -> dict[str, ResultDType]:
    results = {}
    for name, (like, dtype) in _by_name(op, ".returns", listed, outputs, "return").items():
        if like and like not in arguments:
            raise _refusal(op, name, _may_name(".returns", arguments), repr(like), "return")
        results[name] = ResultDType(like, getattr(torch, dtype) if dtype else None)
    return results


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _may_name(call: str, known: Sequence[str]) -> str:
    return f"{' or '.join(map(repr, known)) or 'nothing'}, which {call} may name"


def _refusal(
    op: str, name: str, expected: str, actual: str, what: str = "argument"
) -> ManifestError:
    return ManifestError(f"cuda_ops::{op}: {what} {name!r}: expected {expected}, got {actual}")


def schema_type(argument: torch._C.Argument) -> str:
    """Returns the type as a schema spells it: ``Tensor``, ``float?``, ``int[]``."""
    text = str(argument.real_type)  # type calls every enum an int
    if text.startswith("Optional["):
        return text[len("Optional[") : -1] + "?"
    if text.startswith("List["):
        return text[len("List[") : -1] + "[]"
    return text


def _compare(
    op: str, kernel: dict[str, Any], arguments: list[str], returns: list[str], names: list[str]
) -> None:
    """Refuses a C++ function whose types are not the schema's, position by position."""
    for what, declared, bound in (
        ("argument", arguments, kernel["arguments"]),
        ("return", returns, kernel["returns"]),
    ):
        if len(declared) != len(bound):
            raise ManifestError(
                f"cuda_ops::{op}: the schema has {len(declared)} {what}s, the C++ function for "
                f"{kernel['key']} has {len(bound)}"
            )
        for i, (expected, actual) in enumerate(zip(declared, bound, strict=True)):
            if expected == actual:
                continue
            label = f"{what} {names[i]!r}" if what == "argument" else f"return {i}"
            if expected.rstrip("?[]") not in (*_SCALARS, "ScalarType"):  # torch takes any word
                known = ", ".join(_SCALARS)
                raise ManifestError(
                    f"cuda_ops::{op}: {label} is {expected} in the schema, which no binding can "
                    f"have; known: {known}, each also with ? or [], and ScalarType, also with ?"
                )
            raise ManifestError(
                f"cuda_ops::{op}: {label} is {expected} in the schema ({_cpp(expected)} in C++), "
                f"but the C++ function for {kernel['key']} has {_cpp(actual)}; change one of them"
            )


_SCALARS = {"int": "int64_t", "float": "double", "bool": "bool", "Tensor": "Tensor"}


def _cpp(schema: str) -> str:
    if schema.endswith("?"):
        return f"std::optional<{_SCALARS.get(schema[:-1], schema[:-1])}>"
    if schema.endswith("[]"):
        return f"std::vector<{_SCALARS.get(schema[:-2], schema[:-2])}>"
    return _SCALARS.get(schema, schema)


def _signature(
    op: str, text: str, arguments: list[str], returns: list[str], ints: Sequence[str]
) -> Signature | None:
    if not text:
        return None
    try:
        signature = parse_signature(text, ints)
    except ValueError as error:
        raise ManifestError(f"cuda_ops::{op}: {error}") from None
    if len(signature.names) > MOST_NAMES:
        raise ManifestError(
            f"cuda_ops::{op}: signature {text!r}: expected at most {MOST_NAMES} names, got "
            f"{len(signature.names)}"
        )
    for what, groups, types in (
        (
            "tensor arguments",
            signature.inputs,
            [t for t in arguments if t in ("Tensor", "Tensor?")],
        ),
        ("outputs", signature.outputs, returns),
    ):
        if len(groups) != len(types):
            raise ManifestError(
                f"cuda_ops::{op}: signature {text!r} has {len(groups)} {what}, the schema has "
                f"{len(types)}"
            )
    return signature
