"""Builds operator libraries in ``setup.py``: ours, and that of any package that has operators.

    from setuptools import setup
    from cuda_ops.packaging import operators

    setup(**operators("my_package.src", "my_package/src"))

Every operator becomes one library, ``<root>/lib/<op>.abi3.so``, with the flags of
:mod:`cuda_ops.build.commands`. It is not a Python module: the registry opens it. It
says what it was made from, so that the dev loop builds only what is edited. Beside them
lies ``lib<package>.so``, which registers all of them where there is no Python.
"""

from __future__ import annotations

import copy
import os
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import setuptools
import torch
from setuptools.command import bdist_wheel as setuptools_wheel
from setuptools.command import editable_wheel as setuptools_editable
from setuptools.errors import CompileError
from torch.utils import cpp_extension

from cuda_ops import servers
from cuda_ops.build import (
    commands,
    cpp_autograd,
    manylinux,
    missing,
    provenance,
    threads,
    toolchain,
)
from cuda_ops.build.discovery import BUILTIN_ROOT, PACKAGE, Pair, Text, discover
from cuda_ops.build.options import FILE
from cuda_ops.build.source_text import Kind
from cuda_ops.errors import BuildError

#: Folders that a package carries beside the libraries, so that operators can be rebuilt from it.
FOLDERS = ("kernels", "bindings", "utils", "ops", "include")
#: Libraries that a torch without CUDA does not have.
_TORCH_CUDA = ("c10_cuda", "torch_cuda", "cudart")


def operators(package: str, root: str | Path) -> dict[str, Any]:
    """Returns arguments for :func:`setuptools.setup` that build and ship the operators of a root.

    Args:
        package: the package that the root becomes, ``"my_package.src"``.
        root: the folder with ``kernels/`` and ``bindings/``, relative to ``setup.py``.

    Raises:
        DiscoveryError: see :func:`cuda_ops.build.discovery.discover`.

    Example::

        setup(name="my_package", **operators("my_package.src", "my_package/src"))
    """
    root = Path(root)
    top = package.partition(".")[0]
    modules = setuptools.find_namespace_packages(include=[top, f"{top}.*"])
    built = extensions(package, root)
    data = [f"{package}.{folder}" for folder in _folders(root.resolve(), built)]
    arguments: dict[str, Any] = {
        "packages": sorted({*modules, package, *data} - {f"{package}.lib"}),
        "package_dir": {package: root.as_posix()},
        "package_data": {
            **{name: ["**/*"] for name in data},
            "": ["py.typed", "templates/*", "stable_symbols.txt", "coverage.c", "*.cpp", FILE],
        },
        "ext_modules": built,
        "cmdclass": {
            "build_ext": build_ext,
            "bdist_wheel": bdist_wheel,
            "editable_wheel": editable_wheel,
        },
    }
    if all(ext.py_limited_api for ext in built):
        arguments["options"] = {"bdist_wheel": {"py_limited_api": "cp310"}}
    return arguments


def _folders(root: Path, built: Iterable[Any]) -> list[str]:
    """Returns the folders of a root that a package carries: the usual ones, and those that its
    pairs ask for.
    """
    asked = [
        path.relative_to(root).parts[0]
        for ext in built
        for path in (*ext.pair.sources, *ext.pair.options.include_dirs)
        if path.is_relative_to(root) and path != root
    ]
    return [name for name in dict.fromkeys((*FOLDERS, *asked)) if (root / name).is_dir()]


def extensions(package: str, root: str | Path) -> list[setuptools.Extension]:
    """Returns one extension ``<package>.lib.<op>`` per operator; :class:`build_ext` adds flags."""
    pairs = discover([Path(root)])
    if any(pair.kernel for pair in pairs) and toolchain.cuda_home() is None:
        print(
            "cuda_ops: no CUDA toolkit found (set CUDA_HOME, or run "
            f"{toolchain.INSTALL_NVCC}); building the CPU kernels alone"
        )
    return [_extension(package, pair) for pair in pairs if commands.sources(pair)]


def _extension(package: str, pair: Pair) -> setuptools.Extension:
    cuda = commands.uses_cuda(pair)
    if cuda:
        toolchain.use_cuda_home()
    make: Any = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    native = pair.kind is Kind.NATIVE
    ext: setuptools.Extension = make(
        f"{package}.lib.{pair.stem}",
        [os.path.relpath(source) for source in commands.sources(pair)],
        include_dirs=[str(path) for path in (*pair.include_dirs, *commands.system_dirs(pair))],
        depends=[os.path.relpath(path) for path in pair.files()],
        extra_link_args=commands.link_flags(pair),
        # The file is named abi3 either way; see build_ext.get_ext_filename.
        py_limited_api=native,
        # A guest that does not compile here must not take the others down.
        optional=not native,
    )
    if native:
        # The C shim of the stable ABI is in libtorch_cpu; CUDA comes from the static runtime.
        ext.libraries = ["torch_cpu"]
    elif cuda and (absent := _missing_libraries()):
        static = ["cudart_static", "rt", "pthread", "dl"]
        ext.libraries = [name for name in ext.libraries if name not in absent] + static
    ext.pair = pair
    return ext


