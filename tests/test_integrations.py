"""Hugging Face's sparse blocks, as they are and with cuda_ops inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuda_ops.dev import reload
from cuda_ops.integrations import use_moe

SIZES = {
    "hidden_size": 16, "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("moe_route", "moe_experts", "moe")


def block_of(model: str, normalize: bool) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    named = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}[model]
    more: dict[str, Any] = {"mixtral": {"num_local_experts": 4, "intermediate_size": 6}}.get(
        model,
        {
            "num_experts": 4, "intermediate_size": 6, "moe_intermediate_size": 6,
            "norm_topk_prob": normalize,
        },
    )  # fmt: skip
    config = getattr(transformers, f"{named}Config")(**SIZES, **more)
    config._experts_implementation = "eager"
    module = __import__(
        f"transformers.models.{model}.modeling_{model}", fromlist=[f"{named}SparseMoeBlock"]
    )
    block: torch.nn.Module = getattr(module, f"{named}SparseMoeBlock")(config).double()
    if not isinstance(getattr(block.experts, "gate_up_proj", None), torch.Tensor):
        pytest.skip(f"transformers {transformers.__version__} keeps experts apart")
    with torch.no_grad():
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return block


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "olmoe"])
def test_agrees_with_hugging_face(model: str, normalize: bool) -> None:
    torch.manual_seed(0)
    block = block_of(model, normalize)
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


def test_another_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a tensor gate\.weight in Linear"):
        use_moe(torch.nn.Linear(2, 2))
