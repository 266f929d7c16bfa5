"""Launch configurations are chosen by measuring, kept, and used again only where they hold."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_no_gpu
from torch._subclasses.fake_tensor import FakeTensorMode

import cuda_ops
from cuda_ops.plugins import Plugins
from cuda_ops.registry import registry
from cuda_ops.runtime import tune, use_stored
from cuda_ops.runtime.tuning import choices, command, search
from cuda_ops.runtime.tuning.choices import Key, Stored
from cuda_ops.runtime.tuning.key import device_and_driver, made_from, version_in
from cuda_ops.runtime.tuning.knobs import Knobs, size_bits
from cuda_ops.runtime.tuning.search import Choice, decide
from cuda_ops.spec import Candidates

REPO = Path(__file__).resolve().parent.parent
#: It has a kernel for the CPU alone, whose choices a process with a GPU does not keep: tests of
#: what is kept need a machine without one.
NAME = "tuned_probe"
#: A knob that does nothing but for one value, which makes the result wrong.
CPP = r"""
#include "binding.h"
#include "tuned.h"

using namespace cuda_ops;

namespace {

Knob step{"step", 1, {1, 2, 3}};
Knob width{"width", 8, {16, 32}};

Tensor tuned_probe_cpu(const Tensor& x) {
  const int chosen = step.at(bucket_of(1, x.numel(), dtype_of(x)));
  return elementwise_cpu([=](double v) { return chosen == 3 ? v + 1 : v; }, x);
}

}  // namespace

CUDA_OPS(library) {
  library.op("tuned_probe(Tensor x) -> Tensor", "()->()")
      .dtypes(kFloating)
      .cpu<tuned_probe_cpu>();
}
"""
PLUGIN = """
from cuda_ops.hookspecs import hookimpl
from cuda_ops.runtime import use_stored
from cuda_ops.spec import Candidates


@hookimpl
def cuda_ops_candidates(op):
    settings = {"two": {"step": 2}, "wide": {"width": 16}, "wrong": {"step": 3}}
    return Candidates(settings, lambda x: (1, x.numel()))


@hookimpl
def cuda_ops_op_loaded(op, library):
    use_stored(op, library)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the operator."""
    folder = tmp_path_factory.mktemp("tuned") / "root"
    for name, suffix, text in (("bindings", ".cpp", CPP), ("ops", ".py", PLUGIN)):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{NAME}{suffix}").write_text(text)
    registry().add_root(folder)
    yield folder
    registry().drop_root(folder)


@pytest.fixture
def library(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library of the operator, without any choice, in a cache of its own: other workers have
    the same operator.
    """
    monkeypatch.setenv("CUDA_OPS_CACHE", str(root.parent / "cache"))
    monkeypatch.delenv("CUDA_OPS_TUNE", raising=False)
    cuda_ops.dev.reload(NAME)
    found = registry().library_of(NAME)
    assert found is not None
    knobs = Knobs(found)
    yield found
    choices.forget(NAME)
    search.forget_process(NAME)
    for size in SIZES:
        knobs.choose(bucket(knobs, size), {})


SIZES = (1, 100, 1000, 70_000)


def bucket(knobs: Knobs, size: int, dtype: torch.dtype = torch.float32) -> int:
    return knobs.bucket((1, size_bits(size)), dtype)


def timed(**seconds: float) -> search.Measure:
    """Makes a measurement that returns these seconds for every round; ``default`` takes 1."""

    def measure(functions: Mapping[str, Callable[..., Any]], inputs: Any) -> dict[str, list[float]]:
        return {name: [seconds.get(name, 1.0)] * 8 for name in functions}

    return measure


def never(functions: Mapping[str, Callable[..., Any]], inputs: Any) -> dict[str, list[float]]:
    pytest.fail("measured")


# --- the rule ------------------------------------------------------------------------


def test_a_faster_candidate_is_chosen_beyond_the_margin() -> None:
    times = {"default": [1.0] * 8, "slower": [1.1] * 8, "faster": [0.9] * 8, "best": [0.8] * 8}
    name, reason, ratios = decide(times)
    assert name == "best"
    assert reason == "takes 0.800 (0.800 to 0.800) of the default's time"
    assert ratios["faster"].value == 0.9


