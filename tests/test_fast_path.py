"""The fast path of a public function where tensors may be ``None``, stand in lists or are written:
straight to the kernel where it can, and the dispatcher's results everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_gpu
from torch._subclasses.fake_tensor import FakeTensorMode

import cuda_ops
from cuda_ops.registry import registry

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
with_and_without = pytest.mark.parametrize("given", [True, False], ids=["given", "None"])


def drawn(*shape: int, device: str = "cpu", wanted: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(shape, generator=generator).to(device).requires_grad_(wanted)


def linear(given: bool, device: str = "cpu", wanted: bool = False) -> list[Any]:
    """Arguments of ``fused_linear_gelu``, whose bias may be missing."""
    bias = drawn(3, device=device, wanted=wanted) if given else None
    return [drawn(2, 4, device=device, wanted=wanted), drawn(3, 4, device=device), bias]


def route(given: bool, device: str = "cpu", wanted: bool = False) -> list[Any]:
    """Arguments of ``moe_route``, whose bias has no gradient."""
    bias = drawn(6, device=device) if given else None
    return [drawn(5, 6, device=device, wanted=wanted), 2, 0, True, bias]


each = pytest.mark.parametrize(("name", "make"), [("fused_linear_gelu", linear),
                                                  ("moe_route", route)])  # fmt: skip


def direct(name: str) -> Callable[..., Any]:
    getattr(cuda_ops, name)
    function: Callable[..., Any] = registry().loaded(name).direct
    return function


def forbid(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the dispatcher's way raise."""

    def unwanted(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the dispatcher was asked")

    for way in ("_overload", "_dispatch"):
        monkeypatch.setitem(function.__globals__, way, unwanted)


def first_of(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


@each
@with_and_without
@on_each_device
def test_results_and_gradients_are_those_of_the_dispatcher(
    name: str, make: Any, given: bool, device: str
) -> None:
    found = []
    for function in (direct(name), getattr(torch.ops.cuda_ops, name)):
        args = make(given, device, wanted=True)
        out = function(*args)
        first_of(out).sum().backward()
        grads = [x.grad for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
        with torch.no_grad():
            without = function(*args)
        with torch.inference_mode():
            inferring = function(*args)
        found.append([out, grads, without, inferring])
        assert grads and all(grad is not None for grad in grads)
    torch.testing.assert_close(*found)


@each
@with_and_without
def test_the_kernel_is_called_without_the_dispatcher(
    name: str, make: Any, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = direct(name)
    forbid(function, monkeypatch)
    function(*make(given))
    function(*make(given, wanted=True))
    with pytest.raises(AssertionError, match="the dispatcher"), torch.autocast("cpu"):
        function(*make(given))


@each
def test_what_is_no_plain_tensor_goes_to_the_dispatcher(name: str, make: Any) -> None:
    """Where only the tensor that may be missing is special."""
    function, theirs = direct(name), getattr(torch.ops.cuda_ops, name)
    *args, bias = make(True)
    biases = torch.stack([bias, 2 * bias])
    of_each = torch.vmap(lambda function, bias: first_of(function(*args, bias)), (None, 0))
    torch.testing.assert_close(of_each(function, biases), of_each(theirs, biases))
    shape = first_of(theirs(*args, bias)).shape
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in (*args, bias)]
        assert first_of(function(*fakes)).shape == shape


@each
def test_what_is_no_tensor_is_refused_by_name(name: str, make: Any) -> None:
    *args, _ = make(False)
    op = registry().loaded(name).spec
    argument = op.tensor_names[-1]
    with pytest.raises(RuntimeError, match=f"(?s){name}.*'{argument}'"):
        direct(name)(*args, 3.0)
    with pytest.raises(RuntimeError, match=f"(?s){name}.*'{argument}'.* cpu.*meta"):
        direct(name)(*args, drawn(6, device="meta"))


# --- lists, and what is written -------------------------------------------------------------------


def lists(device: str = "cpu") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    xs = [drawn(*shape, device=device) for shape in ((3,), (2, 4), (5,))]
    return xs, [x + 1 for x in xs]


@pytest.mark.parametrize("count", [1, 3])
@on_each_device
def test_lists_take_it(count: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    xs, ys = (tensors[:count] for tensors in lists(device))
    wanted = torch._foreach_add(ys, xs, alpha=2.0)
    for name in ("foreach_axpy", "foreach_axpy_"):
        forbid(direct(name), monkeypatch)
    torch.testing.assert_close(direct("foreach_axpy")(xs, tuple(ys), 2.0), wanted)
    versions = [y._version for y in ys]
    assert direct("foreach_axpy_")(xs, ys, 2.0) is None
    torch.testing.assert_close(ys, wanted)
    assert [y._version for y in ys] == [version + 1 for version in versions]


def test_lists_that_are_special_do_not() -> None:
    xs, ys = lists()
    wanted = torch._foreach_add(ys, xs)
    function = direct("foreach_axpy")
    mapped = torch.vmap(lambda x: function([x, xs[1], xs[2]], ys)[0])(torch.stack([xs[0]] * 2))
    torch.testing.assert_close(mapped, torch.stack([wanted[0]] * 2))
    for odd in ([], [None, *ys[1:]], [2.0, *ys[1:]], torch.stack([ys[0]] * 3), iter(ys)):
        with pytest.raises((RuntimeError, TypeError), match=r"foreach_axpy|'ys'"):
            function(xs, odd)
    xs[1].requires_grad_()
    out = function(xs, ys)
    out[1].sum().backward()
    torch.testing.assert_close(xs[1].grad, torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="'xs': expected a tensor that requires no gradient"):
        direct("foreach_axpy_")(xs, ys)


def test_no_tensor_is_refused_by_name_in_inference_mode_too() -> None:
    for name, args, argument in (("silu", (None,), "x"), ("foreach_axpy", ([], []), "xs"),
                                 ("foreach_axpy_", ((), ()), "xs")):  # fmt: skip
        for context in (torch.inference_mode, torch.no_grad):
            with context(), pytest.raises(RuntimeError, match=f"{name}: argument '{argument}'"):
                direct(name)(*args)
    with torch.inference_mode():
        xs, ys = lists()
        torch.testing.assert_close(
            direct("foreach_axpy")(xs, tuple(ys)), torch._foreach_add(ys, xs)
        )


def test_a_keyword_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = (100 * drawn(2, 3, 4, 4).abs()).to(torch.uint8)
    wanted = (volume.float() - 1.5) / 2.0
    torch.testing.assert_close(cuda_ops.normalize_volume(volume, mean=1.5, std=2.0), wanted)
    forbid(direct("normalize_volume"), monkeypatch)
    torch.testing.assert_close(direct("normalize_volume")(volume, mean=1.5, std=2.0), wanted)
