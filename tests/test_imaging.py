"""rgb_to_gray and normalize_volume: what their formulas promise, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_gpu
from torch._subclasses.fake_tensor import FakeTensorMode

import cuda_ops
from cuda_ops.compile_ops import reload
from cuda_ops.ops.normalize_volume import normalized


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    reload("rgb_to_gray", "normalize_volume")


DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)

# --- rgb_to_gray -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def every_color() -> torch.Tensor:
    """All 2^24 of them, one row per value of red and green."""
    level = torch.arange(256, dtype=torch.uint8)
    return torch.cartesian_prod(level, level, level).view(65536, 256, 3)


def weighted(image: torch.Tensor, red: int, green: int, blue: int) -> torch.Tensor:
    r, g, b = image.to(torch.int32).unbind(-1)
    return red * r + green * g + blue * b


@on_each_device
def test_gray_is_the_exact_sum_rounded_halves_up(every_color: torch.Tensor, device: str) -> None:
    image = every_color.to(device)
    exact = (weighted(image, 299, 587, 114) + 500) // 1000
    assert torch.equal(cuda_ops.rgb_to_gray(image).to(torch.int32), exact)
    planar = image.permute(2, 0, 1).contiguous()
    assert torch.equal(cuda_ops.rgb_to_gray_chw(planar).to(torch.int32), exact)


@pytest.mark.slow
def test_gray_beside_torchvision_and_opencv(every_color: torch.Tensor) -> None:
    ours = cuda_ops.rgb_to_gray(every_color).to(torch.int32)
    r, g, b = every_color.to(torch.float32).unbind(-1)
    truncated = (0.2989 * r + 0.587 * g + 0.114 * b).to(torch.uint8)
    assert set((ours - truncated).unique().tolist()) == {0, 1}
    fixed = (weighted(every_color, 9798, 19235, 3735) + (1 << 14)) >> 15
    assert (ours - fixed).abs().max() == 1
    assert 0.0005 < (ours != fixed).float().mean() < 0.002


def views() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Ways to look at a (4, 36, 80, 3) image; each is a path of the kernel or its border."""
    return {
        "contiguous": lambda x: x,
        "cropped, aligned": lambda x: x[:, 2:34, 16:64],
        "cropped, not aligned": lambda x: x[:, 1:, 3:70],
        "one channel more": lambda x: torch.cat([x, x], -1)[..., 1:4],
        "every other pixel": lambda x: x[:, ::2, ::2],
        "planar below": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        "blue first": lambda x: x.flip(-1),
        "transposed": lambda x: x.transpose(1, 2),
        "odd count": lambda x: x.flatten(0, 2)[:5003].unsqueeze(0),
        "odd start": lambda x: x.flatten()[3:].unflatten(0, (1, -1, 3)),
        "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
        "one pixel": lambda x: x[:1, :1, :1],
    }


