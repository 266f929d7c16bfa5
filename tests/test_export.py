"""Operators in the layout of Hugging Face's ``kernels``, used where there is no cuda_ops."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import needs_gpu, needs_nvcc

from cuda_ops.__main__ import main
from cuda_ops.build import toolchain
from cuda_ops.build.discovery import Pair
from cuda_ops.dev import export, export_plugins
from cuda_ops.dev.export_texts import is_public, rules_texts
from cuda_ops.errors import BuildError
from cuda_ops.registry import registry

#: One of each kind: a gradient by name, a fake in a module that plugins share, a random key, a
#: composed one, a gradient in a plugin, one that writes its argument, one along a dim.
OPS = ["silu", "rms_norm", "dropout", "scale_relu", "add", "cache_write_", "cumulative_sum"]
CPU = f"torch-stable-abi210-cpu-{platform.machine()}-linux"

#: A process that has no cuda_ops, and imports a build as ``kernels`` does.
HEAD = """
import importlib.util, json, sys
from pathlib import Path
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cuda_ops":
            raise ImportError(name)
sys.meta_path.insert(0, Without())
import torch
def imported(folder):
    name = json.loads((Path(folder) / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, Path(folder) / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


def run(code: str, *arguments: object) -> str:
    """Runs Python elsewhere, where warnings are errors, and returns what it prints."""
    command = [sys.executable, "-W", "error", "-c", HEAD + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # where the library says what it could not register
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("an export")
    made = export.build(OPS)
    assert made.left_out == {}
    builds = export.write(made, folder, "my-ops", "Apache-2.0", 3)
    assert builds[0].name == CPU
    return folder


# --- the layout -------------------------------------------------------------------------


@pytest.mark.slow
def test_builds_say_what_they_are(folder: Path) -> None:
    builds = {path.name: path for path in (folder / "build").iterdir()}
    ids = set()
    for name, path in builds.items():
        said = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
        backend = "cpu" if name == CPU else "cuda"
        assert re.fullmatch(rf"_my_ops_{backend}_[0-9a-f]{{12}}", said["id"])
        ids.add(said["id"])
        shown = (said["name"], said["version"], said["license"], said["python-depends"])
        assert shown == ("my-ops", 3, "Apache-2.0", [])
        assert said["backend"]["type"] == backend
        libraries = {path.name for path in (path / "lib").iterdir()}
        assert libraries == {"libmy_ops.so", *(f"{op}.abi3.so" for op in OPS)}
    assert len(ids) == len(builds)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "library_name: kernels" in card and "- `silu(Tensor x) -> Tensor`" in card


@pytest.mark.slow
@needs_nvcc
def test_the_build_for_cuda_names_toolkit_and_architectures(folder: Path) -> None:
    release = toolchain.cuda_version().replace(".", "")
    path = folder / "build" / CPU.replace("-cpu-", f"-cu{release}-")
    said = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
    archs = said["backend"]["archs"]
    assert archs and all(re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch) for arch in archs)


# --- without cuda_ops --------------------------------------------------------------------


@pytest.mark.slow
def test_operators_work_as_in_cuda_ops(folder: Path) -> None:
    calls = """
def called(ops):
    x = torch.linspace(-2, 2, 24).reshape(4, 6).requires_grad_()
    w = torch.linspace(0.5, 1, 6).requires_grad_()
    cache = torch.zeros(2, 2, 2, 3)
    results = [ops.silu(x), ops.rms_norm(x, w), ops.scale_relu(x, 2.0), ops.add(x, w),
               ops.cumulative_sum(x, 1), ops.dropout(x, 0.5, key=torch.tensor([1, 2]))]
    found = [result.detach().tolist() for result in results]
    for result in results:
        factors = torch.arange(1.0, 25).reshape(4, 6)
        gradients = torch.autograd.grad((result * factors).sum(), (x, w), allow_unused=True)
        found += [None if g is None else g.tolist() for g in gradients]
    for wrong in (lambda: ops.silu(x.int()), lambda: ops.rms_norm(x, w[:5])):
        try:
            wrong()
        except RuntimeError as error:
            found.append(str(error).partition("\\n")[0])
    return found
"""
    alone = run(
        f"{calls}\nprint(json.dumps(called(imported(sys.argv[1]))))", folder / "build" / CPU
    )
    scope: dict[str, object] = {}
    exec("import torch, json, cuda_ops\n" + calls + "\nsaid = json.dumps(called(cuda_ops))", scope)
    assert json.loads(alone) == json.loads(str(scope["said"]))


@pytest.mark.slow
def test_tracers_find_shapes_gradients_and_batches(folder: Path) -> None:
    code = """
ops = imported(sys.argv[1])
x, w = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
for call in (lambda x, w: ops.silu(x) + w, ops.rms_norm, ops.add,
             lambda x, w: ops.scale_relu(x, 2.0) * w, lambda x, w: ops.cumulative_sum(x, 1) * w):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(x, w), call(x, w))
    for mine, other in zip(torch.autograd.grad(compiled(x, w).sum(), (x, w)),
                           torch.autograd.grad(call(x, w).sum(), (x, w))):
        torch.testing.assert_close(mine, other)
torch.testing.assert_close(torch.vmap(ops.silu, in_dims=1)(x.detach()), ops.silu(x.detach()).T)
torch.library.opcheck(ops._ops.ops.silu.default, (x,))
torch.library.opcheck(ops._ops.ops.rms_norm.default, (x, w, 1e-5))
kept = ops.dropout(torch.ones(1000), 0.5).count_nonzero()
assert 300 < kept < 700 and not torch.equal(ops.dropout(x, 0.5), ops.dropout(x, 0.5))
assert "silu_backward" not in ops.__all__
assert ops._ops.add_op_namespace_prefix("silu") == ops.__name__ + "::silu"
print("done")
"""
    assert run(code, folder / "build" / CPU) == "done\n"


@pytest.mark.slow
@needs_gpu
@needs_nvcc
def test_the_build_for_cuda_runs_on_a_gpu(folder: Path) -> None:
    code = """
ops = imported(sys.argv[1])
x = torch.randn(4, 6, device="cuda", requires_grad=True)
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    torch.testing.assert_close(ops.silu(x), torch.nn.functional.silu(x))
    mine, = torch.autograd.grad(ops.silu(x).sum(), x)
    torch.testing.assert_close(mine, *torch.autograd.grad(torch.nn.functional.silu(x).sum(), x))
    torch.cuda.synchronize()
print("done")
"""
    (path,) = (path for path in (folder / "build").iterdir() if path.name != CPU)
    assert run(code, path) == "done\n"


@pytest.mark.slow
def test_two_builds_and_cuda_ops_live_in_one_process(folder: Path, tmp_path: Path) -> None:
    export.write(export.build(["silu"]), tmp_path, "others")
    code = """
sys.meta_path.pop(0)
import cuda_ops
x = torch.randn(3)
mine, others = imported(sys.argv[1]), imported(sys.argv[2])
assert mine._ops.NAMESPACE != others._ops.NAMESPACE
assert torch.equal(mine.silu(x), others.silu(x)) and torch.equal(mine.silu(x), cuda_ops.silu(x))
"""
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "error", "-c", HEAD + code]
    builds = [str(folder / "build" / CPU), str(tmp_path / "build" / CPU)]
    done = subprocess.run([*command, *builds], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr


@pytest.mark.slow
def test_an_export_that_fails_leaves_the_older_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> dict[Pair, str]:
        raise BuildError("no compiler")

    before = sorted(path.name for path in (folder / "build" / CPU / "lib").iterdir())
    monkeypatch.setattr(export.servers, "write", refuses)
    with pytest.raises(BuildError, match="no compiler"):
        export.write(export.build(["silu"]), folder, "my-ops")
    assert before == sorted(path.name for path in (folder / "build" / CPU / "lib").iterdir())
    assert not [*(folder / "build").glob(".*")]


def _has_kernels() -> bool:
    try:
        return tuple(map(int, importlib.metadata.version("kernels").split(".")[:2])) >= (0, 17)
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _has_kernels(), reason="kernels 0.17 or later is not installed")
def test_kernels_loads_it(folder: Path) -> None:
    code = """
from kernels import get_local_kernel
ops = get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert ops.__all__ == sys.argv[2].split() and "cuda_ops" not in sys.modules
print(ops.silu(torch.tensor([0.0, 2.0])).tolist())
"""
    command = [sys.executable, "-c", HEAD + code, str(folder), " ".join(OPS)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=offline)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[1] == pytest.approx(1.7615941)


# --- what cannot be exported ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "no operator 'absent'; known: "),
        (["softmax_cross_entropy"], "expected an operator that calls no other, got one that calls"),
        (["silu", "--name", "My_ops"], "--name: expected lower-case letters, digits and '-', a le"),
        (["silu", "--name", "x"], "--name: expected lower-case letters, digits and '-', a letter"),
    ],
)
def test_what_cannot_be_exported_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["export", str(tmp_path / "out"), *arguments]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and message in said.err and said.out == ""
    assert not (tmp_path / "out").exists()


