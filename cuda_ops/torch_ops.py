"""``torch.ops.cuda_ops``: its operators are loaded when they are first asked for, as those of
``cuda_ops`` are, so that a graph exported elsewhere finds them.
"""

from __future__ import annotations

from typing import Any

import torch


class _Namespace(torch._ops._OpNamespace):
    __module__ = torch._ops._OpNamespace.__module__  # the names of its operators begin with it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            from cuda_ops.registry import registry

            # torch itself asks whether there is one while an operator is defined.
            if name.startswith("_") or registry().loading:
                raise
            registry().public(name)
            return super().__getattr__(name)


def install() -> None:
    """Make it what ``torch.ops.cuda_ops`` is."""
    setattr(torch.ops, "cuda_ops", _Namespace("cuda_ops"))  # noqa: B010 - mypy knows no such name
