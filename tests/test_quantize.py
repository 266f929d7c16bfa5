"""quantize and dequantize_int4 against torch, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_gpu
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.ops.quantize import torch_quantize


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("quantize", "dequantize_int4")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
WIDE = [torch.float32, torch.float16, torch.bfloat16]
NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
on_each_device = pytest.mark.parametrize("device", DEVICES)
to_each = pytest.mark.parametrize("narrow", NARROW)

#: Half the distance between neighbors: relative to a number, and to the largest of its row.
STEPS = {
    torch.float8_e4m3fn: (2.0**-4, 2.0**-10 / 448),
    torch.float8_e5m2: (2.0**-3, 2.0**-17 / 57344),
    torch.int8: (0.0, 0.5 / 127),
}

VIEWS = {
    "dense": lambda x: x,
    "rows left out": lambda x: x.repeat_interleave(2, 0)[::2],
    "part of longer rows": lambda x: torch.nn.functional.pad(x, (8, 24))[..., 8:-24],
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "columns": lambda x: x.mT.contiguous().mT,
    "an odd start": lambda x: torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape),
}


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """NaN equals NaN, whichever it is."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    actual, expected = actual.cpu(), expected.cpu()
    if actual.dtype is torch.int8:
        return torch.equal(actual, expected)
    kinds = actual.isnan() & expected.isnan()
    whole = torch.uint8 if actual.itemsize == 1 else torch.int32
    return bool((kinds | (actual.view(whole) == expected.view(whole))).all())


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    block = draw(st.sampled_from([None, 1, 2, 5, 8, 16, 32, 100, 128, 1000]))
    lengths = st.sampled_from([1, 7, 40, 64, 100, 513, 1000, 4096, 5000])
    n = draw(lengths) if block is None else block * draw(st.integers(1, 9))
    return {
        "shape": (*draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), n),
        "block": block,
        "dtype": draw(st.sampled_from(WIDE)),
        "view": draw(st.sampled_from(sorted(VIEWS))),
        "scale": draw(st.sampled_from([1.0, 1e-4, 300.0])),
        "seed": draw(st.integers(0, 99)),
    }


@to_each
@on_each_device
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_it_is_torch_s_formula_to_the_bit(
    narrow: torch.dtype, device: str, case: dict[str, Any]
) -> None:
    x = (case["scale"] * numbers(case["shape"], case["seed"])).to(device, case["dtype"])
    x, block = VIEWS[case["view"]](x), case["block"]
    q, scale = cuda_ops.quantize(x, narrow, block)
    expected = torch_quantize(x.cpu(), narrow, block)
    assert same_bits(q, expected[0]) and same_bits(scale, expected[1])
    assert q.is_contiguous() and scale.is_contiguous()
    scales = 1 if block is None else x.shape[-1] // block
    assert scale.shape == (*x.shape[:-1], scales) and scale.dtype is torch.float32


@to_each
@on_each_device
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_a_round_trip_is_off_by_half_a_step(
    narrow: torch.dtype, device: str, case: dict[str, Any]
) -> None:
    x = (case["scale"] * numbers(case["shape"], case["seed"])).to(device, case["dtype"])
    q, scale = cuda_ops.quantize(x, narrow, case["block"])
    blocks = x.double().unflatten(-1, (scale.shape[-1], -1))
    back = q.double().view(blocks.shape) * scale.double().unsqueeze(-1)
    relative, of_largest = STEPS[narrow]
    allowed = relative * blocks.abs() + of_largest * blocks.abs().amax(-1, keepdim=True)
    # The quotient is rounded before: at 127 by 2^-18.
    assert ((back - blocks).abs() <= allowed * (1 + 2**-16)).all()


