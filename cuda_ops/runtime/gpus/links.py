"""Which GPUs reach each other, and over what."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cuda_ops.output import table_lines

#: What ``nvidia-smi topo -m`` calls a way, in words.
_WAYS = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, through the CPU, between its host bridges",
    "SYS": "PCIe, and from one CPU to another",
}
_SECONDS = 30


@dataclass(frozen=True)
class Link:
    """The way from one GPU to another."""

    #: Whether one may read and write the other's memory directly.
    peer: bool
    #: ``"NVLink"``, ``"PCIe"``, ``"self"`` or ``"unknown"``.
    kind: str = "unknown"
    #: How many NVLinks are bonded; ``None`` for other kinds.
    count: int | None = None
    #: As ``nvidia-smi`` has it: ``"NV18"``, ``"SYS"``; empty where it is unknown.
    code: str = ""


@dataclass(frozen=True)
class DevicePlace:
    """A GPU as torch counts them, and the part of the machine that is near."""

    index: int
    name: str
    #: CPUs and memory nodes near it, as ``nvidia-smi`` has them: ``"0-47"``, ``"0"``.
    cpus: str = "unknown"
    numa: str = "unknown"


@dataclass(frozen=True)
class Topology:
    """All GPUs that torch sees, and the links between them."""

    devices: tuple[DevicePlace, ...] = ()
    #: ``links[i][j]`` leads from device ``i`` to device ``j``.
    links: tuple[tuple[Link, ...], ...] = ()
    #: Why kinds of links are unknown; empty where they are known.
    reason: str = ""

    def __str__(self) -> str:
        if not self.devices:
            return f"no GPU: {self.reason}"
        names = [f"cuda:{device.index}" for device in self.devices]
        header, rows = ("", *names, "CPUs", "NUMA", "name"), []
        for name, device, links in zip(names, self.devices, self.links, strict=True):
            cells = (_cell(link) for link in links)
            rows.append((name, *cells, device.cpus, device.numa, device.name))
        lines = table_lines(header, rows, left=len(header), indent="")
        codes = {link.code for links in self.links for link in links}
        lines += [f"{code}: {way}" for code, way in _WAYS.items() if code in codes]
        if any(code.startswith("NV") for code in codes):
            lines.append("NV#: so many NVLinks")
        if any(not link.peer and link.kind != "self" for links in self.links for link in links):
            lines.append("-: no peer access; copies go through the host")
        if self.reason:
            lines.append(f"links unknown: {self.reason}")
        return "\n".join(lines)


def topology() -> Topology:
    """Returns which GPUs have peer access to each other, over which links; ``str`` is a table.

    Kinds of links and the CPUs nearby are those of ``nvidia-smi topo -m``. Where it is missing they
    are ``"unknown"``, and ``reason`` says why.

    Returns:
        The GPUs that torch sees; none where there is none, with the reason.

    Example:
    >>> found = topology()
    >>> len(found.links) == len(found.devices) == torch.cuda.device_count()
    True
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Topology(reason="torch sees none on this machine")
    peers = [
        [i != j and torch.cuda.can_device_access_peer(i, j) for j in range(count)]
        for i in range(count)
    ]
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    try:
        matrix = parse_topology(_output("topo", "-m"))
        listed = parse_indices(_output("--query-gpu=index,uuid", "--format=csv,noheader"))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return joined(names, peers, None, [None] * count, reason=_text(error))
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    return joined(names, peers, matrix, [listed.get(uuid) for uuid in uuids])


@dataclass(frozen=True)
class Matrix:
    """What ``nvidia-smi topo -m`` prints: ways between devices by name, and what is near a GPU."""

    ways: dict[tuple[str, str], str] = field(default_factory=dict)
    cpus: dict[str, str] = field(default_factory=dict)
    numa: dict[str, str] = field(default_factory=dict)


