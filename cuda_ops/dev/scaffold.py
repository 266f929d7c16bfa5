"""``compile_dev.py new OP``: a pair that builds and passes its checks, ready to be changed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

from cuda_ops.build.discovery import Pair, illegal_name, namespace_of, root_problem
from cuda_ops.build.programs import environment
from cuda_ops.build.source_text import macro_of
from cuda_ops.errors import DiscoveryError
from cuda_ops.names import HOME, fault_of_namespace
from cuda_ops.registry import registry

#: Where the texts of new files are.
TEMPLATES = Path(__file__).parent / "templates"

#: What ``new`` writes without a flag.
ELEMENTWISE = "elementwise"
#: The other forms of a pair: the flag of ``new``, and what it writes.
FORMS = {
    "rows": "each row becomes a row: a softmax",
    "reduce": "each row becomes a number: a sum of squares",
    "gather": "indices choose rows of a table: an embedding",
    "in-place": "an argument is written, and nothing returned: a moving average",
    "random": "elements meet random numbers: jitter",
    "quantize": "each row becomes integers of eight bits and a scale",
}


def project_root() -> Path:
    """Returns the operator root of the project in the current folder.

    Raises:
        DiscoveryError: there is none.
    """
    here = Path.cwd()
    for root in (here / "src", here):
        if not root_problem(root):
            return root
    raise DiscoveryError(
        f"{here}: expected a project with src/kernels/ or src/bindings/, got neither; go to yours, "
        "or name a folder with --root DIR, which is created if need be"
    )


def new_pair(
    name: str, root: Path, form: str = ELEMENTWISE, namespace: str = ""
) -> tuple[Path, Path]:
    """Writes ``kernels/<name>.cu`` and ``bindings/<name>.cpp`` under ``root``.

    Args:
        name: the name of the operator and of both files.
        root: a folder of operators; created if need be.
        form: what to write: ``"elementwise"``, or one of :data:`FORMS`.
        namespace: the operator's; by default that of the other pairs, or ``cuda_ops``.

    Raises:
        DiscoveryError: the name is not usable, or taken, or the files cannot be written.
    """
    if problem := illegal_name(name):
        raise DiscoveryError(problem.replace("rename the file", "choose another"))
    owner = name.removesuffix("_backward")
    if owner != name and any((root / "bindings").glob(f"{owner}.cpp")):
        raise DiscoveryError(f"{name} is the gradient of {owner} and belongs into {owner}.cpp")
    space = namespace_for(root, namespace)
    binding, kernel = root / "bindings" / f"{name}.cpp", root / "kernels" / f"{name}.cu"
    pair = Pair(name, root, binding, kernel, space)
    for path in pair.own_sources:
        if path.exists():
            raise DiscoveryError(f"{path} exists already; choose another name")
    if (first := registry().pairs().get(pair.key)) is not None:
        hint = "" if namespace_of(root) else ", or a namespace with --namespace my_ops"
        raise DiscoveryError(
            f"operator {pair.key!r} is already defined by {first.own_sources[0]}; choose another "
            f"name{hint}"
        )
    template = form.replace("-", "_")
    try:
        for path in pair.own_sources:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (TEMPLATES / f"{template}{path.suffix}.txt").read_text(encoding="utf-8")
            text = text.replace("cuda_ops.@op@", f"{space}.@op@")
            text = text.replace(macro_of(HOME), macro_of(space))
            text = text.replace("@op@", name).replace("@Op@", _camel(name))
            path.write_text(_formatted(text, path), encoding="utf-8")
    except OSError as error:
        for path in pair.own_sources:  # half a pair would be in the way
            with contextlib.suppress(OSError):
                path.unlink()
        raise DiscoveryError(f"cannot write {error.filename or path}: {error.strerror}") from error
    return kernel, binding


def namespace_for(root: Path, wanted: str) -> str:
    """Returns the namespace of a new pair.

    Raises:
        DiscoveryError: operators cannot have the one that is wanted, or the root has another.
    """
    own = namespace_of(root)
    if wanted and wanted != HOME and (fault := fault_of_namespace(wanted)):
        raise DiscoveryError(f"{fault}; choose another")
    if wanted and own and wanted != own:
        raise DiscoveryError(
            f"{root}: expected --namespace {own}, as its other pairs have, or no such option, got "
            f"{wanted}"
        )
    return wanted or own or HOME


def _formatted(text: str, path: Path) -> str:
    """Returns a text in the style of the .clang-format above its file; as it is, where there is no
    such file or no clang-format.
    """
    program = shutil.which("clang-format", path=environment()["PATH"])
    if program is None:
        return text
    command = [program, "--fallback-style=none", f"--assume-filename={path.resolve()}"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else text


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
