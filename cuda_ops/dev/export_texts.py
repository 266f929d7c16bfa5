"""The Python files of an exported build, which need torch alone.

Rules are not written a second time: the modules that derive them from a schema and a signature line
come along as they are, and so does what each binding says.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from cuda_ops import __version__, spec
from cuda_ops.build.discovery import PACKAGE, Pair
from cuda_ops.dev import export_plugins
from cuda_ops.dev.scaffold import TEMPLATES
from cuda_ops.names import INTERNAL
from cuda_ops.registry import registry
from cuda_ops.spec import OpSpec, default_of

_IMPORT = re.compile(r"^( *)from cuda_ops((?:\.\w+)*) import\b", re.MULTILINE)
#: What an export asks cuda_ops' own rules for; what these import comes with them.
_RULES = ("derive/rules.py", "derive/random.py")
#: Fields of an operator that its table does not repeat.
_TOLD_APART = ("name", "schema", "parsed", "signature", "siblings", "namespace", "doc")


def ops_text(namespace: str, library: str) -> str:
    """Returns ``_ops.py``, which opens the library that registers the operators."""
    text = (TEMPLATES / "export_ops.py.txt").read_text(encoding="utf-8")
    return text.replace("@namespace@", namespace).replace("@library@", library)


def rules_texts(namespace: str, pairs: Iterable[Pair] = ()) -> dict[str, str]:
    """Returns the modules of ``_rules/`` by path, with imports that are relative to each other.
    With them come the answers of the plugins of pairs.
    """
    head = f"# From cuda_ops {__version__}, Apache-2.0.\n"
    hooks = (TEMPLATES / "export_hookspecs.py.txt").read_text(encoding="utf-8")
    plugins = plugins_of(pairs)
    folders = ("", "derive/", "ops/")
    found = {**{f"{folder}__init__.py": "" for folder in folders}, "hookspecs.py": hooks}
    waiting = [*_RULES, *plugins]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        text = plugins.get(path) or (PACKAGE / path).read_text(encoding="utf-8")
        waiting += _imported(text)
        text = _IMPORT.sub(rf"\1from {'.' * path.count('/')}\2 import", text)
        # Operators that stand for a missing gradient, once in a process in each namespace.
        found[path] = head + re.sub(rf"\b{INTERNAL}\b", f"{namespace}_rules", text)
    return found


def plugins_of(pairs: Iterable[Pair]) -> dict[str, str]:
    """Returns the files that the plugins of pairs become, of those that can."""
    return export_plugins.texts_of(pair for pair in pairs if not export_plugins.problem(pair))


def _imported(text: str) -> Iterator[str]:
    """Yields the files of the package that a module imports from."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("cuda_ops."):
            continue
        path = str(node.module).partition(".")[2].replace(".", "/")
        is_file = path != "ops" and (PACKAGE / f"{path}.py").is_file()
        names = [""] if is_file else [f"/{alias.name}" for alias in node.names]
        yield from (f"{path}{name}.py" for name in names)


def registered_text(
    ops: Iterable[OpSpec], left_out: Mapping[str, Mapping[str, str]], plugins: Iterable[str] = ()
) -> str:
    """Returns ``_registered.py``: what each binding says, and what torch is told of it.

    ``left_out`` names, by the operator's name, the answers that are missing and why; ``plugins``
    are the files of ``_rules`` that answer before the rules do.
    """
    ops = list(ops)
    lines = [f"_{stem} = {{}}" for stem in dict.fromkeys(op.stem for op in ops)]
    for op in ops:
        said = {
            field.name: getattr(op, field.name)
            for field in dataclasses.fields(OpSpec)
            if field.name not in _TOLD_APART and field.repr
        }
        words = "".join(f", {name}={value!r}" for name, value in said.items())
        lines.append(f"_spec({op.schema!r}, {op.signature!r}, _{op.stem}, doc=''{words})")
    # What a repr calls, so that no class of OpSpec's fields can be missing there.
    classes = {"OpSpec", *re.findall(r"\b[A-Z]\w+(?=\()", "\n".join(lines))} & {*vars(spec)}
    head = (TEMPLATES / "export_registered.py.txt").read_text(encoding="utf-8").rstrip()
    lines.insert(0, head.replace("@classes@", ", ".join(sorted(classes))) + "\n\n")
    stems = {Path(plugin).stem for plugin in plugins}
    lines += [f"from ._rules.ops import {op} as _plugin_{op}" for op in sorted(stems)]
    for op in ops:
        plugin = f"_plugin_{op.stem}" if op.stem in stems else "None"
        missing = dict(left_out.get(op.name, {}))
        lines.append(f"_register(_{op.stem}[{op.name!r}], {plugin}, {missing!r})")
    return "\n".join(lines) + "\n"


