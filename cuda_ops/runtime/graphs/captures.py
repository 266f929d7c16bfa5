"""One CUDA graph of a function, and of its gradient: what it reads, writes and returns."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from cuda_ops.runtime.graphs.in_turn import InTurn
from cuda_ops.runtime.graphs.places import Places, Sources, Tensors, like
from cuda_ops.runtime.trees import map_tensors, rebuilt_with, tensors_of


class Refusal(Exception):  # noqa: N818  # users get a GraphError of it
    """Why a function cannot be captured; the text completes "cannot be captured: "."""


class Capture:
    """A graph with inputs of its own, which a call is copied into.

    The gradient is a graph too. What the forward saves for it lives in the graphs' memory, so
    there is one forward at a time: :attr:`busy` from a call until its backward has run, or never
    can.
    """

    def __init__(
        self,
        function: Callable[[Tensors], Any],
        inputs: Tensors,
        pool: Any,
        stream: Any,
        in_turn: InTurn,
        stands_for: Mapping[int, torch.Tensor],
    ) -> None:
        """Captures a call.

        Args:
            function: called with tensors like ``inputs``.
            inputs: the tensors of a call, all on one GPU.
            pool: of the graphs' memory. If there is a gradient, other graphs must not share it:
                they would write to what one forward saves for its backward.
            stream: to capture on.
            in_turn: for what runs on the device that the inputs are on.
            stands_for: by ``id`` of a leaf that the function reads, the one that gets its gradient.

        Raises:
            Refusal: it cannot be captured.
        """
        self.in_turn = in_turn
        self._inputs = [like(tensor) for tensor in inputs]
        self._places = Places(self._inputs)
        before = [tensor._version for tensor in self._inputs]
        self._wanted = [k for k, tensor in enumerate(self._inputs) if tensor.requires_grad]
        self._graph = torch.cuda.CUDAGraph()
        self._backward: torch.cuda.CUDAGraph | None = None
        with _recorded(self._graph, pool, stream):
            made = function(self._inputs)
        outputs = tensors_of(made)
        for output in outputs:
            if output.device != in_turn.device:
                where = "the CPU" if output.device.type == "cpu" else output.device
                raise Refusal(
                    f"it returns a tensor of shape {tuple(output.shape)} on {where}, which each "
                    "replay would return unchanged"
                )
        self._written = [k for k, tensor in enumerate(self._inputs) if tensor._version != before[k]]
        if any(k in self._wanted or self._inputs[k].requires_grad for k in self._written):
            raise Refusal("it writes to an argument whose gradient would be lost")
        self._check_shared(inputs)
        self._generation = 0
        self._pending: weakref.ref[_Pending] | None = None
        self._differentiable = [k for k, output in enumerate(outputs) if output.requires_grad]
        self._others = [k for k, output in enumerate(outputs) if not output.requires_grad]
        if self._differentiable:
            self._capture_backward(outputs, pool, stream, stands_for)
        # Without the autograd graph, whose nodes would tie parameters to the stream of the capture.
        self._outputs = [output.detach() for output in outputs]
        self._results = Sources(self._outputs)
        found = iter(self._outputs)
        self._rebuilt = rebuilt_with(map_tensors(lambda _: next(found), made))

    def _check_shared(self, inputs: Tensors) -> None:
        shared = [tensor.untyped_storage().data_ptr() for tensor in inputs]
        if any(shared.count(shared[k]) > 1 for k in self._written):
            raise Refusal("it writes to an argument that shares memory with another one")

    def _capture_backward(
        self,
        made: Tensors,
        pool: Any,
        stream: Any,
        stands_for: Mapping[int, torch.Tensor],
    ) -> None:
        outputs = [made[k] for k in self._differentiable]
        own = [tensor for tensor in self._inputs if tensor.requires_grad]
        read = _leaves(outputs, own)
        #: Leaves that the function reads beside its arguments, such as parameters.
        self.leaves = [stands_for.get(id(leaf), leaf) for leaf in read]
        self._grads = [torch.empty_like(output) for output in outputs]
        self._grad_places = Places(self._grads)
        self._backward = torch.cuda.CUDAGraph()
        found: list[torch.Tensor | None] = []
        try:
            with _recorded(self._backward, pool, stream):
                # What the forward has saved is kept, or this graph would write its own to it.
                found += torch.autograd.grad(
                    outputs, [*own, *read], self._grads, retain_graph=True, allow_unused=True
                )
        except Refusal as refusal:
            raise Refusal(
                f"its backward: {refusal} (results of an earlier call that are still there, such "
                "as a loss, hold parameters on another stream: let go of them)"
            ) from refusal.__cause__
        #: Which of the arguments and leaves get a gradient, and the memory of these.
        self._reached = [grad is not None for grad in found]
        self._found = Sources([grad for grad in found if grad is not None])

    @property
    def busy(self) -> bool:
        return self._pending is not None and self._pending() is not None

    def replay(self, inputs: Tensors, views: bool) -> Any:
        """Returns what the function returns for other inputs, in new memory unless ``views``.

        Raises:
            Refusal: arguments that the function writes to share memory.
        """
        if self._written:
            self._check_shared(inputs)
        if self._differentiable:
            wanted = [inputs[k] for k in self._wanted]
            # torch gives apply no types.
            results = _Replay.apply(  # type: ignore[no-untyped-call]
                self, inputs, views, *wanted, *self.leaves
            )
        elif torch.is_grad_enabled():
            with torch.no_grad():
                results = self._forward(inputs, views)
        else:
            results = self._forward(inputs, views)
        return self._rebuilt(results)

    def _forward(self, inputs: Tensors, views: bool) -> tuple[torch.Tensor, ...]:
        with self.in_turn:
            self._places.fill(inputs)
            self._graph.replay()
            self._generation += 1
            if self._written:
                Places([inputs[k] for k in self._written]).fill(
                    [self._inputs[k] for k in self._written]
                )
            if views:
                return tuple([output.detach() for output in self._outputs])
            return tuple(self._results.copies())

    def _run_backward(self, generation: int, grads: Tensors) -> list[torch.Tensor | None]:
        assert self._backward is not None
        with self.in_turn:
            if self._generation != generation:
                raise RuntimeError(
                    "graphed: backward: expected the call to be the graph's last, got one that has "
                    "run backward before and whose graph has been replayed since; what it saved is "
                    "gone"
                )
            self._grad_places.fill(grads)
            self._backward.replay()
            # Copies, since what accumulates gradients keeps the first one.
            found = iter(self._found.copies())
        return [next(found) if reached else None for reached in self._reached]


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
        ctx.mark_non_differentiable(*[results[k] for k in capture._others])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        capture: Capture = ctx.capture
        given = [grads[k] for k in capture._differentiable]
        found = capture._run_backward(
            ctx.generation,
            [
                torch.zeros_like(static) if grad is None else grad
                for static, grad in zip(capture._grads, given, strict=True)
            ],
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
    before, cached = torch.cuda.current_stream(), torch.is_autocast_cache_enabled()
    # A weight that autocast keeps would be one of the graph, outside of it.
    torch.set_autocast_cache_enabled(False)
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as modes:
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            if inference:  # what torch keeps of random numbers must be written outside of it too
                modes.enter_context(torch.inference_mode(False))
            modes.enter_context(_own_workspaces())
            # Other threads go on: only this one must not do what a capture forbids.
            with torch.cuda.graph(
                graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                try:
                    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                        yield
                except BaseException as error:
                    raised = error
                    raise
    except Exception as error:
        _clean_up(graph, pool, stream, before)
        first = raised or error
        text = (str(first) or type(first).__name__).splitlines()[0]
        raise Refusal(f"{type(first).__name__} while it was captured: {text}") from first
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """Lets a capture have cuBLAS's workspace in its own pool.

    torch keeps one for each stream, and drops it with any graph that was captured there or when
    Inductor asks for it: other graphs of the stream would go on using its memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


