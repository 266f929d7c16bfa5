"""Finds operators in folders. The files are the registry: there is no other list.

Standard library only, so that ``setup.py`` can use it before torch is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path

from cuda_ops.errors import DiscoveryError
from cuda_ops.names import FUNCTIONS, HOME, fault_of_namespace, keyed

PACKAGE = Path(__file__).resolve().parent.parent
#: The operators that cuda_ops ships: inside the package in a wheel, beside it in a checkout.
BUILTIN_ROOT = PACKAGE / "src" if (PACKAGE / "src").is_dir() else PACKAGE.parent / "src"
#: The headers that bindings and kernels include.
INCLUDE_DIR = BUILTIN_ROOT / "utils"

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NATIVE = re.compile(r"\bCUDA_OPS\s*\(\s*(?:(\w+)\s*,)?")
#: The namespace that a guest registers its operators in.
_REGISTERS = re.compile(r"\b(?:STABLE_)?TORCH_LIBRARY(?:_FRAGMENT|_EXPAND)?\s*\(\s*(\w+)")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


class Kind(Enum):
    """How the files of a pair register their operators."""

    #: ``CUDA_OPS(library)``: through the manifest, reloadable in place.
    NATIVE = "native"
    #: ``PYBIND11_MODULE``: a guest, imported as a Python module.
    PYBIND = "pybind11"
    #: ``TORCH_LIBRARY`` or ``STABLE_TORCH_LIBRARY``: a guest that registers itself when opened.
    TORCH_LIBRARY = "TORCH_LIBRARY"


@dataclass(frozen=True, order=True)
class Pair:
    """The one or two files of an operator."""

    stem: str
    root: Path
    binding: Path | None
    kernel: Path | None
    #: The namespace of its root's operators.
    namespace: str = HOME

    @property
    def key(self) -> str:
        """How strings name it: ``silu``, or ``my_ops::silu``; see :func:`cuda_ops.names.keyed`."""
        return keyed(self.namespace, self.stem)

    @property
    def sources(self) -> tuple[Path, ...]:
        """Binding first: an edit of the kernel leaves its object alone."""
        return tuple(path for path in (self.binding, self.kernel) if path is not None)

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        """The root's own ``utils`` folder, then the one of cuda_ops."""
        own = self.root / "utils"
        dirs = (own, INCLUDE_DIR) if own.is_dir() and own != INCLUDE_DIR else (INCLUDE_DIR,)
        return dirs

    @cached_property
    def _codes(self) -> tuple[str, ...]:
        return tuple(map(_code, self.sources))

    @cached_property
    def _kinds(self) -> frozenset[Kind]:
        return frozenset(kind for code in self._codes if (kind := _kind_of(code)))

    @property
    def kind(self) -> Kind:
        """How the pair registers itself. Its files are read once."""
        if Kind.NATIVE in self._kinds or not self._kinds:
            return Kind.NATIVE
        return Kind.PYBIND if Kind.PYBIND in self._kinds else Kind.TORCH_LIBRARY

    def defines(self, namespace: str, name: str) -> bool:
        """Says whether ``torch.ops.<namespace>.<name>`` is an operator of this pair, by its name."""
        belongs = namespace == self.namespace and f"{name}_".startswith(f"{self.stem}_")
        return belongs and self.kind is Kind.NATIVE

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
            if not any(b"TORCH_LIBRARY" in path.read_bytes() for path in self.sources):
                return frozenset()  # most pairs, which need no closer look
            if self.kind is Kind.NATIVE:
                return frozenset()
            named = {match[1] for code in self._codes for match in _REGISTERS.finditer(code)}
        except OSError:  # a file is gone: it defines nothing
            return frozenset()
        return frozenset(self.stem if one == "TORCH_EXTENSION_NAME" else one for one in named)

    @property
    def problem(self) -> str:
        """Why the files form no operator; empty where they do."""
        if not self._kinds:
            return (
                f"{self.sources[0]}: registers nothing; add CUDA_OPS(library) {{ ... }} "
                "(see docs/binding.md), PYBIND11_MODULE or TORCH_LIBRARY"
            )
        if self.kind is not Kind.NATIVE and self.plugin.is_file():
            return (
                f"{self.plugin}: expected a pair with CUDA_OPS(library) for this plugin, got one "
                f"with {self.kind.value}, whose plugins are never called; remove the file"
            )
        declared = {space for code in self._codes if (space := _namespace_in(code))}
        for namespace in sorted(declared - {self.namespace}):
            others = (path for space, path in _namespaces_in(self.root) if space == self.namespace)
            first = next(others, "the operators of cuda_ops")
            return (
                f"{self.sources[0]}: expected {macro_of(self.namespace)}, as in {first}, got "
                f"{macro_of(namespace)}: a root has one namespace"
            )
        if declared and self.namespace != HOME and (fault := fault_of_namespace(self.namespace)):
            return f"{self.sources[0]}: {fault}; choose another in {macro_of(self.namespace)}"
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
        return tuple(_closure(self.sources, self.include_dirs, {}))

    def read(self, texts: dict[Path, bytes] | None = None) -> Text:
        """Reads the pair's files, each once, as they are now.

        Args:
            texts: files that were read already; those read now are added. Pairs that are read
                together share their headers.

        Raises:
            OSError: a file went away meanwhile.
        """
        texts = {} if texts is None else texts
        closures = {
            source: tuple(_closure((source,), self.include_dirs, texts)) for source in self.sources
        }
        files = dict.fromkeys(file for closure in closures.values() for file in closure)
        return Text(closures, {file: _digest(file.name, texts[file]) for file in files})

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
    Problems are a root that does not exist or holds neither folder, a ``.cu``
    that nothing binds, a name that is not a Python identifier or is taken, an
    operator in two roots, where the first counts, and a plugin without an
    operator. Names tell all of that: no file is read but a ``.cu`` without a
    ``.cpp``, and the first files of a root other than that of cuda_ops, which
    say its namespace. Whether a pair registers anything, :attr:`Pair.problem` says.
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
                    f"{pair.sources[0]}: operator {pair.key!r} is already defined by "
                    f"{first.sources[0]}; rename one of them, or give its root a namespace of its "
                    "own, CUDA_OPS(my_ops, library)"
                )
                problems.append(Problem(text, pair.key))
    return dict(sorted(pairs.items())), sorted(problems)


