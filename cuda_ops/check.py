"""The quick check of one operator: what ``compile_dev.py --check`` runs after a build.

Every check enumerates samples and compares; what an operator is comes from the
hooks. A failed entry carries the sample that reproduces it, and a check that
could not run is listed with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.derive import NoGradient
from cuda_ops.samples import MAX_NUMEL, Sample, TensorArg
from cuda_ops.shapes import check_arguments, tensor_arguments
from cuda_ops.spec import OpSpec

#: Error allowed of one result, in units of the dtype's epsilon. Half precision
#: is rounded once from float32; wider dtypes are computed in themselves, with
#: a device's own exp. Times sqrt(reduction length), as rounding errors add up.
EPSILONS = {torch.float64: 32.0, torch.float32: 32.0, torch.float16: 4.0, torch.bfloat16: 4.0}

_SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


class Plugins(Protocol):
    """Whatever answers hooks: the plugin manager, or a stand-in."""

    def ask(self, hook_name: str, op: OpSpec, /) -> Any: ...


@dataclass(frozen=True)
class CheckEntry:
    """One check: passed, failed, or (``None``) not run; ``detail`` says why."""

    name: str
    passed: bool | None
    detail: str = ""
    #: Python that makes the arguments of the failed call.
    sample: str = ""

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAILED", None: "not run"}[self.passed]
        lines = [f"{mark:8}{self.name}" + (f": {self.detail}" if self.detail else "")]
        return "\n".join(lines + ([f"        reproduce: {self.sample}"] if self.sample else []))


@dataclass(frozen=True)
class CheckReport:
    """All checks of one operator."""

    op: str
    entries: tuple[CheckEntry, ...]

    @property
    def passed(self) -> bool:
        return all(entry.passed is not False for entry in self.entries)

    def __str__(self) -> str:
        return "\n".join([f"cuda_ops::{self.op}", *map(str, self.entries)])


class _NotRunError(Exception):
    """Why a check does not apply."""


class _FailedError(Exception):
    """A failure of one of the checks that enumerate samples themselves."""

    def __init__(self, detail: str, sample: Sample) -> None:
        super().__init__(detail)
        self.sample = sample


def check_op(
    op: OpSpec, plugins: Plugins, *, examples: int = 25, devices: Sequence[str] = ("cpu",)
) -> CheckReport:
    """Run every check that applies to a registered operator.

    Args:
        op: the operator, registered together with its fake, gradient and batching rule.
        plugins: answers the hooks.
        examples: Hypothesis samples of each property.
        devices: where to run it, ``"cpu"`` and ``"cuda"`` for example.
    """
    checker = _Checker(op, plugins, examples)
    home = next((device for device in devices if _why_not(op, device) is None), "cpu")
    checks: list[tuple[str, Callable[[], str]]] = []
    for device in devices:
        checks.append((f"reference {device}", partial(checker.reference, device)))
        checks.append((f"fake {device}", partial(checker.fake, device)))
    checks += [
        ("gradient", checker.gradient),
        ("opcheck", partial(checker.opcheck, home)),
        ("vmap", partial(checker.vmap, home)),
        ("compile static", partial(checker.compiled, home, dynamic=False)),
        ("compile dynamic", partial(checker.compiled, home, dynamic=True)),
    ]
    entries = [_entry(name, check) for name, check in checks]
    return CheckReport(op.name, tuple(entries))


def quick_error(op: OpSpec, plugins: Plugins, device: str) -> float:
    """Largest error, relative above 1 and absolute below, over a handful of fixed samples.

    In float32 where the operator takes it.
    ``nan`` where the operator has no reference, no samples or no kernel for the device.
    """
    checker = _Checker(op, plugins, examples=0)
    reference = plugins.ask("cuda_ops_reference", op)
    if reference is None or checker.strategy is None or _why_not(op, device) is not None:
        return math.nan
    worst = 0.0
    dtype = torch.float32 if torch.float32 in op.dtypes else None
    for sample in checker.some(4, range(1, MAX_NUMEL + 1), dtype):
        actual = op.overload(*sample.make(device))
        expected = reference(*_widened(sample))
        for a, e in zip(_outputs(actual), _outputs(expected), strict=True):
            a, e = a.cpu().to(torch.float64), e.to(torch.float64)
            error = (a - e).abs() / e.abs().clamp(min=1.0)
            worst = max(worst, error.max().item() if error.numel() else 0.0)
    return worst


def _entry(name: str, check: Callable[[], str]) -> CheckEntry:
    try:
        return CheckEntry(name, True, check())
    except _NotRunError as reason:
        return CheckEntry(name, None, str(reason))
    except _FailedError as failure:
        return CheckEntry(name, False, str(failure), repr(failure.sample))
    except Exception as error:
        return CheckEntry(name, False, _text(error))


class _Checker:
    def __init__(self, op: OpSpec, plugins: Plugins, examples: int) -> None:
        self.op, self.plugins, self.examples = op, plugins, examples
        self.strategy: SearchStrategy[Sample] | None = plugins.ask("cuda_ops_samples", op)
        self.autograd = plugins.ask("cuda_ops_autograd", op)

    # --- properties: every drawn sample --------------------------------------------

    def reference(self, device: str) -> str:
        """The result against the float64 reference; shape, dtype and NaN included."""
        self._require(device)
        reference = self.plugins.ask("cuda_ops_reference", self.op)
        if reference is None:
            raise _NotRunError("no reference: implement cuda_ops_reference")
        worst = 0.0

        def property_(sample: Sample) -> None:
            nonlocal worst
            actual = self.op.overload(*sample.make(device))
            wide = _widened(sample)
            expected = reference(*wide)
            length = _reduction_length(self.op, sample)
            if length > 1:
                magnitudes = [v.abs() if _is_floating(v) else v for v in wide]
                magnitude = _largest(reference(*magnitudes))
            else:
                magnitude = min(1.0, _largest(wide))
            worst = max(worst, _deviation(actual, expected, magnitude, length))
            assert worst <= 1, f"error is {worst:.3g} times the tolerance"

        count = self._for_all(property_, self.examples)
        return f"{count}, worst error {worst:.2g} of the tolerance"

    def fake(self, device: str) -> str:
        """Shape, strides, dtype and device of the fake against the real output."""
        self._require(device)

        def property_(sample: Sample) -> None:
            args = sample.make(device)
            real = [_described(output) for output in _outputs(self.op.overload(*args))]
            with FakeTensorMode() as mode:
                fakes = [
                    mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args
                ]
                fake = [_described(output) for output in _outputs(self.op.overload(*fakes))]
            assert fake == real, f"the fake says {fake}, the real output is {real}"

        # Nothing to compute or compare, so more of them: layouts are what goes wrong.
        return self._for_all(property_, 4 * self.examples)

    # --- a few chosen samples ---------------------------------------------------------

    def gradient(self) -> str:
        """``gradcheck`` in float64, and one gradient whatever the layout of the incoming one."""
        self._require("cpu")
        if not self._has_gradient():
            raise _NotRunError(f"no gradient declared: no {self.op.name}_backward")
        if self.op.dtypes and torch.float64 not in self.op.dtypes:
            raise _NotRunError("gradcheck needs float64, which the operator does not take")

        def body(sample: Sample) -> None:
            args = self._arguments(sample, "cpu")
            torch.autograd.gradcheck(self.op.overload, args)
            _check_gradient_layouts(self.op, args)

        return self._for_some(body, 3, range(1, 41), dtype=torch.float64)

    def opcheck(self, device: str) -> str:
        """The four tests that torch has of a registration."""

        def body(sample: Sample) -> None:
            args = self._arguments(sample, device)
            results = torch.library.opcheck(self.op.overload, args, raise_exception=False)
            wrong = [f"{test}: {text}" for test, text in results.items() if text != "SUCCESS"]
            assert not wrong, "; ".join(wrong)

        self._require(device)
        return self._for_some(body, 3, range(1, 513))

    def vmap(self, device: str) -> str:
        """``torch.vmap`` against a loop: the mapped dim first, last, and on some tensors only."""
        op = self.op.overload

        def body(sample: Sample) -> None:
            # copies[i] are the arguments of the i-th call
            copies = [replace(sample, seed=sample.seed + i).make(device) for i in range(3)]
            for in_dims in _mappings(sample):
                args = [
                    copies[0][k]
                    if dim is None
                    else torch.stack([copy[k] for copy in copies], 0 if dim == 0 else -1)
                    for k, dim in enumerate(in_dims)
                ]
                looped = [
                    op(*(copies[0 if dim is None else i][k] for k, dim in enumerate(in_dims)))
                    for i in range(3)
                ]
                batched = _outputs(torch.vmap(op, in_dims=in_dims)(*args))
                for output, *parts in zip(batched, *map(_outputs, looped), strict=True):
                    torch.testing.assert_close(output, torch.stack(parts), equal_nan=True)

        self._require(device)
        if self.plugins.ask("cuda_ops_vmap", self.op) is None:
            raise _NotRunError("no batching rule: implement cuda_ops_vmap")
        return self._for_some(body, 4, range(1, 513))

    def compiled(self, device: str, *, dynamic: bool) -> str:
        """``torch.compile`` without graph breaks against eager, gradient included."""
        op = self.op.overload

        def called(*args: Any) -> Any:
            return op(*args)

        def results(function: Callable[..., Any], sample: Sample) -> list[Any]:
            args = self._arguments(sample, device)
            outputs = _outputs(function(*args))
            sums = [output.sum() for output in outputs if output.requires_grad]
            if sums and self._has_gradient():
                torch.autograd.backward(sums)
            gradients = [arg.grad for arg in args if isinstance(arg, torch.Tensor)]
            return [value.detach() for value in (*outputs, *gradients) if value is not None]

        def body(sample: Sample) -> None:
            torch.testing.assert_close(
                results(compiled, sample), results(called, sample), equal_nan=True
            )

        self._require(device)
        torch._dynamo.reset()
        compiled = torch.compile(called, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        # The second sample asks the compiled code for other sizes.
        return self._for_some(body, 2, range(2, 513))

    # --- drawing ------------------------------------------------------------------------

    def some(self, count: int, numel: range, dtype: torch.dtype | None = None) -> list[Sample]:
        """Up to ``count`` different samples of ordinary values, each tensor's size in ``numel``."""
        found: list[Sample] = []

        def adapted(arg: TensorArg) -> TensorArg:
            wanted = dtype if dtype is not None and arg.dtype.is_floating_point else arg.dtype
            return replace(arg, dtype=wanted)

        def collect(sample: Sample) -> None:
            sample = sample.with_tensors(adapted, "normal")
            fits = all(math.prod(arg.shape) in numel for arg in sample.tensors)
            if fits and len(found) < count and sample not in found:
                found.append(sample)

        assert self.strategy is not None
        generate = settings(_SETTINGS, max_examples=200, phases=[Phase.generate])
        generate(given(self.strategy)(collect))()
        if not found:
            sizes = f"{numel.start} to {numel.stop - 1} elements"
            raise _NotRunError(f"none of 200 samples has only tensors of {sizes}")
        return found

    def _for_some(
        self,
        body: Callable[[Sample], None],
        count: int,
        numel: range,
        dtype: torch.dtype | None = None,
    ) -> str:
        samples = self.some(count, numel, dtype)
        for sample in samples:
            try:
                body(sample)
            except Exception as error:
                raise _FailedError(_text(error), sample) from error
        return f"{len(samples)} samples"

    def _for_all(self, property_: Callable[[Sample], None], examples: int) -> str:
        last: list[Sample] = []

        def body(sample: Sample) -> None:
            last[:] = [sample]
            property_(sample)

        assert self.strategy is not None
        try:
            settings(_SETTINGS, max_examples=examples)(given(self.strategy)(body))()
        except Exception as error:
            if not last:
                raise
            # Hypothesis ends with the smallest failing sample.
            raise _FailedError(_text(error), last[0]) from error
        return f"{examples} samples"

    # --- what applies ---------------------------------------------------------------------

    def _require(self, device: str) -> None:
        reason = _why_not(self.op, device)
        if reason is None and self.strategy is None:
            reason = "no samples: give a signature line or implement cuda_ops_samples"
        if reason is not None:
            raise _NotRunError(reason)

    def _has_gradient(self) -> bool:
        declared = self.autograd is not None and not isinstance(self.autograd.backward, NoGradient)
        return declared or self.op.is_composite

    def _arguments(self, sample: Sample, device: str) -> tuple[Any, ...]:
        """The sample's arguments; where a gradient is declared, floating tensors ask for one."""
        args = sample.make(device)
        if not self._has_gradient():
            return args
        return tuple(
            arg.clone(memory_format=torch.contiguous_format).requires_grad_()
            if _is_floating(arg)
            else arg
            for arg in args
        )


