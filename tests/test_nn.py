"""Modules of cuda_ops.nn beside torch's, with the same state dict."""

from __future__ import annotations

import copy
import doctest
import io
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_gpu

import cuda_ops
from cuda_ops import nn
from cuda_ops.compile_ops import reload

theirs = torch.nn
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
HALVES = DTYPES[2:]
#: How far results may be apart: torch rounds some of them twice.
CLOSE = {
    torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2,
}  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_each_device = pytest.mark.parametrize("device", DEVICES)
Make = Callable[..., torch.nn.Module]

#: Ours, torch's, and the shape of an input. What has parameters is made with device and dtype.
PAIRS: dict[str, tuple[Make, Make, tuple[int, ...]]] = {
    "SiLU": (lambda **_: nn.SiLU(), lambda **_: theirs.SiLU(), (3, 5)),
    "ReLU": (lambda **_: nn.ReLU(), lambda **_: theirs.ReLU(), (3, 5)),
    "GELU": (lambda **_: nn.GELU(), lambda **_: theirs.GELU("tanh"), (3, 5)),
    "LayerNorm": (
        lambda **made: nn.LayerNorm(24, **made), lambda **made: theirs.LayerNorm(24, **made),
        (2, 7, 24),
    ),
    "LayerNorm of two dims": (
        lambda **made: nn.LayerNorm((3, 8), 1e-3, **made),
        lambda **made: theirs.LayerNorm((3, 8), 1e-3, **made), (5, 3, 8),
    ),
    "LayerNorm without a bias": (
        lambda **made: nn.LayerNorm(24, bias=False, **made),
        lambda **made: theirs.LayerNorm(24, bias=False, **made), (7, 24),
    ),
    "LayerNorm without parameters": (
        lambda **made: nn.LayerNorm([24], elementwise_affine=False, **made),
        lambda **made: theirs.LayerNorm([24], elementwise_affine=False, **made), (7, 24),
    ),
    "RMSNorm": (
        lambda **made: nn.RMSNorm(24, 1e-6, **made),
        lambda **made: theirs.RMSNorm(24, 1e-6, **made), (2, 7, 24),
    ),
    "RMSNorm of two dims": (
        lambda **made: nn.RMSNorm((3, 8), **made), lambda **made: theirs.RMSNorm((3, 8), **made),
        (5, 3, 8),
    ),
    "RMSNorm without a weight": (
        lambda **made: nn.RMSNorm(24, elementwise_affine=False, **made),
        lambda **made: theirs.RMSNorm(24, elementwise_affine=False, **made), (7, 24),
    ),
    "FusedLinearGELU": (
        lambda **made: nn.FusedLinearGELU(16, 24, **made),
        lambda **made: Apart(16, 24, **made), (2, 5, 16),
    ),
    "FusedLinearGELU without a bias, that keeps": (
        lambda **made: nn.FusedLinearGELU(16, 24, bias=False, save_preactivation=True, **made),
        lambda **made: Apart(16, 24, bias=False, **made), (5, 16),
    ),
}  # fmt: skip
each_pair = pytest.mark.parametrize("name", PAIRS)


