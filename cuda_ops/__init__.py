"""Two files become a PyTorch operator.

``cuda_ops.<op>`` is the public function of each operator, ``torch.ops.cuda_ops.<op>``
what the dispatcher calls. Importing this package opens no operator library;
the first use of an operator does.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

if importlib.util.find_spec("torch") is not None:  # setup.py may come before torch
    from cuda_ops import namespace

    namespace.install()


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'cuda_ops' has no attribute {name!r}")
    here = Path(__file__).parent
    if (here / f"{name}.py").exists() or (here / name / "__init__.py").exists():
        return importlib.import_module(f"cuda_ops.{name}")
    from cuda_ops.registry import registry

    value = registry().public(name)
    if registry().loaded(name) is not None:
        # A function for the life of the process, whatever is reloaded: later uses find it at
        # once. A guest's module is a new one after each reload.
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    from cuda_ops.registry import registry

    return sorted({*globals(), *registry().pairs()})
