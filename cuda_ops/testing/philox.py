"""The numbers of ``src/utils/random.h`` by torch, for references of random operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
#: Blocks of words that are made at once, since each takes several times its own memory.
_AT_ONCE = 1 << 22


def philox(counter: Sequence[torch.Tensor], key: Sequence[int]) -> list[torch.Tensor]:
    """Returns the four words of Philox4x32-10 for each counter of four words, as int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(_MULTIPLIERS[0], c0), _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def _product(factor: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the upper and the lower 32 bits; int64 has no room for all 64."""
    by_low, by_high = words * (factor & 0xFFFF), words * (factor >> 16)
    total = (by_low >> 16) + by_high
    return total >> 16, ((total & 0xFFFF) << 16) | (by_low & 0xFFFF)


def random_bits(key: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns ``Draw::bits()`` of each element of a tensor, as int64.

    Args:
        key: the random key of the call, two int64 numbers; the result is on its device.
        shape: the shape of the tensor.

    Example::

        def reference(x, key, p=0.5):
            dropped = random_uniform(key, x.shape) < p
            return torch.where(dropped, 0, x / (1 - p))
    """
    numel = math.prod(shape)
    key_words, stream = ([int(n) & _LOW, int(n) >> 32 & _LOW] for n in key.tolist())
    words = torch.empty((numel + 3) // 4, 4, dtype=torch.int64, device=key.device)
    for start in range(0, len(words), _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        numbers = torch.arange(start, start + len(part), device=key.device)
        counter = [numbers & _LOW, numbers >> 32, *(torch.full_like(numbers, n) for n in stream)]
        part.copy_(torch.stack(philox(counter, key_words), dim=1))
    return words.flatten()[:numel].view(tuple(shape))


def random_uniform(key: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns ``Draw::uniform()`` of each element of a tensor, as float64."""
    return (random_bits(key, shape) >> 8).double() * 2.0**-24
