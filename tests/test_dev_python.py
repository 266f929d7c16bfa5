"""What ``compile_dev.py`` does, from Python, and what an import costs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp, run_python

import cuda_ops
from cuda_ops.build import compiling
from cuda_ops.compile_ops import (
    CompiledOps,
    _broken_plugins,
    compile_ops,
    compiled_ops,
    reload,
)
from cuda_ops.dev import main
from cuda_ops.errors import BuildError, DiscoveryError, ResultError
from cuda_ops.registry import Registry, registry

X = torch.tensor([1.0, 2.0, 3.0])


# --- from Python -------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_ops_builds_on_first_use(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    registry().rescan()
    assert isinstance(compiled_ops, CompiledOps)
    assert scratch_op.name in list(compiled_ops)
    assert len(compiled_ops) == len(list(compiled_ops))
    assert registry().library_of(scratch_op.name) is None
    function = compiled_ops[scratch_op.name]
    assert torch.equal(function(X), X * 2)
    assert function is compiled_ops[scratch_op.name] is getattr(cuda_ops, scratch_op.name)
    with pytest.raises(KeyError, match="no_such_op"):
        compiled_ops["no_such_op"]
    scratch_op.write("v * 5")
    (row,) = reload(scratch_op.name)
    assert (row.op, row.built, row.error) == (scratch_op.name, "built", "")
    assert row.uncompared == "no reference"
    assert torch.equal(function(X), X * 5)


@pytest.mark.slow
def test_compiled_ops_refuses_a_wrong_result_until_the_text_changes(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = registry().plugins.ask

    def answer(hook: str, op: Any, *rest: Any) -> Any:
        mine = hook == "cuda_ops_reference" and op.name == scratch_op.name
        return (lambda x: x * 3) if mine else ask(hook, op, *rest)

    monkeypatch.setattr(registry().plugins, "ask", answer)
    scratch_op.write("v * 2")
    registry().rescan()
    for _ in range(2):
        with pytest.raises(ResultError, match="wrong on cpu"):
            compiled_ops[scratch_op.name]
    scratch_op.write("v * 3")
    reload(scratch_op.name)
    assert torch.equal(compiled_ops[scratch_op.name](X), X * 3)


@pytest.mark.slow
def test_what_is_unfinished_costs_only_itself(scratch_op: ScratchOp, scratch_root: Path) -> None:
    scratch_op.write("v * 2")
    kernel = scratch_root / "kernels" / "unfinished.cu"
    kernel.write_text("// to be bound")
    try:
        rows = {row.op: row.error for row in compile_ops([scratch_op.name, "unfinished"])}
        assert rows[scratch_op.name] == ""
        assert f"{kernel}: nothing binds this kernel" in rows["unfinished"]
        with pytest.raises(DiscoveryError, match="nothing binds this kernel"):
            _ = cuda_ops.unfinished
        assert [row.op for row in compile_ops([scratch_op.name])] == [scratch_op.name]
    finally:
        kernel.unlink()


@pytest.mark.parametrize(
    ("where", "name", "verb"), [("registry", "load", "loaded"), ("compiling", "build", "built")]
)
def test_an_unforeseen_error_costs_one_operator(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch, where: str, name: str, verb: str
) -> None:
    owner = registry() if where == "registry" else compiling
    real = getattr(owner, name)

    def fail(what: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(what, "stem", what) == scratch_op.name:
            raise KeyError("no such slot")
        return real(what, *arguments, **options)

    other = ScratchOp(f"{scratch_op.name}_other", scratch_op.root)
    scratch_op.write("v * 2")
    other.write("v * 3")
    monkeypatch.setattr(owner, name, fail)
    try:
        row, good = compile_ops([scratch_op.name, other.name], compare=False)
    finally:
        other.binding.unlink()
    assert row.error == f"{scratch_op.name}: cannot be {verb}: KeyError: 'no such slot'"
    assert good.op == other.name and not good.error


def test_a_plugin_that_cannot_be_used_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # Alone: an earlier test's operator may have had one.
    monkeypatch.setattr(registry().plugins, "problems", {"theirs": "no such driver"})
    (row,) = _broken_plugins(None)
    assert (row.op, row.error) == ("plugin theirs", "no such driver")
    assert _broken_plugins(["silu"]) == []
    with pytest.raises(AttributeError, match=r"no operator 'their_op'; .*no such driver"):
        _ = cuda_ops.their_op


@pytest.mark.slow
def test_another_process_knows_why_it_is_not_built(
    scratch_op: ScratchOp, scratch_root: Path
) -> None:
    scratch_op.write("v * undeclared")
    with pytest.raises(BuildError, match="undeclared"):
        reload(scratch_op.name)
    with pytest.raises(BuildError, match=r"(?s)is not built: .*last build failed: .*undeclared"):
        Registry([scratch_root]).public(scratch_op.name)


def test_reload_raises_what_went_wrong_and_the_old_code_serves(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    reload(scratch_op.name)
    scratch_op.write("v * undeclared")
    with pytest.raises(BuildError, match="undeclared"):
        reload(scratch_op.name)
    assert torch.equal(compiled_ops[scratch_op.name](X), X * 2)
    with pytest.raises(BuildError, match="no operator 'no_such_op'"):
        reload("no_such_op")


@pytest.mark.parametrize("name", [None, ("silu",)])
def test_what_is_no_name_is_not_reloaded(name: Any) -> None:
    with pytest.raises(TypeError, match=r"^reload: argument 'names': expected a name, got "):
        reload(name)


@pytest.mark.slow
def test_compile_commands_name_every_source(scratch_op: ScratchOp) -> None:
    scratch_op.write("v")
    assert main([scratch_op.name, "--root", str(scratch_op.root)]) == 0
    entries = json.loads((scratch_op.root / "compile_commands.json").read_text())
    (entry,) = [e for e in entries if e["file"] == str(scratch_op.binding)]
    assert entry["arguments"][-1] == entry["file"]
    headers = [Path(a.partition("-I")[2]) for a in entry["arguments"] if a.startswith("-I")]
    assert any((folder / "binding.h").is_file() for folder in headers)
    # What clangd would do: the binding is understood without an error.
    checked = subprocess.run(
        ["c++", "-fsyntax-only", *entry["arguments"][1:]], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_options_and_operators(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    assert "--watch" in script
    assert "silu" in script


# --- import ------------------------------------------------------------------------------


@pytest.mark.slow
def test_import_opens_no_operator_library(scratch_op: ScratchOp) -> None:
    scratch_op.write("v")
    (row,) = compile_ops([scratch_op.name])
    assert not row.error
    code = f"""if True:
        from pathlib import Path
        import cuda_ops
        from cuda_ops.registry import registry
        def opened():
            maps = Path("/proc/self/maps").read_text().split()
            return [path for path in maps if {scratch_op.name!r} in path]
        registry().add_root(Path({str(scratch_op.root)!r}))
        assert {scratch_op.name!r} in dir(cuda_ops)
        assert not opened(), opened()
        cuda_ops.{scratch_op.name}
        assert opened()
    """
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_an_operator_is_looked_up_once(scratch_op: ScratchOp) -> None:
    scratch_op.write("v")
    scratch_op.reload()
    function = getattr(cuda_ops, scratch_op.name)
    assert vars(cuda_ops)[scratch_op.name] is function  # else each use would search folders


@pytest.mark.slow
def test_import_takes_less_than_50_ms_beyond_torch() -> None:
    code = """if True:
        import statistics, sys, time
        import torch
        def once():
            for name in [m for m in sys.modules if m.split(".")[0] == "cuda_ops"]:
                del sys.modules[name]
            start = time.perf_counter()
            import cuda_ops
            return time.perf_counter() - start
        print(statistics.median(once() for _ in range(5)))
    """
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.05
