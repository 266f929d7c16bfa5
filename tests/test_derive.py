"""What is derived from a schema and a signature line.

The operators here are written in Python, so no library has to be built. The
error texts are those of ``src/utils/manifest.h`` and ``elementwise.h``.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import FLOATING, pair, spec
from torch._subclasses.fake_tensor import FakeTensorMode

from cuda_ops.benchmarking import derived as benchmarking_derived
from cuda_ops.derive import arguments, batching, gradient, layout, rules
from cuda_ops.dispatch import autocast
from cuda_ops.errors import ResultError
from cuda_ops.testing import Sample, TensorArg, check_op, quick_error, samples
from cuda_ops.testing import derived as testing_derived
from cuda_ops.testing.checks import by_name
from cuda_ops.testing.subject import subject_of
from cuda_ops.testing.values import VALUES

LIBRARY = torch.library.Library("cuda_ops", "FRAGMENT")


class Plugins:
    """The derivation plugin alone, with some answers replaced."""

    def __init__(self, **answers):
        self.answers = answers

    def ask(self, hook_name, op):
        if hook_name in self.answers:
            return self.answers[hook_name]
        homes = (rules, testing_derived, benchmarking_derived)
        found = (getattr(home, hook_name) for home in homes if hasattr(home, hook_name))
        return next(found, lambda op: None)(op)


def register(op, kernel, plugins=None):
    """Defines an operator whose CPU kernel allocates by the rule and copies ``kernel``'s result."""
    plugins = plugins or Plugins()

    def cpu(*args, **kwargs):
        outputs = layout.empty_outputs(op, op.signature, arguments.bind(op, args, kwargs))
        results = kernel(*args, **kwargs)
        for out, result in zip(outputs, results if len(outputs) > 1 else [results], strict=True):
            out.copy_(result)
        return outputs if len(outputs) > 1 else outputs[0]

    LIBRARY.define(op.schema)
    LIBRARY.impl(op.name, cpu, "CPU")
    torch.library.register_fake(op.qualname, plugins.ask("cuda_ops_fake", op), lib=LIBRARY)
    torch.library.register_vmap(op.qualname, plugins.ask("cuda_ops_vmap", op), lib=LIBRARY)
    if formula := plugins.ask("cuda_ops_autograd", op):
        torch.library.register_autograd(
            op.qualname, formula.backward, setup_context=formula.setup_context, lib=LIBRARY
        )
    if policy := plugins.ask("cuda_ops_autocast", op):
        autocast.register(LIBRARY, SimpleNamespace(spec=op, now=SimpleNamespace(autocast=policy)))
    return op


@pytest.fixture(scope="session")  # a name can be registered once in a process
def scaled_product():
    """x * y * alpha: broadcasts, takes a number, names its gradients."""
    backward_schema = (
        "derive_mul_backward(Tensor grad_out, Tensor x, Tensor y, float alpha)"
        " -> (Tensor grad_x, Tensor grad_y)"
    )
    op = spec("derive_mul(Tensor x, Tensor y, float alpha=1.0) -> Tensor", "(),()->()")
    backward = spec(backward_schema, "(),(),()->(),()")
    pair(op, backward)
    register(backward, lambda g, x, y, alpha: (g * y * alpha, g * x * alpha))
    return register(op, lambda x, y, alpha=1.0: x * y * alpha)


