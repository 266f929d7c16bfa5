"""Runs compute-sanitizer on small calls of operators, one process per tool.

python -m cuda_ops.testing sanitize silu
pytest --cuda-ops silu --sanitize
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cuda_ops.build import toolchain
from cuda_ops.errors import CudaOpsError
from cuda_ops.testing.subject import find

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Seconds for one tool on all operators.
_TIMEOUT = 540
#: Findings that a tool prints for one process; a false one appears once for each thread.
_PRINTED = 10_000
#: Findings that a verdict shows in full.
_SHOWN = 20
#: What the watched process prints before it calls an operator.
MARK = "cuda_ops checks "
_PREFIX = re.compile(r"^========= ?")
#: In the last line of a tool that found more than it may print: racecheck's, then the others'.
_CUT = re.compile(rf"SUMMARY: {_PRINTED} hazards displayed|SUMMARY: \d+ errors were not printed")
_NOISE = re.compile(r"COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY")


@dataclass(frozen=True)
class Finding:
    """One block of a tool's output: what, where, and in which operator's call."""

    tool: str
    op: str
    text: str

    def __str__(self) -> str:
        return f"{self.tool}, {self.op}:\n" + "\n".join(f"    {s}" for s in self.text.splitlines())


@dataclass(frozen=True)
class Known:
    """A false finding: ``pattern`` is part of its text."""

    tool: str
    op: str
    pattern: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        return (self.tool, self.op) == (finding.tool, finding.op) and self.pattern in finding.text


@dataclass(frozen=True)
class Run:
    """What the tools looked at, and what they found."""

    tools: tuple[str, ...]
    ops: tuple[str, ...]
    findings: tuple[Finding, ...]
    #: Why the tools did not look at an operator, by its name.
    not_run: Mapping[str, str] = field(default_factory=dict)
    #: Tool and operator that had more findings than are printed.
    cut: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Findings that the ledger does not list, and entries of the ledger that were not found."""

    run: Run
    new: tuple[Finding, ...]
    outdated: tuple[Known, ...]

    @property
    def passed(self) -> bool:
        return not self.new and not self.outdated and not self.run.cut

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.new[:_SHOWN]]
        if len(self.new) > _SHOWN:
            lines.append(f"and {len(self.new) - _SHOWN} more")
        lines += [
            f"{known.tool}, {known.op}: the ledger expects {known.pattern!r}, which was not found: "
            "delete the entry"
            for known in self.outdated
        ]
        lines += [f"not run {op}: {reason}" for op, reason in self.run.not_run.items()]
        lines += [
            f"{tool}, {op}: more findings than the {_PRINTED} it prints; the rest is unknown"
            for tool, op in self.run.cut
        ]
        tools, ops = ", ".join(self.run.tools), len(self.run.ops)
        known = len(self.run.findings) - len(self.new)
        lines.append(f"{tools} on {ops} operators: {len(self.new)} findings, {known} known false")
        return "\n".join(lines)


def why_not() -> str:
    """Returns why the tools cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if _program() else "no compute-sanitizer on PATH or in the CUDA toolkit"


def _program() -> str | None:
    home = toolchain.cuda_home()
    places = [home / "bin", home / "compute-sanitizer"] if home else []
    beside = os.pathsep.join(map(str, places))
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=beside)


def run(ops: Sequence[str], tools: Iterable[str] = TOOLS) -> Run:
    """Calls every operator that has a CUDA kernel under every tool.

    Raises:
        CudaOpsError: the tools cannot run here, or the calls themselves fail.
    """
    if reason := why_not():
        raise CudaOpsError(f"compute-sanitizer was not run: {reason}")
    reasons = {op: find(op).why_not("cuda") for op in ops}
    looked_at = tuple(op for op, reason in reasons.items() if not reason)
    not_run = {op: reason for op, reason in reasons.items() if reason}
    tools = tuple(tools)
    findings: list[Finding] = []
    cut: list[tuple[str, str]] = []
    for tool in tools:
        left = looked_at
        while left:
            found, complete = _run_tool(tool, left)
            findings += found
            if complete:
                break
            # Nothing was printed for the operators that follow: they are called again.
            last = found[-1].op if found and found[-1].op in left else left[0]
            cut.append((tool, last))
            left = left[left.index(last) + 1 :]
    return Run(tools, looked_at, tuple(findings), not_run, tuple(cut))


def _run_tool(tool: str, ops: Sequence[str]) -> tuple[list[Finding], bool]:
    """Runs a tool; returns what it finds, and whether it printed all of it."""
    origins = dict.fromkeys(tuple(find(op).origin.options) for op in ops)
    options = [word for origin in origins for word in origin]
    done = subprocess.run(
        [
            str(_program()), "--tool", tool, "--print-limit", str(_PRINTED),
            "--num-callers-host", "4",
            sys.executable, "-m", "cuda_ops.testing.sanitized_calls", *options, *ops,
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
            # Every tensor is an allocation of its own, so that its ends are known, and not in
            # expandable segments, for which the tools report false errors.
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
        },
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )  # fmt: skip
    findings = parse(tool, done.stdout)
    if done.returncode and not findings:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise CudaOpsError(f"{tool}: the calls end with exit status {done.returncode}:\n{last}")
    return findings, not _CUT.search(done.stdout)


def parse(tool: str, output: str) -> list[Finding]:
    """Returns the findings in a tool's output; the calls print which operator is next."""
    findings: list[Finding] = []
    block: list[str] = []
    op = ""

    def close() -> None:
        if block and not _NOISE.search(block[0]):
            findings.append(Finding(tool, op, "\n".join(block)))
        block.clear()

    for line in output.splitlines():
        if line.startswith(MARK):
            close()
            op = line.removeprefix(MARK)
        elif not _PREFIX.match(line):
            close()
        elif text := _PREFIX.sub("", line).rstrip():
            block.append(text)
        else:
            close()
    close()
    return findings


def read_ledger(path: Path) -> list[Known]:
    """Reads lines of ``tool | operator | part of the finding | reason``; ``#`` starts a comment.

    Raises:
        ValueError: a line of another form, or without a reason.
    """
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 4 or not all(fields) or fields[0] not in TOOLS:
            raise ValueError(f"{path}:{number}: expected TOOL | OP | PART OF THE TEXT | REASON")
        entries.append(Known(*fields))
    return entries


def judge(run: Run, ledger: Sequence[Known]) -> Verdict:
    """Judges findings: a known one passes, a new one fails, a known one that is gone fails too."""
    new = [f for f in run.findings if not any(known.covers(f) for known in ledger)]
    asked = [known for known in ledger if known.tool in run.tools and known.op in run.ops]
    outdated = [known for known in asked if not any(map(known.covers, run.findings))]
    return Verdict(run, tuple(new), tuple(outdated))
