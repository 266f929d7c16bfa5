"""Changes every sparse block of a model, and says which it left as they were.

``cuda_ops.nn.convert`` calls it, and changes modules of ``torch.nn`` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cuda_ops.integrations.moe import ranks_of, routes, use_moe

#: How many names a line of text has.
_NAMED = 2


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did to a model's sparse blocks, or ``cuda_ops.nn.convert`` to all of a
    model, by names in it.

    As text it has a line for all that are alike.
    """

    #: What runs cuda_ops now, such as ``"Qwen3MoeSparseMoeBlock: routing and experts"``.
    replaced: Mapping[str, str] = field(default_factory=dict)
    #: Why a block or a module was left as it was.
    left: Mapping[str, str] = field(default_factory=dict)
    #: The text where both are empty.
    nothing: str = field(default="no sparse blocks", repr=False)

    def __str__(self) -> str:
        lines = [*_lines("changed", self.replaced), *_lines("left as it was", self.left)]
        return "\n".join(lines) or self.nothing


def convert(model: torch.nn.Module, group: Any = None) -> Conversion:
    """Calls :func:`use_moe` on every sparse block of a model that it takes.

    Args:
        model: any module, or a block itself. A module with a part named ``experts`` counts as a
            sparse block.
        group: the ranks that share the experts, as in :func:`use_moe`.

    Returns:
        What was changed, and what was not and why. Nothing is raised for a block that cannot be
        changed: look at ``left``, or print the result.

    Raises:
        TypeError: the model is no module.
        RuntimeError: the group is none, which is said before anything is changed.

    Example::

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="bfloat16")
        print(convert(model))
    """
    check_call("cuda_ops.integrations.convert", model, group)
    replaced: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, module in sparse_blocks(model):
        try:
            use_moe(module, group)
        except ValueError as error:
            left[name] = str(error).removeprefix("use_moe: ")
        else:
            kind = type(module).__name__
            what = "routing and experts" if routes(module) else "experts, with its own router"
            replaced[name] = f"{kind}: {what}"
    return Conversion(replaced, left)


def check_call(by: str, model: object, group: object) -> None:
    """Refuses arguments of ``by``, before anything is changed.

    Raises:
        TypeError: the model is no module.
        RuntimeError: the group is none.
    """
    if not isinstance(model, torch.nn.Module):
        got = type(model).__name__
        raise TypeError(f"{by}: argument 'model': expected a torch.nn.Module, got {got}")
    if group is not None:
        ranks_of(group, by)


def sparse_blocks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Returns the modules of a model that have a part named ``experts``, and their names."""
    for name, module in [*model.named_modules()]:
        if isinstance(getattr(module, "experts", None), torch.nn.Module):
            yield name, module


def _lines(what: str, named: Mapping[str, str]) -> list[str]:
    alike: dict[str, list[str]] = {}
    for name, text in named.items():
        alike.setdefault(text, []).append(name or "the model itself")
    return [f"{what}: {_listed(names)}: {text}" for text, names in alike.items()]


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_NAMED])} and {more} more"
