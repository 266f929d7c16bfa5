"""When two results count as the same, and what is said when they do not."""

from __future__ import annotations

import math
from typing import Any

import good_ops
import pytest
import torch

from cuda_ops.testing.compare import deviation
from cuda_ops.testing.samples import Sample, TensorArg
from cuda_ops.testing.subject import described
from cuda_ops.testing.tolerance import EPSILONS, errors


@pytest.mark.parametrize("dtype", [d for d in EPSILONS if d.itemsize > 1])
def test_the_table_is_what_is_allowed(dtype: torch.dtype) -> None:
    one = torch.ones(3, dtype=torch.float64)
    allowed = EPSILONS[dtype] * torch.finfo(dtype).eps
    near, far = (one + f * allowed for f in (0.9, 2.2))
    assert errors([near.to(dtype)], [one], 0.0) <= 1 < errors([far.to(dtype)], [one], 0.0)
    assert errors([far.to(dtype)], [one], 0.0, factor=3.0) <= 1


def test_special_values_equal_only_themselves() -> None:
    nan, inf = torch.tensor([torch.nan]), torch.tensor([torch.inf])
    assert errors([nan], [nan], 1.0) == errors([inf], [inf], 1.0) == 0
    for other in (inf, torch.zeros(1)):
        assert errors([nan], [other], 1.0) == errors([other], [nan], 1.0) == torch.inf
    assert errors([inf], [-inf], 1.0) == torch.inf
    with pytest.raises(AssertionError, match=r"shape \[1\], expected \[2\]"):
        errors([nan], [torch.zeros(2)], 1.0)


def test_sums_of_halves_are_judged_as_sums_in_float32() -> None:
    length, magnitude = 64, 50.0
    expected = torch.zeros(1)  # all of it cancelled
    off = torch.full((1,), 0.1, dtype=torch.bfloat16)
    assert errors([off], [expected], magnitude, length) > 1
    rounded = EPSILONS[torch.bfloat16] * torch.finfo(torch.bfloat16).eps
    assert errors([off], [expected], magnitude, length, least=rounded) <= 1


def test_an_overflow_that_cancels_may_be_none() -> None:
    """Summands of 1e19 in float32 leave a sum of -4e7 open, which float16 does not hold."""
    exact = torch.tensor([-4e7], dtype=torch.float64)
    for result in (0.0, -65504.0, -torch.inf):
        actual = torch.tensor([result], dtype=torch.float16)
        assert errors([actual], [exact], 1e19, 2) <= 1
    for result, magnitude in ((0.0, 1e9), (torch.inf, 1e19)):
        actual = torch.tensor([result], dtype=torch.float16)
        assert errors([actual], [exact], magnitude, 2) == torch.inf


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        ([[[1.0, 2.0], [3.0, 4.5]]], [[[1.0, 2.0], [3.5, 4.0]]], ": at [1, 0] got 3, expected 3.5"),
        ([[1.0], [math.nan]], [[1.0], [2.0]], ": result 1 at [0] got nan, expected 2"),
        ([2.0], [1.0], ": at [] got 2, expected 1"),
        ([[1.0]], [[1.0]], "the error is 0 times the tolerance"),
        ([[]], [[]], "the error is 0 times the tolerance"),
        ([[1, 2, 4]], [[1, 3, 3]], "the result differs: at [1] got 2, expected 3"),
        ([[True, False]], [[True, True]], "the result differs: at [1] got 0, expected 1"),
    ],
)
def test_an_error_says_where_it_is_largest(
    actual: list[Any], expected: list[Any], text: str
) -> None:
    try:
        said = errors(*([torch.tensor(v) for v in some] for some in (actual, expected)), 1.0).text
    except AssertionError as error:
        said = str(error)
    assert text in said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_each_summand_below_the_normal_numbers_may_count_as_0(dtype: torch.dtype) -> None:
    """Additions to global memory take float32 numbers below 1.2e-38 for 0, each of them."""
    tiny = torch.finfo(dtype).tiny
    expected = torch.tensor([3 * tiny], dtype=torch.float64)
    nothing = torch.zeros(1, dtype=dtype)
    assert errors([nothing], [expected], 4 * tiny, 1) > 1
    assert (errors([nothing], [expected], 4 * tiny, 4) <= 1) == (dtype is not torch.float16)


def test_a_number_beside_the_tensors_multiplies_roundings() -> None:
    subject = described()[f"{good_ops.LIBRARY.ns}::scale"]
    for factor, passes in ((1.0, False), (100.0, True)):
        sample = Sample((TensorArg((50,), torch.float64), factor))
        expected = subject.op.overload(*sample.make())
        off = expected + 500 * torch.finfo(torch.float64).eps * expected.abs().max()
        assert (deviation(subject, sample, off) <= 1) == passes
        wrong = expected + 1e-9 * expected.abs().max()  # as float32 would make it
        assert deviation(subject, sample, wrong) > 1


def test_a_factor_of_0_inside_makes_nan_of_an_infinity() -> None:
    """For one in its row, and for a linear operator alone."""
    nan, inf = torch.nan, torch.inf
    at = {"cosines": [[inf, 0.0, 0.0], [0.0, inf, 0.0]], "sum": [[inf, 1.0]], "log": [inf, 0.0]}
    for name, found, passes in (
        ("cosines", [[inf, inf, inf], [inf, nan, -inf]], True),
        ("cosines", [[inf, nan, inf], [inf, nan, -inf]], False),
        ("cosines", [[nan, inf, inf], [inf, nan, -inf]], False),
        ("sum", [inf], True),
        ("sum", [nan], False),
        ("log", [inf, -inf], True),
        ("log", [nan, -inf], False),
    ):
        subject = described()[f"{good_ops.LIBRARY.ns}::{name}"]
        x = torch.tensor(at[name], dtype=torch.float64)
        sample = Sample((TensorArg(tuple(x.shape), torch.float64),))
        for like in (x, x.mT.contiguous().mT if x.dim() > 1 else x):
            worst = deviation(subject, sample, torch.tensor(found, dtype=torch.float64), [like])
            assert (worst <= 1) == passes, (name, found)
