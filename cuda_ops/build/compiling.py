"""The dev build: one operator at a time through ``torch.utils.cpp_extension.load``.

It publishes ``<cache>/lib/<op>-<text>-<key>.so``, named by a hash of the
sources' text and one of everything else that went in. The file appears by an
atomic rename, so a library that can be seen is whole, two processes cannot
disturb each other, and going back to an earlier text of the sources finds its
library again without a build. What ``pip install`` built of the present text
is published as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
from typing import Literal

from filelock import FileLock, Timeout

from cuda_ops.build import (
    cache,
    commands,
    guest_text,
    logs,
    missing,
    origins,
    provenance,
    threads,
    toolchain,
    wrappers,
)
from cuda_ops.build.cache import Name, cache_dir
from cuda_ops.build.discovery import Pair, Text
from cuda_ops.build.provenance import DamagedError, Provenance
from cuda_ops.build.source_text import Kind
from cuda_ops.errors import BuildError, DiscoveryError

Origin = Literal["built", "cached", "installed"]


@dataclass(frozen=True)
class Built:
    """A published library of one pair."""

    pair: Pair
    path: Path
    seconds: float
    #: ``built`` now, ``cached`` by an earlier build, or ``installed`` by pip.
    origin: Origin
    archs: tuple[str, ...]
    resources: logs.KernelResources | None = None
    #: The warnings of nvcc and ptxas, line by line.
    warnings: tuple[str, ...] = ()
    #: Whether it is a debug build.
    debug: bool = False


def visible_archs() -> tuple[str, ...]:
    """Returns ``TORCH_CUDA_ARCH_LIST``, the visible GPUs' or :data:`toolchain.DEFAULT_ARCH`."""
    if chosen := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return toolchain.parse_archs(chosen)
    return toolchain.gpu_archs() or (toolchain.DEFAULT_ARCH,)


def library_path(
    pair: Pair, archs: tuple[str, ...], text: Text | None = None, debug: bool = False
) -> Path:
    """Returns where the library of a text of the pair, or of its present one, is published."""
    return Name.of(pair, archs, (text or pair.read()).hash, debug).library


def find_library(pair: Pair, text: Text, debug: bool = False) -> Path | None:
    """Finds a library to load without building: made of ``text``, and for the visible GPUs if any
    is. Failing that, what pip installed of an earlier text; ``None`` where there is nothing.

    Asks no compiler which flags it would take now: what was built, or found built, last of this
    text is what the user means to run, first among what was built under the variables for
    compilers that are set now. With ``debug`` it is a debug build of ``text`` or nothing, and
    without never one.

    Raises:
        DamagedError: there is only what pip installed, and it is not whole.
    """
    found: dict[Path, Provenance] = {}

    def read_by(read: Callable[[Path], Provenance | None], path: Path) -> Provenance | None:
        try:
            if path != pair.prebuilt:
                cache.check(path)
            made_from = read(path)
        except OSError:
            return None
        except BuildError as error:
            if path == pair.prebuilt and not found.keys() - {path}:
                raise
            warnings.warn(f"{pair.namespace}.{pair.stem}: ignored {error}", stacklevel=7)
            return None
        fits = made_from and (made_from.source_hash, made_from.debug) == (text.hash, debug)
        return made_from if fits else None

    for path in (
        *cache.newest_first(pair, text, ".so", debug),
        *([] if debug else [pair.prebuilt]),
    ):
        if made_from := read_by(provenance.skim, path):
            found[path] = made_from
    while found:
        best = _best(pair, found)
        if read_by(provenance.read, best):  # its checksum too, which takes longer
            break
        del found[best]
    else:
        return pair.prebuilt if not debug and pair.prebuilt.exists() else None
    if best != pair.prebuilt:
        with contextlib.suppress(OSError):  # the cache gives up what was used longest ago
            os.utime(best, (time(), best.stat().st_mtime))
    return best


def _best(pair: Pair, found: Mapping[Path, Provenance]) -> Path:
    has_kernels = any(source.suffix == ".cu" for source in pair.sources)
    # To ask for GPUs starts CUDA. A process that computes on a CPU may not want that, as one does
    # that forks or that loads data for others.
    differ = has_kernels and len({made_from.archs for made_from in found.values()}) > 1
    gpus, environment = toolchain.gpu_archs() if differ else (), commands.environment()

    def rank(path: Path) -> tuple[bool, bool]:
        made_from = found[path]
        # Without a GPU any kernels will do, and a library that has some is the better one.
        serves = bool(made_from.archs) and toolchain.serves(made_from.archs, gpus)
        return serves or not has_kernels, made_from.environment == environment

    return max(found, key=rank)