@to_each
@on_each_device
def test_every_number_of_the_dtype_comes_back(narrow: torch.dtype, device: str) -> None:
    """With scales that are powers of two nothing is rounded."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(narrow)
    every = codes[codes.float().isfinite() & (codes.float() != -128)].to(device)
    for power in (-30, -3, 0, 40):
        x = every.float() * 2.0**power
        q, scale = cuda_ops.quantize(x, narrow)
        assert scale.item() == 2.0**power and same_bits(q, every)


@to_each
@on_each_device
def test_ties_go_to_even(narrow: torch.dtype, device: str) -> None:
    largest = 127.0 if narrow is torch.int8 else torch.finfo(narrow).max
    x = torch.tensor([largest, 0.5, 1.5, 2.5, -0.5, -3.5, 17.0, 19.0, -0.0], device=device)
    q, scale = cuda_ops.quantize(x, narrow)
    assert scale.item() == 1 and same_bits(q, torch_quantize(x.cpu(), narrow)[0])
    if narrow is torch.int8:
        assert q.tolist() == [127, 0, 2, 2, 0, -4, 17, 19, 0]
    if narrow is torch.float8_e4m3fn:
        assert q.float().tolist() == [448, 0.5, 1.5, 2.5, -0.5, -3.5, 16, 20, 0]


@to_each
@on_each_device
def test_rows_of_zeros_have_scale_1(narrow: torch.dtype, device: str) -> None:
    q, scale = cuda_ops.quantize(torch.zeros(3, 40, device=device), narrow)
    assert scale.tolist() == [[1.0]] * 3 and not q.float().any()
    # The same where the scale would be too small for a number.
    q, scale = cuda_ops.quantize(torch.full((1, 40), 1e-45, device=device), narrow)
    assert scale.tolist() == [[1.0]] and not q.float().any()


@to_each
@on_each_device
@pytest.mark.parametrize("dtype", WIDE)
def test_infinities_and_nan_stay_in_their_row(
    narrow: torch.dtype, device: str, dtype: torch.dtype
) -> None:
    x = numbers((5, 300), 0).to(dtype)
    x[1, 7], x[2, 299], x[3, 0], x[3, 5] = torch.inf, torch.nan, -torch.inf, torch.nan
    q, scale = cuda_ops.quantize(x.to(device), narrow)
    expected = torch_quantize(x, narrow)
    assert same_bits(q, expected[0]) and same_bits(scale, expected[1])
    assert scale.isfinite().flatten().tolist() == [True, False, False, False, True]
    others = q[1].float().cpu()
    assert not others[torch.arange(300) != 7].any()


@to_each
@on_each_device
def test_large_and_small_numbers(narrow: torch.dtype, device: str) -> None:
    x = numbers((9, 200), 3) * torch.tensor([[10.0**p] for p in range(-44, 38, 10)])
    q, scale = cuda_ops.quantize(x.to(device), narrow)
    expected = torch_quantize(x, narrow)
    assert same_bits(q, expected[0]) and same_bits(scale, expected[1])


@pytest.mark.parametrize("n", [8, 40, 4096, 4099, 40_000, 70_000])
@on_each_device
def test_rows_of_any_length(n: int, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers((3, n), n).to(dtype)
        q, scale = cuda_ops.quantize(x.to(device), torch.float8_e4m3fn)
        expected = torch_quantize(x, torch.float8_e4m3fn)
        assert same_bits(q, expected[0]) and same_bits(scale, expected[1])


@on_each_device
def test_no_rows_and_no_numbers(device: str) -> None:
    q, scale = cuda_ops.quantize(torch.empty(0, 8, device=device), torch.int8, 4)
    assert q.shape == (0, 8) and scale.shape == (0, 2)
    q, scale = cuda_ops.quantize(torch.empty(3, 0, device=device), torch.int8)
    assert q.shape == (3, 0) and scale.tolist() == [[1.0]] * 3
    q, scale = cuda_ops.quantize(torch.empty(3, 0, device=device), torch.int8, 4)
    assert scale.shape == (3, 0)


@on_each_device
def test_it_is_compiled_and_mapped(device: str) -> None:
    x = numbers((4, 6, 64), 0).to(device)
    expected = cuda_ops.quantize(x, torch.float8_e4m3fn, 16)
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(cuda_ops.quantize, fullgraph=True, backend=backend)
    mapped = torch.vmap(lambda part: cuda_ops.quantize(part, torch.float8_e4m3fn, 16))(x)
    for found in (compiled(x, torch.float8_e4m3fn, 16), mapped):
        assert all(map(same_bits, found, expected))


# --- integers of four bits -----------------------------------------------------------------------

FLOATING = [torch.float64, *WIDE]


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Packs integers of four bits, the first of two in the low half of a byte."""
    pairs = (codes & 15).to(torch.uint8)
    return pairs[..., ::2] | pairs[..., 1::2] << 4


