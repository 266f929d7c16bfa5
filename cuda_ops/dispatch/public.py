"""The public function of an operator: ``cuda_ops.silu(x)``.

``torch.ops.cuda_ops.silu`` is always right, and slower than it need be: its
Autograd kernel is Python and runs whether or not a gradient is wanted. The
public function looks first: plain tensors outside of any tracing, transform, mode, profiling or
autocast that would cast them take :mod:`cuda_ops.dispatch.fast_path`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import textwrap
from collections.abc import Container, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch._C._functorch import TransformType
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from cuda_ops.derive.arguments import bind, split
from cuda_ops.derive.checks import KNOWN_DTYPES, dtype_name, dtypes_text, refuse
from cuda_ops.derive.forward_mode import refuse_tangent
from cuda_ops.derive.random import draw_key
from cuda_ops.dispatch import fast_path, first_use, functional, lists, naming, nvtx, placed
from cuda_ops.dispatch.generation import Served
from cuda_ops.spec import OpSpec, default_of


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
    """Wraps what the plugin made of the operator in a function whose identity lasts. An argument
    that an operator called by it refuses is refused in this one's name.
    """
    wrapper = operator.now.public
    if wrapper is None:
        return _generate(operator, hides=bool(operator.spec.hidden), draws=operator.spec.draws)
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
    defaults |= {
        "_tracing": torch.compiler.is_dynamo_compiling,
        "_RuntimeError": RuntimeError,
        "_retell_part": functools.partial(naming.retell_part, op, frozenset(shown)),
    }
    call = f"return _wrapper({', '.join(passed)})"
    body = (
        f"if not _tracing():\n    try:\n        {call}\n"
        f"    except _RuntimeError as _error:\n        _retell_part(_error)\n        raise\n{call}"
    )
    if tensors:
        before, used = _intercepted(operator, tensors, ", ".join(passed))
        body, defaults = before + body, defaults | used
    return _function(op, ", ".join(parts), body, defaults, wrapper.__doc__)


def _intercepted(
    operator: Served, tensors: Sequence[str], passed: str
) -> tuple[str, dict[str, Any]]:
    """Returns code, and the names that it uses, which hands the call on to an argument that
    intercepts calls and refuses any other that is not a tensor.
    """
    op = operator.spec
    may_be_none = {t for t in tensors if _optional(op, t) or (op.draws and t == op.random)}
    wrong = " or ".join(
        f"not _isinstance({t}, _Tensor)" + (f" and {t} is not None" if t in may_be_none else "")
        for t in tensors
    )
    group = "".join(f"{name}, " for name in tensors)
    code = textwrap.dedent(f"""\
        if {wrong}:
            if _overrides(({group})):
                return _override(({group}), {passed})
            _refuse_given({", ".join(tensors)})
        """)
    return code, {
        "_Tensor": torch.Tensor,
        "_isinstance": isinstance,
        "_overrides": torch.overrides.has_torch_function,
        "_override": functools.partial(_override, operator),
        # Not as in the operator's own function, which shares the names and must have a key.
        "_refuse_given": functools.partial(_refuse_others, op, tensors, may_be_none),
    }


def _override(operator: Served, values: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Calls the override of an argument that intercepts calls, such as an fx Proxy."""
    return torch.overrides.handle_torch_function(operator.public, values, *args, **kwargs)


