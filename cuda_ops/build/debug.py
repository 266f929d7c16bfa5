"""Which operators a process wants as debug builds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from cuda_ops.build.discovery import Pair
from cuda_ops.errors import BuildError
from cuda_ops.names import instead

#: Names the pairs whose debug builds this process uses, separated by commas.
VARIABLE = "CUDA_OPS_DEBUG"


def asked(pairs: Mapping[str, Pair]) -> set[str]:
    """Returns the keys of the pairs that ``CUDA_OPS_DEBUG`` names.

    Raises:
        BuildError: it names something else, so that no debug build would be loaded.
    """
    said = [name for part in os.environ.get(VARIABLE, "").split(",") if (name := part.strip())]
    if not said:
        return set()
    known = {key: key for key in pairs}
    known |= {f"{pair.namespace}::{pair.stem}": key for key, pair in pairs.items()}
    if wrong := [name for name in said if name not in known]:
        raise BuildError(
            f"{VARIABLE}: expected names of operators, separated by commas, got "
            f"{', '.join(map(repr, wrong))}{instead(wrong, pairs)}"
        )
    return {known[name] for name in said}


def variable_for(keys: Iterable[str]) -> str:
    """Returns what to put before a command that shall use these debug builds.

    Example::

        assert variable_for(["silu", "matmul"]) == "CUDA_OPS_DEBUG=silu,matmul"
    """
    return f"{VARIABLE}={','.join(keys)}"
