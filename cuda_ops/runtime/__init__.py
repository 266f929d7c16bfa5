"""What stands around kernels: copies, streams, graphs, launch configurations, memory, traces.

Everything is built on torch's own streams, events, allocator, graphs and profiler, and takes care
of what is easy to get wrong with them. On a machine without a GPU each function does the same with
plain execution.

>>> import torch, cuda_ops.runtime
>>> batches = [{"x": torch.ones(2)}, {"x": torch.zeros(2)}]
>>> [batch["x"].sum().item() for batch in cuda_ops.runtime.prefetch(batches, "cpu")]
[2.0, 0.0]
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from cuda_ops.runtime.gpus.links import topology as topology
    from cuda_ops.runtime.gpus.peers import copy_between as copy_between
    from cuda_ops.runtime.graphs.graphed import graphed as graphed
    from cuda_ops.runtime.launch.kernels import best_block as best_block
    from cuda_ops.runtime.launch.kernels import kernels_of as kernels_of
    from cuda_ops.runtime.launch.kernels import occupancy as occupancy
    from cuda_ops.runtime.launch.machine_code import Kernel as Kernel
    from cuda_ops.runtime.memory.growth import assert_no_growth as assert_no_growth
    from cuda_ops.runtime.memory.history import memory_snapshot as memory_snapshot
    from cuda_ops.runtime.memory.history import record_memory as record_memory
    from cuda_ops.runtime.memory.operators import memory_by_operator as memory_by_operator
    from cuda_ops.runtime.memory.regions import forget_regions as forget_regions
    from cuda_ops.runtime.memory.regions import region as region
    from cuda_ops.runtime.memory.report import memory_report as memory_report
    from cuda_ops.runtime.overlap.host import to_host as to_host
    from cuda_ops.runtime.overlap.pipelines import pipeline as pipeline
    from cuda_ops.runtime.overlap.prefetching import prefetch as prefetch
    from cuda_ops.runtime.stream_checks import check_streams as check_streams
    from cuda_ops.runtime.timing.event_costs import event_overhead as event_overhead
    from cuda_ops.runtime.timing.timer import Timer as Timer
    from cuda_ops.runtime.timing.timer import time_kernel as time_kernel
    from cuda_ops.runtime.tracing.traces import trace as trace
    from cuda_ops.runtime.tuning.search import Choice as Choice
    from cuda_ops.runtime.tuning.search import tune as tune
    from cuda_ops.runtime.tuning.search import use_stored as use_stored

#: By name, the module that has it: imported at the first use, as some need the kits.
_NAMES = {
    "assert_no_growth": "memory.growth",
    "best_block": "launch.kernels",
    "check_streams": "stream_checks",
    "Choice": "tuning.search",
    "copy_between": "gpus.peers",
    "event_overhead": "timing.event_costs",
    "forget_regions": "memory.regions",
    "graphed": "graphs.graphed",
    "Kernel": "launch.machine_code",
    "kernels_of": "launch.kernels",
    "memory_by_operator": "memory.operators",
    "memory_report": "memory.report",
    "memory_snapshot": "memory.history",
    "occupancy": "launch.kernels",
    "pipeline": "overlap.pipelines",
    "prefetch": "overlap.prefetching",
    "record_memory": "memory.history",
    "region": "memory.regions",
    "time_kernel": "timing.timer",
    "Timer": "timing.timer",
    "to_host": "overlap.host",
    "topology": "gpus.links",
    "trace": "tracing.traces",
    "tune": "tuning.search",
    "use_stored": "tuning.search",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> _typing.Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    # A module of the same name would stand here after its import.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
