"""Makes CUDA graphs of a small model, one for each shape, and trains with them.

On a CPU graphed() is the function itself.
"""

from __future__ import annotations

import torch

from cuda_ops.runtime import graphed

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layers = [layer for _ in range(2) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU())]
model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
step = graphed(model)

losses = []
for k in range(200):
    x = torch.randn(64 if k % 2 else 32, 32, device=device)  # two shapes: two graphs
    loss = torch.nn.functional.mse_loss(step(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())

first, last = torch.stack(losses[:4]).mean().item(), torch.stack(losses[-4:]).mean().item()
print(f"{step.graphs} graphs on {device}: loss {first:.2f} at first, {last:.2f} at last")
assert last < first
