"""Copies between devices, and which devices reach each other."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_gpu, run_python
from hypothesis import given
from hypothesis import strategies as st

from cuda_ops.runtime import copy_between, topology
from cuda_ops.runtime.gpus import links, peers
from cuda_ops.runtime.gpus.links import joined, parse_indices, parse_topology

EXAMPLE = Path(__file__).parent.parent / "examples" / "runtime" / "copy_between_gpus.py"
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64,
    torch.bool, torch.complex64, torch.uint16,
]  # fmt: skip


# --- chunks -------------------------------------------------------------------------


@given(total=st.integers(0, 300), size=st.integers(1, 80))
def test_spans_cover_all_bytes_once_and_are_full_but_for_the_last(total: int, size: int) -> None:
    found = list(peers.spans(total, size))
    assert [byte for start, stop in found for byte in range(start, stop)] == list(range(total))
    assert all(stop - start == size for start, stop in found[:-1])
    assert all(0 < stop - start <= size for start, stop in found[-1:])


def _laid_out(shape: list[int], layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor whose elements outside of the view are zeros."""
    if layout == "transposed":
        return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1])
    if layout == "stepped":
        wide = torch.zeros([*shape[:-1], 2 * shape[-1]] if shape else [2], dtype=dtype)
        return wide[..., ::2] if shape else wide[1]
    if layout == "offset":
        return torch.zeros([n + 1 for n in shape], dtype=dtype)[
            tuple(slice(1, None) for _ in shape)
        ]
    return torch.zeros(shape, dtype=dtype)


LAYOUTS = st.sampled_from(["dense", "transposed", "stepped", "offset"])


@given(
    shape=st.lists(st.integers(0, 7), max_size=3),
    into=LAYOUTS,
    out_of=LAYOUTS,
    dtype=st.sampled_from(DTYPES),
    chunk=st.integers(1, 100),
)
def test_copies_in_chunks_are_plain_copies(
    shape: list[int], into: str, out_of: str, dtype: torch.dtype, chunk: int
) -> None:
    src = _laid_out(shape, out_of, dtype)
    src.copy_(torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype))
    before, dst = src.clone(), _laid_out(shape, into, dtype)
    whole = dst._base if dst._base is not None else dst
    returned = copy_between(dst, src, chunks_through_host=True, chunk_bytes=chunk)
    assert returned is dst
    assert _same(dst, before) and _same(src, before)
    # Nothing beside the view was written.
    outside = _numbers(whole).sum() - _numbers(dst).sum()
    assert outside == 0


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(_numbers(a), _numbers(b))


def test_slots_take_turns_and_no_chunk_is_larger_than_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[tuple[int, int]] = []
    copy = peers._Side.copy

    def watch(self: Any, to: torch.Tensor, what: torch.Tensor, after: Any) -> Any:
        copied.append((to.data_ptr(), to.numel()))
        return copy(self, to, what, after)

    monkeypatch.setattr(peers._Side, "copy", watch)
    src = torch.arange(25, dtype=torch.uint8)
    copy_between(torch.empty_like(src), src, chunks_through_host=True, chunk_bytes=10)
    slots = [place for place, _ in copied[::2]]
    assert [size for _, size in copied[::2]] == [10, 10, 5]
    assert slots[0] == slots[2] != slots[1]


