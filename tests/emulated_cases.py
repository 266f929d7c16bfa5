"""Cases of the kernels that test_emulated.py runs on tests/emulator."""

from __future__ import annotations

from typing import NamedTuple


class Moe(NamedTuple):
    plan: str  # part of the printed plan, which shows that the case is what its name says
    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int
    dtype: str = "bfloat16"
    # one: all to one expert; some: some experts get none; invalid: some go to none; tails: 1, 63...
    routing: str = "even"
    keep: int = 1  # gate and up
    backward: int = 0
    capability: int = 90


MOE = {
    # One token: the second product adds up the results itself.
    "token": Moe("token", 1, 136, 72, 8, 2),
    "token, all experts": Moe("token", 1, 136, 72, 8, 8, "float16", keep=0),
    "token, choices of no expert": Moe("token", 1, 256, 320, 16, 6, routing="invalid"),
    "token, one tiny expert": Moe("token", 1, 16, 8, 1, 1),
    "token, most choices": Moe("token", 1, 1040, 264, 3, 16, capability=80),
    # Each block finds its assignments by itself.
    "direct, two tokens": Moe("no map", 2, 64, 40, 4, 2),
    "direct, tiles of 16": Moe("no map", 32, 136, 24, 8, 2),
    "direct, choices of no expert": Moe("no map", 9, 72, 56, 8, 7, routing="invalid", keep=0),
    "direct, all of one expert": Moe("no map", 64, 72, 56, 40, 1, routing="one"),
    "direct, experts without any": Moe("no map", 64, 40, 16, 40, 1, "float16", "some"),
    "direct, K by several warps": Moe("splits 8", 33, 2048, 16, 2, 1, routing="one"),
    # Assignments are sorted by expert first.
    "stream": Moe("stream 8", 100, 264, 136, 48, 1),
    "stream, uneven": Moe("stream 16", 26, 264, 120, 8, 3, "float16", "some"),
    "stream, choices of no expert": Moe("stream 32", 50, 264, 40, 8, 3, routing="invalid"),
    "stream, most experts": Moe("stream 8", 40, 40, 24, 512, 2, capability=80),
    "stream, then mma": Moe("backward plan: mma", 50, 136, 24, 8, 2, backward=1),
    # TMA, cp.async and wgmma.
    "hopper": Moe("backward plan: hopper", 150, 136, 72, 3, 2, backward=1),
    "hopper, all of one expert": Moe(
        "backward plan: hopper", 130, 72, 136, 4, 1, "float16", "one", backward=1
    ),
    "hopper, choices of no expert": Moe(
        "backward plan: hopper", 150, 200, 136, 5, 2, routing="invalid", backward=1
    ),
    # Tiles that take no stage of the ring.
    "hopper, most choices of no expert": Moe(
        "backward plan: hopper", 1300, 72, 136, 1, 1, routing="invalid", backward=1
    ),
    "hopper, experts without any": Moe(
        "backward plan: hopper", 257, 8, 264, 6, 2, routing="some", backward=1
    ),
    "hopper, nothing kept": Moe("plan: hopper", 150, 136, 72, 3, 2, keep=0),
    "hopper, several tiles of H": Moe(
        "backward plan: hopper", 70, 264, 136, 4, 3, "float16", "some", backward=1
    ),
    "hopper, tails of experts": Moe(
        "backward plan: hopper", 323, 72, 136, 6, 1, routing="tails", backward=1
    ),
    "hopper, few rows": Moe("backward plan: hopper", 30, 328, 8, 1, 1, "float16", backward=1),
    # Tiles of 192 rows.
    "hopper, tall tiles": Moe("plan: hopper tall", 140, 136, 72, 2, 2, backward=1),
    "hopper, tall tiles, uneven": Moe(
        "plan: hopper tall", 150, 72, 200, 2, 2, "float16", "some", keep=0
    ),
    "hopper, tall tiles, all of one expert": Moe(
        "plan: hopper tall", 250, 200, 136, 2, 1, routing="one"
    ),
    "hopper, tall tiles, choices of no expert": Moe(
        "plan: hopper tall", 300, 136, 136, 2, 1, routing="invalid"
    ),
    # Rows that are no whole vectors, and GPUs before Hopper.
    "mma, other rows": Moe("backward plan: mma", 40, 36, 20, 3, 2, routing="invalid", backward=1),
    "mma": Moe("backward plan: mma", 150, 136, 72, 3, 2, backward=1, capability=80),
    "simt": Moe("backward plan: simt", 20, 36, 20, 3, 2, "float32", "invalid", backward=1),
    "simt, before 8.0": Moe("backward plan: simt", 20, 36, 20, 3, 2, backward=1, capability=75),
    "simt, before 8.0, float16": Moe(
        "backward plan: simt", 70, 40, 72, 3, 2, "float16", "some", backward=1, capability=75
    ),
}


