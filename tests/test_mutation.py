"""Faults that the mutation run plants, and what it says of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cuda_ops.build.compiling import visible_archs
from cuda_ops.build.discovery import BUILTIN_ROOT, survey
from cuda_ops.testing.__main__ import main
from cuda_ops.testing.mutation import ledger, processes, report, result, trials
from cuda_ops.testing.mutation.campaign import Campaign
from cuda_ops.testing.mutation.kinds import KINDS
from cuda_ops.testing.mutation.objects import same
from cuda_ops.testing.mutation.place import Place, Project
from cuda_ops.testing.mutation.plan import Mutant, chosen, every_mutant, mutants_in
from cuda_ops.testing.mutation.plugin_faults import gradient
from cuda_ops.testing.mutation.reach import Reach
from cuda_ops.testing.mutation.result import Result, Verdict
from cuda_ops.testing.mutation.settings import Settings
from cuda_ops.testing.mutation.source import Source


def planted(kind: str, text: str) -> list[str]:
    """Returns a text with each of the faults of a kind."""
    return [fault.planted(text) for fault in KINDS[kind](Source(text))]


@pytest.mark.parametrize(
    ("kind", "text", "mutants"),
    [
        ("boundary", "if (i < n) f();", ["if (i <= n) f();"]),
        ("boundary", "if (i >= n) f();", ["if (i > n) f();"]),
        ("boundary", "for (i = 0; i<n; ++i) f();", ["for (i = 0; i<=n; ++i) f();"]),
        ("boundary", "g(n - 1, m);", ["g(n, m);"]),
        ("boundary", "y = x[i];", ["y = x[i + 1];"]),
        ("boundary", "g(ceil_div(n, kTile));", ["g(((n) / (kTile)));"]),
        ("stride", "at += x.stride(1);", ["at += x.stride(0);"]),
        ("stride", "at += strides[d];", ["at += strides[d > 0 ? d - 1 : 1];"]),
        ("stride", "x += row * p.x_step;", ["x += row;"]),
        ("stride", "f(rows, cols);", ["f(cols, cols);", "f(rows, rows);"]),
        ("barrier", "{ a = 1; __syncthreads(); b = a; }", ["{ a = 1; ; b = a; }"]),
        ("barrier", "if (last) ring.wait_full<2>(s);", ["if (last) ;"]),
        ("barrier", "{ cp_async_whole(to, from); cp_async_wait<0>(); }",
         ["{ cp_async_whole(to, from); ; }"]),
        ("sign", "y = a + b;", ["y = a - b;"]),
        ("sign", "y = a +\n    b;", ["y = a -\n    b;"]),
        ("sign", "y -= b;", ["y += b;"]),
        ("sign", "return -x;", ["return x;"]),
        ("arithmetic", "y = a * b;", ["y = a / b;"]),
        ("arithmetic", "y /= b;", ["y *= b;"]),
        ("arithmetic", "y = f(0.5f);", ["y = f((0.5f * 2));"]),
        ("arithmetic", "y = f(0.0);", ["y = f(1.0);"]),
        ("arithmetic", "y = x % 4;", ["y = x / 4;", "y = x % 5;"]),
        ("logic", "y = a && b;", ["y = a || b;"]),
        ("logic", "y = std::max(a, b);", ["y = std::min(a, b);"]),
        ("logic", "if (ready) f();", ["if (!(ready)) f();"]),
        ("dtype", "const double y = x;", ["const float y = x;"]),
        ("dtype", "const int64_t i = f<int64_t>(j);",
         ["const int i = f<int64_t>(j);", "const int64_t i = f<int>(j);"]),
        ("dtype", "template <class T>\nvoid f() { C sum = 0; }",
         ["template <class T>\nvoid f() { T sum = 0; }"]),
        ("check", "if (n < 0) refuse(\"n: got \" + shown(n));", ["if (n < 0) ;"]),
        ("check", "{ check_weight(x, weight); }", ["{ ; }"]),
        ("check", "if (bad) throw OpError(\"no\");", ["if (bad) ;"]),
        ("statement", "{ sum += x[i]; }", ["{ ; }"]),
        ("statement", "if (a)\n  p.out =\n      f(x);", ["if (a)\n  \n;"]),
        ("statement", "{ int64_t i = 0; return i; }", []),
    ],
)  # fmt: skip
def test_each_kind_plants_its_faults(kind: str, text: str, mutants: list[str]) -> None:
    assert planted(kind, text) == mutants


def test_words_of_the_binding_are_dropped() -> None:
    text = """CUDA_OPS(library) {
  library.op("f(Tensor(a!) x, int k=2, bool b=False) -> Tensor", "")
      .range("k", 1, 8)
      .doc(R"(k=3 ( and (a!).)")
      .cpu<f_cpu>();
}"""
    mutants = planted("manifest", text)
    assert [mutant.count("\n") for mutant in mutants] == 4 * [text.count("\n")]
    lines = [(set(text.splitlines()) ^ set(mutant.splitlines())) - {""} for mutant in mutants]
    assert lines[0] == {'      .range("k", 1, 8)'}
    assert sum("Tensor x" in line for line in lines[1]) == 1
    assert sum("int k=3" in line for line in lines[2]) == 1
    assert sum("bool b=True" in line for line in lines[3]) == 1


def test_no_fault_lies_where_no_code_is() -> None:
    text = r"""
