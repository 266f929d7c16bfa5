"""Tests which kernels moe chooses, and each of them on a GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import needs_gpu, plan_program
from gemm_cases import A100, H200, T4
from mixtures import ROUNDING, naive, weights

import cuda_ops
from cuda_ops.ops import _moe as references
from cuda_ops.testing.case import NotRunError
from cuda_ops.testing.memory import much_memory
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.subject import find

pytestmark = pytest.mark.usefixtures("built_mixture")


# --- which kernels ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Sizes of one mixture."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16
    aligned: bool = True

    def line(self, device: str, backward: bool) -> str:
        sizes = (self.tokens, self.top_k, self.hidden, self.inner, self.experts)
        values = (self.dtype.itemsize, device, *sizes, int(self.aligned), int(backward))
        return " ".join(map(str, values))

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        return weights(self.experts, self.hidden, self.inner, self.dtype, "cuda")

    def rows(self) -> torch.Tensor:
        skip = 0 if self.aligned else 1
        flat = torch.randn(skip + self.tokens * self.hidden, device="cuda").to(self.dtype)
        return flat[skip:].view(self.tokens, self.hidden)


#: From too few k's for two warps to enough for eight, in every pair: no choice needs large weights.
WIDTHS = (40, 264, 520, 1032)
#: The smallest case of every choice among these is run.
ANYTHING = sorted(
    (
        Case(tokens, hidden, inner, count, top_k)
        for tokens in (1, 2, 8, 20, 64, 150, 300, 700)
        for hidden, inner in itertools.product(WIDTHS, WIDTHS)
        for count, top_k in ((1, 1), (4, 1), (8, 2), (16, 8), (32, 4), (512, 16))
    ),
    key=lambda case: (case.hidden * case.inner * case.experts, case.tokens * case.top_k),
)
#: Sizes that are not multiples of a tile, and rows that are not vectors of 16 bytes.
BORDERS = [
    *(Case(tokens, hidden, inner, 5, 2, dtype)
      for tokens in (1, 3, 31, 200) for hidden, inner in ((8, 8), (8, 520), (328, 8), (136, 264))
      for dtype in (torch.bfloat16, torch.float16)),
    Case(200, 264, 72, 3, 2, aligned=False), Case(1, 264, 72, 3, 2, aligned=False),
    Case(40, 33, 17, 3, 2), Case(40, 40, 24, 3, 2, torch.float32), Case(1, 40, 24, 16, 16),
    Case(1, 40, 24, 16, 17), Case(1, 40, 24, 4, 70),
    Case(1, 4104, 2056, 3, 2), Case(2, 4104, 2056, 3, 2), Case(20, 2056, 4104, 3, 2),
    Case(1700, 24, 16, 512, 8), Case(3000, 136, 72, 4, 3), Case(900, 136, 4104, 5, 2),
    # Tall tiles; blocks take several.
    Case(300, 264, 72, 4, 2), Case(400, 136, 4104, 5, 2), Case(400, 8200, 136, 5, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the plan as a function of cases, compiled without CUDA."""
    answers = plan_program(tmp_path_factory, "moe_plan.cpp")

    def choose(cases: list[Case], device: str = H200, backward: bool = False) -> list[str]:
        return answers(case.line(device, backward) for case in cases)

    return choose