class Route(NamedTuple):
    tokens: int
    experts: int
    top_k: int
    dtype: str = "bfloat16"
    sigmoid: int = 0
    renormalize: int = 1
    bias: int = 0
    transposed: int = 0
    capability: int = 90


ROUTE = {
    "few experts": Route(5, 4, 2),
    "one expert": Route(3, 1, 1, "float32"),
    "128 experts": Route(70, 128, 8),
    "128 experts, float16": Route(33, 128, 8, "float16", renormalize=0),
    "100 experts, float32": Route(33, 100, 8, "float32", sigmoid=1),
    "most experts": Route(9, 512, 16, sigmoid=1, renormalize=0),
    "bias": Route(40, 60, 6, sigmoid=1, bias=1),
    "bias, softmax": Route(40, 256, 6, "float32", bias=1),
    # Groups of lanes share a warp, and a lane has some of its experts, or all or none.
    "many tokens, 8 experts": Route(77, 8, 2, "float32"),
    "many tokens, 5 experts": Route(41, 5, 5, sigmoid=1),
    "many tokens, 32 experts": Route(50, 32, 8, "float32", renormalize=0),
    "many tokens, 60 experts": Route(50, 60, 6, "float32"),
    "many tokens, 64 experts": Route(67, 64, 8, "float16"),
    "many tokens, 128 experts": Route(70, 128, 8, "float32"),
    "many tokens, 130 experts": Route(43, 130, 8, sigmoid=1, renormalize=0),
    "many tokens, 256 experts": Route(61, 256, 8, "float32"),
    "many tokens, 200 experts, most choices": Route(45, 200, 16, "float32"),
    "many tokens, more choices than lanes": Route(50, 24, 9, "float32"),
    "many tokens, transposed": Route(48, 64, 4, "float16", transposed=1),
    "many tokens, float64": Route(50, 24, 3, "float64"),
    # Assignments of more than one block: the last one has one.
    "several blocks": Route(700, 128, 8),
    "several blocks, most experts": Route(641, 512, 8, "float32", capability=80),
    "several blocks, one assignment": Route(4097, 2, 1),
}


class Matmul(NamedTuple):
    m: int
    n: int
    k: int
    a: str = "rows"  # or columns: which of them are dense
    b: str = "columns"
    tile: int = 128
    columns: int = 128  # of fma's tile
    swap: int = 0
    splits: int = 1
    pair: int = 0  # blocks of two share a tile of b
    batch: int = 1
    kernel: str = "hopper"
    dtype: str = "bfloat16"
    precision: str = "ieee"
    aligned: int = 1  # 0: rows that the copy engine cannot read, which for hopper are copied first
    epilogue: str = "plain"  # or place: of 16-bit stream and hopper, with a second output
    plan: str = ""  # of fma: what is said of its copies


