"""What torch's builder needs around it: variables, a script around nvcc and stand-in libraries."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from cuda_ops.build import cache, toolchain
from cuda_ops.errors import BuildError


def stub_libraries() -> Path | None:
    """Makes empty stand-ins for the CUDA libraries that torch names on every link line and that are
    not here: with a torch for CPUs its own, and with NVIDIA's wheels the shared CUDA runtime, which
    they have under no name that the linker looks for. Returns their folder, if any is needed.

    Native libraries need none of them; ``--as-needed`` then leaves them out of the result,
    with the real ones and with these. The static runtime serves a guest.
    """
    home = toolchain.cuda_home()
    names: tuple[str, ...] = ("c10_cuda", "torch_cuda", "cudart")
    if torch.version.cuda:
        names = () if home is None or toolchain.has_shared_runtime(home) else ("cudart",)
    # Two folders: a stand-in must not hide what a torch with CUDA has.
    folder = cache.folder("stubs_cuda" if torch.version.cuda else "stubs")
    for name in names:
        script = folder / f"lib{name}.so"
        try:
            cache.check(script)
        except (FileNotFoundError, BuildError):  # none, or one that another user may write
            cache.write(script, "/* GNU ld script: nothing */\n")
    return folder if names else None


class _Environment:
    """Sets what torch's helpers read from the environment, while builds run and only then.

    Builds run side by side in threads: the first to come sets it, the last to go restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._builds = 0
        self._ours: list[str] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._builds == 0:
                # Native libraries share no C++ types with torch; asking the compiler costs 0.1 s.
                wanted = {"TORCH_DONT_CHECK_COMPILER_ABI": "1"}
                if (home := toolchain.cuda_home()) is not None:
                    # ninja's command line takes it as it is.
                    wanted["PYTORCH_NVCC"] = shlex.quote(str(_nvcc_script(home)))
                self._ours = [name for name in wanted if name not in os.environ]
                os.environ.update({name: wanted[name] for name in self._ours})
            self._builds += 1  # last: on a full disk the script cannot be written
        try:
            yield
        finally:
            with self._lock:
                self._builds -= 1
                if self._builds == 0:
                    for name in self._ours:
                        os.environ.pop(name, None)


compiler_environment = _Environment()


def _nvcc_script(home: Path) -> Path:
    """Wraps nvcc in a script that keeps its output: torch drops that of a successful build."""
    script = cache.folder() / toolchain.NVCC_SCRIPT
    text = (
        "#!/bin/sh\n# The build's folder is the current one.\n"
        f'{shlex.quote(f"{home}/bin/nvcc")} "$@" >nvcc.log 2>&1\nstatus=$?\n'
        "if [ $status != 0 ]; then cat nvcc.log; fi\nexit $status\n"
    )
    if not script.exists() or script.read_text() != text:
        cache.write(script, text, 0o755)
    cache.check(script)
    return script


def device_link(work: Path, archs: Sequence[str]) -> list[str]:
    """Returns the flags that link device code across the ``.cu`` files of a build: torch's builder
    has no step for it, so the line that links runs a script first and takes what it names.
    """
    home = toolchain.cuda_home()
    flags = shlex.join(["-dlink", "-Xcompiler", "-fPIC", *toolchain.gencode_flags(tuple(archs))])
    script = work / "link-device-code"
    cache.write(
        script,
        "#!/bin/sh\n# The build's folder is the current one.\n"
        f"{shlex.quote(f'{home}/bin/nvcc')} {flags} *.cuda.o -o device_code.o >&2 || exit 1\n"
        "echo device_code.o\n",
        0o755,
    )
    # ninja makes one $ of two; a name that is not there ends the link where the script failed.
    return ["$$(./link-device-code || echo device-code-does-not-link)"]
