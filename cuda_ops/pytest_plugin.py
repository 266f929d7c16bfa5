"""``pytest --cuda-ops`` runs every check of every operator as a test of its own.

pytest loads this in every run where cuda_ops is installed, so it stays outside of
:mod:`cuda_ops.testing` and imports that only when needed.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cuda_ops.testing import CheckEntry, Profile
    from cuda_ops.testing.case import Check
    from cuda_ops.testing.worker import Worker

#: A file to point pytest at that no other plugin collects, since operators are not files.
_ANCHOR = Path(__file__).parent / "py.typed"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cuda_ops", "checks of operators")
    group.addoption("--cuda-ops", action="append", nargs="?", const="all", metavar="OP[,OP]",
                    help="check these operators, or all, in place of other tests; repeatable",
                    )  # fmt: skip
    group.addoption("--cuda-ops-root", action="append", default=[], metavar="DIR",
                    help="a folder with kernels/ and bindings/; repeatable")  # fmt: skip
    group.addoption("--cuda-ops-file", default="", metavar="FILE",
                    help="a Python file that describes operators of other libraries")  # fmt: skip
    group.addoption("--cuda-ops-profile", metavar="NAME",
                    help="quick, ci, dev or nightly; default: ci where CI is set, else dev",
                    )  # fmt: skip
    group.addoption("--cuda-ops-seconds", type=float, metavar="N",
                    help="seconds after which a check draws no further samples; default: no limit",
                    )  # fmt: skip
    group.addoption("--sanitize", action="store_true",
                    help="with --cuda-ops: run compute-sanitizer, not the checks")  # fmt: skip
    parser.addini("cuda_ops_ledger", "known false findings of compute-sanitizer", "string", "")
    parser.addini("cuda_ops_regressions", "lines that once failed, replayed first", "string", "")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cuda-ops"):
        config.args = [str(_ANCHOR)]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Plans the run before pytest-xdist starts processes, so that a wrong call is reported once."""
    config = session.config
    if config.getoption("--cuda-ops"):
        _profile(config)
        names = _chosen(config)
        config.stash[_PLAN] = names, _regressions(config, names)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path == _ANCHOR and parent.config.getoption("--cuda-ops"):
        collected: pytest.Collector = _Operators.from_parent(parent, path=file_path, nodeid="")
        return collected
    return None


class _Operators(pytest.File):
    """The chosen operators, built if need be."""

    def collect(self) -> Iterator[pytest.Item]:
        from cuda_ops.testing.checks import CHECKS
        from cuda_ops.testing.runner import DEVICES, planned
        from cuda_ops.testing.subject import find

        names, regressions = self.config.stash[_PLAN]
        for name in names:
            if find(name).incomparable:
                yield _UnjudgedItem.from_parent(self, name=f"{name}::compared[any]", op=name)
        if self.config.getoption("--sanitize"):
            from cuda_ops.testing.sanitizer import TOOLS

            for tool in TOOLS:
                yield _SanitizerItem.from_parent(self, name=f"sanitize::{tool}", names=names)
            return
        for number, line in regressions:
            yield _RegressionItem.from_parent(self, name=f"regression::{number}", line=line)
        for name in names:
            for check, device in planned(CHECKS, DEVICES):
                item = f"{name}::{check.name}[{device}]"
                yield _CheckItem.from_parent(self, name=item, op=name, check=check, device=device)