def _why_not(op: OpSpec, device: str) -> str | None:
    kind = device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    if op.is_composite or kind.upper() in op.keys:
        return None
    return f"no {kind.upper()} kernel in this build"


def _mappings(sample: Sample) -> list[tuple[Any, ...]]:
    """Which dim of which argument to map: all first, all last, then each tensor alone."""
    tensors = [k for k, arg in enumerate(sample.args) if isinstance(arg, TensorArg)]
    positions = range(len(sample.args))
    everything = [tuple(dim if k in tensors else None for k in positions) for dim in (0, -1)]
    alone = [tuple(0 if k == mapped else None for k in positions) for mapped in tensors]
    return everything + (alone if len(tensors) > 1 else [])


def _check_gradient_layouts(op: OpSpec, args: tuple[Any, ...]) -> None:
    inputs = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.requires_grad]
    outputs = [output for output in _outputs(op.overload(*args)) if output.requires_grad]
    dense = [torch.ones_like(output) for output in outputs]
    plain = torch.autograd.grad(outputs, inputs, dense, retain_graph=True)
    layouts = {
        "expanded": [torch.ones((), dtype=o.dtype).expand(o.shape) for o in outputs],
        "stepped": [torch.ones(*o.shape, 2, dtype=o.dtype)[..., 0] for o in outputs],
    }
    for name, incoming in layouts.items():
        actual = torch.autograd.grad(outputs, inputs, incoming, retain_graph=True)
        for a, e in zip(actual, plain, strict=True):
            assert torch.allclose(a, e), f"the gradient changes where the incoming one is {name}"


