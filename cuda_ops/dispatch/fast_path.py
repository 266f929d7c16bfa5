"""The fast path of a public function: where nothing else has a say, plain tensors go straight to
the CPU or CUDA kernel, or through one node of autograd's graph if a gradient is wanted.

Everything else takes the dispatcher's way: composed operators, lists some of whose tensors may be
``None``, and what :func:`by_tensors` asks for in the code that it generates.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from cuda_ops.derive.checks import KNOWN_DTYPES
from cuda_ops.dispatch import cpp_autograd, lists
from cuda_ops.dispatch.generation import Served
from cuda_ops.spec import AutocastPolicy, OpSpec


@dataclass(frozen=True)
class _Argument:
    """A tensor, one that may be ``None``, or a list of tensors, in generated code."""

    name: str
    kind: str

    @property
    def is_list(self) -> bool:
        return self.kind == "List[Tensor]"

    @property
    def spread(self) -> str:
        return f"*{self.name}" if self.is_list else self.name

    @property
    def is_there(self) -> str:
        if self.is_list:
            return f"_type({self.name}) is list and {self.name}"
        return f"{self.name} is not None"

    def holds(self, condition: str) -> str:
        """Returns code that asks something of the tensor, which is true of ``None``."""
        return condition if self.kind == "Tensor" else f"({self.name} is None or {condition})"

    @property
    def is_plain(self) -> str:
        if self.is_list:
            return f"_all_plain({self.name})"
        return self.holds(f"(_type({self.name}) is _Tensor or _type({self.name}) is _Parameter)")

    def is_lazy(self, conjugated: bool) -> str:
        """Returns code that tells whether a tensor is negated, or conjugated, when it is read."""
        lazy = f"{self.name}.is_neg()" + (f" or {self.name}.is_conj()" if conjugated else "")
        return lazy if self.kind == "Tensor" else f"{self.name} is not None and ({lazy})"

    @property
    def wants_gradient(self) -> str:
        if self.is_list:
            return f"_any_wants({self.name})"
        wants = f"{self.name}.requires_grad"
        return wants if self.kind == "Tensor" else f"{self.name} is not None and {wants}"


def by_tensors(operator: Served, arguments: str, shown: str) -> tuple[str, dict[str, Any]]:
    """Returns code that calls the kernel which the first tensor stands for, and the names that it
    uses; nothing for an operator without a fast path.

    Args:
        operator: the operator.
        arguments: those of a call, as code.
        shown: what takes the results that callers see, as code.
    """
    op = operator.spec
    kinds = {argument.name: str(argument.type) for argument in op.parsed.arguments}
    tensors = [_Argument(name, kind) for name, kind in kinds.items() if "Tensor" in kind]
    written = [one for one in tensors if op.argument_names.index(one.name) in op.written]
    always = [one for one in tensors if one.kind == "Tensor"]
    always += [one for one in tensors if one.is_list]
    if (
        op.is_composite
        or not always
        or not set(written) <= set(always)
        or any("List[Optional" in one.kind for one in tensors)
    ):
        return "", {}
    first = f"{always[0].name}[0]" if always[0].is_list else always[0].name
    uncast_cuda, uncast_cpu = (
        _uncast(operator.now.autocast, tensors, first, question)
        for question in ("_cuda_autocast()", "_any_autocast()")
    )
    on_cuda, on_cpu = f"{first}.is_cuda{uncast_cuda}", f"{first}.is_cpu{uncast_cpu}"
    counted = "".join(f"{one.spread}, " for one in written)
    counted = f"_count_versions(({counted}))\n" + 20 * " " if written else ""
    names = _helpers(operator)
    # An autograd.Function takes tensors by position, each by itself, and returns them so.
    if written:
        with_gradient = "_dispatch"  # which refuses it
    elif lists.has_lists(op) or any(argument.kwarg_only for argument in op.parsed.arguments):
        with_gradient = "_overload"
    else:
        with_gradient = "_differentiable"
        names["_differentiable"] = differentiable(operator)
    plain = [one.is_plain for one in tensors]
    by_cuda, by_cpu = "_redispatch(_CUDA, ", "_redispatch(_CPU, "
    if written and any(one.is_list for one in tensors):
        # To ask each tensor of a list whether it is lazy takes longer than that.
        by_cuda = by_cpu = "_below_autograd("
    elif written:  # lazy views are left to kernels in Python, see written.py
        conjugated = _may_be_complex(op)
        plain.append(f"not ({' or '.join(one.is_lazy(conjugated) for one in tensors)})")
    # The cheapest questions first; inference mode has no autograd kernel to get past, and what
    # writes is asked for by functionalize even there.
    untransformed = " and not _transformed()" if written else ""
    # Without any tensor the dispatcher does not know whose error to raise; public.py does.
    there = "".join(f" and {one.is_there}" for one in always)
    code = textwrap.dedent(f"""\
        if _inference(){there}{untransformed}:
            return _dispatch({arguments}){shown}
        if not ({_INTERRUPTED}) and {" and ".join(plain)}:
            try:
                if _grad_enabled() and ({" or ".join(one.wants_gradient for one in tensors)}):
                    if {on_cuda} or {on_cpu}:
                        return {with_gradient}({arguments}){shown}
                elif {on_cuda}:
                    {counted}return {by_cuda}{arguments}){shown}
                elif {on_cpu}:
                    {counted}return {by_cpu}{arguments}){shown}
            except _RuntimeError:  # no kernel has run if a tensor has no memory
                if not _is_wrapper({", ".join(one.spread for one in tensors)}):
                    raise
        """)
    return code, names


def by_device(operator: Served, arguments: str, shown: str) -> tuple[str, dict[str, Any]]:
    """Returns the same for an operator without tensors, whose kernel an argument names."""
    op = operator.spec
    if (position := op.device_position) is None:
        return "", {}
    names = _helpers(operator) | {"_device": torch.device, "_cpu": torch.device("cpu")}
    d = op.argument_names[position]
    # Without a mode of functions no other default device is set.
    code = textwrap.dedent(f"""\
        if not ({_INTERRUPTED}):
            if {d} is None:
                {d} = _cpu
            if _type({d}) is _device:
                if {d}.type == "cpu":
                    return _redispatch(_CPU, {arguments}){shown}
                if {d}.type == "cuda" and {d}.index is not None:
                    return _redispatch(_CUDA, {arguments}){shown}
        """)
    for kind in {"CPU", "CUDA"}.difference(op.keys):  # refused, or there is an error that helps
        code = code.replace(f"_redispatch(_{kind}, ", "_overload(")
    return code, names


#: What tells that something else has a say in a call, and the names that it uses.
_INTERRUPTED = (
    "_modes() or _functions() or _transformed() or _jit() or _profiler._is_profiler_enabled"
)
_QUESTIONS: dict[str, Any] = {
    "_modes": torch._C._len_torch_dispatch_stack,
    "_functions": torch._C._len_torch_function_stack,
    "_transformed": torch._C._are_functorch_transforms_active,
    "_jit": torch._C._is_tracing,
    "_profiler": torch.autograd.profiler,
}
# Made of the text that goes into generated code too: both ask the same questions.
_is_interrupted: Callable[[], bool] = eval(f"lambda: {_INTERRUPTED}", _QUESTIONS)


def _helpers(operator: Served) -> dict[str, Any]:
    return {
        "_type": type,  # an argument may have that name
        "_Tensor": torch.Tensor,
        "_RuntimeError": RuntimeError,
        "_is_wrapper": _is_wrapper,
        "_all_plain": _all_plain,
        "_any_wants": _any_wants,
        "_Parameter": torch.nn.Parameter,
        "_CPU": _kernel_keys("CPU", operator.spec),
        "_CUDA": _kernel_keys("CUDA", operator.spec),
        **_QUESTIONS,
        # Called without an argument it tells about CUDA alone, in half the time.
        "_cuda_autocast": torch.is_autocast_enabled,
        "_any_autocast": torch._C._is_any_autocast_enabled,
        "_grad_enabled": torch.is_grad_enabled,
        "_count_versions": torch.autograd.graph.increment_version,
        "_inference": torch.is_inference_mode_enabled,
        "_dispatch": operator.spec.overload._op,
        "_redispatch": operator.spec.overload._handle.redispatch_boxed,
        "_below_autograd": partial(_below_autograd, operator.spec.overload._op),
    }


def _below_autograd(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Lets the dispatcher look at all tensors, but for autograd and the counter of versions."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return call(*args, **kwargs)


def _uncast(
    policy: AutocastPolicy | None, tensors: Sequence[_Argument], first: str, is_on: str
) -> str:
    """Returns the condition under which autocast changes none of the arguments, as code."""
    if not policy:
        return ""
    if policy != "promote" or any(one.is_list for one in tensors):
        return f" and not {is_on}"
    others = [one for one in tensors if one.name != first]
    equal = " and ".join(one.holds(f"{one.name}.dtype is {first}.dtype") for one in others)
    return f" and (not {is_on} or {equal})" if equal else ""


def _all_plain(tensors: Any) -> bool:
    """Says whether there is a list, not an empty one, of tensors that have memory and nothing else
    to them. This and what follows loops in C: an optimizer's lists are long.
    """
    return (
        type(tensors) in (list, tuple) and bool(tensors) and _PLAIN.issuperset(map(type, tensors))
    )


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def _any_wants(tensors: Sequence[torch.Tensor]) -> bool:
    return any(map(_REQUIRES_GRAD, tensors))


_REQUIRES_GRAD = attrgetter("requires_grad")


def is_undisturbed(*tensors: torch.Tensor) -> bool:
    """Says whether a function may skip the dispatcher: no mode, transform, trace or profiler has a
    say, and all are plain tensors with memory of their own.
    """
    return not (
        torch.compiler.is_compiling()
        or _is_interrupted()
        or not _PLAIN.issuperset(map(type, tensors))
        or _is_wrapper(*tensors)
    )


def _is_wrapper(*tensors: torch.Tensor | None) -> bool:
    """Tells whether one of the tensors wraps another one or a batch and so has no memory of its
    own, as functionalize, vmap and batched gradients leave behind. Its type does not show it; the
    dispatcher can handle it.
    """
    functorch = torch._C._functorch
    given = [tensor for tensor in tensors if tensor is not None]
    return (
        any(map(torch._is_functional_tensor, given))
        or any(map(functorch.is_functorch_wrapped_tensor, given))
        or any(map(functorch.is_legacy_batchedtensor, given))
    )


def _may_be_complex(op: OpSpec) -> bool:
    """Says whether a tensor may be conjugated lazily. A dtype that is not listed is refused before
    any number is read.
    """
    tensors = [a.name for a in op.parsed.arguments if "Tensor" in str(a.type)]
    dtypes = [op.allowed_dtypes(name) or KNOWN_DTYPES for name in tensors]
    return any(dtype.is_complex for allowed in dtypes for dtype in allowed)


def _kernel_keys(backend: str, op: OpSpec) -> torch._C.DispatchKeySet:
    """Returns the keys of a backend's kernel and of torch's fallbacks that resolve lazy views.

    Those look at each tensor for less than asking ``x.is_neg()`` in Python would cost.
    """
    lazy = ["ZeroTensor"]
    if not op.written:  # whose own kernels for these keys are Python, see written.py
        lazy += ["Negative"] + (["Conjugate"] if _may_be_complex(op) else [])
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, backend))
    for name in lazy:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


def differentiable(operator: Served) -> Any:
    """Returns ``autograd.Function.apply`` for the operator, below its own Python-side checks, or
    what does the same in C++.

    Those handle functorch, which the caller has ruled out.
    """
    op = operator.spec
    cpu, cuda = (_kernel_keys(backend, op) for backend in ("CPU", "CUDA"))
    first = next(i for i, a in enumerate(op.parsed.arguments) if str(a.type) == "Tensor")
    redispatch = op.overload._handle.redispatch_boxed

    def forward(ctx: Any, *args: Any) -> Any:
        output = redispatch(cuda if args[first].is_cuda else cpu, *args)
        operator.now.formula.setup_context(ctx, args, output)
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        return operator._backward(ctx, *grads)

    function = type(
        f"{op.name}_function",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
    in_python = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # type() made it
    formula = operator.now.formula
    return cpp_autograd.apply_of(op, formula.backward, (cpu, cuda), in_python)
