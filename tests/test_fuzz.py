"""The fuzzer: what it draws, what it finds, and that it finds nothing in what is shipped."""

from __future__ import annotations

import errno
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cuda_ops.testing.__main__ import main
from cuda_ops.testing.fuzzing import campaign as campaigns
from cuda_ops.testing.fuzzing.black_box import BlackBox
from cuda_ops.testing.fuzzing.calls import Call, Finding, Passed, drawn
from cuda_ops.testing.fuzzing.campaign import Campaign, Result
from cuda_ops.testing.fuzzing.child import LONGEST, Session
from cuda_ops.testing.fuzzing.choices import Choices
from cuda_ops.testing.fuzzing.judge import Judge
from cuda_ops.testing.subject import Origin, find
from cuda_ops.testing.worker import load_origin

REGRESSIONS = Path(__file__).with_name("fuzz_regressions.txt")
#: Operators that each do one thing wrong.
BAD = '''
"""Operators for the fuzzer to find."""

import os
import signal
import time

import torch

from cuda_ops.testing import describe

library = torch.library.Library("fuzz_bad", "DEF")
keep = []


def copied(x):
    # torch's own clone dies of a tensor whose memory was freed.
    if x.numel() and not x.untyped_storage().nbytes():
        raise ValueError(f"fuzz_bad: argument 'x': expected memory, got none of {x.numel()} values")
    return x.clone()


def refuse(op, x):
    if type(x) is not torch.Tensor or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"fuzz_bad::{op}: argument 'x': expected float32, got {x.dtype}")


def asserting(x):
    assert x.dim() > 0, "asserting: no dims"
    return copied(x)


def nameless(x):
    if x.dtype != torch.float32:
        raise RuntimeError("no such kernel")
    return copied(x)


def writing(x):
    result = copied(x)
    if x.is_floating_point() and x.numel() and x.is_contiguous():
        x.view(-1)[0] += 1
    return result


def leaking(x):
    if x.dtype != torch.float32:
        keep.append(bytes(1000))
    refuse("leaking", x)
    return copied(x)


def lying(x):
    return copied(x).unsqueeze(0) if x.dim() > 2 else copied(x)


def crashing(x):
    if x.dim() == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    return copied(x)


def hanging(x):
    while x.dtype == torch.int64:
        time.sleep(1)
    return copied(x)


def good(x):
    refuse("good", x)
    return copied(x)


for function in (asserting, nameless, writing, leaking, lying, crashing, hanging, good):
    name = function.__name__
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, function, "CPU")
    library.impl(name, lambda x: torch.empty_like(x), "Meta")
    describe(f"fuzz_bad::{name}", "(n)->(n)", reference=torch.clone, dtypes=[torch.float32],
             differentiable=False)
'''


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    yield  # calls of DTensors make one
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")  # a process can load it once, and may come back to this module
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "fuzz_bad_ops.py"
    path.write_text(BAD)
    return path


def run(bad: Path, name: str, folder: Path) -> Finding:
    """Returns the call that ended the process."""
    campaign = Campaign([f"fuzz_bad::{name}"], Origin(file=str(bad)), folder, "chance")
    result = campaign.run(60, runs=400)
    (death,) = [finding for finding in result.findings if "the process" in finding.text]
    return death


# --- what is drawn ---------------------------------------------------------------------


def test_equal_bytes_are_equal_calls() -> None:
    subject = find("matmul")
    data = random.Random(3).randbytes(LONGEST)
    assert drawn(Choices(data), subject) == drawn(Choices(data), subject)
    assert drawn(Choices(b""), subject) == drawn(Choices(bytes(LONGEST)), subject)


def test_calls_differ_in_all_that_they_may() -> None:
    subject, bytes_of = find("softmax_cross_entropy"), random.Random(1)
    calls = [drawn(Choices(bytes_of.randbytes(LONGEST)), subject) for _ in range(400)]
    assert {call.function for call in calls} == {
        "cuda_ops.softmax_cross_entropy",
        "torch.ops.cuda_ops.softmax_cross_entropy",
        "torch.ops.cuda_ops.softmax_cross_entropy.default",
    }
    assert len({call.way for call in calls}) > 15
    changed = [sum(one.text != one.valid for one in call.arguments) for call in calls]
    assert {0, 1, 2, 3} <= set(changed) and Counter(changed).most_common(1)[0][0] == 1
    assert any(one.name == "bogus" for call in calls for one in call.arguments)