@pytest.mark.parametrize("order", ["RGB", "BGR"])
@pytest.mark.parametrize("view", views())
@on_each_device
def test_gray_of_any_layout(view: str, order: str, device: str) -> None:
    image = torch.randint(0, 256, (4, 36, 80, 3), dtype=torch.uint8).to(device)
    seen = views()[view](image)
    red, blue = (299, 114) if order == "RGB" else (114, 299)
    expected = ((weighted(seen, red, 587, blue) + 500) // 1000).to(torch.uint8)
    assert torch.equal(cuda_ops.rgb_to_gray(seen, order), expected)
    assert torch.equal(cuda_ops.rgb_to_gray_chw(seen.movedim(-1, -3), order=order), expected)


@on_each_device
def test_gray_of_opencv_s_order_is_that_of_the_flipped_image(
    every_color: torch.Tensor, device: str
) -> None:
    image = every_color.to(device)
    expected = cuda_ops.rgb_to_gray(image.flip(-1))
    assert torch.equal(cuda_ops.rgb_to_gray(image, "BGR"), expected)
    assert torch.equal(cuda_ops.rgb_to_gray_chw(image.permute(2, 0, 1), "BGR"), expected)
    compiled = torch.compile(cuda_ops.rgb_to_gray, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(image[:8], "BGR"), expected[:8])


@on_each_device
def test_gray_refuses_another_order(device: str) -> None:
    image = torch.zeros(5, 5, 3, dtype=torch.uint8, device=device)
    for given in (image, image.to("meta")):
        with pytest.raises(RuntimeError, match="'order': expected 'RGB' or 'BGR', got 'GBR'"):
            cuda_ops.rgb_to_gray(given, "GBR")


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (0, 5, 5, 3)])
@on_each_device
def test_gray_of_no_pixels(shape: tuple[int, ...], device: str) -> None:
    image = torch.empty(shape, dtype=torch.uint8, device=device)
    assert cuda_ops.rgb_to_gray(image).shape == shape[:-1]


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((5, 5, 4), torch.uint8, r"dim '3' of \(..., h, w, 3\) to be 3, got shape \[5, 5, 4\]"),
        ((5, 3), torch.uint8, r"at least 3 dims \(..., h, w, 3\), got shape \[5, 3\]"),
        ((5, 5, 3), torch.float32, "dtype uint8, got float32"),
    ],
)
@on_each_device
def test_gray_refuses(
    shape: tuple[int, ...], dtype: torch.dtype, message: str, device: str
) -> None:
    image = torch.zeros(shape, dtype=dtype, device=device)
    for given in (image, image.to("meta")):
        with pytest.raises(
            RuntimeError, match=f"rgb_to_gray: argument 'image': expected {message}"
        ):
            cuda_ops.rgb_to_gray(given)


@needs_gpu
def test_gray_of_more_than_2_to_the_31_pixels() -> None:
    part = torch.randint(0, 256, (1 << 20, 3), dtype=torch.uint8, device="cuda")
    image = part.repeat(2049, 1).unsqueeze(0)
    out = cuda_ops.rgb_to_gray(image)[0]
    expected = cuda_ops.rgb_to_gray(part.unsqueeze(0))[0]
    assert torch.equal(out[: 1 << 20], expected) and torch.equal(out[-(1 << 20) :], expected)


# --- normalize_volume --------------------------------------------------------------------


def volume(*shape: int, dtype: torch.dtype = torch.uint16, seed: int = 0) -> torch.Tensor:
    most = torch.iinfo(dtype).max + 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, most, shape, generator=generator, dtype=torch.int32).to(dtype)


