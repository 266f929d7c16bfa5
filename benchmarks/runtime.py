"""Measures cuda_ops.runtime beside what people write by hand: copies that overlap, and graphs.

``python -m benchmarks.runtime [copies|graphs|updates|events|peers ...] [--json FILE]`` needs a CUDA
GPU. A file that is there keeps the parts that a run leaves out.

``copies``   a loop over batches whose copy takes as long as its computation: the loop of a
             tutorial, a pinned DataLoader, two buffers by hand, and ``prefetch``
``graphs``   a block of 20 small operators, and one token of a mixture of experts: eager,
             ``torch.cuda.make_graphed_callables``, ``torch.compile(mode="reduce-overhead")``, and
             ``graphed``
``updates``  a graph for other addresses: captured and instantiated again, against the update of an
             instance that is there
``events``   what timing by events costs the host and the device
``peers``    copies from one GPU to another, which needs two
"""

from __future__ import annotations

import argparse
import ctypes
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import cuda_ops
from benchmarks import report
from cuda_ops.benchmarking.stats import Interval, median_interval, ratio_interval
from cuda_ops.errors import BenchmarkError
from cuda_ops.runtime import copy_between, event_overhead, graphed, prefetch, to_host

#: Rounds in which every way runs once.
_ROUNDS = 15


