"""DTensor rules: a sharded run against a replicated one, in a fake process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cuda_ops.spec import OpSpec
from cuda_ops.testing.arguments import in_order
from cuda_ops.testing.case import NO_TENSOR, Case, NotRunError, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.samples import Sample
from cuda_ops.testing.sizes import broadcast_over, shaped
from cuda_ops.testing.subject import Subject

_WORLD = 2


def _divisible(op: OpSpec) -> list[Sample]:
    """Returns a call with equal loop dims, and one whose last tensor broadcasts along the first."""
    equal = shaped(op, (4, 6), core=4)
    return [equal, *broadcast_over(op, equal)]


def _no_rule(subject: Subject, device: str) -> str:
    if subject.op.is_composite:
        return "composed: the rules are those of its parts"
    if subject.op.device_position is not None:
        return NO_TENSOR
    if not subject.op.parsed.returns and torch.__version__ < "2.11":
        return "torch before 2.11 cannot share out an operator without results"
    return "" if subject.sharding is not None else "no sharding rule: implement cuda_ops_sharding"


@check("dtensor", None, "the sharding rule is wrong",
       Draw(24, range(1, 513), listed=_divisible, enough=2, or_drawn=True),
       excuse=_no_rule)  # fmt: skip
def dtensor(case: Case) -> None:
    """Checks that joining each rank's results gives the result of the whole, as must DTensor."""
    args = case.arguments()
    whole = case.call(*args)
    for out_placements, placements in divided(case, args):
        ranks = [
            case.call(*(part(v, p, rank) for v, p in zip(args, placements, strict=True)))
            for rank in range(_WORLD)
        ]
        written = [placements[i] for i in case.subject.op.written if args[i] is not None]
        what = f"placements {list(placements)} -> {list(out_placements)}"
        ends = zip(whole, (*out_placements, *written), strict=True)
        for k, (full, placement) in enumerate(ends):
            joined = _joined([rank[k] for rank in ranks], placement)
            assert joined.shape == full.shape, f"{what}: shape {list(joined.shape)}"
            case.same([joined], [full], what)
        _as_dtensors(case, args, placements, whole, ranks[0], what)


def divided(case: Case, args: Sequence[Any], world: int = _WORLD) -> list[tuple[Any, Any]]:
    """Returns the placements of results and of arguments under which each rank has a part.

    Raises:
        NotRunError: there are none.
    """
    from torch.distributed.tensor import Shard

    assert case.subject.sharding is not None
    found, sharded = [], False
    for out_placements, placements in in_order(case.subject.op, case.subject.sharding)(*args):
        at = [(i, p.dim) for i, p in enumerate(placements) if isinstance(p, Shard)]
        sharded |= bool(at)
        if at and all(args[i].shape[dim] % world == 0 for i, dim in at):
            found.append((out_placements, placements))
    if not found:
        what = f"shards no dim that {world} ranks divide" if sharded else "shards no dim"
        raise NotRunError(f"the sharding rule {what}")
    return found


def _joined(parts: list[torch.Tensor], placement: Any) -> torch.Tensor:
    """Returns what the ranks hold together."""
    from torch.distributed.tensor import Partial, Shard

    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim)
    if isinstance(placement, Partial):
        stacked = torch.stack(parts)
        reductions: dict[str, Callable[..., torch.Tensor]] = {
            "sum": stacked.sum,
            "avg": stacked.mean,
            "max": stacked.amax,
            "min": stacked.amin,
            "product": stacked.prod,
        }
        if placement.reduce_op not in reductions:
            raise NotRunError(f"does not know how ranks join {placement}")
        return reductions[placement.reduce_op](0)
    return parts[0]


def part(value: Any, placement: Any, rank: int, world: int = _WORLD) -> Any:
    """Returns the shard of a rank; the whole if it is replicated."""
    dim = getattr(placement, "dim", None)
    return value if dim is None else value.chunk(world, dim)[rank].contiguous()


def _as_dtensors(
    case: Case,
    args: tuple[Any, ...],
    placements: Any,
    whole: tuple[Any, ...],
    first: tuple[Any, ...],
    what: str,
) -> None:
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor.debug import CommDebugMode

    with _mesh(case.device) as mesh, CommDebugMode() as communication:
        distributed = [
            DTensor.from_local(part(v, p, 0), mesh, [p], run_check=False) if p is not None else v
            for v, p in zip(args, placements, strict=True)
        ]
        results: tuple[Any, ...] = case.call(*distributed)
        assert communication.get_total_counts() == 0, f"{what}: communicates"
        for result, full, own in zip(results, whole, first, strict=True):
            (placement,) = result.placements
            expected = own if isinstance(placement, Partial) else part(full, placement, 0)
            case.same([result.to_local()], [expected], f"{what}, as DTensor")


@contextmanager
def _mesh(device: str) -> Iterator[Any]:
    """Makes a mesh of two ranks: this process plays the first, and the other does not exist."""
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise NotRunError(f"needs torch.distributed: {error}") from error
    if torch.distributed.is_initialized():
        yield init_device_mesh(device.partition(":")[0], (_WORLD,))
        return
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=_WORLD)
    try:
        yield init_device_mesh(device.partition(":")[0], (_WORLD,))
    finally:
        torch.distributed.destroy_process_group()
