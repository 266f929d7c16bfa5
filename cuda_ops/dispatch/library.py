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
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cuda_ops.build.advice import dev_command
from cuda_ops.build.discovery import illegal_name
from cuda_ops.derive.checks import names_text
from cuda_ops.dispatch.check_rules import MOST_NAMES, Rules, rules_of
from cuda_ops.dispatch.schema_types import compare, refuse_types, schema_type
from cuda_ops.dispatch.words import may_name, refusal, words_of
from cuda_ops.errors import ManifestError
from cuda_ops.names import HOME, apart, keyed
from cuda_ops.signature import Group, Signature, factor_and_name, parse_signature
from cuda_ops.spec import (
    UNBOUNDED,
    FloatRange,
    OpSpec,
    Range,
    ResultDType,
    is_device,
    output_names,
)

#: The form of the manifest, and of what a library is handed, as ``src/utils/manifest.h`` has it.
FORMAT = 7
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
    #: What does the same by torch's own operators; 0 if nothing does.
    by_torch: int = 0


@dataclass(frozen=True)
class Library:
    """An opened and validated operator library. It is never closed: graphs may hold its code."""

    path: Path
    stem: str
    namespace: str
    archs: str
    source_hash: str
    ops: dict[str, OpSpec]
    kernels: tuple[Kernel, ...]
    #: What the library says of its operators, as JSON with addresses of this process.
    manifest: str
    _handle: ctypes.CDLL
    #: What only guests have: operators that are functions of a module, or registered already.
    calls: Mapping[str, Any] = field(default_factory=dict)
    registered: Mapping[str, OpSpec] = field(default_factory=dict)

    @property
    def pair(self) -> str:
        """The key of its pair."""
        return keyed(self.namespace, self.stem)

    def register(self, kernel: Kernel) -> None:
        """Gives the dispatcher the trampoline of a kernel, for the life of the process."""
        if self._handle.cuda_ops_register(
            kernel.op.encode(), kernel.key.encode(), ctypes.c_void_p(kernel.trampoline)
        ):
            raise ManifestError(f"{self.path}: torch refused {kernel.key} kernel of {kernel.op!r}")

    def store(self, slot: int, call: int) -> None:
        """Points a slot, of this library or of an older one, at a function (0: at nothing)."""
        self._handle.cuda_ops_store(ctypes.c_void_p(slot), ctypes.c_void_p(call))


