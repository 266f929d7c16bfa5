"""Some operators as one would write them in Triton: elementwise ones in blocks of 1024 elements,
masked at the end, and a mixture of experts as inference engines run it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from benchmarks.moe_tiles import tiles
from cuda_ops.ops._moe import torch_route

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


# --- a mixture of experts ---------------------------------------------------------------

# Assignments are sorted by expert, and each expert's are padded to whole blocks of rows with a
# number that belongs to no assignment. Then one kernel serves both products: a program takes a
# block of rows, gathers them, and multiplies by the matrix of the block's expert.

#: Assignments that one program sorts; more are sorted by torch.
_SORTED_AT_ONCE = 512


@triton.jit
def _blocks_of_few(
    experts, starts, rows, block_experts, count, blocks, num_experts, block: tl.constexpr,
    most: tl.constexpr, most_experts: tl.constexpr, most_blocks: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, most)
    mine = tl.load(experts + at, mask=at < count, other=num_experts).to(tl.int32)
    each = tl.arange(0, most_experts)
    counts = tl.where(each < num_experts, tl.histogram(mine, most_experts), 0)
    padded = (counts + block - 1) // block * block
    ends = tl.cumsum(padded, 0)
    tl.store(starts + each, ends - padded)
    before = tl.zeros((most,), dtype=tl.int32)
    for first in range(0, count, chunk):
        number = first + tl.arange(0, chunk)
        other = tl.load(experts + number, mask=number < count, other=-1).to(tl.int32)
        earlier = (mine[:, None] == other[None, :]) & (number[None, :] < at[:, None])
        before += tl.sum(earlier.to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(rows + tl.load(starts + mine) + before, at, mask=at < count)
    number = tl.arange(0, most_blocks)
    owner = tl.sum((number[:, None] * block >= ends[None, :]).to(tl.int32), 1)
    owner = tl.where(owner < num_experts, owner, -1)
    tl.store(block_experts + number, owner, mask=number < blocks)


@triton.jit
def _experts_product(
    x, w, out, rows, block_experts, scales, assignments, n, k, fan,
    scaled: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    group: tl.constexpr, blocks,
):  # fmt: skip
    # Programs of a group share their columns of w while it is in the cache.
    across = tl.cdiv(n, block_n)
    per_group = group * across
    first = tl.program_id(0) // per_group * group
    height = min(blocks - first, group)
    m_block = first + tl.program_id(0) % per_group % height
    n_block = tl.program_id(0) % per_group // height
    expert = tl.load(block_experts + m_block).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(rows + m_block * block_m + tl.arange(0, block_m))
    valid = row < assignments
    column = n_block * block_n + tl.arange(0, block_n)
    along = tl.arange(0, block_k)
    x_at = x + (row // fan).to(tl.int64)[:, None] * k + along[None, :]
    w_at = w + expert * n * k + column.to(tl.int64)[None, :] * k + along[:, None]
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for step in range(0, k, block_k):
        inside = along < k - step
        a = tl.load(x_at + step, mask=valid[:, None] & inside[None, :], other=0.0)
        b = tl.load(w_at + step, mask=(column < n)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
    if scaled:
        total *= tl.load(scales + row, mask=valid, other=0.0)[:, None]
    out_at = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=valid[:, None] & (column < n)[None, :])


def _blocks(
    experts: torch.Tensor, num_experts: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the rows of all blocks, the experts of the blocks (-1: none), and their number."""
    chosen, count = experts.flatten(), experts.numel()
    blocks = min(count, triton.cdiv(count, block) + num_experts)
    rows = torch.full((blocks * block,), count, dtype=torch.int32, device=experts.device)
    if count <= _SORTED_AT_ONCE:
        owners = rows.new_empty(blocks)
        sizes = [triton.next_power_of_2(v) for v in (count, num_experts + 1, blocks)]
        starts = rows.new_empty(sizes[1])
        _blocks_of_few[(1,)](
            chosen, starts, rows, owners, count, blocks, num_experts, block, *sizes, 32, num_warps=8
        )  # fmt: skip
        return rows, owners, blocks
    ordered, order = torch.sort(chosen, stable=True)
    counts = torch.histc(ordered.float(), num_experts, 0, num_experts - 1)
    padded = (counts + block - 1) // block * block
    ends, before = padded.cumsum(0), counts.cumsum(0) - counts
    place = torch.arange(count, device=rows.device) - before[ordered] + (ends - padded)[ordered]
    rows[place.long()] = order.int()
    starts = torch.arange(blocks, device=rows.device) * block
    owners = torch.searchsorted(ends, starts.to(ends.dtype), right=True)
    return rows, torch.where(owners < num_experts, owners, -1).int(), blocks


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: int,
    choice: int = 0,
) -> torch.Tensor:
    """Runs softmax routing, renormalized, and SwiGLU experts; without a gradient. ``choice`` is a
    tile of the table's for so many tokens.
    """
    weights, experts = torch_route(router_logits, top_k)
    (tokens, hidden), count = x.shape, w_down.shape[0]
    assignments = tokens * top_k
    tile = tiles(assignments / count)[choice]
    rows, owners, blocks = _blocks(experts, count, tile.m)

    def product(source: torch.Tensor, w: torch.Tensor, fan: int, scaled: bool) -> torch.Tensor:
        n, k = w.shape[1:]
        out = source.new_empty(assignments, n)
        _experts_product[(blocks * triton.cdiv(n, tile.n),)](
            source, w, out, rows, owners, weights, assignments, n, k, fan,
            scaled, tile.m, tile.n, tile.k, tile.group, blocks,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out

    activations = silu_and_mul(product(x, w_gate_up, top_k, False))
    return product(activations, w_down, 1, True).view(tokens, top_k, hidden).sum(1)