class Apart(torch.nn.Linear):
    """What FusedLinearGELU does, by torch."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return torch.nn.functional.gelu(super().forward(input), approximate="tanh")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload(
        "silu", "relu", "gelu_approx", "silu_and_mul", "dropout", "fused_linear_gelu", "matmul",
        "sum_rows", "layer_norm", "rms_norm", "add_rms_norm_", "add", "softmax_cross_entropy",
        "rotary_embedding", "moe", "moe_route", "moe_experts",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def made(name: str, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor]:
    """Both modules with the same random parameters, and an input."""
    torch.manual_seed(0)
    ours, expected, shape = PAIRS[name]
    own, other = ours(**options), expected(**options)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, 1.0, 0.3)
    assert not any(own.load_state_dict(other.state_dict()))  # strict
    return own, other, torch.randn(shape, **options)


def run(module: torch.nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The result of a module and the gradients of its floating inputs and of its parameters."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    out = module(*leaves)
    wanted = [x for x in (*leaves, *module.parameters()) if x.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), wanted)]


# --- torch's own ------------------------------------------------------------------------------


@each_pair
@every_dtype
@on_each_device
def test_results_and_gradients_are_those_of_torch(
    name: str, dtype: torch.dtype, device: str
) -> None:
    own, other, x = made(name, dtype=dtype, device=device)
    for ours, expected in zip(run(own, x), run(other, x), strict=True):
        assert ours.dtype == expected.dtype == dtype and ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@each_pair
def test_state_dicts_fit_both_ways(name: str) -> None:
    own, other, _ = made(name)
    assert own.state_dict().keys() == other.state_dict().keys()
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter)
    assert not any(other.load_state_dict(own.state_dict()))
    for ours, expected in zip(own.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, expected)


@each_pair
def test_a_module_of_torch_s_class_is_shown_and_made_as_torch_s(name: str) -> None:
    own, other, _ = made(name)
    base = torch.nn.Linear if "Linear" in name else type(other)
    assert isinstance(own, base)
    assert own.extra_repr().startswith(other.extra_repr())
    fresh, torch_s = (PAIRS[name][i](device="meta") for i in (0, 1))
    for ours, expected in zip(fresh.parameters(), torch_s.parameters(), strict=True):
        assert ours.device == expected.device and ours.shape == expected.shape


@each_pair
def test_modules_compile_whole(name: str) -> None:
    own, _, x = made(name)
    compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, x), run(own, x))


@each_pair
def test_modules_are_copied_pickled_and_saved(name: str) -> None:
    own, _, x = made(name)
    file = io.BytesIO()
    torch.save(own, file)
    file.seek(0)
    copies = (
        copy.deepcopy(own),
        pickle.loads(pickle.dumps(own)),
        torch.load(file, weights_only=False),
    )
    for again in copies:
        assert type(again) is type(own) and torch.equal(again(x), own(x))
        assert all(p is not q for p, q in zip(again.parameters(), own.parameters(), strict=True))


@pytest.mark.parametrize("name", [name for name in PAIRS if "Norm" in name])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@on_each_device
def test_float32_parameters_go_with_a_half(name: str, dtype: torch.dtype, device: str) -> None:
    own, _, x = made(name, device=device)
    half = x.to(dtype)
    assert own(half).dtype == dtype
    torch.testing.assert_close(
        own(half).float(), own(half.float()), rtol=CLOSE[dtype], atol=CLOSE[dtype]
    )


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@each_pair
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@on_each_device
def test_autocast_gives_the_dtypes_of_torch(name: str, dtype: torch.dtype, device: str) -> None:
    own, other, x = made(name, device=device)
    with torch.autocast(device, torch.bfloat16):
        ours, expected = own(x.to(dtype)), other(x.to(dtype))
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, rtol=6e-2, atol=6e-2)


@needs_gpu
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_autocast_widens_half_parameters_too(norm: Any) -> None:
    own = norm(8, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(3, 8, device="cuda", dtype=torch.bfloat16)
    base = norm.__mro__[1]
    with torch.autocast("cuda", torch.bfloat16):
        expected = base.forward(own, x).dtype
        assert own(x).dtype == expected
    if norm is nn.LayerNorm:  # torch 2.11 leaves an RMSNorm as it is
        assert expected == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_eps_is_that_of_torch(dtype: torch.dtype) -> None:
    x = torch.full((1, 8), 1e-3, dtype=dtype)  # whose squares are small beside an eps of a half
    ours, expected = (m.RMSNorm(8, dtype=dtype)(x) for m in (nn, theirs))
    torch.testing.assert_close(ours, expected)


def test_several_dims_must_be_those_of_the_shape() -> None:
    text = r"a tensor whose last dims are \[3, 8\], the normalized_shape, got shape \[5, 4, 6\]"
    for norm, argument in ((nn.LayerNorm((3, 8)), "input"), (nn.RMSNorm((3, 8)), "x")):
        name = f"cuda_ops.nn.{type(norm).__name__}: argument '{argument}': expected "
        with pytest.raises(RuntimeError, match=name + text):
            norm(torch.randn(5, 4, 6))


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.GELU("none"), "GELU: argument 'approximate': expected 'tanh', the approxim"),
        (lambda: nn.SiLU(inplace=True), "SiLU: argument 'inplace': expected False, since the op"),
        (lambda: nn.ReLU(True), "ReLU: argument 'inplace': expected False, since the operator"),
        (lambda: nn.Dropout(0.1, True), "Dropout: argument 'inplace': expected False, since"),
        (lambda: nn.Dropout("x"), "Dropout: argument 'p': expected a number from 0 to 1, got 'x'"),
        (lambda: nn.Dropout(float("nan")), "'p': expected a number from 0 to 1, got nan"),
        (lambda: nn.RMSNorm("x"), "RMSNorm: argument 'normalized_shape': expected an int from 0"),
        (lambda: nn.RMSNorm(2.5), r"'normalized_shape': expected an int from 0 on, .* got 2\.5"),
        (lambda: nn.LayerNorm([2, -1]), r"'normalized_shape': expected an int .* got \[2, -1\]"),
        (lambda: nn.LayerNorm(""), "LayerNorm: argument 'normalized_shape': expected an int from"),
        (lambda: nn.RMSNorm(4, "eps"), "RMSNorm: argument 'eps': expected a number of 0 or more"),
        (lambda: nn.AddRMSNorm(4, float("inf")), "AddRMSNorm: argument 'eps': .* got inf"),
        (lambda: nn.LayerNorm(4, "e"), "LayerNorm: argument 'eps': expected a number of 0 or more"),
        (lambda: nn.AddRMSNorm(4, inplace="no"), "'inplace': expected a bool, got 'no'"),
        (lambda: nn.FusedLinearGELU(2.5, 3), r"GELU: argument 'in_features': exp.* got 2\.5"),
        (lambda: nn.FusedLinearGELU(2, -3), "'out_features': expected an int from 0 on, got -3"),
        (
            lambda: nn.FusedLinearGELU(2, 3, save_preactivation="no"),
            "'save_preactivation': expected a bool, got 'no'",
        ),
        (
            lambda: nn.CrossEntropyLoss(reduction="x"),
            "Loss: argument 'reduction': expected 'mean', 'sum' or 'none', got 'x'",
        ),
        (lambda: nn.CrossEntropyLoss(ignore_index=0.5), r"'ignore_index': exp.* int, got 0\.5"),
        (lambda: nn.CrossEntropyLoss(label_smoothing=2), "'label_smoothing': .* 0 to 1, got 2"),
        (lambda: nn.CrossEntropyLoss(overwrite_logits=1), "'overwrite_logits': .* a bool, got 1"),
        (lambda: nn.RotaryEmbedding(16, interleaved=0), "'interleaved': expected a bool, got 0"),
        (lambda: nn.MoE(4, 4, 3, 1, renormalize="no"), "'renormalize': expected a bool, got 'no'"),
        (lambda: nn.CrossEntropyLoss(torch.ones(3)), r"'weight': exp.*got a tensor of shape \[3\]"),
        (lambda: nn.AddRMSNorm((2, 3)), r"'normalized_shape': expected one dim, got \(2, 3\)"),
        (lambda: nn.RotaryEmbedding(3), "'dim': expected an even number from 2 on, got 3"),
        (lambda: nn.RotaryEmbedding("a"), "'dim': expected an even number from 2 on, got 'a'"),
        (lambda: nn.RotaryEmbedding(16.0), r"'dim': expected an even number from 2 on, got 16\.0"),
        (
            lambda: nn.RotaryEmbedding(16, 4.5),
            r"'max_positions': expected an int from 1 .*got 4\.5",
        ),
        (lambda: nn.RotaryEmbedding(16, 2**63), "'max_positions': expected an int from 1 to 9007"),
        *(
            (lambda base=base: nn.RotaryEmbedding(16, base=base), "'base': expected a positive num")
            for base in (0, -1.0, "a", float("inf"), float("nan"))
        ),
        (lambda: nn.RotaryEmbedding(16, dtype=None), "'dtype': expected float64, .*, got None"),
        (lambda: nn.RotaryEmbedding(16, dtype=torch.int64), "'dtype': exp.*, got torch.int64"),
        (lambda: nn.MoE(4, 4, 3, 4), "MoE: argument 'top_k': expected an int from 1 to 3, got 4"),
        (lambda: nn.MoE(4, 4, 3, "a"), "'top_k': expected an int from 1 to 3, got 'a'"),
        (lambda: nn.MoE(4, 4, 3, 2.0), r"'top_k': expected an int from 1 to 3, got 2\.0"),
        (lambda: nn.MoE(4, 4, 3, True), "'top_k': expected an int from 1 to 3, got True"),
        (lambda: nn.MoE(4, 4, 600, 1), "'num_experts': expected an int from 1 to 512, got 600"),
        (lambda: nn.MoE(4, 4, "3", 1), "'num_experts': expected an int from 1 to 512, got '3'"),
        (
            lambda: nn.MoE(-4, 4, 3, 1),
            "MoE: argument 'hidden_size': expected an int from 0 on, got",
        ),
        (lambda: nn.MoE(4, 4.5, 3, 1), r"'intermediate_size': expected an int from 0 on, got 4\.5"),
        (
            lambda: nn.MoE(4, 4, 3, 1, expert_bias=torch.ones(3)),
            r"'expert_bias': expected a bool, .*, got a tensor of shape \[3\]",
        ),
        (lambda: nn.Experts(4.0, 8, 16), r"Experts: argument 'num_experts': exp.* 512, got 4\.0"),
        (lambda: nn.Experts(0, 8, 16), "'num_experts': expected an int from 1 to 512, got 0"),
        (lambda: nn.Experts(1000, 8, 16), "'num_experts': expected an int from 1 to 512, got 1000"),
        (lambda: nn.Experts(4, 8, -1), "Experts: argument 'intermediate_size': expected an int fr"),
        (lambda: nn.MoE(4, 4, 3, 1, scoring="relu"), "'scoring': expected one of 'softmax', 'sig"),
    ],
)
def test_what_an_operator_does_not_take_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=f"cuda_ops.nn.*{text}"):
        make()


@pytest.mark.parametrize(
    "name", [name for name in nn.__all__ if isinstance(getattr(nn, name), type)]
)
@pytest.mark.parametrize("given", [None, [1.0]], ids=["None", "list"])
def test_what_is_no_tensor_is_refused_by_name(name: str, given: Any) -> None:
    sizes = {"Experts": (2, 4, 4), "MoE": (4, 4, 2, 1), "FusedLinearGELU": (4, 4)}
    takes_a_size = "Norm" in name or name == "RotaryEmbedding"
    module = getattr(nn, name)(*sizes.get(name, (4,) if takes_a_size else ()))
    x = torch.ones(2, 4)
    others = {"AddRMSNorm": [x], "CrossEntropyLoss": [x], "Experts": [x, 1]}.get(name, [])
    named = "None" if given is None else "list"
    with pytest.raises(RuntimeError, match=f"(?s)cuda_ops.*argument '.*{named}"):
        module(given, *others)


# --- dropout ----------------------------------------------------------------------------------


@on_each_device
def test_dropout_drops_while_it_trains_and_repeats_with_the_seed(device: str) -> None:
    drop, x = nn.Dropout(0.25), torch.ones(10_000, device=device, requires_grad=True)
    outs = []
    for _ in range(2):
        torch.manual_seed(0)
        outs.append(drop(x))
    assert torch.equal(*outs) and 0.2 < float((outs[0] == 0).float().mean()) < 0.3
    assert outs[0].unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    (grad,) = torch.autograd.grad(outs[0].sum(), x)
    assert torch.equal(grad, outs[0].detach())
    assert drop.eval()(x) is x


# --- the loss ---------------------------------------------------------------------------------

LOSSES: list[dict[str, Any]] = [
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 2}, {"label_smoothing": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("options", LOSSES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 5, 6), (2, 5, 3, 4)], ids=str)
@every_dtype
@on_each_device
def test_losses_and_their_gradients_are_those_of_torch(
    options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(1)
    # The same on each device: of no target but ignored ones torch's mean is 0 on a GPU, else nan.
    target = torch.randint(5, shape[:1] + shape[2:] if len(shape) > 1 else ()).to(device)
    logits = torch.randn(shape, dtype=dtype, device=device)
    ours, expected = (run(m.CrossEntropyLoss(**options), logits, target) for m in (nn, theirs))
    if dtype in HALVES and device == "cpu":  # where torch rounds between its two steps
        expected = run(theirs.CrossEntropyLoss(**options), logits.float(), target)
        expected = [x.to(dtype) for x in expected]
    torch.testing.assert_close(ours, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@on_each_device
def test_a_loss_is_float32_under_autocast_as_torch_s_is(device: str) -> None:
    logits = torch.randn(4, 5, dtype=torch.bfloat16, device=device)
    target = torch.tensor([0, 1, 2, 3], device=device)
    compiled = torch.compile(nn.CrossEntropyLoss(), fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16):
        ours, expected = (m.CrossEntropyLoss()(logits, target) for m in (nn, theirs))
        traced = compiled(logits, target)
    assert ours.dtype == expected.dtype == traced.dtype == torch.float32
    # On a GPU torch rounds to a half between its two steps.
    expected = theirs.CrossEntropyLoss()(logits.float(), target)
    torch.testing.assert_close([ours, traced], [expected, expected])


def test_targets_that_are_no_indices_are_refused_by_name() -> None:
    loss, logits = nn.CrossEntropyLoss(), torch.randn(4, 5)
    text = "'target': expected indices of classes, int64, got"
    with pytest.raises(RuntimeError, match=f"{text} probabilities, torch.float32: keep"):
        loss(logits, torch.rand(4, 5))
    for given, named in (([0, 1, 2, 3], "list"), (None, "None")):
        with pytest.raises(RuntimeError, match=f"{text} {named}$"):
            loss(logits, given)


@pytest.mark.parametrize(
    ("shape", "of_target", "expected"),
    [((4, 5), (1,), [4]), ((4, 5), (), [4]), ((4, 5, 3), (4, 1), [4, 3]), ((5,), (1,), [])],
)
def test_targets_are_not_broadcast(
    shape: tuple[int, ...], of_target: tuple[int, ...], expected: list[int]
) -> None:
    said = f"'target': expected shape {expected} for an input of shape {list(shape)}, got "
    with pytest.raises(RuntimeError, match=re.escape(f"{said}{list(of_target)}")):
        nn.CrossEntropyLoss()(torch.randn(shape), torch.zeros(of_target, dtype=torch.int64))


def test_a_loss_may_overwrite_its_logits() -> None:
    logits, target = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 1, 2, 3])
    leaf = logits.detach().clone().requires_grad_()
    own = leaf * 1
    loss = nn.CrossEntropyLoss(overwrite_logits=True)
    assert loss.extra_repr().endswith("reduction='mean', overwrite_logits=True")
    loss(own, target).backward()
    theirs.CrossEntropyLoss()(logits, target).backward()
    torch.testing.assert_close(leaf.grad, logits.grad)
    assert torch.equal(own.detach(), leaf.grad)


# --- norms behind an addition -----------------------------------------------------------------


@every_dtype
@on_each_device
def test_an_added_residual_is_normalized_and_returned(dtype: torch.dtype, device: str) -> None:
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    norm = nn.AddRMSNorm(24, 1e-5, **options)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    theirs.RMSNorm(24).load_state_dict(norm.state_dict())
    x, residual = torch.randn(2, 5, 24, **options), torch.randn(2, 5, 24, **options)
    total = x + residual
    wanted = torch.nn.functional.rms_norm(total, (24,), norm.weight, 1e-5)
    out, kept = norm(x, residual)
    assert torch.equal(kept, total)
    torch.testing.assert_close(out, wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    inplace = nn.AddRMSNorm(24, 1e-5, inplace=True, **options)
    inplace.load_state_dict(norm.state_dict())
    assert inplace.extra_repr().endswith("inplace=True")
    before = x.clone(), residual.clone()
    with torch.no_grad():
        first, second = inplace(*before)
    assert first is before[0] and second is before[1] and torch.equal(second, total)
    torch.testing.assert_close(first, wanted, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def test_an_added_residual_has_gradients_and_in_place_says_that_it_has_none() -> None:
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    norm = nn.AddRMSNorm(8)

    def run(add: Callable[..., Any]) -> Any:
        out, total = add(x, residual)
        return torch.autograd.grad((out * total.cos()).sum(), [x, residual, norm.weight])

    def by_torch(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return torch.nn.functional.rms_norm(total, (8,), norm.weight), total

    torch.testing.assert_close(run(norm), run(by_torch))
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled), run(norm))
    with pytest.raises(RuntimeError, match="add_rms_norm_"):
        nn.AddRMSNorm(8, inplace=True)(x, residual)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: (x, x[:1]), r"'residual': expected the shape of 'x', \[3, 8\], got \[1, 8\]"),
        (lambda x: (x, x[:2]), r"'residual': expected the shape of 'x', \[3, 8\], got \[2, 8\]"),
        (lambda x: (x, x.double()), "'residual': expected dtype float32 like 'x', got float64"),
        (
            lambda x: (x, x.to("meta")),
            "'residual': expected a tensor on cpu like 'x', got one on m",
        ),
        (lambda x: (x.int(), x.int()), "'x': expected dtype float64, .* or bfloat16, got int32"),
    ],
)
def test_an_added_residual_that_does_not_fit_is_named(change: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=f"^cuda_ops.nn.AddRMSNorm: argument {text}"):
        nn.AddRMSNorm(8)(*change(torch.randn(3, 8)))


def test_autocast_adds_a_residual_of_another_dtype() -> None:
    x = torch.randn(3, 8)
    with torch.autocast("cpu"):
        out, total = nn.AddRMSNorm(8)(x, x.bfloat16())
    assert out.shape == total.shape == x.shape


# --- rotary embeddings ------------------------------------------------------------------------


def turned(x: torch.Tensor, positions: torch.Tensor, base: float, interleaved: bool) -> Any:
    """The formula, by complex numbers."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions[..., None].double() * frequencies
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    wide = x.double()
    pairs = wide.unflatten(-1, (half, 2)) if interleaved else wide.unflatten(-1, (2, half)).mT
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return (out.flatten(-2) if interleaved else out.mT.flatten(-2)).to(x.dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@every_dtype
@on_each_device
def test_rotary_turns_by_positions(interleaved: bool, dtype: torch.dtype, device: str) -> None:
    rotary = nn.RotaryEmbedding(8, 64, 100.0, interleaved=interleaved, device=device)
    x = torch.randn(2, 7, 3, 8, dtype=dtype, device=device)
    close: Any = {"rtol": 0, "atol": max(CLOSE[dtype], 1e-5)}
    expected = turned(x, torch.arange(7, device=device), 100.0, interleaved)
    torch.testing.assert_close(rotary(x), expected, **close)
    positions = torch.randint(64, (2, 7), device=device)
    expected = turned(x, positions, 100.0, interleaved)
    torch.testing.assert_close(rotary(x, positions), expected, **close)


def test_rotary_tables_keep_their_dtype_and_come_back_from_the_meta_device() -> None:
    rotary = nn.RotaryEmbedding(8, 16)
    cos = rotary.cos.clone()
    assert rotary.state_dict() == {}
    rotary.to(torch.bfloat16)
    assert torch.equal(rotary.cos, cos)
    empty = torch.nn.Sequential(nn.RotaryEmbedding(8, 16, device="meta"))
    assert empty[0].cos.is_meta
    assert torch.equal(empty.to_empty(device="cpu")[0].cos, cos)
    assert nn.RotaryEmbedding(8, 16, dtype=torch.float64).float().cos.dtype == torch.float64


def test_rotary_says_how_long_its_tables_are_and_compiles() -> None:
    rotary = nn.RotaryEmbedding(8, 16)
    with pytest.raises(RuntimeError, match="at most 16 positions, for which there are tables, got"):
        rotary(torch.randn(17, 2, 8))
    for dtype in (torch.uint8, torch.bool, torch.float32):  # the first two would be masks
        with pytest.raises(RuntimeError, match=f"'positions': expected dtype .*, got {dtype}"):
            rotary(torch.randn(2, 2, 8), torch.ones(2, dtype=dtype))
    x, positions = torch.randn(5, 2, 8), torch.tensor([4, 3, 2, 1, 0])
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), rotary(x))
    torch.testing.assert_close(compiled(x, positions), rotary(x, positions))
    assert repr(rotary) == ("RotaryEmbedding(8, max_positions=16, base=10000.0, interleaved=False)")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("wrong", [-1, 16])