@pytest.fixture(scope="session")  # a name can be registered once in a process
def product():
    """A matrix product: core dims, loop dims, two gradients."""
    op = spec("derive_mm(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
    backward = spec(
        "derive_mm_backward(Tensor grad_out, Tensor a, Tensor b) -> (Tensor grad_a, Tensor grad_b)",
        "(m,n),(m,k),(k,n)->(m,k),(k,n)",
    )
    pair(op, backward)
    register(backward, lambda g, a, b: (g @ b.mT, a.mT @ g))
    return register(op, lambda a, b: a.double() @ b.double())


# --- checks: order and text ------------------------------------------------------


def refusal(op, *tensors):
    with pytest.raises(RuntimeError) as caught:
        layout.empty_outputs(op, op.signature, tensors)
    return str(caught.value)


def test_dtype_is_checked_on_the_first_tensor_and_compared_on_the_others():
    op = spec("f(Tensor x, Tensor y) -> Tensor", "(),()->()")
    assert refusal(op, torch.ones(2, dtype=torch.int32), torch.ones(2)) == (
        "cuda_ops::f: argument 'x': expected dtype float64, float32, float16 or bfloat16, got int32"
    )
    assert refusal(op, torch.ones(2), torch.ones(2, dtype=torch.float64)) == (
        "cuda_ops::f: argument 'y': expected dtype float32 like 'x', got float64"
    )
    one = replace(op, dtypes=(torch.float32,))
    assert refusal(one, torch.ones(2, dtype=torch.complex64), torch.ones(2)) == (
        "cuda_ops::f: argument 'x': expected dtype float32, got complex64"
    )


def test_device_is_checked_before_dtype():
    op = spec("f(Tensor x, Tensor y) -> Tensor", "(),()->()")
    with FakeTensorMode():
        cuda = torch.empty(2, device="cuda:0", dtype=torch.float64)
        assert refusal(op, torch.empty(2), cuda) == (
            "cuda_ops::f: argument 'y': expected a tensor on cpu like 'x', got one on cuda:0"
        )


def test_core_dims_are_checked():
    op = spec("mm(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
    assert refusal(op, torch.ones(3), torch.ones(3, 3)) == (
        "cuda_ops::mm: argument 'a': expected at least 2 dims (..., m, k), got shape [3]"
    )
    assert refusal(op, torch.ones(2, 3), torch.ones(5, 4, 2)) == (
        "cuda_ops::mm: argument 'b': expected dim 'k' of (..., k, n) to be 3, got shape [5, 4, 2]"
    )
    gray = spec("gray(Tensor image) -> Tensor", "(h,w,3)->(h,w)")
    assert refusal(gray, torch.ones(8, 8, 4)) == (
        "cuda_ops::gray: argument 'image': expected dim '3' of (..., h, w, 3) to be 3,"
        " got shape [8, 8, 4]"
    )


def test_loop_dims_must_broadcast():
    op = spec("f(Tensor x, Tensor y) -> Tensor", "(),()->()")
    assert refusal(op, torch.ones(2, 3), torch.ones(2, 4)) == (
        "cuda_ops::f: argument 'y': expected dims '...' of (...) to broadcast with [2, 3], "
        "got shape [2, 4]"
    )
    mm = spec("mm(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
    assert refusal(mm, torch.ones(2, 3, 3), torch.ones(5, 3, 3)) == (
        "cuda_ops::mm: argument 'b': expected dims '...' of (..., k, n) to broadcast with [2], "
        "got shape [5, 3, 3]"
    )


def test_an_output_dim_of_an_argument_that_is_none():
    op = spec("f(Tensor x, Tensor? y=None) -> Tensor", "(),(n)->(n)")
    assert refusal(op, torch.ones(2), None) == (
        "cuda_ops::f: output dim 'n' is a dim of an argument that is None"
    )


# --- outputs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([(2, 3)], [2, 3]),
        ([(2, 1), (3,)], [2, 3]),
        ([(1,), (0,)], [0]),
        ([(), (5, 1, 2)], [5, 1, 2]),
        ([(4, 1, 3), (2, 1)], [4, 2, 3]),
    ],
)
def test_broadcast(inputs, expected):
    op = spec("f(Tensor x, Tensor y, Tensor z) -> Tensor", "(),(),()->()")
    assert layout.broadcast(op, [torch.empty(shape) for shape in inputs]) == expected


def test_broadcast_leaves_core_dims_out():
    op = spec("mm(Tensor a, Tensor? c, Tensor b) -> Tensor", "(m,k),(m),(k,n)->(m,n)")
    assert layout.broadcast(op, [torch.empty(5, 1, 2, 3), None, torch.empty(4, 3, 2)]) == [5, 4]


@pytest.mark.parametrize(
    ("x", "strides"),
    [
        (torch.ones(2, 3), (3, 1)),
        (torch.ones(2, 3).t(), (1, 3)),
        (torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.ones(4, 6)[:, ::2], (3, 1)),
        (torch.ones(1, 3).expand(2, 3), (3, 1)),
        (torch.ones(9, 4)[::9], (36, 1)),
        (torch.ones(0, 3), (3, 1)),
    ],
)
def test_an_elementwise_output_keeps_a_dense_layout(x, strides):
    op = spec("f(Tensor x, Tensor y) -> Tensor", "(),()->()")
    (out,) = layout.empty_outputs(op, op.signature, (x, x))
    assert (out.shape, out.stride(), out.dtype) == (x.shape, strides, x.dtype)


def test_two_layouts_or_a_core_dim_make_the_output_contiguous():
    op = spec("f(Tensor x, Tensor y) -> Tensor", "(),()->()")
    (out,) = layout.empty_outputs(op, op.signature, (torch.ones(3, 3), torch.ones(3, 3).t()))
    assert out.stride() == (3, 1)
    rows = spec("rows(Tensor x) -> (Tensor, Tensor)", "(n)->(n),()")
    outputs = layout.empty_outputs(rows, rows.signature, (torch.ones(4, 5).t(),))
    assert [(tuple(o.shape), o.stride()) for o in outputs] == [((5, 4), (4, 1)), ((5,), (1,))]


def test_fake_skips_an_optional_tensor_and_fills_defaults():
    op = spec("f(Tensor x, Tensor? y=None, float alpha=2.0) -> Tensor", "(),()->()")
    fake = rules.cuda_ops_fake(op)
    assert fake(torch.ones(2, 3)).shape == (2, 3)
    assert fake(torch.ones(3), y=torch.ones(2, 1)).shape == (2, 3)


def test_nothing_is_derived_where_names_and_dims_say_nothing():
    composite = spec("f(Tensor x) -> Tensor", "()->()", keys=("CompositeImplicitAutograd",))
    bare = spec("f(Tensor x) -> Tensor", "")
    assert rules.cuda_ops_fake(composite) is None
    assert gradient.cuda_ops_autograd(composite) is None
    assert rules.cuda_ops_fake(bare) is None
    assert batching.cuda_ops_vmap(bare) is None
    assert rules.cuda_ops_sharding(bare) is None
    for hook in (testing_derived.cuda_ops_samples, benchmarking_derived.cuda_ops_benchmarks):
        assert hook(bare) is None


# --- gradient --------------------------------------------------------------------


def test_gradients_are_summed_where_inputs_broadcast(scaled_product, product):
    x, y = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 1), (2, 1, 3)))
    assert torch.autograd.gradcheck(scaled_product.overload, (x, y, 0.5))
    a, b = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 1, 3, 4), (5, 4, 2))
    )
    assert torch.autograd.gradcheck(product.overload, (a, b))
    compiled = torch.compile(product.overload, backend="aot_eager", fullgraph=True, dynamic=True)
    expected = torch.autograd.grad(product.overload(a, b).sum(), (a, b))
    torch.testing.assert_close(torch.autograd.grad(compiled(a, b).sum(), (a, b)), expected)


