"""How much is drawn: named settings of Hypothesis."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase


@dataclass(frozen=True)
class Profile:
    """How much to draw, and how long a sample may take."""

    name: str
    #: Samples of each check that has no number of its own.
    examples: int
    #: Whether every run draws the same samples. If not, a local database keeps failures.
    derandomize: bool
    #: Seconds that one sample may take in its process before it counts as hung.
    timeout: float = 120.0
    #: Seconds after which a check draws no further samples.
    seconds: float = math.inf

    def settings(self) -> settings:
        kept = DirectoryBasedExampleDatabase(Path(".hypothesis") / "cuda_ops")
        return settings(
            max_examples=self.examples,
            deadline=None,  # a first call compiles, loads or warms up
            derandomize=self.derandomize,
            database=None if self.derandomize else kept,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", 25, derandomize=True),  # compile_dev.py --check
        Profile("ci", 40, derandomize=True),
        Profile("dev", 100, derandomize=False),
        Profile("nightly", 10_000, derandomize=False),
    )
}


def default() -> Profile:
    """Returns ``ci`` if the variable CI is set, as continuous integration sets it; else ``dev``."""
    return PROFILES["ci" if os.environ.get("CI") else "dev"]
