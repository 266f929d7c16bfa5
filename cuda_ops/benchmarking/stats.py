"""Medians with intervals that assume nothing about the distribution of the times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Fewer samples than this cannot bound a median with 95 % confidence.
LEAST_SAMPLES = 6


@dataclass(frozen=True)
class Interval:
    """A median and the bounds between which the true one lies, with 95 % confidence."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the width, relative to the value."""
        return (self.high - self.low) / (2 * self.value) if self.value else math.inf

    def scaled(self, factor: float) -> Interval:
        return Interval(self.value * factor, self.low * factor, self.high * factor)


def median_interval(samples: Sequence[float]) -> Interval:
    """Returns the sample median between two order statistics.

    The number of samples below the true median is binomial with p = 1/2, so the ranks follow from
    its tails alone: David and Nagaraja, Order Statistics, 3rd edition, section 7.1. Below
    :data:`LEAST_SAMPLES` samples the bounds are the extremes, and cover less than 95 %.

    Raises:
        ValueError: there are no samples.
    """
    if not samples:
        raise ValueError("median_interval: expected at least one sample, got none")
    ordered = sorted(samples)
    below = _rank(len(ordered))
    return Interval(statistics.median(ordered), ordered[below], ordered[-1 - below])


def _rank(count: int) -> int:
    """Returns the largest k with P(Binomial(count, 1/2) < k) <= 2.5 %, less one and at least 0."""
    tail, rank = 0.0, 0
    while (tail := tail + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    return max(0, rank - 1)


def ratio_interval(theirs: Sequence[float], ours: Sequence[float]) -> Interval:
    """Returns the median of ``theirs / ours``, taken round by round.

    Clocks and temperature drift during a run, but hardly within a round, so a round's ratio is free
    of that.
    """
    return median_interval([t / o for t, o in zip(theirs, ours, strict=True)])


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the mean that suits ratios: twice as fast and half as fast make 1."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))
