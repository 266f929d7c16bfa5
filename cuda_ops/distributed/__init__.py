"""What operators on several ranks share: an agreement before anything is sent, and what sends."""

from cuda_ops.distributed.ways import Way, way

__all__ = ["Way", "way"]
