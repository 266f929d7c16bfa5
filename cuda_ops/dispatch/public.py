"""The public function of an operator: ``cuda_ops.silu(x)``.

``torch.ops.cuda_ops.silu`` is always right, and slower than it need be: its
Autograd kernel is Python and runs whether or not a gradient is wanted. The
public function looks first. Plain tensors outside of any tracing, transform, mode, profiling or
autocast that would cast them go straight to the CPU or CUDA kernel, or, if a gradient is wanted,
through one autograd.Function; everything else takes the dispatcher's way.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from cuda_ops.derive.arguments import bind, split
from cuda_ops.derive.checks import KNOWN_DTYPES, dtype_name, dtypes_text, refuse
from cuda_ops.dispatch.generation import Served
from cuda_ops.spec import AutocastPolicy, OpSpec, default_of


def make(operator: Served) -> tuple[FunctionType, FunctionType]:
    """Generates ``cuda_ops.<op>``, and the operator alone as formulas call it.

    Their identities last; :func:`renew` changes what they do.
    """
    return _public(operator), _generate(operator)


def renew(operator: Served) -> None:
    """Brings the existing functions up to the operator's present generation."""
    for old, new in zip((operator.public, operator.direct), make(operator), strict=True):
        old.__code__ = new.__code__
        old.__defaults__ = new.__defaults__
        old.__kwdefaults__ = new.__kwdefaults__
        old.__doc__ = new.__doc__
        old.__annotations__ = new.__annotations__


def _public(operator: Served) -> FunctionType:
    """Wraps what the plugin made of the operator in a function whose identity lasts."""
    wrapper = operator.now.public
    if wrapper is None:
        return _generate(operator)
    parts: list[str] = []
    passed: list[str] = []
    defaults: dict[str, Any] = {"_wrapper": wrapper}
    try:
        shown = inspect.signature(wrapper).parameters
    except ValueError:  # a function in C need not say what it takes
        shown = inspect.signature(lambda *args, **kwargs: None).parameters
    for parameter in shown.values():
        name, kind = parameter.name, parameter.kind
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(kind.name, "")
        keyword = kind is parameter.KEYWORD_ONLY
        if keyword and not any(part.startswith("*") for part in parts):
            parts.append("*")
        passed.append(f"{name}={name}" if keyword else f"{stars}{name}")
        if parameter.default is parameter.empty:
            parts.append(f"{stars}{name}")
        else:
            defaults[f"_default_{name}"] = parameter.default
            parts.append(f"{name}=_default_{name}")
    op = operator.spec
    starred = {part.lstrip("*") for part in parts if part.startswith("*")}
    tensors = [name for name in _tensor_names(op) if name in shown.keys() - starred]
    body = f"return _wrapper({', '.join(passed)})"
    if tensors:
        defaults |= {"_Tensor": torch.Tensor, "_isinstance": isinstance}
        defaults["_refuse_others"] = functools.partial(_refuse_others, op, tensors)
        wrong = " or ".join(
            f"not _isinstance({t}, _Tensor)" + (f" and {t} is not None" if _optional(op, t) else "")
            for t in tensors
        )
        given, group = ", ".join(passed), "".join(f"{name}, " for name in tensors)
        defaults["_overrides"] = torch.overrides.has_torch_function
        defaults["_override"] = functools.partial(_override, operator)
        before = textwrap.dedent(f"""\
            if {wrong}:
                if _overrides(({group})):
                    return _override(({group}), {given})
                _refuse_others({", ".join(tensors)})
            """)
        body = before + body
    return _function(op, ", ".join(parts), body, defaults, wrapper.__doc__)


