"""The gradient of a mixture: its values, and what is kept for it and how long."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from conftest import Recorder, needs_gpu
from mixtures import drawn, weights
from torch.multiprocessing.reductions import StorageWeakRef

import cuda_ops
from cuda_ops.ops import _moe as references
from cuda_ops.spec import OpSpec

pytestmark = pytest.mark.usefixtures("built_mixture")
WHOLE = "moe_experts_backward"
HALVES = ["moe_experts_backward_down", "moe_experts_backward_gate_up"]


def test_derivatives() -> None:
    x, logits = (torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    matrices = [m.requires_grad_() for m in weights(5, 4, 2)]
    for scoring in references.SCORINGS:
        for renormalize in (True, False):

            def function(*args: torch.Tensor, _s: str = scoring, _r: bool = renormalize) -> Any:
                return cuda_ops.moe(*args, 2, scoring=_s, renormalize=_r)

            assert torch.autograd.gradcheck(function, (x, logits, *matrices))


def test_a_gradient_without_kept_values_runs_again() -> None:
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    chosen, ones = torch.randint(3, (5, 2)), torch.rand(5, 2, dtype=torch.float64)
    matrices = weights(3, 4, 2)
    plain = cuda_ops.moe_experts(x, *matrices, chosen, ones)
    kept, _ = torch.ops.cuda_ops.moe_experts_keep(x, *matrices, chosen, ones)
    for a, b in zip(*(torch.autograd.grad(y.sum(), x) for y in (plain, kept)), strict=True):
        assert torch.equal(a, b)


def test_checkpointed() -> None:
    x, logits, *rest = drawn((5, 4, 2, 3, 2), 0)
    inputs = [t.requires_grad_() for t in (x, logits, *rest[:2])]
    grads = [
        torch.autograd.grad(out.square().sum(), inputs)
        for out in (
            cuda_ops.moe(*inputs, 2),
            torch.utils.checkpoint.checkpoint(cuda_ops.moe, *inputs, 2, use_reentrant=False),
        )
    ]
    assert all(map(torch.equal, *grads))


def test_saves_what_it_says() -> None:
    """x, the matrices, gates and ups, and the routing: nothing of T * k * H elements."""
    tokens, hidden, inner, count, top_k = 32, 64, 8, 4, 2
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    x, logits = (torch.randn(tokens, n, dtype=torch.bfloat16) for n in (hidden, count))
    matrices = weights(count, hidden, inner, torch.bfloat16)
    given = {t.data_ptr() for t in matrices}
    inputs = [t.requires_grad_() for t in (x, logits, *matrices)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        cuda_ops.moe(*inputs, top_k)
    saved = sum(size for pointer, size in sizes.items() if pointer not in given)
    routing = tokens * (2 * count + top_k * (4 + 8))
    assert saved <= 2 * tokens * hidden + 4 * tokens * top_k * inner + routing


# --- in halves -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Recorder], ids=["plain", "dispatched"])
def test_what_was_kept_is_gone_before_the_largest_gradient(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the public function and through the dispatcher's autograd."""
    alive: list[bool] = []
    storages: list[Any] = []
    of_spec = OpSpec.function

    def watched(spec: OpSpec) -> Any:
        function = of_spec.fget(spec)

        def half(*args: Any) -> Any:
            if spec.name == HALVES[0]:
                storages.append(StorageWeakRef(args[4].untyped_storage()))
            else:
                alive.append(not storages[-1].expired())
            return function(*args)

        return half if spec.name in HALVES else function

    monkeypatch.setattr(OpSpec, "function", property(watched))
    *tensors, top_k = drawn((6, 8, 4, 3, 2), 0)
    inputs = [t.requires_grad_() for t in tensors]
    with mode():
        out = cuda_ops.moe(*inputs, top_k)
        again = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
        last = torch.autograd.grad(out.sum(), inputs)
    assert alive == [True, False]
    assert all(map(torch.equal, again, last))


@needs_gpu
def test_the_peak_of_a_gradient_has_nothing_that_was_kept() -> None:
    tokens, hidden, inner, count, top_k, size = 4096, 256, 512, 64, 2, 2
    x, logits = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (hidden, count))
    matrices = weights(count, hidden, inner, x.dtype, "cuda")
    inputs = [t.requires_grad_() for t in (x, logits, *matrices)]
    grad = torch.randn_like(x)
    for _ in range(2):  # a library may keep memory after the first call
        torch.cuda.empty_cache()  # a block left by another test counts whole
        out = cuda_ops.moe(*inputs, top_k)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, inputs, grad)
        peak = torch.cuda.max_memory_allocated() - before
        del out, grads
    rows, matrix = tokens * top_k * inner * size, count * inner * hidden * size
    first = 2 * rows + rows + matrix
    second = 2 * rows + tokens * hidden * size + 3 * matrix - 2 * rows  # less what was kept
    assert second - first > 4 << 20, "the second half is the one with the peak"
    assert peak <= second + (2 << 20)


