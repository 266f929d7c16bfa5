"""Class 2: state that calls from several threads share."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.case import Case, check
from cuda_ops.testing.draw import Draw, follows_line
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.tolerance import same_bits

_THREADS = 4
#: How many sizes of its own each thread has, beside a long call that others overlap with.
_SIZES = 6
_LONG = 1 << 14
#: How long threads go on, in seconds, and for how many calls of each kind at least and at most.
_DURATION = 0.2
_LEAST, _MOST = 2, 64


def _long(op: OpSpec) -> list[Sample]:
    return [shaped(op, (_LONG,), core=2)]


@check("threads", 2, "calls from several threads disturb each other", Draw(1, listed=_long),
       quick=True)  # fmt: skip
def threads(case: Case) -> None:
    """Checks that four threads at once, on a GPU each on a stream of its own, get what one thread
    gets. Each has values and sizes of its own, so that shared buffers and caches show.
    """
    works = [[sample.make(case.device) for sample in _samples(case, k)] for k in range(_THREADS)]
    if case.on_cuda:
        torch.cuda.synchronize()  # the arguments are made on another stream
    start, before = Barrier(_THREADS), torch.get_num_threads()

    def run(work: list[tuple[Any, ...]]) -> list[tuple[int, Any]]:
        torch.set_num_threads(1)  # or four teams of threads would wait for the same cores
        found: list[tuple[int, Any]] = []
        with _stream(case):
            start.wait()
            end = time.monotonic() + _DURATION
            for i in range(_MOST):
                if i >= _LEAST and time.monotonic() > end:
                    break
                for which in (0, 1 + i % _SIZES):
                    found.append((which, _outcome(case, work[which])))
            if case.on_cuda:
                torch.cuda.current_stream().synchronize()
        return found

    # Before one thread alone fills what the operator may keep.
    with ThreadPoolExecutor(_THREADS) as pool:
        together = list(pool.map(run, works))
    torch.set_num_threads(before)
    for k, (work, found) in enumerate(zip(works, together, strict=True)):
        expected = [_outcome(case, args) for args in work]
        if isinstance(expected[0], Exception):
            raise expected[0]
        for which, actual in found:
            if isinstance(expected[which], Exception):
                continue  # a size that the operator refuses
            what = f"a call in thread {k} of {_THREADS} differs from the same call alone"
            assert not isinstance(actual, Exception), f"{what}: it raised {actual}"
            if not all(map(same_bits, actual, expected[which])):  # which is quicker to ask
                case.same(actual, expected[which], what)


def _samples(case: Case, thread: int) -> list[Sample]:
    """Returns the calls of one thread: the sample, and others of sizes that no other thread has."""
    op, free = case.subject.op, follows_line(case.subject)
    found = [replace(case.sample, seed=case.sample.seed + thread)]
    for i in range(_SIZES):
        seed = thread + _THREADS * i
        own = shaped(op, (100 + seed,), core=2) if free else case.sample
        found.append(replace(own, seed=own.seed + 100 + seed))
    return found


def _outcome(case: Case, args: tuple[Any, ...]) -> Any:
    try:
        return case.call(*args)
    except Exception as error:
        return error


def _stream(case: Case) -> contextlib.AbstractContextManager[Any]:
    if not case.on_cuda:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(case.device))
