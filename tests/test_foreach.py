"""foreach_axpy and foreach_axpy_ against torch._foreach_add: any lists, layouts and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.testing import PROFILES, check_op


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("foreach_axpy")


@pytest.mark.parametrize("name", ["foreach_axpy", "foreach_axpy_"])
def test_the_checks_that_take_lists_pass(name: str) -> None:
    report = check_op(name, profile=PROFILES["quick"], isolate=False)
    assert report.passed, str(report)
    ran = {entry.check for entry in report.entries if entry.passed}
    assert ran >= {"reference", "numerics", "mutation", "registration", "public", "opcheck"}


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
on_each_device = pytest.mark.parametrize("device", DEVICES)

Tensors = list[torch.Tensor]


def viewed(x: torch.Tensor, view: str) -> torch.Tensor:
    if view == "transposed":
        return x.mT.contiguous().mT if x.dim() > 1 else x
    if view == "stepped":
        return x.repeat_interleave(2, -1)[..., ::2] if x.dim() > 0 else x
    if view == "an odd start":
        return F.pad(x.flatten(), (1, 0))[1:].view(x.shape)
    return x


VIEWS = ["dense", "transposed", "stepped", "an odd start"]


def drawn(
    shapes: list[tuple[int, ...]],
    dtypes: list[torch.dtype],
    views: list[str],
    device: str,
    seed: int,
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return [
        viewed(
            torch.randn(shape, generator=generator).to(device, dtypes[i % len(dtypes)]),
            views[i % len(views)],
        )
        for i, shape in enumerate(shapes)
    ]


def agree(actual: Any, xs: Tensors, ys: Tensors, alpha: float) -> None:
    assert len(actual) == len(xs)
    for out, x, y in zip(actual, xs, ys, strict=True):
        assert out.shape == x.shape and out.dtype is x.dtype
        expected = alpha * x.double() + y.double()
        eps = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
        scale = (abs(alpha) * x.double().abs() + y.double().abs()).max() if x.numel() else 0
        torch.testing.assert_close(
            out.double(),
            expected,
            rtol=torch.finfo(x.dtype).eps,
            atol=4 * eps * float(scale) + 2**-24,
        )


shapes_drawn = st.lists(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 16, 33, 100]), max_size=3).map(tuple),
    min_size=1,
    max_size=9,
)


@on_each_device
@settings(max_examples=100, deadline=None)
@given(
    shapes=shapes_drawn,
    dtypes=st.lists(st.sampled_from(FLOATING), min_size=1, max_size=3),
    views=st.lists(st.sampled_from(VIEWS), min_size=1, max_size=3),
    others=st.lists(st.sampled_from(VIEWS), min_size=1, max_size=3),
    alpha=st.sampled_from([1.0, 0.0, -0.5, 3.25, 1e-3]),
)
def test_it_agrees_with_torch(
    device: str, shapes: Any, dtypes: Any, views: Any, others: Any, alpha: float
) -> None:
    xs = drawn(shapes, dtypes, views, device, 1)
    ys = drawn(shapes, dtypes, others, device, 2)
    before = [y.clone() for y in ys]
    outs = cuda_ops.foreach_axpy(xs, ys, alpha)
    agree(outs, xs, ys, alpha)
    fakes = cuda_ops.foreach_axpy(
        [
            x.to("meta")
            if x.is_contiguous()
            else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            for x in xs
        ],
        [
            y.to("meta")
            if y.is_contiguous()
            else torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta")
            for y in ys
        ],
        alpha,
    )
    for fake, out in zip(fakes, outs, strict=True):
        assert (fake.shape, fake.dtype) == (out.shape, out.dtype)
        assert fake.stride() == out.stride() or out.numel() < 2
    strides = [y.stride() for y in ys]
    assert cuda_ops.foreach_axpy_(xs, ys, alpha) is None
    agree(ys, xs, before, alpha)
    assert [y.stride() for y in ys] == strides


@on_each_device
@pytest.mark.parametrize("count", [1, 2, 110, 111, 112, 200, 400])
def test_lists_of_any_length(count: int, device: str) -> None:
    shapes = [((i * 37) % 500,) for i in range(count)]  # some of them empty
    xs, ys = (drawn(shapes, FLOATING[1:2], ["dense"], device, seed) for seed in (1, 2))
    agree(cuda_ops.foreach_axpy(xs, ys, 0.5), xs, ys, 0.5)
    mixed = [drawn(shapes, FLOATING, VIEWS, device, seed) for seed in (1, 2)]
    agree(cuda_ops.foreach_axpy(*mixed, alpha=-2.0), *mixed, -2.0)


@on_each_device
@pytest.mark.parametrize("numel", [4095, 4096, 4097, 8191, 8192, 8193, 16_384, 100_003])
def test_tensors_around_the_size_of_a_block(numel: int, device: str) -> None:
    for dtype in FLOATING:
        for view in ("dense", "an odd start"):
            xs, ys = (
                drawn([(numel,), (3,), (numel + 1,)], [dtype], [view], device, seed)
                for seed in (1, 2)
            )
            agree(cuda_ops.foreach_axpy(xs, ys, 0.5), xs, ys, 0.5)


@on_each_device
def test_what_lies_between_is_left(device: str) -> None:
    y = torch.randn(4, 24, device=device)
    before = y.clone()
    x = torch.ones(4, 8, device=device)
    cuda_ops.foreach_axpy_([x], [y[:, 4:12]], 2.0)
    assert torch.equal(y[:, :4], before[:, :4]) and torch.equal(y[:, 12:], before[:, 12:])
    torch.testing.assert_close(y[:, 4:12], before[:, 4:12] + 2)


@on_each_device
def test_gradients(device: str) -> None:
    shapes = [(3, 2), (), (4,)]
    xs, ys = (
        [torch.randn(s, dtype=torch.float64, device=device).requires_grad_() for s in shapes]
        for _ in range(2)
    )

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(cuda_ops.foreach_axpy(list(tensors[:3]), list(tensors[3:]), 0.25))

    assert torch.autograd.gradcheck(function, (*xs, *ys))
    assert torch.autograd.gradgradcheck(lambda *t: function(*[v * v for v in t]), (*xs, *ys))
    # One result alone, of two tensors that require a gradient.
    outs = cuda_ops.foreach_axpy([xs[0], xs[1].detach()], [ys[0].detach(), ys[1]], 3.0)
    (grad,) = torch.autograd.grad(outs[0].sum(), xs[0])
    assert torch.equal(grad, torch.full_like(xs[0], 3.0))


@on_each_device
def test_in_place_takes_no_gradient(device: str) -> None:
    x, y = torch.ones(3, device=device), torch.ones(3, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="'ys'"):
        cuda_ops.foreach_axpy_([x], [y])
    with torch.no_grad():
        cuda_ops.foreach_axpy_([x], [y])
    assert y.tolist() == [2.0] * 3


@on_each_device
def test_memory_may_not_be_written_twice(device: str) -> None:
    y = torch.ones(4, device=device)
    with pytest.raises(RuntimeError, match="argument 'ys': expected memory of its own"):
        cuda_ops.foreach_axpy_([torch.ones_like(y)] * 2, [y, y])
    cuda_ops.foreach_axpy_([y], [y], 2.0)
    assert y.tolist() == [3.0] * 4


@on_each_device
@pytest.mark.parametrize(("shape", "strides", "got"), [
    ((3, 5), (2, 1), "one of overlapping rows"),  # windows
    ((3, 5), (1, 2), "one of overlapping rows"),
    ((2, 2), (3, 3), "one of overlapping rows"),
    ((2, 2, 3), (9, 4, 6), ""),
    ((3, 5), (0, 1), "one with stride 0"),
    ((3, 5), (6, 1), ""),
    ((2, 3), (3, 5), ""),
    ((3, 1), (0, 0), "one with stride 0"),
    ((0, 5), (0, 0), ""),
])  # fmt: skip
def test_elements_may_not_share_memory_where_they_are_written(
    shape: tuple[int, ...], strides: tuple[int, ...], got: str, device: str
) -> None:
    y = torch.zeros(40, device=device).as_strided(shape, strides)
    x = torch.ones(shape, device=device)
    if not got:
        cuda_ops.foreach_axpy_([x], [y])
        assert torch.equal(x, y)
        return
    with pytest.raises(RuntimeError, match=f"'ys': expected a tensor whose .*, got {got}$"):
        cuda_ops.foreach_axpy_([x], [y])


@on_each_device
def test_memory_shared_far_apart_in_long_lists(device: str) -> None:
    for at in (0, 450, 899):
        everything = torch.arange(4000.0, device=device)
        xs, ys = ([everything[start + 4 * i :][:2] for i in range(900)] for start in (0, 2))
        ys[at] = xs[7]  # read in another pair than the one that writes it
        xs[7] = torch.zeros(2, device=device)
        xs[at - 1] = ys[at]
        expected = [y + x for x, y in zip(xs, ys, strict=True)]
        cuda_ops.foreach_axpy_(xs, ys, 1.0)
        assert all(map(torch.equal, ys, expected))


@pytest.mark.parametrize(("xs", "ys", "message"), [
    ([(2,)], [], "'ys': expected as many tensors as in 'xs', which has 1, got 0"),
    ([(2,)], [(2,), (2,)], "'ys': expected as many tensors as in 'xs', which has 1, got 2"),
    ([(2,), (3,)], [(2,), (4,)],
     r"'ys\[1\]': expected shape \[3\] like 'xs\[1\]', got shape \[4\]"),
    ([(2,)], [(2, 1)], r"'ys\[0\]': expected shape \[2\] like 'xs\[0\]', got shape \[2, 1\]"),
])  # fmt: skip
@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_lists_that_do_not_fit(xs: Any, ys: Any, message: str, device: str) -> None:
    made = [[torch.ones(shape, device=device) for shape in shapes] for shapes in (xs, ys)]
    for function in (cuda_ops.foreach_axpy, cuda_ops.foreach_axpy_):
        with pytest.raises(RuntimeError, match=message):
            function(*made, 2.0)


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_other_dtypes(device: str) -> None:
    x = torch.ones(2, device=device)
    message = r"'ys\[1\]': expected dtype float32 like 'xs\[1\]', got bfloat16"
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.foreach_axpy([x, x], [x, x.bfloat16()])
    message = r"'xs\[0\]': expected dtype float64, float32, float16 or bfloat16, got int64"
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.foreach_axpy([x.long()], [x.long()])


def test_no_tensors() -> None:
    for function in (cuda_ops.foreach_axpy, cuda_ops.foreach_axpy_):
        with pytest.raises((RuntimeError, NotImplementedError)):
            function([], [], 1.0)


def test_a_graph_may_be_gone_through_twice_and_by_transforms() -> None:
    x, y, tangent = (torch.randn(3) for _ in range(3))

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cuda_ops.foreach_axpy([x, y], [y, y], 3.0)[0]

    _, backward = torch.func.vjp(function, x, y)
    for _ in range(2):
        torch.testing.assert_close(backward(tangent), (3 * tangent, tangent))
    torch.testing.assert_close(torch.func.jacrev(function)(x, y), 3 * torch.eye(3))
    each = torch.func.grad(lambda x, y: (function(x, y) ** 2).sum())
    found = torch.vmap(each)(x.expand(2, 3), torch.stack([y, x]))
    torch.testing.assert_close(found, 6 * torch.stack([3 * x + y, 4 * x]))


def test_vmap() -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 3)
    once = torch.randn(4)

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(cuda_ops.foreach_axpy([x, once, once], [y, y, once], 2.0))

    outs = torch.vmap(function, in_dims=(0, 1), out_dims=(0, 0, 0))(x, y)
    torch.testing.assert_close(outs[0], 2 * x + y.mT)
    torch.testing.assert_close(outs[1], 2 * once + y.mT)
    torch.testing.assert_close(outs[2], (3 * once).expand(3, 4))
    expected = y.mT + 2 * x
    write = torch.vmap(
        lambda x, y: cuda_ops.foreach_axpy_([x], [y], 2.0), in_dims=(0, 1), out_dims=None
    )
    write(x, y)
    torch.testing.assert_close(y.mT, expected)
    with pytest.raises(RuntimeError, match=r"'ys\[0\]': expected a tensor that torch.vmap maps"):
        torch.vmap(lambda x: cuda_ops.foreach_axpy_([x], [once], 2.0))(x)


def test_compiled() -> None:
    xs, ys = ([torch.randn(s).requires_grad_() for s in ((3, 2), (5,))] for _ in range(2))

    def loss(xs: Tensors, ys: Tensors) -> torch.Tensor:
        first, second = cuda_ops.foreach_axpy([x * 2 for x in xs], ys, 0.5)
        return (first * first).sum() + second.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(xs, ys), loss(xs, ys))
    got, wanted = (torch.autograd.grad(f(xs, ys), (*xs, *ys)) for f in (compiled, loss))
    torch.testing.assert_close(got, wanted)

    def step(xs: Tensors, ys: Tensors) -> Tensors:
        cuda_ops.foreach_axpy_(xs, ys, 0.5)
        return [y + 1 for y in ys]

    xs, ys = ([t.detach() for t in tensors] for tensors in (xs, ys))
    expected = [y + 0.5 * x + 1 for x, y in zip(xs, ys, strict=True)]
    outs = torch.compile(step, fullgraph=True, backend="aot_eager")(xs, ys)
    torch.testing.assert_close(outs, expected)
    torch.testing.assert_close(ys, [e - 1 for e in expected])


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_of_a_list_is_refused_by_name(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    text = "foreach_axpy: argument 'ys': expected a strided tensor, got a nested one"
    with pytest.raises(RuntimeError, match=text):
        cuda_ops.foreach_axpy([torch.ones(2)], [nested], 2.0)


# --- on a GPU alone ------------------------------------------------------------------------------


@needs_gpu
def test_in_a_cuda_graph() -> None:
    shapes = [((i * 37) % 5000,) for i in range(300)]
    xs, ys = (drawn(shapes, FLOATING, ["dense"], "cuda", seed) for seed in (1, 2))
    outs = cuda_ops.foreach_axpy(xs, ys, 0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = cuda_ops.foreach_axpy(xs, ys, 0.5)
    for x in xs:
        x.normal_()
    graph.replay()
    agree(outs, xs, ys, 0.5)


@needs_gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.ones(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    small = torch.ones(3, dtype=torch.bfloat16, device="cuda")
    cuda_ops.foreach_axpy_([x.clone(), small], [x, small.clone()], 2.0)
    assert bool((x[-9:] == 3).all()) and bool((x[:9] == 3).all())
