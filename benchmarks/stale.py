"""Lists the committed measurements whose sources have changed since.

``python -m benchmarks.stale`` takes the commits that each JSON of benchmarks/results names, and
asks git whether the sources of its operators say the same now: both files, the headers that they
include, and those of the operators that they call. Comments, help texts and places do not count.
Where no kernel includes what changed, the device ran the code of today: only the host's time and
what a binding decides, such as the size of a launch, may differ. The exit status is 1 if a
measurement is stale, and 2 if git cannot tell of any.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import on_cpu
from benchmarks.report import REPO
from cuda_ops import output
from cuda_ops.build import discovery, source_text
from cuda_ops.build.discovery import Pair
from cuda_ops.errors import BenchmarkError, CudaOpsError

#: Exit statuses beside 0.
STALE, UNKNOWN = 1, 2
#: The operators behind measurements that are in no file named after one.
_OF = {
    "call_overhead": ("silu", "add_rms_norm_", "foreach_axpy", "fused_linear_gelu", "matmul",
                      "moe", "reduce_sum", "rms_norm", "rotary_embedding"),
    "dense_experts": ("moe",),
    "models": ("moe", "moe_route"),
    **dict.fromkeys(("moe_ranks", "moe_ranks_1", "moe_ranks_4"), ("moe", "moe_send_")),
    "on_cpu": tuple(on_cpu.CASES),
    "runtime": ("moe", "rms_norm"),  # those of its graphs; its other parts call none
}  # fmt: skip
#: Files whose figures are of no operator's speed.
_OF_NONE = {"dev_loop", "dev_loop_2_cores", "dev_loop_cells", "mutants", "tuned"}
_UNCOMMITTED = " with changes"
_CALLS = re.compile(r"\.calls\(\s*\"([\w:]+)\"")
#: Help texts of bindings; a kernel's are assembly.
_RAW = re.compile(r"R\"(\w*)\(.*?\)\1\"", re.DOTALL)
_SHOWN = 4


@dataclass(frozen=True)
class Finding:
    """What one commit measured for one file, and whether that still holds."""

    #: The file, relative to the repository.
    file: str
    operators: tuple[str, ...]
    commit: str
    #: What comes from that commit: ``"86 cases, 8 beside triton"``; empty for other files.
    parts: str
    #: The sources that say something else now, relative to the repository.
    changed: tuple[str, ...] = ()
    #: Those of them that are kernels, or that kernels include.
    kernels: tuple[str, ...] = ()
    #: Why git cannot tell, if so.
    unknown: str = ""

    @property
    def is_stale(self) -> bool:
        return bool(self.changed)


def find(repo: Path = REPO) -> list[Finding]:
    """Returns a finding for each commit of each file under benchmarks/results that measures an
    operator of this repository.

    Raises:
        BenchmarkError: git is not there, the folder is no checkout of it, or a file measured
            operators that nothing names.

    Example::

        stale = [finding.file for finding in find() if finding.is_stale]
    """
    repo = repo.resolve()
    git = _Git(repo)
    pairs, _ = discovery.survey([repo / "src"])
    found = []
    for path in sorted((repo / "benchmarks" / "results").rglob("*.json")):
        if path.stem in _OF_NONE:
            continue
        known = [name for name in _OF.get(path.stem, (path.stem,)) if name in pairs]
        if not known:
            raise BenchmarkError(
                f"{path}: expected a file named after an operator, such as {min(pairs)}.json, or "
                "one that benchmarks/stale.py says the operators of"
            )
        sources, kernels = _sources(known, pairs, repo)
        for commit, parts in _commits(path).items():
            name = path.relative_to(repo).as_posix()
            finding = _finding(git, Finding(name, tuple(known), commit, parts), sources)
            changed = tuple(name for name in finding.changed if name in kernels)
            found.append(replace(finding, kernels=changed))
    return found


def _finding(git: _Git, finding: Finding, sources: Mapping[str, Path]) -> Finding:
    commit = finding.commit.removesuffix(_UNCOMMITTED)
    changed: tuple[str, ...] = ()
    text = ""
    if commit != finding.commit:
        text = "measured with changes that no commit has"
    elif not git.has(commit):
        text = "no commit of this repository (a shallow clone lacks most)"
    else:
        changed = git.changed(commit, sources)
    return replace(finding, changed=changed, unknown=text)


def _sources(
    names: Iterable[str], pairs: Mapping[str, Pair], repo: Path
) -> tuple[dict[str, Path], set[str]]:
    """Returns the files of operators and of those that they call, by their path in the
    repository, and which of them kernels are made of.
    """
    found: dict[str, Path] = {}
    kernels: set[str] = set()
    todo, seen = list(names), set()
    while todo:
        name = todo.pop()
        if name in seen or name not in pairs:  # a part of the pair itself
            continue
        seen.add(name)
        pair = pairs[name]
        todo += _CALLS.findall(pair.code)
        for source, files in pair.read().closures.items():
            for file in files:
                if file.is_relative_to(repo):
                    found[file.relative_to(repo).as_posix()] = file
                    if source.suffix == ".cu":
                        kernels.add(file.relative_to(repo).as_posix())
    return found, kernels


def _commits(path: Path) -> dict[str, str]:
    """Returns the commits that a file names, and what comes from each.

    Raises:
        BenchmarkError: it is no JSON, or names none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        of_file: str = data["environment"]["commit"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(
            f"{path}: expected a measurement with its commit: {error!r}"
        ) from error
    results = data.get("results")
    if isinstance(results, dict) and "environments" in results:  # parts, each of a run of its own
        parts: dict[str, list[str]] = {}
        for part, known in results["environments"].items():
            parts.setdefault(known["commit"], []).append(part)
        return {commit: ", ".join(names) for commit, names in parts.items()}
    counted: dict[str, Counter[str]] = {}
    for result in results if isinstance(results, list) else ():
        if not isinstance(result, dict) or "peers" not in result:
            continue
        own = result.get("commit") or of_file
        counted.setdefault(own, Counter())["cases"] += 1
        for name, peer in result["peers"].items():
            if peer.get("commit"):
                counted.setdefault(peer["commit"], Counter())[f"beside {name}"] += 1
    if not counted:
        return {of_file: ""}
    return {
        commit: ", ".join(
            f"{count} {'case' if (what, count) == ('cases', 1) else what}"
            for what, count in counts.items()
        )
        for commit, counts in counted.items()
    }


class _Git:
    """Answers questions about a repository."""

    def __init__(self, repo: Path) -> None:
        self._repo = repo
        top = self._run("rev-parse", "--show-toplevel").decode().strip()
        if Path(top).resolve() != repo:
            raise BenchmarkError(
                f"{repo} is no checkout of git of its own, so nothing says what changed since a "
                "measurement was committed"
            )
        self._trees: dict[str, frozenset[str]] = {}
        self._blobs: dict[Path, str] = {}

    def has(self, commit: str) -> bool:
        """Tells whether the repository has the commit."""
        try:
            self._run("cat-file", "-e", f"{commit}^{{commit}}")
        except BenchmarkError:
            return False
        return True

    def changed(self, commit: str, sources: Mapping[str, Path]) -> tuple[str, ...]:
        """Returns the sources whose code a commit has nowhere."""
        if commit not in self._trees:
            lines = self._run("ls-tree", "-r", commit).decode().splitlines()
            self._trees[commit] = frozenset(line.split()[2] for line in lines)
        for path in [path for path in sources.values() if path not in self._blobs]:
            self._blobs[path] = self._run("hash-object", str(path)).decode().strip()
        differ = [name for name, p in sources.items() if self._blobs[p] not in self._trees[commit]]
        return tuple(
            name
            for name in sorted(differ, key=_kernels_first)
            if not self._same_code(commit, name, sources[name])
        )

    def _same_code(self, commit: str, name: str, path: Path) -> bool:
        try:
            before = self._run("show", f"{commit}:{name}").decode(errors="replace")
        except BenchmarkError:  # it was not there, or elsewhere
            return False
        return _code(before, path) == _code(source_text.text_of(path), path)

    def _run(self, *arguments: str) -> bytes:
        command = ["git", "-C", str(self._repo), *arguments]
        try:
            return subprocess.run(command, capture_output=True, check=True).stdout
        except FileNotFoundError as error:
            raise BenchmarkError(
                "git is not installed, so nothing says what changed since a measurement was "
                "committed"
            ) from error
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip()
            raise BenchmarkError(f"git {' '.join(arguments)}: {said}") from error


def _kernels_first(name: str) -> tuple[int, str]:
    """Sorts what runs on the device before what calls it."""
    order = (".cu", ".cuh", ".cpp", ".h")
    suffix = Path(name).suffix
    return order.index(suffix) if suffix in order else len(order), name


def _code(text: str, path: Path) -> list[str]:
    """Returns the words of a source, without comments, and without help texts in a binding."""
    code = source_text.code_in(text)
    return (_RAW.sub('""', code) if path.suffix == ".cpp" else code).split()


# --- the command -----------------------------------------------------------------------


def render(findings: Sequence[Finding]) -> Table:
    """Returns a line for each finding that is stale or cannot be told."""
    table = Table("measurement", "commit", "what", "kernels that changed", "other code")
    for finding in findings:
        if not finding.changed and not finding.unknown:
            continue
        others = [name for name in finding.changed if name not in finding.kernels]
        file = finding.file.removeprefix("benchmarks/results/")
        why = finding.unknown or _named(finding.kernels)
        table.add_row(file, finding.commit, finding.parts, why, _named(others))
    return table


def _named(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(Path(name).name for name in files[:_SHOWN]) + more


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is stale; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        findings = find(REPO)
    except CudaOpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return UNKNOWN
    stale = [finding for finding in findings if finding.is_stale]
    unknown = [finding for finding in findings if finding.unknown]
    if arguments.json:
        entries: list[dict[str, Any]] = [
            {**asdict(finding), "stale": finding.is_stale} for finding in findings
        ]
        print(json.dumps(entries, indent=1))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        if stale or unknown:
            table = render(findings)
            output.keep_words(console, table)
            console.print(table)
        fresh = len(findings) - len(stale) - len(unknown)
        by_kernels = sum(bool(finding.kernels) for finding in stale)
        console.print(
            f"{len(stale)} stale, {by_kernels} of them by a kernel; {len(unknown)} unknown, "
            f"{fresh} with the sources of today"
        )
    if stale:
        return STALE
    return UNKNOWN if unknown and len(unknown) == len(findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stale",
        description="List the committed measurements whose sources have changed since.",
        epilog=f"exit status: {STALE} if one is stale, {UNKNOWN} if git cannot tell of any",
    )
    parser.add_argument(
        "--json", action="store_true", help="print every measurement as JSON, with what changed"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
