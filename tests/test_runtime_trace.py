"""Traces: the sums over kernels and copies, what a trace has, the command, ranges for Nsight."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_gpu

import cuda_ops
from cuda_ops.__main__ import main as commands
from cuda_ops.benchmarking.kit import cases_of
from cuda_ops.registry import registry
from cuda_ops.runtime import profile_command, trace
from cuda_ops.runtime.kernel_table import KernelTime, at_least, common, gpu_work, merged
from cuda_ops.runtime.trace_table import short_name, size_text, time_text
from cuda_ops.runtime.tracing import Trace

REPO = Path(__file__).resolve().parent.parent
EXAMPLE = REPO / "examples" / "runtime" / "trace_a_step.py"

# --- sums over events made by hand --------------------------------------------------------


def _event(
    category: str,
    name: str,
    start: float,
    time: float,
    stream: int = 7,
    device: int = 0,
    **said: Any,
) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": device, "tid": stream,
        "ts": start, "dur": time, "args": {"device": device, "stream": stream, **said},
    }  # fmt: skip


def _kernel(name: str, start: float, time: float, stream: int = 7, **said: Any) -> dict[str, Any]:
    return _event("kernel", name, start, time, stream, **said)


def _copy(kind: str, start: float, time: float, stream: int, **said: Any) -> dict[str, Any]:
    return _event("gpu_memcpy", f"Memcpy {kind}", start, time, stream, **said)


def _shape(grid: int, registers: int, occupancy: float = 50) -> dict[str, Any]:
    return {
        "grid": [grid, 1, 1], "block": [128, 2, 1], "registers per thread": registers,
        "shared memory": 1024, "est. achieved occupancy %": occupancy,
    }  # fmt: skip


def test_kernels_of_a_name_are_added_up() -> None:
    work = gpu_work(
        [_kernel("a", 0, 10, **_shape(4, 32)), _kernel("b", 10, 30), _kernel("a", 40, 20)]
    )
    b, a = sorted(work.kernels, key=lambda row: row.name, reverse=True)
    assert (a.calls, b.calls) == (2, 1)
    assert a.seconds == pytest.approx(30e-6) and b.seconds == pytest.approx(30e-6)
    assert a.mean_seconds == pytest.approx(15e-6)
    assert a.share == b.share == pytest.approx(0.5)


def test_the_launch_that_took_most_time_is_shown() -> None:
    events = [
        _kernel("a", 0, 10, **_shape(4, 32)),
        _kernel("a", 10, 7, **_shape(8, 40, 75)),
        _kernel("a", 20, 7, **_shape(8, 40, 75)),
    ]
    assert gpu_work(events).kernels == [
        KernelTime(
            "a", 3, pytest.approx(24e-6), 1.0, (8, 1, 1), (128, 2, 1), 40, 1024, 0.75, shapes=2
        )
    ]


def test_what_the_profiler_did_not_say_is_none() -> None:
    (row,) = gpu_work([_kernel("a", 0, 1)]).kernels
    assert row.grid is row.block is row.registers is row.shared_bytes is row.occupancy is None
    (row,) = gpu_work([_kernel("a", 0, 1, **_shape(4, 32, -99))]).kernels
    assert row.registers == 32 and row.occupancy is None


def test_the_kernel_that_took_most_time_comes_first() -> None:
    work = gpu_work([_kernel("a", 0, 1), _kernel("b", 1, 5), _kernel("c", 6, 3)])
    assert [row.name for row in work.kernels] == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("start", "stream", "device", "overlapped"),
    [
        pytest.param(10, 20, 0, 10, id="within a kernel"),
        pytest.param(25, 20, 0, 5, id="half of it after the kernel"),
        pytest.param(30, 20, 0, 0, id="begins when the kernel ends"),
        pytest.param(55, 20, 0, 6, id="from one kernel into the next"),
        pytest.param(10, 7, 0, 0, id="on the kernel's own stream"),
        pytest.param(10, 20, 1, 0, id="on another GPU"),
    ],
)
def test_copies_overlap_with_kernels(start: int, stream: int, device: int, overlapped: int) -> None:
    events = [
        _kernel("a", 0, 30),
        _kernel("a", 50, 10),
        _kernel("a", 64, 10),
        _copy("HtoD (Pinned -> Device)", start, 10, stream, device=device, bytes=4096),
    ]
    work = gpu_work(events)
    (copy,) = work.copies
    assert copy.kind == "HtoD (Pinned -> Device)"
    assert (copy.calls, copy.bytes) == (1, 4096)
    assert copy.seconds == pytest.approx(10e-6)
    assert copy.overlapped_seconds == pytest.approx(overlapped * 1e-6)
    assert copy.overlapped == work.overlap.copies == pytest.approx(overlapped / 10)


def test_time_counts_once_where_two_kernels_run_during_a_copy() -> None:
    work = gpu_work([_kernel("a", 0, 10, 1), _kernel("b", 0, 10, 2), _copy("DtoH", 5, 10, 3)])
    assert work.overlap.copy_overlapped_seconds == pytest.approx(5e-6)


def test_kinds_of_copies_are_apart() -> None:
    events = [
        _kernel("a", 0, 10, 1),
        _copy("HtoD", 0, 10, 2, bytes=100),
        _copy("HtoD", 10, 10, 2, bytes=100),
        _copy("DtoH", 20, 5, 3, bytes=8),
    ]
    into, out = gpu_work(events).copies
    assert (into.calls, into.bytes, into.overlapped) == (2, 200, pytest.approx(0.5))
    assert (out.calls, out.bytes, out.overlapped) == (1, 8, 0.0)


def test_the_time_of_several_streams() -> None:
    events = [
        _kernel("a", 0, 10, 1),
        _kernel("b", 6, 10, 2),
        _kernel("c", 8, 1, 3),
        _copy("HtoD", 30, 10, 4),
        _event("gpu_memset", "Memset (Device)", 50, 10, 1),
    ]
    overlap = gpu_work(events).overlap
    assert overlap.span_seconds == pytest.approx(60e-6)
    assert overlap.busy_seconds == pytest.approx((16 + 10 + 10) * 1e-6)
    assert overlap.busy == pytest.approx(36 / 60)
    assert overlap.kernel_seconds == pytest.approx(16e-6)
    assert overlap.two_kernels_seconds == pytest.approx(4e-6)
    assert overlap.kernels == pytest.approx(4 / 16)


def test_gpus_are_added() -> None:
    events = [_kernel("a", 0, 10), _kernel("a", 100, 10, device=1), _kernel("a", 120, 10, device=1)]
    overlap = gpu_work(events).overlap
    assert overlap.span_seconds == pytest.approx((10 + 30) * 1e-6)
    assert overlap.busy_seconds == pytest.approx(30e-6)
    assert overlap.two_kernels_seconds == 0


def test_other_events_do_not_count() -> None:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1}
    events = [
        launch,
        launch | {"cat": "cuda_driver", "name": "cuLaunchKernelEx"},
        launch | {"name": "cudaStreamSynchronize"},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 0, "dur": 9},
    ]
    work = gpu_work(events)
    assert work.kernels == [] and work.copies == []
    assert work.launched == 2
    assert work.overlap.busy == work.overlap.copies == work.overlap.kernels == 0.0


def test_intervals() -> None:
    assert merged([(5, 6), (0, 2), (1, 1.5), (2, 3)]) == [(0, 3), (5, 6)]
    assert common([(0, 10)], [(2, 3), (5, 12)]) == 6
    assert at_least(1, [[(0, 1)], [(1, 2)]]) == 2
    assert at_least(2, [[(0, 1)], [(1, 2)]]) == 0
    assert at_least(3, [[(0, 9)], [(1, 5)], [(4, 8)]]) == 1


def test_names_and_units_in_tables() -> None:
    assert short_name("void (anonymous namespace)::f<int>(int*, long)") == "f<int>"
    assert short_name("void f(void (*)(int), int)") == "f"
    long = short_name("first<" + "long, " * 40 + "Last>")
    assert long.startswith("first<long, ") and long.endswith("long, Last>") and len(long) <= 80
    assert [time_text(t) for t in (9e-7, 1e-3, 61.0)] == ["0.90 us", "1.00 ms", "61.00 s"]
    assert [size_text(n) for n in (1023, 1 << 20, 3 << 30)] == ["1023 B", "1.0 MiB", "3.0 GiB"]


def test_tables_of_a_gpu() -> None:
    kernel = "void cuda_ops::flat_kernel<4, float, (anonymous namespace)::Silu<float> >(float*)"
    traced = Trace(None)
    traced._fill(
        [
            _kernel(kernel, 0, 30, **_shape(4, 32)),
            _kernel(kernel, 40, 20, **_shape(8, 32)),
            _kernel("void other(int)", 60, 10),
            _copy("HtoD (Pinned -> Device)", 20, 20, 8, bytes=2 << 20),
        ],
        [],
    )
    assert traced.why_no_gpu == ""
    text = traced.table(top=1)
    (row,) = (line for line in text.splitlines() if "Silu<float>" in line)
    cells = [cell.strip() for cell in row.strip("\u2502").split("\u2502")]
    assert cells == [
        "cuda_ops::flat_kernel<4, float, Silu<float> >", "2", "50.00 us", "25.00 us", "83.3%",
        "4x1x1 +1", "128x2x1", "32", "1.0 KiB", "50%",
    ]  # fmt: skip
    assert "Kernels not listed: 1, which took 10.00 us." in text
    (row,) = (line for line in text.splitlines() if "HtoD" in line)
    cells = [cell.strip() for cell in row.strip("\u2502").split("\u2502")]
    assert cells == [
        "HtoD (Pinned -> Device)", "1", "2.0 MiB", "20.00 us", "104.9 GB/s", "50.0%",
    ]  # fmt: skip
    assert (
        "The GPU was busy for 100.0% of 70.00 us; kernels ran during 50.0% of the time of copies."
        in text
    )


def test_kernels_that_were_launched_and_not_recorded_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 1}
    traced = Trace(None)
    traced._fill([launch], [])
    assert "No GPU was traced: of 1 launches of kernels none was recorded" in traced.table()
    traced._fill([], [])
    assert "No GPU was traced: no kernel was launched." in traced.table()


# --- traces -------------------------------------------------------------------------------


def _train() -> None:
    cuda_ops.silu(torch.ones(8, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_trace_has_our_operators_and_their_gradients(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with trace(path) as traced:
        _train()
    text = path.read_bytes()
    text = gzip.decompress(text) if name.endswith("gz") else text
    names = [event["name"] for event in json.loads(text)["traceEvents"]]
    assert names.count("cuda_ops::silu") == names.count("cuda_ops::silu_backward") == 1
    rows = {row.name: row for row in traced.operators}
    assert rows["cuda_ops::silu"].calls == rows["cuda_ops::silu_backward"].calls == 1
    assert rows["cuda_ops::silu"].is_ours and not rows["aten::sum"].is_ours
    assert rows["cuda_ops::silu"].cpu_seconds >= rows["cuda_ops::silu"].own_cpu_seconds > 0
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_each_call_is_recorded_in_each_mode(mode: Any) -> None:
    x = torch.ones(8)
    with trace() as traced, mode():
        for _ in range(3):
            cuda_ops.silu(x)
            cuda_ops.scale_relu(x, 2.0)  # composed of torch's operators
    rows = {row.name: row.calls for row in traced.operators}
    assert rows["cuda_ops::silu"] == rows["cuda_ops::scale_relu"] == 3
    assert traced.path is None


def test_stacks_have_the_public_function(tmp_path: Path) -> None:
    with trace(tmp_path / "run.json", stacks=True):
        _train()
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    called = [event["name"] for event in events if event.get("cat") == "python_function"]
    assert any("cuda_ops.silu" in name for name in called)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_table_says_so() -> None:
    with trace() as traced:
        _train()
    assert traced.kernels == [] and traced.copies == []
    assert traced.why_no_gpu == "torch sees none"
    text = traced.table(top=1)
    assert text.count("\nNo GPU was traced: torch sees none.") == 1
    assert "cuda_ops::silu " in text and "cuda_ops::silu_backward" in text
    assert text.count("aten::") + text.count("autograd::") <= 1


def test_tracing_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with trace():
        _train()
    assert capsys.readouterr() == ("", "")


def test_an_error_of_the_block_is_passed_on_and_the_trace_written(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(KeyError, match="mine"), trace(path) as traced:  # noqa: PT012
        _train()
        raise KeyError("mine")
    assert "cuda_ops::silu" in path.read_text()
    assert traced.operators
    with trace():  # nothing is left over
        pass


def test_an_error_of_the_block_goes_before_one_of_the_trace(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    incomplete = pytest.warns(UserWarning, match="trace: the trace is not complete: FileNotFound")
    with incomplete, pytest.raises(KeyError), trace(folder / "run.json"):  # noqa: PT012
        folder.rmdir()
        raise KeyError("mine")
    folder.mkdir()
    with pytest.raises(FileNotFoundError), trace(folder / "run.json"):
        folder.rmdir()
    with trace():
        pass


def test_traces_are_not_nested() -> None:
    with trace() as traced:
        with pytest.raises(RuntimeError, match="expected no other trace"), trace():
            pytest.fail("the block ran")
        _train()
    assert "cuda_ops::silu" in {row.name for row in traced.operators}
    refused = pytest.raises(RuntimeError, match="or profiler of torch to be running")
    with torch.profiler.profile(acc_events=True), refused, trace():
        pytest.fail("the block ran")


def test_a_trace_is_read_after_its_block() -> None:
    with trace() as traced:
        for read in (
            lambda: traced.kernels,
            lambda: traced.copies,
            lambda: traced.operators,
            lambda: traced.overlap,
            lambda: traced.why_no_gpu,
            traced.table,
        ):
            with pytest.raises(RuntimeError, match="before its block has ended"):
                read()


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("run.txt", ValueError, "ends in .json or .json.gz, got .*run.txt"),
        ("none/run.json", FileNotFoundError, "there is no folder .*none"),
        ("file/run.json", NotADirectoryError, "file is not a folder"),
        ("folder.json", IsADirectoryError, "folder.json is a folder"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_first(
    tmp_path: Path, path: str, error: type[Exception], text: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()
    expected = pytest.raises(error, match=f"^trace: argument 'path': .*{text}")
    with expected, trace(tmp_path / path):
        pytest.fail("the block ran")


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with trace("run.json"):
        os.chdir("other")
    assert (tmp_path / "run.json").exists()


def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "cuda_ops::silu_backward" in done.stdout
    assert (tmp_path / "step.json.gz").exists()


@needs_gpu
def test_a_trace_on_a_gpu_has_kernels_copies_and_overlap(tmp_path: Path) -> None:
    side = torch.cuda.Stream()
    host = torch.empty(1 << 24, pin_memory=True)
    target = torch.empty(1 << 24, device="cuda")
    x = torch.ones(1 << 26, device="cuda")
    cuda_ops.silu(x)
    torch.cuda.synchronize()
    with trace(tmp_path / "run.json") as traced:
        with torch.cuda.stream(side):
            target.copy_(host, non_blocking=True)
        for _ in range(50):
            cuda_ops.silu(x)  # still running when the block ends
    assert traced.why_no_gpu == ""
    (silu,) = (row for row in traced.kernels if "Silu<" in row.name)
    assert silu.calls == 50 and silu.seconds > 0 and 0 < silu.share <= 1
    assert silu.grid is not None and len(silu.grid) == 3 and silu.block is not None
    assert silu.registers is not None and 0 < silu.registers <= 255
    assert silu.occupancy is not None and 0 < silu.occupancy <= 1
    (copy,) = (row for row in traced.copies if row.kind.startswith("HtoD"))
    assert copy.bytes == host.nbytes and 0 <= copy.overlapped <= 1
    assert 0 < traced.overlap.busy <= 1
    row = next(row for row in traced.operators if row.name == "cuda_ops::silu")
    assert row.gpu_seconds == pytest.approx(silu.seconds, rel=0.01)
    text = traced.table()
    assert "HtoD" in text and "The GPU was busy for" in text


@needs_gpu
def test_work_in_flight_at_the_end_is_traced() -> None:
    from cuda_ops.testing.stall import stall

    with trace() as traced:
        stall(0.05)
        cuda_ops.silu(torch.ones(8, device="cuda"))
    assert any("Silu<" in row.name for row in traced.kernels)


# --- the command --------------------------------------------------------------------------

SCRIPT = """
import sys
import torch, cuda_ops
print("arguments", sys.argv[1:], __name__)
cuda_ops.silu(torch.ones(4, requires_grad=True)).sum().backward()
if "raise" in sys.argv:
    raise ValueError("of the script")
