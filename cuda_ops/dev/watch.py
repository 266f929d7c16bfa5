"""``compile_dev.py --watch``: one line per save, with the change against the save before."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from watchfiles import watch as wait_for_changes

from cuda_ops.benchmarking.clock import make_clock
from cuda_ops.benchmarking.compare import quick_seconds
from cuda_ops.benchmarking.rotation import Rotation
from cuda_ops.build import compiling, threads
from cuda_ops.build.discovery import INCLUDE_DIR, Pair, Text
from cuda_ops.errors import CudaOpsError, DiscoveryError, KitError, ResultError
from cuda_ops.registry import registry
from cuda_ops.runtime.launch.kernels import least_at_launch_bounds
from cuda_ops.spec import BenchmarkCase, OpSpec
from cuda_ops.testing.announce import announced
from cuda_ops.testing.quick import quick_error, quick_gradient

#: The largest case that is timed after a save.
_MOST_BYTES = {"cuda": 4 << 30, "cpu": 16 << 20}


@dataclass(frozen=True)
class Save:
    """What is known about an operator after one save."""

    seconds: float
    #: Or why there is none.
    max_error: float | str
    #: Seconds per call at the largest benchmark case, and its GB/s; or why it was not timed.
    time: float | str
    rate: float | None
    registers: int | None
    spilled: int | None
    #: The least of any kernel in blocks of its launch bound, and these threads; from 0 to 1.
    occupancy: tuple[float, int] | None = None
    #: What finite differences say of the gradient, as in :class:`cuda_ops.compile_ops.Row`.
    gradient: str = ""

    def line(self, op: str, before: Save | None) -> str:
        """Returns the line to print."""
        error = self.max_error
        shown = f"max error {error:.1e}" if isinstance(error, float) else error
        parts = [f"{op}: {self.seconds:.2f} s", shown]
        if self.gradient:
            parts.append(f"gradient {self.gradient}".partition("\n")[0])
        if isinstance(self.time, str):
            parts.append(f"not timed: {self.time}")
        else:
            change = _change(self.time, before.time if before else None)
            parts.append(f"{self.time * 1e6:.1f} us{change}")
        if self.rate is not None:
            change = _change(self.rate, before.rate if before else None)
            parts.append(f"{self.rate:.0f} GB/s{change}")
        if self.registers is not None and self.spilled is not None:
            step = _step(self.registers, before.registers if before else None)
            parts.append(f"{self.registers} registers{step}")
            step = _step(self.spilled, before.spilled if before else None)
            parts.append(f"{self.spilled} bytes spilled{step}")
        if self.occupancy is not None:
            share, threads = self.occupancy
            change = _step(round(100 * share), _percent(before.occupancy) if before else None)
            parts.append(
                f"occupancy {100 * share:.0f} %{change} by the launch bound of {threads} threads"
            )
        return ", ".join(parts)


def watch(
    names: Iterable[str],
    archs: tuple[str, ...] | None,
    console: Console,
    check: Callable[[str], object] = lambda key: None,
    stop: threading.Event | None = None,
    on_save: Callable[[str], None] = lambda line: None,
) -> None:
    """Rebuilds, reloads, compares and times the named pairs on every save, until interrupted; calls
    ``check`` with the key of each that was loaded and can be compared.
    """
    chosen = [registry().pairs()[name] for name in names]
    last: dict[str, Save] = {}
    known = {pair.key: _text(pair) for pair in chosen}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else "CPU only: CUDA code is compiled, not run"
    )
    for pair in chosen:
        if pair.key in registry().failures:
            continue
        built = None
        with contextlib.suppress(CudaOpsError, OSError):
            built = _build(pair, archs)
        if built is None or (pair.is_declared and registry().library_of(pair.key) != built.path):
            known[pair.key] = None, ""  # saved since it was loaded
        elif pair.is_declared:
            # What cannot be measured now is reported at the first save.
            with contextlib.suppress(Exception):
                last[pair.key] = _measure(pair, 0.0, built, device)
    console.print(f"watching {', '.join(p.key for p in chosen)} ({where}); Ctrl-C ends")
    # Looked at every second too: a save before the first wait makes no event.
    for _ in wait_for_changes(
        *_folders(chosen), debounce=50, step=10, stop_event=stop, rust_timeout=1000,
        yield_on_timeout=True,
    ):  # fmt: skip
        for pair in map(_present, chosen):
            text = _text(pair)
            if text != known[pair.key]:
                known[pair.key] = text
                line = _after_save(pair, text[0], archs, device, last)
                console.print(line, markup=False)
                on_save(line)
                if pair.is_declared and text[0] and pair.key not in registry().failures:
                    check(pair.key)


def _after_save(
    pair: Pair,
    text: Text | None,
    archs: tuple[str, ...] | None,
    device: str,
    last: dict[str, Save],
) -> str:
    start = time.monotonic()
    try:
        built = _build(pair, archs, text)
        registry().load(pair.key, built.path)
        seconds = time.monotonic() - start
        if not pair.is_declared:
            return f"{pair.key}: {seconds:.2f} s"
        save = _measure(pair, seconds, built, device)
    except (ResultError, KitError) as error:
        return f"{pair.key}: {seconds:.2f} s, loaded; {error}"
    except CudaOpsError as error:
        registry().fail(pair.key, error)
        serving = "; the code before it goes on serving" if registry().library_of(pair.key) else ""
        return f"{error}{serving}"
    except FileNotFoundError as error:
        return f"{pair.key}: {error.filename} is gone; waiting for it"
    except Exception as error:  # the operator's own code, or a plugin's reference or benchmark
        return f"{pair.key}: loaded, but measuring it failed: {type(error).__name__}: {error}"
    line = save.line(pair.key, last.get(pair.key))
    last[pair.key] = save
    return "\n".join([line, *built.warnings])


def _build(pair: Pair, archs: tuple[str, ...] | None, text: Text | None = None) -> compiling.Built:
    with threads.builders(1) as submit:
        return threads.result(submit(compiling.build, pair, archs, text=text))


def _present(pair: Pair) -> Pair:
    """Returns the pair with the files it has now: a kernel may have joined a binding."""
    try:
        return registry().rescan()[pair.key]
    except (DiscoveryError, KeyError):  # between two saves the folders may form no operator
        return pair


def _measure(pair: Pair, seconds: float, built: compiling.Built, device: str) -> Save:
    op = next(iter(registry().specs(pair.key).values()))
    resources = built.resources
    home = home_of(op, device)
    # First, since it names the operator if its kernel crashes or never ends.
    error = quick_error(op, registry().plugins, home)
    gradient = quick_gradient(op, home)
    taken, rate = timed(op, home)
    return Save(
        seconds,
        error,
        taken,
        rate,
        resources.registers if resources else None,
        resources.spilled_bytes if resources else None,
        _occupancy(built.path) if resources else None,
        gradient,
    )


def _occupancy(library: Path) -> tuple[float, int] | None:
    try:
        fit = least_at_launch_bounds(library)
    except (OSError, RuntimeError):  # compressed code says nothing
        return None
    return None if fit is None else (fit.occupancy, fit.block)


def home_of(op: OpSpec, device: str) -> str:
    """Returns the device that an operator is measured on, where there is this one."""
    return device if "CUDA" in op.keys or op.is_composite else "cpu"


def timed(op: OpSpec, device: str) -> tuple[float | str, float | None]:
    """Returns the seconds of a call at the largest benchmark case and its GB/s, or why there are
    none.
    """
    if not op.is_composite and device.upper() not in op.keys:
        return f"no {device.upper()} kernel", None
    given: list[BenchmarkCase] = registry().plugins.ask("cuda_ops_benchmarks", op) or []
    # On a CPU a smaller case is enough to see a change and does not delay the next save.
    most = _MOST_BYTES[device]
    cases = sorted((c for c in given if c.bytes <= most), key=lambda case: case.bytes)
    if not given:
        return "no signature line or cuda_ops_benchmarks", None
    if not cases:
        return f"no case of at most {most >> 20} MiB", None
    case, clock = cases[-1], make_clock(torch.device(device))
    rotation = Rotation(case, clock.device, 2)
    with announced(f"{op.key}: timing it on {device}"):
        median = quick_seconds(op.function, rotation, clock, budget=0.1)
    return median, case.bytes / median / 1e9


def _text(pair: Pair) -> tuple[Text | None, str]:
    """Reads what the pair's files and its plugin say now."""
    try:
        plugin = pair.plugin
        return pair.read(), plugin.read_text() if plugin.is_file() else ""
    except OSError:  # an editor is replacing the file
        return None, ""


def _folders(pairs: list[Pair]) -> list[Path]:
    folders = {INCLUDE_DIR}
    for pair in pairs:
        folders |= {pair.root / "kernels", pair.root / "bindings", *pair.include_dirs}
        folders.add(pair.plugin.parent)
    return sorted(folder for folder in folders if folder.is_dir())


def _change(now: float, before: float | str | None) -> str:
    if not before or isinstance(before, str):
        return ""
    return f" ({(now / before - 1) * 100:+.0f} %)"


def _percent(occupancy: tuple[float, int] | None) -> int | None:
    return None if occupancy is None else round(100 * occupancy[0])


def _step(now: int, before: int | None) -> str:
    return f" ({now - before:+d})" if before is not None and now != before else ""
