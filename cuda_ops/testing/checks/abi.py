"""Class 1: a library that this torch, or this GPU, cannot run."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from cuda_ops.build.elf import TORCH_CPP, runs_on, undefined_symbols
from cuda_ops.dispatch.library import open_library
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.draw import NOTHING
from cuda_ops.testing.stable_symbols import is_stable, oldest
from cuda_ops.testing.subject import Subject


def _not_built(subject: Subject, device: str) -> str:
    if subject.op.guest:
        return "a guest is built for one torch, on this machine"
    return "" if subject.origin.library else "not built from a pair"


@check("abi", 1, "ABI, architecture or toolchain mismatch", NOTHING, devices=("any",), quick=True,
       excuse=_not_built)  # fmt: skip
def abi(case: Case) -> None:
    """Checks that undefined symbols are stable, here and in the oldest torch, and that there is
    code for the GPU.
    """
    path = Path(case.subject.origin.library)
    handle = ctypes.CDLL(str(path))
    unstable, missing, later = [], [], []
    for name, weak in undefined_symbols(path.read_bytes()):
        if TORCH_CPP.match(name):
            unstable.append(name)
        elif not weak and not hasattr(handle, name):
            missing.append(name)
        elif not weak and is_stable(name) and name not in oldest():
            later.append(name)
    assert not unstable, (
        f"{path.name} needs symbols of torch's C++ ABI, which differ from release to release: "
        f"{', '.join(unstable)}; use the stable ABI's functions"
    )
    assert not missing, f"{path.name} needs symbols that this process lacks: {', '.join(missing)}"
    assert not later, (
        f"{path.name} needs functions that torch 2.10, the oldest that it must load in, does not "
        f"have: {', '.join(later)}"
    )
    if "CUDA" not in case.subject.op.keys:
        return
    op = case.subject.op
    archs = open_library(path, op.stem, op.namespace).archs
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        assert runs_on(archs, capability), (
            f"{path.name} holds code for {archs}, and cuda:{index} has capability "
            f"{capability[0]}.{capability[1]}"
        )
