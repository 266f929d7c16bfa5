"""The binding of a draft: an entry for each device, and the list of operators."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cuda_ops.build.source_text import macro_of
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.cxx import Item, base_type
from cuda_ops.dev.adopt.facts import Output, Passed
from cuda_ops.dev.adopt.flatten import renamed
from cuda_ops.dev.adopt.guest import Guest
from cuda_ops.dev.adopt.host import Host
from cuda_ops.dev.adopt.kernel_file import WIDTH, comment, launcher_head, prose, wrapped, zeroed
from cuda_ops.dev.adopt.notes import Note
from cuda_ops.dev.adopt.operators import Operator

#: Functions of binding.h that a guest may have too; a call would mean both.
OWN_FUNCTIONS = {"sigmoid", "ceil_div", "name", "empty", "contiguous", "strided", "broadcast"}
#: A type or a constant outside of functions.
_DEFINED = re.compile(r"(?:struct|enum(?:\s+class)?)\s+(\w+)|[^=(]*?(\w+)(?:\[\w*\])?\s*=")
IN_ORDER = """\
// Elementwise kernels walk memory. Where all inputs share one dense layout `out` has it too; else
// it is contiguous, and so is what this returns.
Tensor in_order_of(const Tensor& out, const Tensor& x) {
  return out.is_contiguous() ? contiguous(x, shape_of(out)) : x;
}
"""
PUT_BACK = """\
// Copies what was written to `x`, unless it was written in place.
void put_back(const Tensor& x, const Tensor& to) {
  if (x.get() == to.get()) return;
  if (aoti_torch_copy_(to.get(), x.get(), 0) != TORCH_SUCCESS) {
    throw OpError("torch failed to copy what was written");
  }
}
"""


def binding_text(
    guest: Guest, operators: list[Operator], namespace: str, target: Path, left: list[Note]
) -> str:
    """Returns the text of ``bindings/<op>.cpp``.

    Args:
        guest: whose functions are drafted.
        operators: the main one first.
        namespace: that of the operators.
        target: where the text goes, which own headers are relative to.
        left: what there is no draft of, for the list of operators.
    """
    lists: dict[tuple[str, ...], str] = {}
    loops = [one.hosts["cpu"] for one in operators if "cpu" in one.hosts]
    helpers, headers = _helpers(
        guest, "\n".join(line for host in loops for line in host.lines), target
    )
    names = {item.function.name for item in helpers if item.function is not None}
    others = {name: f"guest_{name}" for name in names & OWN_FUNCTIONS}
    for host in loops:
        host.lines = [renamed(guest.unqualified(line), others) for line in host.lines]
    entries: list[str] = []
    for one in operators:
        for device in ("cpu", "cuda"):
            if device in one.hosts:
                entries += [*_entry(one, one.hosts[device]), ""]
    declared = [_declared(one, lists) for one in operators]
    text = "\n".join(entries)
    lines = prose(f"{operators[0].name} for PyTorch, from {guest.files}.")
    system = list(guest.system_includes) if any(host.lines for host in loops) else []
    if "std::memset(" in text:
        system.append("#include <cstring>")
    if re.search(r"std::(?:exp|sqrt|tanh|pow|abs|fabs|log|sin|cos|erf|floor|ceil)\b", text):
        system.append("#include <cmath>")
    if re.search(r"std::(?:min|max)\b", text):
        system.append("#include <algorithm>")
    spaces = [f"using namespace {space};" for space in guest.spaces_in_headers()] if headers else []
    lines += [*sorted(set(system)), *([""] if system else []), '#include "binding.h"', *headers, "",
              "using namespace cuda_ops;", *spaces, ""]  # fmt: skip
    for one in operators:
        if "cuda" in one.hosts:
            lines += launcher_head(one, ";")
    lines += [*([""] if lines[-1] else []), "namespace {", ""]
    for dtypes, name in lists.items():
        listed = [f"DType::{one}" for one in dtypes]
        lines += [*wrapped(f"constexpr DType {name}[] = {{", listed, "};"), ""]
    lines += [IN_ORDER] if "in_order_of(" in text else []
    lines += [PUT_BACK] if "put_back(" in text else []
    texts_kept = [renamed(guest.unqualified(_on_host(item)), others) for item in helpers]
    kept = "\n".join((*texts_kept, text.rstrip("\n")))
    lines += [guest.unqualified(kept), "", "}  // namespace", ""]
    lines += [f"{macro_of(namespace)} {{", *comment(left, "  ")]
    for texts in declared:
        lines += texts
    return "\n".join((*lines, "}")) + "\n"


def _helpers(guest: Guest, loops: str, target: Path) -> tuple[list[Item], list[str]]:
    """Returns what loops use of the guest's own functions and constants, and its headers that have
    some of it.
    """
    wanted = set(re.findall(r"\b[A-Za-z_]\w*\b", loops))
    found: list[Item] = []
    headers: list[str] = []
    grown = bool(loops)
    while grown:
        grown = False
        for item in guest.items:
            if _name_of(item) not in wanted or item in found:
                continue
            if item.source in guest.included:
                path = os.path.relpath(item.source.path.resolve(), target.parent)
                header = f'#include "{Path(path).as_posix()}"'
                headers += [header] if header not in headers else []
            else:
                found.append(item)
                wanted |= set(re.findall(r"\b[A-Za-z_]\w*\b", item.code))
                grown = True
    found.sort(key=lambda item: (guest.sources.index(item.source), item.start))
    return found, headers


def _on_host(item: Item) -> str:
    """Returns the text of a function or constant without CUDA's words."""
    text = item.source.text[item.start : item.end]
    text = text.replace("__forceinline__", "inline")
    return re.sub(r"__(?:host|device|constant)__\s*", "", text) + "\n"


