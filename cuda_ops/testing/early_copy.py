"""A copy on the GPU that lets the next kernel of its stream start before it has copied anything."""

from __future__ import annotations

import ctypes
import functools

import torch

#: Nanoseconds between its start and its first byte; a launch from Python takes a tenth of them.
_WAITS = 1_000_000
_THREADS = 1024
#: GPUs from Hopper on start kernels early (PTX ISA, griddepcontrol).
LEAST_CAPABILITY = (9, 0)

_PTX = b"""
.version 7.8
.target sm_90
.address_size 64

.visible .entry early_copy(
    .param .u64 to, .param .u64 from, .param .u64 bytes, .param .u64 waits)
{
    .reg .pred %done;
    .reg .b16 %byte;
    .reg .b32 %thread;
    .reg .b64 %to, %from, %bytes, %waits, %start, %now, %at;

    ld.param.u64 %to, [to];
    ld.param.u64 %from, [from];
    ld.param.u64 %bytes, [bytes];
    ld.param.u64 %waits, [waits];
    griddepcontrol.launch_dependents;
    mov.u64 %start, %globaltimer;
WAIT:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %done, %now, %waits;
    @%done bra WAIT;
    mov.u32 %thread, %tid.x;
    cvt.u64.u32 %at, %thread;
COPY:
    setp.ge.u64 %done, %at, %bytes;
    @%done bra DONE;
    add.u64 %start, %from, %at;
    ld.global.u8 %byte, [%start];
    add.u64 %start, %to, %at;
    st.global.u8 [%start], %byte;
    add.u64 %at, %at, 1024;
    bra COPY;
DONE:
    ret;
}
"""


@functools.cache
def _kernel(context: int) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = ctypes.CDLL("libcuda.so.1")
    _check("cuModuleLoadData", driver.cuModuleLoadData(ctypes.byref(module), _PTX + b"\0"))
    error = driver.cuModuleGetFunction(ctypes.byref(function), module, b"early_copy")
    _check("cuModuleGetFunction", error)
    return function


def early_copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """Copies the bytes of a dense tensor to another one on the current stream, late.

    A kernel behind it that was launched to start early (CUDA's programmatic dependent launch) runs
    a millisecond before the bytes are there, unless it waits for them. All else comes after them.

    Args:
        to: a dense CUDA tensor of the current device, of compute capability 9.0 or later.
        of: a dense CUDA tensor of as many bytes there.

    Raises:
        RuntimeError: the driver refuses.
    """
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    _check("cuCtxGetCurrent", driver.cuCtxGetCurrent(ctypes.byref(context)))
    values = [ctypes.c_uint64(value) for value in (to.data_ptr(), of.data_ptr(), of.nbytes, _WAITS)]
    pointers = [ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values]
    error = driver.cuLaunchKernel(
        _kernel(context.value or 0), 1, 1, 1, _THREADS, 1, 1, 0,
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        (ctypes.c_void_p * len(values))(*pointers), None,
    )  # fmt: skip
    _check("cuLaunchKernel", error)


def _check(call: str, error: int) -> None:
    if error:
        raise RuntimeError(f"{call} failed with error {error}")
