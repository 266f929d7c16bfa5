"""What follows from the facts about plugins and operators."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator

from cuda_ops.build.elf import TORCH_CPP, runs_on
from cuda_ops.build.toolchain import arch_of_capability
from cuda_ops.doctor.facts import Facts, Operator
from cuda_ops.doctor.finding import Finding

_TORCH = re.compile(r"torch(\d+)_(\d+)_(\d+)_?(\w*?)_py(\d)(\d+)")


def of_plugins(facts: Facts) -> Iterator[Finding]:
    """Yields the plugins that could not be used."""
    for plugin in facts.plugins:
        if plugin.problem:
            package = plugin.package
            command = (
                f"pip uninstall {package}, or install another version; edit it if it is yours"
                if package
                else "edit the plugin's file"
            )
            yield Finding(
                "plugin-failed", "broken", f"plugin {plugin.name!r} ({plugin.value}) failed",
                plugin.problem, command, (plugin.name,),
            )  # fmt: skip


def of_names(facts: Facts) -> Iterator[Finding]:
    """Yields files that form no operator, and operators that their name does not lead to."""
    for one in facts.unusable:
        what, _, command = one.problem.partition("; ")
        fault = "operator-hidden" if one.hidden else "no-operator"
        yield Finding(fault, "broken", what, "it cannot be used", command, (one.name,))
    for op in facts.operators:
        if op.hidden:
            yield Finding(
                "operator-hidden", "broken", f"{op.key} is hidden by {op.hidden}",
                "its name leads there, not to the operator", "rename one of them", (op.key,),
            )  # fmt: skip
    for text in facts.left_aside:
        why = "an added root comes before an installed package"
        yield Finding("left-aside", "note", text, why, about=(text.partition(":")[0],))


def of_libraries(facts: Facts) -> Iterator[Finding]:
    """Yields what is wrong with libraries; one finding for all that share a fault."""
    ops = facts.operators
    yield from _damaged(ops)
    yield from _of_another_torch(facts)
    for op in ops:
        if not op.library and op.problem:
            yield Finding(
                "not-built", "broken", f"{op.key} is not built", op.problem, _build([op]), (op.key,)
            )
        elif op.loads in ("crashes", "hangs"):
            yield Finding(
                f"library-{op.loads}", "broken", f"{op.key}: {op.problem}", op.library,
                _build([op]), (op.key,),
            )  # fmt: skip
        elif op.problem and not _links_another_torch(op):
            yield Finding(
                "library-does-not-load", "broken", f"{op.key} cannot be used", op.problem,
                _build([op]), (op.key,),
            )  # fmt: skip
    yield from _shared(
        "not-built", ops, "not built", "a call raises",
        lambda op: not (op.library or op.problem or op.ignored or op.other_torches),
    )  # fmt: skip
    yield from _shared(
        "source-differs", ops, "made from another text than the present one",
        "what is installed or was built runs, not what the files say",
        lambda op: op.is_current is False, warn=True,
    )  # fmt: skip
    yield from _of_gpus(facts)
    for name, why in (
        ("later_symbols", f"need functions that torch {facts.oldest_torch} does not have"),
        ("cpp_symbols", "need torch's C++ ABI, which differs from release to release"),
    ):
        needing = [op for op in ops if getattr(op, name)]
        if needing:
            needed = sorted({symbol for op in needing for symbol in getattr(op, name)})
            yield Finding(
                name.replace("_", "-"), "warning", f"libraries {why}: {', '.join(needed)}",
                "they load in this torch, and not in each that they must load in",
                "call the stable ABI's functions alone (docs/binding.md)",
                tuple(op.key for op in needing),
            )  # fmt: skip


def _damaged(ops: Iterable[Operator]) -> Iterator[Finding]:
    for op in ops:
        for text in op.ignored:
            command = _build([op])
            if op.builtin and text.startswith(f"{op.root}/lib/"):
                command = f"{command}, or pip install --force-reinstall --no-deps cuda_ops"
            why = f"its {op.origin} library is used" if op.library else "it has no other library"
            yield Finding(
                "library-damaged", "warning" if op.library else "broken", text,
                f"{op.key} skips it, and {why}", command, (op.key,),
            )  # fmt: skip


def _of_another_torch(facts: Facts) -> Iterator[Finding]:
    here = f"torch {facts.torch.version}, Python {facts.python}"
    for op in facts.operators:
        if op.other_torches and not op.library:
            why = f"it was built for {'; '.join(map(_torch_text, op.other_torches))}"
        elif _links_another_torch(op):
            why = op.problem
        else:
            continue
        yield Finding(
            "guest-of-another-torch", "broken", f"guest {op.key} has no library for {here}",
            why, _build([op]), (op.key,),
        )  # fmt: skip


def _links_another_torch(op: Operator) -> bool:
    """Says whether a guest needs C++ functions that this torch does not have."""
    symbol = re.search(r"undefined symbol: (\S+)", op.problem)
    return op.kind != "native" and symbol is not None and bool(TORCH_CPP.match(symbol[1]))


def _torch_text(abi: str) -> str:
    """Reads how the cache calls a torch.

    >>> _torch_text("torch2_10_0_cu130_py312")
    'torch 2.10.0+cu130, Python 3.12'
    """
    found = _TORCH.fullmatch(abi)
    if found is None:
        return abi
    major, minor, patch, local, *python = found.groups()
    version = f"{major}.{minor}.{patch}" + (f"+{local}" if local else "")
    return f"torch {version}, Python {'.'.join(python)}"


def _of_gpus(facts: Facts) -> Iterator[Finding]:
    ops = [op for op in facts.operators if op.library and op.has_kernel]
    for gpu in dict.fromkeys(facts.torch.gpus):
        major, minor = (int(part) for part in gpu.capability.split("."))
        lacking = [op for op in ops if op.archs and not runs_on(" ".join(op.archs), (major, minor))]
        if lacking:
            held = sorted({arch for op in lacking for arch in op.archs or ()})
            yield Finding(
                "arch-missing", "broken",
                f"libraries hold code for {' '.join(held)}, and {gpu.name} has capability "
                f"{gpu.capability}",
                "their kernels do not start on it",
                _build(lacking, f"--arch {arch_of_capability(major, minor)} "),
                tuple(op.key for op in lacking),
            )  # fmt: skip
    if facts.torch.gpus and facts.toolkit.home:
        yield from _shared(
            "no-kernels", ops, "built without CUDA kernels", "a call with a CUDA tensor raises",
            lambda op: op.archs == (),
        )  # fmt: skip


def _shared(
    fault: str,
    ops: Iterable[Operator],
    what: str,
    why: str,
    has: Callable[[Operator], bool],
    warn: bool = False,
) -> Iterator[Finding]:
    if found := [op for op in ops if has(op)]:
        text = f"{len(found)} operators are {what}" if len(found) > 1 else f"1 operator is {what}"
        about = tuple(op.key for op in found)
        yield Finding(fault, "warning" if warn else "broken", text, why, _build(found), about)


def _build(ops: Iterable[Operator], options: str = "") -> str:
    """Returns the command that builds operators, wherever their roots are."""
    ops = list(ops)
    roots = dict.fromkeys(op.root for op in ops if not op.builtin)
    words = [f"--root {shlex.quote(root)} " for root in roots]
    return f"python -m cuda_ops dev {options}{''.join(words)}{' '.join(op.key for op in ops)}"
