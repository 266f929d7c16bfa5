"""Class 5: a backward that assumes a contiguous incoming gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cuda_ops.testing.case import Case, NotRunError, check, wanting, without_gradient
from cuda_ops.testing.compare import is_floating
from cuda_ops.testing.draw import Draw

#: What may follow the operator in a model, and passes back gradients in other layouts.
_USES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda out: out.sum(),
    "mean": lambda out: out.mean(),
    "cat": lambda out: (torch.cat([out, out], -1) * _ramp(torch.cat([out, out], -1))).sum(),
    "transpose": lambda out: (out.mT * _ramp(out.mT)).sum(),
    "expand": lambda out: (out.expand(3, *out.shape) * _ramp(out.expand(3, *out.shape))).sum(),
    "slice": lambda out: (out[..., ::2] * _ramp(out[..., ::2])).sum(),
    "select": lambda out: (out * _ramp(torch.stack([out, out], -1))[..., 0]).sum(),
}


@check("gradient_layouts", 5, "the backward assumes a contiguous gradient",
       Draw(4, range(1, 513), floating=True), quick=True, excuse=without_gradient)  # fmt: skip
def gradient_layouts(case: Case) -> None:
    """Checks that the same gradient in another layout gives the same result."""
    leaves = case.leaves()
    found = [out for out in case.call(*leaves) if is_floating(out)]
    outputs = [out for out in found if out.requires_grad and out.dim()]
    if not outputs:
        raise NotRunError("no floating outputs")
    for name, use in _USES.items():
        if name == "transpose" and any(out.dim() < 2 for out in outputs):
            continue
        stand_ins = [out.detach().requires_grad_() for out in outputs]
        incoming = torch.autograd.grad([use(out) for out in stand_ins], stand_ins)
        dense = [gradient.contiguous().clone() for gradient in incoming]

        def results(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
            found = torch.autograd.grad(
                outputs, wanting(leaves), gradients, retain_graph=True, allow_unused=True
            )
            return list(filter(torch.is_tensor, found))

        what = f"backward through {name} differs from that of the same gradient, contiguous"
        case.same(results(list(incoming)), results(dense), what)


def _ramp(like: torch.Tensor) -> torch.Tensor:
    """Returns a different number for every element, so that none can be mistaken for another."""
    numbers = torch.arange(1, like.numel() + 1, device=like.device, dtype=torch.float32)
    return (numbers / like.numel()).to(like.dtype).view(like.shape)
