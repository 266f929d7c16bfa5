"""torch's words for dtypes, types and dispatch, and those of a native pair."""

from __future__ import annotations

import re
from collections.abc import Collection

from cuda_ops.build.source_text import arguments_in, closing
from cuda_ops.dev.adopt.cxx import base_type
from cuda_ops.dev.adopt.notes import Place, UnknownError

#: The DType of a C++ type, and the type that a launcher takes a pointer to; ``void`` where only
#: the kernel's file knows it.
ELEMENTS = {
    "double": ("kFloat64", "double"),
    "float": ("kFloat32", "float"),
    "Half": ("kFloat16", "void"), "half": ("kFloat16", "void"), "__half": ("kFloat16", "void"),
    "BFloat16": ("kBFloat16", "void"), "__nv_bfloat16": ("kBFloat16", "void"),
    "nv_bfloat16": ("kBFloat16", "void"),
    "uint8_t": ("kUInt8", "uint8_t"), "unsigned char": ("kUInt8", "unsigned char"),
    "int8_t": ("kInt8", "int8_t"), "signed char": ("kInt8", "int8_t"), "char": ("kInt8", "int8_t"),
    "int16_t": ("kInt16", "int16_t"), "short": ("kInt16", "int16_t"),
    "int": ("kInt32", "int"), "int32_t": ("kInt32", "int"),
    "int64_t": ("kInt64", "int64_t"), "long": ("kInt64", "int64_t"),
    "bool": ("kBool", "bool"),
}  # fmt: skip
_SCALAR_TYPES = {
    "Float": "kFloat32", "Float32": "kFloat32", "F32": "kFloat32",
    "Double": "kFloat64", "Float64": "kFloat64", "F64": "kFloat64",
    "Half": "kFloat16", "Float16": "kFloat16", "F16": "kFloat16", "BFloat16": "kBFloat16",
    "Byte": "kUInt8", "UInt8": "kUInt8", "Char": "kInt8", "Int8": "kInt8",
    "Short": "kInt16", "Int16": "kInt16", "Int": "kInt32", "Int32": "kInt32",
    "Long": "kInt64", "Int64": "kInt64", "Bool": "kBool",
}  # fmt: skip
_SCALAR_TYPE = re.compile(
    r"\b(?:torch|at|c10)::(?:headeronly::)?(?:ScalarType::|k)(\w+)\b|\bScalarType::(\w+)\b"
)
#: Dtypes whose types in a kernel have no operators.
NARROW = {"kFloat16": "float16", "kBFloat16": "bfloat16"}
WIDE = ("kFloat64", "kFloat32")
_INTEGERS = ("kUInt8", "kInt8", "kInt16", "kInt32", "kInt64")
#: What the macros of AT_DISPATCH stand for: dtypes that have C++ types with operators.
_DISPATCHED = {
    "FLOATING_TYPES": WIDE,
    "ALL_TYPES": (*WIDE, *_INTEGERS),
    "INTEGRAL_TYPES": _INTEGERS,
    "FLOATING_AND_COMPLEX_TYPES": WIDE,
    "ALL_TYPES_AND_COMPLEX": (*WIDE, *_INTEGERS),
}
_DISPATCH = re.compile(r"AT_DISPATCH_(\w+?)(?:_AND(\d?)|_AND_HALF)?$")
DISPATCH = re.compile(r"\bAT_DISPATCH_\w+\s*\(")
_NATIVE = (
    (r"\b(?:at|c10|torch)::Half\b", "__half"),
    (r"\b(?:at|c10|torch)::BFloat16\b", "__nv_bfloat16"),
    (r"\bC10_LAUNCH_BOUNDS_[12]\(", "__launch_bounds__("),
    (r"\bat::acc_type\s*<\s*(\w+)\s*,\s*true\s*>", r"cuda_ops::compute_t<\1>"),
    (r"\bat::opmath_type\s*<\s*(\w+)\s*>", r"cuda_ops::compute_t<\1>"),
    (r"\bC10_HOST_DEVICE\b", "__host__ __device__"),
    (r"\bC10_DEVICE\b", "__device__"),
    (r"\b(?:at|c10)::ceil_div\b", "cuda_ops::ceil_div"),
)
#: Words that only torch's headers know.
TORCH = re.compile(
    r"\b(?:torch|at|c10|pybind11|py)::\w|\b(?:AT_|TORCH_|C10_|STD_TORCH_)\w+|\bTensor\b"
)


def dtype_in(text: str) -> str:
    """Returns the DType of the last ``torch::kFloat32`` in a text, which counts where options are
    built; empty if there is none.
    """
    found = (_SCALAR_TYPES.get(one[1] or one[2], "") for one in _SCALAR_TYPE.finditer(text))
    return next(filter(None, reversed(list(found))), "")


def visit(how: str, dtypes: tuple[str, ...], dtype: str) -> str:
    """Returns how a call of ``visit`` begins, which turns a dtype into a type."""
    return f"{how}<{', '.join(f'DType::{one}' for one in dtypes)}>({dtype}, [&](auto tag) {{"


