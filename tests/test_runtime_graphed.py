"""Tests of graphed without a GPU: what it decides, with captures that a test makes up."""

from __future__ import annotations

import contextlib
import operator
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from cuda_ops.errors import GraphError
from cuda_ops.runtime import graphed
from cuda_ops.runtime.graphs import graphed as module
from cuda_ops.runtime.graphs.calls import Call
from cuda_ops.runtime.graphs.captures import Refusal, _leaves
from cuda_ops.runtime.graphs.in_turn import InTurn
from cuda_ops.runtime.graphs.places import Places, Sources, base_of, like
from cuda_ops.runtime.trees import rebuilt_with, tensors_of

# --- decisions, without a GPU -------------------------------------------------


class FakeCapture:
    """Calls the function at each replay; busy if a test says so."""

    # For all instances, and emptied by the fixture.
    made: list[FakeCapture] = []  # noqa: RUF012

    def __init__(self, call: Callable[[Any], Any], tensors: Any) -> None:
        self.call, self.replays, self.busy = call, 0, False
        self.in_turn = types.SimpleNamespace(synchronize=lambda: None)
        FakeCapture.made.append(self)

    def replay(self, tensors: Any, views: bool) -> Any:
        self.replays += 1
        return self.call(tensors)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCapture.made = []

    @contextlib.contextmanager
    def no_waits(watched: bool) -> Iterator[list[str]]:
        yield []

    monkeypatch.setattr(module, "_captures", lambda: True)
    monkeypatch.setattr(module, "_device", lambda tensors: torch.device("cpu"))
    monkeypatch.setattr(module, "_aside", lambda call, tensors, stream: call(tensors))
    monkeypatch.setattr(module, "_waits", no_waits)
    kind = module.Graphed
    monkeypatch.setattr(kind, "_stream", lambda self, device: None)
    monkeypatch.setattr(
        kind, "_captured", lambda self, call, tensors, device: FakeCapture(call, tensors)
    )