def test_the_choice(plans: Any) -> None:
    qwen = [Case(tokens, 2048, 768, 128, 8) for tokens in (1, 8, 64, 128, 512, 16384)]
    assert plans(qwen) == [
        "stream 8 splits 4 token no map",
        "stream 8 splits 4 2 no map",
        "stream 8 splits 2 2",
        *["hopper"] * 3,
    ]
    assert plans(qwen, backward=True) == ["mma"] * 3 + ["hopper"] * 3
    assert plans(qwen[3:], device=A100) == ["stream 16 splits 4 2", *["mma"] * 2]
    for backward in (False, True):
        assert plans([qwen[0], qwen[5]], device=T4, backward=backward) == ["simt"] * 2
    more = [Case(1, 2048, 768, 128, top_k) for top_k in (16, 17)]  # than one token's kernel takes
    assert ["token" in plan for plan in plans(more)] == [True, False]
    mixtral = Case(64, 4096, 14336, 8, 2)
    assert plans([mixtral]) == ["hopper"]
    assert plans([mixtral], device=A100) == ["stream 32 splits 2 8"]
    # Tall tiles are for experts with about as many rows as one tile has.
    more = [Case(tokens, 4096, 14336, 8, 2) for tokens in (448, 512, 704, 768)]
    assert plans(more) == ["hopper", "hopper tall", "hopper tall", "hopper"]
    assert plans(more, backward=True) == ["hopper"] * 4
    assert plans([Case(512, 2048, 768, 128, 8, aligned=False)]) == ["mma"]
    assert plans([Case(512, 2048, 768, 128, 8, torch.float32)]) == ["simt"]
    assert plans([Case(512, 2048, 764, 128, 8), Case(0, 8, 8, 2, 1)]) == ["mma", "nothing"]


def smallest(plans: Any) -> dict[str, Case]:
    """Returns every plan that any size gets, and the smallest case of it."""
    found: dict[str, Case] = {}
    for case, plan in zip(ANYTHING, plans(ANYTHING), strict=True):
        found.setdefault(plan, case)
    return found


def test_every_kernel_is_chosen_somewhere(plans: Any) -> None:
    chosen = smallest(plans)
    assert {"hopper", "hopper tall"} <= set(chosen)
    for tile, (rest, splits) in itertools.product(
        (8, 16, 32), (("no map", 1), ("no map", 8), ("", 1), ("", 8))
    ):
        assert any(
            plan.startswith(f"stream {tile} splits {splits} ") and plan.endswith(rest)
            for plan in chosen
        ), (tile, rest, splits)
    assert {8, 4, 2, 1} <= {int(plan.split()[3]) for plan in chosen if "token" in plan}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("device", [A100, H200, "B200"])
def test_no_plan_needs_a_kernel_that_is_left_empty(plans: Any, device: str, backward: bool) -> None:
    """ptx/planned.cuh leaves 16-bit sums of multiply-adds empty."""
    cases = [case for case in (*ANYTHING, *BORDERS) if case.dtype.itemsize == 2]
    assert "simt" not in plans(cases, device, backward)


def families(plans: list[str]) -> set[str]:
    """Returns the plans without the numbers of warps that share a K."""
    return {re.sub(r" splits \d( \d)?", "", plan) for plan in plans}


@pytest.mark.parametrize("name", ["", "_keep", "_backward"])
def test_the_sanitizer_is_shown_every_family(plans: Any, name: str) -> None:
    def case_of(sample: Sample) -> Case:
        x, _, w_down, experts, _ = (
            sample.tensors[1:6] if name == "_backward" else sample.tensors[:5]
        )
        return Case(*x.shape, w_down.shape[2], w_down.shape[0], experts.shape[1], x.dtype)

    samples = find(f"moe_experts{name}").kernel_samples
    backward, single = name == "_backward", Case(40, 40, 24, 3, 2, torch.float32)
    given = plans([*ANYTHING, *BORDERS, single], backward=backward)
    shown = plans([case_of(sample) for sample in samples], backward=backward)
    assert families(given) <= families(shown)


