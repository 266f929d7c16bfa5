"""What a guest offers as operators of a native pair: names, schemas and signature lines."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field

from cuda_ops.build.source_text import arguments_in
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.cxx import parameter
from cuda_ops.dev.adopt.guest import Export, Guest
from cuda_ops.dev.adopt.host import Host
from cuda_ops.dev.adopt.launcher import Launcher
from cuda_ops.dev.adopt.loops import Loops
from cuda_ops.dev.adopt.notes import Note

_GRADIENT = re.compile(r"(?:.*_)?(?:backward|bwd)(?:_cuda|_cpu)?$")
_GRAD_OUT = re.compile(r"(?:grad|d)_?(?:out(?:put)?s?|y)?$|d(?:out|y)$|grad_\w+$|\w+_grad$")


@dataclass
class Argument:
    """An argument of a schema."""

    #: In the schema.
    type: str
    name: str
    default: str = ""
    is_written: bool = False

    def __str__(self) -> str:
        return f"{self.type} {self.name}" + (f"={self.default}" if self.default else "")


@dataclass
class Operator:
    """One operator of the draft."""

    name: str
    export: Export
    hosts: dict[str, Host]
    arguments: list[Argument]
    #: The names of what is returned; a single one may be ``""``.
    returns: list[str]
    #: As the author has written it, if so.
    schema: str = ""
    signature: str = ""
    notes: list[Note] = field(default_factory=list)

    @property
    def stem(self) -> str:
        """What its functions begin with: C++ keeps names with two underscores for itself."""
        return f"{self.name.rstrip('_')}_in_place" if self.name.endswith("_") else self.name

    @property
    def host(self) -> Host:
        """The function that says most: that of the GPU where there is one."""
        return self.hosts.get("cuda") or self.hosts["cpu"]

    @property
    def returned(self) -> list[str]:
        """The tensors that the function returns, in its own words."""
        host = self.host
        return [one for one in host.returned or () if one not in host.tensors]

    def shown(self, cpp_name: str) -> str:
        """Returns the schema's name of an argument of the C++ function."""
        names = [one.name for one in self.host.function.parameters]
        return self.arguments[names.index(cpp_name)].name

    def __str__(self) -> str:
        if self.schema:
            return self.schema
        outputs = [f"Tensor {one}".strip() for one in self.returns]
        returned = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
        parts, letter = [], ord("a")
        for one in self.arguments:
            text = str(one)
            if one.is_written:
                text = text.replace("Tensor", f"Tensor({chr(letter)}!)", 1)
                letter += 1
            parts.append(text)
        return f"{self.name}({', '.join(parts)}) -> {returned}"


def operators_of(guest: Guest) -> tuple[list[Operator], list[Note]]:
    """Returns the operators that can be drafted, the main one first, and what cannot be."""
    notes: list[Note] = []
    found = []
    for export in guest.exports:
        hosts, reasons = _hosts(guest, export)
        if not hosts:
            notes += reasons
            continue
        made = Operator("", export, hosts, *_interface(export, hosts))
        notes += reasons
        if problem := _problem_of(made):
            notes.append(problem)
            continue
        found.append(made)
    notes += guest.unread
    _name(guest.pair.stem, found)
    found.sort(key=lambda one: one.name != guest.pair.stem)
    for one in found:
        _describe(one)
    if found:
        _fit_gradient(guest.pair.stem, found)
    for one in found:
        for host in one.hosts.values():
            host.keep_checks_of_shapes(one.signature)
    return found, notes


def _hosts(guest: Guest, export: Export) -> tuple[dict[str, Host], list[Note]]:
    hosts, reasons = {}, []
    if not any(export.functions.values()):
        return {}, [Note(export.place, f"{export.name}: no function of the guest's own, such as a "
                         "lambda; write it as a function")]  # fmt: skip
    for key, called in export.functions.items():
        if key not in ("cpu", "cuda", "any"):
            text = "is left out; <op>_backward is the gradient of an operator"
            reasons.append(Note(export.place, f"{export.name}: its function for {key[4:]} {text}"))
            continue
        function = guest.function(called)
        if function is None:
            text = f"{export.name}: {called}() is in none of the guest's files"
            reasons.append(Note(export.place, text))
            continue
        if not function.has_tensors:
            reasons.append(Note(function.item.place, f"{called}() takes and returns no tensor, so "
                                "it is no operator; leave it to Python"))  # fmt: skip
            continue
        if not all(re.fullmatch(r"[A-Za-z_]\w*", one.name) for one in function.parameters):
            text = f"{called}() has a parameter without a name"
            reasons.append(Note(function.item.place, text))
            continue
        for device in ("cuda", "cpu") if key == "any" else (key,):
            kind: type[Host] = Launcher if device == "cuda" else Loops
            host = kind(guest, function, device)
            if host.problem is None:
                hosts[device] = host
                continue
            # What serves all devices launches on one of them, and has nothing for the other.
            if key != "any" or host.launches == (device == "cuda"):
                reasons.append(Note(host.problem.place, f"{export.name} on {device.upper()}: "
                                    f"{host.problem.text}"))  # fmt: skip
    return hosts, reasons


