"""Operators that the process got from a package's library for C++ before it came to use them here.

Their schema and their trampolines are registered, and cannot be registered twice. So Python adds
what it has beside them, and takes over their slots: both ways run the same kernels from then on.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import torch

from cuda_ops.dispatch.library import open_library
from cuda_ops.errors import ManifestError
from cuda_ops.spec import OpSpec

#: The dispatcher says where an operator was defined, and a library for C++ names its own file as
#: that place; see registering.h.
_DEFINED = re.compile(r"^schema: (.+)\ndebug: registered at (/.+\.so):\d+$", re.MULTILINE)
_FIRST = "import cuda_ops and call cuda_ops.register_all() before that library is opened"


def slots_of(op: OpSpec) -> dict[str, int] | None:
    """Returns the slots of an operator's kernels by dispatch key; ``None`` where the operator is
    new to the process.

    Raises:
        ManifestError: what is registered is another version of the operator.
    """
    if (defined := _DEFINED.search(torch._C._dispatch_dump(op.qualname))) is None:
        return None
    schema, by = defined[1], Path(defined[2])
    file = by.with_name(f"{op.stem}.abi3.so")
    if schema != str(op.parsed):
        raise ManifestError(
            f"{op.qualname}: {by} has registered it in this process with other arguments: expected "
            f"{op.parsed}, got {schema}; build both from the same sources"
        )
    if op.tags or op.device_position is not None:
        how = "without its tags" if op.tags else "with the kernel that chooses by a Device"
        raise ManifestError(
            f"{op.qualname}: {by} has registered it in this process {how}, which cannot be "
            f"changed; {_FIRST}"
        )
    try:
        ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError as error:  # it was replaced or removed meanwhile
        raise ManifestError(
            f"{op.qualname}: {by} has registered it in this process from a file that is no longer "
            f"there: expected {file} as it was then; start the process again"
        ) from error
    library = open_library(file, op.stem, op.namespace)
    return {kernel.key: kernel.slot for kernel in library.kernels if kernel.op == op.name}
