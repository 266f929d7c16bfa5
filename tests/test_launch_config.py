"""Launch configurations are values, so a test without a GPU can read them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cuda_ops.build import toolchain

HERE = Path(__file__).parent

EXPECTED = {
    # 128 threads, one 16-byte access each; one of 4 bytes where a tensor has up to 32 KB.
    "dense f32 1K": "small, unroll 1, tile 128, blocks 8",
    "dense f32 256M": "flat, unroll 1, tile 512, blocks 524288",
    "dense bf16 1M": "flat, unroll 1, tile 1024, blocks 1024",
    "dense bf16 16K": "small, unroll 1, tile 256, blocks 64",
    "dense, off by one": "points, unroll 4, tile 512, blocks 2048",
    "rows of a wider matrix": "rows, unroll 1, tile 512, blocks 8192",
    "rows of an odd width": "points, unroll 4, tile 512, blocks 8184",
    # A warp a row, a block where rows are long, several where they are few.
    "many short rows": "runs, lanes 32, splits 1, blocks 131072",
    "rows of 16 KB": "runs, lanes 32, splits 2, blocks 1024",
    "few rows of 16 KB": "runs, lanes 256, splits 1, blocks 16",
    "32 long rows": "runs, lanes 256, splits 32, blocks 1024",
    "one row of 1 KB": "runs, lanes 32, splits 1, blocks 1",
    "columns": "strided, lanes 8, splits 8, blocks 1024",
    # Half as many pixels a thread where there are few.
    "720p": "interleaved, pixels 8, blocks 900",
    "8K": "interleaved, pixels 16, blocks 16200",
    "planar 720p": "planar, pixels 8, blocks 900",
    "off by one byte, gray": "scalar, pixels 1, blocks 7200",
    "nothing": "scalar, pixels 1, blocks 0",
    # Blocks that wait for each other are all resident: four on each of 132 multiprocessors.
    "64^3 by a maximum": "packed, unroll 1, team 256, blocks 256",
    "128^3 by a maximum": "packed, unroll 2, team 1024, blocks 1024",
    "512^3 by a maximum": "packed, unroll 2, team 65536, blocks 65536",
    "64^3 by its own statistics": "packed, unroll 4, team 32, blocks 32",
    "512^3 by its own statistics": "packed, unroll 4, team 528, blocks 528",
    "1000 of 8^3": "packed, unroll 4, team 1, blocks 1000",
    "2000 of 8^3": "packed, unroll 4, team 1, blocks 2000",
    "off by one byte, volume": "scalar, unroll 4, team 256, blocks 256",
    # Chunks where rows are too few; their elements take 8 bytes each and are a row once more.
    "8 of 64 for many rows": "kept 32, chunk 64, chunks 1, pieces 1 by 1, workspace 0",
    "64 of one row of 1M": "kept 64, chunk 1024, chunks 1024, pieces 8 by 5, workspace 557056",
    "50 of a vocabulary": "kept 64, chunk 1986, chunks 66, pieces 16 by 11, workspace 1766400",
    "0 of nothing": "kept 32, chunk 0, chunks 1, pieces 0 by 1, workspace 0",
    # Random order: 8 times, by the logarithm.
    "pieces of an ascending row": "missed 0, best of all so far at most 17 times",
    # A block a chunk and a launch a line, until one chunk is left.
    "64 of 2000, which a warp keeps": "not selected",
    "512 of a vocabulary": (
        "chunks 2, list 4096, sample 1024, guess 26, threads 1024; "
        "chunks 1, list 1024, sample 0, guess 0, threads 256; "
        "workspace 524288"
    ),
    "512 of a vocabulary in float64": (
        "chunks 2, list 4096, sample 1024, guess 26, threads 1024; "
        "chunks 1, list 1024, sample 0, guess 0, threads 256; "
        "workspace 1048576"
    ),
    "512 of many rows": "chunks 1, list 4096, sample 512, guess 26, threads 512; workspace 0",
    "2048 of many rows": "chunks 1, list 8192, sample 1024, guess 102, threads 1024; workspace 0",
    "256 of rows of 4096": "chunks 1, list 2048, sample 128, guess 26, threads 256; workspace 0",
    "half of rows of 4096": "not selected",
    "65 of rows of 1025": "not selected",
    "512 of one row of 16M": (
        "chunks 132, list 8192, sample 1024, guess 23, threads 1024; "
        "chunks 2, list 4096, sample 1024, guess 38, threads 1024; "
        "chunks 1, list 1024, sample 0, guess 0, threads 256; "
        "workspace 548864"
    ),
    "8192 of many long rows": (
        "chunks 1, list 16384, sample 2048, guess 182, threads 1024; workspace 0"
    ),
    "8192 in less shared memory": "not selected",
    "more than a block sorts": "not selected",
    "100 of no rows": "not selected",
    # Two heads a thread, which keeps their angles; one where tokens or heads are few.
    "40 heads": "pack 8, units 8, heads 2, 16 x 8 threads, blocks 20480",
    "40 heads, tables in float32": "pack 8, units 8, heads 2, 16 x 8 threads, blocks 20480",
    "40 heads of one token": "pack 8, units 8, heads 1, 16 x 8 threads, blocks 3",
    "one head": "pack 8, units 4, heads 1, 32 x 4 threads, blocks 2048",
    "a quarter of each head": "pack 4, units 12, heads 2, 10 x 12 threads, blocks 52429",
    "a quarter of each head in place": "pack 4, units 3, heads 2, 42 x 3 threads, blocks 12484",
    "heads off by one": "pack 1, units 64, heads 2, 2 x 64 threads, blocks 163840",
    "heads of an odd width": "pack 1, units 17, heads 2, 7 x 17 threads, blocks 4682",
    "nothing turned in place": "pack 1, units 0, heads 1, 1 x 1 threads, blocks 0",
    # 16 bytes of the wider side; heads without gaps on both are one row.
    "8 heads a slot": "heads 1, pack 8, packs 128, 1 x 128, parts 1, blocks 16384",
    "8 heads a slot in eight bits": "heads 1, pack 8, packs 128, 1 x 128, parts 1, blocks 16384",
    "8 heads a slot in float32": "heads 1, pack 4, packs 256, 1 x 128, parts 2, blocks 32768",
    "heads before slots": "heads 8, pack 8, packs 128, 1 x 128, parts 1, blocks 16384",
    "one head a slot": "heads 1, pack 8, packs 8, 16 x 8, parts 1, blocks 63",
    "rows off by one": "heads 1, pack 1, packs 1024, 1 x 128, parts 8, blocks 131072",
    "no tokens": "heads 1, pack 8, packs 128, 1 x 128, parts 1, blocks 0",
    # Four loads a thread where there is a chunk of them for each multiprocessor; each array by the
    # widest access that its addresses and its size allow.
    "64 tokens": "loads 1, widths 16, 16 and 16, chunks 66, blocks 66",
    "8192 tokens": "loads 4, widths 16, 16 and 16, chunks 2096, blocks 528",
    "8192 tokens, off by one element": "loads 4, widths 2, 16 and 16, chunks 16432, blocks 528",
    "8192 tokens, off by 8 bytes": "loads 4, widths 8, 16 and 16, chunks 4144, blocks 528",
    "one choice of 63 tokens, odd rows": "loads 1, widths 2, 8 and 4, chunks 507, blocks 507",
    "no tokens to send": "loads 1, widths 16, 16 and 16, chunks 0, blocks 0",
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = toolchain.cuda_home()
    if home is None:
        pytest.skip("needs nvcc")
    program = tmp_path_factory.mktemp("launch_config") / "launch_config"
    # The kernels come along and are not run: no PTX beside the code, and no optimized code.
    device = ["-gencode=arch=compute_90a,code=sm_90a", "-Xcicc", "-O0", "-Xptxas", "-O0"]
    flags = ["-std=c++17", "--expt-relaxed-constexpr", *device, f"-I{HERE.parent}/src/utils"]
    command = [home / "bin" / "nvcc", *flags, HERE / "launch_config.cu", "-o", program]
    subprocess.run(command, check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(line.split(": ", 1) for line in lines.splitlines())


@pytest.mark.parametrize("problem", EXPECTED)
def test_configuration(printed: dict[str, str], problem: str) -> None:
    assert printed[problem] == EXPECTED[problem]


def test_every_printed_problem_is_expected(printed: dict[str, str]) -> None:
    assert printed.keys() == EXPECTED.keys()
