"""Using operators: what is refused, what traces see, threads, and what help says."""

from __future__ import annotations

import functools
import itertools
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from torch.utils import checkpoint

import cuda_ops
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.compile_ops import compile_ops
from cuda_ops.dispatch import naming
from cuda_ops.errors import BuildError
from cuda_ops.registry import registry

X = torch.tensor([1.0, 2.0])


@pytest.fixture(scope="module")
def shipped() -> None:
    for row in compile_ops(["silu", "matmul", "silu_and_mul", "add"]):
        assert not row.error, row.error


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("by", ["function", "dispatcher"])
@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("silu", [X.int()], r"cuda_ops::silu: argument 'x': expected dtype float64, .*got int32"),
        ("matmul", [X.view(1, 2), X.view(2, 1).double()],
         r"matmul: argument 'b': expected dtype float32 like 'a', got float64"),
        ("matmul_backward", [X, X, X],
         r"argument 'grad_out': expected at least 2 dims .*got shape \[2\]"),
        ("matmul", [X.view(1, 2), X.view(1, 2)],
         r"matmul: argument 'b': expected dim 'k' of \(\.\.\., k, n\) to be 2, got shape \[1, 2\]"),
        ("matmul", [torch.ones(2, 1, 1), torch.ones(3, 1, 1)],
         (r"matmul: argument 'b': expected dims '...' of \(..., k, n\) to broadcast with \[2\], "
          r"got shape \[3, 1, 1\]")),
        ("silu_and_mul", [torch.ones(4, 3)], (r"silu_and_mul: argument 'x': expected dim '2d' of "
         r"\(\.\.\., 2d\) to be a multiple of 2, got shape \[4, 3\]")),
        ("silu_and_mul_backward", [torch.ones(4, 3), torch.ones(4, 8)],
         r"argument 'x': expected dim '2d' of \(\.\.\., 2d\) to be 6, got shape \[4, 8\]"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(
    by: str, op: str, arguments: list[torch.Tensor], message: str
) -> None:
    function = getattr(cuda_ops if by == "function" else torch.ops.cuda_ops, op)
    for gradient in (False, True):
        given = [
            t.detach().clone().requires_grad_(gradient and t.is_floating_point()) for t in arguments
        ]
        with pytest.raises(RuntimeError, match=message):
            function(*given)
    with pytest.raises(RuntimeError, match=message):
        function(*(t.to("meta") for t in arguments))


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("wrong", [3.0, None, [1.0], "x"])
def test_what_is_no_tensor_is_refused(wrong: Any) -> None:
    for function in (cuda_ops.silu, torch.ops.cuda_ops.silu):
        with pytest.raises((TypeError, RuntimeError), match=r"(?si)silu.*tensor"):
            function(wrong)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize(("arguments", "name"), [((X, None), "b"), ((None, X), "a")])
def test_a_tensor_that_is_none_is_named(arguments: Any, name: str) -> None:
    for add in (cuda_ops.add, torch.ops.cuda_ops.add):
        with pytest.raises(RuntimeError, match=f"add: argument '{name}': expected a tensor, got N"):
            add(*arguments)
    with pytest.raises(RuntimeError, match="volume: argument 'x': expected a tensor, got N"):
        cuda_ops.normalize_volume(None)


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("matmul", (X, X)), ("fused_linear_gelu", (X, X[None])), ("silu", (X,)), ("add", (X, X))],
)
def test_a_symbolic_trace_has_it(name: str, arguments: tuple[torch.Tensor, ...]) -> None:
    function = getattr(cuda_ops, name)

    class Model(torch.nn.Module):
        def forward(self, *inputs: Any) -> Any:
            return function(*(inputs[i] for i in range(len(arguments))))

    traced = torch.fx.symbolic_trace(Model())
    torch.testing.assert_close(traced(*arguments), function(*arguments))


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("first", ["cuda_ops.silu(x)", "torch.ops.cuda_ops.silu(x)"])
@pytest.mark.slow
def test_threads_may_be_the_first_to_use_it(first: str) -> None:
    program = f"""
import threading, torch, cuda_ops
x, together, errors = torch.zeros(2), threading.Barrier(4), []
def use():
    together.wait()
    try:
        {first}
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=use) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(errors)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.usefixtures("shipped")
@pytest.mark.slow
def test_what_asks_from_c_plus_plus_needs_operators_that_are_loaded(tmp_path: Path) -> None:
    traced = torch.jit.trace(lambda x: torch.ops.cuda_ops.silu(x), X)
    traced.save(str(tmp_path / "model.pt"))
    program = f"""
