"""Tensors in nested containers: dicts, lists, tuples, dataclasses and what torch's pytree knows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

Change = Callable[[torch.Tensor], Any]


def map_tensors(change: Change, tree: Any) -> Any:
    """Returns a tree like ``tree`` with ``change(tensor)`` in place of each tensor.

    Looks into what ``torch.utils._pytree`` knows, into subclasses of dict, list and tuple, other
    mutable mappings, dataclasses and packed sequences, whose sizes of batches stay on the CPU.
    Everything else is passed on as it is.

    >>> map_tensors(lambda x: x + 1, {"x": torch.zeros(1), "name": "a"})
    {'x': tensor([1.]), 'name': 'a'}
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, PackedSequence):
            data, sizes, *orders = value
            changed = [None if order is None else change(order) for order in orders]
            return PackedSequence(change(data), sizes, *changed)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            new = copy.copy(value)
            for field in dataclasses.fields(value):
                if hasattr(value, field.name):
                    found = map_tensors(change, getattr(value, field.name))
                    object.__setattr__(new, field.name, found)  # it may be frozen
            return new
        if isinstance(value, MutableMapping):
            mapped = copy.copy(value)
            for key in value:
                mapped[key] = map_tensors(change, value[key])
            return mapped
        if isinstance(value, (list, tuple)):
            return _like(value, [map_tensors(change, item) for item in value])
        return value

    # Named tuples: pytree would call a constructor that a subclass may have changed, and change the
    # sizes of a packed sequence too.
    return tree_map(leaf, tree, is_leaf=_is_named_tuple)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """Returns a list or tuple of a subclass with other items, and does not call its constructor,
    which may take anything.
    """
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = items
        return made
    try:
        new = tuple.__new__(type(value), items)
    except TypeError:  # a type of C's, such as torch.Size
        return type(value)(items)
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    return new


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of a tree, in order.

    >>> tensors_of(({"x": torch.zeros(1)}, "text"))
    [tensor([0.])]
    """
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def rebuilt_with(tree: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Returns what makes a tree like ``tree`` of other tensors, given in the order of its own.

    What is only a tensor, or a tuple or list of them, is not looked into again at each call.

    >>> rebuilt_with([torch.zeros(1), torch.zeros(1)])((torch.ones(1), torch.ones(2)))
    [tensor([1.]), tensor([1., 1.])]
    """
    if isinstance(tree, torch.Tensor):
        return itemgetter(0)
    if type(tree) in (tuple, list) and all(isinstance(item, torch.Tensor) for item in tree):
        return type(tree)

    def rebuilt(tensors: Sequence[torch.Tensor]) -> Any:
        found = iter(tensors)
        return map_tensors(lambda _: next(found), tree)

    return rebuilt


def record_streams(tree: Any, stream: Any) -> None:
    """Keeps the memory of a tree's CUDA tensors until a stream has done with what it has so far,
    though they were allocated on another one.
    """
    for tensor in tensors_of(tree):
        for part in parts_of(tensor) if tensor.is_cuda else ():
            part.record_stream(stream)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the strided tensors that hold what a tensor holds."""
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return []
