"""Operators written as strings: what files have, strings have."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_nvcc, run_python

import cuda_ops
from cuda_ops.__main__ import main
from cuda_ops.build import cache, compiling
from cuda_ops.compile_ops import compile_ops
from cuda_ops.dev import strings
from cuda_ops.errors import BuildError, DiscoveryError, ManifestError, ResultError
from cuda_ops.registry import registry
from cuda_ops.testing import CheckReport, check_op
from cuda_ops.testing.checks import by_name

X = torch.tensor([1.0, 2.0, 3.0])
HERE = Path(__file__)

CPP = """
#include "binding.h"
using namespace cuda_ops;
namespace {
Tensor forward(const Tensor& x) {
  return elementwise_cpu([](double v) { return @forward@; }, x);
}
Tensor backward(const Tensor& grad_out, const Tensor& x) {
  return elementwise_cpu([](double g, double v) { (void)v; return @backward@; }, grad_out, x);
}
}
CUDA_OPS(@space@library) {
  library.op("@name@(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<forward>();
  library.op("@name@_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating).cpu<backward>();
}
"""
REFERENCE = """
from cuda_ops.hookspecs import hookimpl

@hookimpl
def cuda_ops_reference(op):
    return lambda x: x * {factor}
"""
_numbers = itertools.count()


def binding(name: str, forward: str, backward: str = "g", space: str = "") -> str:
    text = CPP.replace("@name@", name).replace("@space@", f"{space}, " if space else "")
    return text.replace("@forward@", forward).replace("@backward@", backward)


@pytest.fixture
def name(
    quick_compiler: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    roots_for_now: None,
) -> str:
    """A new name for each test, whose files are in a cache of its own."""
    monkeypatch.setenv("CXX", str(quick_compiler))
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path_factory.mktemp("a cache")))
    monkeypatch.setattr(strings, "_home", None)
    monkeypatch.setattr(strings, "_own", {})
    return f"inlined_{next(_numbers)}"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists what is compiled."""
    compile_one, compiled = compiling._compile, []

    def counted(pair: Any, *rest: Any) -> Any:
        compiled.append(pair.key)
        return compile_one(pair, *rest)

    monkeypatch.setattr(compiling, "_compile", counted)
    return compiled


def line_of(text: str) -> int:
    """Returns the only line of this file that says so."""
    lines = HERE.read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if text in line and "line_of" not in line)
    return number


def checked(name: str, *checks: str) -> CheckReport:
    return check_op(name, checks=[*map(by_name, checks)], devices=["cpu"])


def test_a_string_gets_what_files_get(name: str) -> None:
    function = cuda_ops.inline(name, cpp=binding(name, "v * v", "2 * g * v"))
    packet = getattr(torch.ops.cuda_ops, name)
    assert function is getattr(cuda_ops, name)
    assert torch.equal(function(X), X * X) and torch.equal(packet(X), X * X)
    leaf = X.clone().requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for call in (function, packet, compiled):
        (gradient,) = torch.autograd.grad(call(leaf).sum(), leaf)
        assert torch.equal(gradient, 2 * X)
    assert function(X.to("meta")).shape == X.shape
    assert torch.equal(torch.vmap(function)(X), X * X)
    with pytest.raises(RuntimeError, match=f"cuda_ops::{name}: argument 'x': expected dtype"):
        function(X.int())
    report = checked(name, "registration", "gradcheck", "opcheck", "autocast", "vmap")
    assert report.passed, str(report)


def test_a_changed_text_reloads_and_the_same_text_builds_nothing(
    name: str, builds: list[str]
) -> None:
    function = cuda_ops.inline(name, cpp=binding(name, "v * 2"))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), X * 2)
    for forward, factor in (("v * 2", 2), ("v * 5", 5), ("v * 2", 2)):
        assert cuda_ops.inline(name, binding(name, forward)) is function
        for call in (function, getattr(torch.ops.cuda_ops, name), compiled):
            assert torch.equal(call(X), X * factor)
    assert builds == [name, name]


def test_an_error_names_the_line_of_the_caller_and_the_last_good_text_serves(name: str) -> None:
    function = cuda_ops.inline(name, cpp=binding(name, "v * 2"))
    with pytest.raises(BuildError) as caught:
        cuda_ops.inline(
            name,
            cpp=r"""
            #include "binding.h"
            cuda_ops::Tensor f(const cuda_ops::Tensor& x) { return undeclared; }
            CUDA_OPS(library) {}
            """,
        )
    assert f"{HERE}:{line_of('{ return undeclared; }')}:" in str(caught.value)
    assert str(cache.cache_dir()) not in str(caught.value)
    assert torch.equal(function(X), X * 2)
    (row,) = compile_ops([name])  # again, by the tools
    assert f"{HERE}:" in row.error
    assert cuda_ops.inline(name, cpp=binding(name, "v * 3")) is function
    assert torch.equal(function(X), X * 3) and name not in registry().failures