MATMUL = {
    "tile 256": Matmul(260, 520, 200, tile=256),
    "tile 224": Matmul(260, 264, 200, tile=224),
    "tile 192": Matmul(260, 264, 200, tile=192),
    "tile 160": Matmul(260, 264, 200, tile=160),
    "tile 160, other rows": Matmul(130, 331, 136, tile=160, aligned=0),
    "tile 128": Matmul(260, 264, 200),
    "tile 64": Matmul(260, 64, 200, tile=64),
    "tile 32": Matmul(130, 24, 200, tile=32),
    "tile 16": Matmul(130, 9, 200, tile=16),
    "tile 256, a^T": Matmul(300, 264, 200, "columns", "columns", tile=256),
    "tile 192, a^T b^T": Matmul(130, 264, 200, "columns", "rows", tile=192),
    "tile 128, b^T": Matmul(130, 264, 200, "rows", "rows"),
    "tile 32, b^T": Matmul(130, 24, 200, "rows", "rows", tile=32),
    "swapped, tile 16": Matmul(10, 264, 200, tile=16, swap=1),
    "swapped, tile 32, a^T b^T": Matmul(30, 264, 200, "columns", "rows", tile=32, swap=1),
    "swapped, tile 64, b^T": Matmul(50, 264, 200, "rows", "rows", tile=64, swap=1),
    "pairs, tile 256": Matmul(260, 520, 520, tile=256, pair=1),
    "pairs, tile 224": Matmul(300, 264, 328, tile=224, pair=1),
    "pairs, tile 160, where each sum goes": Matmul(
        512, 320, 200, tile=160, pair=1, epilogue="place"
    ),
    "pairs, tile 192, a^T b^T": Matmul(130, 264, 392, "columns", "rows", tile=192, pair=1),
    "pairs, batch": Matmul(130, 136, 72, "rows", "rows", pair=1, batch=3),
    "pairs, tf32x3": Matmul(130, 75, 177, pair=1, dtype="float32", precision="tf32x3", aligned=0),
    "splits 2": Matmul(130, 264, 520, tile=256, splits=2),
    "splits 2, tile 224": Matmul(130, 264, 520, tile=224, splits=2),
    "splits 3, tile 160": Matmul(130, 264, 520, tile=160, splits=3),
    "splits 3, few rows": Matmul(40, 264, 520, tile=128, splits=3),
    "few rows and columns, where each sum goes": Matmul(9, 70, 136, tile=256, epilogue="place"),
    "splits 4, swapped": Matmul(10, 264, 1032, tile=16, swap=1, splits=4),
    "batch": Matmul(130, 136, 72, "rows", "rows", batch=3),
    "tf32": Matmul(130, 264, 100, dtype="float32", precision="tf32"),
    "tf32, tile 160": Matmul(130, 264, 100, tile=160, dtype="float32", precision="tf32"),
    "tf32, splits 2": Matmul(130, 24, 264, tile=32, splits=2, dtype="float32", precision="tf32"),
    "copies": Matmul(70, 75, 77, "rows", "rows", batch=2, aligned=0),
    "copies, a^T": Matmul(131, 61, 131, "columns", "columns", tile=64, aligned=0),
    "copies, tf32": Matmul(130, 75, 77, dtype="float32", precision="tf32", aligned=0),
    "copies, tf32x3": Matmul(
        130, 75, 177, "rows", "rows", batch=2, dtype="float32", precision="tf32x3", aligned=0
    ),
    "copies, tf32x3, splits 2": Matmul(
        70, 130, 330, "columns", "rows", splits=2, dtype="float32", precision="tf32x3", aligned=0
    ),
    "tile 256, where each sum goes": Matmul(200, 301, 200, tile=256, epilogue="place"),
    "tile 160, where each sum goes": Matmul(140, 320, 136, tile=160, epilogue="place"),
    "tile 64, where each sum goes": Matmul(100, 70, 136, tile=64, epilogue="place"),
    "stream 8": Matmul(3, 200, 520, tile=8, splits=4, kernel="stream"),
    "stream 8, one row": Matmul(1, 77, 1160, tile=8, splits=8, kernel="stream", epilogue="place"),
    "stream 8, one column": Matmul(77, 1, 520, tile=8, swap=1, splits=4, kernel="stream"),
    "stream 8, all warps alike": Matmul(8, 35, 1032, tile=8, splits=8, kernel="stream"),
    "stream 8, swapped": Matmul(150, 5, 264, tile=8, swap=1, splits=2, kernel="stream"),
    "stream 8, swapped, batch": Matmul(
        61, 7, 1032, tile=8, swap=1, splits=8, batch=2, kernel="stream", epilogue="place"
    ),
    "stream 8, K of less than a part": Matmul(4, 40, 8, tile=8, splits=8, kernel="stream"),
    "stream 16, batch": Matmul(
        9, 270, 136, tile=16, splits=1, batch=3, kernel="stream", dtype="float16"
    ),
    "stream 16, swapped": Matmul(77, 16, 1000, tile=16, swap=1, splits=4, batch=2, kernel="stream"),
    "stream 32": Matmul(29, 301, 200, tile=32, splits=1, kernel="stream", epilogue="place"),
    "stream 32, all warps alike": Matmul(32, 129, 2056, tile=32, splits=8, kernel="stream"),
    "stream 32, swapped": Matmul(
        300, 25, 328, tile=32, swap=1, splits=2, kernel="stream", epilogue="place"
    ),
    "mma": Matmul(136, 136, 136, kernel="mma"),
    "mma, a^T b^T": Matmul(136, 72, 136, "columns", "rows", tile=64, kernel="mma"),
    "mma, other rows": Matmul(70, 75, 77, "rows", "rows", 64, batch=2, kernel="mma", aligned=0),
    "mma, tf32": Matmul(
        130, 75, 77, "columns", "rows", kernel="mma", dtype="float32", precision="tf32", aligned=0
    ),
    "mma, tf32x3": Matmul(
        70, 75, 177, tile=64, kernel="mma", dtype="float32", precision="tf32x3", aligned=0
    ),
    **{
        f"fma {rows}x{columns}{quads}": Matmul(
            *shape,
            *layouts,
            rows,
            columns,
            kernel="fma",
            dtype="float32",
            aligned=aligned,
            plan=f"fma {rows}x{columns}{quads}\n",
        )
        for rows, columns in ((256, 128), (128, 128), (128, 64), (64, 64), (32, 64), (32, 32))
        for quads, shape, layouts, aligned in (
            (" quads of a b", (rows + 4, columns + 8, 136), ("columns", "rows"), 1),
            (" quads of a", (rows - 4, columns + 3, 75), ("columns", "columns"), 1),
            (" quads of b", (rows + 1, columns - 4, 20), ("rows", "rows"), 1),
            ("", (rows + 5, columns + 1, 37), ("rows", "columns"), 0),
        )
    },
    "fma, batch": Matmul(
        65, 60, 20, "rows", "rows", 64, 64, batch=2, kernel="fma", dtype="float32"
    ),
    "fma, unaligned lines": Matmul(
        70, 75, 77, "columns", "rows", 64, 64, kernel="fma", dtype="float32", aligned=0
    ),
    # More products than a sum may have before it goes to the totals.
    "fma, no slices, long sums": Matmul(
        140, 131, 600, "rows", "rows", columns=128, kernel="fma", dtype="float32"
    ),
    "fma, slices, long sums": Matmul(
        33, 31, 1300, "rows", "columns", 32, columns=32, kernel="fma", dtype="float32"
    ),
}


