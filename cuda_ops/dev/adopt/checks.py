"""The checks of a guest: what a native pair says of them anyway, and what it keeps."""

from __future__ import annotations

import re

from cuda_ops.build.source_text import arguments_in, closing, masked
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.cxx import Statement
from cuda_ops.dev.adopt.facts import SIZE, Facts
from cuda_ops.dev.adopt.flatten import renamed
from cuda_ops.dev.adopt.notes import Note, Place

CHECK = re.compile(
    r"\s*(?:(?:STD_)?TORCH_CHECK(?:_\w+)?|TORCH_INTERNAL_ASSERT(?:_\w+)?|AT_ASSERTM?|AT_CHECK"
    r"|assert)\s*\("
)


class Checks(Facts):
    """Reads checks."""

    def take_check(self, statement: Statement) -> None:
        """Reads a check: as what the binding says anyway, as C++ that stays, or as a note."""
        text = statement.text
        start = CHECK.match(text)
        assert start is not None
        given = arguments_in(text[start.end() : closing(masked(text), start.end())])
        said = " ".join(_string(one) for one in given[1:]).strip()
        for condition in re.split(r"\s*&&\s*", given[0].strip() if given else ""):
            condition = condition.strip()
            while condition.startswith("(") and closing(condition, 1) == len(condition) - 1:
                condition = condition[1:-1].strip()
            if self._is_of_shapes(condition):
                counts = "numel()" in condition
                self.of_shapes.append((counts, condition, said, statement.place))
            elif not self._is_said(condition):
                self._kept(condition, said, statement.place)

    def keep_checks_of_shapes(self, signature: str) -> None:
        """Keeps the checks of shapes that a signature line does not say."""
        for counts, condition, said, place in self.of_shapes:
            if not signature or (counts and "[" in signature):
                self._kept(condition, said, place, "a signature line")
        self.of_shapes.clear()

    def _is_said(self, text: str) -> bool:
        """Says whether a binding says what a check says: devices, layout, dtypes."""
        known = "|".join(map(re.escape, self.tensors)) or r"(?!)"
        if "||" in text:
            return False
        if re.fullmatch(rf"(?:{known})(?:->|\.)(?:is_contiguous|is_cuda|is_cpu|defined)\(\)", text):
            return True
        if re.search(r"\bdevice\(\)|get_device(?:_index)?\(\)|layout\(\)|requires_grad", text):
            return True
        dtype = re.fullmatch(rf"({known})\.(?:scalar_type|dtype|type)\(\)\s*==\s*(.*)", text)
        if dtype is None:
            return False
        if found := words.dtype_in(dtype[2]):
            self.tensors[dtype[1]].elements.add(found)
            return True
        return bool(re.fullmatch(rf"(?:{known})\.(?:scalar_type|dtype|type)\(\)", dtype[2]))

    def _is_of_shapes(self, text: str) -> bool:
        """Takes a check as one of ranks and sizes; says whether it is."""
        known = "|".join(map(re.escape, self.tensors)) or r"(?!)"
        sides = re.fullmatch(r"([^=!<>|]*?)\s*==\s*([^=!<>|]*)", text)
        if sides is None:
            return False
        left, right = sides[1].strip(), sides[2].strip()
        if re.fullmatch(r"\d+", left):
            left, right = right, left
        rank = re.fullmatch(rf"({known})\.(?:dim\(\)|sizes\(\)\.size\(\))", left)
        if rank and re.fullmatch(r"\d+", right):
            self.tensors[rank[1]].rank = int(right)
            return True
        whole = [re.fullmatch(rf"({known})\.(sizes|numel)\(\)", side) for side in (left, right)]
        if whole[0] and whole[1]:
            if whole[0][2] == "sizes":
                self.same_shape.append((whole[0][1], whole[1][1]))
            return True
        first, second = self._dim_in(left, known), self._dim_in(right, known)
        if first and second:
            self.same.append((first, second))
        elif first and re.fullmatch(r"\d+", right):
            self.fixed[first] = int(right)
        else:
            return False
        return True

    def _dim_in(self, text: str, known: str) -> tuple[str, int] | None:
        if text in self.sizes:
            size = self.sizes[text]
            return (size.tensor, size.dim) if size.dim is not None else None
        found = re.fullmatch(rf"({known}){SIZE}", text)
        if found and found["what"] == "size":
            self.tensors[found[1]].read.add(int(found["dim"]))
            return found[1], int(found["dim"])
        return None

    def _kept(
        self, condition: str, said: str, place: Place, hint: str = ".range or .at_most"
    ) -> None:
        """Keeps a check that the binding cannot declare, as C++."""
        condition = re.sub(r"(\w+)\.sizes\(\)\.size\(\)", r"\1.dim()", condition)
        condition = re.sub(r"(\w+)\.sizes\(\)", r"shape_of(\1)", condition)
        names = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", masked(condition)))
        stripped = re.sub(SIZE, "", condition)
        bare = re.sub(r"shape_of\(\w+\)", "", condition)
        is_plain = (
            names <= {*self.sizes, *self.scalars, *self.tensors, "shape_of"}
            and not words.TORCH.search(stripped)
            and not re.search(r"[.](?!\d)|->", stripped)
            and not re.search(rf"\b(?:{'|'.join(self.tensors) or '(?!)'})\b(?!\.)", bare)
        )
        if is_plain:
            for one in names & self.sizes.keys():
                condition = renamed(condition, {one: self.sizes[one].text})
            text = said.replace("\\", "\\\\").replace('"', '\\"') or f"expected {condition}"
            if "size(" in condition:
                hint = "a signature line"
            self.checks += _check_lines(f"if (!({condition}))", f'throw OpError("{text}");')
            note = f"is kept in the function, where fakes do not see it; say it with {hint}"
        else:
            note = "is not kept; write it with refuse(argument, expected, actual)"
        self.notes.append(Note(place, f"the check {condition} {note}"))


def _check_lines(asked: str, thrown: str) -> list[str]:
    """Returns a check in one line, or in three where that is too long."""
    if len(asked) + len(thrown) < 98:
        return [f"{asked} {thrown}"]
    return [f"{asked} {{", f"  {thrown}", "}"]


def _string(text: str) -> str:
    return "".join(re.findall(r'"((?:\\.|[^"\\])*)"', text))
