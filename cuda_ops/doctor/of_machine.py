"""What follows from the facts about GPUs, driver, toolkit, compilers and cache."""

from __future__ import annotations

from collections.abc import Iterator

from cuda_ops.build.toolchain import INSTALL_NVCC
from cuda_ops.doctor.facts import Driver, Facts, Tool
from cuda_ops.doctor.finding import Finding, Level
from cuda_ops.output import size_text

#: The oldest driver for each CUDA by its major number, as NVIDIA's release notes have it: within
#: one, a driver runs what any toolkit built.
_DRIVERS = {11: "450.80", 12: "525.60", 13: "580"}
#: Says where a torch is that was built with a certain CUDA; pip alone takes the newest.
_CHOOSE = "choose it under Start Locally on PyTorch's site"


def of_torch(facts: Facts) -> Iterator[Finding]:
    """Yields what is wrong between torch, driver and GPUs."""
    torch, driver = facts.torch, facts.driver
    if not torch.version:
        missing = "ModuleNotFoundError" in torch.problem and "torch" in torch.problem
        command = "pip install torch" if missing else "pip install --force-reinstall torch"
        yield Finding("no-torch", "broken", "torch cannot be imported", torch.problem, command)
        return
    release = torch.version.partition("+")[0]
    there = _gpu(driver)
    if there and not torch.cuda:
        command = f"pip install --force-reinstall torch=={release}"
        if driver.cuda and _major(driver.cuda) <= 12:
            command = f"install a torch for CUDA {_major(driver.cuda)}: {_CHOOSE}"
        yield Finding(
            "torch-without-cuda", "broken",
            f"torch {torch.version} was built without CUDA, and there is a GPU: {there}",
            "no tensor can be on the GPU", command,
        )  # fmt: skip
    elif torch.cuda and driver.cuda and _major(driver.cuda) < _major(torch.cuda):
        yield Finding(
            "driver-too-old", "broken",
            f"driver {driver.version or 'of unknown version'} supports CUDA {driver.cuda}, and "
            f"torch {torch.version} was built with {torch.cuda}",
            "torch cannot start CUDA",
            f"install NVIDIA's driver {_driver_for(torch.cuda)} or later; or a torch for CUDA "
            f"{_major(driver.cuda)}: {_CHOOSE}",
        )  # fmt: skip
    elif torch.fails:
        yield Finding(
            "cuda-does-not-start", "broken", torch.problem,
            "a driver or a GPU that does not answer holds up every program that uses it",
            "nvidia-smi, and as root: dmesg | grep -i -e nvrm -e xid; restart the machine",
        )  # fmt: skip
    elif there and not torch.gpus:
        yield _not_started(facts, there)
    yield from _of_driver(facts)


def _not_started(facts: Facts, there: str) -> Finding:
    torch, driver = facts.torch, facts.driver
    if _hides(driver):
        return Finding(
            "gpus-hidden", "warning",
            f"CUDA_VISIBLE_DEVICES={driver.visible!r} hides every GPU",
            "everything runs on the CPU", "unset CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    return Finding(
        "cuda-does-not-start", "broken",
        f"torch {torch.version} finds no GPU that it can use, and there is {there}",
        torch.problem, "python -c 'import torch; torch.cuda.init()' says why",
    )  # fmt: skip


def _hides(driver: Driver) -> bool:
    """Says whether ``CUDA_VISIBLE_DEVICES`` hides every GPU; CUDA stops at the first bad number."""
    if driver.visible is None:
        return False
    first = driver.visible.partition(",")[0].strip()
    return not first.isdecimal() or int(first) >= (len(driver.gpus) or driver.cards)


def _gpu(driver: Driver) -> str:
    """Returns the name of a GPU that programs here could use; empty where there is none.

    A container without its GPUs sees the cards on the bus, and no libcuda.
    """
    if driver.gpus:
        return driver.gpus[0].name
    return "one of NVIDIA" if driver.cards and driver.cuda else ""


def _of_driver(facts: Facts) -> Iterator[Finding]:
    driver, torch = facts.driver, facts.torch
    has_driver = bool(driver.version or driver.cuda)
    if driver.cards and not has_driver:
        yield Finding(
            "no-driver", "warning",
            f"the PCI bus has {driver.cards} GPU{'s' * (driver.cards > 1)} of NVIDIA, and there is "
            "no driver",
            "everything runs on the CPU",
            f"install NVIDIA's driver {_driver_for(torch.cuda or '13')} or later; in a container "
            "that should have them: docker run --gpus all",
        )  # fmt: skip
    if driver.problem and (has_driver or driver.cards):
        yield Finding(
            "driver-does-not-answer", "warning" if torch.gpus else "broken",
            f"nvidia-smi {driver.problem}", "it asks the driver alone",
            "as root: dmesg | grep -i -e nvrm -e xid says why; restart the machine",
        )  # fmt: skip


