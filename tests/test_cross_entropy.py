"""softmax_cross_entropy against torch, with its gradient: any shape, layout, dtype and option."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_ops
from cuda_ops.compile_ops import reload


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("softmax_cross_entropy")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
FLOATING = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
REDUCTIONS = ["mean", "sum", "none"]
on_each_device = pytest.mark.parametrize("device", DEVICES)
reduced = pytest.mark.parametrize("reduction", REDUCTIONS)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "rows left out": lambda x: x.repeat_interleave(2, 0)[::2],
    "part of longer rows": lambda x: F.pad(x, (3, 5))[..., 3:-5],
    "all but the last": lambda x: F.pad(x, (0, 1))[..., :-1],
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns": lambda x: x.mT.contiguous().mT,
    "an odd start": lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape),
}


def drawn(
    shape: tuple[int, ...], classes: int, seed: int, ignored: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits, and labels of which about so many are ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, classes, generator=generator)
    labels = torch.randint(0, classes, shape, generator=generator)
    return logits, labels.masked_fill(torch.rand(shape, generator=generator) < ignored, -100)


def exact(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """Computes torch's in float64; torch wants the classes in the second dim, or alone."""
    wide = logits.double()
    return F.cross_entropy(wide if wide.dim() < 3 else wide.movedim(-1, 1), labels, **options)


def agrees(actual: torch.Tensor, expected: torch.Tensor, size: float = 1.0) -> None:
    """Within the rounding of the result, and of numbers of that size on the way."""
    summed = torch.float64 if actual.dtype is torch.float64 else torch.float32
    unit = torch.finfo(summed).eps * (8 if summed is torch.float64 else 1)  # torch's own errors
    rtol, atol = torch.finfo(actual.dtype).eps + 32 * unit, 32 * unit * size
    if actual.dtype is torch.float16:
        atol += 2**-24  # half of its smallest number, and a little
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol, equal_nan=True)


def compare(logits: torch.Tensor, labels: torch.Tensor, size: float = 16.0, **options: Any) -> None:
    """Compares losses and gradients with torch's."""
    # The log of a sum is kept in float64: logits that are as exact lose digits of the gradient.
    lost = logits.nan_to_num(0, 0, 0).abs().max() / 32 if logits.dtype is torch.float64 else 1.0
    x = logits.detach().requires_grad_()
    loss = cuda_ops.softmax_cross_entropy(x, labels, **options)
    assert loss.dtype is x.dtype
    wide = logits.detach().double().requires_grad_()
    expected = exact(wide, labels, **options)
    agrees(loss, expected, size)
    grad = torch.rand(loss.shape, generator=torch.Generator().manual_seed(0)).to(loss) + 0.5
    (actual,) = torch.autograd.grad(loss, x, grad)
    (wanted,) = torch.autograd.grad(expected, wide, grad.double())
    assert actual.dtype is x.dtype and actual.shape == x.shape
    # At the label a probability less 1 may leave little of either.
    count = max(1, (labels != options.get("ignore_index", -100)).sum().item())
    part = count if options.get("reduction", "mean") == "mean" else 1
    agrees(actual, wanted, max(1.0, lost) * 1.5 / part)


lengths = st.one_of(
    st.integers(1, 40), st.sampled_from([64, 100, 127, 256, 513, 1000, 1024, 4096, 5003])
)


@on_each_device
@settings(max_examples=120, deadline=None)
@given(
    loop=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    classes=lengths,
    dtype=st.sampled_from(FLOATING),
    view=st.sampled_from(sorted(VIEWS)),
    smoothing=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    ignored=st.sampled_from([0.0, 0.5]),
    reduction=st.sampled_from(REDUCTIONS),
)
def test_it_agrees_with_torch(
    device: str,
    loop: list[int],
    classes: int,
    dtype: torch.dtype,
    view: str,
    smoothing: float,
    ignored: float,
    reduction: str,
) -> None:
    logits, labels = drawn(tuple(loop), classes, classes, ignored)
    logits = VIEWS[view](logits.to(device, dtype))
    options = {"label_smoothing": smoothing, "reduction": reduction}
    compare(logits, labels.to(device), **options)


