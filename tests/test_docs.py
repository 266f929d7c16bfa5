"""The documents say what the code says: signatures, names, links, messages, running examples."""

from __future__ import annotations

import argparse
import ast
import doctest
import functools
import importlib
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch

import benchmarks.stale
import benchmarks.tables
import cuda_ops
import cuda_ops.__main__
import cuda_ops.benchmarking.command
import cuda_ops.dev.command
import cuda_ops.testing.__main__
from cuda_ops import benchmarking, dev, errors, hookspecs
from cuda_ops.benchmarking import clock, compare, kit, regression, verify
from cuda_ops.dev import scaffold
from cuda_ops.plugins import Plugins, iter_hook_names
from cuda_ops.registry import registry

REPO = Path(__file__).resolve().parent.parent
PAGES = REPO / "docs"
DOCS = sorted([*PAGES.rglob("*.md"), REPO / "README.md"])
LINKING = sorted(
    {
        *DOCS,
        *REPO.glob("*.md"),
        *(p for f in ("examples", "benchmarks") for p in (REPO / f).rglob("*.md")),
    }
)
BINDING, HOOKS, ERRORS = (PAGES / f"{name}.md" for name in ("binding", "hooks", "errors"))
TUTORIAL, OPERATORS = PAGES / "first-operator.md", PAGES / "operators.md"
KINDS = ("tutorial", "how-to", "reference", "explanation")
NOT_RUN = ("<!-- not run: ", "<!-- write ", "<!-- from ")
#: Why a block has no test: all that may stand behind ``<!-- not run:``. The site shows it.
REASONS = (
    "needs a GPU", "needs the network", "needs gdb", "needs CMake", "needs a program of yours",
    "a sketch",
)  # fmt: skip
LANGUAGES = {"python", "cpp", "pycon", "console", "sh", "diff", "text", "toml", "cmake"}

_FENCE = re.compile(
    r"^(?P<indent>[ \t]*)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$", re.M | re.S
)


def _name(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


every_document = pytest.mark.parametrize("path", DOCS, ids=_name)


@functools.cache
def _sources() -> str:
    """Returns all text of the project but documents and tests; split string literals joined."""
    folders = ("cuda_ops", "src", "build_backend", "examples", "benchmarks")
    suffixes = {".py", ".h", ".cuh", ".cpp", ".cu", ".toml", ".txt"}
    files = [p for f in folders for p in sorted((REPO / f).rglob("*")) if p.suffix in suffixes]
    text = "\n".join(p.read_text(encoding="utf-8") for p in [*files, REPO / "pyproject.toml"])
    return re.sub(r'"\s*\n\s*f?"', "", text)


def _blocks(path: Path, language: str) -> list[tuple[int, str, str]]:
    """Returns line number, the line above, and the code of every fenced block of a language."""
    text = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        if match["language"] == language:
            above = text[: match.start()].rstrip("\n").rpartition("\n")[2].strip()
            code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
            found.append((text[: match.start()].count("\n") + 2, above, code))
    return found


def _program(path: Path) -> str:
    """Returns a document's Python blocks as one program, each line at its own line number."""
    lines = [""] * path.read_text(encoding="utf-8").count("\n")
    for start, above, code in _blocks(path, "python"):
        if not above.startswith(NOT_RUN):
            code_lines = code.splitlines()
            lines[start - 1 : start - 1 + len(code_lines)] = code_lines
    return "\n".join(lines) + "\n"


# --- any document ------------------------------------------------------------------


@every_document
def test_python_blocks_compile(path: Path) -> None:
    for start, _, code in _blocks(path, "python"):
        compile("\n" * (start - 1) + code, str(path), "exec")


@pytest.mark.parametrize("path", [p for p in DOCS if _program(p).strip()], ids=_name)
@pytest.mark.quick("README.md")
def test_python_blocks_run_in_order(path: Path, tmp_path: Path) -> None:
    program = _program(path)
    used = set(re.findall(r"\bcuda_ops\.(\w+)", program)) & set(registry().pairs())
    if used:
        dev.reload(*sorted(used))
    script = tmp_path / f"{path.stem}.py"  # line numbers in a traceback are those of the document
    script.write_text(program, encoding="utf-8")
    environment = {
        **os.environ, "PYTHONPATH": str(REPO), "TORCH_EXTENSIONS_DIR": str(tmp_path),
        # where torch's own builds look for ninja
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script)], cwd=REPO, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # A block of text right below one of Python is what that prints.
    fence = r"^```python\n(?:(?!^```).)*^```\n\n```text\n(.*?)^```$"
    text = path.read_text(encoding="utf-8")
    for printed in re.findall(fence, text, re.MULTILINE | re.DOTALL):
        assert printed in done.stdout


