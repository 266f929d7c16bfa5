"""Builds pairs, loads them and compares them with their references, as ``compile_dev.py`` does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cuda_ops.build import cache, compiling, guest_text, guests, threads, toolchain
from cuda_ops.build.debug import asked as asked_for_debug
from cuda_ops.build.discovery import Pair, Problem, unregistered
from cuda_ops.build.source_text import Kind
from cuda_ops.derive.gradient import may_float, output_may_float, why_none
from cuda_ops.dispatch import declared
from cuda_ops.dispatch.operator import Operator
from cuda_ops.errors import (
    BuildError,
    CudaOpsError,
    DiscoveryError,
    KitError,
    PluginError,
    ResultError,
)
from cuda_ops.names import unknown
from cuda_ops.plugins import plugin_name
from cuda_ops.registry import registry
from cuda_ops.spec import WRONG_GRADIENT, OpSpec

#: The device whose kernels are compiled and not run, since there is no GPU.
NOT_RUN = "cuda*"
#: Why an operator has no fake.
NO_FAKE = "no signature line or cuda_ops_fake"


@dataclass
class Row:
    """One line of the table; ``error`` is empty where everything worked. A line about a root or a
    plugin that cannot be used has nothing else.
    """

    op: str
    built: str = ""
    seconds: float = 0.0
    devices: str = ""
    fake: str = ""
    autograd: str = ""
    max_error: float | None = None
    #: Why ``max_error`` is missing: a few words, and more after a colon.
    uncompared: str = ""
    #: How many samples the operator refused while others were compared, and how.
    refused: str = ""
    #: What finite differences say of the gradient: ``ok``, ``WRONG: `` and where, ``none`` where
    #: there is no gradient, or ``not checked: `` and why; empty if nothing was compared.
    gradient: str = ""
    note: str = ""
    error: str = ""
    warnings: tuple[str, ...] = ()
    #: What the pair asks of its build beyond the defaults, by key.
    options: dict[str, Any] = field(default_factory=dict)
    #: What works and will hurt: flags that are not IEEE arithmetic, and what a guest does.
    hints: tuple[str, ...] = ()
    #: Whether it is a debug build, which is slow.
    debug: bool = False
    #: With ``--check``: what the checks found, for each operator of the pair.
    checks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_wrong_gradient(self) -> bool:
        """Whether the gradient differs from finite differences."""
        return self.gradient.startswith(WRONG_GRADIENT)


def compile_ops(
    names: Sequence[str] = (),
    *,
    archs: tuple[str, ...] | None = None,
    verbose: bool = False,
    compare: bool = True,
    debug: bool | Collection[str] = False,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Builds and loads the named pairs (all without names) and those that they call, in parallel;
    returns rows sorted by name. Unless ``compare`` is false, a few samples tell the largest error,
    and others whether the gradient is right.

    A pair that fails has its error in its row and in ``registry().failures``; the others are
    usable, and an older library of the failed one goes on serving. A pair that is loaded and
    differs from its reference has its error in its row alone, and so have files that form no
    operator and, without names, a plugin that cannot be used. A wrong gradient is no error: its row
    says so in ``gradient``.

    With ``debug`` these are debug builds, not optimized and with the names of variables, which lie
    beside the ordinary libraries: all of them, or those of the pairs with these keys, besides what
    ``CUDA_OPS_DEBUG`` names. Another process loads the ordinary ones unless it asks too.

    Raises:
        BuildError: no operator has one of the names, or one in ``CUDA_OPS_DEBUG``.

    Example::

        from cuda_ops.compile_ops import compile_ops

        (row,) = compile_ops(["silu"], debug=True)
        assert row.debug and not row.error
    """
    pairs = registry().rescan()
    names = [registry().key_of(name) for name in names]
    asked = {key: pair for key, pair in pairs.items() if not names or key in names}
    rows = _unusable(names, [*registry().problems, *unregistered(asked)])
    if strange := [name for name in names if name not in (*pairs, *(row.op for row in rows))]:
        raise BuildError(unknown(strange, pairs))
    chosen = [key for key, pair in asked.items() if not pair.problem]
    archs = archs or compiling.visible_archs()
    debugged = {*([] if isinstance(debug, bool) else debug), *asked_for_debug(pairs)}
    texts: dict[Path, bytes] = {}  # operators share headers
    waiting: list[tuple[compiling.Built, Row]] = []
    with threads.builders(toolchain.operators_at_once()) as submit:

        def start(key: str) -> tuple[Future[compiling.Built], Row]:
            return submit(build, pairs[key]), Row(key)

        def build(pair: Pair) -> compiling.Built:
            text = pair.read(texts)
            if pair.kind is Kind.NATIVE and pair.binding is not None:
                declared.check(
                    pair.stem, texts[pair.binding].decode(errors="replace"), pair.namespace
                )
            of_debug = debug is True or pair.key in debugged
            return compiling.build(pair, archs, verbose=verbose, text=text, debug=of_debug)

        def done(loaded: list[tuple[compiling.Built, Row]]) -> None:
            for one in loaded:
                waiting.remove(one)
                progress(one[1])

        running = dict(map(start, chosen))
        while running:
            future = next(threads.completed(running))
            row = running.pop(future)
            rows.append(row)
            try:
                built = future.result()
                row.seconds, row.built = built.seconds, built.origin
                row.warnings, row.debug = built.warnings, built.debug
                called = [
                    key for key in registry().called(built.pair, built.path) if key not in chosen
                ]
            except Exception as error:
                _fail(row, error, "built")
                progress(row)
                continue
            waiting.append((built, row))
            chosen += called
            running.update(map(start, called))
            # One that calls another may be done before it.
            while ready := [one for one in waiting if _load_or_wait(*one, compare, patient=True)]:
                done(ready)
        done([one for one in waiting if _load_or_wait(*one, compare, patient=False)])
    rows += _broken_plugins(chosen if names else None)  # which may have failed at a load
    return sorted(rows, key=lambda row: row.op)


