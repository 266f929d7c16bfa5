"""The cache of builds: what it refuses to run, and what it gives up."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from fake_builds import compiled
from filelock import FileLock

from cuda_ops.build import cache, compiling, wrappers
from cuda_ops.build.cache import Name
from cuda_ops.build.discovery import Pair, Text, survey
from cuda_ops.dev import main
from cuda_ops.errors import BuildError
from cuda_ops.registry import Registry, registry


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
        pytest.warns(UserWarning, match=f"cuda_ops.{op.name}: ignored {message}"),
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
    top = shlex.quote(str(cache.cache_dir()))  # it has a space
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
            f"run rm -r {shlex.quote(str(bad))}, or set CUDA_OPS_CACHE",
        )
        stat_as_if({bad: 0}, patched)  # root may write anything anyway
        assert scratch_op.build().origin == "cached"


def test_the_wrapper_of_nvcc_is_code_too(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = wrappers._nvcc_script(Path("/cuda"))
    assert script.stat().st_mode & 0o777 == 0o755
    script.chmod(0o777)
    with pytest.raises(BuildError, match=f"{script}: a cache holds code"):
        wrappers._nvcc_script(Path("/cuda"))


@pytest.mark.parametrize("file", ["x.o", "build.ninja", "deeper/x.o"])
def test_a_build_starts_anew_where_another_user_left_a_file(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    work = cache.folder("work", "x")
    planted = work / file
    planted.parent.mkdir(exist_ok=True)
    planted.touch(0o664)  # a compiler's own, with the umask of some systems
    assert list(cache.usable(work).iterdir())
    stat_as_if({planted: 12345}, monkeypatch)
    assert not list(cache.usable(work).iterdir())
    assert list(work.parent.iterdir()) == [work]


def test_a_stand_in_for_a_library_that_others_may_write_is_written_again(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    folder = wrappers.stub_libraries()
    assert folder is not None
    stub = folder / "libcudart.so"
    text = stub.read_text()
    stub.write_text("planted")
    stub.chmod(0o666)
    wrappers.stub_libraries()
    assert stub.read_text() == text and stub.stat().st_mode & 0o777 == 0o644


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


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to("target")
    for text in ("first", "second"):
        cache.write(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert set(tmp_path.iterdir()) == {target, link}


def test_a_pipe_and_a_terminal_are_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        cache.write(pipe, "words")
        assert read.result(timeout=10) == "words" and pipe.is_fifo()
    keyboard, screen = os.openpty()
    try:
        (tmp_path / "terminal").symlink_to(os.ttyname(screen))
        cache.write(tmp_path / "terminal", "words")
        assert os.read(keyboard, 16) == b"words" and (tmp_path / "terminal").is_char_device()
    finally:
        os.close(keyboard)
        os.close(screen)


def test_an_error_names_the_file_that_was_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/report\.json'$"):
        cache.write(tmp_path / "report.json", "words")
    with pytest.raises(FileNotFoundError, match=r"'.*/none/report\.json'$"):
        cache.write(tmp_path / "none" / "report.json", "words")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "found"), [(None, 0o600), (0o644, 0o644)])
def test_a_file_without_a_mode_has_that_of_the_umask(
    tmp_path: Path, mode: int | None, found: int
) -> None:
    before = os.umask(0o077)
    try:
        cache.write(tmp_path / "file", "words", mode)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == found


def test_a_sticky_folder_such_as_tmp_is_fine(
    scratch_op: ScratchOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path))
    scratch_op.write("v")
    scratch_op.build()
    assert scratch_op.build().origin == "cached"


def test_the_command_that_is_named_can_be_run(scratch_op: ScratchOp, tmp_path: Path) -> None:
    root = tmp_path / "it's a root"
    scratch_op.write("v")
    shutil.copytree(scratch_op.root, root)
    other = Registry([root])
    (root / "bindings" / f"{scratch_op.name}.cpp").rename(root / "bindings" / "quoted.cpp")
    said = re.escape(f"run python compile_dev.py --root {shlex.quote(str(root))} quoted or")
    with pytest.raises(BuildError, match=said):
        other.load("quoted")


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
    for leftover in (f".{old.name}.0123abcd", f"gone-{16 * '0'}-{24 * '0'}.so"):
        (old.parent / leftover).touch()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(scratch_op.root, elsewhere)
    (pair,) = (p for p in survey([elsewhere])[0].values() if p.stem == scratch_op.name)
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


def test_clean_leaves_what_it_does_not_know(scratch_op: ScratchOp) -> None:
    scratch_op.write("v")
    library = scratch_op.build().path
    for stray in (".nfs0000", "README"):
        (library.parent / stray).touch()
        (cache.cache_dir() / "work" / stray).mkdir()
    (library.parent / "folder").mkdir()
    scratch_op.binding.unlink()
    cache.clean()
    assert names("lib") == {".nfs0000", "README", "folder"}
    assert names("work") == {".nfs0000", "README"}


def test_a_folder_in_place_of_a_library_is_given_up_too(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    library = scratch_op.build().path
    library.unlink()
    library.mkdir()
    (library / "file").touch()
    scratch_op.write("v * 3")
    new = scratch_op.build().path
    cache.clean()
    assert names("lib") == {new.name}


def test_a_build_succeeds_where_nothing_can_be_given_up(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(cache, "prune", fails)
    scratch_op.write("v")
    assert scratch_op.build().origin == "built"


def test_clean_keeps_what_it_cannot_judge(scratch_op: ScratchOp, tmp_path: Path) -> None:
    scratch_op.write("v")
    scratch_op.build()
    other_root = tmp_path / "elsewhere"
    shutil.copytree(scratch_op.root, other_root)
    pair = survey([other_root])[0][scratch_op.name]
    other = compiling.build(pair).path
    before = names("lib")
    for unreadable in ("a folder", "a note"):
        if unreadable == "a folder":
            shutil.rmtree(other_root / "bindings")
            (other_root / "bindings").symlink_to("bindings")  # as good as no permission
        else:
            name = Name.parse(other.name)
            assert name is not None
            (cache.cache_dir() / "roots" / name.root).write_text("")
        removed, _ = cache.clean()
        assert not removed and names("lib") == before
    cache.remember_root(other_root)  # which writes a damaged note again
    shutil.rmtree(other_root)
    cache.clean()
    assert names("lib") == before - {other.name}


def test_clean_says_what_the_cache_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    below = file / "x"
    for value, said in {
        str(file): f"expected a folder that can be written, got {file}: File exists",
        str(below): f"expected a folder that can be written, got {below}: Not a directory",
        "~nosuchuser/x": "expected a folder, got '~nosuchuser/x': there is no such user",
    }.items():
        monkeypatch.setenv("CUDA_OPS_CACHE", value)
        assert main(["clean"]) != 0
        assert f"error: CUDA_OPS_CACHE: {said}" in capsys.readouterr().out


def test_a_name_says_what_it_was_made_of(scratch_op: ScratchOp) -> None:
    for binding in ("CUDA_OPS(library) {}", "PYBIND11_MODULE(name, m) {}"):
        scratch_op.binding.write_text(binding)
        pair = registry().rescan()[scratch_op.name]
        name = Name.of(pair, ("9.0a",), pair.read().hash)
        for file in (name.library, name.library.with_suffix(".nvcc.log")):
            assert Name.parse(file.name) == Name.parse(f".{file.name}.0123abcd") == name
        assert cache.source_hash(name.library) == pair.read().hash
        assert Name.parse(name.folder) == Name.parse(name.lock.name) == replace(name, text="")
        debugged = Name.of(pair, ("9.0a",), pair.read().hash, debug=True)
        assert Name.parse(debugged.library.name) == debugged != name
        assert Name.parse(debugged.folder) == replace(debugged, text="")
    for other in (".nfs0000", "silu.abi3.so", "0.so", "silu-0123456789abcdef.so"):
        assert Name.parse(other) is None and cache.source_hash(Path(other)) == ""


def test_a_folder_that_is_removed_before_its_lock_is_held(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled_in(pair: Pair, archs: Any, text: Text, work: Path, *rest: bool) -> Text:
        assert work.is_dir()
        return compiled(pair, archs, text, work, *rest)

    monkeypatch.setattr(compiling, "_compile", compiled_in)
    scratch_op.write("v")
    pair = registry().rescan()[scratch_op.name]
    name = Name.of(pair, compiling.visible_archs(), "")
    cache.folder("work")
    with ThreadPoolExecutor() as pool:
        with FileLock(name.lock):  # as another process's clean
            built = pool.submit(compiling.build, pair)
            while not (cache.cache_dir() / "roots").exists():
                time.sleep(0.01)
            time.sleep(0.1)
            shutil.rmtree(name.lock.with_suffix(""), ignore_errors=True)
        assert built.result().origin == "built"


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


def _text(op: ScratchOp) -> Text:
    return registry().rescan()[op.name].read()
