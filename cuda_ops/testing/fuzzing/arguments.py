"""Arguments that an operator should refuse, or survive: each is a piece of Python text.

Text, since a finding has to be one line that anyone can run. What it calls beside torch is in
:mod:`cuda_ops.testing.fuzzing.pieces`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from cuda_ops.testing.fuzzing.choices import Choices
from cuda_ops.testing.samples import TensorArg

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
    "({} * 0 + 2**30)", "{}.shape", "{}.dtype", "{}.storage_offset",
    "str({})", "{}.rename(*'abcdefgh'[:{}.dim()])", "torch.nn.UninitializedParameter()", "dual({})",
    "{}.to('meta').to_sparse()", "torch.empty({}.shape, dtype={}.dtype)", "{}.detach().numpy()",
    "{}.half()", "{}.double()", "{}.long()", "{}.to(torch.complex64)",
)  # fmt: skip


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
        if "freed(" in text or "shrunk(" in text:
            break  # torch's own functions would read what is not there
        wrapped = choices.pick(TENSORS).replace("{}", text)
        if "torch._neg_view(" in wrapped and "quantize_per_tensor(" in wrapped:
            break  # torch negates it in an endless recursion, whatever is called with it
        text = wrapped
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
        shape[shape.index(max(shape))] = 1
    return shape
