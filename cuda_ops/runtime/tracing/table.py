"""Shows a trace as tables: kernels, copies, operators."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cuda_ops.output import size_text, time_text
from cuda_ops.runtime.tracing.kernel_table import CopyTime, KernelTime, Overlap

if TYPE_CHECKING:
    from cuda_ops.runtime.tracing.traces import OperatorTime, Trace

#: Longer names of kernels lose their middle: both ends say what they are.
_NAME_WIDTH = 80


def render(traced: Trace, top: int) -> RenderableType:
    """Returns the tables of a trace, at most ``top`` rows of each, and operators of ours always."""
    parts: list[RenderableType] = []
    if traced.kernels:
        parts += [_kernels(traced.kernels, top), _left_out(traced.kernels, top)]
    if traced.copies:
        parts.append(_copies(traced.copies))
    if traced.kernels or traced.copies:
        parts.append(_overlap(traced.overlap))
    if traced.operators:
        parts.append(_operators(traced, top))
    else:
        parts.append(Text("No operator of torch was called in this thread."))
    if traced.why_no_gpu:
        parts.append(Text(f"No GPU was traced: {traced.why_no_gpu}."))
    return Group(*(part for part in parts if part))


def _kernels(kernels: list[KernelTime], top: int) -> Table:
    table = _table(
        "kernel", "calls", "total", "mean", "share", "grid", "block", "registers", "shared",
        "occupancy (estimate)",
    )  # fmt: skip
    for row in kernels[:top]:
        table.add_row(
            Text(short_name(row.name)),
            str(row.calls),
            time_text(row.seconds),
            time_text(row.mean_seconds),
            f"{row.share:.1%}",
            _extents(row.grid) + (f" +{row.shapes - 1}" if row.shapes > 1 else ""),
            _extents(row.block),
            _said(row.registers),
            "" if row.shared_bytes is None else size_text(row.shared_bytes),
            "" if row.occupancy is None else f"{row.occupancy:.0%}",
        )
    return table


def _left_out(kernels: list[KernelTime], top: int) -> Text:
    rest = kernels[top:]
    if not rest:
        return Text("")
    seconds = sum(row.seconds for row in rest)
    return Text(f"Kernels not listed: {len(rest)}, which took {time_text(seconds)}.")


def _copies(copies: list[CopyTime]) -> Table:
    table = _table("copy", "calls", "size", "total", "rate", "while kernels ran")
    for row in copies:
        rate = f"{row.bytes / row.seconds / 1e9:.1f} GB/s" if row.seconds else ""
        table.add_row(
            Text(row.kind), str(row.calls), size_text(row.bytes), time_text(row.seconds), rate,
            f"{row.overlapped:.1%}",
        )  # fmt: skip
    return table


def _overlap(overlap: Overlap) -> Text:
    said = [f"The GPU was busy for {overlap.busy:.1%} of {time_text(overlap.span_seconds)}"]
    if overlap.copy_seconds:
        said.append(f"kernels ran during {overlap.copies:.1%} of the time of copies")
    if overlap.two_kernels_seconds:
        said.append(f"kernels of several streams during {overlap.kernels:.1%} of that of kernels")
    return Text("; ".join(said) + ".")


def _operators(traced: Trace, top: int) -> Table:
    on_gpu = any(row.gpu_seconds for row in traced.operators)
    table = _table("operator", "calls", "own CPU", "CPU", *(("own GPU", "GPU") if on_gpu else ()))
    for row in _shown(traced.operators, top):
        gpu = (time_text(row.own_gpu_seconds), time_text(row.gpu_seconds)) if on_gpu else ()
        cpu = time_text(row.own_cpu_seconds), time_text(row.cpu_seconds)
        style = "bold" if row.is_ours else ""
        table.add_row(Text(row.name, style=style), str(row.calls), *cpu, *gpu)
    return table


def _shown(operators: list[OperatorTime], top: int) -> Iterable[OperatorTime]:
    return (row for number, row in enumerate(operators) if number < top or row.is_ours)


def _table(*columns: str) -> Table:
    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def short_name(name: str) -> str:
    """Returns a kernel's name without what is the same for all, and not too long.

    >>> short_name("void cuda_ops::flat_kernel<4, float, cuda_ops::Silu<float> >(float*, long)")
    'cuda_ops::flat_kernel<4, float, Silu<float> >'
    """
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"\((?:[^()]|\([^()]*\))*\)$", "", name)
    name = re.sub(r"(?<=[< ])cuda_ops::", "", name)
    half = (_NAME_WIDTH - 3) // 2
    return name if len(name) <= _NAME_WIDTH else f"{name[:half]}...{name[-half:]}"


def _extents(extents: tuple[int, ...] | None) -> str:
    return "" if extents is None else "x".join(map(str, extents))


def _said(value: object) -> str:
    return "" if value is None else str(value)
