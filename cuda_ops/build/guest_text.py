"""What can be told of a guest by reading it: what cannot compile or load here, and what will hurt.

A build takes minutes and ends in a linker's words; reading takes milliseconds and names the line to
change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from cuda_ops.build.discovery import Pair
from cuda_ops.build.source_text import arguments_in, closing, code_of, line_at

#: What torch had once, and what has taken its place.
_REMOVED = (
    (r"#\s*include\s*<THCU?N?N?/", "headers of THC are gone", "include <ATen/cuda/CUDAContext.h>"),
    (r"\bTHCState\b|\bTHCudaCheck\b|\bTHCCeilDiv\b|\bTHCudaMalloc\b",
     "THC is gone", "use C10_CUDA_CHECK, at::ceil_div or a tensor from torch::empty"),
    (r"\bAT_CHECK\s*\(", "AT_CHECK is gone", "write TORCH_CHECK"),
    (r"\bAT_DISPATCH_\w+\(\s*[\w.\[\]()]+?\.type\(\)",
     "AT_DISPATCH takes no .type()", "write .scalar_type()"),
)  # fmt: skip
_C_LINKAGE = re.compile(r'extern\s+"C"\s*(\{)?')
#: A declaration or a definition has its type before it on the line; a call has none, and may know
#: the function from a header.
_DEFINITION = r"\b(?!return\b|else\b|do\b)\w+[ \t*&]+{name}\s*\([^;{{}}]*\)\s*[{{;]"
_LAUNCH = re.compile(r"<<<([^;]*?)>>>", re.DOTALL)
_GUARD = re.compile(r"\b(Optional)?(CUDA|Device)(Stream)?Guard\b")
_INT_SIZE = re.compile(r"\b(?:const\s+)?int\s+\w+\s*=\s*[\w.\->]+\.(?:numel|size)\(")
_SYNCHRONIZES = re.compile(r"\bcuda(Device|Stream|Thread)Synchronize\s*\(")


def fault_of(pair: Pair) -> str:
    """Returns what keeps a guest from working here, with file and line; empty where nothing does
    that a look at its text could tell.
    """
    texts = {path: code_of(path) for path in pair.sources}
    for path, code in texts.items():
        for pattern, what, remedy in _REMOVED:
            if match := re.search(pattern, code):
                return f"{path}:{_line(code, match)}: {what}; {remedy}"
    return next(_one_sided(texts), "")


def _one_sided(texts: dict[Path, str]) -> Iterator[str]:
    """Names functions that are ``extern "C"`` in one file and C++ in another."""
    for path, code in texts.items():
        for name, line in _with_c_linkage(code):
            used = re.compile(_DEFINITION.format(name=re.escape(name)))
            for other, text in texts.items():
                if other == path or name in {one for one, _ in _with_c_linkage(text)}:
                    continue
                if match := used.search(text):
                    yield (
                        f'{other}:{_line(text, match)}: {name}() is C++ here and extern "C" in '
                        f'{path}:{line}, so that one does not find the other; write extern "C" in '
                        "both or in neither"
                    )


def _with_c_linkage(code: str) -> Iterator[tuple[str, int]]:
    """Yields the functions that a text declares or defines as ``extern "C"``, with their lines."""
    for match in _C_LINKAGE.finditer(code):
        if match[1]:
            inside = _without_bodies(code[match.end() : closing(code, match.end())])
            names = re.findall(r"\b(\w+)\s*\(", inside)
        else:
            names = re.findall(r"\b(\w+)\s*\(", re.split(r"[;{]", code[match.end() :])[0])[:1]
        for name in names:
            yield name, _line(code, match)


def _without_bodies(code: str) -> str:
    kept, depth = [], 0
    for letter in code:
        depth -= letter == "}"
        if depth == 0:
            kept.append(letter)
        depth += letter == "{"
    return "".join(kept)


def hints(pair: Pair) -> list[str]:
    """Returns a line for each thing in a guest that works and will hurt."""
    codes = {path: code_of(path) for path in pair.sources}
    guarded = any(map(_GUARD.search, codes.values()))
    return [hint for path, code in codes.items() for hint in _hints(path, code, guarded)]


def _hints(path: Path, code: str, guarded: bool) -> Iterator[str]:
    def at(match: re.Match[str], text: str) -> str:
        return f"{path.name}:{_line(code, match)}: {text}"

    launches = [*_LAUNCH.finditer(code)]
    for match in launches:
        if len(arguments_in(match[1])) < 4:
            yield at(match, "a launch without a stream runs on the default one: wrong beside other "
                     "streams and lost in CUDA graphs; pass at::cuda::getCurrentCUDAStream() as "
                     "the fourth argument")  # fmt: skip
            break
    if launches and not guarded:
        yield at(
            launches[0],
            "no device guard: tensors of another GPU than the current one are read by the wrong "
            "one; begin with c10::cuda::CUDAGuard guard(x.device())",
        )
    if waits := _SYNCHRONIZES.search(code):
        yield at(waits, f"cuda{waits[1]}Synchronize waits for the GPU at each call, and fails in a "
                 "CUDA graph; leave it out")  # fmt: skip
    if narrow := _INT_SIZE.search(code):
        yield at(narrow, "an int holds no size from 2^31 on; write int64_t")


def _line(code: str, match: re.Match[str]) -> int:
    return line_at(code, match.start())
