"""``python -m cuda_ops export DIR``: operators in the layout of Hugging Face's ``kernels`` library.

``kernels.get_kernel`` takes a folder of builds from their hub, or ``get_local_kernel`` from a disk,
and imports the one that fits the machine. A build made here needs torch alone: the library that
registers operators without Python (:mod:`cuda_ops.servers`) comes with it, and so do the rules for
shapes, gradients and batches, as far as schema and signature line give them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_ops import output, servers
from cuda_ops.build import cache, toolchain
from cuda_ops.build.discovery import Pair, add_root_option
from cuda_ops.dev import export_texts as texts
from cuda_ops.dev import library
from cuda_ops.dispatch.library import open_library
from cuda_ops.errors import BuildError, CudaOpsError
from cuda_ops.registry import registry
from cuda_ops.spec import OpSpec

#: How ``kernels`` calls builds for the stable ABI from torch 2.10 on.
_FRAMEWORK = "torch-stable-abi210"
#: The oldest ``kernels`` that this was tried with; others may not know such builds.
_MINVER = "0.17.0"
_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")


@dataclass(frozen=True)
class _Built:
    """The operators of an export, and what is left out of it."""

    libraries: dict[Pair, Path]
    ops: list[OpSpec]
    archs: tuple[str, ...]
    left_out: dict[str, dict[str, str]]


@output.command
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        for root in arguments.root:
            registry().add_root(Path(root))
        keys = library.chosen(arguments.ops, arguments.root)
        archs = toolchain.parse_archs(arguments.arch) if arguments.arch else None
        name = arguments.name or arguments.directory.resolve().name.lower().replace("_", "-")
        made = build(keys, archs)
        for path in write(
            made, arguments.directory, name, arguments.license, arguments.kernel_version
        ):
            print(f"wrote {path}")
        for op, missing in made.left_out.items():
            for answer, why in missing.items():
                print(f"{op}: without {answer}: {why}")
    except (CudaOpsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = error.filename or arguments.directory
        print(f"error: {where}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def build(keys: Sequence[str], archs: tuple[str, ...] | None = None) -> _Built:
    """Builds pairs, and reads what they define.

    Raises:
        BuildError: one does not build, or cannot be exported: it calls others by name, two have one
            name, or they were built for different GPUs.
    """
    built = library.built(keys, archs)
    ops: dict[str, OpSpec] = {}
    lists: dict[str, str] = {}
    for pair, path in built.items():
        opened = open_library(path, pair.stem, pair.namespace)
        if opened.archs != "none":
            lists[opened.archs] = pair.key
        for op in opened.ops.values():
            if op.calls:
                raise BuildError(
                    f"{op.key}: expected an operator that calls no other, got one that calls "
                    f"{', '.join(op.calls)}: it looks for them by name, in a namespace that an "
                    "export does not have"
                )
            if op.name in ops:
                raise BuildError(f"{op.key}: expected one operator of this name, got several")
            ops[op.name] = op
        registry().load(pair.key, path)
    if len(lists) > 1:
        said = ", ".join(f"{key}: {archs}" for archs, key in lists.items())
        raise BuildError(f"expected one list of architectures for all, got {said}; give --arch")
    missing = {op.name: texts.left_out(op) for op in ops.values()}
    missing = {op: why for op, why in missing.items() if why}
    archs = tuple(next(iter(lists), "").split())
    return _Built(built, list(ops.values()), archs, missing)


def write(
    made: _Built, folder: Path, name: str, license_id: str = "unknown", version: int = 1
) -> list[Path]:
    """Writes a build for CPU and, where CUDA kernels were built, one for CUDA.

    Args:
        made: what :func:`build` returned.
        folder: where to; its folder ``build`` gets them, and ``README.md`` what they hold.
        name: the kernel's name for ``kernels``: ``my-ops``.
        license_id: the license of the operators, as SPDX names it.
        version: the number that callers ask for, ``get_kernel(..., version=1)``.

    Returns:
        The folders of the builds.

    Raises:
        ValueError: the name is not one that ``kernels`` takes.
        BuildError: the library that registers the operators does not compile.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"--name: expected lower-case letters, digits and '-', a letter first, got {name!r}"
        )
    backends = {"cpu": "cpu"}
    if made.archs:
        backends["cuda"] = f"cu{toolchain.cuda_version().replace('.', '')}"
    written = []
    for backend, shown in backends.items():
        variant = f"{_FRAMEWORK}-{shown}-{platform.machine()}-linux"
        path = folder / "build" / variant
        meant = {
            "name": name, "version": version, "kernels-minver": _MINVER, "license": license_id,
            "python-depends": [], "backend": _backend(backend, made.archs),
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{variant}-", dir=path.parent) as work:
            _write_build(made, Path(work) / variant, backend, meant)  # or the older one stays
            shutil.rmtree(path, ignore_errors=True)
            (Path(work) / variant).rename(path)
        written.append(path)
    readme = folder / "README.md"
    if not readme.exists():
        readme.write_text(_readme(made, name, license_id, version), encoding="utf-8")
    return written


def _backend(backend: str, archs: tuple[str, ...]) -> dict[str, Any]:
    return {"type": backend, **({"archs": list(archs)} if backend == "cuda" else {})}


def _write_build(made: _Built, path: Path, backend: str, meant: dict[str, Any]) -> None:
    """Writes one build; its namespace, a hash of all in it, is that of no other."""
    libraries = {pair: file.read_bytes() for pair, file in made.libraries.items()}
    package = meant["name"].replace("-", "_")
    functions = texts.functions_text(meant["name"], made.ops)
    own = {pair: f"ops/{pair.stem}.py" for pair in libraries}
    plugins = [path for pair, path in own.items() if path in texts.plugins_of([pair])]
    registered = texts.registered_text(made.ops, made.left_out, plugins)
    unnamed = json.dumps([meant, functions, registered, texts.rules_texts("", libraries)])
    digest = hashlib.sha256(unnamed.encode())
    for contents in libraries.values():
        digest.update(contents)
    namespace = f"_{package}_{backend}_{digest.hexdigest()[:12]}"
    (path / "lib").mkdir(parents=True)
    copies = {}
    for pair, contents in libraries.items():
        copies[pair] = path.resolve() / "lib" / pair.prebuilt.name
        cache.write(copies[pair], contents, 0o755)
    main_library = path.resolve() / "lib" / servers.name_of(package)
    if problems := servers.write(copies, main_library, namespace):
        lines = [f"{pair.key}: {problem}" for pair, problem in problems.items()]
        raise BuildError("\n".join([f"{main_library.name} is without", *lines]))
    rules = texts.rules_texts(namespace, libraries)
    metadata = json.dumps({"id": namespace, **meant}, indent=2) + "\n"
    texts.write_all(path, {
        "__init__.py": functions, "_ops.py": texts.ops_text(namespace, main_library.name),
        "_registered.py": registered, "metadata.json": metadata,
        **{f"_rules/{file}": text for file, text in rules.items()},
    })  # fmt: skip


def _readme(made: _Built, name: str, license_id: str, version: int) -> str:
    shown = [op for op in made.ops if texts.is_public(op)]
    lines = [
        "---", "library_name: kernels", f"license: {license_id.lower()}", "---",
        f"# {name}", "",
        *(f"- `{op.schema}`" for op in shown), "",
        "```python", "from kernels import get_kernel", "",
        f'kernel = get_kernel("<user>/{name}", version={version})',
        f"kernel.{shown[0].name}(...)", "```",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cuda_ops export",
        description="Write operators in the layout of Hugging Face's kernels library, so that "
        "kernels.get_kernel loads them where there is no cuda_ops.",
        epilog="In the folder of a package of your own, its operators are the default.",
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the folder to write, a repository of the hub"
    )
    parser.add_argument(
        "ops", nargs="*", metavar="OP", help="operators to write (default: all of the roots)"
    )
    parser.add_argument(
        "--name", default="", metavar="NAME",
        help="the kernel's name for kernels, such as my-ops (default: that of the folder)",
    )  # fmt: skip
    parser.add_argument(
        "--license", default="unknown", metavar="ID",
        help="of the operators, as SPDX names it, for the metadata (default: unknown)",
    )  # fmt: skip
    parser.add_argument(
        "--kernel-version", type=output.at_least(1), default=1, metavar="N",
        help="the number that callers ask for, get_kernel(..., version=N) (default: 1)",
    )  # fmt: skip
    add_root_option(parser)
    parser.add_argument("--arch", metavar="LIST", help="compute capabilities, such as '8.0;9.0a'")
    return parser