def build(
    pair: Pair,
    archs: tuple[str, ...] | None = None,
    *,
    verbose: bool = False,
    text: Text | None = None,
    debug: bool = False,
) -> Built:
    """Publishes the pair's library: what pip built where it fits, else compiles what changed.

    Args:
        pair: the operator.
        archs: compute capabilities; without them those of :func:`visible_archs`.
        verbose: print the compilers' command lines.
        text: what the pair's files say, where the caller has just read them.
        debug: make a debug build, which lies beside the ordinary library.

    Raises:
        BuildError: the compiler's own error lines; or a cache directory that
            cannot be written, or a disk that is full.
        DiscoveryError: the pair registers nothing.
    """
    if pair.problem:
        raise DiscoveryError(pair.problem)
    archs = archs or visible_archs()
    start = monotonic()
    path, origin = _publish_current(pair, archs, text or pair.read(), verbose, debug)
    return _built(pair, path, start, origin, archs)


def _publish_current(
    pair: Pair, archs: tuple[str, ...], text: Text, verbose: bool, debug: bool
) -> tuple[Path, Origin]:
    """Builds until what was compiled is what the files say: they may be saved meanwhile."""
    try:
        name = Name.of(pair, archs, text.hash, debug)
        if _is_whole(pair, name.library):
            with contextlib.suppress(OSError):
                os.utime(name.library)  # find_library takes the newest
            return name.library, cached_or_installed(pair, name.library)
        cache.folder("lib")
        cache.folder("work")
        cache.remember_root(pair.root)
        with _locked(name.lock, pair.key) as waited:
            # Not before the lock is held: another process may be removing the folder.
            work = cache.folder("work", name.folder)
            if waited:  # another process may have built it
                text = pair.read()
            origin: Origin = "cached"
            while not _is_whole(pair, path := library_path(pair, archs, text, debug), discard=True):
                if not debug and _publish_installed(pair, archs, path):
                    origin = "installed"
                    text = pair.read()
                else:
                    text = _compile(pair, archs, text, work, verbose, debug)
                    origin = "built"
    except OSError as error:
        raise BuildError(
            f"{pair.key}: cannot build in {cache_dir()}: {error.strerror or error}; "
            "set CUDA_OPS_CACHE to a folder that can be written"
        ) from error
    with contextlib.suppress(OSError):  # the library is there all the same
        cache.prune()
    return path, origin


def cached_or_installed(pair: Pair, library: Path) -> Origin:
    """Says where a library that is there comes from: the cache may have a copy of pip's."""
    is_pips = library == pair.prebuilt or provenance.is_copy(library, pair.prebuilt)
    return "installed" if is_pips else "cached"


def _is_whole(pair: Pair, path: Path, discard: bool = False) -> bool:
    """Says whether the cache holds a whole library; with ``discard``, removes a damaged one and
    says so. Only the holder of the lock may: it could be another process's new one by now.
    """
    try:
        if provenance.read(path) is not None or pair.kind is not Kind.NATIVE:
            cache.check(path)
            return True
        problem = f"{path}: expected a line that says what it was made from, got none"
    except FileNotFoundError:
        return False
    except DamagedError as error:
        problem = str(error)
    if discard:
        print(f"{pair.key}: {problem}: damaged, built again", file=sys.stderr, flush=True)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return False


def _publish_installed(pair: Pair, archs: tuple[str, ...], path: Path) -> bool:
    """Publishes the library that pip built, if it is what a build for ``path`` would make.

    A copy: pip may replace the file under processes that have it open.
    """
    try:
        library = pair.prebuilt.read_bytes()
        made_from = provenance.parse(library, pair.prebuilt)
    except (OSError, DamagedError):
        return False
    fits = (
        made_from is not None
        and Name.of(pair, archs, made_from.source_hash).library == path
        and commands.recipe(pair, made_from.archs) == made_from.recipe
        and (not commands.uses_cuda(pair) or toolchain.serves(made_from.archs, archs))
    )
    if fits:
        cache.write(path, library, 0o755)
    return fits


#: What ninja reads in a path as more than a letter, of which torch escapes none.
_SIGNS = "$|:\n"


def _check_for_ninja(pair: Pair, folder: Path, what: str) -> None:
    if sign := next((letter for letter in str(folder) if letter in _SIGNS), ""):
        raise BuildError(
            f"{pair.key}: {what} {folder}: expected a folder without {sign!r} in its path, which "
            "ninja takes for more than a letter; name it otherwise"
        )


