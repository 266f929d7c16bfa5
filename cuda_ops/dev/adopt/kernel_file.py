"""The kernel's file of a draft: the guest's kernels as they are, and launchers."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from cuda_ops.build.source_text import arguments_in, masked, text_of
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.cxx import LAUNCH, Item, Source
from cuda_ops.dev.adopt.guest import OF_TORCH, Guest
from cuda_ops.dev.adopt.notes import Note, Place
from cuda_ops.dev.adopt.operators import Operator

WIDTH = 100
RULER = "// " + "-" * 77
_INCLUDED = re.compile(r'#\s*include\s*(?:"([^"\n]+)"|<([^>\n]+)>)')
_REGISTERS = re.compile(r"PYBIND11_MODULE|TORCH_LIBRARY")
_ACCESSOR = re.compile(
    r"\b(?:(?:torch|at)::)?(?:Generic)?PackedTensorAccessor(?P<bits>32|64)?\s*"
    r"<\s*(?P<item>[\w ]+?)\s*,\s*(?P<rank>\w+)\s*(?:,[^<>]*)?>"
)
ACCESSOR = """\
// Elements by their indices, x[i][j], and sizes, as torch's packed accessors have them; of a
// contiguous tensor. It may write, as theirs may: a kernel that only reads does not.
template <class T, int kRank, class Index>
struct Accessor {
  T* data;
  Index sizes[kRank], strides[kRank];

  Accessor(const void* data_, std::initializer_list<int64_t> sizes_)
      : data(static_cast<T*>(const_cast<void*>(data_))) {
    int64_t step = 1;
    for (int d = kRank - 1; d >= 0; --d) {
      sizes[d] = static_cast<Index>(sizes_.begin()[d]);
      strides[d] = static_cast<Index>(step);
      step *= sizes_.begin()[d];
    }
  }

  __device__ Index size(int d) const { return sizes[d]; }
  __device__ Index stride(int d) const { return strides[d]; }
  __device__ decltype(auto) operator[](Index i) const {
    return Row<kRank>{data, sizes, strides}[i];
  }

 private:
  template <int kDims, class = void> struct Row {
    T* data;
    const Index *sizes, *strides;
    __device__ auto operator[](Index i) const {
      return Row<kDims - 1>{data + i * strides[0], sizes + 1, strides + 1};
    }
  };
  template <class Unused> struct Row<1, Unused> {
    T* data;
    const Index *sizes, *strides;
    __device__ T& operator[](Index i) const { return data[i * strides[0]]; }
  };
};
"""


def comment(notes: Iterable[Note], indent: str = "") -> list[str]:
    """Returns a ``TODO(adopt)`` for each note, wrapped."""
    lines = []
    for note in notes:
        line = f"{indent}// TODO(adopt):"
        for word in str(note).split():
            if len(line) + 1 + len(word) > WIDTH:
                lines.append(line)
                line = f"{indent}//  "
            line += f" {word}"
        lines.append(line)
    return lines


def prose(text: str) -> list[str]:
    """Returns a text as lines of a comment."""
    return textwrap.wrap(text, WIDTH, initial_indent="// ", subsequent_indent="// ")


def wrapped(head: str, parts: list[str], tail: str) -> list[str]:
    """Returns ``head`` with ``parts`` and ``tail`` in lines of at most 100 letters."""
    one = f"{head}{', '.join(parts)}{tail}"
    if len(one) <= WIDTH:
        return [one]
    margin = len(head) if len(head) + max(map(len, parts), default=0) + len(tail) <= WIDTH else 0
    if margin == 0:
        margin = len(head) - len(head.lstrip()) + 4
        lines, line = [head], " " * margin
    else:
        lines, line = [], head
    fresh = True
    for number, part in enumerate(parts):
        text = part + ("," if number < len(parts) - 1 else tail)
        if not fresh and len(line) + 1 + len(text) > WIDTH:
            lines.append(line)
            line, fresh = " " * margin, True
        line += text if fresh else f" {text}"
        fresh = False
    return [*lines, line]


def launcher_head(one: Operator, end: str) -> list[str]:
    """Returns the launcher's declaration, or how its definition begins."""
    given = [f"{p.type} {p.name}" for p in one.hosts["cuda"].passed.values()]
    given += zeroed_parameters(one)
    return wrapped(f"cudaError_t {one.stem}_launch(", [*given, "cudaStream_t stream"], f"){end}")


