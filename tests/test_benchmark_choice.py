"""Peers that have several candidates, and what is done before their time starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reports import rendered

from cuda_ops.benchmarking import command
from cuda_ops.benchmarking.choice import BestOf, choose, wrapped
from cuda_ops.benchmarking.clock import CpuClock, Train
from cuda_ops.benchmarking.compare import Settings
from cuda_ops.benchmarking.kit import Kit
from cuda_ops.benchmarking.peers import compiled, from_pair
from cuda_ops.benchmarking.rotation import Rotation, maker
from cuda_ops.benchmarking.sustained import sustained
from cuda_ops.benchmarking.training import with_gradients
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.compile_ops import reload
from cuda_ops.errors import BenchmarkError
from cuda_ops.registry import registry
from cuda_ops.spec import BenchmarkCase, Peer

CPU = torch.device("cpu")


class SetClock(CpuClock):
    """Takes the seconds that a function states, and really calls it."""

    def train(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        prepare: Callable[[], None] = lambda: None,
    ) -> Train:
        prepare()
        outputs = [function(*args) for args in arguments]
        return Train(getattr(function, "seconds", 1.0), outputs)


def taking(seconds: float, function: Callable[..., Any] = F.silu) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        return function(*args)

    timed.seconds = seconds  # type: ignore[attr-defined]  # functions have no such type
    return timed


def case(**more: Any) -> BenchmarkCase:
    return BenchmarkCase("64", maker((((64,), torch.float32),)), bytes=512, **more)


@pytest.fixture(scope="module")
def silu() -> Any:
    reload("silu")
    return registry().operators("silu")["silu"].spec


def measured(op: Any, kit: Kit, peers: dict[str, Any], which: BenchmarkCase | None = None) -> Any:
    answers = {"cuda_ops_benchmarks": [which or case()], "cuda_ops_reference": F.silu}
    plugins: Any = SimpleNamespace(ask=lambda hook, op: answers.get(hook), peers=lambda op: peers)
    (found,) = kit.measure(op, plugins)
    assert not found.error, found.error
    return found


def refusing(*args: Any) -> Any:
    raise RuntimeError("no such tile\nat line 3")


# --- the choice -------------------------------------------------------------------------


def test_the_fastest_candidate_is_taken_and_the_others_are_named() -> None:
    best = BestOf({"slow": taking(3.0), "fast": taking(2.0), "none": refusing})
    told: list[str] = []
    rotation = Rotation(case(), CPU, 2)
    clock = SetClock(CPU, lambda: None)
    choice = choose(best, rotation, None, clock, progress=told.append)
    assert choice.name == "fast"
    assert choice.text == "fast (slow 1.50x, none not: RuntimeError: no such tile)"
    assert told == ["first calls of slow", "first calls of fast", "first calls of none"]


def test_without_a_candidate_that_runs_the_first_reason_is_given() -> None:
    best = BestOf({"one": refusing, "two": refusing})
    with pytest.raises(
        BenchmarkError, match=r"none of its 2 candidates .* one: RuntimeError: no such tile$"
    ):
        choose(best, Rotation(case(), CPU, 2), None, SetClock(CPU, lambda: None))
    with pytest.raises(ValueError, match="expected at least one candidate"):
        BestOf({})


def test_a_candidate_that_is_wrong_is_not_taken_however_fast(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=100.0, seconds=0.0))
    kit.clock = SetClock(CPU, lambda: None)
    best = BestOf({"wrong": taking(0.1, torch.relu), "right": taking(2.0)})
    found = measured(silu, kit, {"library": Peer(lambda: best)})
    peer = found.peers["library"]
    assert peer.ratio is not None
    assert peer.took.startswith("right (wrong not: differs from the reference")
    text = rendered(kit.report([found]))
    assert "silu: library is the fastest of several in each case: right in 1" in text


def test_a_peer_without_a_right_candidate_is_missing(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=100.0, seconds=0.0))
    best = BestOf({"wrong": torch.relu})
    found = measured(silu, kit, {"library": Peer(lambda: best), "eager": F.silu})
    assert "none of its 1 candidates can be used; wrong: differs" in found.peers["library"].missing
    assert found.peers["eager"].ratio is not None


def test_candidates_are_wrapped_one_by_one() -> None:
    best = wrapped(with_gradients, BestOf({"a": F.silu, "b": torch.tanh}))
    x = torch.ones(3)
    (_, grad), expected = best.candidates["b"](x), 1 - torch.tanh(x) ** 2
    torch.testing.assert_close(grad, torch.tanh(x) * expected)
    assert torch.equal(BestOf({"a": F.silu, "b": torch.tanh})(x), F.silu(x))


def test_a_training_step_chooses_too(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=100.0, seconds=0.0))
    best = BestOf({"refused": refusing, "plain": F.silu})
    found = measured(silu, kit, {"library": Peer(lambda: best)}, case(backward=True))
    assert found.peers["library"].took == "plain (refused not: RuntimeError: no such tile)"


# --- compiled ---------------------------------------------------------------------------


def test_a_compiled_peer_is_the_better_of_both_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def noted(function: Any, **options: Any) -> Any:
        asked.append(options.get("mode"))
        return function

    monkeypatch.setattr(torch, "compile", noted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    best = compiled(F.silu).load()
    assert isinstance(best, BestOf) and list(best.candidates) == ["default", "max-autotune"]
    assert asked == [None, "max-autotune-no-cudagraphs"]
    assert compiled(F.silu, mode="reduce-overhead").load() is F.silu
    assert asked[2:] == ["reduce-overhead"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compiled(F.silu).load() is F.silu  # tuning takes minutes on a CPU


def test_a_pair_may_be_adapted_to_candidates(silu: Any) -> None:
    def adapt(op: Any) -> BestOf:
        return BestOf({"only": op})

    best = from_pair(BUILTIN_ROOT, "silu", adapt=adapt).load()
    x = torch.ones(3)
    assert isinstance(best, BestOf)
    torch.testing.assert_close(best.candidates["only"](x), F.silu(x))


# --- before the time --------------------------------------------------------------------


class Doubling:
    """Keeps twice its argument, and so needs the values of each train."""

    def __init__(self, doubled: bool = True) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    def before(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        time.sleep(0.001)
        self.kept = {args[0].data_ptr(): args[0] * 2 for args in arguments}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.kept[x.data_ptr()] / 2)


def test_what_a_peer_keeps_is_made_anew_before_each_train(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=100.0, seconds=0.0))
    peers = {"keeps": Doubling(), "one of": Peer(lambda: BestOf({"keeps": Doubling()}))}
    found = measured(silu, kit, peers)
    assert found.peers["keeps"].ratio is not None and found.peers["one of"].ratio is not None
    # The copies are outside of the time, which a sleep of 1 ms in each train would exceed.
    kept = Doubling()
    again = wrapped(lambda f: lambda *args: f(*args), kept)
    assert again.before == kept.before and again is not kept


# --- back to back -----------------------------------------------------------------------


def test_calls_back_to_back_are_timed_in_turns_and_go_round() -> None:
    order: list[tuple[str, int]] = []

    def noting(name: str) -> Callable[[int], None]:
        def call(number: int) -> None:
            order.append((name, number))
            time.sleep(0.002)

        return call

    functions = {"a": noting("a"), "b": noting("b")}
    clock = CpuClock(CPU, lambda: None)
    taken = sustained(functions, [(0,), (1,)], clock, 0.02, {"a": 0.002, "b": 0.002})
    assert list(taken) == ["a", "b"] and all(times.low >= 0.002 for times in taken.values())
    turns = [order[0][0]]
    for name, _ in order:
        if name != turns[-1]:
            turns.append(name)
    assert turns == ["a", "b", "a", "b"]  # the second round starts with b, the third with a
    assert {number for _, number in order} == {0, 1}


def test_a_sustained_figure_is_of_ours_and_the_eager_peer(silu: Any) -> None:
    kit = Kit(CPU, Settings(precision=100.0, seconds=0.0, sustained=0.01))
    found = measured(silu, kit, {"other": F.silu, "eager": F.silu}, case(flops=64))
    assert found.sustained is not None and found.peers["eager"].sustained is not None
    assert found.peers["other"].sustained is None
    text = rendered(kit.report([found]))
    assert "silu, back to back" in text and "FLOP/s (" in text
    without = measured(silu, Kit(CPU, Settings(precision=100.0, seconds=0.0)), {"eager": F.silu})
    assert without.sustained is None


@pytest.mark.parametrize("text", ["-1", "61", "nan", "long"])
def test_seconds_back_to_back_have_bounds(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["silu", f"--sustained={text}"])
    assert f"expected seconds from 0 to 60, got '{text}'" in capsys.readouterr().err