@reduced
@on_each_device
def test_gradcheck(reduction: str, device: str) -> None:
    for shape, classes, smoothing in (((3,), 5, 0.0), ((2, 2), 4, 0.2), ((), 7, 1.0)):
        logits, labels = drawn(shape, classes, 1)
        x = logits.to(device, torch.float64).requires_grad_()

        def loss(x: torch.Tensor, labels: Any = labels, smoothing: float = smoothing) -> Any:
            return cuda_ops.softmax_cross_entropy(
                x, labels.to(device), label_smoothing=smoothing, reduction=reduction
            )

        assert torch.autograd.gradcheck(loss, (x,))


@pytest.mark.parametrize("classes", [8, 50, 4096, 4099, 50_257, 128_256])
@pytest.mark.parametrize("rows", [1, 3, 200])
@on_each_device
def test_rows_of_any_length(rows: int, classes: int, device: str) -> None:
    if device == "cpu" and rows * classes > 2**22:
        pytest.skip("long on a CPU")
    for dtype in (torch.float32, torch.bfloat16):
        logits, labels = drawn((rows,), classes, rows, 0.1)
        compare(logits.to(device, dtype), labels.to(device), label_smoothing=0.1)


@reduced
@on_each_device
def test_the_label_may_be_any(reduction: str, device: str) -> None:
    logits, _ = drawn((19,), 19, 0)
    compare(logits.to(device), torch.arange(19, device=device), reduction=reduction)


