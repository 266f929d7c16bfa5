"""Finds operators in folders. The files are the registry: there is no other list.

Standard library only, so that ``setup.py`` can use it before torch is there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cuda_ops.build import options
from cuda_ops.build.options import Options
from cuda_ops.build.source_files import Files
from cuda_ops.build.source_text import (
    Kind,
    closure,
    code_of,
    kind_of,
    kinds_of,
    macro_of,
    may_register,
    module_in,
    namespace_in,
    registers_in,
    text_of,
)
from cuda_ops.errors import BuildError, DiscoveryError
from cuda_ops.names import FUNCTIONS, HOME, fault_of_namespace, keyed

PACKAGE = Path(__file__).resolve().parent.parent
#: The operators that cuda_ops ships: inside the package in a wheel, beside it in a checkout.
BUILTIN_ROOT = PACKAGE / "src" if (PACKAGE / "src").is_dir() else PACKAGE.parent / "src"
#: The headers that bindings and kernels include.
INCLUDE_DIR = BUILTIN_ROOT / "utils"


@dataclass(frozen=True, order=True)
class Pair:
    """The one or two files of an operator, or more of a guest."""

    stem: str
    root: Path
    binding: Path | None
    kernel: Path | None
    #: The namespace of its root's operators.
    namespace: str = HOME
    #: Further files of a guest that its names lead to.
    others: tuple[Path, ...] = ()

    @property
    def key(self) -> str:
        """How strings name it: ``silu``, or ``my_ops::silu``; see :func:`cuda_ops.names.keyed`."""
        return keyed(self.namespace, self.stem)

    @property
    def sources(self) -> tuple[Path, ...]:
        """Binding first: an edit of the kernel leaves its object alone. What the pair's own text
        asks for comes last.
        """
        return tuple(dict.fromkeys((*self.own_sources, *self._asked.sources)))

    @property
    def own_sources(self) -> tuple[Path, ...]:
        """The files that names lead to: all, but for those that the pair asks for."""
        return (*(path for path in (self.binding, self.kernel) if path is not None), *self.others)

    @property
    def options(self) -> Options:
        """What the pair's text and its root's file ask of the build, as they are now.

        Raises:
            BuildError: see :func:`cuda_ops.build.options.read`.
        """
        state = tuple(map(_state, (*self.own_sources, self.root / options.FILE)))
        found = self._options.get(state)
        if found is None:  # asked for many times a build, and the files say the same
            texts = ((path, text_of(path)) for path in self.own_sources if path.exists())
            found = options.read(self.stem, self.root, texts)
            self._options.clear()
            self._options[state] = found
        return found

    @cached_property
    def _options(self) -> dict[tuple[object, ...], Options]:
        """What was read last, by the state of the files."""
        return {}

    @property
    def _asked(self) -> Options:
        """The same, or nothing where it cannot be meant: a build says so, and whatever only looks
        at the files goes on.
        """
        try:
            return self.options
        except BuildError:
            return Options()

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        """Folders with headers of the project: the root's own ``utils``, what the pair asks for
        under the root, and for a guest where its authors keep them; then the one of cuda_ops.
        """
        asked = (path for path in self._asked.include_dirs if path.is_relative_to(self.root))
        own = self.root / "utils"
        dirs = [*([own] if own.is_dir() else []), *asked]
        if self.kind is not Kind.NATIVE:
            places = (
                self.root / "kernels",
                self.root / "bindings",
                self.root / "include",
                self.root,
            )
            dirs += [place for place in places if place.is_dir()]
        return tuple(dict.fromkeys((*dirs, INCLUDE_DIR)))

    @property
    def system_dirs(self) -> tuple[Path, ...]:
        """Folders with headers of packages: they change with their version alone."""
        return tuple(
            path for path in self._asked.include_dirs if not path.is_relative_to(self.root)
        )

    @cached_property
    def _codes(self) -> tuple[str, ...]:
        return tuple(map(code_of, self.own_sources))

    @cached_property
    def _kinds(self) -> frozenset[Kind]:
        return frozenset(kind for code in self._codes for kind in kinds_of(code))

    @property
    def kind(self) -> Kind:
        """How the pair registers itself. Its files are read once."""
        if Kind.NATIVE in self._kinds or not self._kinds:
            return Kind.NATIVE
        return Kind.PYBIND if Kind.PYBIND in self._kinds else Kind.TORCH_LIBRARY

    @property
    def is_declared(self) -> bool:
        """Whether something says what its operators are: a binding, or the plugin of a guest."""
        return self.kind is Kind.NATIVE or self.plugin.is_file()

    @property
    def code(self) -> str:
        """What the pair's files say, without comments."""
        return "\n".join(self._codes)

    @property
    def registers_when_opened(self) -> bool:
        """Whether torch keeps what a guest's library registers for the life of the process."""
        return self.kind is not Kind.NATIVE and Kind.TORCH_LIBRARY in self._kinds

    @property
    def module(self) -> str:
        """The name of a pybind11 guest's module, which its library is asked for."""
        return next(filter(None, map(module_in, self._codes)), self.stem)

    def defines(self, namespace: str, name: str) -> bool:
        """Says whether ``torch.ops.<namespace>.<name>`` is one of this pair, by its name."""
        belongs = namespace == self.namespace and f"{name}_".startswith(f"{self.stem}_")
        return belongs and self.is_declared

    def registers(self, namespace: str, name: str) -> bool:
        """Says whether this guest's text is one that may define ``torch.ops.<namespace>.<name>``:
        it registers operators there, and has the word.
        """
        if namespace not in self._registers:
            return False
        return any(re.search(rf"\b{re.escape(name)}\b", code) for code in self._codes)

    @cached_property
    def _registers(self) -> frozenset[str]:
        """The namespaces that a guest registers operators in."""
        try:
            if not any(map(may_register, self.own_sources)):
                return frozenset()  # most pairs, which need no closer look
            if self.kind is Kind.NATIVE:
                return frozenset()
            named = {one for code in self._codes for one in registers_in(code)}
        except OSError:  # a file is gone: it defines nothing
            return frozenset()
        return frozenset(self.stem if one == "TORCH_EXTENSION_NAME" else one for one in named)

    @property
    def problem(self) -> str:
        """Why the files form no operator; empty where they do."""
        if not self._kinds:
            return (
                f"{self.own_sources[0]}: registers nothing; add CUDA_OPS(library) {{ ... }} "
                "(see docs/binding.md), PYBIND11_MODULE or TORCH_LIBRARY"
            )
        declared = {space for code in self._codes if (space := namespace_in(code))}
        for namespace in sorted(declared - {self.namespace}):
            others = (path for space, path in _namespaces_in(self.root) if space == self.namespace)
            first = next(others, "the operators of cuda_ops")
            return (
                f"{self.own_sources[0]}: expected {macro_of(self.namespace)}, as in {first}, got "
                f"{macro_of(namespace)}: a root has one namespace"
            )
        if declared and self.namespace != HOME and (fault := fault_of_namespace(self.namespace)):
            return f"{self.own_sources[0]}: {fault}; choose another in {macro_of(self.namespace)}"
        return ""

    @property
    def plugin(self) -> Path:
        """Where the pair's plugin lies, if it has one."""
        return plugin_folder(self.root) / f"{self.stem}.py"

    @property
    def prebuilt(self) -> Path:
        """Where ``pip install`` puts the operator's library."""
        return self.root / "lib" / f"{self.stem}.abi3.so"

    def files(self) -> tuple[Path, ...]:
        """Returns the sources and every project header they include, in a fixed order."""
        return tuple(closure(self.sources, self.include_dirs, {}))

    def read(self, texts: dict[Path, bytes] | None = None) -> Text:
        """Reads the pair's files, each once, as they are now.

        Args:
            texts: files that were read already; those read now are added. Pairs that are read
                together share their headers.

        Raises:
            OSError: a file went away meanwhile.
        """
        texts = {} if texts is None else texts
        dirs = self.include_dirs
        closures = {source: tuple(closure((source,), dirs, texts)) for source in self.sources}
        files = dict.fromkeys(file for closure in closures.values() for file in closure)
        digests = {file: _digest(file.name, texts[file]) for file in files}
        if asked := options.text_for(self.stem, self.root):
            digests[self.root / options.FILE] = _digest(options.FILE, asked.encode())
        return Text(closures, digests)

    def source_hash(self) -> str:
        """Returns the hex digest of the contents of :meth:`files`; equal text, equal digest."""
        return self.read().hash


