"""Guests in the forms that repositories have them in: names, folders, defines, reload, faults."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cuda_ops
from cuda_ops.build import guest_text, toolchain
from cuda_ops.build.discovery import Pair, discover
from cuda_ops.build.source_text import Kind
from cuda_ops.compile_ops import Row, compile_ops
from cuda_ops.registry import registry

CORPUS = Path(__file__).parent / "guests" / "corpus"
NAMES = sorted(pair.stem for pair in discover([CORPUS]))
#: With their code for the GPU.
WITH_KERNELS = ("flash_step", "guarded", "lltm_cuda")


@pytest.fixture(scope="module")
def rows(quick_compiler: Path) -> Iterator[dict[str, Row]]:
    """The guests of the corpus, built together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(quick_compiler))
        registry().add_root(CORPUS)
        yield {row.op: row for row in compile_ops(NAMES)}


def guest(name: str, rows: dict[str, Row]) -> object:
    if name in WITH_KERNELS and toolchain.cuda_home() is None:
        pytest.skip("no CUDA toolkit here")  # their .cu files cannot be compiled without one
    assert not rows[name].error, rows[name].error
    return registry().public(name)


def test_file_names_lead_to_a_pair_with_several_files() -> None:
    pairs = {pair.stem: pair for pair in discover([CORPUS])}
    files = [path.relative_to(CORPUS).as_posix() for path in pairs["lltm_cuda"].sources]
    assert files == [
        "bindings/lltm_cuda.cpp", "kernels/lltm_cuda_kernel.cu", "bindings/lltm_cpu.cpp",
    ]  # fmt: skip
    files = [path.relative_to(CORPUS).as_posix() for path in pairs["flash_step"].sources]
    assert files == ["csrc/flash_api.cpp", "csrc/flash_fwd.cu", "csrc/flash_bwd.cu"]
    assert pairs["clamp_ext"].binding == CORPUS / "bindings" / "clamp_ext.cc"
    assert not {"lltm_cpu", "lltm_cuda_kernel", "flash_api"} & pairs.keys()


@pytest.mark.slow
def test_the_forms_of_repositories_build_as_they_are(rows: dict[str, Row]) -> None:
    for name, call, expected in (
        ("named_module", lambda m: m.twice(2.0), 4),
        ("lltm_cuda", lambda m: (m.forward(2.0), m.blocks(257)), (6, 2)),
        ("clamp_ext", lambda m: m.clamp(7.0), 6),
        ("needs_a_define", lambda m: m.scaled(2.0), 6),
        ("flash_step", lambda m: (m.fwd(1), m.bwd(1)), (2, 0)),
        ("guarded", lambda m: (m.blocks(129), m.as_torch_builds_it), (2, True)),
        ("counting", lambda m: m.Counter().next(), 1),
        ("both_ways", lambda m: m.version(), 1),
    ):
        assert call(guest(name, rows)) == expected, name
    x = torch.randn(3)
    assert torch.equal(torch.ops.guest_both_ways.copied(x), x)
    assert rows["needs_a_define"].options == {"defines": ["GUEST_FACTOR=3"]}


@pytest.mark.slow
def test_a_row_says_what_will_hurt(rows: dict[str, Row]) -> None:
    hints = "\n".join(rows["lltm_cuda"].hints)
    assert "lltm_cuda_kernel.cu:11: a launch without a stream" in hints
    assert "no device guard" in hints
    assert "no reload in place" in rows["both_ways"].note
    assert "no reload in place" not in rows["lltm_cuda"].note


@pytest.fixture
def copied(tmp_path: Path, quick_compiler: Path, monkeypatch: pytest.MonkeyPatch,
           roots_for_now: None) -> Path:  # fmt: skip
    """A root with guests that a test edits."""
    monkeypatch.setenv("CXX", str(quick_compiler))
    (tmp_path / "bindings").mkdir()
    registry().add_root(tmp_path)
    return tmp_path / "bindings"


def edited(folder: Path, name: str, old: str, new: str, source: str = "") -> Row:
    """Builds a guest of the corpus under another name, changed."""
    text = (CORPUS / "bindings" / f"{source or name}.cpp").read_text()
    assert old in text
    (folder / f"{name}.cpp").write_text(text.replace(old, new))
    (row,) = compile_ops([name])
    return row


@pytest.mark.slow
def test_a_reload_runs_the_new_code(copied: Path) -> None:
    row = edited(copied, "reloaded_guest", "2 * x", "2 * x", "named_module")
    assert not row.error, row.error
    module = cuda_ops.reloaded_guest
    assert module.twice(2.0) == 4
    row = edited(copied, "reloaded_guest", "2 * x", "5 * x", "named_module")
    assert (row.built, row.error) == ("built", "")
    assert module.twice(2.0) == 10, "what was obtained before the reload runs the old code"