@pytest.mark.parametrize(
    "faster",
    [
        [0.985] * 8,  # by less than the margin
        [0.7, 1.2] * 4,  # now and then
        [0.5] * 5 + [0.99] * 3,  # by a median whose interval ends too high
    ],
)
def test_the_default_stays_where_noise_explains_the_rest(faster: list[float]) -> None:
    name, reason, _ = decide({"default": [1.0] * 8, "other": faster})
    assert name == "default"
    assert "no interval is below 0.980; the best, 'other', takes" in reason


def test_drift_that_all_share_is_no_noise() -> None:
    clock = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    assert decide({"default": clock, "other": [0.9 * c for c in clock]})[0] == "other"


def test_a_wider_margin_asks_for_more() -> None:
    times = {"default": [1.0] * 8, "other": [0.93] * 8}
    assert decide(times)[0] == "other"
    assert decide(times, margin=0.1)[0] == "default"


def test_few_rounds_decide_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"decide: .*expected 6 rounds or more of 'default', got 3"
    ):
        decide({"default": [1.0] * 3, "other": [0.5] * 3})
    with pytest.raises(ValueError, match="got 0"):
        decide({"other": [0.5] * 8})


# --- knobs ---------------------------------------------------------------------------


def test_a_library_lists_its_knobs(library: Path) -> None:
    assert Knobs(library).values == {"step": (1, 2, 3), "width": (8, 16, 32)}


def test_a_library_without_knobs_has_none(root: Path) -> None:
    cuda_ops.dev.reload("relu")
    found = registry().library_of("relu")
    assert found is not None
    assert Knobs(found).values == {}


def test_buckets_are_the_same_in_both_languages(library: Path) -> None:
    knobs = Knobs(library)
    handle = ctypes.CDLL(str(library)).cuda_ops_knob_bucket
    handle.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p]
    sizes = [0, 1, 2, 3, 4, 1023, 1024, 2**30 - 1, 2**30, 2**31, 2**62]
    seen: dict[int, tuple[int, int, str]] = {}
    for dtype in (torch.float32, torch.float16, torch.float64, torch.int64, torch.bool):
        name = str(dtype).removeprefix("torch.")
        for rows in sizes:
            for columns in sizes:
                bits = size_bits(rows), size_bits(columns)
                found = handle(rows, columns, name.encode())
                assert knobs.bucket(bits, dtype) == found
                assert seen.setdefault(found, (*bits, name)) == (*bits, name)


def test_a_knob_holds_for_its_bucket_alone(library: Path) -> None:
    knobs = Knobs(library)
    here, there = bucket(knobs, 1000), bucket(knobs, 100)
    knobs.choose(here, {"step": 2})
    assert [knobs.get("step", b) for b in (here, there)] == [2, 1]
    assert [knobs.get("width", b) for b in (here, there)] == [8, 8]
    knobs.choose(here, {"width": 32})  # what is left out goes back
    assert (knobs.get("step", here), knobs.get("width", here)) == (1, 32)


def test_the_kernel_reads_what_is_set(library: Path) -> None:
    knobs, x = Knobs(library), torch.ones(1000)
    knobs.choose(bucket(knobs, 1000), {"step": 3})
    assert cuda_ops.tuned_probe(x).tolist() == [2.0] * 1000
    assert cuda_ops.tuned_probe(x[:100]).tolist() == [1.0] * 100
    assert cuda_ops.tuned_probe(x.double()).tolist() == [1.0] * 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"height": 1}, "knob 'height': expected one of the library's, step, width"),
        ({"step": 4}, r"knob 'step': expected one of \[1, 2, 3\], got 4"),
    ],
)
def test_what_is_no_knob_or_no_value_changes_nothing(
    library: Path, settings: dict[str, int], message: str
) -> None:
    knobs = Knobs(library)
    knobs.choose(bucket(knobs, 1000), {"width": 16})
    with pytest.raises(ValueError, match=message):
        knobs.choose(bucket(knobs, 1000), {"step": 2, **settings})
    assert knobs.get("step", bucket(knobs, 1000)) == 1
    assert knobs.get("width", bucket(knobs, 1000)) == 16
    with pytest.raises(KeyError, match="no knob 'height'"):
        knobs.get("height", 0)
    with pytest.raises(KeyError, match="no knob 'step' with a bucket -1"):
        knobs.get("step", -1)


