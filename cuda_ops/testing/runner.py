"""Runs checks on an operator: draws samples, runs each in a process, keeps the smallest failure."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, reject, seed, settings
from hypothesis.errors import Unsatisfiable

from cuda_ops.derive.arguments import takes_lists
from cuda_ops.derive.checks import names_text
from cuda_ops.errors import CudaOpsError
from cuda_ops.registry import registry
from cuda_ops.testing.case import Case, Check
from cuda_ops.testing.checks import CHECKS, by_name
from cuda_ops.testing.compare import quoted
from cuda_ops.testing.draw import Draw, besides, chosen, covering
from cuda_ops.testing.profiles import PROFILES, Profile
from cuda_ops.testing.report import CheckEntry, CheckReport, command
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import ITSELF, Subject, find, refuse
from cuda_ops.testing.worker import IN_WORKER, REFUSED, UNJUDGED, Outcome, Worker, perform

#: A process that dies costs seconds, so shrinking ends after this many deaths, and checking after
#: this many checks with deaths.
_MOST_DEATHS, _MOST_DYING_CHECKS = 3, 4
#: How many times as many samples are drawn, since some are drawn more than once.
_AGAIN = 4
#: How many times as many samples are looked through for one that is not refused.
_MORE = 8

#: Found by the first check that draws ordinary samples, which no other check needs to find again.
ALL_REFUSED = f"every sample is {REFUSED}"

#: Where operators are checked; without a GPU the checks on ``cuda`` are listed as not run.
DEVICES = ("cpu", "cuda")

Run = Callable[[Check, Case], Outcome]


def check_op(
    op: str | Subject,
    *,
    checks: Iterable[Check | str] = CHECKS,
    devices: Sequence[str | torch.device] = DEVICES,
    profile: Profile | str = PROFILES["quick"],
    isolate: bool | Worker = True,
) -> CheckReport:
    """Runs checks on one operator; after a check that hangs, no further ones on that device.

    Args:
        op: the name of an operator of cuda_ops, or what :func:`cuda_ops.testing.describe` returned.
        checks: which of :data:`cuda_ops.testing.CHECKS`, or their names, the most specific first.
        devices: where to run it: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        profile: how much to draw, and how long a sample may take, in seconds; or the name of one of
            :data:`cuda_ops.testing.PROFILES`.
        isolate: whether to run samples in a process of their own, so that this one survives
            crashes, hangs and lost GPU contexts; or the process to use. With ``False`` a debugger
            sees the calls.

    Returns:
        A report with one entry for each check on each device; it prints as lines.

    Raises:
        CudaOpsError: the operator is unknown, cannot be used, or cannot be found by a process of
            its own.
        RuntimeError: called at the top level of a file that describes operators.
        ValueError: an argument is not what is said above, or no check runs on any of the devices,
            of which a report would say that nothing failed.

    Example::

        report = check_op("silu", devices=["cpu"])
        assert report.passed, report
    """
    if isolate and IN_WORKER in os.environ:
        raise RuntimeError(
            "check_op was called while a process of the test kit ran this file; "
            'put the call below if __name__ == "__main__"'
        )
    asked: Any = op
    if not isinstance(asked, (str, Subject)):
        got = f"{type(asked).__name__} {getattr(asked, '__name__', asked)!r}"
        refuse("check_op", "op", "the name of an operator, or what describe returned", got)
    listed, names, profile = _checks(checks), _devices(devices), _profile(profile)
    plan = planned(listed, names)
    if not plan:
        expected = f"one that runs on {' or '.join(map(repr, names))}"
        refuse("check_op", "checks", expected, ", ".join(repr(check.name) for check in listed))
    subject = find(op) if isinstance(op, str) else op
    if isolate and subject.unreachable:
        raise CudaOpsError(
            f"{subject.name} is {subject.unreachable}; "
            "move it into one, or check it in this process with isolate=False"
        )
    entries = [unjudged(subject)] if subject.incomparable else []
    with contextlib.ExitStack() as stack:
        run: Run = perform
        if isinstance(isolate, Worker):
            run = isolate
        elif isolate:
            run = stack.enter_context(Worker(profile.timeout))
        lost: dict[str, str] = {}  # device: why no further checks are run on it
        died: dict[str, dict[str, None]] = {}  # device: checks in which a process died

        def watched(check: Check, case: Case) -> Outcome:
            outcome = run(check, case)
            if outcome.hung:
                lost.setdefault(case.device, f"the operator hung in {check.name}")
            if outcome.died:
                ended = died.setdefault(case.device, {})
                ended[check.name] = None
                if len(ended) == _MOST_DYING_CHECKS:
                    reason = f"the operator ended the process in {', '.join(ended)}"
                    lost.setdefault(case.device, reason)
            return outcome

        for check, device in plan:
            if device in lost:
                entries.append(CheckEntry(check.name, device, None, lost[device]))
                continue
            entry = run_check(check, subject, device, profile, watched)
            if entry.passed is False and entry.detail.startswith(ALL_REFUSED):
                lost[device] = ALL_REFUSED
            entries.append(entry)
    return CheckReport(subject.name, tuple(entries), circumstances(profile), _notes(subject))


def _checks(asked: Any) -> list[Check]:
    """Returns the checks that the argument ``checks`` says."""
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        shown = asked.name if isinstance(asked, Check) else asked
        refuse("check_op", "checks", "a list of checks or of their names", repr(shown))
    found = [by_name(check) if isinstance(check, str) else check for check in asked]
    for check in found:
        if not isinstance(check, Check):
            refuse("check_op", "checks", "a list of checks or of their names", repr(check))
    if not found:
        refuse("check_op", "checks", "at least one check", "none")
    return found


def _devices(asked: Any) -> list[str]:
    """Returns the devices that the argument ``devices`` says."""
    expected = "a list of 'cpu', 'cuda' or 'cuda:N'"
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        refuse("check_op", "devices", expected, repr(asked))
    names = [str(one) if isinstance(one, torch.device) else one for one in asked]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", name):
            refuse("check_op", "devices", expected, repr(name))
    if not names:
        refuse("check_op", "devices", expected, "none")
    return names


def _profile(asked: Any) -> Profile:
    """Returns the profile that the argument ``profile`` says."""
    profile = PROFILES.get(asked) if isinstance(asked, str) else asked
    if not isinstance(profile, Profile):
        known = f"a Profile, or {names_text(tuple(PROFILES))}"
        refuse("check_op", "profile", known, repr(asked))
    return profile


def circumstances(profile: Profile) -> str:
    """Returns ``Profile ci, NVIDIA H100, torch 2.11``."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"Profile {profile.name}, {gpu}, torch {torch.__version__}"


