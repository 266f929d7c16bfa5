"""moe of several ranks: each has its own tokens and experts, and gets what one process would."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import multiprocessing.connection
import os
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import shared_boxes
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixtures import ROUNDING, weights

import cuda_ops
from cuda_ops.distributed import Way, symmetric, way, ways
from cuda_ops.ops import _moe_ranks, _moe_senders

WORLDS = (2, 3, 4)


@dataclass(frozen=True)
class Mixture:
    """A call of all ranks together."""

    tokens: tuple[int, ...]
    experts: tuple[int, ...]
    top_k: int
    way: str = "gather"
    dtype: torch.dtype = torch.float64
    scoring: str = "softmax"
    wanted: tuple[bool, ...] = (True, True, True, True)
    compiled: str = ""
    autocast: bool = False
    skewed: bool = False
    seed: int = 0

    def arguments(self) -> list[torch.Tensor]:
        """The arguments of one process with all tokens and experts."""
        torch.manual_seed(self.seed)
        tokens, experts = sum(self.tokens), sum(self.experts)
        x, logits = torch.randn(tokens, 6), torch.randn(tokens, experts)
        if self.skewed:
            logits[:, : self.top_k] += 50
        made = [x, logits, *weights(experts, 6, 4)]
        return [
            value.to(self.dtype).requires_grad_(one)
            for value, one in zip(made, self.wanted, strict=True)
        ]

    def of_rank(self, values: list[Any], rank: int) -> list[Any]:
        """What a rank has of the arguments, or of anything with their shapes."""
        tokens = slice(sum(self.tokens[:rank]), sum(self.tokens[: rank + 1]))
        experts = slice(sum(self.experts[:rank]), sum(self.experts[: rank + 1]))
        return [
            value[part] for value, part in zip(values, (tokens,) * 2 + (experts,) * 2, strict=True)
        ]


def gradients(out: torch.Tensor, arguments: list[torch.Tensor]) -> list[torch.Tensor | None]:
    if out.requires_grad:  # factors that no rounding of the result changes
        (out * arguments[0].detach()).sum().backward()
    return [argument.grad for argument in arguments]


def run(call: Mixture, rank: int, **changed: Any) -> list[torch.Tensor | None]:
    """Returns a rank's result and gradients, on its GPU if the group has GPUs."""
    device = _device(rank)
    arguments = [
        value.detach().to(device, copy=True).requires_grad_(one)
        for value, one in zip(call.of_rank(call.arguments(), rank), call.wanted, strict=True)
    ]
    function = cuda_ops.moe
    if call.compiled:
        torch.compiler.reset()
        function = torch.compile(function, fullgraph=True, backend=call.compiled)
    name, _, chunks = call.way.partition(" ")
    chosen = Way(name, 0, 0, int(chunks or 1))
    group = changed.pop("group", None) or torch.distributed.group.WORLD
    with (
        mock.patch.object(ways, "way", return_value=chosen),
        torch.autocast(device.type, torch.bfloat16, enabled=call.autocast),
    ):
        out = function(*arguments, call.top_k, scoring=call.scoring, group=group, **changed)
    found = [out.detach(), *gradients(out, arguments)]
    return [None if value is None else value.cpu() for value in found]


def _device(rank: int) -> torch.device:
    gpus = torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", rank) if gpus else torch.device("cpu")


