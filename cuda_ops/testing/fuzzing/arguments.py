"""Arguments that an operator should refuse, or survive: each is a piece of Python text.

Text, since a finding has to be one line that anybody can run. What it calls beside torch is in
:data:`KNOWN`.
"""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from cuda_ops.testing.fuzzing.choices import Choices
from cuda_ops.testing.samples import CODES, Sample, TensorArg

#: All dtypes of torch, those that nothing but a view can make included.
DTYPES = tuple(
    sorted(
        {v for name in dir(torch) if isinstance(v := getattr(torch, name), torch.dtype)}, key=str
    )
)
_SIZES = (0, 1, 2, 3, 5, 7, 16, 17, 33, 64)
_HUGE = (2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**61, 2**62, 2**63 - 1)

SCALARS = (
    "None", "True", "False", "0", "1", "-1", "2", "3", "7", "127", "128", "256", "65536",
    "2**31", "-2**31", "2**32", "2**53 + 1", "2**62", "2**63 - 1", "-2**63", "2**63", "2**64",
    "10**30", "0.0", "-0.0", "0.5", "1.0", "1.5", "-1.0", "1e-320", "1e38", "1e308", "inf", "-inf",
    "nan", "1j", "''", "'x'", "'sum'", "'a' * 5000", "'\\0'", "'\\ud800'", "b'x'", "[]", "()", "{}",
    "[1]", "[None]", "(1, 2)", "[1.5, 2]", "{1: 2}", "torch.tensor(1)", "torch.tensor(0.5)",
    "torch.tensor([1, 2])", "torch.tensor(True)", "torch.tensor(nan)", "torch.tensor(2**62)",
    "torch.tensor(0.5, requires_grad=True)", "torch.tensor(1j)", "torch.tensor(1, device='meta')",
    "torch.tensor(-1)", "torch.tensor([])", "torch.float32", "torch.float64", "torch.int64",
    "torch.complex32", "torch.bits8", "torch.qint8", "torch.float8_e4m3fn", "torch.device('cpu')",
    "torch.device('meta')", "torch.device('cuda', 7)", "'cpu'", "'cuda:7'", "'meta'",
    "torch.strided", "torch.preserve_format", "object()", "int", "len", "Fraction(1, 2)",
    "Decimal('0.5')", "range(3)", "iter([1])", "torch.Size([2])", "torch.Generator()", "...",
    "slice(1)", "Number()", "Index()", "RaisingIndex()",
)  # fmt: skip
_NUMPY = ("np.float32(0.5)", "np.float64(0.5)", "np.int64(3)", "np.bool_(True)", "np.array([1.0])")
#: What may be done to a tensor; ``{}`` is the tensor.
TENSORS = (
    "{}.to('meta')", "{}.to_sparse()", "{}.to_sparse_csr()", "{}.to_mkldnn()", "{}.conj()",
    "torch._neg_view({})", "torch.nn.Parameter({}, requires_grad=False)", "torch.nn.Parameter({})",
    "torch.nn.Buffer({})", "{}.requires_grad_()", "{}.as_subclass(Plain)", "Renamed({})",
    "Wrapper({})", "Overriding({})", "{}.unsqueeze(0)", "{}.unsqueeze(-1)", "{}[None, None, None]",
    "{}.mT", "{}.flip(0)", "{}[::2]", "{}[1:]", "{}[..., 1:]", "{}[..., :0]", "{}.flatten()",
    "{}.sum()", "{}.flatten()[0]", "{}[:1].expand(3, *[-1] * ({}.dim() - 1))", "freed({})",
    "shrunk({})", "shrunk({}, 1)", "{}.resize_(0)", "{}.clone().resize_(3, 3)", "strided({}, 1)",
    "strided({}, 0)", "strided({}, 2**40)", "strided({}, 2**62)", "{}.tolist()", "[{}]",
    "({}, {})", "[{}, None]", "[]", "{}.numpy()", "memoryview({}.numpy())", "escaped({})",
    "torch._to_functional_tensor({})", "fake({})", "torch._lazy_clone({})", "graded({})",
    "inferred({})", "torch.nested.nested_tensor([{}, {}])",
    "torch.nested.nested_tensor([{}, {}], layout=torch.jagged)",
    "torch.quantize_per_tensor({}.float(), 0.5, 0, torch.qint8)",
    "torch._efficientzerotensor({}.shape, dtype={}.dtype)", "{}.view(*{}.shape, *[1] * 60)",
    "{}.view(*{}.shape, *[1] * 14)", "{}.view(*[1] * 9, *{}.shape)", "({} * 0 - 1)",
    "({} * 0 + 2**30)", "{}.shape", "{}.dtype", "{}.untyped_storage()", "{}.storage_offset",
    "str({})", "{}.rename(*'abcdefgh'[:{}.dim()])", "torch.nn.UninitializedParameter()", "dual({})",
    "{}.to('meta').to_sparse()", "torch.empty({}.shape, dtype={}.dtype)", "{}.detach().numpy()",
    "{}.is_shared", "{}.half()", "{}.double()", "{}.long()", "{}.to(torch.complex64)",
)  # fmt: skip


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Overriding(torch.Tensor):
    """A subclass that raises where a function of torch sees it."""

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise ValueError(f"an override of {getattr(function, '__name__', function)}")


