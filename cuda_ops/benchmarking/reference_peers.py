"""Makes peers of the reference of an operator, where no plugin names any peer.

``eager`` is the reference as it is and ``compile`` its ``torch.compile``, both in the dtype of the
case. For ``<op>_backward`` they are autograd of the reference of ``<op>``, whose forward runs
before each train, outside of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_ops.derive.arguments import bind, split
from cuda_ops.derive.gradient import ByName
from cuda_ops.errors import BenchmarkError
from cuda_ops.spec import OpSpec, Peer
from cuda_ops.testing.compare import outputs
from cuda_ops.testing.subject import HookAnswers
from cuda_ops.testing.tolerance import is_floating, tensors

from .choice import reason_of, wrapped
from .peers import COMPILE, EAGER, compiled

#: Seconds that a train may take: a reference that loops in Python would take hours of a run.
_MOST_SECONDS = 2.0
_BACKWARD = "_backward"
_WIDE = (torch.float64, torch.complex128)


@dataclass(frozen=True, kw_only=True)
class ReferencePeer(Peer):
    """A peer that is made of a reference, which was written to be right and not to be timed."""

    #: What the peer calls or compiles, for :func:`fault_of`.
    function: Callable[..., Any]
    #: What tables say of it.
    note: str


def reference_peers(op: OpSpec, plugins: HookAnswers) -> dict[str, Peer]:
    """Returns ``eager`` and ``compile`` of the reference that a plugin gives, or of autograd of it;
    none for an operator whose reference is derived.
    """
    if (reference := _given(op, plugins)) is not None:
        return _both(reference, "{}the reference of the plugin", lambda function: function)
    owner = op.siblings.get(op.name.removesuffix(_BACKWARD))
    if owner is None or not op.name.endswith(_BACKWARD):
        return {}
    reference, answer = _given(owner, plugins), plugins.ask("cuda_ops_autograd", owner)
    formula = getattr(getattr(answer, "backward", None), "__self__", None)
    if reference is None or not isinstance(formula, ByName):
        return {}
    what = f"autograd of {{}}the reference of {owner.name}, whose forward is not timed"
    return _both(reference, what, lambda f: Gradient(f, owner, formula))


def _given(op: OpSpec, plugins: HookAnswers) -> Callable[..., Any] | None:
    reference: Callable[..., Any] | None = plugins.ask("cuda_ops_reference", op)
    return None if reference is op.overload else reference


def _both(
    reference: Callable[..., Any], what: str, wrap: Callable[[Callable[..., Any]], Any]
) -> dict[str, Peer]:
    def peer(name: str, load: Callable[[], Callable[..., Any]], through: str) -> Peer:
        said = f"{name} is {what.format(through)}"
        return ReferencePeer(lambda: wrapped(wrap, load()), function=wrap(reference), note=said)

    return {
        EAGER: peer(EAGER, lambda: reference, ""),
        COMPILE: peer(COMPILE, compiled(reference).load, "torch.compile of "),
    }


@dataclass(frozen=True)
class _Graph:
    """What the forward of one call left, and the arguments of the call, whose ids stay taken."""

    args: tuple[Any, ...]
    results: list[torch.Tensor]
    leaves: list[torch.Tensor]
    incoming: list[torch.Tensor]


class Gradient:
    """Computes what ``<op>_backward`` does by autograd of a function that does what ``<op>`` does.

    Its forward runs in :meth:`before`, which the kit calls before each train.
    """

    def __init__(self, function: Callable[..., Any], owner: OpSpec, formula: ByName) -> None:
        self._function, self._owner, self._formula = function, owner, formula
        self._graphs: dict[tuple[int, ...], _Graph] = {}

    def before(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Runs the forward of each call on leaves that share the memory of its arguments."""
        self._graphs = {}  # released first: they may be large
        graphs = {tuple(map(id, args)): self._graph(args) for args in arguments}
        self._graphs = graphs

    def __call__(self, *args: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        if keywords:
            raise BenchmarkError(f"autograd of it takes no keywords, got {', '.join(keywords)}")
        key = tuple(map(id, args))
        if key not in self._graphs:
            self.before([args])
        graph = self._graphs[key]
        gradients = torch.autograd.grad(
            graph.results, graph.leaves, graph.incoming,
            retain_graph=True,  # the host's latency and calls back to back come without `before`
            materialize_grads=True,
        )  # fmt: skip
        # The engine may return what came in, or an expanded view of it; an operator writes it out.
        taken = {tensor.untyped_storage().data_ptr() for tensor in graph.incoming}
        written = []
        for gradient in gradients:
            address = gradient.untyped_storage().data_ptr()
            written.append(gradient.clone() if address in taken else gradient)
            taken.add(address)
        return tuple(written)

    def _graph(self, args: tuple[Any, ...]) -> _Graph:
        given = bind(self._formula.sibling, args, {})
        sources = [(kind, i) for kind, i, _ in self._formula.sources]
        found = dict(zip(sources, given, strict=True))
        self._refuse_lacking(found.keys())
        values = [found["input", i] for i in range(len(self._owner.argument_names))]
        for i in self._formula.targets:
            values[i] = values[i].detach().requires_grad_()
        positional, keywords = split(self._owner, values)
        # torch's cache may hold this backward from a program in which it runs once and gives its
        # buffers away; it keeps one apart that does not.
        with torch.enable_grad(), functorch_config.patch(donated_buffer=False):
            results = outputs(self._function(*positional, **keywords))
        ends = [i for kind, i in sources if kind == "grad"]
        return _Graph(
            args,
            [results[i] for i in ends],
            [values[i] for i in self._formula.targets],
            [found["grad", i] for i in ends],
        )

    def _refuse_lacking(self, found: Any) -> None:
        owner, name = self._owner, self._formula.sibling.name
        lacking = [n for i, n in enumerate(owner.argument_names) if ("input", i) not in found]
        if lacking:
            raise BenchmarkError(
                f"{name} does not take {', '.join(map(repr, lacking))}, which autograd of the "
                f"reference of {owner.name} starts from"
            )
        kept = [owner.output_names[i] for kind, i in found if kind == "output"]
        if kept:
            raise BenchmarkError(
                f"{name} takes {', '.join(map(repr, kept))}, which autograd of the reference of "
                f"{owner.name} would compute itself"
            )


class _Watch(TorchDispatchMode):
    """Sees whether an operator of torch returns a tensor in float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.saw_wide = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # Without dims it is a number, which makes no tensor wide.
        found = tensors(outputs(result))
        self.saw_wide = self.saw_wide or any(t.dtype in _WIDE and t.dim() for t in found)
        return result


def fault_of(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    ours: Sequence[Any],
    calls: int,
    device: torch.device,
) -> str:
    """Returns why a reference is no fair peer on some arguments; empty if it is one.

    Args:
        function: the reference.
        args: the arguments of a call.
        ours: what the operator returned for them.
        calls: how many calls make a train.
        device: where they run.
    """
    watch = _Watch()
    is_wide = any(t.dtype in _WIDE for t in tensors([*args, *ours]))
    try:
        with watch:
            theirs = outputs(function(*args))
    except Exception as error:
        return reason_of(error)
    for mine, other in zip(ours, theirs, strict=False):  # some of ours may be hidden
        if is_floating(mine) and mine.dtype != other.dtype:
            names = (str(t.dtype).removeprefix("torch.") for t in (other, mine))
            return "the reference returns {}, the operator {}".format(*names)
    if watch.saw_wide and not is_wide:
        return "the reference computes in float64"
    begin = perf_counter()
    function(*args)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = perf_counter() - begin
    if seconds * calls > _MOST_SECONDS:
        return f"a call of the reference takes {seconds:.2g} s, too long for {calls} in a train"
    return ""