class Sort(NamedTuple):
    dtype: str
    rows: int
    n: int
    kind: str = "random"  # or what is special about the keys, see run_sort.cpp
    wide: int = 0  # clusters of 16 blocks, else 8
    descending: int = 0
    path: str = "cluster"  # or radix
    rows_at_once: int = 1000
    separate: int = -1  # launches of the steps of 8-byte keys: 1, 0, or as the config says
    plan: str = ""  # part of what is printed of the plan


SORT = {
    "one pass": Sort("uint8", 2, 20_001),
    "one pass, wide": Sort("int8", 1, 30_011, wide=1, descending=1),
    "two passes": Sort("float16", 2, 30_011, "special"),
    "two passes, wide": Sort("bfloat16", 1, 16_385, "special", wide=1, descending=1),
    "four passes": Sort("float32", 2, 33_333, "special", descending=1),
    "four passes, wide": Sort("float32", 2, 33_333, "special", wide=1),
    "eight passes": Sort("float64", 1, 22_529, "special"),
    "eight passes, wide": Sort("int64", 2, 20_000, wide=1, descending=1),
    "most threads": Sort("int16", 1, 131_072, "few"),
    "most threads, wide": Sort("int32", 1, 131_071, "high", wide=1),
    "no differences": Sort("int32", 2, 20_000, "equal"),
    "the last byte": Sort("int64", 1, 20_000, "few", descending=1),
    "the first byte": Sort("int64", 1, 20_000, "high", wide=1),
    "some bytes": Sort("int64", 2, 20_000, "gaps"),
    "in order": Sort("int32", 1, 40_001, "sorted"),
    "in reverse order": Sort("int32", 1, 40_001, "sorted", wide=1, descending=1),
    "more blocks than keys": Sort("float32", 3, 5, "special"),
}