#include <cmath>  // a + b
#define TWICE(x) \
  ((x) * 2)
/* n - 1 */
template <int kN = 2 * 3, class T = float>
struct Pack;
constexpr int kBlock = 2 * 128;
constexpr int64_t kFew = int64_t(1) << 15, kMany = int64_t(1) << 17;
static_assert(sizeof(Pack<4>) == 4 * 2, "a + b");
cudaError_t f_launch(const double* x, int64_t n, cudaStream_t stream);
const auto text = R"(a "quoted" - b; x = y;)";
const auto words = "a - b" /* c - d */;
__global__ void __launch_bounds__(4 * 32) kernel(Pack<2 * 3> p);
"""
    assert {kind: planted(kind, text) for kind in KINDS if planted(kind, text)} == {}


def test_faults_of_a_gradient_in_python() -> None:
    text = '''
def cuda_ops_autograd(op):
    def backward(ctx, grad):
        """Not -1."""
        return -grad * 2 if not ctx.reverse else grad  # a + b
    return backward

def reference(x):
    return -x * 2
'''
    mutants = [fault.planted(text) for fault in gradient(text)]
    line = "return -grad * 2 if not ctx.reverse else grad"
    assert [mutant.splitlines()[4].strip().partition("  #")[0] for mutant in mutants] == [
        line.replace("-grad", "grad"), line.replace("*", "/"), line.replace("not", ""),
    ]  # fmt: skip


def test_each_shipped_operator_has_faults_that_keep_lines() -> None:
    pairs, _ = survey([BUILTIN_ROOT])
    mutants = every_mutant(pairs.values())
    assert {mutant.ops[0] for mutant in mutants} == {*pairs}
    assert {mutant.kind for mutant in mutants} == {*KINDS, "gradient"}
    assert len({mutant.key for mutant in mutants}) == len(mutants)
    for mutant in chosen(mutants, 200, seed=0):
        text = BUILTIN_ROOT / mutant.file
        text = text if text.is_file() else BUILTIN_ROOT.parent / mutant.file
        before = text.read_text()
        after = mutant.fault.planted(before)
        assert after != before and after.count("\n") == before.count("\n"), mutant


def test_a_limit_takes_a_fair_sample_that_the_seed_decides() -> None:
    pairs, _ = survey([BUILTIN_ROOT])
    mutants = every_mutant(pairs.values())
    few = chosen(mutants, 120, seed=1)
    assert few == chosen(mutants, 120, seed=1) != chosen(mutants, 120, seed=2)
    assert few[:60] == chosen(mutants, 60, seed=1)
    by_op = {op: [m for m in few if m.ops[0] == op] for op in pairs}
    assert {len(found) for found in by_op.values()} <= {3, 4}
    for op, found in by_op.items():
        kinds = {m.kind for m in mutants if m.ops[0] == op}
        assert len({m.kind for m in found}) == min(len(found), len(kinds)), op


def test_objects_of_nvcc_are_compared_without_what_it_makes_up(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.cuda.o" for name in "abc")
    first.write_bytes(b"_GLOBAL__N__8e6baa13_7_silu_cu_cd5ab14a tmpxft_00002e00_x code")
    second.write_bytes(b"_GLOBAL__N__ddf1f197_7_silu_cu_cd5ab14a tmpxft_00002e1d_x code")
    third.write_bytes(b"_GLOBAL__N__ddf1f197_7_silu_cu_cd5ab14a tmpxft_00002e1d_x cold")
    assert same(first, second) and not same(first, third)


def test_what_only_a_gpu_runs_is_told_by_names() -> None:
    text = """
