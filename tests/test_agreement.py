"""What ranks tell each other before they send: in memory that one host has, and by gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_ops.distributed.board import _tag


def test_no_row_that_was_never_written_is_one() -> None:
    tags = [_tag(call) for call in (*range(5), *range((1 << 20) - 3, (1 << 20) + 3))]
    assert min(tags) == 1 and max(tags) < 1 << 20
    assert all(one != other for one, other in zip(tags, tags[2:], strict=False))


RANK = """
import json, os, signal, sys, time
import torch.distributed as dist
from cuda_ops.distributed import agreement, board

rank, world, store, how, alone = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
if how == "gloo":
    board.Board.of = staticmethod(lambda *_: None)
dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
ours = agreement.agreement_of(dist.group.WORLD)
found = {"one host": ours.one_host}
found["numbers"] = [[*map(list, ours.exchange("op", [call, rank]))] for call in range(40)]
if alone and rank == 1:
    print(json.dumps(found), flush=True)
    if alone == "ends":
        os._exit(0)
    if alone == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3)  # gives up later than the others
start = time.monotonic()
for given, refusal in (([rank], "no room" if rank else ""), ([1 << 43], ""), ([], "")):
    try:
        ours.exchange("op", given, refusal)
    except RuntimeError as error:
        found.setdefault("errors", []).append(str(error))
    if alone:
        break
found["seconds"] = time.monotonic() - start
print(json.dumps(found), flush=True)
os._exit(0)
"""


def told(tmp_path: Path, how: str, alone: str = "", world: int = 2, timeout: str = "200") -> list:
    """Returns what each rank says, by rank."""
    environment = {**os.environ, "CUDA_OPS_RANKS_TIMEOUT": timeout}
    given = str(world), str(tmp_path / "store"), how, alone
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *given],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    return [json.loads(rank.communicate(timeout=250)[0].splitlines()[-1]) for rank in ranks]


@pytest.mark.parametrize("how", ["memory", "gloo"])
@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_know_what_each_says(tmp_path: Path, how: str, world: int) -> None:
    for rank, said in enumerate(told(tmp_path, how, world=world)):
        assert said["one host"] == (how == "memory")
        assert said["numbers"] == [[[call, k] for k in range(world)] for call in range(40)]
        refused, large = said["errors"]
        assert refused == "op: rank 1 of the group refuses: no room", rank
        assert large.startswith("op: rank 0 of the group refuses: expected sizes of 0 to")


@pytest.mark.parametrize("how", ["memory", "gloo"])
@pytest.mark.parametrize("alone", ["ends", "is killed"])
def test_a_rank_that_ends_is_named_at_once(tmp_path: Path, how: str, alone: str) -> None:
    left, _ = told(tmp_path, how, alone)
    (error,) = left["errors"]
    assert error.startswith("op: ranks of the group that did not come to call 41: 1 (of 2; waited")
    assert left["seconds"] < 100  # the timeout is 200


@pytest.mark.parametrize("how", ["memory", "gloo"])
def test_a_rank_that_comes_late_learns_that_others_have_left(tmp_path: Path, how: str) -> None:
    for said in told(tmp_path, how, "is late", timeout="1"):
        (error,) = said["errors"]
        assert "did not come to call 41" in error