def _notes(subject: Subject) -> tuple[str, ...]:
    """Returns what the build of an operator of cuda_ops gives up; others say nothing of theirs."""
    pair = registry().pairs().get(subject.op.pair)
    return tuple(pair.options.inexact()) if pair is not None else ()


def unjudged(subject: Subject) -> CheckEntry:
    """Returns the failure of an operator that has no samples or no reference."""
    nothing = f"nothing compares this operator; {subject.incomparable}"
    return CheckEntry("compared", "any", False, nothing, "no check can judge it")


def planned(checks: Iterable[Check], devices: Sequence[str]) -> list[tuple[Check, str]]:
    """Returns each check with each device on which it can find anything, in the checks' order."""
    return [
        (check, device)
        for check in checks
        for device in (check.devices if check.devices == ("any",) else devices)
        if device.partition(":")[0] in check.devices
    ]


def run_check(
    check: Check, subject: Subject, device: str, profile: Profile, run: Run
) -> CheckEntry:
    """Runs one check on one device; ``run`` decides in which process."""
    if reason := why_not(check, subject, device):
        return CheckEntry(check.name, device, None, reason)
    start = time.monotonic()
    found = _Found(check, subject, device, run)
    try:
        if check.draw.count is None:
            found.draw(profile)
        else:
            found.choose(check.draw)
        entry = found.entry()
    except CudaOpsError:
        raise
    except Exception as error:  # the plugin's strategy raised, or the kit's
        text = f"the kit could not draw samples: {type(error).__name__}: {error}"
        entry = CheckEntry(check.name, device, False, text, UNJUDGED)
    return replace(entry, seconds=time.monotonic() - start)


def why_not(check: Check, subject: Subject, device: str) -> str:
    """Returns why a check cannot run for an operator on a device; empty if it can."""
    if device == "any":
        return check.excuse(subject, device)
    needs_samples = check.draw.count != 0
    return (
        subject.why_not(device)
        or (subject.incomparable if needs_samples else "")
        or _without_lists(check, subject)
        or check.excuse(subject, device)
    )


#: The checks that pass on lists of tensors.
_TAKING_LISTS = (
    "reference", "lists", "mixed_lists", "numerics", "mutation", "registration", "public",
    "opcheck", "compile_static",
)  # fmt: skip


def _without_lists(check: Check, subject: Subject) -> str:
    if check.name in _TAKING_LISTS or check.draw.count == 0 or not takes_lists(subject.op):
        return ""
    return "the check takes no lists of tensors"


#: The checks that compare with the reference and with nothing else.
_COMPARING = ("reference", "numerics")


class _FailedError(Exception):
    """One sample failed."""


class _EnoughError(BaseException):
    """Ends Hypothesis, which goes on after any Exception."""


