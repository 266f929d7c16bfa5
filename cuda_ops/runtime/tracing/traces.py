"""Traces a block of code with torch's profiler, and adds up what it recorded."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch._C._autograd import DeviceType

from cuda_ops import output, spec
from cuda_ops.build import cache
from cuda_ops.errors import CudaOpsError
from cuda_ops.names import HOME, apart
from cuda_ops.runtime import profilers
from cuda_ops.runtime.arguments import check_count, check_flag, checked_path
from cuda_ops.runtime.tracing.kernel_table import CopyTime, GpuWork, KernelTime, Overlap, gpu_work
from cuda_ops.runtime.tracing.table import render

#: Wide enough for the table of kernels, wherever it is printed.
_WIDTH = 180


@dataclass(frozen=True)
class OperatorTime:
    """All calls of one operator, or of one range of ``torch.profiler.record_function``."""

    name: str
    calls: int
    cpu_seconds: float
    #: Without the operators that it called.
    own_cpu_seconds: float
    #: The time of the kernels and copies that it started; 0 without a GPU.
    gpu_seconds: float
    own_gpu_seconds: float
    #: Whether cuda_ops registered it, in any namespace.
    is_ours: bool


class Trace:
    """What was traced; complete when the block of :func:`trace` has ended."""

    def __init__(self, path: Path | None) -> None:
        #: The Chrome trace, ``None`` if none was asked for.
        self.path = path
        self._gpu: GpuWork | None = None
        self._operators: list[OperatorTime] = []
        self._why_no_gpu = ""

    @property
    def kernels(self) -> list[KernelTime]:
        """A row for each kernel, the one that took most time first."""
        return self._check().kernels

    @property
    def copies(self) -> list[CopyTime]:
        """A row for each kind of copy, the one that took most time first."""
        return self._check().copies

    @property
    def overlap(self) -> Overlap:
        """What ran at the same time."""
        return self._check().overlap

    @property
    def operators(self) -> list[OperatorTime]:
        """A row for each operator, by its own time on the GPU, then by that on the CPU."""
        self._check()
        return self._operators

    @property
    def why_no_gpu(self) -> str:
        """Why there are no kernels; empty if there are any."""
        self._check()
        return self._why_no_gpu

    def table(self, top: int = 20) -> str:
        """Returns the tables as text, at most ``top`` rows of each; our operators are always in.

        Raises:
            ValueError: ``top`` is no int of 0 or more.
            RuntimeError: the block has not ended.
        """
        check_count("Trace.table", "top", top, 0)
        console = Console(width=_WIDTH, color_system=None, highlight=False, soft_wrap=True)
        shown = render(self, top)
        output.keep_words(console, shown)
        with console.capture() as captured:
            console.print(shown)
        return captured.get().rstrip("\n")

    @property
    def _is_complete(self) -> bool:
        return self._gpu is not None

    def _check(self) -> GpuWork:
        if self._gpu is None:
            raise RuntimeError("trace: nothing to read before its block has ended")
        return self._gpu

    def _fill(self, events: list[dict[str, Any]], averages: Any) -> None:
        self._operators = _operators(averages)
        self._gpu = gpu_work(events)
        if self._gpu.kernels or self._gpu.copies:
            return
        if not torch.cuda.is_available():
            self._why_no_gpu = "torch sees none"
        elif self._gpu.launched:
            self._why_no_gpu = (
                f"of {self._gpu.launched} launches of kernels none was recorded; another "
                "profiler may hold the GPU"
            )
        else:
            self._why_no_gpu = "no kernel was launched"


@contextlib.contextmanager
def trace(
    path: str | os.PathLike[str] | None = None, *, shapes: bool = False, stacks: bool = False
) -> Iterator[Trace]:
    """Traces the block with torch's profiler, on the CPU and on every GPU.

    An operator appears under its name in the dispatcher, such as ``cuda_ops::silu``, and its
    gradient under ``cuda_ops::silu_backward``. What was started before the block ends is in, since
    the block waits for the GPUs then. If the block raises, the trace is written all the same.
    Operators that other threads of Python call are not in, except for those of backward passes;
    their kernels are.

    Args:
        path: the Chrome trace to write, ``.json`` or ``.json.gz``, for https://ui.perfetto.dev;
            ``None`` for tables alone.
        shapes: whether the trace has the shapes of arguments.
        stacks: whether the trace has the Python functions that ran, such as ``cuda_ops.silu``,
            which makes everything slower.

    Raises:
        TypeError: the path is none, or ``shapes`` or ``stacks`` is no bool.
        ValueError: the path has another suffix.
        FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError: the path cannot
            be written; before the block runs.
        RuntimeError: a trace or a profiler of torch is running already; in the block, where one
            starts there, in another thread too.

    >>> import torch, cuda_ops.runtime
    >>> with cuda_ops.runtime.trace() as traced:
    ...     y = torch.ones(3).exp()
    >>> [row.calls for row in traced.operators if row.name == "aten::exp"]
    [1]
    """
    check_flag("trace", "shapes", shapes)
    check_flag("trace", "stacks", stacks)
    target = None if path is None else _checked(path)
    profilers.check_free("trace")
    traced = Trace(target)
    profiler = _profiler(shapes, stacks)
    _synchronize()  # what was started earlier is no part of it
    profiler.start()
    failed = True
    try:
        with profilers.kept("trace"):
            yield traced
        failed = False
    finally:
        _finish(traced, profiler, failed)


def _finish(traced: Trace, profiler: torch.profiler.profile, failed: bool) -> None:
    """Waits, stops, writes and reads, each even if the one before failed, as after an illegal
    access. The block's own error goes before all others.
    """
    errors = []
    for step in (
        _synchronize,
        profiler.stop,
        lambda: traced._fill(_written(profiler, traced.path), profiler.key_averages()),
    ):
        try:
            step()
        except Exception as error:
            errors.append(error)
    if errors and not failed:
        raise errors[0]
    if not traced._is_complete:
        reason = f"{type(errors[-1]).__name__}: {errors[-1]}"
        warnings.warn(f"trace: the trace is not complete: {reason}", stacklevel=2)


def _profiler(shapes: bool, stacks: bool) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # Without acc_events torch warns that a schedule would lose events; there is none here.
    return torch.profiler.profile(
        activities=activities, record_shapes=shapes, with_stack=stacks, acc_events=True
    )


def _synchronize() -> None:
    """Waits for every GPU that this process has used, and starts none of the others."""
    if not torch.cuda.is_initialized():
        return
    for index in range(torch.cuda.device_count()):
        # Only in torch for CUDA, and in no stub.
        if torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
            torch.cuda.synchronize(index)


def _checked(path: str | os.PathLike[str]) -> Path:
    target = checked_path("trace", "path", path)
    if not target.name.endswith((".json", ".json.gz")):
        raise ValueError(
            f"trace: argument 'path': expected a file that ends in .json or .json.gz, got {path!s}"
        )
    folder = target.parent
    if not folder.exists():
        raise FileNotFoundError(f"trace: argument 'path': there is no folder {folder}")
    if not folder.is_dir():
        raise NotADirectoryError(f"trace: argument 'path': {folder} is not a folder")
    if target.is_dir():
        raise IsADirectoryError(f"trace: argument 'path': {target} is a folder")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"trace: argument 'path': folder {folder} cannot be written")
    return target.absolute()  # the block may change the working directory


def _written(profiler: torch.profiler.profile, target: Path | None) -> list[dict[str, Any]]:
    """Writes the trace, which appears under its name when it is complete; returns its events."""
    folder = None if target is None else target.parent
    with tempfile.TemporaryDirectory(prefix=".trace-", dir=folder) as temporary:
        file = Path(temporary, "trace.json")
        profiler.export_chrome_trace(str(file))
        data = file.read_bytes()
    if target is not None:
        packed = gzip.compress(data) if target.suffix == ".gz" else data
        cache.write(target, packed, mode=None)
    text = data.decode(errors="replace")
    try:
        events: list[dict[str, Any]] = json.loads(text, strict=False)["traceEvents"]
    except (ValueError, KeyError) as error:
        raise CudaOpsError(f"trace: torch wrote a trace that cannot be read: {error}") from error
    return events


def _operators(averages: Any) -> list[OperatorTime]:
    ours = {apart(key)[0] for key in spec.functions} | {HOME}
    rows = [
        OperatorTime(
            average.key,
            average.count,
            average.cpu_time_total / 1e6,
            average.self_cpu_time_total / 1e6,
            average.device_time_total / 1e6,
            average.self_device_time_total / 1e6,
            average.key.partition("::")[0] in ours and "::" in average.key,
        )
        for average in averages
        if average.device_type == DeviceType.CPU
    ]
    return sorted(rows, key=lambda row: (-row.own_gpu_seconds, -row.own_cpu_seconds))