def test_a_position_without_angles_is_refused(wrong: int, dtype: torch.dtype) -> None:
    text = f"^cuda_ops.nn.RotaryEmbedding: argument 'positions': expected 0 to 15, got {wrong}$"
    with pytest.raises(RuntimeError, match=text):
        nn.RotaryEmbedding(8, 16)(torch.randn(2, 2, 8), torch.tensor([3, wrong], dtype=dtype))


@pytest.mark.parametrize("shape", [(), (4,), (3, 1), (2, 5), (1, 2, 5)], ids=str)
def test_positions_of_another_shape_are_named(shape: tuple[int, ...]) -> None:
    expected = f"shape (..., 5) that fits an x of shape [3, 5, 2, 8], got {list(shape)}"
    with pytest.raises(RuntimeError, match=re.escape(f"argument 'positions': expected {expected}")):
        nn.RotaryEmbedding(8, 16)(torch.randn(3, 5, 2, 8), torch.zeros(shape, dtype=torch.int64))


def test_heads_that_are_too_small_are_named() -> None:
    text = "argument 'x': expected a last dim of at least 8, .*, got shape \\[5, 2, 4\\]"
    for positions in (None, torch.arange(5)):
        with pytest.raises(RuntimeError, match=f"^cuda_ops.nn.RotaryEmbedding: {text}"):
            nn.RotaryEmbedding(8, 16)(torch.randn(5, 2, 4), positions)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5), (2, 3, 5)], ids=str)
