"""matmul: the public function: shapes, precisions, gradients, sharding."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from conftest import Recorder, needs_gpu

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.ops.matmul import PRECISIONS


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("matmul")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


SHAPES = [
    ((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 4)), ((2, 3, 5), (5,)), ((5,), (2, 5, 4)),
    ((2, 3, 5), (5, 4)), ((3, 5), (2, 5, 4)), ((2, 1, 3, 5), (4, 5, 6)), ((0, 5), (5, 4)),
    ((3, 0), (0, 4)), ((0,), (0,)), ((2, 0, 5), (5,)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), SHAPES, ids=str)
@on_each_device
def test_shapes_follow_torch_matmul(a: tuple[int, ...], b: tuple[int, ...], device: str) -> None:
    x = torch.randn(a, dtype=torch.float64, device=device, requires_grad=True)
    y = torch.randn(b, dtype=torch.float64, device=device, requires_grad=True)
    ours, theirs = cuda_ops.matmul(x, y), torch.matmul(x, y)
    torch.testing.assert_close(ours, theirs)
    gradients = torch.autograd.grad(ours.sum(), (x, y))
    torch.testing.assert_close(gradients, torch.autograd.grad(theirs.sum(), (x, y)))


# The last token of each sequence, a transposed batch, a batch that continues along one dim alone,
# and a single row for all of it.
@on_each_device
def test_views_of_a_batch_times_a_weight(device: str) -> None:
    weight = torch.randn(96, 128, device=device).bfloat16()
    x = torch.randn(12, 20, 5, 96, device=device).bfloat16()
    for view in (
        x[0, :, -1:], x[:, :, -1:], x.transpose(0, 2), x[0].transpose(0, 1), x[::2], x[:, ::2],
        x[:, :, :1].transpose(0, 1), x[0, :1, :1].expand(7, 1, 96),
    ):  # fmt: skip
        expected = torch.matmul(view.double(), weight.double())
        assert (cuda_ops.matmul(view, weight) - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("precision", ["high", None, ["ieee"]], ids=str)
def test_no_such_precision(precision: Any) -> None:
    expected = f"'precision': expected one of 'ieee', 'tf32', 'tf32x3', got {precision!r}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        cuda_ops.matmul(torch.ones(2, 2), torch.ones(2, 2), precision=precision)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [(None, "None"), ([[1.0]], "list"), (2.0, "float")],
    ids=str,
)
def test_what_is_no_tensor_is_refused_by_name(precision: str, value: Any, kind: str) -> None:
    for name in ("a", "b"):
        args = {"a": torch.ones(2, 2), "b": torch.ones(2, 2), name: value}
        expected = f"cuda_ops::matmul: argument '{name}': expected a tensor, got {kind}"
        with pytest.raises(RuntimeError, match=f"^{expected}$"):
            cuda_ops.matmul(**args, precision=precision)


REFUSED = [
    ((), (3,), "'a': expected at least 1 dims (..., k), got shape []"),
    ((3,), (), "'b': expected at least 1 dims (..., k), got shape []"),
    ((2, 5), (4,), "'b': expected dim 'k' of (..., k) to be 5, got shape [4]"),
    ((4,), (5, 2), "'b': expected dim 'k' of (..., k, n) to be 4, got shape [5, 2]"),
    ((2, 3, 4), (3, 4, 5),
     "'b': expected dims '...' of (..., k, n) to broadcast with [2], got shape [3, 4, 5]"),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "expected"), REFUSED, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("device", ["meta", *DEVICES])
def test_shapes_are_refused_as_they_were_given(
    a: tuple[int, ...], b: tuple[int, ...], expected: str, device: str
) -> None:
    for precision in PRECISIONS:
        x, y = torch.ones(a, device=device), torch.ones(b, device=device)
        with pytest.raises(RuntimeError, match=f"^cuda_ops::matmul: .*{re.escape(expected)}"):
            cuda_ops.matmul(x, y, precision=precision)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint32], ids=str)
def test_other_dtypes_are_called_by_their_names(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for device in ("cpu", "meta"):
        a = torch.zeros(2, 2, device=device).to(dtype)
        with pytest.raises(RuntimeError, match=f"'a': expected dtype .* or bfloat16, got {name}$"):
            cuda_ops.matmul(a, a)


def test_batch_dims_of_1_do_not_count() -> None:
    b = torch.randn(3, 4)
    a = torch.randn(*[1, 2] * 10, 2, 3)
    torch.testing.assert_close(cuda_ops.matmul(a, b), torch.matmul(a, b))
    expected = "matmul: argument 'a': expected at most 16 batch dims other than 1 in the result"
    with pytest.raises(RuntimeError, match=expected):
        cuda_ops.matmul(torch.ones([2] * 17 + [1, 3]), b)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_meta(precision: str) -> None:
    a, b = torch.empty(2, 3, 5, device="meta"), torch.empty(5, 4, device="meta")
    out = cuda_ops.matmul(a, b, precision=precision)
    assert out.device.type == "meta" and out.shape == (2, 3, 4)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
@on_each_device
def test_precisions(precision: str, device: str) -> None:
    a, b = torch.randn(200, 3000, device=device), torch.randn(3000, 136, device=device)
    exact = a.double() @ b.double()

    def error(c: torch.Tensor) -> float:
        return float((c.double() - exact).norm() / exact.norm())

    allowed = {"ieee": 1.0, "tf32": 4096.0, "tf32x3": 2.0}[precision]
    assert error(cuda_ops.matmul(a, b, precision=precision)) <= allowed * max(error(a @ b), 1e-7)
    halves = cuda_ops.matmul(a.bfloat16(), b.bfloat16(), precision=precision)
    assert halves.dtype is torch.bfloat16


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_autocast_lowers_every_precision(precision: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = cuda_ops.matmul(torch.ones(2, 3), torch.ones(3, 2), precision=precision)
    assert out.dtype is torch.bfloat16


def test_compiled_with_vectors_and_precisions() -> None:
    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return cuda_ops.matmul(a, b) + cuda_ops.matmul(a, b, precision="tf32x3")

    a, b = torch.randn(3, 5), torch.randn(5)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), 2 * (a @ b))


def test_derivatives_of_any_order() -> None:
    a = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cuda_ops.matmul, (a, b))
    assert torch.autograd.gradgradcheck(cuda_ops.matmul, (a, b))


@pytest.mark.parametrize(
    ("a", "b", "shared"), [((8, 6, 5), (5, 4), 1), ((6, 5), (8, 5, 2), 0)], ids=str
)
def test_what_a_batch_shares_gets_one_product(
    a: tuple[int, ...], b: tuple[int, ...], shared: int
) -> None:
    inputs = torch.randn(a), torch.randn(b)
    matrix = inputs[shared].requires_grad_()
    out = cuda_ops.matmul(*inputs)
    with Recorder() as calls:
        torch.autograd.grad(out, matrix, torch.randn_like(out))
    assert calls.results("matmul") == [matrix.shape]
    assert calls.results("sum") == []


def test_a_factor_is_saved_for_the_other_ones_gradient() -> None:
    x, weight = torch.randn(2, 3, 5), torch.randn(5, 4)
    for function in (cuda_ops.matmul, torch.ops.cuda_ops.matmul):
        for wanted, expected in ((x, weight), (weight, x)):
            saved: list[torch.Tensor] = []
            args = [tensor.detach().requires_grad_(tensor is wanted) for tensor in (x, weight)]
            with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
                function(*args)
            assert [tensor.data_ptr() for tensor in saved] == [expected.data_ptr()]


def test_shards_as_torch_mm_does(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    cases = [
        (Shard(0), Replicate(), Shard(0)),
        (Replicate(), Shard(1), Shard(1)),
        (Shard(1), Shard(0), Partial()),
    ]
    for place_a, place_b, expected in cases:
        a = DTensor.from_local(torch.randn(4, 6), mesh, [place_a], run_check=False)
        b = DTensor.from_local(torch.randn(6, 8), mesh, [place_b], run_check=False)
        with CommDebugMode() as communication:
            out = cuda_ops.matmul(a, b)
        assert communication.get_total_counts() == 0
        assert out.placements == (expected,)
        torch.testing.assert_close(out.to_local(), a.to_local() @ b.to_local())


def test_tokens_that_are_sharded_stay_where_they_are(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    for dim in (0, 1):
        a = DTensor.from_local(torch.randn(2, 4, 6), mesh, [Shard(dim)], run_check=False)
        b = DTensor.from_local(torch.randn(6, 8), mesh, [Replicate()], run_check=False)
        inputs = a.requires_grad_(), b.requires_grad_()
        with CommDebugMode() as communication:
            gradients = torch.autograd.grad(cuda_ops.matmul(*inputs).square().sum(), inputs)
        assert communication.get_total_counts() == 0
        assert [g.placements for g in gradients] == [(Shard(dim),), (Partial(),)]


def test_gradients_of_a_linear_layer_several_at_once() -> None:
    """Where a batch of rows has one weight, its gradient is one product."""
    x, w = torch.randn(2, 4, 6), torch.randn(6, 5)
    expected = torch.autograd.functional.jacobian(torch.matmul, (x, w), vectorize=True)
    actual = torch.autograd.functional.jacobian(cuda_ops.matmul, (x, w), vectorize=True)
    torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("shapes", [((4, 6), (6,)), ((4,), (4, 6)), ((6,), (6,))])
def test_traced_by_torchscript(shapes: tuple[Any, Any]) -> None:
    a, b = (torch.randn(shape) for shape in shapes)
    traced = torch.jit.trace(lambda a, b: cuda_ops.matmul(a, b), (a, b))
    torch.testing.assert_close(traced(a + 1, b), cuda_ops.matmul(a + 1, b))
    rows, columns = torch.randn(2, 4, 6), torch.randn(2, 6, 3)
    several = torch.jit.trace(lambda a, b: torch.vmap(cuda_ops.matmul)(a, b), (rows, columns))
    torch.testing.assert_close(several(rows, columns), torch.matmul(rows, columns))