def left_out(op: OpSpec) -> dict[str, str]:
    """Returns the answers of an operator that an export does not have, each with the reason."""
    if op.is_composite or (operator := registry().loaded(op.key)) is None:
        return {}
    now = operator.now
    answers = {
        "fake": now.fake, "vmap": now.vmap,
        "gradient": None if now.autograd is None else now.autograd.backward,
    }  # fmt: skip
    why = export_plugins.problem(registry().pairs()[op.pair])
    missing = {}
    for name, answer in answers.items():
        module = getattr(answer, "__module__", None) or type(answer).__module__
        if answer is None or str(module).startswith("cuda_ops.derive."):
            continue
        if not str(module).startswith("cuda_ops.ops."):
            missing[name] = f"it comes from {module}, which is not the plugin of a pair"
        elif why:
            missing[name] = f"{registry().pairs()[op.pair].plugin.name} has it, and {why}"
    if now.public is not None and not op.draws:
        missing["the public function of its plugin"] = "callers get the operator as its schema is"
    return missing


def functions_text(name: str, ops: Sequence[OpSpec]) -> str:
    """Returns ``__init__.py``: one function for each operator that is no derivative."""
    shown = [op for op in ops if is_public(op)]
    draws = any(op.draws for op in shown)
    lines = [
        f'"""{name}: {", ".join(op.name for op in shown)}, built by cuda_ops {__version__}."""',
        "",
        "import torch",
        "",
        "from . import _registered",
        "from ._ops import ops as _operators",  # no argument begins with an underscore
        *(["from ._rules.derive.random import draw_key as _draw_key"] if draws else []),
        "",
        f"__all__ = {[op.name for op in shown]!r}",
    ]
    return "\n".join([*lines, *map(_function, shown)]) + "\n"


def is_public(op: OpSpec) -> bool:
    """Says whether callers use an operator: it is no derivative of another."""
    if not any(name.startswith(("grad_", "tangent_")) for name in op.argument_names):
        return True
    return not any(op.name.startswith(f"{name}_") for name in op.siblings if name != op.name)


def _function(op: OpSpec) -> str:
    last = op.random if op.draws else ""
    arguments = sorted(op.parsed.arguments, key=lambda a: (a.kwarg_only, a.name == last))
    parameters = []
    for argument in arguments:
        is_named = argument.kwarg_only or argument.name == last
        if is_named and "*" not in parameters:
            parameters.append("*")
        default = f"={default_of(argument)!r}" if argument.has_default_value() else ""
        parameters.append(argument.name + ("=None" if argument.name == last else default))
    passed = ", ".join(
        f"{a.name}={a.name}" if a.kwarg_only else a.name for a in op.parsed.arguments
    )
    shown = "" if not op.hidden else "[0]" if op.shown == 1 else f"[:{op.shown}]"
    doc = f"{op.doc}\n\nSchema: {op.schema}\n" if op.doc else op.schema
    doc = doc.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    body = [f'"""{doc}"""']
    if last:
        body.append(f"if {last} is None:\n    {last} = _draw_key({op.tensor_names[0]})")
    body.append(f"return _operators.{op.name}({passed}){shown}")
    text = textwrap.indent("\n".join(body), "    ", lambda line: bool(line.strip()))
    return f"\n\ndef {op.name}({', '.join(parameters)}):\n{text}"


def write_all(folder: Path, texts: Mapping[str, str]) -> None:
    """Writes files of text into a folder, by path."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
