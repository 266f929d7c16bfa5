"""Installed packages with namespaces: torch.ops finds them, and an added root comes before its
installed copy.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from spaced import Spaced, fresh

from cuda_ops.build.discovery import survey
from cuda_ops.compile_ops import compile_ops
from cuda_ops.names import keyed
from cuda_ops.registry import registry

#: Registers itself, in a namespace that its file name does not tell.
_GUEST = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
Tensor twin(const Tensor& x) { return torch::stable::empty_like(x); }
STABLE_TORCH_LIBRARY(found_ops, m) { m.def("twin(Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(found_ops, CPU, m) { m.impl("twin", TORCH_BOX(&twin)); }
"""


def install(folder: Path, namespace: str) -> Spaced:
    """Puts a package with an operator ``add`` into a folder, as pip would."""
    package = folder / "scratch_package"
    spaced = Spaced(package / "src", namespace)
    spaced.write(3)
    (package / "__init__.py").write_text(
        "from cuda_ops.namespaces import expose\n"
        f'__getattr__, __dir__ = expose("{namespace}", __name__)\n'
    )
    (package / "plugin.py").write_text(
        "from pathlib import Path\n"
        "from cuda_ops.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def cuda_ops_roots():\n"
        '    return [Path(__file__).parent / "src"]\n'
    )
    info = folder / "scratch_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scratch_package\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[cuda_ops]\nscratch = scratch_package.plugin\n")
    return spaced


def build_here(root: Path, key: str) -> None:
    """Builds a pair in the cache that a fresh process uses too, and forgets its root."""
    registry().add_root(root)
    try:
        pair = registry().rescan()[key]
        from cuda_ops.build import compiling

        compiling.build(pair)
    finally:
        registry()._extra_roots.remove(root)
        registry().rescan()


@pytest.mark.slow
def test_torch_ops_finds_what_no_code_has_touched(
    own_cache: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = install(tmp_path, "scratch_ops")
    guest = installed.root / "bindings" / "hidden_name.cpp"
    guest.write_text(_GUEST)
    build_here(installed.root, "scratch_ops::hidden_name")
    build_here(installed.root, "scratch_ops::add")
    done = fresh(
        """
import sys, torch
early = torch.ops.found_ops
import cuda_ops
x = torch.ones(3)
torch.library.define("scratch_ops::python", "(Tensor x) -> Tensor")
torch.library.define("others::python", "(Tensor x) -> Tensor")
assert not hasattr(torch.ops.scratch_ops, "nowhere") and not hasattr(torch.ops.others, "add")
assert "scratch_package" not in sys.modules and "cuda_ops.registry" not in sys.modules
assert early.twin(x).shape == (3,)
assert torch.ops.found_ops is early and not hasattr(early, "nowhere")
assert torch.equal(torch.ops.scratch_ops.add(x, x), x * 4)
import scratch_package
assert torch.equal(scratch_package.add(x, x), x * 4)
assert scratch_package.add.__module__ == "scratch_package"
from scratch_package import add, plugin
assert plugin.cuda_ops_roots() and "add" in dir(scratch_package)
import pickle
assert pickle.loads(pickle.dumps(scratch_package.add)) is scratch_package.add
assert not hasattr(torch.ops.others, "add") and not hasattr(torch.ops.aten, "nowhere")
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


# --- a root beside its installed copy ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("namespace", ["cuda_ops", "scratch_ops"])
def test_an_added_root_is_used_in_place_of_an_installed_copy(
    namespace: str, own_cache: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site, mine = tmp_path / "site", tmp_path / "mine"
    site.mkdir()
    installed = install(site, namespace)
    developed = Spaced(mine, namespace)
    for spaced, factor in ((installed, 3), (developed, 4)):  # cuda_ops has an add itself
        spaced.write(factor)
        binding = spaced.root / "bindings" / "add.cpp"
        text = binding.read_text().replace('"add', '"mine_and_theirs')
        binding.with_name("mine_and_theirs.cpp").write_text(text)
        binding.unlink()
    (installed.root / "ops").mkdir()
    (installed.root / "ops" / "mine_and_theirs.py").write_text("raise RuntimeError('not asked')")
    done = fresh(
        f"""
import sys, torch, cuda_ops
from cuda_ops.dev import main, watch
status = main(["--root", {str(mine)!r}, "mine_and_theirs"])
x = torch.ones(2)
print(torch.ops.{namespace}.mine_and_theirs(x, x).tolist())
sys.exit(status)
""",
        site,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    key = keyed(namespace, "mine_and_theirs")
    first, *_ = done.stdout.splitlines()
    assert first == (
        f"{key}: taken from {mine}; the installed copy in {installed.root} is left aside"
    )
    assert done.stdout.splitlines()[-1] == "[5.0, 5.0]"


def test_only_added_roots_replace_installed_ones(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("cuda_ops", "added", "installed", "another")]
    for root in roots:
        Spaced(root, "my_ops").write(1)
    builtin, added, installed, another = roots
    pairs, problems = survey([builtin], [installed])
    assert pairs["my_ops::add"].root == builtin and len(problems) == 1
    pairs, problems = survey([tmp_path / "cuda_ops" / "bindings", added], [installed, another])
    assert pairs["my_ops::add"].root == added
    assert [problem.name for problem in problems] == [str(tmp_path / "cuda_ops" / "bindings")]
    pairs, problems = survey([], [installed, another])
    assert pairs["my_ops::add"].root == installed and len(problems) == 1


def test_an_operator_is_imported_as_a_submodule_is() -> None:
    compile_ops(["silu", "relu"], compare=False)  # where pip has not built them
    done = fresh(
        "import sys, torch, cuda_ops.silu, cuda_ops.errors\n"
        "import cuda_ops.relu as relu\n"
        "from cuda_ops import silu\n"
        "assert cuda_ops.silu is silu and relu is cuda_ops.relu\n"
        "assert cuda_ops.silu(torch.zeros(2)).tolist() == [0, 0]\n"
        "f = torch.compile(lambda x: cuda_ops.silu(x), fullgraph=True, backend='eager')\n"
        "assert f(torch.zeros(2)).tolist() == [0, 0]\n"
        "try:\n    import cuda_ops.no_such_operator\n"
        "except ModuleNotFoundError as error:\n    assert 'no_such_operator' in str(error)\n"
        "else:\n    raise AssertionError\n"
    )
    assert done.returncode == 0, done.stderr
