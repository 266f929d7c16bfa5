"""The names of a gradient, which say what it takes and returns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.notes import Note

if TYPE_CHECKING:
    from cuda_ops.dev.adopt.operators import Operator

_GRAD_OUT = re.compile(r"(?:grad|d)_?(?:out(?:put)?s?|y)?$|d(?:out|y)$|grad_\w+$|\w+_grad$")


def fit_gradient(stem: str, found: list[Operator]) -> None:
    """Names the arguments and returns of ``<op>_backward`` after what they are, or the operator
    otherwise: with unknown names the pair would not load.
    """
    main = found[0]
    backward = next((one for one in found if one.name == f"{stem}_backward"), None)
    if backward is None or main is backward:
        return
    inputs = [one.name for one in main.arguments]
    tensors = [main.shown(name) for name, tensor in main.host.tensors.items() if tensor.may_float]
    outputs = main.returns if len(main.returns) > 1 else ["out"]
    own = main.returned
    grads = [f"grad_{one}" for one in outputs]
    names: list[str] = []
    for argument in backward.arguments:
        name = argument.name
        if name in (*inputs, *grads) or (len(main.returns) > 1 and name in outputs):
            names.append(name)
        elif _GRAD_OUT.match(name) and len(outputs) == 1 and grads[0] not in names:
            names.append(grads[0])
        elif len(outputs) == 1 and (name in (*own, "out", "output", "y", "result")):
            names.append("out")
        else:
            names.append("")
    returns = []
    made = backward.returned or list(backward.returns)
    for name in made:
        stripped = re.sub(r"^(?:grad_|d_?)|_grad$", "", name)
        if stripped in tensors:
            returns.append(f"grad_{stripped}")
        elif len(tensors) == 1 and len(made) == 1:
            returns.append(f"grad_{tensors[0]}")
        else:
            returns.append("")
    fits = all(names) and all(returns) and returns and any(one in grads for one in names)
    fits = fits and len(set(names)) == len(names) and len(set(returns)) == len(returns)
    if fits and not any(one.is_written for one in (*main.arguments, *backward.arguments)):
        for argument, name in zip(backward.arguments, names, strict=True):
            argument.name = name
        backward.returns = returns
        backward.schema = ""
        for argument, parameter_ in zip(
            backward.arguments, backward.host.function.parameters, strict=True
        ):
            argument.type = words.schema_type(parameter_.type)[0]
        if backward.hosts.keys() != main.hosts.keys():
            missing = next(iter(main.hosts.keys() ^ backward.hosts.keys()))
            fits = missing not in main.hosts
        if fits:
            _compare_lines(main, backward)
            return
    old, backward.name = backward.name, f"{stem}_gradient"
    if backward.schema:
        backward.schema = re.sub(r"^\w+", backward.name, backward.schema)
    backward.returns = (
        [""] if len(backward.returns) == 1 else [one.removeprefix("grad_") for one in made]
    )
    backward.notes.append(Note(backward.export.place, (
        f"named {backward.name}, since its names do not say what they are: as {old} it is the "
        f"gradient of {stem}, with arguments {', '.join(grads)}, inputs and outputs, returns "
        "grad_<input>, and a function for each device")))  # fmt: skip


def _compare_lines(main: Operator, backward: Operator) -> None:
    """Drops the line of a gradient that describes a tensor otherwise than the operator's does: such
    a pair would not load.
    """
    if not (main.signature and backward.signature):
        return
    groups = {}
    for one, prefix in ((main, ""), (backward, "grad_")):
        inputs, outputs = one.signature.split("->")
        tensors = [
            argument.name for argument in one.arguments if argument.type.startswith("Tensor")
        ]
        returns = one.returns if len(one.returns) > 1 or prefix else ["out"]
        found = dict(zip([*tensors, *returns], [*_groups(inputs), *_groups(outputs)], strict=True))
        groups[one.name] = {name.removeprefix(prefix): group for name, group in found.items()}
    own, other = groups[main.name], groups[backward.name]
    if differing := sorted(name for name in own.keys() & other.keys() if own[name] != other[name]):
        backward.notes.append(Note(backward.export.place, (
            f'{backward.name}: no signature line, since "{backward.signature}" has other dims for '
            f'{", ".join(differing)} than "{main.signature}" of {main.name}')))  # fmt: skip
        backward.signature = ""


def _groups(side: str) -> list[str]:
    return re.findall(r"\([^()]*\)|\[[^\[\]]*\]", side)
