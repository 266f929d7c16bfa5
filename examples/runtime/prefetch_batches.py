"""Trains on batches that are on the GPU before they are asked for, and reads losses later.

On a CPU the same loop runs, without copies.
"""

from __future__ import annotations

import torch

from cuda_ops.runtime import prefetch, to_host

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
x = torch.randn(512, 32)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=64)
model = torch.nn.Linear(32, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

batches = prefetch(loader, device)  # can be iterated again, with the same pinned memory
losses = []
for _ in range(5):
    for inputs, targets in batches:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(to_host(loss))  # .item() would wait for the GPU in each step

first, last = losses[0].result().item(), losses[-1].result().item()
print(f"{len(losses)} steps on {device}: loss {first:.2f} at first, {last:.2f} at last")
assert last < first