#: "from digit 5 of ff": sorted by digits 5, 6 and 7 of those that differ; "again": by all of them.
RADIX = {
    "one pass": Sort("uint8", 2, 20_001),
    "two passes": Sort("float16", 3, 20_001, "special", rows_at_once=2),
    "four passes": Sort("float32", 2, 20_001, "special", descending=1),
    "random": Sort("int64", 1, 22_529, plan="from digit 6 of ff\n"),
    "random, many rows": Sort("float64", 19, 2_049, descending=1, plan="from digit 6 of ff\n"),
    "rows shorter than the sample": Sort("int64", 5, 1_025, plan="from digit"),
    "many tiles": Sort("int64", 1, 1_060_000, "high", plan="from digit 7 of 80\n"),
    "small numbers": Sort("int64", 1, 22_529, "small", plan="from digit 0 of 07\n"),
    "few values": Sort("int64", 2, 22_529, "values", descending=1, plan="from digit 5 of ff\n"),
    "zeros and NaNs": Sort("float64", 3, 20_001, "special", rows_at_once=2, plan="of ff\n"),
    "zeros and NaNs, descending": Sort("float64", 3, 20_001, "special", descending=1),
    "in order": Sort("int64", 2, 20_001, "sorted", plan="from digit 0 of 03\n"),
    "in reverse order": Sort("int64", 2, 20_001, "sorted", descending=1),
    "no differences": Sort("int64", 2, 20_001, "equal", plan="from digit 0 of 00\n"),
    "some bytes": Sort("int64", 2, 20_000, "gaps", plan="from digit 1 of aa\n"),
    "higher bytes than the sample's": Sort("int64", 1, 40_001, "unseen high", plan="4 of ff\n"),
    "lower bytes than the sample's": Sort("int64", 1, 40_001, "unseen low", plan="5 of 21, again"),
    "lower bytes, descending": Sort(
        "float64", 1, 40_001, "unseen low", descending=1, plan="5 of 21, again"
    ),
    "lower bytes, in the first of two groups": Sort(
        "int64", 2, 40_001, "unseen low", rows_at_once=1, plan="from digit 5 of 20\n"
    ),
    "neighbors to put in order": Sort("int64", 1, 40_001, "neighbors", plan="6 of f9\n"),
    "as many as are put in order": Sort("int64", 1, 22_528, "groups of 32", plan="6 of ff\n"),
    "more than are put in order": Sort("int64", 1, 22_528, "groups of 33", plan="6 of ff, again"),
    "more of one row than are put in order": Sort(
        "int64", 4, 22_528, "groups of 33", descending=1, rows_at_once=2, plan="of ff, again"
    ),
}
RADIX = {name: case._replace(path="radix") for name, case in RADIX.items()}
RADIX_STEPS = [name for name, case in RADIX.items() if case.dtype in ("int64", "float64")]