def _name_of(item: Item) -> str:
    if item.function is not None:
        function = item.function
        return "" if function.is_kernel or function.has_tensors else function.name
    match = (
        re.match(r"#\s*define\s+(\w+)", item.code)
        if item.kind == "directive"
        else _DEFINED.match(item.code)
    )
    return next(filter(None, match.groups()), "") if match else ""


# --- the entry of one device ---------------------------------------------------------


def _entry(one: Operator, host: Host) -> list[str]:
    parameters = host.function.parameters
    if host.formula:
        return _formula(one, host)
    elementwise = one.signature.startswith("(") and host.elementwise()
    renames: dict[str, str] = {}
    taken = {p.name for p in parameters} | set(host.outputs) | set(host.sizes) | set(host.holes)
    copied = [t for t in host.tensors.values() if t.pointed]
    written = [t.name for t in copied if t.written]
    for tensor in copied:
        renames[tensor.name] = (
            f"{tensor.name}_" if f"{tensor.name}_" not in taken else f"{tensor.name}_given"
        )
    numbers = []
    given = []
    for parameter in parameters:
        native = words.schema_type(parameter.type)[1]
        name = renames.get(parameter.name, parameter.name)
        base = base_type(parameter.type)
        if host.device == "cpu" and parameter.name in host.scalars and base != native and base in (
            "float", "int", "int32_t"):  # fmt: skip
            name = f"{parameter.name}_"
            numbers.append(f"  const auto {parameter.name} = static_cast<{base}>({name});")
        given.append(f"{native} {name}")
    returned = one.returned
    kind = {0: "void", 1: "Tensor"}.get(
        len(returned), f"std::tuple<{', '.join(['Tensor'] * len(returned))}>"
    )
    lines = [
        *comment([*(host.notes if host.device == "cpu" else ()), *hole_notes(host)]),
        *wrapped(f"{kind} {one.stem}_{host.device}(", given, ") {"), *numbers,
    ]  # fmt: skip
    outputs, sizes, holes = _outputs(host)
    if elementwise:
        arguments = [renames.get(name, name) for name in host.tensors]
        into = next(iter(host.outputs), next(iter(written), ""))
        lines += [
            f"  Tensor {name} = empty_elementwise({', '.join(arguments)});" for name in host.outputs
        ]
        ordered = [t.name for t in copied if t.name != into]
        if into in written:
            lines.append(f"  const Tensor {into} = contiguous({renames[into]});")
        lines += [
            f"  const Tensor {name} = in_order_of({into}, {renames[name]});" for name in ordered
        ]
        lines += [f"  {check}" for check in host.checks]
    else:
        for tensor in copied:
            name = renames[tensor.name]
            if tensor.optional:
                lines += [
                    f"  const std::optional<Tensor> {tensor.name} =",
                    f"      {name} ? std::optional<Tensor>(contiguous(*{name})) : std::nullopt;",
                ]
            else:
                lines.append(f"  const Tensor {tensor.name} = contiguous({name});")
        lines += [f"  {check}" for check in host.checks]
        lines += holes
        lines += sizes
        lines += outputs
    back = _returned(returned)
    made = [*host.outputs] or written
    empty = " && ".join(f"{name}.numel() == 0" for name in made)
    if host.device == "cuda":
        if empty:
            lines.append(f"  if ({empty}) return{f' {back}' if back else ''};")
        lines += _launched(one, host)
    else:
        lines += _loops(host)
    lines += [f"  put_back({name}, {renames[name]});" for name in written]
    return [*lines, *([f"  return {back};"] if back else []), "}"]


