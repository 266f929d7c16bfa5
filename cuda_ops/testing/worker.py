"""Runs one case at a time in another process, which may crash, hang or lose its GPU context.

The parent draws and shrinks; the worker only runs. They exchange one line of JSON each way, and
between them the worker says when the kit begins and ends to judge.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import IO, Any, Literal

import torch

from cuda_ops.derive.no_gradient import LOST
from cuda_ops.dispatch import by_torch
from cuda_ops.errors import KitError
from cuda_ops.testing import progress
from cuda_ops.testing.case import Case, Check, NotRunError, OtherMistakeError
from cuda_ops.testing.compare import refused_by
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import Origin, Subject, find

#: How many lines of a crashed or hung process's last words are worth showing.
_LAST_WORDS = 16
#: What faulthandler prints first for a process that dies, and for each thread.
_DEATH = "Fatal Python error"
_THREAD = ("Thread 0x", "Current thread 0x")
_START_TIMEOUT = 300.0
#: How many timeouts a case may take that goes on to say whose turn it is.
_MOST_TIMEOUTS = 10
#: Why a sample was not run.
REFUSED = "refused by the operator, and by its reference too"
#: What a failure is called in whatever check it shows.
REFUSED_ALONE = "the operator refuses what its reference takes"
#: What a failure is called that says nothing about the operator.
UNJUDGED = "the kit could not judge the operator"
#: What a line has that says whether the kit judges.
_JUDGING = "judging"
_KIT = Path(__file__).parent
#: Python code of torch that is a part of ordinary operations.
_TENSOR_METHODS = (Path(torch.functional.__file__), Path(torch._tensor.__file__))
#: Set in the environment of the processes that run cases.
IN_WORKER = "CUDA_OPS_TESTING_WORKER"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case."""

    status: Literal["passed", "failed", "not run"]
    detail: str = ""
    #: Whether the process or its GPU context is lost.
    fatal: bool = False
    #: Whether the case took longer than allowed.
    hung: bool = False
    #: Whether the process died.
    died: bool = False
    #: How the operator refused the sample.
    refusal: str = ""
    #: What a failure is called, if not after its check.
    label: str = ""


def perform(check: Check, case: Case) -> Outcome:
    """Runs a case in this process."""
    try:
        # What is proven are the operator's own kernels; a check of its own compares torch's.
        with by_torch.kernels(False), warnings.catch_warnings():
            # What torch warns of says nothing about the operator, also where warnings are errors.
            warnings.simplefilter("default")
            check.body(case)
        if case.on_cuda:
            torch.cuda.synchronize()  # an error of its kernels belongs to this case
        return Outcome("passed")
    except NotRunError as reason:
        return Outcome("not run", str(reason), fatal=case.on_cuda and _context_is_lost())
    except OtherMistakeError as failure:
        return Outcome("failed", str(failure), label=failure.label)
    except AssertionError as failure:
        if (found := _found_elsewhere(check, case, failure)) is not None:
            return found
        return Outcome("failed", str(failure))
    except KitError as error:
        lost = case.on_cuda and _context_is_lost()
        return Outcome("failed", str(error), fatal=lost, label=UNJUDGED)
    except Exception as error:
        if (found := _found_elsewhere(check, case, error)) is not None:
            return found
        text = f"{type(error).__name__}: {error}".strip()
        if _raised_by_the_kit(error):
            text = f"the kit could not run this check: {text}"
            lost = case.on_cuda and _context_is_lost()
            return Outcome("failed", text, fatal=lost, label=UNJUDGED)
        refused, by_both = refused_by(case.subject, case.sample, case.device, error)
        if by_both:
            lost = case.on_cuda and _context_is_lost()
            return Outcome("not run", REFUSED, fatal=lost, refusal=text)
        label = REFUSED_ALONE if refused else ""
        if any(words in text for words in _REFUSED_LAUNCHES):
            label = _LAUNCH
        # On a GPU an error may leave anything behind: a lost context, a capture under way.
        return Outcome("failed", text, fatal=case.on_cuda, label=label)


