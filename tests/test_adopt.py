"""``compile_dev.py adopt``: drafts of native pairs from guests as people write them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_python

from cuda_ops.build import toolchain
from cuda_ops.build.discovery import Pair, discover
from cuda_ops.build.source_text import Kind
from cuda_ops.compile_ops import compile_ops
from cuda_ops.dev import main
from cuda_ops.dev.adopt import Draft, adopt, draft
from cuda_ops.errors import DiscoveryError
from cuda_ops.registry import registry

GUESTS = Path(__file__).parent / "guests"
PAIRS = {
    pair.stem: pair
    for root in (GUESTS, GUESTS / "corpus", GUESTS / "tutorials")
    for pair in discover([root])
}
BIAS = (
    "linear_bias(Tensor x, Tensor w, Tensor? bias=None, int repeat=1) -> (Tensor out, Tensor flags)"
)
LLTM = (
    "lltm(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell) -> "
    "(Tensor new_h, Tensor new_cell, Tensor X, Tensor gates)"
)
#: What a draft declares, by guest: each schema with its signature line, and words of the list of
#: what is left.
DECLARED = {
    "tutorial_silu": (
        [("tutorial_silu(Tensor x) -> Tensor", "()->()")],
        [],
    ),
    "library_mul": (
        [("library_mul(Tensor a, Tensor b) -> Tensor", "(),()->()")],
        ["library_mul.cpp:7: library_mul: takes the floating dtypes alone"],
    ),
    "muladd": (
        [
            ("muladd(Tensor a, Tensor b, float c) -> Tensor", "(),()->()"),
            ("muladd_myadd_out(Tensor a, Tensor b, Tensor(a!) out) -> ()", "(),(),()->"),
        ],
        ["muladd.cu:11: muladd_kernel takes sizes as int, which holds none from 2^31 on"],
    ),
    "stable_add": ([("stable_add(Tensor a, Tensor b) -> Tensor", "(),()->()")], []),
    "square": (
        [
            ("square(Tensor x) -> Tensor", "()->()"),
            ("square_backward(Tensor grad_out, Tensor x) -> Tensor grad_x", "(),()->()"),
            ("square_scale_(Tensor(a!) x, float by) -> ()", "()->"),
        ],
        ["square.cu:2: square_kernel takes sizes as int"],
    ),
    "lesson_matmul": (
        [("lesson_matmul(Tensor m, Tensor n) -> Tensor", "[h,k],[k,w]->[h,w]")],
        ["m is taken to have 2 dims, since sizes up to m.size(1) are read"],
    ),
    "lesson_gray": (
        [("lesson_gray(Tensor image) -> Tensor", "[height,width,3]->[height,width,1]")],
        ["lesson_gray.cu:5: rgb_to_grayscale_kernel takes sizes as int"],
    ),
    "row_softmax": (
        [("row_softmax(Tensor x, float temperature=1.0) -> Tensor", "[rows,n]->[rows,n]")],
        ["row_softmax.cu:16: the check temperature > 0 is kept", "row_softmax.cu:21: float16 left"],
    ),
    "rows_norm": (
        [("rows_norm(Tensor x, float eps=1e-6) -> Tensor", "")],
        ['it may be "(n)->(n)" if each row becomes one row', "its function for Autograd is left"],
    ),
    "branching": (
        [("branching(Tensor x, float gain=1.0) -> Tensor", "")],
        ["branching.cu:22: float16 and bfloat16 left out", 'it may be "()->()" if each element'],
    ),
    "linear_bias": (
        [(BIAS, "")],
        ["nothing says how many dims bias has", "the check x.size(1) == w.size(1) is kept"],
    ),
    "lltm": (
        [(LLTM, "")],
        ["lltm_cuda_kernel.cu:43: auto X = torch::cat({old_h, input}, 1): write it with call<T"],
    ),
    "leet": (
        [
            ("leet(Tensor x) -> Tensor", "[x_0,x_1]->[x_0,x_1]"),
            ("leet_relu_flat(Tensor x, Tensor(a!) y) -> ()", "(),()->"),
        ],
        ["leet.cu:59: choosing on CUDA: #if CUDA", "leet.cu:35: relu_f32 on CUDA: if (ndim"],
    ),
    "total": (
        [("total(Tensor x) -> Tensor", "")],
        ["total.cu:27: mean_of on CPU: total(x) / x.numel(): the CPU function calls torch"],
    ),
    "cpu_only": (
        [
            ("cpu_only(Tensor x, int skip, float scale=2.0) -> Tensor", "[rows,cols]->[rows]"),
            ("cpu_only_d_sigmoid(Tensor z) -> Tensor", "()->()"),
        ],
        [
            "cpu_only.cpp:11: the check x.size(1) >= 1 is kept",
            "the default std::max(1, 2) of skip",
            "cpu_only.cpp:30: d_elu on CPU: (alpha * (e - 1)) < 0: the CPU function is no formula",
        ],
    ),
    "where_mul": (
        [
            ("where_mul(Tensor a, Tensor mask, float scale) -> Tensor", "(),()->()"),
            (
                "where_mul_backward(Tensor grad_out, Tensor mask, float scale) -> Tensor grad_a",
                "(),()->()",
            ),
        ],
        [],
    ),
    "fill_ints": (
        [("fill_ints(Tensor(a!) out, int value) -> ()", "")],
        ["fill_ints.cu:6: twice: no function of the guest's own, such as a lambda"],
    ),
}
#: What launchers take and do, by guest.
LAUNCHERS = {
    "tutorial_silu": [
        "launch(DType dtype, const void* x, void* y, int64_t n, cudaStream_t stream)",
        "return visit<DType::kFloat64, DType::kFloat32>(dtype, [&](auto tag) {",
        "<scalar_t><<<(n + 255) / 256, 256, 0, stream>>>(",
    ],
    "square": [
        "square_kernel<<<(n + threads - 1) / threads, threads, 0, stream>>>(x, y, n);",
        "square_scale_in_place_launch(float* x, int64_t x_numel, float by, cudaStream_t stream)",
    ],
    "lesson_matmul": [
        "cudaMemsetAsync(output, 0, output_bytes, stream);",
        "// One thread per element of the result.",
        "matmul_k<<<blocks, tpb, 0, stream>>>(const_cast<float*>(m), const_cast<float*>(n), outp",
    ],
    "row_softmax": ['#include "../../kernels/row_max.cuh"', "constexpr int kThreads = 256;"],
    "lltm": [
        "const Accessor<scalar_t, 3, int32_t> gates,",
        "Accessor<scalar_t, 2, int32_t>(old_cell, {batch_size, state_size}),",
    ],
    "branching": [
        "void launch_bend(const T* in, T* out, float gain, size_t n, cudaStream_t stream) {",
        "bend<T><<<blocks, threads, 0, stream>>>(in, out, gain, n);",
        "if (x_numel == 0) return cudaSuccess;",
    ],
    "linear_bias": ["<<<dim3((m + 127) / 128, n), 128, 0, stream>>>(x, w, bias, out, n, k, m);"],
    "total": ["const_cast<__half*>(static_cast<const __half*>(x)), sum, N);"],
    "rows_norm": ["<<<rows, kWidth, 0, stream>>>(", "using acc_t = cuda_ops::compute_t<scalar_t>;"],
}


def one_line(text: str) -> str:
    """Joins lines, comments and the parts of strings, so that words are found across them."""
    text = re.sub(r"\s*\n\s*(?://   ?)?", " ", text)
    return re.sub(r'(?<=[ ,])" +"|" "', "", text)


def texts_of(made: Draft) -> tuple[str, str]:
    """Returns the kernel's file, which may be none, and the binding."""
    by_suffix = {path.suffix: text for path, text in made.texts.items()}
    return by_suffix.get(".cu", ""), by_suffix[".cpp"]


