"""Runs the checks on one library of a pair, in a process of its own that a fault may end.

It writes what it does to a file, line by line, so that the last line says where it died.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cuda_ops.registry import registry
from cuda_ops.testing.case import Case, Check
from cuda_ops.testing.checks import CHECKS
from cuda_ops.testing.mutation.settings import Settings
from cuda_ops.testing.profiles import PROFILES
from cuda_ops.testing.runner import planned, run_check
from cuda_ops.testing.subject import Origin, Subject, find
from cuda_ops.testing.worker import Outcome, load_origin, perform


class _FailedError(BaseException):
    """A sample failed, which is enough. Not an Exception: Hypothesis would go on with those."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks of all operators of a pair until one fails."""
    arguments = _parser().parse_args(argv)
    faulthandler.enable()
    with contextlib.suppress(OSError):  # if memory runs out, this process goes and no other
        Path("/proc/self/oom_score_adj").write_text("1000")
    with arguments.answers.open("a", encoding="utf-8") as file:

        def say(**event: Any) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        start = time.monotonic()
        limits = json.loads(arguments.limits.read_text()) if arguments.limits else {}

        def begin(place: str) -> None:
            say(at=place, time=time.monotonic() - start)
            if place in limits:  # prints the stack, and ends this process
                faulthandler.dump_traceback_later(limits[place], exit=True)

        begin("load")
        try:
            load_origin(Origin(tuple(arguments.root)))
            registry().load(arguments.pair, arguments.library)
            subjects = [find(name) for name in registry().specs(arguments.pair)]
        except Exception as error:
            say(failed="load", detail=f"{type(error).__name__}: {error}")
            return 0
        chosen = [check for check in CHECKS if check.name in (arguments.check or (check.name,))]
        quick = [check for check in chosen if check.quick]
        others = [check for check in chosen if not check.quick]
        for checks in (quick, others):
            for subject in subjects:
                for check, device in planned(checks, arguments.device):
                    place = f"{check.name}[{device}] of {subject.name}"
                    if place in arguments.skip:
                        continue
                    begin(place)
                    detail = _failure(check, subject, device, arguments.profile)
                    if detail is not None:
                        say(failed=place, detail=detail)
                        if not arguments.all:
                            return 0
        say(passed=True, time=time.monotonic() - start)
    return 0


def _failure(check: Check, subject: Subject, device: str, profile: str) -> str | None:
    """Returns what a check says of the first sample that fails; ``None`` if none does."""
    detail = ""

    def run(check: Check, case: Case) -> Outcome:
        nonlocal detail
        outcome = perform(check, case)
        if outcome.status == "failed":
            detail = outcome.detail
            raise _FailedError
        return outcome

    try:
        entry = run_check(check, subject, device, PROFILES[profile], run)
    except _FailedError:
        return detail
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return entry.detail if entry.passed is False else None


def command(
    pair: str, library: Path, answers: Path, roots: Iterable[str], settings: Settings, *,
    skip: Iterable[str] = (), limits: Path | None = None, every: bool = False,
) -> list[str]:  # fmt: skip
    """Returns the command that judges a library."""
    named = [("--root", root) for root in roots]
    named += [("--device", device) for device in settings.devices]
    named += [("--check", check) for check in settings.checks]
    named += [("--skip", place) for place in skip]
    named += [("--limits", str(limits))] if limits else []
    words = [word for option in named for word in option] + (["--all"] if every else [])
    return [
        sys.executable, "-m", "cuda_ops.testing.mutation.judge", pair, str(library), str(answers),
        "--profile", settings.profile, *words,
    ]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cuda_ops.testing.mutation.judge")
    parser.add_argument("pair")
    parser.add_argument("library", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--root", action="append", default=[])
    parser.add_argument("--device", action="append", default=[])
    parser.add_argument("--skip", action="append", default=[])
    parser.add_argument("--profile", choices=PROFILES, default="quick")
    parser.add_argument("--check", action="append", default=[])
    parser.add_argument("--limits", type=Path, help="seconds that each check may take, as JSON")
    parser.add_argument("--all", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