class _FakeStream:
    """A stream that knows what is done before what, and does it at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: All that a later piece of work here comes after.
        self.before: set[str] = set()

    def add(self, work: str) -> frozenset[str]:
        earlier = frozenset(self.before)
        self.before.add(work)
        return earlier

    def record_event(self) -> frozenset[str]:
        return frozenset(self.before)

    def wait_event(self, event: frozenset[str]) -> None:
        self.before |= event

    def wait_stream(self, other: _FakeStream) -> None:
        self.before |= other.before


def test_each_chunk_waits_for_the_one_that_had_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that events say, with streams that only keep account of it."""
    current = {name: _FakeStream(f"current of {name}") for name in ("source", "target")}
    own = {name: _FakeStream(name) for name in ("source", "target")}
    kept: list[str] = []
    earlier: dict[str, frozenset[str]] = {}
    names = iter(("source", "target"))

    class Side(peers._Side):
        def __init__(self, device: torch.device) -> None:
            self._device = next(names)
            self._stream = own[self._device]

    class Entered:
        """Stands for ``torch.cuda.stream``, which each copy enters once."""

        def __init__(self, stream: _FakeStream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            name = self.stream.name
            work = f"{name} {sum(done.startswith(name) for done in earlier)}"
            earlier[work] = self.stream.add(work)

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(peers, "_Side", Side)
    monkeypatch.setattr(torch.cuda, "stream", Entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[device])
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: kept.append(stream.name), raising=False
    )
    current["source"].add("made")
    current["target"].add("cleared")
    src = torch.arange(50, dtype=torch.uint8)
    dst = copy_between(torch.zeros_like(src), src, chunks_through_host=True, chunk_bytes=10)
    assert torch.equal(dst, src)
    assert kept == ["source", "target"]
    assert "made" in earlier["source 0"] and "cleared" in earlier["target 0"]
    for i in range(5):
        assert f"source {i}" in earlier[f"target {i}"]
        if i >= 2:
            assert f"target {i - 2}" in earlier[f"source {i}"]
            # The other half of the way goes on meanwhile.
            assert f"target {i - 1}" not in earlier[f"source {i}"]
    assert "target 4" in current["target"].before and "source 4" in current["source"].before


@pytest.mark.parametrize("chunks", [None, True, False])
def test_conjugate_and_negated_views_are_copied_as_they_look(chunks: bool | None) -> None:
    x = torch.tensor([1 + 2j, 3 - 4j])
    for src in (x.conj(), torch._neg_view(x), x.conj().imag):
        dst = torch.empty(src.shape, dtype=src.dtype)
        assert torch.equal(copy_between(dst, src, chunks_through_host=chunks), src)
    into = torch.zeros(2, dtype=torch.complex64)
    copy_between(into.conj(), x, chunks_through_host=chunks)
    assert torch.equal(into, x.conj().resolve_conj())


def test_leaves_that_want_gradients_can_be_written() -> None:
    dst = torch.zeros(3, requires_grad=True)
    for chunks in (True, False):
        copy_between(dst, torch.ones(3, requires_grad=True), chunks_through_host=chunks)
        assert dst.is_leaf and dst.tolist() == [1.0] * 3


def test_tensors_that_overlap_are_refused_also_in_chunks() -> None:
    x = torch.arange(10.0)
    for chunks in (True, False):
        with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
            copy_between(x[1:], x[:-1], chunks_through_host=chunks)


