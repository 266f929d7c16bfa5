"""The operator under test: its spec, and what its hooks or :func:`describe` say about it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, get_args

import torch
from hypothesis.strategies import SearchStrategy

from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.derive.checks import names_text
from cuda_ops.derive.gradient import why_none
from cuda_ops.derive.no_gradient import NoGradient
from cuda_ops.dispatch.described import foreign_spec, has_kernel
from cuda_ops.errors import CudaOpsError, ManifestError, PluginError
from cuda_ops.names import apart, unknown
from cuda_ops.spec import NO_REFERENCE, AutocastPolicy, AutocastWord, Claims, OpSpec
from cuda_ops.testing import samples
from cuda_ops.testing.samples import Sample

#: ``declared``: there is a formula; ``refused``: asking for a gradient raises and says so;
#: ``none``: the operator does not claim to be differentiable.
Gradient = Literal["declared", "refused", "none"]


#: What is said of results that nothing else is compared with.
ITSELF = "the reference is this very kernel, in its widest dtype"


class HookAnswers(Protocol):
    """Anything that answers hooks: the plugin manager, or a stand-in."""

    def ask(self, hook_name: str, op: OpSpec, /) -> Any: ...

    def peers(self, op: OpSpec, /) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class Origin:
    """How another process finds the same operator."""

    #: Operator roots to add, and a Python file to run.
    roots: tuple[str, ...] = ()
    file: str = ""
    #: The library to load, for an operator that cuda_ops loads.
    library: str = ""

    @property
    def options(self) -> list[str]:
        """Options of ``python -m cuda_ops.testing``, which finds the library by the sources."""
        named = [("--root", root) for root in self.roots]
        named += [("--file", self.file)] if self.file else []
        return [word for option in named for word in option]


@dataclass(frozen=True)
class Subject:
    """Everything that a check may ask about an operator."""

    op: OpSpec
    strategy: SearchStrategy[Sample] | None
    reference: Callable[..., Any] | None
    gradient: Gradient
    #: Positions of the arguments that a declared gradient covers; ``None`` for all.
    differentiable: tuple[int, ...] | None
    autocast: AutocastPolicy | None
    vmap: bool
    sharding: Callable[..., Any] | None
    claims: Claims
    origin: Origin
    #: Positions of the arguments that have a derivative in forward mode of the operator's own.
    forward: tuple[int, ...] = ()
    #: Further samples for compute-sanitizer.
    kernel_samples: tuple[Sample, ...] = ()
    #: Why there is no gradient, if it is known.
    why_no_gradient: str = ""
    #: What the strategy drew, in rounds; checks choose from these.
    rounds: list[list[Sample]] = field(default_factory=list, init=False, repr=False, compare=False)
    #: What :func:`cuda_ops.testing.draw.chosen` chose, by its ``Draw``.
    #: A changed copy, as :func:`dataclasses.replace` makes one, chooses anew.
    drawn: dict[Any, tuple[Sample, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def by_line(self) -> bool:
        """Whether the strategy is made of the signature line and of what the binding says."""
        return self.strategy is not None and self.strategy is samples.strategy(self.op)

    @property
    def name(self) -> str:
        """``silu``, or with its namespace if that is not ``cuda_ops``."""
        return self.op.key

    @property
    def incomparable(self) -> str:
        """Why the operator's results cannot be compared; empty if they can."""
        if self.strategy is None:
            if (undrawn := samples.undrawn(self.op)) is None:
                return "no samples: give a signature line or implement cuda_ops_samples"
            return f"no samples: none are drawn of {undrawn}: implement cuda_ops_samples"
        if self.reference is None:
            return f"{NO_REFERENCE}: implement cuda_ops_reference"
        return ""

    def is_its_own_reference(self, device: str) -> bool:
        """Tells whether the reference is the very kernel under test, called in its widest dtype."""
        return self.reference is self.op.overload and device.startswith("cpu")

    @property
    def unreachable(self) -> str:
        """Why no other process can find the operator; empty if one can."""
        if not self.op.foreign or self.op.guest or Path(self.origin.file).is_file():
            return ""
        return "described outside of any file that another process could run"

    def why_not(self, device: str) -> str:
        """Returns why the operator cannot run on a device; empty if it can."""
        return why_not(self.op, device)


def why_not(op: OpSpec, device: str) -> str:
    """Returns why an operator cannot run on a device; empty if it can."""
    kind = device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    if op.is_composite or kind.upper() in op.keys:
        return ""
    return f"no {kind.upper()} kernel in this build"


