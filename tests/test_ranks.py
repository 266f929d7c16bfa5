"""DTensor's rules on real ranks: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import run_python

from cuda_ops.build.compiling import build
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.registry import all_operators, registry
from cuda_ops.testing.ranks import Placed, check_ranks, ranks_markdown

BAD_OPS = Path(__file__).parent / "bad_ops"


@pytest.mark.slow
def test_rules_hold_on_two_ranks_of_a_cpu() -> None:
    found = check_ranks(["silu", "quantize", "add_rms_norm_", "matmul", "reduce_sum", "dropout"])
    assert {one.op for one in found if one.passed} == {
        "silu", "quantize", "add_rms_norm_", "matmul", "reduce_sum",
    }  # fmt: skip
    assert not [one for one in found if one.passed is False]
    (dropout,) = (one for one in found if one.passed is None)
    assert str(dropout) == "not run dropout: the sharding rule shards no dim"


@pytest.mark.slow
def test_a_wrong_rule_is_found_by_all_ranks(
    quick_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's error leaves no other waiting."""
    monkeypatch.setenv("CXX", str(quick_compiler))
    registry().add_root(BAD_OPS)
    build(registry().rescan()["bad_sharding"])
    done = run_python(
        "-m", "cuda_ops.testing", "ranks", "bad_sharding", "--root", str(BAD_OPS), "--device",
        "cpu", "--json",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "0 passed" in done.stderr or " failed" in done.stderr
    found = json.loads(done.stdout)
    assert [one["op"] for one in found if one["passed"] is False] == ["bad_sharding"] * len(found)
    assert "gathered from all ranks" in found[0]["detail"]


def test_ranks_that_there_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="argument 'ranks': expected 2 or more, got 1"):
        check_ranks(["silu"], 1)
    many = torch.cuda.device_count() + 2
    with pytest.raises(ValueError, match=f"a GPU for each of {many} ranks, got {many - 2}"):
        check_ranks(["silu"], many, "cuda")


def test_a_page_has_each_operator_and_each_reason() -> None:
    found = [
        Placed("f", "[Shard(dim=0)] -> [Shard(dim=0)]", True),
        Placed("f", "[Shard(dim=1)] -> [Shard(dim=1)]", False, "rank 1: wrong"),
        Placed("g", "", None, "composed"),
        Placed("h", "", None, "composed"),
    ]
    page = ranks_markdown(found, "2 ranks on a CPU")
    assert "\n2 ranks on a CPU.\n" in page
    assert "| `f` | 1 of 2 |" in page and "`g` |" not in page
    assert "- FAILED  f [Shard(dim=1)] -> [Shard(dim=1)]: rank 1: wrong" in page
    assert "- composed: `g`, `h`" in page
    assert "Wrong" not in ranks_markdown(found[2:], "here")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_all_rules_hold_on_two_gpus() -> None:
    # Another test of this process may have loaded operators that ranks do not know.
    shipped = all_operators(lambda pair: pair.root == BUILTIN_ROOT)
    found = check_ranks([*shipped], 2, "cuda")
    assert not [str(one) for one in found if one.passed is False]
    assert sum(one.passed is True for one in found) > 100