def test_positions_are_broadcast_mapped_and_traced(shape: tuple[int, ...]) -> None:
    rotary, x = nn.RotaryEmbedding(8, 16), torch.randn(3, 5, 2, 8)
    positions = torch.randint(16, shape)
    expected = rotary(x, positions)
    both = torch.stack([positions, positions])
    mapped = torch.vmap(lambda one: rotary(x, one))(both)
    torch.testing.assert_close(mapped, torch.stack([expected, expected]))
    traced = torch.jit.trace(rotary, (x, positions))
    torch.testing.assert_close(traced(x, positions), expected)
    meta = nn.RotaryEmbedding(8, 16, device="meta")(x.to("meta"), positions.to("meta"))
    assert meta.shape == expected.shape


# --- the others -------------------------------------------------------------------------------


@every_dtype
def test_silu_and_mul_is_the_product(dtype: torch.dtype) -> None:
    x = torch.randn(3, 10, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    torch.testing.assert_close(nn.SiluAndMul()(x), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize(("scoring", "bias"), [("softmax", False), ("sigmoid", True)])
@pytest.mark.parametrize("renormalize", [True, False])
@on_each_device
def test_a_mixture_is_the_naive_one(
    scoring: str, bias: bool, renormalize: bool, device: str
) -> None:
    from mixtures import naive

    torch.manual_seed(2)
    options: dict[str, Any] = {"renormalize": renormalize, "scoring": scoring}
    layer = nn.MoE(16, 12, 5, 2, **options, expert_bias=bias, device=device, dtype=torch.float64)
    correction = layer.gate.e_score_correction_bias
    if bias:
        torch.nn.init.normal_(correction)
        assert "gate.e_score_correction_bias" in layer.state_dict()
    x = torch.randn(2, 7, 16, dtype=torch.float64, device=device)
    rows = x.flatten(0, 1)
    matrices = layer.experts.gate_up_proj, layer.experts.down_proj
    expected = naive(rows, layer.gate(rows), *matrices, 2, **options, expert_bias=correction)
    torch.testing.assert_close(layer(x), expected.view_as(x), rtol=1e-4, atol=1e-6)
    wanted = [layer.gate.weight, *matrices]
    grads = torch.autograd.grad(layer(x).square().sum(), wanted)
    for ours, theirs_ in zip(
        grads, torch.autograd.grad(expected.square().sum(), wanted), strict=True
    ):
        torch.testing.assert_close(ours, theirs_, rtol=1e-3, atol=1e-5)


def test_a_mixture_compiles_and_is_saved() -> None:
    layer, x = nn.MoE(8, 6, 4, 2), torch.randn(3, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, x), run(layer, x))
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(x), layer(x))
    assert "scoring='softmax'" in repr(layer) and "(experts): Experts(4, hidden" in repr(layer)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.ones(6, 9), r"expected shape \(\.\.\., H\) = \(\.\.\., 8\), got shape \[6, 9\]"),
        (torch.tensor(1.0), r"expected shape \(\.\.\., H\) = \(\.\.\., 8\), got shape \[\]"),
        (torch.ones(6, 8).double(), "expected dtype float32 like the parameters, got float64"),
    ],
)
def test_a_token_that_does_not_fit_a_mixture_is_named(x: torch.Tensor, text: str) -> None:
    with pytest.raises(RuntimeError, match=f"^cuda_ops.nn.MoE: argument 'x': {text}"):
        nn.MoE(8, 16, 4, 2)(x)


