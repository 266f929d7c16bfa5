"""Tiles of a Triton mixture of experts, by how many tokens an expert has. Needs no Triton."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """What one program computes at once, and how."""

    #: Rows and columns of the result, and what it takes of K in a step.
    m: int
    n: int
    k: int
    #: Blocks of rows whose programs run together, so that they share columns of a matrix.
    group: int
    warps: int
    stages: int


#: From how many tokens an expert on, the tiles to try. Few tokens stream matrices: narrow blocks
#: for more programs, and long steps. Many multiply: many rows pay for wide blocks of columns.
_TABLE: tuple[tuple[float, tuple[Tile, ...]], ...] = (
    (0, (Tile(16, 64, 128, 1, 4, 4), Tile(16, 128, 128, 1, 8, 3), Tile(16, 32, 256, 1, 4, 3))),
    (8, (Tile(16, 64, 128, 1, 4, 4), Tile(16, 128, 64, 1, 4, 4), Tile(32, 128, 64, 8, 4, 4))),
    (24, (Tile(32, 128, 64, 8, 4, 4), Tile(64, 128, 64, 8, 4, 4), Tile(32, 256, 64, 8, 8, 3))),
    (48, (Tile(64, 128, 64, 16, 4, 4), Tile(64, 256, 64, 16, 8, 3), Tile(128, 128, 64, 16, 8, 4))),
    (96, (Tile(128, 256, 64, 16, 8, 3), Tile(128, 128, 64, 16, 8, 4), Tile(64, 256, 64, 16, 8, 3))),
)
#: How many tiles there are to try for any number of tokens.
CANDIDATES = 3


def tiles(tokens_per_expert: float) -> tuple[Tile, ...]:
    """Returns the tiles to try, the likeliest first.

    Example::

        assert tiles(1000.0)[0][:3] == (128, 256, 64)
    """
    return [tiles for least, tiles in _TABLE if least <= tokens_per_expert][-1]
