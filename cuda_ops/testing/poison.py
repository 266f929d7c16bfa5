"""Fills new allocations and shared memory with a chosen byte, so that unwritten memory shows."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from cuda_ops.testing.allocations import index_of
from cuda_ops.testing.case import NotRunError

#: Huge or NaN in every floating dtype, and tiny in each. Not 0xFF: glibc cannot fill with it.
POISONS = (0xFE, 0x2A)
# malloc.h
_M_PERTURB, _M_MXFAST = -6, 1
# More than the outputs and temporaries of any sample need, in both of the CUDA allocator's pools.
_BLOCKS = (*[512 << 10] * 32, 64 << 20)


@contextlib.contextmanager
def poisoned(device: str, byte: int) -> Iterator[None]:
    """Fills all memory that is allocated inside with ``byte``.

    Raises:
        NotRunError: the C library cannot do this.
    """
    with _cuda(device, byte) if device.startswith("cuda") else _malloc(byte):
        yield


@contextlib.contextmanager
def _malloc(byte: int) -> Iterator[None]:
    """Makes glibc fill what it allocates, which is with the complement of M_PERTURB."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        raise NotRunError("needs a C library with mallopt") from None
    mallopt(_M_MXFAST, 0)
    mallopt(_M_PERTURB, byte ^ 0xFF)
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)


@contextlib.contextmanager
def _cuda(device: str, byte: int) -> Iterator[None]:
    """Fills a fresh pool of the caching allocator and frees it before the operator runs, and leaves
    the byte in the shared memory of all multiprocessors.
    """
    index = index_of(device)
    matrix = torch.full((_SIDE, 2 * _SIDE), byte, dtype=torch.uint8, device=device)
    matrix, product = matrix.view(torch.bfloat16), matrix.new_empty((_SIDE, 2 * _SIDE))
    # First in torch's own pool, since cuBLAS keeps its workspace.
    _fill_shared(matrix, product)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(), index):
        blocks = [torch.full((size,), byte, dtype=torch.uint8, device=device) for size in _BLOCKS]
        torch.cuda.synchronize(device)
        del blocks
        _fill_shared(matrix, product)  # the last to run before the operator
        yield
        torch.cuda.synchronize(device)


#: Rows and columns of a product that has more tiles than any GPU has multiprocessors.
_SIDE = 4096


def _fill_shared(matrix: torch.Tensor, product: torch.Tensor) -> None:
    """Multiplies a matrix by itself: a product keeps tiles of both factors in shared memory, which
    nothing clears for the next kernel.
    """
    torch.mm(matrix, matrix, out=product.view(torch.bfloat16))