@pytest.mark.parametrize(
    ("dst", "src", "options", "error", "text"),
    [
        (torch.empty(2), [1, 2], {}, TypeError, "'src': expected a Tensor, got list"),
        (None, torch.empty(2), {}, TypeError, "'dst': expected a Tensor, got NoneType"),
        (torch.empty(2), torch.empty(2, 1), {}, ValueError,
         r"'src': expected the shape of dst, \[2\], got \[2, 1\]"),
        (torch.empty(2), torch.empty(2).half(), {}, ValueError,
         "'src': expected the dtype of dst, torch.float32, got torch.float16"),
        (torch.empty(2), torch.empty(2).to_sparse(), {}, ValueError,
         "'src': expected a strided tensor, got torch.sparse_coo"),
        (torch.empty(2, device="meta"), torch.empty(2), {}, ValueError,
         "'dst': expected a tensor on a CPU or CUDA device, got one on 'meta'"),
        (torch.empty(2), torch.empty(2), {"chunk_bytes": 0}, ValueError,
         "'chunk_bytes': expected an int of 1 or more, got 0"),
        (torch.empty(2), torch.empty(2), {"chunk_bytes": 1.5}, ValueError,
         "'chunk_bytes': expected an int of 1 or more, got 1.5"),
        (torch.empty(2), torch.empty(2), {"chunk_bytes": "a"}, ValueError,
         "'chunk_bytes': expected an int of 1 or more, got 'a'"),
        (torch.empty(1).expand(2), torch.empty(2), {}, ValueError,
         r"'dst': expected elements with memory of their own, got shape \[2\] with strides \[0\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    dst: Any, src: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"copy_between: argument {text}"):
        copy_between(dst, src, **options)


@needs_gpu
@pytest.mark.parametrize("chunks", [None, True])
@pytest.mark.parametrize("ways", ["cpu cuda", "cuda cpu", "cuda cuda"])
def test_a_gpu_and_the_host_copy_in_both_ways(ways: str, chunks: bool | None) -> None:
    to, of = ways.split()
    src = torch.arange(1_000_001, dtype=torch.float32, device=of)[1:].view(1000, 1000).t()
    dst = torch.zeros(1000, 2000, device=to)[:, ::2]
    copy_between(dst, src, chunks_through_host=chunks, chunk_bytes=300_001)
    assert torch.equal(dst.cpu(), src.cpu())


@needs_gpu
def test_a_copy_in_chunks_comes_after_what_is_queued_and_before_what_follows() -> None:
    from cuda_ops.testing.stall import stall

    src, dst = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    stall(0.05)
    src.fill_(3)
    copy_between(dst, src, chunks_through_host=True, chunk_bytes=1 << 18)
    src.fill_(4)
    assert (dst == 3).all() and (src == 4).all()


@needs_gpu
def test_a_stream_that_is_captured_is_refused() -> None:
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(RuntimeError, match="being captured"):
            copy_between(torch.empty_like(x), x, chunks_through_host=True)
    graph.replay()
    assert (y == 2).all()


@needs_two_gpus
@pytest.mark.parametrize("chunks", [None, True, False])
def test_copies_between_two_gpus_are_ordered_on_both_streams(chunks: bool | None) -> None:
    from cuda_ops.testing.stall import stall

    src = torch.zeros(1 << 20, device="cuda:0")
    dst = torch.zeros(1 << 20, device="cuda:1")
    for device in (0, 1):
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            stall(0.05)
    src.fill_(3)
    dst.fill_(5)  # late, and yet before the copy
    copy_between(dst, src, chunks_through_host=chunks, chunk_bytes=1 << 18)
    src.fill_(4)
    twice = dst * 2
    assert (twice == 6).all() and (src == 4).all()


# --- topology -----------------------------------------------------------------------

# Eight columns would be alike: four GPUs of a node with NVLink switches, and its network cards.
NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNODE\tSYS\t0-47,96-143\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t48-95,144-191\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tNODE\t48-95,144-191\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tSYS\tPIX\tNODE\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n\n"
)
# Four cards in slots, as an older nvidia-smi has it: names of network cards, no NUMA column.
PCIE = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\tmlx5_0\tCPU Affinity\n"
    "GPU0\t X \tPIX\tNODE\tSYS\tPHB\t0-15\n"
    "GPU1\tPIX\t X \tPXB\tSYS\tPHB\t0-15\n"
    "GPU2\tNODE\tPXB\t X \tSYS\tPHB\t0-15\n"
    "GPU3\tSYS\tSYS\tSYS\t X \tSYS\t16-31\n"
    "mlx5_0\tPHB\tPHB\tPHB\tSYS\t X \t\n"
)
# One card cut into slices: the matrix has the card.
MIG = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tN/A\tN/A\t\tN/A\n\nLegend:\n"
# Copied from a terminal, which turns tabs into spaces.
SPACES = (
    "        GPU0    GPU1    CPU Affinity    NUMA Affinity\n"
    "GPU0     X      NV4     0-9             0\n"
    "GPU1    NV4      X      10-19           1\n"
)


def test_nvlinks_cpus_and_nodes_are_read() -> None:
    matrix = parse_topology(NVLINK)
    assert matrix.ways["GPU0", "GPU3"] == "NV18" and matrix.ways["GPU2", "NIC1"] == "PIX"
    assert matrix.ways["GPU1", "NIC0"] == "NODE" and matrix.ways["NIC0", "GPU2"] == "SYS"
    assert matrix.cpus == {
        "GPU0": "0-47,96-143", "GPU1": "0-47,96-143", "GPU2": "48-95,144-191",
        "GPU3": "48-95,144-191",
    }  # fmt: skip
    assert matrix.numa == {"GPU0": "0", "GPU1": "0", "GPU2": "1", "GPU3": "1"}
    assert len(matrix.ways) == 36


def test_pcie_and_older_columns_are_read() -> None:
    matrix = parse_topology(PCIE)
    assert [matrix.ways["GPU0", f"GPU{i}"] for i in range(4)] == ["X", "PIX", "NODE", "SYS"]
    assert matrix.ways["mlx5_0", "GPU3"] == "SYS"
    assert matrix.cpus["GPU3"] == "16-31" and matrix.numa == {}


def test_a_single_card_and_spaces_for_tabs_are_read() -> None:
    assert parse_topology(MIG).ways == {("GPU0", "GPU0"): "X"}
    assert parse_topology(MIG).cpus == {"GPU0": "N/A"}
    matrix = parse_topology(SPACES)
    assert matrix.ways["GPU1", "GPU0"] == "NV4" and matrix.numa["GPU1"] == "1"


@pytest.mark.parametrize("text", ["", "No devices were found\n", "Failed to initialize NVML\n"])
def test_text_without_a_matrix_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="prints no matrix"):
        parse_topology(text)