def test_going_back_to_the_text_that_serves_forgets_the_failure(name: str) -> None:
    cuda_ops.inline(name, cpp=binding(name, "v * 2"))
    with pytest.raises(BuildError, match=f"<{name}.cpp>:6:.*undeclared"):  # a text put together
        cuda_ops.inline(name, cpp=binding(name, "undeclared"))
    assert name in registry().failures
    cuda_ops.inline(name, cpp=binding(name, "v * 2"))
    assert name not in registry().failures


def test_a_first_text_that_does_not_build_is_the_error_of_every_use(name: str) -> None:
    with pytest.raises(BuildError):
        cuda_ops.inline(name, cpp=binding(name, "undeclared"))
    with pytest.raises(BuildError, match=f"<{name}.cpp>:6:.*undeclared"):
        getattr(cuda_ops, name)
    function = cuda_ops.inline(name, cpp=binding(name, "v"))
    assert torch.equal(function(X), X)


def test_checks_catch_a_wrong_operator(name: str) -> None:
    wrong, right = REFERENCE.format(factor=3), REFERENCE.format(factor=2)
    with pytest.raises(ResultError, match=rf"wrong on cpu.*check_op\('{name}'\) says more"):
        cuda_ops.inline(name, cpp=binding(name, "v * 2"), plugin=wrong)
    assert torch.equal(getattr(cuda_ops, name)(X), X * 2)  # to look at it
    report = checked(name, "reference")
    assert not report.passed and "inline" in str(report)
    function = cuda_ops.inline(name, cpp=binding(name, "v * 2", "g * 2"), plugin=right)
    assert checked(name, "reference", "gradcheck").passed
    # The plugin alone changed, or went.
    with pytest.raises(ResultError):
        cuda_ops.inline(name, cpp=binding(name, "v * 2", "g * 2"), plugin=wrong)
    assert cuda_ops.inline(name, cpp=binding(name, "v * 2", "g * 2")) is function


def test_schemas_are_checked_before_anything_is_compiled(name: str, builds: list[str]) -> None:
    text = binding(name, "v").replace('"()->()"', '"()->(n)"')
    with pytest.raises(ManifestError, match=name):
        cuda_ops.inline(name, cpp=text)
    assert builds == []


def test_the_tools_of_the_process_find_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cuda_ops.inline(name, cpp=binding(name, "v * 2", "g * 2"))
    assert compile_ops([name])[0].error == ""
    assert main(["dev", name]) == 0
    assert name in capsys.readouterr().out
    assert name in dir(cuda_ops) and name in cuda_ops.dev.compiled_ops
    removed, kept = cache.clean()
    assert not removed and {entry.name.stem for entry in kept} == {name}
    file = registry().pairs()[name].binding
    assert file is not None
    file.unlink()
    removed, _ = cache.clean()
    assert {entry.name.stem for entry in removed} == {name}


def test_namespaces_do_not_meet(name: str) -> None:
    own = cuda_ops.inline(name, cpp=binding(name, "v * 2"))
    other = cuda_ops.inline(name, cpp=binding(name, "v * 3", space="inlined"))
    assert torch.equal(own(X), X * 2) and torch.equal(other(X), X * 3)
    assert other is registry().public(f"inlined::{name}")
    assert torch.equal(getattr(torch.ops.inlined, name)(X), X * 3)


@pytest.mark.parametrize(
    ("taken", "message"),
    [
        ("silu", r"operator 'silu' is already defined by .*silu.cpp; choose another name"),
        ("silu_backward", "silu_backward is the gradient of silu"),
        ("inline", "is taken by the function cuda_ops.inline; choose another"),
        ("registry", "is taken by the module cuda_ops.registry; choose another"),
        ("two words", "is not a Python identifier; choose another"),
    ],
)
def test_names_are_those_of_files(name: str, taken: str, message: str) -> None:
    with pytest.raises(DiscoveryError, match=f"inline: .*{message}"):
        cuda_ops.inline(taken, cpp=binding(taken, "v"))
    assert not (cache.cache_dir() / cache.INLINE / "0" / "cuda_ops" / "bindings").exists()


