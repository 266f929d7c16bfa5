"""The site of the documents builds without a warning: every page, link and anchor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

REPO = Path(__file__).resolve().parent.parent
for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[docs]'")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error, by one of the workers for all of them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    built = folder / "site"
    with FileLock(folder / "site.lock"):
        if not built.exists():
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "-d",
                 folder / "unfinished"],
                cwd=REPO, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True,
                text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            (folder / "unfinished").rename(built)
    return built


def _html(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text(encoding="utf-8")


def _article(site: Path, page: str) -> str:
    return _html(site, page).partition("<article")[2].partition("</article>")[0]


def test_every_document_is_a_page(site: Path) -> None:
    for page in (REPO / "docs").rglob("*.md"):
        name = page.relative_to(REPO).with_suffix("")
        assert (site / (name.parent if name.name == "README" else name) / "index.html").exists()


def test_the_navigation_is_that_of_the_index(site: Path) -> None:
    home = _html(site, "")
    tabs = home.partition('md-tabs__list">')[2].partition("</ul>")[0]
    names = re.sub(r"<[^>]+>", "", tabs).split()
    index = (REPO / "docs" / "README.md").read_text(encoding="utf-8")
    assert names == ["Home", *re.findall(r"^## (.+)$", index, re.MULTILINE)]
    listed = re.findall(r"^- \[[^\]]+\]\((\S+?)\.md\)", index, re.MULTILINE)
    assert len(listed) > 30
    for page in listed:
        assert f'href="docs/{page}/"' in home, page


def test_no_comment_of_the_sources_is_shown(site: Path) -> None:
    for page in site.glob("docs/**/index.html"):
        text = page.read_text(encoding="utf-8")
        # As text where markdown takes it for that, else as a comment of HTML.
        assert "&lt;!-- table" not in text and "&lt;!-- not run" not in text, page
        assert not re.search("<!-- (?:table|from|end|not run|write|edit) ", text), page


def test_a_block_says_where_it_is_from_and_why_nothing_runs_it(site: Path) -> None:
    assert ">src/bindings/silu.cpp</span>" in _article(site, "")
    assert ">not run by the tests: needs a GPU</span>" in _article(site, "docs/how-to/memory")


def test_files_that_are_no_documents_are_pages_too(site: Path) -> None:
    assert 'href="../../src/utils/servers/registering.h/"' in _article(site, "docs/design")
    assert "register" in _article(site, "src/utils/servers/registering.h")
    assert "translate.py" in _article(site, "tests/emulator")


def test_docstrings_are_pages(site: Path) -> None:
    page = re.sub(
        r"<details.+?</details>", "", _article(site, "docs/api/cuda_ops.runtime"), flags=re.S
    )
    for name in ("graphed", "prefetch", "Timer"):
        assert re.search(rf'<h2 id="cuda_ops\.runtime\.[\w.]+\.{name}"', page), name
    assert ":class:" not in page and "Example::" not in page
    assert page.count("<h2 id=") == len(set(re.findall(r'<h2 id="(\S+)"', page)))
    example = _article(site, "docs/api/cuda_ops")
    assert 'class="gp">&gt;&gt;&gt; </span>' in example and "<blockquote>" not in example


def test_runs_are_drawn_where_their_operators_are(site: Path) -> None:
    for page in (REPO / "docs" / "kernels").glob("*.md"):
        pictures = re.findall(r'src="(\S+?\.svg)"', _article(site, f"docs/kernels/{page.stem}"))
        assert pictures, page
        for picture in pictures:
            assert (site / "docs" / "kernels" / page.stem / picture).resolve().exists(), picture


def test_the_search_finds_a_message_by_its_heading(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {re.sub(r"<.+?>", "", entry["title"]) for entry in index["docs"]}
    errors = (REPO / "docs" / "errors.md").read_text(encoding="utf-8").partition("## Bindings")[2]
    messages = re.findall(r"^\| `(.+?)` \|", errors, re.MULTILINE)
    assert len(messages) > 100
    found = {title.replace("&lt;", "<").replace("&gt;", ">") for title in titles}
    assert not [message for message in messages if message not in found]
    assert not [entry for entry in index["docs"] if entry["location"].startswith("src/")]
