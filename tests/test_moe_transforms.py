"""moe mapped, compiled, traced and exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Recorder
from mixtures import drawn, weights

import cuda_ops

pytestmark = pytest.mark.usefixtures("built_mixture")


@pytest.mark.parametrize("in_dims", [(0, 0, None, None), (None, 0, 0, 0), (0, 0, 0, 0)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    tensors = [torch.randn(3, 5, n, dtype=torch.float64) for n in (4, 6)]
    tensors += [torch.stack(m) for m in zip(*(weights(6, 4, 2) for _ in range(3)), strict=True)]
    args = [t if d == 0 else t[0] for t, d in zip(tensors, in_dims, strict=True)]

    def function(*args: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.moe(*args, 2)
        return out

    each = [
        function(*(a[i] if d == 0 else a for a, d in zip(args, in_dims, strict=True)))
        for i in range(3)
    ]
    torch.testing.assert_close(torch.vmap(function, in_dims)(*args), torch.stack(each))
    none = [a[:0] if d == 0 else a for a, d in zip(args, in_dims, strict=True)]
    assert torch.vmap(function, in_dims)(*none).shape == (0, 5, 4)


def test_more_mapped_experts_than_a_call_takes() -> None:
    tensors = [torch.randn(5, 2, n, dtype=torch.float64) for n in (3, 200)]
    tensors += [torch.stack(m) for m in zip(*(weights(200, 3, 2) for _ in range(5)), strict=True)]
    each = [cuda_ops.moe(*arguments, 2) for arguments in zip(*tensors, strict=True)]
    mapped = torch.vmap(lambda *arguments: cuda_ops.moe(*arguments, 2))(*tensors)
    torch.testing.assert_close(mapped, torch.stack(each))


def test_vmap_takes_no_mapped_dim_for_tokens() -> None:
    """As many examples as tokens, and for each argument one dim too few."""
    size, (x, _, *matrices, _) = 3, drawn((3, 4, 2, 5, 2), 0)
    x, weights = x.expand(size, -1, -1), torch.rand(size, 3, 2)
    with pytest.raises(RuntimeError, match=r"'experts': expected exactly the dims \[t, k\], got"):
        torch.vmap(cuda_ops.moe_experts, in_dims=(0, None, None, 0, 0))(
            x, *matrices, torch.zeros(size, 2, dtype=torch.int64), weights
        )
    with pytest.raises(RuntimeError, match=r"'router_logits': expected exactly the dims \[t, e\]"):
        torch.vmap(lambda logits: cuda_ops.moe_route(logits, 1))(torch.rand(size, 3))


def test_jacobians_of_more_experts_than_a_call_takes() -> None:
    *inputs, top_k = drawn((2, 3, 2, 200, 2), 0)

    def mixed(*inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.moe(*inputs, top_k)
        return out

    expected = torch.autograd.functional.jacobian(mixed, tuple(inputs))
    for i, one in enumerate(torch.func.jacrev(mixed, argnums=(0, 1, 2, 3))(*inputs)):
        torch.testing.assert_close(one, expected[i])


def test_a_mapped_gradient_of_tokens_alone_copies_no_matrices() -> None:
    x, *rest = drawn((2, 6, 2, 512, 2), 0)
    with Recorder() as recorder:
        torch.func.jacrev(lambda x: cuda_ops.moe(x, *rest))(x)
    assert recorder.results("moe_experts_backward") == [torch.Size([2 * 6 * 2, 6])]
    copies = [shape for name in ("clone", "copy_") for shape in recorder.results(name)]
    assert not [shape for shape in copies if shape.numel() >= rest[1].numel()]


def test_no_numbers_in_a_mapped_token() -> None:
    x, logits, matrices = torch.zeros(3, 4, 0), torch.randn(3, 4, 2), weights(2, 0, 2)
    mapped = torch.vmap(lambda *rows: cuda_ops.moe(*rows, *(m.float() for m in matrices), 1))
    assert mapped(x, logits).shape == (3, 4, 0)


def test_compiled_and_autocast() -> None:
    tensors = [torch.randn(6, 8), torch.randn(6, 4), *weights(4, 8, 3, torch.float32)]
    inputs = [t.requires_grad_() for t in tensors]

    def loss(*args: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.moe(*args, 2)
        return out.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs)
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert cuda_ops.moe(*inputs, 2).dtype is torch.bfloat16
        assert cuda_ops.moe_route(inputs[1].bfloat16(), 2)[0].dtype is torch.float32
        chosen, experts = cuda_ops.moe_route(inputs[1], 2)
        outside = [t.bfloat16() for t in (inputs[0], *inputs[2:])]
        inside = cuda_ops.moe_experts(inputs[0], *inputs[2:], experts, chosen)
    assert torch.equal(inside, cuda_ops.moe_experts(*outside, experts, chosen))  # in float32


def test_compiled_for_numbers_of_tokens_without_a_value() -> None:
    from torch._dynamo.decorators import mark_unbacked

    def mixture(*args: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.moe(*args, 2)
        return out

    inputs = [torch.randn(5, 6), torch.randn(5, 4), *weights(4, 6, 3, torch.float32)]
    for tensor in inputs[:2]:
        mark_unbacked(tensor, 0)
    compiled = torch.compile(mixture, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), mixture(*inputs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_by_torchscript() -> None:
    """Its own check runs the trace again without gradients."""
    layer = Layer()
    traced = torch.jit.trace(layer, (torch.randn(5, 8), torch.randn(5, 3)))
    given = torch.randn(7, 8), torch.randn(7, 3)
    torch.testing.assert_close(traced(*given), layer(*given))


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = torch.nn.ParameterList(weights(3, 8, 16, torch.float32))

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = cuda_ops.moe(x, logits, *self.matrices, 2)
        return mixed


def test_exported_for_any_number_of_tokens() -> None:
    layer, tokens = Layer(), torch.export.Dim("tokens")
    given = torch.randn(5, 8), torch.randn(5, 3)
    exported = torch.export.export(layer, given, dynamic_shapes=({0: tokens}, {0: tokens})).module()
    for count in (0, 1, 9):
        others = torch.randn(count, 8), torch.randn(count, 3)
        torch.testing.assert_close(exported(*others), layer(*others))


def test_what_is_exported_keeps_nothing_for_a_gradient() -> None:
    """Its parameters require one, but most exported programs are for inference."""
    layer, given = Layer(), (torch.randn(5, 8), torch.randn(5, 3))
    exported = torch.export.export(layer, given)
    assert "moe_experts_keep" not in str(exported.graph)
    module = exported.module()
    module(*given).sum().backward()
    layer(*given).sum().backward()
    for actual, expected in zip(module.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


@pytest.mark.parametrize("dynamic", [True, None])
def test_errors_under_compile_name_the_argument(dynamic: bool | None) -> None:
    *inputs, top_k = drawn((5, 4, 2, 3, 2), 0)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def mixed(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        out: torch.Tensor = cuda_ops.moe(x[:3], *rest)
        return out

    with pytest.raises(Exception, match=r"(?s)'router_logits': .* = \[3, 3\], got shape \[5, 3\]"):
        mixed(*inputs, top_k)
