"""Tests of the graphs that graphed captures on a GPU."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_gpu

from cuda_ops.errors import GraphError
from cuda_ops.runtime import graphed
from cuda_ops.runtime.graphs.graphed import _noted


def block_of_small_operators() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(64)).cuda()


@needs_gpu
def test_results_are_those_of_the_function_and_may_be_kept() -> None:
    block = block_of_small_operators()
    step = graphed(block)
    inputs = [torch.randn(8, 64, device="cuda") for _ in range(6)]
    with torch.no_grad():
        found = [step(x) for x in inputs]
        for x, y in zip(inputs, found, strict=True):
            torch.testing.assert_close(y, block(x))
    assert step.graphs == 1


@needs_gpu
def test_views_are_overwritten_and_copies_are_not() -> None:
    for views in (False, True):
        step = graphed(lambda x: x * 2, warmup=1, views=views)
        first, second = (step(torch.full((4,), v, device="cuda")) for v in (1.0, 2.0))
        third = step(torch.full((4,), 3.0, device="cuda"))
        assert (third[0], first[0]) == (6, 2)
        assert second[0] == (6 if views else 4)


@needs_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_arguments_and_parameters_are_right(autocast: bool) -> None:
    block = block_of_small_operators()
    step = graphed(block)
    for _ in range(5):
        x = torch.randn(8, 64, device="cuda")
        grads = []
        for function in (step, block):
            block.zero_grad()
            given = x.clone().requires_grad_()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                function(given).float().square().sum().backward()
            grads.append([given.grad, *(one.grad.clone() for one in block.parameters())])
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert step.graphs == 1


@needs_gpu
def test_gradients_add_up_over_calls() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    step = graphed(lambda x: (x * weight).sum(), warmup=1)
    for k in range(5):
        step(torch.full((4,), float(k), device="cuda")).backward()
    assert weight.grad.tolist() == [10.0] * 4


@needs_gpu
def test_gradients_may_be_kept() -> None:
    block = block_of_small_operators()
    step, x = graphed(block, warmup=1), torch.randn(8, 64, device="cuda")
    kept = []
    for k in range(4):
        grads = torch.autograd.grad(step(x * k).square().sum(), [*block.parameters()])
        kept.append((grads, [grad.clone() for grad in grads]))
    assert step.graphs == 1
    for grads, then in kept:
        assert all(map(torch.equal, grads, then))


@needs_gpu
def test_results_of_warm_ups_do_not_hold_leaves_on_their_stream() -> None:
    """If they did, torch would warn of a later backward, and a warning is an error here."""
    step, x = graphed(lambda x: x * 2), torch.ones(4, device="cuda", requires_grad=True)
    kept = step(x)
    (x * 3).sum().backward()
    kept.sum().backward()
    assert x.grad.tolist() == [5.0] * 4


@needs_gpu
def test_two_forwards_before_their_backwards_have_graphs_of_their_own() -> None:
    step = graphed(lambda x: x.exp(), warmup=1)
    x, y = (torch.full((4,), v, device="cuda", requires_grad=True) for v in (0.0, 1.0))
    step(x).sum().backward()
    x.grad = None
    first, second = step(x), step(y)  # of one kind, and captured one after the other
    assert step.graphs == 2
    (first.sum() + second.sum()).backward()
    torch.testing.assert_close(x.grad, x.exp())
    torch.testing.assert_close(y.grad, y.exp())
    third = step(x)
    del third
    gc.collect()
    step(y)
    assert step.graphs == 2  # what can have no backward any more is free


@needs_gpu
def test_a_second_backward_after_another_replay_is_refused() -> None:
    step = graphed(lambda x: x.exp(), warmup=1)
    x = torch.zeros(4, device="cuda", requires_grad=True)
    step(x)
    y = step(x)
    y.sum().backward(retain_graph=True)
    step(x).sum().backward()
    with pytest.raises(RuntimeError, match="what it saved is gone"):
        y.sum().backward()


@needs_gpu
def test_kinds_share_memory_and_do_not_disturb_each_other() -> None:
    step = graphed(lambda x: (x.exp() * x.sin()).cumsum(0), warmup=1)
    given = {n: torch.randn(n, device="cuda", requires_grad=True) for n in (1000, 10, 5000)}
    for _ in range(3):
        outs = {n: step(x) for n, x in given.items()}
        for n in (10, 5000, 1000):
            x = given[n]
            (ours,) = torch.autograd.grad(outs[n].sum(), x)
            (theirs,) = torch.autograd.grad((x.exp() * x.sin()).cumsum(0).sum(), x)
            torch.testing.assert_close(ours, theirs)


@needs_gpu
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_kinds_do_not_write_to_what_others_have_saved(order: str) -> None:
    """What one forward has freed before another was captured may hold what that one saves."""
    block = block_of_small_operators()
    step = graphed(block, warmup=1)
    given = {
        "a": torch.randn(64, 64, device="cuda", requires_grad=True),
        "b": torch.randn(16, 64, device="cuda", requires_grad=True),
    }
    for x in given.values():  # a is captured first
        step(x)
        step(x).sum().backward()
    for x in given.values():
        x.grad = None
    results = {name: step(given[name]) for name in order}
    for name in given:
        results[name].square().sum().backward()
    for x in given.values():
        (expected,) = torch.autograd.grad(block(x).square().sum(), x)
        torch.testing.assert_close(x.grad, expected)


@needs_gpu
def test_gradients_wait_for_each_other_across_streams() -> None:
    from cuda_ops.testing.stall import stall

    step = graphed(lambda x: (x.exp() * x.sin()).exp(), warmup=1)
    x = torch.randn(1 << 16, device="cuda", requires_grad=True)
    step(x)
    step(x)
    (expected,) = torch.autograd.grad((x.exp() * x.sin()).exp().sum(), x)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        y = step(x).sum()
        stall(0.05)
        (found,) = torch.autograd.grad(y, x)
    with torch.cuda.stream(second):
        step(torch.zeros_like(x).requires_grad_())
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected)


@needs_gpu
def test_a_parameter_that_is_unfrozen_gets_its_gradient() -> None:
    block = torch.nn.Linear(8, 8).cuda().requires_grad_(False)
    step, x = graphed(block, warmup=1), torch.randn(4, 8, device="cuda")
    for _ in range(3):
        assert not step(x).requires_grad
    block.requires_grad_()
    for _ in range(3):
        block.zero_grad()
        step(x).sum().backward()
        torch.testing.assert_close(block.bias.grad, torch.full((8,), 4.0, device="cuda"))


@needs_gpu
def test_a_loss_that_is_kept_does_not_disturb_a_capture() -> None:
    block = block_of_small_operators()
    step, x = graphed(block), torch.randn(8, 64, device="cuda")
    kept = block(x).sum()  # holds nodes of the parameters on this stream
    for _ in range(5):
        block.zero_grad()
        loss = step(x).square().sum()
        loss.backward()
    expected = torch.autograd.grad(block(x).square().sum(), [*block.parameters()])
    for one, grad in zip(block.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, grad)
    kept.backward()


@needs_gpu
def test_random_numbers_go_on() -> None:
    step = graphed(lambda x: torch.rand_like(x), warmup=1)
    x = torch.zeros(1000, device="cuda")
    found = [step(x) for _ in range(5)]
    assert len({y.sum().item() for y in found}) == 5
    torch.manual_seed(3)
    first = step(x)
    torch.manual_seed(3)
    assert torch.equal(step(x), first)


@needs_gpu
def test_what_the_function_writes_is_written_once_a_call() -> None:
    count = torch.zeros((), device="cuda")

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x.add_(2)

    compiled, x = graphed(step), torch.zeros(4, device="cuda")
    for k in range(6):
        assert compiled(x)[0] == 2 * (k + 1)
        assert x[0] == 2 * (k + 1)
        assert count == k + 1


@needs_gpu
@pytest.mark.parametrize(("function", "reason"), [
    (lambda x: x * x.sum().item(), r"it waits for the GPU at .*test_runtime_captures\.py:\d+"),
    (lambda x: (torch.cuda.synchronize(), x)[1], "while it was captured"),
    (lambda x: (x, x.new_ones(1).cpu())[1], "it waits for the GPU"),
    (lambda x: torch.zeros(3), r"a tensor of shape \(3,\) on the CPU"),
])  # fmt: skip
def test_what_cannot_be_captured_is_named(function: Callable[..., Any], reason: str) -> None:
    x = torch.ones(4, device="cuda")
    strict, lenient = graphed(function), graphed(function, fallback=True)
    strict(x)
    # A wait shows as the second call runs, other reasons at the capture of the third.
    with pytest.raises(GraphError, match=reason):  # noqa: PT012
        strict(x)
        strict(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            lenient(x)
    assert len([one for one in caught if "cannot be captured" in str(one.message)]) == 1
    # A capture that failed leaves torch as it was.
    torch.rand(2, device="cuda")
    again = graphed(lambda x: x + torch.rand_like(x), warmup=1)
    assert all((again(x) >= 1).all() for _ in range(3))


@needs_gpu
def test_an_argument_on_the_cpu_is_refused() -> None:
    with pytest.raises(GraphError, match=r"a tensor of shape \(\) among the arguments is on cpu"):
        graphed(lambda x, y: x * y)(torch.ones(2, device="cuda"), torch.tensor(2.0))


@needs_gpu
def test_it_runs_within_another_capture_and_on_any_stream() -> None:
    step = graphed(lambda x: x * 2 + 1, warmup=1)
    x = torch.zeros(4, device="cuda")
    for k in range(6):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x.fill_(k)
            y = step(x)
        torch.cuda.current_stream().wait_stream(stream)
        assert y[0] == 2 * k + 1
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        y = step(x)
    x.fill_(20)
    outer.replay()
    assert y[0] == 41


@needs_gpu
def test_threads_may_share_it() -> None:
    step = graphed(lambda x: x.cumsum(0), warmup=1)
    wrong = []

    def work(k: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                x = torch.full((1000,), float(k), device="cuda")
                if step(x)[-1] != 1000 * k:
                    wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_wait_of_another_thread_is_not_told_once_nothing_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mode = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda new: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _noted([]):
            pass
        told = "called a synchronizing CUDA operation"
        warnings.warn(told, stacklevel=1)
        mode[0] = 1  # the user asks for them
        for text in (told, "any other"):
            with pytest.raises(UserWarning, match=text):
                warnings.warn(text, stacklevel=1)


@needs_gpu
@pytest.mark.slow
def test_our_operators_are_captured_and_the_same_text_stays() -> None:
    import cuda_ops
    from cuda_ops.compile_ops import reload

    step = graphed(lambda x: cuda_ops.silu(cuda_ops.rms_norm(x, x.new_ones(64))), warmup=1)
    x = torch.randn(8, 64, device="cuda")
    for _ in range(3):
        expected = torch.nn.functional.silu(torch.nn.functional.rms_norm(x, (64,)))
        torch.testing.assert_close(step(x), expected)
    assert step.graphs == 1
    reload("silu")  # the same text is the same operator
    step(x)
    assert step.graphs == 1