def rounds(ways: Mapping[str, Callable[[], None]], count: int = _ROUNDS) -> dict[str, list[float]]:
    """Returns seconds of wall time, of each way in turns, from an idle GPU to an idle GPU.

    Each turn has an order of its own: behind one that leaves the GPU idle, it runs at a higher
    clock than behind one that keeps it busy.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    order, drawn = list(ways), random.Random(0)
    for turn in range(count + 2):
        drawn.shuffle(order)
        for name in order:
            torch.cuda.synchronize()
            start = perf_counter()
            ways[name]()
            torch.cuda.synchronize()
            if turn >= 2:  # the first warm up
                found[name].append(perf_counter() - start)
    return found


# --- copies -------------------------------------------------------------------

#: Batches of a loop: nothing runs beside the first copy, so few would measure that. Those of
#: ordinary memory take ten times as long.
_BATCHES = {"ordinary": 24, "pinned": 64}
#: Floats of a batch: 64 MiB.
_NUMEL = 16 << 20
#: The size of products that take about 0.1 ms each on an H100, about ten for a copy: with many
#: small ones, the time that the host needs to launch them would be what is measured.
_ROWS, _SIDE = 2048, 4096


def copies() -> list[dict[str, Any]]:
    """Loops over batches in ordinary and in pinned memory; copy and computation take as long.

    ``host_milliseconds`` go by until the loop has ended on the host, waiting for batches included,
    and ``milliseconds`` until the GPU has done too.
    """
    weight = torch.randn(_SIDE, _SIDE, device="cuda").div(_SIDE**0.5).bfloat16()
    repeats = _as_long_as_a_copy(weight)
    results = []
    for source, count in _BATCHES.items():
        batches = [torch.randn(_NUMEL, pin_memory=source == "pinned") for _ in range(4)]
        batches = [batches[k % 4] for k in range(count)]
        compute = partial(_compute, weight, repeats)
        ways = {
            "copy alone": partial(_copy_alone, torch.randn(_NUMEL, pin_memory=True), count),
            "compute alone": partial(_compute_alone, compute, count),
            "tutorial": partial(_tutorial, batches, compute),
            "pinned DataLoader": partial(_data_loader, batches, compute),
            "two buffers by hand": partial(_by_hand, batches, compute),
            "prefetch": partial(_prefetched, batches, compute, 2),
            "prefetch, depth 3": partial(_prefetched, batches, compute, 3),
            "prefetch and to_host": partial(_to_host, batches, compute),
        }
        host: dict[str, list[float]] = {name: [] for name in ways}
        times = rounds({name: partial(_noted, way, host[name]) for name, way in ways.items()})
        longer = max(
            ("copy alone", "compute alone"), key=lambda name: statistics.median(times[name])
        )
        for name in ways:
            results.append({
                "source": source,
                "way": name,
                "milliseconds": statistics.median(times[name]) / count * 1e3,
                "host_milliseconds": statistics.median(host[name]) / count * 1e3,
                "times_tutorial": _described(ratio_interval(times["tutorial"], times[name])),
                "of_the_longer": _described(ratio_interval(times[longer], times[name])),
            })  # fmt: skip
    return results


def _described(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


def _noted(way: Callable[[], None], seconds: list[float]) -> None:
    start = perf_counter()
    way()
    seconds.append(perf_counter() - start)


def _compute(weight: torch.Tensor, repeats: int, x: torch.Tensor) -> torch.Tensor:
    y = x[: _SIDE * 64].view(64, _SIDE).to(weight.dtype).repeat(_ROWS // 64, 1)
    for _ in range(repeats):
        y = torch.mm(y, weight)
    return y.sum() + x.sum()


def _as_long_as_a_copy(weight: torch.Tensor) -> int:
    """Returns how many products take as long as the copy of one batch."""
    source, count = torch.randn(_NUMEL, pin_memory=True), 24
    times = rounds({
        "copy": partial(_copy_alone, source, count),
        "few": partial(_compute_alone, partial(_compute, weight, 4), count),
        "more": partial(_compute_alone, partial(_compute, weight, 14), count),
    }, 5)  # fmt: skip
    copy, few, more = (statistics.median(one) for one in times.values())
    return max(1, round(4 + (copy - few) / ((more - few) / 10)))


def _copy_alone(source: torch.Tensor, count: int) -> None:
    for _ in range(count):
        source.to("cuda", non_blocking=True)


def _compute_alone(compute: Callable[[torch.Tensor], torch.Tensor], count: int) -> None:
    x = torch.randn(_NUMEL, device="cuda")  # as the loops have: zeros may run at a higher clock
    for _ in range(count):
        compute(x)


def _tutorial(batches: list[torch.Tensor], compute: Callable[[torch.Tensor], Any]) -> None:
    for batch in batches:
        compute(batch.to("cuda")).item()


def _data_loader(batches: list[torch.Tensor], compute: Callable[[torch.Tensor], Any]) -> None:
    loader = torch.utils.data.DataLoader(_Listed(batches), batch_size=None, pin_memory=True)
    for batch in loader:
        compute(batch.to("cuda", non_blocking=True))


class _Listed(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, batches: list[torch.Tensor]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, k: int) -> torch.Tensor:
        return self._batches[k]


def _by_hand(batches: list[torch.Tensor], compute: Callable[[torch.Tensor], Any]) -> None:
    """Two pinned and two device buffers, and an event at each end of a copy."""
    for x in _double_buffered(batches):
        compute(x)


def _double_buffered(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    stream = torch.cuda.Stream()
    staged = [torch.empty(_NUMEL, pin_memory=True) for _ in range(2)]
    there = [torch.empty(_NUMEL, device="cuda") for _ in range(2)]
    ready = [torch.cuda.Event() for _ in range(2)]
    consumed = [torch.cuda.Event() for _ in range(2)]

    def send(k: int) -> None:
        slot = k % 2
        if batches[k].is_pinned():
            source = batches[k]
        else:
            ready[slot].synchronize()
            source = staged[slot].copy_(batches[k])
        with torch.cuda.stream(stream):
            stream.wait_event(consumed[slot])
            there[slot].copy_(source, non_blocking=True)
            ready[slot].record(stream)

    send(0)
    for k in range(len(batches)):
        if k + 1 < len(batches):
            send(k + 1)
        torch.cuda.current_stream().wait_event(ready[k % 2])
        yield there[k % 2]
        consumed[k % 2].record()


def _prefetched(
    batches: list[torch.Tensor], compute: Callable[[torch.Tensor], Any], depth: int
) -> None:
    for x in prefetch(batches, "cuda", depth):
        compute(x)


def _to_host(batches: list[torch.Tensor], compute: Callable[[torch.Tensor], Any]) -> None:
    handles = [to_host(compute(x)) for x in prefetch(batches, "cuda")]
    for handle in handles:
        handle.result()


# --- graphs -------------------------------------------------------------------

_CALLS = 200


def graphs() -> list[dict[str, Any]]:
    """Calls of small work one after the other, in microseconds a call."""
    results = []
    for name, (function, arguments) in _steps().items():
        for training in (False, True) if name.startswith("block") else (False,):
            ways = _graph_ways(function, arguments, training)
            times = rounds({way: partial(_calls, call) for way, call in ways.items()})
            for way in ways:
                results.append({
                    "step": f"{name}, training" if training else name,
                    "way": way,
                    "microseconds": statistics.median(times[way]) / _CALLS * 1e6,
                    "times_eager": _described(ratio_interval(times["eager"], times[way])),
                    "times_make_graphed_callables": _described(
                        ratio_interval(times["make_graphed_callables"], times[way])
                    ),
                })  # fmt: skip
            torch.compiler.reset()
    return results


def _steps() -> dict[str, tuple[Any, tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(10) for layer in (torch.nn.Linear(128, 128), torch.nn.GELU())]
    block = torch.nn.Sequential(*layers).cuda()
    hidden, experts, inner, top_k = 2048, 128, 768, 8
    weights = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
        for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner))
    ]
    router = torch.randn(experts, hidden, device="cuda", dtype=torch.bfloat16) * 0.02
    scale = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    for one in (*weights, router, scale):  # or Inductor's graphs would copy them at each call
        torch._dynamo.mark_static_address(one)

    def decode(x: torch.Tensor) -> torch.Tensor:
        y = cuda_ops.rms_norm(x, scale)
        mixed: torch.Tensor = cuda_ops.moe(y, y @ router.t(), *weights, top_k)
        return x + mixed

    token = torch.randn(1, hidden, device="cuda", dtype=torch.bfloat16)
    return {
        "block of 20 operators": (block, (torch.randn(16, 128, device="cuda"),)),
        "one token, 128 experts": (decode, (token,)),
    }


def _graph_ways(
    function: Any, arguments: tuple[torch.Tensor, ...], training: bool
) -> dict[str, Callable[[], Any]]:
    def called(way: Any, own: Any) -> Callable[[], Any]:
        given = tuple(one.clone().requires_grad_(training) for one in arguments)
        leaves = [*given, *(own.parameters() if isinstance(own, torch.nn.Module) else ())]

        def call() -> None:
            if training:
                for leaf in leaves:  # Inductor's graphs own the gradients of the last call
                    leaf.grad = None
                way(*given).backward(torch.ones_like(given[0]))
            else:
                with torch.no_grad():
                    way(*given)

        return call

    samples = tuple(one.clone().requires_grad_(training) for one in arguments)
    # In training torch warns of AccumulateGrad's stream: make_graphed_callables keeps the nodes of
    # the parameters that it has read on the stream of its capture.
    ways: dict[str, Callable[[Any], Any]] = {
        "eager": lambda own: own,
        "make_graphed_callables": lambda own: torch.cuda.make_graphed_callables(own, samples),
        "compiled, reduce-overhead": lambda own: torch.compile(own, mode="reduce-overhead"),
        "graphed": graphed,
        "graphed, views": lambda own: graphed(own, views=True),
    }
    calls = {}
    for name, way in ways.items():
        own = _copied(function)
        with torch.set_grad_enabled(training):
            calls[name] = called(way(own), own)
    for call in calls.values():
        for _ in range(6):
            call()
    return calls


def _copied(function: Any) -> Any:
    """Returns a module of its own, as make_graphed_callables changes the one that it gets."""
    if not isinstance(function, torch.nn.Module):
        return function
    import copy

    return copy.deepcopy(function)


def _calls(call: Callable[[], Any]) -> None:
    for _ in range(_CALLS):
        call()


# --- updates ------------------------------------------------------------------


class _UpdateResult(ctypes.Structure):
    """CUgraphExecUpdateResultInfo of the driver's API."""

    _fields_ = (
        ("result", ctypes.c_int), ("node", ctypes.c_void_p), ("from_node", ctypes.c_void_p),
    )  # fmt: skip


