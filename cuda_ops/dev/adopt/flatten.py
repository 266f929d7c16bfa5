"""A function of a guest as the statements that run on one device, calls of its own helpers
included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cuda_ops.build.source_text import arguments_in, closing, masked
from cuda_ops.dev.adopt.cxx import Function, Statement, split
from cuda_ops.dev.adopt.guest import Guest
from cuda_ops.dev.adopt.notes import UnknownError

_DEVICE = re.compile(
    r"(?P<not>!?)\s*[\w.>()-]*?\b(?:is_(?P<is>cuda|cpu)\(\)"
    r"|device\(\)(?:\.type\(\))?\s*(?P<op>[!=]=)\s*[\w:]*?k?(?P<type>CUDA|CPU))"
)
_DECLARED = re.compile(
    r"(?:const\s+|constexpr\s+|static\s+)*[A-Za-z_][\w:<>, ]*?[\s&*]+(?:__restrict__\s+)?"
    r"(\w+)\s*(?:=|\(|\{|;)"
)
#: What may stand inside of a function: whether there is CUDA, and hints to the compiler.
_DIRECTIVE = re.compile(r"#\s*(?:else|endif|pragma|(?:if|ifdef)\b.*\b(?:WITH|USE)_CUDA\b)")
_NO_TYPE = re.compile(r"(?:return|throw|delete|goto|else)\b")
_CALL = re.compile(
    r"(?P<before>return\s+|(?:const\s+)?(?:auto|[\w:]*Tensor)\s*&?\s*(?P<name>\w+)\s*=\s*|)"
    r"(?P<called>[A-Za-z_][\w:]*)\s*\((?P<given>.*)\)\s*;",
    re.DOTALL,
)


def device_in(condition: str) -> str:
    """Returns the device that a condition asks for; empty where it asks something else."""
    found = _DEVICE.fullmatch(condition.strip())
    if found is None:
        return ""
    device = (found["is"] or found["type"]).lower()
    if bool(found["not"]) != (found["op"] == "!="):
        device = "cpu" if device == "cuda" else "cuda"
    return device


def declared_in(statement: str) -> str:
    """Returns the name that a statement declares; empty where it declares none."""
    text = statement.strip()
    found = _DECLARED.match(text)
    return found[1] if found and not _NO_TYPE.match(text) else ""


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Replaces words by others, all at once, but for members and what stands in quotes."""
    if not names:
        return text
    # Not behind a dot, a colon or an arrow; the last letter of a template is no arrow.
    words = re.compile(rf"(?<![\w.:])(?<!->)(?:{'|'.join(map(re.escape, names))})\b")
    mask, parts, last = masked(text), [], 0
    for found in words.finditer(mask):
        parts += [text[last : found.start()], names[found[0]]]
        last = found.end()
    return "".join((*parts, text[last:]))


def flattened(guest: Guest, function: Function, device: str, depth: int = 0) -> list[Statement]:
    """Returns what a function does for tensors of one device: macros of checks replaced, the
    branches of other devices left out, and calls of functions with tensors or launches by what
    these do.
    """
    done: list[Statement] = []
    for statement in _on_device(guest, function.statements, device):
        inlined = _inlined(guest, statement, device, done, depth, function)
        done += inlined if inlined is not None else [statement]
        if done and re.match(r"return\b|throw\b", done[-1].text.strip()):
            break
    return done


def _on_device(
    guest: Guest, given: tuple[Statement, ...] | list[Statement], device: str
) -> Iterator[Statement]:
    left_out = 0  # of an #else, until its #endif
    for one in given:
        text = one.text.strip()
        if text.startswith("#"):
            if not _DIRECTIVE.match(text):
                raise UnknownError(one.place, f"{text} inside of a function: choose one way")
            if re.match(r"#\s*(else|elif)", text):
                left_out = 1
            elif re.match(r"#\s*endif", text):
                left_out = 0
            continue
        if left_out:
            continue
        for statement in guest.expanded(one):
            yield from _branch(guest, statement, device)


