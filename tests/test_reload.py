"""Live reload: what a caller sees before, during and after an edit, with CPU kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp, run_python

from cuda_ops.errors import BuildError, ManifestError
from cuda_ops.registry import registry

X = torch.tensor([1.0, 2.0, 3.0])
REPO = Path(__file__).resolve().parent.parent


def test_functions_obtained_earlier_see_the_new_code(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    scratch_op.reload()
    function, packet = scratch_op.function, getattr(torch.ops.cuda_ops, scratch_op.name)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X), X * 2)
    scratch_op.write("v * 5")
    scratch_op.reload()
    for caller in (function, packet, packet.default, compiled):
        assert torch.equal(caller(X), X * 5)


def test_broken_edit_keeps_the_old_code_and_names_the_line(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    scratch_op.reload()
    scratch_op.write("v * undeclared")
    with pytest.raises(BuildError, match=rf"{scratch_op.name}.cpp:\d+:.*undeclared"):
        scratch_op.build()
    assert torch.equal(scratch_op.function(X), X * 2)
    with pytest.raises(BuildError, match="undeclared"):  # the same again, not "already built"
        scratch_op.build()
    scratch_op.write("v * 3")
    scratch_op.reload()
    assert torch.equal(scratch_op.function(X), X * 3)


def test_header_edit_and_instant_revert(scratch_op: ScratchOp) -> None:
    header = scratch_op.root / "utils" / "factor.h"
    header.write_text("constexpr double kFactor = 2;")
    scratch_op.write("v * kFactor", include='#include "factor.h"')
    scratch_op.reload()
    header.write_text("constexpr double kFactor = 7;")
    assert scratch_op.reload().origin == "built"
    assert torch.equal(scratch_op.function(X), X * 7)
    header.write_text("constexpr double kFactor = 2;")
    reverted = scratch_op.reload()
    assert reverted.origin == "cached" and reverted.seconds < 0.5
    assert torch.equal(scratch_op.function(X), X * 2)


def test_schema_change(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    scratch_op.reload()
    function, packet = scratch_op.function, getattr(torch.ops.cuda_ops, scratch_op.name)
    scratch_op.write("v * a", "g * a", parameter=", double a", schema=", float a")
    scratch_op.reload()
    assert torch.equal(function(X, 3.0), X * 3)
    assert torch.equal(packet(X, 3.0), X * 3)
    assert torch.equal(getattr(torch.ops.cuda_ops, scratch_op.name).default(X, a=4.0), X * 4)
    leaf = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf, 5.0).sum(), leaf)
    assert torch.equal(gradient, torch.full_like(X, 5))
    with pytest.raises((RuntimeError, TypeError)):
        function(X)


@pytest.mark.slow
def test_shards_find_their_rule_after_a_schema_change(scratch_op: ScratchOp, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    scratch_op.write("v * 2")
    scratch_op.reload()
    shards = DTensor.from_local(X, mesh, [Shard(0)], run_check=False)
    assert scratch_op.function(shards).placements == (Shard(0),)
    scratch_op.write("v * a", "g * a", parameter=", double a", schema=", float a")
    scratch_op.reload()
    scaled = scratch_op.function(shards, 3.0)
    assert scaled.placements == (Shard(0),) and torch.equal(scaled.to_local(), X * 3)


@pytest.mark.slow
def test_changed_schemas_reach_inductor(
    scratch_op: ScratchOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fills in defaults, and counts arguments, by the schema that tracers find."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def reload(arguments: str) -> None:
        schema = "".join(f", float {argument}" for argument in arguments.split())
        parameter = "".join(f", double {argument[0]}" for argument in arguments.split())
        product = " * ".join(["v", *(argument[0] for argument in arguments.split())])
        scratch_op.write(product, product.replace("v", "g"), parameter=parameter, schema=schema)
        scratch_op.reload()
        torch._dynamo.reset()

    for arguments, factor in [
        ("a=1.0", 1),
        ("a=3.0", 3),
        ("a=3.0 b=4.0", 12),
        ("", 1),
        ("a=5.0", 5),
    ]:
        reload(arguments)
        leaf = X.clone().requires_grad_()
        compiled = torch.compile(scratch_op.function, fullgraph=True)
        (gradient,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
        assert torch.equal(compiled(X), X * factor)
        assert torch.equal(gradient, torch.full_like(X, factor))
    assert torch.equal(torch.compile(scratch_op.function)(X, 3.0), X * 3)


@pytest.mark.slow
def test_schema_that_contradicts_the_code_is_refused_and_the_old_one_serves(
    scratch_op: ScratchOp,
) -> None:
    scratch_op.write("v * 2")
    scratch_op.reload()
    scratch_op.write("v * a", "g * a", parameter=", double a", schema=", int a")
    built = scratch_op.build()
    with pytest.raises(ManifestError, match=r"argument 'a' is int .* double"):
        registry().load(scratch_op.name, built.path)
    assert torch.equal(scratch_op.function(X), X * 2)


@pytest.mark.slow
def test_dropped_dispatch_key(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    scratch_op.reload()
    scratch_op.write("v * 2", key="cuda")
    scratch_op.reload()
    with pytest.raises(
        RuntimeError, match=f"cuda_ops::{scratch_op.name}: .*no kernel for this device"
    ):
        scratch_op.function(X)
    scratch_op.write("v * 9")
    scratch_op.reload()
    assert torch.equal(scratch_op.function(X), X * 9)


def _gradient(function: object) -> float:
    leaf = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf)  # type: ignore[operator]
    return float(gradient[0])


@pytest.mark.slow
def test_changed_backward(scratch_op: ScratchOp) -> None:
    scratch_op.write("v", "g * 2")
    scratch_op.reload()
    compiled = torch.compile(scratch_op.function, backend="aot_eager")
    assert _gradient(scratch_op.function) == _gradient(compiled) == 2
    scratch_op.write("v", "g * 3")
    scratch_op.reload()
    assert _gradient(scratch_op.function) == _gradient(compiled) == 3


_FORMULA = """
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import Autograd
@hookimpl
def cuda_ops_autograd(op):
    return Autograd(lambda ctx, inputs, output: None, lambda ctx, grad: {formula})