@reduced
@on_each_device
def test_all_rows_ignored(reduction: str, device: str) -> None:
    x = torch.randn(3, 10, device=device, requires_grad=True)
    labels = torch.full((3,), 7, device=device)
    loss = cuda_ops.softmax_cross_entropy(x, labels, 7, 0.1, reduction)
    expected = F.cross_entropy(x, labels, ignore_index=7, label_smoothing=0.1, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    loss.sum().backward()
    assert x.grad is not None and not x.grad.any()


@reduced
@on_each_device
def test_an_ignored_row_is_not_read(reduction: str, device: str) -> None:
    logits, labels = drawn((4,), 300, 0)
    labels[1] = -100
    x, labels = logits.to(device).requires_grad_(), labels.to(device)
    found = []
    for value in (0.0, torch.nan):
        with torch.no_grad():
            x[1] = value
        loss = cuda_ops.softmax_cross_entropy(x, labels, label_smoothing=0.1, reduction=reduction)
        found.append((loss, *torch.autograd.grad(loss.sum(), x)))
    assert all(map(torch.equal, *found))


@on_each_device
def test_no_rows(device: str) -> None:
    x = torch.randn(0, 10, device=device, requires_grad=True)
    labels = torch.zeros(0, dtype=torch.int64, device=device)
    assert cuda_ops.softmax_cross_entropy(x, labels).isnan()
    assert cuda_ops.softmax_cross_entropy(x, labels, reduction="sum") == 0
    loss = cuda_ops.softmax_cross_entropy(x, labels, reduction="none")
    assert loss.shape == (0,)
    loss.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@on_each_device
def test_loop_dims_broadcast(device: str) -> None:
    logits, _ = drawn((3, 1), 40, 0)
    labels = torch.randint(0, 40, (5,))
    x = logits.to(device).requires_grad_()
    loss = cuda_ops.softmax_cross_entropy(x, labels.to(device), reduction="none")
    assert loss.shape == (3, 5)
    whole = logits.expand(3, 5, 40).double().requires_grad_()
    expected = exact(whole.reshape(15, 40), labels.repeat(3), reduction="none").view(3, 5)
    agrees(loss, expected.to(device))
    (grad,) = torch.autograd.grad(loss.sum(), x)
    (wanted,) = torch.autograd.grad(expected.sum(), whole)
    agrees(grad, wanted.sum(1, keepdim=True).to(device), 5)


# --- unusual numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [7, 40, 5000])
@on_each_device
def test_minus_infinity_is_a_class_that_cannot_be(classes: int, device: str) -> None:
    logits, labels = drawn((5,), classes, 0)
    masked = torch.rand(5, classes, generator=torch.Generator().manual_seed(1)) < 0.5
    masked[0, :] = torch.arange(classes) < classes - 2  # all but the end
    masked[1, :] = True
    logits = logits.masked_fill(masked, -torch.inf)
    logits[2, labels[2]] = -torch.inf  # the loss is infinite
    for dtype in FLOATING:
        for smoothing in (0.0, 0.1):
            x = logits.to(device, dtype)
            compare(x, labels.to(device), label_smoothing=smoothing, reduction="none")


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@on_each_device
def test_what_is_no_number_stays_in_its_row(value: float, device: str) -> None:
    for classes in (7, 300, 5000):
        logits, labels = drawn((3,), classes, 0)
        logits[1, 5] = value
        x = logits.to(device).requires_grad_()
        loss = cuda_ops.softmax_cross_entropy(x, labels.to(device), reduction="none")
        assert loss.isnan().tolist() == [False, True, False]
        (grad,) = torch.autograd.grad(loss.sum(), x)
        assert grad[1].isnan().all() and not grad[::2].isnan().any()


@on_each_device
@pytest.mark.parametrize("dtype", FLOATING)
def test_huge_logits_lose_no_digits(dtype: torch.dtype, device: str) -> None:
    logits, labels = drawn((6,), 1000, 0)
    for offset, scale in ((0, 1e4), (3e4, 1), (-3e4, 100), (1e7, 1e6)):
        if offset + 5 * scale > torch.finfo(dtype).max:
            continue
        x = (offset + scale * logits).to(device, dtype)
        compare(x, labels.to(device), size=scale * 16, reduction="none")
        compare(x, labels.to(device), size=scale * 16, reduction="none", label_smoothing=0.1)


@on_each_device
def test_probabilities_of_huge_logits(device: str) -> None:
    """A log of the sum in float32 would be off by up to 0.03 here, and each probability with it."""
    x = torch.full((1, 5), 1e6, device=device)
    x[0, 3] -= 1
    x.requires_grad_()
    loss = cuda_ops.softmax_cross_entropy(x, torch.tensor([3], device=device))
    agrees(loss, exact(x, torch.tensor([3], device=device)))
    loss.backward()
    assert x.grad is not None
    wanted = torch.softmax(x.detach().double(), -1)
    wanted[0, 3] -= 1
    agrees(x.grad, wanted)


@reduced
@on_each_device
def test_the_same_bits_every_time(reduction: str, device: str) -> None:
    logits, labels = drawn((300,), 3000, 0, 0.1)
    x, labels = logits.to(device).requires_grad_(), labels.to(device)

    def step() -> tuple[torch.Tensor, ...]:
        loss = cuda_ops.softmax_cross_entropy(x, labels, label_smoothing=0.1, reduction=reduction)
        return loss, *torch.autograd.grad(loss.sum(), x)

    first = step()
    for _ in range(3):
        assert all(map(torch.equal, first, step()))


# --- torch's other ways to call ------------------------------------------------------------------


@reduced
@on_each_device
def test_it_is_compiled(reduction: str, device: str) -> None:
    logits, labels = drawn((6,), 50, 0, 0.2)
    x, labels = logits.to(device).requires_grad_(), labels.to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return 2 * cuda_ops.softmax_cross_entropy(
            x, labels, label_smoothing=0.1, reduction=reduction
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), step(x))
    found, expected = (torch.autograd.grad(f(x).sum(), x) for f in (compiled, step))
    assert torch.equal(found[0], expected[0])


@reduced
@on_each_device
def test_it_is_mapped(reduction: str, device: str) -> None:
    logits, labels = drawn((4, 3), 20, 0)
    logits, labels = logits.to(device), labels.to(device)

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cuda_ops.softmax_cross_entropy(x, labels, reduction=reduction).sum()

    found = torch.vmap(torch.func.grad_and_value(loss))(logits, labels)
    for i in range(4):
        for one, other in zip(found, torch.func.grad_and_value(loss)(logits[i], labels[i]),
                              strict=True):  # fmt: skip
            torch.testing.assert_close(one[i], other)


