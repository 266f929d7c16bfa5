"""What a library's manifest may say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScratchOp, needs_nvcc

from cuda_ops.compile_ops import compile_ops
from cuda_ops.dev.scaffold import new_pair
from cuda_ops.dispatch import library
from cuda_ops.dispatch.library import open_library, schema_type
from cuda_ops.errors import CudaOpsError, ManifestError
from cuda_ops.registry import registry
from cuda_ops.spec import OpSpec, Range


def entry(schema: str, signature: str = "", **changes: Any) -> dict[str, Any]:
    """One operator as a manifest lists it; its C++ types are the schema's unless changed."""
    parsed = torch._C.parse_schema(f"cuda_ops::{schema}") if "->" in schema else None
    kernel = {
        "key": "CPU",
        "arguments": [schema_type(a) for a in parsed.arguments] if parsed else [],
        "returns": [schema_type(value) for value in parsed.returns] if parsed else [],
        "call": 1,
        "trampoline": 2,
        "slot": 3,
    }
    kernel.update({key: changes.pop(key) for key in ("arguments", "returns") if key in changes})
    return {
        "schema": schema, "signature": signature, "dtypes": ["float32"], "dtypes_of": [],
        "choices": [], "ranges": [], "float_ranges": [], "limits": [], "belows": [],
        "results": [], "random": "", "saved": [], "hidden": [], "no_gradient": [], "linear": [],
        "tags": [], "nondeterministic": [], "broadcast": False, "doc": "", "has_cuda": False,
        "calls": [], "kernels": [kernel], **changes,
    }  # fmt: skip


def validated(entry: dict[str, Any], siblings: dict[str, OpSpec] | None = None) -> OpSpec:
    return library.validated(entry, "planned", {} if siblings is None else siblings)


# --- the manifest, entry by entry --------------------------------------------------


def test_an_entry_becomes_a_spec() -> None:
    text = (
        "planned(Tensor a, Tensor? b, int[] sizes, float? eps=None, bool flag=False) "
        "-> (Tensor x, Tensor y)"
    )
    op = validated(entry(text, "(m,k),(k)->(m),()", doc="Planned.", has_cuda=True))
    assert (op.name, op.stem, op.qualname) == ("planned", "planned", "cuda_ops::planned")
    assert op.argument_names == ("a", "b", "sizes", "eps", "flag")
    assert op.tensor_positions == (0, 1)
    assert op.output_names == ("x", "y")
    assert [schema_type(a) for a in op.parsed.arguments] == [
        "Tensor", "Tensor?", "int[]", "float?", "bool",
    ]  # fmt: skip
    assert op.dtypes == (torch.float32,) and op.keys == ("CPU",) and op.has_cuda
    assert str(op.signature) == "(m,k),(k)->(m),()" and op.doc == "Planned."


@pytest.mark.parametrize(
    ("schema", "cpp", "message"),
    [
        ("int n", "float", r"'n' is int in the schema \(int64_t in C\+\+\), .*CPU has double"),
        ("float a", "int", r"'a' is float in the schema \(double in C\+\+\), .*has int64_t"),
        ("bool b", "int", r"'b' is bool .*has int64_t"),
        ("float? a", "float", r"'a' is float\? .*std::optional<double>.*has double"),
        ("int[] n", "int", r"'n' is int\[\] .*std::vector<int64_t>.*has int64_t"),
        ("Tensor y", "Tensor?", r"'y' is Tensor .*has std::optional<Tensor>"),
    ],
)
def test_an_argument_type_that_differs_is_named(schema: str, cpp: str, message: str) -> None:
    listed = entry(f"planned(Tensor x, {schema}) -> Tensor", arguments=["Tensor", cpp])
    with pytest.raises(ManifestError, match=f"cuda_ops::planned: argument {message}; change one"):
        validated(listed)


def test_a_dtype_argument_is_an_int_in_the_schema() -> None:
    assert validated(
        entry("planned(Tensor x, ScalarType d) -> Tensor", arguments=["Tensor", "ScalarType"])
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": ["Tensor"]}, "the schema has 2 arguments, the C.. function for CPU has 1"),
        ({"returns": ["Tensor"] * 2}, "the schema has 1 returns, the C.. function for CPU has 2"),
        ({"returns": ["int"]}, "return 0 is Tensor in the schema .*has int64_t"),
        ({"kernels": []}, r"no kernel; add \.cpu<f>\(\)"),
    ],
)
def test_a_function_of_another_form_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=f"cuda_ops::planned: {message}"):
        validated(entry("planned(Tensor x, float a) -> Tensor", **changes))


