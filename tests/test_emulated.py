"""The kernels for Hopper and Ampere run on a CPU: see emulator/translate.py for what that shows."""

from __future__ import annotations

import platform
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from emulator.translate import translate

from cuda_ops import toolchain

HERE = Path(__file__).parent
EMULATOR = HERE / "emulator"
SOURCES = HERE.parent / "src"

#: Few, so that blocks take one tile after the other of problems that a CPU can compute.
MULTIPROCESSORS = 3

TIMINGS = ["late", "early"]  # of wgmma's reads

# tokens, hidden, inner, experts, top_k, dtype, routing, keep, backward, capability
Moe = tuple[int, int, int, int, int, str, str, int, int, int]
MOE: dict[str, tuple[str, Moe]] = {
    # One token: the second product adds up the results itself.
    "token": ("token", (1, 136, 72, 8, 2, "bfloat16", "even", 1, 0, 90)),
    "token, 8 of 8 experts": ("token", (1, 136, 72, 8, 8, "float16", "even", 0, 0, 90)),
    "token, choices of no expert": ("token", (1, 256, 320, 16, 6, "bfloat16", "invalid", 1, 0, 90)),
    "token, one tiny expert": ("token", (1, 16, 8, 1, 1, "bfloat16", "even", 1, 0, 90)),
    "token, most choices": ("token", (1, 1040, 264, 3, 16, "bfloat16", "even", 0, 0, 80)),
    # Each block finds its assignments by itself.
    "direct, two tokens": ("no map", (2, 64, 40, 4, 2, "bfloat16", "even", 1, 0, 90)),
    "direct, tiles of 16": ("stream 16", (32, 136, 24, 8, 2, "bfloat16", "even", 1, 0, 90)),
    "direct, choices of no expert": ("no map", (9, 72, 56, 8, 7, "bfloat16", "invalid", 0, 0, 90)),
    "direct, all of one expert": ("no map", (64, 72, 56, 40, 1, "bfloat16", "one", 1, 0, 90)),
    "direct, experts without any": ("no map", (64, 40, 16, 40, 1, "float16", "some", 1, 0, 90)),
    "direct, K by several warps": ("splits 8", (33, 2048, 16, 2, 1, "bfloat16", "one", 0, 0, 90)),
    # Assignments are sorted by expert first.
    "stream": ("stream 16", (100, 264, 136, 48, 3, "bfloat16", "even", 1, 0, 90)),
    "stream, uneven": ("stream 16", (70, 264, 136, 24, 3, "float16", "some", 1, 0, 90)),
    "stream, choices of no expert": ("stream 32", (70, 264, 40, 12, 3, "bfloat16", "invalid", 1, 0, 90)),
    "stream, most experts": ("stream 8", (100, 40, 72, 512, 8, "bfloat16", "even", 1, 0, 80)),
    "stream, then mma backward": ("backward plan: mma", (100, 136, 24, 24, 2, "bfloat16", "even", 0, 1, 90)),
    # TMA, cp.async and wgmma, forward and backward.
    "hopper": ("backward plan: hopper", (150, 136, 72, 3, 2, "bfloat16", "even", 1, 1, 90)),
    "hopper, all of one expert": ("hopper", (130, 72, 136, 4, 1, "float16", "one", 1, 1, 90)),
    "hopper, choices of no expert": ("hopper", (150, 200, 136, 5, 2, "bfloat16", "invalid", 1, 1, 90)),
    "hopper, experts without any": ("hopper", (257, 8, 264, 6, 2, "bfloat16", "some", 1, 1, 90)),
    "hopper, one row block": ("hopper", (30, 328, 8, 1, 1, "float16", "even", 0, 1, 90)),
    # mma.sync: rows that are no whole vectors, and GPUs before Hopper.
    "mma, rows of 36": ("backward plan: mma", (40, 36, 20, 3, 2, "bfloat16", "invalid", 1, 1, 90)),
    "mma": ("backward plan: mma", (150, 136, 72, 3, 2, "bfloat16", "even", 1, 1, 80)),
    "simt": ("backward plan: simt", (20, 36, 20, 3, 2, "float32", "invalid", 1, 1, 90)),
}  # fmt: skip

