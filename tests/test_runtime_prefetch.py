"""Tests of prefetch and to_host on a CPU, with copies that a fake stream delays."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
import warnings
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import needs_no_gpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import pack_sequence

from cuda_ops.runtime import prefetch, to_host
from cuda_ops.runtime.overlap import prefetching, turns
from cuda_ops.runtime.overlap.lanes import Moved
from cuda_ops.runtime.overlap.prefetching import Prefetch, _Sent
from cuda_ops.runtime.overlap.staging import Pinned
from cuda_ops.runtime.trees import map_tensors, tensors_of

Pair = namedtuple("Pair", ("first", "second"))


@dataclasses.dataclass(frozen=True)
class Example:
    x: torch.Tensor
    name: str


class Names(dict):
    pass


def batches(count: int = 6, size: int = 4) -> Iterator[torch.Tensor]:
    for k in range(count):
        yield torch.full((size,), float(k))


# --- a stream without a GPU ---------------------------------------------------


class FakeStream:
    """Runs what it is given late: when it is waited for, or by chance."""

    lock = threading.RLock()  # one for all, as one may wait for another

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._waiting: list[Any] = []
        self._done = 0
        self._given = 0

    def enqueue(self, work: Any) -> int:
        with FakeStream.lock:
            self._waiting.append(work)
            self._given += 1
            return self._given

    def run_to(self, number: int) -> None:
        with FakeStream.lock:
            while self._done < number:
                self._waiting.pop(0)()
                self._done += 1

    def run_some(self) -> None:
        if self._chance.random() < 0.5:
            self.run_to(self._given)


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._number = stream.enqueue(lambda: None)

    def synchronize(self) -> None:
        self._stream.run_to(self._number)


class FakeLane:
    """Copies out of pinned memory when its stream gets there, and counts what is on the GPU.

    Memory is given out again as soon as no tensor holds it, as the allocator of a stream does,
    and reads of the loop that come too late find what is there by then.
    """

    def __init__(self, chance: random.Random, staged: bool = True) -> None:
        self.copies, self.loop = FakeStream(chance), FakeStream(chance)
        self._staged = staged
        self.blocks: list[tuple[bytearray, list[StorageWeakRef]]] = []

    def pinned(self) -> Pinned:
        return Pinned(pin=False)

    def stage(self, batch: Any, pinned: Pinned) -> Any:
        self.copies.run_some()
        return map_tensors(pinned.put, batch) if self._staged else batch

    def send(self, batch: Any) -> Moved:
        copies = []

        def late(tensor: torch.Tensor) -> torch.Tensor:
            there, alias = self._taken(tensor)
            self.copies.enqueue(lambda: alias.copy_(tensor))
            copies.append(there)
            return there

        return Moved(map_tensors(late, batch), copies, [], FakeEvent(self.copies))

    def _taken(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a tensor in free memory, and one that is not the loop's in the same."""
        for block, users in self.blocks:
            if len(block) == like.nbytes and all(one.expired() for one in users):
                break
        else:
            block, users = bytearray(b"\xff" * like.nbytes), []
            self.blocks.append((block, users))
        there, alias = (torch.frombuffer(block, dtype=like.dtype).view(like.shape) for _ in "12")
        users[:] = [StorageWeakRef(there.untyped_storage())]
        return there, alias

    def receive(self, ready: FakeEvent, shared: Any = None) -> FakeStream:
        self.loop.enqueue(ready.synchronize)
        return self.loop

    def follow(self, reader: FakeStream) -> None:
        self.copies.enqueue(FakeEvent(reader).synchronize)

    def close(self) -> None:
        pass

    def first(self, address: int) -> float:
        """Returns what is at an address now, whether a tensor is there or not."""
        for block, _ in self.blocks:
            bytes_ = torch.frombuffer(block, dtype=torch.uint8)
            if 0 <= (offset := address - bytes_.data_ptr()) < len(block):
                return bytes_[offset : offset + 4].view(torch.float32).item()
        raise AssertionError("no memory of the lane")


def read_late(lane: FakeLane, found: list[float], x: torch.Tensor) -> None:
    """Reads a batch when the loop's stream gets there, as a kernel would, which holds nothing."""
    address = x.data_ptr()
    lane.loop.enqueue(lambda: found.append(lane.first(address)))