@dataclass(frozen=True)
class Text:
    """What a pair's files said at one moment, as digests."""

    #: Per source: itself and the project headers that it includes.
    closures: Mapping[Path, tuple[Path, ...]]
    digests: Mapping[Path, bytes]

    @cached_property
    def hash(self) -> str:
        """Hex digest of names and contents of all files; equal text, equal digest."""
        return _combined(self.digests.values())

    def hash_of(self, source: Path) -> str:
        """Returns the hex digest of one source and the headers that it includes."""
        return _combined(self.digests[file] for file in self.closures[source])


def _state(path: Path) -> tuple[int, ...] | None:
    """Returns what changes when a file is written or replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def content_hash(files: Iterable[Path]) -> str:
    """Returns the hex digest of names and contents."""
    return _combined(_digest(path.name, path.read_bytes()) for path in files)


def _digest(name: str, contents: bytes) -> bytes:
    return hashlib.sha256(f"{name}\0".encode() + contents).digest()


def _combined(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


@dataclass(frozen=True, order=True)
class Problem:
    """Files that form no operator, or a root that holds none."""

    text: str
    #: The name of the operator that it would have been, or the root.
    name: str


def discover(roots: Iterable[Path]) -> tuple[Pair, ...]:
    """Returns the operators under ``roots``, sorted by name, if nothing else is there.

    Raises:
        DiscoveryError: with one line per offender; :func:`survey` says which there are.
    """
    pairs, problems = survey(roots)
    problems = sorted([*problems, *unregistered(pairs)])
    if problems:
        lines = [problem.text for problem in problems]
        raise DiscoveryError("cannot list operators:\n  " + "\n  ".join(lines))
    return tuple(pairs.values())


def unregistered(pairs: Mapping[str, Pair]) -> list[Problem]:
    """Returns the pairs whose files register nothing, or whose plugin is never called. Reads
    every one of them.
    """
    return [Problem(pair.problem, stem) for stem, pair in pairs.items() if pair.problem]


def survey(
    roots: Iterable[Path], installed: Iterable[Path] = ()
) -> tuple[dict[str, Pair], list[Problem]]:
    """Lists the operators under ``roots`` by key, and the files that form none.

    Args:
        roots: the folders; of two pairs with one key the first counts, and the other is a problem.
        installed: those of installed packages. A pair that one of ``roots`` has too, but for the
            first of them, is left aside.

    A root is a folder with ``kernels/*.cu`` and ``bindings/*.cpp``. A ``.cpp``
    alone is an operator composed in C++; a ``.cu`` alone must register itself.
    A guest may have more files: those that its ``build.toml`` lists, or whose
    names begin with its own.
    Problems are a root that does not exist or holds neither folder, a ``.cu``
    that nothing binds, a name that is not a Python identifier or is taken, an
    operator in two roots, where the first counts, and a plugin without an
    operator. Names tell all of that: no file is read but a ``.cu`` without a
    ``.cpp``, one whose name begins with another's, and the first files of a root
    other than that of cuda_ops, which say its namespace. Whether a pair registers
    anything, :attr:`Pair.problem` says.
    """
    problems: list[Problem] = []
    pairs: dict[str, Pair] = {}
    explicit = tuple(dict.fromkeys(Path(root).resolve() for root in roots))
    others = dict.fromkeys(Path(root).resolve() for root in installed)
    for root in dict.fromkeys((*explicit, *others)):
        for pair in _pairs_in(root, problems):
            first = pairs.setdefault(pair.key, pair)
            beside = root not in explicit and first.root in explicit[1:]
            if first is not pair and not beside:
                text = (
                    f"{pair.own_sources[0]}: operator {pair.key!r} is already defined by "
                    f"{first.own_sources[0]}; rename one of them, or give its root a namespace of "
                    "its own, CUDA_OPS(my_ops, library)"
                )
                problems.append(Problem(text, pair.key))
    return dict(sorted(pairs.items())), sorted(problems)


def plugin_folder(root: Path) -> Path:
    """Returns where the plugins of a root's operators lie."""
    return (PACKAGE if root == BUILTIN_ROOT else root) / "ops"


def root_problem(root: Path) -> str:
    """Returns why a folder is no operator root; empty where it is one."""
    if root.is_file():
        return f"{root}: expected a folder with kernels/ and bindings/, got a file"
    if not root.is_dir():
        return f"{root}: operator root does not exist; create it or drop it from the roots"
    if not (root / "kernels").is_dir() and not (root / "bindings").is_dir():
        return f"{root}: operator root has neither kernels/ nor bindings/; create them"
    return ""


def _pairs_in(root: Path, problems: list[Problem]) -> Iterator[Pair]:
    if text := root_problem(root):
        problems.append(Problem(text, str(root)))
        return
    bindings = root / "bindings"
    namespace = HOME if root == BUILTIN_ROOT.resolve() else namespace_of(root) or HOME
    files = Files(root)
    try:
        named = files.named_by(options.pairs_in_file(root))
    except BuildError as error:
        problems.append(Problem(str(error), str(root)))
        named = {}
    for stem, (binding, kernel, others) in sorted({**files.by_name(), **named}.items()):
        pair = Pair(stem, root, binding, kernel, namespace, others)
        if text := illegal_name(stem):
            text = f"{pair.own_sources[0]}: {text}"
        elif kernel is not None and binding is None and kind_of(code_of(kernel)) is None:
            text = (
                f"{kernel}: nothing binds this kernel; write {bindings / (stem + '.cpp')} or "
                "register it in the file itself (PYBIND11_MODULE or TORCH_LIBRARY)"
            )
        if text:
            problems.append(Problem(text, pair.key))
        else:
            yield pair
    stems = files.stems | named.keys()
    for plugin in sorted(plugin_folder(root).glob("[!_.]*.py")):
        if plugin.stem not in stems:
            text = (
                f"{plugin}: no operator {plugin.stem!r} for this plugin; name it as the pair that "
                "it belongs to, or what others import with an underscore in front"
            )
            problems.append(Problem(text, keyed(namespace, plugin.stem)))


def namespace_of(root: Path) -> str:
    """Returns the namespace that the first ``CUDA_OPS`` of a root names; empty if there is none."""
    return next(_namespaces_in(root), ("", root))[0]


def _namespaces_in(root: Path) -> Iterator[tuple[str, Path]]:
    for path in (*sorted(root.glob("bindings/[!.]*.cpp")), *sorted(root.glob("kernels/[!.]*.cu"))):
        with contextlib.suppress(OSError):  # an editor is replacing the file
            if namespace := namespace_in(code_of(path)):
                yield namespace, path


def illegal_name(stem: str, remedy: str = "rename the file") -> str:
    """Returns why ``stem`` cannot name an operator, and the remedy; empty where it can."""
    fault = _fault_of_name(stem)
    return f"{fault}; {remedy}" if fault else ""


def _fault_of_name(stem: str) -> str:
    name = f"operator name {stem!r}"
    if keyword.iskeyword(stem):
        return f"{name} is a keyword of Python"
    if not stem.isidentifier():
        return f"{name} is not a Python identifier"
    if not stem.isascii():  # nvcc takes no others
        return f"{name} has letters beyond ASCII"
    if len(stem) > 100:  # file names may have 255, and those of libraries say more
        return f"{name}: expected at most 100 letters, got {len(stem)}"
    if stem.startswith("_"):
        return f"{name} starts with an underscore"
    if stem in ("new", "adopt", "clean"):
        return f"{name} is a command of compile_dev.py"
    if (PACKAGE / f"{stem}.py").exists() or (PACKAGE / stem).is_dir():
        return f"{name} is taken by the module cuda_ops.{stem}"
    if stem in FUNCTIONS:
        return f"{name} is taken by the function cuda_ops.{stem}"
    if stem == "name":
        return f"{name} is taken by torch.ops.cuda_ops.name"
    return ""


def add_root_option(parser: argparse.ArgumentParser, kind: Callable[[str], Any] = str) -> None:
    """Adds ``--root DIR`` to a command; its values are a list of ``kind``."""
    parser.add_argument(
        "--root", metavar="DIR", type=kind, action="append", default=[],
        help="a folder with kernels/ and bindings/ outside this project; repeatable",
    )  # fmt: skip
