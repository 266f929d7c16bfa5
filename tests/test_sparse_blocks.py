"""Every block that use_moe takes, as it is and with cuda_ops inside, and whole models of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda_ops.compile_ops import reload
from cuda_ops.integrations import BLOCKS, REFUSED, convert, use_moe
from cuda_ops.integrations.moe import routes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "use-moe.md"

#: What the configs of all these blocks have, together: each class reads its own few.
CONFIG = {
    "hidden_size": 16, "intermediate_size": 6, "moe_intermediate_size": 6, "hidden_act": "silu",
    "shared_expert_intermediate_size": 10, "shared_experts_intermediate_size": 10,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_topk": 2,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "moe_routed_scaling_factor": 1.5,
    "router_scaling_factor": 1.5, "route_scale": 1.5, "moe_router_logit_softcapping": 2.0,
    "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, "n_shared_experts": 1,
    "num_shared_experts": 1, "moe_num_shared_experts": 1, "moe_norm_min": 1e-12,
    "shared_expert_combination_strategy": "average", "expert_selection_fn": "sigmoid",
    "use_expert_bias": True, "enable_moe_fp32_combine": True, "router_hidden_size": 5,
    "mlp_bias": False, "use_bias": False, "rms_norm_eps": 1e-6, "_experts_implementation": "eager",
}  # fmt: skip
#: What a class's init takes beside its config.
MORE = {
    "ZayaSparseMoeBlock": (0,),
    "Ernie4_5_VLMoeSparseMoeBlock": (6,),
    "Dots3NoteVisionMoE": (0,),
}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("moe_route", "moe_experts", "moe", "moe_send_")  # the last for a group


@cache
def modules() -> dict[str, str]:
    """The module of each class of the transformers that is installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    found = {}
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for name in re.findall(r"^class (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return found


def class_of(name: str) -> Any:
    if name not in modules():
        # Each release adds some; the newest known one has all.
        pytest.skip(f"this version of transformers has no {name}")
    return getattr(import_module(modules()[name]), name)


def block_of(name: str, **changes: Any) -> Any:
    """A small block of this class, in float32, with random parameters and biases."""
    config = SimpleNamespace(**(CONFIG | changes))
    config.per_layer_config = [config]
    torch.manual_seed(0)
    block = class_of(name)(config, *MORE.get(name, ())).float()
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(std=0.5)
    return block


def tensors_of(result: Any) -> Iterator[torch.Tensor]:
    """Yields the outputs of a block, some of which also return what their router did."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple):
        for one in result:
            yield from tensors_of(one)


def results(block: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns the outputs and the gradients of everything that has one."""
    torch.manual_seed(1)  # a router may draw numbers while it trains
    outputs = [*tensors_of(block(x))]
    inputs = [x, *(p for p in block.parameters() if p.requires_grad)]
    loss = sum((one.square().sum() for one in outputs), torch.zeros(()))
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [*outputs, *(torch.zeros(()) if g is None else g for g in grads)]


def agrees(block: Any, x: torch.Tensor) -> None:
    theirs = results(block, x)
    use_moe(block)
    ours = results(block, x)
    assert len(ours) == len(theirs)
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            own, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max())
        )


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", BLOCKS)
def test_agrees_with_the_block_as_it_was(name: str, training: bool) -> None:
    block = block_of(name).train(training)
    agrees(block, torch.randn(2, 7, 16, requires_grad=True))
    assert routes(block) == bool(BLOCKS[name].routing)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ["DeepseekV3MoE", "Glm4MoeMoE"])
def test_groups_decide_whose_router_runs(name: str, normalize: bool) -> None:
    x = torch.randn(2, 9, 16, requires_grad=True)
    for groups, taken, routed in ((4, 2, False), (4, 4, True), (1, 1, True)):
        block = block_of(name, n_group=groups, topk_group=taken, norm_topk_prob=normalize)
        own = block.gate.forward
        agrees(block, x)
        assert routes(block) is routed
        if not routed:
            assert block.gate.forward == own


def test_deepseek_v2_keeps_its_router_where_it_has_groups() -> None:
    x = torch.randn(2, 9, 16, requires_grad=True)
    block = block_of("DeepseekV2Moe", topk_method="group_limited_greedy", n_group=4, topk_group=2)
    agrees(block, x)
    assert not routes(block)