class Topk(NamedTuple):
    plan: str  # part of the line that is printed
    rows: int
    n: int
    k: int
    dtype: str = "float32"
    kind: str = "any"  # or what is special about the keys, see run_topk.cpp
    descending: int = 1


TOPK = {
    # A warp sorts all of a row.
    **{
        f"sorted, {dtype}, {kind}, {n}": Topk("", rows, n, k, dtype, kind, descending)
        for dtype in ("uint8", "float16", "float32", "int64")
        for kind in ("any", "few", "close", "centers", "crowds")
        for rows, n, k, descending in (
            (70, 4, 3, 0), (5, 16, 16, 1), (3, 100, 8, 0), (2, 128, 128, 1), (3, 200, 64, 1),
            (2, 512, 40, 0), (1, 1000, 33, 1), (1, 1024, 1024, 0),
        )
    },
    # A warp goes through a row, or through chunks of it.
    **{
        f"kept, {dtype}, {kind}, {n}, {k}": Topk(f"chunks {chunks}", rows, n, k, dtype, kind)
        for dtype in ("int8", "bfloat16", "float32", "float64")
        for kind in ("any", "few", "sorted")
        for chunks, rows, n, k in (
            (1, 5, 300, 32), (1, 2, 1000, 7), (1, 3, 1024, 1), (1, 1, 1500, 64), (3, 2, 3100, 40),
            (7, 2, 8150, 64),
        )
    },
    # A block selects by a sample, or sorts all, or the first of several chunks.
    **{
        f"selected, {dtype}, {kind}, {n}, {k}": Topk(
            f"blocks {blocks}, list {room}, sample {sample}\n", rows, n, k, dtype, kind, descending
        )
        for dtype in ("uint8", "bfloat16", "float32", "int64")
        for kind in ("any", "few", "equal", "sorted", "reversed", "special")
        for blocks, room, sample, rows, n, k, descending in (
            (1, 512, 256, 3, 1025, 65, 1), (1, 2048, 1024, 1, 20_011, 256, 0),
            (1, 2048, 512, 3, 5001, 512, 1), (1, 4096, 256, 1, 2500, 1250, 0),
            (1, 8192, 0, 2, 4097, 4097, 1), (2, 8192, 1024, 1, 66_001, 2048, 1),
        )
    },
    # The sample says too few elements or too many, so digits find the limit.
    **{
        f"selected by digits, {dtype}, {kind}, {n}": Topk(
            f"list {room}", 2, n, k, dtype, kind, descending
        )
        for dtype in ("uint8", "float16", "int32", "float64")
        for kind in ("best seen", "worst seen")
        for room, n, k, descending in ((4096, 9001, 1000, 1), (2048, 20_011, 300, 0))
    },
}  # fmt: skip


class Norm(NamedTuple):
    plan: str  # of the gradient, part of what is printed
    rows: int
    n: int
    dtype: str = "float32"
    gap: int = 0  # elements of x between rows


