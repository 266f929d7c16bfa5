"""Trains a small Qwen3-MoE on several ranks: experts in parallel, all else by FSDP.

Each rank keeps some of the experts, and brings its own sequences. ``torchrun --nproc-per-node 2
train_experts.py`` uses a GPU for each rank, or the CPU where there are not as many. ``--save DIR``
writes a checkpoint at the end and ``--load DIR`` goes on from one, on any number of ranks. Needs
transformers 5.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from cuda_ops.integrations import use_moe

SEQUENCES, LENGTH, VOCABULARY = 12, 16, 64


def main() -> None:
    options = _options()
    device = _join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks begin with the same model
    model = Qwen3MoeForCausalLM(_config()).to(device)
    for layer in model.model.layers:
        use_moe(layer.mlp, group=dist.group.WORLD)
    experts = [one for one in model.parameters() if isinstance(one, DTensor)]
    mesh = init_device_mesh(device.type, (ranks,))
    fully_shard(model, mesh=mesh, ignored_params=set(experts))  # all else, along all ranks
    others = [one for one in model.parameters() if all(one is not own for own in experts)]
    # Two groups: torch updates DTensors of one mesh together, and no others with them.
    optimizer = torch.optim.AdamW([{"params": experts}, {"params": others}], lr=1e-2)
    if options.load:
        _load(model, optimizer, options.load)
    for step in range(options.first, options.first + options.steps):
        mine = _sequences(step).tensor_split(ranks)[rank].to(device)
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        for one in experts:  # sums over all ranks' losses; those of the others are means
            one.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item() / ranks:.5f}", flush=True)
    if options.save:
        dcp.save(_state(model, optimizer), checkpoint_id=options.save)
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads end a process that ends while they clear up after a call


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first step")
    parser.add_argument("--save", metavar="DIR")
    parser.add_argument("--load", metavar="DIR")
    return parser.parse_args()


def _join() -> torch.device:
    """Joins the other ranks; returns this one's device."""
    number, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < here:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, intermediate_size=32, moe_intermediate_size=16,
        num_experts=6, num_experts_per_tok=2, router_aux_loss_coef=0.0,
    )  # fmt: skip


def _sequences(step: int) -> torch.Tensor:
    """Returns the sequences (SEQUENCES, LENGTH) of a step, which all ranks share out."""
    generator = torch.Generator().manual_seed(step)
    begin = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
    return (begin + stride * torch.arange(LENGTH)) % VOCABULARY


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


if __name__ == "__main__":
    main()
