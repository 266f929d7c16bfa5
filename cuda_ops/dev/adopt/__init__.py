"""``compile_dev.py adopt GUEST``: drafts the native pair of a guest, and lists what is left.

The guest's files stay as they are. The draft lies in a folder of operators of its own, with a
namespace of its own, so that both can be built, loaded in one process and compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cuda_ops.build.discovery import Pair, namespace_of
from cuda_ops.build.source_text import Kind
from cuda_ops.dev.adopt.binding_file import binding_text, hole_notes
from cuda_ops.dev.adopt.guest import Guest
from cuda_ops.dev.adopt.kernel_file import kernel_text
from cuda_ops.dev.adopt.notes import Note
from cuda_ops.dev.adopt.operators import operators_of
from cuda_ops.dev.scaffold import namespace_for
from cuda_ops.errors import DiscoveryError

#: The folder beside a guest's ``kernels`` and ``bindings``, and the namespace of what is in it.
FOLDER = "adopted"


@dataclass(frozen=True)
class Draft:
    """A native pair as far as a guest's text tells it."""

    #: A folder of operators.
    root: Path
    namespace: str
    #: The files and what is in them.
    texts: dict[Path, str]
    #: What is left to do by hand.
    left: tuple[Note, ...]


def draft(pair: Pair, namespace: str = "") -> Draft:
    """Drafts ``kernels/<op>.cu`` and ``bindings/<op>.cpp`` from the files of a guest.

    Args:
        pair: the guest.
        namespace: the operators'; by default that of the root's other drafts, or ``adopted``.

    Raises:
        DiscoveryError: the pair is no guest, no function of it can be drafted, or operators cannot
            have the namespace.

    Example::

        draft(registry().pairs()["lltm"]).texts
    """
    if pair.kind is Kind.NATIVE:
        raise DiscoveryError(
            f"{pair.stem}: expected a guest, with PYBIND11_MODULE or TORCH_LIBRARY, got a pair "
            "with CUDA_OPS(library), which is a full operator already"
        )
    root = pair.root / FOLDER
    space = namespace_for(root, namespace or namespace_of(root) or FOLDER)
    guest = Guest(pair)
    operators, left = operators_of(guest)
    if not operators:
        reasons = "; ".join(map(str, left)) or "it registers no function"
        raise DiscoveryError(f"{pair.stem}: nothing of this guest can be drafted: {reasons}")
    binding = root / "bindings" / f"{pair.stem}.cpp"
    kernel = root / "kernels" / f"{pair.stem}.cu"
    texts = {}
    of_kernels: list[Note] = []
    if any("cuda" in one.hosts for one in operators):
        texts[kernel] = kernel_text(guest, operators, kernel, of_kernels)
    texts[binding] = binding_text(guest, operators, space, binding, [*left, *of_kernels])
    notes = [*of_kernels]
    for one in operators:
        for host in one.hosts.values():
            notes += [*host.notes, *hole_notes(host)]
        notes += one.notes
    return Draft(root, space, texts, tuple(dict.fromkeys((*notes, *left))))


def adopt(pair: Pair, namespace: str = "") -> Draft:
    """Writes the draft of a guest to the folder ``adopted`` of its root.

    Raises:
        DiscoveryError: see :func:`draft`; or a file of the draft is there already, or cannot be
            written.
    """
    made = draft(pair, namespace)
    for path in made.texts:
        if path.exists():
            raise DiscoveryError(f"{path} exists already; move it away to draft {pair.stem} again")
    try:
        for path, text in made.texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiscoveryError(f"cannot write {error.filename or path}: {error.strerror}") from error
    return made
