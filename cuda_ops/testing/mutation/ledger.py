"""The file of survivors that are explained: harmless, or out of reach of any check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.output import lines_of
from cuda_ops.testing.mutation.plan import Mutant
from cuda_ops.testing.mutation.result import Result

#: Its name in a root, or in the folder ``tests`` beside the root.
NAME = "mutation_ledger.txt"


@dataclass(frozen=True)
class Explained:
    """A mutant that may survive. ``after`` may be ``*``: any change of that line."""

    file: str
    before: str
    after: str
    reason: str

    def covers(self, mutant: Mutant | Result) -> bool:
        return (
            self.file == mutant.file
            and self.before == mutant.before
            and self.after in ("*", mutant.after)
        )

    def __str__(self) -> str:
        return f"{self.file}: {self.before} -> {self.after}"


def read(path: Path) -> list[Explained]:
    """Reads entries of four lines: ``FILE``, ``- LINE``, ``+ MUTANT`` and ``= REASON``.

    Empty lines and those that start with ``#`` say nothing.

    Raises:
        ValueError: a line of another form or in another place.
    """
    entries: list[Explained] = []
    fields: list[str] = []
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip() or line.startswith("#"):
            continue
        mark = ("", "- ", "+ ", "= ")[len(fields)]
        text = line.removeprefix(mark).strip()
        if not line.startswith(mark) or not text or (not mark and line[:2] in ("- ", "+ ", "= ")):
            expected = ("FILE", "- THE LINE", "+ THE MUTANT'S LINE", "= REASON")[len(fields)]
            raise ValueError(f"{path}:{number}: expected {expected}, got {line!r}")
        fields.append(text)
        if len(fields) == 4:
            entries.append(Explained(*fields))
            fields = []
    if fields:
        raise ValueError(f"{path}: the last entry has {len(fields)} of 4 lines")
    return entries


def outdated(entries: Iterable[Explained], mutants: Iterable[Mutant]) -> list[Explained]:
    """Returns the entries about files of these mutants that fit none of them any more."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, []).append(mutant)
    return [
        entry
        for entry in entries
        if entry.file in by_file and not any(map(entry.covers, by_file[entry.file]))
    ]