# kernel, dtype, precision, a, b, tile, swap, splits, batch, m, n, k
Matmul = tuple[str, str, str, str, str, int, int, int, int, int, int, int]
ALIGNED: dict[str, Matmul] = {
    **{
        f"hopper, {a[:3]} {b[:3]}, tile {tile}": (
            *("hopper", "bfloat16", "ieee", a, b, tile, 0, 1, 1, m, n, 200),
        )
        for a, b, tile, m, n in [
            ("rows", "columns", 256, 260, 520),
            ("rows", "columns", 192, 260, 264),
            ("rows", "columns", 128, 260, 264),
            ("columns", "rows", 256, 300, 264),
            ("columns", "rows", 192, 130, 264),
            ("rows", "rows", 128, 130, 264),
            ("columns", "columns", 128, 130, 264),
            ("rows", "columns", 64, 260, 64),
            ("rows", "rows", 32, 130, 24),
            ("columns", "columns", 16, 130, 9),
        ]
    },
    "hopper, swapped, tile 16": ("hopper", "bfloat16", "ieee", "rows", "columns", 16, 1, 1, 1, 10, 264, 200),
    "hopper, swapped, tile 32": ("hopper", "bfloat16", "ieee", "columns", "rows", 32, 1, 1, 1, 30, 264, 200),
    "hopper, swapped, tile 64": ("hopper", "bfloat16", "ieee", "rows", "rows", 64, 1, 1, 1, 50, 264, 200),
    "hopper, splits 2, tile 256": ("hopper", "bfloat16", "ieee", "rows", "columns", 256, 0, 2, 1, 130, 264, 520),
    "hopper, splits 4, swapped": ("hopper", "bfloat16", "ieee", "rows", "columns", 16, 1, 4, 1, 10, 264, 1032),
    "hopper, batch": ("hopper", "bfloat16", "ieee", "rows", "rows", 128, 0, 1, 3, 130, 136, 72),
    "hopper, tf32": ("hopper", "float32", "tf32", "rows", "columns", 128, 0, 1, 1, 130, 264, 100),
    "hopper, tf32, splits 2, narrow": ("hopper", "float32", "tf32", "rows", "columns", 32, 0, 2, 1, 130, 24, 264),
}  # fmt: skip
#: Rows of a length that the copy engine cannot read; for hopper they are copied first.
UNALIGNED: dict[str, Matmul] = {
    "copies, then hopper": ("hopper", "bfloat16", "ieee", "rows", "rows", 128, 0, 1, 2, 70, 75, 77),
    "copies by columns, then hopper": ("hopper", "bfloat16", "ieee", "columns", "columns", 64, 0, 1, 1, 131, 61, 131),
    "copies, then tf32": ("hopper", "float32", "tf32", "rows", "rows", 128, 0, 1, 1, 130, 75, 77),
    "copies, then tf32x3": ("hopper", "float32", "tf32x3", "rows", "rows", 128, 0, 1, 2, 130, 75, 177),
    "copies, then tf32x3, splits 2": ("hopper", "float32", "tf32x3", "columns", "rows", 128, 0, 2, 1, 70, 130, 330),
    "mma, tile 64": ("mma", "bfloat16", "ieee", "rows", "rows", 64, 0, 1, 2, 70, 75, 77),
    "mma, tile 128, tf32": ("mma", "float32", "tf32", "columns", "rows", 128, 0, 1, 1, 130, 75, 77),
    "mma, tile 64, tf32x3": ("mma", "float32", "tf32x3", "rows", "columns", 64, 0, 1, 1, 70, 75, 177),
    "fma": ("fma", "float32", "ieee", "rows", "rows", 128, 0, 1, 2, 140, 131, 300),
    "fma, by columns": ("fma", "float32", "ieee", "columns", "columns", 128, 0, 1, 1, 70, 75, 77),
}  # fmt: skip
FASTER_ALIGNED: dict[str, Matmul] = {
    "mma, whole vectors": ("mma", "bfloat16", "ieee", "rows", "columns", 128, 0, 1, 1, 136, 136, 136),
    "mma, whole vectors, transposed": ("mma", "bfloat16", "ieee", "columns", "rows", 64, 0, 1, 1, 136, 72, 136),
    "fma, whole vectors": ("fma", "float32", "ieee", "columns", "rows", 128, 0, 1, 1, 136, 136, 136),
}  # fmt: skip

#: What is taken out of gemm_grouped_hopper.cuh, what is there instead, and what finds it.
FAULTS = {
    "no fence": ("    tma_store_fence();\n    __syncwarp();", "__syncwarp();", "without a fence"),
    "no wait": ("    cp_async_wait<kPending>();", "", "out is wrong|without a fence"),
    "an arrival too few expected": (
        *("GroupedRing ring(shared, 4 + 1)", "GroupedRing ring(shared, 4)", "one arrival too many"),
    ),
    "an arrival too many expected": (
        *("GroupedRing ring(shared, 4 + 1)", "GroupedRing ring(shared, 4 + 2)", "deadlock"),
    ),
    "no swizzle": ("((chunk ^ (row % 8)) * 16));\n    GroupedCopies", "(chunk * 16));\n    GroupedCopies", "out is wrong"),
    "released while products run": (
        *("if (previous >= 0) ring.release(previous);\n    previous = ring.stage;",),
        *("ring.release(ring.stage);", "out is wrong"),
    ),
}  # fmt: skip