class _Found:
    """What the samples of one check showed."""

    def __init__(self, check: Check, subject: Subject, device: str, run: Run) -> None:
        self.check, self.subject, self.device, self.run = check, subject, device, run
        self.passed = 0
        self.deaths = 0
        self.failures: list[tuple[Sample, Outcome]] = []
        self.skipped: dict[str, None] = {}
        self.refusals: list[tuple[Sample, str]] = []
        self.left_out: list[Sample] = []
        self.stopped = ""

    def holds(self, sample: Sample) -> bool:
        outcome = self.run(self.check, Case(self.subject, self.device, sample))
        if outcome.status == "not run":
            self.skipped[outcome.detail] = None
            if outcome.refusal:
                self.refusals.append((sample, outcome.refusal))
        elif outcome.status == "passed":
            self.passed += 1
        else:
            self.failures.append((sample, outcome))
            # A smaller sample that hangs is not worth the wait.
            self.deaths += _MOST_DEATHS if outcome.hung else outcome.fatal
            return False
        return True

    def choose(self, draw: Draw) -> None:
        """Runs the few samples that a check wants, or others if all of these are refused."""
        assert draw.count is not None
        tried: list[Sample] = []
        for more in (draw, replace(draw, count=_MORE * draw.count, listed=None, grown=None)):
            for sample in chosen(self.subject, more):
                if sample in tried:
                    continue
                tried.append(sample)
                if not self.holds(sample) or self.passed == (draw.enough if more is draw else 1):
                    return
            if self.passed or not (draw.or_drawn or REFUSED in self.skipped):
                return

    def note_left_out(self, sample: Sample) -> None:
        if sample not in self.left_out:
            self.left_out.append(sample)

    def draw(self, profile: Profile) -> None:
        """Runs as many samples as the profile says, no sample twice, and smaller ones if one fails.

        The first ones are chosen to show each dtype, and each layout with each rank; the rest is
        drawn.
        """
        wanted = self.check.draw
        shown = covering(self.subject, wanted, profile.examples * 2 // 3)
        held: dict[str, bool] = {}
        listed = (*shown, *besides(self.subject, wanted))
        for line, sample in {repr(sample): sample for sample in listed}.items():
            held[line] = self.holds(sample)
            if self.deaths >= _MOST_DEATHS:
                return
            if self.failures:
                break  # Hypothesis looks for a smaller one

        first = frozenset(held)
        least = profile.examples // 5  # what nothing but chance finds
        remaining = profile.examples if self.failures else profile.examples - len(held)
        remaining = max(remaining, least)
        until, ended = time.monotonic() + profile.seconds, False

        def body(sample: Sample) -> None:
            nonlocal ended
            if not self.failures and time.monotonic() > until:
                self.stopped = f"stopped after {profile.seconds:g} s"
            if self.stopped or (not self.failures and len(held) - len(first) >= remaining):
                ended = True
                raise _EnoughError
            line = repr(sample)
            if line in first and held[line]:
                reject()
            if line not in held:
                held[line] = self.holds(sample)
            if not held[line]:
                if self.deaths >= _MOST_DEATHS:
                    raise _EnoughError
                raise _FailedError

        # The name is part of what Hypothesis seeds from and stores failures under.
        name = f"{self.subject.name}_{self.check.name}_{self.device}"
        body.__name__ = re.sub(r"\W", "_", name)
        assert self.subject.strategy is not None
        try:
            drawn = wanted.strategy(self.subject, self.note_left_out)
            # Some are drawn again: what passed once must pass, or Hypothesis calls it flaky.
            drawing = settings(profile.settings(), max_examples=_AGAIN * remaining)
            test = drawing(given(drawn)(body))
            if not profile.derandomize:
                test = seed(secrets.randbits(64))(test)  # else it prints one, for what ends early
            test()
        except Unsatisfiable:
            pass
        except (Exception, _EnoughError):
            if not (self.failures or ended):  # the plugin's strategy raised, not the operator
                raise

    def entry(self) -> CheckEntry:
        # Refusals come last, since the quote follows.
        name = self.check.name
        skipped = "; ".join(sorted(self.skipped, key=lambda reason: reason == REFUSED))
        refusal = quoted(self.refusals) if self.refusals else ""
        if self.failures:
            # What the kit could not judge tells less than a mistake.
            sample, outcome = min(self.failures, key=lambda f: (bool(f[1].label), f[0].size))
            line = command(self.subject, name, self.device, sample)
            label = outcome.label or self.check.title
            return CheckEntry(name, self.device, False, outcome.detail, label, self.passed, line)
        if self.stopped:
            skipped = f"{self.stopped}; {skipped}" if skipped else self.stopped
        if self.left_out:
            least = min(self.left_out, key=lambda sample: sample.size)
            most = self.check.draw.numel.stop - 1
            dropped = f"{len(self.left_out)} drawn samples have more than {most} elements: {least}"
            skipped = f"{dropped}; {skipped}" if skipped else dropped
        if not self.passed:
            if self.check.draw == Draw() and not self.skipped:
                nothing = skipped or "no sample of the operator fits this check"
                detail = f"nothing was compared: {nothing}; draw smaller ones in cuda_ops_samples"
                return CheckEntry(name, self.device, False, detail, UNJUDGED)
            if self.check.draw == Draw() and self.skipped.keys() == {REFUSED}:
                detail = f"{ALL_REFUSED}; say in cuda_ops_samples what it takes: {refusal}"
                return CheckEntry(name, self.device, False, detail, UNJUDGED)
            reason = skipped or "no sample of the operator fits this check"
            return CheckEntry(name, self.device, None, reason, refusal=refusal)
        if self.subject.is_its_own_reference(self.device) and name in _COMPARING:
            skipped = f"{ITSELF}; {skipped}" if skipped else ITSELF
        return CheckEntry(
            name, self.device, True, skipped, self.check.title, self.passed, refusal=refusal
        )