def _generate(operator: Served, hides: bool = False, draws: bool = False) -> FunctionType:
    """Generates the function; one that ``hides`` returns what callers see, not what is there for
    the gradient alone. In one that ``draws``, the random key comes last, by name, and is drawn
    unless it is given.
    """
    op = operator.spec
    shown = "" if not hides else "[0]" if op.shown == 1 else f"[:{op.shown}]"
    parameters, defaults = _parameters(op, op.random if draws else "")
    arguments = ", ".join(
        f"{a.name}={a.name}" if a.kwarg_only else a.name for a in op.parsed.arguments
    )
    names: dict[str, Any] = {**defaults, "_overload": op.overload}
    body = f"return _overload({arguments}){shown}"
    tensors = _tensor_names(op)
    before = ""
    if op.nondeterministic:  # the dispatcher raises or warns
        names["_deterministic"] = torch._C._get_deterministic_algorithms
        before += textwrap.dedent(f"""\
            if _deterministic():
                return _overload({arguments}){shown}
            """)
    if operator.now.forward is not None:
        names["_forward_mode"] = torch.autograd.forward_ad
        before += textwrap.dedent(f"""\
            if _forward_mode._current_level >= 0:
                return _overload({arguments}){shown}
            """)
    # What is composed of torch's operators alone has the tangents that those give it.
    elif tensors and (not op.is_composite or op.calls):
        names["_forward_mode"] = torch.autograd.forward_ad
        names["_refuse_tangents"] = functools.partial(refuse_tangents, op, tensors)
        before += textwrap.dedent(f"""\
            if _forward_mode._current_level >= 0:
                _refuse_tangents({", ".join(tensors)})
            """)
    for made in (fast_path.by_tensors, fast_path.by_device):
        text, used = made(operator, arguments, shown)
        before, names = before + text, names | used
    if (position := op.device_position) is not None:
        names["_default"] = placed.default_device
        d = op.argument_names[position]
        body = f"if {d} is None:\n    {d} = _default()\n{body}"
    required = [name for name in tensors if not _optional(op, name)]
    if op.written:  # others are asked by the dispatcher
        names["_transformed"] = torch._C._are_functorch_transforms_active
        names["_functional"] = functools.partial(functional.call, op)
        names["_is_functional"] = functional.is_innermost
        given = ", ".join(op.argument_names)
        before += textwrap.dedent(f"""\
            if _transformed() and _is_functional():
                return _functional(({given},)){shown}
            """)
    possible = [a.name for a in op.parsed.arguments if "Tensor" in str(a.type)]
    if possible and not required and not op.is_composite:
        names["_refuse_none"] = functools.partial(_refuse_none, op, possible[0])
        names["_some"] = _some
        given = " or ".join(f"{t} is not None" if t in tensors else f"_some({t})" for t in possible)
        before += f"if not ({given}):\n    _refuse_none()\n"
    if required and not op.is_composite:
        may_be_none = {name for name in tensors if _optional(op, name)}
        names["_refuse_others"] = functools.partial(_refuse_others, op, tensors, may_be_none)
        missing = " or ".join(f"{name} is None" for name in required)
        before += f"if {missing}:\n    _refuse_others({', '.join(tensors)})\n"
    names |= {
        "_tracing": torch.compiler.is_dynamo_compiling,
        "_RuntimeError": RuntimeError,
        "_retell": functools.partial(naming.retell, op),
    }
    values = "".join(f"{name}, " for name in op.argument_names)
    body = (
        f"if not _tracing():\n    try:\n{textwrap.indent(before + body, ' ' * 8)}\n"
        f"    except _RuntimeError as _error:\n        _retell(_error, ({values}))\n        raise\n"
        f"{body}"
    )
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
    for argument in op.parsed.arguments:  # the dispatcher takes None for False
        if str(argument.real_type) == "bool":
            d = argument.name
            names |= {"_refuse": refuse, "_op": op}
            body = f"if {d} is None:\n    _refuse(_op, {d!r}, 'a bool', 'None')\n{body}"
    if draws:
        # Before anything else: torch's own operator draws it, so all that torch knows of random
        # numbers holds, and what follows is a function of its arguments.
        passed = ", ".join(
            f"{a.name}={a.name}" if a.kwarg_only or a.name == op.random else a.name
            for a in sorted(op.parsed.arguments, key=lambda a: a.name == op.random)
        )
        before, used = _intercepted(operator, tensors, passed)
        names |= used | {"_draw_key": draw_key}
        body = f"{before}if {op.random} is None:\n    {op.random} = _draw_key({tensors[0]})\n{body}"
    doc = op.doc or f"``{op.namespace}::{_shown_schema(op) if hides else op.schema}``"
    return _function(op, parameters, body, names, doc)


