"""Measures moe on several GPUs: beside one GPU that has all experts, and what frameworks write.

``python -m benchmarks.moe_ranks [--ranks N] [--models NAME ...] [--tokens N ...] [--json FILE]``
needs two CUDA GPUs or more, of one host, and uses all that it sees or the first N. ``--ranks 1``
runs on one, where nothing is sent: what it takes the host then tells what a group adds to a call.

Each rank brings as many tokens of its own and has its share of the experts. ``scaling`` is the time
of one GPU with all experts and one rank's tokens over the time of all ranks together: 1 if the wire
cost nothing. The peer is the usual composition: tokens sorted by expert, ``all_to_all_single`` of
counts and rows, ``torch._grouped_mm``, and the way back.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import cuda_ops
from benchmarks import report
from cuda_ops.benchmarking.stats import median_interval, ratio_interval
from cuda_ops.distributed import ways
from cuda_ops.distributed.agreement import agreement_of
from cuda_ops.distributed.collectives import Collectives, all_gather
from cuda_ops.distributed.symmetric import GATHERED, RETURNED, Memory, memory_of
from cuda_ops.ops import _moe
from cuda_ops.ops.moe import MODELS
from cuda_ops.output import at_least

_ROUNDS = 11
#: Seconds of work between two looks at the clock, the first of which wait for the host.
_TRAIN = 0.03
#: Calls between two waits where the host's time is measured.
_IN_A_ROW = 8


def composition(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Does what ``moe`` of ranks does, as frameworks write it: each choice is a row to send."""
    ranks, own = dist.get_world_size(), w_down.shape[0]
    weights, experts = _moe.torch_route(router_logits, top_k)
    order = torch.argsort(experts.flatten(), stable=True)
    counts = torch.bincount(experts.flatten(), minlength=ranks * own)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    sent, received = (one.view(ranks, own).sum(1).tolist() for one in (counts, theirs))
    rows = _exchange(x[order // top_k], received, sent)
    # By rank and then by expert, and the other way round for the products.
    of_expert = torch.arange(own, device=x.device).repeat(ranks).repeat_interleave(theirs)
    by_expert = torch.argsort(of_expert, stable=True)
    ends = theirs.view(ranks, own).sum(0).cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(rows[by_expert], w_gate_up.mT, offs=ends).chunk(2, -1)
    out = torch._grouped_mm(F.silu(gate) * up, w_down.mT, offs=ends)
    back = _exchange(torch.empty_like(out).index_copy(0, by_expert, out), sent, received)
    back = back * weights.flatten()[order].to(x.dtype).unsqueeze(-1)
    return torch.zeros_like(x).index_add_(0, order // top_k, back)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows, received, sent)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sent, received = ctx.sizes
        found = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(found, grad.contiguous(), sent, received)
        return found, None, None


_exchange: Callable[..., torch.Tensor] = _Exchange.apply


# --- one rank -----------------------------------------------------------------


def _case(model: str, tokens: int, backward: bool) -> list[dict[str, Any]]:
    """Measures one size by all ranks together; returns a row a way."""
    hidden, inner, experts, top_k = MODELS[model]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = experts // ranks
    torch.manual_seed(rank)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

    x = made(tokens, hidden)
    logits = torch.randn(tokens, experts, device="cuda")  # in bfloat16 many would be equal
    whole = made(experts, 2 * inner, hidden), made(experts, hidden, inner)
    mine = [one[rank * own : (rank + 1) * own].clone() for one in whole]
    ways: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
        "one GPU": (cuda_ops.moe, [x, logits, *whole]),
        "gather": (partial(_forced, "gather", 1), [x, logits, *mine]),
        "dispatch": (partial(_forced, "dispatch", 1), [x, logits, *mine]),
        "moe": (partial(cuda_ops.moe, group=dist.group.WORLD), [x, logits, *mine]),  # as it chooses
        "composition": (composition, [x, logits, *mine]),
    }
    if not backward and tokens >= 1024:  # what overlaps the wire and the products
        ways["gather in 2"] = partial(_forced, "gather", 2), [x, logits, *mine]
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for name, (function, arguments) in ways.items():
        given = [one.clone().requires_grad_(backward) for one in arguments]
        calls[name] = partial(_step, function, given, top_k, backward)
    if not backward:
        calls["moe, graph"] = _graphed(calls["moe"])
        calls["one GPU, graph"] = _graphed(calls["one GPU"])
    _agree(calls, ways, top_k)
    times = _rounds(calls)
    rows = []
    for name in calls:
        one = "one GPU, graph" if name.endswith("graph") else "one GPU"
        rows.append({
            "model": model, "tokens": tokens, "backward": backward, "way": name,
            "us": median_interval([s * 1e6 for s in times[name]]),
            "scaling": ratio_interval(times[one], times[name]),
            "composition_over": ratio_interval(times["composition"], times[name]),
            "host_us": _host(calls[name]) * 1e6,
            "wire_us": _wire(model, tokens, backward, name) * 1e6,
        })  # fmt: skip
    return rows


def _parts() -> list[dict[str, Any]]:
    """Measures what a call is made of: rows of 32 MiB by each wire, and what ranks say before."""
    group = dist.group.WORLD
    agreement = agreement_of(group)
    x = torch.randn(4096 * dist.get_world_size(), 2048, device="cuda", dtype=torch.bfloat16)
    wires: dict[str, Memory | Collectives] = {"NCCL": Collectives(group)}
    if (memory := memory_of(group, x.device)) is not None:
        count = dist.get_world_size() * x.nbytes
        if not memory.fits(gathered=count, returned=count):
            memory.grow(agreement, "moe_ranks", gathered=count, returned=count)
        wires["memory"] = memory
    rows = []
    for name, wire in wires.items():

        def gather(wire: Memory | Collectives = wire) -> None:
            wire.begin_all_gather((x,), x.shape[0])()
            if isinstance(wire, Memory):  # whose turns go there and back
                wire.begin_barrier(RETURNED)()

        def back(wire: Memory | Collectives = wire) -> None:
            if isinstance(wire, Memory):
                wire.begin_barrier(GATHERED)()
            wire.begin_all_to_all((x,))()

        for what, call in (("gather", gather), ("send back", back)):
            (seconds,) = _rounds({what: call}).values()
            rows.append({"part": f"{what} of {x.nbytes >> 20} MiB by {name}",
                         "us": median_interval([s * 1e6 for s in seconds])})  # fmt: skip
    numbers = torch.zeros(1, 16, dtype=torch.int64)
    said: Callable[[], Any]
    for what, said in (
        ("sizes, by memory that the host has", partial(agreement.exchange, "moe_ranks", [0] * 11)),
        ("sizes, by gloo", partial(all_gather, numbers, agreement.group)),
    ):
        spent = []
        for _ in range(300):
            start = perf_counter()
            said()
            spent.append((perf_counter() - start) * 1e6)
        rows.append({"part": what, "us": median_interval(spent)})
    return rows


def _forced(name: str, chunks: int, *arguments: Any) -> torch.Tensor:
    """Calls moe by this way. Not by unittest.mock, which takes longer than the call on the host."""
    choose, forced = ways.way, ways.Way(name, 0, 0, chunks)
    try:
        ways.way = lambda *_: forced
        out: torch.Tensor = cuda_ops.moe(*arguments, group=dist.group.WORLD)
    finally:
        ways.way = choose
    return out


def _step(
    function: Callable[..., torch.Tensor],
    arguments: list[torch.Tensor],
    top_k: int,
    backward: bool,
) -> torch.Tensor:
    if not backward:
        return function(*arguments, top_k)
    for one in arguments:
        one.grad = None
    out = function(*arguments, top_k)
    out.backward(arguments[0])
    return out


def _graphed(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def _agree(calls: dict[str, Callable[[], torch.Tensor]], ways: Any, top_k: int) -> None:
    """Checks that all ways give what one GPU with the same tokens and all experts does."""
    x, logits, *mine = ways["gather"][1]
    matrices = [all_gather(own, dist.group.WORLD) for own in mine]
    expected = cuda_ops.moe(x, logits, *matrices, top_k).float()
    for name, call in calls.items():
        if not name.startswith("one GPU"):
            error = (call().float() - expected).abs().max() / expected.abs().max()
            if not error < 0.03:
                raise RuntimeError(f"{name} differs from one GPU by {error:.3g} of the largest")


def _rounds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Returns seconds of a call, of each way in turns: those of the slowest rank.

    In another order each time, the same at all ranks: what ran before changes a time, as a GPU's
    clock follows its load.
    """
    order, drawn = [*calls], random.Random(0)
    counts = {name: _count(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        drawn.shuffle(order)
        for name in order:
            found[name].append(_seconds(calls[name], counts[name]))
    return found


def _count(call: Callable[[], Any]) -> int:
    """Returns how many calls make a train, the same at all ranks."""
    _seconds(call, 3)
    return max(3, round(_TRAIN / _seconds(call, 3)))


def _seconds(call: Callable[[], Any], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor(start.elapsed_time(end) / count / 1e3, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def _host(call: Callable[[], Any]) -> float:
    """Returns seconds that a call takes the host, its waits included: of a few in a row, which do
    not fill the queue of a GPU; the median of rows.
    """
    spent = []
    for _ in range(30):
        dist.barrier()
        torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(_IN_A_ROW):
            call()
        spent.append((perf_counter() - start) / _IN_A_ROW)
    torch.cuda.synchronize()
    return statistics.median(spent)


def _wire(model: str, tokens: int, backward: bool, name: str) -> float:
    """Returns seconds that a way's bytes take at the rate of the wire, one direction."""
    hidden, _, experts, top_k = MODELS[model]
    ranks = dist.get_world_size()
    way = ways.way([tokens] * ranks, [experts // ranks] * ranks, top_k, 2 * hidden)
    bytes_of = {"gather": way.gather_bytes, "dispatch": way.dispatch_bytes}
    bytes_of |= {"moe": bytes_of[way.name], "moe, graph": way.gather_bytes}
    sent = bytes_of.get(name.split(" in ")[0], 0)
    if name == "composition":
        sent = tokens * top_k * 2 * hidden * (ranks - 1) // ranks
    return 2 * sent * (2 if backward else 1) / ways.WIRE


def _rank(rank: int, ranks: int, store: str, arguments: argparse.Namespace) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=ranks,
        device_id=torch.device("cuda", rank),
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    parts = _parts()
    for model in arguments.models:
        for backward in (False, True):
            for tokens in arguments.tokens:
                if not backward or tokens >= 1024:
                    rows += _case(model, tokens, backward)
                    if rank == 0:  # a case that fails loses no other
                        _save(arguments.json, rows, parts, ranks)
                torch.cuda.empty_cache()
    if rank == 0:
        _show(rows, parts, ranks)
    dist.barrier()
    dist.destroy_process_group()


def _save(
    path: str | None, rows: list[dict[str, Any]], parts: list[dict[str, Any]], ranks: int
) -> None:
    cases, measured = (
        [{k: vars(v) if hasattr(v, "low") else v for k, v in row.items()} for row in found]
        for found in (rows, parts)
    )
    report.save(path, {"ranks": ranks, "cases": cases, "parts": measured})


def _show(rows: list[dict[str, Any]], parts: list[dict[str, Any]], ranks: int) -> None:
    console = Console()
    console.print(report.environment())
    for part in parts:
        console.print(f"{part['part']}: {part['us'].value:.1f} us")
    heads = (
        "model",
        "tokens a rank",
        "way",
        "us",
        "scaling",
        "over composition",
        "host us",
        "wire us",
    )
    table = Table(*heads, title=f"moe on {ranks} GPUs, bfloat16")
    for row in rows:
        way = f"{row['way']}, training" if row["backward"] else row["way"]
        table.add_row(
            row["model"], str(row["tokens"]), way, f"{row['us'].value:.1f}",
            f"{row['scaling'].value:.2f}", f"{row['composition_over'].value:.2f}",
            f"{row['host_us']:.0f}", f"{row['wire_us']:.0f}",
        )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="NAME",
                        default=["Qwen3-30B-A3B", "Mixtral 8x7B"])  # fmt: skip
    parser.add_argument(
        "--tokens", nargs="+", type=at_least(1), metavar="N", default=[64, 1024, 8192]
    )
    parser.add_argument(
        "--ranks", type=at_least(1), metavar="N", help="processes, each with its GPU"
    )
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    found = torch.cuda.device_count()
    ranks = found if arguments.ranks is None else arguments.ranks
    if ranks > found or (ranks < 2 and arguments.ranks is None):
        print(f"benchmarks.moe_ranks: needs {arguments.ranks or 2} CUDA GPUs; torch sees {found}",
              file=sys.stderr)  # fmt: skip
        return 2
    cuda_ops.moe  # noqa: B018 - built before the ranks ask for it
    with tempfile.TemporaryDirectory() as folder:
        # torch gives it no types.
        torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _rank, (ranks, str(Path(folder) / "store"), arguments), nprocs=ranks
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
