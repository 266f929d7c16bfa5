"""Puts modules of ``cuda_ops.nn`` into a model that there is, in place of torch's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

import cuda_ops
from cuda_ops.derive.checks import dtype_name, dtypes_text
from cuda_ops.integrations import models
from cuda_ops.integrations.models import Conversion
from cuda_ops.integrations.moe import runs_cuda_ops
from cuda_ops.nn.activations import GELU, ReLU, SiLU
from cuda_ops.nn.dropout import Dropout
from cuda_ops.nn.linear import FusedLinearGELU
from cuda_ops.nn.loss import CrossEntropyLoss
from cuda_ops.nn.norms import LayerNorm, RMSNorm
from cuda_ops.ops._moe_checks import FLOATING
from cuda_ops.runtime.arguments import check_flag


def convert(
    model: torch.nn.Module, *, fuse: bool = True, dropout: bool = False, group: Any = None
) -> Conversion:
    """Makes a model run cuda_ops, in place, and says what it changed and what not, and why.

    A module of ``torch.nn`` becomes the one of the same name here, if it is of exactly that class:
    SiLU, GELU(approximate="tanh"), ReLU, LayerNorm, RMSNorm and CrossEntropyLoss. It stays the same
    object, with its parameters, hooks, mode and place in the model, and ``isinstance`` still finds
    torch's class. In a ``torch.nn.Sequential``, a Linear followed by such a GELU becomes a
    FusedLinearGELU with the Linear's parameters, followed by an Identity. Sparse blocks of Hugging
    Face's models are changed as by ``cuda_ops.integrations.convert``. The keys of the state dict
    stay as they were, and a second call changes nothing.

    Call it before ``torch.compile``, before the model is sharded or quantized, and before anything
    that sets a ``forward``; before or after the optimizer is made.

    Args:
        model: any module.
        fuse: False leaves a Linear and its GELU apart. Say so where code takes single layers out of
            a Sequential.
        dropout: also change Dropout, which then keeps no mask, and draws other random numbers than
            before from the same seed.
        group: the ranks that share the experts of sparse blocks, as in
            ``cuda_ops.integrations.use_moe``.

    Returns: a report, whose ``replaced`` and ``left`` are texts by the names of modules; ``print``
    shows a line for all that are alike.
    Errors: TypeError for a model that is not a module, or a fuse or dropout that is no bool;
    RuntimeError for a group that is none; all are said before anything is changed.

    Example:
    >>> model = torch.nn.Sequential(
    ...     torch.nn.LayerNorm(8), torch.nn.Linear(8, 32), torch.nn.GELU("tanh"), torch.nn.GELU()
    ... )
    >>> found = cuda_ops.nn.convert(model)
    >>> [*found.replaced], [*found.left]
    (['0', '1', '2'], ['3'])
    >>> found.replaced["0"]
    'LayerNorm -> cuda_ops.nn.LayerNorm'
    """
    models.check_call("cuda_ops.nn.convert", model, group)
    check_flag("cuda_ops.nn.convert", "fuse", fuse)
    check_flag("cuda_ops.nn.convert", "dropout", dropout)
    work = _Work(dropout)
    work.convert_blocks(model, group)
    if fuse:
        work.fuse(model)
    for name, module in [*model.named_modules()]:
        if id(module) not in work.settled and not _is_ours(module):
            work.convert_module(name, module)
    names = [name for name, _ in model.named_modules()]  # in whose order people read
    replaced, left = ({n: of[n] for n in names if n in of} for of in (work.replaced, work.left))
    return Conversion(replaced, left, "nothing to change")


@dataclass
class _Work:
    """What one call of :func:`convert` has done so far."""

    dropout: bool
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    #: The ids of modules that nothing else is done to.
    settled: set[int] = field(default_factory=set)
    _unusable: dict[str, str] = field(default_factory=dict)

    def convert_blocks(self, model: torch.nn.Module, group: Any) -> None:
        blocks = {n: b for n, b in models.sparse_blocks(model) if not _is_ours(b)}
        before = {name for name, block in blocks.items() if runs_cuda_ops(block, group)}
        found = models.convert(model, group)
        self.replaced |= {n: text for n, text in found.replaced.items() if n not in before}
        self.left |= {n: text for n, text in found.left.items() if n in blocks}
        for name in found.replaced:  # whose experts no longer call the modules in them
            self.settled |= {id(m) for m in blocks[name].get_submodule("experts").modules()}

    def fuse(self, model: torch.nn.Module) -> None:
        parents = Counter(id(child) for m in model.modules() for child in m._modules.values())
        for path, module in [*model.named_modules()]:
            if type(module) is not torch.nn.Sequential or "forward" in vars(module):
                continue
            for (first, linear), (second, gelu) in pairwise([*module._modules.items()]):
                if not _is_linear_before_gelu(linear, gelu):
                    continue
                why = self._why_not_fused(linear, gelu, parents[id(linear)])
                name, name_of_gelu = (f"{path}.{k}" if path else k for k in (first, second))
                if why:
                    self.left[name] = f"Linear before a GELU: {why}"
                    continue
                module._modules[first] = _fused(linear)
                module._modules[second] = torch.nn.Identity().train(gelu.training)
                self.replaced[name] = "Linear -> cuda_ops.nn.FusedLinearGELU"
                self.replaced[name_of_gelu] = "GELU -> Identity, behind a FusedLinearGELU"

    def convert_module(self, name: str, module: torch.nn.Module) -> None:
        rule = next((rule for rule in _RULES if isinstance(module, rule.theirs)), None)
        if rule is None:
            return
        kind = type(module).__name__
        why = _why_left(module, rule.theirs) or rule.why_left(module) or self._why_unusable(rule.op)
        if rule.ours is Dropout and not self.dropout:
            why = why or "it would draw other random numbers; convert(..., dropout=True) takes it"
        if why:
            self.left[name] = f"{kind}: {why}"
        else:
            # The same object: hooks, parameters and whatever else holds it see no other module.
            module.__class__ = rule.ours
            self.replaced[name] = f"{kind} -> cuda_ops.nn.{rule.ours.__name__}"

    def _why_not_fused(self, linear: Any, gelu: Any, parents: int) -> str:
        if parents > 1:
            return "it is part of another module too, maybe without a GELU"
        if _has_hooks(linear) or _has_hooks(gelu):
            return "hooks on one of them, which would see other values or none"
        return _why_left(linear, torch.nn.Linear) or self._why_unusable("fused_linear_gelu")

    def _why_unusable(self, op: str) -> str:
        """Returns why an operator cannot be called; it is loaded otherwise, for torch.compile."""
        if op not in self._unusable:
            self._unusable[op] = ""
            try:
                getattr(cuda_ops, op)
            except Exception as error:  # a plugin's code may raise anything
                self._unusable[op] = f"cuda_ops.{op} cannot be used: {error}"
        return self._unusable[op]


# --- why not ----------------------------------------------------------------------------------


def _in_place(module: Any) -> str:
    return "inplace=True, and the operator writes a tensor of its own" if module.inplace else ""


def _exact(module: Any) -> str:
    if module.approximate == "tanh":
        return ""
    return "exact, where cuda_ops.gelu_approx is the tanh approximation, off by up to 0.0005"


def _without_parameters(module: Any) -> str:
    missing = [name for name in ("weight", "bias") if getattr(module, name, 0) is None]
    if not missing:
        return ""
    return f"no {' and no '.join(missing)}, which would be made anew in each call"


def _weighted(module: Any) -> str:
    return "" if module.weight is None else "it weights classes, which the operator cannot"


@dataclass(frozen=True)
class _Rule:
    theirs: type[torch.nn.Module]
    ours: type[torch.nn.Module]
    op: str
    why_left: Callable[[Any], str]


_RULES = (
    _Rule(torch.nn.SiLU, SiLU, "silu", _in_place),
    _Rule(torch.nn.GELU, GELU, "gelu_approx", _exact),
    _Rule(torch.nn.ReLU, ReLU, "relu", _in_place),
    _Rule(torch.nn.LayerNorm, LayerNorm, "layer_norm", _without_parameters),
    _Rule(torch.nn.RMSNorm, RMSNorm, "rms_norm", _without_parameters),
    _Rule(torch.nn.CrossEntropyLoss, CrossEntropyLoss, "softmax_cross_entropy", _weighted),
    _Rule(torch.nn.Dropout, Dropout, "dropout", _in_place),
)


def _why_left(module: torch.nn.Module, theirs: type[torch.nn.Module]) -> str:
    """Returns why a module is not just torch's, with parameters that the operators take."""
    kind = theirs.__name__
    if is_parametrized(module):
        return "parametrized, by a class that torch.nn.utils.parametrize made for it"
    if type(module) is not theirs:
        own = type(module).forward is not theirs.forward
        return f"a subclass of {kind} with {'a forward' if own else 'code'} of its own"
    if "forward" in vars(module):
        return "a forward was set on it, which would be lost"
    return next(_unfit_parameters(module), "")


