"""Generates the parts of the reference that the code says already: operators and options.

``python docs/generate.py`` writes them and ``--check`` fails where one differs. A part stands
between ``<!-- from the code: NAME -->`` and ``<!-- end -->``. Operators have to be built.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks are not installed

import benchmarks.tables
import cuda_ops.__main__
import cuda_ops.benchmarking.command
import cuda_ops.dev.command
import cuda_ops.dev.export
import cuda_ops.dev.init
import cuda_ops.dev.library
import cuda_ops.dev.magic
import cuda_ops.doctor.command
import cuda_ops.runtime.tracing.command
import cuda_ops.runtime.tuning.command
import cuda_ops.testing.__main__
import docs.gpus
from cuda_ops import nn, pytest_plugin
from cuda_ops.build.discovery import BUILTIN_ROOT
from cuda_ops.derive.gradient import may_float, why_none
from cuda_ops.dispatch.operator import Operator
from cuda_ops.dispatch.schema_types import schema_type
from cuda_ops.registry import registry

DOCS = Path(__file__).resolve().parent
PAGES = tuple(
    DOCS / page
    for page in ("operators.md", "nn.md", "command-line.md", "how-to/notebook.md", "versions.md")
)
_PART = re.compile(r"(<!-- from the code: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_SECTION = re.compile(r"[A-Z][a-z]+(?: [a-z]+)?: ?")


def updated(text: str) -> str:
    """Returns the text of a page with every part generated anew."""

    def made(match: re.Match[str]) -> str:
        return f"{match[1]}{_PARTS[match[2]]().strip()}\n{match[4]}"

    return _PART.sub(made, text)


# --- operators -------------------------------------------------------------------------


def operators() -> dict[str, dict[str, Operator]]:
    """Returns the operators of this project by pair."""
    pairs = registry().pairs()
    stems = sorted(stem for stem, pair in pairs.items() if pair.root == BUILTIN_ROOT)
    return {stem: registry().operators(stem) for stem in stems}


def _contents() -> str:
    return _filled(", ".join(f"[`{stem}`](#{stem})" for stem in operators()))


def _operators() -> str:
    return "\n\n".join(_pair(stem, found) for stem, found in operators().items())


def _pair(stem: str, found: dict[str, Operator]) -> str:
    others = (found[name] for name in sorted(found) if name != stem)
    blocks = [f"## {stem}", _operator(found[stem])]
    for other in others:
        blocks += [f"### {other.spec.name}", _operator(other)]
    return "\n\n".join(blocks)


def _operator(operator: Operator) -> str:
    op, function = operator.spec, registry().public(operator.spec.name)
    line = f", signature line `{op.signature}`" if op.signature else ""
    if op.hidden:
        line += f", of which `cuda_ops.{op.name}` does not return {_listed(op.hidden)}"
    facts = (
        f"`cuda_ops.{op.name}{_arguments(function)}`\n\n"
        f"- **Operator**: `{op.schema}`{line}\n"
        f"- **Devices**: {_devices(operator)}\n"
        f"- **Gradient**: {_gradient(operator)}"
    )
    return f"{facts}\n\n{_docstring(function.__doc__)}"


def _arguments(function: Callable[..., Any]) -> inspect.Signature:
    """Returns what a function takes, without types."""
    found = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return found.replace(parameters=bare, return_annotation=found.empty)


def _devices(operator: Operator) -> str:
    op = operator.spec
    if op.is_composite:
        return "any that its parts run on"
    cpu = "CPU (by torch's own operators)" if op.by_torch else "CPU"
    return f"{cpu}, CUDA" if op.has_cuda else cpu


def _gradient(operator: Operator) -> str:
    if operator.spec.is_composite:
        return "from its parts"
    op, forward = operator.spec, operator.now.forward
    why = why_none(op, operator.now.autograd)
    if why:
        said = re.sub(r"(\w+_backward)", r"`\1`", why)
        text = f"none ({said})"
    else:
        names = [op.argument_names[i] for i in operator.now.differentiable]
        doc = inspect.cleandoc(operator.public.__doc__ or "")
        zero = [n for n in names if re.search(rf"^ *{n}: [^.]*; no gradient\.", doc, re.M)]
        text = _listed(name for name in names if may_float(op, name) and name not in zero)
        if zero:
            text += f", none for {_listed(zero)}"
        if op.no_gradient:
            text += f", not {_listed(op.no_gradient)}, by design"
    if forward is not None:
        return f"{text}; in forward mode {_listed(op.argument_names[i] for i in forward.inputs)}"
    if why:
        return text
    lists = any("Tensor[]" in schema_type(argument) for argument in op.parsed.arguments)
    return f"{text}; none in forward mode ({'lists have none' if lists else f'no `{op.name}_jvp`'})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _docstring(text: str) -> str:
    """Formats a docstring: its paragraphs, then a list of its sections, then its example."""
    text, _, example = inspect.cleandoc(text).partition("\n\nExample:\n")
    prose: list[str] = []
    sections: list[str] = []
    for paragraph in text.split("\n\n"):
        if not _SECTION.match(paragraph):
            prose.append(_filled(paragraph))
            continue
        for section in re.split(rf"\n(?={_SECTION.pattern})", paragraph):
            match = _SECTION.match(section)
            assert match is not None
            sections += _section(match[0].rstrip(": "), section[match.end() :].rstrip())
    blocks = [*prose, "\n".join(sections)]
    if example:
        blocks.append(f"```pycon\n{example.strip()}\n```")
    return "\n\n".join(filter(None, blocks))


def _section(name: str, text: str) -> Iterator[str]:
    if not text.startswith("\n") and name != "Args":
        yield _filled(f"- **{name}**: {text}", "  ")
        return
    yield f"- **{name}**:"
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(text).strip()):
        names, _, meaning = entry.partition(": ")
        yield _filled(f"  - `{names}`: {meaning}", "    ")


def _filled(text: str, indent: str = "") -> str:
    start = text[: len(text) - len(text.lstrip())]
    return textwrap.fill(
        " ".join(text.split()), 120, initial_indent=start, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


# --- modules ---------------------------------------------------------------------------


def _modules() -> list[type]:
    return [value for _, value in sorted(vars(nn).items()) if inspect.isclass(value)]


def _table_of_modules() -> str:
    lines = ["| module | is a | operator | state dict |", "|---|---|---|---|"]
    for module in _modules():
        doc = _plain(module.__doc__ or "")
        operators = dict.fromkeys(re.findall(r"`cuda_ops\.(\w+)`", doc))
        links = ", ".join(f"[`{name}`](operators.md#{name})" for name in operators)
        state = re.search(r"^State dict: (.+?)(?=^[A-Z][a-z]+: )", doc, re.M | re.S)
        assert state is not None, module
        cells = f"[`{module.__name__}`](#{module.__name__.lower()})", _base(module), links, state[1]
        lines.append(f"| {' | '.join(' '.join(cell.split()) for cell in cells)} |")
    return "\n".join(lines)


def _base(module: type) -> str:
    """Returns the name of the class of torch that a module's class is made of."""
    return next(f"`torch.nn.{b.__name__}`" for b in module.__mro__ if b.__module__[:6] == "torch.")


