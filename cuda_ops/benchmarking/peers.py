"""Who an operator is compared with.

    peers = {**torch_peers(F.silu), "liger": imported("liger_kernel.ops.swiglu:silu")}

A peer is a callable that takes the operator's arguments, or a :class:`~cuda_ops.spec.Peer` where it
must be imported, compiled or built first. One that cannot be had stays in every table, as missing,
with its reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cuda_ops.spec import Peer

#: Names for ``--peers`` that every operator may use.
EAGER, COMPILE = "eager", "compile"


def torch_peers(function: Callable[..., Any]) -> dict[str, Callable[..., Any] | Peer]:
    """PyTorch itself: ``function`` as it is, and through ``torch.compile``."""
    return {EAGER: function, COMPILE: compiled(function)}


def compiled(function: Callable[..., Any], **options: Any) -> Peer:
    """``torch.compile(function)`` for exactly the shapes of a case; ``options`` are its own."""

    def load() -> Callable[..., Any]:
        # One code object would be shared by all cases, and after a few of them compiled no more.
        torch._dynamo.reset()
        made: Callable[..., Any] = torch.compile(
            function, **{"fullgraph": True, "dynamic": False, **options}
        )
        return made

    return Peer(load)


def imported(
    path: str, adapt: Callable[[Any], Callable[..., Any]] | None = None, *, off_by: int = 0
) -> Peer:
    """What ``"package.module:name"`` is, or the callable that ``adapt`` makes of it.

    Missing where the module does not import or has no such name. ``off_by`` is that of
    :class:`~cuda_ops.spec.Peer`.
    """
    module, _, name = path.partition(":")

    def load() -> Callable[..., Any]:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        made: Callable[..., Any] = adapt(found) if adapt else found
        return made

    return Peer(load, off_by)


def from_pair(root: Path, stem: str, name: str | None = None) -> Peer:
    """The operator ``name``, by default ``stem``, of a pair under ``root``, built when needed.

    So a peer may be a ``.cu`` with its binding: one call of CUB, for instance. Missing where it
    does not build, for want of a CUDA toolkit perhaps.
    """

    def load() -> Callable[..., Any]:
        # Operators load this module with their plugins; builds are needed here alone.
        from cuda_ops.compile_ops import reload
        from cuda_ops.registry import registry

        registry().add_root(root)
        reload(stem)
        made: Callable[..., Any] = registry().public(name or stem)
        return made

    return Peer(load)


def load_peers(
    peers: Mapping[str, Callable[..., Any] | Peer],
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """The callables by name, and the reasons of those that are missing.

    ``progress`` is told which one is imported or built next.
    """
    ready: dict[str, Callable[..., Any]] = {}
    missing: dict[str, str] = {}
    for name, peer in peers.items():
        if not isinstance(peer, Peer):
            ready[name] = peer
            continue
        progress(f"loading {name}")
        try:
            ready[name] = peer.load()
        except Exception as error:  # a stranger's package may raise anything
            first = (str(error).strip().splitlines() or [""])[0]
            missing[name] = f"{type(error).__name__}: {first}"
    return ready, missing
