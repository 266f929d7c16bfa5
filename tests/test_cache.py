"""The cache of builds: what it refuses to run, and what it gives up."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ScratchOp
from fake_builds import compiled

from cuda_ops.build import cache, compiling
from cuda_ops.dev import main
from cuda_ops.errors import BuildError
from cuda_ops.registry import registry


def stat_as_if(owner: dict[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes files belong to other users, which only root could do in earnest."""
    real = Path.stat

    def stat(self: Path, **how: bool) -> os.stat_result:
        found = real(self, **how)
        if self in owner:
            return os.stat_result((*found[:4], owner[self], *found[5:]))
        return found

    monkeypatch.setattr(Path, "stat", stat)


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_compile", compiled)


@pytest.fixture
def library(scratch_op: ScratchOp) -> Path:
    scratch_op.write("v * 2")
    return scratch_op.build().path


PARTS: dict[str, Callable[[Path], Path]] = {
    "library": lambda library: library,
    "folder": lambda library: library.parent,
    "cache": lambda library: library.parent.parent,
}
parts = pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))


def refuses(op: ScratchOp, message: str) -> None:
    """Neither builds in the cache nor runs what is there."""
    with pytest.raises(BuildError, match=message):
        op.build()
    with (
        pytest.warns(UserWarning, match=f"cuda_ops.{op.name} leaves out {message}"),
        pytest.raises(BuildError, match="is not built"),
    ):
        registry().load(op.name)


@parts
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_not_run(
    scratch_op: ScratchOp, library: Path, part: Callable[[Path], Path], mode: int
) -> None:
    bad = part(library)
    bad.chmod(bad.stat().st_mode | mode)
    top = compiling.cache_dir()
    refuses(
        scratch_op,
        f"{bad}: a cache holds code: expected only its owner to write it, got mode 7.*"
        f"; run chmod -R go-w {top}, or rm -r {top} ",
    )
    bad.chmod(bad.stat().st_mode & ~mode)
    assert scratch_op.build().origin == "cached"


@parts
def test_what_another_user_owns_is_not_run(
    scratch_op: ScratchOp,
    library: Path,
    part: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = part(library)
    with monkeypatch.context() as patched:
        stat_as_if({bad: 12345}, patched)
        refuses(
            scratch_op,
            rf"{bad}: a cache holds code: expected user \d+ or root to own it, got user 12345; "
            f"run rm -r {bad}, or set CUDA_OPS_CACHE",
        )
        stat_as_if({bad: 0}, patched)  # root may write anything anyway
        assert scratch_op.build().origin == "cached"


def test_the_wrapper_of_nvcc_is_code_too(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = compiling._nvcc_script(Path("/cuda"))
    assert script.stat().st_mode & 0o777 == 0o755
    script.chmod(0o777)
    with pytest.raises(BuildError, match=f"{script}: a cache holds code"):
        compiling._nvcc_script(Path("/cuda"))


def test_folders_are_made_for_the_user_alone_whatever_the_umask(
    scratch_op: ScratchOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path / "new"))
    scratch_op.write("v")
    before = os.umask(0o002)
    try:
        built = scratch_op.build()
    finally:
        os.umask(before)
    assert scratch_op.build().origin == "cached"
    for folder in (built.path.parent, tmp_path / "new", tmp_path / "new" / "work"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_sticky_folder_such_as_tmp_is_fine(
    scratch_op: ScratchOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path))
    scratch_op.write("v")
    scratch_op.build()
    assert scratch_op.build().origin == "cached"


# --- what it gives up ------------------------------------------------------------------


def names(folder: str) -> set[str]:
    return {path.name for path in (cache.cache_dir() / folder).iterdir() if path.suffix != ".lock"}


def test_clean_removes_what_no_present_source_needs(
    scratch_op: ScratchOp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch_op.write("v * 2")
    old = scratch_op.build().path
    scratch_op.write("v * 3")
    new = scratch_op.build().path
    for leftover in (f".{old.name}.0123abcd", "gone-0123456789abcdef-0123456789abcdef.so"):
        (old.parent / leftover).touch()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(scratch_op.root, elsewhere)
    (pair,) = (p for p in cache.survey([elsewhere])[0].values() if p.stem == scratch_op.name)
    other = compiling.build(pair).path
    assert main(["clean"]) == 0
    assert f"{cache.cache_dir()}: removed 2 libraries and builds, " in capsys.readouterr().out
    assert names("lib") == {new.name, other.name}
    assert len(names("work")) == 2
    assert scratch_op.build().origin == "cached"
    shutil.rmtree(elsewhere)
    cache.clean()
    assert names("lib") == {new.name} and len(names("work")) == 1
    scratch_op.binding.unlink()
    cache.clean()
    assert not names("lib") and not names("work") and not names("roots")


def test_beyond_its_bound_it_gives_up_what_was_used_longest_ago(
    scratch_op: ScratchOp,
) -> None:
    libraries = []
    for factor in (1, 2, 3):
        scratch_op.write(f"v * {factor}")
        libraries.append(scratch_op.build().path)
    size = libraries[0].stat().st_size
    cache.prune(size)  # all are in use
    assert len(names("lib")) == 3
    for age, library in enumerate(reversed(libraries), start=2):
        os.utime(library, (time.time() - age * 3600,) * 2)
    scratch_op.write("v * 1")  # the oldest is called
    assert compiling.find_library(registry().pairs()[scratch_op.name], _text(scratch_op))
    cache.prune(1)
    assert names("lib") == {libraries[0].name}


def _text(op: ScratchOp) -> compiling.Text:
    return registry().rescan()[op.name].read()