# --- choosing ------------------------------------------------------------------------


@needs_no_gpu
def test_a_choice_is_measured_kept_and_set(library: Path) -> None:
    x, knobs = torch.randn(1000), Knobs(library)
    made = tune(NAME, inputs=(x,), anew=True, measure=timed(two=0.5))
    assert (made.name, made.settings, made.measured) == ("two", {"step": 2}, True)
    assert made.ratios == {"two": (0.5,) * 3, "wide": (1.0,) * 3}
    assert knobs.get("step", bucket(knobs, 1000)) == 2
    assert knobs.get("step", bucket(knobs, 100)) == 1
    (kept,) = choices.stored(NAME)
    assert (kept.name, kept.settings, kept.reason) == ("two", {"step": 2}, made.reason)
    # Sizes within a factor of two are one bucket, whatever the switch says.
    again = tune(cuda_ops.tuned_probe, inputs=(x[:600],), measure=never)
    assert (again.name, again.measured) == ("two", False)
    assert tune(NAME, inputs=(x[:500],), measure=never).name == "default"


@needs_no_gpu
def test_a_wrong_candidate_is_refused_by_name_and_not_timed(library: Path) -> None:
    asked: list[str] = []

    def measure(functions: Mapping[str, Any], inputs: Any) -> dict[str, list[float]]:
        asked.extend(functions)
        return {name: [1.0] * 8 for name in functions}

    made = tune(NAME, inputs=(torch.randn(1000),), anew=True, measure=measure)
    assert asked == ["default", "two", "wide"]
    assert list(made.refused) == ["wrong"]
    assert "its result is not the default's: the error is" in made.refused["wrong"]
    assert made.name == "default"


@needs_no_gpu
def test_the_default_is_a_candidate_though_none_offers_it(library: Path) -> None:
    made = tune(NAME, {"two": {"step": 2}}, (torch.randn(100),), anew=True, measure=timed(two=0.99))
    assert (made.name, made.settings) == ("default", {})
    named = {"default": {"step": 2}}  # no other settings may take its name
    assert tune(NAME, named, (torch.randn(100),), anew=True, measure=timed()).settings == {}


@needs_no_gpu
def test_functions_run_under_their_settings(library: Path) -> None:
    knobs, seen = Knobs(library), {}

    def measure(functions: Mapping[str, Any], inputs: tuple[Any, ...]) -> dict[str, list[float]]:
        for name, function in [*functions.items(), *reversed(list(functions.items()))]:
            function(*inputs)
            seen[name] = [knobs.get(k, bucket(knobs, 1000)) for k in ("step", "width")]
        return {name: [1.0] * 8 for name in functions}

    tune(NAME, inputs=(torch.randn(1000),), anew=True, measure=measure)
    assert seen == {"default": [1, 8], "two": [2, 8], "wide": [1, 16]}
    assert [knobs.get(k, bucket(knobs, 1000)) for k in ("step", "width")] == [1, 8]


@needs_no_gpu
def test_a_measurement_that_fails_leaves_everything_as_it_was(library: Path) -> None:
    def measure(functions: Mapping[str, Any], inputs: tuple[Any, ...]) -> dict[str, list[float]]:
        functions["two"](*inputs)
        raise ZeroDivisionError

    knobs, x = Knobs(library), torch.randn(1000)
    tune(NAME, inputs=(x,), anew=True, measure=timed(wide=0.5))
    with pytest.raises(ZeroDivisionError):
        tune(NAME, inputs=(x,), anew=True, measure=measure)
    assert [knobs.get(k, bucket(knobs, 1000)) for k in ("step", "width")] == [1, 16]
    assert [one.name for one in choices.stored(NAME)] == ["wide"]