@pytest.mark.usefixtures("fake")
def test_the_first_calls_run_and_the_next_is_captured() -> None:
    calls = []

    def double(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return 2 * x

    step = graphed(double, warmup=3)
    for k in range(6):
        assert step(torch.tensor([float(k)])).item() == 2 * k
        assert step.graphs == (k >= 3)
    assert [one.replays for one in FakeCapture.made] == [3]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("change", [
    lambda f, x: f(x[:2]), lambda f, x: f(x.double()), lambda f, x: f(x.expand(3, 4).t()),
    lambda f, x: f(x, 2), lambda f, x: f(x, scale=2), lambda f, x: f(x.requires_grad_()),
    lambda f, x: torch.no_grad()(f)(x), lambda f, x: torch.inference_mode()(f)(x),
])  # fmt: skip
def test_another_kind_gets_another_graph(change: Callable[..., Any]) -> None:
    step = graphed(lambda x, scale=1: x * scale, warmup=1)
    for _ in range(3):
        step(torch.ones(4))
    assert step.graphs == 1
    for _ in range(3):
        change(step, torch.ones(4))
    assert step.graphs == 2


@pytest.mark.usefixtures("fake")
def test_nothing_is_captured_while_another_thread_warms_up() -> None:
    """Both would be on one stream, so the other thread's kernels would be recorded."""
    begun, go_on = threading.Event(), threading.Event()

    def double(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert go_on.wait(100)
        return 2 * x

    step = graphed(double, warmup=1)
    other = threading.Thread(target=step, args=(torch.ones(1),))
    other.start()
    assert begun.wait(100)
    threading.Timer(0.2, go_on.set).start()
    assert step(torch.ones(1)) == 2
    assert step.graphs == 0
    other.join()
    assert step(torch.ones(1)) == 2
    assert step.graphs == 1


@pytest.mark.usefixtures("fake")
def test_training_and_autocast_are_kinds() -> None:
    block = torch.nn.Linear(2, 2)
    step = graphed(block, warmup=1)
    for change in (block.train, block.eval):
        change()
        for _ in range(2):
            step(torch.ones(2))
    assert step.graphs == 2
    torch.set_autocast_enabled("cuda", True)  # torch.autocast warns where there is no GPU
    try:
        for _ in range(2):
            step(torch.ones(2))
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert step.graphs == 3


@pytest.mark.usefixtures("fake")
def test_a_reload_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda_ops.dispatch import compile_tag

    step = graphed(lambda x: x, warmup=1)
    for _ in range(3):
        step(torch.ones(1))
    monkeypatch.setattr(compile_tag, "_tag", "another text")
    for _ in range(3):
        step(torch.ones(1))
    assert step.graphs == 2


@pytest.mark.usefixtures("fake")
def test_what_was_not_used_for_longest_is_dropped() -> None:
    step = graphed(lambda x: x, warmup=1, most=2)

    def use(size: int) -> None:
        step(torch.ones(size))
        step(torch.ones(size))

    for size in (1, 2, 1, 3):
        use(size)
    assert step.graphs == 2
    made = len(FakeCapture.made)
    use(1)
    assert len(FakeCapture.made) == made  # it was used after 2
    use(2)
    assert len(FakeCapture.made) == made + 1
    step.reset()
    assert step.graphs == 0


@pytest.mark.usefixtures("fake")
def test_a_call_that_waits_for_its_backward_is_not_disturbed() -> None:
    step = graphed(lambda x: x, warmup=1, most=100)
    x = torch.ones(1)
    for _ in range(2):
        step(x)
    for k in range(6):
        for one in FakeCapture.made:
            one.busy = True
        step(x)
        assert step.graphs == min(k + 2, 4)  # then it runs as it is
    for one in FakeCapture.made[1:]:
        one.busy = False
    replays = FakeCapture.made[1].replays
    step(x)
    assert FakeCapture.made[1].replays == replays + 1


@pytest.mark.usefixtures("fake")
def test_results_that_grow_are_refused() -> None:
    kept = []

    def grows(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return torch.cat(kept)

    step = graphed(grows)
    step(torch.ones(1))
    with pytest.raises(GraphError, match=r"grows: cannot be captured: its results change .*\(2,\)"):
        step(torch.ones(1))
    assert "its results change" in step.refusals[0]


@pytest.mark.usefixtures("fake")
def test_with_fallback_it_is_called_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, call: Any, tensors: Any, device: Any) -> Any:
        raise Refusal("it sings")

    step = graphed(lambda x: x + 1, warmup=1, fallback=True)
    monkeypatch.setattr(type(step), "_captured", refuse)
    step(torch.ones(1))
    with pytest.warns(RuntimeWarning, match="cannot be captured: it sings; it is called as it is"):
        assert step(torch.ones(1)).item() == 2
    assert step(torch.ones(1)).item() == 2
    strict = graphed(lambda x: x + 1, warmup=1)
    strict(torch.ones(1))
    for _ in range(2):
        with pytest.raises(GraphError, match="it sings; fallback=True calls it as it is"):
            strict(torch.ones(1))


@pytest.mark.usefixtures("fake")
def test_a_refused_call_has_its_effects_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def waits(watched: bool) -> Iterator[list[str]]:
        yield ["file.py:3"] if watched else []

    monkeypatch.setattr(module, "_waits", waits)
    step, x = graphed(lambda x: x.add_(1), fallback=True), torch.zeros(1)
    step(x)
    with pytest.warns(RuntimeWarning, match=r"it waits for the GPU at file\.py:3") as caught:
        assert step(x).item() == 2
    assert caught[0].filename == __file__
    assert step(x).item() == 3


@pytest.mark.usefixtures("fake")
def test_kinds_that_never_get_a_graph_are_forgotten() -> None:
    step = graphed(lambda x, y: x, warmup=3, most=2)
    for k in range(100):
        step(torch.ones(1), float(k))
    step(torch.ones(1), float("nan"))
    step(torch.ones(1), float("nan"))
    assert len(step._kinds) == 16
    assert next(reversed(step._kinds.values())).calls == 2


@pytest.mark.usefixtures("fake")
def test_a_frozen_parameter_and_a_part_in_training_are_kinds() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    step = graphed(block, warmup=1)

    def use() -> int:
        step(torch.ones(2))
        step(torch.ones(2))
        return step.graphs

    assert use() == 1
    block[1].eval()
    assert use() == 2
    block[0].bias.requires_grad_(False)
    assert use() == 3


@pytest.mark.usefixtures("fake")
def test_memory_that_a_parameter_moves_to_is_a_kind() -> None:
    block = torch.nn.Linear(2, 2)
    step = graphed(block, warmup=1)
    for graphs in (1, 2):
        step(torch.ones(2))
        step(torch.ones(2))
        assert step.graphs == graphs
        block.weight.data = block.weight.data.clone()


@pytest.mark.usefixtures("fake")
def test_kinds_that_take_turns_keep_their_graphs() -> None:
    step = graphed(lambda x, scale=1: x * scale, warmup=1)
    for _ in range(4):
        for scale in (2, 2.0, True, -0.0, 0.0):
            assert torch.equal(step(torch.ones(2), scale=scale), torch.full((2,), float(scale)))
    assert step.graphs == 5
    assert [one.replays for one in FakeCapture.made] == [3] * 5


@pytest.mark.usefixtures("fake")
def test_an_argument_without_a_hash_is_named() -> None:
    with pytest.raises(TypeError, match=r"values that have a hash.*got bytearray"):
        graphed(lambda x, y: x)(torch.ones(1), bytearray(2))


def test_without_a_gpu_it_is_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_gpu", bool)

    @graphed(warmup=1)
    def add(x: torch.Tensor, y: float = 1) -> torch.Tensor:
        """Adds."""
        return x + y

    assert add.__doc__ == "Adds."
    assert add.__name__ == "add"
    x = torch.ones(2, requires_grad=True)
    for _ in range(4):
        add(x, y=2).sum().backward()
    assert x.grad.tolist() == [4, 4]


class Scaled:
    """Has a method that becomes graphs."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @graphed(warmup=1)
    def times(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


@pytest.mark.usefixtures("fake")
def test_a_method_has_graphs_for_each_object() -> None:
    two, three, x = Scaled(2), Scaled(3), torch.ones(1)
    for _ in range(3):
        assert two.times(x).item() == 2
        assert three.times(x=x).item() == 3
    assert Scaled.times.graphs == two.times.graphs == 2
    Scaled.times.reset()


def test_a_method_of_a_module_is_refused() -> None:
    class Net(torch.nn.Module):
        @graphed
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(TypeError, match=r"graphed: .*forward: .* got one of Net; call graphed"):
        Net()(torch.ones(1))


def test_a_callable_that_is_no_method_stays_none() -> None:
    class Holder:
        relu = graphed(torch.nn.ReLU())

    assert Holder().relu(torch.tensor([-1.0])).item() == 0


@pytest.mark.usefixtures("fake")
def test_a_copy_begins_without_graphs() -> None:
    linear = graphed(torch.nn.Linear(2, 2), warmup=1, most=3, fallback=True)
    x = torch.ones(1, 2)
    for _ in range(2):
        expected = linear(x)
    for copied in (deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert (linear.graphs, copied.graphs) == (1, 0)
        assert torch.equal(copied(x), expected)
        assert copied._function is not linear._function
        assert (copied._warmup, copied._most, copied._fallback) == (1, 3, True)


@pytest.mark.parametrize("flag", ["views", "fallback"])
def test_a_flag_that_is_no_bool_is_refused(flag: str) -> None:
    expected = f"graphed: argument '{flag}': expected True or False, got 'no'"
    with pytest.raises(TypeError, match=expected):
        graphed(abs, **{flag: "no"})


@pytest.mark.parametrize(("options", "text"), [
    ({"warmup": 0}, "argument 'warmup': expected an int of 1 or more, got 0"),
    ({"most": 0}, "argument 'most': expected an int of 1 or more, got 0"),
])  # fmt: skip
def test_wrong_options_are_named(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        graphed(abs, **options)
    with pytest.raises(TypeError, match="argument 'function': expected a function, got int"):
        graphed(3)


# --- parts of a capture that need no GPU --------------------------------------


@pytest.mark.parametrize("tensor", [
    torch.arange(24.0).view(2, 3, 4).transpose(0, 2), torch.arange(3.0).view(3, 1).expand(3, 5),
    torch.arange(10.0)[1::3], torch.tensor(2.0), torch.zeros(0, 3),
    torch.arange(9.0).unfold(0, 4, 2),
])  # fmt: skip
def test_inputs_of_a_graph_are_like_those_of_the_call(tensor: torch.Tensor) -> None:
    own = like(tensor)
    assert torch.equal(own, tensor)
    assert own.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not len(own)
    if torch._debug_has_internal_overlap(base_of(tensor)) != 1:
        assert own.stride() == tensor.stride()
    Places([own]).fill([tensor + 1])
    assert torch.equal(own, tensor + 1)


@pytest.mark.parametrize(("args", "kwargs"), [
    ((torch.ones(1), 2, None), {"z": torch.ones(3), "a": "text"}),
    (([torch.ones(1), (2, torch.ones(3))],), {"a": {"b": torch.ones(3)}}), ((), {}),
])  # fmt: skip
def test_a_call_is_made_again_with_other_tensors(args: Any, kwargs: Any) -> None:
    call = Call(lambda *args, **kwargs: (args, kwargs), args, kwargs)
    again = call([2 * tensor for tensor in call.tensors])
    assert str(again).replace("2.", "1.") == str((args, kwargs))
    assert call.key() == Call(print, args, kwargs).key()
    assert hash(call.key()) == hash(Call(print, args, kwargs).key())
    assert call.key() != Call(print, (*args, 3), kwargs).key()


@pytest.mark.parametrize("tree", [
    torch.ones(2), (torch.ones(2), torch.ones(1)), [torch.ones(2)], (), {"x": [torch.ones(2), 3]},
    (torch.ones(2), None), None,
])  # fmt: skip
def test_results_have_the_form_of_the_function_s(tree: Any) -> None:
    tensors = [2 * tensor for tensor in tensors_of(tree)]
    again = rebuilt_with(tree)(tensors)
    assert all(map(operator.is_, tensors_of(again), tensors))
    assert str(again).replace("2.", "1.") == str(tree)


@pytest.mark.parametrize("tensors", [
    [], [torch.arange(4.0).view(2, 2).t()], [torch.full((2,), -0.0), torch.tensor(torch.inf)],
    [torch.arange(3), torch.ones(2).expand(3, 2), torch.tensor([True])],
])  # fmt: skip
def test_copies_are_new_memory(tensors: list[torch.Tensor]) -> None:
    copies = Sources(tensors).copies()
    assert len(copies) == len(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert (copy.dtype, str(copy)) == (tensor.dtype, str(tensor))
        assert copy.data_ptr() != tensor.data_ptr()


def test_streams_take_turns_and_wait_only_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    handles, done = [0, 0, 7, 7, 0], []

    def stream(device: torch.device) -> Any:
        own = handles[0]
        return types.SimpleNamespace(
            own=own,
            wait_stream=lambda other: done.append(f"{own} waits for {other.own}"),
            synchronize=lambda: done.append(f"the host waits for {own}"),
        )

    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: handles[0], raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    in_turn = InTurn(torch.device("cuda", 0))
    in_turn.synchronize()
    while handles:
        with in_turn:
            handles.pop(0)
    in_turn.synchronize()
    assert done == ["7 waits for 0", "0 waits for 7", "the host waits for 0"]


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    stream = types.SimpleNamespace(device=None, wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return stream


def test_a_leaf_is_first_read_on_the_current_stream(no_streams: Any) -> None:
    """What adds to its gradient belongs to the stream on which a leaf is first read."""
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    given: list[torch.Tensor] = []

    def step(tensors: Any) -> torch.Tensor:
        given.extend(tensors)
        return tensors[0] * 3

    result = module._aside(step, [x, y], no_streams)
    assert not given[0].is_leaf
    assert given[1] is y
    result.sum().backward()
    assert x.grad.tolist() == [3, 3]
    with torch.no_grad():
        module._aside(step, [x, y], no_streams)
    assert given[2] is x


def test_what_writes_to_a_leaf_fails_or_works_as_without_warm_ups(no_streams: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        module._aside(lambda tensors: tensors[0].add_(1), [x], no_streams)

    def without_gradients(tensors: Any) -> torch.Tensor:
        with torch.no_grad():
            return tensors[0].add_(1)

    module._aside(without_gradients, [x], no_streams)
    assert x.tolist() == [2, 2]


def test_leaves_beside_the_arguments_are_found() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    x = torch.ones(1, 2, requires_grad=True)
    found = _leaves([block(x), block(x) * 2], [x])
    assert {id(one) for one in found} == {id(one) for one in block.parameters()}
