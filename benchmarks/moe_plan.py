"""Predicts moe on several GPUs and hosts from the committed run on one GPU, without a GPU.

``python -m benchmarks.moe_plan [--gpus 8] [--hosts 1]`` prints, for each model and number of
tokens a rank, what a rank sends and how long that takes, and the scaling: the time of one GPU with
all experts and one rank's tokens over that of all ranks, each with its own tokens.

Products keep the share of their floor that one GPU reached, over fewer matrices and as many
operations. The wire is bytes over the rate of a link, NVLink within a host and one network adapter
a GPU between hosts; both run at the same time. Latency is not in it, nor is any overlap of wire and
products: small calls take longer than this, large ones may take less.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from cuda_ops.benchmarking.results import Report
from cuda_ops.distributed.ways import WIRE
from cuda_ops.ops.moe import MODELS, WHOLE
from cuda_ops.output import at_least, size_text, time_text

#: Bytes a second of one direction of a 400 Gb/s network adapter.
NETWORK = 50e9
_ITEM = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Plan:
    """What ``moe`` of one model takes where each of ``hosts`` hosts has ``gpus`` GPUs."""

    model: str
    tokens: int
    gpus: int
    hosts: int
    way: str
    #: Bytes that a rank sends to its own host and to others, to the experts and back together.
    wire_bytes: int
    network_bytes: int
    seconds_of_wire: float
    seconds_of_products: float
    scaling: float


def plan(
    model: str, tokens: int, seconds_of_one: float, ceilings: tuple[float, float],
    gpus: int, hosts: int,
) -> Plan:  # fmt: skip
    """Plans ``moe`` of one model.

    Args:
        model: one of those that ``moe`` is measured with.
        tokens: those of each rank.
        seconds_of_one: what one GPU takes for as many, with all experts.
        ceilings: bytes and operations a second of that GPU.
        gpus: those of a host.
        hosts: how many hosts.
    """
    hidden, inner, experts, top_k = (MODELS | WHOLE)[model]
    ranks = gpus * hosts
    row = hidden * _ITEM

    def floor(ranks: int) -> float:
        met = 1 - (1 - top_k / experts) ** (ranks * tokens)
        matrices = experts / ranks * met * 3 * inner * hidden * _ITEM
        operations = 6 * tokens * top_k * inner * hidden
        return max((matrices + 2 * tokens * row) / ceilings[0], operations / ceilings[1])

    products = seconds_of_one * floor(ranks) / floor(1)
    others = experts - experts / ranks  # experts that another rank does not have
    meets = 1 - _choices(others, top_k) / _choices(experts, top_k)
    near, far = gpus - 1, ranks - gpus
    # A gathered row crosses to a host once; what comes back is of each rank there.
    sent = {
        "gather": (2 * near + far * (gpus - 1) / gpus, far / gpus + far),
        "dispatch": (2 * near * meets, 2 * far * meets),
    }
    seconds = {
        way: max(at_home * tokens * row / WIRE, away * tokens * row / NETWORK)
        for way, (at_home, away) in sent.items()
    }
    way = min(seconds, key=lambda one: seconds[one])
    at_home, away = (math.ceil(part * tokens * row) for part in sent[way])
    scaling = seconds_of_one / (products + seconds[way])
    return Plan(
        model, tokens, gpus, hosts, way, at_home, away, seconds[way], products, scaling
    )  # fmt: skip


def _choices(experts: float, top_k: int) -> float:
    """Returns how many choices there are, for a number of experts that may be no whole one."""
    return math.prod(max(experts - k, 0) / (k + 1) for k in range(top_k))


def plans(report: Report, gpus: int, hosts: int) -> list[Plan]:
    """Plans the cases of a run of ``moe``, forward alone, whose experts the ranks can share out."""
    ceilings = report.ceilings["memory"].value, report.ceilings["bf16"].value
    found = []
    for run in report.of("moe"):
        # Such as ``Qwen3-30B-A3B, T=64 bfloat16``; not a part of a model, which is one rank's.
        if case := re.fullmatch(r"([^,]+), T=(\d+) bfloat16", run.case):
            model, tokens = case[1], int(case[2])
            if (MODELS | WHOLE)[model][2] >= gpus * hosts and run.seconds is not None:
                found.append(plan(model, tokens, run.seconds.value, ceilings, gpus, hosts))
    return found


def main() -> int:
    from benchmarks.stored import reports  # whose tables come from here

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=at_least(1), default=8, help="GPUs of a host (default: 8)")
    parser.add_argument("--hosts", type=at_least(1), default=1, help="hosts (default: 1)")
    arguments = parser.parse_args()
    heads = ("model", "tokens a rank", "way", "in the host", "between hosts", "wire", "products",
             "scaling")  # fmt: skip
    table = Table(*heads, title=f"{arguments.hosts} x {arguments.gpus} GPUs")
    for one in plans(reports()["moe"], arguments.gpus, arguments.hosts):
        table.add_row(
            one.model, str(one.tokens), one.way, size_text(one.wire_bytes),
            size_text(one.network_bytes), time_text(one.seconds_of_wire),
            time_text(one.seconds_of_products), f"{one.scaling:.2f}",
        )  # fmt: skip
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