def compiled(program: Path, flags: list[str | Path]) -> Path:
    """The program of one source, or its object file."""
    done = subprocess.run(
        ["g++", "-std=c++17", "-O1", *flags, "-o", program], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{program.name} does not compile:\n{done.stderr[-4000:]}"
    return program


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Compiles run_<name>.cpp with translated headers: build(name, headers)."""
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("needs the headers of a CUDA toolkit")
    if platform.machine() != "x86_64":
        pytest.skip(f"the emulator's fibers are for x86_64, this is {platform.machine()}")
    folder = tmp_path_factory.mktemp("emulator")
    include: list[str | Path] = [f"-I{EMULATOR}", "-isystem", home / "include"]
    strict = ["-Wall", "-Wextra", "-Werror"]
    objects = [
        compiled(folder / f"{name}.o", [*strict, *include, "-c", EMULATOR / f"{name}.cpp"])
        for name in ("emulator", "copy_engine")
    ]

    def build(name: str, headers: Path) -> Path:
        # What nvcc knows, pragmas for one, g++ warns of.
        flags = ["-w", f"-I{headers}", *include, EMULATOR / f"run_{name}.cpp", *objects]
        return compiled(headers / name, flags)

    return build


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("translated") / "include"
    translate(SOURCES, out, ("moe_experts.cu",), MULTIPROCESSORS)
    return out


@pytest.fixture(scope="module")
def run_moe(build: Callable[[str, Path], Path], headers: Path) -> Path:
    return build("moe", headers)


@pytest.fixture(scope="module")
def run_matmul(build: Callable[[str, Path], Path], headers: Path) -> Path:
    return build("matmul", headers)


def run(
    program: Path, timing: str, seed: int, **arguments: object
) -> subprocess.CompletedProcess[str]:
    given = {"timing": timing, "seed": seed, **arguments}
    command = [str(program), *(f"{name}={value}" for name, value in given.items())]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def check(program: Path, expected: str, timing: str, seed: int, **arguments: object) -> None:
    done = run(program, timing, seed, **arguments)
    said = f"{program.name} {arguments} with timing={timing} seed={seed} said\n{done.stdout}"
    assert done.returncode == 0, said
    assert expected in done.stdout, f"expected {expected!r}: {said}"


def check_moe(program: Path, expected: str, case: Moe, timing: str, seed: int) -> None:
    names = "tokens hidden inner experts top_k dtype routing keep backward capability".split()
    check(program, expected, timing, seed, **dict(zip(names, case, strict=True)))


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", MOE)
def test_moe(run_moe: Path, name: str, timing: str) -> None:
    plan, case = MOE[name]
    if timing == "early" and "hopper" not in plan:
        pytest.skip("has no wgmma, whose timing this is")
    check_moe(run_moe, plan, case, timing, seed=1)


@pytest.mark.parametrize("seed", range(12))
def test_any_moe(run_moe: Path, seed: int) -> None:
    draw = random.Random(seed)
    experts = draw.randint(1, draw.choice([9, 9, 70]))
    top_k = draw.randint(1, min(4, experts))
    tokens = draw.randint(1, draw.choice([12, 60 + 14 * experts // top_k]))
    tokens = min(tokens, 160)
    case: Moe = (
        *(tokens, 8 * draw.randint(1, 24), 8 * draw.randint(1, 24), experts, top_k),
        *(draw.choice(["float16", "bfloat16"]), draw.choice(["even", "one", "invalid", "some"])),
        *(draw.randint(0, 1), draw.randint(0, 1), 90),
    )
    check_moe(run_moe, "plan: ", case, draw.choice(TIMINGS), seed)


def check_matmul(program: Path, case: Matmul, timing: str, aligned: int) -> None:
    names = "kernel dtype precision a b tile swap splits batch m n k".split()
    arguments = dict(zip(names, case, strict=True))
    check(program, "", timing, 1, aligned=aligned, pack=1 - aligned, **arguments)


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", ALIGNED)
def test_matmul(run_matmul: Path, name: str, timing: str) -> None:
    check_matmul(run_matmul, ALIGNED[name], timing, aligned=1)


@pytest.mark.parametrize("name", FASTER_ALIGNED)
def test_matmul_of_whole_vectors(run_matmul: Path, name: str) -> None:
    check_matmul(run_matmul, FASTER_ALIGNED[name], "late", aligned=1)


@pytest.mark.parametrize("name", UNALIGNED)
def test_matmul_of_other_rows(run_matmul: Path, name: str) -> None:
    check_matmul(run_matmul, UNALIGNED[name], "late", aligned=0)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_is_found(
    build: Callable[[str, Path], Path], tmp_path: Path, fault: str | None
) -> None:
    headers = tmp_path / "include"
    translate(SOURCES, headers, (), MULTIPROCESSORS)
    header = headers / "gemm_grouped_hopper.cuh"
    if fault is None:
        check(build("grouped", headers), "out: ", "late", seed=1)
        return
    right, wrong, found = FAULTS[fault]
    text = header.read_text()
    assert right in text, f"{fault}: {header.name} no longer has {right!r}"
    header.write_text(text.replace(right, wrong, 1))
    done = run(build("grouped", headers), "late", seed=1)
    assert done.returncode == 1 and re.search(found, done.stdout), f"{fault}: {done.stdout}"