def read_all(lane: FakeLane, depth: int, view: bool = False, late: bool = True) -> list[float]:
    """Returns what a loop finds in 20 batches, at its end or soon."""
    found: list[float] = []
    for x in Prefetch(batches(20), torch.device("cpu"), depth)._iterate(lane):
        if view:
            held = x[1:]
            del x
            lane.loop.run_some()
            read_late(lane, found, held)
            del held
            time.sleep(0.001)  # the thread goes on before the next batch ends
        else:
            read_late(lane, found, x)
            del x
        if late:
            lane.loop.run_some()
        else:
            lane.loop.run_to(lane.loop._given)
    lane.loop.run_to(lane.loop._given)
    return found


RIGHT = [float(k) for k in range(20)]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_copies_that_come_late_are_waited_for(depth: int, seed: int, view: bool) -> None:
    lane = FakeLane(random.Random(seed))
    assert read_all(lane, depth, view) == RIGHT
    assert len(lane.blocks) <= depth


@pytest.mark.parametrize("taken_out", ["wait_for_copies", "wait_event", "follow", "end of memory"])
def test_without_its_events_a_late_copy_is_seen(
    taken_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above finds what it looks for."""
    lane = FakeLane(random.Random(0))
    lane.copies.run_some = lambda: None
    if taken_out == "wait_for_copies":
        monkeypatch.setattr(_Sent, "wait_for_copies", lambda self: None)
    elif taken_out == "wait_event":
        monkeypatch.setattr(FakeLane, "receive", lambda self, ready, shared=None: self.loop)
    elif taken_out == "follow":
        monkeypatch.setattr(FakeLane, "follow", lambda self, reader: None)
        lane.loop.run_some = lambda: None
    else:
        # Behind the end of the tensor that the loop got, and not of the view that it reads.
        send = FakeLane.send

        def early(self: FakeLane, batch: Any) -> Moved:
            moved = send(self, batch)
            weakref.finalize(moved.tree, FakeLane.follow, self, self.loop)
            return moved

        monkeypatch.setattr(FakeLane, "send", early)
        monkeypatch.setattr(prefetching, "_follow_at_the_end", lambda memory, lane, sent: None)
        lane.loop.run_some = lambda: None
    view, late = taken_out == "end of memory", taken_out != "wait_event"
    assert read_all(lane, 2, view, late) != RIGHT


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_batch_is_over_on_the_stream_that_got_it(
    forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch is dropped while the loop is on the other stream already."""
    lane = FakeLane(random.Random(0))
    streams, found = [FakeStream(random.Random(seed)) for seed in (1, 2)], {}
    if forgotten:
        follow = FakeLane.follow
        monkeypatch.setattr(FakeLane, "follow", lambda self, reader: follow(self, self.loop))
    lane.loop = streams[0]
    for k, x in enumerate(Prefetch(batches(20), torch.device("cpu"), 2)._iterate(lane)):
        read_late(lane, found.setdefault(k, []), x)
        lane.loop = streams[(k + 1) % 2]
    for stream in streams:
        stream.run_to(stream._given)
    assert (found == {k: [float(k)] for k in range(20)}) is not forgotten


def test_the_end_of_memory_is_told_before_it_is_free() -> None:
    """What the safety of a batch rests on, and torch does not write down."""
    seen = []

    def ends(x: torch.Tensor) -> None:
        memory = x.untyped_storage()
        weak = StorageWeakRef(memory)
        weakref.finalize(memory, lambda: seen.append(weak.expired()))

    x = torch.ones(3)
    ends(x)
    view = x[1:]
    del x
    assert seen == []
    del view
    assert seen == [False]
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3)
    ends(x)
    loss = (weight * x).sum()
    del x
    assert seen == [False]
    loss.backward()
    assert seen == [False, False]


def test_memory_that_stays_is_not_watched_for_ever() -> None:
    x = torch.ones(3)
    before = weakref.getweakrefcount(x.untyped_storage())
    turn = turns.Turn()
    turn.release_after(turns.memory_of([x, x[1:]]))
    turn.release()
    turn.wait()
    assert weakref.getweakrefcount(x.untyped_storage()) == before


