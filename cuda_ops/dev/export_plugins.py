"""What an export takes of the plugin of a pair: its answers on shapes, gradients and batches.

A plugin says more than that, for tests and benchmarks, and imports the kits for it. So an export
takes only the hooks that torch needs and what they use, and only if that leads to cuda_ops' rules
and to torch alone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cuda_ops.build.discovery import PACKAGE, Pair

#: The hooks, and what an export calls their answers.
HOOKS = {"cuda_ops_fake": "fake", "cuda_ops_autograd": "gradient", "cuda_ops_vmap": "vmap"}
#: The modules of cuda_ops that need nothing of it but each other.
_RULES = ("derive", "errors", "hookspecs", "names", "signature", "spec")
_DEFINITIONS = (
    ast.FunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
)
_OUTSIDE = {*sys.stdlib_module_names, "torch"}


class NeedsMoreError(ValueError):
    """A plugin's answers use what an export does not have."""


@dataclass
class _Module:
    """A module, and which of its statements are wanted."""

    lines: list[str]
    body: list[ast.stmt]
    wanted: set[str] = field(default_factory=set)


def problem(pair: Pair) -> str:
    """Returns why an export cannot take the answers of a pair's plugin; empty where it can."""
    try:
        texts_of([pair])
    except NeedsMoreError as error:
        return str(error)
    return ""


def texts_of(pairs: Iterable[Pair]) -> dict[str, str]:
    """Returns the files that the plugins of pairs become, by path: ``ops/<op>.py``, and the modules
    that they share. A plugin without such answers becomes none.

    Raises:
        NeedsMoreError: an answer uses other modules; the message names one.
    """
    modules: dict[str, _Module] = {}
    for pair in pairs:
        if not pair.plugin.is_file():
            continue
        path, module = f"ops/{pair.stem}.py", _parsed(pair.plugin)
        if hooks := [name for name in HOOKS if name in _bound(module)]:
            modules[path] = module
            for hook in hooks:
                _want(modules, path, hook)
    while _want_attributes(modules):
        pass
    return {name: _text(module) for name, module in modules.items()}


def _parsed(path: Path) -> _Module:
    text = path.read_text(encoding="utf-8")
    module = _Module(text.splitlines(), ast.parse(text).body)
    for statement in module.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        of_types = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
        if not (isinstance(statement, _DEFINITIONS) or is_text or of_types):
            raise NeedsMoreError(
                f"{path.name}, line {statement.lineno}: expected a definition or an import"
            )
    return module


def _bound(module: _Module) -> dict[str, ast.stmt]:
    """Returns the statement that gives each name of a module its value."""
    found: dict[str, ast.stmt] = {}
    for statement in module.body:
        for name in _names_bound(statement):
            found[name] = statement
    return found


def _names_bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _want(modules: dict[str, _Module], path: str, name: str) -> None:
    """Marks a name of a module as wanted, and all that it uses."""
    module = modules[path]
    statement = _bound(module).get(name)
    if statement is None or name in module.wanted:
        return  # a builtin, or a name of types alone
    module.wanted.add(name)
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        _check_import(modules, statement, name)
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            _want(modules, path, node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):  # in a function
            for alias in node.names:
                _check_import(modules, node, alias.asname or alias.name.partition(".")[0])


def _check_import(
    modules: dict[str, _Module], statement: ast.Import | ast.ImportFrom, name: str
) -> None:
    """Follows an import into the modules that plugins share; refuses what an export lacks."""
    for alias in statement.names:
        if (alias.asname or alias.name.partition(".")[0]) != name:
            continue
        source = alias.name if isinstance(statement, ast.Import) else statement.module or "."
        package, _, inside = source.partition(".")
        if package in _OUTSIDE:
            return
        if package != "cuda_ops" or isinstance(statement, ast.Import) or statement.level:
            raise NeedsMoreError(f"it imports {source}")
        if inside == "ops":  # a module that plugins share
            _shared(modules, alias.name)
        elif inside.startswith("ops."):
            _want(modules, _shared(modules, inside.removeprefix("ops.")), alias.name)
        elif (inside or alias.name).partition(".")[0] not in _RULES:
            raise NeedsMoreError(f"it imports {source}")


def _shared(modules: dict[str, _Module], name: str) -> str:
    """Returns the path of a module that plugins share, ``cuda_ops.ops.<name>``."""
    path = f"ops/{name}.py"
    if path not in modules:
        if not (PACKAGE / path).is_file():
            raise NeedsMoreError(f"it imports cuda_ops.ops.{name}")
        modules[path] = _parsed(PACKAGE / path)
    return path


def _want_attributes(modules: dict[str, _Module]) -> bool:
    """Marks what is taken of the modules that plugins share, ``_norms.fake``; says whether that was
    anything new.
    """
    before = sum(len(module.wanted) for module in modules.values())
    for module in [*modules.values()]:
        bound = _bound(module)
        shared = {
            alias.asname or alias.name: f"ops/{alias.name}.py"
            for statement in module.body
            if isinstance(statement, ast.ImportFrom) and statement.module == "cuda_ops.ops"
            for alias in statement.names
        }
        for wanted in [*module.wanted]:
            for node in ast.walk(bound[wanted]):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    if (path := shared.get(node.value.id)) in modules:
                        _want(modules, str(path), node.attr)
    return sum(len(module.wanted) for module in modules.values()) > before


def _text(module: _Module) -> str:
    """Returns the wanted statements as they are written, in their order."""
    parts = ["from __future__ import annotations"]
    for statement in module.body:
        names = [name for name in _names_bound(statement) if name in module.wanted]
        if not names or (
            isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        ):
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            statement.names = [
                alias for alias in statement.names
                if (alias.asname or alias.name.partition(".")[0]) in names
            ]  # fmt: skip
            parts.append(ast.unparse(statement))
            continue
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        parts.append("\n" + "\n".join(module.lines[first - 1 : statement.end_lineno]))
    return "\n".join(parts) + "\n"
