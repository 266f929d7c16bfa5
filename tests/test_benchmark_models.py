"""The benchmark of whole models: what it measures, what it compares first, and what it refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import model_checks, models
from cuda_ops.compile_ops import reload

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--tiny"]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    reload("moe_route", "moe_experts", "moe")


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert models.main([]) == 2
    assert "needs a CUDA GPU, and torch sees none" in capsys.readouterr().err
    assert models.main(["--device", "cpu"]) == 2
    assert "runs on a CPU with --tiny only" in capsys.readouterr().err


def test_an_old_transformers_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    assert models.main(TINY) == 2
    assert "needs transformers 5.17 or later, got 4.57.1" in capsys.readouterr().err


def test_a_file_keeps_the_cases_that_a_run_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    run = [*TINY, "--json", str(path), "--case"]
    monkeypatch.setenv("CUDA_OPS_COMMIT", "before")
    assert models.main([*run, "token", "prefill"]) == 0, capsys.readouterr().err
    first = json.loads(path.read_text())["results"]
    monkeypatch.setenv("CUDA_OPS_COMMIT", "after")
    assert models.main([*run, "prefill"]) == 0, capsys.readouterr().err
    results = json.loads(path.read_text())["results"]
    commits = {name: known["commit"] for name, known in results["environments"].items()}
    assert commits == {"Qwen3-30B-A3B, token": "before", "Qwen3-30B-A3B, prefill": "after"}
    tokens = [row for row in first["cases"] if row["case"] == "token"]
    assert results["cases"][: len(tokens)] == tokens
    assert len(results["cases"]) == len(first["cases"]) and results["cases"] != first["cases"]


# What torch.compile says about code of transformers.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")
@pytest.mark.parametrize("name", models.CASES)
def test_a_case_has_a_row_for_each_way(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    assert models.main([*TINY, "--case", name, "--json", str(path)]) == 0, capsys.readouterr().err
    saved = json.loads(path.read_text())
    assert {"device", "date", "torch", "commit"} <= saved["environment"].keys()
    (environment,) = saved["results"]["environments"].values()
    assert environment["transformers"].startswith("5.") and saved["results"]["failed"] == []
    case, rows = models.CASES[name], saved["results"]["cases"]
    assert [row["way"] for row in rows] == [*case.peers, "use_moe"]
    for row in rows:
        assert row["model"] == "Qwen3-30B-A3B" and row["layers"] == 2
        assert row["what"] == case.text(models.TINY)
        time = row["milliseconds"]
        assert 0 < time["low"] <= time["value"] <= time["high"]
        assert row["best_peer"] in case.peers
        assert row["difference"] < 0.05
    peers = {row["way"]: row["milliseconds"]["value"] for row in rows if row["way"] in case.peers}
    assert min(peers, key=peers.__getitem__) == rows[0]["best_peer"]
    ours = rows[-1]
    assert ours["difference"] > 0, "cuda_ops did not run: it rounds at other places"
    assert (ours["gradient_difference"] is not None) == (name == "training")
    if name != "compiled":
        assert ours["weights"] < 0.01 and 0 <= ours["elsewhere"] < 0.5


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_is_made_with_all_blocks_changed(name: str) -> None:
    model = models.made(name, models.TINY, CPU)
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    copies = models.ways(model, ["eager", "grouped_mm"])
    assert [one.config._experts_implementation for one in copies.values()][:2] == [
        "eager", "grouped_mm",
    ]  # fmt: skip
    for one in copies.values():  # no copy of the weights
        for ours, theirs in zip(one.parameters(), model.parameters(), strict=True):
            assert ours is theirs
    for block in model_checks.blocks(copies["eager"]):
        assert "forward" not in vars(block.experts)
    changed = model_checks.blocks(copies["use_moe"])
    assert len(changed) == 2
    assert all(isinstance(block.experts.forward, partial) for block in changed)


# --- what is wrong is found before it is timed -------------------------------------------------


def spoilt(monkeypatch: pytest.MonkeyPatch, part: str, change: Any) -> None:
    """Changes what a part of the converted blocks returns."""
    honest = models.convert

    def convert(model: Any) -> Any:
        found = honest(model)
        for block in model_checks.blocks(model):
            module = block.get_submodule(part)
            module.forward = partial(change, module.forward)
        return found

    monkeypatch.setattr(models, "convert", convert)


def wrong_sum(forward: Any, *args: Any) -> torch.Tensor:
    out: torch.Tensor = forward(*args) * 1.2
    return out


def wrong_gradient(forward: Any, *args: Any) -> torch.Tensor:
    out = forward(*args)
    doubled: torch.Tensor = 2 * out - out.detach()
    return doubled


def wrong_weights(forward: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    logits, weights, experts = forward(*args)
    return logits, weights * 1.2, experts


@pytest.mark.parametrize(
    ("case", "part", "change", "text"),
    [
        ("prefill", "experts", wrong_sum, "logits of use_moe differ from those of eager by"),
        ("decode", "experts", wrong_sum, "logits of use_moe differ from those of eager by"),
        ("training", "experts", wrong_gradient, "gradients of use_moe differ"),
        ("token", "gate", wrong_weights, "weights of experts of use_moe differ"),
    ],
)
def test_a_wrong_way_is_not_timed(
    case: str, part: str, change: Any, text: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    spoilt(monkeypatch, part, change)
    path = tmp_path / "run.json"
    assert models.main([*TINY, "--case", case, "--json", str(path)]) == 1
    assert text in capsys.readouterr().err
    results = json.loads(path.read_text())["results"]
    assert results["cases"] == []
    (failed,) = results["failed"]
    assert failed["case"] == case and text in failed["error"]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a")
def test_a_wrong_compiled_model_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt(monkeypatch, "experts", wrong_sum)
    assert models.main([*TINY, "--case", "compiled"]) == 1
    assert "logits of half of the tokens of use_moe differ" in capsys.readouterr().err


def test_blocks_that_were_not_changed_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "convert", lambda model: models_conversion())
    model = models.made("Qwen3-30B-A3B", models.TINY, CPU)
    with pytest.raises(RuntimeError, match="use_moe did not change all blocks:\nno sparse blocks"):
        models.ways(model, ["eager"])


def models_conversion() -> Any:
    from cuda_ops.integrations import Conversion

    return Conversion()


def test_a_nan_is_a_difference() -> None:
    with pytest.raises(RuntimeError, match="logits of x differ from those of eager by nan"):
        model_checks.refuse_beyond({"x": float("nan")}, 0.05, "logits")


def test_ways_take_turns_and_only_run_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = iter(range(1000))

    def tick() -> float:
        said.append("clock")
        return float(next(clock))

    monkeypatch.setattr(models, "perf_counter", tick)

    def call(name: str) -> models.Call:
        def run(state: str, keep: int) -> None:
            assert (state, keep) == ("ready", 0)
            said.append(f"run {name}")

        def prepare() -> str:
            said.append(f"prepare {name}")
            return "ready"

        return models.Call(run, prepare)

    found = models.measure({"a": call("a"), "b": call("b")}, CPU, 3)
    assert found == {"a": [1.0] * 3, "b": [1.0] * 3}
    a, b = (["prepare " + n, "clock", "run " + n, "clock"] for n in "ab")
    assert said == [*a, *b, *b, *a, *a, *b, *b, *a, *a, *b]
