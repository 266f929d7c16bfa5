"""DTensor's rules in a real process group: gloo on a CPU, NCCL with a GPU for each rank.

The check ``dtensor`` plays one rank of a group that does not exist. Here every rank is a process,
results are gathered over the wire, and each is compared with the run of the whole.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, spawn

from cuda_ops.errors import KitError
from cuda_ops.testing.case import Case, NotRunError, called
from cuda_ops.testing.checks.dtensor import divided, part
from cuda_ops.testing.checks.dtensor import dtensor as check
from cuda_ops.testing.draw import chosen
from cuda_ops.testing.runner import why_not
from cuda_ops.testing.subject import Origin, find
from cuda_ops.testing.worker import load_origin

#: Seconds after which a rank that waits for another one gives up.
_PATIENCE = 120


@dataclass(frozen=True)
class Placed:
    """One operator under one rule."""

    op: str
    #: What the rule says, such as ``[Shard(dim=0)] -> [Shard(dim=0)]``; empty for what has none.
    rule: str
    #: ``None`` if it was not run, for the reason in ``detail``.
    passed: bool | None
    detail: str = ""

    def __str__(self) -> str:
        word = {True: "passed", False: "FAILED", None: "not run"}[self.passed]
        rule = f" {self.rule}" if self.rule else ""
        return f"{word:8}{self.op}{rule}{f': {self.detail}' if self.detail else ''}"


def ranks_markdown(found: Sequence[Placed], where: str) -> str:
    """Returns a page: the rules that hold for each operator, those that do not, and why others were
    not run.

    Args:
        found: what :func:`check_ranks` returned.
        where: what the page says of the run, such as ``"2 ranks on NVIDIA H200"``.
    """
    rules = Counter(one.op for one in found if one.passed is not None)
    right = Counter(one.op for one in found if one.passed)
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.passed is None:
            reasons.setdefault(one.detail, []).append(f"`{one.op}`")
    lines = [
        "# DTensor's rules on real ranks",
        "",
        f"{where}.",
        "",
        "| operator | rules that hold |",
    ]
    lines += ["| --- | --- |", *(f"| `{op}` | {right[op]} of {n} |" for op, n in rules.items())]
    if wrong := [str(one) for one in found if one.passed is False]:
        lines += ["", "Wrong:", "", *(f"- {text}" for text in wrong)]
    if reasons:
        lines += ["", "Not run:", ""]
        lines += [f"- {reason}: {', '.join(names)}" for reason, names in reasons.items()]
    return "\n".join(lines) + "\n"


def check_ranks(
    names: Sequence[str], ranks: int = 2, device: str = "cpu", origin: Origin | None = None
) -> list[Placed]:
    """Runs every sharding rule of these operators on real ranks.

    Args:
        names: operators.
        ranks: how many processes; on ``"cuda"`` each has a GPU of its own.
        device: ``"cpu"`` or ``"cuda"``.
        origin: where operators outside of this project come from.

    Raises:
        ValueError: there are fewer GPUs than ranks, or less than two ranks.
        KitError: a rank ended before the others.
    """
    if ranks < 2:
        raise ValueError(f"check_ranks: argument 'ranks': expected 2 or more, got {ranks}")
    there = torch.cuda.device_count() if device == "cuda" else ranks
    if there < ranks:
        raise ValueError(f"check_ranks: expected a GPU for each of {ranks} ranks, got {there}")
    for name in names:
        find(name)  # is built once, before the ranks would build it at the same time
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, device, tuple(names), origin or Origin((), ""), folder)
        try:
            spawn(_rank, arguments, nprocs=ranks)
        except ProcessException as error:
            raise KitError(f"a rank ended before the others: {error}") from error
        found: list[Placed] = torch.load(Path(folder, "found.pt"), weights_only=False)
    return found


def _rank(
    rank: int, world: int, device: str, names: Sequence[str], origin: Origin, folder: str
) -> None:
    """Runs all rules as one rank; the first one writes what was found."""
    from torch.distributed.device_mesh import init_device_mesh

    load_origin(origin)
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not everywhere allowed
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=_PATIENCE),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )
    mesh = init_device_mesh(device, (world,))
    found = [placed for name in names for placed in _rules(name, rank, world, device, mesh)]
    # Not after an error: it would wait for ranks that wait for this one.
    torch.distributed.destroy_process_group()
    if rank == 0:
        torch.save(found, Path(folder, "found.pt"))


def _rules(name: str, rank: int, world: int, device: str, mesh: Any) -> Iterator[Placed]:
    subject = find(name)
    where = f"cuda:{rank}" if device == "cuda" else "cpu"
    reason, judged = why_not(check, subject, device), 0
    # As the check goes on to drawn samples where none of those listed can be judged.
    for draw in () if reason else (check.draw, replace(check.draw, listed=None)):
        for sample in chosen(subject, draw):
            case = Case(subject, where, sample)
            whole = called(case, case.arguments())
            if whole is None or judged == draw.enough:  # it refuses the sample; or that is all
                continue
            try:
                placed = divided(case, case.arguments(), world)
            except NotRunError as unfit:
                reason = str(unfit)
                continue
            judged += 1
            for outs, placements in placed:
                error = _error(case, placements, whole, rank, world, mesh)
                # All ranks speak, or one that failed would leave the others waiting.
                errors: list[str] = [""] * world
                torch.distributed.all_gather_object(errors, error)
                wrong = next((f"rank {k}: {text}" for k, text in enumerate(errors) if text), "")
                yield Placed(name, f"{list(placements)} -> {list(outs)}", not wrong, wrong)
        if judged:
            return
    yield Placed(name, "", None, reason or "it refuses all samples")


def _error(
    case: Case,
    placements: Any,
    whole: tuple[torch.Tensor, ...],
    rank: int,
    world: int,
    mesh: Any,
) -> str:
    """Returns what is wrong with this rank's results; they are gathered unless a rank raised."""
    from torch.distributed.tensor import DTensor

    results: tuple[Any, ...] = ()
    error = ""
    try:
        distributed = [
            v
            if p is None
            else DTensor.from_local(part(v, p, rank, world), mesh, [p], run_check=False)
            for v, p in zip(case.arguments(), placements, strict=True)
        ]
        results = case.call(*distributed)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    raised_anywhere: list[bool] = [False] * world
    torch.distributed.all_gather_object(raised_anywhere, bool(error))
    if any(raised_anywhere):
        return error
    try:
        joined = [_gathered(result) for result in results]
        case.same(joined, whole, "gathered from all ranks")
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def _gathered(result: Any) -> torch.Tensor:
    """Returns the whole result; what a backend may not send is sent as a wider dtype."""
    from torch.distributed.tensor import DTensor

    local = result.to_local()
    if local.dtype in (torch.int16, torch.uint16):  # which NCCL lacks
        sent = local.to(torch.int32)
    elif local.dtype.itemsize == 1 and local.dtype.is_floating_point:
        sent = local.to(torch.float32)
    else:
        sent = local
    whole = DTensor.from_local(sent, result.device_mesh, result.placements, run_check=False)
    full: torch.Tensor = whole.full_tensor()
    return full.to(local.dtype)
