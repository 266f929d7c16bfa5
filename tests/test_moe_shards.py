"""moe of DTensors: tokens sharded, and experts along a mesh dim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import weights

import cuda_ops

pytestmark = pytest.mark.usefixtures("built_mixture")


def test_shards_tokens(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    locals_ = (torch.randn(4, 6), torch.randn(4, 3), *weights(3, 6, 2, torch.float32))
    places = (Shard(0), Shard(0), Replicate(), Replicate())
    args = [
        DTensor.from_local(tensor, mesh, [place], run_check=False).requires_grad_()
        for tensor, place in zip(locals_, places, strict=True)
    ]
    with CommDebugMode() as communication:
        out = cuda_ops.moe(*args, 2)
    assert communication.get_total_counts() == 0
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(out.to_local(), cuda_ops.moe(*locals_, 2))


def one_of_four(rank: int, store: str) -> None:
    """Tokens sharded along all mesh dims, experts along the last one, unevenly."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, 4), rank=rank, world_size=4
    )
    # One expert on two devices leaves one without any; five on four devices leave the last without.
    for shape, count, top_k in (((2, 2), 5, 2), ((2, 2), 1, 1), ((4,), 5, 2)):
        shards_experts(init_device_mesh("cpu", shape), count, top_k)
    torch.distributed.destroy_process_group()


def shards_experts(mesh: Any, count: int, top_k: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    tensors = [torch.randn(4, 3, n, dtype=torch.float64) for n in (6, count)]
    whole = [v.requires_grad_() for v in (*tensors, *weights(count, 6, 2, torch.float64))]
    sharded, others = [Shard(0)] * mesh.ndim, mesh.ndim - 1
    places = [*[sharded] * 2, *[[*[Replicate()] * others, Shard(0)]] * 2]
    parts = [
        distribute_tensor(value.detach(), mesh, place).requires_grad_()
        for value, place in zip(whole, places, strict=True)
    ]
    expected, out = cuda_ops.moe(*whole, top_k), cuda_ops.moe(*parts, top_k)
    assert out.placements == tuple(sharded)
    torch.testing.assert_close(out.full_tensor(), expected)
    if mesh.ndim == 1:  # torch cannot compile for a second mesh that is equal to an earlier one
        compiled = torch.compile(cuda_ops.moe, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*parts, top_k).full_tensor(), expected)
    expected.square().sum().backward()
    out.square().sum().full_tensor().backward()
    for part, value in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), value.grad)


@pytest.mark.slow
def test_shards_experts(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_of_four, (str(tmp_path / "store"),), nprocs=4)


def test_sharded_experts_refuse_what_does_not_fit(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    x, logits, *matrices = torch.randn(4, 6), torch.randn(4, 6), *weights(3, 6, 2, torch.float32)

    def placed(tensor: torch.Tensor, place: Any) -> Any:
        return DTensor.from_local(tensor, mesh, [place], run_check=False)

    whole = placed(x, Replicate()), placed(logits, Replicate())
    first, second = (placed(matrix, Shard(0)) for matrix in matrices)
    with pytest.raises(RuntimeError, match="'x': expected a DTensor on the mesh of 'w_gate_up'"):
        cuda_ops.moe(x, whole[1], first, second, 2)
    with pytest.raises(RuntimeError, match="'expert_bias': expected a DTensor on the mesh of"):
        cuda_ops.moe(*whole, first, second, 2, expert_bias=torch.zeros(6))
    with pytest.raises(RuntimeError, match="'w_gate_up': expected a DTensor on the mesh of 'x'"):
        cuda_ops.moe(*whole, *weights(6, 6, 2, torch.float32), 2)
    with pytest.raises(RuntimeError, match=r"'w_down': expected .* as 'w_gate_up'"):
        cuda_ops.moe(*whole, first, placed(matrices[1].repeat(2, 1, 1), Replicate()), 2)
    with pytest.raises(RuntimeError, match=r"'w_down': expected .* as 'w_gate_up'"):
        cuda_ops.moe(*whole, placed(matrices[0].repeat(2, 1, 1), Replicate()), second, 2)
    # Checked for all ranks' experts: a rank whose own fit would wait for the others.
    with pytest.raises(
        RuntimeError, match=r"'w_gate_up': .* \(E, 2I, H\) = \[6, 4, 6\], got shape \["
    ):
        cuda_ops.moe(*whole, placed(matrices[0].repeat(2, 1, 1), Shard(0)), second, 2)


@pytest.mark.slow
def test_sharded_experts_compile(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    tensors = (torch.randn(4, 6), torch.randn(4, 6), *weights(3, 6, 2, torch.float32))
    places = (Replicate(), Replicate(), Shard(0), Shard(0))
    inputs = [
        DTensor.from_local(tensor, mesh, [place], run_check=False)
        for tensor, place in zip(tensors, places, strict=True)
    ]
    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(cuda_ops.moe, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        actual, expected = (f(*inputs, 2) for f in (compiled, cuda_ops.moe))
        assert actual.placements == expected.placements
        torch.testing.assert_close(actual.to_local(), expected.to_local())
