"""A model of Hugging Face whose experts lie on several ranks: gradients, checkpoints, training."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import spawn

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "examples" / "distributed" / "train_experts.py"
RANKS = 3

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.slow


def model(experts: int = 5) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, intermediate_size=6, moe_intermediate_size=6,
        num_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).double()


def on_all(function: Any, store: Path, ranks: int = RANKS) -> None:
    spawn(joined, (function, str(store), ranks), nprocs=ranks)


def joined(rank: int, function: Any, store: str, ranks: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    function(rank, ranks)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may end a process that ends by itself


def compares_with_one_process(rank: int, ranks: int) -> None:
    from cuda_ops.integrations import use_moe

    parts, whole = model(), model()
    for ours, theirs in zip(parts.model.layers, whole.model.layers, strict=True):
        use_moe(ours.mlp, group=torch.distributed.group.WORLD)
        assert use_moe(ours.mlp, group=torch.distributed.group.WORLD) is ours.mlp
        use_moe(theirs.mlp)
    ids = torch.randint(8, (ranks, 7))
    losses = [whole(ids[k : k + 1], labels=ids[k : k + 1]).loss for k in range(ranks)]
    torch.stack(losses).sum().backward()
    loss = parts(ids[rank : rank + 1], labels=ids[rank : rank + 1]).loss
    torch.testing.assert_close(loss, losses[rank])
    loss.backward()
    block = parts.model.layers[0].mlp
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), block(x))
    for ours, theirs in zip(parts.model.layers, whole.model.layers, strict=True):
        for name, matrix in theirs.mlp.experts.named_parameters():
            own = ours.mlp.experts.get_parameter(name)
            torch.testing.assert_close(own.grad.full_tensor(), matrix.grad)
            local = own.to_local()  # and nothing of the other ranks' experts
            assert local.untyped_storage().nbytes() == local.nbytes


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    on_all(compares_with_one_process, tmp_path / "store")


def takes_what_lies_right(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    from cuda_ops.integrations import use_moe

    with torch.device("meta"):
        empty = model().model.layers[0].mlp
    use_moe(empty, group=init_device_mesh("cpu", (ranks,)))
    assert empty.experts.down_proj.is_meta
    assert empty.experts.down_proj.to_local().shape[0] == (2, 2, 1)[rank]
    block = model().model.layers[0].mlp
    wrong = copy.deepcopy(block)
    mesh = init_device_mesh("cpu", (ranks,))
    wrong.experts.down_proj = torch.nn.Parameter(
        distribute_tensor(wrong.experts.down_proj.detach(), mesh, [Replicate()])
    )
    with pytest.raises(ValueError, match="expected down_proj sharded by expert along the group"):
        use_moe(wrong, group=mesh)
    with pytest.raises(RuntimeError, match="argument 'group': expected a ProcessGroup or one dim"):
        use_moe(block, group=ranks)


def test_matrices_may_be_empty_but_lie_along_the_group(tmp_path: Path) -> None:
    on_all(takes_what_lies_right, tmp_path / "store")


def train(ranks: int, *words: str) -> list[float]:
    """Returns the losses of the example, which runs on the CPU."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, f"--nproc-per-node={ranks}", str(PROGRAM), *words],
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.M)]


def test_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    whole = train(1, "--steps", "6")
    checkpoint = str(tmp_path / "checkpoint")
    begun = train(2, "--steps", "3", "--save", checkpoint)
    ended = train(3, "--steps", "3", "--first", "3", "--load", checkpoint)
    assert [*begun, *ended] == pytest.approx(whole, abs=2e-4)
    assert whole[-1] < whole[0]
