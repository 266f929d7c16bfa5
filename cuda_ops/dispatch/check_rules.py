"""The rules that C++ checks at each call: schema and signature line as Python has read them.

The structs mirror those of ``src/utils/checks.h``. They are filled in when a library is opened, and
hold the texts of :mod:`cuda_ops.derive.checks`, so kernels and fakes refuse in the same words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda_ops.derive import checks
from cuda_ops.derive.arguments import group_of
from cuda_ops.signature import factor_and_name
from cuda_ops.spec import UNBOUNDED, OpSpec, Range

#: ``kMostNames`` of ``checks.h``: the most named dims of one signature line.
MOST_NAMES = 32
_ANY = Range(-(2**63), UNBOUNDED)
_NONE = -1  # for an index


class _Dim(ctypes.Structure):
    _fields_ = [
        ("text", ctypes.c_char_p),
        ("factor", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("limit_factor", ctypes.c_int64),
        ("limit_text", ctypes.c_char_p),
    ]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("dtypes", ctypes.c_int64),
        ("dtypes_text", ctypes.c_char_p),
        ("dims", ctypes.POINTER(_Dim)),
        ("dim_count", ctypes.c_int64),
        ("has_loops", ctypes.c_int64),
        ("is_written", ctypes.c_int64),
        ("dims_text", ctypes.c_char_p),
    ]


class _Range(ctypes.Structure):
    _fields_ = [("least", ctypes.c_int64), ("most", ctypes.c_int64)]


class _Int(ctypes.Structure):
    _fields_ = [
        ("position", ctypes.c_int64),
        ("range", _Range),
        ("limit", ctypes.c_int64),
        ("limit_text", ctypes.c_char_p),
    ]


class _Float(ctypes.Structure):
    _fields_ = [
        ("position", ctypes.c_int64),
        ("least", ctypes.c_double),
        ("most", ctypes.c_double),
        ("text", ctypes.c_char_p),
    ]


class _ScalarType(ctypes.Structure):
    _fields_ = [
        ("position", ctypes.c_int64),
        ("dtypes", ctypes.c_int64),
        ("dtypes_text", ctypes.c_char_p),
    ]


class _Name(ctypes.Structure):
    _fields_ = [
        ("position", ctypes.c_int64),
        ("names", ctypes.POINTER(ctypes.c_char_p)),
        ("count", ctypes.c_int64),
        ("text", ctypes.c_char_p),
    ]


class Rules(ctypes.Structure):
    """``cuda_ops::detail::Rules``; it keeps what it points at alive."""

    _fields_ = [
        ("names", ctypes.POINTER(ctypes.c_char_p)),
        ("known_dtypes", ctypes.c_char_p),
        ("written", ctypes.POINTER(ctypes.c_int64)),
        ("tensors", ctypes.POINTER(_Tensor)),
        ("tensor_count", ctypes.c_int64),
        ("sizes", ctypes.POINTER(_Range)),
        ("size_count", ctypes.c_int64),
        ("ints", ctypes.POINTER(_Int)),
        ("int_count", ctypes.c_int64),
        ("floats", ctypes.POINTER(_Float)),
        ("float_count", ctypes.c_int64),
        ("scalar_types", ctypes.POINTER(_ScalarType)),
        ("scalar_type_count", ctypes.c_int64),
        ("choices", ctypes.POINTER(_Name)),
        ("choice_count", ctypes.c_int64),
        ("has_line", ctypes.c_int64),
    ]


#: What C++ calls the elements of arrays.
STRUCTS: dict[type[Any], str] = {
    _Dim: "DimRule",
    _Tensor: "TensorRule",
    _Range: "Range",
    _Int: "IntRule",
    _Float: "FloatRule",
    _ScalarType: "ScalarTypeRule",
    _Name: "NameRule",
    ctypes.c_int64: "int64_t",
    ctypes.c_char_p: "char* const",
}


def rules_of(op: OpSpec) -> Rules:
    """Returns the rules of an operator; the caller keeps them as long as the library may check."""
    names = op.signature.names if op.signature is not None else ()
    tensors = [_tensor(op, i, names) for i in range(len(op.tensor_positions))]
    sizes = [_range(op.ranges.get(name, _ANY)) for name in names]
    ints = [
        _int(op, position, names)
        for position in op.int_positions
        if op.argument_names[position] in (*op.ranges, *op.limits)
    ]
    floats = [
        _Float(
            op.argument_names.index(name), allowed.lowest, allowed.most,
            checks.float_range_text(allowed).encode(),
        )
        for name, allowed in op.float_ranges.items()
    ]  # fmt: skip
    scalar_types = [_scalar_type(op, name) for name in op.dtype_names if name in op.dtypes_of]
    choices = [_name(op, name) for name in op.choices]
    arguments = [name.encode() for name in op.argument_names]
    written = [i in op.written for i in range(len(arguments))] if op.written else None
    return Rules(
        _array(ctypes.c_char_p, arguments), checks.dtypes_text(checks.KNOWN_DTYPES).encode(),
        _array(ctypes.c_int64, written) if written else None,
        _array(_Tensor, tensors), len(tensors), _array(_Range, sizes), len(sizes),
        _array(_Int, ints), len(ints), _array(_Float, floats), len(floats),
        _array(_ScalarType, scalar_types), len(scalar_types), _array(_Name, choices), len(choices),
        op.signature is not None,
    )  # fmt: skip


def _tensor(op: OpSpec, index: int, names: Sequence[str]) -> _Tensor:
    name, group = op.tensor_names[index], group_of(op, index)
    dims = []
    for dim in group.core:
        factor, named = factor_and_name(dim)
        times, limit = op.dim_limits.get(named, (1, ""))
        dims.append(
            _Dim(
                dim.encode(), factor, names.index(named) if named else _NONE,
                names.index(limit) if limit else _NONE, times,
                checks.dim_limit_text(named, times, limit).encode(),
            )
        )  # fmt: skip
    allowed = op.allowed_dtypes(name)
    listed = _list_of(op, name) if name in op.dtypes_of else 0 if allowed else _NONE
    return _Tensor(
        name.encode(), listed, checks.dtypes_text(allowed).encode() if allowed else None,
        _array(_Dim, dims), len(dims), group.loops, op.tensor_positions[index] in op.written,
        checks.dims_text(group).encode(),
    )  # fmt: skip


def _list_of(op: OpSpec, name: str) -> int:
    return list(op.dtypes_of).index(name) + 1  # in the order of the binding, after the shared one


def _scalar_type(op: OpSpec, name: str) -> _ScalarType:
    text = checks.dtypes_text(op.dtypes_of[name]).encode()
    return _ScalarType(op.argument_names.index(name), _list_of(op, name), text)


def _name(op: OpSpec, argument: str) -> _Name:
    known = op.choices[argument]
    names = _array(ctypes.c_char_p, [name.encode() for name in known])
    text = checks.names_text(known).encode()
    return _Name(op.argument_names.index(argument), names, len(known), text)


def _int(op: OpSpec, position: int, names: Sequence[str]) -> _Int:
    name = op.argument_names[position]
    limit = op.limits.get(name)
    return _Int(
        position, _range(op.ranges.get(name, _ANY)),
        names.index(limit) if limit else _NONE, checks.limit_text(limit or "").encode(),
    )  # fmt: skip


def _range(allowed: Range) -> _Range:
    return _Range(allowed.least, allowed.most)


def _array(struct: type[Any], values: Sequence[Any]) -> Any:
    # A structure keeps the arrays alive that its pointers were set to.
    return ctypes.cast((struct * len(values))(*values), ctypes.POINTER(struct))