def by_memory(call: Mixture, rank: int) -> list[torch.Tensor | None]:
    """Sends by memory that ranks share, as GPUs do: in boxes that grow between two calls of equal
    sizes, and then by what is kept of a call.
    """
    less = dataclasses.replace(call, tokens=tuple(count // 2 for count in call.tokens))
    large = call.seed % 2 == 1  # as if what is sent were
    with (
        shared_boxes.on_cpus(),
        mock.patch.object(_moe_senders, "_SOON", 0.0 if large else 1.0),
        mock.patch.object(symmetric, "_SMALL", -1 if large else 1 << 20),
    ):
        before = run(less, rank)
        run(call, rank)
        torch.testing.assert_close(run(less, rank), before, rtol=0, atol=0)
        with contextlib.ExitStack() as made_before:
            if call.way != "dispatch":
                nothing = mock.patch.object(_moe_ranks, "sender_of", side_effect=AssertionError)
                made_before.enter_context(nothing)
            found = run(call, rank)
        gc.disable()  # the memory goes with its group, not when a cycle is looked for
        try:
            memory = symmetric.memory_of(torch.distributed.group.WORLD, _device(rank))
            known = weakref.ref(memory)
            del memory
            symmetric._memories.clear()
            assert known() is None
        finally:
            gc.enable()
        return found


def of_mesh(call: Mixture, rank: int) -> list[torch.Tensor | None]:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (len(call.tokens),))
    return run(call, rank, group=mesh)


def refuses(call: Mixture, rank: int) -> list[str]:
    """Returns what a rank raises where rank 1 brings something else; then all go on."""
    found = []
    group = torch.distributed.group.WORLD
    x, logits, gate_up, down = call.of_rank(call.arguments(), rank)
    k = call.top_k
    wrong = {
        "dtype": ((x.float(), logits, gate_up.float(), down.float()), k),
        "mixed": ((x, logits, gate_up.float(), down), k),
        "shape": ((x, logits[:, :-1], gate_up, down), k),
        "leading": ((x, logits[:-1], gate_up, down), k),
        "matrix": ((x, logits, gate_up[:, :-1], down), k),
        "gradient": ((x.detach(), logits.detach(), gate_up.detach(), down.detach()), k),
        "top_k": ((x, logits, gate_up, down), k + 1),
        # Their weights are of another dtype too, and so of another size.
        "logits": ((x, logits.float(), gate_up, down), k),
    }
    right = (x, logits, gate_up, down), k
    for one in wrong.values():
        arguments, top_k = one if rank == 1 else right
        with pytest.raises(RuntimeError) as error:
            cuda_ops.moe(*arguments, top_k, group=group)
        found.append(str(error.value))
    run(call, rank)
    return found


def without_one(call: Mixture, rank: int) -> str:
    """Rank 1 does not call; the others say so."""
    if rank == 1:
        return ""
    with pytest.raises(RuntimeError) as error:
        run(call, rank)
    return str(error.value)


def _serve(rank: int, world: int, store: str, backend: str, connection: Any) -> None:
    """Runs what comes through the connection, in one process of a group."""
    if backend == "nccl":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not allowed everywhere
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # daemons may have no processes
    torch.distributed.init_process_group(
        backend, store=torch.distributed.FileStore(store, world), rank=rank, world_size=world
    )
    while (asked := connection.recv()) is not None:
        function, arguments = asked
        try:
            connection.send((True, function(*arguments, rank)))
        except BaseException:  # the other process raises it
            connection.send((False, traceback.format_exc()))
    os._exit(0)  # a group that has failed would wait for the others


class Ranks:
    """The processes of a group, which run the same function."""

    def __init__(self, world: int, store: Path, backend: str = "gloo") -> None:
        self._lost = False
        spawning = multiprocessing.get_context("spawn")
        ends = [spawning.Pipe() for _ in range(world)]
        self._here = [here for here, _ in ends]
        self._processes = [
            spawning.Process(
                target=_serve, args=(rank, world, str(store), backend, there), daemon=True
            )
            for rank, (_, there) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def __call__(self, function: Any, *arguments: Any) -> list[Any]:
        assert not self._lost, "these ranks have failed before"
        self._lost = True  # one that raises may leave the others waiting
        for end in self._here:
            end.send((function, arguments))
        waiting, found = {end: rank for rank, end in enumerate(self._here)}, {}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), 280)
            assert ready, f"ranks {[*waiting.values()]} do not answer"
            for end in ready:
                right, value = end.recv()
                assert right, value  # others may wait for this one
                found[waiting.pop(end)] = value
        self._lost = False
        return [found[rank] for rank in range(len(found))]

    def close(self) -> None:
        for end in self._here:
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def _build() -> None:
    """Has moe built before the ranks ask for it."""
    cuda_ops.moe(torch.ones(1, 2), torch.ones(1, 1), torch.ones(1, 2, 2), torch.ones(1, 2, 1), 1)


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    _build()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_OPS_RANKS_TIMEOUT", "250")
        group = Ranks(request.param, tmp_path_factory.mktemp("ranks") / "store")
        yield request.param, group
        group.close()


def check(call: Mixture, found: list[list[torch.Tensor | None]]) -> None:
    """Compares with one process that has all."""
    whole = call.arguments()
    with torch.autocast("cpu", torch.bfloat16, enabled=call.autocast):
        out = cuda_ops.moe(*whole, call.top_k, scoring=call.scoring)
    filled = [
        value if grad is None else grad
        for value, grad in zip(whole, gradients(out, whole), strict=True)
    ]
    rounding = ROUNDING[torch.bfloat16 if call.autocast else call.dtype]
    for rank, (result, *grads) in enumerate(found):
        expected = call.of_rank([out, *whole[1:]], rank)[0]
        torch.testing.assert_close(result, expected.detach(), rtol=rounding, atol=4 * rounding)
        for grad, part, one in zip(grads, call.of_rank(filled, rank), call.wanted, strict=True):
            if one:
                torch.testing.assert_close(grad, part, rtol=rounding, atol=8 * rounding)
            else:
                assert grad is None


