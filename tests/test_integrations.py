"""Hugging Face's sparse blocks, as they are and with cuda_ops inside."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from cuda_ops.compile_ops import reload
from cuda_ops.integrations import convert, use_moe

SIZES = {
    "hidden_size": 16, "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 8,
}  # fmt: skip


MIXTRAL = {"num_local_experts": 4, "intermediate_size": 6}
OTHERS = {"num_experts": 4, "intermediate_size": 6, "moe_intermediate_size": 6}
NAMES = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("moe_route", "moe_experts", "moe")


def made(model: str, name: str, **config: Any) -> torch.nn.Module:
    """A module of Hugging Face's ``model``, of float64 and random parameters."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    configs = import_module(f"transformers.models.{model}.configuration_{model}")
    kind = next(v for k, v in vars(configs).items() if k.endswith("Config") and model_of(k, model))
    settings = kind(**SIZES, **config)
    settings._experts_implementation = "eager"
    result: torch.nn.Module = getattr(module, name)(settings).double()
    if not any(key.endswith("experts.gate_up_proj") for key, _ in result.named_parameters()):
        pytest.skip(f"transformers {transformers.__version__} keeps experts apart")
    with torch.no_grad():
        for parameter in result.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return result


def model_of(config: str, model: str) -> bool:
    return config.lower() == model.replace("_", "") + "config"


def block_of(model: str, **config: Any) -> torch.nn.Module:
    more = MIXTRAL if model == "mixtral" else OTHERS
    return made(model, f"{NAMES[model]}SparseMoeBlock", **more, **config)


@pytest.mark.parametrize(
    ("model", "normalize"),
    [("mixtral", True), *((model, n) for model in ("qwen3_moe", "olmoe") for n in (True, False))],
)
def test_agrees_with_hugging_face(model: str, normalize: bool) -> None:
    torch.manual_seed(0)
    block = block_of(model, **({} if model == "mixtral" else {"norm_topk_prob": normalize}))
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)

    def run() -> list[torch.Tensor]:
        out = block(x)
        out = out[0] if isinstance(out, tuple) else out
        return [out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]

    theirs = run()
    use_moe(block)
    for ours, expected in zip(run(), theirs, strict=True):
        # The router rounds to float32 on their side, whatever the dtype.
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", NAMES)
def test_a_model_keeps_its_losses_and_checkpoints(model: str) -> None:
    """Router logits are recorded by hooks on the gate, layers recomputed for their gradients."""
    torch.manual_seed(0)
    more = MIXTRAL if model == "mixtral" else OTHERS
    whole: Any = made(model, f"{NAMES[model]}ForCausalLM", **more, use_cache=False).train()
    ids = torch.randint(SIZES["vocab_size"], (2, 7))

    def run() -> list[torch.Tensor]:
        out = whole(ids, labels=ids, output_router_logits=True)
        parameters = [p for p in whole.parameters() if p.requires_grad]
        return [out.loss, out.aux_loss, *torch.autograd.grad(out.loss, parameters)]

    theirs = run()
    for layer in whole.model.layers:
        use_moe(layer.mlp)
    gate, seen = whole.model.layers[0].mlp.gate, []
    gate.register_forward_hook(lambda module, args, out: seen.append(out[0].shape))
    torch.testing.assert_close(run(), theirs, rtol=1e-3, atol=1e-4)
    assert seen == [(14, 4)]
    enable = getattr(whole, "activation_checkpointing_enable", None)
    (enable or whole.gradient_checkpointing_enable)()
    torch.testing.assert_close(run(), theirs, rtol=1e-3, atol=1e-4)


def test_jitter_is_kept() -> None:
    block = use_moe(block_of("mixtral", router_jitter_noise=0.5))
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    first, second = block.train()(x.clone()), block(x.clone())
    assert not torch.equal(first, second)
    assert torch.equal(block.eval()(x.clone()), block(x.clone()))


