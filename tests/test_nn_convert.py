"""cuda_ops.nn.convert: what it replaces, what it leaves and why, and what stays as it was."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_gpu
from torch.nn.utils import parametrize

import cuda_ops
from cuda_ops import nn
from cuda_ops.compile_ops import reload
from cuda_ops.nn import convert

theirs = torch.nn


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload(
        "silu", "relu", "gelu_approx", "dropout", "fused_linear_gelu", "matmul", "sum_rows",
        "layer_norm", "rms_norm", "softmax_cross_entropy", "moe", "moe_route", "moe_experts",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Block(torch.nn.Module):
    """A layer with one of each, and some that stay."""

    def __init__(self, **made: Any) -> None:
        super().__init__()
        self.norm = theirs.LayerNorm(8, **made)
        self.mlp = theirs.Sequential(
            theirs.Linear(8, 24, **made), theirs.GELU("tanh"), theirs.Linear(24, 8, **made)
        )
        self.after = theirs.RMSNorm(8, 1e-6, **made)
        self.acts = theirs.ModuleList([theirs.SiLU(), theirs.ReLU(), theirs.GELU()])
        self.drop = theirs.Dropout(0.0)
        self.loss = theirs.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp(self.norm(x))
        for act in self.acts:
            x = x + act(self.after(x))
        return self.loss(self.drop(x), target)


def step(model: torch.nn.Module, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """A loss and the gradients of all parameters."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=generator, dtype=torch.float64).to(dtype)
    loss = model(x, torch.arange(6))
    return [loss, *torch.autograd.grad(loss, [*model.parameters()])]


CHANGED = {
    "norm": "LayerNorm -> cuda_ops.nn.LayerNorm",
    "mlp.0": "Linear -> cuda_ops.nn.FusedLinearGELU",
    "mlp.1": "GELU -> Identity, behind a FusedLinearGELU",
    "after": "RMSNorm -> cuda_ops.nn.RMSNorm",
    "acts.0": "SiLU -> cuda_ops.nn.SiLU",
    "acts.1": "ReLU -> cuda_ops.nn.ReLU",
    "loss": "CrossEntropyLoss -> cuda_ops.nn.CrossEntropyLoss",
}