def test_what_forms_no_operator_is_refused(name: str) -> None:
    with pytest.raises(
        DiscoveryError, match=r"expected a binding .*, a kernel .* or both, got nei"
    ):
        cuda_ops.inline(name)
    with pytest.raises(TypeError, match="argument 'cpp': expected str, got int"):
        cuda_ops.inline(name, cpp=3)
    with pytest.raises(DiscoveryError, match=f"<{name}.cpp>: registers nothing"):
        cuda_ops.inline(name, cpp="int " + "f();")
    with pytest.raises(DiscoveryError, match=f"<{name}.cu>: nothing binds this kernel"):
        cuda_ops.inline(name, cu="__global__ void " + "f();")
    with pytest.raises(DiscoveryError, match="namespace 'aten' is one that torch has itself"):
        cuda_ops.inline(name, cpp=binding(name, "v", space="aten"))


def test_a_cache_that_cannot_be_written_is_named(name: str) -> None:
    (cache.cache_dir() / cache.INLINE / "0.lock").mkdir(parents=True)  # as root may write any
    with pytest.raises(BuildError, match=r"inline: cannot write in .*; set CUDA_OPS_CACHE to"):
        cuda_ops.inline(name, cpp=binding(name, "v"))


def test_a_root_keeps_the_files_and_loses_nothing(name: str, tmp_path: Path) -> None:
    root = tmp_path / "kept"
    cuda_ops.inline(name, cpp=binding(name, "v * 2"))
    before = registry().pairs()[name].binding
    assert before is not None
    (root / "bindings").mkdir(parents=True)
    (root / "bindings" / f"{name}.cpp").write_text("// of the user\n")
    with pytest.raises(DiscoveryError, match="was not written by"):
        cuda_ops.inline(name, cpp=binding(name, "v * 2"), root=root)
    assert before.exists()
    (root / "bindings" / f"{name}.cpp").unlink()
    function = cuda_ops.inline(name, cpp=binding(name, "v * 2"), root=root)
    assert not before.exists()  # it moved
    file = root / "bindings" / f"{name}.cpp"
    assert file.read_text().startswith(binding(name, "v * 2"))
    cuda_ops.inline(name, cpp=binding(name, "v * 3"), root=root)
    assert torch.equal(function(X), X * 3)
    with pytest.raises(DiscoveryError, match=rf"already defined by {file}; pass root='{root}'"):
        cuda_ops.inline(name, cpp=binding(name, "v * 4"))
    edited = file.read_text().replace("v * 3", "v * 7")
    file.write_text(edited)
    with pytest.raises(DiscoveryError, match=r"was not written by cuda_ops.inline, or was edited"):
        cuda_ops.inline(name, cpp=binding(name, "v * 4"), root=root)
    assert file.read_text() == edited
    file.write_text(binding(name, "undeclared"))  # what messages name is the user's file now
    (row,) = compile_ops([name])
    assert f"{file}:6:" in row.error
    plugin = root / "ops" / f"{name}.py"
    file.unlink()
    plugin.parent.mkdir()
    plugin.write_text("# of the user\n")
    with pytest.raises(DiscoveryError, match=str(plugin)):
        cuda_ops.inline(name, cpp=binding(name, "v * 4"), root=root)
    assert not file.exists() and plugin.exists()


KERNEL = """
#include "elementwise.cuh"
using namespace cuda_ops;
struct Scale {
  template <class C>
  __device__ C operator()(C x) const { return x * C(@factor@); }
};
cudaError_t @name@_launch(const Strided<1>& problem, cudaStream_t stream) {
  return map_cuda(problem, stream, Scale{});
}
"""
LAUNCHER = """
#include "binding.h"
using namespace cuda_ops;
cudaError_t @name@_launch(const Strided<1>& problem, cudaStream_t stream);
Tensor on_cpu(const Tensor& x) { return elementwise_cpu([](double v) { return v * 2; }, x); }
Tensor on_cuda(const Tensor& x) { return elementwise_cuda(@name@_launch, x); }
CUDA_OPS(library) {
  library.op("@name@(Tensor x) -> Tensor", "()->()")
      .dtypes(kFloating).cpu<on_cpu>().cuda<on_cuda>();
}
"""