# --- CUDA ------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
# In the last two, blocks take several tiles: tall ones and even ones.
@pytest.mark.parametrize(
    ("tokens", "inner", "plan"),
    [
        (1, 48, "token"),
        (8, 48, "stream"),
        (300, 48, "hopper"),
        (520, 576, "tall"),
        (6000, 48, "hopper"),
    ],
)
def test_one_graph_for_every_routing(
    plans: Any, tokens: int, inner: int, plan: str, dtype: torch.dtype
) -> None:
    hidden, count, top_k = 64, 16, 4
    (chosen,) = plans([Case(tokens, hidden, inner, count, top_k, dtype)])
    assert (plan if dtype.itemsize == 2 else "simt") in chosen
    matrices = weights(count, hidden, inner, dtype, "cuda")
    x = torch.randn(tokens, hidden, dtype=dtype, device="cuda")
    logits = torch.randn(tokens, count, device="cuda")
    cuda_ops.moe(x, logits, *matrices, top_k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda_ops.moe(x, logits, *matrices, top_k)
    one = torch.zeros(count, device="cuda")
    one[3] = 50
    for new in (torch.randn_like(logits), torch.zeros_like(logits), torch.randn_like(logits) + one):
        logits.copy_(new)
        matrices[1].neg_()
        graph.replay()
        # Again at once: a kernel's reads before it waits must be of this call, not of the last one.
        logits.copy_(new.roll(1, 1))
        matrices[1].copy_(matrices[1].roll(1, 0))
        graph.replay()
        assert torch.equal(out, cuda_ops.moe(x, logits, *matrices, top_k))
        exact = naive(x.double(), logits, *(m.double() for m in matrices), top_k)
        assert (out.double() - exact).norm() <= ROUNDING[dtype] * exact.norm()


def routed(case: Case, how: str) -> torch.Tensor:
    """Returns the experts of every token: any, all the same, or some that do not exist."""
    shape = (case.tokens, case.top_k)
    if how == "one":
        return torch.full(shape, case.experts // 2, device="cuda")
    beyond = 2 if how == "beyond" else 0
    return torch.randint(-beyond, case.experts + beyond, shape, device="cuda")


@needs_gpu
@pytest.mark.parametrize("how", ["any", "one", "beyond"])
def test_every_kernel_agrees_with_float64(plans: Any, how: str) -> None:
    # `plans` asks for 9.0: elsewhere a case would not run the kernel that it is there for.
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the cases are chosen for compute capability 9.0")
    failed = []
    cases = [*BORDERS, *smallest(plans).values()]
    for case, plan in zip(cases, plans(cases), strict=True):
        torch.manual_seed(case.tokens)
        chosen, share = routed(case, how), torch.rand(case.tokens, case.top_k, device="cuda")
        x, matrices = case.rows(), case.matrices()
        out = cuda_ops.moe_experts(x, *matrices, chosen, share)
        kept = torch.ops.cuda_ops.moe_experts_keep(x, *matrices, chosen, share)
        exact = references.kept_mixture(
            x.double(), *(m.double() for m in matrices), chosen, share.double()
        )
        for name, ours, theirs in zip(("out", "gate_up"), kept, exact, strict=True):
            error = (ours.double() - theirs).norm() / theirs.norm().clamp_min(1e-30)
            if not error <= ROUNDING[case.dtype]:
                failed.append(f"{case}: {plan}: {name}: {float(error):.2e}")
        if not (
            torch.equal(out, kept[0])
            and torch.equal(out, cuda_ops.moe_experts(x, *matrices, chosen, share))
        ):
            failed.append(f"{case}: {plan}: other bits the second time")
    assert not failed, "\n".join(failed)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["any", "one", "beyond"])
def test_gradients_of_many_tokens(plans: Any, how: str, dtype: torch.dtype) -> None:
    failed = []
    cases = [
        Case(150, 136, 72, 3, 2, dtype), Case(200, 264, 264, 5, 2, dtype),
        Case(300, 64, 128, 2, 1, dtype), Case(257, 8, 520, 6, 2, dtype),
        Case(900, 520, 392, 8, 3, dtype), Case(30, 328, 8, 1, 1, dtype),
    ]  # fmt: skip
    for case, plan in zip(cases, plans(cases, backward=True), strict=True):
        torch.manual_seed(case.tokens)
        chosen, share = routed(case, how), torch.rand(case.tokens, case.top_k, device="cuda")
        x, grad = case.rows(), case.rows()
        tensors = (x, *case.matrices(), chosen, share)
        gate_up = torch.ops.cuda_ops.moe_experts_keep(*tensors)[1]
        actual = torch.ops.cuda_ops.moe_experts_backward(grad, *tensors, gate_up)
        doubles = (t.double() if t.is_floating_point() else t for t in (grad, *tensors, gate_up))
        expected = references.mixture_backward(*doubles)
        names = ("x", "w_gate_up", "w_down", "weights")
        for name, ours, theirs in zip(names, actual, expected, strict=True):
            error = (ours.double() - theirs).norm() / theirs.norm().clamp_min(1e-30)
            if not error <= ROUNDING[dtype]:
                failed.append(f"{case}: {plan}: grad_{name}: {float(error):.2e}")
    assert not failed, "\n".join(failed)


# Tiles of 128 rows are for many assignments alone; those of mma.sync, on Hopper, for rows that are
# not multiples of 16 bytes.
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [520, 516])
def test_large_tiles(dtype: torch.dtype, hidden: int) -> None:
    inputs = [
        t.to("cuda", dtype).requires_grad_()
        for t in (torch.randn(4096, hidden), torch.randn(4096, 8), *weights(8, hidden, 264))
    ]
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
    out, exact = cuda_ops.moe(*inputs, 2), naive(*exact_inputs, 2)
    grad = torch.randn_like(exact)
    actual = [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]
    expected = [exact, *torch.autograd.grad(exact, exact_inputs, grad)]
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.double() - theirs).norm() <= ROUNDING[dtype] * theirs.norm()


