"""The cases and peers of single operators: what they claim to be compared with."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import moe_peers, moe_tiles, peers
from cuda_ops.benchmarking.choice import BestOf
from cuda_ops.benchmarking.peers import load_peers
from cuda_ops.ops import _moe, bitonic_sort, matmul, moe
from cuda_ops.spec import OpSpec, Peer

CPU = torch.device("cpu")


def spec(name: str) -> OpSpec:
    text = f"{name}(Tensor x) -> Tensor"
    parsed = torch._C.parse_schema(text)
    return OpSpec(name, name, text, parsed, None, (torch.float32,), "", ("CPU",), False)


# --- sorts --------------------------------------------------------------------------------


def test_sorts_are_compared_with_torch_as_users_call_it_and_with_its_stable_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    sort = torch.sort

    def noted(x: torch.Tensor, **options: Any) -> Any:
        asked.append(options)
        return sort(x, **options)

    given = bitonic_sort.cuda_ops_peers(spec("bitonic_sort"))
    assert list(given) == ["eager", "eager stable"]
    eager = given["eager"]
    assert isinstance(eager, Peer) and eager.compared == 1
    functions, missing = load_peers(given)
    assert not missing
    monkeypatch.setattr(torch, "sort", noted)
    x = torch.tensor([[2.0, 1.0, 2.0]])
    for function in functions.values():
        assert function(x, -1, True, False)[0].tolist() == [[2.0, 2.0, 1.0]]
    assert "stable" not in asked[0] and asked[1]["stable"] is True


def test_sorts_have_cases_of_every_kind() -> None:
    cases = {case.label: case for case in bitonic_sort.cuda_ops_benchmarks(spec("bitonic_sort"))}
    assert len(cases) < 100  # a few seconds each
    kinds = [set(re.findall(r"float16|float64|int32|along dim 0|along dim 1", c)) for c in cases]
    assert set().union(*kinds) == {"float16", "float64", "int32", "along dim 0", "along dim 1"}
    for label, order in {
        "16384x1024 float32, ascending": lambda x: x.diff(dim=-1).min() >= 0,
        "16384x1024 float32, descending keys": lambda x: x.diff(dim=-1).max() <= 0,
        "16384x1024 float32, few values": lambda x: x.unique().numel() == 16,
        "16384x1024 float32, clustered": lambda x: (x - x.round()).abs().max() < 0.02,
    }.items():
        x, dim, descending, stable = cases[label].make_inputs(CPU)
        assert order(x) and dim == -1 and not descending and not stable, label
        assert cases[label].reason and cases[label].group == "other keys and dims"
    x, dim, *_ = cases["1024x16384 float32, along dim 0"].make_inputs(CPU)
    assert dim == 0 and x.stride(0) > 1 and x.numel() * 16 == cases[
        "1024x16384 float32, along dim 0"
    ].bytes  # fmt: skip
    assert cases["16384x1024 float32, descending"].make_inputs(CPU)[2] is True
    assert {case.group for case in cases.values()} == {"rows", "one row", "other keys and dims"}


# --- products -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "group"),
    [
        ((8192, 8192, 8192), torch.bfloat16, "M >= 4096"),
        ((2048, 6144, 4096), torch.float16, "M 512 to 2048"),
        ((512, 6144, 4096), torch.bfloat16, "M 512 to 2048"),
        ((128, 6144, 4096), torch.bfloat16, "M 128 and 256"),
        ((64, 6144, 4096), torch.bfloat16, "M 1 to 64"),
        ((1, 6144, 4096), torch.bfloat16, "M 1 to 64"),
        ((4096, 4097, 4096), torch.bfloat16, "odd shapes"),
        ((4095, 4095, 4095), torch.bfloat16, "odd shapes"),
        ((1000, 1000, 1000), torch.bfloat16, "odd shapes"),
        ((4096, 4096, 4096), torch.float32, "float32"),
    ],
)
def test_products_are_averaged_by_rows(
    shape: tuple[int, int, int], dtype: torch.dtype, group: str
) -> None:
    assert matmul._group(*shape, dtype) == group


def test_products_have_the_groups_that_their_summary_names() -> None:
    groups = {case.group for case in matmul.cuda_ops_benchmarks(spec("matmul")) or ()}
    assert groups == {
        "M >= 4096", "M 512 to 2048", "M 128 and 256", "M 1 to 64", "odd shapes", "float32",
    }  # fmt: skip
    assert list(matmul.cuda_ops_peers(spec("matmul"))) == ["eager", "compile"]


def test_ten_algorithms_of_the_library_are_tried() -> None:
    asked: list[tuple[int, bool]] = []

    def cublaslt_matmul(a: Any, b: Any, algorithm: int, tf32: bool) -> torch.Tensor:
        asked.append((algorithm, tf32))
        return torch.mm(a, b)

    best = peers.algorithms(cublaslt_matmul, tf32=True)
    for candidate in best.candidates.values():
        candidate(torch.ones(2, 3), torch.ones(3, 2))
    assert asked == [(i, True) for i in range(10)]
    assert set(peers.PEERS) >= {"matmul", "matmul_tf32"}


# --- mixtures of experts ------------------------------------------------------------------


def arguments(tokens: int = 7, top_k: int = 2) -> tuple[Any, ...]:
    torch.manual_seed(0)
    count, hidden, inner = 5, 8, 6
    return (
        torch.randn(tokens, hidden),
        _moe.distinct_logits(tokens, count, CPU),
        torch.randn(count, 2 * inner, hidden),
        torch.randn(count, hidden, inner),
        top_k,
    )


def experts_alone(
    x: torch.Tensor, w_gate_up: Any, w_down: Any, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    return _moe.mixture(x, w_gate_up, w_down, experts.long(), weights)


@pytest.mark.parametrize("routes", [True, False])
def test_vllm_gets_what_it_asks_for(routes: bool) -> None:
    def fused_topk(x: Any, logits: Any, top_k: int, renormalize: bool) -> tuple[Any, ...]:
        assert renormalize
        return *_moe.torch_route(logits, top_k), None

    package = SimpleNamespace(fused_experts=experts_alone)
    if routes:
        package.fused_topk = fused_topk
    args = arguments()
    torch.testing.assert_close(moe_peers.vllm(package)(*args), moe.naive(*args))


def test_hugging_face_gets_a_module_of_experts() -> None:
    def experts_forward(module: Any, x: Any, experts: Any, weights: Any) -> torch.Tensor:
        assert module.num_experts == 5 and not module.has_bias and not module.is_transposed
        gate_up = x @ module.gate_up_proj[0].mT
        torch.testing.assert_close(
            module._apply_gate(gate_up), F.silu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1]
        )
        return experts_alone(x, module.gate_up_proj, module.down_proj, weights, experts)

    args = arguments()
    torch.testing.assert_close(moe_peers.hugging_face(experts_forward)(*args), moe.naive(*args))


def test_flashinfer_gets_its_halves_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning: list[bool] = []

    class Tuned:
        def __init__(self, on: bool) -> None:
            assert on

        def __enter__(self) -> None:
            tuning.append(True)

        def __exit__(self, *error: object) -> None:
            tuning.append(False)

    def cutlass_fused_moe(
        x: Any, experts: Any, weights: Any, up_gate: Any, w_down: Any, dtype: Any, **options: Any
    ) -> list[torch.Tensor]:
        assert experts.dtype is torch.int32 and dtype is x.dtype
        assert options["tune_max_num_tokens"] == 8192 and options["quant_scales"] is None
        up, gate = up_gate.chunk(2, 1)
        return [experts_alone(x, torch.cat([gate, up], 1), w_down, weights, experts)]

    module = ModuleType("flashinfer")
    module.autotune = Tuned  # type: ignore[attr-defined]  # a fake of the package
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", module)
    peer = moe_peers.UpFirst(SimpleNamespace(cutlass_fused_moe=cutlass_fused_moe))
    first, second = arguments(), arguments()
    peer.before([first, second])
    torch.testing.assert_close(peer(*first), moe.naive(*first))
    assert tuning == [True, False] and len(peer._swapped) == 2
    first[2].mul_(2)  # the next train has other values
    peer.before([first])
    torch.testing.assert_close(peer(*first), moe.naive(*first))
    assert tuning == [True, False] and len(peer._swapped) == 1


def test_triton_tries_the_tiles_that_suit_so_many_tokens() -> None:
    chosen: list[int] = []
    best = moe_peers.tiled(lambda *args, choice: chosen.append(choice))
    assert isinstance(best, BestOf)
    for candidate in best.candidates.values():
        candidate()
    assert chosen == list(range(moe_tiles.CANDIDATES))


def test_the_table_has_tiles_for_any_number_of_tokens() -> None:
    heights = []
    for each in (0.01, 1, 16, 31, 64, 256, 16384):
        tiles = moe_tiles.tiles(each)
        assert len(set(tiles)) == moe_tiles.CANDIDATES
        heights.append(tiles[0].m)
        for tile in tiles:
            assert all(size & (size - 1) == 0 and size >= 16 for size in tile[:3])
            # Both operands of each stage fit the shared memory of a Hopper GPU.
            assert (tile.m + tile.n) * tile.k * 2 * tile.stages <= 227 << 10
            # A thread keeps the sums in registers.
            assert tile.m * tile.n / (32 * tile.warps) <= 128
    assert heights == sorted(heights) and heights[0] == 16 and heights[-1] == 128
    assert moe_tiles.tiles(1024)[0][:3] == (128, 256, 64)


def test_mixtures_have_long_and_skewed_cases() -> None:
    cases = {case.label: case for case in moe.cuda_ops_benchmarks(spec("moe"))}
    assert "Qwen3-30B-A3B, T=32768 bfloat16" in cases
    skewed = [label for label, case in cases.items() if case.group == "skewed"]
    assert skewed and all(label.endswith(", skewed") for label in skewed)
    assert {case.group for case in cases.values()} == {
        "T 1 to 64", "T >= 512", "skewed", "training",
    }  # fmt: skip
    assert cases[skewed[0]].bytes == cases[skewed[0].removesuffix(", skewed")].bytes


def test_skewed_tokens_choose_by_zipfs_law_and_meet_every_expert() -> None:
    torch.manual_seed(1)
    drawn = _moe.distinct_logits(4096, 128, CPU, skewed=True)
    assert torch.equal(drawn.sort(-1).values, torch.linspace(-4, 4, 128).expand(4096, 128))
    often = torch.bincount(drawn.argmax(-1), minlength=128)
    expected = 4096 / torch.arange(1, 129) / (1 / torch.arange(1, 129)).sum()
    assert ((often - expected).abs() < 6 * expected.sqrt() + 1).all()
    assert drawn.topk(8).indices.unique().numel() == 128


def test_no_peer_needs_its_package_before_it_is_loaded() -> None:
    every: dict[str, Callable[..., Any] | Peer] = {
        f"{op} {name}": peer for op, named in peers.PEERS.items() for name, peer in named.items()
    }
    assert {"moe vllm", "moe flashinfer", "moe transformers", "moe sonicmoe"} <= every.keys()
    outside = {k: p for k, p in every.items() if k.startswith("moe ") and "triton" not in k}
    ready, missing = load_peers(outside)
    assert ready.keys() | missing.keys() == outside.keys()