def zeroed(one: Operator) -> list[str]:
    """Returns the outputs that begin as zeros."""
    return [name for name, out in one.hosts["cuda"].outputs.items() if out.zeros]


def zeroed_parameters(one: Operator) -> list[str]:
    return [f"int64_t {name}_bytes" for name in zeroed(one)]


def kernel_text(guest: Guest, operators: list[Operator], target: Path, notes: list[Note]) -> str:
    """Returns the text of ``kernels/<op>.cu``; adds to ``notes`` what the kernels leave open."""
    launched = [one for one in operators if "cuda" in one.hosts]
    launchers: list[str] = []
    for one in launched:
        launchers += _launcher(one)
    kept, includes = _kept(guest, "\n".join(launchers), target, notes)
    body = "\n".join(kept)
    body = guest.unqualified(body)
    launchers = [guest.unqualified(line) for line in launchers]
    text = body + "\n".join(launchers)
    if "Accessor<" in text:
        body = ACCESSOR + "\n" + body
        includes.append("#include <initializer_list>")
    for word, header in (("__half", "<cuda_fp16.h>"), ("__nv_bfloat16", "<cuda_bf16.h>")):
        if re.search(rf"\b{word}\b", text) and f"#include {header}" not in includes:
            includes.append(f"#include {header}")
    includes.append("#include <cstdint>")
    own = []
    if (
        any("dtype" in one.hosts["cuda"].passed for one in launched)
        or "cuda_ops::compute_t" in text
    ):
        own.append('#include "dtype.cuh"')
    if "cuda_ops::ceil_div" in text:
        own.append('#include "division.h"')
    own += [one for one in includes if '"' in one]
    system = sorted({one for one in includes if '"' not in one})
    code = "\n".join(launchers)
    words_used = [word for word in ("DType", "visit") if re.search(rf"(?<!:)\b{word}[<:]", code)]
    using = [f"using cuda_ops::{word};" for word in words_used]
    using += [f"using namespace {space};" for space in guest.spaces_in_headers()]
    head = f"Kernels of {guest.files}, as they are, and launchers for the binding."
    parts = [
        *prose(head), *system, *([""] if system and own else []), *dict.fromkeys(own), "",
        *using, *([""] if using else []), "namespace {", "", body.strip("\n"), "",
        "}  // namespace", "", RULER, "", *launchers,
    ]  # fmt: skip
    return "\n".join(parts).rstrip() + "\n"


def _launcher(one: Operator) -> list[str]:
    host = one.hosts["cuda"]
    lines = [*comment(host.notes), *launcher_head(one, " {")]
    for name in zeroed(one):
        zero = f"cudaMemsetAsync({name}, 0, {name}_bytes, stream)"
        lines.append(f"  const cudaError_t zeroed_{name} = {zero};")
        lines.append(f"  if (zeroed_{name} != cudaSuccess) return zeroed_{name};")
    if any("const_cast<" in line for line in host.lines):
        lines.append("  // const_cast: the kernel reads through a pointer that could write.")
    for line in host.lines:
        text = f"  {line}" if line else ""
        listed = re.match(r"(.*\bvisit<)(.*)(>\(dtype, \[&\]\(auto tag\) \{)$", text)
        if len(text) > WIDTH and listed:
            lines += wrapped(listed[1], arguments_in(listed[2]), listed[3])
            continue
        call = re.match(r"(\s*[\w:]+(?:<[^;{}()]*?>)?(?:<<<.*?>>>)?\()(.*)(\);?)$", text)
        if len(text) > WIDTH and call:
            lines += wrapped(call[1], arguments_in(call[2]), call[3])
        else:
            lines.append(text)
    return [*lines, "}", ""]


