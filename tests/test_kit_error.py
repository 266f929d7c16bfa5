"""What the test kit cannot do is neither a mistake of the operator nor a success."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from cuda_ops.spec import Range
from cuda_ops.testing import PROFILES, Sample, TensorArg, check_op, describe
from cuda_ops.testing.checks import by_name
from cuda_ops.testing.report import CheckEntry
from cuda_ops.testing.sizes import shaped
from cuda_ops.testing.subject import Subject
from cuda_ops.testing.values import make_tensor
from cuda_ops.testing.worker import UNJUDGED


@pytest.fixture
def described() -> Iterator[Callable[..., Subject]]:
    """Registers ``given::f`` by its schema and describes it with itself as its reference."""
    with torch.library._scoped_library("given", "DEF") as library:

        def make(schema: str, function: Any, line: str = "", **options: Any) -> Subject:
            library.define(schema)
            library.impl("f", function, "CompositeExplicitAutograd")
            options = {"reference": function, "differentiable": False, **options}
            return describe("given::f", line, **options)

        yield make


def _checked(subject: Subject, name: str) -> CheckEntry:
    few = replace(PROFILES["quick"], examples=10)
    checks = [by_name(name)]
    (entry,) = check_op(subject, checks=checks, devices=["cpu"], isolate=False, profile=few).entries
    return entry


X = TensorArg((2, 3))


@pytest.mark.parametrize("name", ["empty", "repeats", "reference", "numerics", "alignment"])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.uint32,
        torch.uint64,
    ],
)
def test_dtypes_that_torch_can_hardly_compute_with_are_compared(
    described: Callable[..., Subject], dtype: torch.dtype, name: str
) -> None:
    right = described("f(Tensor x) -> Tensor", torch.clone, "()->()", dtypes=[dtype])
    entry = _checked(right, name)
    assert entry.passed, entry
    if name in ("reference", "numerics"):
        wrong = torch.conj_physical if dtype.is_complex else torch.zeros_like
        entry = _checked(replace(right, reference=wrong), name)
        assert entry.passed is False and entry.label == by_name(name).title, entry


def test_a_dtype_that_the_kit_cannot_make_is_no_mistake_of_the_operator(
    described: Callable[..., Subject],
) -> None:
    quantized = described("f(Tensor x) -> Tensor", torch.clone, "()->()", dtypes=[torch.qint8])
    entry = _checked(quantized, "layouts")
    assert entry.label == UNJUDGED and not entry.passed
    assert entry.detail.startswith("the kit could not run this check: ")


def test_sizes_stay_within_the_ranges_of_an_operator(described: Callable[..., Subject]) -> None:
    """Beyond them, the operator refuses, and a reference may take for ever."""
    op = described("f(Tensor x) -> Tensor", torch.clone, "(m,n)->(m,n)").op
    within = replace(op, ranges={"m": Range(9, 20), "n": Range(0, 8192)})
    assert shaped(within, (2,), core={"m": 5, "n": 100_003}).args[0].shape == (2, 9, 8192)
    assert shaped(within, (2,), core=5).args[0].shape == (2, 9, 6)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("dtypes", [[torch.complex128], [torch.float64, torch.complex128]])
def test_gradients_of_complex_numbers_are_compared(
    described: Callable[..., Subject], dtypes: list[torch.dtype], is_right: bool
) -> None:
    """Real numbers would not show a factor that should be conjugate."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return grad * y.conj(), grad * (x.conj() if is_right else x)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    with torch.library._scoped_library("given", "FRAGMENT") as library:
        schema, line = "f(Tensor x, Tensor y) -> Tensor", "(),()->()"
        subject = described(schema, torch.mul, line, dtypes=dtypes, differentiable=True)
        torch.library.register_autograd("given::f", backward, setup_context=keep, lib=library)
        entry = _checked(subject, "gradcheck")
    assert entry.passed is is_right, entry
    assert is_right or "wrong for complex numbers" in entry.detail


