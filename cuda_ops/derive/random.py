"""Random keys, which torch's own operator draws.

So all that torch knows of random numbers holds for the operators that take a key: a CUDA graph
draws anew at each replay, ``torch.utils.checkpoint`` and ``torch.compile`` draw the same again
where they compute again, and ``torch.vmap`` asks for ``randomness``.
"""

from __future__ import annotations

import sys

import torch

#: One more than the largest number of a key.
_MOST = 2**63 - 1


def draw_key(like: torch.Tensor) -> torch.Tensor:
    """Draws the key of a call: two numbers, from the generator of the tensor's device.

    Ranks that share a DTensor all get the key of the first.
    """
    if type(like) is not torch.Tensor and not torch.compiler.is_dynamo_compiling():
        distributed = sys.modules.get("torch.distributed.tensor")  # else it is not one
        if distributed is not None and isinstance(like, distributed.DTensor):
            own = torch.randint(_MOST, (2,), device=like.to_local().device)
            mesh = like.device_mesh
            replicated = [distributed.Replicate()] * mesh.ndim
            shared: torch.Tensor = distributed.distribute_tensor(own, mesh, replicated)
            return shared
    return torch.randint(_MOST, (2,), device=like.device)