@pytest.mark.parametrize(
    "schema", ["planned(Tensor x", "planned", "planned(Tenser x) -> Tensor", ""]
)
def test_a_schema_that_does_not_parse_is_quoted(schema: str) -> None:
    listed = {**entry("planned(Tensor x) -> Tensor"), "schema": schema}
    with pytest.raises(ManifestError, match=r"planned.cpp: schema '.*' does not parse: \S"):
        validated(listed)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            "planned(Tensor(a!) x) -> Tensor(a!)",
            r"schema .*: expected returns that are new tensors, got one with \(a\); return nothing",
        ),
        ("planned(Tensor(a) x) -> Tensor", r"argument 'x': expected a type without \(a\), or \(a!"),
        ("planned(Tensor x, float lambda) -> Tensor", "argument 'lambda': .* one of its keywords"),
        ("planned(Tensor x, *, Tensor? y=None) -> Tensor", r"argument 'y': .* before the '\*'"),
        ("planned(Tensor _x) -> Tensor", "argument '_x': expected .* not start with an underscore"),
        ("planned(Tensor x, *, int keyset) -> Tensor", "argument 'keyset': expected another name"),
        ("planned(Tensor(a!) x, int mode) -> ()", "argument 'mode': expected another name"),
        ("planned(Tensor x) -> ()", r"schema .*: expected a return, .*, got '\(\)'; write '->"),
        ("planned.fast(Tensor x) -> Tensor", "schema .* dot, got overload 'fast'; write planned_f"),
        ("planned(Tensor x, ...) -> Tensor", "schema .*: expected every argument .*, got '...'"),
        ("planned(Tensor x) -> ...", "schema .*: expected every argument .*, got '...'"),
        ("planned(Tensor x, Tensor x) -> Tensor", "schema .* names that differ, got 'x' twice"),
        ("planned(Tensor x) -> (Tensor y, Tensor y)", "schema .* that differ, got 'y' twice"),
        ("planned(int n) -> Tensor", "schema .*: expected a tensor argument or .*, got none; wr"),
    ],
)
def test_a_schema_that_no_function_can_have_is_refused(schema: str, message: str) -> None:
    with pytest.raises(ManifestError, match=f"cuda_ops::planned: {message}"):
        validated(entry(schema))


def test_a_composed_operator_needs_no_tensor() -> None:
    listed = entry("planned(int n) -> Tensor")
    listed["kernels"][0]["key"] = "CompositeImplicitAutograd"
    assert validated(listed).is_composite


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ("(),()->()", "has 2 tensor arguments, the schema has 1"),
        ("()->(),()", "has 2 outputs, the schema has 1"),
        ("(m)->(n)", "output dim 'n' is in no input"),
        ("()", "exactly one '->'"),
        ("m->m", "expected groups like"),
    ],
)
def test_a_signature_that_contradicts_the_schema_is_refused(signature: str, message: str) -> None:
    with pytest.raises(ManifestError, match=rf"cuda_ops::planned: signature .*{message}"):
        validated(entry("planned(Tensor x, float a) -> Tensor", signature))


def test_numbers_need_no_group_in_the_signature() -> None:
    op = validated(entry("planned(float a, Tensor x, int n) -> Tensor", "(m)->()"))
    assert op.signature is not None and str(op.signature) == "(m)->()"


INDEXED = "planned(Tensor x, Tensor? index, int k, int? n=None) -> Tensor"


