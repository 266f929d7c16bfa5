"""Everything that is wrong, from the facts alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cuda_ops.doctor import of_machine, of_operators
from cuda_ops.doctor.facts import Facts
from cuda_ops.doctor.finding import LEVELS, Finding

_RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    of_machine.of_torch,
    of_machine.of_toolkit,
    of_machine.of_tools,
    of_machine.of_cache,
    of_operators.of_plugins,
    of_operators.of_names,
    of_operators.of_libraries,
    of_machine.of_probes,
)


def findings(facts: Facts) -> list[Finding]:
    """Returns what follows from the facts, what is broken first.

    Example::

        from cuda_ops.doctor.facts import Facts, Torch
        from cuda_ops.doctor.findings import findings

        assert findings(Facts(torch=Torch(version="2.13.0"))) == []
    """
    found: list[Finding] = []
    for rule in _RULES:
        try:
            found += rule(facts)
        except Exception as error:  # odd facts must not hide the other findings
            what = f"{rule.__name__}: {type(error).__name__}: {error}"
            found.append(Finding("probe-failed", "broken", what, "it could not be judged"))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))