@st.composite
def mixtures(draw: Any, world: int) -> Mixture:
    counts = st.tuples(*[st.integers(0, 5)] * world)
    tokens, experts = draw(counts), draw(counts.filter(any))
    return Mixture(
        tokens,
        experts,
        draw(st.integers(1, min(4, sum(experts)))),
        draw(st.sampled_from(["gather", "gather 3", "dispatch"])),
        draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])),
        draw(st.sampled_from(["softmax", "sigmoid"])),
        draw(st.one_of(st.just((False,) * 4), st.tuples(*[st.booleans()] * 4))),
        skewed=draw(st.booleans()),
        seed=draw(st.integers(0, 100)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", [run, by_memory])
def test_ranks_get_what_one_process_would(ranks: Any, how: Any) -> None:
    world, together = ranks

    @settings(
        max_examples=40, deadline=None, database=None, derandomize=True,
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(mixtures(world))
    def holds(call: Mixture) -> None:
        check(call, together(how, call))

    holds()


def in_this_way(call: Mixture, way: str, rank: int) -> list[torch.Tensor | None]:
    """Calls moe where more than kernels takes part, at one rank or at all."""
    arguments = [
        value.detach().clone().requires_grad_(way != "inference")
        for value in call.of_rank(call.arguments(), rank)
    ]
    group = torch.distributed.group.WORLD

    def of(*given: torch.Tensor) -> torch.Tensor:
        return cuda_ops.moe(*given, call.top_k, group=group)

    with contextlib.ExitStack() as around:
        if way == "inference":
            around.enter_context(torch.inference_mode())
        if way in ("profiled", "recomputed, one rank profiled before") and rank == 1:
            around.enter_context(torch.profiler.profile())
        if way == "saved elsewhere":
            around.enter_context(torch.autograd.graph.save_on_cpu())
        if way.startswith("recomputed"):
            out = torch.utils.checkpoint.checkpoint(of, *arguments, use_reentrant=False)
        else:
            out = of(*arguments)
    if way == "written to":
        out = out.mul_(2)
        out.mul_(0.5)
    with contextlib.ExitStack() as around:
        if way == "recomputed, one rank profiled after" and rank == 1:
            around.enter_context(torch.profiler.profile())
        return [out.detach(), *gradients(out, arguments)]


@pytest.mark.parametrize("way", [
    "plain", "profiled", "inference", "saved elsewhere", "recomputed",
    "recomputed, one rank profiled before", "recomputed, one rank profiled after", "written to",
])  # fmt: skip
def test_profilers_hooks_and_checkpoints_change_no_result(ranks: Any, way: str) -> None:
    world, together = ranks
    call = Mixture(TOKENS[:world], EXPERTS[:world], 2)
    wanted = (way != "inference",) * 4
    check(dataclasses.replace(call, wanted=wanted), together(in_this_way, call, way))


#: What the ranks have, of which two and more take the first.
TOKENS, EXPERTS = (3, 0, 5, 1), (1, 4, 0, 2)
GPUS = [(2, True), (2, False), (4, True), (4, False)]


@pytest.fixture(
    scope="module", params=GPUS,
    ids=[f"{world} ranks, {'shared memory' if may else 'NCCL alone'}" for world, may in GPUS],
)  # fmt: skip
def gpus(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Ranks]]:
    world, may_share = request.param
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA GPUs")  # each rank has its own
    _build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(symmetric.SWITCH, str(int(may_share)))
        group = Ranks(world, tmp_path_factory.mktemp("gpus") / "store", "nccl")
        yield world, group
        group.close()


def shares(call: Mixture, rank: int) -> bool:
    """Returns whether a rank has written to the others' memory."""
    run(call, rank)
    memory = symmetric.memory_of(torch.distributed.group.WORLD, _device(rank))
    return memory is not None and memory.fits(gathered=1, returned=1)


@pytest.mark.slow
def test_gpus_share_memory_if_they_may(gpus: tuple[int, Ranks]) -> None:
    world, together = gpus
    allowed = os.environ[symmetric.SWITCH] == "1"
    assert together(shares, Mixture(TOKENS[:world], EXPERTS[:world], 2)) == [allowed] * world


@pytest.mark.slow
def test_gpus_get_what_one_process_would(gpus: tuple[int, Ranks]) -> None:
    world, together = gpus

    @settings(
        max_examples=40, deadline=None, database=None, derandomize=True,
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(mixtures(world))
    def holds(call: Mixture) -> None:
        check(call, together(run, call))

    holds()


def in_a_graph(call: Mixture, rank: int) -> list[torch.Tensor]:
    """Returns what a replay makes of other tokens, and what a call does."""
    arguments = [v.detach().to(_device(rank)) for v in call.of_rank(call.arguments(), rank)]
    group = torch.distributed.group.WORLD

    def step() -> torch.Tensor:
        return cuda_ops.moe(*arguments, call.top_k, group=group)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    arguments[0].normal_()
    arguments[1].normal_()
    graph.replay()
    return [out.cpu(), step().cpu()]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"compiled": "inductor"}, {"autocast": True}])
