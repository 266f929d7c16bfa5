"""The process that calls: it draws bytes, or lets a fuzzer draw them, and judges what they make."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from cuda_ops.testing.fuzzing.black_box import BlackBox
from cuda_ops.testing.fuzzing.calls import Call, Finding, drawn
from cuda_ops.testing.fuzzing.choices import Choices
from cuda_ops.testing.fuzzing.judge import Judge, Verdict
from cuda_ops.testing.heap import heap_reader
from cuda_ops.testing.subject import Origin, Subject, find

#: The longest input, in bytes; a call takes some 20.
LONGEST = 64
#: How many calls look for a leak in each round; the first round without growth is the last.
_LEAK_ROUNDS = (32, 32, 64, 64, 1024, 1024)
#: Seconds that a call may take to be repeated so often.
_QUICK = 0.002
#: Bytes that a refused call may keep.
_NOISE = 16


@dataclass
class Session:
    """Judges the calls of some operators, and keeps one call of each kind of finding."""

    subjects: Sequence[Subject]
    box: BlackBox
    #: By their forms.
    found: dict[str, Finding] = field(default_factory=dict)
    #: The forms of refusals so far.
    refusals: set[str] = field(default_factory=set)
    #: Called with each form of outcome, which a fuzzer may take for something new.
    on_form: Callable[[str], None] = lambda form: None
    report: Callable[[Finding], None] = lambda finding: None
    #: Called with each new form of refusal, and a call.
    note: Callable[[str, str], None] = lambda form, line: None
    #: Repeating each new kind of refused call takes most of the time at first.
    looks_for_leaks: bool = True

    def __post_init__(self) -> None:
        self._parent = os.getppid()
        self._judges = {subject.name: Judge(subject) for subject in self.subjects}

    def one(self, data: bytes) -> None:
        """Makes a call of bytes and judges it."""
        if os.getppid() != self._parent:
            os._exit(1)  # what it finds is read no more
        choices = Choices(data)
        call = drawn(choices, self.subjects[choices.below(len(self.subjects))])
        verdict = self._judged(call)
        self.box.count(verdict.status)
        form = f"{call.key}: {verdict.status}: {verdict.form}"
        self.on_form(form)
        if verdict.status == "finding" and form not in self.found:
            self._keep(self._simplest(call, verdict), form)
        if verdict.status == "refused" and form not in self.refusals:
            self.refusals.add(form)
            self.note(form, str(call))
            if self.looks_for_leaks:
                self._look_for_leak(call)

    def _judged(self, call: Call) -> Verdict:
        judge, text = self._judges[call.key], call.as_json()
        judge.before, judge.after = lambda: self.box.begin(text), self.box.end
        self.box.make(text)
        try:
            return judge(str(call))
        except Exception as error:  # else one mistake of ours would end the run
            text = f"{type(error).__name__}: {error}"
            return Verdict("finding", f"the fuzzer could not judge the call: {text}")

    def _simplest(self, call: Call, verdict: Verdict) -> tuple[Call, Verdict]:
        """Returns the call with as little that is wrong as shows the same."""
        progress = True
        while progress:
            progress = False
            for simpler in call.simpler():
                other = self._judged(simpler)
                if other.status == "finding" and other.form == verdict.form:
                    call, verdict, progress = simpler, other, True
                    break
        return call, verdict

    def _keep(self, shown: tuple[Call, Verdict], form: str) -> None:
        call, verdict = shown
        self.found[form] = Finding(str(call), verdict.text, form)
        self.report(self.found[form])

    def _look_for_leak(self, call: Call) -> None:
        """Repeats a call that was refused, and sees whether each keeps memory."""
        kept = _kept_by_each(lambda: self._judged(call))
        if kept:
            form = f"{call.key}: leak: {self._judged(call).form}"
            self._keep((call, _of_leak(kept)), form)


def _kept_by_each(call: Callable[[], Verdict]) -> float:
    """Returns how many bytes each of many calls keeps; 0 if they are slow or cannot be counted."""
    start = time.monotonic()
    call()
    if time.monotonic() - start > _QUICK or (in_use := heap_reader()) is None:
        return 0.0

    def growth(calls: int) -> float:
        gc.collect()
        before = in_use()
        for _ in range(calls):
            call()
        gc.collect()
        return (in_use() - before) / calls

    gc.freeze()  # what is there now is looked at no more: collections are cheap
    # A cache that grows has room for the next thousand calls after the first.
    grown = 0.0
    for calls in _LEAK_ROUNDS:
        if (grown := growth(calls)) < _NOISE:
            return 0.0
    return grown


def _of_leak(kept: float) -> Verdict:
    return Verdict("finding", f"each refused call keeps memory: {kept:.0f} bytes")


def main(message: str) -> None:
    """Runs what the parent's message asks for, until its time is over or the parent ends it."""
    asked = json.loads(message)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # torch prints arguments into its own errors. If it cannot, as a long tensor of float16 under
    # autocast to bfloat16, which it would cut, the frame that is left leaves transforms off later.
    torch.set_printoptions(threshold=1 << 21)
    subjects = _subjects(asked)
    box = BlackBox(Path(asked["box"]))
    findings = Path(asked["findings"]).open("a", buffering=1)  # noqa: SIM115 - open to the end

    def report(finding: Finding) -> None:
        findings.write(json.dumps(asdict(finding)) + "\n")

    # Line by line, since libFuzzer ends the process without a word to Python.
    refusals = Path(asked["findings"] + ".refusals").open("a", buffering=1)  # noqa: SIM115 - the same

    def note(form: str, line: str) -> None:
        refusals.write(json.dumps([form, line]) + "\n")

    session = Session(subjects, box, report=report, note=note)
    session.found.update({form: Finding("", "", form) for form in asked["known"]})
    if asked["line"]:
        box.make(asked["line"])
        judge = Judge(subjects[0], lambda: box.begin(asked["line"]), box.end)
        verdict = judge(asked["line"])
        if verdict.status == "refused" and (kept := _kept_by_each(lambda: judge(asked["line"]))):
            verdict = _of_leak(kept)
        report(Finding(asked["line"], verdict.text, verdict.status))
        return
    if asked["engine"] == "atheris":
        _by_coverage(session, asked)
    else:
        _by_chance(session, asked["seed"], asked["seconds"], asked["runs"])


def _subjects(asked: dict[str, Any]) -> list[Subject]:
    from cuda_ops.registry import registry
    from cuda_ops.testing.worker import load_origin

    load_origin(Origin(tuple(asked["roots"]), asked["file"]))
    for pair, library in asked["libraries"].items():
        registry().load(pair, Path(library))
    return [find(name) for name in asked["ops"]]


def _by_chance(session: Session, seed: int, seconds: float, runs: int) -> None:
    drawn_bytes = random.Random(seed)
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end and (not runs or count < runs):
        session.one(drawn_bytes.randbytes(LONGEST))
        count += 1


def _by_coverage(session: Session, asked: dict[str, Any]) -> None:
    import atheris

    from cuda_ops.testing.fuzzing import coverage

    forms = coverage.connect(asked["counters"])

    def on_form(form: str) -> None:
        forms[zlib.crc32(form.encode()) % len(forms)] = 1

    session.on_form = on_form
    limits = [f"-max_total_time={int(asked['seconds'])}", f"-max_len={LONGEST}", "-timeout=3600"]
    limits += ["-rss_limit_mb=0", "-len_control=0", f"-seed={asked['seed']}"]
    limits += [f"-runs={asked['runs']}"] if asked["runs"] else []
    atheris.Setup([sys.argv[0], *limits, asked["corpus"]], session.one)
    atheris.Fuzz()
