"""Judges mutants side by side: plants each in a copy, compiles it, and runs what may find it."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_ops.build import threads
from cuda_ops.build.discovery import Pair
from cuda_ops.testing.mutation.judging import Judging
from cuda_ops.testing.mutation.place import Place, Project
from cuda_ops.testing.mutation.plan import Mutant
from cuda_ops.testing.mutation.processes import StoppedError
from cuda_ops.testing.mutation.result import Result
from cuda_ops.testing.mutation.settings import Settings


@dataclass(frozen=True)
class Campaign:
    """Mutants to judge, and how many at once."""

    pairs: Mapping[str, Pair]
    settings: Settings
    jobs: int = 1
    #: Seconds after which no result is waited for.
    seconds: float | None = None
    #: Where the unchanged operators are built, for the next run too; without it, for this one.
    keep: Path | None = None

    def run(
        self, mutants: Sequence[Mutant], done: Callable[[Result], None], note: Callable[[str], None]
    ) -> None:
        """Judges mutants in their order, ``jobs`` at once; ``done`` gets each result.

        Ends what runs, and removes all copies, if the time is over or at an exception such as
        Ctrl-C, which it passes on.
        """
        root = next(iter(self.pairs.values())).root
        project = Project.of(root, bool(self.settings.tests))
        stop = threading.Event()
        with tempfile.TemporaryDirectory(prefix="cuda_ops_mutants_") as name:
            folder = Path(name).resolve()
            kept = self.keep.resolve() if self.keep else folder / "unchanged"
            judging = Judging(self.pairs, self.settings, kept, stop, note)
            places: queue.SimpleQueue[Place] = queue.SimpleQueue()
            for number, gpu in enumerate(_gpus(self.jobs, self.settings.devices)):
                cores = max(1, (os.cpu_count() or 1) // self.jobs)
                places.put(Place(project, folder / f"place{number}", gpu, cores))

            def judge(mutant: Mutant) -> Result:
                place = places.get()
                start = time.monotonic()
                try:
                    result = judging.result(mutant, place.made())
                except StoppedError:
                    raise
                except Exception as error:  # a full disk must not end the others
                    problem = f"{type(error).__name__}: {error}"
                    result = Result(**mutant.as_json(), verdict="not judged", detail=problem)
                finally:
                    places.put(place)
                return replace(result, seconds=round(time.monotonic() - start, 1))

            with ThreadPoolExecutor(self.jobs) as pool:
                try:
                    self._collect([pool.submit(judge, mutant) for mutant in mutants], done)
                finally:
                    stop.set()
                    pool.shutdown(cancel_futures=True)

    def _collect(self, futures: Iterable[Future[Result]], done: Callable[[Result], None]) -> None:
        try:
            for future in threads.completed(futures, self.seconds):
                done(future.result())
        except TimeoutError:
            return
        except StoppedError:  # only where something else was raised first
            return


def _gpus(jobs: int, devices: Iterable[str]) -> list[str | None]:
    """Returns the GPU of each place, in turn those that are visible."""
    import torch

    count = torch.cuda.device_count() if "cuda" in devices else 0
    if count < 2:
        return [None] * jobs
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = named if len(named) == count else [*map(str, range(count))]
    return [visible[number % count] for number in range(jobs)]
