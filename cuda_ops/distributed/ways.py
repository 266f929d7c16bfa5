"""How tokens reach experts that several ranks have, and why that way."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NoReturn

#: Bytes a second of one direction of NVLink of an H100 or H200, as NVIDIA states it.
WIRE = 450e9
#: Seconds that a dispatch takes beyond its bytes: the host waits for the router, rows are sorted by
#: rank, and each kind of rows has a collective. 1.8 to 2.1 ms with two H200 and 8192 tokens a rank,
#: 1.3 with fewer (``python -m benchmarks.moe_ranks``, 2026-11-27, torch 2.11).
_WAIT = 1.8e-3
#: Seconds on the wire, one way, that are worth two chunks, and how many there are at most. A chunk
#: reads the matrices again, fills up tiles of its own and takes the host as long as a call: on two
#: H200, 75 us of Qwen3 with 8192 tokens are not worth two, and 149 us of Mixtral are; on four, 224
#: and 447 us are, and no case gained by more than two.
_CHUNK, _MOST_CHUNKS = 70e-6, 2


@dataclass(frozen=True)
class Way:
    """How tokens reach their experts, and why that way."""

    name: str
    #: What the busiest rank sends, to its experts and back each.
    gather_bytes: int
    dispatch_bytes: int
    #: Into how many parts gathered tokens are cut, so that one is computed while others are sent;
    #: where no gradient is wanted, whose kept values would have to be joined.
    chunks: int = 1

    def __str__(self) -> str:
        saved = 2 * (self.gather_bytes - self.dispatch_bytes) / WIRE
        return (
            f"{self.name}: {self.gather_bytes} bytes each way by gather, in {self.chunks} chunks, "
            f"{self.dispatch_bytes} by dispatch, which saves {saved * 1e6:.0f} us on the wire and "
            f"takes {_WAIT * 1e6:.0f} us more on the way"
        )


def way(tokens: Sequence[int], experts: Sequence[int], top_k: int, row_bytes: int) -> Way:
    """Returns the way that ``cuda_ops.moe(..., group=g)`` takes; printed, it says why.

    A token's experts are taken as drawn at random: routers are trained to spread them. Within a
    CUDA graph tokens are gathered, whatever this says.

    Args:
        tokens: how many each rank brings.
        experts: how many each rank has.
        top_k: experts of a token.
        row_bytes: those of a token's row: H times the bytes of a number.

    Raises:
        ValueError: there is no rank, the lists are of different lengths, a number is no int of 0 or
            more, or there are fewer experts than a token has.

    Example:
        >>> print(way([64, 64], [64, 64], top_k=8, row_bytes=4096).name)
        gather
    """
    return _way(tuple(tokens), tuple(experts), top_k, row_bytes)


@functools.lru_cache(maxsize=1024)
def _way(tokens: tuple[int, ...], experts: tuple[int, ...], top_k: int, row_bytes: int) -> Way:
    _check(tokens, experts, top_k, row_bytes)
    total, ranks = sum(experts), len(tokens)
    gather = (ranks - 1) * max(tokens) * row_bytes
    meets = [1 - math.comb(total - n, top_k) / math.comb(total, top_k) for n in experts]
    dispatch = math.ceil(
        row_bytes
        * max(
            sum(count * meets[to] for to in range(ranks) if to != rank)
            for rank, count in enumerate(tokens)
        )
    )
    name = "dispatch" if 2 * (gather - dispatch) / WIRE > _WAIT else "gather"
    chunks = min(_MOST_CHUNKS, max(1, int(gather / WIRE / _CHUNK)))
    return Way(name, gather, dispatch, chunks)


def _check(tokens: tuple[int, ...], experts: tuple[int, ...], top_k: int, row_bytes: int) -> None:
    if not tokens:
        _refuse("tokens", "a number for each rank", "none")
    if len(experts) != len(tokens):
        _refuse("experts", f"a number for each of {len(tokens)} ranks", f"{len(experts)}")
    given: dict[str, tuple[Any, ...]]
    given = {"tokens": tokens, "experts": experts, "top_k": (top_k,), "row_bytes": (row_bytes,)}
    for argument, numbers in given.items():
        for number in numbers:
            if not _is_int(number) or number < 0:
                _refuse(argument, "an int of 0 or more", f"{number!r}")
    if top_k > sum(experts):
        _refuse("top_k", f"at most {sum(experts)}, the experts of all ranks", f"{top_k}")


def _is_int(given: object) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool)


def _refuse(argument: str, expected: str, got: str) -> NoReturn:
    raise ValueError(f"way: argument '{argument}': expected {expected}, got {got}")
