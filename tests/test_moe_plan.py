"""The plan of moe on several GPUs, which needs none."""

from __future__ import annotations

import math

import pytest

from benchmarks.moe_plan import NETWORK, main, plan
from cuda_ops.distributed.ways import WIRE, way

#: Bytes and operations a second.
CEILINGS = 4e12, 8e14
ROW = 4096 * 2


def test_a_wire_of_one_host_is_that_of_the_way() -> None:
    planned = plan("Mixtral 8x7B", 4096, 4e-3, CEILINGS, gpus=2, hosts=1)
    chosen = way([4096] * 2, [4] * 2, 2, ROW)
    assert planned.way == "dispatch"
    assert planned.wire_bytes == math.ceil(2 * 4096 * ROW * 22 / 28)  # all but 6 of 28 pairs
    assert abs(planned.wire_bytes - 2 * chosen.dispatch_bytes) <= 1
    assert planned.network_bytes == 0
    assert planned.seconds_of_products == 4e-3  # operations bind, and are as many
    assert planned.scaling == pytest.approx(4e-3 / (4e-3 + planned.wire_bytes / WIRE))


def test_a_rank_reads_its_part_of_the_matrices() -> None:
    planned = plan("Mixtral 8x7B", 64, 6e-4, CEILINGS, gpus=4, hosts=1)
    assert planned.seconds_of_products == pytest.approx(6e-4 / 4, rel=0.01)


def test_hosts_are_joined_by_adapters() -> None:
    planned = plan("Qwen3-30B-A3B", 4096, 6e-4, CEILINGS, gpus=8, hosts=2)
    # Each of 8 others in the other host has 8 of 128 experts, and 8 of them are chosen.
    meets = 1 - math.comb(120, 8) / math.comb(128, 8)
    assert planned.network_bytes == math.ceil(2 * 8 * meets * 4096 * 2048 * 2)
    assert planned.seconds_of_wire == pytest.approx(planned.network_bytes / NETWORK)


def test_the_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr("sys.argv", ["moe_plan", "--gpus", "8", "--hosts", "2"])
    assert main() == 0
    said = capsys.readouterr().out
    assert "2 x 8 GPUs" in said and "Qwen3-30B-A3B" in said
    assert "Mixtral" not in said  # 8 experts are too few
