"""The same operators as one writes them in Triton: blocks of 1024 elements, masked at the end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _silu(x, out, numel, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < numel).to(tl.float32)
    tl.store(out + at, value * tl.sigmoid(value), mask=at < numel)


@triton.jit
def _silu_and_mul(x, out, half, block: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    gate = tl.load(x + row * 2 * half + at, mask=at < half).to(tl.float32)
    up = tl.load(x + row * 2 * half + half + at, mask=at < half).to(tl.float32)
    tl.store(out + row * half + at, gate * tl.sigmoid(gate) * up, mask=at < half)


def silu(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _silu[(triton.cdiv(x.numel(), _BLOCK),)](x, out, x.numel(), _BLOCK)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], half))
    _silu_and_mul[(out.numel() // half, triton.cdiv(half, _BLOCK))](x, out, half, _BLOCK)
    return out
