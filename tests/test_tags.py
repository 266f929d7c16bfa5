"""What a binding says to torch's compilers, and ``torch.use_deterministic_algorithms``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp
from specs import spec

from cuda_ops.compile_ops import reload
from cuda_ops.dispatch.words import TAGS, words_of
from cuda_ops.errors import ManifestError
from cuda_ops.registry import registry
from cuda_ops.signature import parse_signature
from cuda_ops.testing import check_op
from cuda_ops.testing.checks import by_name
from cuda_ops.testing.subject import find

SOURCE = """
#pragma GCC optimize("O0")
#include "binding.h"
using namespace cuda_ops;
namespace {
Tensor twice(const Tensor& x) { return elementwise_cpu([](double v) { return 2 * v; }, x); }
Tensor thrice(const Tensor& x) { return elementwise_cpu([](double v) { return 3 * v; }, x); }
Tensor same(const Tensor& x) { return elementwise_cpu([](double v) { return v; }, x); }
}
CUDA_OPS(library) {
  library.op("OP(Tensor x) -> Tensor", "()->()").dtypes(kFloating)
      .tag("cudagraph_unsafe").tag("needs_fixed_stride_order").nondeterministic().cpu<twice>();
  library.op("OP_on_cuda(Tensor x) -> Tensor", "()->()").dtypes(kFloating)
      .nondeterministic("cuda").cpu<thrice>();
  library.op("OP_plain(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<same>();
}
"""


#: What a manifest has of an operator that says none of these words.
NOTHING = {
    **dict.fromkeys(("hidden", "no_gradient", "linear", "tags", "nondeterministic"), ()),
    "broadcast": False,
    "signature": "()->()",
}


@pytest.fixture(scope="module")
def scratch(scratch_root: Path) -> Iterator[ScratchOp]:
    scratch = ScratchOp("scratch_tags", scratch_root)
    with scratch.built(SOURCE.replace('"OP', f'"{scratch.name}')):
        yield scratch


@pytest.fixture
def deterministic() -> Iterator[Callable[..., None]]:
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def test_the_dispatcher_has_the_tags(scratch: ScratchOp) -> None:
    tags = getattr(torch.ops.cuda_ops, scratch.name).default.tags
    assert {torch.Tag.cudagraph_unsafe, torch.Tag.needs_fixed_stride_order} <= {*tags}
    assert torch.Tag.pt2_compliant_tag in tags
    plain = getattr(torch.ops.cuda_ops, f"{scratch.name}_plain").default.tags
    assert torch.Tag.cudagraph_unsafe not in plain


@pytest.mark.parametrize("by", ["function", "dispatcher"])
def test_determinism_is_torch_s_own(
    scratch: ScratchOp, by: str, deterministic: Callable[..., None]
) -> None:
    name, x = scratch.name, torch.randn(3, requires_grad=True)

    def called(op: str) -> Any:
        return registry().public(op) if by == "function" else getattr(torch.ops.cuda_ops, op)

    text = rf"^cuda_ops::{name} does not have a deterministic implementation, but you set"
    called(name)(x)
    deterministic(True)
    modes: tuple[Any, ...] = (torch.enable_grad, torch.no_grad, torch.inference_mode)
    for mode in modes:
        with mode():
            with pytest.raises(RuntimeError, match=text):
                called(name)(x)
            called(f"{name}_plain")(x)
            assert torch.equal(called(f"{name}_on_cuda")(x), 3 * x)
    with pytest.raises(RuntimeError, match=text):
        torch.vmap(called(name))(x.detach())
    deterministic(True, warn_only=True)
    with pytest.warns(UserWarning, match=text):
        assert torch.equal(called(name)(x), 2 * x)
    deterministic(False)
    compiled = torch.compile(called(name), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), 2 * x)
    deterministic(True)
    with pytest.raises(RuntimeError, match=text):
        compiled(x)


def test_the_kit_does_not_expect_the_same_bits(scratch: ScratchOp) -> None:
    repeats = by_name("repeats")
    (entry,) = check_op(scratch.name, checks=[repeats], devices=["cpu"], isolate=False).entries
    assert entry.passed is None and "no such claim: it is .nondeterministic()" in entry.detail
    assert find(f"{scratch.name}_plain").claims.deterministic


def test_a_reload_changes_tags(scratch: ScratchOp) -> None:
    name = f"{scratch.name}_plain"
    function, x = registry().public(name), torch.randn(3)
    text = scratch.binding.read_text()
    scratch.binding.write_text(
        text.replace(f'{name}(Tensor x) -> Tensor", "()->()")',
                     f'{name}(Tensor x) -> Tensor", "()->()").tag("pointwise").nondeterministic()')
    )  # fmt: skip
    (row,) = reload(scratch.name)
    assert not row.error, row.error
    assert torch.Tag.pointwise in getattr(torch.ops.cuda_ops, name).default.tags
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic implementation"):
            function(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(function(x), x)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"tags": ["fast"]}, r"\.tag: expected one of cudagraph_unsafe, .*, got 'fast'"),
        ({"tags": ["core"]}, r"\.tag: expected one of .*, got 'core'"),
        ({"nondeterministic": ["xpu"]}, r"\.nondeterministic: expected \"cpu\", \"cuda\" or"),
    ],
)  # fmt: skip
def test_unknown_words_are_refused_with_a_list(words: dict[str, Any], text: str) -> None:
    entry = {**NOTHING, **words}
    parsed, line = spec("f(Tensor x) -> Tensor", "()->()").parsed, parse_signature("()->()")
    with pytest.raises(ManifestError, match=f"cuda_ops::f: {text}"):
        words_of("cuda_ops::f", entry, parsed, line, False)
    with pytest.raises(ManifestError):
        words_of("cuda_ops::f", {**entry, "tags": ["pointwise"]}, parsed, line, True)


def test_tags_are_torch_s() -> None:
    old = {"cudagraph_unsafe", "needs_fixed_stride_order", "nondeterministic_seeded", "pointwise"}
    assert old <= {tag for tag in TAGS if hasattr(torch.Tag, tag)}
    parsed, line = spec("f(Tensor x) -> Tensor", "()->()").parsed, parse_signature("()->()")
    words = words_of("cuda_ops::f", {**NOTHING, "tags": [*TAGS, "pointwise"]}, parsed, line, False)
    assert words["tags"] == tuple(tag for tag in TAGS if hasattr(torch.Tag, tag))
