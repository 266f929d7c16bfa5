"""What compute-sanitizer watches: a few small calls of operators on the GPU, gradients included."""

from __future__ import annotations

import argparse
import sys

import torch

from cuda_ops.testing.case import Case, wanting
from cuda_ops.testing.child import arrive
from cuda_ops.testing.draw import Draw, chosen, ordinary
from cuda_ops.testing.sanitizer import MARK
from cuda_ops.testing.subject import Origin, find

#: Tails, several blocks, and views; the tools slow kernels down a hundredfold.
_DRAW = Draw(8, range(1, 2049), adapt=ordinary)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", action="append", default=[])
    parser.add_argument("--file", default="")
    parser.add_argument("ops", nargs="+")
    arguments = parser.parse_args()
    arrive(Origin(tuple(arguments.root), arguments.file))
    torch.zeros(1, device="cuda")
    for name in arguments.ops:
        subject = find(name)
        torch.cuda.synchronize()
        print(f"{MARK}{name}", flush=True)
        for sample in chosen(subject, _DRAW):
            case = Case(subject, "cuda", sample)
            leaves = case.leaves() if subject.gradient == "declared" else case.arguments()
            outputs = case.call(*leaves)
            sums = [output.sum() for output in outputs if output.requires_grad]
            if sums:
                torch.autograd.grad(sums, wanting(leaves), allow_unused=True)
            torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
