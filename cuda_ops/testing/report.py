"""Reports of what passed, what failed and what was not run: as lines, as JSON, as a table."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import Subject


@dataclass(frozen=True)
class CheckEntry:
    """One check on one device: passed, failed, or (``None``) not run; ``detail`` says why."""

    check: str
    device: str
    passed: bool | None
    detail: str = ""
    #: How a failure names its class.
    label: str = ""
    #: Samples that ran.
    count: int = 0
    #: The command that runs the failed sample again.
    reproduce: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.check}[{self.device}]"

    def __str__(self) -> str:
        if self.passed:
            samples = f"{self.count} sample" + ("s" if self.count != 1 else "")
            return f"ok      {self.name}: {samples}{', ' if self.detail else ''}{self.detail}"
        if self.passed is None:
            return f"not run {self.name}: {self.detail}"
        lines = [f"FAILED  {self.name}: {self.label}", *_indented(self.detail)]
        if self.reproduce:
            lines.append(f"        reproduce: {self.reproduce}")
        return "\n".join(lines)


def _indented(text: str) -> list[str]:
    return [f"        {line}" for line in text.splitlines()]


@dataclass(frozen=True)
class CheckReport:
    """All checks of one operator; the first failure is the most specific one."""

    op: str
    entries: tuple[CheckEntry, ...]
    #: Profile, GPU and version of torch of the run.
    circumstances: str = ""

    @property
    def passed(self) -> bool:
        return all(entry.passed is not False for entry in self.entries)

    @property
    def failures(self) -> tuple[CheckEntry, ...]:
        return tuple(entry for entry in self.entries if entry.passed is False)

    def __str__(self) -> str:
        ran = [str(entry) for entry in self.entries if entry.passed is not None]
        return "\n".join([self.op, *ran, *not_run(self.entries), counts(self.entries)])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CheckReport:
        entries = tuple(CheckEntry(**entry) for entry in value["entries"])
        return cls(value["op"], entries, value["circumstances"])


def read_junit(path: Path) -> list[CheckReport]:
    """Reads what tests recorded as property ``cuda_ops_report`` with ``pytest --junitxml``."""
    properties = ElementTree.parse(path).iter("property")
    texts = [p.get("value", "") for p in properties if p.get("name") == "cuda_ops_report"]
    reports = [CheckReport.from_json(json.loads(text)) for text in texts]
    return sorted(reports, key=lambda report: report.op)


def not_run(entries: Iterable[CheckEntry]) -> list[str]:
    """Returns one line for each reason, with the checks that it kept from running."""
    reasons: dict[str, list[str]] = {}
    for entry in entries:
        if entry.passed is None:
            reasons.setdefault(entry.detail, []).append(entry.name)
    return [f"not run {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def not_run_counts(entries: Iterable[CheckEntry]) -> list[str]:
    """Returns one line for each reason, with how many checks it kept from running."""
    reasons = Counter(entry.detail for entry in entries if entry.passed is None)
    return [f"not run {number}: {reason}" for reason, number in reasons.most_common()]


def counts(entries: Iterable[CheckEntry]) -> str:
    """Returns ``20 passed, 1 failed, 9 not run``."""
    number = Counter(entry.passed for entry in entries)
    return f"{number[True]} passed, {number[False]} failed, {number[None]} not run"


def command(subject: Subject, check: str, device: str, sample: Sample) -> str:
    """Returns the command that runs a sample again, in a process of its own."""
    line = f"{subject.name}::{check}[{device}]" + (f" {sample}" if sample.args else "")
    words = ["python", "-m", "cuda_ops.testing", "replay", *subject.origin.options, line]
    return shlex.join(words)


def markdown(reports: Sequence[CheckReport]) -> str:
    """Tabulates operators and checks: samples that passed, FAILED, or a dash if not run."""
    circumstances = " and ".join(dict.fromkeys(r.circumstances for r in reports))
    names = list(dict.fromkeys(entry.name for report in reports for entry in report.entries))
    ran = [
        name
        for name in names
        if any(e.name == name and e.passed is not None for r in reports for e in r.entries)
    ]
    lines = [
        f"{circumstances}. Each cell is the number of samples that passed.",
        "",
        "| check | " + " | ".join(report.op for report in reports) + " |",
        "|---" * (len(reports) + 1) + "|",
    ]
    for name in ran:
        cells = [_cell(next((e for e in r.entries if e.name == name), None)) for r in reports]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    reasons = Counter(
        (entry.name, entry.detail)
        for report in reports
        for entry in report.entries
        if entry.passed is None
    )
    lines += ["", "Not run:", ""]
    lines += [f"- {name}: {reason} ({n} operators)" for (name, reason), n in reasons.items()]
    return "\n".join(lines) + "\n"


def _cell(entry: CheckEntry | None) -> str:
    if entry is None or entry.passed is None:
        return "-"
    return str(entry.count) if entry.passed else "**FAILED**"