def _broken_plugins(pairs: Sequence[str] | None) -> list[Row]:
    """Returns a failed row for each plugin that cannot be used, or each one of these pairs."""
    own = None if pairs is None else [*map(plugin_name, pairs)]
    rows = []
    for name, text in registry().plugins.problems.items():
        if own is None or name in own:
            rows.append(Row(f"plugin {name}"))
            _fail(rows[-1], PluginError(text))
    return rows


def _unusable(names: Sequence[str], problems: Sequence[Problem]) -> list[Row]:
    """Returns a failed row for each file or root that was asked for and cannot be used."""
    errors: dict[str, CudaOpsError] = {}
    for problem in problems:
        if not names or problem.name in names:
            errors[problem.name] = DiscoveryError(problem.text)
    rows = [Row(name) for name in errors]
    for row in rows:
        _fail(row, errors[row.op])
    return rows


def reload(*names: str) -> list[Row]:
    """Builds and loads what changed in these pairs, or in all that are loaded or failed to be.
    Functions obtained earlier run the new code. What runs as a debug build stays one.

    Args:
        names: pairs, such as ``"silu"``; none for all.

    Returns:
        A row for each operator, as in the table of ``compile_dev.py``.

    Raises:
        TypeError: a name is no str.
        CudaOpsError: the first of the operators that failed; all others are
            reloaded, and the failed one still runs its old code.

    Example::

        cuda_ops.dev.reload("silu")
    """
    given: Any
    for given in names:
        if not isinstance(given, str):
            raise TypeError(f"reload: argument 'names': expected a name, got {given!r}")
    used = [k for k in registry().rescan() if registry().library_of(k) or k in registry().failures]
    debugged = [key for key in used if cache.is_debug(registry().library_of(key))]
    rows = compile_ops(names or used, debug=debugged) if names or used else []
    for row in rows:
        if row.error:
            raise registry().failures.get(row.op) or ResultError(row.error)
    return rows


def add_root(root: str | Path) -> None:
    """Adds a folder with ``kernels/`` and ``bindings/``, as ``--root`` does.

    Args:
        root: the folder. Its operators are found from now on, by their names.

    Raises:
        DiscoveryError: it does not exist, or has neither.

    Example::

        cuda_ops.dev.add_root("my_ops/src")
    """
    registry().add_root(Path(root))


class CompiledOps(Mapping[str, Any]):
    """``compiled_ops["silu"]``: the public function, built on first use. One whose result is not
    its reference's is refused until its text changes; ``cuda_ops.silu`` is there all the same.
    """

    def __init__(self) -> None:
        #: By key: the library, and what was wrong with its result.
        self._wrong: dict[str, tuple[Path, ResultError]] = {}

    def __getitem__(self, name: str) -> Any:
        key = registry().key_of(name)
        if key not in registry().pairs():
            raise KeyError(name)
        if registry().library_of(key) is None:
            try:
                reload(key)
            except ResultError as error:
                if library := registry().library_of(key):
                    self._wrong[key] = library, error
                raise
        wrong = self._wrong.get(key)
        if wrong is not None and wrong[0] == registry().library_of(key):
            raise wrong[1]
        return registry().public(key)

    def __iter__(self) -> Iterator[str]:
        return iter(registry().pairs())

    def __len__(self) -> int:
        return len(registry().pairs())


compiled_ops = CompiledOps()


def _load_or_wait(built: compiling.Built, row: Row, compare: bool, patient: bool) -> bool:
    """Says whether the row is complete. With ``patient``, a called operator may still come."""
    try:
        _load(built, row, compare)
    except BuildError as error:
        if patient:
            return False
        _fail(row, error)
    except Exception as error:
        _fail(row, error, "loaded")
    return True


