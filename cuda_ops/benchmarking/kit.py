"""Measures operators on one device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from cuda_ops.errors import BenchmarkError
from cuda_ops.spec import BenchmarkCase, Claims, OpSpec, Peer
from cuda_ops.testing.compare import outputs
from cuda_ops.testing.samples import DeviceArg
from cuda_ops.testing.subject import HookAnswers, why_not
from cuda_ops.testing.tolerance import tensors

from . import capacity
from .ceilings import Ceilings, arithmetic
from .choice import settle, wrapped
from .clock import CLEAN_OVER_WARM, COLD_OVER_WARM, host_latency, make_clock, prove_cold
from .compare import OURS, Settings, calls_for, compare, quick_seconds
from .environment import environment
from .memory import memory_of
from .peers import EAGER, load_peers
from .raised import raised
from .reference_peers import ReferencePeer, fault_of, reference_peers
from .results import CaseResult, PeerResult, Report
from .rotation import Rotation
from .stats import Interval, median_interval
from .sustained import sustained
from .training import with_gradients
from .verify import Verifier

#: If the device takes longer than this, the host's latency is hidden behind it.
HOST_BOUND_SECONDS = 20e-6
#: The largest of few cases on a CPU, if any is smaller: larger ones take most of the time.
_FEW_CPU_BYTES = 32 << 20


class Kit:
    """Measures operators on one device, under the same ceilings and settings."""

    def __init__(
        self,
        device: torch.device | str,
        settings: Settings | None = None,
        peers: Collection[str] | None = None,
        cases: str = "",
        clean_caches: bool = False,
    ) -> None:
        """Args:
            device: where to measure, ``"cpu"``, ``"cuda"`` or ``"cuda:N"`` too.
            settings: when a comparison is done.
            peers: the names of the peers to compare with; ``None`` for all that a case has.
            cases: a regular expression; cases whose labels do not match are not measured.
            clean_caches: whether trains start with caches that hold nothing unwritten.

        Raises:
            BenchmarkError: on a GPU, if flushing its cache has no effect.
            ValueError: the device is none on which operators can be measured.
        """
        self.device, self.settings = _known(device), settings or Settings()
        self._peers, self._cases, self._clean_caches = peers, cases, clean_caches
        self.clock = make_clock(self.device, clean_caches)
        least = CLEAN_OVER_WARM if clean_caches else COLD_OVER_WARM
        self.cold_over_warm = prove_cold(self.clock, least) if self.device.type == "cuda" else None
        self.ceilings = Ceilings(self.clock)
        self.left_out: dict[str, str] = {}

    def measure(
        self,
        op: OpSpec,
        plugins: HookAnswers,
        *,
        few: bool = False,
        progress: Callable[[str], None] = lambda text: None,
        measured: Callable[[CaseResult], None] = lambda result: None,
    ) -> list[CaseResult]:
        """Measures every case of an operator, in order; if a case fails, its result has the error.

        :attr:`left_out` then names what was not measured, and why.

        Args:
            op: the operator, registered.
            plugins: answers the hooks.
            few: whether to measure only the smallest and the largest case of each dtype.
            progress: called with the part of the case that comes next, but not while calls are
                timed in turns.
            measured: called with each result as soon as it is there.
        """
        reason = why_not(op, self.device.type)
        cases = cases_of(op, plugins)
        asked = [case for case in cases if re.search(self._cases, case.label)]
        reference = plugins.ask("cuda_ops_reference", op)
        claims: Claims = plugins.ask("cuda_ops_claims", op) or Claims()
        if not reason and not cases:
            reason = "no cases: give a signature line or implement cuda_ops_benchmarks"
        if not reason and reference is None:
            reason = "nothing to check results with: implement cuda_ops_reference"
        if reason:
            self.left_out[op.key] = reason
            return []
        fitting = []
        for case in asked:
            if too_large := capacity.too_large(case, self.device):
                self.left_out[f"{op.key} {case.label}"] = too_large
            else:
                fitting.append(case)
        results = []
        with warnings.catch_warnings():
            # Strict float32 is what a float32 case is about.
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
            for case in self._few(fitting) if few else fitting:
                results.append(self._measure_case(op, case, reference, claims, progress))
                measured(results[-1])
        return results

    def report(self, results: list[CaseResult], finished: bool = True) -> Report:
        """Returns the results with everything that is needed to judge them, and whether they are
        all that were asked for. A ceiling that one of them went above is raised to it, for all.
        """
        return raised(
            Report(
                environment=environment(self.device),
                ceilings=self.ceilings.measured,
                physical=self.ceilings.physical,
                cold_over_warm=self.cold_over_warm,
                settings={
                    **asdict(self.settings),
                    "cases": self._cases,
                    "clean_caches": self._clean_caches,
                    "finished": finished,
                },
                results=results,
                left_out=self.left_out,
            )
        )

    # --- one case --------------------------------------------------------------------

    def _measure_case(
        self,
        op: OpSpec,
        case: BenchmarkCase,
        reference: Callable[..., Any],
        claims: Claims,
        progress: Callable[[str], None],
    ) -> CaseResult:
        def part(text: str) -> None:
            progress(f"{op.key} {case.label}: {text}")

        dtype = "" if case.dtype is None else str(case.dtype).removeprefix("torch.")
        result = CaseResult(
            op.key, op.pair, case.label, case.reason, dtype, case.bytes, case.flops, "",
            group=case.group,
        )  # fmt: skip
        try:
            result = replace(result, arithmetic=arithmetic(case))
            return self._compared(op, case, reference, claims, result, part)
        except BenchmarkError as error:
            return replace(result, error=str(error))
        except Exception as error:  # the operator's own code, or out of memory
            return replace(result, error=f"{type(error).__name__}: {error}")

    def _compared(
        self,
        op: OpSpec,
        case: BenchmarkCase,
        reference: Callable[..., Any],
        claims: Claims,
        result: CaseResult,
        progress: Callable[[str], None],
    ) -> CaseResult:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the case before may have left little
        wanted = {n: p for n, p in case.peers.items() if self._peers is None or n in self._peers}
        peers, missing = load_peers(wanted, progress)
        functions = {OURS: case.function or op.function, **peers}
        keywords = {
            name: self.device if isinstance(value, DeviceArg) else value
            for name, value in case.keywords.items()
        }
        if keywords:
            functions = {
                name: wrapped(lambda f: partial(f, **keywords), f) for name, f in functions.items()
            }
            reference = partial(reference, **case.keywords)
        forward = functions
        capacity.check_shared(case, self.device)
        fixed = [op.argument_names.index(name) for name in op.no_gradient]
        constants = [op.output_names.index(name) for name in op.constants]
        trained = partial(with_gradients, fixed=fixed, constants=constants)
        if case.backward:
            functions = {name: wrapped(trained, f) for name, f in functions.items()}
        progress("making arguments")
        pair = Rotation(case, self.device, 2)
        written = _written(op, functions[OURS], pair.arguments[0])
        if case.backward:
            made = outputs(forward[OURS](*pair.arguments[0]))
            reference = trained(reference, like=[r.dtype for r in made])
        progress(f"estimating the time of {OURS}")
        estimate = quick_seconds(functions[OURS], pair, self.clock, budget=0.0)
        # A case that reads only part of its arguments keeps all of them, and their values.
        each = max(capacity.footprint(case), 2 * pair.bytes_per_copy)
        calls = min(calls_for(estimate, self.clock), max(2, capacity.free(self.device) // each))
        rotation = pair
        if calls > 2:
            progress(f"making arguments for {calls} calls")
            rotation = Rotation(case, self.device, calls, pair.shared)
        referring = {n: p for n, p in wanted.items() if isinstance(p, ReferencePeer)}
        if referring:
            progress("trying the reference as a peer")
            fault = fault_of(
                partial(next(iter(referring.values())).function, **keywords),
                pair.arguments[0],
                outputs(forward[OURS](*pair.arguments[0])),
                calls,
                self.device,
            )
            for name in referring if fault else ():
                functions.pop(name, None)
                missing.setdefault(name, fault)
        progress("the reference in float64")
        verifier = Verifier(op, reference, rotation, claims.tolerance)
        lenient = {
            name: peer
            for name, peer in wanted.items()
            if isinstance(peer, Peer) and (peer.off_by or peer.compared is not None)
        }
        took, unusable = settle(
            functions, forward, rotation, verifier, self.clock, lenient, progress
        )
        missing |= unusable
        found = compare(functions, rotation, verifier, self.clock, self.settings, lenient, progress)
        progress("the device's ceilings and the host's latency")
        for name, seconds in found.seconds.items():
            self.ceilings.refuse_impossible(case, name, seconds.value, calls)
        missing |= found.missing
        latencies = self._latencies(
            {name: functions[name] for name in found.seconds},
            rotation.arguments[0],
            found.seconds[OURS].value,
        )
        memory = {}
        for name in found.seconds if case.memory else ():
            progress(f"memory of {name}")
            memory[name] = memory_of(
                forward[name], rotation.arguments[0], self.device, case.backward, fixed
            )
        lasting = self._sustained(functions, rotation, found.seconds, progress)
        floor = self.ceilings.floor(case, written)
        notes = [f"{name} waits for the device: host time is included" for name in found.waiting]
        notes += [peer.note for peer in referring.values()]
        for name, peer in lenient.items():
            if name in found.ratios and peer.off_by:
                notes.append(f"{name} rounds by another rule: off by {peer.off_by} at most")
            if name in found.ratios and peer.compared is not None:
                which = "result" if peer.compared == 1 else f"{peer.compared} results"
                notes.append(f"{name}: only its first {which} compared")
        return replace(
            result,
            seconds=found.seconds[OURS],
            host=latencies.get(OURS),
            memory=memory.get(OURS),
            sustained=lasting.get(OURS),
            floor_seconds=floor.seconds,
            bound=floor.bound,
            calls=calls,
            rounds=found.rounds,
            converged=found.converged,
            peers={
                name: PeerResult(missing=missing[name])
                if name in missing
                else PeerResult(
                    found.seconds[name],
                    found.ratios[name],
                    latencies.get(name),
                    memory=memory.get(name),
                    sustained=lasting.get(name),
                    took=took.get(name, ""),
                )
                for name in wanted
            },
            notes=tuple(notes),
        )

    def _latencies(
        self, functions: dict[str, Callable[..., Any]], args: tuple[Any, ...], seconds: float
    ) -> dict[str, Interval]:
        # On a CPU a call is its own latency.
        if self.device.type != "cuda" or seconds > HOST_BOUND_SECONDS:
            return {}
        times = host_latency(
            {name: partial(function, *args) for name, function in functions.items()},
            self.device,
            rounds=self.settings.latency_rounds,
            calls=self.settings.latency_calls,
        )
        return {name: median_interval(taken) for name, taken in times.items()}

    def _sustained(
        self,
        functions: dict[str, Callable[..., Any]],
        rotation: Rotation,
        seconds: dict[str, Interval],
        progress: Callable[[str], None],
    ) -> dict[str, Interval]:
        """Times ours and one peer back to back: the eager one, or else the first."""
        if not self.settings.sustained:
            return {}
        others = [name for name in seconds if name != OURS]
        names = [OURS, *([EAGER] if EAGER in others else others[:1])]
        progress(f"{' and '.join(names)}, back to back")
        return sustained(
            {name: functions[name] for name in names},
            rotation.arguments,
            self.clock,
            self.settings.sustained,
            {name: seconds[name].value for name in names},
        )

    def _few(self, cases: list[BenchmarkCase]) -> list[BenchmarkCase]:
        """Returns the smallest and the largest case of each dtype."""
        if self.device.type == "cpu":
            cases = [case for case in cases if case.bytes <= _FEW_CPU_BYTES] or cases
        by_dtype: dict[torch.dtype | None, list[BenchmarkCase]] = {}
        for case in cases:
            by_dtype.setdefault(case.dtype, []).append(case)
        ends = [
            end(group, key=lambda case: (case.bytes, case.flops))
            for group in by_dtype.values()
            for end in (min, max)
        ]
        return [case for case in cases if any(case is end for end in ends)]


def _known(given: Any) -> torch.device:
    """Returns the device that the argument ``device`` says."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):  # no name of a device, or no name at all
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        expected = "expected 'cpu', 'cuda', 'cuda:N' or such a torch.device"
        raise ValueError(f"Kit: argument 'device': {expected}, got {given!r}")
    return device


def _written(op: OpSpec, function: Callable[..., Any], args: tuple[Any, ...]) -> int | None:
    """Returns how many bytes a call returns; ``None`` if it writes into its arguments."""
    if op.parsed.is_mutable:
        return None
    return sum(result.nbytes for result in tensors(outputs(function(*args))))


def cases_of(op: OpSpec, plugins: HookAnswers) -> list[BenchmarkCase]:
    """Returns the operator's cases, each with the operator's peers beside its own. Where no plugin
    answers ``cuda_ops_peers``, they are made of its reference.
    """
    cases: list[BenchmarkCase] = plugins.ask("cuda_ops_benchmarks", op) or []
    peers = plugins.peers(op)
    if peers is None:
        peers = reference_peers(op, plugins)
    return [replace(case, peers={**peers, **case.peers}) for case in cases]
