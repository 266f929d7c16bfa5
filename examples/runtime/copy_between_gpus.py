"""Copies a tensor from one device to another, straight and through the host.

python examples/runtime/copy_between_gpus.py
"""

from __future__ import annotations

import torch

from cuda_ops.runtime import copy_between, topology


def main() -> None:
    print(topology())
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = torch.device("cuda:0" if count else "cpu")
    second = torch.device(f"cuda:{count - 1}" if count else "cpu")

    x = torch.arange(6_000_000, device=first).reshape(2000, 3000)
    straight = copy_between(torch.empty_like(x, device=second), x)
    # Any strides: these rows lie 6000 elements apart.
    rows = torch.zeros(2000, 6000, dtype=x.dtype, device=second)
    through_host = copy_between(rows[:, ::2], x, chunks_through_host=True, chunk_bytes=1 << 20)

    assert torch.equal(straight.cpu(), x.cpu()) and torch.equal(through_host.cpu(), x.cpu())
    print(f"{x.nbytes} bytes from {first} to {second}, both ways the same")


if __name__ == "__main__":
    main()
