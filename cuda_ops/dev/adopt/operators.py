"""What a guest offers as operators of a native pair: names, schemas and signature lines."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field

from cuda_ops.build.source_text import arguments_in
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.cxx import parameter
from cuda_ops.dev.adopt.dims import line_of
from cuda_ops.dev.adopt.gradient import fit_gradient
from cuda_ops.dev.adopt.guest import Export, Guest
from cuda_ops.dev.adopt.host import Host
from cuda_ops.dev.adopt.launcher import Launcher
from cuda_ops.dev.adopt.loops import Loops
from cuda_ops.dev.adopt.notes import Note

_GRADIENT = re.compile(r"(?:.*_)?(?:backward|bwd)(?:_cuda|_cpu)?$")


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
        fit_gradient(guest.pair.stem, found)
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
