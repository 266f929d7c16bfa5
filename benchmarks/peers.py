"""Peers from outside: those that only this checkout has, or that another package must bring.

This is one plugin for every operator; peers of PyTorch itself are with the operators.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe_peers import MOE_PEERS
from cuda_ops.benchmarking.choice import BestOf
from cuda_ops.benchmarking.peers import from_pair, imported, torch_peers
from cuda_ops.hookspecs import hookimpl
from cuda_ops.spec import OpSpec, Peer

_CUB = Path(__file__).parent / "cub"
_CUBLAS = Path(__file__).parent / "cublas"
#: As ``kCublasLtAlgorithms``.
_ALGORITHMS = 10


# --- an operator that has no Python file of its own -------------------------------------


def scale_relu(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Runs what the operator is composed of."""
    return torch.relu(x * scale + 1)


# --- packages, adapted to our arguments -------------------------------------------------


def on_halves(swiglu_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Calls Liger's kernel, which takes two contiguous tensors, on copies of the halves of one."""

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        out: torch.Tensor = swiglu_forward(gate.contiguous(), up.contiguous())[2]
        return out

    return silu_and_mul


def planar(rgb_to_grayscale: Callable[..., Any]) -> Callable[..., Any]:
    return lambda image: rgb_to_grayscale(image).squeeze(-3)


def interleaved(rgb_to_grayscale: Callable[..., Any]) -> Callable[..., Any]:
    return lambda image: rgb_to_grayscale(image.movedim(-1, -3)).squeeze(-3)


def liger_rms_norm(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps Liger's gradient from writing over the incoming one, which the calls share."""

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        out: torch.Tensor = function(x, weight, eps, in_place=False)
        return out

    return rms_norm


def liger_cross_entropy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Passes the options by name. Liger writes the gradient over the logits in its forward."""

    def cross_entropy(
        logits: torch.Tensor,
        labels: torch.Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        loss: torch.Tensor = function(
            logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        return loss

    return cross_entropy


def with_eps(function: Callable[..., Any], eps: float) -> Callable[..., Any]:
    return lambda *tensors: function(*tensors, eps)


def turned_in_place(apply_rotary: Callable[..., Any]) -> Callable[..., Any]:
    """Calls flash-attn's kernel so that it writes over x."""

    def rotary_embedding_(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
    ) -> None:
        apply_rotary(x, cos, sin, interleaved, True)

    return rotary_embedding_


def reshape_and_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls vLLM's kernel, which takes eight bits as bytes, and always takes scales."""

    @functools.cache
    def one(device: torch.device) -> torch.Tensor:
        return torch.ones((), device=device)

    def cache_write_(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key_scale: torch.Tensor | None = None,
        value_scale: torch.Tensor | None = None,
    ) -> None:
        caches, kind = [key_cache, value_cache], "auto"
        if key_cache.dtype.itemsize == 1:
            kind = "fp8_e5m2" if key_cache.dtype is torch.float8_e5m2 else "fp8"
            caches = [cache.view(torch.uint8) for cache in caches]
        scales = [one(key.device) if s is None else s for s in (key_scale, value_scale)]
        function(key, value, *caches, slots, kind, *scales)

    return cache_write_


def vllm_quantize(scaled_fp8_quant: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the operator of vLLM that the dtype and the block ask for."""
    scaled_int8_quant = importlib.import_module("vllm._custom_ops").scaled_int8_quant

    def quantize(
        x: torch.Tensor, dtype: torch.dtype, block: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if dtype is torch.int8 and block is None:
            q, scale, _ = scaled_int8_quant(x)
        elif block is None:
            q, scale = scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        else:
            quantization = "vllm.model_executor.layers.quantization.utils"
            suffix = "int8" if dtype is torch.int8 else "fp8"
            module = importlib.import_module(f"{quantization}.{suffix}_utils")
            q, scale = getattr(module, f"per_token_group_quant_{suffix}")(x, block)
        return q, scale

    return quantize


def algorithms(cublaslt_matmul: Callable[..., Any], tf32: bool = False) -> BestOf:
    """Makes a candidate of each algorithm that cuBLASLt suggests. torch has no way to the others:
    its TunableOp knows only the first one on NVIDIA's GPUs.
    """
    return BestOf(
        {
            f"algorithm {i + 1}": functools.partial(cublaslt_matmul, algorithm=i, tf32=tf32)
            for i in range(_ALGORITHMS)
        }
    )


_TORCHVISION = "torchvision.transforms.v2.functional:rgb_to_grayscale"
_FLASH_ROTARY = "flash_attn.layers.rotary:apply_rotary_emb"

PEERS: dict[str, dict[str, Callable[..., Any] | Peer]] = {
    "scale_relu": torch_peers(scale_relu),
    "silu": {"triton": imported("benchmarks.triton_kernels:silu")},
    "silu_and_mul": {
        "triton": imported("benchmarks.triton_kernels:silu_and_mul"),
        "liger": imported("liger_kernel.ops.swiglu:swiglu_forward", on_halves),
    },
    "rgb_to_gray": {"torchvision": imported(_TORCHVISION, interleaved, off_by=1)},
    "rgb_to_gray_chw": {"torchvision": imported(_TORCHVISION, planar, off_by=1)},
    "rms_norm": {
        "liger": imported("liger_kernel.transformers.functional:liger_rms_norm", liger_rms_norm)
    },
    "layer_norm": {
        "liger": imported(
            "liger_kernel.transformers.functional:liger_layer_norm",
            functools.partial(with_eps, eps=1e-5),
        )
    },
    "add_rms_norm_": {
        "vllm": imported(
            "vllm._custom_ops:fused_add_rms_norm", functools.partial(with_eps, eps=1e-6)
        )
    },
    "rotary_embedding": {"flash_attn": imported(_FLASH_ROTARY)},
    "rotary_embedding_": {"flash_attn": imported(_FLASH_ROTARY, turned_in_place)},
    "cache_write_": {
        "vllm": imported("vllm._custom_ops:reshape_and_cache_flash", reshape_and_cache)
    },
    "softmax_cross_entropy": {
        "liger": imported(
            "liger_kernel.transformers.functional:liger_cross_entropy", liger_cross_entropy
        )
    },
    "quantize": {"vllm": imported("vllm._custom_ops:scaled_fp8_quant", vllm_quantize)},
    # DeviceSegmentedSort, and DeviceRadixSort for a single row.
    "bitonic_sort": {"cub": from_pair(_CUB, "cub_sort")},
    "matmul": {"cublaslt": from_pair(_CUBLAS, "cublaslt_matmul", adapt=algorithms)},
    "matmul_tf32": {
        "cublaslt": from_pair(
            _CUBLAS, "cublaslt_matmul", adapt=functools.partial(algorithms, tf32=True)
        )
    },
    "moe": MOE_PEERS,
    # DeviceSegmentedReduce, and DeviceReduce for a single row.
    "sum_rows": {"cub": from_pair(_CUB, "cub_sum", "cub_sum_rows")},
    "reduce_sum": {"cub": from_pair(_CUB, "cub_sum")},
}


@hookimpl
def cuda_ops_peers(op: OpSpec) -> dict[str, Callable[..., Any] | Peer] | None:
    return PEERS.get(op.key)
