"""Mixtures of experts of other packages, adapted to the arguments of ``moe``.

Each peer routes as its package does: softmax over the chosen experts, which is renormalized.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.moe_tiles import CANDIDATES
from cuda_ops.benchmarking.choice import BestOf
from cuda_ops.benchmarking.peers import imported
from cuda_ops.ops._moe import torch_route
from cuda_ops.spec import Peer


def tiled(moe: Callable[..., torch.Tensor]) -> BestOf:
    """Makes a candidate of each tile that the table has for the case's tokens."""
    names = ("the table's first tile", "its second", "its third")
    return BestOf(
        {name: functools.partial(moe, choice=i) for i, name in enumerate(names[:CANDIDATES])}
    )


def sonic(functional: Any) -> Callable[..., torch.Tensor]:
    """Calls SonicMoE's router and experts on logits and on the matrices as they are."""
    enums = importlib.import_module("sonicmoe.enums")

    @functools.cache
    def tokens(count: int, top_k: int, device: torch.device) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device=device).repeat_interleave(top_k)

    def moe(
        x: torch.Tensor,
        router_logits: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        top_k: int,
    ) -> torch.Tensor:
        experts = w_down.shape[0]
        router = functional.TC_Softmax_Topk_Router_Function
        # The softmax over the chosen experts alone, which is renormalized already.
        weights, chosen = router.apply(router_logits, experts, top_k, True, False)
        out: torch.Tensor = functional.moe_general_routing_inputs(
            x,
            weights.flatten(),
            tokens(x.shape[0], top_k, x.device),
            chosen.flatten(),
            w_gate_up.permute(1, 2, 0),
            None,
            w_down.permute(1, 2, 0),
            None,
            experts,
            torch.cuda.current_stream().cuda_stream,
            enums.ActivationType.SWIGLU,
            is_inference_mode_enabled=not x.requires_grad,
            concat_layout=True,
        )[0]
        return out

    return moe


def vllm(package: Any) -> Callable[..., torch.Tensor]:
    """Calls vLLM's fused experts with the tiles that it has for the device, and with its own router
    in the versions that have it there.
    """
    route = getattr(package, "fused_topk", None)

    def moe(
        x: torch.Tensor,
        router_logits: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        top_k: int,
    ) -> torch.Tensor:
        if route is None:
            weights, experts = torch_route(router_logits, top_k)
        else:  # some versions return more than weights and experts
            weights, experts = route(x, router_logits, top_k, True)[:2]
        out: torch.Tensor = package.fused_experts(x, w_gate_up, w_down, weights, experts)
        return out

    return moe


class UpFirst:
    """Calls FlashInfer's fused experts, which want the half for up before the one for gate.

    A server brings its matrices into that order once, as it loads a model. So they are copied
    before each train, outside of the time.
    """

    def __init__(self, package: Any) -> None:
        self._package = package
        self._swapped: dict[int, torch.Tensor] = {}
        self._tuned: set[tuple[int, ...]] = set()

    def before(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Copies the matrices of all calls, and at a new shape lets FlashInfer choose its tiles."""
        matrices = {args[2].data_ptr(): args[2] for args in arguments}
        for gone in self._swapped.keys() - matrices.keys():
            del self._swapped[gone]
        for address, w_gate_up in matrices.items():
            gate, up = w_gate_up.chunk(2, dim=1)
            kept = self._swapped.get(address)
            if kept is None or kept.shape != w_gate_up.shape:
                kept = self._swapped[address] = torch.empty_like(w_gate_up)
            torch.cat([up, gate], dim=1, out=kept)
        shape = (*arguments[0][0].shape, *arguments[0][2].shape, arguments[0][4])
        if shape not in self._tuned:
            self._tuned.add(shape)
            with importlib.import_module("flashinfer").autotune(True):
                self(*arguments[0])

    def __call__(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        top_k: int,
    ) -> torch.Tensor:
        weights, experts = torch_route(router_logits, top_k)
        # It tunes for token counts up to this one, and refuses none.
        out = self._package.cutlass_fused_moe(
            x,
            experts.int(),
            weights,
            self._swapped[w_gate_up.data_ptr()],
            w_down,
            x.dtype,
            quant_scales=None,
            tune_max_num_tokens=max(8192, x.shape[0]),
        )
        result: torch.Tensor = out[0] if isinstance(out, (list, tuple)) else out
        return result


def hugging_face(experts_forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Calls the experts that transformers runs for ``experts_implementation="grouped_mm"``, with
    the attributes that such a module has.
    """

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def moe(
        x: torch.Tensor,
        router_logits: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        top_k: int,
    ) -> torch.Tensor:
        weights, experts = torch_route(router_logits, top_k)
        module = SimpleNamespace(
            gate_up_proj=w_gate_up,
            down_proj=w_down,
            num_experts=w_down.shape[0],
            act_fn=F.silu,
            has_gate=True,
            has_bias=False,
            is_concatenated=True,
            is_transposed=False,
            _apply_gate=gated,
        )
        return experts_forward(module, x, experts, weights.to(x.dtype))

    return moe


MOE_PEERS: dict[str, Callable[..., Any] | Peer] = {
    "triton": imported("benchmarks.triton_kernels:moe", tiled),
    "sonicmoe": imported("sonicmoe:functional", sonic),
    "flashinfer": imported("flashinfer:fused_moe", UpFirst),
    "vllm": imported("vllm.model_executor.layers:fused_moe", vllm),
    "transformers": imported(
        "transformers.integrations.moe:grouped_mm_experts_forward", hugging_face
    ),
}
