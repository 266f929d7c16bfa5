"""What runs on which GPU, as tables for docs/generate.py."""

from __future__ import annotations

from cuda_ops.build import toolchain
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.build.elf import runs_on
from cuda_ops.registry import registry

#: By compute capability; developer.nvidia.com/cuda-gpus has all. The last stands for later ones.
_GPUS = {
    (7, 5): "T4, RTX 20", (8, 0): "A100, A30", (8, 6): "A10, A40, RTX A6000, RTX 30",
    (8, 7): "Jetson Orin", (8, 9): "L4, L40, RTX 6000 Ada, RTX 40", (9, 0): "H100, H200, GH200",
    (10, 0): "B200, GB200", (10, 3): "B300, GB300", (12, 0): "RTX PRO 6000, RTX 50",
    (12, 1): "GB10", (99, 0): "",
}  # fmt: skip

#: Instructions that not every GPU has, the header that has them, and what runs without.
_INSTRUCTIONS = (
    ("`wgmma` and the copy engine", "9.0a", "wgmma.cuh", "tensor cores by `mma.sync`"),
    ("clusters of blocks", "9.0a", "sort_cluster.cuh", "passes over device memory"),
    ("start before the last kernel ends", "9.0", "early_start.cuh", "one kernel after the other"),
    ("conversions to 8-bit floats", "8.9", "narrow.cuh", "the same in integers"),
)


def releases() -> str:
    """Returns which code of a release each GPU runs."""
    lines = ["| capability | GPUs | what a release runs there |", "|---|---|---|"]
    for capability, gpus in _GPUS.items():
        codes = [arch for arch in toolchain.RELEASE_ARCHS if runs_on(arch, capability)]
        said = f"code for {codes[-1].removesuffix('+PTX')}" if codes else "nothing"
        if codes and not runs_on(codes[-1].removesuffix("+PTX"), capability):
            said = f"PTX of {codes[-1].removesuffix('+PTX')}, which the driver compiles"
        name = f"{capability[0]}.{capability[1]}" if gpus else "later ones"
        lines.append(f"| {name} | {gpus} | {said} |")
    return "\n".join(lines)


def instructions() -> str:
    """Returns which operators have kernels for instructions that not every GPU has."""
    lines = ["| instructions | in code for | operators | elsewhere |", "|---|---|---|---|"]
    pairs = {
        stem: {file.name for file in pair.files()}
        for stem, pair in sorted(registry().pairs().items())
        if pair.root == BUILTIN_ROOT
    }
    for what, arch, header, otherwise in _INSTRUCTIONS:
        found = [f"`{stem}`" for stem, files in pairs.items() if header in files]
        assert found, f"no operator includes {header}"
        since = arch if arch.endswith("a") else f"{arch} and later"
        lines.append(f"| {what} | {since} | {', '.join(found)} | {otherwise} |")
    return "\n".join(lines)
