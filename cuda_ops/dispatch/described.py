"""The operators that a plugin makes of a guest's functions, or describes where the guest registers
them itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cuda_ops.build.discovery import Pair
from cuda_ops.derive.arguments import bind, split
from cuda_ops.derive.checks import check_arguments
from cuda_ops.dispatch.library import Kernel, validated
from cuda_ops.dispatch.schema_types import schema_type
from cuda_ops.errors import ManifestError
from cuda_ops.signature import Signature, parse_signature
from cuda_ops.spec import GuestOperator, OpSpec

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class DescribedGuest:
    """An opened guest with what its plugin says of it; to the registry it is a ``Library``."""

    path: Path
    stem: str
    #: The operators that functions of its module become, by name, and these functions.
    ops: dict[str, OpSpec] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    #: The operators that it registers itself, by the dispatcher's name.
    registered: dict[str, OpSpec] = field(default_factory=dict)
    kernels: tuple[Kernel, ...] = ()
    source_hash: str = ""


def describe(
    pair: Pair, path: Path, module: ModuleType, described: Sequence[GuestOperator]
) -> DescribedGuest:
    """Returns the operators of a guest.

    Args:
        pair: the guest, whose library is loaded.
        path: that library.
        module: its functions, of the library that is loaded now or after a reload.
        described: what its plugin answers to ``cuda_ops_guest``.

    Raises:
        ManifestError: the plugin says something that is not so, or contradicts itself.
    """
    guest = DescribedGuest(path, pair.stem)
    for one in described:
        if "(" not in one.schema and "::" in one.schema:
            guest.registered[one.schema] = _registered(pair, one)
            continue
        op = _declared(pair, one, guest.ops)
        guest.ops[op.name] = op
        guest.calls[op.name] = Call(op, module, _function(pair, op, one, module), one.contiguous)
    if not described:
        raise ManifestError(
            f"{pair.plugin}: expected cuda_ops_guest to describe the functions of the guest "
            f"{pair.stem!r}, without which its other hooks are never asked, got nothing"
        )
    return guest


def _declared(pair: Pair, one: GuestOperator, siblings: dict[str, OpSpec]) -> OpSpec:
    """Returns the operator of a schema, by the rules of a binding."""
    file = str(pair.plugin)
    unknown = [device for device in one.devices if device not in _DEVICES]
    if unknown or not one.devices:
        raise ManifestError(
            f"{file}: {one.schema!r}: expected devices of 'cpu' and 'cuda', where the function "
            f"works, got {unknown[0] if unknown else 'none'!r}"
        )
    floats = re.findall(r"\bfloat\?? +(\w+)", one.schema)
    entry = {
        "schema": one.schema,
        "signature": one.signature,
        "doc": one.doc,
        "has_cuda": "cuda" in one.devices,
        "dtypes": _names(one.dtypes),
        "dtypes_of": [[name, _names(dtypes)] for name, dtypes in one.dtypes_of.items()],
        "ranges": [[name, *r] for name, r in one.ranges.items() if name not in floats],
        "float_ranges": [[name, *r, False] for name, r in one.ranges.items() if name in floats],
        "choices": [[name, list(names)] for name, names in one.one_of.items()],
        "limits": [*one.at_most.items()],
        "belows": [*one.below.items()],
        "results": [
            [name, like, ""] if isinstance(like, str) else [name, "", *_names([like])]
            for name, like in one.returns.items()
        ],
        "saved": one.saved,
        "no_gradient": one.no_gradient,
        "nondeterministic": one.nondeterministic,
        "kernels": [{"key": device.upper()} for device in one.devices],
        # What no function of a guest can be.
        "hidden": (),
        "linear": (),
        "tags": (),
        "calls": (),
        "random": "",
        "broadcast": False,
    }
    op = validated(entry, pair.stem, siblings, pair.namespace, file)
    return replace(op, guest=pair.key)


def _names(dtypes: Sequence[torch.dtype]) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def _function(pair: Pair, op: OpSpec, one: GuestOperator, module: ModuleType) -> str:
    """Returns the name of the function of the module that an operator calls."""
    rest = op.name.removeprefix(f"{pair.stem}_")
    tried = (op.name, "forward") if op.name == pair.stem else (rest, op.name)
    for name in (one.function,) if one.function else tried:
        if callable(getattr(module, name, None)):
            return name
    has = ", ".join(name for name in dir(module) if not name.startswith("_")) or "no function"
    raise ManifestError(
        f"{pair.plugin}: {op.qualname}: expected a function {one.function or tried[0]!r} of the "
        f"guest, got {has}; name it by function=..., or write 'its_namespace::{rest}' for what the "
        "guest registers itself"
    )


@dataclass(frozen=True)
class Call:
    """The kernel of an operator on every device: the guest's function between two checks."""

    op: OpSpec
    module: ModuleType
    function: str
    #: Whether the function gets contiguous tensors.
    contiguous: bool

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        values = bind(self.op, args, kwargs)
        check_arguments(self.op, values)
        return self._results(getattr(self.module, self.function)(*self._given(values)))

    def fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the operator on tensors without data: what the function makes of copies does not
        have the strides of what was passed.
        """

        def contiguous(*args: Any, **kwargs: Any) -> Any:
            positional, keywords = split(self.op, self._given(bind(self.op, args, kwargs)))
            return fake(*positional, **keywords)

        return contiguous if self.contiguous else fake

    def _given(self, values: Sequence[Any]) -> list[Any]:
        if not self.contiguous:
            return [*values]
        kept = self.op.written  # a copy would be written
        return [value if i in kept else _contiguous(value) for i, value in enumerate(values)]

    def _results(self, result: Any) -> Any:
        """Returns what the dispatcher takes for the operator's schema."""
        expected = [schema_type(value) for value in self.op.parsed.returns]
        if not expected:
            return None  # functions that write an argument often return it too
        if expected == ["Tensor[]"]:
            return result
        found = result if isinstance(result, (list, tuple)) else (result,)
        if len(found) != len(expected):
            raise RuntimeError(
                f"{self.op.qualname}: expected the guest's {self.function}() to return "
                f"{len(expected)} results, got {len(found)}"
            )
        return tuple(found) if len(expected) > 1 else found[0]