def subject_of(
    op: OpSpec,
    plugins: HookAnswers,
    origin: Origin | None = None,
    forward: tuple[int, ...] = (),
) -> Subject:
    """Returns what the hooks say about a registered operator. ``forward`` are the positions of the
    arguments that have a derivative in forward mode.
    """
    autograd = plugins.ask("cuda_ops_autograd", op)
    gradient: Gradient = "none"
    if op.is_composite or (op.foreign and _is_differentiable(op.qualname)):
        gradient = "declared"
    elif autograd is not None:
        gradient = "refused" if isinstance(autograd.backward, NoGradient) else "declared"
    return Subject(
        op=op,
        strategy=_strategy(op, plugins),
        reference=plugins.ask("cuda_ops_reference", op),
        gradient=gradient,
        differentiable=None if autograd is None else autograd.inputs,
        autocast=plugins.ask("cuda_ops_autocast", op),
        vmap=_is_mapped(op, plugins),
        sharding=plugins.ask("cuda_ops_sharding", op),
        claims=_claims(op, plugins),
        origin=origin or Origin(),
        forward=forward,
        kernel_samples=tuple(plugins.ask("cuda_ops_kernel_samples", op) or ()),
        why_no_gradient="" if op.is_composite or op.foreign else why_none(op, autograd),
    )


def _is_differentiable(name: str) -> bool:
    """Tells whether the library that registers an operator gave it a gradient."""
    return any(has_kernel(name, key) for key in ("Autograd", "AutogradCPU", "AutogradCUDA"))


def _claims(op: OpSpec, plugins: HookAnswers) -> Claims:
    claims: Claims = plugins.ask("cuda_ops_claims", op) or Claims()
    if not op.nondeterministic:
        return claims
    return replace(claims, deterministic=False, reason=claims.reason or "it is .nondeterministic()")


def _is_mapped(op: OpSpec, plugins: HookAnswers) -> bool:
    """Tells whether ``torch.vmap`` takes it, by its own rule or, if composed, its parts' rules."""
    if op.foreign:
        return op.is_composite or has_kernel(op.qualname, "FuncTorchBatched")
    if op.is_composite:
        from cuda_ops.registry import registry

        return all(find(registry().part_of(op, part)).vmap for part in op.calls)
    return plugins.ask("cuda_ops_vmap", op) is not None


def _strategy(op: OpSpec, plugins: HookAnswers) -> SearchStrategy[Sample] | None:
    """Returns the strategy to draw from, which names the hook if it draws unsuitable arguments."""
    strategy = plugins.ask("cuda_ops_samples", op)
    if strategy is None or strategy is samples.strategy(op):
        return strategy
    hook = f"{op.qualname}: hook cuda_ops_samples: expected"
    if not isinstance(strategy, SearchStrategy):
        raise PluginError(f"{hook} a Hypothesis strategy, got {type(strategy).__name__}")
    least = sum(not argument.has_default_value() for argument in op.parsed.arguments)

    def checked(sample: Any) -> Sample:
        if not isinstance(sample, Sample):
            raise PluginError(f"{hook} a strategy of Sample, got one of {type(sample).__name__}")
        if not least <= len(sample.args) <= len(op.argument_names):
            names = ", ".join(op.argument_names)
            raise PluginError(f"{hook} arguments {names}, got {len(sample.args)} in {sample!r}")
        return sample

    return strategy.map(checked)


def find(name: str) -> Subject:
    """Returns the operator of this name; loads one of ours, looks up a described one.

    Raises:
        CudaOpsError: there is none, or it cannot be used.
    """
    if name in _described:
        return _described[name]
    from cuda_ops.registry import registry

    key = registry().key_of(name)
    op, forward = registry().registered(key), ()
    if op is None:
        operator = _operator(key, name)
        op, tangents = operator.spec, operator.now.forward
        forward = tangents.inputs if tangents is not None else ()
    pair, library = registry().pairs()[op.pair], registry().library_of(op.pair)
    found_anyway = [BUILTIN_ROOT, *(root.resolve() for root in registry().plugins.roots())]
    roots = () if pair.root in found_anyway else (str(pair.root),)
    origin = Origin(roots, library=str(library or ""))
    return subject_of(op, registry().plugins, origin, forward)


def _operator(key: str, name: str) -> Any:
    """Returns the operator with this key; errors call it by ``name``."""
    from cuda_ops.registry import registry

    try:
        registry().public(key)
    except AttributeError:
        pairs = registry().pairs()
        if apart(key)[0] not in {pair.namespace for pair in pairs.values()}:
            hint = f"{name} is not described; call cuda_ops.testing.describe({name!r})"
            raise CudaOpsError(hint) from None
        raise CudaOpsError(unknown([name], pairs)) from None
    if (operator := registry().loaded(key)) is None:
        raise CudaOpsError(
            f"{name} is a guest; describe it with cuda_ops_guest in "
            f"{registry().pairs()[key].plugin}, or with cuda_ops.testing.describe"
        )
    return operator


# --- operators of other libraries ------------------------------------------------------

_described: dict[str, Subject] = {}

_REGISTERED = "an operator that torch.library knows, such as 'mylib::softmax'"