def _times(
    described: Callable[..., Subject],
    backward: Callable[..., Any],
    schema: str,
    function: Any,
    line: str = "()->()",
    **options: Any,
) -> CheckEntry:
    """Checks a gradient that is made from what was given."""
    name = options.pop("name", "gradcheck")

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.others = inputs[1:]

    with torch.library._scoped_library("given", "FRAGMENT") as library:
        subject = described(schema, function, line, differentiable=True, **options)
        torch.library.register_autograd("given::f", backward, setup_context=keep, lib=library)
        return _checked(subject, name)


@pytest.mark.parametrize("wrong", ["", "flip", "count"])
def test_gradients_are_compared_for_each_choice(
    described: Callable[..., Subject], wrong: str
) -> None:
    """The smallest samples have a default, or what is drawn first."""

    def function(x: torch.Tensor, flip: bool, count: int) -> torch.Tensor:
        return x * ((-3 if flip else 3) + count)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        flip, count = ctx.others
        sign = -3 if flip and wrong != "flip" else 3
        return grad * (sign + (0 if wrong == "count" else count)), None, None

    entry = _times(described, backward, "f(Tensor x, bool flip, int count) -> Tensor", function)
    assert entry.passed is not bool(wrong), entry


def test_a_result_that_no_number_below_0_or_beyond_1_has_can_be_judged(
    described: Callable[..., Subject],
) -> None:
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad / (x * (1 - x)).sqrt() / 2

    entry = _times(described, backward, "f(Tensor x) -> Tensor", lambda x: x.sqrt().asin())
    assert entry.passed, entry


def test_a_result_that_is_always_nan_is_not_compared(described: Callable[..., Subject]) -> None:
    subject = described("f(Tensor x) -> Tensor", lambda x: x * torch.nan, "()->()")
    entry = _checked(subject, "opcheck")
    assert entry.passed is None and "results are NaN" in entry.reason, entry


def test_a_mask_beside_the_result_is_not_compared(described: Callable[..., Subject]) -> None:
    def backward(ctx: Any, grad: torch.Tensor, grad_mask: Any) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x > 0)

    schema = "f(Tensor x) -> (Tensor, Tensor)"
    entry = _times(described, backward, schema, lambda x: (x.clamp(min=0), x > 0), "()->(),()")
    assert entry.passed, entry


@pytest.mark.parametrize("name", ["gradient_edges", "gradient_sizes"])
@pytest.mark.parametrize("factor", [2, 1])
def test_gradients_without_float64_are_those_of_the_reference(
    described: Callable[..., Subject], name: str, factor: int
) -> None:
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * factor

    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    entry = _times(
        described, backward, "f(Tensor x) -> Tensor", square, name=name,
        dtypes=[torch.float32, torch.bfloat16],
    )  # fmt: skip
    assert entry.passed is (factor == 2), entry


def test_own_samples_without_a_line_may_be_large(described: Callable[..., Subject]) -> None:
    strategy = st.sampled_from([Sample((TensorArg((n,)),)) for n in (3, 5000)])
    subject = described("f(Tensor x) -> Tensor", torch.clone, strategy=strategy)
    entry = _checked(replace(subject, reference=subject.op.overload), "large")
    assert entry.passed is not False, entry


def test_what_cannot_be_drawn_is_named(described: Callable[..., Subject]) -> None:
    schema, strategy = "f(Tensor x, int[] c) -> Tensor", st.just(Sample((X, [2])))
    subject = described(schema, lambda x, c: x * c[0], "()->()", strategy=strategy)
    expected = "no samples: none are drawn of int[] 'c': implement cuda_ops_samples"
    assert replace(subject, strategy=None).incomparable == expected


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_large_complex_numbers_are_finite_and_tiny_ones_are_none(dtype: torch.dtype) -> None:
    seeded = torch.Generator().manual_seed(0)
    for values in ("large", "tiny"):
        x = make_tensor(TensorArg((100,), dtype), values, seeded, torch.device("cpu"))
        assert x.isfinite().all() and (x != 0).all(), values


