"""Signature lines: the dims that a function's text tells of each tensor."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.host import Host

if TYPE_CHECKING:
    from cuda_ops.dev.adopt.operators import Operator


def _group(dims: list[str]) -> str:
    return f"[{','.join(dims)}]"


def line_of(one: Operator, host: Host) -> tuple[str, list[str]]:
    """Returns the signature line that a function's text tells, or ``""``; and what is to be said.

    Brackets hold all dims that a tensor has: more is claimed only where a kernel is elementwise.
    """
    count = len(one.returns)
    if host.elementwise():
        return f"{','.join(['()'] * len(host.tensors))}->{','.join(['()'] * count)}", []
    if any(argument.type.startswith("Tensor[") for argument in one.arguments):
        text = "no signature line describes a list of tensors; write the fake in a plugin"
        return "", [f"{one.name}: {text}"]
    dims, taken, said = _Dims(host).all()
    if host.holes:
        said.append("some outputs are not drafted")
    results = []
    for name in host.returned or ():
        output = host.outputs.get(name)
        if output is None:
            continue
        shape = dims.get(output.like) or ["?"] if output.like else []
        shape = shape or [_entry(host, dims, text) or "?" for text in output.shape]
        if not output.like and "?" in shape:
            said.append(f"the shape of {name} is not told by sizes of arguments")
        results.append(shape)
    groups = [_group(dims.get(name) or ["?"]) for name in host.tensors]
    line = f"{','.join(groups)}->{','.join(map(_group, results))}"
    if not said:
        return line, [f"{one.name}: {text}" for text in taken]
    text = f"{one.name}: no signature line, since {' and '.join(said)}"
    if hint := _hint(host, count) if "?" in line else f'"{line}" if that is so':
        text += f"; it may be {hint}"
    return "", [text]


def _hint(host: Host, results: int) -> str:
    """Returns a line of loop dims that may be right, and when it is."""
    if host.holes or not all(output.like for output in host.outputs.values()):
        return ""
    read = set().union(*(tensor.read for tensor in host.tensors.values()))
    if not read <= {-1}:
        return ""
    group, what = ("(n)", "row") if read else ("()", "element")
    line = f"{','.join([group] * len(host.tensors))}->{','.join([group] * results)}"
    return f'"{line}" if each {what} becomes one {what}'


def _entry(host: Host, dims: dict[str, list[str]], text: str) -> str:
    text = re.sub(r"^(?:static_cast<int64_t>)?\((.*)\)$", r"\1", text)
    if re.fullmatch(r"\d+", text):
        return text
    if text in host.scalars and words.schema_type(host.scalars[text].type)[0] == "int":
        return text
    size = host.sizes.get(text)
    if size is None and (found := re.fullmatch(r"(\w+)\.size\((-?\d+)\)", text)):
        tensor, dim = found[1], int(found[2])
    elif size is not None and size.dim is not None:
        tensor, dim = size.tensor, size.dim
    else:
        return ""
    known = dims.get(tensor, [])
    return known[dim] if -len(known) <= dim < len(known) else ""


class _Dims:
    """The dims of each tensor argument, by what is read and compared."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._said: list[str] = []
        #: What is taken for granted, by tensor.
        self._taken: dict[str, str] = {}
        self._of: dict[tuple[str, int], tuple[str, int]] = {}
        self._rank: dict[str, int] = {}

    def all(self) -> tuple[dict[str, list[str]], list[str], list[str]]:
        """Returns the dims by tensor, what was taken for granted, and what nothing tells."""
        host = self._host
        for name, tensor in host.tensors.items():
            rank = tensor.rank
            read = {dim for dim in tensor.read if dim >= 0}
            if rank is None and read and read == set(range(max(read) + 1)) and read == tensor.read:
                rank = len(read)
                self._taken[name] = (f"{name} is taken to have {rank} dims, since sizes up to "
                                     f"{name}.size({rank - 1}) are read")  # fmt: skip
            if rank is not None:
                self._rank[name] = rank
        for first, second in (*host.same_shape, *reversed(host.same_shape)):
            for a, b in ((first, second), (second, first)):
                if a in self._rank and b not in self._rank:
                    self._rank[b] = self._rank[a]
        for name in host.tensors:
            if name not in self._rank:
                self._said.append(f"nothing says how many dims {name} has")
        for first, second in host.same_shape:
            for dim in range(min(self._rank.get(first, 0), self._rank.get(second, 0))):
                self._join((first, dim), (second, dim))
        for one, other in host.same:
            self._join(one, other)
        compared = {self._root(one) for pair in host.same for one in pair}
        names = self._names()
        dims: dict[str, list[str]] = {}
        for name, rank in self._rank.items():
            dims[name] = []
            for dim in range(rank):
                root = self._root((name, dim))
                text = names.get(root, "")
                if not text and (root in compared or dim in self._read(name)):
                    text = f"{name}_{dim}"
                    names[root] = text
                if not text:
                    text = f"{name}_{dim}"
                    self._said.append(f"the size {dim} of {name} is neither read nor compared")
                dims[name].append(text)
        return dims, [*self._taken.values()], self._said

    def _read(self, name: str) -> set[int]:
        rank = self._rank[name]
        return {dim % rank for dim in self._host.tensors[name].read if -rank <= dim < rank}

    def _names(self) -> dict[tuple[str, int], str]:
        names: dict[tuple[str, int], str] = {}
        host = self._host
        for place, number in host.fixed.items():
            names[self._root(place)] = str(number)
        for name, size in host.sizes.items():
            if size.dim is None or size.tensor not in self._rank:
                continue
            root = self._root((size.tensor, size.dim))
            text = f"{name}_" if name in host.scalars else name
            if text not in names.values():
                names.setdefault(root, text)
        return names

    def _root(self, place: tuple[str, int]) -> tuple[str, int]:
        rank = self._rank.get(place[0], 0)
        if place[1] < 0 <= place[1] + rank:
            place = (place[0], place[1] + rank)
        while place in self._of:
            place = self._of[place]
        return place

    def _join(self, one: tuple[str, int], other: tuple[str, int]) -> None:
        first, second = self._root(one), self._root(other)
        if first != second:
            self._of[max(first, second)] = min(first, second)