def test_an_input_that_needs_no_gradient_gets_none(scaled_product):
    formula = gradient.cuda_ops_autograd(scaled_product)
    x, y = torch.ones(2), torch.ones(2)
    ctx = SimpleNamespace(needs_input_grad=(False, True, False), saved_tensors=(x, y))
    ctx.save_for_backward = lambda *tensors: None
    formula.setup_context(ctx, (x, y, 3.0), x)
    assert [g if g is None else g.tolist() for g in formula.backward(ctx, torch.ones(2))] == [
        None,
        [3.0, 3.0],
        None,
    ]


def test_two_outputs_one_of_them_unused():
    op = spec("derive_two(Tensor x) -> (Tensor up, Tensor down)", "()->(),()")
    backward = spec(
        "derive_two_backward(Tensor grad_up, Tensor grad_down, Tensor down) -> Tensor",
        "(),(),()->()",
    )
    pair(op, backward)
    register(backward, lambda up, down, out: 2 * up + 3 * down + 0 * out)
    register(op, lambda x: (2 * x, 3 * x))
    x = torch.ones(3, requires_grad=True)
    up, _ = op.overload(x)
    up.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_no_formula_raises_when_a_gradient_is_asked_for(scaled_product):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        scaled_product.siblings["derive_mul_backward"].overload(x, x, x, 1.0)[0].sum().backward()
    assert str(caught.value) == (
        "cuda_ops::derive_mul_backward has no gradient: "
        "add derive_mul_backward_backward(...) to pair.cpp"
    )


