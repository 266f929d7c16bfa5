"""Makes the tables of runs that belong to no operator: experts on several GPUs, and what stands
around kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import moe_plan
from benchmarks.stored import json_of, markdown, reports
from cuda_ops.output import time_text


def _dense_experts() -> str:
    """Compares the mixture with its products alone."""
    rows = []
    for result in json_of("dense_experts")["results"]:
        ours, composed, products = (
            result["seconds"][name] for name in ("cuda_ops.moe", "grouped_mm", "torch.bmm")
        )
        ratios = composed / ours, products / ours, composed / products
        times = time_text(ours), time_text(products)
        rows.append((result["case"], *times, *(f"{ratio:.2f}" for ratio in ratios)))
    header = ("case", "moe", "bmm", "grouped_mm / moe", "bmm / moe", "grouped_mm / bmm")
    return markdown(header, rows)


def _experts_on_ranks() -> str:
    """Has the scaling that is planned for ``moe`` on several GPUs and hosts."""
    report, sizes = reports()["moe"], [(2, 1), (4, 1), (8, 1), (8, 2), (8, 8)]
    planned = {
        (one.model, one.tokens, one.gpus, one.hosts): one
        for gpus, hosts in sizes
        for one in moe_plan.plans(report, gpus, hosts)
        if one.tokens >= 64  # fewer take as long as their launches
    }
    rows = []
    for model, tokens in dict.fromkeys((model, tokens) for model, tokens, *_ in planned):
        cells = [planned.get((model, tokens, *size)) for size in sizes]
        text = [
            f"{one.scaling:.2f} ({time_text(one.seconds_of_wire)})" if one else "-" for one in cells
        ]
        rows.append((model, str(tokens), *text))
    heads = ("model", "tokens a rank", *(f"{hosts} x {gpus} GPUs" for gpus, hosts in sizes))
    return markdown(heads, rows)


def _ranks(run: str) -> str:
    """Has a run of ``moe`` on several GPUs: the scaling of each case, eager and as a graph, and
    times over the composition.
    """
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for case in json_of(run)["results"]["cases"]:
        step = str(case["tokens"]) + (", trained" if case["backward"] else "")
        cells.setdefault((case["model"], step), {})[case["way"]] = case

    def scaling(case: dict[str, Any] | None) -> str:
        if case is None:
            return "-"
        value = case["scaling"]["value"]
        return f"{value:.2f} ({time_text(case['us']['value'] / 1e6)})"

    rows = []
    for (model, step), found in cells.items():
        ways = [found.get(way) for way in ("moe", "moe, graph", "gather in 2", "dispatch")]
        over = f"{found['moe']['composition_over']['value']:.2f}x"
        rows.append((model, step, *map(scaling, ways), over, f"{found['moe']['host_us']:.0f} us"))
    heads = (
        "model", "tokens a rank", "moe", "as a graph", "gather in 2 chunks", "dispatch",
        "composition", "host",
    )  # fmt: skip
    return markdown(heads, rows)


def _models() -> str:
    """Has each case of whole models: the best of transformers' ways, ``use_moe`` and the ratio."""
    run, rows = json_of("models"), []
    cases = run["results"]["cases"]
    milliseconds = {(c["model"], c["case"], c["way"]): c["milliseconds"]["value"] for c in cases}
    for case in cases:
        if case["way"] == "use_moe":
            name, what, best = case["model"], case["case"], case["best_peer"]
            theirs = f"{milliseconds[name, what, best]:.3g} ms, {best}"
            ours = f"{milliseconds[name, what, 'use_moe']:.3g} ms"
            rows.append((name, case["what"], theirs, ours, f"{case['best_over']['value']:.2f}x"))
    known = run["results"]["environments"].values()
    device, torch, transformers, date = (
        " and ".join(sorted({one[key] for one in known}))
        for key in ("device", "torch", "transformers", "date")
    )
    heading = (
        f"{cases[0]['layers']} layers of the real shape, random weights, bfloat16; {device}, torch "
        f"{torch}, transformers\n{transformers}, {date}, "
        "`python -m benchmarks.models`; a ratio is the median over\nturns, so it may differ from "
        "that of the two medians beside it."
    )
    table = markdown(("model", "", "transformers' best", "use_moe", "faster"), rows)
    return f"{heading}\n\n{table}"


