"""Tests that need a GPU and that the kit does not cover: messages, threads, reload of CUDA code.

test_operators.py checks values, streams, graphs, empty inputs and more than 2^31 elements of every
operator.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ScratchOp, needs_gpu

import cuda_ops
from cuda_ops.dev.scaffold import new_pair
from cuda_ops.registry import registry

pytestmark = needs_gpu


@pytest.fixture
def cuda_op(scratch_op: ScratchOp) -> ScratchOp:
    """A scaffolded pair; ``edit`` changes what its kernel returns inside the limit."""
    new_pair(scratch_op.name, scratch_op.root)
    return scratch_op


def edit(op: ScratchOp, expression: str) -> None:
    kernel = op.root / "kernels" / f"{op.name}.cu"
    lines = kernel.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "NaN passes through" in line)
    lines[at] = f"    return {expression};  // NaN passes through"
    lines[at - 1] = "    const C most = static_cast<C>(limit); (void)most;"
    kernel.write_text("\n".join(lines) + "\n")


def test_several_gradients_at_once() -> None:
    """torch computes them in a thread of its own for each GPU."""
    x = torch.randn(4, 5, device="cuda", requires_grad=True)
    ours, theirs = (
        torch.autograd.functional.jacobian(function, x, vectorize=True)
        for function in (cuda_ops.silu, F.silu)
    )
    torch.testing.assert_close(ours, theirs)


def test_device_mix_names_both() -> None:
    a = torch.randn(2, 2, device="cuda")
    with pytest.raises(RuntimeError, match=r"argument 'b': expected a tensor on cuda:0 like 'a'"):
        cuda_ops.matmul(a, a.cpu())


def test_build_for_another_arch_names_both(cuda_op: ScratchOp) -> None:
    from cuda_ops.build import compiling

    pair = registry().rescan()[cuda_op.name]
    capability = torch.cuda.get_device_capability()
    other = "8.0" if capability < (8, 0) else "12.0"
    registry().load(cuda_op.name, compiling.build(pair, (other,)).path)
    with pytest.raises(RuntimeError, match=f"this build holds code for {other}.*Rebuild"):
        cuda_op.function(torch.ones(3, device="cuda"))


def test_edit_is_seen_by_compiled_callers_but_not_by_captured_graphs(cuda_op: ScratchOp) -> None:
    edit(cuda_op, "x * 2")
    cuda_op.reload()
    x = torch.ones(64, device="cuda")
    compiled = torch.compile(cuda_op.function, fullgraph=True)
    assert torch.equal(compiled(x), x * 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cuda_op.function(x)
    edit(cuda_op, "x * 3")
    cuda_op.reload()
    assert torch.equal(cuda_op.function(x), x * 3)
    assert torch.equal(compiled(x), x * 3)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, x * 2)


def test_300_reloads_of_cuda_code_while_another_thread_calls(
    cuda_op: ScratchOp, tmp_path: Path
) -> None:
    libraries = []
    for factor in (1, 2):
        edit(cuda_op, f"x * {factor}")
        libraries.append(cuda_op.build().path)
    registry().load(cuda_op.name, libraries[0])
    function, x, done = cuda_op.function, torch.ones(64, device="cuda"), threading.Event()
    compiled = torch.compile(function, backend="aot_eager")
    wrong = []

    def call() -> None:
        y = torch.ones(64, device="cuda")
        while not done.is_set():
            if (result := function(y)[0].item()) not in (1.0, 2.0):
                wrong.append(result)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        for i in range(300):
            fresh = tmp_path / f"{i}.so"
            shutil.copyfile(libraries[i % 2], fresh)
            registry().load(cuda_op.name, fresh)
            assert function(x)[0].item() == i % 2 + 1
            assert compiled(x)[0].item() == i % 2 + 1
    finally:
        done.set()
        caller.join()
    assert not wrong