def test_dtypes_and_ranges_of_single_arguments() -> None:
    op = validated(
        entry(
            INDEXED,
            "(m),[m]->(k)",
            dtypes_of=[["index", ["int64", "int32"]]],
            ranges=[["k", 1, 16], ["m", 1, 512]],
            limits=[["k", "m"]],
        )
    )
    assert op.dtypes_of == {"index": (torch.int64, torch.int32)}
    assert op.sharing == ("x",) and op.allowed_dtypes("x") == (torch.float32,)
    assert op.ranges == {"k": Range(1, 16), "m": Range(1, 512)} and op.limits == {"k": "m"}
    assert op.signature is not None and op.signature.int_names == ("k",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtypes_of": [["k", ["int64"]]]},
            "'k': expected 'x' or 'index', which .dtypes may name, got 'k'",
        ),
        (
            {"dtypes_of": [["index", ["int64"]]] * 2},
            "'index': expected to be named once by .dtypes, got twice",
        ),
        (
            {"ranges": [["x", 1, 2]]},
            "'x': expected 'k' or 'n' or 'm', which .range or .at_least may name, got 'x'",
        ),
        (
            {"ranges": [["k", 1, 2]] * 2},
            "'k': expected to be named once by .range or .at_least, got twice",
        ),
        (
            {"float_ranges": [["k", 0.0, math.inf, True]]},
            "'k': expected nothing, which .range, .at_least or .above may name, got 'k'",
        ),
        ({"ranges": [["k", 2, 1]]}, "'k': expected the smaller number first in .range, got 2, 1"),
        (
            {"limits": [["q", "m"]]},
            "'q': expected 'k' or 'n' or 'm', which .at_most may name, got 'q'",
        ),
        (
            {"limits": [["0m", "m"]]},
            "'0m': expected 'k' or 'n' or 'm', which .at_most may name, got '0m'",
        ),
        (
            {"signature": "(k),()->(k)"},
            "'k': expected another name than an input's dim, whose size it does not say, got 'k'",
        ),
        ({"limits": [["k", "q"]]}, "'k': expected 'm', which .at_most may name, got 'q'"),
        (
            {"limits": [["k", "m"]], "signature": ""},
            "'k': expected nothing, which .at_most may name, got 'm'",
        ),
    ],
)
def test_a_name_that_is_none_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {"signature": "(m),[m]->(k)", **changes}
    with pytest.raises(ManifestError, match=f"^cuda_ops::planned: argument {re.escape(message)}$"):
        validated(entry(INDEXED, **given))


def test_a_dim_is_at_most_one_of_an_argument_before() -> None:
    line = {"signature": "(m,2p),[q]->(k)"}
    op = validated(entry(INDEXED, **line, limits=[["2q", "m"], ["p", "m"], ["k", "q"]]))
    assert op.dim_limits == {"q": (2, "m"), "p": (1, "m")} and op.limits == {"k": "q"}
    for limit, message in (
        (["m", "m"], "'m': expected nothing, which .at_most may name, got 'm'"),
        (["p", "q"], "'p': expected 'm', which .at_most may name, got 'q'"),
    ):
        with pytest.raises(ManifestError, match=f"^cuda_ops::planned: dim {re.escape(message)}$"):
            validated(entry(INDEXED, **line, limits=[limit]))
    with pytest.raises(ManifestError, match=r"dim 'q': expected to be named once by .at_most"):
        validated(entry(INDEXED, **line, limits=[["2q", "m"], ["q", "p"]]))


def test_too_many_names_in_one_line_are_refused() -> None:
    dims = ",".join(f"d{i}" for i in range(33))
    with pytest.raises(ManifestError, match=r"signature .*: expected at most 32 names, got 33"):
        validated(entry("planned(Tensor x) -> Tensor", f"({dims})->()"))


@pytest.mark.parametrize("name", ["other", "plan", "plannedx", "my_planned"])
def test_an_operator_must_be_named_after_its_file(name: str) -> None:
    with pytest.raises(
        ManifestError, match=f"'{name}' must be named 'planned' or start with 'planned_'"
    ):
        validated(entry(f"{name}(Tensor x) -> Tensor"))


def test_a_second_operator_may_not_have_the_name_of_a_module() -> None:
    with pytest.raises(ManifestError, match=r"^torch\.cpp: operator name 'torch_ops' is taken by"):
        library.validated(entry("torch_ops(Tensor x) -> Tensor"), "torch", {})


def test_an_operator_is_defined_once() -> None:
    listed = entry("planned_backward(Tensor x) -> Tensor")
    op = validated(listed)
    with pytest.raises(ManifestError, match="'planned_backward' is defined twice"):
        validated(listed, {op.name: op})


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "planned.so"
    path.write_bytes(b"not ELF")
    with pytest.raises(ManifestError, match=r"planned: planned.so does not load: "):
        open_library(path, "planned")
    with pytest.raises(ManifestError, match=r"planned: gone.so does not load: "):
        open_library(tmp_path / "gone.so", "planned")
    with pytest.raises(ManifestError, match=r"has no manifest; write CUDA_OPS\(library\)"):
        open_library(Path(torch.__file__).parent / "lib" / "libc10.so", "planned")


# --- the same through real builds: does C++ report what it has? -----------------------------


_SHARED = """
#include "binding.h"
using namespace cuda_ops;
namespace {{
Tensor same(const Tensor& x) {{ return x; }}
}}
CUDA_OPS(library) {{
  library.op("{op}(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<same>();
  library.op("{op}_twin(Tensor x) -> Tensor", "()->()").dtypes(kFloating).cpu<same>();
}}
"""
_ABSENT = """
#include "binding.h"
using namespace cuda_ops;
Tensor {op}_elsewhere(const Tensor& x);
namespace {{
Tensor out_of_sight(const Tensor& x) {{ return {op}_elsewhere(x); }}
}}
CUDA_OPS(library) {{
  library.op("{op}(Tensor x) -> Tensor", "()->()").cpu<out_of_sight>();
}}
"""


