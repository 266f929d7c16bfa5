"""A copy of the sources in which faults are planted, so that the user's own are never touched."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_ops.build import cache
from cuda_ops.build.discovery import BUILTIN_ROOT, PACKAGE, Pair
from cuda_ops.errors import CudaOpsError
from cuda_ops.testing.mutation.plan import Mutant
from cuda_ops.testing.worker import environment as worker_environment

#: What a copy needs none of.
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.so", "*.o", "node_modules")
_MARKS = ("pyproject.toml", "setup.py", "setup.cfg")


@dataclass(frozen=True)
class Project:
    """What is copied: a root alone, or with all around it that its tests or its package need."""

    root: Path
    folder: Path
    #: Names in the folder; all if there are none.
    only: tuple[str, ...] = ()

    @classmethod
    def of(cls, root: Path, with_tests: bool) -> Project:
        """Returns what to copy for a root.

        Raises:
            CudaOpsError: the operators of an installed cuda_ops, which has no checkout around it.
        """
        if root == BUILTIN_ROOT.resolve():
            if root.parent != PACKAGE.parent:
                raise CudaOpsError(
                    "faults are planted in the operators of cuda_ops in a checkout of it, and this "
                    "one is installed; name another root with --root"
                )
            return cls(root, root.parent, () if with_tests else (PACKAGE.name, root.name))
        if with_tests:
            above = (folder for folder in (root, *root.parents) if _is_project(folder))
            return cls(root, next(above, root))
        return cls(root, root)

    def copy(self, to: Path) -> None:
        """Copies the project; libraries are reached by a link, since none is written."""
        for name in self.only or ("",):
            shutil.copytree(self.folder / name, to / name, ignore=_LEFT_OUT, dirs_exist_ok=True,
                            ignore_dangling_symlinks=True)  # fmt: skip
        libraries, link = self.root / "lib", to / self.root.relative_to(self.folder) / "lib"
        if libraries.is_dir():
            shutil.rmtree(link, ignore_errors=True)
            link.symlink_to(libraries)


def _is_project(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in _MARKS)


@dataclass(frozen=True)
class Place:
    """One copy, which one mutant at a time uses."""

    project: Project
    folder: Path
    #: What ``CUDA_VISIBLE_DEVICES`` is there; ``None`` leaves it alone.
    gpu: str | None
    #: Threads of each process.
    threads: int

    @property
    def copied(self) -> Path:
        return self.folder / "copy"

    @property
    def said(self) -> Path:
        """The output of the program that ran there last."""
        return self.folder / "said"

    @property
    def root(self) -> Path:
        return self.copied / self.project.root.relative_to(self.project.folder)

    def made(self) -> Place:
        """Makes the copy, if it is not there."""
        if not self.copied.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.project.copy(self.copied)
        return self

    def pair(self, pair: Pair) -> Pair:
        """Returns a pair of the project as it lies in the copy."""

        def moved(path: Path | None) -> Path | None:
            return None if path is None else self.root / path.relative_to(pair.root)

        others = tuple(self.root / path.relative_to(pair.root) for path in pair.others)
        binding, kernel = moved(pair.binding), moved(pair.kernel)
        return replace(pair, root=self.root, binding=binding, kernel=kernel, others=others)

    @property
    def roots(self) -> list[str]:
        """The root that its processes must be told of: shipped operators are found anyway."""
        return [] if self.project.root == BUILTIN_ROOT.resolve() else [str(self.root)]

    def file(self, mutant: Mutant) -> Path:
        """Returns the file of a mutant in the copy."""
        path = self.root / mutant.file
        return path if path.is_file() else self.copied / mutant.file

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Lets the copy have the fault in this block."""
        path = self.file(mutant)
        text = path.read_text(encoding="utf-8")
        path.write_text(mutant.fault.planted(text), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")

    def environment(self, libraries: Path | None = None) -> dict[str, str]:
        """Returns the variables of its processes, with ``libraries`` in place of the cache."""
        found = worker_environment()
        if self.project.folder != self.project.root:  # it has packages beside the root
            found["PYTHONPATH"] = os.pathsep.join((str(self.copied), found["PYTHONPATH"]))
        found.setdefault("OMP_NUM_THREADS", str(self.threads))
        found.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        # What a faulty operator was compiled into must not serve the right one later.
        found["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")
        if self.gpu is not None:
            found["CUDA_VISIBLE_DEVICES"] = self.gpu
        if libraries is not None:
            found["CUDA_OPS_CACHE"] = str(libraries)
        return found

    def cache_with(self, library: Path, name: str) -> Path:
        """Returns a cache that holds a library under a name beside all that are built."""
        folder = self.folder / "cache"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "lib").mkdir(mode=0o700, parents=True)
        folder.chmod(0o700)
        for built in (cache.cache_dir() / "lib").glob("*.so"):
            with contextlib.suppress(OSError):  # another process gives it up
                _linked(built, folder / "lib" / built.name)
        _linked(library, folder / "lib" / name)
        return folder


def _linked(file: Path, link: Path) -> None:
    try:
        link.hardlink_to(file)
    except OSError:  # on another disk
        shutil.copy2(file, link)
