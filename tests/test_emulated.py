"""Kernels of matrix products, mixtures of experts and sorts, run on a CPU by tests/emulator.

Whatever is wrong is printed by the program that ran: a value and its place, a deadlock and who
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

import pytest
from emulated_cases import MATMUL, MOE, RADIX, RADIX_STEPS, ROUTE, SORT, Moe
from emulated_faults import FAULTS, USER_OF
from emulator.translate import translate

from cuda_ops.build import toolchain
from cuda_ops.dev.scaffold import new_pair

HERE = Path(__file__).parent
EMULATOR = HERE / "emulator"
SOURCES = HERE.parent / "src"

#: Few multiprocessors, so that blocks take one tile after the other of problems that a CPU can
#: compute, and few tokens that are many.
CONSTANTS = {"kHopperSms": 3, "kFewTokens": 40}
KERNELS = ("moe_experts.cu", "moe_route.cu")

Build = Callable[[str, Path], Path]
Program = Callable[[str], Path]

# --- programs -------------------------------------------------------------------------


def compiled(result: Path, *flags: str | Path) -> Path:
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", "-O1", *flags, "-o", result]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{result.name} does not compile:\n{done.stderr[-4000:]}"
    return result


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """``build(name, headers)`` compiles run_<name>.cpp with translated headers."""
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("needs the headers of a CUDA toolkit")
    if platform.machine() != "x86_64":
        pytest.skip(f"the emulator's fibers are for x86_64, this is {platform.machine()}")
    folder = tmp_path_factory.mktemp("emulator")
    include: list[str | Path] = [f"-I{EMULATOR}", "-isystem", home / "include"]
    strict = ["-Wall", "-Wextra", "-Werror"]
    objects = [
        compiled(folder / f"{name}.o", *strict, *include, "-c", EMULATOR / f"{name}.cpp")
        for name in ("emulator", "copy_engine")
    ]

    def build(name: str, headers: Path) -> Path:
        # No warnings: what is written for nvcc has pragmas that others do not know.
        source = EMULATOR / f"run_{name}.cpp"
        return compiled(headers / name, "-w", f"-I{headers}", *include, source, *objects)

    return build


@pytest.fixture(scope="module")
def program(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """``program(name)`` is run_<name>.cpp with the sources as they stand, compiled once."""
    headers = tmp_path_factory.mktemp("translated") / "include"
    translate(SOURCES, headers, KERNELS, CONSTANTS)
    return functools.cache(lambda name: build(name, headers))


def run(program: Path, timing: str, seed: int, **arguments: object) -> tuple[int, str]:
    """The exit status, and what was run and said. ``timing``: of wgmma's reads."""
    given = {**arguments, "timing": timing, "seed": seed}
    words = [f"{name}={value}" for name, value in given.items()]
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=120, check=False
    )
    said = f"run_{program.name} {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.returncode, said


def check_moe(program: Path, case: Moe, timing: str, seed: int) -> None:
    status, said = run(program, timing, seed, **case._asdict())
    assert status == 0, said
    assert case.plan in said.partition("\n")[2], f"a plan other than {case.plan!r}: {said}"


# --- tests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "timing"),
    [(name, "late") for name in MOE] + [(name, "early") for name in MOE if "hopper" in name],
)
def test_moe(program: Program, name: str, timing: str) -> None:
    check_moe(program("moe"), MOE[name], timing, seed=1)


@pytest.mark.parametrize("name", ROUTE)
def test_route(program: Program, name: str) -> None:
    status, said = run(program("route"), "late", seed=1, **ROUTE[name]._asdict())
    assert status == 0, said


@pytest.mark.parametrize("seed", range(12))
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
    check_moe(program("moe"), case, draw.choice(["early", "late"]), seed)


@pytest.mark.parametrize(
    ("name", "timing"),
    [(name, "late") for name in MATMUL]
    + [(name, "early") for name, case in MATMUL.items() if case.kernel == "hopper"],
)
def test_matmul(program: Program, name: str, timing: str) -> None:
    case = MATMUL[name]
    status, said = run(program("matmul"), timing, seed=1, **case._replace(plan="")._asdict())
    assert status == 0, said
    assert case.plan in said.partition("\n")[2], f"a plan other than {case.plan!r}: {said}"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", SORT)
def test_sort(program: Program, name: str, seed: int) -> None:
    status, said = run(program("sort"), "late", seed, **SORT[name]._asdict())
    assert status == 0, said


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", RADIX)
def test_radix_sort(program: Program, name: str, seed: int) -> None:
    status, said = run(program("sort"), "late", seed, **RADIX[name]._asdict())
    assert status == 0, said
    plan = RADIX[name].plan
    assert plan in said.partition("\n")[2], f"a plan other than {plan!r}: {said}"
    if name in RADIX_STEPS:
        assert said.endswith("\none launch\n"), said


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", RADIX_STEPS)
def test_radix_sort_by_separate_launches(program: Program, name: str, seed: int) -> None:
    case = RADIX[name]._replace(separate=1)
    status, said = run(program("sort"), "late", seed, **case._asdict())
    assert status == 0, said
    assert case.plan in said.partition("\n")[2], f"a plan other than {case.plan!r}: {said}"
    assert said.endswith("\na launch for each step\n"), said


@pytest.mark.parametrize("timing", ["late", "early"])
def test_grouped(program: Program, timing: str) -> None:
    """What test_a_fault_is_found breaks is right as it stands."""
    status, said = run(program("grouped"), timing, seed=1)
    assert status == 0, said


def test_what_new_writes_for_rows(build: Build, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    new_pair("by_rows", sources, rows=True)
    (sources / "utils").symlink_to(SOURCES / "utils")
    translate(sources, tmp_path / "include", ("by_rows.cu",), {})
    status, said = run(build("rows", tmp_path / "include"), "late", seed=1)
    assert status == 0, said


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(build: Build, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    translate(SOURCES, tmp_path / "include", KERNELS, CONSTANTS)
    header = tmp_path / "include" / fault.header
    text = header.read_text()
    assert fault.right in text, f"{header.name} no longer has {fault.right!r}"
    header.write_text(text.replace(fault.right, fault.wrong, 1))
    name_of_program, case = USER_OF[fault.header]
    if fault.mixture:
        name_of_program, case = "moe", MOE[fault.mixture]._asdict()
    if fault.header == "sort_radix_wide.cuh":
        case = {**case, "separate": fault.separate}
    broken = build(name_of_program, tmp_path / "include")
    for seed in (1, 2, 3):
        status, said = run(broken, fault.timing, seed, **case)
        assert status == 1 and re.search(fault.found, said), f"{name} was not found: {said}"