def test_a_compiled_gradient_has_halves() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[Any] = []

    def compiler(module: Any, inputs: Any) -> Any:
        graphs.append({str(node.target) for node in module.graph.nodes})
        return make_boxed_func(module.forward)

    *tensors, top_k = drawn((6, 8, 4, 3, 2), 0)
    inputs = [t.requires_grad_() for t in tensors]
    compiled = torch.compile(
        lambda *args: cuda_ops.moe(*args, top_k),
        backend=aot_autograd(fw_compiler=compiler),
        fullgraph=True,
    )
    grads = torch.autograd.grad(compiled(*inputs).sum(), inputs)
    _, backward = graphs
    assert {f"cuda_ops.{name}.default" for name in HALVES} <= backward
    expected = torch.autograd.grad(cuda_ops.moe(*inputs, top_k).sum(), inputs)
    torch.testing.assert_close(grads, expected)


def test_halves_are_the_whole() -> None:
    """Indices of no expert are among them: their rows come last and are zeros."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, 9, 6, dtype=torch.float64)
    chosen, share = torch.randint(-1, 5, (9, 2)), torch.rand(9, 2, dtype=torch.float64)
    matrices = weights(4, 6, 3)
    kept = torch.ops.cuda_ops.moe_experts_keep(x, *matrices, chosen, share)[1]
    whole = torch.ops.cuda_ops.moe_experts_backward(grad, x, *matrices, chosen, share, kept)
    rows, *others = torch.ops.cuda_ops.moe_experts_backward_down(
        grad, matrices[1], chosen, share, kept
    )
    first = torch.ops.cuda_ops.moe_experts_backward_gate_up(rows, x, matrices[0], chosen)
    assert all(map(torch.equal, whole, (*first, *others)))
    unknown, rows = int(((chosen < 0) | (chosen > 3)).sum()), rows.flatten(0, 1)
    assert unknown and not rows[-unknown:].any() and rows[:-unknown].any(-1).all()


@pytest.mark.parametrize("wanted", range(16))
def test_halves_compute_what_is_wanted(wanted: int) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, 5, 6, dtype=torch.float64)
    chosen, share = torch.randint(4, (5, 2)), torch.rand(5, 2, dtype=torch.float64)
    matrices = weights(4, 6, 3)
    kept = torch.ops.cuda_ops.moe_experts_keep(x, *matrices, chosen, share)[1]
    arguments = (grad, x, *matrices, chosen, share, kept)
    every = torch.ops.cuda_ops.moe_experts_backward(*arguments)
    some = torch.ops.cuda_ops.moe_experts_backward(*arguments, wanted)
    for i, (all_of_it, part) in enumerate(zip(every, some, strict=True)):
        assert torch.equal(part, all_of_it if wanted >> i & 1 else all_of_it.new_empty(0))


def backward_operators(function: Any) -> list[str]:
    with Recorder() as calls:
        function()
    return [name for name in (WHOLE, *HALVES) if calls.results(name)]


def test_parts_of_all_tokens_have_no_halves(mesh: Any) -> None:
    """Mapped or sharded parts would each order only their own rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    *tensors, top_k = drawn((6, 8, 4, 3, 2), 0)
    inputs = [t.requires_grad_() for t in tensors]

    def loss(*args: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.moe(*args, top_k)
        return out.square().sum()

    assert backward_operators(lambda: torch.autograd.grad(loss(*inputs), inputs)) == HALVES

    detached = [t.detach() for t in inputs]
    mapped = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    assert backward_operators(lambda: mapped(*detached)) == [WHOLE]
    samples = [t.expand(2, *t.shape) for t in detached]
    assert backward_operators(lambda: torch.vmap(mapped)(*samples)) == [WHOLE]

    places = [[Shard(0)], [Shard(0)], [Replicate()], [Replicate()]]
    sharded = [
        DTensor.from_local(t, mesh, place, run_check=False).requires_grad_()
        for t, place in zip(detached, places, strict=True)
    ]
    assert backward_operators(lambda: loss(*sharded).backward()) == [WHOLE]


def test_a_second_derivative_is_refused_by_its_name_under_vmap_too() -> None:
    x, *rest = drawn((4, 3, 2, 3, 2), 0)

    def total(x: torch.Tensor) -> torch.Tensor:
        return cuda_ops.moe(x, *rest).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="moe_experts_backward has no gradient: second"):
            torch.func.jacrev(torch.func.jacrev(total))(x)