@pytest.mark.parametrize("name", DECLARED)
def test_a_draft_declares_what_the_text_tells_and_lists_the_rest(name: str) -> None:
    made = draft(PAIRS[name])
    _, binding = texts_of(made)
    expected, left = DECLARED[name]
    found = re.findall(r'\.op\( *"([^"]*)", *"([^"]*)"\)', one_line(binding))
    assert found == expected
    said = "\n".join(map(str, made.left))
    for words in left:
        assert words in said
    assert left or not said, said


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_take_pointers_sizes_and_a_stream(name: str) -> None:
    kernel, _ = texts_of(draft(PAIRS[name]))
    for words in LAUNCHERS[name]:
        assert words in one_line(kernel) or words in kernel
    _, _, launchers = kernel.partition("// ----")
    assert not re.search(r"\b(?:at|torch|c10)::|Tensor\b", launchers)
    assert "torch/" not in kernel and "ATen/" not in kernel


@pytest.mark.parametrize("name", DECLARED)
def test_what_is_left_is_marked_in_the_draft_too(name: str) -> None:
    made = draft(PAIRS[name])
    marked = one_line("\n".join(made.texts.values()))
    for note in made.left:
        assert f"TODO(adopt): {' '.join(str(note).split())}" in marked
    assert len({str(note) for note in made.left}) == len(made.left)


