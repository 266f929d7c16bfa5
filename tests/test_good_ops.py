"""Tests the kit on right operators: a false alarm is a mistake of the kit."""

from __future__ import annotations

import good_ops  # describes the operators
import pytest

from cuda_ops.testing import check_op
from cuda_ops.testing.subject import described
from cuda_ops.testing.worker import Worker

GOOD = [name for name in described() if name.startswith("good::")]


def test_there_are_enough_of_them() -> None:
    assert len(GOOD) >= 25 and good_ops.LIBRARY.ns == "good"


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.slow
def test_no_false_alarm(name: str, worker: Worker) -> None:
    report = check_op(described()[name], isolate=worker)
    assert report.passed, str(report)
    assert sum(entry.passed is True for entry in report.entries) >= 12
