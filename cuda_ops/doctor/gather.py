"""Asks every probe. One that raises costs its own facts alone, and is named."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cuda_ops import __version__
from cuda_ops.build.commands import TORCH_TARGET
from cuda_ops.doctor import machine
from cuda_ops.doctor.asking import ask_child
from cuda_ops.doctor.facts import (
    Cache,
    Driver,
    Facts,
    Failure,
    Operator,
    Plugin,
    Tool,
    Toolkit,
    Torch,
    Unusable,
)
from cuda_ops.names import unknown

_Fact = TypeVar("_Fact")
#: The oldest torch, ``"2.10"``.
OLDEST_TORCH = f"{int(TORCH_TARGET[2:4], 16)}.{int(TORCH_TARGET[4:6], 16)}"


class UnknownError(ValueError):
    """Names that are no operators."""


def gather(names: Sequence[str] = (), roots: Sequence[str] = ()) -> Facts:
    """Returns what there is to know of this installation; builds nothing and runs no operator.

    Args:
        names: the operators to look at; without them all.
        roots: folders of operators to add.

    Raises:
        UnknownError: no operator has one of the names.

    Example::

        from cuda_ops.doctor.gather import gather

        assert gather(["silu"]).operators[0].key == "silu"
    """
    failures: list[Failure] = []

    def guarded(probe: str, look: Callable[[], _Fact], otherwise: _Fact) -> _Fact:
        try:
            return look()
        except UnknownError:
            raise
        except Exception as error:
            failures.append(Failure(probe, f"{type(error).__name__}: {error}"))
            return otherwise

    guarded("project", _enter_project, None)
    torch, driver = guarded("torch", machine.torch_and_driver, (Torch(), Driver()))
    facts = Facts(
        cuda_ops=__version__,
        python=platform.python_version(),
        oldest_torch=OLDEST_TORCH,
        torch=torch,
        driver=driver,
        toolkit=guarded("toolkit", machine.toolkit, Toolkit()),
        compiler=guarded("compiler", machine.compiler, Tool()),
        ninja=guarded("ninja", machine.ninja, Tool()),
    )
    if torch.version:  # without it nothing of what follows can be imported
        facts = replace(facts, cache=guarded("cache", _cache, Cache()))
        facts = guarded("operators", lambda: _with_operators(facts, names, roots), facts)
    return replace(facts, failures=(*facts.failures, *failures))


def _enter_project() -> None:
    """Makes the project in the current folder known, as for other commands."""
    if sys.modules.get("torch") is None:
        return  # it is missing or broken, which another probe says
    from cuda_ops.dev import project

    project.enter()


def _cache() -> Cache:
    from cuda_ops.doctor import caches

    return caches.look()


def _with_operators(facts: Facts, names: Sequence[str], roots: Sequence[str]) -> Facts:
    """Asks the child as often as a library ends it, which it then leaves out."""
    opened: dict[str, tuple[str, str]] = {}
    while True:
        request = {"names": [*names], "roots": [*roots], "skip": [*opened]}
        lines, ended = ask_child("operators", request)
        for line in lines:
            if "opened" in line:
                problem = line["problem"]
                opened[line["opened"]] = ("no" if problem else "yes", problem)
        last = lines[-1] if lines else {}
        if "opening" not in last:
            return _joined(facts, lines, opened, ended.problem)
        said = f"opening its library {ended.problem or 'ended the process'}"
        opened[last["opening"]] = ("hangs" if ended.hangs else "crashes", said)


def _joined(
    facts: Facts, lines: list[dict[str, Any]], opened: dict[str, tuple[str, str]], ended: str
) -> Facts:
    plugins: dict[str, Plugin] = {}
    operators: dict[str, Operator] = {}
    unusable, left_aside, failures = [], [], [*facts.failures]
    importing = ""
    for line in lines:
        match line:
            case {"unknown": strange, "known": known}:
                lost = [f"; plugin {p.name!r} {p.problem}" for p in plugins.values() if p.problem]
                raise UnknownError(unknown(strange, known) + "".join(lost))
            case {"refused": text}:
                raise UnknownError(text)
            case {"plugins": fields}:
                plugins[fields["name"]] = Plugin(**fields)
            case {"importing": importing}:
                pass
            case {"imported": name}:
                importing = ""
                if "raised" in line:
                    problem = f"failed to import: {line['raised']}"
                    plugins[name] = replace(plugins[name], problem=problem)
            case {"plugin": name, "problem": problem}:  # of a pair, or of a hook
                known_one = plugins.get(name, Plugin(name, name))
                plugins[name] = replace(known_one, problem=known_one.problem or problem)
            case {"operator": fields}:
                operators[fields["key"]] = _operator(fields, opened)
            case {"hidden": key, "by": by}:
                operators[key] = replace(operators[key], hidden=by)
            case {"unusable": fields}:
                unusable.append(Unusable(**fields))
            case {"left_aside": text}:
                left_aside.append(text)
            case {"failed": [probe, problem]}:
                failures.append(Failure(probe, problem))
            case {"raised": problem}:
                failures.append(Failure("operators", problem))
    if importing:
        problem = f"importing it {ended or 'ended the process'}"
        plugins[importing] = replace(plugins[importing], problem=problem)
    elif ended:
        failures.append(Failure("operators", f"looking at them {ended}"))
    return replace(
        facts,
        plugins=tuple(plugins.values()),
        operators=tuple(operators.values()),
        unusable=tuple(unusable),
        left_aside=tuple(left_aside),
        failures=tuple(failures),
    )


def _operator(fields: dict[str, Any], opened: dict[str, tuple[str, str]]) -> Operator:
    # JSON has no tuples.
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
    operator = Operator(**values)
    if operator.key not in opened:
        return operator
    loads, problem = opened[operator.key]
    return replace(operator, loads=loads, problem=problem)
