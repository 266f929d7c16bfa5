"""The knobs of shipped operators: every choice is right, and holds where it was made."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_gpu
from emulator.translate import translate

import cuda_ops
from cuda_ops.build import toolchain
from cuda_ops.runtime import tune
from cuda_ops.runtime.tuning import search
from cuda_ops.runtime.tuning.key import key_of
from cuda_ops.runtime.tuning.knobs import Knobs, size_bits
from cuda_ops.spec import OpSpec

REPO = Path(__file__).resolve().parent.parent

#: The knobs of each operator, and their defaults.
SHIPPED: dict[str, dict[str, int]] = {
    "reduce_sum": {"blocks_per_sm": 8, "split_bytes": 64},
    "sum_rows": {"blocks_per_sm": 8, "split_bytes": 64},
    "softmax_cross_entropy": {"blocks_per_sm": 8},
    "attention": {"hopper": 1},
}


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The shipped operators of the present text, and no choices but those of the test."""
    cuda_ops.dev.reload(*SHIPPED)
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path))
    monkeypatch.delenv("CUDA_OPS_TUNE", raising=False)
    yield
    for name in SHIPPED:
        search.forget_process(name)
        knobs = Knobs(search.found(name)[1])
        for dtype in (torch.float32, torch.bfloat16):
            for rows, columns in ((16, 100_003), (1, 1_600_048), (300, 500)):
                knobs.choose(knobs.bucket((size_bits(rows), size_bits(columns)), dtype), {})


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", SHIPPED)
def test_candidates_set_knobs_of_the_library_and_change_the_default(name: str) -> None:
    spec, library = search.found(name)
    knobs, offered = Knobs(library), search.offered_by(spec, None)
    defaults = {knob: values[0] for knob, values in knobs.values.items()}
    assert defaults == SHIPPED[name]
    for setting in offered.settings.values():
        knobs.check(setting)
        assert {**defaults, **setting} != defaults
    assert len({tuple(s.items()) for s in offered.settings.values()}) == len(offered.settings)


#: Every element of a row is in one split, whatever is chosen, and workspaces hold what is written.
CONFIGS = r"""
#include <cstdio>
#include "reduce/reduce_binding.h"
#include "loss/cross_entropy.h"

using namespace cuda_ops;

int main() {
  int checked = 0, differing = 0;
  DeviceInfo device;
  device_named("H200", device);
  for (const int blocks : {4, 8, 16, 32}) {
    for (const int64_t rows : {1, 2, 7, 100, 1000, 5000}) {
      for (const int64_t n : {0, 1, 1000, 4097, 70000, 3000001}) {
        CrossEntropy entropy;
        entropy.rows = rows;
        entropy.n = n;
        entropy.dtype = DType::kBFloat16;
        entropy.blocks_per_sm = blocks;
        const auto cut = cross_entropy_config(entropy, device);
        const int64_t ends = cut.parts * cut.per_part;
        const int64_t room = cross_entropy_partials(entropy, device);
        if (n > 0 && (ends < n || ends - cut.per_part >= n)) return 1;
        if (cut.parts > 1 && room < 3 * rows * cut.parts) return 2;
        for (const int bytes : {32, 64, 128, 256}) {
          for (const int64_t stride : {1, 1000}) {
            RowSums sums, plain;
            for (RowSums* p : {&sums, &plain}) {
              p->rows.dtype = DType::kFloat32;
              p->rows.add_dim(rows, stride == 1 ? n : 1);
              p->n = n;
              p->stride = stride;
            }
            sums.blocks_per_sm = blocks;
            sums.split_bytes = bytes;
            const auto c = row_sums_config(sums, device), d = row_sums_config(plain, device);
            if (n > 0 && (c.splits * c.chunk < n || (c.splits - 1) * c.chunk >= n)) return 3;
            if (c.splits < 1 || c.splits > 65535) return 4;
            if (c.splits > 1 && partial_sums(sums, device) < rows * c.splits) return 5;
            const int64_t count = rows * c.splits;
            if (count > kMostFinished) {
              RowSums again;  // as reduce_sum.cu makes it
              again.rows.dtype = DType::kFloat32;
              again.n = count;
              const int64_t more = row_sums_config(again, device).splits;
              if (full_partial_sums(sums, device) < count + more) return 6;
            } else if (count > 1 && full_partial_sums(sums, device) < count) {
              return 7;
            }
            if (c.splits != d.splits) ++differing;
            ++checked;
          }
        }
      }
    }
  }
  use_choice(*new RowSums);
  std::printf("%d %d\n", checked, differing > 0);
}
"""