def _branch(guest: Guest, statement: Statement, device: str) -> Iterator[Statement]:
    text, mask = statement.text, masked(statement.text)
    if start := re.match(r"if\s*\(", mask):
        end = closing(mask, start.end())
        if asked := device_in(text[start.end() : end]):
            parts = split(text[end + 1 :], statement.place)
            # `else` is a statement of its own to what follows the condition.
            ways = parts[:1], [_without_else(one) for one in parts[1:2]]
            for chosen in ways[0 if asked == device else 1]:
                yield from _on_device(guest, _unblocked(chosen), device)
            return
    if choice := re.match(
        r"(?:return\s+|[^?;]*?[^=!<>]=\s*)(?P<asked>[^?=]*?(?:[!=]=[^?]*)?)\?", mask
    ):
        if asked := device_in(text[choice.start("asked") : choice.end("asked")]):
            colon = choice.end() + mask[choice.end() :].replace("::", "  ").find(":")
            way = (
                text[choice.end() : colon]
                if asked == device
                else text[colon + 1 :].rstrip().removesuffix(";")
            )
            text = f"{text[: choice.start('asked')]}{way.strip()};"
    yield Statement(text, statement.place)


def _without_else(statement: Statement) -> Statement:
    return Statement(re.sub(r"^\s*else\b\s*", "", statement.text), statement.place)


def _unblocked(statement: Statement) -> list[Statement]:
    text = statement.text.strip()
    return split(text[1:-1], statement.place) if text.startswith("{") else [statement]


def _inlined(
    guest: Guest, statement: Statement, device: str, before: list[Statement], depth: int,
    caller: Function,
) -> list[Statement] | None:  # fmt: skip
    """Returns what a call does that is a statement; ``None`` where it stays as it is."""
    call = _CALL.fullmatch(statement.text.strip())
    if call is None or depth > 4:
        return None
    text = statement.text.strip()
    if closing(masked(text), call.start("given")) != call.end("given"):  # f(x) / g(y)
        return None
    given = arguments_in(call["given"])
    callee = guest.function(call["called"], len(given))
    if callee is None or len(callee.parameters) != len(given) or callee.is_template:
        return None
    if not (callee.has_tensors or callee.launches):
        return None
    body = flattened(guest, callee, device, depth + 1)
    taken = {declared_in(one.text) for one in before} | {one.name for one in caller.parameters}
    names, declared = {}, []
    for parameter, value in zip(callee.parameters, given, strict=True):
        value = re.sub(r"\.contiguous\(\)$", "", value)
        assigned = re.search(
            rf"\b{parameter.name}\s*(?:[-+*/]?=(?!=)|\+\+|--)", " ".join(one.text for one in body)
        )
        is_name = re.fullmatch(r"\w+", value) and not assigned
        if is_name or "*" in parameter.type or re.fullmatch(r"\w+\.data_ptr<.*", value):
            names[parameter.name] = value
        elif value == parameter.name:
            continue
        else:
            kind = re.sub(r"&", "", parameter.type).strip()
            name = parameter.name if parameter.name not in taken else f"{parameter.name}_in"
            names[parameter.name] = name
            declared.append(Statement(f"{kind} {name} = {value};", statement.place))
    for one in body:
        local = declared_in(one.text)
        if local in taken and local and local not in names:
            names[local] = f"{local}_{callee.name}"
    body = [Statement(renamed(one.text, names), one.place) for one in body]
    if call["before"].startswith("return"):
        return [*declared, *body]
    if call["name"]:
        if not body or not body[-1].text.startswith("return"):
            return None
        value = body[-1].text.removeprefix("return").strip().removesuffix(";")
        kept = body[:-1]
        if re.fullmatch(r"\w+", value) and value in {declared_in(one.text) for one in kept}:
            kept = [Statement(renamed(one.text, {value: call["name"]}), one.place) for one in kept]
        else:
            kept.append(Statement(f"auto {call['name']} = {value};", body[-1].place))
        return [*declared, *kept]
    body = body[:-1] if body and body[-1].text.startswith("return") else body
    return [*declared, *body]
