"""Faults that test_emulated.py puts into the kernels and must find.

The programs that run the right kernels hold all of them; ``FAULT`` is true in a run that asks for
this one.
"""

from __future__ import annotations

from typing import NamedTuple

from emulated_cases import ATTENTION, MATMUL, MOE, RADIX, SCAN, SORT


class Fault(NamedTuple):
    right: str  # the header's text
    switched: str  # its replacement, which does the same unless FAULT
    timing: str
    found: str  # a pattern
    header: str = "gemm_grouped_hopper.cuh"
    separate: int = -1  # sort_radix_wide.cuh: as a Sort's
    mixture: str = ""  # the case in MOE, if it is not its header's


#: What runs a header's kernels: a program, and its case.
USER_OF: dict[str, tuple[str, dict[str, object]]] = {
    "gemm_grouped_hopper.cuh": ("grouped", {"products": "rows"}),
    "gemm_grouped_hopper_weights.cuh": ("grouped", {"products": "weights"}),
    "gemm_grouped_ring.cuh": ("grouped", {"products": "rows"}),
    "moe_map.cuh": ("moe", MOE["hopper, most choices of no expert"]._asdict()),
    "gemm_grouped_stream.cuh": ("moe", MOE["direct, tiles of 16"]._asdict()),
    "gemm_stream_sums.cuh": ("moe", MOE["token, most choices"]._asdict()),
    "gemm_fma.cuh": ("matmul", MATMUL["fma 64x64 quads of a b"]._asdict()),
    "gemm_hopper.cuh": ("matmul", MATMUL["tile 16"]._asdict()),
    "attention.cuh": ("attention", ATTENTION["bfloat16, 128, causal"]._asdict()),
    "attention_gradient.cuh": ("attention", ATTENTION["bfloat16, 128, causal"]._asdict()),
    "attention_hopper.cuh": ("attention", ATTENTION["hopper, many steps"]._asdict()),
    "attention_hopper_gradient.cuh": ("attention", ATTENTION["hopper, many steps"]._asdict()),
    "sort_cluster.cuh": ("sort", SORT["four passes"]._asdict()),
    "sort_radix_wide.cuh": ("sort", RADIX["more than are put in order"]._asdict()),
    "look_back.cuh": ("scan", SCAN["parts of rows"]._asdict()),
}


