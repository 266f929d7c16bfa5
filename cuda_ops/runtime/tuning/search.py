"""Chooses launch configurations by measuring, and keeps what was chosen.

A binding has knobs (``src/utils/tuned.h``), a plugin offers settings of them
(``cuda_ops_candidates``), and :func:`tune` measures them on arguments of the caller. What it chose
is on disk (:mod:`cuda_ops.runtime.tuning.choices`), so it is measured once.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cuda_ops.build.source_text import text_of
from cuda_ops.dispatch import first_use
from cuda_ops.errors import NotTunedError
from cuda_ops.runtime.arguments import check_callable, check_mapping, is_number, loaded_key
from cuda_ops.runtime.tuning import choices
from cuda_ops.runtime.tuning.choices import DEFAULT, Key, Stored
from cuda_ops.runtime.tuning.key import device_and_driver, key_of, made_from
from cuda_ops.runtime.tuning.knobs import Knobs
from cuda_ops.spec import Candidates, OpSpec

#: Another candidate must save this share of the default's time, beyond noise.
MARGIN = 0.02
#: The variable that says what may be done, and what it may be.
SWITCH, MODES = "CUDA_OPS_TUNE", ("off", "stored", "on")

#: Seconds per call by name, one for each round; all names have as many.
Times = Mapping[str, Sequence[float]]
#: Measures functions by name on arguments: :func:`cuda_ops.runtime.tuning.rounds.rounds_of`.
Measure = Callable[[Mapping[str, Callable[..., Any]], tuple[Any, ...]], Times]

#: What is in use in this process, so that a repeated call looks at no file.
_in_use: dict[Key, Choice] = {}
#: Whether this thread chooses before a call.
_choosing = threading.local()
#: Operators and arguments for which that failed, which is said once.
_failed: set[tuple[str, str]] = set()
#: Held while knobs go through the candidates.
_measuring = threading.RLock()


@dataclass(frozen=True)
class Choice:
    """What an operator uses for arguments of such sizes, and why."""

    #: The candidate's name.
    name: str
    #: The values of the knobs that it sets.
    settings: Mapping[str, int]
    reason: str
    #: Whether this call measured.
    measured: bool = False
    #: By candidate, its time over the default's: median, and the ends of the interval.
    ratios: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    #: By candidate, why it was not measured.
    refused: Mapping[str, str] = field(default_factory=dict)


def mode() -> str:
    """Returns what ``CUDA_OPS_TUNE`` says: ``"off"``, ``"stored"`` (the default) or ``"on"``.

    Raises:
        ValueError: it says something else.
    """
    said = os.environ.get("CUDA_OPS_TUNE") or "stored"
    if said not in MODES:
        raise ValueError(f"{SWITCH}: expected one of {', '.join(MODES)}, got {said!r}")
    return said


def tune(
    op: str | OpSpec | Callable[..., Any],
    candidates: Candidates | Mapping[str, Mapping[str, int]] | None = None,
    inputs: Sequence[Any] = (),
    *,
    anew: bool = False,
    margin: float = MARGIN,
    measure: Measure | None = None,
) -> Choice:
    """Chooses among an operator's launch configurations for arguments of these sizes.

    Uses what was chosen before, if anything was for the same source, build, GPU, driver, dtype and
    sizes within a factor of two. Else it measures if ``CUDA_OPS_TUNE=on`` or ``anew`` says so:
    every candidate must first give the default's result within the operator's tolerance, then all
    take turns, and another one than the default is chosen only where it is faster beyond noise.
    From then on the whole process calls the operator with it. While this measures, other threads
    that call the operator get the candidates too.

    While a CUDA graph is captured, or torch.compile traces, nothing is measured. Where there is a
    GPU, choices are for tensors on it.

    Args:
        op: the operator, its name or its :class:`~cuda_ops.spec.OpSpec`.
        candidates: settings of knobs by name; by default what ``cuda_ops_candidates`` offers.
        inputs: the operator's arguments; tensors keep their values.
        anew: measure, whatever ``CUDA_OPS_TUNE`` and the stored choice say; not with ``off``.
        margin: the share of the default's time that another candidate must save beyond noise.
        measure: how to measure, in place of trains of calls on cold caches.

    Returns:
        What is used from now on, why, and whether this call measured.

    Raises:
        NotTunedError: the arguments are not tuned for; also a ValueError.
        TypeError: ``candidates`` is no mapping of mappings, ``inputs`` no list or tuple, or
            ``measure`` cannot be called.
        ValueError: no such operator, no candidates, a knob that the binding does not have, a value
            that is not legal, a ``margin`` that is no number from 0 to 1, or a wrong
            ``CUDA_OPS_TUNE``.
        BuildError: the choice cannot be written.

    Example:
    >>> choice = tune("sum_rows", inputs=(torch.ones(4, 8),))
    >>> choice.name, choice.measured
    ('default', False)
    """
    if torch.compiler.is_compiling():
        return Choice(DEFAULT, {}, "torch.compile traces: nothing is measured or looked up")
    _check(inputs, margin, measure)
    spec, library = found(op)
    offered = offered_by(spec, candidates)
    if why := _why_not_here(inputs):
        return Choice(DEFAULT, {}, why)
    key = key_of(spec, library, inputs, offered)
    said = mode()
    if said != "off" and not anew and (known := _in_use.get(key)) is not None:
        return known
    knobs = Knobs(library)
    settings = {DEFAULT: {}, **{n: dict(s) for n, s in offered.settings.items() if n != DEFAULT}}
    for name, setting in settings.items():
        try:
            knobs.check(setting)
        except ValueError as error:
            raise ValueError(f"tune: {spec.key}: candidate {name!r}: {error}") from None
    bucket = knobs.bucket(key.bits, getattr(torch, key.dtype))
    if said == "off":
        knobs.choose(bucket, {})
        return Choice(DEFAULT, {}, f"{SWITCH}=off")
    before = next((one for one in choices.stored(spec.key) if one.key == key), None)
    if before is not None and not anew and _apply(knobs, bucket, before):
        _in_use[key] = Choice(before.name, before.settings, before.reason, ratios=before.ratios)
        return _in_use[key]
    if why := _why_not_now(said, anew):
        return Choice(DEFAULT, {}, why)
    with _measuring:
        made = _measured(spec, knobs, bucket, settings, tuple(inputs), margin, measure)
    choices.keep(Stored(key, made.name, made.settings, made.reason, made.ratios))
    _in_use[key] = Choice(made.name, made.settings, made.reason, ratios=made.ratios)
    return made


def _check(inputs: object, margin: object, measure: object) -> None:
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        one = "; write [x] for one" if isinstance(inputs, torch.Tensor) else ""
        raise TypeError(
            "tune: argument 'inputs': expected a list of arguments, got "
            f"{type(inputs).__name__}{one}"
        )
    if not is_number(margin) or not 0 <= margin <= 1:
        raise ValueError(f"tune: argument 'margin': expected a number from 0 to 1, got {margin!r}")
    if measure is not None:
        check_callable("tune", "measure", measure)


def use_stored(op: OpSpec, library: Path) -> int:
    """Sets the knobs of a library that was just loaded to what is stored; returns how many choices.

    For ``cuda_ops_op_loaded`` of a plugin whose operator has candidates. Nothing is measured here;
    with ``CUDA_OPS_TUNE=on`` the first call for each kind of arguments then measures, and with
    ``off`` nothing is looked up.

    Args:
        op: the operator.
        library: the library that was loaded, as the hook gets it.

    Example::

        @hookimpl
        def cuda_ops_op_loaded(op, library):
            use_stored(op, library)
    """
    forget_process(op.key)
    if mode() == "on":
        first_use.before[op.key] = functools.partial(_first_use, op)
    if mode() == "off" or not choices.path_of(op.key).exists():
        return 0
    made, where = made_from(library), device_and_driver()
    if made is None or where is None:
        return 0
    knobs, used = Knobs(library), 0
    for one in choices.stored(op.key):
        key = one.key
        if (key.source, key.build) == made and (key.device, key.driver) == where:
            used += _apply(knobs, knobs.bucket(key.bits, getattr(torch, key.dtype)), one)
    return used


def _first_use(op: OpSpec, *inputs: Any) -> None:
    """Chooses before a call, once for each kind of arguments. Never fails the call."""
    if getattr(_choosing, "now", False):  # a measurement calls the operator
        return
    shown = [
        (tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one for one in inputs
    ]
    kind = op.key, repr(shown)
    if kind in _failed:
        return
    _choosing.now = True
    try:
        tune(op, inputs=inputs)
    except NotTunedError:
        pass
    except Exception as error:
        _failed.add(kind)
        warnings.warn(f"{op.key} is not tuned: {error}", RuntimeWarning, stacklevel=4)
    finally:
        _choosing.now = False


def forget_process(op: str) -> None:
    """Forgets what this process has looked up for an operator, by key; its knobs stay as set."""
    for key in [key for key in _in_use if key.op == op]:
        del _in_use[key]


def decide(times: Times, margin: float = MARGIN) -> tuple[str, str, dict[str, Any]]:
    """Chooses by times: the candidate with the least median, among those whose whole interval of
    round-by-round ratios to the default is below ``1 - margin``; else the default.

    Returns:
        Its name, the reason, and the interval of each candidate's ratio.

    Raises:
        ValueError: the default is not among them, or there are too few rounds for an interval.

    Example:
    >>> decide({"default": [1.0] * 8, "wide": [0.9] * 8})[0]
    'wide'
    """
    from cuda_ops.benchmarking.stats import LEAST_SAMPLES, ratio_interval

    if len(times.get(DEFAULT, ())) < LEAST_SAMPLES:
        raise ValueError(
            f"decide: argument 'times': expected {LEAST_SAMPLES} rounds or more of {DEFAULT!r}, "
            f"got {len(times.get(DEFAULT, ()))}"
        )
    ratios = {n: ratio_interval(t, times[DEFAULT]) for n, t in times.items() if n != DEFAULT}
    if not ratios:
        return DEFAULT, "no other candidate was measured", {}
    best = min(ratios, key=lambda name: ratios[name].value)
    sure = {name: r for name, r in ratios.items() if r.high < 1 - margin}
    chosen = min(sure, key=lambda name: sure[name].value) if sure else DEFAULT
    shown = ratios[chosen if sure else best]
    took = f"{shown.value:.3f} ({shown.low:.3f} to {shown.high:.3f}) of the default's time"
    if sure:
        return chosen, f"takes {took}", ratios
    needed = f"below {1 - margin:.3f}"
    return DEFAULT, f"no interval is {needed}; the best, {best!r}, takes {took}", ratios


def found(op: str | OpSpec | Callable[..., Any]) -> tuple[OpSpec, Path]:
    """Returns an operator and the library that it is in; loads it if need be.

    Raises:
        ValueError: there is no such operator.
        CudaOpsError: there is, and it cannot be used.
    """
    from cuda_ops.registry import registry

    key = loaded_key("tune", op)
    operator = registry().loaded(key)
    library = None if operator is None else registry().library_of(operator.spec.pair)
    if operator is None or library is None:
        raise ValueError(f"tune: argument 'op': expected an operator of cuda_ops, got {op!r}")
    return operator.spec, library


def offered_by(
    spec: OpSpec, given: Candidates | Mapping[str, Mapping[str, int]] | None
) -> Candidates:
    """Returns the candidates of an operator: ``given``, or what its plugin offers.

    Raises:
        TypeError: what was given is no mapping of mappings.
        ValueError: there are none.
    """
    from cuda_ops.registry import registry

    if given is not None:
        settings = given.settings if isinstance(given, Candidates) else given
        check_mapping(
            "tune", "candidates", settings, "a Candidates, or a mapping of names to knobs' values"
        )
        for name, setting in settings.items():
            wanted = f"a mapping of knobs to ints for {name!r}"
            check_mapping("tune", "candidates", setting, wanted)
    if isinstance(given, Candidates):
        return given
    offered: Candidates | None = registry().plugins.ask("cuda_ops_candidates", spec)
    if offered is None:
        pairs = registry().pairs().items()
        plugins = {key: text_of(pair.plugin) for key, pair in pairs if pair.plugin.is_file()}
        tuned = [key for key, text in plugins.items() if "cuda_ops_candidates" in text]
        raise ValueError(
            f"tune: {spec.key}: expected a plugin that answers cuda_ops_candidates, or a "
            "Candidates as argument 'candidates', got neither; operators with such a plugin: "
            f"{', '.join(tuned) or 'none'}"
        )
    return offered if given is None else Candidates(given, offered.sizes)


def _apply(knobs: Knobs, bucket: int, one: Stored) -> bool:
    """Says whether the library takes a stored choice; one that it does not know was edited."""
    try:
        knobs.choose(bucket, one.settings)
    except ValueError as error:
        path = choices.path_of(one.key.op)
        warnings.warn(f"{path}: choice {one.name!r} is left out: {error}", stacklevel=3)
        return False
    return True


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _why_not_here(inputs: Sequence[Any]) -> str:
    """Returns why nothing is chosen for such tensors in this process."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_meta for t in tensors):
        return "a tensor without values of its own, as in tracing: nothing is measured"
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return "inside of a transform of torch.func or a dispatch mode: nothing is measured"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if others := [str(t.device) for t in tensors if t.device.type != device]:
        return f"choices of this process are for tensors on {device}, got one on {others[0]}"
    return ""