@pytest.mark.slow
def test_what_cannot_be_reloaded_says_so_and_goes_on(copied: Path) -> None:
    for name, source, message in (
        ("both_again", "both_ways", "TORCH_LIBRARY registers when opened"),
        ("counting_again", "counting", "py::module_local"),
    ):
        text = (CORPUS / "bindings" / f"{source}.cpp").read_text()
        text = text.replace("guest_both_ways", name).replace("Counter", f"Counter_{name}")
        (copied / f"{name}.cpp").write_text(text)
        (row,) = compile_ops([name])
        assert not row.error, row.error
        (copied / f"{name}.cpp").write_text(text.replace("return 1;", "return 2;"))
        (row,) = compile_ops([name])
        assert message in row.error, row.error
        assert registry().public(name).version() == 1


@pytest.mark.slow
def test_a_header_in_angle_brackets_is_part_of_the_text(copied: Path) -> None:
    shutil.copytree(CORPUS / "include", copied.parent / "include")
    (copied / "clamp_again.cc").write_text((CORPUS / "bindings" / "clamp_ext.cc").read_text())
    (row,) = compile_ops(["clamp_again"])
    assert not row.error and cuda_ops.clamp_again.clamp(7.0) == 6
    header = copied.parent / "include" / "guest" / "limits.h"
    header.write_text(header.read_text().replace("6", "4"))
    (row,) = compile_ops(["clamp_again"])
    assert (row.built, row.error) == ("built", "") and cuda_ops.clamp_again.clamp(7.0) == 4


def pair_of(folder: Path, binding: str, kernel: str = "") -> Pair:
    for name, text in (("bindings/faulty.cpp", binding), ("kernels/faulty.cu", kernel)):
        if text:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    (pair,) = discover([folder])
    return pair


MODULE = '\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("f", &f); }\n'


DISPATCH = 'void f(at::Tensor x) { AT_DISPATCH_ALL_TYPES(x.type(), "f", 0); }'
BLOCK = 'extern "C" {\nvoid g() { f(0); }\nvoid f(float* x, int n) { g(); }\n}'


@pytest.mark.parametrize(
    ("binding", "kernel", "message"),
    [
        ("#include <THC/THC.h>", "", r"faulty.cpp:1: headers of THC are gone; include <ATen/"),
        ("void f() {\n  AT_CHECK(true);\n}", "", "faulty.cpp:2: AT_CHECK is gone; write TORCH"),
        ("void f(at::Tensor x);", DISPATCH, r"faulty.cu:1: AT_DISPATCH takes no \.type\(\); write"),
        ('extern "C" void f(float* x);', "\nvoid f(float* x) {}",
         r'faulty.cu:2: f\(\) is C\+\+ here and extern "C" in .*faulty.cpp:1'),
        ("void f(float* x, int n);", BLOCK,
         r'faulty.cpp:1: f\(\) is C\+\+ here and extern "C" in .*faulty.cu:1'),
    ],
    ids=["header", "check", "dispatch", "C in the binding", "C in the kernel"],
)  # fmt: skip
def test_what_cannot_work_is_said_before_a_build(
    tmp_path: Path, binding: str, kernel: str, message: str, roots_for_now: None
) -> None:
    pair_of(tmp_path, binding + MODULE, kernel)
    registry().add_root(tmp_path)
    (row,) = compile_ops(["faulty"])
    assert re.search(message, row.error), row.error
    assert row.seconds == 0


@pytest.mark.parametrize(
    ("binding", "kernel"),
    [
        ('extern "C" void f(float* x);', 'extern "C" void f(float* x) { f(x); }'),
        # A call of what a header declares.
        ("void g(float* x) {\n  f(x);\n  return f(x);\n}", 'extern "C" void f(float* x) {}'),
        (
            'extern "C" {\n#include <stdio.h>\nvoid f(float* x);\n}',
            'extern "C" void f(float* x) {}',
        ),
        ('void f(float* x);  // extern "C" before', "void f(float* x) {}"),
    ],
)
def test_what_works_is_not_refused(tmp_path: Path, binding: str, kernel: str) -> None:
    assert guest_text.fault_of(pair_of(tmp_path, binding + MODULE, kernel)) == ""


def test_hints_have_lines_and_leave_good_guests_alone(tmp_path: Path) -> None:
    bad = pair_of(tmp_path, MODULE, """
void f(at::Tensor x) {
  int n = x.numel();
  k<<<dim3(n, 2), 256>>>(x.data_ptr<float>());
  cudaDeviceSynchronize();
}""")  # fmt: skip
    found = "\n".join(guest_text.hints(bad))
    for part in (":4: a launch without a stream", ":4: no device guard", ":5: cudaDeviceSynch",
                 ":3: an int holds no size"):  # fmt: skip
        assert part in found
    good = pair_of(tmp_path, MODULE, """
void f(at::Tensor x) {
  const c10::cuda::CUDAGuard guard(x.device());
  int64_t n = x.numel();
  k<<<dim3(n, 2), 256, 0, at::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>());
}""")  # fmt: skip
    assert guest_text.hints(good) == []


def test_old_registrations_are_known(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, 'static auto r = torch::RegisterOperators("old_ops::f", &f);')
    assert pair.kind is Kind.TORCH_LIBRARY and pair.registers("old_ops", "f")
