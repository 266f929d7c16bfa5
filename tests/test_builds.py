"""Builds beside other processes and under fault: killed, a full disk, a missing compiler."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ScratchOp

from cuda_ops.build import commands, compiling, logs, toolchain, wrappers
from cuda_ops.build.discovery import discover
from cuda_ops.compile_ops import compile_ops
from cuda_ops.errors import BuildError, ManifestError
from cuda_ops.registry import registry

X = torch.tensor([1.0, 2.0, 3.0])
REPO = Path(__file__).resolve().parent.parent


def _build_script(op: ScratchOp) -> list[str]:
    code = (
        "import sys; from pathlib import Path; from cuda_ops.build import compiling\n"
        "from cuda_ops.build.discovery import discover\n"
        f"pair = {{p.stem: p for p in discover([Path({str(op.root)!r})])}}[{op.name!r}]\n"
        "print('start', flush=True); print(compiling.build(pair).path)"
    )
    return [sys.executable, "-c", code]


@pytest.mark.slow
def test_two_processes_build_the_same_operator(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    both = [
        subprocess.Popen(_build_script(scratch_op), stdout=subprocess.PIPE, text=True, cwd=REPO)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0].splitlines()[-1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    registry().rescan()
    registry().load(scratch_op.name, Path(outputs[0]))
    assert torch.equal(scratch_op.function(X), X * 2)


_KILLED_BUILDS = """
import os, random, signal, time
from pathlib import Path
from torch.utils import cpp_extension  # once, before the forks
from cuda_ops.build import compiling
from cuda_ops.build.discovery import discover
binding = Path({binding!r})
pair = {{p.stem: p for p in discover([binding.parent.parent])}}[binding.stem]
text, moments = binding.read_text(), random.Random(0)
for i in range(10):
    binding.write_text(text.replace("v * 0", f"v * {{i}}"))
    child = os.fork()
    if child == 0:
        compiling.build(pair)
        os._exit(0)
    time.sleep(moments.uniform(0, 1.5))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_what_ptxas_serializes_is_a_warning(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 0")
    assert scratch_op.build().warnings == ()
    said = "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async is serialized"
    scratch_op.build().path.with_suffix(".nvcc.log").write_text(f"ptxas info: fine\n{said}\n")
    assert scratch_op.build().warnings == (said,)


@pytest.mark.slow
def test_killed_builds_leave_nothing_that_hangs_or_breaks(
    scratch_op: ScratchOp, tmp_path: Path
) -> None:
    scratch_op.write("v * 0")
    script = _KILLED_BUILDS.format(binding=str(scratch_op.binding))
    log = tmp_path / "log"  # not a pipe, which the compilers of a killed build would hold open
    with log.open("w") as errors:
        done = subprocess.run([sys.executable, "-c", script], cwd=REPO, stderr=errors)
    assert done.returncode == 0, log.read_text()
    scratch_op.write("v * 4")
    start = time.monotonic()
    scratch_op.reload()
    assert time.monotonic() - start < 60
    assert torch.equal(scratch_op.function(X), X * 4)


@pytest.mark.parametrize("name", ["a$b", "a|b", "a:b"])
def test_a_folder_that_ninja_would_misread_is_named(
    scratch_op: ScratchOp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scratch_op.write("v * 6")
    cache, root = tmp_path / name, tmp_path / f"root{name}"
    monkeypatch.setenv("CUDA_OPS_CACHE", str(cache))
    with pytest.raises(BuildError, match=rf"cache {re.escape(str(cache))}\S*: expected a folder"):
        scratch_op.build()
    monkeypatch.delenv("CUDA_OPS_CACHE")
    shutil.copytree(scratch_op.binding.parents[1], root)
    pair = next(pair for pair in discover([root]) if pair.stem == scratch_op.binding.stem)
    with pytest.raises(BuildError, match=rf"root {re.escape(str(root))}: expected a folder"):
        compiling.build(pair)


def test_cache_that_cannot_be_written(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("v")
    monkeypatch.setenv("CUDA_OPS_CACHE", "/proc/cuda_ops_cache")
    said = (
        "CUDA_OPS_CACHE: expected a folder that can be written, got /proc/cuda_ops_cache: No such"
    )
    with pytest.raises(BuildError, match=said):
        scratch_op.build()


def _cache() -> str:
    """Quotes it for a shell."""
    return shlex.quote(str(compiling.cache_dir()))


def _in_namespace(op: ScratchOp, mount: str) -> subprocess.CompletedProcess[str]:
    """Builds ``op`` in a process of its own after ``mount``, which only that process sees.

    Its output ends with the libraries that are in the cache then.
    """
    look = f"find {_cache()}/lib -name '*.so'"
    command = f'{mount} && "$@"; status=$?; {look}; exit $status'
    isolated = ["unshare", "--map-root-user", "--mount", "sh", "-c", command, "sh"]
    try:
        allowed = subprocess.run([*isolated, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare command here to mount with")
    if allowed.returncode:
        pytest.skip(f"may not mount here: {allowed.stderr.decode().strip()}")
    return subprocess.run(
        [*isolated, *_build_script(op)], capture_output=True, text=True, cwd=REPO, check=False
    )


@pytest.mark.slow
def test_read_only_cache_serves_what_it_holds(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2")
    built = scratch_op.build()
    cache = _cache()
    read_only = f"mount --bind {cache} {cache} && mount -o remount,ro,bind {cache} {cache}"
    done = _in_namespace(scratch_op, read_only)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["start", str(built.path), str(built.path)]
    scratch_op.write("v * 3")
    done = _in_namespace(scratch_op, read_only)
    assert "Read-only file system; set CUDA_OPS_CACHE to a folder" in done.stderr


# A disk with room for nothing, for some of the compiler's files, or for all but the last library.
@pytest.mark.parametrize("kilobytes", [4, 60, "all but one"])
@pytest.mark.slow
def test_full_disk_is_an_error_and_leaves_no_library(
    scratch_op: ScratchOp, kilobytes: int | str
) -> None:
    scratch_op.write("v * 2")
    if kilobytes == "all but one":
        library = scratch_op.build().path.stat().st_size
        (compiled,) = compiling.cache_dir().glob("work/*/*.o")
        kilobytes = (compiled.stat().st_size + library * 3 // 2) // 1024  # linked, then published
    done = _in_namespace(scratch_op, f"mount -t tmpfs -o size={kilobytes}k none {_cache()}")
    assert "BuildError" in done.stderr, done.stderr
    assert "No space left on device" in done.stderr
    assert ".so" not in done.stdout


@pytest.mark.slow
def test_a_full_folder_for_temporary_files_is_named_and_not_the_cache(
    scratch_op: ScratchOp, tmp_path: Path
) -> None:
    scratch_op.write("v * 2")
    where = shlex.quote(str(tmp_path))
    done = _in_namespace(
        scratch_op, f"mount -t tmpfs -o size=4k none {where} && export TMPDIR={where}"
    )
    assert f"{scratch_op.name}: TMPDIR: {tmp_path}: No space left on device; set it" in done.stderr


@pytest.mark.parametrize(("room", "named"), [(0, "TMPDIR: /tmp:"), (2, "cannot build in")])
def test_the_full_disk_is_the_one_with_less_room(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch, room: int, named: str
) -> None:
    for name in ("TMPDIR", "TMP", "TEMP"):
        monkeypatch.delenv(name, raising=False)
    usage = {Path("/tmp"): room, compiling.cache_dir(): 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=usage[Path(path)]))
    scratch_op.write("v")
    log = f"{scratch_op.binding}:1: fatal error: writing: No space left on device"  # below /tmp
    pair = registry().rescan()[scratch_op.name]
    assert logs.explain_failure(pair, log).startswith(named)


def test_a_compiler_that_is_missing_is_named(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("v")
    monkeypatch.setenv("CXX", "/nonexistent/c++ -O1")
    said = rf"{scratch_op.name}: there is no C\+\+ compiler '/nonexistent/c\+\+', which CXX"
    with pytest.raises(BuildError, match=said):
        scratch_op.build()


def test_a_compiler_that_cannot_start_shows_its_error_and_no_command_line(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho my compiler has no licence >&2\nexit 1\n")
    script.chmod(0o755)
    scratch_op.write("v")
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(BuildError, match=r"does not compile:\nmy compiler has no licence$"):
        scratch_op.build()


def test_files_of_the_cache_that_hold_something_else_are_written_again(
    scratch_op: ScratchOp,
) -> None:
    scratch_op.write("v")
    (row,) = compile_ops([scratch_op.name])
    (compared,) = compiling.cache_dir().glob("lib/*.json")
    (objects,) = compiling.cache_dir().glob("work/*/objects.json")
    for text in ("null", "5", "[]", "{", "\xff"):
        compared.write_text(text, encoding="latin-1")
        (again,) = compile_ops([scratch_op.name])
        assert (again.error, again.uncompared) == (row.error, row.uncompared)
    objects.write_text("null")
    scratch_op.write("v * 2")
    assert scratch_op.build().origin == "built"


def test_a_missing_function_of_another_library_is_not_blamed_on_the_launcher(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch_op.write("of_another_library() + v", include='extern "C" double of_another_library();')
    with pytest.raises(ManifestError, match=r"symbol of_another_library; define it in .* LDFLAGS"):
        scratch_op.reload()
    scratch_op.write("own(v)", include="double own(double);")
    with pytest.raises(ManifestError, match=r"undefined symbol _Z3ownd; declare the launcher"):
        scratch_op.reload()


@pytest.mark.slow
def test_building_leaves_the_environment_as_it_was(scratch_op: ScratchOp) -> None:
    before = dict(os.environ)
    scratch_op.write("v * 2")
    scratch_op.build()
    assert dict(os.environ) == before


def test_what_a_build_sets_changes_the_key_of_no_other_build(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_NVCC", raising=False)
    monkeypatch.setattr(toolchain, "cuda_home", lambda: Path("/nowhere"))
    before = commands.environment()
    with wrappers.compiler_environment():
        assert "PYTORCH_NVCC" in os.environ
        assert commands.environment() == before


def test_an_environment_that_could_not_be_set_does_not_disturb_the_next_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dict(os.environ)

    def full(home: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(toolchain, "cuda_home", lambda: Path("/nowhere"))
        patched.setattr(wrappers, "_nvcc_script", full)
        with pytest.raises(OSError, match="No space left"), wrappers.compiler_environment():
            pass
    with wrappers.compiler_environment():
        assert os.environ["TORCH_DONT_CHECK_COMPILER_ABI"] == "1"
    assert dict(os.environ) == before
