"""Products of every size, and the smallest one that each kernel of gemm.h is chosen for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from conftest import plan_program


@dataclass(frozen=True)
class Case:
    """Sizes and layouts of one product; a layout is "k" (K-major) or "l" (line-major)."""

    m: int
    n: int
    k: int
    layouts: str = "kk"
    dtype: torch.dtype = torch.bfloat16
    precision: str = "ieee"
    batch: int = 1
    aligned: bool = True
    #: For a K-major a: elements from row to row and from matrix to matrix, b being one for all.
    walk: tuple[int, int] | None = None

    def line(self, device: str, linear: bool) -> str:
        a = (self.k, 1) if self.layouts[0] == "k" else (1, self.m)
        b = (1, self.k) if self.layouts[1] == "k" else (self.n, 1)
        precision = ("ieee", "tf32", "tf32x3").index(self.precision)
        steps = self.m * self.k, self.k * self.n
        if self.walk is not None:
            a, steps = (self.walk[0], 1), (self.walk[1], 0)
        values = (self.dtype.itemsize, precision, device, self.m, self.n, self.k, *a, *b)
        rest = (self.batch, int(self.aligned), int(linear), *steps)
        return " ".join(map(str, (*values, *rest)))

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        def made(lines: int, layout: str) -> torch.Tensor:
            shape = (self.batch, lines, self.k) if layout == "k" else (self.batch, self.k, lines)
            skip = 0 if self.aligned else 1
            flat = torch.randn(skip + self.batch * lines * self.k, device="cuda").to(self.dtype)
            matrix = flat[skip:].view(shape)
            return matrix if layout == "k" else matrix.mT

        a, b = made(self.m, self.layouts[0]), made(self.n, self.layouts[1]).mT
        return (a, b) if self.batch > 1 else (a[0], b[0])


#: What the GPU tests run on, and others: as device_info.h names or describes them.
H200, A100, T4 = "H200", "A100", "7.5,40,64"
LAYOUTS = ("kk", "kl", "lk", "ll")
_SIZES = (1, 4, 8, 17, *(2**e for e in range(5, 15)), 40, 200, 640, 1000, 3000, 6000)
#: The first is not a whole number of vectors; the last one is a whole number of cache lines, which
#: decides whether loads are waited for.
_KS = (21, 136, 264, 520, 1032, 2056, 4104, 6144)
#: Sizes a border below as many tiles as SMs, or below a half, a third or a quarter of that: where
#: splits pay.
_WAVES = [
    size
    for tiles in (33, 44, 66, 132)
    for rows in range(1, tiles + 1)
    for columns in (128, 160, 192, 224, 256)
    if tiles % rows == 0
    for sizes in [(128 * rows - 8, columns * tiles // rows - 8)]
    for size in (sizes, sizes[::-1])
]

Plans = Callable[..., list[str]]


def planner(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Returns the plan as a function of cases, compiled without CUDA."""
    answers = plan_program(tmp_path_factory, "gemm_plan.cpp")

    def choose(cases: list[Case], device: str = H200, linear: bool = False) -> list[str]:
        return answers(case.line(device, linear) for case in cases)

    return choose


def kinds(linear: bool) -> list[tuple[torch.dtype, str, str]]:
    """Returns every dtype, precision and layouts; a layer knows one precision."""
    precisions = [(torch.bfloat16, "ieee"), (torch.float16, "ieee"), (torch.float32, "ieee")]
    if not linear:
        precisions += [(torch.float32, "tf32"), (torch.float32, "tf32x3")]
    return [(*pair, layouts) for pair in precisions for layouts in LAYOUTS]


@cache
def anything(linear: bool = False) -> list[Case]:
    """Returns all sizes in order: first those with enough stages to fill a ring, and among them the
    smallest.
    """
    cases = [
        Case(m, n, k, layouts, dtype, precision)
        for (m, n), k in itertools.product([*itertools.product(_SIZES, _SIZES), *_WAVES], _KS)
        for dtype, precision, layouts in kinds(linear)
    ]
    return sorted(cases, key=lambda c: (c.k < 512, c.m * c.n * c.k))


def kernel(plan: str) -> str:
    """Returns the kernel of a plan, without its grid and the copies before it."""
    return re.sub(r"^pack.*, | grid \d+", "", plan)


def kernels(plans: Plans, cases: list[Case], linear: bool = False) -> dict[str, Case]:
    """Returns every kernel that any of the cases gets, and the first case that does."""
    found: dict[str, Case] = {}
    for case, plan in zip(cases, plans(cases, linear=linear), strict=True):
        found.setdefault(f"{kernel(plan)}, {case.dtype}, {case.precision}", case)
    return found


def smallest(plans: Plans, linear: bool = False) -> dict[str, Case]:
    """Returns every kernel that any size gets, and the smallest case of it."""
    return kernels(plans, anything(linear), linear)


#: Families for which the samples drawn for any check are small enough.
_DRAWN = {"mma 64", "fma 32x32", "simt 64"}


def families(plans: Plans, cases: list[Case], linear: bool = False) -> set[str]:
    """Returns the families of the cases, with one name for wide tiles and one for narrow ones:
    "pack a", "wide alone", "wide A^T", "narrow swapped", "narrow splits 2", "fma 128x64",
    "fma quads of a".
    """
    found: set[str] = set()
    for plan in set(plans(cases, linear=linear)):
        copies, _, chosen = re.sub(r" grid \d+", "", plan).rpartition(", ")
        found |= {copies} - {""}
        if tile := re.match(r"hopper (swapped )?128x(\d+)", chosen):
            width = "narrow" if int(tile[2]) < 128 else "wide"
            order = "swapped" if tile[1] else "straight"
            shared = re.findall(r"splits [23]|pairs", chosen) or ["alone"]
            words = [order, *shared, *re.findall(r".\^T", chosen)]
            found |= {f"{width} {word}" for word in words}
        elif tile := re.match(r"(fma \d+x\d+)(.*)", chosen):
            found |= {tile[1], "fma" + tile[2]} - {"fma"}
        else:  # a stream, swapped or not
            found.add(re.sub(r" 8 splits \d", "", chosen))
    return found - _DRAWN