def test_a_gradient_that_the_formula_leaves_out_compiles_until_it_is_asked_for():
    backward = spec("derive_part_backward(Tensor grad_out, Tensor y) -> Tensor grad_x", "(),()->()")
    op = pair(spec("derive_part(Tensor x, Tensor y) -> Tensor", "(),()->()"), backward)
    register(backward, torch.mul)
    register(op, torch.mul)
    compiled = torch.compile(op.overload, backend="aot_eager", fullgraph=True)
    x, y = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    (grad,) = torch.autograd.grad(compiled(x, y.detach()).sum(), x)
    torch.testing.assert_close(grad, y.detach())
    out = compiled(x, y)
    torch.testing.assert_close(out, x * y)
    with pytest.raises(RuntimeError, match="derive_part has no gradient for 'y': return grad_y"):
        out.sum().backward()


# --- autocast, batching, sharding, samples, timing ---------------------------------


def test_tensors_of_one_floating_dtype_are_promoted_under_autocast():
    two = "derive_autocast(Tensor x, Tensor? y) -> Tensor"
    assert rules.cuda_ops_autocast(spec(two, "(),()->()")) == "promote"
    for left_alone in (
        spec("derive_autocast(Tensor x) -> Tensor", "()->()"),
        spec(two, "(),()->()", dtypes=()),  # the binding's business
        spec(two, "(),()->()", dtypes=(torch.float16, torch.bfloat16)),  # float32 is none of them
        spec(two, "(),()->()", keys=("CompositeImplicitAutograd",)),
    ):
        assert rules.cuda_ops_autocast(left_alone) is None


@pytest.mark.parametrize("in_dims", [(0, None), (None, -1), (1, 0), (-1, -1)])
def test_vmap_aligns_loop_dims(product, in_dims):
    inner = ((2, 3, 4), (4, 5))
    args = []
    for dim, shape in zip(in_dims, inner, strict=True):
        batched = torch.randn(6, *shape)
        args.append(batched[0] if dim is None else batched.movedim(0, dim))
    actual = torch.vmap(product.overload, in_dims=in_dims)(*args)
    expected = torch.vmap(torch.matmul, in_dims=in_dims)(*args)
    torch.testing.assert_close(actual, expected)


def test_loop_dims_shard_and_core_dims_replicate():
    from torch.distributed.tensor import Replicate, Shard

    op = spec("mm(Tensor a, Tensor b, float alpha=1.0) -> Tensor", "(m,k),(k,n)->(m,n)")
    rule = rules.cuda_ops_sharding(op)
    a, b = SimpleNamespace(shape=(4, 1, 8, 8)), SimpleNamespace(shape=(2, 8, 8))
    assert rule(a, b, 2.0) == [
        ([Replicate()], [Replicate(), Replicate(), None]),
        ([Shard(0)], [Shard(0), Replicate(), None]),
        ([Shard(1)], [Replicate(), Shard(0), None]),
    ]