def test_numbers_of_which_some_are_equal_are_compared(described: Callable[..., Subject]) -> None:
    """The last of the largest in place of the first, as a join of lanes may leave it."""

    def last(x: torch.Tensor) -> torch.Tensor:
        # Where the first number is among the largest, it wins: all equal ones show nothing.
        n = x.shape[-1]
        at = n - 1 - x.flip(-1).argmax(-1)
        return torch.where(x[..., 0] == x.amax(-1), torch.zeros_like(at), at)

    subject = described("f(Tensor x) -> Tensor", last, "(n)->()", dtypes=[torch.float32])
    entry = _checked(replace(subject, reference=lambda x: x.argmax(-1)), "numerics")
    assert entry.passed is False and "the result differs" in entry.detail, entry


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_comes_in_the_bits_of_a_gpu_too(dtype: torch.dtype) -> None:
    seeded = torch.Generator().manual_seed(0)
    x = make_tensor(TensorArg((400,), dtype), "special", seeded, torch.device("cpu"))
    bits = x[x.isnan()].view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    assert len(bits.unique()) == 2 and torch.iinfo(bits.dtype).max in bits


@pytest.mark.parametrize("fault", ["", "forward", "backward"])
def test_a_formula_that_changes_far_from_zero_is_compared_there(
    described: Callable[..., Subject], fault: str
) -> None:
    """Most numbers that are drawn at random are below 4."""

    def forward(x: torch.Tensor, beta: float) -> torch.Tensor:
        x = torch.where(x > 20, x + 0.1, x) if fault == "forward" else x
        return torch.nn.functional.softplus(x, beta)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,), beta = ctx.saved_tensors, ctx.beta
        linear = (x if fault == "backward" else beta * x) > 20
        return torch.where(linear, grad, grad * torch.sigmoid(beta * x)), None

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.beta = inputs[1]

    betas = st.builds(
        lambda n, beta, seed: Sample((TensorArg((n,), torch.float64), beta), "normal", seed),
        st.integers(1, 20), st.sampled_from((0.1, 0.5, 1.0)), st.integers(0, 99),
    )  # fmt: skip
    with torch.library._scoped_library("given", "FRAGMENT") as library:
        subject = described(
            "f(Tensor x, float beta) -> Tensor", forward, strategy=betas, differentiable=True
        )
        subject = replace(subject, reference=torch.nn.functional.softplus)
        torch.library.register_autograd("given::f", backward, setup_context=keep, lib=library)
        assert _checked(subject, "numerics").passed is (fault != "forward")
        assert _checked(subject, "gradient_edges").passed is not (fault == "backward")


@pytest.mark.parametrize("chunk", [None, 64, 1024])
def test_partial_sums_in_16_bits_are_found(
    described: Callable[..., Subject], chunk: int | None
) -> None:
    """Whatever other dims a result has, and where only long sums are cut into parts."""

    def means(x: torch.Tensor) -> torch.Tensor:
        parts = [part.float().sum(-2) for part in x.split(chunk or x.shape[-2], -2)]
        if chunk:
            parts = [part.to(x.dtype).float() for part in parts]
        return (torch.stack(parts).sum(0) / x.shape[-2]).to(x.dtype)

    halves = [torch.float16, torch.bfloat16]
    subject = described("f(Tensor x) -> Tensor", means, "(m,n)->(n)", dtypes=halves)
    entry = _checked(replace(subject, reference=lambda x: x.mean(-2)), "rounding")
    assert entry.passed is (chunk is None), entry
    assert entry.passed or entry.label == by_name("rounding").title


