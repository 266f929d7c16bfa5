"""A test that a block of code keeps no memory."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cuda_ops.output import size_text
from cuda_ops.runtime.arguments import check_callable, is_number
from cuda_ops.runtime.frames import is_inner
from cuda_ops.runtime.memory.history import recorded_history
from cuda_ops.runtime.memory.regions import counted_device, current_region, regions

#: Places, or kinds of tensors, that an error lists.
_MOST_LISTED = 5
_HISTORY = 100_000
#: Seconds between counts: autograd's threads may let go of something a little later.
_PAUSES = (0.0, 0.02, 0.2)


@contextlib.contextmanager
def assert_no_growth(
    tolerance: int = 0,
    device: torch.device | str | None = None,
    *,
    warm: Callable[[], object] | None = None,
) -> Iterator[None]:
    """Fails if more memory is in use after the block than before it.

    A first call often fills a cache, which is no leak: call the function before, or pass it as
    ``warm``. On a GPU what torch's allocator has given out counts, to the byte, and an error says
    where what is left was allocated. On a CPU the memory of all tensors that Python can reach
    counts; what only C++ holds is not seen, for that the check ``leaks`` of the test kit looks at
    the heap over many calls.

    >>> kept = []
    >>> with assert_no_growth(device="cpu"):
    ...     total = torch.ones(1000).sum().item()
    >>> try:
    ...     with assert_no_growth(device="cpu"):
    ...         kept.append(torch.ones(1000))
    ... except AssertionError as error:
    ...     print(str(error).splitlines()[0])
    assert_no_growth: 4000 bytes more are in use on cpu than before, expected at most 0 more

    Args:
        tolerance: bytes that may be left.
        device: a CPU or CUDA device; by default the current GPU, or the CPU where there is none.
        warm: called twice before memory is counted.

    Raises:
        AssertionError: more is left; the text says how much, in which region, and what.
        TypeError: ``warm`` cannot be called.
        ValueError: ``tolerance`` is no number of 0 or more, or ``device`` is neither a CPU nor a
            GPU of this machine.
    """
    if not is_number(tolerance) or not tolerance >= 0:  # nan is neither
        raise ValueError(
            f"assert_no_growth: argument 'tolerance': expected 0 bytes or more, got {tolerance!r}"
        )
    where = counted_device("assert_no_growth", device)
    if warm is not None:
        check_callable("assert_no_growth", "warm", warm)
        warm(), warm()
    native = where.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
    with recorded_history(_HISTORY, "python") if native else contextlib.nullcontext():
        left = {use.name: use.left for use in regions(where)}
        before, blocks = _in_use(where), _blocks(where) if native else {}
        yield
        for pause in _PAUSES:
            time.sleep(pause)
            after = _in_use(where)
            grown = sum(after.values()) - sum(before.values())
            if grown <= tolerance:
                return
        found = places_left(blocks, _blocks(where)) if native else _kinds(before, after)
    inside = f" in region {current_region()!r}" if current_region() else ""
    text = (
        f"assert_no_growth: {grown} bytes more are in use on {where}{inside} than before, expected "
        f"at most {tolerance} more"
    )
    raise AssertionError("\n".join([text, *found, *_regions_left(left, where)]))


def _regions_left(before: Mapping[str, int], device: torch.device) -> list[str]:
    """Says which regions left more in use than they had before."""
    more = Counter({use.name: use.left - before.get(use.name, 0) for use in regions(device)})
    listed = [(name, size) for name, size in more.most_common(_MOST_LISTED) if size > 0]
    return [f"  {size_text(size)} more in use after region {name!r}" for name, size in listed]


def _in_use(device: torch.device) -> dict[int, int]:
    """Returns the bytes of each storage that is in use; on a GPU of all of them as one."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return {0: torch.cuda.memory_allocated(device)}
    return {key: storage.nbytes() for key, storage in _storages().items()}


def _storages() -> dict[int, Any]:
    """Returns the storages of all tensors on the CPU that Python can reach."""
    found: dict[int, Any] = {}
    for tensor in _tensors():
        with contextlib.suppress(Exception):  # sparse, lazy: no storage to ask for
            storage = tensor.untyped_storage()
            if storage.device.type == "cpu":
                found[storage._cdata] = storage
    return found


def _tensors() -> Iterator[torch.Tensor]:
    # By type: to ask an object itself may run code of a proxy.
    for tensor in [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]:
        yield tensor
        with contextlib.suppress(Exception):
            # C++ holds it, and Python has no object for it unless one asks.
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
                yield tensor.grad


def _kinds(before: Mapping[int, int], after: Mapping[int, int]) -> list[str]:
    """Says which tensors are new, as kinds of the same shape and dtype."""
    sizes: Counter[str] = Counter()
    told = set(before)
    for tensor in _tensors():
        with contextlib.suppress(Exception):
            key = tensor.untyped_storage()._cdata
            if key in after and key not in told:
                told.add(key)
                dtype = str(tensor.dtype).removeprefix("torch.")
                sizes[f"{dtype} of shape {list(tensor.shape)}"] += after[key]
    return [f"  {size_text(size)} in {kind}" for kind, size in sizes.most_common(_MOST_LISTED)]


def _blocks(device: torch.device) -> dict[int, Mapping[str, Any]]:
    """Returns the blocks in use of torch's allocator, by address."""
    return {
        block["address"]: block
        for segment in torch.cuda.memory_snapshot()
        if segment.get("device", 0) == device.index
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def places_left(
    before: Mapping[int, Mapping[str, Any]], after: Mapping[int, Mapping[str, Any]]
) -> list[str]:
    """Says where blocks were allocated that were not there before, by address.

    >>> frames = [{"filename": "model.py", "line": 7, "name": "forward"}]
    >>> places_left({}, {4096: {"size": 512, "frames": frames}})
    ['  512 B at model.py:7 in forward']
    """
    sizes: Counter[str] = Counter()
    for address in after.keys() - before.keys():
        block = after[address]
        sizes[_place(block.get("frames") or [])] += block["size"]
    return [f"  {size_text(size)} {place}" for place, size in sizes.most_common(_MOST_LISTED)]


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """Returns the innermost line outside of torch and cuda_ops, the user's."""
    own = [frame for frame in frames if not is_inner(frame["filename"])]
    for frame in own or frames:
        return f"at {frame['filename']}:{frame['line']} in {frame['name']}"
    return "at a place that the history does not know"