def test_samples_fit_the_signature_and_print_what_makes_them():
    op = spec("mm(Tensor a, Tensor b, int k=1, bool flag=True) -> Tensor", "(m,k),(k,n)->(m,n)")
    layouts, scope = set(), vars(samples) | {"torch": torch}

    @settings(max_examples=250, derandomize=True, database=None, deadline=None)
    @given(samples.strategy(op))
    def check(sample):
        args = sample.make("cpu")
        assert eval(repr(sample), scope) == sample
        assert "\n" not in repr(sample)
        assert max(arg.numel() for arg in args[:2]) <= samples.MAX_NUMEL
        for arg, made in zip(sample.tensors, args[:2], strict=True):
            assert (tuple(made.shape), made.dtype) == (arg.shape, arg.dtype)
            layouts.add(arg.layout)
        layout.empty_outputs(op, op.signature, args)
        again = sample.make("cpu")
        assert all(
            torch.equal(x.nan_to_num(), y.nan_to_num())
            for x, y in zip(args[:2], again[:2], strict=True)
        )

    check()
    assert layouts == set(samples.LAYOUTS)


@pytest.mark.parametrize(
    ("layout", "strides", "offset"),
    [
        ("contiguous", (60, 20, 5, 1), 0),
        ("transposed", (60, 20, 1, 4), 0),
        ("sliced", (96, 32, 8, 1), 1),
        ("stepped", (120, 40, 10, 2), 0),
        ("expanded", (0, 20, 5, 1), 0),
        ("channels_last", (60, 1, 15, 3), 0),
        ("offset", (60, 20, 5, 1), 3),
    ],
)
def test_layouts(layout, strides, offset):
    (made,) = Sample((TensorArg((2, 3, 4, 5), torch.bfloat16, layout),)).make()
    assert (made.shape, made.stride(), made.storage_offset()) == ((2, 3, 4, 5), strides, offset)


@pytest.mark.parametrize("dtype", [*FLOATING, torch.uint8, torch.int64, torch.bool, torch.uint16])
@pytest.mark.parametrize("values", VALUES)
def test_every_dtype_has_every_value_mode(dtype, values):
    (made,) = Sample((TensorArg((64,), dtype),), values, seed=1).make()
    assert made.dtype == dtype
    if values == "special" and dtype.is_floating_point:
        assert made.isnan().any()
        assert made.isinf().any()
        assert (made == 0).any()


def test_benchmarks_count_bytes_in_and_out():
    mm = spec("mm(Tensor a, Tensor b) -> Tensor", "(m,k),(k,n)->(m,n)")
    assert [(c.label, c.bytes) for c in benchmarking_derived.cuda_ops_benchmarks(mm)] == [
        ("k=m=n=256 float32", 3 * 256**2 * 4),
        ("k=m=n=1024 float32", 3 * 1024**2 * 4),
        ("k=m=n=256 bfloat16", 3 * 256**2 * 2),
        ("k=m=n=1024 bfloat16", 3 * 1024**2 * 2),
    ]
    scale = spec("f(Tensor x, float alpha) -> Tensor", "()->()")
    cases = benchmarking_derived.cuda_ops_benchmarks(scale)
    sizes = [2**10, 2**15, 2**20, 2**24, 2**28, 2**30]
    assert [case.bytes for case in cases] == [
        *(8 * n for n in sizes),
        *(4 * n for n in sizes),
        2**26,
    ]
    assert all(case.reason for case in cases)
    assert (cases[-1].label, cases[-1].dtype) == ("16M float16", torch.float16)
    x, alpha = cases[0].make_inputs(torch.device("cpu"))
    assert (x.shape, x.dtype, alpha) == ((1024,), torch.float32, 0.5)
    named = spec("f(Tensor x, *, float alpha, float beta=1.0) -> Tensor", "()->()")
    case = benchmarking_derived.cuda_ops_benchmarks(named)[0]
    assert (
        case.keywords == {"alpha": 0.5, "beta": 1.0}
        and len(case.make_inputs(torch.device("cpu"))) == 1
    )
    rows = benchmarking_derived.cuda_ops_benchmarks(spec("h(Tensor x) -> Tensor", "(2d)->(d)"))
    assert (rows[1].label, rows[1].bytes) == ("4096x1024 float32", 4096 * 3 * 1024 * 4)
    integers = spec("g(Tensor x) -> Tensor", "()->()", dtypes=(torch.uint8,))
    (x,) = benchmarking_derived.cuda_ops_benchmarks(integers)[2].make_inputs(torch.device("cpu"))
    assert x.dtype == torch.uint8 and x.max() > 250 and x.min() < 5


