"""What the test kit makes of compute-sanitizer's output."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import needs_no_gpu

from cuda_ops.testing import sanitizer
from cuda_ops.testing.__main__ import main
from cuda_ops.testing.sanitizer import Finding, Known, Run, judge, parse, read_ledger
from cuda_ops.testing.subject import Subject

OUTPUT = """\
========= COMPUTE-SANITIZER
cuda_ops checks silu
cuda_ops checks bad
========= Invalid __global__ read of size 4 bytes
=========     at void neighbor_kernel<float>(const T1 *, T1 *, long)+0x90 in bad.cu:12
=========     by thread (3,0,0) in block (0,0,0)
=========
========= Invalid __global__ read of size 8 bytes
=========     at void neighbor_kernel<double>(const T1 *, T1 *, long)+0x90 in bad.cu:12
=========
========= ERROR SUMMARY: 2 errors
"""


def test_findings_name_operator_and_source_line() -> None:
    first, second = parse("memcheck", OUTPUT)
    assert (first.tool, first.op) == ("memcheck", "bad") and "in bad.cu:12" in str(first)
    assert second.text.startswith("Invalid __global__ read of size 8 bytes")


def test_the_ledger_excuses_findings_and_expires(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.txt"
    ledger.write_text("# known\nmemcheck | bad | size 4 bytes | padded by the test\n")
    (known,) = read_ledger(ledger)
    assert known == Known("memcheck", "bad", "size 4 bytes", "padded by the test")
    run = Run(("memcheck",), ("silu", "bad"), tuple(parse("memcheck", OUTPUT)))
    assert judge(run, [known]).new == run.findings[1:]
    assert judge(replace(run, findings=run.findings[:1]), [known]).passed
    clean = judge(replace(run, findings=()), [known])
    assert not clean.passed and "which was not found: delete the entry" in str(clean)
    assert judge(replace(run, findings=(), ops=("silu",)), [known]).passed
    assert not judge(Run(("memcheck",), ("f",), (Finding("memcheck", "f", "x"),)), []).passed
    ledger.write_text("memcheck | bad | size 4 bytes |\n")
    with pytest.raises(ValueError, match=r"ledger.txt:1: expected TOOL \| OP"):
        read_ledger(ledger)


@needs_no_gpu
def test_without_a_gpu_the_sanitizer_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sanitize", "silu"]) == 2
    assert "compute-sanitizer was not run: no CUDA device" in capsys.readouterr().err


@pytest.fixture
def stand_in_for_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU and the tools, as far as an operator without a CUDA kernel sees of them."""
    monkeypatch.setattr(sanitizer, "why_not", lambda: "")
    monkeypatch.setattr(Subject, "why_not", lambda subject, device: "no CUDA kernel in this build")


@pytest.mark.usefixtures("stand_in_for_the_sanitizer")
def test_the_sanitizer_says_which_operators_have_no_cuda_kernel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sanitize", "silu", "--tool", "memcheck"]) == 0
    said = capsys.readouterr().out
    assert "not run silu: no CUDA kernel in this build" in said
    assert "memcheck on 0 operators: 0 findings" in said


_CUT_SHORT = """\
#!{python}
import sys
for op in sys.argv[sys.argv.index("cuda_ops.testing.sanitized_calls") + 1 :]:
    print(f"cuda_ops checks {{op}}")
    if op in ("add", "relu"):
        print("========= Invalid __global__ read of size 4 bytes\\n=========")
    if op == "add":  # and 3 more, of whichever operator
        print("========= ERROR SUMMARY: 10003 errors")
        print("========= ERROR SUMMARY: 3 errors were not printed. Use --print-limit option")
        break
"""


def test_a_tool_that_prints_no_more_is_run_again_for_the_operators_that_follow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(_CUT_SHORT.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sanitizer, "why_not", lambda: "")
    monkeypatch.setattr(sanitizer, "_program", lambda: str(program))
    monkeypatch.setattr(Subject, "why_not", lambda subject, device: "")
    run = sanitizer.run(("silu", "add", "relu"), ("memcheck",))
    assert [finding.op for finding in run.findings] == ["add", "relu"]
    known = [Known("memcheck", op, "Invalid", "of this test") for op in ("add", "relu")]
    verdict = judge(run, known)
    assert not verdict.passed and not verdict.new
    assert "memcheck, add: more findings than the 10000 it prints" in str(verdict)