#: What the CUDA runtime says of a launch that it refuses; if the operator does not look, torch does
#: in its next call.
_REFUSED_LAUNCHES = (
    "CUDA error: invalid configuration argument",
    "CUDA error: too many resources requested for launch",
)
_LAUNCH = "unchecked launch or resource limits"
#: What a call that does not come back is called, whatever the check.
_HUNG = "races, missing barriers, deadlocks"


def _found_elsewhere(check: Check, case: Case, error: Exception) -> Outcome | None:
    """Returns the outcome of a check that stumbles over a gradient that is lost, which fails
    ``gradient_declared``; ``None`` for any other error.
    """
    if check.name == "gradient_declared" or LOST not in str(error):
        return None
    lost = case.on_cuda and _context_is_lost()
    return Outcome("not run", "gradient_declared says which output has no gradient", fatal=lost)


def _raised_by_the_kit(error: Exception) -> bool:
    """Tells whether an error comes from what the kit does with tensors, and not from a call of the
    operator, which passes through other Python code. A fault on the GPU shows up anywhere.
    """
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if file not in _TENSOR_METHODS]
    return files[-1].is_relative_to(_KIT) and "CUDA error" not in str(error)


def _context_is_lost() -> bool:
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").sum().item()
    except Exception:
        return True
    return False


class Worker:
    """A process that runs cases, started when needed and replaced when lost."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None
        self._read = b""
        self._judging = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, check: Check, case: Case) -> Outcome:
        """Runs a case in the process; a crash or a hang is an outcome too."""
        process, words = self._started()
        start = words.seek(0, os.SEEK_END)
        message = {
            "name": case.subject.name,
            "pair": case.subject.op.pair,
            "origin": asdict(case.subject.origin),
            "check": check.name,
            "device": case.device,
            "sample": repr(case.sample),
        }
        answer = self._exchange(process, message, self.timeout)
        if answer is not None:
            outcome = Outcome(**answer)
            if outcome.fatal:
                self.close()
            return outcome
        hung = False
        try:
            what = f"the process died of {_cause(process.wait(0.5))}; its last words"
        except subprocess.TimeoutExpired:
            hung = True
            start = words.seek(0, os.SEEK_END)  # past what the operator printed
            process.send_signal(signal.SIGUSR1)  # faulthandler prints the stack
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            seconds = f"after {self.timeout:.0f} s; its stack"
            what = f"still running {seconds}"
            if self._judging:
                what = f"the kit was still computing the reference and comparing {seconds}"
        words.seek(start)
        said = words.read().decode(errors="replace").strip().splitlines()
        self.close()
        lines = "\n".join(f"  {line}" for line in _telling(said, _THREAD if hung else _DEATH))
        text = f"{case.subject.name}: {what}:\n{lines}"
        if hung and self._judging:
            return Outcome("failed", text, fatal=True, label=UNJUDGED)
        label = _HUNG if hung else ""
        return Outcome("failed", text, fatal=True, hung=hung, died=not hung, label=label)

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, self._words):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def _started(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # Appending, since both processes move the one position of this file.
            self._read = b""
            self._words = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the process
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cuda_ops.testing.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                env=environment(),
            )
            if self._exchange(self._process, None, _START_TIMEOUT) is None:
                self._words.seek(0)
                said = self._words.read().decode(errors="replace")
                raise RuntimeError(f"the process for the checks does not start:\n{said}")
        assert self._words is not None
        return self._process, self._words

    def _exchange(
        self, process: subprocess.Popen[bytes], message: dict[str, Any] | None, timeout: float
    ) -> dict[str, Any] | None:
        """Sends the worker a message, if any, and returns its answer; ``None`` if it says nothing
        for so many seconds, or has ended.
        """
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            if message is not None:
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
        self._judging = False
        end = time.monotonic() + _MOST_TIMEOUTS * timeout
        while (left := end - time.monotonic()) > 0:
            line = self._line(process, min(timeout, left))
            if line is None:
                return None
            answer: dict[str, Any] = json.loads(line)
            if _JUDGING not in answer:
                return answer
            self._judging = answer[_JUDGING]
        return None

    def _line(self, process: subprocess.Popen[bytes], timeout: float) -> bytes | None:
        """Returns the worker's next line; ``None`` if it comes too late or never."""
        assert process.stdout is not None
        while b"\n" not in self._read:
            if not select.select([process.stdout], [], [], timeout)[0]:
                return None
            more = os.read(process.stdout.fileno(), 1 << 16)
            if not more:
                return None
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line


