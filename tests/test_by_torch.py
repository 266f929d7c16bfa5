"""What a CPU runs: an operator's own kernel, or torch's operators in its place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import ScratchOp

from cuda_ops import servers
from cuda_ops.build.compiling import build
from cuda_ops.compile_ops import reload
from cuda_ops.dispatch import by_torch
from cuda_ops.errors import BuildError, ManifestError
from cuda_ops.registry import registry

X = torch.arange(3.0)

#: Its two functions differ, which no operator's may, so that a result tells which one ran.
_BINDING = """
#include "by_torch.h"
#include "binding.h"
using namespace cuda_ops;
namespace {{
Tensor f(const Tensor& x) {{ return elementwise_cpu([](double v) {{ return 10 * v; }}, x); }}
{returns} g({arguments}) {{ return {value}; }}
}}
CUDA_OPS(library) {{
  library.op("{name}(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<{functions}>();
}}
"""


def binding(name: str, functions: str = "f, g", value: str = "mul(x, scalar(2, x))") -> str:
    return _BINDING.format(
        name=name, functions=functions, value=value, returns="Tensor", arguments="const Tensor& x"
    )


@pytest.mark.slow
def test_a_cpu_runs_torchs_operators_unless_told_otherwise(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(by_torch.SWITCH, raising=False)
    scratch_op.binding.write_text(binding(scratch_op.name))
    scratch_op.reload()
    call = scratch_op.function
    assert torch.equal(call(X), 2 * X)
    with by_torch.kernels(False):
        assert torch.equal(call(X), 10 * X)
        with by_torch.kernels(True):
            assert torch.equal(call(X), 2 * X)
        assert torch.equal(call(X), 10 * X)
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(call(X)))
        thread.start()
        thread.join()
        assert torch.equal(found[0], 10 * X), "another thread runs something else"
    assert torch.equal(call(X), 2 * X)
    monkeypatch.setenv(by_torch.SWITCH, "own")
    with by_torch.kernels(True):
        assert torch.equal(call(X), 2 * X)
    assert torch.equal(call(X), 10 * X)


@pytest.mark.slow
def test_a_reload_takes_torchs_operators_away_and_brings_them_back(scratch_op: ScratchOp) -> None:
    results = []
    for functions in ("f, g", "f", "f, g"):
        scratch_op.binding.write_text(binding(scratch_op.name, functions))
        scratch_op.reload()
        with by_torch.kernels(True):
            results.append(scratch_op.function(X)[1].item())
        with by_torch.kernels(False):
            assert scratch_op.function(X)[1] == 10
    assert results == [2, 10, 2]


def test_the_end_of_another_threads_block_leaves_this_one() -> None:
    inside, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with by_torch.kernels(True):
            inside.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    with by_torch.kernels(False):
        may_end.set()
        thread.join()
        assert not by_torch.wanted()


@pytest.mark.slow
def test_a_kernel_that_is_gone_does_not_come_back(scratch_op: ScratchOp) -> None:
    text = binding(scratch_op.name)
    scratch_op.binding.write_text(text)
    scratch_op.reload()
    scratch_op.binding.write_text(text.replace(".cpu<f, g>", ".cuda<f>"))
    scratch_op.reload()
    with by_torch.kernels(True), pytest.raises(RuntimeError, match="no kernel for this device"):
        scratch_op.function(X)


@pytest.mark.slow
def test_arguments_are_refused_before_torch_sees_them(scratch_op: ScratchOp) -> None:
    scratch_op.binding.write_text(binding(scratch_op.name))
    scratch_op.reload()
    said = []
    for which in (True, False):
        with by_torch.kernels(which), pytest.raises(RuntimeError) as error:
            scratch_op.function(X.int())
        said.append(str(error.value).splitlines()[0])
    assert said[0] == said[1]
    assert "argument 'x'" in said[0]


@pytest.mark.parametrize("which", [False, True])
def test_a_product_below_autograd_takes_what_wants_gradients(which: bool) -> None:
    reload("matmul")
    a = torch.randn(3, 4, requires_grad=True)
    with by_torch.kernels(which), torch._C._AutoDispatchBelowAutograd():
        product = torch.ops.cuda_ops.matmul(a, a.t())
        found = torch.ops.cuda_ops.matmul_backward(torch.ones(3, 3), a, a.t())
    assert torch.is_grad_enabled(), "gradients stay on for the caller"
    plain = a.detach()
    torch.testing.assert_close(product, plain @ plain.t())
    torch.testing.assert_close(found[0], torch.ones(3, 3) @ plain)


@pytest.mark.slow
def test_one_function_by_torch_for_two_operators_is_refused(scratch_op: ScratchOp) -> None:
    name, text = scratch_op.name, binding(scratch_op.name)
    text = text.replace("}\nCUDA_OPS", "Tensor h(const Tensor& x) { return f(x); }\n}\nCUDA_OPS")
    twin = f'  library.op("{name}_twin(Tensor x) -> Tensor", "()->()").cpu<h, g>();\n}}\n'
    scratch_op.binding.write_text(text.removesuffix("}\n") + twin)
    with pytest.raises(ManifestError, match=rf"{name}_twin: its CPU function also serves '{name}'"):
        scratch_op.reload()


@pytest.mark.slow
def test_functions_of_two_types_do_not_compile(scratch_op: ScratchOp) -> None:
    text = _BINDING.format(
        name=scratch_op.name, functions="f, g", value="x", returns="Tensor",
        arguments="const Tensor& x, double by",
    )  # fmt: skip
    scratch_op.binding.write_text(text)
    with pytest.raises(BuildError, match="g takes and returns what f does"):
        scratch_op.build()


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "factor"), [(None, 2), ("own", 10)])
def test_a_program_without_python_runs_the_same(
    scratch_op: ScratchOp, tmp_path: Path, chosen: str | None, factor: int
) -> None:
    scratch_op.binding.write_text(binding(scratch_op.name))
    registry().rescan()
    pair = registry().pairs()[scratch_op.name]
    library = tmp_path / servers.name_of("served")
    beside = Path(shutil.copy(build(pair).path, tmp_path))
    assert not servers.write({pair: beside}, library)
    code = (
        f"import torch; torch.ops.load_library({str(library)!r}); "
        f"print(torch.ops.cuda_ops.{scratch_op.name}(torch.ones(1)).item())"
    )
    environment = {k: v for k, v in os.environ.items() if k != by_torch.SWITCH}
    if chosen is not None:
        environment[by_torch.SWITCH] = chosen
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=environment
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == factor
