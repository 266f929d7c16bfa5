"""The CPU function of a draft: loops over pointers, or a formula of numbers."""

from __future__ import annotations

import re

from cuda_ops.build.source_text import masked
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.cxx import base_type, split
from cuda_ops.dev.adopt.facts import POINTER, SIZE, indented_text
from cuda_ops.dev.adopt.host import DECLARED, Host
from cuda_ops.dev.adopt.kernels import Use, is_elementwise, use_of
from cuda_ops.dev.adopt.notes import Place, UnknownError


class Loops(Host):
    """A function that computes on the CPU."""

    def take_formula(self, value: str, place: Place) -> bool:
        """Reads a function made of torch's elementwise operators as one of numbers."""
        if self.compute or self.outputs:
            return False
        numbers = {**dict.fromkeys(self.tensors), **dict.fromkeys(self.scalars)}
        lines = []
        for name, statement in self.holes.items():
            declared = DECLARED.match(statement.text)
            assert declared is not None
            value_of = words.formula(declared["value"], numbers, statement.place)
            lines.append(f"const double {name} = {value_of};")
            numbers[name] = None
        lines.append(f"return {words.formula(value, numbers, place)};")
        if any(one.optional for one in self.tensors.values()) or not self.tensors:
            raise UnknownError(place, f"{value}: no formula of tensors alone")
        self.holes.clear()
        self.formula = lines
        return True

    def lower(self) -> None:
        """Turns loops over tensors into loops of a binding."""
        if self.formula:
            return
        if any("<<<" in one.text for one in self.compute):
            raise UnknownError(self.place, "kernels are launched here")
        if self.holes:
            first = next(iter(self.holes.values()))
            text = " ".join(first.text.split())
            raise UnknownError(
                first.place, f"{text}: the CPU function calls torch; write its loops"
            )
        if not self.compute:
            raise UnknownError(self.place, "nothing is computed here for the CPU")
        known = "|".join(map(re.escape, self.all_tensors()))
        _, uses = self.cpu_code()
        for name in self.tensors:
            use = uses.get(f"{name}_data")
            if use is not None:
                self.tensors[name].pointed = True
                self.tensors[name].written |= use.written
        for statement in self.compute:
            text, place = statement.text, statement.place
            if self.early and re.fullmatch(r"if \(.*\) return;", text):
                continue  # loops over nothing do nothing
            lines: list[str] = []
            inside: dict[str, str] = {}
            start = words.DISPATCH.match(masked(text))
            if start is None:
                lines = indented_text(self._loop(text, place, known, self.pointers))
            else:
                of, body, body_place = self.dispatched(text, start, place)
                for one in split(body, body_place):
                    lines += indented_text(self._loop(one.text.strip(), one.place, known, inside))
                own = {k: v for k, v in inside.items() if "scalar_t" in v}
                self.pointers |= {k: v for k, v in inside.items() if k not in own}
                lines = [words.visit("visit_cpu", self.dtypes, f"dtype_of({of})"),
                         "  using scalar_t = decltype(tag);",
                         *(f"  {one}" for one in (*own.values(), *lines)), "});"]  # fmt: skip
            self.lines += lines
        for name in re.findall(r"\b(\w+)\s*\(", "\n".join(self.lines)):
            called = self.guest.function(name)
            if called is not None and words.TORCH.search(called.item.code):
                text = f"{name}() calls torch; write it in plain C++"
                raise UnknownError(called.item.place, text)

    def _loop(self, text: str, place: Place, known: str, pointers: dict[str, str]) -> str:
        def pointer(found: re.Match[str]) -> str:
            name, element = found[1], base_type(found["element"])
            self.point(name, element, place)
            if element in ("Half", "BFloat16"):
                element = f"torch::headeronly::{element}"
            const, how = ("", "mutable") if self.is_written(name) else ("const ", "const")
            value = f"static_cast<{const}{element}*>({name}.{how}_data_ptr())"
            pointers[f"{name}_data"] = f"{const}{element}* const {name}_data = {value};"
            return f"{name}_data"

        text = re.sub(rf"(?<![\w.])({known}){POINTER}", pointer, text)
        text = re.sub(r"\bat::parallel_for\(\s*0\s*,\s*", "parallel_for(", text)
        text = re.sub(r"\bat::internal::GRAIN_SIZE\b", "32768", text)
        rest = re.sub(rf"(?<![\w.])(?:{known}){SIZE}", " ", text)
        if left := re.search(rf"(?<![\w.>])(?:{known})\b", rest):
            raise UnknownError(
                place,
                f"{' '.join(text.split())[:80]}: loops have no word for this use of {left[0]}",
            )
        if words.TORCH.search(text):
            raise UnknownError(
                place,
                f"{' '.join(text.split())[:80]}: the CPU function calls torch; write its loops",
            )
        return text

    def cpu_code(self) -> tuple[str, dict[str, Use]]:
        """Returns the loops with a word for each tensor in place of its pointer, and how they use
        these.
        """
        known = self.any_tensor
        code = "\n".join(one.text for one in self.compute)
        code = re.sub(rf"(?<![\w.])({known}){POINTER}", lambda m: f"{m[1]}_data", code)
        names = set(re.findall(rf"\b(?:{known})_data\b", code))
        return code, {name: use_of(name, code) for name in names}

    def one_index(self) -> bool:
        code, uses = self.cpu_code()
        return is_elementwise(uses, code)