@on_each_device
def test_the_operator_is_the_function(device: str) -> None:
    logits, labels = drawn((6,), 50, 0, 0.2)
    x, labels = logits.to(device).requires_grad_(), labels.to(device)
    for reduction in REDUCTIONS:
        made = torch.ops.cuda_ops.softmax_cross_entropy(x, labels, -100, 0.1, reduction)
        assert torch.equal(made, cuda_ops.softmax_cross_entropy(x, labels, -100, 0.1, reduction))
        assert made.requires_grad
    assert isinstance(cuda_ops.softmax_cross_entropy_rows(x, labels), torch.Tensor)


@on_each_device
def test_the_gradient_keeps_a_number_for_each_row(device: str) -> None:
    """No copy of the logits, and nothing else of their size."""
    logits, labels = drawn((6,), 50, 0)
    x, kept = logits.to(device).requires_grad_(), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        cuda_ops.softmax_cross_entropy(x, labels.to(device))
    assert sum(t.numel() for t in kept if t.data_ptr() != x.data_ptr()) <= 2 * 6 + 1


# --- the gradient in place of the logits ---------------------------------------------------------


@reduced
@pytest.mark.parametrize("view", ["dense", "part of longer rows", "columns"])
@on_each_device
def test_the_gradient_may_take_the_place_of_the_logits(
    view: str, reduction: str, device: str
) -> None:
    hidden, labels = drawn((2, 3), 8, 0, 0.2)
    hidden, labels = hidden.to(device), labels.to(device)
    weight = torch.randn(8, 50, device=device, requires_grad=True)

    def step(overwrite: bool) -> tuple[torch.Tensor, ...]:
        logits = VIEWS[view](hidden @ weight)
        loss = cuda_ops.softmax_cross_entropy(
            logits, labels, -100, 0.1, reduction, overwrite_logits=overwrite
        )
        before = logits.detach().clone()
        grads = torch.autograd.grad(loss.sum(), (logits, weight))
        assert torch.equal(logits, grads[0] if overwrite else before)
        assert (logits.data_ptr() == grads[0].data_ptr()) == overwrite
        return loss, *grads

    assert all(map(torch.equal, step(True), step(False)))


@on_each_device
@pytest.mark.parametrize("view", ["unfolded", "expanded"])
def test_logits_whose_rows_share_memory_are_not_written_over(view: str, device: str) -> None:
    x, labels = torch.randn(9, device=device, requires_grad=True), torch.tensor([1, 2, 3])

    def gradient(overwrite: bool) -> torch.Tensor:
        y = 2 * x
        rows = y.unfold(0, 5, 2) if view == "unfolded" else y[:5].expand(3, 5)
        loss = cuda_ops.softmax_cross_entropy(rows, labels.to(device), overwrite_logits=overwrite)
        return torch.autograd.grad(loss, x)[0]

    torch.testing.assert_close(gradient(True), gradient(False))


@on_each_device
def test_overwritten_logits_give_no_second_gradient(device: str) -> None:
    logits, labels = drawn((3,), 20, 0)
    x, labels = logits.to(device).requires_grad_(), labels.to(device)
    y = 2 * x
    loss = cuda_ops.softmax_cross_entropy(y, labels, overwrite_logits=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    other = cuda_ops.softmax_cross_entropy(z := 2 * x, labels, overwrite_logits=True)
    squares = z.square().sum()  # needs the logits after they are overwritten
    other.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@on_each_device
def test_logits_stay_where_they_cannot_be_overwritten(device: str) -> None:
    logits, labels = drawn((4,), 20, 0)
    x, labels = logits.to(device).requires_grad_(), labels.to(device)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return cuda_ops.softmax_cross_entropy(x + 0, labels, overwrite_logits=True)

    (expected,) = torch.autograd.grad(cuda_ops.softmax_cross_entropy(x, labels), x)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], expected)
    assert torch.equal(torch.func.grad(loss)(x.detach()), expected)
    assert torch.equal(torch.autograd.grad(loss(x), x, create_graph=True)[0], expected)
    row = logits[:1].to(device).requires_grad_()  # one for all labels
    broadcast = cuda_ops.softmax_cross_entropy(
        row + 0, labels, reduction="none", overwrite_logits=True
    )
    torch.autograd.grad(broadcast.sum(), row)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("shape", [(3, 1), (1,), (2, 3), ()], ids=str)
