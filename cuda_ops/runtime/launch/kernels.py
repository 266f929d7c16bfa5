"""What an operator's kernels need of a multiprocessor, and how many of their blocks it holds.

Registers, shared memory and launch bounds are read from the machine code in the library, so none of
this needs a GPU or a tool of the CUDA toolkit. How much fits on a multiprocessor then follows from
NVIDIA's published rules (CUDA C++ Programming Guide, Compute Capabilities; the CUDA Occupancy
Calculator), as the driver computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cuda_ops.runtime.arguments import check_count, is_int, loaded_key
from cuda_ops.runtime.launch.machine_code import RESERVED, Capability, Kernel, kernels_in

if TYPE_CHECKING:
    from cuda_ops.spec import OpSpec

_WARP = 32
_REGISTERS = 65536  # of a multiprocessor, and the most of a block
_REGISTER_UNIT = 256  # of a warp
_SHARED_UNIT = 128
_PARTITIONS = 4  # of a multiprocessor; each has its own registers
_KIB = 1024


class Limits(NamedTuple):
    """What one multiprocessor of a compute capability holds at a time."""

    warps: int
    blocks: int
    #: KiB of shared memory that it can be set to, besides the L1 cache.
    carve_outs: tuple[int, ...]
    #: Named barriers, where they limit blocks.
    barriers: int | None


_UP_TO_100 = (0, 8, 16, 32, 64, 100)
_UP_TO_164 = (*_UP_TO_100, 132, 164)
_UP_TO_228 = (*_UP_TO_164, 196, 228)
#: By compute capability.
LIMITS: dict[Capability, Limits] = {
    (8, 0): Limits(64, 32, _UP_TO_164, None),
    (8, 6): Limits(48, 16, _UP_TO_100, None),
    (8, 9): Limits(48, 24, _UP_TO_100, None),
    (9, 0): Limits(64, 32, _UP_TO_228, 64),
    (10, 0): Limits(64, 32, _UP_TO_228, 64),
    (12, 0): Limits(48, 24, _UP_TO_100, 24),
}


@dataclass(frozen=True)
class Fit:
    """How many blocks of a kernel fit on a multiprocessor at a time, and why no more."""

    block: int
    blocks_per_sm: int
    #: Resident warps over the most that a multiprocessor holds, from 0 to 1.
    occupancy: float
    #: What allows no more blocks: of ``"warps"``, ``"blocks"``, ``"registers"``,
    #: ``"shared memory"`` and ``"barriers"``.
    limited_by: tuple[str, ...]


# --- by the published rules ----------------------------------------------------------


def occupancy(
    kernel: Kernel,
    block: int,
    shared_bytes: int = 0,
    capability: Capability | None = None,
    *,
    carve_out: int | None = None,
) -> Fit:
    """Computes how many blocks of a kernel fit on a multiprocessor at a time.

    Args:
        kernel: from :func:`kernels_of`, or made by hand.
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block, in bytes, beside what the kernel declares.
        capability: the GPU's compute capability; by default what the kernel was compiled for.
        carve_out: KiB of shared memory that the multiprocessor is set to, beside its L1 cache; by
            default the most it can be. More than 48 KB of a block need cudaFuncSetAttribute.

    Raises:
        TypeError: ``kernel`` is no kernel.
        ValueError: a block that no launch takes, a negative size, a carve-out that no such
            multiprocessor has, or a capability not known here.

    Example:
    >>> kernel = Kernel("k", "k", (9, 0), 32, 0, 1024, False)
    >>> occupancy(kernel, 256)
    Fit(block=256, blocks_per_sm=8, occupancy=1.0, limited_by=('warps', 'registers'))
    """
    limits = _limits("occupancy", kernel, capability, shared_bytes)
    if not is_int(block) or not 1 <= block <= kernel.max_threads:
        raise ValueError(
            f"occupancy: argument 'block': expected 1 to {kernel.max_threads} threads, as "
            f"{kernel.name} takes, got {block!r}"
        )
    if carve_out is not None and carve_out not in limits.carve_outs:
        raise ValueError(
            f"occupancy: argument 'carve_out': expected one of {limits.carve_outs}, got "
            f"{carve_out!r}"
        )
    return _fit(kernel, block, shared_bytes, limits, carve_out)


def _fit(
    kernel: Kernel, block: int, shared_bytes: int, limits: Limits, carve_out: int | None = None
) -> Fit:
    warps = -(-block // _WARP)
    allowed = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": _by_registers(kernel.registers, warps),
        "shared memory": _by_shared_memory(kernel.shared_bytes + shared_bytes, limits, carve_out),
    }
    if limits.barriers is not None and kernel.barriers:
        allowed["barriers"] = limits.barriers // kernel.barriers
    fitting = min(allowed.values())
    limited_by = tuple(name for name, most in allowed.items() if most == fitting)
    return Fit(block, fitting, fitting * warps / limits.warps, limited_by)


def best_block(kernel: Kernel, capability: Capability | None = None, shared_bytes: int = 0) -> Fit:
    """Finds the block that most threads fit with, as ``cudaOccupancyMaxPotentialBlockSize`` does.

    The largest one of several. It is where to start measuring, not what is fastest: fewer threads
    with more loads in flight each often win.

    Args:
        kernel: from :func:`kernels_of`, or made by hand.
        capability: the GPU's compute capability; by default what the kernel was compiled for.
        shared_bytes: dynamic shared memory of a block, in bytes.

    Raises:
        TypeError, ValueError: as :func:`occupancy`.

    Example:
    >>> best_block(Kernel("k", "k", (9, 0), 40, 0, 1024, False)).block
    768
    """
    limits = _limits("best_block", kernel, capability, shared_bytes)
    largest = kernel.max_threads
    sizes = [largest, *range((largest - 1) // _WARP * _WARP, 0, -_WARP)]
    fits = [_fit(kernel, block, shared_bytes, limits) for block in sizes]
    return max(fits, key=lambda fit: fit.block * fit.blocks_per_sm)


def _limits(
    function: str, kernel: Kernel, capability: Capability | None, shared_bytes: int
) -> Limits:
    """Checks what both functions take, and returns what a multiprocessor holds."""
    if not isinstance(kernel, Kernel):
        raise TypeError(
            f"{function}: argument 'kernel': expected a Kernel, as kernels_of lists them, got "
            f"{type(kernel).__name__}"
        )
    check_count(function, "shared_bytes", shared_bytes, least=0)
    if capability is None:
        capability = kernel.capability
    if capability not in [*LIMITS]:  # a list has no hash
        raise ValueError(
            f"{function}: argument 'capability': expected one of {_listed(LIMITS)}, got "
            f"{capability!r}"
        )
    return LIMITS[capability]


def _listed(capabilities: Iterable[Capability]) -> str:
    return ", ".join(map(str, capabilities))


def _by_registers(registers: int, warps: int) -> int:
    if registers == 0:
        return _REGISTERS
    of_warp = _rounded(registers * _WARP, _REGISTER_UNIT)
    # A launch is refused as if every partition had as many of the block's warps.
    if of_warp * _rounded(warps, _PARTITIONS) > _REGISTERS:
        return 0
    return _REGISTERS // _PARTITIONS // of_warp * _PARTITIONS // warps


def _by_shared_memory(used: int, limits: Limits, carve_out: int | None) -> int:
    of_block = _rounded(used + RESERVED, _SHARED_UNIT)
    room = limits.carve_outs[-1] if carve_out is None else carve_out
    if room * _KIB < of_block:  # the driver sets the least that a block fits in
        room = min((size for size in limits.carve_outs if size * _KIB >= of_block), default=0)
    return room * _KIB // of_block


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


# --- what a library holds ------------------------------------------------------------


def kernels_of(
    op: str | OpSpec | Callable[..., Any], capability: Capability | None = None
) -> list[Kernel]:
    """Lists the kernels in an operator's library, sorted by name.

    Args:
        op: the operator, its :class:`~cuda_ops.spec.OpSpec` or its name, ``"silu"`` or
            ``"my_ops::scale"``.
        capability: for which compute capability; by default the one of the visible GPU if the
            library has code for it, else the highest one that it has.

    Returns:
        An empty list where the library holds no kernels: the pair has no ``.cu``, or there was no
        CUDA toolkit to build it with.

    Raises:
        BuildError: the operator is not built.
        ValueError: there is no such operator, or its library has kernels, but none for
            ``capability``.
        RuntimeError: the kernels are compressed, which a plain build does not do.

    Example:
    >>> for kernel in kernels_of("silu"):
    ...     assert kernel.registers > 0
    """
    from cuda_ops.registry import registry

    key = loaded_key("kernels_of", op)
    operator = registry().loaded(key)
    library = registry().library_of(key if operator is None else operator.spec.pair)
    if library is None:
        return []
    found = kernels_in(library)
    present = sorted({kernel.capability for kernel in found})
    if not present:
        return []
    if capability is None:
        visible = _visible()
        capability = visible if visible in present else present[-1]
    if capability not in present:
        raise ValueError(
            f"kernels_of: argument 'capability': expected one that {library.name} has code for, "
            f"{_listed(present)}, got {capability!r}"
        )
    return sorted((k for k in found if k.capability == capability), key=lambda k: k.name)


def least_at_launch_bounds(library: Path) -> Fit | None:
    """Returns the least occupancy of a library's kernels, each in blocks of its launch bound and
    without dynamic shared memory; ``None`` if no kernel has a bound, or one for a known GPU.

    Args:
        library: the file.

    Raises:
        OSError, RuntimeError: as :func:`kernels_in`.
    """
    bounded = [k for k in kernels_in(library) if k.is_bounded and k.capability in LIMITS]
    fits = [occupancy(kernel, kernel.max_threads) for kernel in bounded]
    return min(fits, key=lambda fit: fit.occupancy, default=None)


def _visible() -> Capability | None:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