# --- the rules that come along ----------------------------------------------------------------


def test_rules_need_torch_and_each_other_alone() -> None:
    pairs = [pair for key, pair in registry().pairs().items() if key in OPS]
    texts = rules_texts("_my_ops", pairs)
    assert {"derive/rules.py", "spec.py", "ops/rms_norm.py", "ops/_norms.py"} <= set(texts)
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module).partition(".")[0]]
            else:
                continue
            assert {*names} <= {*sys.stdlib_module_names, "torch"}, f"{path}: {names}"
        assert "_cuda_ops" not in text.replace("cuda_ops_", "")


@pytest.mark.parametrize(
    ("name", "arguments", "public"),
    [
        ("silu", ("x",), True),
        ("silu_backward", ("grad_y", "x"), False),
        ("silu_jvp", ("x", "tangent_x"), False),
        ("rescale", ("x", "grad_scale"), True),  # a name as any other
    ],
)
def test_derivatives_alone_are_not_shown(
    name: str, arguments: tuple[str, ...], public: bool
) -> None:
    op = SimpleNamespace(name=name, argument_names=arguments, siblings={name: None, "silu": None})
    assert is_public(op) is public  # type: ignore[arg-type]


def test_a_file_in_the_way_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-ops").touch()
    assert main(["export", str(tmp_path / "my-ops"), "silu"]) == 1
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path}/my-ops/build: cannot be written: Not a directory\n"


