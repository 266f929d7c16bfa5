"""Reports of what passed, what failed and what was not run: as lines, as JSON, as a table."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import ITSELF, Subject

#: How many checks a reason keeps from running that a summary names.
_MANY = 4


@dataclass(frozen=True)
class CheckEntry:
    """One check on one device: passed, failed, or (``None``) not run; ``detail`` says why."""

    check: str
    device: str
    passed: bool | None
    detail: str = ""
    #: The mistake that a failure shows.
    label: str = ""
    #: Samples that ran.
    count: int = 0
    #: The command that runs the failed sample again.
    reproduce: str = ""
    seconds: float = 0.0
    #: How the operator refused a sample that its reference refuses too, and that sample.
    refusal: str = ""

    @property
    def name(self) -> str:
        return f"{self.check}[{self.device}]"

    @property
    def reason(self) -> str:
        """``detail``, and the refused sample."""
        return _quoted(self.detail, self.refusal)

    def __str__(self) -> str:
        if self.passed:
            samples = f"{self.count} sample" + ("s" if self.count != 1 else "")
            return f"ok      {self.name}: {samples}{', ' if self.reason else ''}{self.reason}"
        if self.passed is None:
            return f"not run {self.name}: {self.reason}"
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
    #: What the operator's build gives up, such as IEEE arithmetic by ``--use_fast_math``.
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(entry.passed is not False for entry in self.entries)

    @property
    def failures(self) -> tuple[CheckEntry, ...]:
        return tuple(entry for entry in self.entries if entry.passed is False)

    def __str__(self) -> str:
        ran = [str(entry) for entry in self.entries if entry.passed is not None]
        return "\n".join([self.op, *self.notes, *ran, *not_run(self.entries), counts(self.entries)])

    def summary(self) -> str:
        """Returns one line with how many checks passed, failed and were not run, and then the
        failures in full.
        """
        number = Counter(entry.passed for entry in self.entries)
        itself = any(e.passed and e.detail.startswith(ITSELF) for e in self.entries)
        parts = [f"{number[False]} FAILED"] if number[False] else []
        parts.append(f"{number[True]} passed" + itself * " (compared with itself)")
        if number[None]:
            parts.append(f"{number[None]} not run: {_main_reasons(self.entries)}")
        failed = map(str, self.failures)
        return "\n".join([f"{self.op}: {', '.join(parts)}", *self.notes, *failed])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> CheckReport:
        entries = tuple(CheckEntry(**entry) for entry in value["entries"])
        return cls(value["op"], entries, value["circumstances"], tuple(value.get("notes", ())))


def read_junit(*paths: Path) -> list[CheckReport]:
    """Reads what tests recorded as property ``cuda_ops_report`` with ``pytest --junitxml``, those
    of one operator and the same circumstances as one.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is no XML, or none of its tests recorded a report.
    """
    properties: list[ElementTree.Element] = []
    for path in paths:
        try:
            properties += ElementTree.parse(path).iter("property")
        except ElementTree.ParseError as error:
            raise ValueError(f"{path}: expected what pytest --junitxml writes: {error}") from error
    texts = [p.get("value", "") for p in properties if p.get("name") == "cuda_ops_report"]
    if not texts:
        names = ", ".join(map(str, paths))
        raise ValueError(f"{names}: expected tests of operators, got none with a report")
    merged: dict[tuple[str, str], CheckReport] = {}
    for report in (CheckReport.from_json(json.loads(text)) for text in texts):
        key = report.op, report.circumstances
        before = merged.get(key, replace(report, entries=()))
        merged[key] = replace(before, entries=before.entries + report.entries)
    found = (replace(report, entries=_merged(report.entries)) for report in merged.values())
    return sorted(found, key=lambda report: report.op)


def _merged(entries: Iterable[CheckEntry]) -> tuple[CheckEntry, ...]:
    """Returns one entry for each check and device: the first failure, else what passed together, as
    a check and the samples of it that once failed.
    """
    found: dict[str, CheckEntry] = {}
    for entry in entries:
        before = found.get(entry.name)
        if before is None or before.passed is None or (before.passed and entry.passed is False):
            found[entry.name] = entry
        elif entry.passed and before.passed:
            found[entry.name] = replace(before, count=before.count + entry.count)
    return tuple(found.values())


def not_run(entries: Iterable[CheckEntry]) -> list[str]:
    """Returns one line for each reason, with the checks that it kept from running, and one sample
    of those that the operator refused.
    """
    return [
        f"not run {', '.join(names)}: {_quoted(reason, first)}"
        for reason, (names, first) in _reasons(entries).items()
    ]


def not_run_counts(entries: Iterable[CheckEntry]) -> list[str]:
    """Returns one line for each reason, with how many checks it kept from running."""
    entries = list(entries)
    reasons = Counter(entry.detail for entry in entries if entry.passed is None)
    first = {reason: refusal for reason, (_, refusal) in _reasons(entries).items()}
    return [f"not run {n}: {_quoted(reason, first[reason])}" for reason, n in reasons.most_common()]


def _main_reasons(entries: Iterable[CheckEntry]) -> str:
    """Returns the reasons that kept many checks from running, and how many others there are."""
    reasons = Counter(entry.detail for entry in entries if entry.passed is None)
    named = {reason: n for reason, n in reasons.most_common() if n >= _MANY}
    shown = [f"{n} {reason}" for reason, n in named.items()]
    if others := len(reasons) - len(named):
        left = reasons.total() - sum(named.values())
        shown.append(f"{left} for {others} {'other ' * bool(named)}reason" + "s" * (others > 1))
    return ", ".join(shown)


def _reasons(entries: Iterable[CheckEntry]) -> dict[str, tuple[list[str], str]]:
    """Returns for each reason the checks that it kept from running, and its first refusal."""
    reasons: dict[str, tuple[list[str], str]] = {}
    for entry in entries:
        if entry.passed is None:
            names, first = reasons.get(entry.detail, ([], ""))
            names += [entry.name] if entry.name not in names else []
            reasons[entry.detail] = names, first or entry.refusal
    return reasons


def _quoted(reason: str, refusal: str) -> str:
    return f"{reason}: {refusal}" if refusal else reason


def counts(entries: Iterable[CheckEntry]) -> str:
    """Returns ``20 passed, 1 failed, 9 not run``."""
    number = Counter(entry.passed for entry in entries)
    return f"{number[True]} passed, {number[False]} failed, {number[None]} not run"


def not_looked_at(entries: Iterable[CheckEntry], every: Iterable[str]) -> str:
    """Returns one line with what a run left out of ``every`` check, and what it could not see."""
    entries = list(entries)
    ran = {entry.check for entry in entries}
    missed = []
    if left := [name for name in every if name not in ran]:
        missed.append(f"{', '.join(left)} (pytest --cuda-ops runs them)")
    gpus = torch.cuda.device_count()
    if gpus < 2:
        missed.append("a second GPU (one here)" if gpus else "CUDA kernels (no GPU here)")
    missed.append("compute-sanitizer (pytest --cuda-ops --sanitize runs it)")
    return f"not looked at: {'; '.join(missed)}"


def command(subject: Subject, check: str, device: str, sample: Sample) -> str:
    """Returns the command that runs a sample again, in a process of its own."""
    line = f"{subject.name}::{check}[{device}]" + (f" {sample}" if sample.args else "")
    words = ["python", "-m", "cuda_ops.testing", "replay", *subject.origin.options, line]
    return shlex.join(words)


def markdown(reports: Sequence[CheckReport]) -> str:
    """Tabulates operators and checks: samples that passed, FAILED, or the number of the reason why
    it was not run.
    """
    circumstances = " and ".join(dict.fromkeys(r.circumstances for r in reports))
    names = list(dict.fromkeys(entry.name for report in reports for entry in report.entries))
    ran = [
        name
        for name in names
        if any(e.name == name and e.passed is not None for r in reports for e in r.entries)
    ]
    meaning = "the number of samples that passed, or in brackets why the check was not run"
    lines = [
        f"{circumstances}. Each cell is {meaning}.",
        "",
        "| check | " + " | ".join(report.op for report in reports) + " |",
        "|---" * (len(reports) + 1) + "|",
    ]
    reasons = _reasons(entry for report in reports for entry in report.entries)
    numbers = {reason: number for number, reason in enumerate(reasons, 1)}
    for name in ran:
        found = [next((e for e in r.entries if e.name == name), None) for r in reports]
        lines.append(f"| {name} | " + " | ".join(_cell(e, numbers) for e in found) + " |")
    if noted := [f"- {report.op}: {note}" for report in reports for note in report.notes]:
        lines += ["", *noted]
    lines += ["", "Not run:", ""]
    lines += [
        f"{numbers[reason]}. {', '.join(names)}: {_quoted(reason, first)}"
        for reason, (names, first) in reasons.items()
    ]
    return "\n".join(lines) + "\n"


def _cell(entry: CheckEntry | None, numbers: dict[str, int]) -> str:
    if entry is None:
        return "not asked for"
    if entry.passed is None:
        return f"({numbers[entry.detail]})"
    return str(entry.count) if entry.passed else "**FAILED**"
