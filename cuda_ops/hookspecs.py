"""The hooks: everything that a plugin can say about operators.

A plugin is a module or object whose functions are marked with ``@hookimpl``.
The file ``cuda_ops/ops/<op>.py`` is the plugin of one pair and is asked only
about the operators of that pair. Installed packages add plugins through the
entry-point group ``cuda_ops`` and are asked about every operator. The
derivation plugin (``cuda_ops/derive/rules.py``) answers last, from the schema and
the signature line, so a plugin says only what is special about an operator.

A hook about one operator stops at the first answer that is not ``None``;
``cuda_ops_peers`` joins all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pluggy

from cuda_ops.spec import (
    AutocastPolicy,
    AutocastWord,
    Autograd,
    BenchmarkCase,
    Candidates,
    Claims,
    GuestOperator,
    OpSpec,
    Peer,
    ShardingRule,
)

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from cuda_ops.testing.samples import Sample

PROJECT = "cuda_ops"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def cuda_ops_roots() -> Iterable[Path]:  # type: ignore[empty-body]
    """Folders with a ``kernels/`` and a ``bindings/`` folder each.

    Fires when operators are first listed. All answers are joined; the same
    operator of one namespace in two of them is an error, and in one that was
    added by hand leaves the installed one aside.
    """


@hookspec(firstresult=True)
def cuda_ops_guest() -> list[GuestOperator] | None:
    """The operators of a guest, which says less about itself than a binding does.

    Asked of ``ops/<guest>.py`` in the guest's root alone; its other hooks are then asked about
    each operator. Fires when the guest's library is loaded or reloaded.
    """


@hookspec(firstresult=True)
def cuda_ops_fake(op: OpSpec) -> Callable[..., Any] | None:
    """The operator on tensors without data.

    The callable takes the operator's arguments (sizes may be symbolic) and
    returns empty outputs with the shape, strides, dtype and device of the
    real ones, and raises the errors that the real one raises. Arguments that
    the signature line and ``.dtypes`` refuse never reach it.
    Fires when the operator's library is loaded or reloaded.
    """


@hookspec(firstresult=True)
def cuda_ops_autograd(op: OpSpec) -> Autograd | None:
    """The gradient formula. Fires when the operator's library is loaded or reloaded."""


@hookspec(firstresult=True)
def cuda_ops_autocast(op: OpSpec) -> AutocastPolicy | None:
    """What ``torch.autocast`` does with the tensor arguments.

    ``"lower_precision"`` casts floating arguments to the autocast dtype,
    ``"float32"`` casts them to float32, ``"promote"`` to what
    ``torch.promote_types`` makes of them. A mapping from names says so for
    some, and leaves the others as they are.
    Fires when the operator's library is loaded or reloaded.
    """


@hookspec(firstresult=True)
def cuda_ops_public(op: OpSpec) -> Callable[..., Any] | None:
    """What ``cuda_ops.<op>`` is, where that is more than the operator: other arguments or shapes.

    The callable works through ``op.function`` and those of its siblings, and brings the
    parameters and the docstring. Fires when the operator's library is loaded or reloaded.
    """


@hookspec(firstresult=True)
def cuda_ops_vmap(op: OpSpec) -> Callable[..., Any] | None:
    """The batching rule, in the form of :func:`torch.library.register_vmap`.

    ``rule(info, in_dims, *args) -> (outputs, out_dims)``. Not for composed operators,
    whose parts are mapped.
    Fires when the operator's library is loaded or reloaded.
    """


@hookspec(firstresult=True)
def cuda_ops_sharding(op: OpSpec) -> Callable[..., list[ShardingRule]] | None:
    """The DTensor rule, in the form of ``torch.distributed.tensor.experimental.register_sharding``.

    The callable takes the operator's arguments with each tensor replaced by
    its DTensor spec, and returns the acceptable shardings of one mesh dim.
    Fires when the operator is loaded and DTensor is in use.
    """


@hookspec(firstresult=True)
def cuda_ops_flops(op: OpSpec) -> Callable[..., int] | None:
    """What ``torch.utils.flop_counter.FlopCounterMode`` counts for a call.

    The callable takes the operator's arguments with each tensor replaced by its shape, and returns
    floating-point operations, a multiply-add counting as two. Not for composed operators, whose
    parts are counted. Fires when the operator's library is loaded or reloaded.
    """


@hookspec(firstresult=True)
def cuda_ops_reference(op: OpSpec) -> Callable[..., Any] | None:
    """What the operator should compute: a slow, obvious function of CPU tensors.

    It gets the arguments in float64 where they were floating, and its result
    is compared with the operator's in the dtype under test.
    Fires when an operator is checked.
    """


@hookspec(firstresult=True)
def cuda_ops_samples(op: OpSpec) -> SearchStrategy[Any] | None:
    """Inputs to test with: a Hypothesis strategy of :class:`cuda_ops.testing.Sample`.

    Fires when an operator is checked.
    """