FAULTS = {
    "no fence": Fault(
        "tma_store_fence();\n",
        "if (!FAULT) tma_store_fence();\n",
        "late",
        "without a fence",
        "gemm_grouped_ring.cuh",
    ),
    "waits for too few copies": Fault(
        "hand_over<1>();",
        "if (FAULT) hand_over<2>(); else hand_over<1>();",
        "early",
        "out is wrong",
        "gemm_grouped_ring.cuh",
    ),
    "wgmma still reads what is released": Fault(
        "wgmma_wait<1>();",
        "if (FAULT) wgmma_wait<2>(); else wgmma_wait<1>();",
        "late",
        "out is wrong",
    ),
    "too few arrivals": Fault(
        "constexpr int kArrivals = kGather ? 1 + 4 : 1",
        "const int kArrivals = kGather ? (FAULT ? 4 : 1 + 4) : 1",
        "late",
        "deadlock|one arrival too many|out is wrong",
    ),
    "no swizzle": Fault(
        "kSwizzleBytes + ((chunk ^ (row % 8)) * 16));\n      GroupedCopies",
        "kSwizzleBytes + ((FAULT ? chunk : chunk ^ (row % 8)) * 16));\n      GroupedCopies",
        "late",
        "out is wrong",
    ),
    "too many bytes": Fault(
        "kGather ? Tile::kBytesB : Tile::kStage",
        "kGather && !FAULT ? Tile::kBytesB : Tile::kStage",
        "late",
        "deadlock",
    ),
    "a number for too few": Fault(
        "4 * Tile::kConsumers + (kGather ? 4 : 0)",
        "4 * Tile::kConsumers + (kGather && !FAULT ? 4 : 0)",
        "late",
        "deadlock|one arrival too many|is wrong",
        mixture="hopper, most choices of no expert",
    ),
    "a number that some have not read": Fault(
        "mbarrier_wait(empty + 8 * slot, phase ^ 1);\n    numbers",
        "if (!FAULT) mbarrier_wait(empty + 8 * slot, phase ^ 1);\n    numbers",
        "late",
        "deadlock|one arrival too many|is wrong",
        mixture="hopper, most choices of no expert",
        header="gemm_grouped_ring.cuh",
    ),
    "numbers of the call before": Fault(
        "p.taken[thread] = 0;",
        "p.taken[thread] = FAULT ? p.taken[thread] : 0;",
        "late",
        "is wrong",
        "moe_map.cuh",
    ),
    "rows of the next expert": Fault(
        "if (kb == whole && busy)",
        "if ((FAULT ? kb > whole : kb == whole) && busy)",
        "late",
        "weights is wrong",
        "gemm_grouped_hopper_weights.cuh",
    ),
    "rows of no assignment": Fault(
        "there[i] && m + 64 * box < p.m ? 16 : 0",
        "(FAULT || there[i]) && m + 64 * box < p.m ? 16 : 0",
        "late",
        "weights is wrong",
        "gemm_grouped_hopper_weights.cuh",
    ),
    "gradients with too few arrivals": Fault(
        "constexpr int kArrivals = 1 + 4;",
        "const int kArrivals = FAULT ? 4 : 1 + 4;",
        "late",
        "deadlock|one arrival too many|weights is wrong",
        "gemm_grouped_hopper_weights.cuh",
    ),
    "copies that are never handed over": Fault(
        "    }\n    copies.hand_over<0>();\n",
        "    }\n    if (!FAULT) copies.hand_over<0>();\n",
        "late",
        "deadlock",
        "gemm_grouped_hopper_weights.cuh",
    ),
    "a result not turned over": Fault(
        "fill_box<T, kTransposed>(box, pairs, consumer);",
        "if (FAULT) fill_box<T>(box, pairs, consumer);\n"
        "else fill_box<T, kTransposed>(box, pairs, consumer);",
        "late",
        "weights is wrong",
        "gemm_grouped_hopper_weights.cuh",
    ),
    "zeros without a fence": Fault(
        "tma_store_fence();  // wgmma sees them\n",
        "if (!FAULT) tma_store_fence();\n",
        "late",
        "without a fence",
        "gemm_grouped_hopper_weights.cuh",
    ),
    "zeros that others have not written": Fault(
        "named_barrier(uint32_t(1 + (alone",
        "if (!FAULT) named_barrier(uint32_t(1 + (alone",
        "early",
        "weights is wrong|without a fence",
        "gemm_grouped_hopper_weights.cuh",
    ),
    "multiplies a stage that is on its way": Fault(
        "wait_group(kStages - 2)",
        "wait_group(kStages - 2 + FAULT)",
        "late",
        "out is wrong",
        "gemm_fma.cuh",
    ),
    "adds up slices that others still write": Fault(
        "with_totals(put_totals);\n      __syncthreads();",
        "with_totals(put_totals);\n      if (!FAULT) __syncthreads();",
        "late",
        "out is wrong",
        "gemm_fma.cuh",
    ),
    "copies over a stage that is read": Fault(
        "(kStages - 2);\n          __syncthreads();",
        "(kStages - 2);\n          if (!FAULT) __syncthreads();",
        "late",
        "out is wrong",
        "gemm_fma.cuh",
    ),
    "writes to blocks that still read": Fault(
        "cluster_sync();  // all counts are there",
        "if (FAULT) __syncthreads(); else cluster_sync();  // all counts are there",
        "late",
        "of row . is wrong|there is no block",
        "sort_cluster.cuh",
    ),
    "reads before other blocks have written": Fault(
        "cluster_sync();\n    do {",
        "if (FAULT) __syncthreads(); else cluster_sync();\n    do {",
        "late",
        "of row . is wrong",
        "sort_cluster.cuh",
    ),
    "does not sort again": Fault(
        "if (round > 0 && choice.unsorted == 0) return {};",
        "if (round > 0 && (FAULT || choice.unsorted == 0)) return {};",
        "late",
        "of row . is wrong",
        "sort_radix_wide.cuh",
    ),
    "no launches that sort again": Fault(
        "for (int round = 0; round < 2; ++round) {\n    for (int number = 0; number < int",
        "for (int round = 0; round < (FAULT ? 1 : 2); ++round) {\n"
        "for (int number = 0; number < int",
        "late",
        "of row . is wrong",
        "sort_radix_wide.cuh",
        separate=1,
    ),
    "no wait in an early launch": Fault(
        "  wait_for_previous();\n",
        "  if (!FAULT) wait_for_previous();\n",
        "late",
        "global memory before the wait",
        "gemm_hopper.cuh",
    ),
    "reads through the L1 cache before the wait": Fault(
        "if (wanted) ahead.template load<true>(",
        "if (wanted && FAULT) ahead.template load<false>(lines, range.end - range.begin);\n"
        "if (wanted && !FAULT) ahead.template load<true>(",
        "late",
        "global memory before the wait",
        "gemm_grouped_stream.cuh",
    ),
    "a block that does not wait after its early reads": Fault(
        """    rows = after_previous(rows);
    let_next_start();
  }
#pragma unroll
  for (int c""",
        """    if (!FAULT) rows = after_previous(rows);
    if (!FAULT) let_next_start();
  }
#pragma unroll
  for (int c""",
        "late",
        "global memory before the wait",
        "gemm_grouped_stream.cuh",
    ),
    "one token that does not wait": Fault(
        "const void* rows = after_previous(p.a);\n  let_next_start();\n  if (int(",
        "const void* rows = FAULT ? p.a : after_previous(p.a);\n  let_next_start();\n  if (int(",
        "late",
        "global memory before the wait",
        "gemm_grouped_stream.cuh",
        mixture="token",
    ),
    "the first part of a line again": Fault(
        "loaded = false;",
        "loaded = FAULT && loaded;",
        "late",
        "out is wrong",
        "gemm_stream_sums.cuh",
    ),
    "attention: sums of smaller scores as they are": Fault(
        "const C shrunk = attention_power<T>(most[i][half] - base);",
        "const C shrunk = FAULT ? C(1) : attention_power<T>(most[i][half] - base);",
        "late",
        "out is wrong",
        "attention.cuh",
    ),
    "attention: keys go where they are still read": Fault(
        "__syncthreads();  // values are there, and keys have been read",
        "if (!FAULT) __syncthreads();",
        "late",
        "out is wrong",
        "attention.cuh",
    ),
    "attention: the gradient's rows are not waited for": Fault(
        "__syncthreads();  // this stage is there, and the one before has been read",
        "if (!FAULT) __syncthreads();",
        "late",
        "grad_[qkv] is wrong",
        "attention_gradient.cuh",
    ),
    "attention: a key too many": Fault(
        "shape.seen_from(key, row, kStream)",
        "shape.seen_from(key, row + (FAULT ? 1 : 0), kStream)",
        "late",
        "out is wrong",
        "attention.cuh",
    ),
    "attention: values are released too early": Fault(
        "wgmma_wait_after(total[0] + total[1], -scale, barriers);\n        wgmma_wait<0>();",
        "wgmma_wait_after(total[0] + total[1], -scale, barriers);\n"
        "        if (FAULT) wgmma_wait<1>(); else wgmma_wait<0>();",
        "late",
        "out is wrong",
        "attention_hopper.cuh",
    ),
    "attention: scores are read before they are there": Fault(
        "wgmma_wait<1>();",
        "if (FAULT) wgmma_wait<2>(); else wgmma_wait<1>();",
        "late",
        "out is wrong",
        "attention_hopper.cuh",
    ),
    "attention: the next queries come too early": Fault(
        "queries_of_tile.wait_empty();",
        "if (!FAULT) queries_of_tile.wait_empty();",
        "late",
        "out is wrong|surplus|arriv",
        "attention_hopper.cuh",
    ),
    "attention: a stage that is not full": Fault(
        "values.wait_full();",
        "if (!FAULT) values.wait_full();",
        "late",
        "out is wrong",
        "attention_hopper.cuh",
    ),
    "attention: sums that are not scaled down": Fault(
        "sums[i] *= shrunk[i / 2 % 2];",
        "if (!FAULT) sums[i] *= shrunk[i / 2 % 2];",
        "late",
        "out is wrong",
        "attention_hopper.cuh",
    ),
    "attention: a stage of the gradient is released too early": Fault(
        "wgmma_wait<kHasGrads ? 1 : 0>();  // the weights, and the sums of the stage before",
        "if (FAULT) wgmma_wait<kHasGrads ? 2 : 1>(); else wgmma_wait<kHasGrads ? 1 : 0>();",
        "late",
        "grad_[qkv] is wrong",
        "attention_hopper_gradient.cuh",
    ),
    "attention: the gradient's weights of the stage before": Fault(
        "wgmma_wait_after(total, -scale, barriers);\n          wgmma_wait<0>();",
        "wgmma_wait_after(total, -scale, barriers);\n"
        "          if (FAULT) wgmma_wait<1>(); else wgmma_wait<0>();",
        "late",
        "grad_[qkv] is wrong",
        "attention_hopper_gradient.cuh",
    ),
    "attention: the gradient reads rows that are not there": Fault(
        "ring.wait_full();",
        "if (!FAULT) ring.wait_full();",
        "early",
        "grad_[qkv] is wrong",
        "attention_hopper_gradient.cuh",
    ),
    "attention: queries before the first key": Fault(
        "shape.causal && row > other ? int(row - other)",
        "!FAULT && shape.causal && row > other ? int(row - other)",
        "late",
        "grad_k is wrong",
        "attention_gradient.cuh",
    ),
    "a group's own sum for that up to its end": Fault(
        "+ (k == 0)) * width",
        "+ (k == 0 && !FAULT)) * width",
        "late",
        "1 back: -?nan",
        "look_back.cuh",
    ),
    "the nearest part left out": Fault(
        "for (int k = 1; k < count; ++k) {",
        "for (int k = 1; k + FAULT < count; ++k) {",
        "late",
        "1 back: ",
        "look_back.cuh",
    ),
}