@needs_gpu
def test_a_gradient_gives_its_space_back_before_the_last_result() -> None:
    tokens, hidden, inner, count, top_k, size = 4096, 256, 512, 8, 2, 2
    x, grad = (torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(2))
    chosen = torch.randint(0, count, (tokens, top_k), device="cuda")
    tensors = (
        x,
        *weights(count, hidden, inner, x.dtype, "cuda"),
        chosen,
        torch.rand_like(chosen * 1.0),
    )
    gate_up = torch.ops.cuda_ops.moe_experts_keep(*tensors)[1]
    for _ in range(2):  # a library may keep memory after the first call
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = torch.ops.cuda_ops.moe_experts_backward(grad, *tensors, gate_up)
        peak = torch.cuda.max_memory_allocated() - before
        del results
    of_gate_up = 2 * count * inner * hidden * size
    together = tokens * top_k * 2 * inner * size + (tokens + count * inner) * hidden * size
    space = tokens * top_k * max(inner, hidden) * size
    assert of_gate_up > 2 << 20, "large enough to be seen beside the map"
    assert peak <= together + max(space, of_gate_up) + (1 << 20)


@needs_gpu
def test_more_elements_than_an_int_counts() -> None:
    case = Case(131072, 2080, 1040, 64, 8)
    assert case.tokens * case.top_k * min(case.hidden, 2 * case.inner) > 2**31
    try:
        with much_memory("cuda", 24e9, patience=300):
            compare_with_parts(case, 8, "cuda")
    except NotRunError as error:
        pytest.skip(str(error))  # the GPU has less memory, or other tests have it


def compare_with_parts(case: Case, parts: int, device: str) -> None:
    """Compares all tokens at once with a part of them at a time: each token stands alone."""
    torch.manual_seed(0)
    matrices = weights(case.experts, case.hidden, case.inner, case.dtype, device)
    for matrix in matrices:
        matrix.requires_grad_()
    rows, grad = (
        torch.randn(case.tokens, case.hidden, device=device, dtype=case.dtype) for _ in range(2)
    )
    logits = torch.randn(case.tokens, case.experts, device=device)

    def step(part: slice) -> tuple[torch.Tensor, ...]:
        inputs = rows[part].clone().requires_grad_(), logits[part].clone().requires_grad_()
        out = cuda_ops.moe(*inputs, *matrices, case.top_k)
        return out.detach(), *torch.autograd.grad(out, (*inputs, *matrices), grad[part])

    *of_tokens, whole_gate_up, whole_down = step(slice(None))
    sums = [torch.zeros_like(matrix, dtype=torch.float32) for matrix in matrices]
    size = case.tokens // parts
    for first in range(0, case.tokens, size):
        part = slice(first, first + size)
        *of_part, grad_gate_up, grad_down = step(part)
        for name, ours, theirs in zip(("out", "x", "logits"), of_tokens, of_part, strict=True):
            assert torch.equal(ours[part], theirs), (name, first)
        sums[0] += grad_gate_up
        sums[1] += grad_down
    for ours, theirs in zip((whole_gate_up, whole_down), sums, strict=True):
        assert (ours.float() - theirs).norm() <= ROUNDING[case.dtype] * theirs.norm()
