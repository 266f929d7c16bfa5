"""The launcher of a draft: the statements that launch, with pointers and sizes for tensors."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator

from cuda_ops.build.source_text import arguments_in, closing, masked
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.cxx import LAUNCH, Function, Parameter, Statement, base_type, split
from cuda_ops.dev.adopt.facts import (
    ACCESSOR,
    AFTER_LAUNCH,
    POINTER,
    SIZE,
    Passed,
    indented_text,
    launches_in,
)
from cuda_ops.dev.adopt.host import Host
from cuda_ops.dev.adopt.kernels import is_elementwise, use_of
from cuda_ops.dev.adopt.notes import Note, Place, UnknownError

_MIN_MAX = re.compile(r"\b(?:std::)?(?:min|max)\s*\(")
#: Puts a text aside, so that nothing else of it is replaced, and returns what stands for it.
Hold = Callable[[str], str]


class Launcher(Host):
    """A function that launches kernels."""

    def lower(self) -> None:
        launching = [
            i
            for i, one in enumerate(self.compute)
            if "<<<" in one.text or self._helpers_in(one.text)
        ]
        if not launching:
            raise UnknownError(self.place, "no kernel is launched here")
        self._find_written()
        last = launching[-1]
        for number, statement in enumerate(self.compute):
            if number < launching[0]:  # nothing has been launched that could fail
                text = re.sub(r"^(if \(.*\) return);$", r"\1 cudaSuccess;", statement.text)
                statement = Statement(text, statement.place)
            self.lines += self._lowered(statement, number == last)
        if not any(line.startswith("return visit<") for line in self.lines):
            self.lines.append("return cudaGetLastError();")
        for name, output in self.outputs.items():
            if output.zeros:
                self.passed.setdefault(name, Passed("void*", name, ""))

    def _helpers_in(self, text: str) -> list[tuple[re.Match[str], Function]]:
        """Returns the calls of the guest's own functions that launch, such as a template that a
        dispatch calls.
        """
        found = []
        for one in re.finditer(
            r"\b(?P<kernel>[A-Za-z_]\w*)\s*(?:<[^;<>(){}]*>)?\s*\(", masked(text)
        ):
            function = self.guest.function(one["kernel"])
            if function is not None and function.launches and not function.has_tensors:
                found.append((one, function))
        return found

    def _find_written(self) -> None:
        """Finds the arguments that kernels write."""
        doubted: list[tuple[str, Function, str]] = []
        for called, given, place in self._called():
            if called is None:
                raise UnknownError(place, f"the kernel {given[0]} is in none of the guest's files")
            for parameter, value in zip(called.parameters, given, strict=False):
                if re.search(r"\bconst\b[^*]*\*", parameter.type):
                    continue
                use = use_of(parameter.name, called.item.body)
                for name in self._pointed_in(value):
                    if name in self.tensors:
                        self.tensors[name].written |= use.written
                        doubted += [(name, called, parameter.name)] if use.otherwise else []
        # What returns nothing writes something.
        nothing = not self.returned and not any(one.written for one in self.tensors.values())
        for name, function, pointer in doubted:
            if nothing or not self.tensors[name].written:
                self.tensors[name].written |= nothing
                text = "written: if it is only read, take the (a!) away"
                if not nothing:
                    text = f"read: if it is written, say Tensor(a!) {name} in the schema"
                self.notes.append(Note(function.item.place, (
                    f"{function.name} takes {pointer} as a pointer that is not const, and {name} "
                    f"is taken to be {text}")))  # fmt: skip

    def _called(self) -> Iterator[tuple[Function | None, list[str], Place]]:
        """Yields the kernels, and functions that launch, with their arguments; for an unknown one
        its name.
        """
        for statement in self.compute:
            text, place = statement.text, statement.place
            for launch, given in launches_in(text):
                kernel = self.guest.kernel(launch["kernel"])
                yield kernel, given if kernel is not None else [launch["kernel"]], place
            for call, function in self._helpers_in(text):
                yield (
                    function,
                    arguments_in(text[call.end() : closing(masked(text), call.end())]),
                    place,
                )

    def _pointed_in(self, text: str) -> list[str]:
        known = self.any_tensor
        return [
            found[1]
            for found in re.finditer(
                rf"\b({known})(?:{POINTER}|{ACCESSOR.replace('?P<', '?P<a_')})", text
            )
        ]

    def _lowered(self, statement: Statement, is_last: bool) -> list[str]:
        text = statement.text
        mask = masked(text)
        if words.DISPATCH.match(mask):
            return self._dispatch(statement, is_last)
        if words.DISPATCH.search(mask):
            raise UnknownError(
                statement.place,
                "AT_DISPATCH inside of another statement; hand the launcher a DType, use visit",
            )
        return indented_text(self._plain(text, statement.place))

    def _dispatch(self, statement: Statement, is_last: bool) -> list[str]:
        text, place = statement.text, statement.place
        start = words.DISPATCH.match(masked(text))
        assert start is not None
        of, body, body_place = self.dispatched(text, start, place)
        if "dtype" not in self.passed:
            self.passed = {"dtype": Passed("DType", "dtype", f"dtype_of({of})"), **self.passed}
        inside: list[str] = []
        for one in split(body, body_place):
            if "<<<" not in one.text and AFTER_LAUNCH.search(one.text):
                continue
            inside += indented_text(self._plain(one.text.strip(), one.place))
        head = words.visit("visit", self.dtypes, "dtype")
        block = [
            "  using scalar_t = decltype(tag);",
            *(f"  {one}" for one in inside),
            "  return cudaGetLastError();",
        ]
        if is_last:
            return [f"return {head}", *block, "});"]
        return [f"const cudaError_t error{place.line} = {head}", *block, "});",
                f"if (error{place.line} != cudaSuccess) return error{place.line};"]  # fmt: skip

    def _plain(self, text: str, place: Place) -> str:
        """Replaces what a launcher has no word for: tensors by pointers and sizes."""
        statement = text
        text = re.sub(
            r"\b(?:at|c10)::(?:cuda::)?(?:getCurrentCUDAStream)\(.*?\)(?:\.stream\(\))?",
            "stream",
            text,
        )
        held: list[str] = []

        def hold(value: str) -> str:
            held.append(value)
            return f"\0{len(held) - 1}\0"

        for call, function in reversed(self._helpers_in(text)):
            end = closing(masked(text), call.end())
            values = [
                self._argument(value, function, number, hold)
                for number, value in enumerate(arguments_in(text[call.end() : end]))
            ]
            text = text[: call.end()] + ", ".join((*values, "stream")) + text[end:]
        parts, last = [], 0
        mask = masked(text)
        for found in LAUNCH.finditer(mask):
            launch = LAUNCH.match(text, found.start())
            assert launch is not None
            end = closing(mask, launch.end())
            parts.append(text[last : launch.start()])
            parts.append(self._launch(launch, text[launch.end() : end], hold, place))
            last = end + 1
        text = "".join((*parts, text[last:]))
        text = self._pointers(
            text, hold, place, lambda name: "" if self.is_written(name) else "const "
        )
        text = self._sizes(text, hold)
        for name, parameter in self.scalars.items():
            text = self._scalar(text, name, parameter, place)
        for name in self.sizes:
            if re.search(rf"(?<![\w.]){name}\b", text):
                self._size_parameter(name)
        optional = "|".join(one.name for one in self.tensors.values() if one.optional) or "(?!)"
        text = re.sub(
            rf"(?<![\w.])({optional})\.has_value\(\)",
            lambda found: self._given(found[1], hold),
            text,
        )
        known = "|".join(map(re.escape, (*self.all_tensors(), *self.options))) or r"(?!)"
        if left := re.search(rf"(?<![\w.>])(?:{known})\b", re.sub(r"\0\d+\0", " ", text)):
            raise UnknownError(
                place,
                f"{_shown(statement)}: a launcher has no tensor {left[0]}",
            )
        while "\0" in text:
            text = re.sub(r"\0(\d+)\0", lambda m: held[int(m[1])], text)
        text = re.sub(r"\breturn\s*;", "return cudaGetLastError();", words.native(text))
        if words.TORCH.search(text):
            raise UnknownError(place, f"{_shown(statement)}: a launcher has no word of torch's")
        return text

    def _launch(self, launch: re.Match[str], inside: str, hold: Hold, place: Place) -> str:
        config = [*arguments_in(launch["config"]), "0"][:3]  # no shared memory where none is said
        if len(config) != 3:
            raise UnknownError(place, f"a launch of {launch['kernel']} without a block's size")
        kernel = self.guest.kernel(launch["kernel"])
        assert kernel is not None
        values = [
            self._argument(value, kernel, number, hold)
            for number, value in enumerate(arguments_in(inside))
        ]
        call = f"{launch['kernel']}{launch['template'] or ''}<<<{', '.join(config)}, stream>>>("
        return call + ", ".join(values) + ")"

    def _argument(self, value: str, called: Function, number: int, hold: Hold) -> str:
        """Replaces the pointers in an argument; one to read and write where that is what it is
        passed as.
        """
        kind = called.parameters[number].type if number < len(called.parameters) else ""
        narrow = base_type(kind) in ("int", "unsigned", "unsigned int", "int32_t", "uint32_t")
        if narrow and (value in self.sizes or re.fullmatch(rf"\w+{SIZE}", value)):
            note = Note(called.item.place, (
                f"{called.name} takes sizes as {base_type(kind)}, which holds none from 2^31 on; "
                "take int64_t, and for indices too"))  # fmt: skip
            self.notes += [note] if note not in self.notes else []
        takes_const = re.search(r"\bconst\b[^*]*\*", kind) or "*" not in kind
        if re.search(r"_cast\s*<\s*(?!const\b)[^<>]*\*\s*>", value):  # to float4*, say
            takes_const = False
        return self._pointers(
            value, hold, called.item.place, lambda _: "" if takes_const else "mutable "
        )

    def _pointers(self, text: str, hold: Hold, place: Place, wanted: Callable[[str], str]) -> str:
        known = self.any_tensor

        def pointer(name: str, element: str, const: str) -> str:
            base = base_type(element)
            is_written = self.is_written(name)
            shared = words.ELEMENTS.get(base, ("", "void"))[1]
            own = self.passed.get(name)
            kind = f"{shared}*" if is_written else f"const {shared}*"
            if own is not None and own.type != kind:
                raise UnknownError(place, f"{name} is read as elements of two types")
            self.passed.setdefault(name, Passed(kind, name, ""))
            self.point(name, base, place)
            constant = "" if is_written else "const "
            real = {"Half": "__half", "half": "__half", "BFloat16": "__nv_bfloat16"}.get(base, base)
            value = name if shared != "void" else f"static_cast<{constant}{real}*>({name})"
            if const.startswith("mutable") and not is_written:
                value = f"const_cast<{real}*>({value})"
            return value

        def plain(found: re.Match[str]) -> str:
            return str(hold(pointer(found[1], found["element"], wanted(found[1]))))

        def accessor(found: re.Match[str]) -> str:
            name, rank = found[1], int(found["rank"])
            if name in self.tensors:
                self.tensors[name].rank = rank
            index = "int64_t" if found["bits"] == "64" else "int32_t"
            pointer(name, found["item"], "")
            sizes = [self._size_of(name, dim) for dim in range(rank)]
            return str(
                hold(f"Accessor<{found['item']}, {rank}, {index}>({name}, {{{', '.join(sizes)}}})")
            )

        text = re.sub(rf"(?<![\w.])({known}){ACCESSOR}", accessor, text)
        return re.sub(rf"(?<![\w.])({known}){POINTER}", plain, text)

    def _size_of(self, tensor: str, dim: int) -> str:
        if tensor in self.outputs and self.outputs[tensor].like:
            tensor = self.outputs[tensor].like
        for name, size in self.sizes.items():
            if (size.tensor, size.dim) == (tensor, dim):
                self._size_parameter(name)
                return name
        name = f"{tensor}_size_{dim}"
        self.passed.setdefault(name, Passed("int64_t", name, f"{tensor}.size({dim})"))
        return name

    def _given(self, name: str, hold: Hold) -> str:
        self.passed.setdefault(f"has_{name}", Passed("bool", f"has_{name}", f"{name}.has_value()"))
        return str(hold(f"has_{name}"))

    def _sizes(self, text: str, hold: Hold) -> str:
        known = self.any_tensor

        def size(found: re.Match[str]) -> str:
            value = found[0]
            self.sized(found[1], found, value)
            for name, one in self.sizes.items():
                if one.text == value:
                    self._size_parameter(name)
                    return str(hold(name))
            parts = (
                found[1],
                found["what"] or found["all"],
                (found["dim"] or "").replace("-", "m"),
            )
            name = "_".join(part for part in parts if part)
            self.passed.setdefault(name, Passed("int64_t", name, value))
            return str(hold(name))

        return re.sub(rf"(?<![\w.])({known}){SIZE}", size, text)

    def _size_parameter(self, name: str) -> None:
        kind = "int64_t"
        if self.size_types.get(name) == "int":
            if any(
                _MIN_MAX.search(one.text) and re.search(rf"\b{name}\b", one.text)
                for one in self.compute
            ):
                kind = "int"  # std::min wants both of one type
        self.passed.setdefault(name, Passed(kind, name, self.sizes[name].text))

    def _scalar(self, text: str, name: str, parameter: Parameter, place: Place) -> str:
        if not re.search(rf"(?<![\w.>]){name}\b", text):
            return text
        kind, native = words.schema_type(parameter.type)
        base = base_type(parameter.type)
        if kind not in ("int", "float", "bool"):
            raise UnknownError(place, f"a launcher takes no {parameter.type} {name}")
        if base == "Scalar":
            text = re.sub(
                rf"\b{name}\.to(?:<([\w:]+)>|Double|Float|Int|Long)\(\)",
                lambda found: f"static_cast<{found[1]}>({name})" if found[1] else name,
                text,
            )
            base = native
        value = name if base in (native, "long", "long long") else f"static_cast<{base}>({name})"
        self.passed.setdefault(
            name, Passed(native if base in ("long", "long long") else base, name, value)
        )
        return text

    def one_index(self) -> bool:
        found = [
            (one, launch, given) for one in self.compute for launch, given in launches_in(one.text)
        ]
        if len(found) != 1:
            return False
        _, launch, given = found[0]
        kernel = self.guest.kernel(launch["kernel"])
        assert kernel is not None
        uses = {}
        for parameter, value in zip(kernel.parameters, given, strict=False):
            if "*" in parameter.type:
                element = base_type(parameter.type).rstrip("*").strip()
                is_one = element in words.ELEMENTS or re.search(rf"\b{element}\b", kernel.head)
                if not is_one or not self._pointed_in(value):  # a float4 is four elements
                    return False
                uses[parameter.name] = use_of(parameter.name, kernel.item.body)
        return is_elementwise(uses, kernel.item.body)


def _shown(text: str) -> str:
    """Returns a statement in one line of some words."""
    return textwrap.shorten(text, 80, placeholder=" ...")
