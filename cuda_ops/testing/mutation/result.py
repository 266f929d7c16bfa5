"""What became of a mutant, and the file that keeps it for the next run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cuda_ops.build import cache

#: ``invalid``: does not compile. ``equivalent``: compiles to the same. ``not judged``: nothing here
#: can run it.
Verdict = Literal["killed", "survived", "invalid", "equivalent", "not judged"]


@dataclass(frozen=True)
class Result:
    """What became of a mutant."""

    op: str
    kind: str
    file: str
    line: int
    before: str
    after: str
    number: int
    verdict: Verdict
    #: What found it: a check with its device, ``crash``, ``hang``, ``load`` or ``tests``.
    by: str = ""
    #: What that said; why it was not judged.
    detail: str = ""
    #: Why it may survive, from the ledger.
    reason: str = ""
    seconds: float = 0.0
    #: A digest of all that was judged: sources, devices and profile.
    of: str = ""

    @property
    def key(self) -> str:
        return "\n".join((self.file, self.kind, self.before, self.after, str(self.number)))

    @property
    def is_open(self) -> bool:
        """Whether it survived and nothing explains it."""
        return self.verdict == "survived" and not self.reason

    def __str__(self) -> str:
        reason = f"\n    {self.reason}" if self.reason else ""
        where = f"{self.file}:{self.line}: {self.kind}, {self.op}"
        return f"{where}\n  - {self.before}\n  + {self.after}{reason}"


def write(path: Path, results: Iterable[Result], circumstances: dict[str, Any]) -> None:
    """Writes a file that :func:`read` reads; it is whole at any time."""
    value = {**circumstances, "results": [asdict(result) for result in results]}
    cache.write(path.absolute(), json.dumps(value, indent=1))


def read(path: Path) -> list[Result]:
    """Returns the results of an earlier run; none where there is no file yet.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.exists():
        return []
    try:
        return [Result(**result) for result in json.loads(path.read_text())["results"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected what an earlier run wrote, got {error}") from None