def open_library(path: Path, stem: str, namespace: str = HOME) -> Library:
    """Opens ``path`` and checks its manifest; ``stem`` and ``namespace`` are those of the pair.

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
    text = manifest_function(ctypes.byref(_host())).decode()
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != FORMAT:
        raise ManifestError(
            f"{stem}: {path.name}: expected a manifest of format {FORMAT}, got "
            f"{manifest['format']}: another version of cuda_ops built it; "
            f"run {dev_command()} {stem}"
        )
    if manifest["namespace"] != namespace:
        raise ManifestError(
            f"{stem}: {path.name}: expected operators in the namespace {namespace!r}, as the text "
            f"of its root says, got {manifest['namespace']!r}"
        )
    handle.cuda_ops_check.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    handle.cuda_ops_check.restype = None
    ops: dict[str, OpSpec] = {}
    kernels: list[Kernel] = []
    served: dict[int, tuple[str, str]] = {}
    for entry in manifest["ops"]:
        op = validated(entry, stem, ops, namespace)
        ops[op.name] = op
        _kept.append(rules_of(op))
        handle.cuda_ops_check(entry["checks"], ctypes.byref(_kept[-1]))
        for kernel in entry["kernels"]:
            for function in filter(None, (kernel["call"], kernel["by_torch"])):
                other, key = served.setdefault(function, (op.name, kernel["key"]))
                if (other, key) != (op.name, kernel["key"]):  # it would check by one's rules alone
                    raise ManifestError(
                        f"{op.qualname}: its {kernel['key']} function also serves {other!r} as its "
                        f"{key} function; give each operator a function of its own on each device"
                    )
            addresses = (kernel[name] for name in ("call", "trampoline", "slot", "by_torch"))
            kernels.append(Kernel(op.name, kernel["key"], *addresses))
    if stem not in ops:
        raise ManifestError(
            f"{stem}.cpp defines {', '.join(sorted(ops)) or 'no operator'}; expected {stem!r}"
        )
    return Library(
        path,
        stem,
        namespace,
        manifest["archs"],
        manifest["source_hash"],
        ops,
        tuple(kernels),
        text,
        handle,
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


def parsed_schema(
    schema: str,
    stem: str,
    known: Collection[str],
    is_composed: bool,
    namespace: str = HOME,
    file: str = "",
) -> torch._C.FunctionSchema:
    """Parses a schema and checks what it says by itself.

    Args:
        schema: the schema, without a namespace.
        stem: the pair's name.
        known: operators that the pair has declared before.
        is_composed: whether the operator is made of others.
        namespace: the pair's namespace.
        file: where it stands, for errors; the binding without one.

    Raises:
        ManifestError: names operator and argument.
    """
    file = file or f"{stem}.cpp"
    try:
        parsed = torch._C.parse_schema(f"{namespace}::{schema}")
    except RuntimeError as error:
        raise ManifestError(
            f"{file}: schema {schema!r} does not parse: {str(error).strip()}"
        ) from None
    _, name = apart(qualname := parsed.name)
    if name != stem and not name.startswith(f"{stem}_"):
        raise ManifestError(
            f"{file}: operator {name!r} must be named {stem!r} or start with '{stem}_', "
            "so that the file name leads to it"
        )
    if problem := illegal_name(name, "choose another"):
        raise ManifestError(f"{file}: {problem}")
    if name in known:
        raise ManifestError(f"{file}: operator {name!r} is defined twice")
    if not parsed.overload_name:  # which _refuse_form refuses
        refuse_types(qualname, parsed)
    for argument in parsed.returns:
        if argument.alias_info is not None:
            raise ManifestError(
                f"{qualname}: schema {schema!r}: expected returns that are new tensors, got "
                "one with (a); return nothing, '-> ()': the caller has what is written"
            )
    for argument in parsed.arguments:
        if argument.alias_info is not None and not argument.alias_info.is_write:
            raise ManifestError(
                f"{qualname}: argument {argument.name!r}: expected a type without (a), or "
                f"(a!) for one that is written, got {schema!r}"
            )
    writes = parsed.is_mutable
    for argument in parsed.arguments:
        if argument.kwarg_only and "Tensor" in str(argument.type) and not writes:
            raise ManifestError(
                f"{qualname}: argument {argument.name!r}: expected a tensor to be before the "
                f"'*', got {schema!r}, which torch can neither map nor differentiate; a caller may "
                f"write {argument.name}=... there too"
            )
    for argument in parsed.arguments:
        if keyword.iskeyword(argument.name):
            expected, actual = "a name that Python can pass", "one of its keywords"
            raise refusal(qualname, argument.name, expected, actual)
        if argument.name.startswith("_"):  # so are the names that the public function needs itself
            expected = "a name that does not start with an underscore"
            raise refusal(qualname, argument.name, expected, repr(argument.name))
        if (argument.kwarg_only and argument.name in _TORCH_S_OWN) or (
            writes and argument.name in _TORCH_S_OWN_WHERE_WRITTEN
        ):
            expected = "another name, as torch passes a keyword of this one"
            raise refusal(qualname, argument.name, expected, repr(argument.name))
    _refuse_form(qualname, schema, parsed, is_composed)
    return parsed


def validated(
    entry: dict[str, Any],
    stem: str,
    siblings: dict[str, OpSpec],
    namespace: str = HOME,
    file: str = "",
) -> OpSpec:
    """Returns the operator that an entry of a manifest declares.

    Args:
        entry: as ``src/utils/manifest.h`` writes it; the C++ types of kernels are compared where
            it has them.
        stem: the pair's name.
        siblings: the operators that the pair has declared before.
        namespace: the pair's namespace.
        file: where it is declared, for errors; the binding without one.

    Raises:
        ManifestError: it contradicts itself; names operator and argument.
    """
    schema: str = entry["schema"]
    composed = any(kernel["key"] == "CompositeImplicitAutograd" for kernel in entry["kernels"])
    parsed = parsed_schema(schema, stem, siblings, composed, namespace, file)
    name = parsed.name  # for errors
    arguments = [schema_type(argument) for argument in parsed.arguments]
    returns = [schema_type(value) for value in parsed.returns]
    names = [argument.name for argument in parsed.arguments]
    choices = _choices(name, entry["choices"], parsed)
    for kernel in entry["kernels"]:
        if "arguments" in kernel:
            compare(name, kernel, arguments, returns, names, choices)
    if not entry["kernels"] and not entry["has_cuda"]:
        raise ManifestError(f"{name}: no kernel; add .cpu<f>(), .cuda<f>() or .composite<f>()")
    tensors, ints, floats, scalar_types = (
        [n for n, t in zip(names, arguments, strict=True) if t in (kind, f"{kind}?")]
        for kind in ("Tensor", "int", "float", "ScalarType")
    )
    signature = check_signature(name, entry["signature"], parsed)
    if (key := entry["random"]) and key not in tensors:
        raise refusal(name, key, may_name(".random", tensors), repr(key))
    listed = _by_name(name, ".dtypes", entry["dtypes_of"], (*tensors, *scalar_types))
    dtypes_of = {argument: _dtypes(dtypes) for argument, dtypes in listed.items()}
    limits, dim_limits = _limits(name, entry["limits"], ints, signature)
    indices = [
        argument
        for argument in tensors
        if all(map(_is_integer, dtypes_of.get(argument, _dtypes(entry["dtypes"])) or (torch.half,)))
    ]
    op = OpSpec(
        name=apart(name)[1],
        namespace=namespace,
        stem=stem,
        schema=schema,
        parsed=parsed,
        signature=signature,
        dtypes=_dtypes(entry["dtypes"]),
        doc=entry["doc"],
        keys=tuple(kernel["key"] for kernel in entry["kernels"]),
        has_cuda=entry["has_cuda"],
        by_torch=any(kernel.get("by_torch") for kernel in entry["kernels"]),
        calls=tuple(entry["calls"]),
        siblings=siblings,
        dtypes_of=dtypes_of,
        ranges=_ranges(name, entry["ranges"], ints, signature),
        float_ranges=_float_ranges(name, entry["float_ranges"], floats),
        limits=limits,
        dim_limits=dim_limits,
        saved=tuple(entry["saved"]),
        results=_results(
            name, entry["results"], output_names(parsed.returns), (*tensors, *scalar_types)
        ),
        belows=_dims_by_name(name, ".below", entry["belows"], indices, signature),
        choices=choices,
        random=entry["random"],
        **words_of(name, entry, parsed, signature, composed),
    )
    _refuse_without_dtype(op)
    if op.random:
        _refuse_key(op)
    for output in op.saved:
        if output not in op.output_names:
            expected = may_name(".saved", op.output_names)
            raise ManifestError(f"{op.qualname}: expected {expected}, got {output!r}")
    return op


def _refuse_form(name: str, schema: str, parsed: torch._C.FunctionSchema, composed: bool) -> None:
    """Refuses what torch parses but cannot define, differentiate or call."""
    returns = output_names(parsed.returns)
    counts = Counter(a.name for a in parsed.arguments) | Counter(returns)
    twice = [repeated for repeated, count in counts.items() if count > 1]
    expected = actual = ""
    if parsed.overload_name:
        expected = "a name without a dot"
        actual = f"overload {parsed.overload_name!r}; write {apart(name)[1]}_{parsed.overload_name}"
    elif "..." in schema:
        expected, actual = "every argument and return by name", "'...'"
    elif twice:
        expected, actual = "names that differ", f"{twice[0]!r} twice"
    elif not returns and not parsed.is_mutable:
        expected = "a return, as torch can neither differentiate nor compile a call without one"
        actual = "'()'; write '-> Tensor', or (a!) after the type of what the operator writes"
    elif returns and all(schema_type(value) == "int" for value in parsed.returns):
        expected = "a return that is a tensor, without which torch.compile cannot trace a call"
        actual = "int alone; return a 'Tensor' without dims, or compute it in Python"
    elif composed and parsed.is_mutable:
        expected, actual = "a composed operator to write nothing", "(a!)"
    elif not composed and not any("Tensor" in str(a.type) for a in parsed.arguments):
        devices = [argument.name for argument in parsed.arguments if is_device(argument)]
        if len(devices) != 1:
            expected = "a tensor argument or one of type Device, which say which kernel to call"
            actual = (
                f"{' and '.join(map(repr, devices)) or 'none'}; write one 'Device? device=None'"
            )
    if expected:
        raise ManifestError(f"{name}: schema {schema!r}: expected {expected}, got {actual}")


def _refuse_without_dtype(op: OpSpec) -> None:
    """Refuses an output whose dtype neither a tensor argument nor the binding says."""
    if op.device_position is None or op.signature is None:
        return
    for name in op.output_names:
        rule = op.results.get(name, ResultDType())
        optional = any(
            a.name == rule.like and schema_type(a).endswith("?") for a in op.parsed.arguments
        )
        if rule.dtype is None and (not rule.like or optional):
            named = f", {rule.like!r}" if rule.like else ""
            expected = f'.returns("{name}"{named}, DType::kFloat32) or another dtype, as there is '
            expected += "no tensor argument that has one"
            raise refusal(op.qualname, name, expected.replace("'", '"'), "none", "return")


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
            raise refusal(op, name, may_name(call, known), repr(name), what)
        if name in found:
            raise refusal(op, name, f"to be named once by {call}", "twice", what)
        found[name] = values[0] if len(values) == 1 else values
    return found


def _ranges(
    op: str, listed: Sequence[Sequence[Any]], ints: Sequence[str], signature: Signature | None
) -> dict[str, Range]:
    dims = signature.names if signature is not None else ()
    for name in dims:
        if name in ints:
            expected = "another name than an input's dim, whose size it does not say"
            raise refusal(op, name, expected, repr(name))
    for name, least, most in listed:
        if least > most:
            raise refusal(op, name, "the smaller number first in .range", f"{least}, {most}")
    found = _by_name(op, ".range or .at_least", listed, (*ints, *dims))
    sizes = dict.fromkeys(signature.int_names if signature is not None else (), (0, UNBOUNDED))
    return {name: Range(*limits) for name, limits in (sizes | found).items()}


def _choices(
    op: str, listed: Sequence[Sequence[Any]], parsed: torch._C.FunctionSchema
) -> dict[str, tuple[str, ...]]:
    """Returns the names that each str argument may be, in the order of the binding."""
    strings = {a.name: a for a in parsed.arguments if schema_type(a) in ("str", "str?")}
    found = _by_name(op, ".one_of", listed, tuple(strings))
    for name, known in found.items():
        if not known or len(set(known)) < len(known):
            raise refusal(op, name, "names that differ in .one_of", repr(known))
        default = strings[name].default_value
        if default is not None and default not in known:
            expected = f"a default that is {names_text(known)}"
            raise refusal(op, name, expected, repr(default))
    return {name: tuple(known) for name, known in found.items()}


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
            raise refusal(op, name, may_name(call, dims), repr(dim))
    return found


def _float_ranges(
    op: str, listed: Sequence[Sequence[Any]], floats: Sequence[str]
) -> dict[str, FloatRange]:
    found = _by_name(op, ".range, .at_least or .above", listed, floats)
    for name, (least, most, is_open) in found.items():
        if is_open and not math.isfinite(least):
            raise refusal(op, name, "a finite number in .above", f"{least}")
        if not least <= most:
            raise refusal(op, name, "the smaller number first in .range", f"{least}, {most}")
    return {name: FloatRange(*limits) for name, limits in found.items()}


def _refuse_key(op: OpSpec) -> None:
    """Refuses a random key that the public function could not draw."""
    position = op.argument_names.index(op.random)
    kind = str(op.parsed.arguments[position].type)
    if kind != "Tensor":
        raise refusal(op.qualname, op.random, "a Tensor, as .random says", kind)
    if op.parsed.arguments[position].has_default_value():
        expected = "no default, as the public function draws the random key"
        raise refusal(op.qualname, op.random, expected, "one")
    index = op.tensor_positions.index(position)
    if op.signature is not None and op.signature.inputs[index] != Group(("2",), loops=False):
        expected = "[2] in the signature line, as .random says"
        raise refusal(op.qualname, op.random, expected, str(op.signature.inputs[index]))
    if str(op.parsed.arguments[op.tensor_positions[0]].type) != "Tensor" or index == 0:
        expected = "a tensor before the random key, on whose device it is drawn"
        raise refusal(op.qualname, op.random, expected, "none")


def _limits(
    op: str, listed: Sequence[Sequence[str]], ints: Sequence[str], signature: Signature | None
) -> tuple[dict[str, str], dict[str, tuple[int, str]]]:
    """Returns the limits of int arguments, and those of dims, or of a multiple such as ``2r``."""
    groups = signature.inputs if signature is not None else ()
    named = [factor_and_name(dim)[1] for group in groups for dim in group.core]
    dims = list(dict.fromkeys(filter(None, named)))  # in the order in which a call binds them
    of_ints: list[tuple[str, str]] = []
    of_dims: dict[str, tuple[int, str]] = {}
    for name, limit in listed:
        dim = name.lstrip("0123456789")
        factor = int(name[: len(name) - len(dim)] or 1)
        if name in ints or dim not in dims or not 0 < factor < 2**31:
            of_ints.append((name, limit))
            continue
        if dim in of_dims:
            raise refusal(op, dim, "to be named once by .at_most", "twice", "dim")
        before = dims[: dims.index(dim)]
        if limit not in before:
            raise refusal(op, dim, may_name(".at_most", before), repr(limit), "dim")
        of_dims[dim] = factor, limit
    known = (*ints, *dims)
    for name, _ in of_ints:
        if name not in known:
            raise refusal(op, name, may_name(".at_most", known), repr(name))
    ordered = {dim: of_dims[dim] for dim in dims if dim in of_dims}
    return _dims_by_name(op, ".at_most", of_ints, ints, signature), ordered


def _results(
    op: str, listed: Sequence[Sequence[str]], outputs: Sequence[str], arguments: Sequence[str]
) -> dict[str, ResultDType]:
    results = {}
    for name, (like, dtype) in _by_name(op, ".returns", listed, outputs, "return").items():
        if like and like not in arguments:
            raise refusal(op, name, may_name(".returns", arguments), repr(like), "return")
        results[name] = ResultDType(like, getattr(torch, dtype) if dtype else None)
    return results


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def check_signature(op: str, text: str, parsed: torch._C.FunctionSchema) -> Signature | None:
    """Parses a signature line and compares it with the schema; returns ``None`` for no line. ``op``
    has its namespace.

    Raises:
        ManifestError: they contradict each other.
    """
    if not text:
        return None
    arguments = [schema_type(argument) for argument in parsed.arguments]
    returns = [schema_type(value) for value in parsed.returns]
    ints = [
        argument.name
        for argument, kind in zip(parsed.arguments, arguments, strict=True)
        if kind in ("int", "int?")
    ]
    for i, kind in enumerate(returns):
        if kind != "Tensor":
            raise ManifestError(
                f'{op}: signature {text!r}: expected "", as no line describes return {i} '
                f"of type {kind}; its shapes come from cuda_ops_fake of a plugin"
            )
    try:
        signature = parse_signature(text, ints)
    except ValueError as error:
        raise ManifestError(f"{op}: {error}") from None
    if len(signature.names) > MOST_NAMES:
        raise ManifestError(
            f"{op}: signature {text!r}: expected at most {MOST_NAMES} names, got "
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
                f"{op}: signature {text!r} has {len(groups)} {what}, the schema has {len(types)}"
            )
    return signature
