"""Names of operators and of their namespaces in the dispatcher."""

from __future__ import annotations

import difflib
import keyword
from collections.abc import Iterable, Sequence

#: The namespace of ``CUDA_OPS(library)``.
HOME = "cuda_ops"
#: The namespace of what graphs hold beside operators, such as the refusal of a gradient.
INTERNAL = "_cuda_ops"
#: The namespaces that torch has itself, in one version or another.
OF_TORCH = frozenset({
    "ao", "aten", "bucketing", "c10d", "c10d_functional", "cuda", "debug_mode_ops", "debugprims",
    "device_mesh", "export", "fsdp", "higher_order", "inductor", "inductor_prims", "metal", "mkl",
    "mkldnn", "mkldnn_prepacked", "mps", "mtia", "onednn", "onnx_symbolic", "prepacked", "prim",
    "prims", "profiler", "pt2e_quant", "quantization", "quantized", "quantized_decomposed",
    "rngprims", "sparse", "static_runtime", "streams", "symm_mem", "triton", "vulkan",
    "vulkan_prepack", "xnnpack",
})  # fmt: skip
#: What ``cuda_ops`` has beside operators and its own modules, and the module of each, which is
#: imported at its first use.
FUNCTIONS = {
    "inline": "cuda_ops.dev.strings",
    "load_ipython_extension": "cuda_ops.dev.magic",
    "register_all": "cuda_ops.registry",
}
#: What ``torch.ops`` has beside namespaces.
_BESIDE_NAMESPACES = ("import_module", "load_library", "loaded_libraries")


def keyed(namespace: str, name: str) -> str:
    """Returns how strings name an operator or a pair: ``silu``, or ``my_ops::silu`` where it is in
    another namespace than ``cuda_ops``.
    """
    return name if namespace == HOME else f"{namespace}::{name}"


def apart(key: str) -> tuple[str, str]:
    """Returns namespace and name of what :func:`keyed` returned, or of a full name,
    ``cuda_ops::silu``.
    """
    namespace, _, name = key.rpartition("::")
    return namespace or HOME, name


def full(key: str) -> str:
    """Returns the name in the dispatcher of what :func:`keyed` returned: ``cuda_ops::silu``."""
    return "::".join(apart(key))


def unknown(names: Sequence[str], known: Iterable[str]) -> str:
    """Says that there are no operators of these names, and which may be meant."""
    return f"no operator {', '.join(map(repr, names))}{instead(names, known)}"


def instead(names: Sequence[str], known: Iterable[str]) -> str:
    """Returns the end of an error about unknown names: keys that may be meant, or else all."""
    known = [*known]
    return suggested(names, known) or f"; known: {', '.join(known) or 'none'}"


def suggested(names: Iterable[str], known: Iterable[str]) -> str:
    """Returns a question for the keys whose names are close to one of these; empty without any."""
    keys: dict[str, list[str]] = {}
    for key in known:
        keys.setdefault(apart(key)[1], []).append(key)
    close = [one for name in names for one in difflib.get_close_matches(apart(name)[1], keys)]
    meant = [repr(key) for stem in dict.fromkeys(close) for key in keys[stem]]
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def fault_of_namespace(name: str) -> str:
    """Returns why operators cannot have this namespace; empty where they can."""
    shown = f"namespace {name!r}"
    if keyword.iskeyword(name):
        return f"{shown} is a keyword of Python"
    if not name.isidentifier() or not name.isascii():
        return f"{shown} is not a Python identifier of ASCII letters"
    if name.startswith("_"):
        return f"{shown} starts with an underscore"
    if name in OF_TORCH:
        return f"{shown} is one that torch has itself"
    if name in _BESIDE_NAMESPACES:
        return f"{shown} is taken by torch.ops.{name}"
    return ""
