"""A call as text, and how bytes become one: a valid call, of which some arguments are changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from cuda_ops.names import HOME
from cuda_ops.testing.arguments import sampled_arguments
from cuda_ops.testing.draw import Draw, chosen
from cuda_ops.testing.fuzzing.arguments import SCALARS, changed, text_of
from cuda_ops.testing.fuzzing.choices import Choices
from cuda_ops.testing.fuzzing.ways import WAYS
from cuda_ops.testing.subject import Subject

#: How many valid calls of an operator others are made of.
_VALID = 32


@dataclass(frozen=True)
class Passed:
    """One argument of a call."""

    text: str
    #: What it was before it was changed; empty for one that no valid call has.
    valid: str
    #: The name that it is passed by; empty if it is passed by position.
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.text}" if self.name else self.text


@dataclass(frozen=True)
class Call:
    """One call. ``str`` is the line that repeats it, the operator's key in front."""

    key: str
    function: str
    arguments: tuple[Passed, ...]
    way: str = "{}"

    def __str__(self) -> str:
        passed = ", ".join(map(str, self.arguments))
        return f"{self.key}: {self.way.replace('{}', self.function)}({passed})"

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Call:
        parts = json.loads(text)
        parts["arguments"] = tuple(Passed(**passed) for passed in parts["arguments"])
        return Call(**parts)

    def simpler(self) -> Iterator[Call]:
        """Returns calls with less that is wrong or unusual."""
        if self.way != "{}":
            yield replace(self, way="{}")
        for i, argument in enumerate(self.arguments):
            before, after = self.arguments[:i], self.arguments[i + 1 :]
            if not argument.valid:
                yield replace(self, arguments=before + after)
            elif argument.text != argument.valid:
                mended = replace(argument, text=argument.valid)
                yield replace(self, arguments=(*before, mended, *after))
        if any(argument.name for argument in self.arguments):
            plain = tuple(replace(argument, name="") for argument in self.arguments)
            yield replace(self, arguments=plain)


@dataclass(frozen=True)
class Finding:
    """One kind of call that an operator does not treat as it should."""

    #: The call.
    line: str
    #: What was wrong.
    text: str
    #: What tells it from others: the operator, and the text without numbers.
    form: str


def functions_of(subject: Subject) -> list[str]:
    """Returns the names by which an operator can be called."""
    op = subject.op
    names = [f"torch.ops.{op.namespace}.{op.name}", f"torch.ops.{op.namespace}.{op.name}.default"]
    return names if op.foreign or op.namespace != HOME else [f"cuda_ops.{op.name}", *names]


_valid_calls: dict[str, list[tuple[object, ...]]] = {}


def _valid(subject: Subject) -> list[tuple[object, ...]]:
    if (found := _valid_calls.get(subject.name)) is None:
        samples = chosen(subject, Draw(_VALID, adapt=lambda sample: sample))
        found = _valid_calls[subject.name] = [sample.args for sample in samples]
    return found


def why_not(subject: Subject) -> str:
    """Returns why there are no calls to begin with; empty if there are."""
    if subject.strategy is None:
        return "no samples: give a signature line or implement cuda_ops_samples"
    return subject.unreachable or subject.why_not("cpu")


def drawn(choices: Choices, subject: Subject) -> Call:
    """Returns the call that the bytes describe."""
    op = subject.op
    values = list(choices.pick(_valid(subject)))
    function, way = choices.pick(functions_of(subject)), choices.pick(WAYS)
    # How many to change: mostly one, since the first wrong argument hides what follows.
    wrong = {choices.below(max(1, len(values))) for _ in range(choices.pick((1, 1, 1, 2, 2, 3, 0)))}
    form = choices.below(16)
    texts = [text_of(value) for value in values]
    arguments: list[Passed] = []
    schema = sampled_arguments(op)
    is_public = function.startswith("cuda_ops.")
    for i, (value, text) in enumerate(zip(values, texts, strict=True)):
        own, is_random = schema[i], schema[i].name == op.random
        by_name = own.kwarg_only or form in (12, 13) or (is_random and is_public and op.draws)
        said = changed(choices, value, texts[:i] + texts[i + 1 :]) if i in wrong else text
        arguments.append(Passed(said, text, own.name if by_name else ""))
    arguments.sort(key=lambda argument: bool(argument.name))
    if form == 15 and arguments:
        del arguments[choices.below(len(arguments))]
    if form == 14:
        names = ("", "bogus", "out", "self", *op.argument_names)
        extra = Passed(choices.pick(SCALARS), "", choices.pick(names))
        at = sum(not argument.name for argument in arguments)
        arguments.insert(at if not extra.name else len(arguments), extra)
    return Call(op.key, function, tuple(arguments), way)
