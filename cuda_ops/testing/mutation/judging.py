"""Judges one mutant: compiles it, compares objects, runs the checks and then the tests."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from cuda_ops.build import commands
from cuda_ops.build.discovery import Pair, Text
from cuda_ops.testing.mutation import processes
from cuda_ops.testing.mutation.objects import Recipe, same
from cuda_ops.testing.mutation.place import Place
from cuda_ops.testing.mutation.plan import Mutant, files_of
from cuda_ops.testing.mutation.reach import Reach
from cuda_ops.testing.mutation.result import Result, Verdict
from cuda_ops.testing.mutation.settings import Settings
from cuda_ops.testing.mutation.trials import Trials, Unchanged

#: Seconds for a compiler.
_COMPILE = 900.0
#: A mutant that so many operators let survive is judged by no other.
_ENOUGH = 2
_NEEDS_GPU = "only a GPU runs it"
#: Which verdict of several operators counts.
_FIRST: tuple[Verdict, ...] = ("killed", "invalid", "survived", "not judged", "equivalent")


class Judging:
    """Judges mutants of some pairs; several threads may, each in its place."""

    def __init__(
        self, pairs: Mapping[str, Pair], settings: Settings, folder: Path, stop: threading.Event,
        note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._pairs, self._settings, self._folder, self._stop = pairs, settings, folder, stop
        self._trials = Trials(settings, stop, note)
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._unchanged: dict[str, Unchanged] = {}
        self._texts: dict[str, Text] = {}
        self._reach: dict[str, Reach] = {}

    def result(self, mutant: Mutant, place: Place) -> Result:
        """Judges a mutant by its operators, until one finds it.

        Raises:
            StoppedError: the run ends.
        """
        found: list[tuple[Verdict, str, str]] = []
        for key in mutant.ops:
            found.append(self._judged(mutant, key, place))
            survived = sum(verdict == "survived" for verdict, *_ in found)
            if found[-1][0] in ("killed", "invalid") or survived == _ENOUGH:
                break
        verdict, by, detail = min(found, key=lambda one: _FIRST.index(one[0]))
        return Result(**mutant.as_json(), verdict=verdict, by=by, detail=detail)

    def _judged(self, mutant: Mutant, key: str, place: Place) -> tuple[Verdict, str, str]:
        """Returns the verdict, what found the mutant, and what that said."""
        recipe = Recipe(place.pair(self._pairs[key]), self._settings.archs)
        if reason := recipe.why_not:
            return "not judged", "", f"{key}: {reason}"
        changed = self._sources(mutant, key)
        if changed == []:
            return "not judged", "", "no CUDA toolkit here"
        here = self._runs_here(mutant, key, changed)
        tests = [
            words
            for pattern, words in self._settings.tests
            if fnmatch.fnmatchcase(mutant.file, pattern)
        ]
        if not here and not tests:
            return "not judged", "", _NEEDS_GPU
        left_out = False
        if changed and not tests and "cuda" not in self._settings.devices:
            # The slowest part of a build, for code that nothing here can run.
            left_out = any(source.suffix == ".cu" for source in changed)
            changed = [source for source in changed if source.suffix != ".cu"]
        unchanged = self._of(key, recipe, place)
        if unchanged.problem:
            return "not judged", "", f"{key}: {unchanged.problem}"
        library, devices = self._home(key) / "unchanged.so", self._settings.devices
        if changed is not None:
            library = place.folder / "mutant.so"
            verdict, detail, differing = self._compiled(mutant, key, recipe, changed, place)
            if {*differing} <= {s for s in changed if s.suffix == ".cu"}:
                devices = tuple(device for device in devices if device == "cuda")
                here = "cuda" in devices
            if verdict == "equivalent" and left_out:
                return "not judged", "", _NEEDS_GPU
            if verdict is not None:
                return verdict, "", detail
        if here:
            with place.planted(mutant) if changed is None else contextlib.nullcontext():
                by, detail = self._trials.checked(key, library, place, unchanged, devices)
            if by:
                return "killed", by, detail
        broken = ""
        for words in tests:
            failed, said = self._trials.tested(mutant, self._pairs[key], words, library, place)
            if failed:
                return "killed", "tests", said
            broken = broken or said
        return "survived" if here or not broken else "not judged", "", broken

    # --- what a mutant changes -----------------------------------------------------

    def _text(self, key: str) -> Text:
        with self._lock:
            if key not in self._texts:
                self._texts[key] = self._pairs[key].read()
            return self._texts[key]

    def _sources(self, mutant: Mutant, key: str) -> list[Path] | None:
        """Returns the sources that a mutant changes, of those compiled here; ``None``: a plugin."""
        pair = self._pairs[key]
        path = pair.root / mutant.file
        if path.suffix == ".py":
            return None
        here = {*map(Path, commands.sources(pair))}
        closures = self._text(key).closures
        return [source for source in pair.sources if source in here and path in closures[source]]

    def _runs_here(self, mutant: Mutant, key: str, changed: list[Path] | None) -> bool:
        """Says whether the checks can run what a mutant changes."""
        if "cuda" in self._settings.devices or changed is None:
            return True
        if all(source.suffix == ".cu" for source in changed):
            return False
        with self._lock:
            if key not in self._reach:
                pair, texts = self._pairs[key], {}
                for path in files_of(pair, {}):
                    if path.suffix not in (".py", ".cu", ".cuh"):
                        texts[str(path.relative_to(pair.root))] = path.read_text(encoding="utf-8")
                self._reach[key] = Reach(texts)
        return not self._reach[key].needs_gpu(mutant.file, mutant.fault.start)

    # --- compiling -----------------------------------------------------------------

    def _home(self, key: str) -> Path:
        """Returns the folder of an unchanged operator, named by all that it depends on."""
        pair, settings = self._pairs[key], self._settings
        plugin = pair.plugin.read_text(encoding="utf-8") if pair.plugin.is_file() else ""
        parts = [self._text(key).hash, commands.recipe(pair, settings.archs), plugin,
                 *settings.devices, *settings.checks, settings.profile]  # fmt: skip
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        return self._folder / f"{pair.stem}-{digest}"

    def _of(self, key: str, recipe: Recipe, place: Place) -> Unchanged:
        """Builds and checks an operator without a fault, once."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._unchanged:
                note = self._home(key) / "unchanged.json"
                if note.is_file():
                    kept = json.loads(note.read_text())
                    self._unchanged[key] = Unchanged(**{**kept, "failing": (*kept["failing"],)})
                else:
                    self._unchanged[key] = self._built(key, recipe, place)
                    note.write_text(json.dumps(asdict(self._unchanged[key])))
            return self._unchanged[key]

    def _built(self, key: str, recipe: Recipe, place: Place) -> Unchanged:
        home = self._home(key)
        home.mkdir(parents=True, exist_ok=True)
        objects = []
        for source in recipe.sources():
            objects.append(home / commands.object_of(source))
            if error := self._error(recipe.compile(source, objects[-1]), place):
                return Unchanged(f"does not compile without a fault: {error}")
        library = home / "unchanged.so"
        if error := self._error(recipe.link(objects, library), place):
            return Unchanged(f"does not link without a fault: {error}")
        return self._trials.unchanged(key, library, place)

    def _compiled(
        self, mutant: Mutant, key: str, recipe: Recipe, changed: list[Path], place: Place
    ) -> tuple[Verdict | None, str, list[Path]]:
        """Makes the library of a mutant; returns the verdict, if that says enough, an error, and
        the sources whose objects differ.
        """
        home = self._home(key)
        objects: dict[str, Path] = {}
        differing = []
        with place.planted(mutant):
            for source in changed:
                moved = place.root / source.relative_to(self._pairs[key].root)
                name = commands.object_of(source)
                objects[name] = place.folder / name
                if error := self._error(recipe.compile(moved, objects[name]), place):
                    return "invalid", error, []
                if not same(objects[name], home / name):
                    differing.append(source)
        if not differing:
            return "equivalent", "", []
        names = [*map(commands.object_of, recipe.sources())]
        linked = [objects.get(name, home / name) for name in names]
        if error := self._error(recipe.link(linked, place.folder / "mutant.so"), place):
            return "invalid", error, []
        return None, "", differing

    def _error(self, command: list[str], place: Place) -> str:
        """Runs a compiler in a place; returns its first error, if any."""
        status = processes.run(command, place.root, place.said, self._stop, timeout=_COMPILE)
        if status == 0:
            return ""
        lines = place.said.read_text(errors="replace").splitlines()
        errors = (line for line in lines if re.search(r"\berror\b|undefined", line))
        late = f"no end after {_COMPILE:.0f} s"
        return next(errors, late if status is None else f"status {status}")[:300]