class Wrapper(torch.Tensor):
    """A tensor without memory around another one, as those of quantizing libraries."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, strides=held.stride()
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda value: value.held, (args, kwargs or {}))
        return function(*args, **kwargs)


class Renamed:
    """Something that takes the place of a tensor without being one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


class Number(float):
    """A float of another class."""


class Index:
    """Something that may be an int."""

    def __index__(self) -> int:
        return 1


class RaisingIndex:
    """Something that says it may be an int, and is not."""

    def __index__(self) -> int:
        raise ValueError("no index")


def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Makes the tensor that ``TensorArg`` describes with the same arguments, or one of zeros in a
    dtype that has no values to draw.
    """
    arg = TensorArg(*args, **kwargs)
    plain = arg.dtype.is_floating_point or arg.dtype.is_complex or arg.dtype in CODES
    if plain or arg.dtype in _INTEGERS:
        made: torch.Tensor = Sample((arg,)).make()[0]
        return made
    return torch.zeros(arg.shape, dtype=torch.uint8).to(arg.dtype)


_INTEGERS = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def freed(value: torch.Tensor) -> torch.Tensor:
    """Frees the tensor's memory and leaves its sizes."""
    value.untyped_storage().resize_(0)
    return value


def shrunk(value: torch.Tensor, left: int | None = None) -> torch.Tensor:
    """Shrinks the tensor's memory to half, or so many bytes, and leaves its sizes."""
    storage = value.untyped_storage()
    storage.resize_(storage.nbytes() // 2 if left is None else left)
    return value


def strided(value: torch.Tensor, stride: int) -> torch.Tensor:
    """Gives the first dim another stride, at most so that no element lies outside of the memory."""
    if not value.dim():
        return value
    strides, sizes = list(value.stride()), list(value.shape)
    strides[0] = stride
    if stride > 1:
        sizes[0] = min(sizes[0], 1)
    return value.as_strided(sizes, strides)


def escaped(value: torch.Tensor) -> torch.Tensor:
    """Returns what a batch of torch.vmap leaves behind."""
    kept: list[torch.Tensor] = []

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.append(one)
        return one.clone()

    torch.vmap(keep)(value)
    return kept[0]


def graded(value: torch.Tensor) -> torch.Tensor:
    """Returns what torch.func.grad leaves behind."""
    kept: list[torch.Tensor] = []

    def keep(one: torch.Tensor) -> torch.Tensor:
        kept.append(one)
        return one.sum()

    torch.func.grad(keep)(value)
    return kept[0]


def fake(value: torch.Tensor) -> torch.Tensor:
    """Returns a fake of a tensor, whose mode is off."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: torch.Tensor = FakeTensorMode().from_tensor(value)
    return made


def inferred(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that inference mode made."""
    with torch.inference_mode():
        return value.clone()


def dual(value: torch.Tensor) -> torch.Tensor:
    """Returns a dual number, whose level is over."""
    with torch.autograd.forward_ad.dual_level():
        made: torch.Tensor = torch.autograd.forward_ad.make_dual(value, torch.ones_like(value))
        return made


def known() -> dict[str, Any]:
    """Returns what the text of a call may name beside operators."""
    numpy: dict[str, Any] = {}
    try:
        import numpy as np

        numpy = {"np": np}
    except ImportError:
        pass
    functions: tuple[Callable[..., Any], ...] = (
        tensor, freed, shrunk, strided, escaped, graded, fake, inferred, dual,
        Plain, Overriding, Wrapper, Renamed, Number, Index, RaisingIndex,
    )  # fmt: skip
    return {
        "torch": torch, "inf": math.inf, "nan": math.nan, "Decimal": decimal.Decimal,
        "Fraction": fractions.Fraction, **numpy,
        **{function.__name__: function for function in functions},
    }  # fmt: skip


# --- what is drawn --------------------------------------------------------------------


def text_of(value: Any) -> str:
    """Returns the text of a valid argument out of a sample."""
    if isinstance(value, TensorArg):
        return f"tensor{repr(value).removeprefix('TensorArg')}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text_of, value))}]"
    if type(value).__name__ == "DeviceArg":
        return "torch.device('cpu')"
    return repr(value)


def changed(choices: Choices, value: Any, others: list[str]) -> str:
    """Returns the text of something else in place of a valid argument; ``others`` are the texts of
    the other arguments.
    """
    kind = choices.below(16)
    if kind == 15:
        return choices.pick(SCALARS)
    if kind == 14 and others:
        return choices.pick(others)
    if isinstance(value, (list, tuple)) and value:
        elements = [text_of(one) for one in value]
        at = choices.below(len(value))
        elements[at] = changed(choices, value[at], others)
        return f"[{', '.join(elements)}]"
    if isinstance(value, TensorArg):
        return _changed_tensor(choices, value, kind)
    return choices.pick((*SCALARS, *_NUMPY))


def _changed_tensor(choices: Choices, value: TensorArg, kind: int) -> str:
    shape, dtype = list(value.shape), value.dtype
    text = text_of(value)
    if kind < 3:
        return _shaped(_reshaped(choices, shape), dtype)
    if kind < 5:
        return _shaped(shape, choices.pick(DTYPES))
    if kind == 5:
        sizes = [choices.pick((*_HUGE, *_SIZES)) if choices.chance(2) else s for s in shape or [1]]
        return f"tensor((), dtype={dtype!r}).expand({', '.join(map(str, sizes))})"
    if kind == 6:
        sizes = _reshaped(choices, shape)
        strides = [choices.pick((0, 1, 2, 3, 5)) for _ in sizes]
        return f"{_shaped([257], dtype)}.as_strided({tuple(sizes)}, {tuple(strides)})"
    for _ in range(1 + choices.below(2)):
        text = choices.pick(TENSORS).replace("{}", text)
    return text


def _shaped(shape: list[int], dtype: torch.dtype) -> str:
    return f"tensor({tuple(shape)}, dtype={dtype!r})"


def _reshaped(choices: Choices, shape: list[int]) -> list[int]:
    shape = list(shape)
    what = choices.below(5)
    if what == 0 and shape:
        shape[choices.below(len(shape))] = choices.pick(_SIZES)
    elif what == 1 and shape:
        del shape[choices.below(len(shape))]
    elif what == 2:
        shape.insert(choices.below(len(shape) + 1), choices.pick(_SIZES))
    elif what == 3:
        shape = shape[::-1]
    else:
        shape = [choices.pick(_SIZES) for _ in range(choices.pick((0, 1, 2, 3, 4, 8, 20)))]
    while math.prod(shape) > 1 << 16:
        shape[shape.index(max(shape))] = 2
    return shape