def _kept(
    guest: Guest, launchers: str, target: Path, notes: list[Note]
) -> tuple[list[str], list[str]]:
    """Returns the guest's device code with its comments, and the includes that it needs."""
    includes: list[str] = []
    of_torch: list[str] = []
    pieces: list[tuple[Item, str]] = []
    for source in guest.sources:
        if source.path.suffix != ".cu":
            continue
        last = 0
        for item in _items_of(guest, source):
            gap = source.text[last : item.start]
            last = item.end
            if found := _INCLUDED.match(item.code):
                name = found[1] or found[2]
                if name in guest.headers:
                    path = Path(os.path.relpath(guest.headers[name], target.parent)).as_posix()
                    includes.append(f'#include "{path}"')
                    if _includes_torch(guest.headers[name]):
                        place = Place(source.path, source.line(item.start))
                        text = f"{name} includes torch's headers, which a kernel does not need"
                        notes.append(Note(place, text))
                elif OF_TORCH.match(name):
                    of_torch.append(item.code.strip())
                else:
                    includes.append(" ".join(item.code.split()))
            elif item.kind not in ("open", "close") and _is_kept(item):
                pieces.append(
                    (item, _with_comment(gap) + _native(source.text[item.start : item.end]))
                )
    # Host functions that nothing here calls stay behind.
    texts = [text for item, text in pieces if not _is_host(item)]
    waiting = [(item, text) for item, text in pieces if _is_host(item)]
    grown = True
    while grown:
        grown = False
        for item, text in list(waiting):
            assert item.function is not None
            if re.search(rf"\b{item.function.name}\b", "\n".join((launchers, *texts))):
                waiting.remove((item, text))
                texts.append(text)
                grown = True
    left = {id(item) for item, _ in waiting}
    kept = []
    for item, text in pieces:
        if id(item) in left or f"{text}\n" in kept:  # or in several files alike
            continue
        function = item.function
        if function is not None and not function.is_kernel and function.launches:
            text = _with_stream(text)
        kept.append(text + "\n")
        mask = masked(text)
        if found := words.TORCH.search(mask):
            place = Place(item.source.path, item.source.line(item.start))
            text = f"torch's headers stay for {found[0]}: use plain C++ or headers of cuda_ops"
            notes.append(Note(place, text))
            includes += of_torch
    return kept, list(dict.fromkeys(includes))


def _includes_torch(header: Path) -> bool:
    return any(
        OF_TORCH.match(one) for one in re.findall(r'#\s*include\s*["<]([^">]+)', text_of(header))
    )


def _items_of(guest: Guest, source: Source) -> list[Item]:
    return [item for item in guest.items if item.source is source]


def _is_host(item: Item) -> bool:
    function = item.function
    return function is not None and not function.is_kernel and not function.is_device


def _is_kept(item: Item) -> bool:
    code = item.code
    if item.kind == "directive":
        is_check = re.match(r"#\s*define", code) and re.search(r"CHECK|ASSERT", code)
        is_include = re.match(r"#\s*(?:pragma\s+once|include)", code)
        return not (is_check or is_include or words.TORCH.search(code))
    function = item.function
    if function is None:
        on_device = re.search(r"__(?:device|global|constant)__", code)
        is_prototype = item.kind == "statement" and re.search(r"\)\s*;$", code) and "=" not in code
        is_loose = re.match(r"\s*(?:using\s+namespace|namespace)\b", code)
        is_of_torch = words.TORCH.search(_native(code))
        return not (is_loose or is_of_torch or (is_prototype and not on_device))
    if function.is_kernel or function.is_device:
        return True
    if _REGISTERS.match(function.name) or function.has_tensors:
        return False
    if function.launches:
        return function.is_template
    return not words.TORCH.search(_native(code))


def _with_comment(gap: str) -> str:
    """Returns the comment that stands right above something, and nothing else of what is there."""
    block = gap.rpartition("\n\n")[2].strip()
    return f"{block}\n" if block else ""


def _native(text: str) -> str:
    def accessor(found: re.Match[str]) -> str:
        index = "int32_t" if found["bits"] == "32" else "int64_t"
        return f"Accessor<{found['item']}, {found['rank']}, {index}>"

    return words.native(_ACCESSOR.sub(accessor, text))


def _with_stream(text: str) -> str:
    """Hands the stream to a function that launches."""
    mask = masked(text)
    parts, last = [], 0
    for found in LAUNCH.finditer(mask):
        config = text[found.start("config") : found.end("config")]
        given = [*arguments_in(config), "0"][:3]
        parts += [text[last : found.start("config")], ", ".join((*given, "stream"))]
        last = found.end("config")
    text = "".join((*parts, text[last:]))
    text = re.sub(
        r"^\s*(?:C10_CUDA_KERNEL_LAUNCH_CHECK|C10_CUDA_CHECK|AT_CUDA_CHECK)\(.*?\);\n",
        "",
        text,
        flags=re.MULTILINE,
    )
    body = masked(text).index("{")
    end = masked(text).rindex(")", 0, body)
    inside = text[:end].rstrip()
    return f"{inside}{'' if inside.endswith('(') else ', '}cudaStream_t stream{text[end:]}"