def test_gpus_in_other_ways(gpus: tuple[int, Ranks], options: dict[str, Any]) -> None:
    world, together = gpus
    for kind in ("gather", "gather 2", "dispatch"):
        sizes = TOKENS[:world], EXPERTS[:world]
        call = Mixture(*sizes, 2, kind, torch.float32, **options, wanted=wanted(kind))
        check(call, together(run, call))


@pytest.mark.slow
def test_gpus_replay_a_graph(gpus: tuple[int, Ranks]) -> None:
    world, together = gpus
    call = Mixture((4,) * world, (2,) * world, 2, dtype=torch.float32)
    for replayed, called in together(in_a_graph, call):
        torch.testing.assert_close(replayed, called)


def while_products_ran(rank: int) -> tuple[float, float]:
    """Returns the part of the copies between GPUs, and of the kernels of NCCL, with products beside
    them.
    """
    made = {"device": f"cuda:{rank}", "dtype": torch.bfloat16}
    x, logits = torch.randn(8192, 4096, **made), torch.randn(8192, 8, **made)
    own = 8 // torch.distributed.get_world_size()
    gate_up = torch.randn(own, 8192, 4096, **made) / 64
    down = torch.randn(own, 4096, 4096, **made) / 64
    chosen = Way("gather", 0, 0, 4)
    with mock.patch.object(ways, "way", return_value=chosen):

        def call() -> None:
            cuda_ops.moe(x, logits, gate_up, down, 2, group=torch.distributed.group.WORLD)

        call()
        torch.cuda.synchronize()
        with cuda_ops.runtime.trace() as traced:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
    between = [copy for copy in traced.copies if "PtoP" in copy.kind]
    seconds = sum(copy.seconds for copy in between)
    beside = sum(copy.overlapped_seconds for copy in between)
    return beside / seconds if between else 0.0, traced.overlap.kernels


@pytest.mark.slow
def test_gpus_send_while_products_run(gpus: tuple[int, Ranks]) -> None:
    """As a trace says it: how much depends on how far ahead of the GPUs the host is."""
    _, together = gpus
    for copies, kernels in together(while_products_ran):
        assert (copies if os.environ[symmetric.SWITCH] == "1" else kernels) > 0


WAYS = pytest.mark.parametrize("kind", ["gather", "gather 2", "dispatch"])


def wanted(kind: str) -> tuple[bool, ...]:
    """Which gradients are wanted: none with chunks, which are for calls without."""
    return (" " not in kind,) * 4


@WAYS
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"compiled": "aot_eager"},
        {"compiled": "inductor"},
        {"autocast": True, "dtype": torch.float32},
    ],
)
def test_ways_of_calling(ranks: Any, kind: str, options: dict[str, Any]) -> None:
    world, together = ranks
    call = Mixture(TOKENS[:world], EXPERTS[:world], 2, kind, **options, wanted=wanted(kind))
    check(call, together(run, call))