def test_the_memory_of_tensors_is_that_of_their_parts() -> None:
    x = torch.eye(3)
    jagged = torch.nested.nested_tensor([x, x], layout=torch.jagged)
    sizes = [[part.nbytes() for part in turns.memory_of([one])] for one in (x, x[1], x.to_sparse())]
    assert sizes == [[36], [36], [48, 12]]
    assert [part.nbytes() for part in turns.memory_of([jagged])][:2] == [72, 24]


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_no_more_batches_than_depth_are_there(depth: int) -> None:
    there: list[Any] = []
    most = 0

    class Counted(FakeLane):
        def send(self, batch: Any) -> Moved:
            moved = FakeLane.send(self, batch)
            there.append(StorageWeakRef(moved.tree.untyped_storage()))
            nonlocal most
            most = max(most, sum(not one.expired() for one in there))
            return moved

    lane = Counted(random.Random(1))
    for x in Prefetch(batches(30), torch.device("cpu"), depth)._iterate(lane):
        time.sleep(0.002)  # the thread goes as far ahead as it may
        assert x.shape == (4,)
    assert most == depth == len(lane.blocks)


def test_with_room_for_one_nothing_is_copied_ahead() -> None:
    lane = FakeLane(random.Random(0))
    lane.loop.run_some = lane.copies.run_some = lambda: None
    loop = Prefetch(batches(3), torch.device("cpu"), 1)._iterate(lane)
    found: list[float] = []
    kept = [next(loop)]
    read_late(lane, found, kept[0])
    assert found == []
    kept.append(next(loop))
    lane.copies.run_to(lane.copies._given)  # the second copy, behind the first batch's use
    assert found == [0.0]
    loop.close()


def test_a_loop_that_keeps_all_batches_gets_all() -> None:
    kept = list(Prefetch(batches(9), torch.device("cpu"), 2)._iterate(FakeLane(random.Random(3))))
    assert len({x.data_ptr() for x in kept}) == 9


def test_the_loader_runs_ahead_in_a_thread_and_no_further() -> None:
    taken: list[int] = []

    def loader() -> Iterator[torch.Tensor]:
        for k, x in enumerate(batches(10)):
            taken.append(k)
            yield x

    loop = Prefetch(loader(), torch.device("cpu"), 2)._iterate(FakeLane(random.Random(0)))
    x = next(loop)
    for _ in range(200):
        if len(taken) == 3:
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert taken == [0, 1, 2]  # one in hand, one sent, one that waits for its place
    assert x[0] == 0
    loop.close()


def test_an_exception_of_the_loader_comes_in_its_place() -> None:
    def loader() -> Iterator[torch.Tensor]:
        yield from batches(3)
        raise OSError("disk")

    loop = Prefetch(loader(), torch.device("cpu"), 2)._iterate(FakeLane(random.Random(0)))
    assert len([next(loop) for _ in range(3)]) == 3
    with pytest.raises(OSError, match="disk"):
        next(loop)


def test_a_loop_that_ends_early_ends_the_loader_and_its_thread() -> None:
    closed = []

    def loader() -> Iterator[torch.Tensor]:
        try:
            yield from batches(100)
        finally:
            closed.append(threading.current_thread().name)

    lane = FakeLane(random.Random(0))
    prefetched = Prefetch(loader(), torch.device("cpu"), 2)
    for _ in prefetched._iterate(lane):
        break
    assert closed == ["cuda_ops.prefetch"]
    assert not [t for t in threading.enumerate() if t.name == "cuda_ops.prefetch"]
    assert not lane.copies._waiting  # nothing is in flight
    assert len(prefetched._spare) == 2


def test_a_loader_that_does_not_come_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_PATIENCE", 0.05)
    go_on = threading.Event()

    def loader() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        go_on.wait()

    loop = Prefetch(loader(), torch.device("cpu"), 2)._iterate(FakeLane(random.Random(0)))
    next(loop)
    with pytest.warns(RuntimeWarning, match="the loader has not come back for 0.05 s"):
        loop.close()
    go_on.set()