@pytest.mark.parametrize("path", LINKING, ids=_name)
def test_no_block_escapes(path: Path) -> None:
    """Each says its language, so that a test of the language finds it, or why nothing runs it."""
    text = path.read_text(encoding="utf-8")
    fences = re.findall(r"^[ \t]*```(\w*)$", text, re.MULTILINE)
    assert set(fences[::2]) <= LANGUAGES and set(fences[1::2]) <= {""}
    reasons = re.findall(r"<!-- not run(?:: (.+?))? -->", text)
    assert set(reasons) <= set(REASONS)
    marked = [above for language in LANGUAGES for _, above, _ in _blocks(path, language)]
    assert sum(above.startswith("<!-- not run") for above in marked) == len(reasons)
    for line, _, code in _blocks(path, "text"):
        commands = re.findall(r"^\$? ?(?:python|pytest|pip|c\+\+) .*", code, re.MULTILINE)
        assert not commands, f"{path.name}:{line}: a command in a block of text"


@pytest.mark.parametrize("path", LINKING, ids=_name)
def test_commands_have_the_options_that_are_written(path: Path) -> None:
    """Blocks of commands of this project are read by its own parsers; others say why not."""
    for line, above, code in _blocks(path, "sh"):
        if above not in RUN_ELSEWHERE:
            unread = [command for command in _commands(code) if not _reads(command)]
            excused = above.startswith("<!-- not run: ")
            assert bool(unread) <= excused, f"{path.name}:{line}: no parser reads {unread}"


#: Blocks that .ci/run and test_servers.py run.
RUN_ELSEWHERE = ("<!-- main job -->", "<!-- test -->", "<!-- without CMake -->")
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "compile_dev.py": dev.command._parser,
    "benchmarks": benchmarking.command._parser,
    "benchmarks.tables": benchmarks.tables._parser,
    "benchmarks.stale": benchmarks.stale._parser,
    "cuda_ops.testing": cuda_ops.testing.__main__._parser,
}


