"""Which functions of a pair only its CUDA kernels reach, so that a CPU cannot judge them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cuda_ops.build.source_text import closing
from cuda_ops.testing.mutation.source import Source

#: A function at the start of a line, as clang-format leaves those of a namespace.
_FUNCTION = re.compile(r"^[\w:][^;{}()\n]*?\b(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?\{", re.MULTILINE)
_ON_CPU = re.compile(r"\.(?:cpu|composite)\s*<\s*(\w+)")
_ON_CUDA = re.compile(r"\.cuda\s*<\s*(\w+)")


@dataclass(frozen=True)
class _Function:
    file: str
    name: str
    start: int
    end: int
    words: frozenset[str]


class Reach:
    """What the entries of a pair's operators call, as far as names tell."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._functions: list[_Function] = []
        cpu: set[str] = set()
        cuda: set[str] = set()
        for file, text in texts.items():
            code = Source(text).code
            cpu |= {*_ON_CPU.findall(code)}
            cuda |= {*_ON_CUDA.findall(code)}
            for found in _FUNCTION.finditer(code):
                end = closing(code, found.end())
                words = frozenset(re.findall(r"\w+", code[found.start(1) : end]))
                self._functions.append(_Function(file, found[1], found.start(), end, words))
        self._cpu, self._cuda = self._reached(cpu), self._reached(cuda)

    def _reached(self, names: Iterable[str]) -> set[str]:
        reached: set[str] = set()
        waiting = {*names}
        while waiting:
            name = waiting.pop()
            reached.add(name)
            for function in self._functions:
                if function.name == name:
                    waiting |= {f.name for f in self._functions if f.name in function.words}
            waiting -= reached
        return reached

    def needs_gpu(self, file: str, at: int) -> bool:
        """Says whether a place lies in a function that entries for CUDA call, and no others."""
        names = {f.name for f in self._functions if f.file == file and f.start <= at < f.end}
        names -= {"CUDA_OPS"}
        return bool(names) and names <= self._cuda and not names & self._cpu