def test_pinned_memory_is_used_again() -> None:
    lane = FakeLane(random.Random(0))
    prefetched = Prefetch([torch.zeros(100), torch.ones(50)] * 5, torch.device("cpu"), 2)
    for _ in range(3):
        assert [x.numel() for x in prefetched._iterate(lane)] == [100, 50] * 5
    assert [pinned._memory.numel() for pinned in prefetched._spare] == [512, 512]


# --- pinned memory and trees --------------------------------------------------


@pytest.mark.parametrize("tensor", [
    torch.arange(24).view(2, 3, 4).transpose(0, 2),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(3, 1).expand(3, 5),
    torch.tensor(1 + 2j),
    torch.tensor([True, False]),
    torch.randn(10)[1::3],
    torch.zeros(3, 0),
])  # fmt: skip
def test_staged_tensors_look_as_tensor_to_leaves_them(tensor: torch.Tensor) -> None:
    pinned = Pinned(pin=False)
    for _ in range(2):  # the second time the memory is large enough
        pinned.clear()
        first, second = pinned.put(tensor), pinned.put(tensor + (tensor.dtype != torch.bool))
        assert torch.equal(first, tensor)
        assert torch.equal(second, tensor + (tensor.dtype != torch.bool))
        assert first.stride() == torch.empty_like(tensor).stride()


def test_trees_keep_their_types() -> None:
    x = torch.zeros(2)
    tree = {
        "a": [x, (x, "text", None)], "pair": Pair(x, 1), "example": Example(x, "n"),
        "ordered": OrderedDict(x=x), "names": Names(x=x), "user": UserDict(x=x),
    }  # fmt: skip
    mapped = map_tensors(lambda one: one + 1, tree)
    assert len(tensors_of(tree)) == len(tensors_of(mapped)) == 7
    assert all(torch.equal(one, torch.ones(2)) for one in tensors_of(mapped))
    assert all(torch.equal(one, torch.zeros(2)) for one in tensors_of(tree))
    for key in tree:
        assert type(mapped[key]) is type(tree[key])
    assert mapped["a"][1][1:] == ("text", None)
    assert mapped["example"].name == "n"


class Labeled(list[Any]):
    """A list whose constructor takes something else."""

    def __init__(self, label: str, *items: Any) -> None:
        super().__init__(items)
        self.label = label


class Point(tuple[Any, ...]):
    """A tuple whose constructor takes something else."""

    label: str

    def __new__(cls, x: Any, *, label: str) -> Point:
        made = super().__new__(cls, (x, 2 * x))
        made.label = label
        return made


class Deeper(Pair):
    """A named tuple with a constructor of its own."""

    def __new__(cls, x: Any) -> Deeper:
        return super().__new__(cls, x, "other")


def test_constructors_of_subclasses_are_not_called() -> None:
    x = torch.ones(1)
    batch = {"list": Labeled("a", x, 3), "point": Point(x, label="b"), "pair": Deeper(x)}
    (moved,) = prefetch([[batch, x.shape]], "cpu")
    found: dict[str, Any] = moved[0]
    assert [type(one) for one in found.values()] == [Labeled, Point, Deeper]
    assert found["list"] == [x, 3] and found["list"].label == "a"
    assert found["point"] == (x, 2 * x) and found["point"].label == "b"
    assert found["pair"] == (x, "other")
    assert found["list"] is not batch["list"] and moved[1] == (1,)


def test_a_batch_that_holds_itself_is_refused() -> None:
    batch: list[Any] = [torch.ones(1)]
    batch.append(batch)
    with pytest.raises(ValueError, match=r"^prefetch: a batch: expected .* that holds itself"):
        list(prefetch([batch], "cpu"))


def test_packed_sequences_keep_their_batch_sizes() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    mapped = map_tensors(lambda one: one * 2, packed)
    assert type(mapped) is type(packed)
    assert torch.equal(mapped.data, packed.data * 2)
    assert torch.equal(mapped.batch_sizes, packed.batch_sizes)


# --- the public functions on a CPU --------------------------------------------


