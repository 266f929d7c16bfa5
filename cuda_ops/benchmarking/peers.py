"""Makes the peers that an operator is compared with.

    peers = {**torch_peers(F.silu), "liger": imported("liger_kernel.ops.swiglu:silu")}

A peer is a callable that takes the operator's arguments, or a :class:`~cuda_ops.spec.Peer` if it
must be imported, compiled or built first. An unavailable peer stays in every table, as missing,
with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cuda_ops.spec import Peer

from .choice import BestOf

#: Names for ``--peers`` that every operator may use.
EAGER, COMPILE = "eager", "compile"


def torch_peers(function: Callable[..., Any]) -> dict[str, Callable[..., Any] | Peer]:
    """Makes peers of a function of PyTorch: as it is, and through ``torch.compile``, which is the
    faster one of its default and of ``max-autotune``.

    Example::

        assert list(torch_peers(F.silu)) == ["eager", "compile"]
    """
    return {EAGER: function, COMPILE: compiled(function)}


#: What ``torch.compile`` may be asked for: with CUDA graphs, the other form of ``max-autotune``,
#: results would be written over by the next call.
_MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}


def compiled(function: Callable[..., Any], **options: Any) -> Peer:
    """Makes a peer of ``torch.compile(function, **options)`` for exactly the shapes of a case.

    Where the options name neither a mode nor a backend and there is a GPU, it is the faster one, at
    each case, of the default and of ``max-autotune`` without CUDA graphs.

    Example::

        peers = {"max-autotune": compiled(F.silu, mode="max-autotune-no-cudagraphs")}
    """

    def made(mode: str | None) -> Callable[..., Any]:
        asked = {"fullgraph": True, "dynamic": False, **({"mode": mode} if mode else {}), **options}
        compiled: Callable[..., Any] = torch.compile(function, **asked)
        return compiled

    def load() -> Callable[..., Any]:
        # All cases share one code object, which torch would stop compiling after a few of them.
        torch._dynamo.reset()
        if options.keys() & {"mode", "backend"} or not torch.cuda.is_available():
            return made(None)
        return BestOf({name: made(mode) for name, mode in _MODES.items()})

    return Peer(load)


def imported(
    path: str, adapt: Callable[[Any], Callable[..., Any]] | None = None, *, off_by: int = 0
) -> Peer:
    """Makes a peer of ``"package.module:name"``, which is missing if it cannot be imported.

    Args:
        path: module and name, with dots in the name for attributes.
        adapt: makes the callable of what was imported; by default that itself.
        off_by: as in :class:`~cuda_ops.spec.Peer`.
    """
    module, _, name = path.partition(":")

    def load() -> Callable[..., Any]:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        made: Callable[..., Any] = adapt(found) if adapt else found
        return made

    return Peer(load, off_by)


def from_pair(
    root: Path,
    stem: str,
    name: str | None = None,
    adapt: Callable[[Any], Callable[..., Any]] | None = None,
) -> Peer:
    """Makes a peer of a pair under ``root``, which is built when needed: one call of CUB, for
    instance. It is missing if it does not build, for lack of a CUDA toolkit perhaps.

    Args:
        root: a folder with kernels/ and bindings/.
        stem: the pair's name.
        name: the operator's name, by default ``stem``.
        adapt: makes the callable, or a :class:`~.choice.BestOf`, of the operator; by default that
            itself.
    """

    def load() -> Callable[..., Any]:
        # Plugins import this module; only here does it need to build.
        from cuda_ops.compile_ops import reload
        from cuda_ops.registry import registry

        registry().add_root(root)
        reload(stem)
        op: Callable[..., Any] = registry().public(registry().key_of(name or stem))
        return adapt(op) if adapt else op

    return Peer(load)


def load_peers(
    peers: Mapping[str, Callable[..., Any] | Peer],
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """Returns the callables by name, and by name why others are missing.

    ``progress`` is called with the one that is imported or built next.
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
        except Exception as error:  # another package may raise anything
            first = (str(error).strip().splitlines() or [""])[0]
            missing[name] = f"{type(error).__name__}: {first}"
    return ready, missing