def _shown_schema(op: OpSpec) -> str:
    """Returns the schema without the results that ``cuda_ops.<op>`` does not return."""
    returns = [f"{value.type} {value.name or ''}".strip() for value in op.parsed.returns]
    shown = ", ".join(returns[: op.shown])
    return f"{op.schema.partition('->')[0]}-> {shown if op.shown == 1 else f'({shown})'}"


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


def _function(
    op: OpSpec, parameters: str, body: str, names: dict[str, Any], doc: str | None
) -> FunctionType:
    if first_use.is_wanted():
        body, names = first_use.asked(op, body, names)
    if nvtx.is_wanted():
        body, names = nvtx.ranged(op, body, names)
    # A real module: torch.compile finds the globals of a function through sys.modules.
    module = ModuleType(f"cuda_ops.dispatch.public.{op.key.replace('::', '.')}")
    scope = sys.modules.setdefault(module.__name__, module).__dict__
    scope.update(names)
    source = f"def {op.name}({parameters}):\n" + textwrap.indent(body, "    ")
    exec(compile(source, f"<{op.namespace}.{op.name}>", "exec"), scope)
    function: FunctionType = scope.pop(op.name)
    function.__doc__ = doc or f"``{op.namespace}::{op.schema}``"
    function.__module__ = op.namespace
    function.__qualname__ = op.name
    return function


def _tensor_names(op: OpSpec) -> list[str]:
    return [op.argument_names[i] for i in op.tensor_positions]


def _optional(op: OpSpec, name: str) -> bool:
    argument = op.parsed.arguments[op.argument_names.index(name)]
    return str(argument.type).startswith("Optional")


def _refuse_others(
    op: OpSpec, names: Sequence[str], may_be_none: Container[str], *values: Any
) -> None:
    """Refuses an argument that is not a tensor, by name. For ``None`` the dispatcher would not say
    which argument it is, and a plugin's function would fail wherever it first uses it.
    """
    for name, value in zip(names, values, strict=True):
        optional = name in may_be_none
        if not (isinstance(value, torch.Tensor) or (optional and value is None)):
            expected = "a tensor or None" if optional else "a tensor"
            refuse(op, name, expected, "None" if value is None else type(value).__name__)


def _some(tensors: Any) -> bool:
    """Says whether a list has a tensor; one of ``Tensor?[]`` may hold ``None`` alone."""
    if not isinstance(tensors, (list, tuple)):  # the dispatcher refuses what is in place of a list
        return tensors is not None
    return any(tensor is not None for tensor in tensors)


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


def may_have_tangents() -> bool:
    """Tells whether dual numbers are differentiated here: transforms of torch.func have their own
    way, and inside of an autograd.Function torch has taken them apart.
    """
    return not torch._C._are_functorch_transforms_active() and torch._C._is_fwd_grad_enabled()


def tangents_of(values: Sequence[Any]) -> list[Any]:
    """Returns the tangent of each value, or ``None``; of a list the first that there is."""
    return [
        next(filter(torch.is_tensor, tangents_of(value)), None)
        if isinstance(value, (list, tuple))
        else torch.autograd.forward_ad.unpack_dual(value).tangent
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        else None
        for value in values
    ]


def refuse_tangents(op: OpSpec, names: Sequence[str], *values: Any) -> None:
    """Refuses dual numbers: the dispatcher would drop their tangents in silence."""
    if not may_have_tangents():
        return  # torch.func.jvp refuses what has no rule for it
    for name, tangent in zip(names, tangents_of(values), strict=True):
        if tangent is not None:
            refuse_tangent(op, op.argument_names.index(name))


