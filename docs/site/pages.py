"""Which pages the site has, and its navigation. MkDocs calls what is named ``on_...``.

A page lies where it lies in the repository, so links between pages need no change. A file or folder
that a page links to, and that is no page, becomes one: its text, or the list of its files.
"""

from __future__ import annotations

import ast
import contextlib
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPO = Path(__file__).resolve().parent.parent.parent
INDEX = REPO / "docs" / "README.md"

#: Modules that have a page for their docstrings, with those that the page has besides.
API = {
    "cuda_ops": (),
    "cuda_ops.runtime": (),
    "cuda_ops.integrations": (),
    "cuda_ops.distributed": (),
    "cuda_ops.namespaces": (),
    "cuda_ops.testing": (),
    "cuda_ops.benchmarking": tuple(
        f"cuda_ops.benchmarking.{name}" for name in ("kit", "peers", "results", "plots")
    ),
    "cuda_ops.packaging": (),
    "cuda_ops.spec": (),
    "cuda_ops.hookspecs": (),
    "cuda_ops.dev": (),
    "cuda_ops.errors": (),
}

LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
#: Text in which a link is no link.
CODE = re.compile(r"^[ \t]*```.*?^[ \t]*```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_PICTURES = {".svg", ".png"}
_LANGUAGES = {".cu": "cuda", ".cuh": "cuda", ".cpp": "cpp", ".h": "cpp", ".py": "python"}


def pages() -> list[Path]:
    """Returns the documents of the repository that the site has."""
    folders = ("docs", "benchmarks/results", "examples")
    found = [page for folder in folders for page in (REPO / folder).rglob("*.md")]
    return sorted([*found, *REPO.glob("*.md")])


def targets(page: Path, text: str) -> Iterator[tuple[str, Path]]:
    """Yields each relative link of a page, and the file that it leads to."""
    for link in LINK.findall(CODE.sub("", text)):
        file = link.partition("#")[0]
        if file and not re.match(r"[a-z]+:", link):
            yield link, (page.parent / file).resolve()


def page_of(target: Path) -> Path | None:
    """Returns the page that shows a file or folder, ``None`` for what is one itself."""
    if target.is_dir():
        return target / "README.md"
    if target.suffix == ".md" or target.suffix in _PICTURES or not target.is_file():
        return None
    return target.with_name(f"{target.name}.md")


def on_config(config: Any) -> Any:
    """Takes the navigation from docs/README.md."""
    others = [{"All documents": "docs/README.md"}, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
    config.nav = [{"Home": [{"cuda_ops": "README.md"}, *others]}, *_sections()]
    return config


def _sections() -> list[dict[str, list[Any]]]:
    text = INDEX.read_text(encoding="utf-8")
    sections = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, items = section.partition("\n")
        entries: list[Any] = []
        for item in re.split(r"^- ", items, flags=re.MULTILINE)[1:]:
            item = item.partition("\n\n")[0]
            links = re.findall(r"\[([^\]]+)\]\((\S+?)\)", item)
            if item.startswith("["):
                entries.append(_entry(*links[0]))
            else:  # a list of pages, named by its first word
                entries.append({item.partition(",")[0]: [_entry(*link) for link in links]})
        if name == "Reference":
            entries.append({"Python API": [f"docs/api/{page}.md" for page in _api_pages()]})
        sections.append({name: entries})
    return sections


def _entry(title: str, link: str) -> dict[str, str]:
    title = " ".join(title.replace("`", "").split())
    return {title[0].upper() + title[1:]: posixpath.normpath(f"docs/{link}")}


def _source(module: str) -> Path | None:
    path = REPO / module.replace(".", "/")
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.exists()), None)


def _api_pages() -> list[str]:
    return [module for module in API if _source(module)]


def on_files(files: Files, config: Any) -> Files:
    """Adds every page, what they link to, and the pages of docstrings."""
    known = pages()
    for page in known:
        uri = page.relative_to(REPO).as_posix()
        files.append(File(uri, str(REPO), config.site_dir, config.use_directory_urls))
    waiting = list(known)
    made: set[Path] = set(known)
    while waiting:
        page = waiting.pop()
        text = _generated(page) if page not in known else page.read_text(encoding="utf-8")
        for _, target in targets(page, text):
            shown = page_of(target)
            if shown is not None and shown not in made:
                made.add(shown)
                waiting.append(shown)
                uri = shown.relative_to(REPO).as_posix()
                files.append(File.generated(config, uri, content=_generated(shown)))
    for name in _api_pages():
        files.append(File.generated(config, f"docs/api/{name}.md", content=_api_page(name)))
    return files


def _api_page(module: str) -> str:
    source = _source(module)
    assert source is not None
    parts = [
        f"---\ntitle: {module}\n---\n\n# `{module}`",
        f"::: {module}\n    options: {{show_root_heading: false, show_root_toc_entry: false}}",
    ]
    if module == "cuda_ops":
        parts.append(
            "[Operators](../operators.md) and [modules](../nn.md) have pages of their own."
        )
    exported = _exported(ast.parse(source.read_text(encoding="utf-8")))
    names = [*dict.fromkeys(exported), *API[module]]
    return "\n\n".join([*parts, *(f"::: {name}" for name in names)]) + "\n"


def _exported(tree: ast.Module) -> Iterator[str]:
    """Yields the full name of each name that a module imports for those who import it."""
    listed: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            with contextlib.suppress(ValueError):  # it is computed
                listed = ast.literal_eval(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname == alias.name or alias.name in listed:
                    yield f"{node.module}.{alias.name}"


def _generated(page: Path) -> str:
    """Returns the page that shows a file or a folder."""
    head = "---\nsearch: {exclude: true}\ntitle: NAME\n---\n\n# `PATH`\n\n"
    folder = page.name == "README.md"
    shown = page.parent if folder else page.with_suffix("")
    text = head.replace("NAME", shown.name).replace("PATH", shown.relative_to(REPO).as_posix())
    if folder:
        entries = sorted(p for p in shown.iterdir() if p.is_file())
        return text + "".join(f"- [{entry.name}]({entry.name})\n" for entry in entries)
    content = shown.read_text(encoding="utf-8")
    if shown.suffix == ".ipynb":
        return text + "\n\n".join(_cells(content)) + "\n"
    language = _LANGUAGES.get(shown.suffix, shown.suffix.lstrip(".") or "text")
    return f"{text}````{language}\n{content.rstrip()}\n````\n"


def _cells(notebook: str) -> Iterator[str]:
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
