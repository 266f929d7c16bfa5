"""What there is to say of plugins and operators, told line by line in a process of its own."""

from __future__ import annotations

import importlib.metadata
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda_ops import hookspecs
from cuda_ops.build import cache, compiling, debug, provenance
from cuda_ops.build.cache import Name
from cuda_ops.build.discovery import BUILTIN_ROOT, Pair, Text, survey, unregistered
from cuda_ops.build.elf import TORCH_CPP, undefined_symbols
from cuda_ops.build.provenance import DamagedError, Provenance
from cuda_ops.build.source_text import Kind
from cuda_ops.dev import project
from cuda_ops.doctor.facts import Operator, Plugin, Unusable
from cuda_ops.errors import BuildError, CudaOpsError, DiscoveryError
from cuda_ops.namespaces import hidden_by
from cuda_ops.registry import registry
from cuda_ops.runtime.launch.machine_code import kernels_in
from cuda_ops.testing.stable_symbols import is_stable, oldest

Tell = Callable[[dict[str, Any]], None]
#: A library is compared with its checksum, however large it is.
_ALL = 1 << 62


def look(tell: Tell, request: dict[str, Any]) -> None:
    """Tells of plugins, then of operators, then opens their libraries.

    Args:
        tell: writes a line.
        request: ``names`` of operators, or none for all; ``roots`` to add; ``skip``, the keys of
            those that are not opened.
    """
    broken = _plugins(tell)
    if not broken:
        for root in request["roots"]:
            registry().add_root(Path(root))
    pairs = survey([BUILTIN_ROOT, *map(Path, request["roots"])])[0] if broken else _usable(tell)
    try:
        names = request["names"] if broken else [*map(registry().key_in_command, request["names"])]
    except DiscoveryError as error:  # several namespaces have an operator of this name
        tell({"refused": str(error)})
        return
    if unknown := [name for name in names if name not in pairs]:
        tell({"unknown": unknown, "known": [*pairs]})
        return
    chosen = {key: pair for key, pair in pairs.items() if not names or key in names}
    try:
        debugged = debug.asked(pairs)
    except BuildError as error:
        debugged = set()
        tell({"failed": ["CUDA_OPS_DEBUG", str(error)]})
    looked = {key: _looked_at(pair, key in debugged) for key, pair in chosen.items()}
    for operator in looked.values():
        tell({"operator": asdict(operator)})
    if broken:
        return
    for key, operator in looked.items():
        if operator.library and key not in request["skip"]:
            tell({"opening": key})
            tell({"opened": key, "problem": _load(key)})
    for key, pair in chosen.items():
        if hidden := hidden_by(pair.namespace, pair.stem):
            tell({"hidden": key, "by": hidden})
    for name, problem in registry().plugins.problems.items():
        tell({"plugin": name, "problem": problem})


# --- plugins -----------------------------------------------------------------------


def _plugins(tell: Tell) -> bool:
    """Imports the installed plugins one by one; says whether one takes all operators with it."""
    found = [*importlib.metadata.entry_points(group=hookspecs.PROJECT)]
    for one in found:
        package = one.dist.name if one.dist is not None else ""
        if one.dist is not None and one.dist.read_text("INSTALLER") == project.INSTALLER:
            package = ""  # pip has none, and must not bring a stranger's
        tell({"plugins": asdict(Plugin(one.name, one.value, package))})
    for one in found:
        tell({"importing": one.name})
        try:
            one.load()
        except BaseException as error:  # as Plugins.load_installed, which is asked next
            tell({"imported": one.name, "raised": f"{type(error).__name__}: {error}"})
        else:
            tell({"imported": one.name})
    try:
        registry()
    except CudaOpsError as error:
        named = [one.name for one in found if one.value in str(error)]
        tell({"plugin": (named or ["unknown"])[0], "problem": str(error)})
        return True
    return False


# --- operators, without opening anything -------------------------------------------


