"""``torch.ops.cuda_ops``: loads an operator when it is first asked for, as ``cuda_ops`` does, so
that a graph exported elsewhere finds it.
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
    """Puts it in place of ``torch.ops.cuda_ops``."""
    setattr(torch.ops, "cuda_ops", _Namespace("cuda_ops"))  # noqa: B010 - mypy knows no such name
