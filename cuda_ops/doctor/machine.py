"""Probes of the machine: GPUs, driver, toolkit, compilers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from cuda_ops.build import missing, toolchain
from cuda_ops.doctor.asking import Answer, ask, ask_child
from cuda_ops.doctor.facts import Driver, Gpu, Tool, Toolkit, Torch
from cuda_ops.errors import BuildError

#: What the kernel says of the driver, and of what is plugged in.
_KERNEL = Path("/proc/driver/nvidia/version")
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
#: nvidia-smi takes seconds on a machine with many GPUs, and for ever where one of them hangs.
_SMI_SECONDS = 20.0
_QUERY = ("--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
_TOOL_SECONDS = 20.0


def torch_and_driver() -> tuple[Torch, Driver]:
    """Returns what torch and the driver say, each asked in another process."""
    lines, ended = ask_child("gpus", {})
    said = {key: value for line in lines for key, value in line.items()}
    problem, failed = said.get("problem", ""), ended.problem
    if "raised" in said:
        failed = f"raised {said['raised']}"
    if failed:
        problem = f"{'starting CUDA' if 'torch' in said else 'import torch'} {failed}"
    gpus = tuple(Gpu(*gpu) for gpu in said.get("gpus", ()))
    torch = Torch(**said.get("torch", {}), gpus=gpus, problem=problem, fails=bool(failed))
    return torch, _driver(said.get("driver", ""), gpus)


def _driver(cuda: str, of_torch: tuple[Gpu, ...]) -> Driver:
    version, problem, gpus = "", "", of_torch
    with contextlib.suppress(Exception):  # without a torch nvidia-smi says it
        from cuda_ops.runtime.tuning.key import version_in

        version = version_in(_KERNEL.read_text(encoding="utf-8"))
    if program := shutil.which("nvidia-smi"):
        answer = ask((program, *_QUERY), _SMI_SECONDS)
        rows = _rows(answer)
        if rows:
            gpus = tuple(Gpu(name, capability) for name, capability, _ in rows)
            version = version or rows[0][2]
        else:
            problem = answer.problem or f"said: {answer.text.strip()}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return Driver(version, cuda, gpus, _cards(), visible, problem)


def _rows(answer: Answer) -> list[tuple[str, str, str]]:
    """Reads the lines ``NVIDIA H100 80GB HBM3, 9.0, 580.82.07``."""
    found = re.findall(r"^(.+), (\d+\.\d+), ([\d.]+)$", answer.text, re.MULTILINE)
    return [] if answer.problem else found


def _cards() -> int:
    def is_gpu(device: Path) -> bool:
        with contextlib.suppress(OSError):
            texts = ((device / name).read_text(encoding="ascii") for name in ("vendor", "class"))
            vendor, kind = texts
            return vendor.strip() == _NVIDIA and kind.startswith(_DISPLAY)
        return False

    return sum(map(is_gpu, _PCI.glob("*")))


def toolkit() -> Toolkit:
    """Returns the CUDA toolkit that builds take, and what was passed over on the way to it."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        home, version = toolchain.cuda_home(), toolchain.cuda_version()
    passed_over = [line.removeprefix("cuda_ops: ") for line in said.getvalue().splitlines()]
    nvcc = shutil.which("nvcc") or ""
    chosen = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    where = ("", "") if home is None else (str(home), version)
    return Toolkit(*where, chosen, nvcc, _is_script(nvcc), tuple(passed_over))


def _is_script(program: str) -> bool:
    with contextlib.suppress(OSError), Path(program or os.devnull).open("rb") as file:
        return file.read(2) == b"#!"
    return False


def compiler() -> Tool:
    """Returns the C++ compiler that builds take."""
    try:
        command = toolchain.cxx()
        if said := missing.cxx_problem():
            problem, _, mend = said.partition("; ")
            return Tool(problem=problem, command=mend)
    except BuildError as error:  # CXX leaves a quote open
        return Tool(problem=str(error), command="set CXX to a command, or unset CXX")
    path = shutil.which(command[0]) or command[0]
    version = toolchain.cxx_version()
    if version == "none":
        problem = f"{path}: expected its version, got no answer"
        return Tool(path, problem=problem, command=f"{path} --version says why; or set CXX")
    return Tool(path, version)


def ninja() -> Tool:
    """Returns the ninja that torch's builder starts: the one on ``PATH``."""
    path = shutil.which("ninja")
    if path is None:
        beside = Path(sys.executable).parent
        installed = os.access(beside / "ninja", os.X_OK)
        mend = f"export PATH={shlex.quote(str(beside))}:$PATH" if installed else "pip install ninja"
        return Tool(problem="there is no program 'ninja' on PATH", command=mend)
    answer = ask((path, "--version"), _TOOL_SECONDS)
    if answer.problem:
        mend = "pip install --force-reinstall ninja"
        return Tool(path, problem=f"{path}: {answer.problem}", command=mend)
    return Tool(path, answer.text.strip())
