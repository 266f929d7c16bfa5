"""Products of every size, and the least one that each kernel of gemm.h is chosen for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

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

    def line(self, capability: int, linear: bool) -> str:
        a = (self.k, 1) if self.layouts[0] == "k" else (1, self.m)
        b = (1, self.k) if self.layouts[1] == "k" else (self.n, 1)
        precision = ("ieee", "tf32", "tf32x3").index(self.precision)
        values = (self.dtype.itemsize, precision, capability, self.m, self.n, self.k, *a, *b)
        return " ".join(map(str, (*values, self.batch, int(self.aligned), int(linear))))

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        def made(lines: int, layout: str) -> torch.Tensor:
            shape = (self.batch, lines, self.k) if layout == "k" else (self.batch, self.k, lines)
            skip = 0 if self.aligned else 1
            flat = torch.randn(skip + self.batch * lines * self.k, device="cuda").to(self.dtype)
            matrix = flat[skip:].view(shape)
            return matrix if layout == "k" else matrix.mT

        a, b = made(self.m, self.layouts[0]), made(self.n, self.layouts[1]).mT
        return (a, b) if self.batch > 1 else (a[0], b[0])


LAYOUTS = ("kk", "kl", "lk", "ll")
_SIZES = (1, 4, 8, 17, *(2**e for e in range(5, 15)), 40, 200, 640, 1000, 3000, 6000)
#: The first is no whole number of vectors.
_KS = (21, 136, 264, 520, 1032, 2056, 4104)
#: Tiles, but for a border, of which all SMs take as many at once, or that many in parts of two,
#: three or four: where splits pay.
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
    """The choice as a function of cases, compiled without CUDA."""
    answers = plan_program(tmp_path_factory, "gemm_plan.cpp")

    def choose(cases: list[Case], capability: int = 90, linear: bool = False) -> list[str]:
        return answers(case.line(capability, linear) for case in cases)

    return choose


def kinds(linear: bool) -> list[tuple[torch.dtype, str, str]]:
    """Every dtype, precision and layouts that a kernel may be chosen by. Those of float32 decide
    about copies alone, and a layer knows one precision.
    """
    precisions = ("ieee",) if linear else ("ieee", "tf32", "tf32x3")
    halves = itertools.product((torch.bfloat16, torch.float16), ("ieee",), LAYOUTS)
    return [*halves, *itertools.product((torch.float32,), precisions, ("kk",))]


def kernel(plan: str) -> str:
    """What multiplies: as many blocks as there are, of whatever was copied before."""
    return re.sub(r"^pack.*, | grid \d+", "", plan)


def kernels(plans: Plans, cases: list[Case], linear: bool = False) -> dict[str, Case]:
    """Every kernel that any of the cases is given, and the first that is."""
    found: dict[str, Case] = {}
    for case, plan in zip(cases, plans(cases, linear=linear), strict=True):
        found.setdefault(f"{kernel(plan)}, {case.dtype}, {case.precision}", case)
    return found


def smallest(plans: Plans, linear: bool = False) -> dict[str, Case]:
    """Every kernel that any size is given, and the smallest case of it. One with as many stages as
    fill a ring comes before one without.
    """
    cases = [
        Case(m, n, k, layouts, dtype, precision)
        for (m, n), k in itertools.product([*itertools.product(_SIZES, _SIZES), *_WAVES], _KS)
        for dtype, precision, layouts in kinds(linear)
    ]
    return kernels(plans, sorted(cases, key=lambda c: (c.k < 512, c.m * c.n * c.k)), linear)