def updates() -> list[dict[str, Any]]:
    """Makes a graph run on other addresses: by a new instance, and by an update of the old one."""
    driver = ctypes.CDLL("libcuda.so.1")
    results = []
    for kernels in (20, 200, 2000):
        x = [torch.zeros(1024, device="cuda") for _ in range(2)]

        def capture(x: torch.Tensor, kernels: int = kernels) -> Any:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                for _ in range(kernels):
                    x.add_(1)
            return graph

        first, second = map(capture, x)
        first.instantiate()
        spent: dict[str, list[float]] = {"capture": [], "instantiate": [], "update": []}
        result, launches = _UpdateResult(), 0
        for k in range(_ROUNDS):
            start = perf_counter()
            again = capture(x[1])
            captured = perf_counter()
            again.instantiate()
            instantiated = perf_counter()
            error = driver.cuGraphExecUpdate_v2(
                ctypes.c_void_p(first.raw_cuda_graph_exec()),
                ctypes.c_void_p((second if k % 2 == 0 else again).raw_cuda_graph()),
                ctypes.byref(result),
            )
            updated = perf_counter()
            if error:
                raise RuntimeError(f"cuGraphExecUpdate: error {error}, result {result.result}")
            for name, seconds in zip(
                spent, (captured - start, instantiated - captured, updated - instantiated),
                strict=True,
            ):  # fmt: skip
                spent[name].append(seconds)
            first.replay()
            launches += 1
        torch.cuda.synchronize()
        if x[0].any() or x[1][0] != launches * kernels:
            raise RuntimeError("an updated graph did not run on the new addresses")
        for name, times in spent.items():
            results.append({
                "kernels": kernels,
                "what": name,
                "microseconds": _described(median_interval([one * 1e6 for one in times])),
            })  # fmt: skip
    return results