def test_numbers_of_gpus_are_read() -> None:
    assert parse_indices("0, GPU-0a-1\n3, GPU-0b-2\n") == {"0a-1": 0, "0b-2": 3}
    with pytest.raises(ValueError, match="expected an index and a UUID"):
        parse_indices("No devices were found")


def test_devices_are_those_that_torch_sees_in_its_order() -> None:
    """``CUDA_VISIBLE_DEVICES=3,0``: torch's first GPU is the fourth of ``nvidia-smi``."""
    peer = [[False, True], [True, False]]
    found = joined(["A", "B"], peer, parse_topology(PCIE), [3, 0])
    assert found.links[0][1] == links.Link(True, "PCIe", None, "SYS")
    assert found.devices[0].cpus == "16-31" and found.devices[1].cpus == "0-15"
    assert found.devices[0].numa == "unknown" and found.reason == ""


def test_a_table_says_links_and_where_there_is_no_peer_access() -> None:
    peer = [[False, True, False], [True, False, False], [False, False, False]]
    lines = str(joined(["A", "B", "C"], peer, parse_topology(NVLINK), [0, 1, 2])).splitlines()
    assert lines[0].split() == ["cuda:0", "cuda:1", "cuda:2", "CPUs", "NUMA", "name"]
    assert lines[1].split() == ["cuda:0", "x", "NV18", "NV18", "-", "0-47,96-143", "0", "A"]
    assert "NV#: so many NVLinks" in lines
    assert "-: no peer access; copies go through the host" in lines
    assert joined(["A", "B"], peer, parse_topology(NVLINK), [0, 1]).links[0][1].count == 18


def test_unknown_links_come_with_a_reason() -> None:
    peer = [[False, True], [True, False]]
    found = joined(["A", "B"], peer, None, [None, None], reason="there is no nvidia-smi")
    assert found.links[0][1] == links.Link(True, "unknown")
    assert "links unknown: there is no nvidia-smi" in str(found)
    sliced = joined(["A"], [[False]], parse_topology(MIG), [None])
    assert "cuda:0, which may be a MIG slice" in sliced.reason


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "no"), "there is no nvidia-smi on the path"),
        (subprocess.TimeoutExpired("nvidia-smi", 30), "timed out after 30 seconds"),
        (subprocess.CalledProcessError(9, "nvidia-smi", "", "driver not loaded\nmore"),
         "nvidia-smi ended with status 9 and said: driver not loaded"),
    ],
)  # fmt: skip
def test_a_broken_nvidia_smi_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def fail(*options: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    found = topology()
    assert text in found.reason and found.links[0][1] == links.Link(True, "unknown")


def test_without_a_gpu_the_answer_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(topology()) == "no GPU: torch sees none on this machine"
    assert topology().links == ()


@needs_gpu
def test_topology_lists_every_gpu() -> None:
    found = topology()
    count = torch.cuda.device_count()
    assert len(found.devices) == len(found.links) == count
    assert all(found.links[i][i].kind == "self" for i in range(count))
    assert found.devices[0].name == torch.cuda.get_device_name(0)
    if count > 1:
        link = found.links[0][1]
        assert link.peer == torch.cuda.can_device_access_peer(0, 1)
        assert link.kind != "unknown" or found.reason


@pytest.mark.slow
def test_the_example_runs() -> None:
    done = run_python(str(EXAMPLE))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("both ways the same")