def _texts_of_modules() -> str:
    return "\n\n".join(_of_nn(module) for module in _modules())


def _of_nn(value: Any) -> str:
    line = f"`cuda_ops.nn.{value.__name__}{_arguments(value)}`"
    return f"## {value.__name__}\n\n{line}\n\n{_docstring(_plain(value.__doc__))}"


def _plain(text: str) -> str:
    """Writes names in a docstring as Markdown does."""
    return re.sub(r"``(.+?)``", r"`\1`", re.sub(r":\w+:`", "`", inspect.cleandoc(text)))


# --- options ---------------------------------------------------------------------------


def _options(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        if action.option_strings and action.nargs != 0:
            value = "|".join(map(str, action.choices)) if action.choices else action.metavar
            name += f" {value or action.dest.upper()}"
        elif action.nargs == "*":
            name += " ..."
        rows.append((name, action.help or ""))
    return _table(rows)


def _subcommands(parser: argparse.ArgumentParser) -> str:
    (group,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    said = {choice.dest: choice.help for choice in group._choices_actions}
    return "\n\n".join(
        f"`{name}`: {said[name]}\n\n{_options(command)}" for name, command in group.choices.items()
    )


class _PytestOptions:
    """Collects what the plugin of pytest adds."""

    def __init__(self) -> None:
        self.options: list[tuple[str, str]] = []
        self.settings: list[tuple[str, str]] = []

    def getgroup(self, name: str, description: str) -> _PytestOptions:
        return self

    def addoption(self, name: str, **said: Any) -> None:
        metavar = said.get("metavar")
        self.options.append((f"{name} {metavar}" if metavar else name, said["help"]))

    def addini(self, name: str, meaning: str, kind: str, default: str) -> None:
        self.settings.append((name, meaning))


def _pytest_options() -> str:
    found = _PytestOptions()
    # It takes the place of pytest's parser, of which the plugin uses these methods alone.
    pytest_plugin.pytest_addoption(found)  # type: ignore[arg-type]
    return f"{_table(found.options)}\n\nSettings of pytest:\n\n{_table(found.settings)}"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = ["| option | meaning |", "|---|---|"]
    for name, meaning in rows:
        cells = f"`{name}`", " ".join(meaning.replace("%%", "%").split())
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def _commands() -> str:
    rows = [(name, meaning) for name, (_, _, meaning) in cuda_ops.__main__.COMMANDS.items()]
    return _table(rows).replace("option", "command", 1)


_PARTS: dict[str, Callable[[], str]] = {
    "contents": _contents,
    "operators": _operators,
    "table of modules": _table_of_modules,
    "modules": _texts_of_modules,
    "convert": lambda: _of_nn(nn.convert),
    "GPUs": docs.gpus.releases,
    "instructions": docs.gpus.instructions,
    "cuda_ops": _commands,
    "compile_dev.py": lambda: _options(cuda_ops.dev.command._parser()),
    "init": lambda: _options(cuda_ops.dev.init._parser()),
    "export": lambda: _options(cuda_ops.dev.export._parser()),
    "doctor": lambda: _options(cuda_ops.doctor.command._parser()),
    "library": lambda: _options(cuda_ops.dev.library._parser()),
    "cuda_op": lambda: _options(cuda_ops.dev.magic._parser()),
    "cuda_ops.testing": lambda: _subcommands(cuda_ops.testing.__main__._parser()),
    "pytest": _pytest_options,
    "tune": lambda: _options(cuda_ops.runtime.tuning.command._parser()),
    "benchmarks": lambda: _options(cuda_ops.benchmarking.command._parser()),
    "profile": lambda: _options(cuda_ops.runtime.tracing.command._parser()),
    "benchmarks.tables": lambda: _options(benchmarks.tables._parser()),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    arguments = parser.parse_args(argv)
    differing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = updated(text)
        if new != text:
            differing.append(page)
            if not arguments.check:
                page.write_text(new, encoding="utf-8")
    for page in differing:
        print(f"{page.name} {'differs' if arguments.check else 'updated'}")
    return int(arguments.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
