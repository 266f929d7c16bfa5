"""The tag of torch's compile caches: what is compiled depends on the text of operators.

torch keeps compiled graphs on disk under a key that knows an operator's schema and not its
gradient. Without a tag a new process may be given the gradient of an older text. The tag covers
the operators that are loaded: a graph can hold no others, and their files need not be read.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

from cuda_ops.build.discovery import PACKAGE, content_hash

_PREFIX = "cuda_ops-"
_tag = ""


def change(texts: Iterable[str]) -> None:
    """Makes everything compiled from now on, in any thread, depend on these texts.

    torch 2.13 has a tag for each thread, and the one that loads an operator need not be the one
    that compiles. So the default bears it, of the config and of its environment variable; both are
    private, and without them :func:`renew` alone tells the other threads.
    """
    from torch.compiler import config

    global _tag
    text = "\n".join([*texts, _own_text()])
    _tag = _PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]
    entry = getattr(config, "_config", {}).get("cache_key_tag")
    for default in ("default", "env_value_default"):
        if isinstance(getattr(entry, default, None), str):
            setattr(entry, default, _tagged(getattr(entry, default)))
    renew()


def current() -> str:
    """Returns a text that is another one once an operator was loaded or reloaded."""
    return _tag


def renew() -> None:
    """Tags what this thread compiles, where it has set a tag of its own; keeps what is there."""
    from torch.compiler import config

    if config.cache_key_tag != (tagged := _tagged(config.cache_key_tag)):
        config.cache_key_tag = tagged


def _tagged(present: str) -> str:
    parts = [part for part in present.split(";") if part]
    return ";".join([*(part for part in parts if not part.startswith(_PREFIX)), _tag])


@functools.cache
def _own_text() -> str:
    """Hashes what derives gradients and shapes: another version may derive others."""
    folders = (PACKAGE, PACKAGE / "derive", PACKAGE / "dispatch")
    return content_hash(path for folder in folders for path in sorted(folder.glob("[!.]*.py")))