def _contiguous(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_contiguous(one) for one in value]
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def foreign_spec(
    name: str, signature: str = "", dtypes: Sequence[torch.dtype] = (), **fields: Any
) -> OpSpec:
    """Returns what is known of an operator that another library has registered.

    Args:
        name: the dispatcher's, ``"mylib::softmax"``.
        signature: its NumPy-style line; empty for none.
        dtypes: the dtypes that its tensor arguments may have.
        fields: others of the spec.

    Raises:
        ManifestError: the signature line does not fit the schema.
        RuntimeError: there is no such operator.
        ValueError: the signature line cannot be parsed.
    """
    namespace, _, short = name.partition("::")
    parsed = torch._C._get_schema(name, "")
    line = parse_signature(signature) if signature else None
    if line is not None:
        _compare_counts(name, signature, line, parsed)
    keys = [k for k in ("CPU", "CUDA", "CompositeImplicitAutograd") if has_kernel(name, k)]
    spec = {"stem": short, "doc": "", **fields}
    return OpSpec(
        name=short,
        schema=str(parsed).removeprefix(f"{namespace}::"),
        parsed=parsed,
        signature=line,
        dtypes=tuple(dtypes),
        keys=tuple(keys),
        has_cuda="CUDA" in keys,
        namespace=namespace,
        foreign=True,
        **spec,
    )


def _compare_counts(
    name: str, signature: str, line: Signature, parsed: torch._C.FunctionSchema
) -> None:
    tensors = sum(schema_type(a) in ("Tensor", "Tensor?") for a in parsed.arguments)
    counts = [("tensor arguments", len(line.inputs), tensors)]
    # A line may list what is written as an output or not, and describes no other types.
    if not parsed.is_mutable and all(schema_type(value) == "Tensor" for value in parsed.returns):
        counts.append(("outputs", len(line.outputs), len(parsed.returns)))
    for what, found, expected in counts:
        if found != expected:
            raise ManifestError(
                f"{name}: signature {signature!r} has {found} {what}, the schema has {expected}"
            )


def _registered(pair: Pair, one: GuestOperator) -> OpSpec:
    """Returns the spec of an operator that the guest registers itself."""
    try:
        op = foreign_spec(
            one.schema,
            one.signature,
            one.dtypes,
            stem=pair.stem,
            guest=pair.key,
            doc=one.doc,
            dtypes_of=one.dtypes_of,
            saved=one.saved,
            nondeterministic=one.nondeterministic,
        )
    except (ManifestError, ValueError) as error:
        raise ManifestError(f"{pair.plugin}: {error}") from None
    except RuntimeError:
        raise ManifestError(
            f"{pair.plugin}: expected an operator that the guest {pair.stem!r} registers, got "
            f"{one.schema!r}, which torch does not know"
        ) from None
    outputs = [name for name in one.no_gradient if name not in op.argument_names]
    inputs = [name for name in one.no_gradient if name not in outputs]
    return replace(op, no_gradient=tuple(inputs), no_gradient_outputs=tuple(outputs))


def has_kernel(name: str, key: str) -> bool:
    """Says whether an operator of any library has a kernel for a dispatch key."""
    direct: bool = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    explicit = "CompositeExplicitAutograd"
    return direct or (
        key in ("CPU", "CUDA") and torch._C._dispatch_has_kernel_for_dispatch_key(name, explicit)
    )


def attach(function: Any, module: ModuleType) -> None:
    """Lets ``cuda_ops.<guest>.<function>`` go on where ``cuda_ops.<guest>`` is an operator now."""
    for name in dir(module):
        if not name.startswith("_"):
            setattr(function, name, getattr(module, name))