def native(text: str) -> str:
    """Replaces torch's words in device code by those that native kernels have."""
    for pattern, word in _NATIVE:
        text = re.sub(pattern, word, text)
    return text


def dispatched(macro: str) -> tuple[tuple[str, ...], int, str] | None:
    """Reads a macro of AT_DISPATCH.

    Returns:
        the dtypes that kernels can be compiled for, how many arguments name further ones, and what
        is left out; ``None`` where the macro is not known.
    """
    found = _DISPATCH.match(macro)
    if found is None or found[1] not in _DISPATCHED:
        return None
    extra = int(found[2] or 1) if found[2] is not None else 0
    left = "float16" if macro.endswith("_AND_HALF") else ""
    if "COMPLEX" in found[1]:
        left = "complex"
    return _DISPATCHED[found[1]], extra, left


def schema_type(text: str) -> tuple[str, str]:
    """Returns what a C++ type of a guest is in a schema, and in the native function; empty where
    it is nothing of the kind.
    """
    base = base_type(text)
    known = {
        "Tensor": ("Tensor", "const Tensor&"),
        "optional<Tensor>": ("Tensor?", "const std::optional<Tensor>&"),
        "vector<Tensor>": ("Tensor[]", "const std::vector<Tensor>&"),
        "TensorList": ("Tensor[]", "const std::vector<Tensor>&"),
        "bool": ("bool", "bool"),
        "string": ("str", "const std::string&"), "string_view": ("str", "const std::string&"),
        "Scalar": ("float", "double"),
        "vector<int64_t>": ("int[]", "const std::vector<int64_t>&"),
        "IntArrayRef": ("int[]", "const std::vector<int64_t>&"),
        "vector<double>": ("float[]", "const std::vector<double>&"),
        "ScalarType": ("ScalarType", "ScalarType"),
        "optional<int64_t>": ("int?", "std::optional<int64_t>"),
        "optional<double>": ("float?", "std::optional<double>"),
        "optional<bool>": ("bool?", "std::optional<bool>"),
    }  # fmt: skip
    if base in known:
        return known[base]
    if re.fullmatch(
        r"(?:unsigned )?(?:int|long|long long|size_t|u?int(?:8|16|32|64)_t|unsigned)", base
    ):
        return "int", "int64_t"
    if base in ("float", "double"):
        return "float", "double"
    return "", ""


def default_of(text: str) -> str:
    """Returns a C++ default in a schema's words; empty where it has none for it."""
    text = text.strip()
    if re.search(r"\b(?:nullopt|none|None)\b", text):
        return "None"
    text = {"true": "True", "false": "False"}.get(text, text)
    text = re.sub(r"(?<=[\d.])[fFlLuU]+$", "", text)
    is_said = re.fullmatch(r'-?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?|True|False|"[^"\\]*"', text)
    return f"{text}0" if is_said and text.endswith(".") else text if is_said else ""


#: torch's elementwise operators as functions of numbers.
_OF_NUMBERS = {
    **{name: f"std::{name}" for name in (
        "exp", "tanh", "sqrt", "abs", "log", "log1p", "expm1", "sin", "cos", "erf", "floor", "ceil",
        "pow",
    )},
    "sigmoid": "sigmoid",
}  # fmt: skip
_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def formula(text: str, numbers: Collection[str], place: Place) -> str:
    """Returns an expression of torch's elementwise operators as one of doubles.

    Raises:
        UnknownError: it is more than that.
    """
    left = " ".join(text.split())
    done = re.sub(r"\b(\w+)\.(\w+)\(\)", r"torch::\2(\1)", text)
    while call := re.search(r"\b(?:torch|at)::(\w+)\s*\(", done):
        end = closing(done, call.end())
        inside, name = done[call.end() : end], call[1]
        given = arguments_in(inside)
        if name in _OF_NUMBERS:
            value = f"{_OF_NUMBERS[name]}({inside})"
        elif name == "relu":
            value = f"std::max<double>({inside}, 0)"  # a NaN stays one
        elif name in _OPERATORS and len(given) == 2:
            value = f"(({given[0]}) {_OPERATORS[name]} ({given[1]}))"
        else:
            raise UnknownError(place, f"{left}: the CPU function calls torch; write its loops")
        done = done[: call.start()] + value + done[end + 1 :]
    names = set(re.findall(r"(?<![\w.:])[A-Za-z_]\w*(?!::)\b(?!\s*[(<:])", done))
    called = set(re.findall(r"(?<![\w])((?:std::)?[A-Za-z_]\w*)(?:<double>)?\s*\(", done))
    known = {*_OF_NUMBERS.values(), "std::max"}
    plain = done.replace("max<double>", "max")
    if (
        not names <= {*numbers, "double"}
        or not called <= known
        or re.search(r"[?;{}&|=\[\]%<>!]", plain)
    ):
        raise UnknownError(
            place, f"{left}: the CPU function is no formula of numbers; write its loops"
        )
    return " ".join(done.split())
