"""Measures from save until the new kernel has run, for cuda_ops and for
``torch.utils.cpp_extension.load``.

The latter builds the same operator as the tutorials write it (tests/guests), edited and loaded
again under a new name; cuda_ops builds these files too, as a guest. First builds start with an
empty cache. ``python -m benchmarks.dev_loop``. Without a GPU all are compiled and loaded, and the
CPU kernel is run. ``--cells`` measures from a changed string, as a notebook's cell
has it, until the operator has run on the CPU: ``cuda_ops.inline`` and
``torch.utils.cpp_extension.load_inline``, each with an operator that has a CPU kernel alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils import cpp_extension

import cuda_ops
from benchmarks import report
from cuda_ops.build import compiling, toolchain, wrappers
from cuda_ops.dev.scaffold import new_pair
from cuda_ops.output import at_least
from cuda_ops.registry import registry

FLOOR, GOAL = 10, 20
_TUTORIAL = ("kernels/tutorial_silu.cu", "bindings/tutorial_silu.cpp")
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _run(function: Callable[[torch.Tensor], Any]) -> None:
    function(torch.randn(1024, device=_DEVICE))
    if _DEVICE == "cuda":
        torch.cuda.synchronize()


def ours(root: Path, edits: int) -> dict[str, list[float]]:
    """Returns the seconds from save to run, for edits of the kernel and of the binding."""
    kernel, binding = new_pair("dev_loop", root)
    registry().add_root(root)
    taken: dict[str, list[float]] = {"first build": [], "kernel edit": [], "binding edit": []}

    def load() -> None:
        _built("dev_loop")
        _run(registry().public("dev_loop"))

    start = time.perf_counter()
    load()
    taken["first build"].append(time.perf_counter() - start)
    for path, label in ((kernel, "kernel edit"), (binding, "binding edit")):
        for i in range(edits):
            text = path.read_text().replace("x > most ? most", f"x > most ? most + C({i})")
            start = time.perf_counter()
            path.write_text(f"{text}\n// edit {i}\n")
            load()
            taken[label].append(time.perf_counter() - start)
    return taken


def _built(name: str) -> None:
    built = compiling.build(registry().pairs()[name])
    registry().load(name, built.path)


def guest(root: Path, edits: int) -> dict[str, list[float]]:
    """Returns the same for the tutorial form, built by cuda_ops, for edits of the kernel."""
    for part in _TUTORIAL:
        (root / part).parent.mkdir(exist_ok=True)
        shutil.copy(report.REPO / "tests" / "guests" / part, root / part)
    registry().add_root(root)
    taken = []
    for i in range(edits + 1):
        start = time.perf_counter()
        kernel = root / _TUTORIAL[0]
        kernel.write_text(kernel.read_text() + f"\n// edit {i}\n")
        _built("tutorial_silu")
        _run(registry().public("tutorial_silu").forward)
        taken.append(time.perf_counter() - start)
    return {"guest, first build": taken[:1], "guest, kernel edit": taken[1:]}


def tutorial(folder: Path, edits: int) -> dict[str, list[float]]:
    """Returns the same for the tutorial form, built by torch."""
    for part in _TUTORIAL:
        shutil.copy(report.REPO / "tests" / "guests" / part, folder)
    stubs: list[str] = []
    if not torch.version.cuda:  # a torch without CUDA refuses .cu files otherwise
        cpp_extension.CUDA_HOME = str(toolchain.cuda_home())
        stubs = [
            "-Wl,--as-needed",
            f"-L{wrappers.stub_libraries()}",
            f"-L{toolchain.cuda_home()}/lib64",
            "-lcudart_static",
            "-lrt",
            "-ldl",
        ]
    archs = compiling.visible_archs()
    taken = []
    for i in range(edits + 1):
        kernel = folder / "tutorial_silu.cu"
        start = time.perf_counter()
        kernel.write_text(kernel.read_text() + f"\n// edit {i}\n")
        module = cpp_extension.load(
            name="tutorial_silu_peer",
            sources=[str(folder / "tutorial_silu.cpp"), str(kernel)],
            extra_cuda_cflags=toolchain.gencode_flags(archs),
            extra_ldflags=stubs,
            build_directory=str(folder),
        )
        _run(module.forward)
        taken.append(time.perf_counter() - start)
    return {"tutorial, first build": taken[:1], "tutorial, kernel edit": taken[1:]}


#: The same operator for both, with ``@`` for a number that each edit changes.
_CELL = """
#include "binding.h"
using namespace cuda_ops;
Tensor swish_cpu(const Tensor& x) {
  return elementwise_cpu([](double v) { return v / (1 + exp(-@ * v)); }, x);
}
CUDA_OPS(library) {
  library.op("dev_loop_cell(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<swish_cpu>();
}
"""
_PEER_CELL = """
torch::Tensor forward(torch::Tensor x) {
  const torch::Tensor in = x.contiguous();
  torch::Tensor out = torch::empty_like(in);
  AT_DISPATCH_FLOATING_TYPES(in.scalar_type(), "swish", [&] {
    const scalar_t* from = in.data_ptr<scalar_t>();
    scalar_t* to = out.data_ptr<scalar_t>();
    for (int64_t i = 0; i < in.numel(); ++i) to[i] = from[i] / (1 + std::exp(-@ * from[i]));
  });
  return out;
}
"""


def cells(folder: Path, edits: int, peer_edits: int) -> dict[str, list[float]]:
    """Returns the seconds from a changed string to a result, by turns; the first text of each is
    not counted.
    """
    x = torch.randn(1024)

    def ours(text: str) -> torch.Tensor:
        result: torch.Tensor = cuda_ops.inline("dev_loop_cell", cpp=text)(x)
        return result

    def peer(text: str) -> torch.Tensor:
        module = cpp_extension.load_inline(
            name="dev_loop_cell_peer",
            cpp_sources=text,
            functions=["forward"],
            build_directory=str(folder),
        )
        result: torch.Tensor = module.forward(x)
        return result

    taken: dict[str, list[float]] = {"cell, inline": [], "cell, load_inline": []}
    ways = ((ours, _CELL, edits), (peer, _PEER_CELL, peer_edits))
    for i in range(max(edits, peer_edits) + 1):
        for seconds, (run, text, count) in zip(taken.values(), ways, strict=True):
            if i > count:
                continue
            start = time.perf_counter()
            result = run(text.replace("@", f"{i + 1}.0"))
            seconds.append(time.perf_counter() - start)
            torch.testing.assert_close(result, x / (1 + (-(i + 1.0) * x).exp()))
    return {label: seconds[1:] for label, seconds in taken.items()}


def _told(results: dict[str, list[float]]) -> dict[str, list[float]]:
    """Prints what was measured at once: the whole takes minutes."""
    for label, seconds in results.items():
        listed = ", ".join(f"{one:.2f}" for one in seconds)
        print(f"{label}: {listed} s", file=sys.stderr, flush=True)
    return results


def command_seconds(*command: str, repeats: int = 5) -> float:
    """Returns the median wall time of a whole command, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], cwd=report.REPO, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@contextlib.contextmanager
