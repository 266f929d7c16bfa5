"""The documents say what the code says: signatures, names, links, messages, running examples."""

from __future__ import annotations

import ast
import functools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch

from cuda_ops import dev, hookspecs
from cuda_ops.benchmarking import clock, compare, kit, regression, verify
from cuda_ops.plugins import Plugins, iter_hook_names
from cuda_ops.registry import registry

REPO = Path(__file__).resolve().parent.parent
DOCS = sorted([*(REPO / "docs").rglob("*.md"), *REPO.glob("README.md")])
LINKING = sorted({*DOCS, *REPO.glob("*.md"), *(REPO / "examples").rglob("*.md")})
BINDING, HOOKS = REPO / "docs" / "binding.md", REPO / "docs" / "hooks.md"
BENCHMARKING = REPO / "docs" / "benchmarking.md"
NOT_RUN = "<!-- not run -->"

_FENCE = re.compile(
    r"^(?P<indent>[ \t]*)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)


def _name(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


every_document = pytest.mark.parametrize("path", DOCS, ids=_name)


@functools.cache
def _sources() -> str:
    """All text of the project that is not a document or a test; split string literals joined."""
    folders = ("cuda_ops", "src", "build_backend", "examples", "benchmarks")
    suffixes = {".py", ".h", ".cuh", ".cpp", ".cu", ".toml", ".txt"}
    files = [p for f in folders for p in sorted((REPO / f).rglob("*")) if p.suffix in suffixes]
    text = "\n".join(p.read_text(encoding="utf-8") for p in [*files, REPO / "pyproject.toml"])
    return re.sub(r'"\s*\n\s*f?"', "", text)


def _blocks(path: Path, language: str) -> list[tuple[int, str, str]]:
    """Line number, the line above, and the code of every fenced block of a language."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        if match["language"] == language:
            above = text[: match.start()].rstrip("\n").rpartition("\n")[2].strip()
            code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
            found.append((text[: match.start()].count("\n") + 2, above, code))
    return found


def _program(path: Path) -> str:
    """The Python blocks of a document as one program, each line at its own line number."""
    lines = [""] * path.read_text(encoding="utf-8").count("\n")
    for start, above, code in _blocks(path, "python"):
        if above != NOT_RUN:
            code_lines = code.splitlines()
            lines[start - 1 : start - 1 + len(code_lines)] = code_lines
    return "\n".join(lines) + "\n"


# --- any document ------------------------------------------------------------------


@every_document
def test_python_blocks_compile(path: Path) -> None:
    for start, _, code in _blocks(path, "python"):
        compile("\n" * (start - 1) + code, str(path), "exec")


@pytest.mark.parametrize("path", [p for p in DOCS if _program(p).strip()], ids=_name)
def test_python_blocks_run_in_order(path: Path, tmp_path: Path) -> None:
    program = _program(path)
    used = set(re.findall(r"\bcuda_ops\.(\w+)", program)) & set(registry().pairs())
    if used:
        dev.reload(*sorted(used))
    script = tmp_path / f"{path.stem}.py"  # line numbers in a traceback are those of the document
    script.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", LINKING, ids=_name)
def test_relative_links_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@every_document
def test_names_exist(path: Path) -> None:
    mentioned = set(re.findall(r"\bcuda_ops_\w+\b", path.read_text(encoding="utf-8")))
    assert mentioned <= set(re.findall(r"\bcuda_ops_\w+\b", _sources()))


@every_document
def test_files_that_are_commands_exist(path: Path) -> None:
    for module in re.findall(r"python -m ((?:cuda_ops|benchmarks)[\w.]*)", path.read_text()):
        file = REPO / module.replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), module


# --- docs/binding.md -----------------------------------------------------------------


def test_headers_of_the_binding_page_exist() -> None:
    for header in re.findall(r"[\w/]+\.(?:cuh|h)\b", BINDING.read_text(encoding="utf-8")):
        assert (REPO / "src" / "utils" / Path(header).name).is_file(), header


@every_document
def test_cpp_blocks_are_excerpts(path: Path) -> None:
    """Each names its file; ``// ...`` stands for what is left out."""
    for line, above, code in _blocks(path, "cpp"):
        source = re.fullmatch(r"<!-- from (\S+) -->", above)
        assert source, f"{path.name}:{line}: write <!-- from FILE --> above the block"
        rest = (REPO / source[1]).read_text(encoding="utf-8")
        for part in re.split(r"^\s*// \.\.\.\n", code, flags=re.MULTILINE):
            assert part in rest, f"{path.name}:{line}: not in {source[1]}, in this order:\n{part}"
            rest = rest.partition(part)[2]


def test_type_table_is_that_of_the_headers() -> None:
    text = (REPO / "src" / "utils" / "manifest.h").read_text(encoding="utf-8")
    type_name = r'struct SchemaType<([^{]+)> \{\s*static constexpr const char\* name = "(.+?)"'
    known = re.findall(type_name, text)
    after = BINDING.read_text(encoding="utf-8").partition("| schema | C++ |")[2]
    table = after.partition("\n\n")[0]
    listed = []
    for row in table.splitlines()[2:]:
        schema, cpp = (re.findall(r"`(.+?)`", cell) for cell in row.strip("|").split("|"))
        listed += zip(cpp, schema, strict=True)
    assert sorted(listed) == sorted(known)


def test_messages_of_the_binding_page_exist() -> None:
    table = BINDING.read_text(encoding="utf-8").partition("## Errors")[2]
    fragments = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    linker = {"undefined symbol"}  # the system's words
    assert fragments and not [f for f in fragments if f not in _sources() and f not in linker]


# --- docs/hooks.md -------------------------------------------------------------------


def test_every_hook_has_a_heading_with_its_signature() -> None:
    tree = ast.parse(Path(hookspecs.__file__).read_text(encoding="utf-8"))
    declared = [
        f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.returns is not None
    ]
    assert len(declared) == len(list(iter_hook_names()))
    assert declared == re.findall(r"^### `(.+)`$", HOOKS.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    script = tmp_path_factory.mktemp("hooks") / "upsample2x.py"
    script.write_text(_program(HOOKS), encoding="utf-8")
    return SimpleNamespace(**runpy.run_path(str(script)))


def test_examples_form_a_plugin_with_every_hook(example: SimpleNamespace) -> None:
    assert set(iter_hook_names()) <= set(vars(example))
    Plugins().register(example, "the examples of docs/hooks.md")


def test_examples_agree_with_each_other(example: SimpleNamespace) -> None:
    op: Any = SimpleNamespace(name="upsample2x", dtypes=(torch.float64,))
    op.function = reference = example.cuda_ops_reference(op)
    x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert example.cuda_ops_fake(op)(x).shape == reference(x).shape
    grad_out = torch.randn(3, 8, 10, dtype=torch.float64)
    (expected,) = torch.autograd.grad(reference(x), x, grad_out)
    formula = example.cuda_ops_autograd(op)
    torch.testing.assert_close(formula.backward(None, grad_out), expected)
    batched, dim = example.cuda_ops_vmap(op)(None, (1,), x.detach())
    assert dim == 0 and torch.equal(batched[2], reference(x.detach()[:, 2].contiguous()))
    (drawn,) = hypothesis.find(example.cuda_ops_samples(op), lambda sample: True).make()
    assert drawn.dtype is torch.float64 and drawn.dim() == 3
    (case,) = example.cuda_ops_benchmarks(op)
    small = torch.randn(2, 3, 3)
    assert torch.equal(example.cuda_ops_peers(op)["eager"](small), reference(small))
    (case,) = example.cuda_ops_benchmarks(op)
    assert case.reason and case.dtype == torch.float32


# --- docs/benchmarking.md ---------------------------------------------------------------


def test_messages_of_the_benchmarking_page_exist() -> None:
    table = BENCHMARKING.read_text(encoding="utf-8").partition("## Errors")[2]
    fragments = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert fragments and not [f for f in fragments if f not in _sources()]


def test_numbers_of_the_benchmarking_page_are_those_of_the_kit() -> None:
    text = " ".join(BENCHMARKING.read_text(encoding="utf-8").split())
    for said in (
        f"from 2 to {compare.MOST_CALLS} of them",
        f"take {clock.COLD_OVER_WARM} times as long",
        f"at {verify.MOST_COMPARED:,} positions",
        f"within {compare.Settings().precision:.0%}".replace("%", " %"),
        f"({compare.QUICK.precision:.0%}".replace("%", " %"),
        f"or for {compare.Settings().seconds:g} seconds",
        f"{compare.Settings().latency_rounds} samples of {compare.Settings().latency_calls} calls",
        f"more than {regression.BETWEEN_RUNS:.0%}".replace("%", " %"),
        f"less than {kit.HOST_BOUND_SECONDS * 1e6:g} us",
        f"Above {verify._EXPENSIVE_FLOPS / 1e9:g} GFLOP, or {verify._EXPENSIVE_BYTES >> 20} MiB",
    ):
        assert said in text, said