def test_a_report_names_what_was_changed_and_what_was_left() -> None:
    model = Block()
    found = convert(model)
    assert found.replaced == CHANGED and [*found.replaced] == [*CHANGED]
    assert [*found.left] == ["acts.2", "drop"]
    text = str(found)
    assert "changed: norm: LayerNorm -> cuda_ops.nn.LayerNorm" in text
    assert "left as it was: acts.2: GELU: exact, where cuda_ops.gelu_approx is the tanh" in text
    assert text.endswith("drop: Dropout: it would draw other random numbers; convert(..., "
                         "dropout=True) takes it")  # fmt: skip
    assert type(model.acts[0]) is nn.SiLU and type(model.mlp[1]) is theirs.Identity


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_stay(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Block(dtype=dtype)
    before = step(model, dtype)
    assert convert(model).replaced
    close = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(step(model, dtype), before, rtol=close, atol=close)


def test_alike_modules_share_a_line() -> None:
    model = theirs.Sequential(*(theirs.SiLU() for _ in range(4)))
    assert str(convert(model)) == "changed: 0, 1 and 2 more: SiLU -> cuda_ops.nn.SiLU"


def test_parameters_are_the_same_objects_so_that_an_optimizer_goes_on() -> None:
    model = Block(dtype=torch.float64)
    model.norm.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(model.named_parameters())
    keys = [*model.state_dict()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    convert(model)
    after = dict(model.named_parameters())
    assert [*after] == [*before] and all(after[name] is before[name] for name in before)
    assert [*model.state_dict()] == keys
    assert not model.norm.weight.requires_grad
    loss = model(torch.randn(6, 8, dtype=torch.float64), torch.arange(6))
    loss.backward()
    optimizer.step()
    assert not torch.equal(model.mlp[0].weight, state["mlp.0.weight"])
    assert not any(model.load_state_dict(state))  # strict, of the model as it was
    assert not any(Block(dtype=torch.float64).load_state_dict(model.state_dict()))


def test_a_second_call_changes_nothing() -> None:
    model = Block()
    convert(model)
    before = {name: (id(module), type(module)) for name, module in model.named_modules()}
    found = convert(model)
    assert not found.replaced and [*found.left] == ["acts.2", "drop"]
    assert {n: (id(m), type(m)) for n, m in model.named_modules()} == before


def test_modes_and_hooks_are_kept() -> None:
    model = Block().eval()
    model.norm.train()
    seen: list[str] = []
    model.norm.register_forward_hook(lambda *_: seen.append("norm"))
    model.acts[0].register_forward_pre_hook(lambda *_: seen.append("act"))
    model.after.register_full_backward_hook(lambda *_: seen.append("backward"))
    norm = model.norm
    convert(model)
    assert model.norm is norm and norm.training and not model.mlp[0].training
    assert not model.mlp[1].training
    step(model, torch.float32)
    assert seen == ["norm", "act", "backward", "backward", "backward"]


def test_a_module_at_two_places_stays_one() -> None:
    shared, norm = theirs.SiLU(), theirs.LayerNorm(4)
    model = theirs.ModuleDict({"a": shared, "b": shared, "c": theirs.Sequential(norm, norm)})
    elsewhere = [shared]  # as a model may keep a list of its own
    found = convert(model)
    assert [*found.replaced] == ["a", "c.0"]
    assert model["a"] is model["b"] is elsewhere[0] and type(shared) is nn.SiLU
    assert model["c"][0] is model["c"][1] is norm and type(norm) is nn.LayerNorm


def test_tied_weights_stay_tied() -> None:
    embedding = theirs.Embedding(24, 8)
    model = theirs.Sequential(embedding, theirs.Linear(8, 24), theirs.GELU("tanh"))
    model[1].weight = embedding.weight
    convert(model)
    assert type(model[1]) is nn.FusedLinearGELU and model[1].weight is embedding.weight
    assert model.double()[1].weight is embedding.weight


def test_the_model_itself_may_be_such_a_module() -> None:
    act = theirs.SiLU()
    assert str(convert(act)) == "changed: the model itself: SiLU -> cuda_ops.nn.SiLU"
    assert type(act) is nn.SiLU
    assert str(convert(theirs.Linear(2, 2))) == "nothing to change"


def test_another_argument_is_refused() -> None:
    text = r"^cuda_ops\.nn\.convert: argument 'model': expected a torch\.nn\.Module, got funct"
    with pytest.raises(TypeError, match=text):
        convert(lambda x: x)
    for flag in ("fuse", "dropout"):
        text = rf"^cuda_ops\.nn\.convert: argument '{flag}': expected True or False, got 'no'"
        with pytest.raises(TypeError, match=text):
            convert(theirs.SiLU(), **{flag: "no"})


@pytest.mark.parametrize("group", [1, "a"])
def test_a_group_is_refused_before_anything_is_changed(group: Any) -> None:
    model = theirs.Sequential(theirs.SiLU())
    text = r"^cuda_ops\.nn\.convert: argument 'group': expected a ProcessGroup or one dim of a Dev"
    with pytest.raises(RuntimeError, match=text):
        convert(model, group=group)
    assert type(model[0]) is theirs.SiLU


def test_dropout_is_changed_where_it_is_asked_for() -> None:
    model = theirs.Sequential(theirs.Dropout(0.25), theirs.Dropout(0.5, inplace=True))
    found = convert(model, dropout=True)
    assert found.replaced == {"0": "Dropout -> cuda_ops.nn.Dropout"}
    assert found.left["1"].startswith("Dropout: inplace=True")
    assert model[0].p == 0.25


# --- a Linear and its GELU --------------------------------------------------------------------


def pair(**options: Any) -> theirs.Sequential:
    return theirs.Sequential(theirs.Linear(4, 6, **options), theirs.GELU("tanh"))


def test_a_linear_stays_apart_from_its_gelu_where_that_is_asked_for() -> None:
    model = pair()
    assert convert(model, fuse=False).replaced == {"1": "GELU -> cuda_ops.nn.GELU"}
    assert type(model[0]) is theirs.Linear
    assert convert(model).replaced["0"] == CHANGED["mlp.0"]  # also before a GELU of ours


def test_a_fused_linear_keeps_what_the_two_kept_for_the_gradient() -> None:
    model = pair(bias=False)
    linear, x = model[0], torch.randn(3, 4)
    expected = model(x)
    convert(model)
    assert model[0].save_preactivation and model[0].bias is None
    torch.testing.assert_close(model(x), expected)
    # What else holds the Linear calls it without a gelu, and may change what it holds.
    assert type(linear) is theirs.Linear and linear.weight is model[0].weight
    linear.weight = theirs.Parameter(torch.zeros(6, 4))
    torch.testing.assert_close(model(x), expected)


def test_a_linear_is_left_where_others_would_see_the_gelu() -> None:
    hooked, shared = pair(), pair()
    hooked[0].register_forward_hook(lambda *_: None)
    watched = pair()
    watched[1].register_forward_pre_hook(lambda *_: None)
    model = theirs.ModuleDict(
        {"hooked": hooked, "watched": watched, "shared": shared, "other": shared[0]}
    )
    found = convert(model)
    hooks = "Linear before a GELU: hooks on one of them, which would see other values or none"
    assert found.left == {
        "hooked.0": hooks,
        "watched.0": hooks,
        "shared.0": "Linear before a GELU: it is part of another module too, maybe without a GELU",
    }
    assert {name: found.replaced[name] for name in ("hooked.1", "watched.1", "shared.1")} == (
        dict.fromkeys(("hooked.1", "watched.1", "shared.1"), "GELU -> cuda_ops.nn.GELU")
    )


def test_a_sequential_at_two_places_is_fused_once() -> None:
    block = pair()
    model = theirs.ModuleDict({"a": block, "b": block})
    assert [*convert(model).replaced] == ["a.0", "a.1"]
    assert type(model["b"][0]) is nn.FusedLinearGELU


def test_other_containers_are_not_fused() -> None:
    class Own(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)

    own = Own(*pair())
    listed = theirs.ModuleList(pair())
    exact = theirs.Sequential(theirs.Linear(4, 6), theirs.GELU())
    found = convert(theirs.ModuleDict({"own": own, "listed": listed, "exact": exact}))
    assert [*found.replaced] == ["own.1", "listed.1"] and [*found.left] == ["exact.1"]


# --- what is left, and why --------------------------------------------------------------------


class OwnForward(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OwnName(torch.nn.SiLU):
    pass


class OnAnotherTensor(torch.nn.Parameter):
    pass


def patched() -> torch.nn.Module:
    act = theirs.SiLU()
    act.forward = lambda x: x
    return act


def parametrized() -> torch.nn.Module:
    norm = theirs.LayerNorm(4)
    parametrize.register_parametrization(norm, "weight", theirs.Identity())
    return norm


def wrapped() -> torch.nn.Module:
    norm = theirs.LayerNorm(4)
    norm.weight = OnAnotherTensor(torch.ones(4))
    return norm


LEFT: list[tuple[Callable[[], torch.nn.Module], str]] = [
    (theirs.GELU, "GELU: exact, where cuda_ops.gelu_approx is the tanh approximation, off by"),
    (lambda: theirs.SiLU(inplace=True), "SiLU: inplace=True, and the operator writes a tensor"),
    (lambda: theirs.ReLU(inplace=True), "ReLU: inplace=True, and the operator writes a tensor"),
    (lambda: theirs.LayerNorm(4, bias=False), "LayerNorm: no bias, which would be made anew"),
    (
        lambda: theirs.LayerNorm(4, elementwise_affine=False),
        "LayerNorm: no weight and no bias, which would be made anew in each call",
    ),
    (lambda: theirs.RMSNorm(4, elementwise_affine=False), "RMSNorm: no weight, which would be"),
    (lambda: theirs.CrossEntropyLoss(torch.ones(4)), "CrossEntropyLoss: it weights classes"),
    (lambda: OwnForward(4), "OwnForward: a subclass of LayerNorm with a forward of its own"),
    (OwnName, "OwnName: a subclass of SiLU with code of its own"),
    (patched, "SiLU: a forward was set on it, which would be lost"),
    (parametrized, "ParametrizedLayerNorm: parametrized, by a class that torch.nn.utils"),
    (wrapped, "LayerNorm: its weight is a OnAnotherTensor; convert before it is sharded or"),
    (
        lambda: theirs.LayerNorm(4, dtype=torch.complex64),
        "LayerNorm: its weight has dtype complex64, not float64, float32, float16 or bfloat16",
    ),
]


@pytest.mark.parametrize(("make", "text"), LEFT)
def test_what_is_left_says_why(make: Callable[[], torch.nn.Module], text: str) -> None:
    module = make()
    kind = type(module)
    found = convert(theirs.ModuleDict({"part": module}))
    assert not found.replaced and found.left["part"].startswith(text)
    assert type(module) is kind


def test_a_sharded_parameter_is_left(mesh: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    norm, block = theirs.RMSNorm(4), pair()
    norm.weight = theirs.Parameter(distribute_tensor(norm.weight.detach(), mesh))
    block[0].weight = theirs.Parameter(distribute_tensor(block[0].weight.detach(), mesh))
    found = convert(theirs.ModuleDict({"norm": norm, "block": block}))
    text = "its weight is a DTensor; convert before it is sharded or quantized"
    assert found.left == {
        "norm": f"RMSNorm: {text}", "block.0": f"Linear before a GELU: {text}",
    }  # fmt: skip


def test_an_operator_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise RuntimeError(f"{name} is not built")

    monkeypatch.delattr(cuda_ops, "silu", raising=False)
    monkeypatch.setattr(cuda_ops, "__getattr__", missing)
    found = convert(theirs.Sequential(theirs.SiLU()))
    assert found.left == {"0": "SiLU: cuda_ops.silu cannot be used: silu is not built"}


def test_modules_of_ours_are_left_in_silence() -> None:
    model = theirs.ModuleList([nn.LayerNorm(4, bias=False), nn.MoE(4, 4, 2, 1), nn.AddRMSNorm(4)])
    assert str(convert(model)) == "nothing to change"


# --- afterwards -------------------------------------------------------------------------------


def test_a_converted_model_compiles_whole() -> None:
    model = Block(dtype=torch.float64)
    expected = step(model)
    convert(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled), expected)
    torch.testing.assert_close(step(model), expected)


def test_a_model_that_was_compiled_before_runs_the_operators() -> None:
    model = Block(dtype=torch.float64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = step(compiled)
    convert(compiled)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        torch.testing.assert_close(step(compiled), expected)
    assert "cuda_ops::layer_norm" in {event.key for event in profile.key_averages()}


def test_a_converted_model_is_copied_pickled_and_saved() -> None:
    model = Block(dtype=torch.float64)
    convert(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(step(again)[0], step(model)[0])
        assert not convert(again).replaced
        assert again.mlp[0].weight is not model.mlp[0].weight


def test_functional_calls_and_transforms_see_a_converted_model() -> None:
    model = Block(dtype=torch.float64)
    convert(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x, target = torch.randn(6, 8, dtype=torch.float64), torch.arange(6)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, parameters, (x, target))
        return out

    found = torch.func.grad(loss)(parameters)
    expected = torch.autograd.grad(model(x, target), [*model.parameters()])
    torch.testing.assert_close([*found.values()], [*expected])


def test_an_encoder_of_torch_gives_the_same_while_it_trains_and_afterwards() -> None:
    torch.manual_seed(0)
    layer = theirs.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = (
        theirs.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        torch.randn(2, 5, 16),
    )

    def run() -> list[torch.Tensor]:
        trained = model.train()(x)
        grads = torch.autograd.grad(trained.square().sum(), [*model.parameters()])
        with torch.no_grad():  # by a path of torch's own, which reads the norms' parameters
            return [trained, *grads, model.eval()(x)]

    expected = run()
    found = convert(model)
    assert [*found.replaced] == [f"layers.{i}.norm{k}" for i in (0, 1) for k in (1, 2)]
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


@needs_gpu
def test_a_converted_model_moves_to_a_gpu_and_runs_there() -> None:
    model = Block()
    convert(model)
    model.to("cuda", torch.bfloat16)
    x = torch.randn(6, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x, torch.arange(6, device="cuda")).backward()
    assert x.grad is not None and x.grad.isfinite().all()


# --- models of Hugging Face -------------------------------------------------------------------


def test_sparse_blocks_are_changed_in_the_same_call() -> None:
    from test_integrations import MIXTRAL, SIZES, made

    model: Any = made("mixtral", "MixtralForCausalLM", **MIXTRAL, use_cache=False).eval()
    model.tail = theirs.Sequential(theirs.LayerNorm(8), theirs.SiLU())
    ids = torch.randint(SIZES["vocab_size"], (2, 7))
    keys, expected = [*model.state_dict()], model(ids).logits
    found = convert(model)
    assert found.replaced == {
        "model.layers.0.mlp": "MixtralSparseMoeBlock: routing and experts",
        "tail.0": "LayerNorm -> cuda_ops.nn.LayerNorm",
        "tail.1": "SiLU -> cuda_ops.nn.SiLU",
    }
    assert not found.left
    assert [*model.state_dict()] == keys
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-4)
    again = convert(model)
    assert not again.replaced and not again.left


def test_a_block_that_is_refused_says_why_and_its_activation_is_changed() -> None:
    from test_integrations import block_of

    block = block_of("mixtral")
    del block.experts.act_fn  # which may be a class of transformers
    block.experts.act_fn = theirs.SiLU()
    block.gate.top_k = 17
    found = convert(theirs.Sequential(block))
    assert found.left == {"0": "expected MixtralSparseMoeBlock to choose 1 to 4 experts, got 17"}
    assert found.replaced == {"0.experts.act_fn": "SiLU -> cuda_ops.nn.SiLU"}