def _usable(tell: Tell) -> dict[str, Pair]:
    """Returns the pairs that form operators, and tells of all else."""
    pairs = registry().pairs()
    for problem in [*registry().problems, *unregistered(pairs)]:
        # Two pairs of one key, or a name that something else has.
        hidden = "is already defined by" in problem.text or " is taken by " in problem.text
        tell({"unusable": asdict(Unusable(problem.name, problem.text, hidden))})
    for installed, used in registry().left_aside():
        tell({"left_aside": f"{used.key}: {used.root} is used, not {installed.root}"})
    return {key: pair for key, pair in pairs.items() if not pair.problem}


def _looked_at(pair: Pair, debugged: bool) -> Operator:
    known: dict[str, Any] = {
        "key": pair.key,
        "kind": pair.kind.value,
        "root": str(pair.root),
        "builtin": pair.root == BUILTIN_ROOT.resolve(),
        "has_kernel": any(source.suffix == ".cu" for source in pair.sources),
    }
    try:
        text = pair.read()
        known["ignored"] = tuple(_damaged(pair, text, debugged))
        library = _found(pair, text, debugged)
    except (OSError, BuildError) as error:
        return Operator(**known, problem=str(error))
    if library is None:
        last = compiling.last_failure(pair, text)
        return Operator(**known, problem=last, other_torches=_other_torches(pair, text))
    known["library"] = str(library)
    known["origin"] = compiling.cached_or_installed(pair, library)
    try:
        made_from = provenance.read(library)
        known["archs"] = _archs(library, made_from)
        known["is_current"] = made_from and made_from.source_hash == text.hash
        known |= _symbols(pair, library)
    except (OSError, BuildError, struct.error, ValueError, IndexError) as error:
        known["problem"] = f"{library}: cannot be read as an ELF library: {error}"
    return Operator(**known)


def _found(pair: Pair, text: Text, debugged: bool) -> Path | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # _damaged says it, and the cache's own probe
        try:
            return compiling.find_library(pair, text, debugged)
        except DamagedError:
            return None


def _damaged(pair: Pair, text: Text, debugged: bool) -> Iterator[str]:
    """Yields what is wrong with each file that a call would look at."""
    for path in (*cache.newest_first(pair, text, ".so", debugged), pair.prebuilt):
        try:
            provenance.read(path, hashed=_ALL)
        except FileNotFoundError:
            continue
        except (DamagedError, OSError) as error:
            yield str(error)


def _archs(library: Path, made_from: Provenance | None) -> tuple[str, ...] | None:
    """Returns what a library says that it was built for; else what its machine code is for."""
    if made_from is not None:
        return made_from.archs
    try:
        found = sorted({kernel.capability for kernel in kernels_in(library)})
    except RuntimeError:  # compressed
        return None
    return tuple(f"{major}.{minor}" for major, minor in found)


def _symbols(pair: Pair, library: Path) -> dict[str, tuple[str, ...]]:
    if pair.kind is not Kind.NATIVE:
        return {}  # it is built for one torch, whose C++ it may use
    needed = undefined_symbols(library.read_bytes())
    names = [name for name, weak in needed if not weak]
    return {
        "later_symbols": tuple(n for n in names if is_stable(n) and n not in oldest()),
        "cpp_symbols": tuple(n for n in names if TORCH_CPP.match(n)),
    }


def _other_torches(pair: Pair, text: Text) -> tuple[str, ...]:
    """Returns the torches that the cache has a guest's library of this text for."""
    if pair.kind is Kind.NATIVE:
        return ()
    found = (cache.cache_dir() / "lib").glob(f"{pair.stem}-{text.hash}-torch*.so")
    names = filter(None, (Name.parse(path.name) for path in found))
    return tuple(sorted({name.abi.strip("_") for name in names if name.abi}))


# --- operators, opened -------------------------------------------------------------


def _load(key: str) -> str:
    """Opens the library of a pair, and its plugin, as a first use does. No operator runs."""
    if registry().library_of(key) is not None:  # another one calls it
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that its sources changed is known
        try:
            registry().load(key)
        except CudaOpsError as error:
            return str(error)
        except BaseException as error:  # a guest's code, or a plugin's
            return f"{type(error).__name__}: {error}"
    return ""