@pytest.mark.parametrize("model", NAMES)
def test_a_block_is_saved_and_keeps_its_dtype(model: str) -> None:
    block, x = use_moe(block_of(model)).float(), torch.randn(2, 3, 16)
    again = pickle.loads(pickle.dumps(block))
    torch.testing.assert_close(again(x), block(x))
    again.experts.down_proj.data.zero_()  # the copy's own
    assert not torch.equal(again(x), block(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert block(x).dtype is torch.float32


def test_a_replaced_forward_is_not_lost() -> None:
    block = block_of("qwen3_moe")
    theirs = block.experts.forward
    block.experts.forward = lambda *args: theirs(*args)
    with pytest.raises(ValueError, match=r"expected experts of Qwen3.* its class's forward, got"):
        use_moe(block)
    block.experts.forward = theirs  # as a temporary wrapper leaves it
    assert use_moe(use_moe(block)) is block


def test_another_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a class in cuda_ops.integrations.BLOCKS, got Linear"):
        use_moe(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("chosen", [-1, 0, 5])
def test_a_number_of_choices_that_no_call_takes_is_refused(chosen: int) -> None:
    block = block_of("mixtral")
    block.gate.top_k = chosen
    text = f"expected MixtralSparseMoeBlock to choose 1 to 4 experts, got {chosen}$"
    with pytest.raises(ValueError, match=f"^use_moe: {text}"):
        use_moe(block)
    (left,) = convert(block).left.values()
    assert left.startswith("expected MixtralSparseMoeBlock to choose")


@pytest.mark.parametrize("group", [1, "a"])
def test_a_group_is_refused_by_the_name_of_what_was_called(group: Any) -> None:
    text = "argument 'group': expected a ProcessGroup or one dim of a DeviceMesh, got"
    with pytest.raises(RuntimeError, match=rf"^cuda_ops\.integrations\.convert: {text}"):
        convert(torch.nn.Linear(2, 2), group)
    with pytest.raises(RuntimeError, match=f"^use_moe: {text}"):
        use_moe(block_of("mixtral"), group)


def test_silu_in_place_is_silu() -> None:
    block = block_of("mixtral")
    for silu in (torch.nn.SiLU(inplace=True), torch.nn.functional.silu):
        del block.experts.act_fn
        block.experts.act_fn = silu
        assert use_moe(block) is block


def test_sharded_experts_name_what_is_not(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    block = use_moe(block_of("mixtral"))
    for name, parameter in [*block.experts.named_parameters()]:
        sharded = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
        setattr(block.experts, name, torch.nn.Parameter(sharded))
    with pytest.raises(RuntimeError, match="'x': expected a DTensor on the mesh of 'w_gate_up'"):
        block(torch.randn(1, 3, 16, dtype=torch.float64))


def test_a_changed_block_is_refused() -> None:
    def changed(change: Callable[[Any], None]) -> Any:
        block = block_of("qwen3_moe")
        change(block)
        return block

    def activation(block: Any) -> None:
        block.experts.act_fn = torch.nn.GELU()

    def scores(block: Any) -> None:
        block.gate.register_buffer("e_score_correction_bias", torch.zeros(4))

    def shared(block: Any) -> None:
        block.shared_expert = torch.nn.Linear(16, 16)

    def choices(block: Any) -> None:
        block.gate.top_k = 17

    def unknown(block: Any) -> None:
        del block.gate.top_k

    def nothing(block: Any) -> None:
        block.experts.act_fn = None

    def many(block: Any) -> None:
        for name, matrix in [*block.experts.named_parameters()]:
            setattr(block.experts, name, torch.nn.Parameter(matrix[:1].expand(513, -1, -1)))

    for change, text in (
        (choices, "expected Qwen3MoeSparseMoeBlock to choose 1 to 4 experts, got 17"),
        (many, "expected Qwen3MoeSparseMoeBlock to have at most 512 experts, got 513"),
        (unknown, "expected the gate of Qwen3MoeSparseMoeBlock to have an int top_k, got None"),
        (activation, "expected experts of Qwen3MoeSparseMoeBlock to have silu"),
        (nothing, "expected experts of Qwen3MoeSparseMoeBlock to have silu, got None"),
        (scores, "to have .*gate.weight, got .*gate.e_score_correction_bias"),
        (shared, "to be made of .* got .*shared_expert"),
    ):
        with pytest.raises(ValueError, match=text):
            use_moe(changed(change))
