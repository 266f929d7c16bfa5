"""Facts and findings for people, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cuda_ops import output
from cuda_ops.doctor.facts import Facts, Gpu, Operator, Tool
from cuda_ops.doctor.finding import LEVELS, Finding

_COLORS = {"broken": "red", "warning": "yellow", "note": "cyan"}


def as_json(facts: Facts, found: Sequence[Finding]) -> str:
    """Returns one object: the fields of the facts, and ``findings``."""
    both = {**asdict(facts), "findings": [asdict(finding) for finding in found]}
    return json.dumps(both, indent=2, allow_nan=False)


def show(facts: Facts, found: Sequence[Finding], console: Console) -> None:
    """Prints the facts, the operators, and what is wrong with the command that mends it."""
    grid = Table(box=None, pad_edge=False, show_header=False)
    for name, text in _machine(facts):
        grid.add_row(name, escape(text))
    for part in (grid, _operators(facts.operators)):
        if part.row_count:
            output.keep_words(console, part)
            console.print(part)
            console.print()
    for finding in found:
        color = _COLORS[finding.level]
        console.print(f"[{color}]{finding.level}[/] {escape(_short(finding.what))}")
        if finding.why:
            console.print(f"  why: {_short(finding.why)}", markup=False)
        if finding.about and finding.about[0] not in finding.what:
            console.print(f"  about: {', '.join(finding.about)}", markup=False)
        if finding.command:
            console.print(f"  mend: {finding.command}", markup=False)
    if found:
        console.print()
    console.print(summary(found), markup=False)


def summary(found: Sequence[Finding]) -> str:
    """Returns the last line.

    >>> summary([Finding("no-ninja", "warning", "there is no ninja")])
    'Nothing is broken. 1 warning.'
    """
    broken, warnings, notes = ([f for f in found if f.level == level] for level in LEVELS)
    text = f"{len(broken)} broken." if broken else "Nothing is broken."
    for some, name in ((warnings, "warning"), (notes, "note")):
        if some:
            text += f" {len(some)} {name}{'s' * (len(some) > 1)}."
    return text


def _machine(facts: Facts) -> Iterator[tuple[str, str]]:
    torch, driver, toolkit, cache = facts.torch, facts.driver, facts.toolkit, facts.cache
    yield "cuda_ops", f"{facts.cuda_ops}, Python {facts.python}"
    built = f"built with CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
    yield "torch", f"{torch.version}, {built}" if torch.version else "cannot be imported"
    yield "GPUs", _gpus(torch.gpus or driver.gpus, usable=bool(torch.gpus))
    supports = f"CUDA {driver.cuda}" if driver.cuda else "does not say which CUDA it supports"
    known = driver.version or driver.cuda
    yield "driver", f"{driver.version or 'unknown version'}, {supports}" if known else "none"
    where = f"CUDA {toolkit.version}, {toolkit.home}"
    yield "toolkit", where if toolkit.home else "none: CUDA kernels cannot be built"
    script = ", a script around another" if toolkit.is_script else ""
    yield "nvcc", f"{toolkit.nvcc}{script}" if toolkit.nvcc else "none on PATH"
    yield "C++", _tool(facts.compiler)
    yield "ninja", _tool(facts.ninja)
    if not torch.version:  # nothing else can be looked at
        return
    held = f"{cache.entries} libraries and builds, {output.size_text(cache.size)}"
    if cache.stale:
        held += f", {cache.stale} of them stale"
    if cache.foreign:
        held += ", refused: others may write it"
    if not cache.writable:
        held += ", cannot be written"
    yield "cache", f"{_short(cache.path)}: {held}" if cache.path else "none"
    for plugin in facts.plugins:
        package = f" of {plugin.package}" if plugin.package else ""
        state = "failed" if plugin.problem else "loaded"
        yield "plugin", f"{plugin.name} ({plugin.value}){package}: {state}"
    if not facts.plugins:
        yield "plugins", "none installed"


def _short(text: str) -> str:
    """Returns a text with ``~`` for the user's home folder."""
    try:
        return text.replace(f"{Path.home()}/", "~/")
    except RuntimeError:  # there is none
        return text


def _gpus(gpus: Sequence[Gpu], usable: bool) -> str:
    if not gpus:
        return "none here: only CPU kernels run"
    listed = (f"{gpu.name}, {gpu.capability}" for gpu in dict.fromkeys(gpus))
    text = f"{len(gpus)} ({'; '.join(listed)})"
    return text if usable else f"{text}, none of them usable by torch"


def _tool(tool: Tool) -> str:
    return f"{tool.path}, {tool.version}" if not tool.problem else tool.problem


def _operators(operators: Sequence[Operator]) -> Table:
    table = Table("op", "library", "holds code for", "text", "loads", box=None, pad_edge=False)
    for op in operators:
        archs = "unknown" if op.archs is None else " ".join(op.archs) or "CPU alone"
        text = {True: "the present one", False: "[yellow]another[/]", None: "unknown"}
        loads = op.loads if op.loads in ("yes", "") else f"[red]{op.loads}[/]"
        if not op.library:
            table.add_row(op.key, "[red]none[/]")
        else:
            table.add_row(op.key, op.origin, archs, text[op.is_current], loads or "not tried")
    return table
