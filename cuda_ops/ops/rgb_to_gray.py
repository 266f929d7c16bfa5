"""``rgb_to_gray``: the exact weighted sum in integers, and what others compute instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops import derive
from cuda_ops.benchmarking.peers import torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    channels = _channels(op)

    def reference(image: torch.Tensor) -> torch.Tensor:
        red, green, blue = image.to(torch.int64).unbind(channels)
        gray = (299 * red + 587 * green + 114 * blue + 500) // 1000
        return gray.to(torch.uint8)

    return reference


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    return derive.with_peers(derive.cuda_ops_benchmarks(op), torch_peers(composed(_channels(op))))


def composed(channels: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What one writes in PyTorch, torchvision too: every step a kernel, truncated at the end."""

    def gray(image: torch.Tensor) -> torch.Tensor:
        red, green, blue = image.unbind(channels)
        return (0.299 * red + 0.587 * green + 0.114 * blue).to(image.dtype)

    return gray


def _channels(op: OpSpec) -> int:
    return -3 if op.name == "rgb_to_gray_chw" else -1
