"""Results that come to the host while it goes on."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

from cuda_ops.runtime.trees import map_tensors, record_streams, tensors_of

Tree = TypeVar("Tree")


def to_host(tree: Tree) -> HostCopy[Tree]:
    """Starts to copy the tensors of ``tree`` to pinned memory, and returns a handle at once.

    The copies run on a stream of their own behind what the current stream of each GPU has to do so
    far, so neither the host nor later kernels wait for them, and ``result()`` waits for these
    copies alone. They read a clone on the GPU, which is made first: what is written to the tensors
    after the call does not show. Tensors on a CPU are cloned too. The result is detached, and what
    is no tensor is passed on.

    Args:
        tree: a tensor, or dicts, lists, tuples and dataclasses of them, nested.

    Raises:
        ValueError: a tensor is on ``meta`` and has no values.
        RuntimeError: a current stream is captured into a CUDA graph.

    Example:
        >>> handle = to_host({"loss": torch.tensor(2.0), "step": 3})
        >>> handle.result()
        {'loss': tensor(2.), 'step': 3}
    """
    tensors = tensors_of(tree)
    for one in tensors:
        if one.is_meta:
            raise ValueError(
                "to_host: argument 'tree': expected tensors that have values, got one of shape "
                f"{tuple(one.shape)} on 'meta'"
            )
    devices = {one.device for one in tensors if one.is_cuda}
    streams = {device: _stream_behind(device) for device in devices}
    with torch.no_grad():
        clones = map_tensors(_cloned, tree)
        for device, stream in streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        result = map_tensors(lambda one: _pinned(one, streams), clones)
        return HostCopy(result, [stream.record_event() for stream in streams.values()])


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone()


def _pinned(tensor: torch.Tensor, streams: dict[torch.device, Any]) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu")
    stream = streams[tensor.device]
    with torch.cuda.stream(stream):
        if tensor.layout == torch.strided:
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        else:
            host = tensor.to("cpu")
        record_streams(tensor, stream)
    return host


class HostCopy(Generic[Tree]):
    """Copies on their way to the host, which cannot be read before they are complete."""

    def __init__(self, tree: Tree, events: list[Any]) -> None:
        self.__tree, self.__events = tree, events

    def done(self) -> bool:
        """Returns whether :meth:`result` would not wait."""
        return all(event.query() for event in self.__events)

    def result(self) -> Tree:
        """Waits for the copies, and for nothing else, and returns the tree."""
        for event in self.__events:
            event.synchronize()
        return self.__tree

    def __repr__(self) -> str:
        return f"HostCopy({'done' if self.done() else 'on its way'})"


#: By stream that computes: a copy behind one stream must not wait for another.
_STREAMS: dict[Any, Any] = {}


def _stream_behind(device: torch.device) -> Any:
    """Returns the stream of the copies that follow the device's current stream."""
    current = torch.cuda.current_stream(device)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"to_host: the current stream of {device}: expected one that runs, got one that is "
                "captured into a CUDA graph; copy the graph's outputs after a replay"
            )
    if current not in _STREAMS:
        _STREAMS[current] = torch.cuda.Stream(device)
    return _STREAMS[current]
