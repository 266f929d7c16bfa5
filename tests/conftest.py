"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from limits import pytest_timeout_set_timer as pytest_timeout_set_timer  # a hook
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cuda_ops.build import commands, compiling, discovery, toolchain
from cuda_ops.compile_ops import Row, compile_ops, reload
from cuda_ops.registry import registry
from cuda_ops.testing import PROFILES
from cuda_ops.testing.case import NotRunError
from cuda_ops.testing.memory import much_memory, release
from cuda_ops.testing.worker import Worker

if "PYTEST_XDIST_WORKER" in os.environ:
    # There are as many workers as cores, so each one and what it starts gets one thread.
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


#: Modules with tests of ten seconds or more. They run first, after tests that run alone: started
#: last, such a test would leave the other workers idle.
LONG = (
    "guests", "emulated", "servers", "pytest_plugin", "reload", "installed", "brackets", "scaffold",
    "docs", "kit", "bad_ops", "notebook", "operators", "inline", "dev", "moe_shards", "watch",
    "good_ops", "transforms", "doctor", "site", "export", "cpp_autograd",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest deselects slow tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: (not _alone(item), place.get(item.path.name, len(LONG))))
    alike: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("quick"):
            alike.setdefault((item.path, item.originalname), []).append(item)
    for group in alike.values():
        mark = group[0].get_closest_marker("quick")
        (chosen,) = mark.args if mark else ()
        if isinstance(chosen, int):  # so many, evenly spread
            quick = [group[i * len(group) // chosen] for i in range(min(chosen, len(group)))]
        else:
            quick = [item for item in group if item.callspec.id == chosen]
        for item in group:
            if item not in quick:
                item.add_marker("slow")


class _Turns:
    """Lets tests that judge by the clock run while no other worker runs one.

    Each worker holds a file while its test runs. A test marked ``alone`` first closes the gate that
    all pass, then waits until every file is free; the gate stays closed for more tests of its kind.
    """

    def __init__(self, folder: Path, worker: str) -> None:
        self._folder = folder
        self._gate, self._mine = FileLock(folder / "gate.lock"), FileLock(folder / f"{worker}.lock")

    @contextlib.contextmanager
    def turn(self, alone: bool, next_alone: bool) -> Iterator[None]:
        if not self._gate.is_locked:
            self._gate.acquire()
        if alone:
            for worker in self._folder.glob("gw*.lock"):
                with FileLock(worker):
                    pass  # its next test waits at the gate
        else:
            self._mine.acquire()
            self._gate.release()
        try:
            yield
        finally:
            if not alone:
                self._mine.release()
            elif not next_alone:
                self._gate.release()


_TURNS = pytest.StashKey[_Turns]()
_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Gives each worker of a run the folder of their turns."""
    made = node.config.stash.get(_FOLDER, None)
    if made is None:
        made = node.config.stash[_FOLDER] = tempfile.TemporaryDirectory(prefix="cuda_ops_turns_")
        node.config.add_cleanup(made.cleanup)
    node.workerinput["turns"] = made.name


def pytest_configure(config: pytest.Config) -> None:
    # Only a worker has it; a pytest that a test starts inherits the variables of xdist as well.
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        folder = Path(worker["turns"])
        config.stash[_TURNS] = _Turns(folder, worker["workerid"])


@pytest.hookimpl(wrapper=True, tryfirst=True)  # a test's own time limit starts after the wait
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    turns: _Turns | None = item.config.stash.get(_TURNS, None)
    if turns is None:
        return (yield)
    with turns.turn(_alone(item), nextitem is not None and _alone(nextitem)):
        return (yield)


def _alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


_BINDING = """
#include "binding.h"
{include}
using namespace cuda_ops;
namespace {{
Tensor forward(const Tensor& x{parameter}) {{
  Tensor out = empty_elementwise(x);
  map_cpu(strided(out, x), [=](double v) {{ return {forward}; }});
  return out;
}}
Tensor backward(const Tensor& grad_out, const Tensor& x{parameter}) {{
  Tensor grad_x = empty_elementwise(grad_out, x);
  map_cpu(strided(grad_x, grad_out, x), [=](double g, double v) {{ (void)v; return {backward}; }});
  return grad_x;
}}
}}
CUDA_OPS(library) {{
  library.op("{op}(Tensor x{schema}) -> Tensor", "()->()").dtypes(kFloating).{key}<forward>();
  library.op("{op}_backward(Tensor grad_out, Tensor x{schema}) -> Tensor grad_x", "(),()->()")
      .dtypes(kFloating).{key}<backward>();
}}
"""

_numbers = itertools.count()


def save(file: Path, text: str) -> None:
    """Writes a file at once: what watches it sees the old text or the new one, never a part."""
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parents[2], delete=False, encoding="utf-8"
    ) as part:
        part.write(text)
    Path(part.name).replace(file)


@dataclass
class ScratchOp:
    """An operator in a folder of its own, for tests that edit files."""

    name: str
    root: Path

    @property
    def binding(self) -> Path:
        return self.root / "bindings" / f"{self.name}.cpp"

    def write(
        self,
        forward: str = "v",
        backward: str = "g",
        *,
        parameter: str = "",
        schema: str = "",
        include: str = "",
        key: str = "cpu",
    ) -> None:
        """Writes the binding; formulas are C++ in ``v`` (the input) and ``g`` (the gradient)."""
        text = _BINDING.format(
            op=self.name, forward=forward, backward=backward, parameter=parameter,
            schema=schema, include=include, key=key,
        )  # fmt: skip
        save(self.binding, textwrap.dedent(text))

    @contextlib.contextmanager
    def built(
        self, binding: str, *, kernel: str = "", plugin: str = "", compare: bool = True
    ) -> Iterator[Row]:
        """Writes the files of a pair and builds it; removes them in the end."""
        texts = {
            self.binding: binding,
            self.root / "kernels" / f"{self.name}.cu": kernel,
            self.root / "ops" / f"{self.name}.py": plugin,
        }
        files = [file for file, text in texts.items() if text]
        for file in files:
            file.write_text(texts[file])
        (row,) = compile_ops([self.name], compare=compare)
        assert not row.error, row.error
        yield row
        for file in files:
            file.unlink()
        registry().rescan()

    def build(self) -> compiling.Built:
        return compiling.build(registry().rescan()[self.name])

    def reload(self) -> compiling.Built:
        """Builds and loads, as ``compile_dev.reload`` does for one operator."""
        built = self.build()
        registry().load(self.name, built.path)
        return built

    @property
    def function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = registry().public(self.name)
        return function


def made_once(path: Path, make: Callable[[Path], object], wait: bool = True) -> bool:
    """Lets ``make`` write ``path`` unless another process has written it.

    Returns:
        Whether the file is there; without ``wait``, False while another process is writing it.
    """
    try:
        with FileLock(f"{path}.lock", timeout=-1 if wait else 0):
            if not path.exists():
                part = path.with_name(f"{path.name}.part")
                shutil.rmtree(part, ignore_errors=True)  # left by a failed attempt
                make(part)
                part.rename(path)
    except Timeout:
        return False
    return True


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Lets Ctrl-C interrupt; whatever a script starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def folder_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of a run share; use it with :func:`made_once`."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seeds torch, so that a failing test fails again, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def quick_compiler(folder_of_all: Path) -> Path:
    """A C++ compiler for ``CXX`` that takes a third of the time.

    It does not optimize and uses a precompiled binding.h.
    """
    compiler, folder = os.environ.get("CXX", "c++"), folder_of_all / "quick"
    header = discovery.INCLUDE_DIR / "binding.h"

    def make(part: Path) -> None:
        precompiled = part / "binding.h.gch"  # a folder: the compiler takes the file that fits
        precompiled.mkdir(parents=True)
        pairs = discovery.discover([discovery.BUILTIN_ROOT])
        for cuda, pair in {commands.uses_cuda(pair): pair for pair in pairs}.items():
            flags = shlex.split(" ".join(commands.cxx_flags(pair, compiling.visible_archs())))
            folders = [Path(folder) for folder in cpp_extension.include_paths()]
            folders += [toolchain.cuda_home() / "include"] if cuda else []
            command = [
                compiler, *flags, "-O0", "-fPIC", "-w", f"-I{header.parent}",
                *(f"-isystem{folder}" for folder in folders),
                "-x", "c++-header", header, "-o", precompiled / f"cuda-{cuda}",
            ]  # fmt: skip
            subprocess.run(command, check=True)
        script = part / "c++"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} -I"{folder}" "$@" -O0\n')
        script.chmod(0o755)

    made_once(folder, make)
    return folder / "c++"


@pytest.fixture(scope="session")
def scratch_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("operators")
    for folder in ("kernels", "bindings", "utils", "ops"):
        (root / folder).mkdir()
    registry().add_root(root)
    return root


@pytest.fixture
def scratch_op(
    scratch_root: Path,
    quick_compiler: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ScratchOp]:
    """A new operator for each test, with its own cache."""
    monkeypatch.setenv("CXX", str(quick_compiler))
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path_factory.mktemp("a cache")))
    op = ScratchOp(f"scratch_{next(_numbers)}", scratch_root)
    yield op
    for folder in ("kernels", "bindings", "ops"):
        for path in (scratch_root / folder).glob(f"{op.name}.*"):
            path.unlink()
    registry().rescan()


# Without nvcc the build leaves out a binding's CUDA entry and its kernel.
needs_nvcc = pytest.mark.skipif(toolchain.cuda_home() is None, reason="needs nvcc")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
#: For what is promised where there is none; other tests say what holds on one.
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    """Frees the memory that torch keeps after a large test: other processes wait for it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        release()


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of two fake devices, whose messages are counted and go nowhere."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    """A process that checks harmless operators; sharing it imports torch's compilers once."""
    with Worker(PROFILES["ci"].timeout) as worker:
        yield worker


@pytest.fixture
def roots_for_now() -> Iterator[None]:
    """Removes the roots that a command line adds after the test."""
    before = list(registry()._extra_roots)
    yield
    registry()._extra_roots[:] = before
    registry().rescan()


@pytest.fixture(scope="module")
def own_cache(
    quick_compiler: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[pytest.MonkeyPatch]:
    """A cache and a list of roots for the tests of one module alone."""
    before = list(registry()._extra_roots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(quick_compiler))
        patch.setenv("CUDA_OPS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield patch
    registry()._extra_roots[:] = before
    registry().rescan()


class Recorder(TorchDispatchMode):
    """Records the operators that run while it is on and the shapes of their first results."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        first = next(filter(torch.is_tensor, tree_leaves(result)), None)
        if first is not None:
            self._calls.append((function.overloadpacket.__name__, first.shape))
        return result

    def results(self, name: str) -> list[torch.Size]:
        return [shape for called, shape in self._calls if called == name]


@pytest.fixture(scope="session")
def built_mixture() -> None:
    """Builds moe and its parts."""
    reload("moe_route", "moe_experts", "moe")


@contextlib.contextmanager
def room_for(device: str, needed: float) -> Iterator[None]:
    """Waits for this much free memory on the device; skips if the device has less in total."""
    try:
        with much_memory(device, needed, patience=240):
            yield
    except NotRunError as error:
        pytest.skip(str(error))


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in another process, in the checkout."""
    command, folder = [sys.executable, *arguments], Path(__file__).parent.parent
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)


def plan_program(
    tmp_path_factory: pytest.TempPathFactory, source: str
) -> Callable[[Iterable[str]], list[str]]:
    """Compiles a program that plans kernels, without CUDA; returns a function from its input lines
    to its output lines.
    """
    folder = Path(__file__).parent
    program = tmp_path_factory.mktemp("plan") / "plan"
    compiler, utils = os.environ.get("CXX", "c++"), folder.parent / "src" / "utils"
    command = [compiler, "-std=c++17", "-I", utils, folder / source, "-o", program]
    subprocess.run(command, check=True)

    def answers(lines: Iterable[str]) -> list[str]:
        asked = subprocess.run(
            [program], input="\n".join(lines), capture_output=True, text=True, check=True
        )
        return asked.stdout.splitlines()

    return answers
