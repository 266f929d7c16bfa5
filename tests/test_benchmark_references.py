"""Peers made of the reference of a plugin: what has them, when they are fair, and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from reports import rendered

from cuda_ops.benchmarking import reference_peers as module
from cuda_ops.benchmarking.clock import host_latency
from cuda_ops.benchmarking.compare import Settings
from cuda_ops.benchmarking.kit import Kit, cases_of
from cuda_ops.benchmarking.reference_peers import Gradient, ReferencePeer, reference_peers
from cuda_ops.benchmarking.results import CaseResult
from cuda_ops.benchmarking.rotation import maker
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.compile_ops import reload
from cuda_ops.errors import BenchmarkError
from cuda_ops.registry import all_operators, registry
from cuda_ops.spec import BenchmarkCase, OpSpec

CPU = torch.device("cpu")
QUICK = Settings(precision=100.0, seconds=0.0)


def spec(name: str, pair: str = "silu") -> OpSpec:
    reload(pair)
    found: OpSpec = registry().operators(pair)[name].spec
    return found


def answers(
    references: dict[str, Callable[..., Any]],
    cases: list[BenchmarkCase] | None = None,
    peers: dict[str, Any] | None = None,
) -> Any:
    """Answers as plugins do that give these references by operator, and derive the others."""

    def ask(hook: str, op: OpSpec) -> Any:
        if hook == "cuda_ops_benchmarks":
            return cases
        if hook == "cuda_ops_reference" and op.name in references:
            return references[op.name]
        return registry().plugins.ask(hook, op) if hook == "cuda_ops_autograd" else op.overload

    return SimpleNamespace(ask=ask, peers=lambda op: peers)


def case(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> BenchmarkCase:
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    moved = 2 * numel * dtype.itemsize
    inputs = maker(tuple((shape, dtype) for shape in shapes))
    return BenchmarkCase("a case", inputs, bytes=moved, dtype=dtype)


def measured(
    op: OpSpec, references: dict[str, Callable[..., Any]], one: BenchmarkCase, peer: str = "eager"
) -> CaseResult:
    hooks = answers(references, [one])
    ask = hooks.ask

    def claimless(hook: str, op: OpSpec) -> Any:
        return None if hook == "cuda_ops_claims" else ask(hook, op)

    hooks.ask = claimless
    (found,) = Kit(CPU, QUICK, {peer}).measure(op, hooks)
    assert not found.error, found.error
    return found


# --- which operators get them -----------------------------------------------------------------


def test_a_reference_is_a_peer_where_no_plugin_names_one() -> None:
    op, one = spec("silu"), [case((64,))]
    silu = {"silu": F.silu}
    (found,) = cases_of(op, answers(silu, one))
    assert list(found.peers) == ["eager", "compile"]
    assert cases_of(op, answers(silu, one, {}))[0].peers == {}  # a plugin that wants none
    assert list(cases_of(op, answers(silu, one, {"theirs": F.silu}))[0].peers) == ["theirs"]
    assert cases_of(op, answers({}, one))[0].peers == {}  # its own kernel is no peer
    backward = spec("silu_backward")
    assert list(reference_peers(backward, answers(silu))) == ["eager", "compile"]
    assert reference_peers(spec("silu_backward_backward"), answers(silu)) == {}


def test_of_the_operators_of_this_project_few_are_compared_with_a_reference() -> None:
    """Each is listed here since its reference is a fair peer; others name theirs, or ``{}``."""
    found = {
        name
        for name, operator in all_operators(lambda pair: pair.root == BUILTIN_ROOT).items()
        for one in cases_of(operator.spec, registry().plugins)
        if any(isinstance(peer, ReferencePeer) for peer in one.peers.values())
    }
    assert found == {"layer_norm_backward", "rms_norm_backward"}


# --- when they are fair -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_is_timed_in_the_dtype_of_the_case_and_named(dtype: torch.dtype) -> None:
    seen: set[torch.dtype] = set()

    def reference(x: torch.Tensor) -> torch.Tensor:
        seen.add(x.dtype)
        return x * torch.tensor(1.0, dtype=torch.float64) * x.sigmoid()  # a number is not wide

    found = measured(spec("silu"), {"silu": reference}, case((64,), dtype=dtype))
    assert found.peers["eager"].ratio is not None
    assert seen == {dtype, torch.float64}  # as a peer, and to compare with
    assert found.notes == ("eager is the reference of the plugin",)
    text = rendered(Kit(CPU, QUICK).report([found]))
    assert "silu: eager is the reference of the plugin" in text


def test_the_note_on_a_compiled_reference_says_so() -> None:
    peers = reference_peers(spec("silu"), answers({"silu": F.silu}))
    assert [peer.note for peer in peers.values() if isinstance(peer, ReferencePeer)] == [
        "eager is the reference of the plugin",
        "compile is torch.compile of the reference of the plugin",
    ]


def refusing(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float64:
        raise TypeError(f"wants float64, got {x.dtype}")
    return F.silu(x)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (lambda x: F.silu(x.double()), "the reference returns float64, the operator float32"),
        (lambda x: F.silu(x.double()).to(x.dtype), "the reference computes in float64"),
        (refusing, "TypeError: wants float64, got torch.float32"),
    ],
)
@pytest.mark.parametrize("peer", ["eager", "compile"])
def test_a_reference_that_is_no_fair_peer_is_missing(
    reference: Callable[..., Any], reason: str, peer: str
) -> None:
    found = measured(spec("silu"), {"silu": reference}, case((64,)), peer)
    assert found.peers[peer].missing == reason


def test_a_case_in_float64_has_a_reference_in_float64() -> None:
    found = measured(spec("silu"), {"silu": refusing}, case((64,), dtype=torch.float64))
    assert found.peers["eager"].ratio is not None


def test_a_reference_that_takes_hours_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.01)

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return F.silu(x)

    missing = measured(spec("silu"), {"silu": slow}, case((64,))).peers["eager"].missing
    assert missing.startswith("a call of the reference takes 0.02"), missing
    assert "s, too long for " in missing and missing.endswith(" in a train")


# --- backward ---------------------------------------------------------------------------------


def gradient(function: Callable[..., Any], op: OpSpec) -> Gradient:
    formula = registry().plugins.ask("cuda_ops_autograd", op)
    return Gradient(function, op, formula.backward.__self__)


def test_a_gradient_is_compared_with_autograd_of_the_reference() -> None:
    op = spec("silu_backward")
    found = measured(op, {"silu": F.silu}, case((64,), (64,)))
    assert found.peers["eager"].ratio is not None, found.peers["eager"].missing
    (note,) = found.notes
    assert note == "eager is autograd of the reference of silu, whose forward is not timed"
    wrong = measured(op, {"silu": torch.relu}, case((64,), (64,)))
    assert "eager differs from the reference" in wrong.peers["eager"].missing


def test_the_forward_runs_before_the_time_only() -> None:
    calls = 0

    def reference(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return F.silu(x)

    peer = gradient(reference, spec("silu"))
    trains = [(torch.randn(8), torch.randn(8)) for _ in range(3)]
    peer.before(trains)
    assert calls == 3
    host_latency({"peer": lambda: peer(*trains[0])}, CPU, rounds=2, calls=2)
    for grad_out, x in trains:
        (got,) = peer(grad_out, x)
        torch.testing.assert_close(got, torch.ops.aten.silu_backward(grad_out, x))
        assert not x.requires_grad
    assert calls == 3
    with torch.no_grad():
        trains[0][1].add_(1)  # the next train has other values
        peer.before(trains)
        (got,) = peer(*trains[0])
    torch.testing.assert_close(got, torch.ops.aten.silu_backward(*trains[0]))
    with pytest.raises(BenchmarkError, match="autograd of it takes no keywords, got x"):
        peer(trains[0][0], x=trains[0][1])


def test_a_compiled_backward_may_run_again_on_what_one_forward_left() -> None:
    compiled, donated = torch.compile(lambda x: x.sin().exp().sin(), backend="aot_eager"), []

    def noting(x: torch.Tensor) -> torch.Tensor:
        donated.append(functorch_config.donated_buffer)  # torch's cache tells both kinds apart
        result: torch.Tensor = compiled(x)
        return result

    peer = gradient(noting, spec("silu"))
    args = torch.randn(8), torch.randn(8)
    peer.before([args])
    first, second = peer(*args), peer(*args)
    assert torch.equal(first[0], second[0]) and donated == [False]


def test_a_gradient_that_is_what_came_in_is_written_out() -> None:
    peer = gradient(lambda x: x + 1, spec("silu"))
    grad_out, x = torch.randn(8), torch.randn(8)
    (got,) = peer(grad_out, x)
    assert torch.equal(got, grad_out) and got.data_ptr() != grad_out.data_ptr()
    rows = gradient(lambda x, w, b, eps: (x + w + b).exp(), spec("layer_norm", "layer_norm"))
    args = [torch.randn(4) for _ in range(4)]
    assert len({got.data_ptr() for got in rows(*args)}) == 3


def test_gradients_that_do_not_take_what_the_reference_takes_are_missing() -> None:
    relu = spec("relu", "relu")
    with pytest.raises(
        BenchmarkError, match="relu_backward does not take 'x', which autograd of the reference of "
    ):
        gradient(torch.relu, relu)(torch.randn(8), torch.randn(8))
    sources = [("grad", 0, True), ("input", 0, True), ("output", 0, True)]
    of_both: Any = SimpleNamespace(
        sibling=spec("silu_backward_backward"), sources=sources, targets=(0,)
    )
    with pytest.raises(BenchmarkError, match=r"takes 'out', which autograd of .* would compute"):
        Gradient(F.silu, spec("silu"), of_both)(*(torch.randn(8) for _ in range(3)))
    backward = spec("relu_backward", "relu")
    found = measured(backward, {"relu": torch.relu}, case((64,), (64,)))
    assert found.peers["eager"].missing.startswith("relu_backward does not take 'x', which ")