# --- events -------------------------------------------------------------------


def events() -> list[dict[str, Any]]:
    """Times trains of launches by no events, by a pair around all, and by a pair around each."""
    return [
        {"train": one.train, "timing": one.timing, "events": one.events,
         "host_microseconds": one.host_per_call, "host_microseconds_an_event": one.host_per_event,
         "device_microseconds": one.device_per_call, "added": one.device_added}
        for one in event_overhead()
    ]  # fmt: skip


# --- peers --------------------------------------------------------------------


def peers() -> list[dict[str, Any]]:
    """Copies from one GPU to another, from an idle pair to an idle pair."""
    results = []
    for size in (1 << 20, 64 << 20, 512 << 20):
        source = torch.ones(size, dtype=torch.uint8, device="cuda:0")
        target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        ways: dict[str, Callable[[], Any]] = {
            "copy_": partial(target.copy_, source, non_blocking=True),
            "copy_between": partial(copy_between, target, source),
            "copy_between, through the host": partial(
                copy_between, target, source, chunks_through_host=True
            ),
            "by way of .cpu()": partial(_by_way_of_the_cpu, target, source),
        }
        times = rounds({name: partial(_on_both, way) for name, way in ways.items()})
        for name in ways:
            seconds = statistics.median(times[name])
            results.append({
                "MiB": size >> 20, "way": name, "microseconds": seconds * 1e6,
                "gigabytes_a_second": size / seconds / 1e9,
            })  # fmt: skip
    return results


def _by_way_of_the_cpu(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source.cpu())


def _on_both(way: Callable[[], Any]) -> None:
    way()
    for device in range(2):
        torch.cuda.synchronize(device)


# --- the command --------------------------------------------------------------

_PARTS = {
    "copies": copies, "graphs": graphs, "updates": updates, "events": events, "peers": peers,
}  # fmt: skip


def _part(name: str) -> str:
    if name not in _PARTS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_PARTS)}, got {name!r}")
    return name


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", type=_part, metavar="PART")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.runtime: needs a CUDA GPU, and torch sees none", file=sys.stderr)
        return 2
    try:
        found = report.earlier(arguments.json)
    except BenchmarkError as error:
        print(f"benchmarks.runtime: {error}", file=sys.stderr)
        return 2
    console, known = Console(), report.environment()
    console.print(known)
    for part in arguments.parts or _PARTS:
        if part == "peers" and torch.cuda.device_count() < 2:
            print("benchmarks.runtime: peers: not run, needs two CUDA GPUs", file=sys.stderr)
            continue
        rows = found[part] = _PARTS[part]()
        found["environments"][part] = known
        table = Table(*rows[0], title=part)
        for row in rows:
            table.add_row(*map(_shown, row.values()))
        console.print(table)
        report.save(arguments.json, found)  # a part that fails loses no other
    return 0


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['value']:.3g} ({value['low']:.3g} to {value['high']:.3g})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