@on_each_device
@settings(max_examples=80, deadline=None)
@given(
    loop=st.lists(st.integers(0, 4), max_size=2),
    block=st.sampled_from([1, 2, 3, 8, 10, 16, 32, 128]),
    blocks=st.integers(1, 9),
    dtype=st.sampled_from(FLOATING),
    zero=st.booleans(),
    broadcast=st.booleans(),
    view=st.sampled_from(["dense", "stepped", "an odd start"]),
)
def test_dequantize_is_exact(
    device: str,
    loop: list[int],
    block: int,
    blocks: int,
    dtype: torch.dtype,
    zero: bool,
    broadcast: bool,
    view: str,
) -> None:
    blocks += block * blocks % 2  # an even number of them in all
    size = block * blocks
    generator = torch.Generator().manual_seed(size)
    codes = torch.randint(0 if zero else -8, 16 if zero else 8, (*loop, size), generator=generator)
    scale = torch.randn((blocks,) if broadcast else (*loop, blocks), generator=generator).to(dtype)
    zeros = torch.randint(0, 16, (*loop, blocks), generator=generator).to(dtype) if zero else None
    shifts = 0 if zeros is None else zeros.double().repeat_interleave(block, -1)
    expected = (codes.double() - shifts) * scale.double().repeat_interleave(block, -1)
    q = VIEWS[view](packed(codes)).to(device)
    on_device = [t if t is None else t.to(device) for t in (scale, zeros)]
    actual = cuda_ops.dequantize_int4(q, on_device[0], block, on_device[1])
    assert actual.dtype is dtype and actual.is_contiguous()
    assert torch.equal(actual.cpu(), expected.to(dtype))


@on_each_device
def test_every_pair_of_integers(device: str) -> None:
    q = torch.arange(256, dtype=torch.uint8, device=device).view(1, 256)
    signed = cuda_ops.dequantize_int4(q, torch.ones(1, 1, device=device), 512).cpu().view(256, 2)
    zeros = torch.zeros(1, 1, device=device)
    positive = cuda_ops.dequantize_int4(q, torch.ones_like(zeros), 512, zeros).cpu().view(256, 2)
    for byte in range(256):
        low, high = byte % 16, byte // 16
        assert positive[byte].tolist() == [low, high]
        assert signed[byte].tolist() == [low - 16 * (low > 7), high - 16 * (high > 7)]


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_what_dequantize_refuses(device: str) -> None:
    q, scale = (
        torch.zeros(2, 8, dtype=dtype, device=device) for dtype in (torch.uint8, torch.float16)
    )
    for block in (0, 3, 32):
        message = f"'block': expected a divisor of 16, the numbers in a row of 'q', got {block}"
        with pytest.raises(RuntimeError, match=message):
            cuda_ops.dequantize_int4(q, scale, block)
    message = r"'scale': expected dim 'g' of \(\.\.\., g\) to be 4, one for each 4 of 16"
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.dequantize_int4(q, scale, 4)
    message = "'zero_point': expected dtype float16 like 'scale', got float32"
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.dequantize_int4(q, scale, 2, scale.float())
    with pytest.raises(RuntimeError, match="'q': expected dtype uint8, got int8"):
        cuda_ops.dequantize_int4(q.to(torch.int8), scale, 2)
    with pytest.raises(RuntimeError, match="'zero_point': expected dim 'g'"):
        cuda_ops.dequantize_int4(q, scale, 2, scale[:, 1:])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_what_is_refused(device: str) -> None:
    x = torch.ones(2, 12, device=device)
    for block in (0, -4, 5, 24):
        message = f"quantize: argument 'block': expected a divisor of 12, .* got {block}"
        with pytest.raises(RuntimeError, match=message):
            cuda_ops.quantize(x, torch.int8, block)
    message = "'dtype': expected float8_e4m3fn, float8_e5m2 or int8, got float16"
    with pytest.raises(RuntimeError, match=message):
        cuda_ops.quantize(x, torch.float16)
    with pytest.raises(RuntimeError, match="'x': expected dtype float32, float16 or bfloat16"):
        cuda_ops.quantize(x.double(), torch.int8)
    with pytest.raises(RuntimeError, match="'x': expected at least 1 dims"):
        cuda_ops.quantize(x[0, 0], torch.int8)


@on_each_device
def test_a_gradient_is_refused(device: str) -> None:
    x = torch.ones(2, 12, device=device, requires_grad=True)
    _, scale = cuda_ops.quantize(x, torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="quantize has no gradient"):
        scale.sum().backward()


# --- on a GPU alone ------------------------------------------------------------------------------


@needs_gpu
def test_more_than_2_to_the_31_elements() -> None:
    part = torch.randn(1 << 12, 256, device="cuda", dtype=torch.bfloat16)
    x = part.repeat(2049, 1)
    assert x.numel() > 2**31
    q, scale = cuda_ops.quantize(x, torch.float8_e4m3fn, 128)
    expected = cuda_ops.quantize(part, torch.float8_e4m3fn, 128)
    assert same_bits(q[-4096:], expected[0]) and same_bits(scale[-4096:], expected[1])
