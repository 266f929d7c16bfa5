"""Kernels of matrix products, mixtures of experts, sorts and more, run on a CPU by tests/emulator.

The program that ran prints whatever is wrong: a value and its place, a deadlock and which thread
waits for what, an access and its address. emulator/translate.py says what this can show.
"""

from __future__ import annotations

import functools
import os
import platform
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import made_once
from emulated_cases import (
    ATTENTION,
    FOREACH,
    MATMUL,
    MOE,
    NORM,
    RADIX,
    RADIX_STEPS,
    ROUTE,
    SCAN,
    SORT,
    TOPK,
    Moe,
)
from emulated_faults import FAULTS, USER_OF
from emulator.translate import translate

from cuda_ops.build import toolchain
from cuda_ops.dev.scaffold import new_pair

HERE = Path(__file__).parent
EMULATOR = HERE / "emulator"
SOURCES = HERE.parent / "src"

#: Few tokens are many, in problems that a CPU can compute.
CONSTANTS = {"kFewTokens": 40}
KERNELS = (
    "add_rms_norm_.cu", "attention.cu", "bitonic_topk.cu", "cache_write_.cu", "cumulative_sum.cu",
    "dequantize_int4.cu", "foreach_axpy.cu", "layer_norm.cu", "moe_experts.cu", "moe_route.cu",
    "moe_send_.cu", "quantize.cu", "rms_norm.cu", "rotary_embedding.cu", "softmax_cross_entropy.cu",
)  # fmt: skip

#: The programs that run_*.cpp make; the one that takes longest to compile comes first.
PROGRAMS = (
    "matmul", "moe", "attention", "norm", "route", "sort", "grouped", "rotary", "loss", "quantize",
)  # fmt: skip

Build = Callable[[Path, Path], None]
Program = Callable[[str], Path]

# --- programs -------------------------------------------------------------------------


def compiled(result: Path, *flags: str | Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", *flags, "-o", result]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{result.name} does not compile:\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def build(folder_of_all: Path) -> Build:
    """``build(program, headers)`` compiles run_<name>.cpp with translated headers."""
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("needs the headers of a CUDA toolkit")
    if platform.machine() != "x86_64":
        pytest.skip(f"the emulator's fibers are for x86_64, this is {platform.machine()}")
    include: list[str | Path] = [f"-I{EMULATOR}", "-isystem", home / "include"]
    objects = [folder_of_all / f"{name}.o" for name in ("emulator", "copy_engine")]
    for path in objects:
        strict = ["-O2", "-Wall", "-Wextra", "-Werror", "-c", EMULATOR / f"{path.stem}.cpp"]
        made_once(path, lambda path, strict=strict: compiled(path, *strict, *include))

    # As nvcc does, products and sums become multiply-adds, which round once.
    fused = (
        ["-mfma", "-ffp-contract=fast", "-fexpensive-optimizations"]
        if " fma " in Path("/proc/cpuinfo").read_text()
        else []
    )

    def build(program: Path, headers: Path) -> None:
        # No warnings: code for nvcc has pragmas that other compilers do not know.
        source = EMULATOR / f"{program.stem}.cpp"
        compiled(program, "-O1", "-w", *fused, f"-I{headers}", *include, source, *objects)

    return build


@pytest.fixture(scope="module")
def program(build: Build, folder_of_all: Path) -> Program:
    """``program(name)`` is run_<name>.cpp, compiled once with all faults to choose from."""
    headers = folder_of_all / "translated"
    made_once(headers, translated)

    def make(name: str, wait: bool) -> bool:
        program = folder_of_all / f"run_{name}"
        return made_once(program, lambda path: build(path, headers), wait)

    @functools.cache
    def program(name: str) -> Path:
        done = make(name, wait=False)
        for other in PROGRAMS:  # while another worker compiles it, compile the others
            if not done:
                make(other, wait=False)
                done = make(name, wait=False)
        if not done:
            make(name, wait=True)
        return folder_of_all / f"run_{name}"

    return program


def translated(headers: Path) -> None:
    """Writes the sources as headers for the emulator; a fault is chosen by its number."""
    translate(SOURCES, headers, KERNELS, CONSTANTS)
    for number, fault in enumerate(FAULTS.values(), 1):
        (header,) = headers.rglob(fault.header)
        text = header.read_text()
        assert fault.right in text, f"{header.name} no longer has {fault.right!r}"
        switched = fault.switched.replace("FAULT", f"(emulator::fault == {number})")
        header.write_text(text.replace(fault.right, switched, 1))


def run(
    program: Path, timing: str, seed: int, fault: int = 0, **arguments: object
) -> tuple[int, str]:
    """Returns the exit status, the command and its output. ``timing``: of wgmma's reads."""
    given = {**arguments, "timing": timing, "seed": seed, "fault": fault}
    words = [f"{name}={value}" for name, value in given.items()]
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=120, check=False
    )
    said = f"{program.name} {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.returncode, said


def check(program: Path, case: Any, timing: str = "late", seed: int = 1) -> str:
    """Runs a case, which may name the plan to be printed; returns the command and its output."""
    status, said = run(program, timing, seed, **case._asdict())
    assert status == 0, said
    plan = getattr(case, "plan", "")
    assert plan in said.partition("\n")[2], f"a plan other than {plan!r}: {said}"
    return said


# --- tests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "timing"),
    [(name, "late") for name in MOE] + [(name, "early") for name in MOE if "hopper" in name],
)
@pytest.mark.slow
def test_moe(program: Program, name: str, timing: str) -> None:
    check(program("moe"), MOE[name], timing)