# --- the quick check ----------------------------------------------------------------


def failures(op, **answers):
    report = check_op(subject_of(op, Plugins(**answers)), devices=("cpu",), isolate=False)
    return [entry.name for entry in report.failures], report


@pytest.mark.slow
def test_the_check_passes_good_operators(scaled_product, product):
    for op in (scaled_product, product):
        failed, report = failures(op, cuda_ops_sharding=None)  # not registered with DTensor
        assert not failed, str(report)
        reference = Plugins(cuda_ops_reference=lambda *args, op=op: op.overload(*args))
        assert quick_error(op, reference, "cpu") < 1e-5


@pytest.mark.parametrize(("name", "default"), [("derive_named", ""), ("derive_usual", "=2.0")])
@pytest.mark.slow
def test_the_check_passes_keyword_only_arguments_by_name(name, default):
    op = spec(f"{name}(Tensor x, *, float s{default}) -> Tensor", "()->()")
    backward = spec(f"{name}_backward(Tensor grad_out, float s) -> Tensor grad_x", "()->()")
    pair(op, backward)
    register(backward, lambda grad, s: grad * s)
    register(op, lambda x, *, s=2.0: x * s)
    failed, report = failures(op, cuda_ops_sharding=None)  # not registered with DTensor
    assert not failed, str(report)
    reference = Plugins(cuda_ops_reference=lambda x, *, s=2.0: x * s)
    assert quick_error(op, reference, "cpu") < 1e-5


@pytest.mark.slow
def test_the_check_says_what_it_did_not_run(product):
    subject = subject_of(product, Plugins())
    report = check_op(subject, devices=["cpu"], isolate=False)
    skipped = {entry.name: entry.detail for entry in report.entries if entry.passed is None}
    assert skipped["abi[any]"] == "not built from a pair"
    assert "not run abi[any]: not built from a pair" in str(report)
    assert f"{len(skipped)} not run" in str(report)


def test_an_operator_that_nothing_compares_fails(product):
    failed, report = failures(product, cuda_ops_reference=None)
    assert failed == ["compared[any]"]
    assert "nothing compares this operator; no reference: implement cuda_ops_ref" in str(report)
    assert quick_error(product, Plugins(cuda_ops_reference=None), "cpu") == (
        "no reference: implement cuda_ops_reference"
    )
    assert quick_error(product, Plugins(cuda_ops_samples=None), "cpu") == (
        "no samples: give a signature line or implement cuda_ops_samples"
    )
    assert quick_error(product, Plugins(), "cuda:7") in (
        "no CUDA device",
        "no CUDA kernel in this build",
    )
    # The product is its own reference in float64, which shows no wrong formula.
    assert quick_error(product, Plugins(), "cpu") == "no reference"
    checks = [by_name("reference")]
    (entry,) = check_op(
        subject_of(product, Plugins()), checks=checks, devices=["cpu"], isolate=False
    ).entries
    assert str(entry).endswith(" samples, the reference is this very kernel, in its widest dtype")