def test_a_tensor_that_is_left_to_make_raises_where_it_is_missing() -> None:
    _, binding = texts_of(draft(PAIRS["lltm"]))
    assert 'Tensor gates;\n  throw OpError("lltm_cuda_kernel.cu:43: what this line' in binding


def test_the_draft_that_the_documents_show_is_what_it_writes() -> None:
    made = draft(PAIRS["tutorial_silu"])
    assert made.root == GUESTS / "adopted" and not made.left
    for path, text in made.texts.items():
        assert path.read_text() == text


def test_a_cpu_function_brings_what_it_calls_under_a_name_of_its_own() -> None:
    _, binding = texts_of(draft(PAIRS["cpu_only"]))
    assert "double guest_sigmoid(double v) {" in binding  # binding.h has a sigmoid too
    assert "to[r] += twice(scalar_t(guest_sigmoid(std::accumulate(" in binding
    assert "#include <numeric>\n" in binding and "std::memset(out.mutable_data_ptr()" in binding
    assert "const double s = sigmoid(z);\n    return (1 - s) * s;" in binding


def test_outputs_have_the_dtypes_of_their_guest() -> None:
    _, binding = texts_of(draft(PAIRS["linear_bias"]))
    assert "Tensor flags = empty({repeat}, DType::kInt32, x);" in binding
    assert '.returns("flags", DType::kInt32)' in binding
    assert "bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr" in binding
    _, binding = texts_of(draft(PAIRS["total"]))
    assert '.dtypes("x", DType::kFloat16)' in binding and '("out", DType::kFloat32)' in binding


GUEST = """
#include <torch/extension.h>
__global__ void one_kernel(const float* x, float* y, int64_t n) {{
  {body}
}}
torch::Tensor one(torch::Tensor x) {{
  auto y = torch::empty_like(x);
  one_kernel<<<1, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  return y;
}}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ m.def("one", &one); }}
"""
INDEX = "int64_t i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) "
EACH = "for (int64_t i = 0; i < n; ++i) "
LOOP = "for (int64_t i = threadIdx.x; i < n; i += blockDim.x) "


def written(folder: Path, text: str, name: str = "one") -> Pair:
    (folder / "kernels").mkdir(exist_ok=True)
    (folder / "kernels" / f"{name}.cu").write_text(text)
    (pair,) = discover([folder])
    return pair


@pytest.mark.parametrize(
    ("body", "is_elementwise"),
    [
        (INDEX + "y[i] = 2 * x[i];", True),
        (LOOP + "{ const float v = x[i]; y[i] = v * v; }", True),
        (INDEX + "y[i] = x[n - 1 - i];", False),
        (INDEX + "y[i] = x[i] * i;", False),
        (INDEX + "FLOAT4(y[i]) = FLOAT4(x[i]);", False),
        (INDEX + "y[i] = *(&x[i] + 1);", False),
        (INDEX + "y[i] = threadIdx.x % 2 ? x[i] : 0;", False),
        (LOOP + "atomicAdd(&y[i], x[i]);", False),
        ("float sum = 0; " + EACH + "{ sum += x[i]; y[i] = sum; }", False),
        (INDEX + "y[i] = __shfl_xor_sync(~0u, x[i], 1);", False),
        ("float top = 0; " + EACH + "top = max(top, x[i]); " + EACH + "y[i] = x[i] / top;", False),
    ],
)  # fmt: skip
def test_only_kernels_of_one_index_are_called_elementwise(
    tmp_path: Path, body: str, is_elementwise: bool
) -> None:
    made = draft(written(tmp_path, GUEST.format(body=body)))
    _, binding = texts_of(made)
    assert ('"one(Tensor x) -> Tensor", "()->()")' in binding) is is_elementwise
    assert ("no signature line" in str(made.left[:1])) is not is_elementwise