import torch
from cuda_ops.registry import all_operators
all_operators()
print(torch.jit.load({str(tmp_path / "model.pt")!r})(torch.zeros(1)).item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "0.0\n", done.stderr


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("wants", [False, True], ids=["plain", "with a gradient"])
@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (
            "softmax_cross_entropy",
            ([3, 4], torch.zeros(3)),
            "argument 'labels': expected dtype int64, got float32",
        ),
        (
            "moe",
            ([4, 8], [4, 4], [4, 16, 8], [4, 8, 8], 9),
            "argument 'top_k': expected at most 4, the size of dim 'e', got 9",
        ),
        (
            "moe",
            ([4, 8], [4, 4], torch.ones(4, 16, 8, dtype=torch.float16), [4, 8, 8], 2),
            "argument 'w_gate_up': expected dtype float32 like 'x', got float16",
        ),
    ],
    ids=["cross entropy", "routing", "experts"],
)
def test_what_a_part_refuses_is_said_of_the_operator_that_was_called(
    op: str, arguments: tuple[Any, ...], message: str, wants: bool
) -> None:
    given = [torch.ones(a, requires_grad=wants) if isinstance(a, list) else a for a in arguments]
    with pytest.raises(RuntimeError) as caught:
        getattr(cuda_ops, op)(*given)
    assert str(caught.value) == f"cuda_ops::{op}: {message}"


def test_other_errors_of_a_part_are_left_alone() -> None:
    op, names = registry().operators("moe")["moe"].spec, {"x", "top_k"}
    for error in (
        RuntimeError("cuda_ops::moe_experts: argument 'weights': no argument of moe"),
        RuntimeError("other::moe_experts: argument 'x': of another library"),
        RuntimeError("cuda_ops::moe: argument 'x': its own"),
        RuntimeError("out of memory"),
        torch.OutOfMemoryError("cuda_ops::moe_route: argument 'x': not an error of ours"),
    ):
        naming.retell_part(op, names, error)


def test_sparse_tensors_are_refused() -> None:
    for arguments, name in (((X.to_sparse(), X), "a"), ((X, X.to_sparse()), "b")):
        with pytest.raises(RuntimeError, match=f"argument '{name}': expected a strided tensor"):
            cuda_ops.add(*arguments)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of quantized and of nested ones