def test_the_quick_comparison_leaves_out_what_both_refuse():
    def halved(x):
        if x.numel() < 3:
            raise RuntimeError("cuda_ops::derive_halved: argument 'x': expected 3 elements")
        return x / 2

    op = spec("derive_halved(Tensor x) -> Tensor", "()->()")
    register(op, halved)
    shapes = st.integers(1, 9).map(lambda size: Sample((TensorArg((size,)),)))
    answers = {"cuda_ops_samples": shapes, "cuda_ops_reference": halved}
    assert quick_error(op, Plugins(**answers), "cpu") == 0
    with pytest.raises(RuntimeError, match="expected 3 elements"):
        quick_error(op, Plugins(**answers | {"cuda_ops_reference": lambda x: x / 2}), "cpu")
    refused = answers | {"cuda_ops_samples": st.just(Sample((TensorArg((2,)),)))}
    sample = Sample((TensorArg((2,)),))
    assert quick_error(op, Plugins(**refused), "cpu") == (
        f"all refused: cuda_ops::derive_halved: argument 'x': expected 3 elements, for {sample}"
    )


def test_a_wrong_result_is_reported_with_its_sample(product):
    failed, report = failures(product, cuda_ops_reference=lambda a, b: a @ b + 1e-2)
    assert failed[0] == "empty[cpu]" and "reference[cpu]" in failed
    entry = next(entry for entry in report.failures if entry.check == "reference")
    assert "times the tolerance" in entry.detail
    assert "replay 'derive_mm::reference[cpu] Sample((TensorArg((" in entry.reproduce


@pytest.mark.slow
def test_a_wrong_fake_gradient_and_batching_rule_are_found():
    op = spec("derive_wrong(Tensor x) -> Tensor", "()->()")
    backward = spec("derive_wrong_backward(Tensor grad_out, Tensor x) -> Tensor", "(),()->()")
    pair(op, backward)
    register(backward, lambda grad, x: 3 * grad * x)
    wrong = Plugins(
        cuda_ops_fake=lambda x: torch.empty(x.shape, dtype=x.dtype),
        cuda_ops_vmap=lambda info, in_dims, x: (op.overload(x), 0),
    )
    register(op, lambda x: x * x, wrong)
    failed, report = failures(op)
    assert {"registration[cpu]", "gradcheck[cpu]", "vmap[cpu]"} <= set(failed), str(report)


def test_a_fake_that_raises_is_a_wrong_result():
    def raises(x):
        raise TypeError("bad fake")

    op = spec("derive_bad_fake(Tensor x) -> Tensor", "()->()")
    register(op, lambda x: 2 * x, Plugins(cuda_ops_fake=raises))
    answers = {"cuda_ops_reference": lambda x: 2 * x, "cuda_ops_fake": raises}
    with pytest.raises(ResultError, match="wrong on cpu: the fake raised TypeError: bad fake"):
        quick_error(op, Plugins(**answers), "cpu")


def test_sizes_that_depend_on_the_data_and_numbers_are_compared():
    def fake(x):
        return x.new_empty(torch.library.get_ctx().new_dynamic_size()), x.dim()

    def positive(x):
        return x[x > 0], x.dim()

    op = spec("derive_positive(Tensor x) -> (Tensor, int)", "")
    LIBRARY.define(op.schema)
    LIBRARY.impl(op.name, positive, "CPU")
    torch.library.register_fake(op.qualname, fake, lib=LIBRARY)
    shapes = st.integers(1, 9).map(lambda size: Sample((TensorArg((size,)),)))
    answers = {"cuda_ops_samples": shapes, "cuda_ops_reference": positive, "cuda_ops_fake": fake}
    assert quick_error(op, Plugins(**answers), "cpu") == 0


def test_all_refused_is_said_of_two_files_alone_too():
    def refuses(x):
        raise RuntimeError("cuda_ops::derive_refuses: argument 'x': expected another")

    op = spec("derive_refuses(Tensor x) -> Tensor", "()->()")
    register(op, refuses)
    why_not = quick_error(op, Plugins(), "cpu")
    assert isinstance(why_not, str)
    assert why_not.startswith("all refused: cuda_ops::derive_refuses: argument 'x': expected anoth")
    assert Sample.parse(why_not.partition(", for ")[2]).tensors