@pytest.mark.parametrize("name", ROUTE)
@pytest.mark.slow
def test_route(program: Program, name: str) -> None:
    check(program("route"), ROUTE[name])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.slow
def test_any_moe(program: Program, seed: int) -> None:
    draw = random.Random(seed)
    experts = draw.randint(1, draw.choice([9, 9, 70]))
    top_k = draw.randint(1, min(4, experts))
    case = Moe(
        plan="plan",
        tokens=draw.randint(1, draw.choice([12, 160])),
        hidden=8 * draw.randint(1, 24),
        inner=8 * draw.randint(1, 24),
        experts=experts,
        top_k=top_k,
        dtype=draw.choice(["float16", "bfloat16"]),
        routing=draw.choice(["even", "one", "invalid", "some"]),
        keep=draw.randint(0, 1),
        backward=draw.randint(0, 1),
    )
    check(program("moe"), case, draw.choice(["early", "late"]), seed)


@pytest.mark.parametrize(
    ("name", "timing"),
    [(name, "late") for name in MATMUL]
    + [(name, "early") for name, case in MATMUL.items() if case.kernel == "hopper"],
)
@pytest.mark.slow
def test_matmul(program: Program, name: str, timing: str) -> None:
    case = MATMUL[name]
    status, said = run(program("matmul"), timing, seed=1, **case._replace(plan="")._asdict())
    assert status == 0, said
    assert case.plan in said.partition("\n")[2], f"a plan other than {case.plan!r}: {said}"


@pytest.mark.parametrize("timing", ["late", "early"])
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.slow
def test_attention(program: Program, name: str, timing: str) -> None:
    check(program("attention"), ATTENTION[name], timing)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", SORT)
@pytest.mark.slow
def test_sort(program: Program, name: str, seed: int) -> None:
    check(program("sort"), SORT[name], seed=seed)


@pytest.mark.parametrize("name", TOPK)
@pytest.mark.slow
def test_topk(program: Program, name: str) -> None:
    check(program("topk"), TOPK[name])


@pytest.mark.parametrize("name", FOREACH)
@pytest.mark.slow
def test_foreach(program: Program, name: str) -> None:
    check(program("foreach"), FOREACH[name])


@pytest.mark.parametrize("name", NORM)
@pytest.mark.slow
def test_norm(program: Program, name: str) -> None:
    check(program("norm"), NORM[name])


@pytest.mark.parametrize("name", SCAN)
@pytest.mark.slow
def test_scan(program: Program, name: str) -> None:
    check(program("scan"), SCAN[name])


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", RADIX)
@pytest.mark.slow
def test_radix_sort(program: Program, name: str, seed: int) -> None:
    said = check(program("sort"), RADIX[name], seed=seed)
    if name in RADIX_STEPS:
        assert said.endswith("\none launch\n"), said


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", RADIX_STEPS)
@pytest.mark.slow
def test_radix_sort_by_separate_launches(program: Program, name: str, seed: int) -> None:
    said = check(program("sort"), RADIX[name]._replace(separate=1), seed=seed)
    assert said.endswith("\na launch for each step\n"), said


@pytest.mark.parametrize("timing", ["late", "early"])
@pytest.mark.parametrize("products", ["rows", "weights"])
@pytest.mark.quick(1)
def test_grouped(program: Program, products: str, timing: str) -> None:
    """The kernels that test_a_fault_is_found breaks are right without a fault."""
    status, said = run(program("grouped"), timing, seed=1, products=products)
    assert status == 0, said


@pytest.mark.parametrize("name", ["loss", "quantize"])
@pytest.mark.quick(1)
def test_rows_of_every_length(program: Program, name: str) -> None:
    """The cross entropy with its gradient, and quantized numbers to the bit."""
    status, said = run(program(name), "late", seed=1)
    assert status == 0, said


@pytest.mark.slow
def test_rotary_embeddings_and_cache_writes(program: Program) -> None:
    for seed in (1, 2):
        status, said = run(program("rotary"), "late", seed)
        assert status == 0, said


@pytest.mark.slow
def test_send(program: Program) -> None:
    """What moe_send_ copies, to the bit, and nothing beside it."""
    status, said = run(program("send"), "late", seed=1)
    assert status == 0, said


@pytest.mark.slow
def test_what_new_writes_for_rows(build: Build, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    new_pair("by_rows", sources, "rows")
    (sources / "utils").symlink_to(SOURCES / "utils")
    translate(sources, tmp_path / "include", ("by_rows.cu",), {})
    build(tmp_path / "run_rows", tmp_path / "include")
    status, said = run(tmp_path / "run_rows", "late", seed=1)
    assert status == 0, said


@pytest.mark.slow
def test_random(build: Build, tmp_path: Path) -> None:
    translate(SOURCES, tmp_path / "include", (), {})
    build(tmp_path / "run_random", tmp_path / "include")
    status, said = run(tmp_path / "run_random", "late", seed=1)
    assert status == 0, said


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.quick(1)
def test_a_fault_is_found(program: Program, name: str) -> None:
    fault, number = FAULTS[name], [*FAULTS].index(name) + 1
    user, case = USER_OF[fault.header]
    if fault.mixture:
        user, case = "moe", MOE[fault.mixture]._asdict()
    if fault.header == "sort_radix_wide.cuh":
        case = {**case, "separate": fault.separate}
    for seed in (1, 2, 3):
        status, said = run(program(user), fault.timing, seed, number, **case)
        assert status == 1 and re.search(fault.found, said), f"{name} was not found: {said}"