def plugin_folder(root: Path) -> Path:
    """Returns where the plugins of a root's operators lie."""
    return (PACKAGE if root == BUILTIN_ROOT else root) / "ops"


def root_problem(root: Path) -> str:
    """Returns why a folder is no operator root; empty where it is one."""
    if not root.is_dir():
        return f"{root}: operator root does not exist; create it or drop it from the roots"
    if not (root / "kernels").is_dir() and not (root / "bindings").is_dir():
        return f"{root}: operator root has neither kernels/ nor bindings/; create them"
    return ""


def _pairs_in(root: Path, problems: list[Problem]) -> Iterator[Pair]:
    if text := root_problem(root):
        problems.append(Problem(text, str(root)))
        return
    kernels, bindings = root / "kernels", root / "bindings"
    namespace = HOME if root == BUILTIN_ROOT.resolve() else namespace_of(root) or HOME
    # Editors keep hidden files here.
    cu = {path.stem: path for path in sorted(kernels.glob("[!.]*.cu"))}
    cpp = {path.stem: path for path in sorted(bindings.glob("[!.]*.cpp"))}
    for stem in sorted(cu.keys() | cpp.keys()):
        pair = Pair(stem, root, cpp.get(stem), cu.get(stem), namespace)
        if text := illegal_name(stem):
            text = f"{pair.sources[0]}: {text}"
        elif pair.binding is None and _kind_of(_code(cu[stem])) is None:
            text = (
                f"{cu[stem]}: nothing binds this kernel; write {bindings / (stem + '.cpp')} or "
                "register it in the file itself (PYBIND11_MODULE or TORCH_LIBRARY)"
            )
        if text:
            problems.append(Problem(text, pair.key))
        else:
            yield pair
    for plugin in sorted(plugin_folder(root).glob("[!_.]*.py")):
        if plugin.stem not in cu.keys() | cpp.keys():
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
            if namespace := _namespace_in(_code(path)):
                yield namespace, path


def illegal_name(stem: str, remedy: str = "rename the file") -> str:
    """Returns why ``stem`` cannot name an operator, and the remedy; empty where it can."""
    fault = _fault_of_name(stem)
    return f"{fault}; {remedy}" if fault else ""


def _fault_of_name(stem: str) -> str:
    name = f"operator name {stem!r}"
    if not stem.isidentifier() or keyword.iskeyword(stem):
        return f"{name} is not a Python identifier"
    if not stem.isascii():  # nvcc takes no others
        return f"{name} has letters beyond ASCII"
    if len(stem) > 100:  # file names may have 255, and those of libraries say more
        return f"{name}: expected at most 100 letters, got {len(stem)}"
    if stem.startswith("_"):
        return f"{name} starts with an underscore"
    if stem in ("new", "clean"):
        return f"{name} is a command of compile_dev.py"
    if (PACKAGE / f"{stem}.py").exists() or (PACKAGE / stem).is_dir():
        return f"{name} is taken by the module cuda_ops.{stem}"
    if stem in FUNCTIONS:
        return f"{name} is taken by the function cuda_ops.{stem}"
    if stem == "name":
        return f"{name} is taken by torch.ops.cuda_ops.name"
    return ""


def _code(path: Path) -> str:
    return _COMMENT.sub("", path.read_text(encoding="utf-8", errors="replace"))


def namespace_in(text: str) -> str:
    """Returns the namespace that ``CUDA_OPS`` names in a file's text; empty if there is none."""
    return _namespace_in(_COMMENT.sub("", text))


def _namespace_in(code: str) -> str:
    found = _NATIVE.search(code)
    return (found[1] or HOME) if found else ""


def macro_of(namespace: str) -> str:
    """Returns how a binding begins its list of operators."""
    return f"CUDA_OPS({'' if namespace == HOME else f'{namespace}, '}library)"


def _kind_of(code: str) -> Kind | None:
    if _NATIVE.search(code):
        return Kind.NATIVE
    if re.search(r"\bPYBIND11_MODULE\s*\(", code):
        return Kind.PYBIND
    if re.search(r"\b(STABLE_)?TORCH_LIBRARY(_FRAGMENT|_IMPL|_EXPAND)?\s*\(", code):
        return Kind.TORCH_LIBRARY
    return None


def _closure(
    sources: Iterable[Path], include_dirs: Iterable[Path], texts: dict[Path, bytes]
) -> Iterator[Path]:
    """Yields the sources, then the headers reached by ``#include "..."``; reads each once."""
    dirs = tuple(include_dirs)
    seen: set[Path] = set()
    todo = list(sources)
    while todo:
        path = todo.pop(0)
        if path in seen:
            continue
        seen.add(path)
        yield path
        if path not in texts:
            texts[path] = path.read_bytes()
        for name in _INCLUDE.findall(texts[path].decode(errors="replace")):
            found = next((d / name for d in (path.parent, *dirs) if (d / name).is_file()), None)
            if found is not None:
                todo.append(found.resolve())