def test_a_block_that_chooses_outside_of_its_gate_keeps_its_router() -> None:
    """Such as DeepSeek-V3's of some versions of transformers."""
    block = block_of("DeepseekV3MoE")
    del block.gate.num_group
    assert not routes(use_moe(block))


def test_the_bias_of_a_choice_is_read_at_each_call() -> None:
    block = use_moe(block_of("Glm4MoeMoE")).eval()
    x = torch.randn(1, 5, 16)
    block.gate.e_score_correction_bias.copy_(torch.arange(8.0) * 100)
    _, _, experts = block.gate(x)
    assert experts.tolist() == [[7, 6]] * 5


@pytest.mark.parametrize("name", ["Qwen2MoeSparseMoeBlock", "DeepseekV3MoE", "GraniteMoeMoE"])
def test_compiles_whole(name: str) -> None:
    block = use_moe(block_of(name))
    x = torch.randn(2, 7, 16, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for own, expected in zip(results(compiled, x), results(block, x), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["Qwen2MoeSparseMoeBlock", "DeepseekV3MoE", "Lfm2MoeSparseMoeBlock"]
)
def test_16_bits_stay_16_bits(name: str) -> None:
    block = use_moe(block_of(name).bfloat16())
    x = torch.randn(2, 7, 16, dtype=torch.bfloat16, requires_grad=True)
    for result in results(block, x):
        assert result.dtype is torch.bfloat16


@pytest.mark.slow
def test_experts_of_a_group_agree(tmp_path: Path) -> None:
    from test_expert_parallel import on_all

    on_all(group_agrees, tmp_path / "store", 2)


def group_agrees(rank: int, ranks: int) -> None:
    for name, taken in (("DeepseekV3MoE", 2), ("Glm4MoeMoE", 4), ("GraniteMoeMoE", 4)):
        block = block_of(name, n_group=4, topk_group=taken)
        x = torch.randn(ranks, 7, 16)[rank : rank + 1]
        expected = block(x)
        assert convert(block, group=torch.distributed.group.WORLD).left == {}
        assert block.experts.down_proj.to_local().shape[0] == 8 // ranks
        assert routes(block) is (name == "Glm4MoeMoE")
        torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)


# --- guards ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_blocks_that_look_alike_are_refused_with_a_reason(name: str) -> None:
    block = object.__new__(class_of(name))
    with pytest.raises(
        ValueError, match=re.escape(f"{name} cannot run cuda_ops.moe: {REFUSED[name]}")
    ):
        use_moe(block)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_changed_block_is_refused(name: str) -> None:
    block = block_of(name)
    block.one_more = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=rf"expected {name} to be made of .*, got .*one_more Lin"):
        use_moe(block)
    del block.one_more
    block.experts.register_buffer("one_more", torch.zeros(4))
    with pytest.raises(ValueError, match=rf"expected {name} to have .*, got .*experts\.one_more"):
        use_moe(block)
    del block.experts.one_more
    activation = block.experts.act_fn
    del block.experts.act_fn  # a module or a function
    block.experts.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match=f"expected experts of {name} to have silu, got GELU"):
        use_moe(block)
    del block.experts.act_fn
    block.experts.act_fn = activation
    theirs = block.experts.forward
    block.experts.forward = lambda *args: theirs(*args)
    with pytest.raises(ValueError, match=f"expected experts of {name} to have its class's forward"):
        use_moe(block)
    del block.experts.forward
    assert use_moe(use_moe(block)) is block


@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if block.routing])
def test_a_gate_that_differs_is_refused(name: str) -> None:
    block = block_of(name)
    block.gate.register_buffer("one_more", torch.zeros(4))
    with pytest.raises(ValueError, match=rf"expected {name} to have .*, got .*gate\.one_more"):
        use_moe(block)
    del block.gate.one_more
    theirs = block.gate.forward
    block.gate.forward = lambda *args: theirs(*args)
    with pytest.raises(ValueError, match=f"expected gate of {name} to have its class's forward"):
        use_moe(block)
    block.gate = torch.nn.Linear(16, 8, bias=False)
    with pytest.raises(ValueError, match=rf"to be made of .*{BLOCKS[name].gate}.*, got .*Linear"):
        use_moe(block)


