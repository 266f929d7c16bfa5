"""``python -m cuda_ops.testing mutate``: chooses mutants, judges them and prints the report."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cuda_ops.build.compiling import visible_archs
from cuda_ops.build.discovery import BUILTIN_ROOT, Pair
from cuda_ops.build.source_text import Kind
from cuda_ops.names import unknown
from cuda_ops.output import INTERRUPTED, above_zero, at_least, lines_of
from cuda_ops.registry import registry
from cuda_ops.testing.checks import by_name
from cuda_ops.testing.mutation import ledger, report, result
from cuda_ops.testing.mutation.campaign import Campaign
from cuda_ops.testing.mutation.kinds import KINDS
from cuda_ops.testing.mutation.ledger import Explained
from cuda_ops.testing.mutation.plan import Mutant, chosen, every_mutant
from cuda_ops.testing.mutation.result import Result
from cuda_ops.testing.mutation.settings import Settings
from cuda_ops.testing.profiles import PROFILES

_OPEN = ("survived", "not judged")
_KINDS = (*KINDS, "gradient")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help="names of pairs; without any, all of a root")
    add("--device", action="append", choices=("cpu", "cuda"),
        help="where the checks run; repeatable; without it, everywhere they can")  # fmt: skip
    add("--kind", action="append", choices=_KINDS, help="plant these alone; repeatable")
    add(
        "--limit",
        type=at_least(1),
        metavar="N",
        help="plant N faults, spread over operators and kinds",
    )
    add("--seed", type=int, default=0, help="choose others")
    add("--shard", default="1/1", metavar="I/N", help="of the chosen, each N-th from the I-th on")
    add(
        "--jobs",
        type=at_least(1),
        default=1,
        help="faults at a time, spread over the visible GPUs",
    )
    add("--minutes", type=above_zero, metavar="M", help="stop after M minutes")
    add("--check", action="append", metavar="CHECK", help="run this check alone; repeatable")
    add("--profile", choices=PROFILES, default="quick", help="how much the checks draw")
    add(
        "--tests",
        type=Path,
        metavar="FILE",
        help="tests for what no check finds: lines of PATTERN OF FILES | ARGUMENTS OF PYTEST",
    )
    add(
        "--ledger",
        type=Path,
        metavar="FILE",
        help=f"survivors with a reason; else {ledger.NAME} in the root or in tests beside it",
    )
    add("--json", type=Path, action="append", default=[], metavar="FILE",
        help="keep results and go on with them; repeatable: the first one is written")  # fmt: skip
    add("--again", action="store_true", help="judge once more what survived or was not judged")
    add("--keep", type=Path, metavar="DIR", help="keep the unchanged builds for the next run")
    add("--list", action="store_true", help="print the faults and plant none")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 1 if a fault survived that the ledger does not explain, 130 after
    Ctrl-C, else 0.

    Raises:
        CudaOpsError: the operators cannot be mutated.
        ValueError: a file or an option has another form.
    """
    pairs = _pairs(arguments.ops, arguments.root)
    root = next(iter(pairs.values())).root
    beside = root.parent if root == BUILTIN_ROOT.resolve() else root
    every = [m for m in every_mutant(pairs.values()) if m.kind in (arguments.kind or (m.kind,))]
    plan = _shard(chosen(every, arguments.limit, arguments.seed), arguments.shard)
    places = (root / ledger.NAME, beside / "tests" / ledger.NAME)
    book = arguments.ledger or next((path for path in places if path.is_file()), None)
    # Read before the list too: a wrong option is no less wrong there.
    entries = ledger.read(book) if book else []
    tests = _read_tests(arguments.tests) if arguments.tests else ()
    checks = tuple(by_name(name).name for name in arguments.check or ())
    if arguments.list:
        for mutant in plan:
            print(mutant)
        print(f"{len(plan)} of {len(every)} faults")
        return 0
    has_gpu = torch.cuda.is_available()
    devices = tuple(arguments.device or ("cpu", *(["cuda"] if has_gpu else [])))
    if "cuda" in devices and not has_gpu:
        raise ValueError("--device cuda: expected a visible GPU, got none")
    settings = Settings(visible_archs(), devices, arguments.profile, checks, tests)
    progress = _Run(plan, pairs, settings, arguments.json, arguments.again)
    seconds = None if arguments.minutes is None else 60 * arguments.minutes
    campaign = Campaign(pairs, settings, arguments.jobs, seconds, arguments.keep)
    stopped = False
    try:
        with _ended_as_by_ctrl_c():
            campaign.run(progress.left, progress.note, _say)
    except KeyboardInterrupt:
        stopped = True
    finally:
        results = _explained(progress.results, entries)
        outdated = ledger.outdated(entries, every) if not arguments.kind else []
        print(report.text(results, outdated, len(plan)), flush=True)
    return INTERRUPTED if stopped else int(any(result.is_open for result in results))


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Lets a request to end, such as that of ``timeout``, remove the copies too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Run:
    """The results of a plan: those of an earlier run, and those that come in."""

    def __init__(
        self, plan: Sequence[Mutant], pairs: dict[str, Pair], settings: Settings,
        files: Sequence[Path], rejudge: bool,
    ) -> None:  # fmt: skip
        self._file = files[0] if files else None
        self._of = {key: _digest(pair, settings) for key, pair in pairs.items()}
        earlier = {found.key: found for file in files for found in result.read(file)}
        #: What the files have beside this plan, such as another shard.
        self._others = earlier
        self.results: list[Result] = []
        self.left: list[Mutant] = []
        for mutant in plan:
            known = earlier.get(mutant.key)
            again = rejudge and known is not None and known.verdict in _OPEN
            if known is None or known.of != self._of[mutant.ops[0]] or again:
                self.left.append(mutant)
            else:
                self.results.append(replace(known, line=mutant.line))
        self._planned = len(plan)

    def note(self, found: Result) -> None:
        found = replace(found, of=self._of[found.op])
        self.results.append(found)
        if self._file is not None:
            self._others[found.key] = found
            result.write(self._file, self._others.values(), {"torch": torch.__version__})
        by = f" by {found.by}" if found.by else ""
        count = f"{len(self.results)}/{self._planned}"
        where = f"{found.op} {found.file}:{found.line}"
        _say(f"{count} {found.verdict}{by}: {where} {found.kind} ({found.seconds:.0f} s)")