"""


@pytest.mark.slow
def test_changed_formula_in_a_plugin_reaches_compiled_code(scratch_op: ScratchOp) -> None:
    plugin = scratch_op.root / "ops" / f"{scratch_op.name}.py"
    scratch_op.write("v")
    plugin.write_text(_FORMULA.format(formula="grad * 4"))
    scratch_op.reload()
    compiled = torch.compile(scratch_op.function, backend="aot_eager")
    assert _gradient(scratch_op.function) == _gradient(compiled) == 4
    plugin.write_text(_FORMULA.format(formula="grad * 6"))
    scratch_op.reload()
    assert _gradient(scratch_op.function) == _gradient(compiled) == 6


@pytest.mark.parametrize("loader", ["this thread", "another thread"])
@pytest.mark.slow
def test_changed_formula_in_a_new_process_despite_torch_s_disk_caches(
    scratch_op: ScratchOp, tmp_path: Path, loader: str
) -> None:
    plugin = scratch_op.root / "ops" / f"{scratch_op.name}.py"
    # Formulas of calls alone: Inductor caches their graphs and compiles no C++ for them.
    formulas = ("op.overload(grad)", "op.overload(op.overload(grad))")
    load = f"registry().load({scratch_op.name!r}, built.path)"
    if loader == "another thread":
        load = f"thread = Thread(target=lambda: {load}); thread.start(); thread.join()"
    code = f"""
import os
from pathlib import Path
from threading import Thread
import torch
import torch._inductor.compile_fx  # once, before the forks: they begin without any operator
def differentiate():
    from cuda_ops.build import compiling
    from cuda_ops.registry import registry
    registry().add_root(Path({str(scratch_op.root)!r}))
    built = compiling.build(registry().pairs()[{scratch_op.name!r}])
    {load}
    function = torch.compile(registry().public({scratch_op.name!r}), fullgraph=True)
    leaf = torch.ones(3, requires_grad=True)
    function(leaf).sum().backward()
    print(leaf.grad[0].item(), flush=True)
for formula in {[_FORMULA.format(formula=formula) for formula in formulas]}:
    Path({str(plugin)!r}).write_text(formula)
    child = os.fork()
    if child == 0:
        differentiate()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    # A fork cannot use CUDA once its parent has, and the operator has a CPU kernel only.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **hidden}
    scratch_op.write("v * 3")
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["3.0", "9.0"]


@pytest.mark.slow
def test_the_tag_of_torch_s_disk_caches_is_every_thread_s_and_keeps_what_others_put_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_CACHE_KEY_TAG", "set")
    code = """
from threading import Thread
import torch
from torch.compiler import config
import cuda_ops
seen = []
def other(work):
    thread = Thread(target=work); thread.start(); thread.join()
def look():
    seen.append(config.cache_key_tag)
config.cache_key_tag = "mine"
other(lambda: cuda_ops.relu)
other(look)
cuda_ops.relu(torch.empty(2, device="meta"))  # as a compiler asks for the shape
look()
other(look)
environment, mine, others = (text.split(";cuda_ops-") for text in seen)
assert environment[0] == others[0] in ("set", "mine"), seen  # "mine": one for all, as torch 2.11
assert mine[0] == "mine", seen
assert environment[1] == mine[1] == others[1], seen
"""
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr


_COMPOSED = """
#include "binding.h"
#include "compose.h"
using namespace cuda_ops;
namespace {{
Tensor f(const Tensor& x) {{ return mul(x, scalar({factor}, x)); }}
}}
CUDA_OPS(library) {{
  library.op("{name}(Tensor x) -> Tensor", "()->()").dtypes(kFloating).composite<f>();
}}
"""


@pytest.mark.slow
def test_changed_composition_reaches_compiled_code(scratch_op: ScratchOp) -> None:
    scratch_op.binding.write_text(_COMPOSED.format(name=scratch_op.name, factor=2))
    scratch_op.reload()
    compiled = torch.compile(scratch_op.function, backend="aot_eager")
    assert torch.equal(compiled(X), X * 2)
    scratch_op.binding.write_text(_COMPOSED.format(name=scratch_op.name, factor=5))
    scratch_op.reload()
    assert torch.equal(scratch_op.function(X), X * 5)
    assert torch.equal(compiled(X), X * 5)


@pytest.mark.slow
def test_300_reloads_while_another_thread_calls(scratch_op: ScratchOp, tmp_path: Path) -> None:
    libraries = []
    for factor in (1, 2):
        scratch_op.write(f"v * {factor}")
        libraries.append(scratch_op.build().path)
    registry().load(scratch_op.name, libraries[0])
    function, done, wrong = scratch_op.function, threading.Event(), []

    def call() -> None:
        while not done.is_set():
            result = float(function(X)[0])
            if result not in (1.0, 2.0):
                wrong.append(result)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        for i in range(300):
            fresh = tmp_path / f"{i}.so"  # a new path is a new library to the system's loader
            shutil.copyfile(libraries[i % 2], fresh)
            registry().load(scratch_op.name, fresh)
            assert float(function(X)[0]) == i % 2 + 1
    finally:
        done.set()
        for caller in callers:
            caller.join()
    assert not wrong