int64_t shared(int64_t n) { return n + 1; }
int64_t blocks(int64_t n) { return shared(n) * 2; }
Tensor f_cpu(const Tensor& x) { return made(shared(x.numel())); }
Tensor f_cuda(const Tensor& x) { return made(blocks(x.numel())); }
CUDA_OPS(library) { library.op("f(Tensor x) -> Tensor").cpu<f_cpu>().cuda<f_cuda>(); }
"""
    reach = Reach({"f.cpp": text})
    gpu = {word: reach.needs_gpu("f.cpp", text.index(word)) for word in ("n + 1", "* 2", ".op(")}
    assert gpu == {"n + 1": False, "* 2": True, ".op(": False}


# --- ledger and report ----------------------------------------------------------------


def a_mutant(text: str = "y = a + b;") -> Mutant:
    (mutant,) = mutants_in(Path("f.cpp"), "bindings/f.cpp", text, ["f"])
    return mutant


def a_result(verdict: Verdict, mutant: Mutant | None = None, **more: str) -> Result:
    return Result(**(mutant or a_mutant()).as_json(), verdict=verdict, **more)


_ENTRY = "# why\nbindings/f.cpp\n- y = a + b;\n+ {}\n= both are zero there\n"


def test_the_ledger_explains_by_text(tmp_path: Path) -> None:
    path = tmp_path / ledger.NAME
    for after, covers in (("y = a - b;", True), ("*", True), ("y = a * b;", False)):
        path.write_text(_ENTRY.format(after))
        (entry,) = ledger.read(path)
        assert entry.covers(a_mutant("\n\n    y = a + b;")) == covers
        assert (ledger.outdated([entry], [a_mutant()]) == []) == covers
    assert ledger.outdated([entry], []) == []  # nothing was asked about that file


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bindings/f.cpp\n+ y\n", "ledger.txt:2: expected - THE LINE, got '+ y'"),
        ("- y\n", "ledger.txt:1: expected FILE"),
        ("bindings/f.cpp\n- y\n", "the last entry has 2 of 4 lines"),
    ],
)
def test_a_wrong_ledger_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "ledger.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"ledger\.txt") as error:
        ledger.read(path)
    assert says in str(error.value)


def test_the_share_counts_neither_invalid_nor_equivalent_nor_explained_ones() -> None:
    results = [
        *[a_result("killed", by="reference[cpu] of f") for _ in range(3)],
        a_result("survived"), a_result("survived", reason="never reached"),
        a_result("invalid"), a_result("equivalent"), a_result("not judged", detail="only a GPU"),
    ]  # fmt: skip
    assert report.share(results) == 3 / 4
    text = report.text(results, [], planned=9)
    assert (
        "| f        | 8       | 1       | 1          | 1          | 3      | 1        | 1 " in text
    )
    assert "killed by reference[cpu] 3" in text and "not judged here 1: only a GPU" in text
    assert text.endswith(
        "killed 3 of 4 mutants (75.0%); besides 1 explained, 1 equivalent, 1 invalid, "
        "1 not judged; 1 of 9 not run yet"
    )
    assert "SURVIVED:\nbindings/f.cpp:1: sign, f\n  - y = a + b;\n  + y = a - b;" in text


# --- runs -----------------------------------------------------------------------------

#: Draws at most 4 elements, which is what lets the fault in ``large`` survive.
_PLUGIN = """
from cuda_ops.hookspecs import hookimpl
from cuda_ops.testing import Sample, TensorArg
from hypothesis import strategies as st
import torch