NORM = {
    "a lane a row": Norm("pack 4, packs 2, lanes 4 of 128, stages 3", 70, 32),
    "a few lanes": Norm("pack 8, packs 2, lanes 8 of 128, stages 3", 600, 128, "bfloat16"),
    "a warp": Norm("pack 4, packs 4, lanes 32 of 128, stages 1", 50, 512),
    "a block": Norm("pack 8, packs 2, lanes 128 of 128, stages 3", 5, 2000, "float16"),
    "more rows than blocks": Norm("pack 8, packs 2, lanes 96 of 96", 1100, 1032, "float16"),
    "vectors of 8 bytes": Norm("pack 4, packs 4, lanes 288 of 288, stages 3", 9, 4100, "bfloat16"),
    "vectors of 8 bytes in float32": Norm("pack 2, packs 4", 9, 1030),
    "long rows": Norm("pack 4, packs 8, lanes 416 of 416, stages 1", 300, 13000),
    "rows that are read again": Norm("pack 4, packs 0, lanes 512 of 512, stages 0", 3, 17000),
    "single elements": Norm("pack 1, packs 8, lanes 32 of 128, stages 0", 40, 201),
    "single elements of a block": Norm("pack 1", 7, 1001, "bfloat16"),
    "rows with gaps": Norm("pack 4", 20, 260, gap=8),
    "rows with odd gaps": Norm("pack 1", 20, 260, gap=1),
    "float64": Norm("pack 2, packs 4", 30, 250, "float64"),
    "three numbers": Norm("pack 1", 9, 3),
}


class Scan(NamedTuple):
    plan: str  # part of the printed plan, as above
    outer: int
    n: int
    inner: int = 1
    dtype: str = "float32"
    reverse: int = 0
    gap: int = 0  # elements of x between rows
    start: int = 0  # elements of the allocations before x and before the sums


SCAN = {
    "rows of one": Scan("rows pack 4", 77, 1),
    "rows shorter than packs": Scan("rows pack 8", 100, 3, dtype="bfloat16"),
    "rows shorter than packs, reversed": Scan("rows pack 8", 101, 5, dtype="float16", reverse=1),
    "rows from anywhere": Scan("rows pack 4", 900, 31, start=3),
    "rows from anywhere, reversed": Scan("rows pack 4", 900, 31, reverse=1, start=1),
    "rows of a block": Scan("rows pack 8", 2, 2500, dtype="bfloat16", start=1),
    "rows with gaps": Scan("rows pack 1", 3, 1001, gap=3, reverse=1),
    "rows with whole gaps": Scan("rows pack 4", 3, 1000, gap=12),
    "integers": Scan("rows pack 2", 5, 700, dtype="int64", reverse=1),
    "narrow integers": Scan("rows pack 2", 400, 9, dtype="int32"),
    "float64": Scan("rows pack 2", 3, 333, dtype="float64", start=1),
    "parts of rows": Scan("rows pack 4, lanes 1, warps 1, rows 1, threads 320, parts 2", 2, 10_000),
    "parts of rows from anywhere": Scan("parts 2", 2, 10_001, start=2, reverse=1),
    "parts of rows, by elements": Scan("rows pack 1", 3, 5000, gap=1, dtype="int32"),
    "parts of bfloat16": Scan("rows pack 8", 1, 20_000, dtype="bfloat16"),
    "columns": Scan("columns pack 4, lanes 8, warps 4", 1, 100, 64),
    "columns, reversed": Scan("columns pack 4, lanes 8", 3, 37, 36, reverse=1),
    "narrow columns": Scan("columns pack 4, lanes 1", 2, 200, 4),
    "columns by elements": Scan("columns pack 1, lanes 32", 2, 41, 33, gap=2),
    "two columns": Scan("columns pack 1, lanes 2", 2, 100, 2, dtype="bfloat16", reverse=1),
    "columns of bfloat16": Scan("columns pack 8, lanes 8", 2, 20, 64, dtype="bfloat16"),
    "columns of integers": Scan("columns pack 2, lanes 8", 2, 50, 16, dtype="int32"),
    "parts of columns": Scan("warps 16, rows 1, threads 512, parts 2", 2, 700, 40),
    "parts of columns, reversed": Scan("parts 2", 1, 1000, 48, reverse=1, gap=4),
    "parts of columns by elements": Scan("columns pack 1", 1, 400, 33, dtype="float64"),
    "parts of columns of bfloat16": Scan("columns pack 8, lanes 2", 1, 2500, 16, dtype="bfloat16"),
}