def _compile(
    pair: Pair, archs: tuple[str, ...], text: Text, work: Path, verbose: bool, debug: bool
) -> Text:
    """Compiles and links what changed since ``text`` was compiled here last.

    Publishes the library if the files still say ``text`` afterwards.

    Returns:
        What they say afterwards.
    """
    from torch.utils import cpp_extension

    if problem := missing.cxx_problem():
        raise BuildError(f"{pair.key}: {problem}")
    if pair.kind is not Kind.NATIVE and (fault := guest_text.fault_of(pair)):
        raise BuildError(f"{pair.key}: {fault}")
    _check_for_ninja(pair, pair.root, "root")
    _check_for_ninja(pair, work, "cache")
    path = library_path(pair, archs, text, debug)
    marker = cache.usable(work) / cache.MARKER
    marker.touch()
    _drop_stale_objects(pair, text, work)
    with_cuda = any(source.endswith(".cu") for source in commands.sources(pair))
    if with_cuda:
        toolchain.use_cuda_home()
    stubs = wrappers.stub_libraries()
    device_code = with_cuda and pair.options.relocatable_device_code
    # load() would take an earlier failure of the same text for a finished build.
    name = path.stem
    cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(name, None)
    try:
        (work / "lock").unlink(missing_ok=True)  # load()'s own lock file; ours covers it
        with wrappers.compiler_environment(), threads.running_compilers(work):
            linked = cpp_extension.load(
                name=name,
                sources=commands.sources(pair),
                extra_cflags=commands.cxx_flags(pair, archs, debug=debug),
                extra_cuda_cflags=[*commands.nvcc_flags(pair, archs, debug), "-Xptxas", "-v"],
                extra_ldflags=[
                    "-shared",
                    *(wrappers.device_link(work, archs) if device_code else []),
                    *commands.link_flags(pair),
                    *([f"-L{shlex.quote(str(stubs))}"] if stubs is not None else []),
                    *(["-ltorch_python"] if pair.kind is Kind.PYBIND else []),
                ],
                extra_include_paths=[
                    str(d) for d in (*pair.include_dirs, *commands.system_dirs(pair))
                ],
                build_directory=str(work),
                # Else torch prints to stdout, and does not say what went wrong.
                verbose=False,
                with_cuda=with_cuda,
                is_python_module=False,
                is_standalone=True,
            )
    except RuntimeError as error:
        marker.unlink(missing_ok=True)
        _forget_objects(pair, text, work)
        reason = logs.explain_failure(pair, str(error))
        with contextlib.suppress(OSError):  # a disk may be full: that is the reason then
            cache.write(path.with_suffix(".failed.txt"), reason)
        raise BuildError(f"{pair.key}: {origins.shown(reason)}") from None
    finally:
        if verbose and (work / "build.ninja").exists():
            with contextlib.suppress(OSError):  # no ninja: that is the reason then
                ninja = subprocess.run(
                    ["ninja", "-t", "commands"], cwd=work, capture_output=True, text=True
                )
                print(ninja.stdout, end="", file=sys.stderr)
    after = pair.read()
    if after.hash == text.hash:  # else it is unknown which text was compiled
        if (log := work / "nvcc.log").exists():
            shutil.copyfile(log, path.with_suffix(".nvcc.log"))
        provenance.write(Path(linked), provenance.of(pair, archs, text, debug))
        cache.write(path, Path(linked).read_bytes(), 0o755)
        _remember_objects(text, work)
    Path(linked).unlink(missing_ok=True)
    marker.unlink(missing_ok=True)
    return after


def last_failure(pair: Pair, text: Text) -> str:
    """Returns why this text of the pair did not build here; empty where it did."""
    notes = cache.newest_first(pair, text, ".failed.txt")
    try:
        return origins.shown(notes[0].read_text()) if notes else ""
    except OSError:
        return ""


def _built(pair: Pair, path: Path, start: float, origin: Origin, archs: tuple[str, ...]) -> Built:
    try:
        log = path.with_suffix(".nvcc.log").read_text(encoding="utf-8", errors="replace")
        log = origins.shown(log)
    except OSError:
        log = ""
    seconds = monotonic() - start
    debug = cache.is_debug(path)
    warned = logs.warnings(log, debug)
    return Built(pair, path, seconds, origin, archs, logs.resources(log), warned, debug)


def _drop_stale_objects(pair: Pair, text: Text, work: Path) -> None:
    """Removes objects whose inputs changed: ninja goes by mtime, and knows a kernel's headers
    only where torch has CUDA.
    """
    known = cache.read_json(work / "objects.json")
    for source in pair.sources:
        if known.get(source.name) != text.hash_of(source):
            (work / commands.object_of(source)).unlink(missing_ok=True)


def _forget_objects(pair: Pair, text: Text, work: Path) -> None:
    """Keeps, of a build that failed, what is known of the objects that it need not compile."""
    known = cache.read_json(work / "objects.json")
    (work / "objects.json").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a file is gone, or a disk full: they are compiled again
        if pair.read().hash == text.hash:  # else it is unknown which text was compiled
            kept = {name: of for name, of in _inputs(text).items() if known.get(name) == of}
            (work / "objects.json").write_text(json.dumps(kept))


def _remember_objects(text: Text, work: Path) -> None:
    (work / "objects.json").write_text(json.dumps(_inputs(text)))


def _inputs(text: Text) -> dict[str, str]:
    """Returns what each object is compiled from."""
    return {source.name: text.hash_of(source) for source in text.closures}


@contextlib.contextmanager
def _locked(path: Path, stem: str) -> Iterator[bool]:
    """Holds an operating-system lock, which dies with its holder; says whether it had to wait."""
    lock, waited = FileLock(path), False
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{stem}: another process is building it; waiting", file=sys.stderr, flush=True)
        waited = True
        while not lock.is_locked:
            if threads.stopped():
                raise KeyboardInterrupt from None
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=0.5)
    try:
        yield waited
    finally:
        lock.release()