def test_quantized_matrices_are_refused() -> None:
    block = block_of("Qwen3MoeSparseMoeBlock")
    narrow = block.experts.down_proj.detach().to(torch.float8_e4m3fn)
    block.experts.down_proj = torch.nn.Parameter(narrow, requires_grad=False)
    with pytest.raises(ValueError, match=r"expected matrices of .* got torch.float8_e4m3fn"):
        use_moe(block)


def test_matrices_that_are_no_parameters_are_refused() -> None:
    block = block_of("Qwen3MoeSparseMoeBlock")
    matrices = block.experts.down_proj.detach()
    del block.experts.down_proj
    block.experts.register_buffer("down_proj", matrices)
    with pytest.raises(ValueError, match=r"down_proj of .* Parameter with 3 dims, got a Tensor"):
        use_moe(block)
    del block.experts.down_proj
    block.experts.down_proj = torch.nn.Parameter(matrices[0])
    assert "got a Parameter with 2" in str(convert(block))


def test_an_activation_that_wants_another_shape_is_refused() -> None:
    block = block_of("Qwen3MoeSparseMoeBlock")
    block.experts.act_fn = torch.nn.GLU()
    with pytest.raises(ValueError, match=r"to have silu, got GLU"):
        use_moe(block)


def test_a_gate_routes_by_itself_again_once_it_leaves_groups_out() -> None:
    block, x = block_of("DeepseekV3MoE", n_group=4, topk_group=4), torch.randn(2, 3, 16)
    use_moe(block)
    block.gate.topk_group = 1
    assert str(convert(block)).endswith("experts, with its own router")
    torch.testing.assert_close(
        block(x), block_of("DeepseekV3MoE", n_group=4, topk_group=1)(x), rtol=1e-4, atol=1e-4
    )


# --- whole models ------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    def __init__(self, *blocks: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(blocks)


def test_convert_changes_what_it_can_and_names_the_rest() -> None:
    refused = block_of("Qwen3MoeSparseMoeBlock")
    refused.experts.act_fn = torch.nn.GELU()
    foreign = torch.nn.Module()
    foreign.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    model = Layers(
        torch.nn.Linear(16, 16),
        *(block_of("Qwen2MoeSparseMoeBlock") for _ in range(4)),
        block_of("DeepseekV3MoE", n_group=4, topk_group=2),
        refused,
        foreign,
    )
    found = convert(model)
    assert [*found.replaced] == [f"layers.{k}" for k in range(1, 6)]
    assert [*found.left] == ["layers.6", "layers.7"]
    for block in model.layers[1:6]:
        assert block.experts.forward.func.__module__ == "cuda_ops.integrations.moe"
    assert "forward" not in vars(refused.experts) and "forward" not in vars(refused.gate)
    silu = "expected experts of Qwen3MoeSparseMoeBlock to have silu, got GELU(approximate='none')"
    unknown = "expected a block of a class in cuda_ops.integrations.BLOCKS, got Module, which may"
    *lines, last = str(found).splitlines()
    assert lines == [
        "changed: layers.1, layers.2 and 2 more: Qwen2MoeSparseMoeBlock: routing and experts",
        "changed: layers.5: DeepseekV3MoE: experts, with its own router",
        f"left as it was: layers.6: {silu}",
    ]
    assert last.startswith(f"left as it was: layers.7: {unknown}")


def test_convert_takes_a_block_itself_and_a_model_without_any() -> None:
    assert str(convert(block_of("Glm4MoeMoE"))).startswith("changed: the model itself: Glm4MoeMoE")
    assert str(convert(torch.nn.Linear(2, 2))) == "no sparse blocks"


# --- the table of the document ---------------------------------------------------------------


def test_the_document_lists_every_block_that_is_taken_or_refused() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    listed = {name: row for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed.keys() == BLOCKS.keys() | REFUSED.keys()
    for name, block in BLOCKS.items():
        expected = "cuda_ops" if block.routing else "its own"
        assert expected in listed[name].split("|")[2], name
    for name in REFUSED:
        assert "refused" in listed[name].split("|")[2], name