class Foreach(NamedTuple):
    tensors: int
    most: int  # elements of a tensor
    dtype: str = "float32"
    start: int = 0  # elements before the x of every third tensor
    in_place: int = 0


FOREACH = {
    "one tensor of several blocks": Foreach(1, 20_000),
    "more tensors than a table holds": Foreach(230, 300),
    "tensors of one element": Foreach(20, 1, "bfloat16"),
    "some from anywhere": Foreach(12, 9000, "bfloat16", start=3),
    "in place": Foreach(30, 5000, "float16", start=1, in_place=1),
    "float64": Foreach(9, 6000, "float64", start=1),
}


class Attention(NamedTuple):
    m: int
    n: int
    d: int
    dtype: str = "bfloat16"
    causal: int = 0
    pitch: int = 0  # elements from one row to the next; 0: d
    size: float = 1  # of numbers
    split: int = 0  # keys of a block; 0: as is chosen
    hopper: int = 0
    batch: int = 2
    plan: str = ""


ATTENTION = {
    **{
        f"{dtype}, {d}, {'causal' if causal else 'all'}": Attention(m, n, d, dtype, causal)
        for dtype in ("bfloat16", "float16", "float32", "float64")
        for m, n, d, causal in ((150, 140, 64, 0), (140, 150, 128, 1), (70, 90, 256, 1))
    },
    "no vectors": Attention(70, 90, 33, pitch=37),
    "part of a vector": Attention(70, 90, 100, "float16", 1, pitch=104),
    "large scores": Attention(70, 150, 64, size=1000),
    "large scores, float32": Attention(20, 100, 64, "float32", 1, size=1000),
    "one query": Attention(1, 200, 64, causal=0),
    "two keys": Attention(200, 2, 80, "float32", causal=1),
    "more queries than keys": Attention(260, 20, 64, causal=1),
    "more keys than queries": Attention(20, 260, 128, causal=1),
    "keys in three parts": Attention(1, 800, 128, plan="splits=3"),
    "parts without vectors": Attention(3, 530, 33, "float16", pitch=37, plan="splits=2"),
    "parts of large scores": Attention(5, 520, 64, "float32", size=1000, plan="splits=2"),
    "parts of many rows": Attention(150, 140, 128, "float16", split=64, plan="splits=3"),
    "parts of which some see nothing": Attention(150, 140, 64, causal=1, split=64),
    "float32 parts": Attention(40, 200, 256, "float32", 1, split=32),
    "float64 parts": Attention(33, 100, 64, "float64", split=16, plan="splits=7"),
    **{
        f"hopper, {dtype}, {d}{', causal' * causal}": Attention(
            m, n, d, dtype, causal, hopper=1, plan="gradient hopper=1"
        )
        for dtype in ("bfloat16", "float16")
        for m, n, d, causal in (
            (150, 300, 64, 0),
            (300, 150, 64, 1),
            (260, 280, 128, 1),
            (130, 70, 128, 0),
            (270, 330, 256, 1),
        )
    },
    "no sequence": Attention(70, 90, 64, batch=0),
    "hopper, no sequence": Attention(70, 90, 64, hopper=1, batch=0),
    "hopper, many steps": Attention(500, 900, 64, hopper=1, plan="hopper=1 splits=1"),
    "hopper, part of a row": Attention(
        150, 140, 80, "float16", pitch=96, hopper=1, plan="hopper=1"
    ),
    "hopper, large scores": Attention(70, 400, 64, size=1000, hopper=1, plan="hopper=1"),
    "hopper, far scores": Attention(70, 400, 64, size=1e8, hopper=1, plan="hopper=1"),
    "hopper, more queries than keys": Attention(300, 20, 64, causal=1, hopper=1, plan="hopper=1"),
    "hopper, parts": Attention(140, 700, 128, split=256, hopper=1, plan="hopper=1 splits=3"),
    "hopper, parts that see nothing": Attention(300, 300, 64, causal=1, split=128, hopper=1),
}