def parse_topology(text: str) -> Matrix:
    r"""Reads the output of ``nvidia-smi topo -m``.

    >>> text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-47\nGPU1\tNV18\t X \t48-95\n"
    >>> parse_topology(text).ways["GPU0", "GPU1"], parse_topology(text).cpus["GPU1"]
    ('NV18', '48-95')

    Raises:
        ValueError: there is no matrix in it.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the heading is underlined
    ways: dict[tuple[str, str], str] = {}
    near: dict[str, dict[str, str]] = {"CPU Affinity": {}, "NUMA Affinity": {}}
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"\t|  +", line)]
        if not header:
            if line[:1].isspace() and "GPU0" in cells:
                header = [cell for cell in cells if cell]
            continue
        name, *rest = [cell for cell in cells if cell] or [""]
        devices = [column for column in header if " " not in column]
        if name not in devices:
            if name.startswith("Legend"):
                break
            continue
        ways.update({(name, to): way for to, way in zip(devices, rest, strict=False)})
        for column, cell in zip(header[len(devices) :], rest[len(devices) :], strict=False):
            if column in near:
                near[column][name] = cell
    if not ways:
        raise ValueError("nvidia-smi topo -m prints no matrix")
    return Matrix(ways, near["CPU Affinity"], near["NUMA Affinity"])


def parse_indices(text: str) -> dict[str, int]:
    r"""Reads ``index, uuid`` lines of ``nvidia-smi``: its number of a GPU by torch's UUID.

    >>> parse_indices("0, GPU-8f0c\n1, GPU-77aa\n")
    {'8f0c': 0, '77aa': 1}

    Raises:
        ValueError: a line is something else.
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        index, separator, uuid = line.partition(",")
        if not separator or not index.strip().isdigit():
            raise ValueError(f"nvidia-smi prints {line!r}, expected an index and a UUID")
        found[uuid.strip().removeprefix("GPU-")] = int(index)
    return found


def joined(
    names: Sequence[str],
    peers: Sequence[Sequence[bool]],
    matrix: Matrix | None,
    numbers: Sequence[int | None],
    reason: str = "",
) -> Topology:
    r"""Joins what torch and ``nvidia-smi`` know; ``numbers`` are the latter's for torch's GPUs.

    >>> text = "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n"
    >>> joined(["A", "B"], [[False] * 2] * 2, parse_topology(text), [0, 1]).links[0][1]
    Link(peer=False, kind='PCIe', count=None, code='SYS')
    """
    if matrix is not None and None in numbers:
        # A slice of a GPU has a UUID of its own.
        lost = ", ".join(f"cuda:{i}" for i, number in enumerate(numbers) if number is None)
        reason = f"nvidia-smi lists no GPU with the UUID of {lost}, which may be a MIG slice"
    known = matrix or Matrix()
    own = [None if number is None else f"GPU{number}" for number in numbers]
    links = tuple(
        tuple(
            Link(False, "self")
            if i == j
            else _link(peers[i][j], known.ways.get((own[i] or "", own[j] or ""), ""))
            for j in range(len(names))
        )
        for i in range(len(names))
    )
    devices = tuple(
        DevicePlace(
            i,
            name,
            known.cpus.get(own[i] or "", "unknown"),
            known.numa.get(own[i] or "", "unknown"),
        )
        for i, name in enumerate(names)
    )
    return Topology(devices, links, reason)


def _link(peer: bool, code: str) -> Link:
    if bonded := re.fullmatch(r"NV(\d+)", code):
        return Link(peer, "NVLink", int(bonded[1]), code)
    return Link(peer, "PCIe" if code in _WAYS else "unknown", None, code)


def _cell(link: Link) -> str:
    if link.kind == "self":
        return "x"
    code = link.code or "unknown"
    return code if link.peer else f"{code} -"


def _output(*options: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", *options], capture_output=True, text=True, timeout=_SECONDS, check=True
    )
    return done.stdout


def _text(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no nvidia-smi on the path"
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or error.stdout or "").strip().splitlines() or ["nothing"]
        return f"nvidia-smi ended with status {error.returncode} and said: {said[0]}"
    return str(error)
