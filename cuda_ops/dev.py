"""``python compile_dev.py``: build what changed, load it, say how it went."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cuda_ops import build as builder
from cuda_ops import clangd, guests, toolchain
from cuda_ops.discovery import Kind, Pair
from cuda_ops.errors import BuildError, CudaOpsError, DiscoveryError, PluginError, ResultError
from cuda_ops.no_gradient import NoGradient
from cuda_ops.operator import Operator
from cuda_ops.registry import registry
from cuda_ops.spec import Autograd, OpSpec


@dataclass
class Row:
    """One line of the table; ``error`` is empty where everything worked. One that is no operator,
    a root or a plugin that cannot be used, has nothing else.
    """

    op: str
    built: str = ""
    seconds: float = 0.0
    devices: str = ""
    fake: str = ""
    autograd: str = ""
    max_error: float | None = None
    note: str = ""
    error: str = ""
    warnings: tuple[str, ...] = ()
    #: With ``--check``: what the checks said, of each operator of the pair.
    checks: list[dict[str, Any]] = field(default_factory=list)


def compile_ops(
    names: Sequence[str] = (),
    *,
    archs: tuple[str, ...] | None = None,
    verbose: bool = False,
    compare: bool = True,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Build and load the named pairs (all without names) and those that they call, in parallel;
    rows sorted by name. Unless ``compare`` is false, a few samples tell the largest error.

    A pair that fails has its error in its row and in ``registry().failures``;
    the others are usable, and what was loaded of it before goes on serving. One
    that is loaded and computes something else than its reference has its error in its row alone. So
    has what forms no operator and, without names, a plugin that cannot be used.

    Raises:
        BuildError: a name that is no operator.
    """
    pairs = registry().rescan()
    rows = _unusable(names)
    unknown = [name for name in names if name not in (*pairs, *(row.op for row in rows))]
    if unknown:
        raise BuildError(f"no operator {', '.join(map(repr, unknown))}; known: {', '.join(pairs)}")
    chosen = [name for name in names if name in pairs] if names else list(pairs)
    waiting: list[tuple[builder.Built, Row]] = []
    with ThreadPoolExecutor(toolchain.operators_at_once()) as pool:

        def start(stem: str) -> tuple[Future[builder.Built], Row]:
            return pool.submit(builder.build, pairs[stem], archs, verbose=verbose), Row(stem)

        def done(loaded: list[tuple[builder.Built, Row]]) -> None:
            for one in loaded:
                waiting.remove(one)
                progress(one[1])

        running = dict(map(start, chosen))
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                row = running.pop(future)
                rows.append(row)
                try:
                    built = future.result()
                    row.seconds, row.built = built.seconds, built.origin
                    row.warnings = built.warnings
                    called = [
                        stem
                        for stem in registry().called(built.pair, built.path)
                        if stem not in chosen
                    ]
                except CudaOpsError as error:
                    _fail(row, error)
                    progress(row)
                    continue
                waiting.append((built, row))
                chosen += called
                running.update(map(start, called))
            # One that calls another may be done before it.
            while ready := [one for one in waiting if _load_or_wait(*one, compare, patient=True)]:
                done(ready)
        done([one for one in waiting if _load_or_wait(*one, compare, patient=False)])
    return sorted(rows, key=lambda row: row.op)


def _unusable(names: Sequence[str]) -> list[Row]:
    """What was asked for and is no operator."""
    errors: dict[str, CudaOpsError] = {}
    for problem in registry().problems:
        if not names or problem.name in names:
            errors[problem.name] = DiscoveryError(problem.text)
    if not names:
        for name, text in registry().plugins.problems.items():
            errors[f"plugin {name}"] = PluginError(text)
    rows = [Row(name) for name in errors]
    for row in rows:
        _fail(row, errors[row.op])
    return rows


def reload(*names: str) -> list[Row]:
    """Build and load what changed of these pairs, or of all that are loaded or failed to be;
    functions obtained earlier run the new code.

    Raises:
        CudaOpsError: the first of the operators that failed; all others are
            reloaded, and the failed one still runs its old code.
    """
    used = [s for s in registry().rescan() if registry().library_of(s) or s in registry().failures]
    rows = compile_ops(names or used) if names or used else []
    for row in rows:
        if row.error:
            raise registry().failures.get(row.op) or ResultError(row.error)
    return rows


def add_root(root: str | Path) -> None:
    """List the operators of one more folder, with ``kernels/`` and ``bindings/``: ``--root``.

    Raises:
        DiscoveryError: it does not exist, or has neither.
    """
    registry().add_root(Path(root))


class CompiledOps(Mapping[str, Any]):
    """``compiled_ops["silu"]``: the public function, built on first use."""

    def __getitem__(self, name: str) -> Any:
        if name not in registry().pairs():
            raise KeyError(name)
        if registry().library_of(name) is None:
            reload(name)
        return registry().public(name)

    def __iter__(self) -> Iterator[str]:
        return iter(registry().pairs())

    def __len__(self) -> int:
        return len(registry().pairs())