def test_labels_that_broadcast_are_not_summed_up(reduction: str, shape: tuple[int, ...]) -> None:
    text = re.escape(
        f"expected shape [3], that of 'logits' without its last dim, got shape {[*shape]}"
    )
    with pytest.raises(RuntimeError, match=f"cross_entropy: argument 'labels': {text}$"):
        cuda_ops.softmax_cross_entropy(
            torch.zeros(3, 5), torch.zeros(shape, dtype=torch.int64), reduction=reduction
        )


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_what_is_refused(device: str) -> None:
    x = torch.zeros(2, 12, device=device)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    for smoothing in (-0.1, 1.5, float("nan")):
        with pytest.raises(RuntimeError, match="'label_smoothing': expected a number from 0 to 1"):
            cuda_ops.softmax_cross_entropy(x, labels, label_smoothing=smoothing)
    message = "cross_entropy: argument 'reduction': expected 'mean', 'sum' or 'none', got 'max'"
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.softmax_cross_entropy(x, labels, reduction="max")
    with pytest.raises(RuntimeError, match="'labels': expected dtype int64, got int32"):
        cuda_ops.softmax_cross_entropy(x, labels.int())
    with pytest.raises(RuntimeError, match=r"'labels': expected shape \[2\], that of 'logits'"):
        cuda_ops.softmax_cross_entropy(x, labels.new_zeros(3))
    with pytest.raises(RuntimeError, match="'logits': expected at least 1 dims"):
        cuda_ops.softmax_cross_entropy(x[0, 0], labels)
    with pytest.raises(RuntimeError, match="'logits': expected dtype float64, float32"):
        cuda_ops.softmax_cross_entropy(labels.expand(2, 2), labels)


@pytest.mark.parametrize("label", [-1, 12, 2**40])
@reduced
def test_a_label_out_of_range(label: int, reduction: str) -> None:
    message = f"'labels': expected indices from 0 to below 12, .* or -100 to ignore, got {label}"
    labels = torch.tensor([3, label])
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.softmax_cross_entropy(torch.zeros(2, 12), labels, reduction=reduction)


# --- on a GPU alone ------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("label", [-1, 5000, 2**40])
@pytest.mark.parametrize("rows", [2, 2000])
def test_a_label_out_of_range_is_nan_on_a_gpu(label: int, rows: int) -> None:
    logits, labels = drawn((rows,), 5000, 0)
    labels[1] = label
    x = logits.cuda().requires_grad_()
    loss = cuda_ops.softmax_cross_entropy(x, labels.cuda(), label_smoothing=0.1, reduction="none")
    assert loss[1].isnan() and not loss[0].isnan() and not loss[2:].isnan().any()
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert grad[1].isnan().all() and not grad[0].isnan().any() and not grad[2:].isnan().any()
    assert cuda_ops.softmax_cross_entropy(x, labels.cuda()).isnan()


@needs_gpu
def test_in_a_cuda_graph() -> None:
    logits, labels = drawn((300,), 1000, 0, 0.1)
    x, labels = logits.cuda().requires_grad_(), labels.cuda()

    def step() -> tuple[torch.Tensor, ...]:
        loss = cuda_ops.softmax_cross_entropy(x, labels)
        # Detached: a loss that is kept ties the leaf to the stream that it was first used on.
        return loss.detach(), *torch.autograd.grad(loss, x)

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(map(torch.equal, captured, expected))


@needs_gpu
def test_more_than_2_to_the_31_elements() -> None:
    part = torch.randn(1 << 10, 32_000, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 32_000, (1 << 10,), device="cuda")
    x, many = part.repeat(66, 1), labels.repeat(66)
    assert x.numel() > 2**31
    loss, lse = torch.ops.cuda_ops.softmax_cross_entropy_rows(x, many)
    expected = torch.ops.cuda_ops.softmax_cross_entropy_rows(part, labels)
    torch.testing.assert_close(loss[-1024:], expected[0])
    torch.testing.assert_close(lse[-1024:], expected[1])
    backward = torch.ops.cuda_ops.softmax_cross_entropy_rows_backward
    assert torch.equal(backward(loss, x, many, lse)[-1024:],
                       backward(loss[-1024:], part, labels, lse[-1024:]))  # fmt: skip
