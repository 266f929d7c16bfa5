"""Runs processes that call operators, and says what they found and what ended them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuda_ops.testing.fuzzing.black_box import BlackBox
from cuda_ops.testing.fuzzing.instrumented import Instrumented
from cuda_ops.testing.subject import Origin

#: How long a call may take, in seconds, and a process until its first one.
_MOST_SECONDS, _START_SECONDS = 10.0, 300.0
#: After so many processes that died, one job gives up.
_MOST_DEATHS = 50
_LAST_WORDS = 40
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


@dataclass(frozen=True)
class Finding:
    """One kind of call that an operator does not treat as it should."""

    line: str
    text: str
    form: str


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

    def __str__(self) -> str:
        calls = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        lines = [f"{finding.line}\n    {finding.text}" for finding in self.findings]
        lines.append(f"{calls} in {self.seconds:.0f} s{self.coverage}")
        return "\n".join(lines)


@dataclass
class Campaign:
    """Calls operators for a while."""

    ops: Sequence[str]
    origin: Origin
    seconds: float
    #: Where the fuzzer keeps the inputs that showed something new.
    corpus: Path
    #: ``atheris``, or ``chance`` without it.
    engine: str
    instrumented: Instrumented | None = None
    seed: int = 1
    #: Called with each finding.
    progress: Callable[[Finding], None] = lambda finding: None

    def run(self) -> Result:
        """Calls until the time is over; a process that dies is a finding, and is replaced."""
        result = Result()
        start, deaths = time.monotonic(), 0
        with tempfile.TemporaryDirectory(prefix="cuda_ops-fuzz-") as folder:
            while (left := start + self.seconds - time.monotonic()) > 1 and deaths < _MOST_DEATHS:
                job = _Job(self, Path(folder), left, self.seed + deaths, result)
                deaths += not job.run()
        result.seconds = time.monotonic() - start
        return result


class _Job:
    """One process."""

    def __init__(
        self, campaign: Campaign, folder: Path, seconds: float, seed: int, result: Result
    ) -> None:
        self.campaign, self.result = campaign, result
        self.words, self.found = folder / f"words-{seed}", folder / f"findings-{seed}"
        self.found.touch()
        self.box = BlackBox(folder / f"box-{seed}")
        asked = {
            "ops": list(campaign.ops), "roots": campaign.origin.roots, "file": campaign.origin.file,
            "box": str(folder / f"box-{seed}"), "findings": str(self.found), "engine": campaign.engine,
            "seed": seed, "seconds": seconds, "runs": 0, "corpus": str(campaign.corpus),
            "known": [finding.form for finding in result.findings],
            "libraries": {}, "counters": "",
        }  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        if (built := campaign.instrumented) is not None:
            asked |= {"libraries": built.libraries, "counters": built.counters}
            environment |= built.environment
        watched = _WATCHED if campaign.engine == "atheris" else ()
        with self.words.open("wb") as words:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(watched=list(watched)), json.dumps(asked)],
                stdout=words, stderr=words, stdin=subprocess.DEVNULL, env=environment,
            )  # fmt: skip

    def run(self) -> bool:
        """Waits for the process; returns whether it ended by itself."""
        try:
            hung = self._wait()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        self._collect()
        begun, _, line = self.box.read()
        if hung or self.process.returncode:
            said = self.words.read_bytes()[-(1 << 16) :].decode(errors="replace").splitlines()
            text = "\n    ".join(_telling(said))
            if not begun:
                raise RuntimeError(f"the process that calls operators does not start:\n    {text}")
            code = self.process.returncode
            what = f"took more than {_MOST_SECONDS:.0f} s" if hung else f"died of {_cause(code)}"
            key = line.partition(": ")[0]
            shown = line or "between two calls"
            self._add(Finding(shown, f"the process {what}:\n    {text}", f"{key}: {what}: {_top(said)}"))
            return False
        return True

    def _wait(self) -> bool:
        """Waits; returns whether a call did not come back."""
        seen, since = 0, time.monotonic()
        while self.process.poll() is None:
            time.sleep(0.2)
            self._report()
            begun, _, line = self.box.read()
            if begun != seen or (begun and not line):
                seen, since = begun, time.monotonic()
            if time.monotonic() - since > (_MOST_SECONDS if begun else _START_SECONDS):
                self.process.send_signal(signal.SIGUSR1)  # faulthandler prints the stack
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(1.0)
                return True
        return False

    def _report(self) -> None:
        for line in self.found.read_text().splitlines():
            self._add(Finding(**json.loads(line)))

    def _add(self, finding: Finding) -> None:
        if all(finding.form != other.form for other in self.result.findings):
            self.result.findings.append(finding)
            self.campaign.progress(finding)

    def _collect(self) -> None:
        self._report()
        for status, count in self.box.read()[1].items():
            self.result.counts[status] = self.result.counts.get(status, 0) + count
        refusals = Path(f"{self.found}.refusals")
        if refusals.exists():
            self.result.refusals.update(json.loads(refusals.read_text()))
        said = [line for line in self.words.read_text(errors="replace").splitlines() if "cov: " in line]
        if said:
            words = said[-1].split()
            self.result.coverage = (
                f", {words[words.index('cov:') + 1]} places covered, "
                f"{words[words.index('corp:') + 1].partition('/')[0]} inputs kept"
            )


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _telling(said: list[str]) -> list[str]:
    """Returns the lines that say why a process ended."""
    heads = ("Fatal Python error", "==", "Current thread", "terminate called")
    starts = [i for i, line in enumerate(said) if line.startswith(heads)]
    return said[starts[0] :][:_LAST_WORDS] if starts else said[-_LAST_WORDS:]


def _top(said: list[str]) -> str:
    """Returns the first function of the project in a stack of AddressSanitizer, if there is one."""
    frames = [line.split(" in ", 1)[1] for line in said if " in " in line and line.strip()[:1] == "#"]
    return next((frame for frame in frames if "cuda_ops" in frame), "")


def has_atheris() -> bool:
    """Tells whether atheris is installed."""
    return importlib.util.find_spec("atheris") is not None