def of_toolkit(facts: Facts) -> Iterator[Finding]:
    """Yields what is wrong with nvcc, and between it, torch and the driver."""
    toolkit, driver, torch = facts.toolkit, facts.driver, facts.torch
    for line in toolkit.passed_over:
        _, _, command = line.partition("; run ")
        if line.startswith("CUDA_"):
            command = f"unset {line.partition(':')[0]}, or set it to a toolkit"
        yield Finding(
            "toolkit-passed-over", "warning", line, "the next place that has one is taken",
            command or f"{line.partition(' ')[0]} --version",
        )  # fmt: skip
    if toolkit.is_script and not toolkit.chosen:
        where = f"it calls the toolkit in {toolkit.home}, which builds here take"
        yield Finding(
            "nvcc-is-a-script", "warning",
            f"nvcc on PATH is a script: {toolkit.nvcc}",
            f"{where if toolkit.home else 'it does not say where its toolkit is'}; torch's own "
            "builders look for one beside the script",
            f"export CUDA_HOME={toolkit.home or 'DIR'}",
        )  # fmt: skip
    without = tuple(op.key for op in facts.operators if op.has_kernel and not op.archs)
    if not toolkit.home and without:
        yield Finding(
            "no-toolkit", "broken" if torch.gpus else "warning",
            "there is no CUDA toolkit", "these operators have no CUDA kernels", INSTALL_NVCC,
            without,
        )  # fmt: skip
    if toolkit.home and driver.cuda and _major(toolkit.version) > _major(driver.cuda):
        yield Finding(
            "toolkit-too-new", "broken" if driver.gpus else "warning",
            f"the toolkit in {toolkit.home} is CUDA {toolkit.version}, and driver "
            f"{driver.version} supports CUDA {driver.cuda}",
            "kernels that it builds do not start here",
            f"install NVIDIA's driver {_driver_for(toolkit.version)} or later, or set CUDA_HOME "
            f"to a toolkit of CUDA {_major(driver.cuda)}",
        )  # fmt: skip
    if toolkit.home and torch.cuda and _major(toolkit.version) != _major(torch.cuda):
        yield _majors(facts)


def _majors(facts: Facts) -> Finding:
    """Native kernels bring their own runtime; a guest shares torch's."""
    toolkit, torch = facts.toolkit, facts.torch
    guests = [op for op in facts.operators if op.kind != "native" and op.has_kernel]
    level: Level = "warning" if guests else "note"
    if any(not op.library for op in guests):
        level = "broken"
    return Finding(
        "cuda-majors-differ", level,
        f"nvcc is of CUDA {toolkit.version}, and torch {torch.version} was built with {torch.cuda}",
        "guests with a .cu cannot be built, since they share torch's CUDA runtime; native kernels "
        "bring their own" + ("" if guests else ", and there is no guest here"),
        f"set CUDA_HOME to a toolkit of CUDA {_major(torch.cuda)}",
        tuple(op.key for op in guests),
    )  # fmt: skip


def of_tools(facts: Facts) -> Iterator[Finding]:
    """Yields which programs are missing; that is broken only where something has to be built."""
    tools: dict[str, Tool] = {"no-compiler": facts.compiler, "no-ninja": facts.ninja}
    for fault, tool in tools.items():
        if tool.problem:
            why = "nothing can be built; what is built works"
            yield Finding(fault, _if_needed(facts), tool.problem, why, tool.command)


def of_cache(facts: Facts) -> Iterator[Finding]:
    """Yields what is wrong with the cache of builds."""
    cache = facts.cache
    elsewhere = "export CUDA_OPS_CACHE=DIR, a folder of yours"
    if cache.problem:
        yield Finding(
            "no-cache", _if_needed(facts), cache.problem, "nothing can be built", elsewhere
        )
    elif not cache.writable:
        yield Finding(
            "cache-read-only", _if_needed(facts), f"the cache {cache.path} cannot be written",
            "what it holds is used, and nothing can be built", elsewhere,
        )  # fmt: skip
    for text in cache.foreign:
        what, _, command = text.partition("; run ")
        yield Finding("cache-foreign", "broken", what, "nothing in it is run", command)
    if cache.stale:
        yield Finding(
            "cache-stale", "note",
            f"{cache.stale} of the {cache.entries} libraries and builds in the cache belong to "
            f"no present source: {size_text(cache.stale_size)}",
            "they are never loaded", "python -m cuda_ops clean",
        )  # fmt: skip


def of_probes(facts: Facts) -> Iterator[Finding]:
    """Yields what could not be looked at."""
    for failure in facts.failures:
        yield Finding(
            "probe-failed", "broken", f"{failure.probe}: {failure.problem}",
            "it could not be looked at; the rest was",
        )  # fmt: skip


def _if_needed(facts: Facts) -> Level:
    needed = not facts.operators or any(not op.library for op in facts.operators)
    return "broken" if needed else "warning"


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _driver_for(cuda: str) -> str:
    return _DRIVERS.get(_major(cuda), f"for CUDA {cuda}")