def test_a_call_is_kept_as_text_and_made_simpler() -> None:
    wrong = Passed("None", "tensor((3,))")
    call = Call("silu", "cuda_ops.silu", (wrong, Passed("1", "", "bogus")), "torch.vmap({})")
    assert str(call) == "silu: torch.vmap(cuda_ops.silu)(None, bogus=1)"
    assert Call.from_json(call.as_json()) == call
    assert {str(simpler) for simpler in call.simpler()} >= {
        "silu: cuda_ops.silu(None, bogus=1)",
        "silu: torch.vmap(cuda_ops.silu)(tensor((3,)), bogus=1)",
        "silu: torch.vmap(cuda_ops.silu)(None)",
    }


def test_a_parent_reads_what_ran(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "box")
    box.count("refused")
    box.begin("silu: cuda_ops.silu(None)")
    begun, counts, line = BlackBox(tmp_path / "box").read()
    assert (begun, counts["refused"], line) == (1, 1, "silu: cuda_ops.silu(None)")
    box.end()
    assert BlackBox(tmp_path / "box").read()[2] == ""


# --- what is judged --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("silu: cuda_ops.silu(tensor((3,)))", "returned"),
        ("silu: cuda_ops.silu(None)", "refused"),
        ("silu: torch.ops.cuda_ops.silu(tensor((3,), dtype=torch.int32))", "refused"),
        ("silu: torch.vmap(cuda_ops.silu)(tensor((), dtype=torch.float32))", "unmade"),
        ("silu: cuda_ops.silu(tensor((3,)).view(7))", "unmade"),
        ("silu: cuda_ops.silu(tensor(()).expand(2**31))", "large"),
        ("silu: cuda_ops.silu(tensor((), dtype=torch.int32).expand(2**62))", "refused"),
        ("silu: cuda_ops.silu(shrunk(tensor((64,))))", "refused"),
        ("silu: cuda_ops.silu(freed(tensor((64,))))", "refused"),
    ],
)
def test_a_call_is_judged(line: str, status: str) -> None:
    verdict = Judge(find("silu"))(line)
    assert verdict.status == status, verdict


@pytest.mark.parametrize("line", ["silu: 3", "silu: cuda_ops.add(1, 2)", "silu: cuda_ops.silu(("])
def test_what_is_no_call_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="expected silu: and a call of it"):
        Judge(find("silu"))(line)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("asserting", "an exception of the wrong type: AssertionError: asserting: no dims"),
        ("nameless", "an error that does not name the operator: RuntimeError: no such kernel"),
        ("writing", "an argument changed that the operator does not write"),
        ("leaking", "each refused call keeps memory"),
        ("lying", "not as the fake"),
    ],
)
def test_a_bad_operator_is_found(name: str, text: str, bad: Path, tmp_path: Path) -> None:
    load_origin(Origin(file=str(bad)))
    session = Session([find(f"fuzz_bad::{name}")], BlackBox(tmp_path / "box"))
    session.looks_for_leaks = name == "leaking"
    bytes_of = random.Random(1)
    for _ in range(200):
        session.one(bytes_of.randbytes(LONGEST))
        if any(text in finding.text for finding in session.found.values()):
            break  # what leaks is repeated thousands of times
    found = [finding.text for finding in session.found.values()]
    assert any(text in said for said in found), found


@pytest.mark.slow
def test_a_crash_is_found_and_made_simple(
    bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaigns, "_MOST_DEATHS", 1)
    found = run(bad, "crashing", tmp_path)
    assert found.text.startswith("the process died of SIGSEGV:") and "Segmentation" in found.text
    call = found.line.partition(": ")[2]
    assert call.startswith("torch.ops.fuzz_bad.crashing") and call.count("(") < 12
    campaign = Campaign([], Origin(file=str(bad)), tmp_path, "chance")
    assert campaign.again(found.line).form == "finding"
    assert campaign.again("fuzz_bad::crashing: torch.ops.fuzz_bad.crashing(tensor((3,)))") == (
        Finding("fuzz_bad::crashing: torch.ops.fuzz_bad.crashing(tensor((3,)))", "", "returned")
    )