def _fail(row: Row, error: Exception, attempt: str = "used") -> None:
    """Notes why an operator failed. A foreign error must not cost the others either."""
    if not isinstance(error, CudaOpsError):
        what = f"{row.op}: cannot be {attempt}: {type(error).__name__}: {error}"
        error = CudaOpsError(what)
    registry().fail(row.op, error)
    row.error = str(error)


def _load(built: compiling.Built, row: Row, compare: bool) -> None:
    pair = built.pair
    if registry().serves(pair, built.path):
        registry().failures.pop(pair.key, None)  # of a text that came in between
    else:
        registry().load(pair.key, built.path)
    asked = pair.options
    row.options, row.hints = asked.as_json(), tuple(asked.inexact())
    if pair.kind is not Kind.NATIVE:
        row.hints += tuple(guest_text.hints(pair))
        if not pair.is_declared:
            row.note = guests.missing(pair)
            return
        row.hints = (guests.missing(pair), *row.hints)
    op = next(iter(registry().specs(pair.key).values()))
    row.devices = _devices(pair, op.keys, op.has_cuda)
    if op.is_composite:
        row.fake = row.autograd = "composed"
    elif (operator := registry().loaded(op.key)) is not None:
        row.fake = "yes" if operator.now.fake else NO_FAKE
        row.autograd = _gradients(operator)
    else:  # as the guest registers it
        row.fake, row.autograd = ("its own" if has else "no" for has in guests.own_rules(pair))
    if not compare:
        row.uncompared = "see its checks"
        return
    device = "cuda" if "CUDA" in op.keys and torch.cuda.is_available() else "cpu"
    try:
        error, row.refused, row.gradient = _compared(op, built, device)
    except (ResultError, KitError) as wrong:  # it stays loaded, so that its author can look at it
        row.error = str(wrong)
    else:
        row.max_error = error if isinstance(error, float) else None
        row.uncompared = error if isinstance(error, str) else ""


def _gradients(operator: Operator) -> str:
    """Returns ``yes``, why there is none, or the inputs that have a gradient where other tensors of
    floating numbers have none; ``yes, not cos`` where others, or outputs, have none by design.
    """
    found, op = operator.now.differentiable, operator.spec
    if why := why_none(op, operator.now.autograd):
        return why if why.startswith("no ") else f"no, {why}"
    having = [op.argument_names[i] for i in found]
    others = {name for name in op.tensor_names if may_float(op, name)} - {*having}
    if not others <= {*op.no_gradient}:
        return "of " + ", ".join(having)
    without = [name for name in op.no_gradient if name in others]
    shown = op.output_names[: op.shown]
    without += [name for name in shown if name in op.constants and output_may_float(op, name)]
    return f"yes, not {', '.join(without)}" if without else "yes"


def _compared(op: OpSpec, built: compiling.Built, device: str) -> tuple[float | str, str, str]:
    """Returns the largest error on a few fixed samples, or why there is none, which of them the
    operator refused, and what finite differences say of the gradient. The file beside the library
    keeps these, since none changes, so that a run with nothing to build need not start the GPU.
    """
    store = built.path.with_suffix(".compared.json")
    operator = registry().loaded(op.key)
    said = registry().plugin_text(built.pair) if operator is None else operator.now.fingerprint
    key = f"{device}, torch {torch.__version__}, {said}"
    known: dict[str, Any] = cache.read_json(store)
    if not (isinstance(known.get(key), list) and len(known[key]) == 3):
        from cuda_ops.testing.quick import quick_comparison, quick_gradient

        try:
            compared = quick_comparison(op, registry().plugins, device)
            known[key] = [*compared, quick_gradient(op, device)]
        except CudaOpsError:
            raise
        except Exception as error:  # the operator's own code, or a plugin's reference
            raise CudaOpsError(
                f"{op.key}: comparing it with its reference failed: {type(error).__name__}: {error}"
            ) from error
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            cache.write(store, json.dumps(known))
    found, refused, gradient = known[key]
    return found, refused, gradient


def _devices(pair: Pair, keys: Sequence[str], has_cuda: bool) -> str:
    if "CompositeImplicitAutograd" in keys:
        return "any"
    names = [key.lower() for key in keys]
    if has_cuda and "CUDA" not in keys:
        names.append("no nvcc" if toolchain.cuda_home() is None else "no .cu")
    elif pair.kernel is not None and "CUDA" not in keys:
        names.append("no .cuda<f>() of its .cu")
    elif "CUDA" in keys and not torch.cuda.is_available():
        names[names.index("cuda")] = NOT_RUN
    return " ".join(names)
