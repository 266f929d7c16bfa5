"""Exports a model with operators of cuda_ops for a program that has no Python.

    python export.py FOLDER

writes, for the CPU and for CUDA where there is a GPU, ``FOLDER/<device>.pt2``, the package that
AOTInductor compiles, and ``FOLDER/<device>.pt``, an input and the output to compare with.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import cuda_ops


class Block(torch.nn.Module):
    """A norm, a product, and operators of every kind: composed, of lists, elementwise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(width) + 0.5)
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = cuda_ops.rms_norm(x, self.weight, 1e-5)
        hidden = cuda_ops.scale_relu(self.linear(normed), 2.0)
        first, second = cuda_ops.foreach_axpy([hidden, x], [x, hidden], 0.5)
        return cuda_ops.silu(first) + second


def export(folder: Path, device: str) -> None:
    torch.manual_seed(0)
    model, x = Block(64).to(device).eval(), torch.randn(5, 64, device=device)
    rows = torch.export.Dim("rows", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: rows}})
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / f"{device}.pt2")
        )
        values = {"x": x.cpu(), "expected": model(x).cpu()}
    torch.save(values, folder / f"{device}.pt")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        export(folder, device)
        print(f"wrote {folder / device}.pt2")