@hookimpl
def cuda_ops_samples(op):
    shapes = st.sampled_from([(2,), (4,), (1, 3)])
    return st.builds(lambda shape: Sample((TensorArg(shape, torch.float32),)), shapes)

@hookimpl
def cuda_ops_reference(op):
    return lambda x: 3 * x
"""
_BINDING = """
#include "binding.h"
#include "tripled.h"
using namespace cuda_ops;
namespace {
Tensor tripled_cpu(const Tensor& x) {
  const int64_t places[2 * 2] = {3, 3, 3, 3};
  const int64_t large = x.numel() / 1000000;
  Tensor out = empty_elementwise(x);
  map_cpu(strided(out, x), [=](double v) { return v * times(places[counted(3)]) + large; });
  return out;
}
}  // namespace
CUDA_OPS(library) {
  library.op("tripled(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<tripled_cpu>();
}
"""
_HEADER = """#pragma once
#include <cstdint>
inline int64_t unused(int64_t n) { return n * 7; }
inline int64_t times(int64_t n) { return n + n / 1000; }
inline int64_t counted(int64_t n) {
  while (n != 0) --n;
  return n;
}
"""
#: What to plant, the line that it makes, and what becomes of it.
_VERDICTS: dict[str, Verdict] = {
    "inline int64_t times(int64_t n) { return n - n / 1000; }": "survived",
    "inline int64_t times(int64_t n) { return n + n * 1000; }": "killed",
    "while (n != 0) ;": "killed",
    "const int64_t large = x.numel() / 1000001;": "survived",
    "const int64_t places[2 / 2] = {3, 3, 3, 3};": "invalid",
    "inline int64_t unused(int64_t n) { return n / 7; }": "equivalent",
}


@pytest.fixture
def root(tmp_path: Path, quick_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root of one operator for CPUs, to be copied; its samples are weak."""
    root = tmp_path / "root"
    for name, text in {
        "bindings/tripled.cpp": _BINDING, "utils/tripled.h": _HEADER, "ops/tripled.py": _PLUGIN,
    }.items():  # fmt: skip
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("CXX", str(quick_compiler))
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path / "cache"))
    return root


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_each_verdict(
    root: Path, tmp_path: Path, roots_for_now: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_MORE", 3.0)  # for what hangs
    before = files(root)
    pairs, _ = survey([root])
    mutants = [m for m in every_mutant(pairs.values()) if m.after in _VERDICTS]
    settings = Settings(visible_archs(), checks=("reference",))
    found: list[Result] = []
    notes: list[str] = []
    Campaign(pairs, settings, jobs=2).run(mutants, found.append, notes.append)
    assert notes == []
    assert {one.after: one.verdict for one in found} == _VERDICTS
    killed = {one.kind: one for one in found if one.verdict == "killed"}
    assert killed["arithmetic"].by == "reference[cpu] of tripled"
    assert "tolerance" in killed["arithmetic"].detail
    assert killed["statement"].by == "hang"
    assert killed["statement"].detail == "in reference[cpu] of tripled"
    (invalid,) = (one for one in found if one.verdict == "invalid")
    assert "too many initializers" in invalid.detail
    assert files(root) == before
    assert [*(tmp_path / "temporary").iterdir()] == []


@pytest.mark.slow
def test_a_run_goes_on_with_the_results_of_an_earlier_one(
    root: Path, tmp_path: Path, roots_for_now: None, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, book = tmp_path / "results.json", root / ledger.NAME
    words = ["mutate", "--root", str(root), "--device", "cpu", "--check", "reference",
             "--json", str(kept), "--kind", "sign"]  # fmt: skip
    assert main(words) == 1
    said = capsys.readouterr()
    assert "2/2 survived: tripled " in said.err
    assert "  + inline int64_t times(int64_t n) { return n - n / 1000; }" in said.out
    assert main(words) == 1
    said = capsys.readouterr()
    assert said.err == ""
    survivors = [one for one in result.read(kept) if one.verdict == "survived"]
    entries = [f"{m.file}\n- {m.before}\n+ {m.after}\n= no sample\n" for m in survivors]
    book.write_text("".join(entries))
    assert main(words) == 0
    assert "explained:" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_compilers_and_removes_copies(root: Path, tmp_path: Path) -> None:
    compiler, started = tmp_path / "c++", tmp_path / "started"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in -v | --version) echo slow 1.0; exit;; esac\n'
        f"echo $$ >> {started}\nexec sleep 300\n"
    )
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "cuda_ops.testing", "mutate", "--root", root,
               "--device", "cpu", "--jobs", "2"]  # fmt: skip
    process = subprocess.Popen(
        command, env={**os.environ, "CXX": str(compiler)}, stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 120
    while not started.exists() and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "not run yet" in said
    for number in started.read_text().split():
        assert not Path(f"/proc/{number}").exists()
    assert [path for path in (tmp_path / "temporary").iterdir() if "mutants" in path.name] == []


def test_tests_need_what_lies_around_a_root(tmp_path: Path) -> None:
    root = tmp_path / "project" / "package" / "operators"
    root.mkdir(parents=True)
    assert Project.of(root, with_tests=True).folder == root
    (tmp_path / "project" / "pyproject.toml").touch()
    assert Project.of(root, with_tests=True).folder == tmp_path / "project"
    assert Project.of(root, with_tests=False).folder == root
    shipped = Project.of(BUILTIN_ROOT, with_tests=False)
    assert shipped.folder == BUILTIN_ROOT.parent and shipped.only == ("cuda_ops", "src")


def test_a_copy_has_the_fault_only_for_a_while(root: Path, tmp_path: Path) -> None:
    pairs, _ = survey([root])
    mutant = next(m for m in every_mutant(pairs.values()) if m.file == "utils/tripled.h")
    place = Place(Project.of(root, with_tests=False), tmp_path / "place", None, 1).made()
    copied = place.root / "utils" / "tripled.h"
    with place.planted(mutant):
        assert copied.read_text() == mutant.fault.planted(_HEADER) != _HEADER
    assert copied.read_text() == _HEADER == (root / "utils" / "tripled.h").read_text()


def test_a_program_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 300 & echo $! > {tmp_path}/child; wait"
    stop = threading.Event()
    started = time.monotonic()
    status = processes.run(["sh", "-c", script], tmp_path, tmp_path / "said", stop, timeout=1.0)
    assert status is None and time.monotonic() - started < 30
    child = Path("/proc") / (tmp_path / "child").read_text().strip() / "cmdline"
    end = time.monotonic() + 10
    while child.exists() and child.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    assert not child.exists() or not child.read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shard", "3/2"], "--shard: expected I/N such as 1/4, got '3/2'"),
        (["no_such_operator"], "no operator 'no_such_operator'; known: "),
        (["silu", "--check", "layout"], "no check 'layout'; known: "),
        (["silu", "--tests", "absent.txt"], "absent.txt: No such file or directory"),
        (["silu", "--ledger", "absent.txt"], "absent.txt: No such file or directory"),
        (["silu", "--tests", __file__], "test_mutation.py:1: expected PATTERN OF FILES |"),
    ],
)
def test_a_wrong_call_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mutate", *words, "--list"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tests", "--ledger"])
def test_a_file_of_another_encoding_is_named_with_its_line(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("# first\n# größer\n".encode("latin-1"))
    assert main(["mutate", "silu", "--list", option, str(file)]) == 2
    assert f"{file}:2: expected text in UTF-8, got byte 0xf6" in capsys.readouterr().err