@WAYS
@pytest.mark.slow
def test_the_same_bits_each_time(ranks: Any, kind: str) -> None:
    world, together = ranks
    call = Mixture(TOKENS[:world], EXPERTS[:world], 3, kind, torch.bfloat16, wanted=wanted(kind))
    first, second = together(run, call), together(run, call)
    assert all(
        a is b is None or torch.equal(a, b)
        for x, y in zip(first, second, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.slow
def test_a_dim_of_a_mesh_is_a_group(ranks: Any) -> None:
    world, together = ranks
    call = Mixture(TOKENS[:world], EXPERTS[:world], 2)
    check(call, together(of_mesh, call))


@pytest.mark.slow
def test_all_ranks_refuse_together_and_go_on(ranks: Any) -> None:
    world, together = ranks
    call = Mixture((3,) * world, (2,) * world, 2)
    for rank, texts in enumerate(together(refuses, call)):
        dtype, mixed, shape, leading, matrix, gradient, top_k, logits = texts
        assert "expected the same dtype at all ranks, got [0, 1" in dtype
        assert "expected the same dtype of weights at all ranks, got [0, 1" in logits
        assert "expected the same logits of a token at all ranks" in shape
        assert "expected the same top_k at all ranks, got [2, 3" in top_k
        assert "expected the same call with gradients at all ranks" in gradient
        for text, argument in (
            (mixed, "w_gate_up"),
            (leading, "router_logits"),
            (matrix, "w_gate_up"),
        ):
            assert f"cuda_ops::moe: argument '{argument}': expected" in text
            assert ("rank 1 of the group refuses" in text) == (rank != 1)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_OPS_RANKS_TIMEOUT", "2")
    together = Ranks(3, tmp_path / "store")
    try:
        call = Mixture((3,) * 3, (2,) * 3, 2)
        together(run, call)  # the groups are made by all
        first, _, third = together(without_one, call)
    finally:
        together.close()
    assert first == third
    assert "ranks of the group that did not come to call 2: 1 (of 3; waited 2 s" in first


def test_a_way_is_chosen_by_bytes() -> None:
    assert way([64] * 2, [64] * 2, 8, 4096).name == "gather"
    assert way([8192] * 2, [64] * 2, 8, 4096).name == "gather"  # nearly every token goes anyway
    eight = way([16384] * 8, [1] * 8, 2, 8192)
    assert eight.name == "dispatch" and eight.gather_bytes == 7 * 16384 * 8192
    text = (
        "dispatch: 939524096 bytes each way by gather, in 2 chunks, 234881024 by dispatch, which "
        "saves 3132 us on the wire and takes"
    )
    assert str(eight).startswith(text)
    assert [way([n] * 2, [64] * 2, 8, 4096).chunks for n in (0, 8192, 16384, 65536)] == [1, 1, 2, 2]
    assert way([5, 0], [0, 3], 2, 8).dispatch_bytes == 40


def alone(call: Mixture, rank: int) -> list[str]:
    """What transforms and second derivatives raise at each rank."""
    x, logits, *matrices = call.of_rank(call.arguments(), rank)
    group = torch.distributed.group.WORLD

    def moe(x: torch.Tensor) -> torch.Tensor:
        return cuda_ops.moe(x, logits, *matrices, call.top_k, group=group)

    grad = torch.autograd.grad(moe(x).square().sum(), x, create_graph=True)[0]
    texts = []
    for wrong in (lambda: torch.func.vmap(moe)(x[None]), lambda: grad.sum().backward()):
        with pytest.raises(RuntimeError) as error:
            wrong()
        texts.append(str(error.value))
    return texts


@pytest.mark.slow
def test_what_there_is_not_is_named(ranks: Any) -> None:
    world, together = ranks
    for texts in together(alone, Mixture((2,) * world, (2,) * world, 2)):
        assert "cuda_ops::moe: transforms of torch.func do not reach other ranks" in texts[0]
        assert "cuda_ops::moe_backward has no gradient: second derivatives" in texts[1]


@pytest.mark.parametrize("group", [3, "world"])
def test_a_group_is_a_group(group: Any) -> None:
    with pytest.raises(RuntimeError, match="argument 'group': expected a ProcessGroup or one dim"):
        cuda_ops.moe(
            torch.ones(1, 2), torch.ones(1, 1), torch.ones(1, 2, 2), torch.ones(1, 2, 1), 1,
            group=group,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (([], [], 1, 8), "argument 'tokens': expected a number for each rank, got none"),
        (([1, 2], [1], 1, 8), "argument 'experts': expected a number for each of 2 ranks, got 1"),
        (([1], [1], 2, 8), "argument 'top_k': expected at most 1, the experts of all ranks, got 2"),
        (([1], [-1], 1, 8), "argument 'experts': expected an int of 0 or more, got -1"),
        (([1], [1], 1, 2.5), "argument 'row_bytes': expected an int of 0 or more, got 2.5"),
    ],
)
def test_a_way_of_no_ranks_or_experts_is_refused(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"way: {text}"):
        way(*given)