@needs_no_gpu
def test_the_kits_clock_times_candidates_and_keeps_arguments(library: Path) -> None:
    x = torch.randn(70_000)
    before = x.clone()
    made = tune(NAME, inputs=(x,), anew=True)
    assert made.measured and made.ratios.keys() == {"two", "wide"}
    assert all(low <= value <= high for value, low, high in made.ratios.values())
    assert torch.equal(x, before)


# --- when it does not measure ---------------------------------------------------------


@needs_no_gpu
def test_nothing_is_measured_unless_asked(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tune(NAME, inputs=(torch.randn(1000),), measure=never)
    assert made == Choice("default", {}, made.reason)
    assert made.reason == "nothing is stored, and CUDA_OPS_TUNE=on or anew=True would measure"
    monkeypatch.setenv("CUDA_OPS_TUNE", "on")
    assert tune(NAME, inputs=(torch.randn(1000),), measure=timed(two=0.5)).measured
    assert tune(NAME, inputs=(torch.randn(1000),), measure=never).name == "two"


@needs_no_gpu
def test_off_means_the_default_though_another_is_stored(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, knobs = torch.randn(1000), Knobs(library)
    tune(NAME, inputs=(x,), anew=True, measure=timed(two=0.5))
    monkeypatch.setenv("CUDA_OPS_TUNE", "off")
    made = tune(NAME, inputs=(x,), anew=True, measure=never)
    assert (made.name, made.reason) == ("default", "CUDA_OPS_TUNE=off")
    assert knobs.get("step", bucket(knobs, 1000)) == 1
    assert use_stored(registry().specs(NAME)[NAME], library) == 0
    monkeypatch.setenv("CUDA_OPS_TUNE", "stored")
    assert use_stored(registry().specs(NAME)[NAME], library) == 1
    assert knobs.get("step", bucket(knobs, 1000)) == 2


def test_another_word_for_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_OPS_TUNE", "yes")
    with pytest.raises(
        ValueError, match="CUDA_OPS_TUNE: expected one of off, stored, on, got 'yes'"
    ):
        search.mode()


@needs_no_gpu
def test_nothing_is_measured_in_a_capture(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_is_capturing", lambda: True)
    monkeypatch.setenv("CUDA_OPS_TUNE", "on")
    x = torch.randn(1000)
    made = tune(NAME, inputs=(x,), anew=True, measure=never)
    assert (made.name, made.reason) == (
        "default", "a CUDA graph is captured: nothing is measured",
    )  # fmt: skip
    monkeypatch.setattr(search, "_is_capturing", lambda: False)
    tune(NAME, inputs=(x,), measure=timed(two=0.5))
    search.forget_process(NAME)
    monkeypatch.setattr(search, "_is_capturing", lambda: True)
    assert tune(NAME, inputs=(x,), measure=never).name == "two"  # a stored one is used


@needs_no_gpu
def test_nothing_is_measured_on_tensors_without_values(library: Path) -> None:
    with FakeTensorMode():
        made = tune(NAME, inputs=(torch.empty(1000),), anew=True, measure=never)
    assert "without values of its own" in made.reason
    made = tune(NAME, inputs=(torch.empty(1000, device="meta"),), anew=True, measure=never)
    assert "without values of its own" in made.reason


def test_nothing_is_measured_while_torch_compile_traces(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_OPS_TUNE", "on")

    @torch.compile(fullgraph=True, backend="eager")
    def tuned(x: torch.Tensor) -> torch.Tensor:
        tune("tuned_probe", inputs=(x,), measure=never)
        out: torch.Tensor = cuda_ops.tuned_probe(x)
        return out

    x = torch.randn(1000)
    assert torch.equal(tuned(x), x)
    assert choices.stored(NAME) == []


# --- what it refuses ------------------------------------------------------------------


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Has the name of an operator, and is none."""
    return x


@pytest.mark.parametrize(
    ("op", "candidates", "message"),
    [
        ("no_such_op", None, "argument 'op': .*no operator 'no_such_op'"),
        (7, None, "argument 'op': expected an operator of cuda_ops, got 7"),
        (sum_rows, None, "argument 'op': expected an operator of cuda_ops, got <function sum_rows"),
        (torch.ops.aten.relu, None, "argument 'op': namespace 'aten' has no operator 'relu'"),
        ("relu", None, "relu: expected a plugin that answers cuda_ops_candidates, .*: .*sum_rows"),
        (NAME, {"high": {"height": 2}}, "tuned_probe: candidate 'high': knob 'height'"),
        (NAME, {"four": {"step": 4}}, r"tuned_probe: candidate 'four': .*expected one of \[1, 2"),
        (NAME, {"two": {"step": 2.0}}, r"tuned_probe: candidate 'two': .*, got 2.0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    library: Path, op: Any, candidates: Any, message: str
) -> None:
    x = torch.randn(100, device="cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match=f"tune: {message}"):
        tune(op, candidates, (x,), anew=True, measure=never)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inputs": torch.ones(2)}, TypeError, r"'inputs': .*, got Tensor; write \[x\] for one"),
        ({"inputs": 5}, TypeError, "'inputs': expected a list of arguments, got int"),
        (
            {"inputs": (torch.ones(2), 1)},
            ValueError,
            r"'inputs': .* of tuned_probe, got \[\(2,\), 1\]",
        ),
        ({"candidates": 5}, TypeError, "'candidates': expected a Candidates, or .* got int"),
        ({"candidates": [1]}, TypeError, "'candidates': expected a Candidates, or .* got list"),
        ({"candidates": "a"}, TypeError, "'candidates': expected a Candidates, or .* got str"),
        ({"candidates": {"a": 1}}, TypeError, "'candidates': .* knobs to ints for 'a', got int"),
        ({"margin": "a"}, ValueError, "'margin': expected a number from 0 to 1, got 'a'"),
        ({"margin": -1}, ValueError, "'margin': expected a number from 0 to 1, got -1"),
        ({"margin": float("nan")}, ValueError, "'margin': expected a number from 0 to 1, got nan"),
        ({"measure": 1}, TypeError, "'measure': expected something to call, got int"),
    ],
)
@needs_no_gpu
def test_arguments_of_another_kind_are_refused(
    library: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    rest = {"inputs": (torch.ones(2),), "measure": never} | arguments
    with pytest.raises(error, match=f"^tune: argument {message}"):
        tune(NAME, **rest)


def test_a_call_without_tensors_is_refused(library: Path) -> None:
    with pytest.raises(ValueError, match=r"'inputs': expected arguments that .*, got \[\]"):
        tune(NAME, anew=True, measure=never)


@needs_no_gpu
def test_sizes_may_say_that_nothing_is_tuned(library: Path) -> None:
    offered = Candidates({"two": {"step": 2}}, lambda x: None)
    with pytest.raises(ValueError, match=r"expected arguments that .*, got \[\(100,\)\]"):
        tune(NAME, offered, (torch.randn(100),), anew=True, measure=never)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC 11.4.0", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82  Release\n", "580.82"),
        ("GCC version:  gcc version 11.4.0\n", ""),
        ("", ""),
    ],
)
def test_the_drivers_version_is_found_in_what_the_kernel_says(text: str, version: str) -> None:
    assert version_in(text) == version


@needs_no_gpu
def test_several_kinds_of_gpus_have_no_common_choice(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda_ops.runtime.tuning import key as tuning_key

    monkeypatch.setattr(tuning_key, "device_and_driver", lambda: None)
    with pytest.raises(ValueError, match="expected visible GPUs of one kind, got several"):
        tune(NAME, inputs=(torch.randn(100),), anew=True, measure=never)


@pytest.mark.parametrize("answer", [7, Candidates({"two": 2}, len), Candidates({}, 7)])  # type: ignore[dict-item, arg-type]
def test_another_answer_to_the_hook_is_refused(library: Path, answer: Any) -> None:
    from cuda_ops.hookspecs import hookimpl

    class Guest:
        @hookimpl
        def cuda_ops_candidates(self, op: Any) -> Any:
            return answer

    plugins = Plugins()
    plugins.add(Guest(), "guest")
    with pytest.warns(UserWarning, match="expected a Candidates of settings and sizes or None"):
        assert plugins.ask("cuda_ops_candidates", registry().specs(NAME)[NAME]) is None


# --- other processes and reloads -------------------------------------------------------

READER = f"""
import sys
import torch, cuda_ops
from pathlib import Path
from cuda_ops.registry import registry
from cuda_ops.runtime.tuning.knobs import Knobs
registry().add_root(Path(sys.argv[1]))
cuda_ops.{NAME}(torch.ones(3))
knobs = Knobs(registry().library_of("{NAME}"))
print([knobs.get("step", knobs.bucket((1, bits), torch.float32)) for bits in (7, 10)])
print(sorted(name for name in sys.modules if name.startswith(
    ("hypothesis", "cuda_ops.testing", "cuda_ops.benchmarking"))))
"""


def read_elsewhere(root: Path, **variables: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READER, str(root)], cwd=REPO,
        env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


FIRST_USE = f"""
import sys, warnings
import torch, cuda_ops
from pathlib import Path
from cuda_ops.registry import registry
from cuda_ops.runtime.tuning import choices, rounds, search
registry().add_root(Path(sys.argv[1]))
measured = []
def rounds_of(functions, inputs):
    measured.append([tuple(x.shape) for x in inputs])
    return {{name: [0.5 if name == "two" else 1.0] * 8 for name in functions}}
rounds.rounds_of = rounds_of
function = cuda_ops.{NAME}
for size in (1000, 1001, 40):
    print(torch.equal(function(torch.ones(size)), torch.ones(size)), measured)
print([(one.name, one.key.bits) for one in choices.stored("{NAME}")])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        function(torch.ones(3, dtype=torch.int32))
    except RuntimeError as error:
        print("got int32" in str(error))
print(torch.vmap(function)(torch.ones(3, 9000)).shape, len(measured))
compiled = torch.compile(lambda x: function(x) * 2, backend="eager", fullgraph=True)
print(compiled(torch.ones(90000)).shape, len(measured))
"""


@needs_no_gpu
def test_the_first_call_of_each_kind_measures_if_the_variable_says_so(
    root: Path, library: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE, str(root)], cwd=REPO,
        env={**os.environ, "CUDA_OPS_TUNE": "on"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "True [[(1000,)]]",
        "True [[(1000,)]]",  # of the same size within a factor of two
        "True [[(1000,)], [(40,)]]",
        "[('two', (1, 10)), ('two', (1, 6))]",
        "True",
        "torch.Size([3, 9000]) 3",  # the call of the whole batch
        "torch.Size([90000]) 3",  # as it was traced
    ], done.stderr


@needs_no_gpu
def test_another_process_uses_the_choice_from_the_first_call_on(root: Path, library: Path) -> None:
    tune(NAME, inputs=(torch.randn(1000),), anew=True, measure=timed(two=0.5))
    assert read_elsewhere(root) == ["[1, 2]", "[]"]  # and imports no kit for that
    assert read_elsewhere(root, CUDA_OPS_TUNE="off") == ["[1, 1]", "[]"]


@needs_no_gpu
def test_an_edit_has_no_choice_and_going_back_has_the_old_one(root: Path, library: Path) -> None:
    binding, x = root / "bindings" / f"{NAME}.cpp", torch.randn(1000)
    tune(NAME, inputs=(x,), anew=True, measure=timed(two=0.5))
    try:
        binding.write_text(CPP.replace("v + 1", "v + 2"))
        cuda_ops.dev.reload(NAME)
        edited = registry().library_of(NAME)
        assert edited is not None and edited != library
        assert Knobs(edited).get("step", bucket(Knobs(edited), 1000)) == 1
        assert tune(NAME, inputs=(x,), measure=never).name == "default"
        tune(NAME, inputs=(x,), anew=True, measure=timed(wide=0.5))
        assert Knobs(library).get("step", bucket(Knobs(library), 1000)) == 2
    finally:
        binding.write_text(CPP)
        cuda_ops.dev.reload(NAME)
    assert registry().library_of(NAME) == library
    assert tune(NAME, inputs=(x,), measure=never).name == "two"
    assert {one.name for one in choices.stored(NAME)} == {"two", "wide"}


@needs_no_gpu
def test_a_stored_choice_that_was_edited_is_left_out(library: Path) -> None:
    tune(NAME, inputs=(torch.randn(1000),), anew=True, measure=timed(two=0.5))
    (one,) = choices.stored(NAME)
    choices.keep(replace(one, settings={"step": 99}))
    with pytest.warns(UserWarning, match=r"choice 'two' is left out: knob 'step': expected"):
        assert use_stored(registry().specs(NAME)[NAME], library) == 0


@needs_no_gpu
def test_a_choice_of_another_gpu_driver_or_build_is_not_used(library: Path) -> None:
    op = registry().specs(NAME)[NAME]
    made, where = made_from(library), device_and_driver()
    assert made is not None and where is not None
    right = Key(NAME, *made, *where, "float32", (1, 10))
    other: Any = "other"
    for field in ("source", "build", "device", "driver"):
        choices.keep(Stored(replace(right, **{field: other}), "two", {"step": 2}, "why"))
    assert use_stored(op, library) == 0
    choices.keep(Stored(right, "two", {"step": 2}, "why"))
    assert use_stored(op, library) == 1


# --- the command ----------------------------------------------------------------------


@needs_no_gpu
def test_the_command_shows_and_forgets(
    library: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["--show", NAME]) == 0
    assert "nothing is stored in" in capsys.readouterr().out
    tune(NAME, inputs=(torch.randn(1000),), anew=True, measure=timed(two=0.5))
    (one,) = choices.stored(NAME)
    choices.keep(replace(one, key=replace(one.key, source="other")))
    assert command.main(["--show"]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("512 to 1023", "takes 0.500", "yes", "another source"))
    assert command.main(["--show", "--json", NAME]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(entry["name"], entry["unused"]) for entry in listed] == [
        ("two", ""), ("two", "no, another source"),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        command.main(["--show", "--forget"])
    assert "argument --forget: not allowed with argument --show" in capsys.readouterr().err
    assert len(choices.stored(NAME)) == 2
    assert command.main(["--forget", NAME]) == 0
    assert f"{NAME}: forgot 2 choices" in capsys.readouterr().out
    assert choices.stored(NAME) == []


@needs_no_gpu
def test_the_command_measures_cases_and_reports_what_it_refused(
    library: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda_ops.runtime.tuning import rounds

    monkeypatch.setattr(rounds, "rounds_of", timed(two=0.5))
    assert command.main([NAME]) == command.FAILED
    shown = capsys.readouterr().out
    assert "measured on the CPU, for the CPU alone" in shown
    assert "two: takes 0.500" in shown and "refused 'wrong'" in shown
    stored = choices.stored(NAME)
    assert stored and {one.name for one in stored} == {"two"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "expected an operator, --show or --forget, got none"),
        (["no_such_op"], "no operator 'no_such_op'"),
        (["--show", "no_such_op"], "no operator 'no_such_op'"),
        (["--forget", "no_such_op"], "no operator 'no_such_op'"),
        (["relu"], "expected a plugin that answers cuda_ops_candidates"),
        ([NAME, "--case", "no such case"], "has 'no such case' in its label"),
    ],
)
def test_the_command_says_what_it_cannot_do(
    library: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert command.main(argv) == command.REFUSED
    assert message in " ".join(capsys.readouterr().out.split())


def test_off_measures_nothing_by_the_command(
    library: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_OPS_TUNE", "off")
    assert command.main([NAME]) == command.REFUSED
    assert "CUDA_OPS_TUNE=off; set it to stored or on" in capsys.readouterr().out