def test_vectors_of_elements_and_pointers_in_doubt(tmp_path: Path) -> None:
    text = GUEST.format(body=INDEX + "{ float4 v = x[i]; v.x = v.y; y[i] = v; }")
    text = text.replace("const float* x, float* y", "const float4* x, float4* y")
    for name in ("x", "y"):
        pointer = f"{name}.data_ptr<float>()"
        text = text.replace(pointer, f"reinterpret_cast<float4*>({pointer})")
    kernel, binding = texts_of(draft(written(tmp_path, text)))
    assert '"one(Tensor x) -> Tensor", "")' in binding
    assert "reinterpret_cast<float4*>(const_cast<float*>(x))" in kernel
    body = "float* at = x; float* to = y; to[0] = at[0];"
    text = GUEST.format(body=body).replace("const float* x", "float* x")
    made = draft(written(tmp_path, text))
    assert "x is taken to be read: if it is written, say Tensor(a!) x" in str(made.left)
    text = text.replace(
        "torch::Tensor one(torch::Tensor x) {", "void one(at::Tensor x, at::Tensor y) {"
    )
    text = text.replace("  auto y = torch::empty_like(x);\n", "").replace("  return y;\n", "")
    made = draft(written(tmp_path, text))
    assert "y is taken to be written: if it is only read, take the (a!) away" in str(made.left)
    assert '"one(Tensor(a!) x, Tensor(b!) y) -> ()"' in texts_of(made)[1]


