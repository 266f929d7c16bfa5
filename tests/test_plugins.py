"""Plugins: which are refused, in which order they are asked, and how far a broken one reaches."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ScratchOp

import cuda_ops
from cuda_ops import registry as registry_module
from cuda_ops.build.discovery import Pair
from cuda_ops.dispatch.operator import Operator
from cuda_ops.errors import ManifestError, PluginError
from cuda_ops.hookspecs import ANSWERS, hookimpl
from cuda_ops.plugins import Plugins, iter_hook_names
from cuda_ops.registry import Registry, registry
from cuda_ops.signature import parse_signature
from cuda_ops.spec import OpSpec

IMPORTS = "from cuda_ops.hookspecs import hookimpl\n"
X = torch.tensor([1.0, 2.0])


def spec(name: str, stem: str | None = None) -> OpSpec:
    schema = f"{name}(Tensor x) -> Tensor"
    parsed = torch._C.parse_schema(schema)
    signature = parse_signature("()->()")
    return OpSpec(
        name, stem or name, schema, parsed, signature, (torch.float32,), "", ("CPU",), False
    )


def plugin(**hooks: Any) -> ModuleType:
    """A plugin with these functions, unmarked."""
    module = ModuleType("plugin")
    vars(module).update(hooks)
    return module


def answering(policy: str | None) -> ModuleType:
    @hookimpl
    def cuda_ops_autocast(op: OpSpec) -> str | None:
        return policy

    return plugin(cuda_ops_autocast=cuda_ops_autocast)


def names_of(plugins: Plugins) -> set[str]:
    return {name for name, held in plugins._manager.list_name_plugin() if held is not None}


def entry(name: str, load: Callable[[], Any]) -> SimpleNamespace:
    return SimpleNamespace(name=name, value=f"{name}.plugin", load=load)


def installed(monkeypatch: pytest.MonkeyPatch, *entries: SimpleNamespace) -> Plugins:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    plugins = Plugins()
    plugins.load_installed()
    return plugins


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """A manager of its own, without whatever is installed here."""
    return installed(monkeypatch)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    (tmp_path / "ops").mkdir()
    yield Pair("planned", tmp_path, tmp_path / "bindings" / "planned.cpp", None)
    sys.modules.pop("cuda_ops.ops.planned", None)


def save_plugin(pair: Pair, text: str) -> Path:
    path = pair.root / "ops" / f"{pair.stem}.py"
    path.write_text(IMPORTS + text)
    return path


# --- what is refused ---------------------------------------------------------------


def misspelt() -> ModuleType:
    @hookimpl
    def cuda_ops_autocasts(op: OpSpec) -> None: ...

    return plugin(cuda_ops_autocasts=cuda_ops_autocasts)


def with_a_wrong_argument() -> ModuleType:
    @hookimpl
    def cuda_ops_autocast(operator: OpSpec) -> None: ...

    return plugin(cuda_ops_autocast=cuda_ops_autocast)


def unmarked() -> ModuleType:
    def cuda_ops_autocast(op: OpSpec) -> None: ...

    return plugin(cuda_ops_autocast=cuda_ops_autocast)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (misspelt, r"plugin 'guest': .*cuda_ops_autocasts"),
        (with_a_wrong_argument, r"plugin 'guest': (?s:.*)cuda_ops_autocast(?s:.*)operator"),
        (unmarked, r"plugin 'guest': function 'cuda_ops_autocast' .*not marked; write @hookimpl"),
    ],
)
def test_an_invalid_plugin_is_refused_and_leaves_no_trace(
    plugins: Plugins, make: Any, message: str
) -> None:
    before = names_of(plugins)
    with pytest.raises(PluginError, match=message):
        plugins.add(make(), "guest")
    assert names_of(plugins) == before
    assert plugins.ask("cuda_ops_autocast", spec("planned")) is None
    # Neither its name nor its hooks stand in the way of the corrected plugin, or of another.
    plugins.add(answering("float32"), "guest")
    plugins.add(answering(None), "another")
    assert plugins.ask("cuda_ops_autocast", spec("planned")) == "float32"


def test_a_rule_that_would_never_be_asked_for_is_refused(plugins: Plugins) -> None:
    @hookimpl
    def cuda_ops_vmap(op: OpSpec) -> Any:
        return lambda info, in_dims, x: (x, 0)

    plugins.add(plugin(cuda_ops_vmap=cuda_ops_vmap), "guest")
    composed = replace(spec("planned"), keys=("CompositeImplicitAutograd",))
    with pytest.raises(
        ManifestError, match="cuda_ops::planned: cuda_ops_vmap: a composed operator"
    ):
        Operator.prepare(composed, plugins, "", Path())


def test_a_name_that_is_taken_is_refused_and_its_owner_stays(plugins: Plugins) -> None:
    owner = answering("float32")
    plugins.add(owner, "guest")
    for late in (answering("promote"), owner):
        with pytest.raises(PluginError, match=r"plugin 'guest': .*already"):
            plugins.add(late, "guest")
        assert plugins.ask("cuda_ops_autocast", spec("planned")) == "float32"
    with pytest.raises(PluginError, match=r"plugin 'alias': .*already"):
        plugins.add(owner, "alias")
    assert "alias" not in names_of(plugins)


def test_every_hook_is_listed() -> None:
    names = set(iter_hook_names())
    assert {"cuda_ops_roots", "cuda_ops_fake", "cuda_ops_op_loaded"} <= names


# --- installed plugins ---------------------------------------------------------------


def test_broken_entry_points_are_recorded_and_the_rest_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> None:
        raise OSError("no such driver")

    plugins = installed(
        monkeypatch,
        entry("broken", broken),
        entry("exits", lambda: sys.exit(3)),
        entry("misspelt", misspelt),
        entry("good", lambda: answering("promote")),
    )
    assert sorted(plugins.problems) == ["broken", "exits", "misspelt"]
    assert re.search(r"'broken' \(broken.plugin\).*no such driver", plugins.problems["broken"])
    assert re.search(r"'exits' \(exits.plugin\) .*SystemExit\(3\)", plugins.problems["exits"])
    assert "cuda_ops_autocasts" in plugins.problems["misspelt"]
    assert plugins.ask("cuda_ops_autocast", spec("planned")) == "promote"


def test_an_interrupt_while_plugins_are_imported_is_no_fault_of_theirs(
    monkeypatch: pytest.MonkeyPatch, plugins: Plugins, pair: Pair
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        installed(monkeypatch, entry("slow", interrupted))
    save_plugin(pair, "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        plugins.load_pair_plugin(pair)
    assert "cuda_ops.ops.planned" not in sys.modules


@pytest.mark.parametrize("order", [("package", "other"), ("other", "package")])
def test_a_package_may_import_its_own_operator_at_its_top(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    imports: list[str] = []
    made: list[Registry] = []
    answers = {"package": answering("float32"), "other": answering("promote")}

    def importing() -> Any:
        imports.append("package")
        if len(imports) == 1:  # its __init__ asks for an operator, which imports the plugin
            made.append(registry_module.registry())
        return answers["package"]

    loads = {"package": importing, "other": lambda: answers["other"]}
    monkeypatch.setattr(registry_module, "_registry", None)
    monkeypatch.setattr(registry_module, "_unfinished", None)
    entries = [entry(name, loads[name]) for name in order]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    assert registry_module.registry() is made[0] is registry_module.registry()
    assert made[0].plugins.problems == {}
    assert made[0].plugins._installed == [answers[name] for name in order]


def test_a_plugin_that_uses_an_operator_while_it_is_imported_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "eager_plugin.py").write_text("from cuda_ops import silu\n" + IMPORTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry_module, "_registry", None)
    monkeypatch.setattr(registry_module, "_unfinished", None)
    monkeypatch.delitem(vars(cuda_ops), "silu", raising=False)  # kept after its first use
    eager = entry("eager", lambda: importlib.import_module("eager_plugin"))
    entries = [eager, entry("good", lambda: answering("promote"))]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    plugins = registry_module.registry().plugins
    assert list(plugins.problems) == ["eager"]
    assert "uses an operator while it is imported; import" in plugins.problems["eager"]
    assert plugins.ask("cuda_ops_autocast", spec("planned")) == "promote"


def test_an_installed_plugin_brings_operator_folders(plugins: Plugins, tmp_path: Path) -> None:
    @hookimpl
    def cuda_ops_roots() -> Iterator[str]:
        yield str(tmp_path)

    plugins.add(plugin(cuda_ops_roots=cuda_ops_roots), "guest")
    assert plugins.roots() == [tmp_path]


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    [
        ("cuda_ops_roots", [None], r"expected an iterable of paths or None, got \[None\]"),
        ("cuda_ops_roots", "ops", "expected an iterable of paths or None, got 'ops'"),
        ("cuda_ops_roots", ["a\0b"], r"expected folders, got 'a\\x00b': "),
        ("cuda_ops_roots", OSError("disk gone"), "OSError: disk gone"),
        ("cuda_ops_roots", pytest.skip.Exception("not here"), "Skipped: not here"),
        ("cuda_ops_roots", SystemExit(3), "SystemExit: 3"),
        ("cuda_ops_public", 7, "expected a callable or None, got 7"),
        ("cuda_ops_fake", torch.float32, "expected a callable or None, got torch.float32"),
        (
            "cuda_ops_autograd",
            print,
            "expected an Autograd of two callables or None, got <built-in",
        ),
        ("cuda_ops_kernel_samples", [7], r"expected a list of Sample or None, got \[7\]"),
        ("cuda_ops_autocast", "float16", "expected one of 'lower_precision', .*, got 'float16'"),
        (
            "cuda_ops_autocast",
            {"x": 7},
            r"expected .*, or a mapping to them or None, got \{'x': 7\}",
        ),
        ("cuda_ops_samples", [], r"expected a Hypothesis strategy or None, got \[\]"),
        ("cuda_ops_benchmarks", [7], r"expected a list of BenchmarkCase or None, got \[7\]"),
        ("cuda_ops_claims", True, "expected a Claims or None, got True"),
        ("cuda_ops_peers", [print], "expected a mapping from names to callables or Peer or None"),
        ("cuda_ops_vmap", SystemExit("no"), "SystemExit: no"),
    ],
)
def test_a_wrong_answer_costs_what_depends_on_it(
    plugins: Plugins, tmp_path: Path, hook: str, answer: Any, message: str
) -> None:
    def answers(op: OpSpec) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    wrong = (lambda: answers(spec("planned"))) if hook == "cuda_ops_roots" else answers
    hooks = {hook: hookimpl(wrong)}
    if hook != "cuda_ops_roots":
        hooks["cuda_ops_roots"] = hookimpl(lambda: [tmp_path])
    plugins.add(plugin(**hooks), "guest")
    expected = f"plugin 'guest', hook {hook}(, operator '.*')?: {message}"
    if hook == "cuda_ops_roots":
        with pytest.warns(UserWarning, match=f"{expected}.*; it is left out"):
            assert plugins.roots() == []
    else:
        plugins.roots()
        for stem, root in (("theirs", tmp_path), ("ours", tmp_path.parent)):
            plugins.load_pair_plugin(Pair(stem, root, None, None))
        with pytest.raises(PluginError, match=expected):
            list(plugins._answers(hook, spec("theirs")))
        with pytest.warns(UserWarning, match=f"{expected}.*; it is left out"):
            list(plugins._answers(hook, spec("ours")))
    assert re.search(expected, plugins.problems["guest"])


def test_each_hook_that_is_left_out_is_named(plugins: Plugins) -> None:
    @hookimpl
    def wrong(op: OpSpec) -> Any:
        raise ValueError("why")

    plugins.add(plugin(cuda_ops_fake=wrong, cuda_ops_vmap=wrong), "guest")
    for hook in ("cuda_ops_fake", "cuda_ops_vmap"):
        with pytest.warns(UserWarning, match=hook):
            list(plugins._answers(hook, spec("planned")))
        assert hook in plugins.problems["guest"]


def test_every_hook_has_a_form_of_answer() -> None:
    assert list(ANSWERS) == list(iter_hook_names())


# --- order -----------------------------------------------------------------------------


def test_the_pair_answers_before_installed_plugins_and_those_before_derivation(
    plugins: Plugins, pair: Pair
) -> None:
    op = spec("planned")
    derived = plugins.ask("cuda_ops_fake", op)
    assert derived is not None

    @hookimpl
    def cuda_ops_fake(op: OpSpec) -> Any:
        return print

    plugins.add(plugin(cuda_ops_fake=cuda_ops_fake), "guest")
    assert plugins.ask("cuda_ops_fake", op) is print
    path = save_plugin(pair, "@hookimpl\ndef cuda_ops_fake(op): return len\n")
    plugins.load_pair_plugin(pair)
    assert plugins.ask("cuda_ops_fake", op) is len
    assert plugins.ask("cuda_ops_fake", spec("planned_backward", "planned")) is len
    assert plugins.ask("cuda_ops_fake", spec("other")) is print
    path.unlink()
    plugins.load_pair_plugin(pair)
    assert plugins.ask("cuda_ops_fake", op) is print


def test_none_passes_the_question_on(plugins: Plugins, pair: Pair) -> None:
    plugins.add(answering("float32"), "first")
    plugins.add(answering(None), "second")
    save_plugin(pair, "@hookimpl\ndef cuda_ops_autocast(op): return None\n")
    plugins.load_pair_plugin(pair)
    assert plugins.ask("cuda_ops_autocast", spec("planned")) == "float32"


def test_peers_of_all_plugins_are_joined_and_no_answer_is_none(plugins: Plugins) -> None:
    op = spec("planned")
    assert plugins.peers(op) is None
    plugins.add(plugin(cuda_ops_peers=hookimpl(lambda op: {})), "without")
    assert plugins.peers(op) == {}
    plugins.add(plugin(cuda_ops_peers=hookimpl(lambda op: {"a": min})), "one")
    plugins.add(plugin(cuda_ops_peers=hookimpl(lambda op: {"b": len, "a": max})), "last")
    assert plugins.peers(op) == {"b": len, "a": max}


def test_the_plugin_installed_last_answers_first(plugins: Plugins) -> None:
    plugins.add(answering("float32"), "first")
    plugins.add(answering("promote"), "second")
    assert plugins.ask("cuda_ops_autocast", spec("planned")) == "promote"


# --- op_loaded ---------------------------------------------------------------------------


def listening(heard: list[tuple[str, int]]) -> ModuleType:
    @hookimpl
    def cuda_ops_op_loaded(op: OpSpec, generation: int) -> None:
        heard.append((op.name, generation))

    return plugin(cuda_ops_op_loaded=cuda_ops_op_loaded)


def test_a_late_plugin_is_told_of_earlier_loads(plugins: Plugins, tmp_path: Path) -> None:
    early: list[tuple[str, int]] = []
    late: list[tuple[str, int]] = []
    plugins.add(listening(early), "early")
    plugins.tell_loaded(spec("planned"), tmp_path, 0)
    plugins.add(listening(late), "late")
    plugins.tell_loaded(spec("planned"), tmp_path, 1)
    assert early == late == [("planned", 0), ("planned", 1)]


def test_a_plugin_that_raises_on_a_load_is_named_after_all_were_told(
    plugins: Plugins, tmp_path: Path
) -> None:
    @hookimpl
    def cuda_ops_op_loaded(op: OpSpec) -> None:
        raise KeyError("lost")

    heard: list[tuple[str, int]] = []
    plugins.add(listening(heard), "before")
    plugins.add(plugin(cuda_ops_op_loaded=cuda_ops_op_loaded), "guest")
    plugins.add(listening(heard), "after")
    with pytest.warns(
        UserWarning, match=r"'guest', hook cuda_ops_op_loaded, operator 'planned': KeyError"
    ):
        plugins.tell_loaded(spec("planned"), tmp_path, 0)
    assert heard == [("planned", 0)] * 2
    with pytest.warns(UserWarning, match=r"'late', hook cuda_ops_op_loaded"):
        plugins.add(plugin(cuda_ops_op_loaded=cuda_ops_op_loaded), "late")
    assert set(plugins.problems) == {"guest", "late"}


def test_a_pair_is_told_of_its_own_loads_only(plugins: Plugins, pair: Pair, tmp_path: Path) -> None:
    save_plugin(
        pair,
        "heard = []\n@hookimpl\ndef cuda_ops_op_loaded(op, generation): heard.append(op.name)\n",
    )
    plugins.tell_loaded(spec("other"), tmp_path, 0)
    plugins.tell_loaded(spec("planned"), tmp_path, 0)
    plugins.load_pair_plugin(pair)
    plugins.tell_loaded(spec("other"), tmp_path, 1)
    assert sys.modules["cuda_ops.ops.planned"].heard == ["planned"]


# --- the file of a pair ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module\n", r"cuda_ops.ops.planned.*planned.py: ModuleNotFoundError"),
        ("def broken(:\n", r"cuda_ops.ops.planned.*SyntaxError"),
        ("@hookimpl\ndef cuda_ops_fakes(op): ...\n", r"cuda_ops.ops.planned.*cuda_ops_fakes"),
    ],
)
def test_a_broken_plugin_file_is_named_and_the_one_before_stays(
    plugins: Plugins, pair: Pair, text: str, message: str
) -> None:
    save_plugin(pair, "@hookimpl\ndef cuda_ops_autocast(op): return 'promote'\n")
    plugins.load_pair_plugin(pair)
    save_plugin(pair, text)
    with pytest.raises(PluginError, match=message):
        plugins.load_pair_plugin(pair)
    assert plugins.ask("cuda_ops_autocast", spec("planned")) == "promote"
    save_plugin(pair, "@hookimpl\ndef cuda_ops_autocast(op): return 'float32'\n")
    plugins.load_pair_plugin(pair)
    assert plugins.ask("cuda_ops_autocast", spec("planned")) == "float32"


@pytest.mark.slow
def test_a_hook_that_raises_stops_its_own_operator_and_no_other(scratch_op: ScratchOp) -> None:
    path = scratch_op.root / "ops" / f"{scratch_op.name}.py"
    scratch_op.write("v * 2")
    path.write_text(IMPORTS + "@hookimpl\ndef cuda_ops_fake(op): return {}[op.name]\n")
    message = (
        rf"plugin 'cuda_ops.ops.{scratch_op.name}', hook cuda_ops_fake, "
        rf"operator '{scratch_op.name}': KeyError"
    )
    try:
        with pytest.raises(PluginError, match=message):
            scratch_op.reload()
        other = ScratchOp(f"{scratch_op.name}other", scratch_op.root)
        other.write("v * 3")
        other.reload()
        assert torch.equal(other.function(X), X * 3)
        path.write_text("raise OSError('unreadable table')\n")
        with pytest.raises(PluginError, match=rf"{scratch_op.name}.py: OSError: unreadable table"):
            scratch_op.reload()
        path.unlink()
        scratch_op.reload()
        assert torch.equal(scratch_op.function(X), X * 2)
    finally:
        path.unlink(missing_ok=True)
        other.binding.unlink()
        registry().rescan()


@pytest.mark.slow
def test_what_a_plugin_may_make_of_an_operator(scratch_op: ScratchOp) -> None:
    """Any callable is a public function, one that uses the operator while it is loaded is not."""
    name, path = scratch_op.name, scratch_op.root / "ops" / f"{scratch_op.name}.py"
    scratch_op.write("v * 2")
    path.write_text(f"from cuda_ops import {name}\n")
    with pytest.raises(
        PluginError, match=rf"{name}.py: PluginError: cuda_ops.{name} is used while"
    ):
        scratch_op.reload()
    public = "@hookimpl\ndef cuda_ops_public(op): return {}\n"
    path.write_text(IMPORTS + public.format("lambda *a, **k: op.function(*a, **k)"))
    scratch_op.reload()
    assert torch.equal(scratch_op.function(X), X * 2)
    assert torch.equal(scratch_op.function(x=X), X * 2)
    path.write_text("import torch\n" + IMPORTS + public.format("torch.relu"))  # says no arguments
    scratch_op.reload()
    assert torch.equal(scratch_op.function(-X), X * 0)
    path.write_text(IMPORTS + "@hookimpl\ndef cuda_ops_op_loaded(op): raise OSError(op.name)\n")
    with pytest.warns(UserWarning, match=rf"hook cuda_ops_op_loaded, operator '{name}': OSError"):
        scratch_op.reload()
    assert torch.equal(scratch_op.function(X), X * 2)