def _formula(one: Operator, host: Host) -> list[str]:
    native = [(words.schema_type(p.type)[1], p.name) for p in host.function.parameters]
    values = [*host.tensors, *host.scalars]
    body = wrapped("  const auto f = [](", [f"double {name}" for name in values], ") {")
    steps = [*(f"    {step}" for step in host.formula), "  };"]
    one_line = f"{body[0]} {steps[0].strip()} }};"
    if len(body) == 1 and len(steps) == 2 and len(one_line) <= WIDTH:
        body, steps = [one_line], []
    return [
        *comment(host.notes),
        *wrapped(f"Tensor {one.stem}_cpu(", [f"{kind} {name}" for kind, name in native], ") {"),
        *body, *steps,
        *wrapped("  return elementwise_cpu(f, ", values, ");"), "}",
    ]  # fmt: skip


def hole_notes(host: Host) -> list[Note]:
    return [
        Note(one.place, f"{' '.join(one.text.split()).rstrip(';')}: write it with "
             "call<Tensor>(...) of compose.h, or in a kernel, and take the throw away")
        for one in host.holes.values()
    ]  # fmt: skip


def _outputs(host: Host) -> tuple[list[str], list[str], list[str]]:
    """Returns the lines that allocate, those of the sizes that they need, and those that stand for
    tensors which the author has to make.
    """
    sizes: dict[str, str] = {}
    lines: list[str] = []
    first = next(iter(host.tensors), "")
    for output in host.outputs.values():
        like = output.dtype_of or output.like or first
        shape = f"shape_of({output.like})" if output.like else _shape(host, output, sizes)
        dtype = f"DType::{output.dtype}, " if output.dtype else ""
        lines.append(f"  Tensor {output.name} = empty({shape}, {dtype}{like});")
    holes = [f"  Tensor {name};" for name in host.holes]
    if holes:
        place = next(iter(host.holes.values())).place
        holes.append(f'  throw OpError("{place}: what this line makes is left to write");')
    return lines, [f"  const int64_t {name} = {value};" for name, value in sizes.items()], holes


def _shape(host: Host, output: Output, sizes: dict[str, str]) -> str:
    for entry in output.shape:
        _need(host, entry, sizes)
    return f"{{{', '.join(output.shape)}}}"


def _need(host: Host, text: str, sizes: dict[str, str]) -> None:
    for name in re.findall(r"(?<![\w.])[A-Za-z_]\w*", text):
        if name in sizes:
            continue
        if name in host.sizes:
            sizes[name] = host.sizes[name].text
        elif name in host.derived:
            _need(host, host.derived[name], sizes)
            sizes[name] = host.derived[name]


