"""What a choice depends on, for a call: source, build, GPU, driver, dtype and sizes."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cuda_ops.build import provenance
from cuda_ops.build.advice import dev_command
from cuda_ops.errors import NotTunedError
from cuda_ops.runtime.tuning.choices import Key
from cuda_ops.runtime.tuning.knobs import size_bits
from cuda_ops.spec import Candidates, OpSpec


def key_of(spec: OpSpec, library: Path, inputs: Sequence[Any], offered: Candidates) -> Key:
    """Returns what a choice for these arguments depends on.

    Raises:
        NotTunedError: nothing is tuned for them.
        ValueError: they are not the operator's arguments, or the library does not say what it was
            made from, or GPUs of several kinds are visible.
    """
    tensor = next((value for value in inputs if isinstance(value, torch.Tensor)), None)
    try:
        sizes = None if tensor is None else offered.sizes(*inputs)
    except TypeError as error:
        raise ValueError(
            f"tune: argument 'inputs': expected the arguments of {spec.key}, got "
            f"{_shown(inputs)}: {error}"
        ) from error
    if tensor is None or sizes is None:
        raise NotTunedError(
            f"tune: argument 'inputs': expected arguments that {spec.key} is tuned for, got "
            f"{_shown(inputs)}"
        )
    made, where = made_from(library), device_and_driver()
    if made is None:
        raise ValueError(
            f"tune: {library.name} does not say what it was made from; run {dev_command()}"
        )
    if where is None:
        raise ValueError("tune: expected visible GPUs of one kind, got several; choose by "
                         "CUDA_VISIBLE_DEVICES")  # fmt: skip
    rows, columns = sizes
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Key(spec.key, *made, *where, dtype, (size_bits(rows), size_bits(columns)))


def _shown(inputs: Sequence[Any]) -> list[Any]:
    return [tuple(v.shape) if isinstance(v, torch.Tensor) else v for v in inputs]


def device_and_driver() -> tuple[str, str] | None:
    """Returns the GPU of this process and its driver, or the CPU where there is none; ``None``
    where GPUs of several kinds are visible, as a library has one choice for all of them.
    """
    if not torch.cuda.is_available():
        return f"CPU ({_cpu()})", ""
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return (names.pop(), _driver()) if len(names) == 1 else None


@functools.cache
def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.machine()


@functools.cache
def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    # Without that file, as in some containers: the CUDA that the driver supports.
    return version_in(text) or f"CUDA {driver_version()}"


def version_in(text: str) -> str:
    """Returns the driver's version in what the kernel says of it; nothing if it says none.

    Example:
    >>> version_in("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5")
    '550.54.15'
    """
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""


def driver_version() -> int:
    """Returns the driver's number for its CUDA, such as 13000; 0 if it does not say."""
    version = ctypes.c_int()
    error = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return 0 if error else version.value


@functools.cache  # a library that was built anew has another path
def made_from(library: Path) -> tuple[str, str] | None:
    """Returns the hash of a library's text, and its build: compilers, flags and architectures;
    ``None`` for one that does not say.
    """
    found = provenance.skim(library)
    if found is None:
        return None
    build = f"{'debug-' * found.debug}{found.recipe} {';'.join(found.archs)}".strip()
    return found.source_hash, build
