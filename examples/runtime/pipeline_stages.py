"""Decodes, copies, and computes different images at the same time."""

from __future__ import annotations

import torch

import cuda_ops
from cuda_ops.runtime import pipeline

device = "cuda" if torch.cuda.is_available() else "cpu"


def decode(seed: int) -> torch.Tensor:
    """Stands for reading a file: work of the host."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (256, 256, 3), dtype=torch.uint8, generator=generator)


def to_device(image: torch.Tensor) -> torch.Tensor:
    if device == "cpu":
        return image
    return image.pin_memory().to(device, non_blocking=True)


stages = {"decode": decode, "copy": to_device, "gray": cuda_ops.rgb_to_gray}
means = [gray.float().mean() for gray in pipeline(stages, range(8), depth=3, device=device)]
print("means:", " ".join(f"{mean:.1f}" for mean in torch.stack(means).tolist()))
