"""Operators built for a fuzzer: their C++ says where it is, and AddressSanitizer watches it.

Kernels are left out, since calls run on a CPU. The libraries lie in a cache of their own, where no
other process finds them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.build import cache, toolchain
from cuda_ops.errors import BuildError
from cuda_ops.testing.subject import Origin

_SOURCE = Path(__file__).with_name("coverage.c")
_FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address -fsanitize-coverage=trace-pc,trace-cmp"
#: A leak is looked for by calls, and an operator is loaded more than once.
_ASAN = "detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1:handle_segv=0"


@dataclass(frozen=True)
class Instrumented:
    """What a process needs to call such operators."""

    #: The library of each pair.
    libraries: dict[str, str]
    #: The library with the counters.
    counters: str
    environment: dict[str, str]


def build(pairs: Sequence[str], origin: Origin) -> Instrumented:
    """Builds the pairs, and those that they call.

    Raises:
        BuildError: the C++ compiler is not gcc, or a pair does not compile.
    """
    folder = cache.folder("fuzz")
    compiler = toolchain.words_of("CXX") or ["c++"]
    runtime = [_runtime(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    counters = folder / "libcuda_ops_fuzz.so"
    # Renamed when it is whole, since another process may be running it.
    new = counters.with_suffix(f".{os.getpid()}")
    made = subprocess.run(
        [*compiler, "-x", "c", "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(new)],
        capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode:
        raise BuildError(f"{_SOURCE.name} does not compile:\n{made.stderr}")
    new.replace(counters)
    loading = {"LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": _ASAN}
    flags = {
        "CUDA_OPS_CACHE": str(folder),
        "CXXFLAGS": _FLAGS,
        "LDFLAGS": f"-L{folder} -l:{counters.name} -Wl,-rpath,{folder}",
    }
    command = [sys.executable, "-m", __name__, *origin.options, *pairs]
    done = subprocess.run(
        command, env={**os.environ, **loading, **flags}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise BuildError(f"operators do not build for the fuzzer: {done.stdout.strip()}")
    return Instrumented(json.loads(done.stdout.splitlines()[-1]), str(counters), loading)


def _runtime(compiler: Sequence[str], name: str) -> str:
    """Returns the path of one of the compiler's libraries, to be loaded before any other."""
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"no C++ compiler {compiler[0]!r}")
    asked = [*compiler, f"-print-file-name={name}"]
    path = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        raise BuildError(f"{compiler[0]} has no {name}; --instrument needs gcc and its libasan")
    return path


def _main(arguments: Sequence[str]) -> int:
    """Builds pairs in this process, under the flags of the environment."""
    import argparse

    from cuda_ops.build import compiling, threads
    from cuda_ops.registry import registry
    from cuda_ops.testing.worker import load_origin

    parser = argparse.ArgumentParser()
    parser.add_argument("--root", action="append", default=[])
    parser.add_argument("--file", default="")
    parser.add_argument("pairs", nargs="*")
    asked = parser.parse_args(arguments)
    load_origin(Origin(tuple(asked.root), asked.file))
    # As without a toolkit, so that no kernel is compiled; a cached function has another type.
    toolchain.cuda_home = lambda: None  # type: ignore[assignment]
    found = {}
    try:
        with threads.builders(toolchain.operators_at_once()) as submit:
            pairs = registry().pairs()
            futures = [submit(compiling.build, pairs[key]) for key in asked.pairs]
            for built in threads.completed(futures):
                found[built.result().pair.key] = str(built.result().path)
                print(f"built {built.result().pair.key}", file=sys.stderr, flush=True)
    except BuildError as error:
        print(error)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
