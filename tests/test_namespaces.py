"""Roots with a namespace of their own, and guests by their torch.ops name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from spaced import Spaced, fresh
from torch.utils.flop_counter import FlopCounterMode

import cuda_ops
from cuda_ops import torch_ops
from cuda_ops.build.discovery import Pair, survey
from cuda_ops.compile_ops import compile_ops, compiled_ops, reload
from cuda_ops.dev import main, watch
from cuda_ops.dev.scaffold import new_pair
from cuda_ops.dispatch import declared
from cuda_ops.errors import CudaOpsError, DiscoveryError, ManifestError
from cuda_ops.names import OF_TORCH, apart, fault_of_namespace, keyed, unknown
from cuda_ops.namespaces import expose
from cuda_ops.registry import registry
from cuda_ops.testing import check_op
from cuda_ops.testing.checks import by_name
from cuda_ops.testing.subject import find
from cuda_ops.testing.worker import Worker

REPO = Path(__file__).resolve().parent.parent
X = torch.tensor([1.0, -2.0, 3.0])
Y = torch.tensor([2.0, 5.0, 7.0])


@pytest.fixture(scope="module")
def spaces(
    own_cache: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Spaced, Spaced]:
    """Two roots that both have an ``add``, as cuda_ops has."""
    made = []
    for namespace, factor in (("first_ops", 10), ("second_ops", 100)):
        spaced = Spaced(tmp_path_factory.mktemp(namespace), namespace)
        spaced.write(factor)
        (spaced.root / "ops").mkdir()
        (spaced.root / "ops" / "add.py").write_text(
            "from cuda_ops.hookspecs import hookimpl\n"
            "@hookimpl\n"
            "def cuda_ops_reference(op):\n"
            f"    return (lambda x, y: x + {factor} * y) if op.name == 'add' else None\n"
            "@hookimpl\n"
            "def cuda_ops_flops(op):\n"
            f"    return lambda *shapes: {factor}\n"
        )
        registry().add_root(spaced.root)
        made.append(spaced)
    rows = compile_ops([spaced.key for spaced in made])
    assert [row.op for row in rows] == ["first_ops::add", "second_ops::add"]
    assert [row.error for row in rows] == ["", ""]
    assert all(row.max_error is not None and row.max_error < 1e-6 for row in rows)
    return made[0], made[1]


# --- names -------------------------------------------------------------------------------


def test_keys() -> None:
    assert keyed("cuda_ops", "silu") == "silu" and keyed("my_ops", "silu") == "my_ops::silu"
    assert apart("silu") == apart("cuda_ops::silu") == ("cuda_ops", "silu")
    assert apart("my_ops::silu") == ("my_ops", "silu")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("aten", "is one that torch has itself"),
        ("_cuda_ops", "starts with an underscore"),
        ("class", "is a keyword of Python"),
        ("my ops", "is not a Python identifier"),
        ("größe", "is not a Python identifier of ASCII letters"),
        ("load_library", r"is taken by torch\.ops\.load_library"),
    ],
)
def test_a_namespace_that_operators_cannot_have(name: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^expose: namespace '{name}' {fault}"):
        expose(name, __name__)
    with pytest.raises(DiscoveryError, match=f"^namespace '{name}' {fault}.*; choose another"):
        new_pair("planned", tmp_path, namespace=name)
    if name.isidentifier():
        Spaced(tmp_path, name).write(1)
        (pair,) = survey([tmp_path])[0].values()
        assert f"namespace '{name}'" in pair.problem and f"CUDA_OPS({name}, lib" in pair.problem


def test_the_namespaces_of_this_torch_are_known() -> None:
    done = fresh("import torch; print(*torch._C._dispatch_get_all_op_names())")
    assert done.returncode == 0, done.stderr
    spaces = {name.partition("::")[0] for name in done.stdout.split()}
    assert {space for space in spaces if not space.startswith("_")} <= OF_TORCH
    assert fault_of_namespace("my_ops") == ""


def test_the_text_names_the_namespace_of_a_root(tmp_path: Path) -> None:
    Spaced(tmp_path, "my_ops").write(1)
    (tmp_path / "bindings" / "guest.cpp").write_text("PYBIND11_MODULE(guest, m) {}")
    pairs, problems = survey([tmp_path])
    assert list(pairs) == ["my_ops::add", "my_ops::guest"] and not problems
    assert all(pair.namespace == "my_ops" and not pair.problem for pair in pairs.values())
    (tmp_path / "bindings" / "other.cpp").write_text("// CUDA_OPS(no, x)\nCUDA_OPS(\n  l) {}")
    assert survey([tmp_path])[0]["my_ops::other"].problem == (
        f"{tmp_path}/bindings/other.cpp: expected CUDA_OPS(my_ops, library), as in "
        f"{tmp_path}/bindings/add.cpp, got CUDA_OPS(library): a root has one namespace"
    )


def test_one_namespace_in_two_roots(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        Spaced(tmp_path / folder, "my_ops").write(1)
    (problem,) = survey([tmp_path / "a", tmp_path / "b"])[1]
    assert problem.name == "my_ops::add"
    assert "operator 'my_ops::add' is already defined by" in problem.text
    assert "or give its root a namespace of its own, CUDA_OPS(my_ops, library)" in problem.text


def test_a_text_with_another_namespace_than_its_library_is_refused(
    spaces: tuple[Spaced, Spaced],
) -> None:
    from cuda_ops.dispatch.library import open_library

    library = registry().library_of("first_ops::add")
    assert library is not None
    with pytest.raises(ManifestError, match=r"in the namespace 'cuda_ops', .*, got 'first_ops'"):
        open_library(library, "add")


def test_errors_of_a_binding_name_the_namespace() -> None:
    text = 'CUDA_OPS(my_ops, library) { library.op("add(Tensor x) -> Tensor", "(),()->()"); }'
    with pytest.raises(ManifestError, match=r"^my_ops::add: signature '\(\),\(\)->\(\)' has 2"):
        declared.check("add", text, "my_ops")


# --- operators ---------------------------------------------------------------------------


def test_every_name_leads_to_its_operator(spaces: tuple[Spaced, Spaced]) -> None:
    for spaced, factor in zip(spaces, (10, 100), strict=True):
        expected = X + factor * Y
        assert torch.equal(spaced.function(X, Y), expected)
        assert torch.equal(getattr(torch.ops, spaced.namespace).add(X, Y), expected)
        assert torch.equal(compiled_ops[spaced.key](X, Y), expected)
        assert registry().loaded(spaced.key) is not None
        spec = find(spaced.key).op
        assert (spec.name, spec.qualname, spec.key) == ("add", spaced.key, spaced.key)
        assert torch.equal(spec.function(X, Y), expected)
    assert registry().key_of("add") == registry().key_of("cuda_ops::add") == "add"
    assert registry().key_of("nowhere") == "nowhere"
    assert torch.ops.first_ops.add.default is not torch.ops.second_ops.add.default


def test_a_name_alone_leads_to_the_only_operator(spaces: tuple[Spaced, Spaced]) -> None:
    first, _ = spaces
    (first.root / "bindings" / "lonely.cpp").write_text("CUDA_OPS(first_ops, library) {}")
    try:
        registry().rescan()
        assert registry().key_of("lonely") == "first_ops::lonely"
        assert registry().key_of("lonely_backward") == "first_ops::lonely_backward"
        with pytest.raises(AttributeError, match=r"'cuda_ops' has no operator 'lonely'; there is "):
            _ = cuda_ops.lonely
    finally:
        (first.root / "bindings" / "lonely.cpp").unlink()
        registry().rescan()


def test_a_command_means_an_added_root_first(
    spaces: tuple[Spaced, Spaced],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # which is no project
    first, second = spaces
    key = registry().key_in_command
    assert key("silu") == key("cuda_ops::silu") == "silu" and key("nowhere") == "nowhere"
    assert key("cuda_ops::add") == "add" and key("second_ops::add") == "second_ops::add"
    with pytest.raises(
        DiscoveryError, match="'add': expected a full name, first_ops::add or second_ops::add, got"
    ):
        key("add")
    registry().drop_root(second.root)
    try:
        assert main(["add"]) == 0
        assert "first_ops::add" in capsys.readouterr().out
        assert key("add_backward") == "first_ops::add_backward"
        assert key("add_rms_norm_") == "add_rms_norm_"  # not one of the pair first_ops::add
        # Those of the installed packages.
        registry()._installed_roots = [*registry()._installed_roots, first.root.resolve()]
        pairs = registry().pairs()
        registry()._extra_roots.remove(first.root)
        registry()._pairs = pairs
        with pytest.raises(DiscoveryError, match="a full name, cuda_ops::add or first_ops::add,"):
            key("add")
        assert main(["add"]) == 1
        assert "error: operator 'add': expected a full name, " in capsys.readouterr().out
    finally:
        for spaced in spaces:
            registry().add_root(spaced.root)
        registry().rescan()


def test_a_command_in_a_project_means_its_operators(
    spaces: tuple[Spaced, Spaced], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [tmp_path / "mine", tmp_path / ".venv" / "lib" / "site-packages" / "theirs"]
    for root, namespace in zip(roots, ("mine_ops", "their_ops"), strict=True):
        Spaced(root, namespace).write(1)
    before = list(registry()._extra_roots)
    try:
        registry()._extra_roots[:] = []
        monkeypatch.setattr(registry().plugins, "roots", lambda: roots)
        registry().rescan()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(DiscoveryError, match="cuda_ops::add or mine_ops::add or their_ops::a"):
            registry().key_in_command("add")
        (tmp_path / "pyproject.toml").touch()
        assert registry().key_in_command("add") == "mine_ops::add"
        assert registry().key_in_command("silu") == "silu"
        monkeypatch.chdir(REPO)
        assert registry().key_in_command("add") == "add"
    finally:
        registry()._extra_roots[:] = before
        monkeypatch.undo()
        registry().rescan()


@pytest.mark.parametrize(
    ("names", "end"),
    [
        (["silv"], "no operator 'silv'; did you mean 'silu'?"),
        (["my_ops::reluu"], "no operator 'my_ops::reluu'; did you mean 'relu' or 'other::relu'?"),
        (["silv", "zzz"], "no operator 'silv', 'zzz'; did you mean 'silu'?"),
        (["zzz"], "no operator 'zzz'; known: silu, relu, other::relu"),
    ],
)
def test_an_unknown_name_leads_to_those_that_are_close(names: list[str], end: str) -> None:
    assert unknown(names, ["silu", "relu", "other::relu"]) == end


def test_a_module_leads_to_names_that_are_close(spaces: tuple[Spaced, Spaced]) -> None:
    with pytest.raises(AttributeError, match=r"has no operator 'silv'; did you mean 'silu'\?$"):
        _ = cuda_ops.silv
    with pytest.raises(AttributeError, match=r"'ad'; did you mean 'first_ops::add'\?$"):
        registry().public("first_ops::ad")


def test_what_a_binding_calls_is_in_its_namespace_first(spaces: tuple[Spaced, Spaced]) -> None:
    op = find("first_ops::add").op
    assert registry().part_of(op, "add_backward") == "first_ops::add_backward"
    assert registry().part_of(op, "silu") == "silu"
    assert registry().part_of(op, "cuda_ops::add") == "add"
    assert registry().part_of(op, "second_ops::add") == "second_ops::add"
    assert registry().part_of(replace(op, namespace="cuda_ops"), "add") == "add"


def test_gradient_transforms_and_tracing(spaces: tuple[Spaced, Spaced]) -> None:
    first, second = (spaced.function for spaced in spaces)
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    for call in (first, torch.ops.first_ops.add):
        grads = torch.autograd.grad(call(x, y).sum(), (x, y))
        assert torch.equal(grads[1], torch.full((3,), 10.0))
    assert torch.equal(torch.func.grad(lambda v: second(X, v).sum())(Y), torch.full((3,), 100.0))
    rows = torch.stack([X, Y])
    assert torch.equal(torch.vmap(first, in_dims=(0, None))(rows, Y), rows + 10 * Y)
    assert torch.equal(torch.vmap(torch.ops.second_ops.add)(rows, rows), rows + 100 * rows)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return first(x, y) + torch.ops.second_ops.add(x, y)

    result = both(x, y)
    assert torch.equal(result, 2 * X + 110 * Y)
    assert torch.equal(torch.autograd.grad(result.sum(), y)[0], torch.full((3,), 110.0))
    graph = torch.export.export(_Adds(), (X, Y)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        torch.ops.first_ops.add.default,
        torch.ops.second_ops.add.default,
    ]


class _Adds(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = torch.ops.first_ops.add(x, y)
        return torch.ops.second_ops.add(added, y)  # type: ignore[no-any-return] # torch has no types


def test_autocast_and_flops_of_each(spaces: tuple[Spaced, Spaced]) -> None:
    first, second = (spaced.function for spaced in spaces)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(first(X.bfloat16(), Y), X + 10 * Y)
        assert torch.equal(torch.ops.second_ops.add(X, Y.bfloat16()), X + 100 * Y)
    for spaced, flops in zip(spaces, (10, 100), strict=True):
        with FlopCounterMode(display=False) as counter:
            spaced.function(X, Y)
        assert counter.get_total_flops() == flops
    assert second(X, Y).shape == X.shape


def test_dtensor_has_the_rule_of_each(spaces: tuple[Spaced, Spaced], mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    x = DTensor.from_local(X, mesh, [Shard(0)])
    for spaced, factor in zip(spaces, (10, 100), strict=True):
        out = spaced.function(x, x)
        assert out.placements == (Shard(0),) and torch.equal(out.to_local(), X + factor * X)


def test_errors_of_a_call_name_the_namespace(spaces: tuple[Spaced, Spaced]) -> None:
    wrong = Y.double()
    for call in (spaces[0].function, torch.ops.first_ops.add):
        with pytest.raises(RuntimeError, match=r"^first_ops::add: argument 'y': expected dtype f"):
            call(X, wrong)
        with pytest.raises(RuntimeError, match=r"first_ops::add: argument 'y': expected dtype f"):
            call(X.to("meta"), wrong.to("meta"))
    with pytest.raises(AttributeError, match="'first_ops' object has no attribute 'nowhere'"):
        _ = torch.ops.first_ops.nowhere
    assert not hasattr(torch.ops.first_ops, "add_nowhere")
    with pytest.raises(KeyError):
        compiled_ops["first_ops::nowhere"]
    with pytest.raises(CudaOpsError, match=r"no operator 'third_ops::add'; did you mean .*first_"):
        compile_ops(["third_ops::add"])


def test_a_reload_is_of_one_namespace(spaces: tuple[Spaced, Spaced]) -> None:
    first, _ = spaces
    functions, overload = [spaced.function for spaced in spaces], torch.ops.first_ops.add.default
    try:
        first.write(11)
        (row,) = compile_ops(["first_ops::add"], compare=False)
        assert not row.error and row.built == "built"
        assert torch.equal(functions[0](X, Y), X + 11 * Y)
        assert torch.equal(overload(X, Y), X + 11 * Y)
        assert torch.equal(functions[1](X, Y), X + 100 * Y)
        assert first.function is functions[0]

        first.write(13)
        pair = registry().pairs()["first_ops::add"]
        line = watch._after_save(pair, watch._text(pair)[0], None, "cpu", {})
        assert line.startswith("first_ops::add: ") and "wrong on cpu" in line
        assert torch.equal(functions[0](X, Y), X + 13 * Y)

        first.write(12, more=", *, int unused=1")
        with pytest.raises(ManifestError, match=r"^first_ops::add: the schema has 3 arguments"):
            reload("first_ops::add")
        assert torch.equal(functions[0](X, Y), X + 13 * Y)
    finally:
        first.write(10)
        reload("first_ops::add")
    assert torch.equal(functions[0](X, Y), X + 10 * Y)


def test_the_kit_checks_it(spaces: tuple[Spaced, Spaced], worker: Worker) -> None:
    names = ("reference", "gradient", "public", "vmap", "opcheck", "errors", "abi")
    known = [by_name(name) for name in names if _is_check(name)]
    assert len(known) > 4
    report = check_op("second_ops::add", checks=known, devices=["cpu"], isolate=worker)
    assert report.passed, str(report)
    assert "second_ops::add" in str(report)
    ran = {entry.check for entry in report.entries if entry.passed}
    assert {"reference", "vmap"} <= ran


def _is_check(name: str) -> bool:
    try:
        by_name(name)
    except ValueError:
        return False
    return True


def test_a_module_shows_the_operators_of_a_namespace(spaces: tuple[Spaced, Spaced]) -> None:
    module = sys.modules["scratch_ops"] = ModuleType("scratch_ops")
    try:
        shown: Any = module
        shown.__getattr__, shown.__dir__ = expose("first_ops", "scratch_ops")
        function = shown.add
        assert function is spaces[0].function and vars(module)["add"] is function
        assert (function.__module__, function.__qualname__) == ("scratch_ops", "add")
        assert function.__doc__ == "``first_ops::add(Tensor x, Tensor y) -> Tensor``"
        assert "add" in dir(module)
        with pytest.raises(AttributeError, match="namespace 'first_ops' has no operator 'silu'"):
            _ = shown.silu
        with pytest.raises(AttributeError, match="module 'scratch_ops' has no attribute '_x'"):
            _ = shown._x
        assert torch.equal(shown.add_backward(X, X, Y)[1], 10 * X)
    finally:
        del sys.modules["scratch_ops"]


# --- torch.ops ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pair_calls_one_of_its_namespace(
    spaces: tuple[Spaced, Spaced],
) -> None:
    first, _ = spaces
    binding = first.root / "bindings" / "thrice.cpp"
    binding.write_text("""