class _Item(pytest.Item):
    def __init__(self, *, name: str, parent: Any, **extra: Any) -> None:
        super().__init__(name, parent, nodeid=name, **extra)

    def _settle(self, entry: CheckEntry, op: str = "") -> None:
        from cuda_ops.testing.report import CheckReport
        from cuda_ops.testing.runner import circumstances

        op = op or self.nodeid.rpartition("::")[0]
        report = CheckReport(op, (entry,), circumstances(_profile(self.config)))
        # As text, since pytest-xdist must send it and --junitxml keep it.
        self.user_properties.append(("cuda_ops_report", json.dumps(report.as_json())))
        if entry.passed is None:
            pytest.skip(entry.reason)
        if not entry.passed:
            pytest.fail(str(entry), pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class _CheckItem(_Item):
    def __init__(self, *, op: str, check: Check, device: str, **rest: Any) -> None:
        super().__init__(**rest)
        self._op, self._check, self._device = op, check, device

    def runtest(self) -> None:
        from cuda_ops.testing.runner import run_check
        from cuda_ops.testing.subject import find

        worker, profile = _worker(self.config)
        self._settle(run_check(self._check, find(self._op), self._device, profile, worker))


class _UnjudgedItem(_Item):
    def __init__(self, *, op: str, **rest: Any) -> None:
        super().__init__(**rest)
        self._op = op

    def runtest(self) -> None:
        from cuda_ops.testing.runner import unjudged
        from cuda_ops.testing.subject import find

        self._settle(unjudged(find(self._op)))


class _RegressionItem(_Item):
    def __init__(self, *, line: str, **rest: Any) -> None:
        super().__init__(**rest)
        self._line = line

    def runtest(self) -> None:
        from cuda_ops.testing.__main__ import parse_line, replay

        self._settle(replay(self._line), parse_line(self._line)[0])


class _SanitizerItem(_Item):
    def __init__(self, *, names: list[str], **rest: Any) -> None:
        super().__init__(**rest)
        self._names = names

    def runtest(self) -> None:
        from cuda_ops.testing import sanitizer

        reason = sanitizer.why_not()
        if reason:
            pytest.skip(reason)
        ledger = self.config.getini("cuda_ops_ledger")
        entries = sanitizer.read_ledger(self.config.rootpath / ledger) if ledger else []
        tool = self.name.rpartition("::")[2]
        verdict = sanitizer.judge(sanitizer.run(self._names, [tool]), entries)
        if not verdict.run.ops:
            pytest.skip("; ".join(f"{op}: {why}" for op, why in verdict.run.not_run.items()))
        if not verdict.passed:
            pytest.fail(str(verdict), pytrace=False)
        print(verdict)  # pytest -rP shows what was not run


# --- shared by all tests of a run -----------------------------------------------------

_WORKER: pytest.StashKey[tuple[Worker, Profile]] = pytest.StashKey()
#: The operators to check, and the numbered lines to replay for them.
_PLAN: pytest.StashKey[tuple[list[str], list[tuple[int, str]]]] = pytest.StashKey()


def _worker(config: pytest.Config) -> tuple[Worker, Profile]:
    """Returns the one process for all checks of a run, which is replaced when a check breaks it."""
    from cuda_ops.testing.worker import Worker

    if _WORKER not in config.stash:
        profile = _profile(config)
        config.stash[_WORKER] = Worker(profile.timeout), profile
    return config.stash[_WORKER]


def pytest_unconfigure(config: pytest.Config) -> None:
    if _WORKER in config.stash:
        config.stash[_WORKER][0].close()


def _profile(config: pytest.Config) -> Profile:
    from cuda_ops.testing.profiles import PROFILES, default

    name = config.getoption("--cuda-ops-profile")
    if name and name not in PROFILES:
        raise pytest.UsageError(f"--cuda-ops-profile {name}: known are {', '.join(PROFILES)}")
    profile = PROFILES[name] if name else default()
    seconds = config.getoption("--cuda-ops-seconds")
    return profile if seconds is None else replace(profile, seconds=seconds)


def _chosen(config: pytest.Config) -> list[str]:
    from cuda_ops.compile_ops import compile_ops
    from cuda_ops.errors import CudaOpsError
    from cuda_ops.registry import operators_of, registry
    from cuda_ops.testing.subject import described, find

    _load_origin(config)
    try:
        pairs = {s: p for s, p in registry().rescan().items() if p.is_declared}
        wanted = [name for names in config.getoption("--cuda-ops") for name in names.split(",")]
        wanted = [registry().key_in_command(name) for name in wanted]
        names = list(pairs) + list(described()) if "all" in wanted else wanted
        stems = [name for name in names if name in pairs]
        # Not compared: Hypothesis warns when samples are drawn while pytest starts.
        for row in compile_ops(stems, compare=False) if stems else []:
            if row.error:
                raise pytest.UsageError(row.error)
        chosen = operators_of(names)
        for name in chosen:
            find(name)
    except CudaOpsError as error:
        raise pytest.UsageError(str(error)) from error
    return chosen


def _load_origin(config: pytest.Config) -> None:
    """Adds the roots and runs the file that the options name."""
    from cuda_ops.errors import CudaOpsError
    from cuda_ops.testing.subject import Origin
    from cuda_ops.testing.worker import load_origin

    roots, file = config.getoption("--cuda-ops-root"), config.getoption("--cuda-ops-file")
    try:
        load_origin(Origin(tuple(roots), file))
    except (CudaOpsError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
    except Exception as error:  # the file's own: its author wants to see the line
        raise pytest.UsageError(f"{file} fails:\n{traceback.format_exc()}") from error


def _regressions(config: pytest.Config, names: list[str]) -> list[tuple[int, str]]:
    """Returns the file's numbered lines for the operators under test."""
    from cuda_ops.testing.__main__ import parse_line
    from cuda_ops.testing.checks import by_name

    file = config.getini("cuda_ops_regressions")
    found = []
    for number, line in enumerate(_lines(config.rootpath / file) if file else [], 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            op, check, _, _ = parse_line(line)
            by_name(check)
        except ValueError as error:
            raise pytest.UsageError(f"{file}:{number}: {error}") from error
        if op in names:
            found.append((number, line))
    return found


def _lines(path: Path) -> list[str]:
    from cuda_ops.output import lines_of

    try:
        return lines_of(path)
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"cuda_ops_regressions: {error}") from error


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints how many checks passed, in one line, and what was not run, by reason."""
    if not terminalreporter.config.getoption("--cuda-ops"):
        return
    found = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for key, value in getattr(report, "user_properties", ())
        if key == "cuda_ops_report" and getattr(report, "when", "") == "call"
    ]
    if found:
        from cuda_ops.testing.report import CheckReport, counts, not_run_counts

        checked = [CheckReport.from_json(json.loads(value)) for value in found]
        entries = [entry for report in checked for entry in report.entries]
        terminalreporter.section("cuda_ops")
        terminalreporter.line(counts(entries))
        for line in not_run_counts(entries):
            terminalreporter.line(line)
