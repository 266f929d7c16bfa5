"""What judges mutants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What judges mutants."""

    archs: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    profile: str = "quick"
    #: Names of the checks that run; all if there are none.
    checks: tuple[str, ...] = ()
    #: Patterns of files, and the arguments of pytest for the tests that run their code.
    tests: tuple[tuple[str, str], ...] = ()
