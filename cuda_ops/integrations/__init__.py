"""Puts operators of cuda_ops into models of other libraries."""

from cuda_ops.integrations.blocks import BLOCKS, REFUSED, Block
from cuda_ops.integrations.models import Conversion, convert
from cuda_ops.integrations.moe import use_moe

__all__ = ["BLOCKS", "REFUSED", "Block", "Conversion", "convert", "use_moe"]