def _commands(code: str) -> list[list[str]]:
    """Returns the words of each command, without comments and variables in front."""
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        for command in re.split(r" && ", line):
            words = shlex.split(command, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            found += [words] if words else []
    return found


def _reads(words: list[str]) -> bool:
    """Returns whether a parser of this project reads the command.

    Raises:
        SystemExit: it refuses the command.
    """
    program, rest = words[0], words[1:]
    if program == "pytest":
        options = set(re.findall(r"^`(--[\w-]+)", _pytest_table(), re.MULTILINE))
        own = [word.partition("=")[0] for word in rest if word.startswith("--")]
        return set(own) <= {*options, "--dist", "--junitxml"}
    if program != "python":
        return words == ["pip", "install", "-e", "."]  # which .ci/run does
    if rest[0] == "-m":
        rest = rest[1:]
    module, rest = rest[0], rest[1:]
    if module == "cuda_ops":
        module, first, _ = cuda_ops.__main__.COMMANDS[rest[0]]
        rest = [*first, *rest[1:]]
        parser = importlib.import_module(module)._parser()
    elif module in PARSERS:
        parser = PARSERS[module]()
    else:
        return False
    try:
        parser.parse_intermixed_args(rest)
    except TypeError:  # it has commands of its own, or hands on what it does not know
        parser.parse_args(rest)
    return True


def _pytest_table() -> str:
    page = (PAGES / "command-line.md").read_text(encoding="utf-8")
    part = page.partition("<!-- from the code: pytest -->")[2].partition("<!-- end -->")[0]
    return part.replace("| `", "`")


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


@pytest.mark.parametrize("path", sorted(PAGES.rglob("*.md")), ids=_name)
def test_every_page_is_of_the_kind_under_which_the_index_lists_it(path: Path) -> None:
    index = PAGES / "README.md"
    if path == index:
        return
    (kind,) = re.findall(
        r"^\*\[Documents\]\(\S+\) / (\S+)\*$", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert kind in KINDS
    section = re.split(rf"^## {kind}$", index.read_text(encoding="utf-8"), flags=re.M | re.I)[1]
    links = re.findall(r"\]\((\S+?)\)", section.partition("\n## ")[0])
    assert path in [(PAGES / link).resolve() for link in links]


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
        assert [*(REPO / "src" / "utils").rglob(Path(header).name)], header


@every_document
@pytest.mark.parametrize("language", ["cpp", "python"])
def test_cpp_blocks_and_marked_ones_are_excerpts(path: Path, language: str) -> None:
    """Each names its file; ``// ...`` stands for what is left out. The tutorial writes others."""
    for line, above, code in _blocks(path, language):
        source = re.fullmatch(r"<!-- from (\S+) -->", above)
        if source is None:
            excused = language == "python" or above.startswith(("<!-- write ", "<!-- not run: "))
            assert excused, f"{path.name}:{line}: write <!-- from FILE --> above the block"
            continue
        rest = (REPO / source[1]).read_text(encoding="utf-8")
        for part in re.split(r"^\s*// \.\.\.\n", code, flags=re.MULTILINE):
            assert part in rest, f"{path.name}:{line}: not in {source[1]}, in this order:\n{part}"
            rest = rest.partition(part)[2]


def test_type_table_is_that_of_the_headers() -> None:
    text = (REPO / "src" / "utils" / "entry.h").read_text(encoding="utf-8")
    type_name = r'struct SchemaType<([^{]+)> \{\s*static constexpr const char\* name = "(.+?)"'
    known = re.findall(type_name, text)
    after = BINDING.read_text(encoding="utf-8").partition("| schema | C++ |")[2]
    table = after.partition("\n\n")[0]
    listed = []
    for row in table.splitlines()[2:]:
        schema, cpp = (re.findall(r"`(.+?)`", cell) for cell in row.strip("|").split("|"))
        listed += zip(cpp, schema, strict=True)
    known = [(cpp, name) for cpp, name in known if not name.startswith("enum")]  # in the text
    known += [(cpp, name.replace("int", "SymInt")) for cpp, name in known if name.startswith("int")]
    assert sorted(listed) == sorted(known)


def _header(name: str) -> str:
    return (REPO / "src" / "utils" / name).read_text(encoding="utf-8")


def test_every_word_of_a_binding_is_listed_and_shown() -> None:
    public = _header("manifest.h").partition("class Op {")[2].partition(" private:")[0]
    words = set(re.findall(r"^  Op& (\w+)\(", public, re.MULTILINE))
    listed = set(re.findall(r"^\| `\.(\w+)", BINDING.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(words) > 15 and words == listed
    blocks = "\n".join(code for _, _, code in _blocks(BINDING, "cpp"))
    assert words <= set(re.findall(r"\.(\w+)[<(]", blocks))


@pytest.mark.parametrize(
    "form",
    ["Tensor ", "Tensor? ", "Tensor[] ", "Tensor?[] ", "Tensor(a!) ", "Tensor(a!)? ",
     "Tensor(a!)[] ", "*, Tensor(a!) ", "int ", "int? ", "int[]? ", "SymInt ", "float ", "float? ",
     "float[]? ", "bool ", "bool[] ", "str ", "ScalarType ", "ScalarType? ", "Device? ", "-> ()",
     "-> Tensor[]", ", int dims)"],
)  # fmt: skip
def test_every_form_of_a_schema_is_shown(form: str) -> None:
    assert any(form in code for _, _, code in _blocks(BINDING, "cpp"))


def test_every_form_of_the_scaffold_is_shown() -> None:
    kinds = BINDING.read_text(encoding="utf-8").partition("## One pair of each kind")[2]
    kinds = kinds.partition("\n## ")[0]
    shown = re.findall(r"^`new my_op(?: --([\w-]+))?`", kinds, re.MULTILINE)
    assert sorted(shown) == sorted(["", *scaffold.FORMS])
    assert kinds.count("\n### ") == kinds.count("\n```cpp") == len(shown)


def test_every_dtype_is_listed() -> None:
    members = _header("dtype.h").partition("enum class DType")[2].partition("kUnsupported")[0]
    table = BINDING.read_text(encoding="utf-8").partition("| `DType` | torch |")[2]
    listed = re.findall(r"`(k\w+)`", table.partition("\n\n")[0])
    assert listed == re.findall(r"^  (k\w+),", members, re.MULTILINE)


#: Public in C++ alone: what a binding or a kernel does not name itself.
UNNAMED = {
    "Host", "Op", "philox", "Library", "Operand", "UnknownDType", "RandomBlock", "is_strided",
    "CpuElement", "Element", "Compute", "kLog2E", "sigmoids_of_powers", "kResultsIn",
}  # fmt: skip
VOCABULARY = (
    "binding.h", "by_torch.h", "checks.h", "compose.h", "division.cuh", "division.h", "dtype.cuh",
    "dtype.h", "elementwise.h", "entry.h", "foreach/foreach_binding.h", "gelu_by_torch.h",
    "launch.h", "layout.h", "manifest.h", "math.cuh", "names.h", "narrow.cuh", "narrow.h",
    "overlap.h", "points.h", "points_binding.h", "ptx/warp.cuh", "random.cuh", "random.h",
    "random_binding.h", "rows/rows_binding.h", "strided.h", "tensor.h", "workspace.h",
)  # fmt: skip


@pytest.mark.parametrize("header", VOCABULARY)
def test_every_helper_is_listed(header: str) -> None:
    """The names that a header has outside of ``detail``, as code."""
    detail = r"^namespace detail \{.*?^\}  // namespace detail$"
    code = re.sub(detail, "", _header(header), flags=re.MULTILINE | re.DOTALL)
    code = code.partition("namespace cuda_ops {")[2]
    code = re.sub(r"^template <.*?> (?=\w)", "", code, flags=re.MULTILINE)
    types = re.findall(r"^(?:struct|class|enum class) (?:alignas\(.+\) )?(\w+)", code, re.MULTILINE)
    types += re.findall(r"^(?:using|enum) (\w+) [=:]", code, re.MULTILINE)
    constants = re.findall(r"^constexpr [\w:]+ (k\w+)", code, re.MULTILINE)
    functions = re.findall(r"^(?!using|struct|static_assert)\w.*?\b([a-z]\w+)\(.*[^;]$", code, re.M)
    names = {*types, *constants, *functions} - UNNAMED - {"alignas"}
    prose = re.sub(r"```.*?```", "", BINDING.read_text(encoding="utf-8"), flags=re.DOTALL)
    said = "\n".join(re.findall(r"`([^`\n]+)`", prose))
    assert not [name for name in sorted(names) if not re.search(rf"\b{name}\b", said)]


# --- docs/errors.md ------------------------------------------------------------------


def test_messages_of_the_errors_page_exist() -> None:
    table = ERRORS.read_text(encoding="utf-8").partition("## Bindings")[2]
    table = table.partition("## Torch, CUDA and compilers")[0]  # whose words are not ours
    fragments = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    # The linker's and pluggy's.
    others = {"undefined symbol", "unknown hook", "can not be found in the hookspec"}
    assert len(fragments) > 40
    assert not [f for f in fragments if f not in _sources() and f not in others]


def test_every_promise_of_the_page_of_faults_has_its_test() -> None:
    rows = [
        (PAGES / file, re.findall(r"`(test_\w+)`", tests))
        for file, tests in re.findall(
            r"\| \[\w+\]\((.+?)\) (.+) \|$", (PAGES / "faults.md").read_text(), re.M
        )
    ]
    assert len(rows) > 20 and all(tests for _, tests in rows)
    for file, tests in rows:
        assert set(tests) <= set(re.findall(r"^def (test_\w+)", file.read_text(), re.M))


def test_every_error_class_is_listed() -> None:
    table = ERRORS.read_text(encoding="utf-8").partition("## Classes")[2].partition("## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert listed == [
        name for name, value in vars(errors).items() if inspect.isclass(value)
    ]  # in their order


# --- docs/design.md ------------------------------------------------------------------


def test_the_layers_are_in_the_order_of_their_test() -> None:
    text = (PAGES / "design.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`(\w+)`\]", text, re.MULTILINE)
    test = ast.parse((REPO / "tests" / "test_layers.py").read_text(encoding="utf-8"))
    (layers,) = (
        ast.literal_eval(node.value)
        for node in test.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    )
    assert tuple(listed) == layers


# --- docs/environment.md -------------------------------------------------------------


def test_every_environment_variable_is_listed() -> None:
    text = (PAGES / "environment.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([A-Z][A-Z_]+)`", text))
    folders = ("cuda_ops", "benchmarks", "build_backend")
    code = "\n".join(
        path.read_text(encoding="utf-8") for f in folders for path in (REPO / f).rglob("*.py")
    )
    used = r"(?:environ(?:\.get\(|\.setdefault\(|\[)|getenv\()"
    read = set(re.findall(rf"""{used}["'](\w+)["']""", code))
    assert read and read <= listed
    # rich reads NO_COLOR.
    assert not [name for name in listed - {"NO_COLOR"} if f'"{name}"' not in code]


# --- docs/operators.md, docs/command-line.md -----------------------------------------


@pytest.fixture(scope="module")
def generator() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(PAGES / "generate.py")))


@pytest.mark.parametrize(
    "name", ["operators.md", "nn.md", "command-line.md", "how-to/notebook.md", "versions.md"]
)
def test_generated_pages_are_up_to_date(generator: SimpleNamespace, name: str) -> None:
    text = (PAGES / name).read_text(encoding="utf-8")
    assert generator.updated(text) == text, "run python docs/generate.py"


def _examples() -> Iterator[tuple[str, str]]:
    heading = ""
    for line in re.split(r"^(?=## )", OPERATORS.read_text(encoding="utf-8"), flags=re.MULTILINE):
        heading = line.partition("\n")[0].removeprefix("## ")
        yield from ((heading, code) for code in re.findall(r"```pycon\n(.*?)```", line, re.S))


def test_every_operator_has_an_example() -> None:
    assert {name for name, _ in _examples()} == {
        path.stem for path in (REPO / "src" / "bindings").glob("*.cpp")
    }


@pytest.mark.parametrize(("name", "code"), [pytest.param(*e, id=e[0]) for e in _examples()])
def test_examples_of_operators_run(name: str, code: str) -> None:
    scope = {"torch": torch, "cuda_ops": cuda_ops}
    example = doctest.DocTestParser().get_doctest(code, scope, name, str(OPERATORS), 0)
    assert example.examples
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)