def _unfit_parameters(module: torch.nn.Module) -> Iterator[str]:
    for name, parameter in module.named_parameters():
        kind = type(parameter)
        if kind is not torch.nn.Parameter:
            yield f"its {name} is a {kind.__name__}; convert before it is sharded or quantized"
        elif parameter.dtype not in FLOATING:
            taken = dtypes_text(FLOATING)
            yield f"its {name} has dtype {dtype_name(parameter.dtype)}, not {taken}"
        elif parameter.device.type not in ("cpu", "cuda", "meta"):
            yield f"its {name} is on {parameter.device.type}, for which there are no kernels"


def _is_ours(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("cuda_ops.nn.")


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))


# --- a Linear and its GELU --------------------------------------------------------------------


def _is_linear_before_gelu(linear: Any, gelu: Any) -> bool:
    """Tells whether both could be one; a GELU that is not torch's or ours is told of by itself."""
    return (
        isinstance(linear, torch.nn.Linear)
        and not _is_ours(linear)
        and type(gelu) in (torch.nn.GELU, GELU)
        and gelu.approximate == "tanh"
        and "forward" not in vars(gelu)
    )


def _fused(linear: Any) -> torch.nn.Module:
    """Returns a module with the parameters of a Linear. Not the Linear itself: what else holds it
    calls it without a gelu.
    """
    fused: Any = copy.copy(linear)
    fused._parameters = linear._parameters.copy()
    fused.__class__ = FusedLinearGELU
    # What the two modules kept: the gradient needs no second product.
    fused.save_preactivation = True
    module: torch.nn.Module = fused
    return module
