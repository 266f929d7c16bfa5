"""Compares whole models that run their experts in other ways, before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

#: The way that all others are compared with.
REFERENCE = "eager"
#: The largest difference of logits, relative to the largest one, and of gradients.
_LOGITS, _GRADIENTS = 0.05, 0.05
#: The largest difference of a weight: transformers rounds them to bfloat16.
_WEIGHTS = 2**-7

Choices = Sequence[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
#: Returns the logits of a way that is to be compared.
Logits = Callable[[], torch.Tensor]


@dataclass
class Checked:
    """What was found before a case was timed."""

    #: By way, the largest difference relative to the largest logit, with the choices of eager; of a
    #: compiled model the median of the tokens' largest ones, with its own.
    difference: dict[str, float] = field(default_factory=dict)
    #: The same of gradients of the first block's matrices.
    gradient: dict[str, float] = field(default_factory=dict)
    #: The largest difference of use_moe with its own choices, whatever it chose.
    own_routing: float | None = None
    #: The largest difference of a weight of use_moe for the same tokens, and the share of tokens
    #: that go to other experts, which are as good.
    weights: float | None = None
    elsewhere: float | None = None


def blocks(model: Any) -> list[Any]:
    return [m for m in model.modules() if {"gate", "experts"} <= {n for n, _ in m.named_children()}]


@contextmanager
def recorded(model: Any) -> Iterator[Choices]:
    """Lists what all gates got and returned, in the order of their calls."""
    calls: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []

    def note(_: Any, given: Any, out: Any) -> None:
        calls.append((given[0].detach(), tuple(one.detach() for one in out)))

    with _hooked(model, note):
        yield calls


@contextmanager
def replayed(model: Any, calls: Choices) -> Iterator[None]:
    """Makes all gates return what was recorded."""
    left = iter(calls)
    with _hooked(model, lambda *_: next(left)[1]):
        yield
    if next(left, None) is not None:
        raise RuntimeError("a model called its gates less often than the one that was recorded")


@contextmanager
def _hooked(model: Any, hook: Callable[..., Any]) -> Iterator[None]:
    handles = [block.gate.register_forward_hook(hook) for block in blocks(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns the largest difference of each token, relative to the largest value of all."""
    rows = zip(found.flatten(0, -2).split(256), expected.flatten(0, -2).split(256), strict=True)
    each = [(a.float() - b.float()).abs().amax(-1) for a, b in rows]  # less memory than all at once
    return torch.cat(each) / expected.abs().max().float()


def compared(models: Mapping[str, Any], logits: Mapping[str, Logits], ours: str) -> Checked:
    """Compares the logits of all ways, and gradients where they leave some.

    Args:
        models: by way, the model that its ``logits`` run.
        logits: each computes the same tokens.
        ours: the way whose gates may route by other code.

    Raises:
        RuntimeError: one of them differs by more than bfloat16 rounds.
    """
    found, reference = Checked(), models[REFERENCE]
    with recorded(reference) as choices:
        logits[REFERENCE]()
    with replayed(reference, choices):  # whose gradient is none of the gates' either
        expected = logits[REFERENCE]()
    gradients = _gradients(reference)
    found.weights, found.elsewhere = _routed_alike(choices, blocks(models[ours]))
    for name, compute in logits.items():
        if name == REFERENCE:
            continue
        with replayed(models[name], choices):
            found.difference[name] = difference(compute(), expected).max().item()
        for own, theirs in zip(_gradients(models[name]), gradients, strict=True):
            furthest = difference(own, theirs).max().item()
            found.gradient[name] = max(furthest, found.gradient.get(name, 0.0))
    found.own_routing = difference(logits[ours](), expected).max().item()
    refuse_beyond({ours: found.weights}, _WEIGHTS, "weights of experts")
    refuse_beyond(found.difference, _LOGITS, "logits")
    refuse_beyond(found.gradient, _GRADIENTS, "gradients")
    return found


def compared_compiled(logits: Mapping[str, Logits], ours: str) -> Checked:
    """Compares the logits of compiled models with those of :data:`REFERENCE`, which is not
    compiled: the median of the tokens' largest differences.

    Raises:
        RuntimeError: half of the tokens differ by more than bfloat16 rounds.
    """
    found, expected = Checked(), logits[REFERENCE]()
    for name, compute in logits.items():
        if name != REFERENCE:
            each = difference(compute(), expected)
            found.difference[name] = each.median().item()
            if name == ours:
                found.own_routing = each.max().item()
    refuse_beyond(found.difference, _LOGITS, "logits of half of the tokens")
    return found


def _gradients(model: Any) -> list[torch.Tensor]:
    experts = blocks(model)[0].experts
    return [p.grad.clone() for p in experts.parameters() if p.grad is not None]


def _routed_alike(choices: Choices, converted: Sequence[Any]) -> tuple[float, float]:
    """Gives the converted gates what those of the reference got; returns how much a weight differs,
    and the share of tokens that go to other experts.
    """
    furthest, others, tokens = 0.0, 0, 0
    for k, (given, (_, weights, experts)) in enumerate(choices):
        with torch.no_grad():
            _, own_weights, own_experts = converted[k % len(converted)].gate(given)
        # Weights of experts that are equally good are equal, whichever was chosen.
        pair = own_weights.float().sort(-1).values, weights.float().sort(-1).values
        furthest = max(furthest, (pair[0] - pair[1]).abs().max().item())
        others += int((own_experts.sort(-1).values != experts.sort(-1).values).any(-1).sum())
        tokens += len(experts)
    return furthest, others / tokens


def refuse_beyond(found: Mapping[str, float], limit: float, what: str) -> None:
    for name, furthest in found.items():
        if not furthest <= limit:  # NaN is beyond too
            raise RuntimeError(
                f"{what} of {name} differ from those of {REFERENCE} by {furthest:.3g}, expected at "
                f"most {limit:.3g}"
            )