if "exit" in sys.argv:
    sys.exit(7)
if "text" in sys.argv:
    sys.exit("a last word")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("word", "status", "said"),
    [
        ("fine", 0, ""),
        ("raise", 1, "ValueError: of the script\n"),
        ("exit", 7, ""),
        ("text", 1, "a last word\n"),
    ],
)
def test_a_script_is_traced(
    script: Path, capfd: pytest.CaptureFixture[str], word: str, status: int, said: str
) -> None:
    output = script.parent / "run.json"
    before = list(sys.argv), list(sys.path)
    assert profile_command.main(["-o", str(output), str(script), "--x", word]) == status
    out, error = capfd.readouterr()
    assert out.startswith(f"arguments ['--x', '{word}'] __main__\n")
    assert "cuda_ops::silu_backward" in out
    assert said in error
    assert "cuda_ops::silu" in output.read_text()
    assert (sys.argv, sys.path) == before


def test_an_exception_is_shown_without_our_frames(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    profile_command.main([str(script), "raise"])
    error = capfd.readouterr().err
    shown = error[error.index("Traceback") :]
    # With a process group torch puts the rank before each line.
    assert f'File "{script}", line 7' in shown.splitlines()[1]
    assert "profile_command" not in shown and "runpy" not in shown


def test_a_module_is_traced(
    script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    assert profile_command.main(["--top", "3", "-m", "my_script", "exit", "--top"]) == 7
    assert capfd.readouterr().out.startswith("arguments ['exit', '--top'] __main__\n")


def test_the_command_is_one_of_cuda_ops(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert commands(["profile", "--top", "1", str(script), "exit"]) == 7
    assert "cuda_ops::silu_backward" in capfd.readouterr().out


@pytest.mark.parametrize("interrupted", ["script", "operator"])
def test_an_interrupt_is_status_130(
    script: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    interrupted: str,
) -> None:
    if interrupted == "script":
        script.write_text("raise KeyboardInterrupt")
        words = [str(script)]
    else:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(profile_command, "_step", lambda *_: interrupt)
        words = ["--op", "silu"]
    assert profile_command.main(words) == 130
    assert ("KeyboardInterrupt" in capfd.readouterr().err) == (interrupted == "script")


def test_json_stands_alone(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert profile_command.main(["--json", str(script), "exit"]) == 7
    out, error = capfd.readouterr()
    found = json.loads(out)
    assert "arguments ['exit']" in error
    assert found["status"] == 7 and found["file"] is None
    assert {"kernels", "copies", "overlap", "operators", "why_no_gpu"} <= found.keys()
    silu = next(row for row in found["operators"] if row["name"] == "cuda_ops::silu")
    assert silu["calls"] == 1 and silu["is_ours"]


@pytest.mark.parametrize("op", ["silu", "cuda_ops::silu_backward"])
def test_an_operator_is_traced(capfd: pytest.CaptureFixture[str], op: str) -> None:
    assert profile_command.main(["--json", "--op", op, "--case", "float32"]) == 0
    found = json.loads(capfd.readouterr().out)
    name = op.removeprefix("cuda_ops::")
    cases = cases_of(registry().specs("silu")[name], registry().plugins)
    ranges = {row["name"] for row in found["operators"] if row["name"].startswith(f"{name}: ")}
    assert ranges and ranges <= {f"{name}: {case.label}" for case in cases}
    row = next(row for row in found["operators"] if row["name"] == f"cuda_ops::{name}")
    assert row["calls"] == profile_command.CALLS * len(ranges)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["none.py"], "there is no file none.py"),
        (["--op", "none"], "there is no operator none"),
        (["--op", "silu", "--case", "none"], "no case has 'none' in its label; known: "),
        (["--op", "silu", "--case", "("], "error: "),
        (["-o", "run.txt", __file__], "expected a file that ends in .json"),
    ],
)
def test_a_call_that_makes_no_sense_is_one_line(
    capfd: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert profile_command.main(words) == 2
    out, error = capfd.readouterr()
    assert out == "" and text in error and "Traceback" not in error


@pytest.mark.parametrize("words", [[], ["--op", "silu", "x.py"], ["-m"], ["--case", "x", "y.py"]])
def test_wrong_options_are_refused(capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        profile_command.main(words)
    assert end.value.code == 2
    assert "usage: python -m cuda_ops profile" in capfd.readouterr().err


# --- ranges for Nsight --------------------------------------------------------------------


def _in_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
        text=True,
    )  # fmt: skip


def test_calls_have_ranges_where_they_are_asked_for() -> None:
    code = """
import torch
calls, depth = [], []
torch.cuda.nvtx.range_push = lambda name: (calls.append(name), depth.append(name))
torch.cuda.nvtx.range_pop = depth.pop
from cuda_ops.dispatch import nvtx
available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
assert nvtx.is_wanted()  # as on a GPU, which decides for the process
torch.cuda.is_available = available
import cuda_ops
x = torch.ones(4, requires_grad=True)
cuda_ops.silu(x).sum().backward()
print(calls, depth)
calls.clear()
try:
    cuda_ops.silu(torch.ones(3, dtype=torch.int32))
except RuntimeError as error:
    print("got int32" in str(error), calls, depth)
calls.clear()
cuda_ops.matmul(torch.ones(2, 2), torch.ones(2, 2))
print(calls, depth)
calls.clear()
compiled = torch.compile(lambda x: cuda_ops.silu(x) * 2, backend="eager", fullgraph=True)
print(torch.equal(compiled(torch.zeros(3)), torch.zeros(3)), calls)
"""
    done = _in_process(code, CUDA_OPS_NVTX="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['cuda_ops::silu', 'cuda_ops::silu_backward'] []",
        "True ['cuda_ops::silu'] []",
        "['cuda_ops.matmul', 'cuda_ops::matmul'] []",
        "True []",
    ]


def test_without_the_variable_a_function_is_as_before() -> None:
    code = "import cuda_ops; print('_range_push' in cuda_ops.silu.__code__.co_names)"
    for value in ("", "0"):
        done = _in_process(code, CUDA_OPS_NVTX=value)
        assert (done.stdout.strip(), done.returncode) == ("False", 0), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_ranges_are_refused_once() -> None:
    code = """
import torch, cuda_ops
print(cuda_ops.silu(torch.zeros(1)), cuda_ops.relu(torch.zeros(1)))
print('_range_push' in cuda_ops.silu.__code__.co_names)
"""
    done = _in_process(code, CUDA_OPS_NVTX="1")
    assert done.stdout.splitlines() == ["tensor([0.]) tensor([0.])", "False"], done.stderr
    assert done.stderr.count("CUDA_OPS_NVTX is set, and torch sees no CUDA GPU") == 1


@needs_gpu
def test_ranges_on_a_gpu() -> None:
    code = """
import torch, cuda_ops
x = torch.zeros(3, device="cuda", requires_grad=True)
cuda_ops.silu(x).sum().backward()
print('_range_push' in cuda_ops.silu.__code__.co_names, x.grad.tolist())
"""
    done = _in_process(code, CUDA_OPS_NVTX="1")
    assert done.stdout.strip() == "True [0.5, 0.5, 0.5]", done.stderr