def test_on_a_cpu_the_loader_is_iterated_in_its_thread() -> None:
    names = []

    def loader() -> Iterator[dict[str, Any]]:
        for x in batches(3):
            names.append(threading.current_thread().name)
            yield {"x": x, "name": "a"}

    given = prefetch(loader(), "cpu")
    assert [batch["x"][0].item() for batch in given] == [0, 1, 2]
    assert set(names) == {threading.current_thread().name}


def test_it_can_be_iterated_again_and_has_a_length() -> None:
    given = prefetch([torch.zeros(1)] * 4, "cpu")
    assert len(given) == len(list(given)) == len(list(given)) == 4


DEVICE = "^prefetch: argument 'device': expected a CPU or CUDA device of this machine, got "


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ((3, "cpu"), TypeError, "prefetch: argument 'loader': expected an iterable, got int"),
    (([], "cpu", 0), ValueError, "argument 'depth': expected an int of 1 or more, got 0"),
    (([], "cpu", True), ValueError, "argument 'depth': expected an int of 1 or more, got True"),
    (([], "foo"), ValueError, DEVICE + "'foo'$"),
    (([], "mps"), ValueError, DEVICE + "'mps'$"),
    (([], torch.device("meta")), ValueError, DEVICE + "'meta'$"),
    (([], 1.0), ValueError, DEVICE + "1.0$"),
    (([], True), ValueError, DEVICE + "True$"),
    (([], "cuda:99"), ValueError, DEVICE + "'cuda:99', and torch sees "),
    (([], 99), ValueError, DEVICE + "99, and torch sees "),
])  # fmt: skip
def test_wrong_arguments_are_named(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        prefetch(*arguments)


@needs_no_gpu
def test_without_a_gpu_the_default_is_the_cpu_and_cuda_is_refused() -> None:
    (batch,) = prefetch([torch.ones(2)])
    assert batch.device.type == "cpu"
    with pytest.raises(ValueError, match=DEVICE + "'cuda', .* sees no GPU here; pass 'cpu'$"):
        prefetch([], "cuda")


@pytest.mark.parametrize(("count", "text"), [(1, "1 GPU here"), (2, "2 GPUs here")])
def test_a_gpu_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, text: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for device in (f"cuda:{count}", count, -1):
        with pytest.raises(ValueError, match=f"{DEVICE}{device!r}, and torch sees {text}$"):
            prefetch([], device)
    assert prefetch([], f"cuda:{count - 1}").device.index == count - 1


def test_tensors_without_values_have_no_way_to_the_host() -> None:
    with pytest.raises(ValueError, match=r"^to_host: argument 'tree': .* \(2,\) on 'meta'"):
        to_host([torch.ones(1), torch.empty(2, device="meta")])


def test_a_gradient_is_not_lost_without_a_word() -> None:
    batch = {"x": torch.zeros(2, requires_grad=True)}
    with pytest.raises(ValueError, match=r"shape \(2,\) that requires a gradient"):
        list(prefetch([batch], "cpu"))
    with pytest.raises(ValueError, match="requires a gradient"):
        list(Prefetch([batch], torch.device("cpu"), 2)._iterate(FakeLane(random.Random(0))))


def test_to_host_copies_on_a_cpu_too() -> None:
    x = torch.arange(3.0, requires_grad=True)
    handle = to_host({"x": x, "step": 1, "pair": Pair(x * 2, None)})
    with torch.no_grad():
        x.zero_()
    result = handle.result()
    assert handle.done()
    assert result["x"].tolist() == [0, 1, 2]
    assert not result["x"].requires_grad
    assert result["step"] == 1
    assert type(result["pair"]) is Pair
    assert repr(handle) == "HostCopy(done)"


def test_dataloader_batches_come_through() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    lane = FakeLane(random.Random(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [
            (x.tolist(), y.tolist())
            for x, y in _exact(Prefetch(loader, torch.device("cpu"), 2), lane)
        ]
    assert [len(x) for x, _ in found] == [4, 4, 2]
    assert found[2] == ([8.0, 9.0], [8, 9])


def _exact(prefetched: Prefetch[Any], lane: FakeLane) -> Iterator[Any]:
    """Runs the copies before each batch is looked at."""
    for batch in prefetched._iterate(lane):
        lane.loop.run_to(lane.loop._given)
        yield batch
