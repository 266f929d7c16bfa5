"""What moves batches: a stream that copies them, and the one of the loop that reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cuda_ops.runtime.overlap.staging import Pinned, stages
from cuda_ops.runtime.overlap.turns import Event, Reader
from cuda_ops.runtime.trees import map_tensors, tensors_of


@dataclass
class Moved:
    """A batch whose copies have been started."""

    tree: Any
    #: Tensors in memory of the stream that copies.
    copies: list[torch.Tensor]
    #: Tensors that were there, in memory of any stream.
    found: list[torch.Tensor]
    #: Behind the copies.
    ready: Event


class Lane(Protocol):
    """What moves batches; a test has one that delays each copy as long as it may."""

    def pinned(self) -> Pinned: ...

    def stage(self, batch: Any, pinned: Pinned) -> Any:
        """Returns the batch, pinned."""

    def send(self, batch: Any) -> Moved:
        """Starts to copy a batch."""

    def receive(self, ready: Event, shared: Any = None) -> Any:
        """Makes the loop's stream wait for a batch, and returns it, as :class:`Reader` does."""

    def follow(self, reader: Any) -> None:
        """Makes later copies wait for what a stream that reads has to do so far."""

    def close(self) -> None:
        """Gives back the stream, to which nothing is sent any more."""


#: By device, streams of iterations that have ended, with the memory that the allocator keeps for
#: each: a new stream would take batches anew.
_STREAMS: dict[torch.device, list[Any]] = {}


class CudaLane(Reader):
    """A stream of its own, from pinned memory to a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        spare = _STREAMS.setdefault(device, [])
        self._stream = spare.pop() if spare else torch.cuda.Stream(device)

    def close(self) -> None:
        _STREAMS[self._device].append(self._stream)

    def pinned(self) -> Pinned:
        return Pinned()

    def stage(self, batch: Any, pinned: Pinned) -> Any:
        tensors = tensors_of(batch)
        for device in {one.device for one in tensors if one.is_cuda}:
            # The loader's own work on a GPU; without any, this would wait for the loop's.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        if not any(map(stages, tensors)):
            return batch
        with torch.no_grad():
            return map_tensors(lambda one: pinned.put(one) if stages(one) else one, batch)

    def send(self, batch: Any) -> Moved:
        copies: list[torch.Tensor] = []
        found: list[torch.Tensor] = []

        def move(tensor: torch.Tensor) -> torch.Tensor:
            there = tensor.to(self._device, non_blocking=True)
            (found if tensor.device == self._device else copies).append(there)
            return there

        with torch.cuda.stream(self._stream), torch.no_grad():
            tree = map_tensors(move, batch)
            return Moved(tree, copies, found, self._stream.record_event())

    def follow(self, reader: Any) -> None:
        self._stream.wait_event(reader.record_event())