def _returned(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{{{', '.join(names)}}}" if names else ""


def _launched(one: Operator, host: Host) -> list[str]:
    _, sizes, _ = _outputs(host)
    declared = {line.split()[2] for line in sizes}
    on = next((name for name in host.tensors if not host.tensors[name].optional), "")
    values = []
    for passed in host.passed.values():
        if "*" in passed.type:
            values.append(_pointer(host, passed))
        elif passed.name in declared:
            values.append(passed.name)
        else:
            values.append(passed.value)
    values += map(bytes_of, zeroed(one))
    call = wrapped(f"    return {one.stem}_launch(", [*values, "stream"], ");")
    return [f"  launch({on}, [&](cudaStream_t stream) {{", *call, "  });"]


def bytes_of(name: str) -> str:
    """Returns C++ for the bytes of a tensor."""
    return f"{name}.numel() * size_of(dtype_of({name}))"


def _pointer(host: Host, passed: Passed) -> str:
    name = passed.name
    is_optional = name in host.tensors and host.tensors[name].optional
    how = "mutable" if host.is_written(name) else "const"
    value = f"{name}{'->' if is_optional else '.'}{how}_data_ptr()"
    if not passed.type.endswith("void*"):
        value = f"static_cast<{passed.type}>({value})"
    return f"{name} ? {value} : nullptr" if is_optional else value


def _loops(host: Host) -> list[str]:
    lines = [
        f"  std::memset({name}.mutable_data_ptr(), 0, {bytes_of(name)});"
        for name, output in host.outputs.items()
        if output.zeros
    ]
    _, sizes, _ = _outputs(host)
    declared = {line.split()[2] for line in sizes}
    code = "\n".join(host.lines)
    for name, size in host.sizes.items():
        if name not in declared and re.search(rf"(?<![\w.]){name}\b", code):
            lines.append(f"  const int64_t {name} = {size.text};")
    lines += [f"  {line}" for line in host.pointers.values()]
    skipped = {f"{name} = {host.derived[name]}" for name in declared & host.derived.keys()}
    return [
        *lines,
        *(f"  {line}".rstrip() for line in host.lines if not any(one in line for one in skipped)),
    ]


# --- the list of operators -----------------------------------------------------------


def _declared(one: Operator, lists: dict[tuple[str, ...], str]) -> list[str]:
    schema = str(one).replace('"', '\\"')
    lines = comment(one.notes, "  ")
    if one.export.name not in one.name:
        lines.append(f"  // {one.export.name}() of the guest.")
    if len(schema) + len(one.signature) + 24 <= 100:
        lines.append(f'  library.op("{schema}", "{one.signature}")')
    else:
        lines += ["  library", "      .op("]
        head, rest = "", schema
        pieces = []
        while len(rest) > 84:
            cut = rest.rfind(" ", 0, 84) + 1
            head, rest = rest[:cut], rest[cut:]
            pieces.append(f'"{head}"')
        pieces.append(f'"{rest}",')
        lines[-1] += pieces[0]
        lines += [f"          {piece}" for piece in (*pieces[1:], f'"{one.signature}")')]
    lines += [f"      {line}" for line in _dtypes(one, lists)]
    if one.export.doc:
        doc = one.export.doc.replace("\\n", " ")
        lines.append(f'      .doc(R"({doc})")')
    lines += [
        f"      .{device}<{one.stem}_{device}>()"
        for device in ("cpu", "cuda")
        if device in one.hosts
    ]
    lines[-1] += ";"
    return lines


def _dtypes(one: Operator, lists: dict[tuple[str, ...], str]) -> list[str]:
    """Returns what is declared of dtypes: a list for all, lists of single ones, and results."""
    host = one.host
    if host.formula:
        return [".dtypes(kFloating)"]
    own: dict[str, tuple[str, ...]] = {}
    for other in one.hosts.values():
        for position, name in enumerate(other.tensors):
            tensor = other.tensors[name]
            shown = one.shown(list(host.tensors)[position])
            if tensor.dispatched and other.dtypes:
                own.setdefault(shown, other.dtypes)
            elif tensor.elements:
                own.setdefault(shown, tuple(sorted(tensor.elements)))
    tensors = [one.shown(name) for name in host.tensors]
    shared = next((other.dtypes for other in one.hosts.values() if other.dtypes), ())
    if not shared and len(set(own.values())) == 1 and len(own) == len(tensors):
        shared = next(iter(own.values()))
    lines = []
    if len(shared) == 1 and len(tensors) == 1:
        lines.append(f'.dtypes("{tensors[0]}", DType::{shared[0]})')
    elif shared:
        name = lists.setdefault(shared, "kTypes" if not lists else f"kTypes{len(lists) + 1}")
        lines.append(f".dtypes({name})")
    for argument, dtypes in own.items():
        if dtypes == shared:
            continue
        if len(dtypes) == 1:
            lines.append(f'.dtypes("{argument}", DType::{dtypes[0]})')
        else:
            name = lists.setdefault(dtypes, f"kTypes{len(lists) + 1}" if lists else "kTypes")
            lines.append(f'.dtypes("{argument}", {name})')
    return lines + _results(one, host, shared, own, tensors)


def _results(
    one: Operator, host: Host, shared: tuple[str, ...], own: dict[str, tuple[str, ...]],
    tensors: list[str],
) -> list[str]:  # fmt: skip
    lines = []
    first = tensors[0] if tensors else ""
    for name, cpp in zip(one.returns, one.returned, strict=False):
        output = host.outputs.get(cpp)
        if output is None:
            continue
        shown = name or "out"
        if output.dtype and own.get(first, shared) != (output.dtype,):
            lines.append(f'.returns("{shown}", DType::{output.dtype})')
        elif output.dtype_of in host.tensors:
            of = one.shown(output.dtype_of)
            if own.get(of, shared) != own.get(first, shared):
                lines.append(f'.returns("{shown}", "{of}")')
    return lines