@pytest.mark.parametrize("schema", ["flaot", "Stream"])
def test_a_type_that_no_binding_can_have_is_named(schema: str) -> None:
    text = f"planned(Tensor x, {schema} s) -> Tensor"
    with pytest.raises(ManifestError, match=f"'s' is {schema} in the schema, which no binding"):
        validated(entry(text, arguments=["Tensor", "float"]))


@pytest.mark.slow
def test_one_function_for_two_operators_is_refused(scratch_op: ScratchOp) -> None:
    scratch_op.binding.write_text(_SHARED.format(op=scratch_op.name))
    name = scratch_op.name
    with pytest.raises(ManifestError, match=rf"{name}_twin: its CPU function also serves '{name}'"):
        scratch_op.reload()
    with pytest.raises(ManifestError, match="also serves"):
        getattr(torch.ops.cuda_ops, name)


@needs_nvcc
@pytest.mark.slow
def test_one_function_for_two_devices_is_refused(scratch_op: ScratchOp) -> None:
    name = scratch_op.name
    new_pair(name, scratch_op.root)
    text = scratch_op.binding.read_text()
    scratch_op.binding.write_text(text.replace(f".cuda<{name}_cuda>", f".cuda<{name}_cpu>"))
    message = rf"{name}: its CUDA function also serves '{name}' as its CPU function; .* each device"
    with pytest.raises(ManifestError, match=message):
        scratch_op.reload()


@pytest.mark.slow
def test_an_undefined_launcher_is_named(scratch_op: ScratchOp) -> None:
    scratch_op.binding.write_text(_ABSENT.format(op=scratch_op.name))
    with pytest.raises(CudaOpsError, match=rf"{scratch_op.name}: .*{scratch_op.name}_elsewhere"):
        scratch_op.reload()


def test_types_and_counts_of_real_functions_are_compared(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * n", "g * n", parameter=", double n", schema=", int n")
    with pytest.raises(ManifestError, match=r"argument 'n' is int .* has double; change one"):
        scratch_op.reload()
    scratch_op.write("v * n", "g * n", parameter=", double n")
    with pytest.raises(ManifestError, match=r"the schema has 1 arguments, .* has 2"):
        scratch_op.reload()
    assert registry().loaded(scratch_op.name) is None


@pytest.mark.slow
def test_a_schema_that_torch_refuses_is_a_failed_row_and_leaves_no_trace(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not this schema")

    scratch_op.write("v * 2")
    with monkeypatch.context() as patch:
        patch.setattr(torch.library, "register_autograd", refuse)
        row, *_ = compile_ops([scratch_op.name])
    assert re.match(rf"cuda_ops::{scratch_op.name}.*: schema .* be registered: not this", row.error)
    assert scratch_op.name not in vars(torch.ops.cuda_ops)
    row, *_ = compile_ops([scratch_op.name])
    assert not row.error
    assert torch.equal(scratch_op.function(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.slow
def test_arguments_may_be_named_like_functions_and_lists_have_no_lost_gradient(
    scratch_op: ScratchOp,
) -> None:
    name = scratch_op.name
    scratch_op.binding.write_text(f"""#include "binding.h"
using namespace cuda_ops;
namespace {{
Tensor product(const Tensor& x, const std::vector<Tensor>& ys) {{
  return elementwise_cpu([](double a, double b) {{ return a * b; }}, x, ys[0]);
}}
Tensor backward(const Tensor& grad_out, const std::vector<Tensor>& ys) {{
  return product(grad_out, ys);
}}
Tensor same(const Tensor& type) {{
  return elementwise_cpu([](double a) {{ return a; }}, type);
}}
}}
CUDA_OPS(library) {{
  library.op("{name}(Tensor x, Tensor[] ys) -> Tensor", "").cpu<product>();
  library.op("{name}_backward(Tensor grad_out, Tensor[] ys) -> Tensor grad_x", "").cpu<backward>();
  library.op("{name}_same(Tensor type) -> Tensor", "()->()").dtypes(kFloating).cpu<same>();
}}
""")
    scratch_op.reload()
    x, y = (torch.full((2,), n, requires_grad=True) for n in (2.0, 3.0))
    scratch_op.function(x, [y.detach()]).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y)
    with pytest.raises(RuntimeError, match=rf"cuda_ops::{name} has no gradient for 'ys'"):
        scratch_op.function(x, [y]).sum().backward()
    assert torch.equal(registry().public(f"{name}_same")(x.detach()), x)
