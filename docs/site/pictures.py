"""Draws the committed runs, and puts the pictures where tables have the same cases.

They are drawn where a run or the code that draws is newer, into a folder that git ignores.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pages import REPO

sys.path.append(str(REPO))  # benchmarks are not installed

from benchmarks.stored import RESULTS, file_of, reports
from benchmarks.tables import _pages
from cuda_ops.benchmarking import plots

DRAWN = REPO / "build" / "pictures"


@functools.cache
def drawn() -> dict[str, list[Path]]:
    """Draws the run of each pair that is not drawn yet; returns the pictures by pair."""
    found = {}
    for pair, report in reports().items():
        run = file_of(f"operators/{pair}")
        folder = DRAWN / run.parent.parent.relative_to(RESULTS) / "plots" / pair
        pictures = sorted(folder.glob("*.svg"))
        newest = max(run.stat().st_mtime, Path(plots.__file__).stat().st_mtime)
        if not pictures or min(picture.stat().st_mtime for picture in pictures) < newest:
            for old in pictures:
                old.unlink()
            pictures = sorted(plots.draw(report, folder))
        found[pair] = pictures
    return found


def on_files(files: Files, config: Any) -> Files:
    """Adds the pictures where benchmarks/results has those that GitHub shows."""
    for pictures in drawn().values():
        for picture in pictures:
            uri = _uri(picture)
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(picture)))
    return files


def _uri(picture: Path) -> str:
    return (RESULTS.relative_to(REPO) / picture.relative_to(DRAWN)).as_posix()


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Shows the pictures of its operators on each page of docs/kernels, and one of each on that of
    performance.
    """
    source = REPO / page.file.src_uri
    kernels = _pages()
    if source in kernels:
        pictures = [picture for pair in kernels[source] for picture in drawn().get(pair, ())]
        shown = "\n\n".join(_picture(picture, source) for picture in pictures)
        return f"{markdown}\n## Pictures\n\n{shown}\n" if shown else markdown
    if page.file.src_uri == "docs/performance.md":
        firsts = [_first(pictures) for pictures in drawn().values()]
        shown = "\n\n".join(_picture(picture, source) for picture in firsts)
        return f"{markdown}\n## Pictures\n\n<div class=gallery markdown>\n\n{shown}\n\n</div>\n"
    return markdown


def _first(pictures: list[Path]) -> Path:
    """Returns the rates by size, else those under the roofline, else what is there."""
    names = {picture.stem: picture for picture in pictures}
    return names.get("bandwidth") or names.get("roofline") or pictures[0]


def _picture(picture: Path, source: Path) -> str:
    link = os.path.relpath(REPO / _uri(picture), source.parent)
    title = f"{picture.parent.name}, {picture.stem.replace('_', ' ')}"
    return f"[![{title}]({link}){{ loading=lazy }}]({link})"  # alone, it can be enlarged