def _pairs(names: Sequence[str], roots: Sequence[str]) -> dict[str, Pair]:
    """Returns the named pairs, or all of the last root; of one root, since one is copied.

    Raises:
        ValueError: there are none, or they lie in several roots.
    """
    known = registry().pairs()
    wanted = [registry().key_in_command(name) for name in names]
    if strange := [name for name, key in zip(names, wanted, strict=True) if key not in known]:
        raise ValueError(unknown(strange, known))
    root = Path(roots[-1]).resolve() if roots else BUILTIN_ROOT.resolve()
    keys = wanted or [key for key, pair in known.items() if pair.root == root]
    found = {key: known[key] for key in keys}
    if len({pair.root for pair in found.values()}) > 1:
        several = ", ".join(sorted({str(pair.root) for pair in found.values()}))
        raise ValueError(f"expected operators of one root, got some of {several}; name one by one")
    if not _hold_any(found.values()):
        raise ValueError(f"no operator to plant faults in: {root} has no pair with CUDA_OPS")
    return found


def _hold_any(pairs: Iterable[Pair]) -> bool:
    return any(pair.kind is Kind.NATIVE for pair in pairs)


def _shard(mutants: Sequence[Mutant], shard: str) -> list[Mutant]:
    first, _, count = shard.partition("/")
    if not (first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count)):
        raise ValueError(f"--shard: expected I/N such as 1/4, got {shard!r}")
    return [*mutants[int(first) - 1 :: int(count)]]


def _digest(pair: Pair, settings: Settings) -> str:
    plugin = pair.plugin.read_text(encoding="utf-8") if pair.plugin.is_file() else ""
    parts = (pair.read().hash, plugin, repr(settings))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _read_tests(path: Path) -> tuple[tuple[str, str], ...]:
    """Reads lines of ``PATTERN | ARGUMENTS``; ``#`` starts a comment.

    Raises:
        ValueError: a line of another form.
    """
    found = []
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, bar, words = map(str.strip, line.partition("|"))
        if not bar or not pattern or not words:
            raise ValueError(f"{path}:{number}: expected PATTERN OF FILES | ARGUMENTS OF PYTEST")
        found.append((pattern, words))
    return tuple(found)


def _explained(results: Iterable[Result], entries: Sequence[Explained]) -> list[Result]:
    """Gives each survivor the reason that the ledger has for it."""

    def reason(found: Result) -> str:
        fitting = (entry.reason for entry in entries if entry.covers(found))
        return next(fitting, "") if found.verdict == "survived" else ""

    return [replace(found, reason=reason(found)) for found in results]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