def described() -> dict[str, Subject]:
    """Returns all subjects that :func:`describe` made, by name."""
    return dict(_described)


def describe(
    name: str,
    signature: str = "",
    *,
    reference: Callable[..., Any],
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    strategy: SearchStrategy[Sample] | None = None,
    differentiable: bool = True,
    autocast: AutocastPolicy | None = None,
    sharding: Callable[..., Any] | None = None,
    claims: Claims | None = None,
    kernel_samples: Sequence[Sample] = (),
) -> Subject:
    """Describes an operator of another library, for the same checks.

    Call it at the top of a module: another process runs that file to find the operator.

    Args:
        name: ``"mylib::softmax"``, registered with ``torch.library``.
        signature: its NumPy-style line, ``"(n)->(n)"``; or give a ``strategy`` instead.
        reference: a slow, obvious function of CPU tensors, floating ones in float64.
        dtypes: the dtypes that its tensor arguments may have.
        strategy: inputs to draw, as the hook ``cuda_ops_samples`` gives them.
        differentiable: whether a floating or complex operator claims a gradient.
        autocast: the policy that it claims; ``None`` claims that autocast changes nothing.
        sharding: its DTensor rule, as for ``register_sharding``.
        claims: what else it promises, or does not.
        kernel_samples: calls for compute-sanitizer that reach kernels for larger problems.

    Returns:
        The subject, for :func:`cuda_ops.testing.check_op`.

    Raises:
        ValueError: torch.library knows no such operator, the signature line does not fit its
            schema or leaves nothing to draw from, or another argument is not what is said above.

    Example::

        subject = describe("mylib::softsign", "()->()", reference=lambda x: x / (1 + x.abs()))
    """
    _check_described(name, signature, reference, dtypes, strategy, sharding, claims, kernel_samples)
    try:
        op = foreign_spec(name, signature, dtypes)
    except ManifestError as error:
        raise ValueError(str(error)) from None
    except RuntimeError:
        refuse("describe", "name", _REGISTERED, repr(name))
    _check_autocast(autocast, op)
    if strategy is None:
        strategy = samples.strategy(op)
    if strategy is None:
        raise ValueError(f"{name}: give a signature line, or a strategy for its arguments")
    inexact = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    file = sys._getframe(1).f_globals.get("__file__")  # a notebook has none
    subject = Subject(
        op=op,
        strategy=strategy,
        reference=reference,
        gradient="declared" if differentiable and inexact else "none",
        differentiable=None,
        autocast=autocast,
        vmap=op.is_composite or has_kernel(name, "FuncTorchBatched"),
        sharding=sharding,
        claims=claims or Claims(),
        origin=Origin(file=str(Path(file).resolve()) if file else ""),
        kernel_samples=tuple(kernel_samples),
    )
    _described[name] = subject
    return subject


def refuse(function: str, argument: str, expected: str, got: str) -> NoReturn:
    """Refuses an argument of a function of the kit."""
    raise ValueError(f"{function}: argument {argument!r}: expected {expected}, got {got}")


def _check_described(
    name: Any,
    signature: Any,
    reference: Any,
    dtypes: Any,
    strategy: Any,
    sharding: Any,
    claims: Any,
    kernel_samples: Any,
) -> None:
    """Refuses what :func:`describe` is given where a check would fail later, or never run."""
    listed = (list, tuple, frozenset, set)
    for argument, fits, expected, given in (
        ("name", isinstance(name, str), _REGISTERED, name),
        ("signature", isinstance(signature, str), "a line such as '(n)->(n)'", signature),
        ("reference", callable(reference), "a function", reference),
        (
            "dtypes",
            isinstance(dtypes, listed)
            and bool(dtypes)
            and all(isinstance(dtype, torch.dtype) for dtype in dtypes),
            "a list of dtypes, at least one",
            dtypes,
        ),
        (
            "strategy",
            strategy is None or isinstance(strategy, SearchStrategy),
            "a Hypothesis strategy",
            strategy,
        ),
        ("sharding", sharding is None or callable(sharding), "a function", sharding),
        ("claims", claims is None or isinstance(claims, Claims), "Claims", claims),
        (
            "kernel_samples",
            isinstance(kernel_samples, listed)
            and all(isinstance(sample, Sample) for sample in kernel_samples),
            "a list of Sample",
            kernel_samples,
        ),
    ):
        if not fits:
            refuse("describe", argument, expected, repr(given))


def _check_autocast(policy: Any, op: OpSpec) -> None:
    words = get_args(AutocastWord)
    named = policy if isinstance(policy, Mapping) else {} if policy is None else {None: policy}
    for name, word in named.items():
        if word not in words or name not in (None, *op.argument_names):
            expected = f"{names_text(words)}, or one of them for each of some arguments by name"
            refuse("describe", "autocast", expected, repr(policy))
