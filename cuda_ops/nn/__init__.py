"""Modules over the operators: torch's own classes with another forward, and what torch lacks.

``cuda_ops.nn.convert(model)`` puts them into a model that there is already.
"""

from cuda_ops.nn.activations import GELU, ReLU, SiLU, SiluAndMul
from cuda_ops.nn.converting import convert
from cuda_ops.nn.dropout import Dropout
from cuda_ops.nn.linear import FusedLinearGELU
from cuda_ops.nn.loss import CrossEntropyLoss
from cuda_ops.nn.mixture import Experts, MoE
from cuda_ops.nn.norms import AddRMSNorm, LayerNorm, RMSNorm
from cuda_ops.nn.rotary import RotaryEmbedding

__all__ = [
    "GELU",
    "AddRMSNorm",
    "CrossEntropyLoss",
    "Dropout",
    "Experts",
    "FusedLinearGELU",
    "LayerNorm",
    "MoE",
    "RMSNorm",
    "ReLU",
    "RotaryEmbedding",
    "SiLU",
    "SiluAndMul",
    "convert",
]
