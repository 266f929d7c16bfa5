"""A folder is a layer: imports of cuda_ops only go down, and calling operators imports no kit."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cuda_ops

PACKAGE = Path(cuda_ops.__file__).parent
#: The folders and modules of cuda_ops, the lowest first. docs/design.md says what each knows.
LAYERS = (
    "errors",
    "names",
    "output",
    "distributed",
    "signature",
    "spec",
    "hookspecs",
    "build",
    "derive",
    "plugins",
    "dispatch",
    "registry",
    "torch_ops",
    "namespaces",
    "__init__",
    "testing",
    "compile_ops",
    "benchmarking",
    "runtime",
    "ops",
    "integrations",
    "nn",
    "servers",
    "packaging",
    "dev",
    "doctor",
    "pytest_plugin",
    "__main__",
)


def layer(module: str) -> str:
    """Returns a module's layer: ``"build"`` for ``"cuda_ops.build.discovery"``."""
    return (*module.split("."), "__init__")[1]


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Returns the modules that a file imports, except for types alone, and the lines."""
    package = ("cuda_ops", *path.relative_to(PACKAGE).parent.parts)
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*above, *([node.module] if node.module else [])))
            yield from (
                (source if source.count(".") else f"{source}.{name.name}", node.lineno)
                for name in node.names
            )
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def test_imports_only_go_down() -> None:
    upward, seen = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        seen.add(own)
        for module, line in imported(path):
            if not module.startswith("cuda_ops."):
                continue
            other = layer(module)
            if other not in LAYERS:  # a name of the package itself, such as an operator
                other = "__init__"
            if LAYERS.index(other) > LAYERS.index(own):
                upward.append(f"{path.relative_to(PACKAGE)}:{line} imports {module}")
    assert upward == []
    assert seen - {"src"} == set(LAYERS)


@pytest.mark.slow
def test_calling_operators_imports_no_kit() -> None:
    """Neither does compiling or differentiating one: kits are imported on request."""
    code = """
import sys
import torch, cuda_ops
x = torch.randn(4, requires_grad=True)
cuda_ops.silu(x).sum().backward()
cuda_ops.scale_relu(x, 2.0)
torch.compile(cuda_ops.relu, backend="aot_eager")(x)
kits = ("hypothesis", "cuda_ops.testing", "cuda_ops.benchmarking")
print(sorted(name for name in sys.modules if f"{name}.".startswith(tuple(f"{k}." for k in kits))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