#: Graphs whose capture failed: torch may still point to them.
_failed: list[Any] = []


def _clean_up(graph: Any, pool: Any, stream: Any, before: Any) -> None:
    """Ends what torch leaves open where CUDA refuses a capture: its end raises before torch has
    left the stream, the pool and the random state.
    """
    torch.cuda.set_stream(before)
    with contextlib.suppress(Exception):
        graph.pool()
        return  # the capture had ended, and with it all of this
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        # Where that raises torch has ended it, and will release the pool with the graph.
        torch._C._cuda_releasePool(stream.device_index, pool)
    _failed.append(graph)
    with (
        contextlib.suppress(Exception),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"),
    ):
        # A capture that succeeds leaves the random state as it should be.
        torch.empty(1, device=stream.device).zero_()
    torch.cuda.set_stream(before)


def _leaves(outputs: Tensors, own: Tensors) -> list[torch.Tensor]:
    """Returns the leaves of an autograd graph that are not among ``own``, in a fixed order."""
    known = {id(tensor) for tensor in own}
    found: list[torch.Tensor] = []
    seen: set[Any] = set()

    def note(leaf: torch.Tensor) -> None:
        if id(leaf) not in known:
            known.add(id(leaf))
            found.append(leaf)

    for output in outputs:
        if output.is_leaf:  # a parameter that is returned itself
            note(output)
    waiting = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if leaf is not None:
            note(leaf)
        waiting.extend(following for following, _ in node.next_functions)
    return found
