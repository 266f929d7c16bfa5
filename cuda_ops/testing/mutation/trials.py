"""Runs on one library what may find a fault: the checks, and tests of the project."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from cuda_ops.build.cache import Name
from cuda_ops.build.discovery import Pair
from cuda_ops.testing.mutation import judge, processes
from cuda_ops.testing.mutation.place import Place
from cuda_ops.testing.mutation.plan import Mutant
from cuda_ops.testing.mutation.settings import Settings
from cuda_ops.testing.worker import IN_WORKER

#: Seconds for the checks of an unchanged operator, and for tests.
_CHECKS, _TESTS = 1200.0, 900.0
#: How much longer than of the unchanged operator a check of a mutant may take: so many times, and
#: so many seconds, as the machine may be busy.
_SLOWER, _MORE = 8.0, 30.0
#: What faulthandler prints first where a check takes longer.
_LATE = "Timeout ("
#: How much of what a check or test says is kept.
_TOLD = 500


@dataclass(frozen=True)
class Unchanged:
    """What the checks say of an operator without a fault."""

    #: Why its mutants cannot be judged; empty if they can.
    problem: str = ""
    #: Seconds of each check.
    seconds: dict[str, float] = field(default_factory=dict)
    #: Checks that fail without a fault, and so tell nothing.
    failing: tuple[str, ...] = ()


class Trials:
    """Runs checks and tests in places, each in a process of its own."""

    def __init__(
        self, settings: Settings, stop: threading.Event, note: Callable[[str], None]
    ) -> None:
        self._settings, self._stop, self._note = settings, stop, note
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        #: Why tests tell nothing, by their arguments; empty where they do.
        self._broken: dict[str, str] = {}

    def unchanged(self, key: str, library: Path, place: Place) -> Unchanged:
        """Runs all checks on the library of an operator without a fault."""
        events = self._events(key, library, place, self._settings.devices, None)
        failed = [event for event in events if "failed" in event]
        for event in failed:
            first = event["detail"].partition("\n")[0]
            if event["failed"] == "load":
                return Unchanged(f"does not load without a fault: {first}")
            told = f"{key}: {event['failed']} fails without a fault and is left out: {first}"
            self._note(told)
        last = events[-1]
        if "passed" not in last:
            where = last.get("at", last.get("late", ""))
            return Unchanged(f"does not come to the end of {where} without a fault")
        begun = [event for event in events if "time" in event]
        seconds = {one["at"]: then["time"] - one["time"] for one, then in pairwise(begun)}
        return Unchanged("", seconds, tuple(event["failed"] for event in failed))

    def checked(
        self, key: str, library: Path, place: Place, unchanged: Unchanged, devices: Sequence[str]
    ) -> tuple[str, str]:
        """Returns what found a fault and what it said; empty if no check on the devices did."""
        last = self._events(key, library, place, devices, unchanged)[-1]
        if "passed" in last:
            return "", ""
        if "failed" in last:
            return last["failed"], last["detail"][:_TOLD]
        words = place.said.read_text(errors="replace").strip().splitlines()
        if "late" in last or any(line.startswith(_LATE) for line in words):
            return "hang", f"in {last.get('late') or last['at']}"
        deaths = [line for line in words if line.startswith("Fatal Python error")]
        return "crash", f"in {last['at']}: {next(iter(deaths or words[-1:]), '')[:_TOLD]}"

    def _events(
        self, key: str, library: Path, place: Place, devices: Sequence[str],
        unchanged: Unchanged | None,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Returns what the judge wrote of a library: of all checks if there is nothing to compare
        with. If it took too long, ``late`` says where it was.
        """
        answers, limits = place.folder / "answers", place.folder / "limits.json"
        answers.unlink(missing_ok=True)
        known = unchanged or Unchanged()
        limit = {check: _MORE + _SLOWER * took for check, took in known.seconds.items()}
        limits.write_text(json.dumps(limit))
        settings = replace(self._settings, devices=tuple(devices))
        command = judge.command(
            key, library, answers, place.roots, settings, skip=known.failing, limits=limits,
            every=unchanged is None,
        )  # fmt: skip
        timeout = sum(limit.values()) if limit else _CHECKS
        status = processes.run(
            command, place.folder, place.said, self._stop, timeout=timeout,
            environment=place.environment(),
        )  # fmt: skip
        lines = answers.read_text().splitlines() if answers.exists() else []
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        if not events:
            said = place.said.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the checks of {key} do not start:\n{said}")
        if status is None:
            events.append({"late": events[-1].get("at", "")})
        return events

    def tested(
        self, mutant: Mutant, pair: Pair, words: str, library: Path, place: Place
    ) -> tuple[bool, str]:
        """Runs tests on a mutant of a pair; says whether one failed, and quotes it, or why the
        tests tell nothing.
        """
        with self._lock:
            lock = self._locks.setdefault(words, threading.Lock())
        with lock:
            if words not in self._broken:
                status, said = self._pytest(words, place, None)
                problem = f"pytest {words} fails without a fault: {said}"
                self._broken[words] = problem if status != 0 else ""
        if problem := self._broken[words]:
            return False, problem
        with place.planted(mutant):
            copied = place.pair(pair)
            name = Name.of(copied, self._settings.archs, copied.read().hash).library.name
            status, said = self._pytest(words, place, place.cache_with(library, name))
        if status is None:
            return True, f"no end after {_TESTS:.0f} s"
        # An error outside of a test, such as in a fixture, says nothing of the operator.
        return said.startswith("FAILED "), said if status else ""

    def _pytest(self, words: str, place: Place, libraries: Path | None) -> tuple[int | None, str]:
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider",
            f"--basetemp={place.folder / 'pytest'}", *shlex.split(words),
        ]  # fmt: skip
        environment = place.environment(libraries)
        del environment[IN_WORKER]  # tests may check operators
        status = processes.run(
            command, place.copied, place.said, self._stop, timeout=_TESTS, environment=environment
        )
        lines = place.said.read_text(errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("FAILED ", "ERROR "))] or lines[-1:]
        return status, told[0][:_TOLD] if told else ""