# --- docs/first-operator.md ----------------------------------------------------------


@pytest.mark.slow
def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    """Its commands run in order, its files are written and edited, in a folder of the test's."""
    for kind, where, text in _steps():
        path = tmp_path / where.removeprefix("../")
        if kind == "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif kind == "edit":
            lines = text.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] != "+")
            new = "".join(line[1:] for line in lines if line[0] != "-")
            before = path.read_text(encoding="utf-8")
            assert before.count(old) == 1, old
            path.write_text(before.replace(old, new), encoding="utf-8")
        else:
            _run_and_compare(text, tmp_path)


def _steps() -> Iterator[tuple[str, str, str]]:
    """Yields ``("write", path, text)``, ``("edit", path, diff)`` and ``("run", "", console)``."""
    text = TUTORIAL.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        above = text[: match.start()].rstrip("\n").rpartition("\n")[2]
        if marked := re.fullmatch(r"<!-- (write|edit) (\S+) -->", above):
            yield marked[1], marked[2], match["code"]
        elif match["language"] == "console":
            yield "run", "", match["code"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        pytest.param(path, code, id=f"{path.stem}:{line}")
        for path in DOCS
        if path != TUTORIAL
        for line, above, code in _blocks(path, "console")
        if not above.startswith("<!-- not run: ")
    ],
)
def test_console_blocks_print_what_they_show(path: Path, code: str, tmp_path: Path) -> None:
    for step in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, expected = step.partition("\n")
        done = subprocess.run(
            ["bash", "-c", command.replace("/tmp/", f"{tmp_path}/")], cwd=REPO,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


def _run_and_compare(console: str, folder: Path) -> None:
    # The outputs are those of a CPU.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO)}
    for step in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        line, _, expected = step.partition("\n")
        words = [word.replace("../", f"{folder}/") for word in shlex.split(line)]
        assert words[0] == "python"
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=REPO, env=environment, capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        shown = _comparable(done.stdout.replace(f"{folder}/", "../"))
        pattern = re.escape(_comparable(expected)).replace(re.escape("...\n"), "(?:.*\n)*?")
        assert re.fullmatch(pattern, shown), f"{line}\n{done.stdout}{done.stderr}"


def _comparable(text: str) -> str:
    """Drops what another machine or version may print: numbers, spaces, a drawn sample."""
    text = re.sub(r"Sample\(.*", "Sample", text)
    with_toolkit = "* No GPU here: CUDA kernels were compiled, only CPU kernels were run."
    text = re.sub(r"No CUDA toolkit here, .*", with_toolkit, text)
    text = re.sub(r"\d[\d.]*(?:e[+-]\d+)?", "#", text.replace("cpu no nvcc", "cpu cuda*"))
    return re.sub(r"[ ]+", " ", re.sub(r" ~|[ ]+$", "", text, flags=re.MULTILINE)).strip() + "\n"


# --- docs/hooks.md -------------------------------------------------------------------


def test_every_hook_has_a_heading_with_its_signature() -> None:
    tree = ast.parse(Path(hookspecs.__file__).read_text(encoding="utf-8"))
    declared = [
        f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("cuda_ops_")
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


# --- docs/measuring.md -----------------------------------------------------------------


def test_numbers_of_the_measuring_page_are_those_of_the_kit() -> None:
    text = " ".join((PAGES / "measuring.md").read_text(encoding="utf-8").split())
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
