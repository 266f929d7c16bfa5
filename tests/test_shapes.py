"""What fakes refuse, they refuse as the kernels do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cuda_ops.compile_ops import compile_ops
from cuda_ops.derive.checks import MAX_DIMS


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    for row in compile_ops(["add", "fused_linear_gelu", "matmul", "sum_rows"]):
        assert not row.error, row.error


def refusal(op: str, shapes: tuple[tuple[int, ...], ...], device: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.cuda_ops, op)(*(torch.ones(shape, device=device) for shape in shapes))
    return str(caught.value)


@pytest.mark.parametrize(("a", "b"), [("cpu", "meta"), ("meta", "cpu")])
@pytest.mark.parametrize("op", ["add", "matmul"])
def test_the_meta_device_is_called_by_its_name(op: str, a: str, b: str) -> None:
    x, y = torch.ones(2, 2, device=a), torch.ones(2, 2, device=b)
    expected = f"cuda_ops::{op}: argument 'b': expected a tensor on {a} like 'a', got one on {b}$"
    with pytest.raises(RuntimeError, match=expected):
        getattr(torch.ops.cuda_ops, op)(x, y)


# --- more batch dims than a kernel walks --------------------------------------------


TOO_MANY = (2,) * (MAX_DIMS + 1)
ODD, EVEN = (2, 1) * 9, (1, 2) * 9  # neither has too many


@pytest.mark.parametrize(
    ("op", "argument", "shapes"),
    [
        ("matmul", "a", ((*TOO_MANY, 1, 3), (3, 4))),
        ("matmul", "b", ((1, 3), (*TOO_MANY, 3, 1))),
        ("matmul", "a", ((*ODD, 1, 3), (*EVEN, 3, 1))),
        ("matmul", "a", ((*TOO_MANY, 0, 1, 3), (3, 4))),
        ("matmul_tf32", "a", ((*TOO_MANY, 1, 3), (3, 4))),
        ("matmul_tf32x3", "b", ((1, 3), (*TOO_MANY, 3, 1))),
        ("matmul_backward", "grad_out", ((*TOO_MANY, 1, 4), (*TOO_MANY, 1, 3), (3, 4))),
        ("matmul_backward", "grad_out", ((1, 4), (*TOO_MANY, 1, 3), (3, 4))),
        ("fused_linear_gelu", "x", ((*TOO_MANY, 3), (4, 3))),
        ("fused_linear_gelu", "x", ((3,), (4, 3), (*TOO_MANY, 4))),
        ("fused_linear_gelu_keep", "x", ((*TOO_MANY, 3), (4, 3), (4,))),
        ("fused_linear_gelu_slope", "x", ((*TOO_MANY, 4), (1, 3), (4, 3))),
    ],
    ids=lambda value: str(value)[:30],
)
def test_too_many_batch_dims(op: str, argument: str, shapes: Any) -> None:
    expected = f"cuda_ops::{op}: argument '{argument}': expected at most 16 batch dims other than 1"
    assert refusal(op, shapes, "cpu").startswith(expected)
    assert refusal(op, shapes, "meta") == refusal(op, shapes, "cpu")


@pytest.mark.parametrize("op", ["add", "sum_rows"])
def test_too_many_dims(op: str) -> None:
    """Dims that follow each other in memory count as one where a kernel walks point by point."""
    shape = (*TOO_MANY, 2)
    x = torch.ones(shape).permute(*reversed(range(len(shape))))
    arguments = (x, torch.ones(())) if op == "add" else (x,)
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.cuda_ops, op)(*arguments)
    expected = f"cuda_ops::{op}: expected at most 16 dims other than 1, got shape [2, 2"
    assert str(caught.value).startswith(expected)
    assert torch.equal(torch.ops.cuda_ops.sum_rows(x.mT.contiguous()), torch.full(shape[:-1], 2.0))
    ones = torch.ones(2, 1, 3).expand(2, 1, 3)[(None,) * 20]
    assert torch.equal(torch.ops.cuda_ops.sum_rows(ones), ones.sum(-1))


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("matmul", ((*EVEN, 1, 3), (3, 4))),
        ("matmul_backward", ((*EVEN, 1, 4), (*EVEN, 1, 3), (3, 4))),
        ("fused_linear_gelu", ((*EVEN, 3), (4, 3))),
        ("fused_linear_gelu_keep", ((*EVEN, 3), (4, 3), (4,))),
        ("fused_linear_gelu_slope", ((*EVEN, 4), (*EVEN, 3), (4, 3))),
    ],
)
def test_dims_of_1_do_not_count(op: str, shapes: Any) -> None:
    real, fake = (
        getattr(torch.ops.cuda_ops, op)(*(torch.ones(shape, device=device) for shape in shapes))
        for device in ("cpu", "meta")
    )
    both = zip(real, fake, strict=True) if isinstance(real, tuple) else [(real, fake)]
    for ours, theirs in both:
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())


def test_a_size_that_may_be_1_does_not_count() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        assert mode.shape_env is not None
        sizes = [mode.shape_env.create_unbacked_symint() for _ in TOO_MANY]
        for size in sizes:
            torch._check(size >= 0)
        out = torch.ops.cuda_ops.matmul(torch.empty(*sizes, 1, 3), torch.empty(3, 4))
    assert out.dim() == len(TOO_MANY) + 2