@hookspec(firstresult=True)
def cuda_ops_kernel_samples(op: OpSpec) -> list[Sample] | None:
    """Calls that run kernels which drawn samples, of up to 4096 elements, are too small to reach.

    Fires when an operator is called under compute-sanitizer, which slows kernels down a
    hundredfold: few calls, and no larger than it takes to have each kernel chosen.
    """


@hookspec(firstresult=True)
def cuda_ops_claims(op: OpSpec) -> Claims | None:
    """What the checks may expect: equal bits on each call, or not; a wider tolerance, and why.

    Fires when an operator is checked.
    """


@hookspec(firstresult=True)
def cuda_ops_benchmarks(op: OpSpec) -> list[BenchmarkCase] | None:
    """Shapes worth measuring, each with its bytes and FLOPs.

    Fires when an operator is timed.
    """


@hookspec
def cuda_ops_peers(op: OpSpec) -> Mapping[str, Callable[..., Any] | Peer] | None:
    """Peers that compute the same, by name: callables that take the operator's arguments.

    All answers are joined, so that any package can add a peer; where two have one
    name the first plugin's counts. Without an answer, the reference of a plugin is
    the peer; ``{}`` is for no peers. Fires when an operator is timed.
    """


@hookspec(firstresult=True)
def cuda_ops_candidates(op: OpSpec) -> Candidates | None:
    """Launch configurations to choose among by measuring, for a binding that has knobs.

    Fires when an operator is tuned. A choice may change how sums round, and nothing else: one whose
    result differs by more than the operator's tolerance is refused.
    """


@hookspec(historic=True)
def cuda_ops_op_loaded(op: OpSpec, library: Path, generation: int) -> None:
    """An operator was registered from ``library``; ``generation`` counts its reloads from 0.

    Historic: a plugin that arrives later is told of every earlier load.
    """


def _are_candidates(answer: Any) -> bool:
    if not isinstance(answer, Candidates) or not callable(answer.sizes):
        return False
    settings: Any = answer.settings  # a plugin may have put anything there
    return isinstance(settings, Mapping) and all(
        isinstance(name, str)
        and isinstance(knobs, Mapping)
        and all(isinstance(value, int) for value in knobs.values())
        for name, knobs in settings.items()
    )


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    def is_list(answer: Any) -> bool:
        return isinstance(answer, (list, tuple)) and all(isinstance(one, kind) for one in answer)

    return is_list


def _are_paths(answer: Any) -> bool:
    return (
        isinstance(answer, Iterable)
        and not isinstance(answer, str)
        and all(isinstance(root, (str, os.PathLike)) for root in answer)
        and all(isinstance(os.fspath(root), str) for root in answer)
    )


def _is_formula(answer: Any) -> bool:
    is_formula = isinstance(answer, Autograd)
    return is_formula and callable(answer.setup_context) and callable(answer.backward)


def _is_autocast_policy(answer: Any) -> bool:
    words = answer.values() if isinstance(answer, Mapping) else [answer]
    return all(word in get_args(AutocastWord) for word in words)


def _is_strategy(answer: Any) -> bool:
    from hypothesis.strategies import SearchStrategy

    return isinstance(answer, SearchStrategy)


def _are_samples(answer: Any) -> bool:
    kit = sys.modules.get("cuda_ops.testing.samples")  # which made them, and is above this module
    return kit is not None and _is_list_of(kit.Sample)(answer)


def _are_peers(answer: Any) -> bool:
    return isinstance(answer, Mapping) and all(
        isinstance(name, str) and (callable(peer) or isinstance(peer, Peer))
        for name, peer in answer.items()
    )


_WORDS = ", ".join(map(repr, get_args(AutocastWord)))
#: What the answer to each hook has to be where it is not ``None``, in words and as a check.
ANSWERS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "cuda_ops_roots": ("an iterable of paths", _are_paths),
    "cuda_ops_guest": ("a list of GuestOperator", _is_list_of(GuestOperator)),
    "cuda_ops_fake": ("a callable", callable),
    "cuda_ops_autograd": ("an Autograd of two callables", _is_formula),
    "cuda_ops_autocast": (f"one of {_WORDS}, or a mapping to them", _is_autocast_policy),
    "cuda_ops_public": ("a callable", callable),
    "cuda_ops_vmap": ("a callable", callable),
    "cuda_ops_sharding": ("a callable", callable),
    "cuda_ops_flops": ("a callable", callable),
    "cuda_ops_reference": ("a callable", callable),
    "cuda_ops_samples": ("a Hypothesis strategy", _is_strategy),
    "cuda_ops_kernel_samples": ("a list of Sample", _are_samples),
    "cuda_ops_claims": ("a Claims", lambda answer: isinstance(answer, Claims)),
    "cuda_ops_benchmarks": ("a list of BenchmarkCase", _is_list_of(BenchmarkCase)),
    "cuda_ops_peers": ("a mapping from names to callables or Peer", _are_peers),
    "cuda_ops_candidates": ("a Candidates of settings and sizes", _are_candidates),
    "cuda_ops_op_loaded": ("anything", lambda answer: True),  # nothing reads it
}
