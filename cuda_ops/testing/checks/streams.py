"""Class 8: work on another stream than the current one."""

from __future__ import annotations

import torch

from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.stall import stall

#: In seconds; a launch that does not wait for the inputs comes too early.
_LATE = 0.1


@check("streams", 8, "wrong stream", Draw(2, range(1, 4097)), devices=("cuda",))
def streams(case: Case) -> None:
    """Checks that late inputs on a side stream give a right result, and every kernel ran there."""
    args = case.arguments()
    expected = case.call(*args)
    late = [torch.zeros_like(v) if isinstance(v, torch.Tensor) else v for v in args]
    torch.cuda.synchronize()
    side = torch.cuda.Stream(case.device)
    with torch.cuda.stream(side):
        stall(_LATE)
        for buffer, value in zip(late, args, strict=True):
            if isinstance(value, torch.Tensor):
                buffer.copy_(value, non_blocking=True)
        actual = case.call(*late)
        kept = [output.clone() for output in actual]
    side.synchronize()
    case.same(kept, expected, "inputs that arrive late on a side stream")
    _runs_on(side, case, args)


def _runs_on(side: torch.cuda.Stream, case: Case, args: tuple[object, ...]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.cuda.stream(side):
            case.call(*args)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.zeros(8, device=case.device)
        torch.cuda.synchronize()
    if profile.profiler is None or profile.profiler.kineto_results is None:
        raise NotRunError("the profiler gives no events")
    events = [
        event
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == torch._C._autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    kernels = [e for e in events if not e.name().startswith(("Mem", "Context", "Event", "Stream"))]
    if not kernels:
        raise NotRunError("the profiler gives no events")
    last = max(kernels, key=lambda event: event.start_ns())  # torch.zeros, on the side stream
    strays = {e.name() for e in kernels if e.device_resource_id() != last.device_resource_id()}
    assert not strays, f"not on the current stream: {', '.join(sorted(strays))}"