def test_quantized_and_nested_tensors_are_refused_on_every_way(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    scratch_op.reload()
    function, overload = scratch_op.function, getattr(torch.ops.cuda_ops, scratch_op.name)
    rows = [torch.ones(2), torch.ones(3)]
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    refused = f"cuda_ops::{scratch_op.name}: argument 'x': expected a strided tensor, got a "
    for call, tensor, actual in (
        (overload, quantized, "quantized"),
        *itertools.product(
            (function, overload),
            (
                torch.nested.nested_tensor(rows, layout=kind)
                for kind in (torch.jagged, torch.strided)
            ),
            ("nested",),
        ),
    ):
        with pytest.raises(RuntimeError, match=f"^{refused}{actual} one$"):
            call(tensor)
    with pytest.raises(RuntimeError, match=r"argument 'x': expected dtype .*, got quint8"):
        function(quantized)


def test_what_stops_a_composed_operator_without_a_word_is_guessed(scratch_op: ScratchOp) -> None:
    """torch.utils.checkpoint stops recomputing by an exception without a text, which torch's C
    interface does not pass on.
    """
    scratch_op.binding.write_text(
        '#include "compose.h"\n#include "binding.h"\nusing namespace cuda_ops;\nnamespace {\n'
        'Tensor f(const Tensor& x) { return call<Tensor>("aten::relu", "", x); }\n}\n'
        f'CUDA_OPS(library) {{ library.op("{scratch_op.name}(Tensor x) -> Tensor", "()->()")'
        ".composite<f>(); }\n"
    )
    scratch_op.reload()

    def gradient() -> torch.Tensor:
        x = X.clone().requires_grad_()
        checkpoint.checkpoint(scratch_op.function, x, use_reentrant=False).sum().backward()
        assert x.grad is not None
        return x.grad

    with pytest.raises(
        RuntimeError, match=r"run aten::relu(; torch 2.13 and later|.*_early_stop\(False\))"
    ):
        gradient()
    with checkpoint.set_checkpoint_early_stop(False):
        assert torch.equal(gradient(), torch.ones(2))


@pytest.mark.usefixtures("shipped")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_function_calls_the_operator() -> None:
    traced = torch.jit.trace(lambda x: cuda_ops.silu(x) + x, torch.zeros(2))
    torch.testing.assert_close(traced(X), torch.nn.functional.silu(X) + X)


@pytest.mark.usefixtures("shipped")
@pytest.mark.slow
def test_the_dispatcher_s_name_loads_the_operator_too(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled: torch.Tensor = cuda_ops.add(x, x)
            return doubled

    torch.export.save(torch.export.export(Model(), (X,)), tmp_path / "model.pt2")
    program = f"""
import torch, cuda_ops
print(torch.export.load({str(tmp_path / "model.pt2")!r}).module()(torch.ones(2)).tolist())
print(torch.ops.cuda_ops.silu(torch.zeros(1)).item())
print(torch.compile(lambda x: torch.ops.cuda_ops.matmul(x, x), fullgraph=True, backend="eager")(
    torch.ones(1, 1)).item(), hasattr(torch.ops.cuda_ops, "no_such_op"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[2.0, 2.0]", "0.0", "1.0 False"], done.stderr


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("gradient", [False, True])
def test_views_that_torch_resolves_late_are_resolved(gradient: bool) -> None:
    negative = torch.tensor([1 + 2j, -3 - 4j]).conj().imag
    assert negative.is_neg()
    zero = torch._efficientzerotensor(2)
    for lazy in (negative, zero):
        eager = lazy.clone().requires_grad_(gradient)
        actual = cuda_ops.silu(lazy.detach().requires_grad_(gradient))
        torch.testing.assert_close(actual, torch.nn.functional.silu(eager))


def _functional() -> torch.Tensor:
    return torch._to_functional_tensor(X.clone())


def _left_by_functionalize() -> torch.Tensor:
    seen: list[torch.Tensor] = []
    torch.func.functionalize(lambda x: (seen.append(x), x * 1)[1])(X)
    return seen[0]


def _left_by_grad() -> torch.Tensor:
    seen: list[torch.Tensor] = []
    torch.func.grad(lambda x: (seen.append(x), x.sum())[1])(X)
    return seen[0]


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("make", [_functional, _left_by_functionalize, _left_by_grad])
@pytest.mark.parametrize("gradient", [False, True])
def test_a_tensor_that_stands_for_another_is_taken_as_torch_takes_it(
    make: Callable[[], torch.Tensor], gradient: bool
) -> None:
    for ours, by_torch, before in (
        (cuda_ops.silu, torch.nn.functional.silu, ()),
        (cuda_ops.add, torch.add, (X,)),
    ):
        results = []
        for function in (ours, by_torch):
            x = make().detach().requires_grad_(gradient)
            result = function(*before, x)
            if gradient:
                result = torch.autograd.grad(result.sum(), x)[0]
            assert torch._is_functional_tensor(result) == torch._is_functional_tensor(x)
            if torch._is_functional_tensor(result):
                result = torch._from_functional_tensor(result.detach())
            results.append(result)
        torch.testing.assert_close(*results)


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[..., Any]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return ctx.function(grad) * x.cos(), None


def _in_a_backward(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Sine.apply(x, function)
    return result


def _in_a_hook(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    doubled = x * 2
    doubled.register_hook(function)
    return doubled.sin()


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("place", [_in_a_backward, _in_a_hook])
@pytest.mark.parametrize("more", [False, True])
def test_several_gradients_at_once_meet_it(place: Callable[..., Any], more: bool) -> None:
    """The operator is called by the user's own code, with a batch that looks like one gradient."""
    functions = cuda_ops.silu, torch.ops.cuda_ops.silu, torch.nn.functional.silu
    *ours, expected = (
        torch.autograd.functional.jacobian(
            functools.partial(place, function), X, vectorize=True, create_graph=more
        )
        for function in functions
    )
    for actual in ours:
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("shipped")
def test_a_wrong_number_of_arguments_is_refused() -> None:
    for arguments in ((), (X, X)):
        with pytest.raises((TypeError, RuntimeError), match=r"silu\(\)"):
            cuda_ops.silu(*arguments)


@pytest.mark.slow
def test_an_operator_that_did_not_build_says_why_at_each_use(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * undeclared")
    (row,) = compile_ops([scratch_op.name])
    assert "undeclared" in row.error
    for _ in range(2):
        with pytest.raises(BuildError, match=rf"{scratch_op.name}.cpp:\d+:.*undeclared"):
            getattr(cuda_ops, scratch_op.name)
    scratch_op.write("v * 2")
    assert not compile_ops([scratch_op.name])[0].error
    assert torch.equal(getattr(cuda_ops, scratch_op.name)(X), X * 2)


@pytest.mark.slow
def test_what_a_parallel_loop_throws_comes_out(scratch_op: ScratchOp) -> None:
    scratch_op.write('v > 1 ? throw std::runtime_error("too large") : v')
    assert not compile_ops([scratch_op.name], compare=False)[0].error
    x = torch.zeros(100_000)
    assert torch.equal(scratch_op.function(x), x)
    with pytest.raises(RuntimeError, match="too large"):
        scratch_op.function(x + 2)


def test_an_operator_that_was_never_built_says_how_to(scratch_op: ScratchOp) -> None:
    scratch_op.write("v")
    registry().rescan()
    with pytest.raises(
        BuildError, match=f"is not built: run python compile_dev.py --root .* {scratch_op.name} "
    ):
        getattr(cuda_ops, scratch_op.name)


@pytest.mark.usefixtures("shipped")
@pytest.mark.slow
def test_help_says_of_each_operator_what_it_is_or_why_it_cannot_be_used(
    scratch_op: ScratchOp,
) -> None:
    scratch_op.write("v * undeclared")
    compile_ops([scratch_op.name])
    text = pydoc.render_doc(cuda_ops, renderer=pydoc.plaintext)
    assert re.search(r"\n    silu\(x\)\n +Sigmoid-weighted", text)
    assert re.search(rf"\n    {scratch_op.name}\(.*\n +Cannot be used: (?s:.*?)undeclared", text)
    (listed,) = [name for name in dir(cuda_ops) if name == scratch_op.name]
    with pytest.raises(BuildError, match="undeclared"):
        getattr(cuda_ops, listed)(X)
    assert scratch_op.name not in vars(cuda_ops)  # it is looked for again
    scratch_op.write("v * 2")
    scratch_op.reload()
    assert torch.equal(getattr(cuda_ops, listed)(X), X * 2)


@pytest.mark.slow
def test_help_needs_no_operator_that_is_built(tmp_path: Path) -> None:
    program = "import pydoc, cuda_ops; print(pydoc.render_doc(cuda_ops, renderer=pydoc.plaintext))"
    environment = os.environ | {"CUDA_OPS_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    ours = [key for key, pair in registry().pairs().items() if pair.root == BUILTIN_ROOT]
    assert [key for key in ours if f"\n    {key}(" not in done.stdout] == []


@pytest.mark.usefixtures("shipped")
def test_an_operator_that_does_not_exist_is_an_attribute_error() -> None:
    for name in ("no_such_operator", "silu_nonsense", "_private"):
        with pytest.raises(AttributeError, match=f"'cuda_ops' has no .*'{name}'"):
            getattr(cuda_ops, name)
    assert not hasattr(cuda_ops, "no_such_operator")


def test_a_tensor_that_escaped_from_vmap_is_refused_by_name() -> None:
    """torch.add says that the tensor may have escaped from a function being vmapped."""
    kept: list[torch.Tensor] = []
    torch.vmap(lambda x: (kept.append(x), x * 1)[1])(torch.randn(3, 2))
    for function in (cuda_ops.silu, torch.ops.cuda_ops.silu):
        with pytest.raises(RuntimeError, match="argument 'x': expected a tensor, got one that esc"):
            function(kept[0])


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("dropout", (torch.ones(4), 0.5, None), "'training': expected a bool, got None"),
        ("dropout", (torch.ones(4), 0.5, "no"), "'training': expected a bool, got str"),
        ("dropout", (torch.ones(4), -1.0, False), "'p': expected from 0 to 1, got -1.0"),
        ("cumulative_sum", (torch.ones(4), 0, None), "'reverse': expected a bool, got None"),
        ("bitonic_topk", (torch.ones(4), 1, 0, None), "'largest': expected a bool, got None"),
        ("cumulative_sum", (torch.ones(4), 2**63), "'dim': expected an int of 64 bits, got 922337"),
        ("cumulative_sum", (torch.ones(4), 10**400), "'dim': .* of 64 bits, got 1329 bits"),
        ("rms_norm", (torch.ones(4), torch.ones(4), 10**400), "'eps': expected a number that a f"),
    ],
    ids=["training", "no training", "p", "reverse", "largest", "int", "longer", "number"],
)
def test_a_flag_that_is_none_and_a_number_too_large_are_named(
    op: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(RuntimeError, match=f"^cuda_ops::{op}: argument {message}"):
        getattr(cuda_ops, op)(*arguments)


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ("CUDA_OPS_CPU", "CUDA_OPS_CPU: expected torch or own, got 'onw'"),
        ("CUDA_OPS_AUTOGRAD", "CUDA_OPS_AUTOGRAD: expected python, or nothing, got 'onw'"),
    ],
)
def test_a_switch_with_a_slip_of_the_pen_is_refused(switch: str, message: str) -> None:
    code = "import torch, cuda_ops; cuda_ops.silu(torch.ones(2, requires_grad=True))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, switch: "onw"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and message in done.stderr
