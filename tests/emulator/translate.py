"""Turns the project's CUDA sources into C++ for any x86-64 compiler, to run on the emulator.

It rewrites the three things that C++ lacks: inline PTX becomes calls of the functions in ptx.h,
launches become calls of emulator::launch, and shared memory becomes the emulator's. Macros spell
the instructions of the tensor cores, so tensor_cores.h replaces their sections. All other code is
compiled unchanged: the programs run_*.cpp include it, and tests/test_emulated.py builds and runs
them, with faults from tests/emulated_faults.py put in on request.

The emulator (emulator.h) runs threads as fibers in an order drawn from a seed. It has warp
collectives, barriers of all kinds, mbarriers with the bytes that they expect, the copy engine with
its swizzle and borders, cp.async and bulk stores that take effect only at their waits, wgmma by its
descriptors (it reads operands as early or as late as the rules allow), mma.sync, clusters and their
shared memory, and cooperative launches as one cluster. Shared memory starts as NaN. It finds
deadlocks, surplus arrivals, addresses out of bounds or unaligned, global reads outside every
tensor, ordinary stores that the copy engine or wgmma reads without a proxy fence, copies that a
block leaves behind, and memory that an early launch touches before it waits for the kernels before
it.

It assumes that tensor cores add in float32 and round (real ones truncate), that a fence makes all
of its thread's writes visible, and that the copy engine rounds to tf32 half away from zero.

It cannot show times, registers, bank conflicts, visibility between proxies beyond that fence, the
memory model (every store is seen at once), races that no drawn order meets, or an error in PTX that
assembles to something other than ptx.h says.
"""

from __future__ import annotations

import re
from pathlib import Path

_ASM = re.compile(r"\basm\s*(?:volatile)?\s*\(")
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_LAUNCH = re.compile(r"([A-Za-z_]\w*(?:<[^<>;]*>)?)\s*<<<")
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")

#: For each file, where the section that tensor_cores.h replaces begins, and where it ends.
_TENSOR_CORES = {
    "ptx/wgmma.cuh": ("// The registers of an instruction", "// clang-format on"),
    "ptx/mma.cuh": ("#define CUDA_OPS_MMA", "#undef CUDA_OPS_MMA"),
}


def translate(
    sources: Path, out: Path, kernels: tuple[str, ...], constants: dict[str, int]
) -> None:
    """Writes the headers of ``sources/utils`` and some of ``sources/kernels`` to ``out``.

    ``constants`` get other values there, for problems that a CPU can compute.
    """
    out.mkdir()
    found = []
    utils, chosen = sources / "utils", [sources / "kernels" / kernel for kernel in kernels]
    for path in [*filter(Path.is_file, utils.rglob("*")), *chosen]:
        text = path.read_text()
        name = path.name if path in chosen else str(path.relative_to(utils))
        if name in _TENSOR_CORES:
            begin, end = map(text.index, _TENSOR_CORES[name])
            here = '}  // namespace cuda_ops\n#include "tensor_cores.h"\nnamespace cuda_ops {\n'
            text = text[:begin] + here + text[end + len(_TENSOR_CORES[name][1]) :]
        for constant, value in constants.items():
            text, count = re.subn(rf"\b{constant} = \d+", f"{constant} = {value}", text)
            found += count * [constant]
        if path.suffix in (".cu", ".cuh"):
            text = _launches(_instructions(_shared_memory(text)))
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
    assert sorted(found) == sorted(constants), f"of {set(constants)} there are {found}"


def _shared_memory(text: str) -> str:
    text = _DYNAMIC.sub(r"auto* \2 = reinterpret_cast<\1*>(emulator::dynamic_shared());", text)
    # Blocks run one after the other, or those of a cluster, which have no such variables.
    return text.replace("__shared__", "static")


def _instructions(text: str) -> str:
    while found := _ASM.search(text):
        end = _closing(text, found.end() - 1)
        template, *operands = _split(text[found.end() : end], ":")
        name = _opcode("".join(_LITERAL.findall(template)))
        values = [
            operand[operand.index("(") + 1 : operand.rindex(")")]
            for section in operands[:2]  # outputs, inputs; not what is clobbered
            for operand in _split(section, ",")
            if operand.strip()
        ]
        call = f"emulator::ptx_{name}({', '.join(values)})" if name else "(void)0"
        text = text[: found.start()] + call + text[end + 1 :]
    return text


def _opcode(ptx: str) -> str:
    """The first instruction as a name, with the special register it reads; "" if there is none."""
    for statement in re.split(r"\\n|;", ptx):
        words = statement.strip().lstrip("{").split()
        if words and not words[0].startswith(".") and not words[0].endswith(":"):
            registers = re.findall(r"%%(\w+)", statement)
            return re.sub(r"\W", "_", "_".join([words[0], *registers]))
    return ""


def _launches(text: str) -> str:
    while found := _LAUNCH.search(text):
        config_end = text.index(">>>", found.end())
        begin = text.index("(", config_end)
        end = _closing(text, begin)
        call = f"{found[1]}{text[begin : end + 1]}"
        launch = f"emulator::launch({text[found.end() : config_end]}, [=] {{ {call}; }})"
        text = text[: found.start()] + launch + text[end + 1 :]
    return text.replace("cudaLaunchKernelEx(", "emulator::launch(")


def _outside_of_strings(text: str, begin: int) -> list[int]:
    places, inside, at = [], False, begin
    while at < len(text):
        if inside and text[at] == "\\":
            at += 1
        elif text[at] == '"':
            inside = not inside
        elif not inside:
            places.append(at)
        at += 1
    return places


def _closing(text: str, begin: int) -> int:
    depth = 0
    for at in _outside_of_strings(text[: begin + 4000], begin):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise ValueError(f"no closing parenthesis: {text[begin : begin + 80]!r}")


def _split(text: str, separator: str) -> list[str]:
    depth, begin, parts = 0, 0, []
    for at in _outside_of_strings(text, 0):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
        if depth == 0 and text[at] == separator:
            parts.append(text[begin:at])
            begin = at + 1
    return [*parts, text[begin:]]
