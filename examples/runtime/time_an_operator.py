"""Times an operator beside torch's, in turns, and what timing by events costs.

python examples/runtime/time_an_operator.py
"""

from __future__ import annotations

import json

import rich
import torch
import torch.nn.functional as F

import cuda_ops
from cuda_ops.runtime import Timer, event_overhead, time_kernel


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(1 << 16, device=device)

    timer = Timer({"cuda_ops": cuda_ops.silu, "torch": F.silu}, (x,))
    found = timer.run(seconds=0.5)
    rich.print(found)
    print("as JSON:", json.dumps(found["torch"].as_dict()["seconds"]))

    warm = time_kernel(cuda_ops.silu, x, cold=False, seconds=0.2)
    print("one function, warm:", warm)

    print(event_overhead(device, calls=50, rounds=5))


if __name__ == "__main__":
    main()