def environment() -> dict[str, str]:
    """Returns the worker's environment: the parent's search path, and a malloc without a cache.

    Cached blocks would come back with their old contents, in spite of :mod:`poison`.
    """
    tunables = [os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.tcache_count=0"]
    return {
        **os.environ,
        IN_WORKER: "1",
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
        "GLIBC_TUNABLES": ":".join(filter(None, tunables)),
    }


def _telling(said: list[str], head: str | tuple[str, ...]) -> list[str]:
    """Returns the lines from faulthandler's last ``head`` on, past what the operator printed."""
    said = [line for line in said if not line.startswith("Extension modules:")]
    heads = [i for i, line in enumerate(said) if line.startswith(head)]
    return said[heads[-1] :][:_LAST_WORDS] if heads else said[-_LAST_WORDS:]


def _cause(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


# --- in the worker --------------------------------------------------------------------


def begin(origin: Origin) -> None:
    """Begins a process of a pool, which ends without a word after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    load_origin(origin)


def load_origin(origin: Origin) -> None:
    """Makes the operators of an origin known to this process.

    Raises:
        ValueError: its file is not Python or ends the process, or another module has its name.
    """
    from cuda_ops.registry import registry

    for root in origin.roots:
        registry().add_root(Path(root))
    if origin.file and origin.file not in _ran:
        file = Path(origin.file)
        try:
            _ran[origin.file] = _run(file)
        except SyntaxError as error:
            raise ValueError(_told_of_syntax(file, error)) from error
        except SystemExit as error:  # else it would end this process without a word
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame.lineno for frame in frames if frame.filename == str(file.resolve())]
            where = f"{file}:{own[-1]}" if own else str(file)
            expected = "expected a file that describes operators, got one that ends the process"
            raise ValueError(f"{where}: {expected} with {error.code!r}") from error


def _told_of_syntax(file: Path, error: SyntaxError) -> str:
    """Says where Python cannot read a file, or another one that it imports."""
    named = error.filename and error.filename != str(file.resolve())
    where = f"{file}: {error.filename}" if named else str(file)
    line = f":{error.lineno}" if error.lineno else ""
    return f"{where}{line}: {type(error).__name__}: {error.msg}"


_ran: dict[str, ModuleType] = {}


def _run(file: Path) -> ModuleType:
    """Imports the module in a file; in a package by its full name, for its relative imports."""
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"{file} is not a Python file")
    file = file.resolve()
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if root != file.parent:
        return _imported(name, root, file)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _imported(name: str, root: Path, file: Path) -> ModuleType:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module = importlib.import_module(name)
    if Path(module.__file__ or "").resolve() != file:
        raise ValueError(f"{file}: {name} is imported from {module.__file__} instead")
    return module


_subjects: dict[tuple[str, Origin], Subject] = {}


def _subject(name: str, pair: str, origin: Origin) -> Subject:
    """Returns an operator, loaded once from the library that the parent runs."""
    if (name, origin) not in _subjects:
        from cuda_ops.registry import registry

        load_origin(origin)
        if origin.library and registry().library_of(pair) != Path(origin.library):
            registry().load(pair, Path(origin.library))
        _subjects[name, origin] = find(name)
    return _subjects[name, origin]


def _main() -> None:
    from cuda_ops.testing.checks import by_name

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # stdout is for the protocol alone: what an operator prints goes to its last words.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    say(asdict(Outcome("passed")))
    progress.listen(lambda judges: say({_JUDGING: judges}))
    for line in sys.stdin:
        message = json.loads(line)
        place = message["origin"]
        origin = Origin(tuple(place["roots"]), place["file"], place["library"])
        try:
            subject = _subject(message["name"], message["pair"], origin)
            case = Case(subject, message["device"], Sample.parse(message["sample"]))
            outcome = perform(by_name(message["check"]), case)
        except Exception as error:
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        say(asdict(outcome))


if __name__ == "__main__":
    _main()
