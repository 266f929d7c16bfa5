"""Sizes at which an operator's kernels reach a limit, read from their launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from cuda_ops.testing.case import Case, NotRunError, called, check
from cuda_ops.testing.checks.bounds import check_bounds
from cuda_ops.testing.checks.devices import moved
from cuda_ops.testing.checks.large import TOLERATED
from cuda_ops.testing.compare import deviation
from cuda_ops.testing.device_events import DeviceEvent, device_events
from cuda_ops.testing.draw import Draw, follows_line
from cuda_ops.testing.samples import LARGEST_NUMEL, Sample
from cuda_ops.testing.sizes import resizable, resized, shaped
from cuda_ops.testing.subject import Subject

#: Sizes of a dim for which launches are looked at, and the size of every other core dim.
_LOOKS, _OTHERS = (300, 3000), 5
#: Blocks in y and z of a grid, threads of a block, and shared memory that needs no permission.
_MOST_BLOCKS, _MOST_THREADS, _PLAIN_SHARED = 65_535, 1024, 48 << 10
#: Elements that a thread may have at once.
_PER_THREAD = (1, 2, 4, 8, 16)
#: How many limits of a dim are tried, and the largest size.
_MOST_LIMITS, _LARGEST = 20, 1 << 19


@check("boundaries", 14, "unchecked launch or resource limits", Draw(1, range(1, 4097)),
       devices=("cuda",))  # fmt: skip
def boundaries(case: Case) -> None:
    """Looks at the launches of two sizes of each dim; then compares the sizes next to what their
    blocks, their shared memory and their grids hold with the reference.
    """

    def compare(at_limit: Case) -> None:
        found = at_limit.call(*at_limit.arguments())
        worst = deviation(case.subject, at_limit.sample, found)
        assert worst <= TOLERATED, worst.text

    _at_limits(case, compare)


@check("tails", 3, "out-of-bounds access", Draw(1, range(1, 4097)), devices=("cuda",))
def tails(case: Case) -> None:
    """Checks guard zones as ``bounds`` does, at the sizes of ``boundaries``: kernels for large
    problems have tails of their own.
    """
    _at_limits(case, check_bounds)


def _without_another(subject: Subject, device: str) -> str:
    return "" if torch.cuda.device_count() > 1 else "there is one GPU"


@check("limits_elsewhere", 9, "wrong device", Draw(1, range(1, 4097)), devices=("cuda",),
       excuse=_without_another)  # fmt: skip
def limits_elsewhere(case: Case) -> None:
    """Calls the sizes of ``boundaries`` on device 1 once they were called on device 0: what a
    kernel must be allowed once a device, as much shared memory, may be allowed on the first alone.
    """

    def compare(at_limit: Case) -> None:
        args = at_limit.arguments()
        expected = at_limit.call(*args)
        actual = at_limit.call(*moved(args, torch.device("cuda:1")))
        at_limit.same(actual, expected, "on cuda:1 after cuda:0")

    _at_limits(case, compare)


def _at_limits(case: Case, examine: Callable[[Case], None]) -> None:
    """Calls ``examine`` with each size next to a limit that the operator takes.

    Raises:
        AssertionError: what ``examine`` raised, with the size and the limit.
        NotRunError: there is no such size.
    """
    small = _small(case)
    examined = 0
    for dim in resizable(case.subject.op):
        for size, why in _limits(case, small, dim).items():
            sample = _with_size(case, small, dim, size)
            if sample is None or called(case, sample.make(case.device)) is None:
                continue
            try:
                examine(replace(case, sample=sample))
            except AssertionError as failure:
                raise AssertionError(f"{dim}={size}, {why}: {failure}, for {sample}") from failure
            examined += 1
    if not examined:
        raise NotRunError("no size at a limit of its launches can be called")


def _small(case: Case) -> Sample:
    """Returns a call of few numbers, with dims other than 1 as far as the operator takes them."""
    op, sample = case.subject.op, case.sample
    if follows_line(case.subject):
        return shaped(op, (2,) if op.tensor_positions else (), core=_OTHERS)
    for dim in resizable(op):
        other = resized(op, sample, dim, _OTHERS)
        if other is not None and called(case, other.make(case.device)) is not None:
            sample = other
    return sample


def _with_size(case: Case, small: Sample, dim: str, size: int) -> Sample | None:
    sample = resized(case.subject.op, small, dim, size)
    return sample if sample is not None and sample.numel <= LARGEST_NUMEL else None


def _limits(case: Case, small: Sample, dim: str) -> dict[int, str]:
    """Returns sizes next to a limit of some launch, and which that is."""
    looks = [(size, launches) for size in _LOOKS if (launches := _launches(case, small, dim, size))]
    found = dict.fromkeys(_LOOKS, "a size to look at launches")  # there may have been none
    found |= {limit: why for limit, why in _of_looks(looks) if 1 < limit < _LARGEST}
    chosen = sorted(found)[:: -(-len(found) // _MOST_LIMITS)]
    return {
        size: f"{'next to ' * (size != limit)}{found[limit]}"
        for limit in chosen
        for size in (limit - 1, limit, limit + 1)
    }


def _launches(case: Case, small: Sample, dim: str, size: int) -> list[DeviceEvent]:
    sample = _with_size(case, small, dim, size)
    if sample is None or called(case, args := sample.make(case.device)) is None:
        return []
    return [event for event in device_events(lambda: case.call(*args)) if event.kind == "kernel"]


def _of_looks(looks: list[tuple[int, list[DeviceEvent]]]) -> Iterator[tuple[int, str]]:
    """Yields limits, and what each is."""
    device = torch.cuda.get_device_properties()
    for size, launches in looks:
        for launch in {(event.threads, event.grid): event for event in launches}.values():
            yield launch.threads, f"a block of {launch.threads} threads"
            for each in (launch.threads * times for times in _PER_THREAD):
                if math.ceil(size / each) in launch.grid:
                    yield each, f"{each} elements of a block of {launch.threads} threads"
                    at_once = device.max_threads_per_multi_processor // max(32, launch.threads)
                    waves = max(1, at_once) * device.multi_processor_count
                    yield waves * each, f"{waves} blocks, as many as run at once"
    if len(looks) < len(_LOOKS):
        return
    (small, first), (large, second) = looks
    for before, after in _same_kernels(first, second):
        grown = (large - small) / max(1, after.shared - before.shared)
        if after.shared > before.shared:
            most = getattr(device, "shared_memory_per_block_optin", 227 << 10)
            for limit in (_PLAIN_SHARED, most):
                fits = int(small + (limit - before.shared) * grown)
                yield fits, f"{limit} bytes of shared memory"
        if after.threads > before.threads:
            per_thread = max(1, large // after.threads)
            yield _MOST_THREADS * per_thread, f"{_MOST_THREADS} threads of a block"
        for axis in (1, 2):
            if after.grid[axis] > before.grid[axis]:
                per_block = max(1, round(large / after.grid[axis]))
                yield _MOST_BLOCKS * per_block, f"{_MOST_BLOCKS} blocks in y or z of a grid"


def _same_kernels(
    first: Iterable[DeviceEvent], second: Iterable[DeviceEvent]
) -> list[tuple[DeviceEvent, DeviceEvent]]:
    """Returns launches of the same kernel for the smaller and for the larger size."""
    named = {event.name: event for event in second}
    return [(event, named[event.name]) for event in first if event.name in named]