def _interface(export: Export, hosts: dict[str, Host]) -> tuple[list[Argument], list[str], str]:
    host = hosts.get("cuda") or hosts["cpu"]
    written = {name for one in hosts.values() for name, t in one.tensors.items() if t.written}
    arguments = []
    for number, one in enumerate(host.function.parameters):
        name, default = one.name, ""
        if number < len(export.arguments):
            name, default = export.arguments[number]
        if keyword.iskeyword(name):
            name += "_"
        kind = words.schema_type(one.type)[0]
        arguments.append(Argument(kind, name, words.default_of(default), one.name in written))
    new = [one for one in host.returned or () if one not in host.tensors]
    returns = [""] if len(new) == 1 or host.formula else new
    if not re.match(r"[\w:.]+\s*\(.*\)\s*->", export.schema, re.DOTALL):
        return arguments, returns, ""
    schema = re.sub(r"\bScalar\b", "float", " ".join(export.schema.split()))
    schema = schema.partition("(")[0].rpartition("::")[2] + schema[schema.index("(") :]
    arrow = schema.rindex("->")
    inside = schema[schema.index("(") + 1 : arrow].rstrip().removesuffix(")")
    given = [one for one in arguments_in(inside) if one != "*"]
    if len(given) != len(arguments):
        return arguments, returns, ""
    for argument, text in zip(arguments, given, strict=True):
        parsed = parameter(text)
        argument.name, argument.default = parsed.name, parsed.default
        argument.is_written |= "!" in parsed.type
    results = arguments_in(schema[arrow + 2 :].strip().removeprefix("(").removesuffix(")"))
    if any("!" in one for one in results):  # the caller has what is written
        return arguments, returns, ""
    returns = [parameter(one).name if " " in one else "" for one in results]
    return arguments, returns, schema


def _problem_of(made: Operator) -> Note | None:
    """Returns why an operator cannot be drafted; ``None`` where it can."""
    host, problem = made.host, ""
    unknown = [one for one in host.function.parameters if not words.schema_type(one.type)[0]]
    if unknown:
        problem = f"no schema has the type {unknown[0].type} of {unknown[0].name}"
    elif not any(one.type.startswith("Tensor") for one in made.arguments):
        problem = "takes no tensor; give it a Device, see 'Without a tensor argument'"
    elif not made.returns and not any(one.is_written for one in made.arguments):
        problem = "returns nothing, and writes no argument as far as its text tells"
    elif made.schema and len(made.returns) != (1 if host.formula else len(made.returned)):
        problem = "its schema returns another number of tensors than its function"
    return Note(made.export.place, f"{made.export.name}: {problem}") if problem else None


def _name(stem: str, found: list[Operator]) -> None:
    """Names the operators after the guest."""
    forward = [one for one in found if not _GRADIENT.match(one.export.name)]

    def rank(one: Operator) -> int:
        name = one.export.name
        return [name == stem, name == "forward", name in (f"{stem}_forward", f"{stem}_fwd", "fwd"),
                name in stem or stem in name, True].index(True)  # fmt: skip

    main = min(forward or found, key=rank, default=None)
    taken: set[str] = set()
    for one in found:
        name = re.sub(r"\W", "_", one.export.name)
        if one is main:
            one.name = stem
        elif (
            _GRADIENT.match(name) and f"{stem}_backward" not in taken and len(forward) < len(found)
        ):
            one.name = f"{stem}_backward"
        else:
            one.name = name if name.startswith(f"{stem}_") else f"{stem}_{name}"
        if one.name in taken:
            one.name += "_2"
        taken.add(one.name)
        if one.schema:
            one.schema = re.sub(r"^\w+(?:\.\w+)?", one.name, one.schema)


