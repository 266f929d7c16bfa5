"""The process in which a driver, a plugin or a library may crash or hang. What it finds goes to a
file, line by line, so that what it was about to do when it ended is the last line.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tell = Callable[[dict[str, Any]], None]


def gpus(tell: Tell, request: dict[str, Any]) -> None:
    """Tells which torch there is, which CUDA the driver supports, and the GPUs of torch."""
    import torch

    cuda = torch.version.cuda or ""
    tell({"torch": {"version": torch.__version__, "cuda": cuda}})
    from cuda_ops.runtime.tuning.key import driver_version

    try:
        number = driver_version()
        tell({"driver": f"{number // 1000}.{number % 1000 // 10}" if number else ""})
    except (OSError, AttributeError):  # no libcuda.so.1, which comes with the driver
        tell({"driver": ""})
    found, problem = [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                major, minor = torch.cuda.get_device_capability(index)
                found.append((torch.cuda.get_device_name(index), f"{major}.{minor}"))
        elif cuda:
            try:
                torch.cuda.init()
            except Exception as error:  # what it raises differs from torch to torch
                problem = str(error).strip().partition("\n")[0]
    said = [str(one.message).strip().partition("\n")[0] for one in caught]
    tell({"gpus": found, "problem": problem or " ".join(said if not found else [])})


def operators(tell: Tell, request: dict[str, Any]) -> None:
    """Tells of plugins and operators, and opens the libraries one after the other."""
    from cuda_ops.doctor import operators

    operators.look(tell, request)


PROBES: dict[str, Callable[[Tell, dict[str, Any]], None]] = {"gpus": gpus, "operators": operators}


def main(told: str, probe: str, request: str) -> int:
    """Runs one probe; returns the exit status."""
    with Path(told).open("a", encoding="utf-8") as file:

        def tell(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            PROBES[probe](tell, json.loads(request))
        except BaseException as error:  # a plugin may raise anything
            tell({"raised": f"{type(error).__name__}: {error}"})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