def ulps(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest error in units of the last place of the exact result."""
    step = torch.finfo(actual.dtype).eps * exact.abs().clamp(min=1e-6)
    return float(((actual.to(torch.float64) - exact).abs() / step).max())


SHAPES = [
    (1, 1, 1), (2, 3, 5), (16, 16, 16), (33, 17, 65), (3, 8, 16, 32), (5, 7, 9, 11),
    (300, 2, 4, 8), (64, 128, 128), (3, 64, 64, 65), (2, 2, 128, 128, 100),
]  # fmt: skip


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint8])
@pytest.mark.parametrize("shape", SHAPES)
@on_each_device
def test_normalized_by_its_own_statistics(
    shape: tuple[int, ...], dtype: torch.dtype, out_dtype: torch.dtype, device: str
) -> None:
    x = volume(*shape, dtype=dtype)
    actual = cuda_ops.normalize_volume(x.to(device), dtype=out_dtype)
    assert actual.dtype == out_dtype and actual.is_contiguous()
    torch.testing.assert_close(
        actual.cpu().double(), normalized(x), rtol=2 * torch.finfo(out_dtype).eps, atol=1e-6
    )


@on_each_device
def test_statistics_are_of_each_volume_of_a_batch(device: str) -> None:
    x = volume(6, 8, 16, 16)
    x[2] = torch.full((8, 16, 16), 65535, dtype=torch.int32).to(torch.uint16)
    actual = cuda_ops.normalize_volume(x.to(device)).cpu()
    for i in range(6):
        assert torch.equal(actual[i], cuda_ops.normalize_volume(x[i].to(device)).cpu())
    assert torch.equal(actual[2], torch.zeros(8, 16, 16))


@pytest.mark.parametrize("value", [0, 1, 40000, 65535])
@on_each_device
def test_a_constant_volume_gives_zeros(value: int, device: str) -> None:
    x = torch.full((33, 65, 67), value, dtype=torch.int32, device=device).to(torch.uint16)
    assert torch.equal(cuda_ops.normalize_volume(x), torch.zeros(33, 65, 67, device=device))


@on_each_device
def test_a_small_deviation_beside_a_large_mean_keeps_its_digits(device: str) -> None:
    x = (volume(16, 64, 64).to(torch.int32) % 3 + 60000).to(torch.uint16)
    exact = normalized(x)
    actual = cuda_ops.normalize_volume(x.to(device)).cpu()
    assert ulps(actual, exact) < 2
    mean, std = 60001.00001, 0.8
    exact = (x.double() - mean) / std
    actual = cuda_ops.normalize_volume(x.to(device), mean=mean, std=std).cpu()
    assert (actual - exact).abs().max() < 1e-6


@pytest.mark.parametrize("maximum", [65535.0, 4095.0, 255.0, 3.0, 1e-3, 123.456])
@on_each_device
def test_a_quotient_is_rounded_once(maximum: float, device: str) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(16, 64, 64)
    actual = cuda_ops.normalize_volume(x.to(device), maximum=maximum).cpu()
    divisor = torch.tensor(maximum, dtype=torch.float32).double() if device == "cuda" else maximum
    assert torch.equal(actual, (x.double() / divisor).float())


@on_each_device
def test_the_maximum_may_stand_second(device: str) -> None:
    x = volume(3, 5, 7).to(device)
    expected = cuda_ops.normalize_volume(x, maximum=4095.0)
    assert torch.equal(cuda_ops.normalize_volume(x, 4095.0), expected)
    assert torch.equal(torch.ops.cuda_ops.normalize_volume(x, 4095.0), expected)
    with pytest.raises(TypeError, match="positional argument"):
        cuda_ops.normalize_volume(x, 4095.0, 1.0)


@on_each_device
def test_given_mean_and_std(device: str) -> None:
    for dtype in (torch.uint16, torch.uint8):
        x = volume(3, 5, 7, 129, dtype=dtype)
        actual = cuda_ops.normalize_volume(x.to(device), mean=100.25, std=17.5).cpu()
        assert ulps(actual, (x.double() - 100.25) / 17.5) < 3


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 1:, 3:], lambda x: x.transpose(-1, -3), lambda x: x[..., ::2],
        lambda x: x.flatten()[1:].unflatten(0, (1, 1, -1)), lambda x: x[:1].expand(3, -1, -1, -1),
    ],
)  # fmt: skip
@on_each_device
def test_normalized_from_any_layout(view: Any, device: str) -> None:
    seen = view(volume(4, 16, 20, 32).to(device))
    plain = seen.to(torch.int32).contiguous().to(torch.uint16)
    for options in ({}, {"maximum": 1000.0}):
        expected = cuda_ops.normalize_volume(plain, **options)
        assert torch.equal(cuda_ops.normalize_volume(seen, **options), expected)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 3, 3), (0, 3, 3, 3)])
@on_each_device
def test_normalized_nothing(shape: tuple[int, ...], device: str) -> None:
    x = torch.empty(shape, dtype=torch.uint16, device=device)
    assert cuda_ops.normalize_volume(x).shape == shape
    assert cuda_ops.normalize_volume(x, maximum=2.0).shape == shape


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"maximum": 1.0, "std": 1.0}, "'maximum': expected None beside mean and std, got both"),
    ({"maximum": 1.0, "mean": 0.0}, "'maximum': expected None beside mean and std, got both"),
    ({"mean": 1.0}, "'std': expected a number beside mean, got None"),
    ({"std": 1.0}, "'mean': expected a number beside std, got None"),
    ({"maximum": 0.0}, "'maximum': expected a number from 1e-30 to 1e30, got 0.000000"),
    ({"maximum": -2.0}, "'maximum': expected a number from 1e-30 to 1e30, got -2.000000"),
    ({"maximum": float("nan")}, "'maximum': expected a number from 1e-30 to 1e30, got nan"),
    ({"mean": 1.0, "std": 0.0}, "'std': expected a number from 1e-30 to 1e30, got 0.000000"),
    ({"mean": float("inf"), "std": 1.0}, "'mean': expected a number from -1e30 to 1e30, got inf"),
    ({"dtype": torch.bfloat16}, "'dtype': expected float32 or float16, got bfloat16"),
    ({"dtype": torch.float64}, "'dtype': expected float32 or float16, got float64"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
@on_each_device
def test_normalize_refuses(options: dict[str, Any], message: str, device: str) -> None:
    x = volume(2, 2, 2).to(device)
    expected = f"cuda_ops::normalize_volume: argument {message}"
    with pytest.raises(RuntimeError) as error:
        cuda_ops.normalize_volume(x, **options)
    assert str(error.value).splitlines()[0] == expected
    if "dtype" in options:  # what the binding itself refuses, a fake takes
        with FakeTensorMode() as mode, pytest.raises(RuntimeError) as error:
            cuda_ops.normalize_volume(mode.from_tensor(x), **options)
        assert str(error.value).splitlines()[0] == expected


def test_normalize_refuses_other_dtypes_and_shapes() -> None:
    with pytest.raises(RuntimeError, match="'x': expected dtype uint16 or uint8, got int16"):
        cuda_ops.normalize_volume(torch.zeros(2, 2, 2, dtype=torch.int16))
    with pytest.raises(RuntimeError, match=r"'x': expected at least 3 dims \(..., d, h, w\)"):
        cuda_ops.normalize_volume(torch.zeros(2, 2, dtype=torch.uint8))


def test_keywords_reach_compiled_and_batched_calls() -> None:
    x = volume(3, 4, 5, 6)
    options: dict[str, Any] = {"maximum": 100.0, "dtype": torch.float16}
    expected = cuda_ops.normalize_volume(x, **options)
    batched = torch.vmap(lambda v: cuda_ops.normalize_volume(v, **options))(x)
    compiled = torch.compile(
        lambda v: cuda_ops.normalize_volume(v, **options), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(batched, expected) and torch.equal(compiled(x), expected)


@needs_gpu
@pytest.mark.parametrize("shape", [(64, 64, 64), (256, 256, 256), (40, 32, 32, 32)])
def test_own_statistics_in_a_cuda_graph_and_over_and_over(shape: tuple[int, ...]) -> None:
    x = volume(*shape).to("cuda")
    expected = cuda_ops.normalize_volume(x)
    for _ in range(20):
        assert torch.equal(cuda_ops.normalize_volume(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda_ops.normalize_volume(x)
    fresh = volume(*shape, seed=1).to("cuda")
    x.copy_(fresh)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, cuda_ops.normalize_volume(fresh))


@needs_gpu
def test_normalize_more_than_2_to_the_31_voxels() -> None:
    part = volume(64, 128, 128, dtype=torch.uint8).to("cuda")
    x = part.repeat(2049, 1, 1)
    assert x.numel() > 2**31
    out = cuda_ops.normalize_volume(x, dtype=torch.float16)
    expected = cuda_ops.normalize_volume(part, dtype=torch.float16)  # the same statistics
    assert torch.equal(out[:64], expected) and torch.equal(out[-64:], expected)
