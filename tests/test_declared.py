"""Schemas and signature lines are checked before anything is compiled."""

from __future__ import annotations

import pytest
from conftest import ScratchOp

from cuda_ops.compile_ops import compile_ops
from cuda_ops.dispatch.declared import check
from cuda_ops.errors import ManifestError

BINDING = """
#include "binding.h"
CUDA_OPS(library) {
  %s
}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r'library.op("f(Tensor x -> Tensor", "").cpu<f>();', "schema 'f.Tensor x -> Tensor' does"),
        (r'library.op("g(Tensor x) -> Tensor", "").cpu<g>();', "operator 'g' must be named 'f'"),
        (r'library.op("f(Tensor x, Scalar s) -> Tensor", "").cpu<f>();', "'s' is Scalar"),
        (r'library.op("f(Tensor x)" /* two */ " -> Tensor", "(n->(n)").cpu<f>();', "groups like"),
        (r'library.op("f(Tensor x) -> Tensor", "()->(k)").cpu<f>();', "dim 'k' is in no input"),
        (r'library.op("f(int k) -> Tensor", "").cpu<f>();', "or one of type Device"),
        ('library.op("f(Tensor x) -> Tensor", "");\n  library.op("f(Tensor x) -> Tensor", "");',
         "operator 'f' is defined twice"),
        (r'library.op("f(Tensor x, str m=\"a\") -> Tensor", "(),()->()").cpu<f>();',
         "has 2 tensor arguments, the schema has 1"),
    ],
)  # fmt: skip
def test_what_the_loader_would_refuse_is_refused(text: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        check("f", BINDING % text)


@pytest.mark.parametrize(
    "text",
    [
        r'library.op("f(Tensor x, str m=\"a\") -> Tensor", "()->()").cpu<f>();',
        '// library.op("g(Tensor x) -> Tensor", "");',
        '/* library.op("g(Tensor x) -> Tensor", ""); */',
        'library.op("f(int n) -> Tensor", "").doc("of // parts; made").composite<f>();',
        "const char* schema = SCHEMA; library.op(schema, line);",
        '\n#if NEVER\n  library.op("g(Tensor x) -> Tensor", "");\n#endif\n',
        'library.op("f(Tensor x) -> Tensor", "()->()").doc(R"(library.op("g(", "(n"))").cpu<f>();',
    ],
)
def test_nothing_else_is(text: str) -> None:
    check("f", BINDING % text)


def test_no_compiler_runs_for_what_is_refused(scratch_op: ScratchOp) -> None:
    text = f'library.op("{scratch_op.name}(Tensor x) -> Tensor", "(n)->(m)").cpu<nothing>();'
    scratch_op.binding.write_text(BINDING % text)  # nothing is declared: it would not compile
    (row,) = compile_ops([scratch_op.name])
    assert "output dim 'm' is in no input" in row.error and not row.built
