"""Traces: what one has, the command, ranges for Nsight."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_gpu, needs_no_gpu

import cuda_ops
from cuda_ops.__main__ import main as commands
from cuda_ops.benchmarking.kit import cases_of
from cuda_ops.registry import registry
from cuda_ops.runtime import trace
from cuda_ops.runtime.tracing import command

REPO = Path(__file__).resolve().parent.parent
EXAMPLE = REPO / "examples" / "runtime" / "trace_a_step.py"

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


def test_a_link_is_followed_and_a_pipe_is_written(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.json", tmp_path / "pipe.json.gz"
    link.symlink_to("target.json")
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        for path in (link, pipe):
            with trace(path):
                torch.ones(3).sin()
        packed = read.result(timeout=10)
    assert link.is_symlink() and pipe.is_fifo()
    for data in ((tmp_path / "target.json").read_bytes(), gzip.decompress(packed)):
        assert "aten::sin" in {event.get("name") for event in json.loads(data)["traceEvents"]}


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


@needs_no_gpu
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


def test_another_number_of_rows_is_refused() -> None:
    with trace() as traced:
        pass
    top: Any
    for top in ("a", 2.5, -1):
        with pytest.raises(ValueError, match=r"^Trace\.table: argument 'top': expected an int of"):
            traced.table(top)


def _legacy_profiler() -> None:
    with torch.autograd.profiler.profile():
        torch.ones(3).sin()


def _profiler() -> None:
    with torch.profiler.profile(acc_events=True):
        torch.ones(3).sin()


def _profiler_of_another_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_profiler).result()


@pytest.mark.parametrize("start", [_profiler, _legacy_profiler, _profiler_of_another_thread])
def test_a_profiler_that_starts_in_the_block_is_refused(start: Callable[[], None]) -> None:
    # torch would give it the profiler of the trace, and end the process where that is read.
    expected = "trace: expected no other trace or profiler of torch to start in its block, got one"
    with trace() as traced:
        with pytest.raises(RuntimeError, match=expected):
            start()
        torch.ones(3).exp()
    names = {row.name for row in traced.operators}
    assert "aten::exp" in names and "aten::sin" not in names
    start()  # it is torch's again


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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"path": 5}, "'path': expected a path, got int"),
        ({"shapes": "a"}, "'shapes': expected True or False, got 'a'"),
        ({"stacks": 1}, "'stacks': expected True or False, got 1"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^trace: argument {text}"), trace(**arguments):
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

    x = torch.ones(8, device="cuda")  # makes the context, which stall does not
    with trace() as traced:
        stall(0.05)
        cuda_ops.silu(x)
    assert any("Silu<" in row.name for row in traced.kernels)


# --- the command --------------------------------------------------------------------------

SCRIPT = """
import sys
import torch, cuda_ops
print("arguments", sys.argv[1:], __name__)
cuda_ops.silu(torch.ones(4, requires_grad=True)).sum().backward()
if "raise" in sys.argv:
    raise ValueError("of the script")
if "profile" in sys.argv:
    with torch.profiler.profile():
        pass
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
        ("profile", 1, "RuntimeError: trace: expected no other trace or profiler of torch"),
        ("exit", 7, ""),
        ("text", 1, "a last word\n"),
    ],
)
def test_a_script_is_traced(
    script: Path, capfd: pytest.CaptureFixture[str], word: str, status: int, said: str
) -> None:
    output = script.parent / "run.json"
    before = list(sys.argv), list(sys.path)
    assert command.main(["-o", str(output), str(script), "--x", word]) == status
    out, error = capfd.readouterr()
    assert out.startswith(f"arguments ['--x', '{word}'] __main__\n")
    assert "cuda_ops::silu_backward" in out
    assert said in error
    assert "cuda_ops::silu" in output.read_text()
    assert (sys.argv, sys.path) == before


def test_an_exception_is_shown_without_our_frames(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command.main([str(script), "raise"])
    error = capfd.readouterr().err
    shown = error[error.index("Traceback") :]
    # With a process group torch puts the rank before each line.
    assert f'File "{script}", line 7' in shown.splitlines()[1]
    assert "tracing/command" not in shown and "runpy" not in shown


def test_a_module_is_traced(
    script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    assert command.main(["--top", "3", "-m", "my_script", "exit", "--top"]) == 7
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

        monkeypatch.setattr(command, "_step", lambda *_: interrupt)
        words = ["--op", "silu"]
    assert command.main(words) == 130
    assert ("KeyboardInterrupt" in capfd.readouterr().err) == (interrupted == "script")


def test_json_stands_alone(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", str(script), "exit"]) == 7
    out, error = capfd.readouterr()
    found = json.loads(out)
    assert "arguments ['exit']" in error
    assert found["status"] == 7 and found["file"] is None
    assert {"kernels", "copies", "overlap", "operators", "why_no_gpu"} <= found.keys()
    silu = next(row for row in found["operators"] if row["name"] == "cuda_ops::silu")
    assert silu["calls"] == 1 and silu["is_ours"]


@pytest.mark.parametrize("op", ["silu", "cuda_ops::silu_backward"])
def test_an_operator_is_traced(capfd: pytest.CaptureFixture[str], op: str) -> None:
    assert command.main(["--json", "--op", op, "--case", "float32"]) == 0
    found = json.loads(capfd.readouterr().out)
    name = op.removeprefix("cuda_ops::")
    cases = cases_of(registry().specs("silu")[name], registry().plugins)
    ranges = {row["name"] for row in found["operators"] if row["name"].startswith(f"{name}: ")}
    assert ranges and ranges <= {f"{name}: {case.label}" for case in cases}
    row = next(row for row in found["operators"] if row["name"] == f"cuda_ops::{name}")
    assert row["calls"] == command.CALLS * len(ranges)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["none.py"], "there is no file none.py"),
        (["--op", "none"], "no operator 'none'; known: "),
        (["--op", "silv"], "no operator 'silv'; did you mean 'silu'?"),
        (["--op", "silu", "--case", "none"], "no case has 'none' in its label; known: "),
        (["-o", "run.txt", __file__], "expected a file that ends in .json"),
    ],
)
def test_a_call_that_makes_no_sense_is_one_line(
    capfd: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    assert command.main(words) == 2
    out, error = capfd.readouterr()
    assert out == "" and text in error and "Traceback" not in error


@pytest.mark.parametrize("words", [[], ["--op", "silu", "x.py"], ["-m"], ["--case", "x", "y.py"]])
def test_wrong_options_are_refused(capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(words)
    assert end.value.code == 2
    assert "usage: python -m cuda_ops profile" in capfd.readouterr().err


def test_a_pattern_that_is_none_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--op", "silu", "--case", "("])
    assert end.value.code == 2
    assert "argument --case: '(' is not a regular expression: " in capfd.readouterr().err


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


@needs_no_gpu
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