def _describe(one: Operator) -> None:
    """Finds the signature line, or says what it would need."""
    lines = {device: line_of(one, host) for device, host in one.hosts.items()}
    place = one.export.place
    if one.host.formula:
        text = f"{one.name}: takes the floating dtypes alone, and computes in double"
        one.notes.append(Note(place, text))
    for argument, (name, default) in zip(one.arguments, one.export.arguments, strict=False):
        if default and not argument.default and not one.schema:
            text = f"{one.name}: the default {default} of {name} is left out"
            one.notes.append(Note(place, text))
    for name in one.host.returned or ():
        if name in one.host.tensors:
            text = f"{one.name}: does not return {name}, which the caller has"
            one.notes.append(Note(place, text))
    found = {line for line, _ in lines.values()}
    for _, said in lines.values():
        for text in said:
            note = Note(place, text)
            if note not in one.notes:
                one.notes.append(note)
    if len(found) == 1:
        (one.signature,) = found
    elif all(found):
        one.notes.append(Note(place, f"no signature line: the functions of the devices read it as "
                              f"{' and as '.join(sorted(found))}"))  # fmt: skip


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


def _fit_gradient(stem: str, found: list[Operator]) -> None:
    """Names the arguments and returns of ``<op>_backward`` after what they are, or the operator
    otherwise: with unknown names the pair would not load.
    """
    main = found[0]
    backward = next((one for one in found if one.name == f"{stem}_backward"), None)
    if backward is None or main is backward:
        return
    inputs = [one.name for one in main.arguments]
    tensors = [main.shown(name) for name, tensor in main.host.tensors.items() if tensor.may_float]
    outputs = main.returns if len(main.returns) > 1 else ["out"]
    own = main.returned
    grads = [f"grad_{one}" for one in outputs]
    names: list[str] = []
    for argument in backward.arguments:
        name = argument.name
        if name in (*inputs, *grads) or (len(main.returns) > 1 and name in outputs):
            names.append(name)
        elif _GRAD_OUT.match(name) and len(outputs) == 1 and grads[0] not in names:
            names.append(grads[0])
        elif len(outputs) == 1 and (name in (*own, "out", "output", "y", "result")):
            names.append("out")
        else:
            names.append("")
    returns = []
    made = backward.returned or list(backward.returns)
    for name in made:
        stripped = re.sub(r"^(?:grad_|d_?)|_grad$", "", name)
        if stripped in tensors:
            returns.append(f"grad_{stripped}")
        elif len(tensors) == 1 and len(made) == 1:
            returns.append(f"grad_{tensors[0]}")
        else:
            returns.append("")
    fits = all(names) and all(returns) and returns and any(one in grads for one in names)
    fits = fits and len(set(names)) == len(names) and len(set(returns)) == len(returns)
    if fits and not any(one.is_written for one in (*main.arguments, *backward.arguments)):
        for argument, name in zip(backward.arguments, names, strict=True):
            argument.name = name
        backward.returns = returns
        backward.schema = ""
        for argument, parameter_ in zip(
            backward.arguments, backward.host.function.parameters, strict=True
        ):
            argument.type = words.schema_type(parameter_.type)[0]
        if backward.hosts.keys() != main.hosts.keys():
            missing = next(iter(main.hosts.keys() ^ backward.hosts.keys()))
            fits = missing not in main.hosts
        if fits:
            _compare_lines(main, backward)
            return
    old, backward.name = backward.name, f"{stem}_gradient"
    if backward.schema:
        backward.schema = re.sub(r"^\w+", backward.name, backward.schema)
    backward.returns = (
        [""] if len(backward.returns) == 1 else [one.removeprefix("grad_") for one in made]
    )
    backward.notes.append(Note(backward.export.place, (
        f"named {backward.name}, since its names do not say what they are: as {old} it is the "
        f"gradient of {stem}, with arguments {', '.join(grads)}, inputs and outputs, returns "
        "grad_<input>, and a function for each device")))  # fmt: skip


def _compare_lines(main: Operator, backward: Operator) -> None:
    """Drops the line of a gradient that describes a tensor otherwise than the operator's does: such
    a pair would not load.
    """
    if not (main.signature and backward.signature):
        return
    groups = {}
    for one, prefix in ((main, ""), (backward, "grad_")):
        inputs, outputs = one.signature.split("->")
        tensors = [
            argument.name for argument in one.arguments if argument.type.startswith("Tensor")
        ]
        returns = one.returns if len(one.returns) > 1 or prefix else ["out"]
        found = dict(zip([*tensors, *returns], [*_groups(inputs), *_groups(outputs)], strict=True))
        groups[one.name] = {name.removeprefix(prefix): group for name, group in found.items()}
    own, other = groups[main.name], groups[backward.name]
    if differing := sorted(name for name in own.keys() & other.keys() if own[name] != other[name]):
        backward.notes.append(Note(backward.export.place, (
            f'{backward.name}: no signature line, since "{backward.signature}" has other dims for '
            f'{", ".join(differing)} than "{main.signature}" of {main.name}')))  # fmt: skip
        backward.signature = ""


def _groups(side: str) -> list[str]:
    return re.findall(r"\([^()]*\)|\[[^\[\]]*\]", side)