def pair(folder: Path, plugin: str) -> Pair:
    (folder / "ops").mkdir()
    (folder / "ops" / "mine.py").write_text(plugin)
    return Pair("mine", folder, None, None)


def test_of_a_plugin_comes_what_its_answers_use(tmp_path: Path) -> None:
    plugin = '''
"""What is special."""
from __future__ import annotations
from typing import TYPE_CHECKING
import torch
from cuda_ops.derive import checks, rules
from cuda_ops.testing import check_op
if TYPE_CHECKING:
    from cuda_ops.registry import Registry
SIZE = 2
@hookimpl
def cuda_ops_fake(op):
    return lambda x: helper(x, rules)
@hookimpl
def cuda_ops_claims(op):
    return check_op(OTHER)
def helper(x, rules):
    return x.new_empty(SIZE)
OTHER = 3
'''
    texts = export_plugins.texts_of([pair(tmp_path, plugin)])
    assert [*texts] == ["ops/mine.py"]
    bound = {name for node in ast.parse(texts["ops/mine.py"]).body for name in _names(node)}
    assert bound == {"annotations", "rules", "SIZE", "cuda_ops_fake", "helper"}


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names]
    return [*export_plugins._names_bound(node)]


@pytest.mark.parametrize(
    ("plugin", "problem"),
    [
        ("def cuda_ops_fake(op):\n    return None\n", ""),
        ("import scipy\ndef cuda_ops_claims(op):\n    return scipy\n", ""),
        ("import scipy\ndef cuda_ops_fake(op):\n    return scipy\n", "it imports scipy"),
        (
            "def cuda_ops_vmap(op):\n    from cuda_ops.registry import function\n",
            "it imports cuda_ops.registry",
        ),
        ("from . import near\ndef cuda_ops_fake(op):\n    return near\n", "it imports ."),
        (
            "for x in ():\n    pass\ndef cuda_ops_fake(op):\n    return None\n",
            "mine.py, line 1: expected a definition or an import",
        ),
    ],
)
def test_a_plugin_that_uses_more_stays(tmp_path: Path, plugin: str, problem: str) -> None:
    assert export_plugins.problem(pair(tmp_path, plugin)) == problem
