"""A mixture of SwiGLU experts and its router."""

from __future__ import annotations

from typing import Any

import torch

import cuda_ops
from cuda_ops.derive.checks import dtype_name
from cuda_ops.nn._like_torch import (
    must_be_bool,
    must_be_int,
    must_be_tensor,
    refuse,
    refuse_call,
)
from cuda_ops.ops import _moe
from cuda_ops.ops._moe_checks import MOST_CHOSEN, MOST_EXPERTS


class Experts(torch.nn.Module):
    """The experts of :class:`MoE`: two stacked matrices, named as transformers 5 names them.

    A call takes x, router_logits and top_k, and renormalize, scoring and expert_bias as
    :func:`cuda_ops.moe` does.

    State dict: gate_up_proj (E, 2I, H), the gate first, and down_proj (E, H, I).
    Shapes: x (..., H), router_logits (..., E); the result has the shape of x.
    Dtypes: as for cuda_ops.moe.

    Args:
        num_experts: E, from 1 to 512.
        hidden_size: H.
        intermediate_size: I, of one expert.
        device, dtype: of the parameters.

    Errors: ValueError for a num_experts out of range or a size that is no int; RuntimeError as for
    cuda_ops.moe.
    Formula: that of cuda_ops.moe.

    Example:
    >>> experts = cuda_ops.nn.Experts(num_experts=3, hidden_size=4, intermediate_size=8)
    >>> experts(torch.randn(5, 4), torch.randn(5, 3), top_k=2).shape
    torch.Size([5, 4])
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        must_be_int("Experts", "num_experts", num_experts, 1, MOST_EXPERTS)
        _check_sizes("Experts", hidden_size, intermediate_size)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        up = torch.empty(num_experts, 2 * intermediate_size, hidden_size, **made)
        down = torch.empty(num_experts, hidden_size, intermediate_size, **made)
        self.gate_up_proj, self.down_proj = torch.nn.Parameter(up), torch.nn.Parameter(down)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws each matrix as torch.nn.Linear draws its weight."""
        for matrices in (self.gate_up_proj, self.down_proj):
            bound = matrices.shape[-1] ** -0.5 if matrices.shape[-1] else 0.0
            torch.nn.init.uniform_(matrices, -bound, bound)

    def forward(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        renormalize: bool = True,
        scoring: str = "softmax",
        expert_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs each token through the experts that its logits choose."""
        out: torch.Tensor = cuda_ops.moe(
            x, router_logits, self.gate_up_proj, self.down_proj, top_k, renormalize=renormalize,
            scoring=scoring, expert_bias=expert_bias,
        )  # fmt: skip
        return out

    def extra_repr(self) -> str:
        """Returns the sizes."""
        experts, hidden, intermediate = self.down_proj.shape
        return f"{experts}, hidden_size={hidden}, intermediate_size={intermediate}"


class MoE(torch.nn.Module):
    """A mixture of SwiGLU experts by :func:`cuda_ops.moe`, with its router.

    Names and shapes of parameters are those of Mixtral's, Qwen-MoE's and OLMoE's blocks in
    transformers 5 (the first with renormalize=True, which is the default), so that their state
    dicts fit. ``cuda_ops.nn.convert`` makes those blocks run the same operators where they are.

    State dict: gate.weight (E, H), experts.gate_up_proj (E, 2I, H), the gate first, and
    experts.down_proj (E, H, I); with expert_bias also gate.e_score_correction_bias (E), a buffer.
    Shapes: x (..., H); the result has its shape. E from 1 to 512.
    Dtypes: float64, float32, float16 or bfloat16, the same for x and the parameters; under autocast
    its dtype, with the routing in float32.

    Args:
        hidden_size: H.
        intermediate_size: I, of one expert.
        num_experts: E.
        top_k: experts per token, from 1 to 16 and at most E.
        renormalize: divide a token's weights by their sum.
        scoring: "softmax" over all experts, or "sigmoid" of each.
        expert_bias: add a buffer to the scores when choosing, zeros at first, as DeepSeek-V3 does
            to even out how many tokens an expert gets; no gradient.
        device, dtype: of the parameters.

    Errors: ValueError for a top_k or num_experts out of range, a size that is no int, any other
    scoring, or a renormalize or expert_bias that is no bool; RuntimeError as for cuda_ops.moe.
    Formula: Shazeer et al., https://arxiv.org/abs/1701.06538, with the SwiGLU experts of Shazeer,
    https://arxiv.org/abs/2002.05202.

    Example:
    >>> layer = cuda_ops.nn.MoE(hidden_size=4, intermediate_size=8, num_experts=3, top_k=2)
    >>> layer(torch.randn(2, 5, 4)).shape
    torch.Size([2, 5, 4])
    >>> list(layer.state_dict())
    ['gate.weight', 'experts.gate_up_proj', 'experts.down_proj']
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool = True,
        scoring: str = "softmax",
        expert_bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes("MoE", hidden_size, intermediate_size)
        must_be_int("MoE", "num_experts", num_experts, 1, MOST_EXPERTS)
        must_be_int("MoE", "top_k", top_k, 1, min(MOST_CHOSEN, num_experts))
        given: Any = expert_bias
        if not isinstance(given, bool):
            expected = "a bool, whether the module makes a buffer for one"
            refuse("MoE", "expert_bias", expected, expert_bias)
        must_be_bool("MoE", "renormalize", renormalize)
        _moe.scoring_code("nn.MoE", scoring)
        self.top_k, self.renormalize, self.scoring = top_k, renormalize, scoring
        self.gate = torch.nn.Linear(hidden_size, num_experts, False, device, dtype)
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32)
        # Beside the weight, where transformers has it; None is no part of the state dict.
        self.gate.register_buffer("e_score_correction_bias", bias if expert_bias else None)
        self.experts = Experts(num_experts, hidden_size, intermediate_size, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of the experts of each token."""
        must_be_tensor(self, "x", x)
        try:
            logits = self.gate(x)
        except RuntimeError:
            # Not looked at before: hooks or wrappers of the gate may cast x or gather the weight.
            self._check(x)
            raise
        out: torch.Tensor = self.experts(
            x, logits, self.top_k, self.renormalize, self.scoring,
            self.gate.e_score_correction_bias,
        )  # fmt: skip
        return out

    def _check(self, x: torch.Tensor) -> None:
        """Refuses what a product with the gate's weight cannot take, which says little of x."""
        weight: Any = self.gate.weight
        if x.is_nested or weight.dim() != 2:
            return
        if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
            expected = f"shape (..., H) = (..., {weight.shape[1]})"
            refuse_call(self, "x", expected, f"shape {list(x.shape)}")
        if x.dtype != weight.dtype:
            expected = f"dtype {dtype_name(weight.dtype)} like the parameters"
            refuse_call(self, "x", expected, dtype_name(x.dtype))
        if x.device != weight.device:
            expected = f"a tensor on {weight.device} like the parameters"
            refuse_call(self, "x", expected, f"one on {x.device}")

    def extra_repr(self) -> str:
        """Returns how it routes."""
        return f"top_k={self.top_k}, renormalize={self.renormalize}, scoring={self.scoring!r}"


def _check_sizes(module: str, hidden_size: Any, intermediate_size: Any) -> None:
    must_be_int(module, "hidden_size", hidden_size, 0)
    must_be_int(module, "intermediate_size", intermediate_size, 0)
