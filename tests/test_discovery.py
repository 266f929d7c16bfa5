"""Folders in, operators or named problems out."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_python

import cuda_ops
from cuda_ops.build.discovery import (
    BUILTIN_ROOT,
    INCLUDE_DIR,
    Pair,
    content_hash,
    discover,
    illegal_name,
    survey,
)
from cuda_ops.build.source_text import Kind
from cuda_ops.errors import DiscoveryError

NATIVE = '#include "binding.h"\nCUDA_OPS(library) {}\n'
KERNEL = '#include "elementwise.cuh"\n'
PYBIND = "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n"
TORCH = "TORCH_LIBRARY(mine, m) {}\n"


def write(root: Path, files: dict[str, str]) -> Path:
    root.mkdir(exist_ok=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def one(root: Path) -> Pair:
    (pair,) = discover([root])
    return pair


def problem(*roots: Path) -> str:
    with pytest.raises(DiscoveryError) as caught:
        discover(roots)
    return str(caught.value)


# --- what is an operator ---------------------------------------------------------


def test_a_pair_is_two_files_with_one_stem(tmp_path: Path) -> None:
    write(tmp_path, {"kernels/a.cu": KERNEL, "bindings/a.cpp": NATIVE})
    pair = one(tmp_path)
    assert (pair.stem, pair.root, pair.kind) == ("a", tmp_path, Kind.NATIVE)
    assert pair.sources == (tmp_path / "bindings/a.cpp", tmp_path / "kernels/a.cu")
    assert pair.prebuilt == tmp_path / "lib" / "a.abi3.so"


def test_a_binding_alone_is_an_operator_composed_in_cpp(tmp_path: Path) -> None:
    pair = one(write(tmp_path, {"bindings/a.cpp": NATIVE}))
    assert pair.kernel is None
    assert pair.kind is Kind.NATIVE


@pytest.mark.parametrize(
    ("text", "kind"), [(PYBIND, Kind.PYBIND), (TORCH, Kind.TORCH_LIBRARY)], ids=["pybind", "torch"]
)
def test_a_kernel_alone_may_register_itself(tmp_path: Path, text: str, kind: Kind) -> None:
    pair = one(write(tmp_path, {"kernels/a.cu": text}))
    assert pair.binding is None
    assert pair.kind is kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (NATIVE, Kind.NATIVE),
        (PYBIND, Kind.PYBIND),
        (TORCH, Kind.TORCH_LIBRARY),
        ("STABLE_TORCH_LIBRARY_IMPL(mine, CPU, m) {}", Kind.TORCH_LIBRARY),
        ("TORCH_LIBRARY_FRAGMENT(mine, m) {}", Kind.TORCH_LIBRARY),
        (f"// CUDA_OPS(library)\n/* TORCH_LIBRARY(a,\nm) */ {PYBIND}", Kind.PYBIND),
        (PYBIND + TORCH, Kind.PYBIND),
    ],
)
def test_kind_is_read_from_code_not_from_comments(tmp_path: Path, text: str, kind: Kind) -> None:
    assert one(write(tmp_path, {"kernels/a.cu": "", "bindings/a.cpp": text})).kind is kind


def test_operators_of_all_roots_are_sorted_by_name(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"bindings/c.cpp": NATIVE, "bindings/a.cpp": NATIVE})
    second = write(tmp_path / "second", {"bindings/b.cpp": NATIVE})
    assert [pair.stem for pair in discover([first, second])] == ["a", "b", "c"]


def test_a_root_given_twice_counts_once(tmp_path: Path) -> None:
    root = write(tmp_path / "root", {"bindings/a.cpp": NATIVE})
    assert len(discover([root, tmp_path / "root" / ".." / "root"])) == 1


def test_the_operators_shipped_are_well_formed() -> None:
    assert [pair.stem for pair in discover([BUILTIN_ROOT])]


# --- what is not, and what to do about it ----------------------------------------


def test_a_kernel_that_nothing_binds(tmp_path: Path) -> None:
    root = write(tmp_path, {"kernels/a.cu": KERNEL})
    assert problem(root) == (
        f"cannot list operators:\n  {root}/kernels/a.cu: nothing binds this kernel; write "
        f"{root}/bindings/a.cpp or register it in the file itself "
        "(PYBIND11_MODULE or TORCH_LIBRARY)"
    )


def test_a_binding_that_registers_nothing(tmp_path: Path) -> None:
    root = write(tmp_path, {"bindings/a.cpp": "// CUDA_OPS(library) {}\n"})
    assert f"{root}/bindings/a.cpp: registers nothing; add CUDA_OPS(library)" in problem(root)


@pytest.mark.parametrize("stem", ["my-op", "2d_conv", "lambda", "with space"])
def test_a_name_that_python_cannot_say(tmp_path: Path, stem: str) -> None:
    root = write(tmp_path, {f"bindings/{stem}.cpp": NATIVE})
    what = "a keyword of Python" if stem == "lambda" else "not a Python identifier"
    assert f"operator name {stem!r} is {what}; rename the file" in problem(root)


def test_a_name_that_nvcc_cannot_say(tmp_path: Path) -> None:
    root = write(tmp_path, {"bindings/opé.cpp": NATIVE})
    assert "operator name 'opé' has letters beyond ASCII; rename the file" in problem(root)


def test_a_plugin_of_no_operator(tmp_path: Path) -> None:
    files = {"bindings/row_max.cpp": NATIVE, "ops/row_max.py": "", "ops/_shared.py": ""}
    assert discover([write(tmp_path, files)])
    root = write(tmp_path, {"ops/rowmax.py": ""})
    assert f"{root}/ops/rowmax.py: no operator 'rowmax' for this plugin; name it" in problem(root)


@pytest.mark.parametrize("text", [PYBIND, TORCH])
def test_a_plugin_of_a_guest(tmp_path: Path, text: str) -> None:
    (pair,) = discover([write(tmp_path, {"bindings/a.cpp": text})])
    assert not pair.is_declared
    (pair,) = discover([write(tmp_path, {"ops/a.py": ""})])
    assert pair.is_declared and not pair.problem


def test_files_that_an_editor_hides_are_none(tmp_path: Path) -> None:
    root = write(tmp_path, {"bindings/row_max.cpp": NATIVE, "ops/row_max.py": ""})
    for name in ("bindings/.#row_max.cpp", "ops/.#row_max.py"):
        (root / name).symlink_to("user@host.42")  # as Emacs locks what it edits
    assert [pair.stem for pair in discover([root])] == ["row_max"]


def test_a_private_name(tmp_path: Path) -> None:
    root = write(tmp_path, {"bindings/_a.cpp": NATIVE})
    assert "operator name '_a' starts with an underscore; rename the file" in problem(root)


@pytest.mark.parametrize("stem", ["registry", "build"])
def test_a_name_that_a_module_has(tmp_path: Path, stem: str) -> None:
    root = write(tmp_path, {f"bindings/{stem}.cpp": NATIVE})
    assert (
        f"operator name {stem!r} is taken by the module cuda_ops.{stem}; rename the file"
        in problem(root)
    )


def test_names_that_python_reaches_before_an_operator_are_refused() -> None:
    """Those of the package's module and of torch's namespace, whatever they come to be."""
    names = "from cuda_ops.build.discovery import illegal_name; import torch, cuda_ops; "
    names += (
        "print([n for n in [*vars(cuda_ops), *dir(torch.ops.cuda_ops)] if not illegal_name(n)])"
    )
    assert run_python("-c", names).stdout == "[]\n"
    assert illegal_name("name") == (
        "operator name 'name' is taken by torch.ops.cuda_ops.name; rename the file"
    )
    for name in ("Path", "Any", "importlib", "annotations"):
        assert not illegal_name(name)
        assert name not in vars(cuda_ops)


def test_one_operator_in_two_roots(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"bindings/a.cpp": NATIVE})
    second = write(tmp_path / "second", {"bindings/a.cpp": NATIVE})
    assert (
        f"{second}/bindings/a.cpp: operator 'a' is already defined by {first}/bindings/a.cpp; "
        "rename one of them" in problem(first, second)
    )


def test_a_root_that_does_not_exist(tmp_path: Path) -> None:
    assert f"{tmp_path}/nowhere: operator root does not exist; create it or drop it" in problem(
        tmp_path / "nowhere"
    )


def test_a_root_without_folders(tmp_path: Path) -> None:
    assert f"{tmp_path}: operator root has neither kernels/ nor bindings/; create them" in problem(
        tmp_path
    )


def test_every_offender_is_named_at_once(tmp_path: Path) -> None:
    root = write(tmp_path, {"kernels/b.cu": KERNEL, "bindings/my-op.cpp": NATIVE})
    lines = problem(root, tmp_path / "nowhere").splitlines()
    assert len(lines) == 4
    assert lines[1:] == sorted(lines[1:])


def test_offenders_cost_only_themselves(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"bindings/a.cpp": NATIVE, "kernels/wip.cu": KERNEL})
    second = write(tmp_path / "second", {"bindings/a.cpp": NATIVE, "bindings/b.cpp": NATIVE})
    pairs, problems = survey([first, tmp_path / "nowhere", second])
    assert list(pairs) == ["a", "b"] and pairs["a"].root == first
    assert {problem.name for problem in problems} == {"a", "wip", str(tmp_path / "nowhere")}


# --- which files an operator is made of -------------------------------------------


def test_files_are_the_sources_and_every_header_they_reach(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "bindings/a.cpp": '#include "near.h"\n#include <vector>\n' + NATIVE,
            "bindings/near.h": '#  include "own.h"\n',
            "utils/own.h": '#include "near.h"\n#include "not_ours.h"\n',
            "utils/unused.h": "",
        },
    )
    names = [path.name for path in one(root).files()]
    assert names[:3] == ["a.cpp", "near.h", "binding.h"]
    assert "own.h" in names
    assert not {"unused.h", "not_ours.h", "vector"} & set(names)
    assert len(names) == len(set(names))


def test_a_root_has_headers_of_its_own_before_ours(tmp_path: Path) -> None:
    root = write(tmp_path, {"bindings/a.cpp": NATIVE, "utils/binding.h": "// mine\n"})
    pair = one(root)
    assert pair.include_dirs == (root / "utils", INCLUDE_DIR)
    assert root / "utils" / "binding.h" in pair.files()
    assert INCLUDE_DIR / "binding.h" not in pair.files()


def test_files_of_one_source_leave_the_other_out(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "bindings/a.cpp": NATIVE,
            "kernels/a.cu": '#include "mine.cuh"\n',
            "kernels/mine.cuh": "",
        },
    )
    kernel = root / "kernels/a.cu"
    before = one(root).read()
    assert before.closures[kernel] == (kernel, root / "kernels/mine.cuh")
    (root / "bindings/a.cpp").write_text(NATIVE + "// edited")
    after = one(root).read()
    assert after.hash != before.hash and after.hash_of(kernel) == before.hash_of(kernel)


@pytest.mark.parametrize("edited", ["bindings/a.cpp", "kernels/a.cu", "utils/mine.cuh"])
def test_source_hash_follows_every_file(tmp_path: Path, edited: str) -> None:
    files = {
        "bindings/a.cpp": NATIVE,
        "kernels/a.cu": '#include "mine.cuh"\n',
        "utils/mine.cuh": "// one\n",
    }
    pair = one(write(tmp_path, files))
    before = pair.source_hash()
    write(tmp_path, {edited: files[edited] + "// two\n"})
    assert pair.source_hash() != before
    write(tmp_path, {edited: files[edited]})
    assert pair.source_hash() == before


def test_source_hash_ignores_where_the_files_are(tmp_path: Path) -> None:
    here, there = (
        one(write(tmp_path / name, {"bindings/a.cpp": NATIVE})) for name in ("here", "there")
    )
    assert here.source_hash() == there.source_hash()


def test_content_hash_knows_names_and_borders(tmp_path: Path) -> None:
    write(tmp_path, {"a": "xy", "b": "", "c": "x", "d": "y", "e/a": "xy"})
    a, b, c, d, ea = (tmp_path / name for name in ("a", "b", "c", "d", "e/a"))
    assert content_hash([a]) == content_hash([ea])
    assert len({content_hash(files) for files in ([a], [a, b], [c, d], [b, a])}) == 4