@pytest.mark.slow
def test_what_torch_dies_of_is_no_finding(bad: Path, tmp_path: Path) -> None:
    x = "torch.quantize_per_tensor(tensor((3,)), 0.5, 0, torch.qint8)"
    line = f"fuzz_bad::good: torch.ops.fuzz_bad.good(torch._neg_view({x}).resolve_neg())"
    campaign = Campaign([], Origin(file=str(bad)), tmp_path, "chance")
    assert campaign.again(line).form == "unmade"


@pytest.mark.slow
def test_a_hang_is_found(bad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "_MOST_WAITING", 8.0)
    monkeypatch.setattr(campaigns, "_MOST_DEATHS", 1)
    monkeypatch.setattr(campaigns, "_MOST_SHRINKS", 0)
    found = run(bad, "hanging", tmp_path)
    assert "waits for 8 s" in found.text and "in hanging" in found.text


# --- what is shipped -------------------------------------------------------------------


def lines() -> list[str]:
    said = REGRESSIONS.read_text().splitlines()
    return [line for line in said if line and not line.startswith("#")]


@pytest.mark.parametrize("line", lines())
def test_what_was_found_stays_mended(line: str) -> None:
    verdict = Judge(find(line.partition(": ")[0]))(line)
    assert verdict.status in ("refused", "returned"), verdict


@pytest.mark.parametrize("name", ["silu", "matmul", "softmax_cross_entropy", "rotary_embedding_"])
def test_a_short_run_finds_nothing(name: str, tmp_path: Path) -> None:
    session = Session([find(name)], BlackBox(tmp_path / "box"))
    session.looks_for_leaks = False
    bytes_of = random.Random(name)
    for _ in range(150):
        session.one(bytes_of.randbytes(LONGEST))
    assert session.found == {}
    counts = session.box.read()[1]
    assert counts["refused"] > 20 and counts["returned"] > 20, counts


@pytest.mark.slow
def test_the_command_reports(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "found.json"
    options = ["--file", str(bad), "--by-chance", "--minutes", "0.15", "--json", str(written)]
    assert main(["fuzz", "fuzz_bad::nameless", *options]) == 1
    said = capsys.readouterr().out
    assert "FOUND  an error that does not name the operator" in said
    assert f"fuzz --file {bad} --again" in said and " calls in " in said
    found = json.loads(written.read_text())
    assert found["findings"] and found["counts"]["finding"] > 0
    assert main(["fuzz", "--file", str(bad), "--again", found["findings"][0]["line"]]) == 1
    good = "fuzz_bad::good: torch.ops.fuzz_bad.good(tensor((3,)))"
    assert main(["fuzz", "--file", str(bad), "--again", good]) == 0


@pytest.mark.parametrize("line", ["silu", "silu: 3", "silu: cuda_ops.silu(", "silu: silu(\0)"])
def test_the_command_refuses_what_is_no_call(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--again", line]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {line!r}: expected silu: and a call of it\n"


@pytest.mark.parametrize(
    ("form", "status"),
    [("returned", 0), ("refused", 0), ("finding", 1), ("unmade", 2), ("large", 2)],
)
def test_what_became_of_a_repeated_call_is_the_status(
    form: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Campaign, "again", lambda self, line: Finding(line, "why", form))
    assert main(["fuzz", "--again", "silu: cuda_ops.silu(None)"]) == status


def test_a_folder_to_write_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", "silu", "--by-chance", "--json", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --json {tmp_path}: expected a file, got a folder\n"


def test_on_a_full_disk_the_summary_is_printed_and_the_file_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Campaign, "run", lambda *_: Result(counts={"returned": 7}))
    monkeypatch.setattr(os, "fsync", full)
    file = tmp_path / "found.json"
    assert main(["fuzz", "silu", "--by-chance", "--json", str(file)]) == 2
    said = capsys.readouterr()
    assert "7 calls in 0 s: 7 returned" in said.out
    assert said.err == f"error: {file}: No space left on device\n"


def test_without_atheris_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["fuzz", "silu"]) == 2
    assert 'pip install "cuda_ops[fuzz]"' in capsys.readouterr().err


@pytest.mark.slow
def test_the_fuzzer_follows_coverage(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    result = Campaign(["silu"], Origin(), tmp_path, "atheris").run(120, runs=600)
    assert result.findings == [] and sum(result.counts.values()) == 600
    assert len(list(tmp_path.iterdir())) > 20 and "places covered" in result.coverage
