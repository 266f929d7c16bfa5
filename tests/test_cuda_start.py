"""What computes on a CPU leaves CUDA alone, also where there is a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_python
from shipped import OPERATORS, call_with

from cuda_ops.build import compiling
from cuda_ops.derive.arguments import split
from cuda_ops.registry import registry

#: As on a machine with a GPU, where CUDA would start if anything asked for it.
SEEN = """
import sys

import torch

def start(*arguments):
    raise AssertionError("CUDA was started")

if not torch.cuda.is_available():
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    torch.cuda._lazy_init = torch.cuda.get_device_capability = start

import cuda_ops
"""

CALLS = """
for name, (arguments, keywords) in torch.load(sys.argv[1]).items():
    getattr(torch.ops.cuda_ops, name)(*arguments, **keywords)
    assert not torch.cuda.is_initialized(), name
x = torch.ones(2, 4, requires_grad=True)
cuda_ops.silu(x).sum().backward()
assert not torch.cuda.is_initialized()
"""

#: An image is loaded by a process that was forked from one in which CUDA has started.
LOADING = """
import torch
from torch.utils.data import DataLoader, Dataset

import cuda_ops

class Images(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return cuda_ops.rgb_to_gray(torch.full((5, 7, 3), i, dtype=torch.uint8))

cuda_ops.silu(torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu"))
workers = {"num_workers": 2, "multiprocessing_context": "fork"}
found = [images.shape for images in DataLoader(Images(), batch_size=2, **workers)]
assert found == [(2, 5, 7)] * 2, found
"""


@pytest.fixture(autouse=True)
def _one_library_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # To choose among those for several GPUs, CUDA must say which it sees.
    folder = tmp_path / "cache" / "lib"
    folder.mkdir(parents=True)
    for pair in {registry().pairs()[operator.spec.pair] for operator in OPERATORS.values()}:
        library = compiling.find_library(pair, pair.read())
        assert library is not None
        if library != pair.prebuilt:
            shutil.copy2(library, folder)
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path / "cache"))


def test_no_operator_starts_it_to_compute_on_a_cpu(tmp_path: Path) -> None:
    calls = {name: split(operator.spec, call_with(name)) for name, operator in OPERATORS.items()}
    torch.save(calls, tmp_path / "calls")
    done = run_python("-c", SEEN + CALLS, str(tmp_path / "calls"))
    assert done.returncode == 0, done.stderr


def test_a_forked_process_computes_on_a_cpu_after_it_has_started() -> None:
    done = run_python("-c", LOADING)
    assert done.returncode == 0, done.stderr