compiled_ops = CompiledOps()


def _load_or_wait(built: builder.Built, row: Row, compare: bool, patient: bool) -> bool:
    """Whether the row is complete. Where ``patient``, what it calls may still come."""
    try:
        _load(built, row, compare)
    except BuildError as error:
        if patient:
            return False
        _fail(row, error)
    except CudaOpsError as error:
        _fail(row, error)
    return True


def _fail(row: Row, error: CudaOpsError) -> None:
    registry().fail(row.op, error)
    row.error = str(error)


def _load(built: builder.Built, row: Row, compare: bool) -> None:
    pair = built.pair
    if registry().library_of(pair.stem) != built.path:
        registry().load(pair.stem, built.path)
    if pair.kind is not Kind.NATIVE:
        row.note = guests.missing(pair)
        return
    operator = registry().operators(pair.stem)[pair.stem]
    op = operator.spec
    row.devices = _devices(pair, op.keys, op.has_cuda)
    composed = "composed" if op.is_composite else ""
    row.fake = composed or ("yes" if operator.now.fake else "no")
    autograd = operator.now.autograd
    differentiable = autograd is not None and not isinstance(autograd.backward, NoGradient)
    row.autograd = composed or (_gradients(op, autograd) if autograd and differentiable else "no")
    if not compare:
        return
    device = "cuda" if "CUDA" in op.keys and torch.cuda.is_available() else "cpu"
    try:
        error = _max_error(operator, built, device)
    except ResultError as wrong:  # it stays loaded: one wants to see what it does
        row.error = str(wrong)
    else:
        row.max_error = None if math.isnan(error) else error  # nothing to compare with


def _gradients(op: OpSpec, autograd: Autograd) -> str:
    """``yes``, or the inputs that have a gradient where other tensors have none."""
    if autograd.inputs is None or set(op.tensor_positions) <= set(autograd.inputs):
        return "yes"
    return "of " + ", ".join(op.argument_names[i] for i in sorted(autograd.inputs))