def _missing_libraries() -> tuple[str, ...]:
    """Lists the libraries that torch names on the link line of a guest and that are not here."""
    if torch.version.cuda is None:
        return _TORCH_CUDA
    home = toolchain.cuda_home()
    return () if home is None or toolchain.has_shared_runtime(home) else ("cudart",)


def release_archs() -> tuple[str, ...]:
    """Returns a wheel's archs: ``TORCH_CUDA_ARCH_LIST``, or every GPU that a release supports."""
    listed = toolchain.parse_archs(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    return listed or toolchain.RELEASE_ARCHS


def editable_archs() -> tuple[str, ...]:
    """Returns an editable install's archs: ``TORCH_CUDA_ARCH_LIST``, or this machine's GPUs.

    The default arch is always included, so that a checkout built without a GPU runs on one later.
    """
    listed = toolchain.parse_archs(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if listed:
        return listed
    return tuple(dict.fromkeys((toolchain.DEFAULT_ARCH, *toolchain.gpu_archs())))


# setuptools has no types.
class bdist_wheel(setuptools_wheel.bdist_wheel):  # type: ignore[misc]  # noqa: N801 - distutils' name
    """setuptools' command for wheels, whose wheel says which systems it runs on."""

    def run(self) -> None:
        super().run()
        made = getattr(self.distribution, "dist_files", [])
        for place, (command, python, wheel) in enumerate(made):
            if command == "bdist_wheel":
                made[place] = command, python, str(manylinux.retag(Path(wheel)))


# distutils' name, and setuptools gives its commands no types.
class editable_wheel(setuptools_editable.editable_wheel):  # type: ignore[misc]  # noqa: N801
    """setuptools' command for ``pip install -e``, which puts the folder of ``setup.py`` on the
    import path.

    The finder that setuptools would write for packages in several places is asked too late: in the
    folder that holds a clone, the clone's own folder, which has the package's name, is imported.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.package_dir = {"": "."}  # libraries are loaded by their paths, not imported


class build_ext(cpp_extension.BuildExtension):  # noqa: N801 - distutils' name
    """torch's build command, with one folder per operator and several operators at a time."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # Not the frontend's temporary folder: a second install compiles only what changed.
        # Editable and release builds differ in archs and would evict each other.
        self.build_temp = f"build/{'editable' if self.inplace else 'release'}"
        self.parallel = toolchain.operators_at_once() if self.use_ninja else None

    def run(self) -> None:
        if self.extensions and (problem := missing.cxx_problem()):
            raise CompileError(f"cuda_ops: {problem}")  # before ninja fails with a traceback
        archs = editable_archs() if self.inplace else release_archs()
        for ext in self.extensions:
            text = ext.pair.read()
            ext.made_from = provenance.of(ext.pair, archs, text)
            ext.extra_compile_args = _compile_flags(ext.pair, archs, text)
            if not self.inplace:
                _leave_out_paths(ext.extra_compile_args)
                _make_small(ext)
                # Where a wheel is installed, torch has loaded NVIDIA's libraries by then.
                ext.extra_link_args = [
                    flag for flag in ext.extra_link_args if not flag.startswith("-Wl,-rpath,")
                ]
        if all(ext.pair.kind is Kind.NATIVE for ext in self.extensions):
            # Native kernels bring their own CUDA runtime, whatever torch was built with.
            cpp_extension._check_cuda_version = lambda *_: None
        super().run()
        self._build_library()
        if self.inplace and any(ext.pair.root == BUILTIN_ROOT for ext in self.extensions):
            self._build_autograd()

    def _build_library(self) -> None:
        """Builds the library that registers what was built, for programs without Python."""
        found = {ext.pair: Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions}
        if not found:
            return
        package = self.extensions[0].name.partition(".")[0]
        path = next(iter(found.values())).with_name(servers.name_of(package))
        for pair, problem in servers.write(found, path).items():
            print(f"cuda_ops: {path.name} is without {pair.key!r}: {problem}")

    def _build_autograd(self) -> None:
        """Builds what fits this torch alone, so no wheel has it; operators do without it."""
        try:
            cpp_autograd.build(BUILTIN_ROOT / "lib")
        except BuildError as error:
            print(f"{cpp_autograd.SLOWER}: {error}")

    def _build_extensions_parallel(self) -> None:
        with threads.builders(self.parallel or 1) as submit:
            for future in [submit(self.build_extension, ext) for ext in self.extensions]:
                threads.result(future)

    def build_extension(self, ext: Any) -> None:
        # Commands are not made for threads: each gets a copy with a build folder of its own.
        worker = copy.copy(self)
        worker.build_temp = f"{self.build_temp}/{ext.pair.stem}"
        # ninja decides what is up to date: its commands contain the text's hash, not its age.
        worker.force = True
        try:
            with threads.running_compilers(Path(worker.build_temp).absolute()):
                super(build_ext, worker).build_extension(ext)
            worker._write_provenance(ext)
        except Exception as error:
            if not ext.optional:
                raise
            ext.pair.prebuilt.unlink(missing_ok=True)  # of an earlier, working version
            print(
                f"cuda_ops: {ext.pair.stem!r} ({ext.pair.kind.value}) does not compile here and is "
                f"left out; its error is shown again when it is used: {_first_line(error)}"
            )

    def _write_provenance(self, ext: Any) -> None:
        if ext.pair.kind is not Kind.NATIVE:
            return  # made for one torch
        if ext.pair.source_hash() == ext.made_from.source_hash:
            provenance.write(Path(self.get_ext_fullpath(ext.name)), ext.made_from)
        else:  # saved meanwhile: it is unknown which text was compiled
            shutil.rmtree(self.build_temp)

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            ext.pair.prebuilt.parent.mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def get_ext_filename(self, fullname: str) -> str:
        """Returns ``<package>/lib/<op>.abi3.so``, where :attr:`Pair.prebuilt` looks for it."""
        return fullname.replace(".", "/") + ".abi3.so"


def _compile_flags(pair: Pair, archs: tuple[str, ...], text: Text) -> dict[str, list[str]]:
    # ninja sees changes that a command does not show as a changed definition: compilers and, for
    # nvcc, headers, whose dependencies a torch without CUDA does not write.
    recipe = f"-DCUDA_OPS_RECIPE={commands.recipe(pair, archs)}"
    flags = {"cxx": [*commands.cxx_flags(pair, archs, text.hash), recipe]}
    if commands.uses_cuda(pair):
        kernels = [text.hash_of(source) for source in pair.sources if source.suffix == ".cu"]
        contents = f"-DCUDA_OPS_KERNEL_HASH={'_'.join(kernels)}"
        flags["nvcc"] = [*commands.nvcc_flags(pair, archs), contents, recipe]
        if pair.options.relocatable_device_code:
            flags["nvcc_dlink"] = ["-dlink", *toolchain.gencode_flags(archs)]
    # The flags are quoted for a shell; here they must be plain, since torch quotes them itself.
    return {tool: shlex.split(" ".join(listed)) for tool, listed in flags.items()}


def _leave_out_paths(flags: dict[str, list[str]]) -> None:
    """Keeps the folders of this machine out of a wheel's error texts and debug information."""
    python = sysconfig.get_path("include")
    folders = [Path.cwd(), PACKAGE.parent, Path(torch.__file__).parent.parent, Path(python)]
    if (home := toolchain.cuda_home()) is not None:
        folders.append(home)
    maps = [f"-ffile-prefix-map={folder}/=" for folder in folders]
    flags["cxx"] += ["-g0", *maps]  # Python's own flags ask for -g
    if "nvcc" in flags:
        # The line numbers for profilers hold the names of files, which nvcc cannot map.
        flags["nvcc"] = [flag for flag in flags["nvcc"] if flag != "-lineinfo"]
        # Nor can it map what this returns, which the assert() of newer C libraries stores.
        flags["nvcc"].append("-D__builtin_FILE()=__FILE__")
        for one in maps:  # nvcc splits at commas, and a shell reads the rest
            flags["nvcc"] += ["-Xcompiler", shlex.quote(one).replace(",", "\\,")]


def _make_small(ext: Any) -> None:
    """Has a wheel's library stored without the names of what it does not export, and its device
    code packed as tightly as drivers can read it: those that run code of CUDA 13 do.
    """
    ext.extra_link_args.append("-Wl,--strip-all")
    if "nvcc" in ext.extra_compile_args and int(toolchain.cuda_version().partition(".")[0]) >= 13:
        ext.extra_compile_args["nvcc"].append("--compress-mode=size")


def _first_line(error: Exception) -> str:
    cause = error.__cause__
    if isinstance(cause, subprocess.CalledProcessError) and cause.output:
        text = cause.output.decode(errors="replace")
        found = [line for line in text.splitlines() if "error" in line]
        if found:
            return str(found[0])
    return str(error).partition("\n")[0]
