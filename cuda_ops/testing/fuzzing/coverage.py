"""Tells atheris' fuzzer what the C++ of operators does, and which errors came up."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_FORMS = 1 << 12
_COMPARISONS = (
    "cmp1", "cmp2", "cmp4", "cmp8",
    "const_cmp1", "const_cmp2", "const_cmp4", "const_cmp8", "switch",
)  # fmt: skip
_kept: list[Any] = []


def connect(counters: str) -> Any:
    """Registers the counters of the library at this path, if it is not empty, and an array that is
    returned: an element that is set is something new to the fuzzer.
    """
    fuzzer = _fuzzer()
    forms = (ctypes.c_uint8 * _FORMS)()
    _register(fuzzer, forms)
    if counters:
        library = ctypes.CDLL(counters)
        size = ctypes.c_size_t.in_dll(library, "cuda_ops_counter_count").value
        _register(fuzzer, (ctypes.c_uint8 * size).in_dll(library, "cuda_ops_counters"))
        compare = (ctypes.c_void_p * len(_COMPARISONS)).in_dll(library, "cuda_ops_compare")
        for i, name in enumerate(_COMPARISONS):
            function = getattr(fuzzer, f"__sanitizer_cov_trace_{name}")
            compare[i] = ctypes.cast(function, ctypes.c_void_p).value
    return forms


def _fuzzer() -> ctypes.CDLL:
    """Returns the library of atheris that has libFuzzer in it."""
    import atheris

    (path,) = Path(atheris.__file__).parent.glob("core_with_libfuzzer*.so")
    return ctypes.CDLL(str(path))


def _register(fuzzer: ctypes.CDLL, counters: Any) -> None:
    """Registers 8-bit counters, each with a place of its own, which libFuzzer counts by."""
    begin, size = ctypes.addressof(counters), len(counters)
    places = (ctypes.c_size_t * (2 * size))()
    for i in range(size):
        places[2 * i] = begin + i  # any number that no other counter has
    _kept.extend((counters, places))
    table = ctypes.addressof(places)
    fuzzer.__sanitizer_cov_8bit_counters_init(ctypes.c_void_p(begin), ctypes.c_void_p(begin + size))
    fuzzer.__sanitizer_cov_pcs_init(
        ctypes.c_void_p(table), ctypes.c_void_p(table + ctypes.sizeof(places))
    )
