"""The signature line: what parses, how it prints, what is refused."""

from __future__ import annotations

import pytest

from cuda_ops.signature import Group, Signature, parse_signature


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("()->()", ((),), ((),)),
        ("(),()->()", ((), ()), ((),)),
        ("(m,k),(k,n)->(m,n)", (("m", "k"), ("k", "n")), (("m", "n"),)),
        ("(n)->(n),(n)", (("n",),), (("n",), ("n",))),
        ("(h,w,3)->(h,w)", (("h", "w", "3"),), (("h", "w"),)),
        ("()->(3)", ((),), (("3",),)),
        ("(2d),(d)->(2d)", (("2d",), ("d",)), (("2d",),)),
        ("(n),(n)->", (("n",), ("n",)), ()),
    ],
)
def test_parses_and_prints_as_written(text, inputs, outputs):
    signature = parse_signature(text)
    assert signature == Signature(tuple(map(Group, inputs)), tuple(map(Group, outputs)))
    assert str(signature) == text


def test_brackets_are_all_dims_that_there_are():
    signature = parse_signature("(n),[n],[]->(n),[2n]")
    assert signature.inputs == (Group(("n",)), Group(("n",), loops=False), Group((), loops=False))
    assert str(signature) == "(n),[n],[]->(n),[2n]"
    shapes = [group.shape((4, 5), {"n": 3}) for group in (*signature.inputs, *signature.outputs)]
    assert shapes == [(4, 5, 3), (3,), (), (4, 5, 3), (6,)]


def test_spaces_mean_nothing():
    assert parse_signature(" ( m, k ) ,(k,n) -> (m,n) ") == parse_signature("(m,k),(k,n)->(m,n)")


@pytest.mark.parametrize(
    ("text", "elementwise"),
    [
        ("()->()", True),
        ("(),()->(),()", True),
        ("(n)->()", False),
        ("()->(3)", False),
        ("(),[]->()", False),
        ("()->[]", False),
    ],
)
def test_elementwise_means_no_core_dim_anywhere(text, elementwise):
    assert parse_signature(text).is_elementwise is elementwise


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(m,k)", "expected inputs->outputs with exactly one '->'"),
        ("()->()->()", "expected inputs->outputs with exactly one '->'"),
        ("m,k->(m)", r"expected groups like \(m,k\),\(k,n\) or \[n\], got 'm,k'"),
        ("(m,[k])->(m)", "expected groups like"),
        ("(m],[k)->(m)", "expected groups like"),
        ("(m)(k)->(m)", "expected groups like"),
        ("->(m)", "output dim 'm' is in no input"),
        ("->", "expected groups like"),
        ("(m,)->(m)", "'' is not a dim name or a size"),
        ("(m-1)->(m)", "'m-1' is not a dim name or a size"),
        ("(m)->(n)", "output dim 'n' is in no input"),
    ],
)
def test_refuses_with_the_text_and_the_reason(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_signature(text)
    assert repr(text) in str(caught.value)
