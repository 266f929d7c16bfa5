"""Gradients that C++ records: the same as those that Python records, in every way of asking."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp, needs_gpu
from torch.utils.checkpoint import checkpoint

import cuda_ops
from cuda_ops.build import cpp_autograd as library
from cuda_ops.compile_ops import reload
from cuda_ops.dispatch import cpp_autograd, fast_path
from cuda_ops.errors import BuildError
from cuda_ops.registry import registry

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
#: Operators with one and several arguments, with numbers, and with a result that is kept.
CASES: dict[str, tuple[list[tuple[int, ...]], tuple[Any, ...]]] = {
    "silu": ([(5, 7)], ()),
    "fused_relu_scale": ([(5, 7)], (2.5,)),
    "layer_norm": ([(5, 8), (8,), (8,)], (1e-5,)),
    "silu_and_mul": ([(5, 8)], ()),
    "attention": ([(1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)], (False, None)),
}
each = pytest.mark.parametrize("name", sorted(CASES))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload(*CASES, "matmul")
    if library.found() is None:  # pip has not built it, as in an environment with a wheel
        library.build()
        cpp_autograd._module.cache_clear()


def both(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], ...]:
    """Returns the functions that call an operator and record its gradient: C++'s and Python's."""
    getattr(cuda_ops, name)
    operator = registry().loaded(name)
    in_cpp = fast_path.differentiable(operator)
    with monkeypatch.context() as patched:
        patched.setattr(cpp_autograd, "_module", lambda: None)
        in_python = fast_path.differentiable(operator)
    assert type(in_cpp).__name__ == "Callable" and type(in_python).__name__ != "Callable"
    return in_cpp, in_python


def first_of(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def tensors(name: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes, _ = CASES[name]
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [x.to(device).requires_grad_() for x in made]


#: y is twice x, and z has no gradient.
CONSTANT = """
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
std::tuple<Tensor, Tensor> forward(const Tensor& x) {
  return elementwise_cpu<2>([](double v) { return Results<double, 2>{{2 * v, 3 * v}}; }, x);
}
Tensor backward(const Tensor& grad_y) {
  return elementwise_cpu([](double g) { return 2 * g; }, grad_y);
}
}
CUDA_OPS(library) {
  library.op("scratch_constant(Tensor x) -> (Tensor y, Tensor z)", "()->(),()")
      .dtypes(kFloating).no_gradient("z").cpu<forward>();
  library.op("scratch_constant_backward(Tensor grad_y) -> Tensor grad_x", "()->()")
      .dtypes(kFloating).cpu<backward>();
}
"""


def test_an_output_without_a_gradient_is_a_constant(
    scratch_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = ScratchOp("scratch_constant", scratch_root)
    with scratch.built(CONSTANT, compare=False) as row:
        assert row.autograd == "yes, not z"
        for function in both(scratch.name, monkeypatch):
            x = torch.randn(3, requires_grad=True)
            y, z = function(x)
            assert y.requires_grad and not z.requires_grad and z.grad_fn is None
            (y + z).sum().backward()
            assert torch.equal(x.grad, torch.full((3,), 2.0))


@each
@on_each_device
def test_results_and_gradients_are_those_of_python(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for function in both(name, monkeypatch):
        x = tensors(name, device)
        results = function(*x, *CASES[name][1])
        out = first_of(results)
        assert out.requires_grad and out.grad_fn is not None
        gradients = torch.autograd.grad(out.square().sum(), x)
        outputs = results if isinstance(results, tuple) else (results,)
        found.append([outputs, [r.requires_grad for r in outputs], gradients])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_the_gradient_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in both("silu", monkeypatch):
        (x,) = tensors("silu")
        assert torch.autograd.gradgradcheck(function, x)
    for function in both("layer_norm", monkeypatch):  # which has none
        x = tensors("layer_norm")
        out = function(*x, 1e-5).square().sum()
        first = torch.autograd.grad(out, x, create_graph=True)
        with pytest.raises(RuntimeError, match="layer_norm_backward has no gradient"):
            first[0].sum().backward()


@each
def test_only_what_requires_a_gradient_gets_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, _ = both(name, monkeypatch)
    for k in range(len(CASES[name][0])):
        x = [t.detach().requires_grad_(i == k) for i, t in enumerate(tensors(name))]
        first_of(function(*x, *CASES[name][1])).sum().backward()
        assert [t.grad is not None for t in x] == [i == k for i in range(len(x))]


def test_the_public_function_records_by_it() -> None:
    x = torch.randn(4, requires_grad=True)
    out = cuda_ops.silu(x)
    if os.environ.get(library.SWITCH) != "python":
        assert out.grad_fn.name() == "silu_backward"
    assert cuda_ops.silu(x.detach()).grad_fn is None
    with torch.no_grad():
        assert cuda_ops.silu(x).grad_fn is None


def test_a_second_backward_says_that_the_graph_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    function, _ = both("silu", monkeypatch)
    x = torch.randn(4, requires_grad=True)
    out = function(x).sum()
    out.backward(retain_graph=True)
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


def test_what_was_written_meanwhile_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    function, _ = both("silu", monkeypatch)
    x = torch.randn(4, requires_grad=True)
    inner = x * 1
    out = function(inner)
    inner.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_on_saved_tensors_and_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    function, _ = both("silu", monkeypatch)
    x = torch.randn(4, requires_grad=True)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        out = function(x * 1).sum()
    out.backward()
    assert len(packed) == 1 and torch.equal(x.grad, expected)
    x.grad = None
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by torch
@each
def test_under_compiled_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, in_python = both(name, monkeypatch)
    x = tensors(name)
    expected = torch.autograd.grad(first_of(in_python(*x, *CASES[name][1])).sum(), x)
    out = first_of(function(*x, *CASES[name][1])).sum()
    torch._dynamo.reset()
    compiler = torch._dynamo.compiled_autograd._enable(
        torch.compile(backend="aot_eager", fullgraph=True)
    )
    with compiler:
        out.backward()
    torch.testing.assert_close([t.grad for t in x], list(expected))


def test_batched_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for function in both("layer_norm", monkeypatch):
        given = tuple(tensors("layer_norm"))
        whole = functools.partial(torch.autograd.functional.jacobian, vectorize=True)
        found.append(whole(lambda *x, f=function: f(*x, 1e-5), given))
    torch.testing.assert_close(found[0], found[1])


def test_a_formula_of_a_plugin_stays_in_python() -> None:
    cuda_ops.matmul(torch.ones(2, 2), torch.ones(2, 2))
    assert type(fast_path.differentiable(registry().loaded("matmul"))).__name__ != "Callable"


def test_nothing_is_kept_when_the_graph_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    function, _ = both("silu", monkeypatch)
    x = torch.randn(4, requires_grad=True)
    inner = x * 1
    out = function(inner)
    kept = weakref.ref(inner)
    del inner
    gc.collect()
    assert kept() is not None
    del out
    gc.collect()
    assert kept() is None


def test_a_long_chain_is_freed_without_recursion(monkeypatch: pytest.MonkeyPatch) -> None:
    function, _ = both("silu", monkeypatch)
    x = torch.randn(1, requires_grad=True)
    for _ in range(50_000):
        x = function(x)
    del x


def test_bad_arguments_get_the_operator_s_own_errors() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="cuda_ops::matmul: argument 'b'"):
        cuda_ops.matmul(x, torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="fused_relu_scale"):
        cuda_ops.fused_relu_scale(x, "much")


def binding(name: str, gradient: str, space: str = "", more: str = "") -> str:
    """Returns the text of an operator that gives back its argument, and of its gradient."""
    taken = f", Tensor {more}" if more else ""
    line = "(),()->()" if more else "()->()"
    return (
        '#include "binding.h"\n#include "compose.h"\nusing namespace cuda_ops;\n'
        "Tensor given(const Tensor& x) { return x; }\n"
        f"Tensor gradient(const Tensor& grad_out{taken.replace('Tensor', 'const Tensor&')}) {{\n"
        f"  return {gradient};\n}}\n"
        f"CUDA_OPS({space and space + ', '}library) {{\n"
        f'  library.op("{name}(Tensor x) -> Tensor", "()->()").cpu<given>();\n'
        f'  library.op("{name}_backward(Tensor grad_out{taken}) -> Tensor grad_x", "{line}")\n'
        "      .cpu<gradient>();\n}\n"
    )


# A copy: compiled code may not be given back its own argument, an error where CI is set.
COPIED = 'call<Tensor>("aten::abs", "", grad_out)'
NEGATED = 'call<Tensor>("aten::neg", "", grad_out)'


def run(code: str, folder: Path) -> str:
    head = "import torch, cuda_ops\nfrom cuda_ops import compile_ops\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def test_given_back_as_it_is_and_a_reload_before_the_backward(tmp_path: Path) -> None:
    (tmp_path / "bindings").mkdir()
    file = tmp_path / "bindings/given_back.cpp"
    file.write_text(binding("given_back", "grad_out"))
    (tmp_path / "later.cpp").write_text(binding("given_back", "grad_out", more="x"))
    said = run(f"""
        compile_ops.add_root({str(tmp_path)!r})
        compile_ops.reload("given_back")
        x = torch.ones(3, requires_grad=True)
        out = cuda_ops.given_back(x)
        assert x.is_leaf and not out.is_leaf and out.grad_fn.name() == "given_back_backward"
        out.sum().backward()
        print(x.grad.tolist())
        try:
            cuda_ops.given_back(x * 1).mul_(2)
        except RuntimeError as error:  # as for a view that an autograd.Function returns
            print("is being modified inplace" in str(error))
        out = cuda_ops.given_back(x)
        import pathlib
        pathlib.Path({str(file)!r}).write_text(pathlib.Path("later.cpp").read_text())
        compile_ops.reload("given_back")
        try:
            out.sum().backward()
        except RuntimeError as error:
            print(error)
    """, tmp_path)  # fmt: skip
    lines = said.splitlines()
    assert lines[:2] == ["[1.0, 1.0, 1.0]", "True"]
    assert lines[2].startswith("cuda_ops::given_back_backward takes other arguments since a reload")


def test_operators_of_one_name_have_gradients_of_their_own(tmp_path: Path) -> None:
    for space, gradient in (("first", COPIED), ("second", NEGATED)):
        (tmp_path / space / "bindings").mkdir(parents=True)
        (tmp_path / space / "bindings/alike.cpp").write_text(binding("alike", gradient, space))
    said = run(f"""
        from cuda_ops.registry import registry
        from torch._dynamo import compiled_autograd
        for space in ("first", "second"):
            compile_ops.add_root({str(tmp_path)!r} + "/" + space)
            compile_ops.reload(space + "::alike")
        for space in ("first", "second"):
            x = torch.ones(1, requires_grad=True)
            out = registry().public(space + "::alike")(x)
            assert out.grad_fn.name() == "alike_backward"
            with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                out.sum().backward()
            print(x.grad.item())
    """, tmp_path)  # fmt: skip
    assert said.split() == ["1.0", "-1.0"]


# --- where it is not there ------------------------------------------------------------------------


def test_without_the_library_python_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_file", lambda: "not-there.so")
    cpp_autograd._module.cache_clear()
    try:
        assert library.found() is None and cpp_autograd._module() is None
    finally:
        cpp_autograd._module.cache_clear()


def test_a_library_that_does_not_open_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF")
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.setattr(library, "found", lambda: broken)
    cpp_autograd._module.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="gradients are recorded in Python.*broken"):
            assert cpp_autograd._module() is None
    finally:
        cpp_autograd._module.cache_clear()


def test_a_cache_that_may_not_be_entered_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(library, "_file", lambda: "not-there.so")
    monkeypatch.setattr(library.cache, "cache_dir", forbidden)
    with pytest.warns(RuntimeWarning, match="gradients are recorded in Python.*Permission denied"):
        assert library.found() is None


def test_the_switch_has_python_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "python")
    cpp_autograd._module.cache_clear()
    try:
        assert cpp_autograd._module() is None
    finally:
        cpp_autograd._module.cache_clear()


def test_without_a_compiler_or_headers_the_error_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(BuildError, match=r"expected Python's headers in .*python3-dev"):
        library.build(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler 'no-such-compiler'"):
        library.build(tmp_path)
    assert list(tmp_path.iterdir()) == []