def test_every_choice_covers_rows_and_fits_its_workspace(tmp_path: Path) -> None:
    source, program = tmp_path / "configs.cpp", tmp_path / "configs"
    source.write_text(CONFIGS)
    include = f"-I{REPO / 'src' / 'utils'}"
    flags = ["-std=c++17", "-Wall", "-Werror", include]
    subprocess.run([*toolchain.cxx(), *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["1152", "1"])


@pytest.mark.slow
def test_sums_are_right_under_every_choice_in_the_emulator(tmp_path: Path) -> None:
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("needs the headers of a CUDA toolkit")
    if platform.machine() != "x86_64":
        pytest.skip(f"the emulator's fibers are for x86_64, this is {platform.machine()}")
    emulator, program = REPO / "tests" / "emulator", tmp_path / "run_sums"
    translate(REPO / "src", tmp_path / "translated", ("reduce_sum.cu", "sum_rows.cu"), {})
    include = [f"-I{tmp_path / 'translated'}", f"-I{emulator}", "-isystem", str(home / "include")]
    sources = [str(emulator / f"{name}.cpp") for name in ("run_sums", "emulator", "copy_engine")]
    flags = ["-std=c++17", "-O1", "-w", *include, *sources, "-o", str(program)]
    subprocess.run([*toolchain.cxx(), *flags], check=True)
    done = subprocess.run(
        [program, "seed=1", "timing=late", "fault=0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_gpu
@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", SHIPPED)
def test_every_candidate_has_the_same_bits_each_time_and_the_right_result(name: str) -> None:
    inputs = shipped_inputs(name)
    spec, library = search.found(name)
    knobs, offered = Knobs(library), search.offered_by(spec, None)
    key = key_of(spec, library, inputs, offered)
    here = knobs.bucket(key.bits, getattr(torch, key.dtype))
    made = tune(name, inputs=inputs, anew=True, measure=equal_times)
    assert made.refused == {}
    try:
        for setting in offered.settings.values():
            knobs.choose(here, setting)
            first = result(spec, inputs)
            assert all(torch.equal(first, result(spec, inputs)) for _ in range(5))
    finally:
        knobs.choose(here, {})


@needs_gpu
@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", SHIPPED)
def test_a_choice_holds_in_a_graph_and_nothing_is_measured_there(name: str) -> None:
    inputs = shipped_inputs(name)
    made = tune(name, inputs=inputs, anew=True)
    assert made.measured and made.refused == {}
    spec, _ = search.found(name)
    expected = result(spec, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = tune(name, inputs=inputs, anew=True, measure=never)
        out = result(spec, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert inside.reason == "a CUDA graph is captured: nothing is measured"
    assert torch.equal(out, expected)


@needs_gpu
@pytest.mark.usefixtures("shipped")
def test_tensors_of_the_cpu_have_no_choice_beside_a_gpu() -> None:
    made = tune("sum_rows", inputs=(torch.ones(4, 8),), anew=True, measure=never)
    assert made.reason == "choices of this process are for tensors on cuda, got one on cpu"


def equal_times(functions: Mapping[str, Callable[..., Any]], inputs: Any) -> dict[str, list[float]]:
    return {name: [1.0] * 8 for name in functions}


def never(functions: Mapping[str, Callable[..., Any]], inputs: Any) -> dict[str, list[float]]:
    pytest.fail("measured")


def result(spec: OpSpec, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Returns the first result of a call, the one that is shown."""
    found: torch.Tensor | tuple[torch.Tensor, ...] = spec.function(*inputs)
    return found[0] if isinstance(found, tuple) else found


def shipped_inputs(name: str) -> tuple[torch.Tensor, ...]:
    if name == "attention":
        q, k, v = (torch.randn(2, 3, n, 64, device="cuda").bfloat16() for n in (300, 500, 500))
        return q, k, v
    x = torch.randn(16, 100_003, device="cuda")
    labels = torch.randint(0, 100_003, (16,), device="cuda")
    return (x, labels) if name == "softmax_cross_entropy" else (x,)


@pytest.mark.parametrize("example", ["occupancy_of_a_kernel", "tune_an_operator"])
def test_examples_run(example: str, tmp_path: Path) -> None:
    cuda_ops.dev.reload(*SHIPPED)
    done = subprocess.run(
        [sys.executable, "-W", "error", REPO / "examples" / "runtime" / f"{example}.py"],
        cwd=REPO, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
