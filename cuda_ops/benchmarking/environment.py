"""Describes where a measurement was made: device, clocks, driver, versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from cuda_ops.build import cache, toolchain
from cuda_ops.registry import registry

#: The key of an environment in which debug builds ran; it names them.
DEBUG_BUILD = "debug_build"

_NVIDIA_SMI = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


def environment(device: torch.device | None = None) -> dict[str, str]:
    """Returns device, date, versions and commit; for a GPU also its clocks, driver and power limit.

    Clocks are those of this moment. A value that cannot be found out is ``"unknown"``. Where the
    process has loaded debug builds, ``"debug_build"`` names their operators.

    Example::

        assert environment(torch.device("cpu"))["device"].startswith("CPU (")
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = {
        "device": device_name(device),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": toolchain.cuda_version(),
        "cub": cub_version(),
        "python": platform.python_version(),
        "commit": _commit(),
    }
    if debugged := [k for k in registry().pairs() if cache.is_debug(registry().library_of(k))]:
        known[DEBUG_BUILD] = ", ".join(debugged)
    if device.type == "cuda":
        known |= _nvidia_smi(device)
    else:
        known["threads"] = str(torch.get_num_threads())
    return known


def cub_version() -> str:
    """Returns the version of the toolkit's CUB, which decides what it offers: ``"3.0.1"``."""
    home = toolchain.cuda_home()
    for folder in ("include/cccl", "include") if home else ():
        header = Path(str(home)) / folder / "cub" / "version.cuh"
        if header.is_file():
            text = header.read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"^#define CUB_VERSION (\d+)", text, re.MULTILINE):
                version = int(found[1])
                return f"{version // 100_000}.{version // 100 % 1000}.{version % 100}"
    return "not installed"


def device_name(device: torch.device) -> str:
    """Returns ``"NVIDIA H200"``, or ``"CPU (AMD EPYC, 2 cores)"``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({_cpu_model()}, {os.cpu_count()} cores)"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _nvidia_smi(device: torch.device) -> dict[str, str]:
    # nvidia-smi numbers all GPUs of the machine; the UUID means the one this process sees.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    answer = _output(
        "nvidia-smi", f"--id={uuid}", "--format=csv,noheader,nounits",
        f"--query-gpu={','.join(_NVIDIA_SMI.values())}",
    )  # fmt: skip
    values = [value.strip() for value in answer.split(",")]
    if len(values) != len(_NVIDIA_SMI):
        return dict.fromkeys(_NVIDIA_SMI, "unknown")
    return dict(zip(_NVIDIA_SMI, values, strict=True))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    # For a copy without its history, or with another one.
    if commit := os.environ.get("CUDA_OPS_COMMIT"):
        return commit
    here = Path(__file__).parent
    commit = _output("git", "-C", str(here), "rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    changed = _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if changed else commit


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
