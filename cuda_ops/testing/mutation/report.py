"""Prints what became of mutants: tables by operator, by kind and by check, and the survivors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from cuda_ops.testing.mutation.ledger import Explained
from cuda_ops.testing.mutation.result import Result

_COLUMNS = ("planted", "invalid", "equivalent", "not judged", "killed", "survived", "explained")


def counted(results: Sequence[Result]) -> dict[str, int]:
    """Returns how many mutants each column counts; ``survived`` are those without a reason."""
    verdicts = Counter(result.verdict for result in results)
    explained = sum(bool(r.reason) for r in results if r.verdict == "survived")
    return {
        "planted": len(results), "invalid": verdicts["invalid"],
        "equivalent": verdicts["equivalent"], "not judged": verdicts["not judged"],
        "killed": verdicts["killed"], "survived": verdicts["survived"] - explained,
        "explained": explained,
    }  # fmt: skip


def share(results: Sequence[Result]) -> float | None:
    """Returns the share of killed mutants among those that could be, without the explained."""
    counts = counted(results)
    judged = counts["killed"] + counts["survived"]
    return counts["killed"] / judged if judged else None


def text(results: Sequence[Result], outdated: Iterable[Explained], planned: int) -> str:
    """Returns the report of a run that was to plant ``planned`` mutants."""
    blocks = [
        _table("operator", results, lambda result: result.op),
        _table("kind", results, lambda result: result.kind),
    ]
    killers = Counter(r.by.partition(" of ")[0] for r in results if r.verdict == "killed")
    if killers:
        blocks.append("killed by " + ", ".join(f"{by} {n}" for by, n in killers.most_common()))
    reasons = Counter(r.detail for r in results if r.verdict == "not judged")
    if reasons:
        lines = [f"not judged here {n}: {reason}" for reason, n in reasons.most_common()]
        blocks.append("\n".join(lines))
    for title, found in (
        ("explained", [r for r in results if r.verdict == "survived" and r.reason]),
        ("SURVIVED", [r for r in results if r.is_open]),
    ):
        if found:
            ordered = sorted(found, key=lambda r: (r.op, r.file, r.line))
            blocks.append("\n".join([f"{title}:", *map(str, ordered)]))
    for entry in outdated:
        blocks.append(f"the ledger has an entry that fits no mutant; delete it: {entry}")
    blocks.append(_last_line(results, planned))
    return "\n\n".join(blocks)


def _last_line(results: Sequence[Result], planned: int) -> str:
    counts, found = counted(results), share(results)
    judged = counts["killed"] + counts["survived"]
    line = f"killed {counts['killed']} of {judged} mutants"
    line += f" ({found:.1%})" if found is not None else ""
    besides = ("explained", "equivalent", "invalid", "not judged")
    rest = [f"{counts[name]} {name}" for name in besides if counts[name]]
    line += f"; besides {', '.join(rest)}" if rest else ""
    left = planned - len(results)
    return line + (f"; {left} of {planned} not run yet" if left else "")


def _table(title: str, results: Sequence[Result], group: Callable[[Result], str]) -> str:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(group(result), []).append(result)
    rows = [[title, *_COLUMNS, "share"]]
    for name, found in [*sorted(groups.items()), ("all", [*results])]:
        counts, part = counted(found), share(found)
        shown = "" if part is None else f"{part:.0%}"
        rows.append([name, *(str(counts[column] or "") for column in _COLUMNS), shown])
    rows.insert(1, ["---"] + ["--:"] * (len(rows[0]) - 1))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    filled = [[_fill(*cell) for cell in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in filled)


def _fill(cell: str, width: int) -> str:
    if cell == "---":
        return "-" * width
    return "-" * (width - 1) + ":" if cell == "--:" else cell.ljust(width)