def _copies() -> str:
    """Has the loops over batches whose copy takes as long as their computation."""
    cells: dict[str, list[str]] = {}
    for row in json_of("runtime")["results"]["copies"]:
        cell = f"{row['milliseconds']:.2f} ms"
        if "alone" not in row["way"]:
            cell += f", {row['times_tutorial']['value']:.2f}x"
            cell += f", {row['of_the_longer']['value']:.0%}"
        cells.setdefault(row["way"], []).append(cell)
    return markdown(("a batch", "ordinary memory", "pinned memory"), _rows(cells))


def _graphs() -> str:
    """Has the calls of small work by each way to a graph, a column for each step."""
    cells: dict[str, list[str]] = {}
    steps = dict.fromkeys(row["step"] for row in json_of("runtime")["results"]["graphs"])
    for row in json_of("runtime")["results"]["graphs"]:
        ratio = row["times_make_graphed_callables"]["value"]
        cells.setdefault(row["way"], []).append(f"{row['microseconds']:.1f} us, {ratio:.2f}x")
    return markdown(("a call", *steps), _rows(cells))


def _graph_updates() -> str:
    """Has what a graph for other addresses takes."""
    cells: dict[str, list[str]] = {}
    counts: dict[str, None] = {}
    for row in json_of("runtime")["results"]["updates"]:
        counts[f"{row['kernels']} kernels"] = None
        time = time_text(row["microseconds"]["value"] / 1e6)
        cells.setdefault(row["what"], []).append(time)
    return markdown(("", *counts), _rows(cells))


def _events() -> str:
    """Has what events cost, a row for how they are used, a column for each train."""
    cells: dict[str, list[str]] = {}
    found = json_of("runtime")["results"]["events"]
    for row in found:
        device = row["device_microseconds"]
        cell = f"{row['host_microseconds']:.1f}" + ("" if device is None else f", {device:.1f}")
        way = ", ".join(word for word in (row["timing"], row["events"]) if word)
        cells.setdefault(way, []).append(cell)
    trains = dict.fromkeys(row["train"] for row in found)
    return markdown(("host, device", *trains), _rows(cells))


def _peers() -> str:
    """Has copies from one GPU to another, a column for each size."""
    cells: dict[str, list[str]] = {}
    found = json_of("runtime")["results"]["peers"]
    for row in found:
        time = time_text(row["microseconds"] / 1e6)
        rate = f"{row['gigabytes_a_second']:.3g} GB/s"
        cells.setdefault(row["way"], []).append(f"{time}, {rate}")
    sizes = dict.fromkeys(f"{row['MiB']} MiB" for row in found)
    return markdown(("a copy", *sizes), _rows(cells))


def _by_torch() -> str:
    """Has what a CPU runs: times of torch's functions over those of operators."""
    cells: dict[str, list[str]] = {}
    for row in json_of("on_cpu")["results"]["cases"]:
        ratios = (f"{row['torch_over'][way]['value']:.2f}x" for way in ("as it is", "own kernel"))
        if row["op"] not in cells:
            cells[row["op"]] = ["torch's" if row["by_torch"] else "its own"]
        cells[row["op"]] += ratios
    heads = ("operator", "a CPU runs", "float32", "its own kernel", "bfloat16", "its own kernel")
    return markdown(heads, _rows(cells))


def _without_links(table: Callable[[], str], base: Path) -> str:
    return table()


def _rows(cells: dict[str, list[str]]) -> list[tuple[str, ...]]:
    return [(name, *row) for name, row in cells.items()]


_RUNS: dict[str, Callable[[], str]] = {
    "dense experts": _dense_experts,
    "experts on ranks": _experts_on_ranks,
    "ranks": partial(_ranks, "moe_ranks"),
    "ranks of one": partial(_ranks, "moe_ranks_1"),
    "ranks of four": partial(_ranks, "moe_ranks_4"),
    "models": _models,
    "copies": _copies,
    "graphs": _graphs,
    "graph updates": _graph_updates,
    "events": _events,
    "peers": _peers,
    "by torch": _by_torch,
}
TABLES: dict[str, Callable[[Path], str]] = {
    name: partial(_without_links, table) for name, table in _RUNS.items()
}
