"""Which faults to plant: those of a pair's files and of the headers that hold its kernels."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from cuda_ops.build.discovery import INCLUDE_DIR, Pair
from cuda_ops.build.source_text import Kind, closure, line_at
from cuda_ops.testing.mutation.kinds import KINDS, Fault
from cuda_ops.testing.mutation.plugin_faults import gradient
from cuda_ops.testing.mutation.source import Source

_T = TypeVar("_T")

#: What a header holds that computes.
_COMPUTES = re.compile(r"__(?:device|global)__|\bparallel_for\(")

#: What a header defines, at the start of a line.
_DEFINED = re.compile(
    r"^(?:struct|class|enum class) (\w+)|^[\w:][^;{}()\n]*?\b(\w+)\(", re.MULTILINE
)
#: A header's mutants are judged by at most so many of the operators that use it.
_MOST_USERS = 3


@dataclass(frozen=True)
class Mutant:
    """A file with one fault."""

    #: The operators whose checks may find it; the first one is named in reports.
    ops: tuple[str, ...]
    kind: str
    #: The file, from the root on or, for the plugin of a shipped operator, from the project on.
    file: str
    line: int
    #: The lines that change, in one line each.
    before: str
    after: str
    fault: Fault
    #: Tells it from faults that change equal lines to the same.
    number: int = 0

    @property
    def key(self) -> str:
        """What a file of results knows it by: all but the line's number."""
        return "\n".join((self.file, self.kind, self.before, self.after, str(self.number)))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}\n  - {self.before}\n  + {self.after}"

    def as_json(self) -> dict[str, Any]:
        return {
            "op": self.ops[0], "kind": self.kind, "file": self.file, "line": self.line,
            "before": self.before, "after": self.after, "number": self.number,
        }  # fmt: skip


def files_of(pair: Pair, texts: dict[Path, bytes]) -> list[Path]:
    """Returns the files of a pair that hold its operators: sources, headers under its root, plugin.

    Of the headers that every binding includes, only those that compute.
    """
    vocabulary = {*closure([INCLUDE_DIR / "binding.h"], [INCLUDE_DIR], texts)}
    files = []
    for path in closure(pair.sources, pair.include_dirs, texts):
        if not path.is_relative_to(pair.root):
            continue
        if path not in vocabulary or _COMPUTES.search(texts[path].decode(errors="replace")):
            files.append(path)
    return [*files, *([pair.plugin] if pair.plugin.is_file() else [])]


def mutants_in(path: Path, name: str, text: str, ops: Sequence[str]) -> list[Mutant]:
    """Returns every mutant of a file, each once."""
    faults: dict[Fault, str] = {}
    if path.suffix == ".py":
        faults = dict.fromkeys(gradient(text), "gradient")
    else:
        source = Source(text)
        for kind, find in KINDS.items():
            for fault in find(source):
                faults.setdefault(fault, kind)
    numbers: Counter[tuple[str, str, str]] = Counter()
    mutants = []
    for fault, kind in sorted(faults.items(), key=lambda item: (item[0].start, item[0].new)):
        before, after = _lines(text, fault)
        same = kind, before, after
        line = line_at(text, fault.start)
        mutants.append(
            Mutant(tuple(ops), kind, name, line, before, after, fault, numbers[same])
        )  # fmt: skip
        numbers[same] += 1
    return mutants


def _lines(text: str, fault: Fault) -> tuple[str, str]:
    """Returns the lines that a fault changes, and what they become."""
    first = text.rfind("\n", 0, fault.start) + 1
    last = text.find("\n", max(fault.start, fault.end))
    last = len(text) if last < 0 else last
    after = text[first : fault.start] + fault.new + text[fault.end : last]
    return " ".join(text[first:last].split()), " ".join(after.split())


def every_mutant(pairs: Iterable[Pair]) -> list[Mutant]:
    """Returns all mutants of pairs that register themselves with ``CUDA_OPS``, headers once."""
    texts: dict[Path, bytes] = {}
    users: dict[Path, list[Pair]] = {}
    files: dict[str, list[Path]] = {}
    for pair in pairs:
        if pair.kind is Kind.NATIVE and not pair.problem:
            files[pair.key] = files_of(pair, texts)
            for path in files[pair.key]:
                users.setdefault(path, []).append(pair)
    found = []
    for path, using in users.items():
        text = path.read_text(encoding="utf-8")
        judging = _covering(path, text, [(pair, files[pair.key]) for pair in using], texts)
        name = str(path.relative_to(_base(using[0], path)))
        found += mutants_in(path, name, text, [pair.key for pair in judging])
    return found


def _covering(
    path: Path, text: str, users: Sequence[tuple[Pair, list[Path]]], texts: Mapping[Path, bytes]
) -> list[Pair]:
    """Returns the users of a file that judge its mutants: of a header's those that together use
    most of what it defines, and of equal ones the shortest.
    """
    left = {name for found in _DEFINED.finditer(Source(text).code) for name in found.groups()}
    words: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    for pair, files in users:
        own = b"\n".join(texts.get(file, b"") for file in files if file != path)
        words[pair.key] = {*re.findall(r"\w+", own.decode(errors="replace"))}
        sizes[pair.key] = len(own)
    ranked: list[Pair] = []
    waiting = [pair for pair, _ in users]
    while waiting and len(ranked) < _MOST_USERS:
        best = max(waiting, key=lambda pair: (len(left & words[pair.key]), -sizes[pair.key]))
        left -= words[best.key]
        ranked.append(best)
        waiting.remove(best)
    return ranked


def _base(pair: Pair, path: Path) -> Path:
    """Returns the folder that names of a pair's files start from: the root, or what holds the
    plugins of shipped operators.
    """
    return pair.root if path.is_relative_to(pair.root) else pair.plugin.parents[2]


def chosen(mutants: Iterable[Mutant], limit: int | None, seed: int) -> list[Mutant]:
    """Returns ``limit`` of the mutants, or all, in the order in which to run them.

    Each stretch of the list is spread over operators, and over the kinds and files of each.
    """
    by_op: dict[str, dict[str, dict[str, list[Mutant]]]] = {}
    for mutant in mutants:
        kinds = by_op.setdefault(mutant.ops[0], {})
        kinds.setdefault(mutant.kind, {}).setdefault(mutant.file, []).append(mutant)
    in_turn = []
    for op, kinds in sorted(by_op.items()):
        draw = random.Random(f"{seed} {op}")
        turns = []
        for files in _shuffled(kinds.values(), draw):
            in_files = [_shuffled(one, draw) for one in _shuffled(files.values(), draw)]
            turns.append([*_turns(in_files)])
        in_turn.append([*_turns(turns)])
    random.Random(seed).shuffle(in_turn)
    return [*_turns(in_turn)][:limit]


def _shuffled(values: Iterable[_T], draw: random.Random) -> list[_T]:
    found = [*values]
    draw.shuffle(found)
    return found


def _turns(lists: Iterable[Sequence[_T]]) -> Iterator[_T]:
    """Yields the first of each list, then the second of each."""
    nothing = object()
    for value in chain.from_iterable(zip_longest(*lists, fillvalue=nothing)):
        if value is not nothing:
            yield value  # type: ignore[misc]  # it is of a list
