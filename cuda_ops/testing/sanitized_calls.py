"""Makes the calls that compute-sanitizer watches: a few small ones of each operator on the GPU,
gradients included, and those that plugins name, so that kernels for larger problems run too.
"""

from __future__ import annotations

import argparse
import sys

import torch

from cuda_ops.testing.case import Case, wanting
from cuda_ops.testing.draw import Draw, chosen, ordinary
from cuda_ops.testing.sanitizer import MARK
from cuda_ops.testing.subject import Origin, find
from cuda_ops.testing.tolerance import is_floating
from cuda_ops.testing.worker import load_origin

#: Tails, several blocks, and views; the tools slow kernels down a hundredfold.
_DRAW = Draw(8, range(1, 2049), adapt=ordinary)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", action="append", default=[])
    parser.add_argument("--file", default="")
    parser.add_argument("ops", nargs="+")
    parsed = parser.parse_args()
    load_origin(Origin(tuple(parsed.root), parsed.file))
    torch.zeros(1, device="cuda")
    for name in parsed.ops:
        subject = find(name)
        torch.cuda.synchronize()
        print(f"{MARK}{name}", flush=True)
        for sample in chosen(subject, _DRAW):
            case = Case(subject, "cuda", sample)
            arguments = case.arguments()
            if subject.gradient == "declared":
                having = subject.differentiable
                for i, value in enumerate(arguments):
                    if is_floating(value) and (having is None or i in having):
                        value.requires_grad_()  # in its own layout; leaves() are contiguous
            sums = [output.sum() for output in case.call(*arguments) if output.requires_grad]
            if sums:
                torch.autograd.grad(sums, wanting(arguments), allow_unused=True)
            torch.cuda.synchronize()
        for sample in subject.kernel_samples:
            case = Case(subject, "cuda", sample)
            case.call(*case.arguments())
            torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