def test_a_hook_of_the_gate_may_cast_the_tokens() -> None:
    layer = nn.MoE(8, 16, 4, 2)
    x = torch.randn(3, 8)
    expected = layer(x)
    layer.gate.double()
    layer.gate.register_forward_pre_hook(lambda gate, args: (args[0].double(),))
    layer.gate.register_forward_hook(lambda gate, args, out: out.float())
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "olmoe"])
def test_state_dicts_of_hugging_face_s_blocks_fit(model: str) -> None:
    from test_integrations import block_of

    block = block_of(model)  # which skips where transformers is not installed
    renormalize = bool(getattr(block.gate, "norm_topk_prob", True))
    layer = nn.MoE(16, 6, 4, 2, renormalize=renormalize, dtype=torch.float64)
    assert not any(layer.load_state_dict(block.state_dict()))
    assert not any(block.load_state_dict(layer.state_dict()))
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


# --- the package ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", nn.__all__)
def test_examples_run(name: str) -> None:
    doc = getattr(nn, name).__doc__
    scope = {"torch": torch, "cuda_ops": cuda_ops}
    example = doctest.DocTestParser().get_doctest(doc, scope, name, None, 0)
    assert example.examples
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)


def test_names_are_listed_once_and_all_there() -> None:
    assert len(set(nn.__all__)) == len(nn.__all__)
    public = {
        name
        for name, value in vars(nn).items()
        if getattr(value, "__doc__", "") and (isinstance(value, type) or callable(value))
    }
    assert public == set(nn.__all__)


@pytest.mark.slow
def test_the_package_imports_it_at_its_first_use_alone() -> None:
    code = """
import sys
import cuda_ops
assert "cuda_ops.nn" not in sys.modules
assert cuda_ops.nn.SiLU.__name__ == "SiLU"
import cuda_ops.nn
from cuda_ops import nn
assert nn is cuda_ops.nn
import torch
layer = torch.nn.Sequential(nn.LayerNorm(8), nn.SiLU())  # whose operators nothing has loaded
torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(2, 8)).sum().backward()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