def test_a_fake_is_compared_where_sizes_do_not_divide_as_those_of_samples(
    described: Callable[..., Subject],
) -> None:
    """Thirds of rows, rounded up in the kernel; samples all leave one of three over."""
    with torch.library._scoped_library("given", "FRAGMENT") as library:
        samples = st.integers(1, 9).map(lambda n: Sample((TensorArg((3 * n + 1,)),)))
        subject = described(
            "f(Tensor x) -> Tensor", lambda x: x[::3].clone(), strategy=samples,
        )  # fmt: skip
        library.impl("f", lambda x: x.new_empty(x.shape[0] // 3 + 1), "Meta")
        entry = _checked(replace(subject, reference=lambda x: x[::3]), "registration")
    assert entry.passed is False and "the fake says" in entry.detail, entry


def test_a_list_of_tensors_is_made_and_compared(
    described: Callable[..., Subject],
) -> None:
    samples = st.just(Sample(([X, X],)))
    subject = described("f(Tensor[] xs) -> Tensor", lambda xs: xs[0] + xs[1], strategy=samples)
    right = replace(subject, reference=lambda xs: xs[0] + xs[1])
    for name in ("reference", "numerics", "mutation"):
        assert _checked(right, name).passed
    wrong = replace(subject, reference=lambda xs: xs[0] - xs[1])
    assert _checked(wrong, "reference").passed is False
    entry = _checked(right, "layouts")
    assert entry.passed is None and entry.detail == "the check takes no lists of tensors"


@pytest.mark.parametrize("name", ["mutation", "unwritten", "reference", "registration"])
def test_results_in_lists_and_numbers_are_compared(
    described: Callable[..., Subject], name: str
) -> None:
    def f(x: torch.Tensor) -> Any:
        return x + 1, [x + 2, x + 3], x.dim()

    subject = described("f(Tensor x) -> (Tensor, Tensor[], int)", f, "()->(),(),()")
    assert _checked(subject, name).passed
    if name == "reference":
        for wrong in (
            lambda x: (x + 1, [x + 2, x + 4], x.dim()),
            lambda x: (x + 1, [x + 2, x + 3], x.dim() + 1),
            lambda x: (x + 1, [x + 2, x + 3]),
        ):
            entry = _checked(replace(subject, reference=wrong), name)
            assert entry.passed is False and entry.label == by_name(name).title, entry


def test_a_required_dtype_comes_from_the_samples_alone(
    described: Callable[..., Subject],
) -> None:
    samples = st.just(Sample((X, torch.float64)))
    subject = described(
        "f(Tensor x, ScalarType t) -> Tensor", lambda x, t: x.to(t), "()->()", strategy=samples
    )
    for name in ("empty", "repeats", "compile_dynamic"):
        entry = _checked(subject, name)
        assert entry.passed or "no sample of the operator fits" in entry.detail, entry


def test_what_an_operator_writes_to_its_arguments_is_compared(
    described: Callable[..., Subject],
) -> None:
    def f(x: torch.Tensor) -> None:
        x.mul_(2)

    subject = described("f(Tensor(a!) x) -> ()", f, "()->()")
    for name in (
        "empty",
        "mutation",
        "repeats",
        "unwritten",
        "reference",
        "layouts",
        "compile_static",
    ):
        assert _checked(subject, name).passed, name
    entry = _checked(replace(subject, reference=lambda x: x.mul_(3)), "reference")
    assert entry.passed is False and "times the tolerance" in entry.detail
    entry = _checked(replace(subject, reference=lambda x: x * 2), "reference")
    assert entry.passed is False and "times the tolerance" in entry.detail


def test_a_reference_that_raises_is_named(described: Callable[..., Subject]) -> None:
    def nothing(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("nothing at all")

    subject = described("f(Tensor x) -> Tensor", torch.clone, "()->()", reference=nothing)
    entry = _checked(subject, "reference")
    assert entry.label == UNJUDGED and not entry.passed
    raised = "the reference raised NotImplementedError: nothing at all"
    assert entry.detail == f"the kit could not compare the result: {raised}"


def test_samples_that_raise_when_drawn_are_named(described: Callable[..., Subject]) -> None:
    samples = st.just(0).map(lambda zero: 1 // zero)
    entry = _checked(described("f(Tensor x) -> Tensor", torch.clone, strategy=samples), "reference")
    assert entry.label == UNJUDGED
    assert entry.detail.startswith("the kit could not draw samples: ZeroDivisionError")


def test_after_every_sample_is_refused_no_other_check_draws_any(
    described: Callable[..., Subject],
) -> None:
    def nothing(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("nothing at all")

    subject = described("f(Tensor x) -> Tensor", nothing, "()->()")
    entries = check_op(subject, devices=["cpu"], isolate=False).entries
    (failure,) = (entry for entry in entries if entry.passed is False)
    assert failure.check == "mutation" and failure.label == UNJUDGED
    later = {entry.detail for entry in entries[entries.index(failure) + 1 :]}
    assert later == {"every sample is refused by the operator, and by its reference too"}