# --- comparing ------------------------------------------------------------------------------


def _outputs(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _described(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a fake must get right; the stride of a dim that is never stepped along means nothing."""
    used = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(stride if size > 1 and tensor.numel() else None for size, stride in used)
    return tuple(tensor.shape), strides, tensor.dtype, str(tensor.device)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _widened(sample: Sample) -> list[Any]:
    return [v.to(torch.float64) if _is_floating(v) else v for v in sample.make("cpu")]


def _largest(values: Any) -> float:
    """The largest finite magnitude among floating tensors."""
    finite = [v.abs()[v.isfinite()] for v in _outputs(values) if _is_floating(v)]
    return max((v.max().item() for v in finite if v.numel()), default=0.0)


def _reduction_length(op: OpSpec, sample: Sample) -> int:
    """How many elements one result may be summed from: 1 if elementwise, else by the core dims."""
    if op.signature is None:
        return max((size for arg in sample.tensors for size in arg.shape), default=1)
    if op.signature.is_elementwise:
        return 1
    tensors = tensor_arguments(op, sample.make("meta"))
    bound = check_arguments(op, tensors)
    kept = {dim for dims in op.signature.outputs for dim in dims}
    summed = math.prod(size for dim, size in bound.items() if dim not in kept)
    longest: int = max(2, summed, *bound.values())
    return longest


def _deviation(actual: Any, expected: Any, magnitude: float, length: int) -> float:
    """The largest error in units of the tolerance; NaN equals NaN, an infinity only itself.

    ``magnitude`` is the size of what was added up: cancellation makes a small
    result as wrong as its summands.
    """
    worst = 0.0
    for a, e in zip(_outputs(actual), _outputs(expected), strict=True):
        assert a.shape == e.shape, f"shape {list(a.shape)}, the reference has {list(e.shape)}"
        a = a.cpu()
        if not a.is_floating_point():
            assert torch.equal(a, e.to(a.dtype)), "differs from the reference"
            continue
        info = torch.finfo(a.dtype)
        # What overflows the dtype is infinite in the reference too.
        e = e.to(a.dtype).to(torch.float64)
        allowed = EPSILONS[a.dtype] * info.eps * math.sqrt(length) * (e.abs() + magnitude)
        a = a.to(torch.float64)
        same = (a == e) | (a.isnan() & e.isnan())
        error = torch.where(same, 0.0, (a - e).abs() / (allowed + info.tiny))
        error = torch.where(same | (a.isfinite() & e.isfinite()), error, math.inf)
        worst = max(worst, error.max().item() if error.numel() else 0.0)
    return worst


def _text(error: Exception) -> str:
    plain = isinstance(error, AssertionError)
    return str(error) if plain else f"{type(error).__name__}: {error}"
