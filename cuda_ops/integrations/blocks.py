"""Which sparse blocks of Hugging Face's models were compared with cuda_ops, and what they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

_PLAIN = ("gate", "experts")


@dataclass(frozen=True)
class Block:
    """A sparse block as it was when it was compared."""

    #: The class of its part ``experts``.
    experts: str
    #: The names of its parts, and of parts that its config may leave out.
    parts: tuple[str, ...] = _PLAIN
    optional: tuple[str, ...] = ()
    #: How its part ``gate`` routes, if cuda_ops can: ``"softmax"``, ``"scaled softmax"`` or
    #: ``"sigmoid"``. Empty where the block keeps its own router.
    routing: str = ""
    #: The class of ``gate``, which is compared where cuda_ops routes.
    gate: str = ""


def _family(
    names: str,
    parts: tuple[str, ...] = _PLAIN,
    *,
    ends: str = "SparseMoeBlock",
    routing: str = "",
    gate: str = "TopKRouter",
    optional: tuple[str, ...] = (),
) -> Iterator[tuple[str, Block]]:
    """Returns blocks whose classes, and those of their parts, differ in the first words alone."""
    for name in names.split():
        router = f"{name}{gate}" if routing else ""
        yield f"{name}{ends}", Block(f"{name}Experts", parts, optional, routing, router)


_SHARED = (*_PLAIN, "shared_experts")
_ONE_SHARED = (*_PLAIN, "shared_expert")
_GATED = (*_ONE_SHARED, "shared_expert_gate")
_sigmoids = partial(_family, routing="sigmoid", gate="TopkRouter")

#: The blocks that were compared, by class. Others look the same from outside and are not: a factor,
#: clamps or groups of experts show only in forward's code.
BLOCKS: dict[str, Block] = dict([
    # The softmax of logits.
    *_family("Mixtral Qwen3Moe Olmoe FlexOlmo Mellum MiniMax Qwen3VLMoeText "
             "Qwen3OmniMoeThinkerText", routing="softmax"),
    *_family("Qwen2Moe Qwen3Next Qwen3_5Moe Qwen4ExpText Qwen3OmniMoeTalkerText", _GATED,
             routing="softmax"),
    *_family("DeepseekV2 DeepseekOcr2Text UnlimitedOcrText", _SHARED, ends="Moe",
             routing="scaled softmax", gate="TopkRouter"),
    # Sigmoids, with a bias for the choice, groups and a factor.
    *_sigmoids("DeepseekV3 DeepseekV32 Glm4Moe Glm4MoeLite Glm4vMoeText GlmMoeDsa Dots1 KimiLinear "
               "SolarOpen BailingHybrid", _SHARED, ends="MoE"),
    *_sigmoids("ExaoneMoe", _SHARED, ends="SparseMoEBlock"),
    *_sigmoids("AXK1", (*_SHARED, "post_mlp_layernorm"), ends="MoE"),
    *_sigmoids("MiMoV2Flash", ends="MoE"),
    ("Dots3NoteTextMoE", Block("Dots3NoteExperts", _SHARED, routing="sigmoid",
                               gate="Dots3NoteTextTopkRouter")),
    # Routers that stay: cuda_ops has no such score, group, sum or order of results.
    *_family("Lfm2Moe MiniMaxM2 Zaya"),
    *_family("AXK2 Mistral4 MistralLarge4Text HYV3 Inkling", _SHARED, ends="MoE"),
    *_family("Kolibri1 Laguna", _SHARED),
    *_family("Flint LaraMini", _ONE_SHARED),
    *_family("Cohere2Moe Ernie4_5_Moe", optional=("shared_experts",)),
    *_family("Jamba Phimoe", ("router", "experts")),
    *_family("Afmoe", ("router", "experts", "shared_experts")),
    *_family("Beam", ends="MoE"),
    *_family("GraniteMoe GraniteMoeSWA GraniteMoeHybrid GraniteMoeShared", ("router", "experts"),
             ends="MoE"),
    *_family("HunYuanMoEV1", (*_PLAIN, "shared_mlp"), ends="Moe"),
    ("Ernie4_5_VLMoeSparseMoeBlock", Block("Ernie4_5_VLMoeMoeExperts")),
    ("Dots3NoteVisionMoE", Block("Dots3NoteExperts")),
])  # fmt: skip

_CLAMPED = "its experts clamp gate and up before they multiply them"
_PLUS_ONE = (
    "its experts multiply up + 1 by gate * sigmoid(alpha * gate), both clamped, where cuda_ops.moe "
    "multiplies up by silu(gate)"
)
_GELU = "its experts have another activation than silu, and it is a whole layer"

#: Blocks that look alike and cannot run :func:`cuda_ops.moe`, and why.
REFUSED: dict[str, str] = {
    "GptOssMLP": f"{_PLUS_ONE}, and have biases",
    "OpenAIPrivacyFilterMLP": f"{_PLUS_ONE}, and have biases",
    "MiniMaxM3VLSparseMoeBlock": _PLUS_ONE,
    "DeepseekV4SparseMoeBlock": _CLAMPED,
    "Glm5NextTextMoE": _CLAMPED,
    "HYV4MoE": _CLAMPED,
    "HYV4VLMoE": _CLAMPED,
    "Step3p7SparseMoeBlock": _CLAMPED,
    "Llama4TextMoe": "it multiplies tokens by their weights before the experts, and runs all",
    "AriaTextMoELayer": "its matrices are transposed, (E, H, 2I) and (E, I, H)",
    "LongcatFlashMoE": "some of its experts return a token as it is, and have no matrices",
    "MuseSparkMoE": "it normalizes what each expert returns before it is weighted",
    "Inkling2SparseMoeBlock": "its experts have a function of gate and up other than SwiGLU",
    "Inkling2LoopSparseMoeBlock": "its experts have a function of gate and up other than SwiGLU",
    "Gemma4TextDecoderLayer": _GELU,
    "DiffusionGemmaEncoderTextLayer": _GELU,
    "DiffusionGemmaDecoderTextLayer": _GELU,
}
