"""The functions of torch's stable ABI, as the headers of one torch declare them.

The list of the oldest torch that libraries must load in lies beside this file. It is made from the
headers of that torch, whose wheel need not fit this machine::

    pip download torch==2.10.0 --no-deps --only-binary :all: --platform macosx_11_0_arm64
    unzip torch-2.10.0-*.whl "torch/include/torch/csrc/*"
    python -m cuda_ops.testing.stable_symbols torch/include > cuda_ops/testing/stable_symbols.txt
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

#: The headers of the shim for CPU and CUDA, in ``torch/csrc``.
_HEADERS = (
    "stable/c/shim.h",
    "inductor/aoti_torch/c/shim.h",
    "inductor/aoti_torch/c/shim_cpu.h",
    "inductor/aoti_torch/c/shim_deprecated.h",
    "inductor/aoti_torch/generated/c_shim_aten.h",
    "inductor/aoti_torch/generated/c_shim_cpu.h",
    "inductor/aoti_torch/generated/c_shim_cuda.h",
)
_DECLARED = re.compile(r"AOTI_TORCH_EXPORT\b[^;{(]*?\b((?:aoti_torch|torch)_\w+)\s*\(")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@cache
def oldest() -> frozenset[str]:
    """Returns the functions of the oldest torch that libraries must load in."""
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return frozenset(lines)


def is_stable(name: str) -> bool:
    """Tells whether a symbol is named as the functions of the stable ABI are."""
    return name.startswith(("aoti_torch_", "torch_"))


def declared(include: Path) -> list[str]:
    """Returns the functions that the headers in a torch's ``include`` folder declare.

    Raises:
        OSError: a header is missing.
    """
    texts = [(include / "torch" / "csrc" / name).read_text(encoding="utf-8") for name in _HEADERS]
    return sorted({name for text in texts for name in _DECLARED.findall(_COMMENT.sub("", text))})


if __name__ == "__main__":
    print("\n".join(declared(Path(sys.argv[1]))))