def _why_not_now(said: str, anew: bool) -> str:
    if _is_capturing():
        return "a CUDA graph is captured: nothing is measured"
    if said != "on" and not anew:
        return f"nothing is stored, and {SWITCH}=on or anew=True would measure"
    return ""


def _measured(
    spec: OpSpec,
    knobs: Knobs,
    bucket: int,
    settings: Mapping[str, Mapping[str, int]],
    inputs: tuple[Any, ...],
    margin: float,
    measure: Measure | None,
) -> Choice:
    from cuda_ops.runtime.tuning import rounds

    functions = {}
    for name, setting in settings.items():
        functions[name] = rounds.under(knobs, bucket, setting, spec.function)
    before = {name: knobs.get(name, bucket) for name in knobs.values}
    chosen: Mapping[str, int] = before
    try:
        with torch.no_grad():
            refused = rounds.refused(spec, functions, inputs)
            right = {name: f for name, f in functions.items() if name not in refused}
            times = (measure or rounds.rounds_of)(right, inputs)
        name, reason, ratios = decide(times, margin)
        chosen = settings[name]
    finally:
        knobs.choose(bucket, chosen)
    numbers = {n: (r.value, r.low, r.high) for n, r in ratios.items()}
    return Choice(name, chosen, reason, True, numbers, refused)
