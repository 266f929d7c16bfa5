"""``rgb_to_gray``: the exact weighted sum in integers, and what others compute instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import BenchmarkCase, OpSpec, Peer


@hookimpl
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    channels = _channels(op)

    def reference(image: torch.Tensor, order: str = "RGB") -> torch.Tensor:
        red, green, blue = in_order(image.to(torch.int64), channels, order)
        gray = (299 * red + 587 * green + 114 * blue + 500) // 1000
        return gray.to(torch.uint8)

    return reference


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer]:
    from cuda_ops.benchmarking.peers import torch_peers

    return torch_peers(composed(_channels(op)))


def in_order(image: torch.Tensor, channels: int, order: str) -> tuple[torch.Tensor, ...]:
    """Returns red, green and blue of an image."""
    planes = image.unbind(channels)
    return planes if order == "RGB" else planes[::-1]


def composed(channels: int) -> Callable[..., torch.Tensor]:
    """Computes what one writes in PyTorch, rounded as the operator rounds: 0.5002 lifts ties over
    the half, and exceeds it by less than the 0.001 that lies between two different sums.
    """

    def gray(image: torch.Tensor, order: str = "RGB") -> torch.Tensor:
        red, green, blue = in_order(image, channels, order)
        return (0.299 * red + 0.587 * green + 0.114 * blue + 0.5002).to(image.dtype)

    return gray


#: Images, height, width and why.
_POINTS = (
    (1, 720, 1280, "one camera frame: the launch is much of the cost"),
    (1, 1080, 1920, "Full HD"),
    (1, 2160, 3840, "4K"),
    (1, 4320, 7680, "8K: beyond the cache"),
    (16, 720, 1280, "a batch of camera frames"),
    (64, 1080, 1920, "memory bandwidth alone"),
)


@hookimpl
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase]:
    return [_case(op, *point) for point in _POINTS]


def _case(op: OpSpec, images: int, height: int, width: int, reason: str) -> BenchmarkCase:
    from cuda_ops.benchmarking.rotation import maker

    shape = [images, height, width]
    shape.insert(len(shape) + 1 + _channels(op), 3)
    return BenchmarkCase(
        "x".join(map(str, shape)) + " uint8",
        maker(((tuple(shape), torch.uint8),)),
        bytes=images * height * width * (3 + 1),
        reason=reason,
        dtype=torch.uint8,
    )


def _channels(op: OpSpec) -> int:
    return -3 if op.name == "rgb_to_gray_chw" else -1