#include "binding.h"
#include "compose.h"
using namespace cuda_ops;
namespace {
Tensor thrice(const Tensor& x) { return call<Tensor>("first_ops::add", "", x, x); }
}
CUDA_OPS(first_ops, library) {
  library.op("thrice(Tensor x) -> Tensor", "()->()").composite<thrice>().calls("add");
}
""")
    try:
        rows = {row.op: row.error for row in compile_ops(["thrice"])}
        assert rows == {"first_ops::add": "", "first_ops::thrice": ""}
        done = fresh(f"""
import torch, cuda_ops
from cuda_ops.dev import add_root
add_root({str(first.root)!r})
assert torch.equal(torch.ops.first_ops.thrice(torch.ones(3)), torch.full((3,), 11.0))
""")
        assert done.returncode == 0, done.stderr
        assert find("first_ops::thrice").vmap
    finally:
        binding.unlink()
        registry().rescan()


def test_a_namespace_of_torch_is_left_alone() -> None:
    assert type(torch.ops.aten) is torch._ops._OpNamespace
    assert isinstance(torch.ops.some_other_library, torch_ops._Namespace)
    assert isinstance(torch.ops, torch._ops._Ops)
    names = [pair.key for pair in registry().pairs().values() if pair.registers("aten", "add")]
    assert names == []


@pytest.mark.parametrize(
    ("code", "space", "word", "found"),
    [
        ('TORCH_LIBRARY(ops, m) { m.def("f(Tensor x) -> Tensor"); }', "ops", "f", True),
        ('TORCH_LIBRARY(ops, m) { m.def("f(Tensor x) -> Tensor"); }', "ops", "g", False),
        ('TORCH_LIBRARY_FRAGMENT( ops, m) { m.def("f", &f); }', "ops", "f", True),
        ('STABLE_TORCH_LIBRARY_FRAGMENT(ops, m) { m.def("f", &f); }', "ops", "f", True),
        ("TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { DEF(f) }", "guest", "f", True),
        ('TORCH_LIBRARY_IMPL(ops, CPU, m) { m.impl("f", &f); }', "ops", "f", False),
        ('// TORCH_LIBRARY(ops, m)\nPYBIND11_MODULE(x, m) { m.def("f", &f); }', "ops", "f", False),
        ('CUDA_OPS(library) {} TORCH_LIBRARY(ops, m) { m.def("f"); }', "ops", "f", False),
    ],
)
def test_what_a_guest_registers(
    code: str, space: str, word: str, found: bool, tmp_path: Path
) -> None:
    binding = tmp_path / "guest.cpp"
    binding.write_text(code)
    assert Pair("guest", tmp_path, binding, None).registers(space, word) is found


# --- compile_dev.py new --------------------------------------------------------------------


def test_a_new_pair_gets_the_namespace_of_its_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "src"
    assert main(["new", "swish_clip", "--root", str(root), "--namespace", "my_ops"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("--watch my_ops::swish_clip")
    assert main(["new", "relu", "--root", str(root)]) == 0  # which cuda_ops has, too
    for name in ("swish_clip", "relu"):
        assert "\nCUDA_OPS(my_ops, library) {" in (root / "bindings" / f"{name}.cpp").read_text()
    assert sorted(survey([root])[0]) == ["my_ops::relu", "my_ops::swish_clip"]
    assert main(["new", "one_more", "--root", str(root), "--namespace", "other_ops"]) == 1
    said = capsys.readouterr().out
    assert "expected --namespace my_ops, as its other pairs have, or no such option, got" in said
    assert main(["--namespace", "my_ops", "silu"]) == 1
    assert (
        "--namespace: expected new or adopt, as in: python compile_dev.py new my_op"
        in capsys.readouterr().out
    )


def test_a_name_that_cuda_ops_has_is_free_in_another_namespace(tmp_path: Path) -> None:
    hint = r"already defined by .*; choose another name, or a namespace with --namespace my_ops$"
    with pytest.raises(DiscoveryError, match=hint):
        new_pair("relu", tmp_path)
    kernel, binding = new_pair("relu", tmp_path, namespace="my_ops")
    assert kernel.is_file() and "CUDA_OPS(my_ops, library)" in binding.read_text()