def refuse_escaped(op: OpSpec, values: Sequence[Any]) -> None:
    """Refuses a batch of torch.vmap after its end, for which no transform has a rule any more."""
    for name, value in zip(op.argument_names, values, strict=False):
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and torch._C._functorch.is_batchedtensor(tensor):
                refuse(op, name, "a tensor", "one that escaped from torch.vmap")


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
        interpreter: Any = torch._C._functorch.peek_interpreter_stack()
        if interpreter is not None and interpreter.key() == TransformType.Jvp:
            _keep_for_tangents(ctx, operator.spec, inputs, output, only_forward=True)
            return
        if interpreter is None and torch.autograd.forward_ad._current_level >= 0:
            _keep_for_tangents(ctx, operator.spec, inputs, output, only_forward=False)
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
        op, derivative = operator.spec, operator.now.forward
        known = derivative.inputs if derivative is not None else ()
        values, outputs = tree_unflatten(ctx.flat(ctx.saved_tensors), ctx.tree)
        values = bind(op, values, {})  # the dispatcher leaves out those equal to their default
        given = [*tangents, *[None] * (len(values) - len(tangents))]
        if ctx.has_zeros:
            given = [t if i in known or (t is not None and t.any()) else None for i, t in
                     enumerate(given)]  # fmt: skip
        if derivative is None:
            refuse_tangent(op, next(i for i, t in enumerate(given) if t is not None))
        is_tuple = isinstance(outputs, tuple)
        found = derivative.tangents(op, values, outputs if is_tuple else (outputs,), given)
        return tuple(found) if is_tuple else found[0]

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        positional, keywords = split(operator.spec, args)
        return operator._vmap(info, in_dims[: len(positional)], *positional, **keywords)

    functions = {
        "forward": forward, "setup_context": setup_context, "backward": backward, "jvp": jvp,
        "vmap": vmap,
    }  # fmt: skip
    listed = lists.has_lists(operator.spec)
    functions = lists.one_by_one(functions) if listed else functions
    function = type(
        f"{operator.spec.name}_transformed",
        (torch.autograd.Function,),
        {name: staticmethod(made) for name, made in functions.items()},
    )
    # mypy cannot see what a class that type() makes inherits.
    called = function.apply  # type: ignore[attr-defined]
    called = lists.calling(called) if listed else called

    def apply(*args: Any, **kwargs: Any) -> Any:
        if functional.is_innermost():
            return functional.call(operator.spec, bind(operator.spec, args, kwargs))
        # A formula's setup_context gets all arguments, also those that the dispatcher leaves out.
        return called(*bind(operator.spec, args, kwargs))

    return apply


def _keep_for_tangents(
    ctx: Any, op: OpSpec, inputs: tuple[Any, ...], output: Any, only_forward: bool
) -> None:
    """Keeps what the derivative in forward mode needs: everything.

    Where torch.func.jvp is the innermost transform there is no gradient, and torch may say which
    tangents are missing. Elsewhere it hands in zeros for them.
    """
    flat, ctx.tree = tree_flatten((inputs, output))
    rest = [None if isinstance(value, torch.Tensor) else value for value in flat]
    places = [isinstance(value, torch.Tensor) for value in flat]

    def whole(tensors: Sequence[torch.Tensor]) -> list[Any]:
        kept = iter(tensors)
        return [next(kept) if place else value for place, value in zip(places, rest, strict=True)]

    ctx.flat = whole
    ctx.save_for_forward(*filter(torch.is_tensor, flat))
    ctx.has_zeros = not only_forward
    if only_forward:
        ctx.set_materialize_grads(False)
        outputs = output if isinstance(output, tuple) else (output,)
        named = zip(op.output_names, outputs, strict=True)
        ctx.mark_non_differentiable(*(output for name, output in named if name in op.constants))


def _parameters(op: OpSpec, key: str = "") -> tuple[str, dict[str, Any]]:
    """Returns the parameter list, in which defaults have names, and the defaults. A random key that
    need not be given comes last, by name alone.
    """
    parts: list[str] = []
    defaults: dict[str, Any] = {}
    star = False
    for argument in op.parsed.arguments:
        if argument.name == key:
            continue
        if argument.kwarg_only and not star:
            parts.append("*")
            star = True
        if argument.has_default_value():
            defaults[f"_default_{argument.name}"] = default_of(argument)
            parts.append(f"{argument.name}=_default_{argument.name}")
        else:
            parts.append(argument.name)
    if key:
        parts += [f"{key}=None"] if star else ["*", f"{key}=None"]
    return ", ".join(parts), defaults