def _fresh_cache(scratch: str) -> Iterator[None]:
    """Builds everything anew: an earlier run may have left the same texts behind."""
    before = os.environ.get("CUDA_OPS_CACHE")
    os.environ["CUDA_OPS_CACHE"] = f"{scratch}/cache"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_OPS_CACHE"]
        else:
            os.environ["CUDA_OPS_CACHE"] = before


def _folder(scratch: str, name: str) -> Path:
    folder = Path(scratch) / name
    folder.mkdir()
    return folder


def _print(results: dict[str, list[float]]) -> Console:
    grid = Table("step", "median s", "min s", "max s")
    for label, seconds in results.items():
        median = statistics.median(seconds)
        grid.add_row(label, f"{median:.2f}", f"{min(seconds):.2f}", f"{max(seconds):.2f}")
    console = Console()
    console.print(report.environment(), grid)
    return console


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edits", type=at_least(1), default=5)
    parser.add_argument("--peer-edits", type=at_least(1), default=2)
    parser.add_argument("--cells", action="store_true", help="measure cells alone")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.cells:
        with tempfile.TemporaryDirectory() as scratch, _fresh_cache(scratch):
            found = cells(Path(scratch), arguments.edits, arguments.peer_edits)
        fast, slow = (statistics.median(seconds) for seconds in found.values())
        _print(found).print(f"changed cell: {slow / fast:.1f}x faster")
        report.save(arguments.json, {"seconds": found, "ratio": slow / fast})
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        with _fresh_cache(scratch):
            results |= _told(ours(_folder(scratch, "root"), arguments.edits))
            results |= _told(guest(_folder(scratch, "guest"), arguments.peer_edits))
        results |= _told(tutorial(_folder(scratch, "peer"), arguments.peer_edits))
    results["import torch"] = [command_seconds("-c", "import torch")]
    results["compile_dev.py, nothing changed"] = [command_seconds("compile_dev.py")]
    median = {label: statistics.median(seconds) for label, seconds in results.items()}
    ratio = median["tutorial, kernel edit"] / median["kernel edit"]
    of_guest = median["guest, first build"] / median["tutorial, first build"]
    again = median["compile_dev.py, nothing changed"] / median["import torch"]
    console = _print(results)
    console.print(f"kernel edit: {ratio:.1f}x faster (floor {FLOOR}, goal {GOAL})")
    console.print(f"a guest's first build: {of_guest:.2f}x the time of torch's load (limit 1)")
    console.print(f"nothing changed: {again:.2f}x import torch (limit 1.5)")
    ratios = {"ratio": ratio, "guest_ratio": of_guest, "no_op_ratio": again}
    report.save(arguments.json, {"seconds": results, **ratios})


if __name__ == "__main__":
    main()
