"""Traces a step of training and prints where its time went, on a GPU or on a CPU.

It writes step.json.gz, which https://ui.perfetto.dev shows as a timeline.
"""

from __future__ import annotations

import torch

import cuda_ops
from cuda_ops.runtime import trace

device = "cuda" if torch.cuda.is_available() else "cpu"
weight = torch.randn(256, 256, device=device, requires_grad=True)
batches = [torch.randn(64, 256) for _ in range(4)]


def step(batch: torch.Tensor) -> None:
    x = batch.to(device, non_blocking=True)
    cuda_ops.silu(x @ weight).square().mean().backward()


step(batches[0])  # loads kernels, which is no part of a step
with trace("step.json.gz") as traced:
    for batch in batches:
        step(batch)

print(traced.table(top=8))
ours = [row for row in traced.operators if row.is_ours]
print("ours:", ", ".join(f"{row.name} ({row.calls} calls)" for row in ours))
if traced.copies:
    print(f"kernels ran during {traced.overlap.copies:.0%} of the time of copies")
