"""How ``<op>_backward`` is read as a gradient, and which pairs of operators are refused."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from specs import pair, spec

from cuda_ops.derive import gradient
from cuda_ops.derive.no_gradient import NoGradient
from cuda_ops.errors import ManifestError


def test_a_gradient_that_the_formula_leaves_out_is_not_silently_zero():
    op = spec("f(Tensor x, Tensor y) -> Tensor", "(),()->()")
    pair(op, spec("f_backward(Tensor grad_out) -> Tensor grad_x", "()->()"))
    ctx = SimpleNamespace(needs_input_grad=(True, True), save_for_backward=lambda *tensors: None)
    formula = gradient.cuda_ops_autograd(op)
    formula.setup_context(ctx, (torch.ones(2), torch.ones(2)), torch.ones(2))
    with pytest.raises(RuntimeError, match="cuda_ops::f has no gradient for 'y': return grad_y"):
        formula.backward(ctx, torch.ones(2))


def test_a_gradient_takes_keyword_only_arguments_by_name(monkeypatch):
    op = spec("f(Tensor x, *, float c=2.0) -> Tensor", "()->()")
    backward = spec("f_backward(Tensor grad_out, *, float c) -> Tensor grad_x", "()->()")
    pair(op, backward)
    monkeypatch.setattr(type(backward), "function", staticmethod(lambda grad, *, c: grad * c))
    ctx = SimpleNamespace(needs_input_grad=(True,), save_for_backward=lambda *tensors: None)
    formula = gradient.cuda_ops_autograd(op)
    formula.setup_context(ctx, (torch.ones(2),), torch.ones(2), {"c": 3.0})
    ctx.saved_tensors = ()
    (found,) = formula.backward(ctx, torch.ones(2))
    assert torch.equal(found, torch.full((2,), 3.0))


def test_what_another_formula_kept_is_refused():
    """As a reload between a forward and its backward leaves it."""
    formulas = []
    for arguments in ("Tensor grad_out", "Tensor grad_out, Tensor x"):
        op = spec("f(Tensor x) -> Tensor", "()->()")
        pair(op, spec(f"f_backward({arguments}) -> Tensor grad_x", ""))
        formulas.append(gradient.cuda_ops_autograd(op))
    ctx = SimpleNamespace(needs_input_grad=(True,), save_for_backward=lambda *tensors: None)
    formulas[0].setup_context(ctx, (torch.ones(2),), torch.ones(2))
    text = "^cuda_ops::f_backward takes other arguments since a reload"
    with pytest.raises(RuntimeError, match=text):
        formulas[1].backward(ctx, torch.ones(2))


def test_integer_operators_have_no_gradient():
    op = spec("f(Tensor x) -> Tensor", "()->()", dtypes=(torch.uint8,))
    assert gradient.cuda_ops_autograd(op) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": "f(Tensor[] xs) -> Tensor"}, r"got 'f\(Tensor\[\] xs\) -> Tensor'; for others"),
        ({"dtypes": (torch.uint8,)}, r"got 'f\(Tensor x\) -> Tensor'; for others define"),
        ({"keys": ("CompositeImplicitAutograd",)}, "got a composed one, whose gradient follows"),
    ],
)
def test_a_gradient_that_nothing_would_call_is_refused(changes, message):
    op = spec(**{"schema": "f(Tensor x) -> Tensor", "signature": ""} | changes)
    pair(op, spec("f_backward(Tensor grad_out) -> Tensor grad_x", ""))
    with pytest.raises(ManifestError, match=f"^cuda_ops::f_backward: expected f to .*, {message}"):
        gradient.cuda_ops_autograd(op)


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        (
            "f(Tensor x) -> Tensor",
            "f_backward(Tensor grad_out, Tensor w) -> Tensor grad_x",
            (
                "cuda_ops::f_backward: argument 'w' is unknown; allowed: "
                "inputs 'x', outputs 'out', gradients 'grad_out'. "
                "Rename it, or name the returns of f."
            ),
        ),
        (
            "f(Tensor x) -> Tensor",
            "f_backward(Tensor grad_out) -> Tensor grad_y",
            (
                "cuda_ops::f_backward: return 'grad_y' is unknown; "
                "name each return after the input it belongs to: 'grad_x'"
            ),
        ),
        (
            "f(Tensor x, Tensor y) -> Tensor",
            "f_backward(Tensor grad_out) -> Tensor",
            (
                "cuda_ops::f_backward: an unnamed return; "
                "name each return after the input it belongs to: 'grad_x', 'grad_y'"
            ),
        ),
        (
            "f(Tensor grad_out) -> Tensor",
            "f_backward(Tensor grad_out) -> Tensor",
            (
                "cuda_ops::f_backward: argument 'grad_out' means two things; allowed: "
                "inputs 'grad_out', outputs 'out', gradients 'grad_out'. "
                "Rename it, or name the returns of f."
            ),
        ),
    ],
)
def test_names_that_say_nothing_are_refused(forward, backward, message):
    op = pair(spec(forward, ""), spec(backward, ""))
    with pytest.raises(ManifestError) as caught:
        gradient.cuda_ops_autograd(op)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("line", "backward", "message"),
    [
        ("(n),[n]->(n)", "(n),(n),(n)->(n),(n)", r"argument 'y': expected \[n\] .* got \(n\) in '"),
        ("(n),[m]->(n)", "(n),(n),[n]->(n),[n]", r"argument 'y': expected \[m\] .* got \[n\] in '"),
        ("(n),[n]->(n)", "(k),(n),[n]->(n),[n]", r"argument 'x': expected \(n\) .* got \(n\) in '"),
        ("(n),(n)->()", "(n),(n),(n)->(n),(n)", r"argument 'grad_out': expected \(\) .* got \(n\)"),
        ("(2n),(n)->(n)", "(n),(n),(n)->(n),(n)", r"argument 'x': expected \(2n\) .* got \(n\) in"),
        (
            "(n),(n)->(n)",
            "(n),(n),(n)->(n),[n]",
            r"return 'grad_y': expected \(n\) .* got \[n\] in",
        ),
    ],
)
def test_two_lines_that_disagree_on_a_tensor_are_refused(line, backward, message):
    returns = "(Tensor grad_x, Tensor grad_y)"
    op = pair(
        spec("derive_two(Tensor x, Tensor y) -> Tensor", line),
        spec(f"derive_two_backward(Tensor grad_out, Tensor x, Tensor y) -> {returns}", backward),
    )
    with pytest.raises(ManifestError, match=f"cuda_ops::derive_two_backward: {message}"):
        gradient.cuda_ops_autograd(op)


def test_a_gradient_of_each_row_serves_what_is_in_brackets():
    op = pair(
        spec("derive_two(Tensor x, Tensor y) -> Tensor", "(n),[n]->(n)"),
        spec("derive_two_backward(Tensor grad_out, Tensor x) -> Tensor grad_y", "(a),(a)->(a)"),
    )
    assert gradient.cuda_ops_autograd(op).inputs == (1,)


def test_a_gradient_without_a_kernel_is_refused():
    line = ("derive_one_backward(Tensor grad_out) -> Tensor grad_x", "()->()")
    op = pair(
        spec("derive_one(Tensor x) -> Tensor", "()->()"),
        spec(*line, keys=("CUDA",)),
    )
    message = r"_backward: expected \.cpu<f>\(\), which derive_one has, got none"
    with pytest.raises(ManifestError, match=message):
        gradient.cuda_ops_autograd(op)
    composed = pair(op, spec(*line, keys=("CompositeImplicitAutograd",)))
    assert gradient.cuda_ops_autograd(composed) is not None


def test_a_misspelt_gradient_is_refused():
    takes_and_gives = "(Tensor grad_out) -> Tensor grad_x"
    for name, rest, message in (
        ("backwards", takes_and_gives, "got 'derive_one_backwards'"),
        ("bakward", takes_and_gives, "got 'derive_one_bakward'"),
        ("bwd", takes_and_gives, "_bwd: returns 'grad_x': expected the name 'derive_one_backward'"),
        ("grad", takes_and_gives, "_grad: returns 'grad_x': expected the name"),
        ("forward", "(Tensor y) -> Tensor out", None),
        ("norm", "(Tensor x) -> Tensor grad_x", None),
        ("scaled", "(Tensor grad_scale) -> Tensor", None),
    ):
        op = pair(
            spec("derive_one(Tensor x) -> Tensor", "()->()"),
            spec(f"derive_one_{name}{rest}", "()->()"),
        )
        with pytest.raises(ManifestError, match=message) if message else nullcontext():
            gradient.cuda_ops_autograd(op)
    backward = spec("ab_backward(Tensor grad_out) -> Tensor grad_x", "()->()")
    pair(spec("ab(Tensor x) -> Tensor", "()->()"), backward)
    assert isinstance(gradient.cuda_ops_autograd(backward).backward, NoGradient)


def test_outputs_that_are_no_tensors_are_passed_by() -> None:
    op = spec("f(Tensor x) -> (Tensor y, int n, Tensor[] zs)", "")
    backward = spec("f_backward(Tensor grad_y) -> Tensor grad_x", "")
    pair(op, backward)
    formula = gradient.cuda_ops_autograd(op)
    context = SimpleNamespace(
        save_for_backward=lambda *tensors: None,
        mark_non_differentiable=lambda *tensors: None,
        set_materialize_grads=lambda whether: None,
        needs_input_grad=(True,),
        saved_tensors=(),
    )
    x = torch.ones(3)
    formula.setup_context(context, (x,), (x, 3, [x, x]))
    with pytest.raises(RuntimeError, match="has no gradient through 'zs'"):
        formula.backward(context, None, None, [None, x])
    assert formula.backward(context, None, None, [None, None]) == (None,)


def test_a_gradient_that_takes_none_is_refused() -> None:
    op = spec("f(Tensor x) -> Tensor y", "()->()")
    pair(op, spec("f_backward(Tensor x) -> Tensor grad_x", "()->()"))
    with pytest.raises(ManifestError, match="f_backward: expected an argument 'grad_y', got none"):
        gradient.cuda_ops_autograd(op)