def _override(operator: Served, values: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Calls the override of an argument that intercepts calls, such as an fx Proxy."""
    return torch.overrides.handle_torch_function(operator.public, values, *args, **kwargs)


def _generate(operator: Served) -> FunctionType:
    op = operator.spec
    parameters, defaults = _parameters(op)
    arguments = ", ".join(
        f"{a.name}={a.name}" if a.kwarg_only else a.name for a in op.parsed.arguments
    )
    names: dict[str, Any] = {**defaults, "_overload": op.overload}
    body = f"return _overload({arguments})"
    tensors = _tensor_names(op)
    optional = any(
        str(a.type).startswith(("Optional[Tensor", "List[Tensor")) for a in op.parsed.arguments
    )
    keyword_only = any(argument.kwarg_only for argument in op.parsed.arguments)
    before = ""
    # What is composed of torch's operators alone has the tangents that those give it.
    if tensors and (not op.is_composite or op.calls):
        names["_forward_mode"] = torch.autograd.forward_ad
        names["_refuse_tangents"] = functools.partial(refuse_tangents, op, tensors)
        before = textwrap.dedent(f"""\
            if _forward_mode._current_level >= 0:
                _refuse_tangents({", ".join(tensors)})
            """)
    if tensors and not optional and not keyword_only and not op.is_composite:
        names.update(_helpers(operator))
        plain = " and ".join(
            f"(_type({t}) is _Tensor or _type({t}) is _Parameter)" for t in tensors
        )
        gradient = " or ".join(f"{t}.requires_grad" for t in tensors)
        uncast_cuda, uncast_cpu = (
            _uncast(operator.now.autocast, tensors, question)
            for question in ("_cuda_autocast()", "_any_autocast()")
        )
        on_cuda = f"{tensors[0]}.is_cuda{uncast_cuda}"
        on_cpu = f"{tensors[0]}.is_cpu{uncast_cpu}"
        written = "".join(f"{op.argument_names[i]}, " for i in op.written)
        counted = f"_count_versions(({written}))\n" + 24 * " " if written else ""
        with_gradient = "_dispatch" if written else "_differentiable"  # which refuses it
        # The cheapest questions first; inference mode has no autograd kernel to get past.
        before += textwrap.dedent(f"""\
            if _inference():
                return _dispatch({arguments})
            if not (_modes() or _functions() or _transformed() or _jit() \\
                    or _profiler._is_profiler_enabled) and {plain}:
                try:
                    if ({gradient}) and _grad_enabled():
                        if {on_cuda} or {on_cpu}:
                            return {with_gradient}({arguments})
                    elif {on_cuda}:
                        {counted}return _redispatch(_CUDA, {arguments})
                    elif {on_cpu}:
                        {counted}return _redispatch(_CPU, {arguments})
                except _RuntimeError:  # no kernel has run if a tensor has no memory
                    if not _is_wrapper({", ".join(tensors)}):
                        raise
            """)
    required = [name for name in tensors if not _optional(op, name)]
    if optional and not required and not op.is_composite:
        possible = [a.name for a in op.parsed.arguments if "Tensor" in str(a.type)]
        names["_refuse_none"] = functools.partial(_refuse_none, op, possible[0])
        given = " or ".join(f"{t} is not None" if t in tensors else t for t in possible)
        before += f"if not ({given}):\n    _refuse_none()\n"
    if required and not op.is_composite:
        names["_refuse_others"] = functools.partial(_refuse_others, op, tensors)
        missing = " or ".join(f"{name} is None" for name in required)
        before += f"if {missing}:\n    _refuse_others({', '.join(tensors)})\n"
    if before:
        names["_tracing"] = torch.compiler.is_dynamo_compiling
        body = f"if not _tracing():\n{textwrap.indent(before, '    ')}{body}"
    for argument in op.parsed.arguments:
        if (kind := str(argument.real_type)) in ("ScalarType", "Optional[ScalarType]"):
            # The dispatcher casts an int to an enum, whatever it is.
            d = argument.name
            names |= {"_type": type, "_dtype": torch.dtype}
            names |= {f"_dtypes_{d}": op.dtypes_of.get(d, KNOWN_DTYPES)}
            names |= {"_refuse_dtype": _refuse_dtype, "_op": op}
            wrong = f"_type({d}) is not _dtype or {d} not in _dtypes_{d}"
            wrong = f"{d} is not None and ({wrong})" if kind.startswith("Optional") else wrong
            body = f"if {wrong}:\n    _refuse_dtype(_op, {d!r}, {d})\n{body}"
    return _function(op, parameters, body, names, op.doc)


def dispatched_if_batched() -> contextlib.AbstractContextManager[Any]:
    """Sends public functions through the dispatcher inside of ``torch.autograd.grad(...,
    is_grads_batched=True)``, whose tensors look plain and have no memory that a kernel could read.
    """
    if torch.compiler.is_dynamo_compiling():  # compiled autograd: the dispatcher's way anyway
        return contextlib.nullcontext()
    batched = torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED)
    return _dispatched() if batched else contextlib.nullcontext()


_BATCHED = torch._C._dispatch_key_parse("VmapMode")


def _dispatched() -> contextlib.AbstractContextManager[Any]:
    """Turns on a mode that changes nothing: while any is on, public functions go through the
    dispatcher.
    """
    return BaseTorchDispatchMode()


def _uncast(policy: AutocastPolicy | None, tensors: Sequence[str], is_on: str) -> str:
    """Returns the condition under which autocast changes none of the arguments, as code."""
    if not policy:
        return ""
    if policy != "promote":
        return f" and not {is_on}"
    first, *others = (f"{tensor}.dtype" for tensor in tensors)
    equal = " and ".join(f"{other} is {first}" for other in others)
    return f" and (not {is_on} or {equal})" if equal else ""


def _function(
    op: OpSpec, parameters: str, body: str, names: dict[str, Any], doc: str | None
) -> FunctionType:
    # A real module: torch.compile finds the globals of a function through sys.modules.
    module = ModuleType(f"cuda_ops.dispatch.public.{op.name}")
    scope = sys.modules.setdefault(module.__name__, module).__dict__
    scope.update(names)
    source = f"def {op.name}({parameters}):\n" + textwrap.indent(body, "    ")
    exec(compile(source, f"<cuda_ops.{op.name}>", "exec"), scope)
    function: FunctionType = scope.pop(op.name)
    function.__doc__ = doc or f"``cuda_ops::{op.schema}``"
    function.__module__ = "cuda_ops"
    function.__qualname__ = op.name
    return function


def _helpers(operator: Served) -> dict[str, Any]:
    redispatch = operator.spec.overload._handle.redispatch_boxed
    return {
        "_type": type,  # an argument may have that name
        "_Tensor": torch.Tensor,
        "_RuntimeError": RuntimeError,
        "_is_wrapper": _is_wrapper,
        "_Parameter": torch.nn.Parameter,
        "_CPU": _below_autograd("CPU", operator.spec),
        "_CUDA": _below_autograd("CUDA", operator.spec),
        "_modes": torch._C._len_torch_dispatch_stack,
        "_functions": torch._C._len_torch_function_stack,
        "_transformed": torch._C._are_functorch_transforms_active,
        "_profiler": torch.autograd.profiler,
        "_jit": torch._C._is_tracing,
        # Called without an argument it tells about CUDA alone, in half the time.
        "_cuda_autocast": torch.is_autocast_enabled,
        "_any_autocast": torch._C._is_any_autocast_enabled,
        "_grad_enabled": torch.is_grad_enabled,
        "_count_versions": torch.autograd.graph.increment_version,
        "_inference": torch.is_inference_mode_enabled,
        "_dispatch": operator.spec.overload._op,
        "_redispatch": redispatch,
        "_differentiable": _differentiable(operator, redispatch),
    }


def _tensor_names(op: OpSpec) -> list[str]:
    return [op.argument_names[i] for i in op.tensor_positions]


def _optional(op: OpSpec, name: str) -> bool:
    argument = op.parsed.arguments[op.argument_names.index(name)]
    return str(argument.type).startswith("Optional")


def _refuse_others(op: OpSpec, names: Sequence[str], *values: Any) -> None:
    """Refuses an argument that is not a tensor, by name. For ``None`` the dispatcher would not say
    which argument it is, and a plugin's function would fail wherever it first uses it.
    """
    for name, value in zip(names, values, strict=True):
        optional = _optional(op, name)
        if not (isinstance(value, torch.Tensor) or (optional and value is None)):
            expected = "a tensor or None" if optional else "a tensor"
            refuse(op, name, expected, "None" if value is None else type(value).__name__)


def _refuse_none(op: OpSpec, name: str) -> None:
    """Refuses a call without any tensor, for which the dispatcher lists every key that it knows."""
    refuse(op, name, "a tensor, whose device says which kernel to call", "none")


def _refuse_dtype(op: OpSpec, name: str, value: Any) -> None:
    if isinstance(value, torch.dtype):
        allowed = op.dtypes_of.get(name)
        expected = dtypes_text(allowed) if allowed else "a dtype that kernels know"
        refuse(op, name, expected, dtype_name(value))
    if not torch.overrides.has_torch_function((value,)):  # as an fx Proxy has
        refuse(op, name, "a torch.dtype", repr(value))


def _is_wrapper(*tensors: torch.Tensor) -> bool:
    """Tells whether one of the tensors wraps another one or a batch and so has no memory of its
    own, as functionalize, vmap and batched gradients leave behind. Its type does not show it; the
    dispatcher can handle it.
    """
    functorch = torch._C._functorch
    return any(
        torch._is_functional_tensor(tensor)
        or functorch.is_functorch_wrapped_tensor(tensor)
        or functorch.is_legacy_batchedtensor(tensor)
        for tensor in tensors
    )


def refuse_tangents(op: OpSpec, names: Sequence[str], *values: Any) -> None:
    """Refuses dual numbers: the dispatcher would drop their tangents in silence."""
    if torch._C._are_functorch_transforms_active() and not op.written:
        return  # torch.func.jvp refuses what has no rule for it
    for name, value in zip(names, values, strict=True):
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(tensor, torch.Tensor) or not (
                tensor.is_floating_point() or tensor.is_complex()
            ):
                continue
            if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
                raise _no_forward_mode(op, f"argument {name!r}: ")


def _no_forward_mode(op: OpSpec, where: str) -> NotImplementedError:
    return NotImplementedError(
        f"{op.qualname}: {where}expected no tangent, as the operator has no derivative in forward "
        "mode; torch.func.grad, vjp and backward have one"
    )


def refuse_escaped(op: OpSpec, values: Sequence[Any]) -> None:
    """Refuses a batch of torch.vmap after its end, for which no transform has a rule any more."""
    for name, value in zip(op.argument_names, values, strict=False):
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and torch._C._functorch.is_batchedtensor(tensor):
                refuse(op, name, "a tensor", "one that escaped from torch.vmap")


def _below_autograd(backend: str, op: OpSpec) -> torch._C.DispatchKeySet:
    """Returns the keys of a backend's kernel and of torch's fallbacks that resolve lazy views.

    Those look at each tensor for less than asking ``x.is_neg()`` in Python would cost.
    """
    # Only complex numbers are conjugated lazily. A dtype that is not listed is refused before any
    # number is read.
    lists = [op.allowed_dtypes(name) or KNOWN_DTYPES for name in op.tensor_names]
    may_be_complex = any(dtype.is_complex for allowed in lists for dtype in allowed)
    lazy = ["Negative", "ZeroTensor"] + (["Conjugate"] if may_be_complex else [])
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, backend))
    for name in lazy:
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return keys


def _differentiable(operator: Served, redispatch: Any) -> Any:
    """Returns ``autograd.Function.apply`` for the operator, below its own Python-side checks.

    Those handle functorch, which the caller has ruled out.
    """
    cpu, cuda = (_below_autograd(backend, operator.spec) for backend in ("CPU", "CUDA"))
    first = operator.spec.tensor_positions[0]

    def forward(ctx: Any, *args: Any) -> Any:
        output = redispatch(cuda if args[first].is_cuda else cpu, *args)
        operator.now.formula.setup_context(ctx, args, output)
        return output

    def backward(ctx: Any, *grads: Any) -> Any:
        return operator._backward(ctx, *grads)

    function = type(
        f"{operator.spec.name}_function",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
    # mypy cannot see the base of a class that type() makes.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def transformed(operator: Served) -> Any:
    """Returns the operator as an autograd.Function that ``torch.func`` transforms understand.

    :func:`torch.library.register_autograd` alone refuses ``torch.func.grad``, so this is
    registered where the dispatcher meets the outermost transform.
    """

    # Function.apply takes no keyword-only arguments: they come last.
    def forward(*args: Any) -> Any:
        positional, keywords = split(operator.spec, args)
        return operator.spec.overload(*positional, **keywords)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        positional, keywords = split(operator.spec, inputs)
        ctx.keywords = len(keywords)
        extra = {"keyword_only_inputs": keywords} if keywords else {}
        operator._setup_context(ctx, tuple(positional), output, **extra)

    def backward(ctx: Any, *grads: Any) -> Any:
        # The function that torch.func.vjp returns is called when the transform is over. Saved
        # tensors then look plain and have no memory.
        with _dispatched():
            gradients = operator._backward(ctx, *grads)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return (*gradients, *[None] * ctx.keywords)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_forward_mode(operator.spec, "")

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        positional, keywords = split(operator.spec, args)
        return operator._vmap(info, in_dims[: len(positional)], *positional, **keywords)

    function = type(
        f"{operator.spec.name}_transformed",
        (torch.autograd.Function,),
        {
            "forward": staticmethod(forward),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
            "jvp": staticmethod(jvp),
            "vmap": staticmethod(vmap),
        },
    )

    def apply(*args: Any, **kwargs: Any) -> Any:
        values = bind(operator.spec, args, kwargs) if kwargs else args
        # mypy cannot see what a class that type() makes inherits.
        return function.apply(*values)  # type: ignore[attr-defined]

    return apply


def _parameters(op: OpSpec) -> tuple[str, dict[str, Any]]:
    """Returns the parameter list, in which defaults have names, and the defaults."""
    parts: list[str] = []
    defaults: dict[str, Any] = {}
    star = False
    for argument in op.parsed.arguments:
        if argument.kwarg_only and not star:
            parts.append("*")
            star = True
        if argument.has_default_value():
            defaults[f"_default_{argument.name}"] = default_of(argument)
            parts.append(f"{argument.name}=_default_{argument.name}")
        else:
            parts.append(argument.name)
    return ", ".join(parts), defaults
