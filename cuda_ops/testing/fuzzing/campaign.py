"""Runs processes that call operators, and says what they found and what ended them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from cuda_ops.testing.fuzzing.black_box import BlackBox
from cuda_ops.testing.fuzzing.calls import Call, Finding
from cuda_ops.testing.fuzzing.instrumented import Instrumented
from cuda_ops.testing.subject import Origin

#: How long a call may compute, how long it may take where it waits, or where others do, and how
#: long a process may take until its first call, in seconds.
_MOST_SECONDS, _MOST_WAITING, _START_SECONDS = 10.0, 60.0, 300.0
#: After so many processes that died, one job gives up.
_MOST_DEATHS = 50
_LAST_WORDS = 12
#: How often a call that ends a process is made simpler; each try costs a process.
_MOST_SHRINKS = 4
#: The parts of cuda_ops that look at arguments; atheris sees them only if it is there first.
_WATCHED = ("cuda_ops.dispatch", "cuda_ops.derive", "cuda_ops.spec", "cuda_ops.plugins")
_PROGRAM = """
import sys
if {watched}:
    import atheris
    with atheris.instrument_imports(include={watched}):
        import cuda_ops.registry
from cuda_ops.testing.fuzzing.child import main
main(sys.argv[1])
"""


#: The form of a death that torch may have died alone, as it made the arguments of a call.
_UNMADE = "unmade"


class _StoppedError(Exception):
    """The campaign is to end before its time."""


@dataclass
class Result:
    """What all calls together showed."""

    findings: list[Finding] = field(default_factory=list)
    #: How many calls were made, and what became of those.
    counts: dict[str, int] = field(default_factory=dict)
    #: One call for each form of refusal.
    refusals: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    #: What the fuzzer says at the end: covered places, inputs that it keeps.
    coverage: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def add(self, other: Result) -> None:
        """Adds what another campaign showed at the same time."""
        known = {finding.form for finding in self.findings}
        self.findings += [finding for finding in other.findings if finding.form not in known]
        for status, count in other.counts.items():
            self.counts[status] = self.counts.get(status, 0) + count
        self.refusals |= other.refusals
        self.seconds = max(self.seconds, other.seconds)
        self.coverage = self.coverage or other.coverage

    @property
    def summary(self) -> str:
        """One line: how many calls, what became of them, how much was covered."""
        made = sum(self.counts.values())
        calls = ", ".join(f"{count:,} {status}" for status, count in self.counts.items())
        return f"{made:,} calls in {self.seconds:.0f} s: {calls}{self.coverage}"


@dataclass(frozen=True)
class Campaign:
    """How operators are called: which, from where, with what that watches."""

    ops: Sequence[str]
    origin: Origin
    #: Where the fuzzer keeps the inputs that showed something new.
    corpus: Path
    #: ``atheris``; or ``chance``, which needs nothing.
    engine: str
    instrumented: Instrumented | None = None
    #: Called with each finding.
    progress: Callable[[Finding], None] = lambda finding: None
    #: Ends all that runs when set.
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, seconds: float, seed: int = 1, runs: int = 0) -> Result:
        """Calls until the time is over, or :attr:`stop` is set; a process that dies is a finding,
        and is replaced.
        """
        result = Result()
        start = time.monotonic()
        with contextlib.suppress(_StoppedError):
            self._call(result, start + seconds, seed, runs)
        result.seconds = time.monotonic() - start
        return result

    def _call(self, result: Result, end: float, seed: int, runs: int) -> None:
        deaths, spoiled = 0, 0
        with tempfile.TemporaryDirectory(prefix="cuda_ops-fuzz-") as folder:
            while deaths < _MOST_DEATHS:
                left = end - time.monotonic()
                if left <= 1:
                    break
                known = [finding.form for finding in result.findings]
                job = _Job(
                    self, Path(folder), seed + deaths + spoiled, seconds=left, known=known,
                    runs=runs,
                )  # fmt: skip
                try:
                    death = job.run(partial(self._confirm, result, job))
                finally:
                    job.count(result)
                if job.is_spoiled:
                    spoiled += 1
                    continue
                if death is None:
                    break
                deaths += 1
                if death.form == _UNMADE and self._is_unmade(death):
                    result.counts["unmade"] = result.counts.get("unmade", 0) + 1
                    continue
                self._add(result, self._simplest(death))

    def _is_unmade(self, death: Finding) -> bool:
        """Tells whether torch ends a process by itself when it makes the arguments."""
        return self.again(str(Call.from_json(death.line))).form == _UNMADE

    def again(self, line: str) -> Finding:
        """Runs one call in a process of its own; returns what became of it, with the status as the
        form, or ``finding`` where the process died; ``unmade`` where it died before the call.

        Raises:
            ValueError: the line is no call.
        """
        key, colon, _ = line.strip().partition(": ")
        if not colon:
            raise ValueError(f"{line!r}: expected OP: and a call of it")
        found: list[Finding] = []
        with tempfile.TemporaryDirectory(prefix="cuda_ops-fuzz-") as folder:
            alone = replace(self, ops=[key], engine="chance")
            job = _Job(alone, Path(folder), line=line.strip())
            death = job.run(found.append)
        if death is None:
            return found[0]
        return death if death.form == _UNMADE else replace(death, form="finding")

    def _confirm(self, result: Result, job: _Job, finding: Finding) -> None:
        """Adds a finding if the call shows it alone. Else what earlier calls left in torch shows,
        once for all operators, and the process is replaced.
        """
        if self.again(finding.line).form == "finding":
            self._add(result, finding)
            return
        job.is_spoiled = True
        form = f"not alone: {finding.form.partition(': ')[2]}"
        text = f"after other calls, not alone: {finding.text}"
        self._add(result, replace(finding, text=text, form=form))

    def _add(self, result: Result, finding: Finding) -> None:
        if all(finding.form != other.form for other in result.findings):
            result.findings.append(finding)
            self.progress(finding)

    def _simplest(self, death: Finding) -> Finding:
        """Returns a call with less that is wrong and ends a process too, and says whether the call
        does so alone.
        """
        if not death.line.startswith("{"):
            return death
        call = Call.from_json(death.line)
        shown = replace(death, line=str(call))
        if (alone := self.again(str(call))).form != "finding":
            text = f"after other calls, not alone: {death.text}"
            return replace(shown, text=text)
        for _ in range(_MOST_SHRINKS):
            for simpler in call.simpler():
                found = self.again(str(simpler))
                if found.form == "finding":
                    call, alone = simpler, found
                    break
            else:
                break
        return replace(shown, line=str(call), text=alone.text)


class _Job:
    """One process, which calls for some seconds, or makes one call."""

    def __init__(
        self, campaign: Campaign, folder: Path, seed: int = 0, *, seconds: float = 0.0,
        known: Sequence[str] = (), runs: int = 0, line: str = "",
    ) -> None:  # fmt: skip
        self.words, self.found = folder / f"words-{seed}", folder / f"findings-{seed}"
        self.found.touch()
        self.box = BlackBox(folder / f"box-{seed}")
        self._stop = campaign.stop
        asked: dict[str, Any] = {
            "ops": list(campaign.ops), "roots": campaign.origin.roots, "file": campaign.origin.file,
            "box": str(folder / f"box-{seed}"), "findings": str(self.found), "line": line,
            "engine": campaign.engine, "corpus": str(campaign.corpus), "known": list(known),
            "seed": seed, "seconds": seconds, "runs": runs, "libraries": {}, "counters": "",
        }  # fmt: skip
        search_path = os.pathsep.join(path or "." for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": search_path}
        if (built := campaign.instrumented) is not None:
            asked |= {"libraries": built.libraries, "counters": built.counters}
            environment |= built.environment
        watched = _WATCHED if campaign.engine == "atheris" else ()
        with self.words.open("wb") as words:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(watched=list(watched)), json.dumps(asked)],
                stdout=words, stderr=words, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is no death
            )  # fmt: skip

    def run(self, report: Callable[[Finding], None]) -> Finding | None:
        """Waits for the process, and reports what it finds; returns what ended it, if that was a
        call.

        Raises:
            RuntimeError: it ended before its first call.
            _StoppedError: the campaign is to end.
        """
        told, state = 0, "ended"
        try:
            while not self.is_spoiled and (state := self._wait()) == "running":
                told = self._report(told, report)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        if self.is_spoiled:
            return None
        self._report(told, report)
        begun, _, line = self.box.read()
        status = self.process.returncode
        if state == "ended" and not status:
            return None
        said = self.words.read_bytes()[-(1 << 16) :].decode(errors="replace").splitlines()
        text = "\n    ".join(_telling(said))
        if not begun and not line:
            raise RuntimeError(f"the process that calls operators ends before a call:\n    {text}")
        hung = f"computes for {_MOST_SECONDS:.0f} s, or waits for {_MOST_WAITING:.0f} s"
        what = f"the process {hung if state == 'hung' else f'died of {_cause(status)}'}"
        key = Call.from_json(line).key if line.startswith("{") else ""
        form = _UNMADE if self.box.is_making else f"{key}: {what}: {_top(said)}"
        return Finding(line or "between two calls", f"{what}:\n    {text}", form)

    #: Whether calls left something in torch that changes what later ones do.
    is_spoiled = False
    _seen, _since, _computed = 0, 0.0, 0.0

    def _wait(self) -> Literal["running", "ended", "hung"]:
        """Waits a moment."""
        if self._stop.is_set():
            raise _StoppedError
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
            return "ended"
        begun = self.box.read()[0]
        if not self._since or begun != self._seen:
            self._seen, self._since = begun, time.monotonic()
            self._computed = _computed(self.process.pid)
        waits = time.monotonic() - self._since > (_MOST_WAITING if begun else _START_SECONDS)
        if not waits and (
            not begun or _computed(self.process.pid) - self._computed < _MOST_SECONDS
        ):
            return "running"
        self.process.send_signal(signal.SIGUSR1)  # faulthandler prints the stack
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        return "hung"

    def _report(self, told: int, report: Callable[[Finding], None]) -> int:
        lines = self.found.read_text().splitlines()
        for line in lines[told:]:
            if not self.is_spoiled:  # what comes after proves nothing
                report(Finding(**json.loads(line)))
        return len(lines)

    def count(self, result: Result) -> None:
        """Adds what the process did to the result."""
        for status, count in self.box.read()[1].items():
            result.counts[status] = result.counts.get(status, 0) + count
        refusals = Path(f"{self.found}.refusals")
        if refusals.exists():
            result.refusals.update(map(json.loads, refusals.read_text().splitlines()))
        words = [line.split() for line in self.words.read_text(errors="replace").splitlines()]
        if said := [line for line in words if "cov:" in line and "corp:" in line]:
            places, inputs = (said[-1][said[-1].index(name) + 1] for name in ("cov:", "corp:"))
            result.coverage = f", {places} places covered, {inputs.partition('/')[0]} inputs kept"


def _computed(pid: int) -> float:
    """Returns how many seconds a process has computed."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _telling(said: list[str]) -> list[str]:
    """Returns the lines that say why a process ended."""
    heads = ("Fatal Python error", "==", "terminate called")
    said = [line for line in said if line.strip("=")]
    starts = [i for i, line in enumerate(said) if line.startswith(heads)]
    told = said[starts[0] :][:_LAST_WORDS] if starts else said[-_LAST_WORDS:]
    return [textwrap.shorten(line, 160) for line in told]


def _top(said: list[str]) -> str:
    """Returns the first function of ours in a stack of AddressSanitizer, if there is one."""
    frames = [line.partition(" in ")[2] for line in said if line.strip().startswith("#")]
    return next((frame for frame in frames if "cuda_ops" in frame), "")
