"""How many blocks of each kernel of an operator fit on a multiprocessor, and what limits them.

It needs no GPU: registers and shared memory are read from the library, and the rest are rules.
"""

from cuda_ops.runtime import best_block, kernels_of, occupancy

kernels = kernels_of("sum_rows")
if not kernels:
    print("sum_rows was built without a CUDA toolkit: its library holds no kernels")
for kernel in kernels:
    bound = occupancy(kernel, kernel.max_threads)
    best = best_block(kernel)
    name = kernel.name.removeprefix("void ").partition("(cuda_ops::")[0]
    print(
        f"{name}: {kernel.registers} registers, {kernel.shared_bytes} bytes shared; "
        f"{bound.blocks_per_sm} blocks of {bound.block} threads fit, occupancy "
        f"{bound.occupancy:.0%}, limited by {' and '.join(bound.limited_by)}; "
        f"best with {best.block} threads"
    )