def _max_error(operator: Operator, built: builder.Built, device: str) -> float:
    """The largest error on a few fixed samples; kept beside the library, since neither changes.

    So a run that has nothing to build does not even have to start the GPU.
    """
    store = built.path.with_suffix(".max_error.json")
    key = f"{device}, torch {torch.__version__}, {operator.now.fingerprint}"
    try:
        known: dict[str, float] = json.loads(store.read_text())
    except (OSError, ValueError):
        known = {}
    if key not in known:
        from cuda_ops.testing import quick_error

        try:
            known[key] = quick_error(operator.spec, registry().plugins, device)
        except CudaOpsError:
            raise
        except Exception as error:  # the operator's own code, or a plugin's reference
            raise CudaOpsError(
                f"{operator.spec.name}: comparing it with its reference failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            temporary = store.with_name(f".{store.name}.{os.getpid()}")
            temporary.write_text(json.dumps(known))
            temporary.rename(store)
    return known[key]


def _devices(pair: Pair, keys: Sequence[str], has_cuda: bool) -> str:
    if "CompositeImplicitAutograd" in keys:
        return "any"
    names = [key.lower() for key in keys]
    if has_cuda and "CUDA" not in keys:
        names.append("no nvcc" if toolchain.cuda_home() is None else "no .cu")
    elif pair.kernel is not None and "CUDA" not in keys:
        names.append("no .cuda<f>() of its .cu")
    elif "CUDA" in keys and not torch.cuda.is_available():
        names[names.index("cuda")] = "cuda (no GPU)"
    return " ".join(names)


def table(rows: Sequence[Row]) -> Table:
    grid = Table(
        "op", "build", "devices", "fake", "autograd", "max error", box=None, pad_edge=False
    )
    for row in rows:
        if row.error and not row.devices:  # not loaded
            grid.add_row(row.op, "[red]failed[/]", "", "", "", "")
            continue
        build = f"{row.seconds:.1f} s" if row.built == "built" else row.built
        error = "" if row.max_error is None else f"{row.max_error:.1e}"
        if row.error:
            error = "[red]failed[/]"
        grid.add_row(row.op, build, row.devices or row.note, row.fake, row.autograd, error)
    return grid


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    arguments = _parser().parse_intermixed_args(argv)
    console = Console(stderr=arguments.json, highlight=False, soft_wrap=True)
    if arguments.completion:
        print(_completion(arguments.completion))
        return 0
    try:
        if arguments.ops[:1] == ["new"]:
            return _new(arguments, console)
        if arguments.rows:
            raise ValueError("--rows: expected new, as in: compile_dev.py new my_softmax --rows")
        for root in arguments.root:
            registry().add_root(Path(root))
        archs = toolchain.parse_archs(arguments.arch) if arguments.arch else None
        rows = _compile(arguments, archs, console)
        failed = any(row.error for row in rows)
        if arguments.check:
            failed |= not _check(rows, console)
        if arguments.json:
            print(json.dumps([asdict(row) for row in rows], indent=2, allow_nan=False))
        if arguments.watch and (
            watched := [row.op for row in rows if row.op in registry().pairs()]
        ):
            from cuda_ops.watch import watch

            watch(watched, archs, console)
        return int(failed)
    except (CudaOpsError, ValueError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        return 130


def _compile(arguments: Any, archs: tuple[str, ...] | None, console: Console) -> list[Row]:
    total = len(arguments.ops) or len(registry().pairs())
    with console.status(f"building {total} operators") as status:
        done: list[str] = []

        def progress(row: Row) -> None:
            done.append(row.op)
            if row.built == "built":
                console.print(f"built {row.op} in {row.seconds:.1f} s")
            status.update(f"building: {len(done)} of {total} done")

        rows = compile_ops(
            arguments.ops,
            archs=archs,
            verbose=arguments.verbose,
            # --check compares more, in a process that may crash or hang.
            compare=not arguments.check,
            progress=progress,
        )
    clangd.write(registry().pairs().values(), archs or builder.visible_archs())
    console.print(table(rows))
    for row in rows:
        if row.error:
            said = row.error.removeprefix(f"{row.op}: ")
            console.print(f"\n[red]{row.op}[/]: {escape(said)}")
        elif row.warnings and row.built == "built":
            console.print(f"\n[yellow]{row.op}[/] {escape(chr(10).join(row.warnings))}")
    if not torch.cuda.is_available() and any("cuda" in row.devices for row in rows):
        console.print("\nNo GPU here: CUDA kernels were compiled, only CPU kernels were run.")
    return rows


def _check(rows: Sequence[Row], console: Console) -> bool:
    from cuda_ops.testing import PROFILES, check_op
    from cuda_ops.testing.checks import QUICK
    from cuda_ops.testing.child import Worker

    good = True
    with Worker(PROFILES["quick"].timeout) as worker:
        for row in rows:
            if row.error or registry().pairs()[row.op].kind is not Kind.NATIVE:
                continue
            for name in registry().operators(row.op):
                with console.status(f"checking {name}"):
                    report = check_op(name, checks=QUICK, isolate=worker)
                console.print(str(report), markup=False)
                row.checks.append(report.as_json())
                good &= report.passed
    return good


def _new(arguments: Any, console: Console) -> int:
    from cuda_ops.scaffold import new_pair

    if len(arguments.ops) != 2:
        raise ValueError("new: expected one name, as in: compile_dev.py new swish_clip")
    root = Path(arguments.root[0]) if arguments.root else None
    for path in new_pair(arguments.ops[1], root, rows=arguments.rows):
        console.print(f"wrote {path}", markup=False)
    where = f"--root {shlex.quote(str(root))} " if root else ""
    console.print(f"next: python compile_dev.py {where}--watch {arguments.ops[1]}", markup=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_prog(),
        description="Build what changed, load every operator, compare it with its reference.",
        epilog="compile_dev.py new OP writes a pair that builds and passes its checks.",
    )
    parser.add_argument("ops", nargs="*", metavar="OP", help="operators to build (default: all)")
    parser.add_argument(
        "--watch", action="store_true", help="rebuild, reload, check and time on every save"
    )
    parser.add_argument(
        "--rows", action="store_true", help="new: an operator of rows, not an elementwise one"
    )
    parser.add_argument("--check", action="store_true", help="run the full check of each operator")
    parser.add_argument(
        "--root",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with kernels/ and bindings/ outside this project; repeatable",
    )
    parser.add_argument("--arch", metavar="LIST", help="compute capabilities, such as '8.0;9.0a'")
    parser.add_argument("--verbose", action="store_true", help="show the compilers' command lines")
    parser.add_argument("--json", action="store_true", help="print the table as JSON on stdout")
    parser.add_argument(
        "--completion", choices=("bash", "zsh", "tcsh"), help="print a completion script and end"
    )
    return parser


def _prog() -> str:
    """``cuda-ops`` where that was called: completion scripts are for one command."""
    called = Path(sys.argv[0]).name
    return called if called == "cuda-ops" else "compile_dev.py"


def _completion(shell: str) -> str:
    """The script for ``eval``; operator names are those of the moment it was printed."""
    import shtab

    parser = _parser()
    names = ["new", *registry().pairs()]
    next(a for a in parser._actions if a.dest == "ops").choices = names
    script: str = shtab.complete(parser, shell)
    return script


if __name__ == "__main__":
    sys.exit(main())
