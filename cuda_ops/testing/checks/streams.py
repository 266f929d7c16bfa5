"""Class 8: work on another stream than the current one."""

from __future__ import annotations

import torch

from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.device_events import device_events
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.stall import stall

_TITLE = "wrong stream"
#: In seconds; a launch that does not wait for the inputs comes too early.
_LATE = 0.1
#: In seconds; work on another stream that waits for nothing starts within it.
_AHEAD = 0.02
#: How often to look whether the current stream waits for another one: it may be late by chance.
_LOOKS = 3


@check("streams", 8, _TITLE, Draw(2, range(1, 4097)), devices=("cuda",))
def streams(case: Case) -> None:
    """Checks that kernels, copies and memsets run on the current stream, or on one that waits for
    it and that it waits for.
    """
    args = case.arguments()
    side = torch.cuda.Stream(case.device)
    case.call(*args)  # what a first call sets up may run anywhere
    for _ in range(_LOOKS):
        if not _strays(side, case, args):
            return


def _strays(side: torch.cuda.Stream, case: Case, args: tuple[object, ...]) -> bool:
    """Tells whether a call runs on other streams too, all of them forked and joined.

    Raises:
        AssertionError: one of them was not.
    """

    def between_markers() -> None:
        with torch.cuda.stream(side):
            marker = torch.empty(8, device=case.device)
            stall(_AHEAD)
            marker.zero_()
            case.call(*args)
            marker.zero_()
            side.synchronize()
            torch.cuda.synchronize()
            marker.zero_()  # the last of all events tells which stream is the current one

    events = device_events(between_markers)
    ours = [event for event in events if event.stream == events[-1].stream]
    if len(ours) < 3:
        raise NotRunError("the profiler gives no events")
    first, last = ours[0], ours[-2]
    strays = [event for event in events if event.stream != first.stream]
    early = {event.name for event in strays if event.start < first.end}
    assert not early, f"not on the current stream, and ahead of it: {', '.join(sorted(early))}"
    late = {event.name for event in strays if event.end > last.start}
    assert not late, (
        f"not on the current stream, which does not wait for it: {', '.join(sorted(late))}"
    )
    return bool(strays)


@check("late_inputs", 8, _TITLE, Draw(2, range(1, 4097)), devices=("cuda",))
def late_inputs(case: Case) -> None:
    """Checks that inputs which arrive late on a side stream give a right result."""
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
