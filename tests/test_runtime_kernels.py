"""What kernels need of a multiprocessor: read from machine code, compared with NVIDIA's rules."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import cuda_ops
from cuda_ops.build import toolchain
from cuda_ops.dev.watch import Save
from cuda_ops.runtime import Kernel, best_block, kernels_of, occupancy
from cuda_ops.runtime.launch.kernels import LIMITS, least_at_launch_bounds
from cuda_ops.runtime.launch.machine_code import kernels_in

REPO = Path(__file__).resolve().parent.parent


def kernel(registers: int = 32, shared_bytes: int = 0, max_threads: int = 1024, barriers: int = 0,
           capability: tuple[int, int] = (9, 0)) -> Kernel:  # fmt: skip
    return Kernel(
        "k", "k", capability, registers, shared_bytes, max_threads, True, barriers=barriers
    )


@pytest.fixture(scope="module")
def home() -> Path:
    found = toolchain.cuda_home()
    if found is None:
        pytest.skip("needs a CUDA toolkit")
    return found


# --- the rules -----------------------------------------------------------------------

#: NVIDIA's own calculator, on the host, fed with the numbers of the programming guide's table.
CALCULATOR = r"""
#include <cstdio>
#include <cuda_occupancy.h>

int main() {
  int major, minor, registers, shared, barriers, most, block, dynamic;
  while (std::scanf("%d %d %d %d %d %d %d %d", &major, &minor, &registers, &shared, &barriers,
                    &most, &block, &dynamic) == 8) {
    const bool large = minor == 0 && major != 12;
    const int kilobytes = major == 8 && minor == 0 ? 164 : large ? 228 : 100;
    cudaOccDeviceProp device;
    device.computeMajor = major;
    device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = large ? 2048 : 1536;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = kilobytes * 1024;
    device.sharedMemPerBlockOptin = (kilobytes - 1) * 1024;
    device.reservedSharedMemPerBlock = 1024;
    device.numSms = 1;
    cudaOccFuncAttributes function;
    function.maxThreadsPerBlock = most;
    function.numRegs = registers;
    function.sharedSizeBytes = shared;
    function.partitionedGCConfig = PARTITIONED_GC_OFF;
    function.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    function.maxDynamicSharedSizeBytes = dynamic;
    function.numBlockBarriers = barriers;
    function.virtualResourceCount = 0;
    cudaOccDeviceState state;
    state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    cudaOccResult result;
    int grid = 0, best = 0;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &function, &state, block,
                                                dynamic) != CUDA_OCC_SUCCESS ||
        cudaOccMaxPotentialOccupancyBlockSize(&grid, &best, &device, &function, &state, nullptr,
                                              dynamic) != CUDA_OCC_SUCCESS) {
      return 1;
    }
    std::printf("%d %d %d\n", result.activeBlocksPerMultiprocessor, best, grid);
  }
}
"""

PROBLEMS = [
    (*capability, *problem)
    for capability in LIMITS
    for problem in itertools.product(
        (16, 24, 32, 33, 40, 64, 96, 128, 168, 255),  # registers
        (0, 400, 16384),  # static shared memory
        (0, 1, 16),  # barriers
        (256, 1000, 1024),  # launch bound
        (32, 33, 96, 128, 256),  # block
        (0, 1, 5000, 40_000, 90_000),  # dynamic shared memory
    )
]


def test_the_rules_are_those_of_the_toolkits_calculator(home: Path, tmp_path: Path) -> None:
    source, program = tmp_path / "calculator.cpp", tmp_path / "calculator"
    source.write_text(CALCULATOR)
    flags = ["-std=c++17", f"-I{home / 'include'}"]
    command = [*toolchain.cxx(), *flags, str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    given = "\n".join(" ".join(map(str, problem)) for problem in PROBLEMS)
    done = subprocess.run([program], input=given, capture_output=True, text=True, check=True)
    answers = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(answers) == len(PROBLEMS)
    for problem, (blocks, best, fitting) in zip(PROBLEMS, answers, strict=True):
        major, minor, registers, shared, barriers, most, block, dynamic = problem
        one = kernel(registers, shared, most, barriers, (major, minor))
        assert occupancy(one, block, dynamic).blocks_per_sm == blocks, problem
        if block == 32:  # the best block is the same for all of them
            found = best_block(one, shared_bytes=dynamic)
            assert found.blocks_per_sm == fitting, problem
            assert fitting == 0 or found.block == best, problem


@pytest.mark.parametrize(
    ("one", "block", "shared", "blocks", "share", "limit"),
    [
        (kernel(32), 256, 0, 8, 1.0, "warps"),
        (kernel(64), 256, 0, 4, 0.5, "registers"),
        (kernel(16), 32, 0, 32, 0.5, "blocks"),
        (kernel(32), 128, 100 * 1024, 2, 0.125, "shared memory"),
        (kernel(32, barriers=16), 128, 0, 4, 0.25, "barriers"),
        (kernel(32, capability=(8, 6)), 256, 0, 6, 1.0, "warps"),
        (kernel(168), 512, 0, 0, 0.0, "registers"),
    ],
)
def test_a_fit_says_what_limits_it(
    one: Kernel, block: int, shared: int, blocks: int, share: float, limit: str
) -> None:
    fit = occupancy(one, block, shared)
    assert (fit.blocks_per_sm, fit.occupancy) == (blocks, share)
    assert limit in fit.limited_by


def test_another_capability_may_be_asked_for() -> None:
    assert occupancy(kernel(), 1024, capability=(8, 9)).occupancy == pytest.approx(2 / 3)
    assert best_block(kernel(), (8, 9)).occupancy == 1


def test_a_smaller_carve_out_holds_fewer_blocks() -> None:
    assert occupancy(kernel(), 128, 15 * 1024, carve_out=64).blocks_per_sm == 4
    # One that holds no block is passed over, as by the driver.
    assert occupancy(kernel(), 128, 15 * 1024, carve_out=8).blocks_per_sm == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block": 0}, r"'block': expected 1 to 1024 threads, as k takes, got 0"),
        ({"block": 2048}, r"'block': expected 1 to 1024 threads, as k takes, got 2048"),
        ({"block": "a"}, r"'block': expected 1 to 1024 threads, as k takes, got 'a'"),
        ({"block": 1.5}, r"'block': expected 1 to 1024 threads, as k takes, got 1.5"),
        ({"block": 32, "shared_bytes": -1}, r"'shared_bytes': .* 0 or more, got -1"),
        ({"block": 32, "shared_bytes": "a"}, r"'shared_bytes': .* 0 or more, got 'a'"),
        (
            {"block": 32, "capability": (7, 5)},
            r"'capability': expected one of \(8, 0\), .*got \(7, 5\)",
        ),
        ({"block": 32, "capability": [9, 0]}, r"'capability': .*\(9, 0\).*got \[9, 0\]"),
        ({"block": 32, "carve_out": 7}, r"'carve_out': expected one of .*228.*, got 7"),
    ],
)
def test_what_no_gpu_takes_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"occupancy: argument {message}"):
        occupancy(kernel(), **given)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: occupancy(cast("Kernel", None), 256), TypeError,
         "occupancy: argument 'kernel': expected a Kernel, .* got NoneType"),
        (lambda: best_block(cast("Kernel", "silu")), TypeError,
         "best_block: argument 'kernel': expected a Kernel, .* got str"),
        (lambda: best_block(kernel(), (1, 1)), ValueError,
         r"best_block: argument 'capability': .* got \(1, 1\)"),
        (lambda: best_block(kernel(), (9, 0), -1), ValueError,
         "best_block: argument 'shared_bytes': expected an int of 0 or more, got -1"),
    ],
)  # fmt: skip
def test_the_function_that_was_called_is_named(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^{text}$"):
        call()


# --- machine code --------------------------------------------------------------------

SOURCE = r"""
__global__ void plain(float* out) { out[threadIdx.x] = 2; }
__global__ void __launch_bounds__(96) shared(float* out) {
  __shared__ float held[100];
  held[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = held[99 - threadIdx.x];
}
template <int N>
__global__ void __launch_bounds__(1024, 2) spilling(float* out, const float* in) {
  float values[N];
  for (int k = 0; k < 3; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = in[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) out[i * 1024 + threadIdx.x] = values[i] * values[N - 1 - i];
  }
}
template __global__ void spilling<64>(float*, const float*);
"""
ARCHS = ("8.0", "9.0a", "12.0")


@pytest.fixture(scope="module")
def compiled(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(home, tmp_path_factory.mktemp("machine_code"))


def compile_library(home: Path, folder: Path, *flags: str) -> Path:
    (folder / "some.cu").write_text(SOURCE)
    library = folder / "some.so"
    done = subprocess.run(
        [home / "bin" / "nvcc", "-shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v", *flags,
         *toolchain.gencode_flags(ARCHS), folder / "some.cu", "-o", library],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (folder / "some.nvcc.log").write_text(done.stdout + done.stderr)
    return library


def test_kernels_are_read_as_ptxas_reports_them(compiled: Path) -> None:
    log = compiled.with_suffix(".nvcc.log").read_text()
    found = {(k.symbol, k.capability): k for k in kernels_in(compiled)}
    assert len(found) == 3 * len(ARCHS)
    reports = log.split("Compiling entry function")[1:]
    assert len(reports) == len(found)
    spilled = 0
    for report in reports:
        symbol, sm = re.findall(r"'(\S+?)' for 'sm_(\d+)", report)[0]
        one = found[symbol, divmod(int(sm), 10)]
        said = {
            what: int(match[1]) if (match := re.search(pattern, report)) else 0
            for what, pattern in (
                ("registers", r"Used (\d+) registers"), ("barriers", r"used (\d+) barriers"),
                ("shared", r"(\d+) bytes smem"), ("spilled", r"(\d+) bytes spill stores"),
                ("stack", r"(\d+) bytes stack frame"),
            )
        }  # fmt: skip
        assert said == {
            "registers": one.registers, "barriers": one.barriers, "shared": one.shared_bytes,
            "spilled": one.spilled_bytes, "stack": one.stack_bytes,
        }  # fmt: skip
        spilled += said["spilled"]
    assert spilled > 0  # else the test shows nothing about spills


def test_names_and_launch_bounds_are_those_of_the_source(compiled: Path) -> None:
    found = {k.name: (k.max_threads, k.is_bounded) for k in kernels_in(compiled)}
    assert found == {
        "plain(float*)": (1024, False),
        "shared(float*)": (96, True),
        "void spilling<64>(float*, float const*)": (1024, True),
    }


def test_without_a_log_spills_are_not_known(compiled: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(compiled.read_bytes())
    assert {k.spilled_bytes for k in kernels_in(copy)} == {None}


def test_compressed_code_is_refused(home: Path, tmp_path: Path) -> None:
    library = compile_library(home, tmp_path, "-Xfatbin", "-compress-all")
    with pytest.raises(RuntimeError, match=r"some.so: expected plain machine code, got compressed"):
        kernels_in(library)


def test_the_least_occupancy_is_that_of_bounded_kernels(compiled: Path) -> None:
    fits = [occupancy(k, k.max_threads) for k in kernels_in(compiled) if k.is_bounded]
    least = least_at_launch_bounds(compiled)
    assert least is not None
    assert least.occupancy == min(fit.occupancy for fit in fits) < 1


def test_a_library_without_kernels_has_none(tmp_path: Path) -> None:
    (tmp_path / "host.cpp").write_text("int f() { return 1; }\n")
    library = tmp_path / "host.so"
    source = str(tmp_path / "host.cpp")
    command = [*toolchain.cxx(), "-shared", "-fPIC", source, "-o", str(library)]
    subprocess.run(command, check=True)
    assert kernels_in(library) == []
    assert least_at_launch_bounds(library) is None


def test_kernels_of_an_operator(home: Path) -> None:
    found = kernels_of("silu_backward")  # in the library of silu
    assert found == kernels_of("silu") == kernels_of(cuda_ops.silu) != []
    assert len({k.capability for k in found}) == 1
    for one in found:
        assert "cuda_ops::" in one.name and one.registers > 0
        assert 0 < best_block(one).occupancy <= 1
    with pytest.raises(ValueError, match=r"kernels_of: argument 'capability': .*\), got \(7, 0\)"):
        kernels_of("silu", (7, 0))


def test_an_unknown_operator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernels_of: argument 'op': .*no operator 'no_such_op'"):
        kernels_of("no_such_op")
    for other in (None, torch.relu):
        with pytest.raises(ValueError, match=r"^kernels_of: .* an operator of cuda_ops, got"):
            kernels_of(cast("str", other))


def test_a_line_of_the_watch_shows_occupancy() -> None:
    before = Save(1.0, 1e-7, "no CPU kernel", None, 32, 0, (1.0, 256))
    after = Save(1.0, 1e-7, "no CPU kernel", None, 64, 0, (0.5, 256))
    assert before.line("silu", None).endswith(
        ", occupancy 100 % by the launch bound of 256 threads"
    )
    assert after.line("silu", before).endswith(
        ", occupancy 50 % (-50) by the launch bound of 256 threads"
    )


# --- the header ----------------------------------------------------------------------

PROBE_CU = r"""
#include "occupancy.cuh"

using namespace cuda_ops;

namespace {

template <int N>
__global__ void __launch_bounds__(N == 0 ? 1024 : 256) probe_kernel(float* out, const float* in) {
  float values[N + 1];
#pragma unroll
  for (int i = 0; i <= N; ++i) values[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i <= N; ++i) out[i * 1024 + threadIdx.x] = values[i] * values[N - i];
}

__global__ void __launch_bounds__(512) shared_kernel(float* out, const float* in) {
  __shared__ float held[3000];
  for (int i = threadIdx.x; i < 3000; i += blockDim.x) held[i] = in[i];
  __syncthreads();
  for (int i = threadIdx.x; i < 3000; i += blockDim.x) out[i] = held[2999 - i];
}

using Probe = void (*)(float*, const float*);

}  // namespace

cudaError_t occupancy_probe_launch(void* out, int64_t which, int64_t block, int64_t shared_bytes,
                                   cudaStream_t stream) {
  const Probe kernels[] = {probe_kernel<0>, probe_kernel<40>, probe_kernel<120>, shared_kernel};
  const Probe kernel = kernels[which];
  if (shared_bytes > 0) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  const auto ask = [&] {
    return block == 0 ? occupancy_of(kernel, shared_bytes)
                      : occupancy_of_block(kernel, int(block), shared_bytes);
  };
  const Occupancy first = ask(), again = ask();
  if (first.error != cudaSuccess) return first.error;
  const int64_t numbers[] = {first.block, first.blocks_per_sm, first.sms, again.block,
                             again.blocks_per_sm, first.grid(1000), first.resident_grid(1 << 30)};
  return cudaMemcpyAsync(out, numbers, sizeof numbers, cudaMemcpyHostToDevice, stream);
}
"""
PROBE_CPP = r"""
#include "binding.h"

using namespace cuda_ops;

cudaError_t occupancy_probe_launch(void* out, int64_t which, int64_t block, int64_t shared_bytes,
                                   cudaStream_t stream);

namespace {

Tensor occupancy_probe_cuda(const Tensor& x, int64_t which, int64_t block, int64_t shared_bytes) {
  Tensor out = empty({7}, DType::kInt64, x);
  launch(x, [&](cudaStream_t stream) {
    return occupancy_probe_launch(out.mutable_data_ptr(), which, block, shared_bytes, stream);
  });
  return out;
}

}  // namespace

CUDA_OPS(library) {
  library.op("occupancy_probe(Tensor x, int which, int block, int shared_bytes) -> Tensor", "")
      .cuda<occupancy_probe_cuda>();
}
"""
#: How the probe's kernels are called, in its order.
PROBES = ("probe_kernel<0>", "probe_kernel<40>", "probe_kernel<120>", "shared_kernel")


@pytest.fixture(scope="module")
def probe(home: Path) -> list[Kernel]:
    cuda_ops.inline("occupancy_probe", PROBE_CPP, PROBE_CU)
    found = kernels_of("occupancy_probe")
    return [next(k for k in found if name in k.name) for name in PROBES]


def test_the_probe_holds_kernels_that_differ(probe: list[Kernel]) -> None:
    assert [k.max_threads for k in probe] == [1024, 256, 256, 512]
    assert probe[0].registers < probe[1].registers < probe[2].registers
    assert probe[3].shared_bytes == 12000


def test_the_header_reports_that_there_is_no_gpu(home: Path, tmp_path: Path) -> None:
    """Its numbers are then 0, and a grid of them is empty."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    (tmp_path / "no_gpu.cu").write_text(
        '#include <cstdio>\n#include "occupancy.cuh"\n'
        "__global__ void nothing() {}\n"
        "int main() {\n"
        "  const auto found = cuda_ops::occupancy_of(nothing);\n"
        "  const auto wrong = cuda_ops::occupancy_of_block(nothing, 0);\n"
        '  std::printf("%d %d %d %lld %d\\n", found.error != cudaSuccess, found.block,\n'
        "              found.blocks_per_sm, (long long)found.grid(100),\n"
        "              wrong.error == cudaErrorInvalidValue);\n"
        "  cuda_ops::Occupancy made{256, 4, 10};\n"
        '  std::printf("%d %lld %lld %lld\\n", made.resident(), (long long)made.grid(257),\n'
        "              (long long)made.resident_grid(257),\n"
        "              (long long)made.resident_grid(1 << 30));\n"
        "}\n"
    )
    program = tmp_path / "no_gpu"
    subprocess.run(
        [home / "bin" / "nvcc", "-std=c++17", "--expt-relaxed-constexpr",
         f"-I{REPO / 'src' / 'utils'}", *toolchain.gencode_flags(("9.0a",)),
         tmp_path / "no_gpu.cu", "-o", program],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 0 0 0 1", "40 2 2 40"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("which", range(len(PROBES)), ids=PROBES)
def test_the_rules_are_those_of_the_driver(probe: list[Kernel], which: int) -> None:
    capability = torch.cuda.get_device_capability()
    if capability not in LIMITS:
        pytest.skip(f"needs a GPU of a known capability, got {capability}")
    x, one = torch.zeros(1, device="cuda"), probe[which]
    assert one.capability == capability
    device: Any = torch.cuda.get_device_properties(0)  # whose types leave some numbers out
    largest = device.shared_memory_per_block_optin - one.shared_bytes
    for shared in (0, 1, 1000, 20_000, 40_000, largest // 2, largest):
        for block in range(32, one.max_threads + 1, 96):
            asked = torch.ops.cuda_ops.occupancy_probe(x, which, block, shared).tolist()
            fit = occupancy(one, block, shared)
            assert asked[1] == asked[4] == fit.blocks_per_sm, (block, shared)
        asked = torch.ops.cuda_ops.occupancy_probe(x, which, 0, shared).tolist()
        assert asked[0] == asked[3] == best_block(one, shared_bytes=shared).block, shared
        assert asked[2] == device.multi_processor_count
        assert asked[5] == -(-1000 // asked[0])
        assert asked[6] == asked[1] * asked[2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_kernels_of_a_shipped_operator_run_at_the_computed_occupancy() -> None:
    """Each fits at least once in blocks of its launch bound, or no launch would succeed."""
    kernels = kernels_of("sum_rows")
    assert kernels
    for one in kernels:
        assert one.capability == torch.cuda.get_device_capability()
        assert occupancy(one, one.max_threads).blocks_per_sm >= 1
