"""What a kernel, or a loop on the CPU, does with its pointers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cuda_ops.build.source_text import closing

_ASSIGNED = re.compile(r"\s*(?:(?:[-+*/|&^%]|<<|>>)?=(?!=)|\+\+|--)")
#: A macro around an element, such as FLOAT4(x[i]), may read and write its neighbors.
_MACRO = re.compile(r"\b[A-Z][A-Z0-9_]*\s*\(\s*[&(]*$")
_BEHIND_MACRO = re.compile(r"\s*\)[)\s]*(?:[-+*/|&^%]|<<|>>)?=(?!=)")
_BRACKET = re.compile(r"\s*\[")
_COMBINES = re.compile(r"__shared__|__syncthreads|__shfl|__syncwarp|cooperative_groups|atomic[A-Z]")


@dataclass
class Use:
    """How a text uses a pointer."""

    written: bool = False
    #: In other ways than ``p[i]``, so that reading tells no more.
    otherwise: bool = False
    #: The indices, as written.
    indices: frozenset[str] = frozenset()


def use_of(name: str, code: str) -> Use:
    """Reads how code uses the pointer, or accessor, of a name."""
    use, indices = Use(), set()
    for found in re.finditer(rf"(?<![\w.>]){re.escape(name)}\b", code):
        before, at = code[: found.start()].rstrip(), found.end()
        after = _BRACKET.match(code, at)
        if after is None:
            if re.match(r"\s*\.\s*(?:size|stride)\(", code[at:]):
                continue
            through = at if before.endswith("*") else closing(code, at) + 1
            if before.endswith(("*", "*(")) and _ASSIGNED.match(code, through):
                use.written = True
            use.otherwise = True
            continue
        inside = []
        while after is not None:
            end = closing(code, after.end())
            inside.append("".join(code[after.end() : end].split()))
            at = end + 1
            after = _BRACKET.match(code, at)
        indices.add("][".join(inside))
        if _ASSIGNED.match(code, at) or before.endswith(("++", "--")):
            use.written = True
        if re.search(r"\batomic\w+\(\s*&?$", before):
            use.written = True
        elif before.endswith("&") or _MACRO.search(before):
            use.otherwise = True
            use.written |= _BEHIND_MACRO.match(code, at) is not None
    use.indices = frozenset(indices)
    return use


def is_elementwise(pointers: dict[str, Use], code: str) -> bool:
    """Says whether code makes each element of one element of each pointer, at the same index, and
    of nothing that the index says. In doubt it does not.
    """
    indices = frozenset[str]().union(*(use.indices for use in pointers.values()))
    if len(indices) != 1 or any(use.otherwise for use in pointers.values()):
        return False
    (index,) = indices
    if not re.fullmatch(r"[A-Za-z_]\w*", index) or _COMBINES.search(code):
        return False
    declared = [*re.finditer(rf"[\w:]+\s+{index}\s*=[^;]*;", code)]
    if len(declared) != 1:
        return False
    loop = re.compile(r"for\s*\(\s*(?:const\s+)?$").search(code, 0, declared[0].start())
    if loop is not None and _carries(code, closing(code, loop.end()) + 1):
        return False
    rest = code[: declared[0].start()] + code[declared[0].end() :]
    rest = re.sub(rf"\[\s*{index}\s*\]|\b{index}\s*(?:<=?|>=?|\+=)|(?:\+\+|--)\s*{index}\b"
                  rf"|\b{index}\s*(?:\+\+|--)", " ", rest)  # fmt: skip
    return not re.search(rf"\b(?:{index}|threadIdx|blockIdx)\b", rest)


def _carries(code: str, start: int) -> bool:
    """Says whether a loop whose body starts there hands a number on to its next round."""
    braces = re.compile(r"\s*\{").match(code, start)
    end = closing(code, braces.end()) if braces else code.find(";", start)
    body = code[start:end]
    for found in re.finditer(r"(?<![\w.\]>])([A-Za-z_]\w*)\s*(?:[-+*/|&^%]|<<|>>)?=(?!=)", body):
        if not re.search(rf"[\w:>][\s&*]+{found[1]}\s*=(?!=)", body):
            return True
    return False
