"""One CUDA graph of a function, and of its gradient: what it reads, writes and returns."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from cuda_ops.runtime.trees import map_tensors, tensors_of

Tensors = Sequence[torch.Tensor]


class Refusal(Exception):  # noqa: N818
    """Why a function cannot be captured; the text completes "cannot be captured: "."""


class Capture:
    """A graph with inputs of its own, which a call is copied into.

    The gradient is a graph too. What the forward saves for it lives in the graph's memory, so
    there is one forward at a time: :attr:`busy` from a call until its backward has run, or never
    can.
    """

    def __init__(
        self, function: Callable[[Tensors], Any], inputs: Tensors, pool: Any, stream: Any
    ) -> None:
        """Captures a call.

        Args:
            function: called with tensors like ``inputs``.
            inputs: the tensors of a call, all on one GPU.
            pool: of the graphs' memory.
            stream: to capture on, on which the function has run before.

        Raises:
            Refusal: it cannot be captured.
        """
        self._inputs = [_like(tensor) for tensor in inputs]
        self._places = _Places(self._inputs)
        before = [tensor._version for tensor in self._inputs]
        self._graph = torch.cuda.CUDAGraph()
        self._backward: torch.cuda.CUDAGraph | None = None
        self._input_grads: Sequence[torch.Tensor | None] = ()
        with _recorded(self._graph, pool, stream):
            made = function(self._inputs)
        self._made = made
        self._outputs = tensors_of(made)
        for output in self._outputs:
            if not output.is_cuda:
                raise Refusal(
                    f"it returns a tensor of shape {tuple(output.shape)} on the CPU, which each "
                    "replay would return unchanged"
                )
        self._written = [k for k, tensor in enumerate(self._inputs) if tensor._version != before[k]]
        self._check_written(inputs)
        self._generation = 0
        self._pending: weakref.ref[_Pending] | None = None
        self._differentiable = [k for k, o in enumerate(self._outputs) if o.requires_grad]
        if self._differentiable:
            self._capture_backward(pool, stream)

    def _check_written(self, inputs: Tensors) -> None:
        written = {inputs[k].untyped_storage().data_ptr() for k in self._written}
        shared = [tensor.untyped_storage().data_ptr() for tensor in inputs]
        if any(shared.count(memory) > 1 for memory in written):
            raise Refusal("it writes to an argument that shares memory with another one")
        if any(inputs[k].requires_grad for k in self._written):
            raise Refusal("it writes to an argument that requires a gradient")

    def _capture_backward(self, pool: Any, stream: Any) -> None:
        outputs = [self._outputs[k] for k in self._differentiable]
        own = [tensor for tensor in self._inputs if tensor.requires_grad]
        #: Leaves that the function reads beside its arguments, such as parameters.
        self.leaves = _leaves(outputs, own)
        self._grads = [torch.empty_like(output) for output in outputs]
        self._grad_places = _Places(self._grads)
        self._backward = torch.cuda.CUDAGraph()
        with _recorded(self._backward, pool, stream):
            # The graph of the forward is kept, and with it the memory of what it has saved, which
            # other captures in this pool must not take.
            self._input_grads = torch.autograd.grad(
                outputs, [*own, *self.leaves], self._grads, retain_graph=True, allow_unused=True
            )

    @property
    def busy(self) -> bool:
        return self._pending is not None and self._pending() is not None

    def replay(self, inputs: Tensors, views: bool) -> Any:
        """Returns what the function returns for other inputs, in new memory unless ``views``."""
        if self._differentiable:
            own = [tensor for tensor in inputs if tensor.requires_grad]
            results = _Replay.apply(  # type: ignore[no-untyped-call]
                self, inputs, views, *own, *self.leaves
            )
        else:
            results = self._forward(inputs, views)
        found = iter(results)
        return map_tensors(lambda _: next(found), self._made)

    def _forward(self, inputs: Tensors, views: bool) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            self._places.fill(inputs)
            self._graph.replay()
            self._generation += 1
            if self._written:
                _Places([inputs[k] for k in self._written]).fill(
                    [self._inputs[k] for k in self._written]
                )
            return tuple(o.detach() if views else o.detach().clone() for o in self._outputs)

    def _run_backward(self, grads: Tensors) -> list[torch.Tensor | None]:
        assert self._backward is not None
        self._grad_places.fill(grads)
        self._backward.replay()
        # Copies, since what accumulates gradients keeps the first one.
        return [None if grad is None else grad.clone() for grad in self._input_grads]


class _Pending:
    """Lives until the backward of one forward has run, or its autograd graph is gone."""

    __slots__ = ("__weakref__",)


class _Replay(torch.autograd.Function):
    """A replay whose gradient is a replay."""

    @staticmethod
    def forward(
        ctx: Any, capture: Capture, inputs: Tensors, views: bool, *wanted: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = capture._forward(inputs, views)
        ctx.capture, ctx.generation, ctx.pending = capture, capture._generation, _Pending()
        capture._pending = weakref.ref(ctx.pending)
        differentiable = set(capture._differentiable)
        ctx.mark_non_differentiable(
            *(result for k, result in enumerate(results) if k not in differentiable)
        )
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        capture: Capture = ctx.capture
        if capture._generation != ctx.generation:
            raise RuntimeError(
                "graphed: backward: expected the call to be the graph's last, got one that has "
                "run backward before and whose graph has been replayed since; what it saved is gone"
            )
        given = [grads[k] for k in capture._differentiable]
        found = capture._run_backward(
            [
                torch.zeros_like(static) if grad is None else grad
                for static, grad in zip(capture._grads, given, strict=True)
            ]
        )
        ctx.pending = None
        return None, None, None, *found


@contextlib.contextmanager
def _recorded(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
    """Captures what runs inside.

    Raises:
        Refusal: it raised, or CUDA refuses.
    """
    raised: BaseException | None = None
    cached = torch.is_autocast_cache_enabled()
    # A weight that autocast keeps would be one of the graph, outside of it.
    torch.set_autocast_cache_enabled(False)
    try:
        # Other threads go on: only this one must not do what a capture forbids.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                yield
            except BaseException as error:
                raised = error
                raise
    except Exception as error:
        first = raised or error
        text = (str(first) or type(first).__name__).splitlines()[0]
        raise Refusal(f"{type(first).__name__} while it was captured: {text}") from first
    finally:
        torch.set_autocast_cache_enabled(cached)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the strides of the tensor, unless several elements share memory in
    another way than by a stride of 0.
    """
    with torch.inference_mode(False), torch.no_grad():  # or nothing counts its versions
        base = _base(tensor)
        if torch._debug_has_internal_overlap(base) == 1:
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            memory = torch.empty_strided(
                base.shape, base.stride(), dtype=tensor.dtype, device=tensor.device
            )
            copied = memory.copy_(base).expand(tensor.shape)
    return copied.requires_grad_(tensor.requires_grad)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without the repetitions of dims that were expanded."""
    repeated = [k for k in range(tensor.dim()) if tensor.stride(k) == 0 and tensor.size(k) > 1]
    return _narrowed(tensor.detach(), repeated)


class _Places:
    """Tensors that others are copied into, in as few launches as torch makes of it."""

    def __init__(self, tensors: Tensors) -> None:
        self._bases = [_base(tensor) for tensor in tensors]
        #: Dims of which one element stands for all.
        self._repeated = [
            [dim for dim, size in enumerate(base.shape) if size != tensor.size(dim)]
            for base, tensor in zip(self._bases, tensors, strict=True)
        ]

    def fill(self, sources: Tensors) -> None:
        if not self._bases:
            return
        if any(self._repeated):
            sources = list(map(_narrowed, sources, self._repeated))
        with torch.no_grad():
            torch._foreach_copy_(self._bases, list(sources), non_blocking=True)


def _narrowed(tensor: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    for dim in dims:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _leaves(outputs: Tensors, own: Tensors) -> list[torch.Tensor]:
    """Returns the leaves of an autograd graph that are not among ``own``, in a fixed order."""
    known = {id(tensor) for tensor in own}
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if leaf is not None and id(leaf) not in known:
            known.add(id(leaf))
            found.append(leaf)
        waiting.extend(following for following, _ in node.next_functions)
    return found