@pytest.mark.parametrize("name", ["both_ways", "clamp_ext", "flash_step", "lltm_cuda", "guarded"])
def test_guests_without_a_function_of_tensors_are_refused_in_a_line(name: str) -> None:
    with pytest.raises(
        DiscoveryError, match=rf"{name}: nothing of this guest can be drafted: \S+:\d+: "
    ):
        draft(PAIRS[name])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1, 256>>>", "1>>>", "one.cu:8: one on CUDA: a launch of one_kernel without a block"),
        (
            "one_kernel<<<",
            "other_kernel<<<",
            "one.cu:8: one on CUDA: the kernel other_kernel is in",
        ),
        ("x.numel())", "x.sum())", "one.cu:8: one on CUDA: one_k.*a launcher has no tensor x"),
        ("Tensor x)", "Tensor x, torch::Device d)", "no schema has the type torch::Device of d"),
        ("float>(), y", "Thing>(), y", "x is read as elements of an unknown type, Thing"),
        ('m.def("one", &one);', "", "it registers no function"),
        ("return y;", "if (n > 3) return x; return y;", "returns y, and something else before"),
    ],
)
def test_what_cannot_be_drafted_says_where_and_why(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = GUEST.format(body=INDEX + "y[i] = x[i];")
    assert old in text
    pair = written(tmp_path, text.replace(old, new))
    with pytest.raises(DiscoveryError, match=message):
        draft(pair)


@pytest.mark.parametrize("name", ["tutorial_silu", "lltm", "linear_bias", "square", "muladd"])
def test_no_text_makes_it_crash(name: str, tmp_path: Path) -> None:
    """Files that end anywhere are drafted or refused."""
    for number, source in enumerate(PAIRS[name].own_sources):
        text = source.read_text()
        for cut in range(0, len(text), 61):
            root = tmp_path / f"{number}_{cut}"
            for path in PAIRS[name].own_sources:
                target = root / path.parent.name / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(path.read_text() if path != source else text[:cut])
            for pair in discover_what_registers(root):
                try:
                    made = draft(pair)
                except DiscoveryError:
                    continue
                assert made.texts


def discover_what_registers(root: Path) -> list[Pair]:
    try:
        return [pair for pair in discover([root]) if pair.kind is not Kind.NATIVE]
    except DiscoveryError:  # what is left registers nothing
        return []


# --- the command -----------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roots_for_now: None) -> Path:
    """A root with the guests of tutorials, and a cache of its own."""
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "guests"
    for folder in ("kernels", "bindings", "include"):
        shutil.copytree(GUESTS / "tutorials" / folder, root / folder)
    for path in (GUESTS / "kernels").glob("*"):
        shutil.copy(path, root / "kernels")
    for path in (GUESTS / "bindings").glob("*"):
        shutil.copy(path, root / "bindings")
    return root


def test_the_command_writes_says_what_is_left_and_never_overwrites(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in copied.rglob("*.*")}
    root = ["--root", str(copied)]
    assert main([*root, "adopt", "row_softmax"]) == 0
    said = capsys.readouterr().out.splitlines()
    adopted = copied / "adopted"
    assert said[:3] == [
        f"wrote {adopted / 'kernels' / 'row_softmax.cu'}",
        f"wrote {adopted / 'bindings' / 'row_softmax.cpp'}",
        "left to do, marked with TODO(adopt) in the draft:",
    ]
    assert said[3].startswith("  row_softmax.cu:")
    assert said[-1] == f"next: python compile_dev.py --root {adopted} --check adopted::row_softmax"
    assert {path: path.read_bytes() for path in before} == before
    for call, message in (
        (["adopt", "row_softmax"], "row_softmax.cu exists already; move it away to draft row_sof"),
        (["adopt", "nothing"], "no guest 'nothing'; known: "),
        (["adopt", "silu"], "silu: expected a guest, with PYBIND11_MODULE or TORCH_LIBRARY, got"),
        (["adopt"], "adopt: expected one guest, as in: python compile_dev.py adopt lltm"),
        (["adopt", "square", "--rows"], "--rows: expected new"),
        (["adopt", "square", "--namespace", "other"], "expected --namespace adopted, as its other"),
    ):
        assert main([*root, *call]) == 1
        assert message in capsys.readouterr().out
    assert main([*root, "adopt", "stable_add"]) == 0
    assert "left to do" not in capsys.readouterr().out


@pytest.mark.slow
def test_drafts_with_a_cpu_function_pass_their_checks_unedited(
    copied: Path, quick_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(quick_compiler))
    names = ["library_mul", "muladd", "stable_add"]
    pairs = {pair.stem: pair for pair in discover([copied])}
    for name in names:
        adopt(pairs[name])
    root = copied / "adopted"
    done = run_python("compile_dev.py", "--root", str(root), "--arch", "9.0a", "--check",
        "--verbose", *(f"adopted::{name}" for name in names))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (*names, "muladd_myadd_out"):
        report = done.stdout.split(f"\nadopted::{name}\n")[1].partition(" not run\n")[0]
        assert "FAILED" not in report
        assert re.search(r"ok +compile_dynamic\[cpu\]", report)


@pytest.mark.slow
def test_a_draft_and_its_guest_load_side_by_side_and_agree(
    copied: Path, quick_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(quick_compiler))
    pairs = {pair.stem: pair for pair in discover([copied])}
    for name in ("stable_add", "cpu_only"):
        adopt(pairs[name])
    for root in (copied, copied / "adopted"):
        registry().add_root(root)
    for row in compile_ops(["stable_add", "adopted::stable_add", "adopted::cpu_only"]):
        assert not row.error, row.error
    a, b = torch.randn(5, 3), torch.randn(3, 5).t()
    expected = torch.ops.stable_guest.stable_add(a, b)
    assert torch.equal(torch.ops.adopted.stable_add(a, b), expected)
    sums = torch.ops.adopted.cpu_only(a, 0, 3.0)
    torch.testing.assert_close(sums, 6 * torch.sigmoid(a.sum(1)))
    with pytest.raises(RuntimeError, match=r"adopted::cpu_only: no columns"):
        torch.ops.adopted.cpu_only(a[:, :0], 0)


@pytest.mark.slow
def test_drafts_of_kernels_compile_unedited(
    copied: Path, quick_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if toolchain.cuda_home() is None:
        pytest.skip("no CUDA toolkit here")  # their .cu files cannot be compiled without one
    monkeypatch.setenv("CXX", str(quick_compiler))
    pairs = {pair.stem: pair for pair in discover([copied])}
    names = ["branching", "leet", "lesson_matmul", "linear_bias", "lltm", "row_softmax",
             "rows_norm", "square", "total", "where_mul"]  # fmt: skip
    for name in names:
        adopt(pairs[name])
    registry().add_root(copied / "adopted")
    rows = compile_ops([f"adopted::{name}" for name in names], archs=("9.0a",), compare=False)
    assert {row.op.partition("::")[2]: row.error for row in rows} == dict.fromkeys(names, "")
    autograd = {row.op: row.autograd for row in rows}
    assert autograd["adopted::square"] == "yes" and autograd["adopted::where_mul"] == "yes"