@needs_nvcc
@pytest.mark.slow
def test_a_kernel_is_compiled_alone_and_errors_of_nvcc_name_the_line(name: str) -> None:
    def inline(factor: str) -> Any:
        kernel = KERNEL.replace("@name@", name).replace("@factor@", factor)
        return cuda_ops.inline(name, cpp=LAUNCHER.replace("@name@", name), cu=kernel)

    def compiled_at() -> int:
        (built,) = (cache.cache_dir() / "work").glob(f"{name}-*/{name}.o")
        return built.stat().st_mtime_ns

    function = inline("2")  # other texts of the same number: on a GPU the CPU is what it should be
    before = compiled_at()
    assert inline("(1 + 1)") is function and compiled_at() == before
    with pytest.raises(BuildError, match=rf"<{name}.cu>\(6\): error: .*undeclared"):
        inline("undeclared")
    assert torch.equal(function(X), X * 2)
    assert inline("(4 / 2)") is function and compiled_at() == before  # after an error too
    cuda_ops.inline(name, cpp=binding(name, "v * 3"))  # without its kernel
    assert torch.equal(function(X), X * 3)
    assert registry().pairs()[name].kernel is None


GUEST = """
#include <torch/extension.h>
torch::Tensor forward(torch::Tensor x) {{ return x * {factor}; }}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ m.def("forward", &forward, "a guest"); }}
"""


@pytest.mark.slow
def test_a_guest_is_its_module(name: str) -> None:
    module = cuda_ops.inline(name, cpp=GUEST.format(factor=2))
    assert torch.equal(module.forward(X), X * 2) and getattr(cuda_ops, name) is module
    cuda_ops.inline(name, cpp=GUEST.format(factor=3))
    assert torch.equal(module.forward(X), X * 3)


PROGRAM = f"""
import sys, torch, cuda_ops
sys.path.insert(0, {str(HERE.parent)!r})
from cuda_ops.build import compiling
from cuda_ops.dev import strings

TEXT = {CPP!r}
build, built = compiling._compile, []
compiling._compile = lambda pair, *rest: built.append(pair.key) or build(pair, *rest)

def inline(forward):
    text = TEXT.replace("@name@", "inlined").replace("@space@", "")
    text = text.replace("@forward@", forward).replace("@backward@", "g")
    function = cuda_ops.inline("inlined", cpp=text)
    return float(function(torch.ones(1)))
"""


def program(code: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM + textwrap.dedent(code)]


@pytest.mark.slow
def test_processes_with_one_name_do_not_disturb_each_other(name: str) -> None:
    code = """
    print(inline(sys.argv[1]), strings._home.folder.name, flush=True)
    sys.stdin.readline()
    print(inline(sys.argv[2]), inline(sys.argv[1]), built, flush=True)
    """
    texts = ("v * 2", "v * 3"), ("v * 4", "v * 5")
    processes = [
        subprocess.Popen(
            [*program(code), *pair], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for pair in texts
    ]
    first = [process.stdout.readline().split() for process in processes if process.stdout]
    assert [words[0] for words in first] == ["2.0", "4.0"]
    assert sorted(words[1] for words in first) == ["0", "1"]
    rest = [process.communicate("\n")[0].strip() for process in processes]
    twice = "['inlined', 'inlined']"
    assert rest == [f"3.0 2.0 {twice}", f"5.0 4.0 {twice}"]
    # The next one takes a folder that is free, and what any of them has built.
    after = "print(inline('v * 2'), inline('v * 5'), strings._home.folder.name, built)"
    done = subprocess.run(program(after), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2.0 5.0 0 []"


@pytest.mark.slow
def test_a_forked_process_and_a_removed_cache_get_folders_of_their_own(name: str) -> None:
    code = """
    import os, shutil
    from cuda_ops.registry import registry
    inline("v * 2")
    file = registry().pairs()["inlined"].binding
    before = file.read_text()
    child = os.fork()
    if not child:
        good = inline("v * 3") == 3 and inline("v * 2") == 2 and inline("v * 3") == 3
        os._exit(0 if good and registry().pairs()["inlined"].binding != file else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert file.read_text() == before and strings._home.held
    shutil.rmtree(os.environ["CUDA_OPS_CACHE"])
    assert not strings._home.held
    print(inline("v * 5"), inline("v * 2"))
    """
    done = subprocess.run(program(code), capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "5.0 2.0", done.stderr


def test_nothing_of_it_is_imported_before_its_use() -> None:
    code = """
import sys, cuda_ops
cuda_ops.silu
print([n for n in ("IPython", "rich", "cuda_ops.dev") if n in sys.modules])
cuda_ops.inline, cuda_ops.load_ipython_extension
print("IPython" in sys.modules, "inline" in dir(cuda_ops))
"""
    done = run_python("-c", code)
    assert done.stdout.split("\n")[:2] == ["[]", "False True"], done.stderr
