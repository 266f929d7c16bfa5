"""What the doctor makes of facts: each fault is named, with what mends it."""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cuda_ops.doctor import facts as all_facts
from cuda_ops.doctor import findings as rules
from cuda_ops.doctor import of_machine, of_operators, report
from cuda_ops.doctor.facts import (
    Cache,
    Driver,
    Facts,
    Failure,
    Gpu,
    Operator,
    Plugin,
    Tool,
    Toolkit,
    Torch,
    Unusable,
)
from cuda_ops.doctor.finding import LEVELS, Finding
from cuda_ops.doctor.findings import findings

REPO = Path(__file__).resolve().parent.parent
H100, A100 = Gpu("NVIDIA H100 80GB HBM3", "9.0"), Gpu("NVIDIA A100-SXM4-40GB", "8.0")
SILU = Operator(
    "silu", has_kernel=True, library="/x/silu.so", origin="cached", archs=("9.0a",),
    is_current=True, loads="yes",
)  # fmt: skip
GUEST = Operator("lltm", "pybind11", "/my ops", builtin=False, has_kernel=True)
#: A machine on which all is well.
WELL = Facts(
    python="3.12.1",
    oldest_torch="2.10",
    torch=Torch("2.11.0+cu130", "13.0", (H100,)),
    driver=Driver("580.82.07", "13.0", (H100,), 1),
    toolkit=Toolkit("/usr/local/cuda", "13.0", nvcc="/usr/local/cuda/bin/nvcc"),
    compiler=Tool("/usr/bin/c++", "c++ 12.2.0"),
    ninja=Tool("/usr/bin/ninja", "1.11.1"),
    cache=Cache("/home/me/.cache/cuda_ops", 1 << 20, 1),
    operators=(SILU,),
)


def found(**changed: Any) -> dict[str, Finding]:
    """What is wrong with a machine that differs from the good one in these facts, by fault."""
    listed = findings(replace(WELL, **changed))
    assert len({one.fault for one in listed}) == len(listed), listed
    return {one.fault: one for one in listed}


def the(fault: str, **changed: Any) -> Finding:
    """The one thing that is wrong."""
    listed = found(**changed)
    assert [*listed] == [fault]
    return listed[fault]


def test_all_is_well_with_a_gpu_and_without() -> None:
    assert found() == {}
    bare = Torch("2.13.0+cpu")
    assert found(torch=bare, driver=Driver()) == {}
    # A torch with CUDA says why it finds none, and there is none.
    idle = Torch("2.13.0+cu130", "13.0", problem="Found no NVIDIA driver on your system")
    assert found(torch=idle, driver=Driver()) == {}


# --- GPUs and drivers ----------------------------------------------------------------------


def test_a_torch_without_cuda_beside_a_gpu() -> None:
    one = the("torch-without-cuda", torch=Torch("2.13.0+cpu"))
    assert one.level == "broken" and "H100" in one.what
    assert one.command == "pip install --force-reinstall torch==2.13.0"
    old = Driver("550.54.15", "12.4", (H100,), 1)
    older_toolkit = replace(WELL.toolkit, version="12.4")
    one = the("torch-without-cuda", torch=Torch("2.13.0+cpu"), driver=old, toolkit=older_toolkit)
    assert one.command.startswith("install a torch for CUDA 12: choose it under Start Locally")


def test_a_driver_that_is_too_old_for_torch() -> None:
    torch = Torch("2.11.0+cu130", "13.0", problem="The NVIDIA driver on your system is too old")
    driver = Driver("550.54.15", "12.4", (H100,), 1)
    toolkit = replace(WELL.toolkit, version="12.4")
    listed = found(torch=torch, driver=driver, toolkit=toolkit)
    one = listed["driver-too-old"]
    assert one.level == "broken"
    assert "driver 550.54.15 supports CUDA 12.4, and torch 2.11.0+cu130 was built with 13.0" in (
        one.what
    )
    assert "driver 580 or later" in one.command and "a torch for CUDA 12: " in one.command
    # Within one major number a driver runs what a newer toolkit built.
    newer = Torch("2.13.0+cu132", "13.2", (H100,))
    assert found(torch=newer) == {}


def test_a_toolkit_that_is_too_new_for_the_driver() -> None:
    torch, driver = Torch("2.11.0+cu126", "12.6", (H100,)), Driver("550.54.15", "12.4", (H100,), 1)
    listed = found(torch=torch, driver=driver)
    assert [*listed] == ["toolkit-too-new", "cuda-majors-differ"]
    assert listed["toolkit-too-new"].level == "broken"
    assert "set CUDA_HOME to a toolkit of CUDA 12" in listed["toolkit-too-new"].command


@pytest.mark.parametrize("visible", ["", "7"])
def test_gpus_that_a_variable_hides(visible: str) -> None:
    driver = replace(WELL.driver, visible=visible)
    one = the("gpus-hidden", torch=Torch("2.11.0+cu130", "13.0"), driver=driver)
    assert one.level == "warning" and one.command == "unset CUDA_VISIBLE_DEVICES"
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in one.what


def test_a_variable_that_names_a_gpu_is_not_blamed() -> None:
    torch = Torch("2.11.0+cu130", "13.0", problem="CUDA unknown error")
    one = the("cuda-does-not-start", torch=torch, driver=replace(WELL.driver, visible="0"))
    assert one.why == "CUDA unknown error"


def test_cuda_that_does_not_start() -> None:
    torch = Torch("2.11.0+cu130", "13.0", problem="CUDA unknown error")
    one = the("cuda-does-not-start", torch=torch)
    assert one.level == "broken" and one.why == "CUDA unknown error"
    unknown = Driver("580.82.07", "13.0", (), 1)  # no nvidia-smi, as in many containers
    assert "there is one of NVIDIA" in the("cuda-does-not-start", torch=torch, driver=unknown).what
    assert found(torch=torch, driver=replace(unknown, cuda="")) == {}  # a container without GPUs
    hanging = replace(torch, problem="starting CUDA gave no answer within 60 s", fails=True)
    one = the("cuda-does-not-start", torch=hanging, driver=replace(WELL.driver, gpus=()))
    assert "gave no answer within 60 s" in one.what


def test_a_gpu_without_a_driver() -> None:
    bare = {"torch": Torch("2.13.0+cpu"), "driver": Driver(cards=2)}
    one = the("no-driver", **bare)
    assert "1 GPU of" in the("no-driver", torch=bare["torch"], driver=Driver(cards=1)).what
    assert one.level == "warning" and "2 GPUs of" in one.what and "--gpus all" in one.command


@pytest.mark.parametrize(("gpus", "level"), [((H100,), "warning"), ((), "broken")])
def test_an_nvidia_smi_that_hangs(gpus: tuple[Gpu, ...], level: str) -> None:
    driver = replace(WELL.driver, gpus=gpus, problem="gave no answer within 20 s")
    listed = found(torch=replace(WELL.torch, gpus=gpus), driver=driver)
    one = listed["driver-does-not-answer"]
    assert one.level == level and one.what == "nvidia-smi gave no answer within 20 s"


# --- toolkits and compilers ----------------------------------------------------------------


def test_cuda_majors_that_differ_matter_to_guests_alone() -> None:
    older = replace(WELL.toolkit, version="12.8")
    one = the("cuda-majors-differ", toolkit=older)
    assert one.level == "note"
    assert "native kernels bring their own, and there is no guest here" in one.why
    built = replace(GUEST, library="/x/lltm.so", archs=("9.0a",), is_current=True, loads="yes")
    one = the("cuda-majors-differ", toolkit=older, operators=(SILU, built))
    assert (one.level, one.about) == ("warning", ("lltm",))
    listed = found(toolkit=older, operators=(SILU, GUEST))
    assert listed["cuda-majors-differ"].level == "broken"
    assert "CUDA 13" in listed["cuda-majors-differ"].command


def test_an_nvcc_that_is_a_script() -> None:
    script = replace(WELL.toolkit, nvcc="/usr/local/bin/nvcc", is_script=True)
    one = the("nvcc-is-a-script", toolkit=script)
    assert one.level == "warning" and "/usr/local/bin/nvcc" in one.what
    assert one.command == "export CUDA_HOME=/usr/local/cuda"
    assert found(toolkit=replace(script, chosen="/usr/local/cuda")) == {}


def test_no_toolkit_matters_where_an_operator_has_no_kernels() -> None:
    assert found(toolkit=Toolkit()) == {}
    bare = replace(SILU, archs=())
    one = the("no-toolkit", toolkit=Toolkit(), operators=(bare,))
    assert (one.level, one.about) == ("broken", ("silu",))
    assert one.command == 'pip install "cuda_ops[nvcc]"'
    without = {"torch": Torch("2.13.0+cpu"), "driver": Driver()}
    assert the("no-toolkit", toolkit=Toolkit(), operators=(bare,), **without).level == "warning"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("CUDA_HOME: expected a folder with bin/nvcc, got '/x', which is ignored",
         "unset CUDA_HOME, or set it to a toolkit"),
        ("/x/bin/nvcc did not report its version and is ignored", "/x/bin/nvcc --version"),
        ('/x lacks nvidia-nvvm and is ignored; run pip install "cuda_ops[nvcc]"',
         'pip install "cuda_ops[nvcc]"'),
    ],
)  # fmt: skip
def test_a_toolkit_that_was_passed_over(line: str, command: str) -> None:
    one = the("toolkit-passed-over", toolkit=replace(WELL.toolkit, passed_over=(line,)))
    assert (one.what, one.command) == (line, command)


@pytest.mark.parametrize(("field", "fault"), [("compiler", "no-compiler"), ("ninja", "no-ninja")])
def test_a_missing_tool_is_broken_where_something_has_to_be_built(field: str, fault: str) -> None:
    missing = {field: Tool(problem="there is none", command="install one")}
    one = the(fault, **missing)
    assert (one.level, one.what, one.command) == ("warning", "there is none", "install one")
    listed = found(**missing, operators=(replace(SILU, library="", loads=""),))
    assert listed[fault].level == "broken"


# --- the cache -----------------------------------------------------------------------------


def test_a_cache_that_cannot_be_used() -> None:
    assert the("no-cache", cache=Cache(problem="no home folder")).level == "warning"
    assert the("cache-read-only", cache=replace(WELL.cache, writable=False)).level == "warning"
    text = "/c/x.so: a cache holds code: expected user 1; run rm -r /c/x.so, or set it elsewhere"
    one = the("cache-foreign", cache=replace(WELL.cache, foreign=(text,)))
    assert one.level == "broken" and one.command == "rm -r /c/x.so, or set it elsewhere"
    stale = replace(WELL.cache, entries=9, stale=3, stale_size=3 << 20)
    one = the("cache-stale", cache=stale)
    assert one.level == "note" and "3 of the 9" in one.what and "3.00 MiB" in one.what
    assert one.command == "python -m cuda_ops clean"


# --- plugins and operators -----------------------------------------------------------------


def test_a_plugin_that_failed() -> None:
    plugin = Plugin("mine", "my_package.plugin", "my-package", "failed to import: OSError: none")
    one = the("plugin-failed", plugins=(plugin, Plugin("good", "good.plugin")))
    assert (one.level, one.about) == ("broken", ("mine",)) and "OSError" in one.why
    assert "my-package" in one.command


def test_an_operator_that_a_name_hides() -> None:
    text = "/r/bindings/testing.cpp: operator name 'testing' is taken by the module; rename it"
    one = the("operator-hidden", unusable=(Unusable("testing", text, hidden=True),))
    assert one.level == "broken" and one.command == "rename it" and "testing.cpp" in one.what
    behind = replace(SILU, key="my_ops::norm", hidden="the module my_ops.norm")
    one = the("operator-hidden", operators=(behind,))
    assert one.what == "my_ops::norm is hidden by the module my_ops.norm"
    one = the("no-operator", unusable=(Unusable("x", "/r/x.cu: nothing binds it; bind it"),))
    assert one.command == "bind it"
    assert the("left-aside", left_aside=("x: /a is used, not /b",)).level == "note"


def test_a_gpu_that_libraries_hold_no_code_for() -> None:
    both = replace(WELL.torch, gpus=(H100, A100))
    one = the("arch-missing", torch=both)
    assert (one.level, one.about) == ("broken", ("silu",))
    assert "hold code for 9.0a, and NVIDIA A100-SXM4-40GB has capability 8.0" in one.what
    assert one.command == "python -m cuda_ops dev --arch 8.0 silu"
    fits = replace(SILU, archs=("8.0", "9.0a"))
    assert found(torch=both, operators=(fits,)) == {}
    one = the("no-kernels", operators=(replace(SILU, archs=()),))
    assert one.level == "broken" and one.command == "python -m cuda_ops dev silu"


def test_libraries_that_are_missing_damaged_or_of_another_text() -> None:
    none = replace(SILU, library="", origin="", archs=(), loads="", is_current=None)
    two = (none, replace(none, key="relu"))
    one = the("not-built", operators=two)
    assert one.about == ("silu", "relu") and one.command == "python -m cuda_ops dev silu relu"
    failed = replace(none, problem="silu.cu:3: error")
    assert the("not-built", operators=(failed,)).why == "silu.cu:3: error"
    cut = "/x/silu.abi3.so: expected at least 9 bytes, got 3"
    one = the("library-damaged", operators=(replace(none, root="/x", ignored=(cut,)),))
    assert one.level == "broken" and one.what == cut and one.command.endswith("dev silu")
    cut = "/x/lib/silu.abi3.so: expected at least 9 bytes, got 3"
    one = the("library-damaged", operators=(replace(none, root="/x", ignored=(cut,)),))
    assert one.command.endswith("dev silu, or pip install --force-reinstall --no-deps cuda_ops")
    assert the("library-damaged", operators=(replace(SILU, ignored=(cut,)),)).level == "warning"
    one = the("source-differs", operators=(replace(SILU, is_current=False),))
    assert (one.level, one.about) == ("warning", ("silu",))


@pytest.mark.parametrize("how", ["crashes", "hangs"])
def test_a_library_that_takes_the_process_with_it(how: str) -> None:
    bad = replace(SILU, loads=how, problem="opening its library was ended by SIGABRT")
    one = the(f"library-{how}", operators=(bad,))
    assert one.level == "broken" and one.why == "/x/silu.so" and "SIGABRT" in one.what


def test_a_guest_of_another_torch() -> None:
    for abi, text in (
        ("torch2_10_0_cu130_py310", "torch 2.10.0+cu130, Python 3.10"),
        ("torch2_13_0_py312", "torch 2.13.0, Python 3.12"),
        ("torchnightly", "torchnightly"),
    ):
        one = the("guest-of-another-torch", operators=(replace(GUEST, other_torches=(abi,)),))
        assert one.level == "broken" and one.why == f"it was built for {text}"
        assert one.command == "python -m cuda_ops dev --root '/my ops' lltm"
    opened = replace(
        GUEST, library="/x/lltm.so", archs=("9.0",), loads="no",
        problem="lltm: lltm.so does not load: /x/lltm.so: undefined symbol: _ZN3c105ErrorC2Ev",
    )  # fmt: skip
    one = the("guest-of-another-torch", operators=(opened,))
    assert "lltm has no library for torch 2.11.0+cu130, Python 3.12.1" in one.what
    own = replace(opened, problem="lltm.so: undefined symbol: lltm_launch")
    assert the("library-does-not-load", operators=(own,)).why == own.problem


def test_symbols_that_the_oldest_torch_lacks() -> None:
    later = replace(SILU, later_symbols=("aoti_torch_new",))
    one = the("later-symbols", operators=(later,))
    assert one.level == "warning" and "torch 2.10 does not have: aoti_torch_new" in one.what
    assert the("cpp-symbols", operators=(replace(SILU, cpp_symbols=("_ZN2at3xyzEv",)),)).about


def test_a_probe_that_raised_is_named() -> None:
    one = the("probe-failed", failures=(Failure("cache", "OSError: disk"),))
    assert one.level == "broken" and one.what == "cache: OSError: disk"


def test_facts_that_cannot_be_judged_hide_no_other_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(facts: Facts) -> Any:
        raise KeyError("odd")

    monkeypatch.setattr(rules, "_RULES", (raises, *rules._RULES))
    listed = found(cache=replace(WELL.cache, writable=False))
    assert [*listed] == ["probe-failed", "cache-read-only"]
    assert listed["probe-failed"].what == "raises: KeyError: 'odd'"


def test_no_torch() -> None:
    one = the("no-torch", torch=Torch(problem="ModuleNotFoundError: No module named 'torch'"),
              operators=(), driver=Driver())  # fmt: skip
    assert one.command == "pip install torch"
    broken = Torch(problem="OSError: libcudart.so.13: cannot open", fails=True)
    one = the("no-torch", torch=broken, operators=(), driver=Driver())
    assert one.command == "pip install --force-reinstall torch" and "libcudart" in one.why


def test_what_is_broken_comes_first() -> None:
    changed = replace(WELL, cache=replace(WELL.cache, stale=1), ninja=Tool(problem="none"))
    listed = findings(replace(changed, failures=(Failure("cache", "OSError"),)))
    assert [one.level for one in listed] == ["broken", "warning", "note"] == [*LEVELS]
    assert report.summary(listed) == "1 broken. 1 warning. 1 note."


# --- the report ----------------------------------------------------------------------------


def shown(facts: Facts) -> str:
    console = Console(width=120, record=True, highlight=False, soft_wrap=True)
    with console.capture() as capture:
        report.show(facts, findings(facts), console)
    return capture.get()


def test_the_report_says_plainly_that_there_is_no_gpu() -> None:
    text = shown(replace(WELL, torch=Torch("2.13.0+cpu"), driver=Driver()))
    assert re.search(r"^GPUs +none here: only CPU kernels run", text, re.MULTILINE)
    assert re.search(r"^driver +none *$", text, re.MULTILINE)
    assert text.endswith("Nothing is broken.\n")


def test_the_report_has_each_finding_with_its_command() -> None:
    text = shown(replace(WELL, ninja=Tool(problem="there is [no] ninja", command="pip install n")))
    assert "warning there is [no] ninja\n  why: nothing can be built; what is built works\n" in text
    assert "  mend: pip install n\n" in text
    text = shown(replace(WELL, operators=(replace(SILU, archs=None, is_current=False),)))
    assert re.search(r"^silu +cached +unknown +another +yes", text, re.MULTILINE)
    assert "  about: silu\n" in text


def test_the_json_is_the_facts_and_the_findings() -> None:
    facts = replace(WELL, ninja=Tool(problem="none"))
    read = json.loads(report.as_json(facts, findings(facts)))
    assert read["format"] == all_facts.FORMAT and read["torch"]["gpus"][0]["capability"] == "9.0"
    assert [one["fault"] for one in read["findings"]] == ["no-ninja"]
    assert read["findings"][0].keys() == {one.name for one in fields(Finding)}


def _documented() -> str:
    page = (REPO / "docs" / "command-line.md").read_text(encoding="utf-8")
    return page.partition("## python -m cuda_ops doctor")[2].partition("\n## ")[0]


def test_every_field_of_the_json_is_documented() -> None:
    classes = [
        value for value in vars(all_facts).values()
        if inspect.isclass(value) and is_dataclass(value) and value.__module__ == all_facts.__name__
    ]  # fmt: skip
    assert len(classes) > 8
    names = {field.name for one in (*classes, Finding) for field in fields(one)}
    listed = set(re.findall(r"`(\w+)`", _documented()))
    assert names <= listed, names - listed


def test_every_fault_is_documented() -> None:
    """Those that the rules name, and those that follow from a field."""
    made = {"library-crashes", "library-hangs", "later-symbols", "cpp-symbols"}
    for module in (of_machine, of_operators, rules):
        tree = ast.parse(inspect.getsource(module))
        texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        made |= {t for t in texts if isinstance(t, str) and re.fullmatch(r"[a-z]+(-[a-z]+)+", t)}
    table = _documented().partition("| fault |")[2].partition("\n\n")[0]
    listed = set(
        re.findall(r"`([a-z]+(?:-[a-z]+)+)`", re.sub(r"^(\|[^|]*\|).*", r"\1", table, flags=re.M))
    )
    assert made == listed


def test_the_page_shows_the_rows_and_lines_that_the_report_has() -> None:
    page = (REPO / "docs" / "how-to" / "doctor.md").read_text(encoding="utf-8")
    block = page.partition("```console\n")[2].partition("```")[0]
    machine, table, said, last = block.partition("\n")[2].split("\n\n")
    shown_rows = [line.split()[0] for line in machine.splitlines()]
    assert shown_rows == [name for name, _ in report._machine(WELL)]
    header = shown(WELL).split("\n\n")[1].splitlines()[0]
    assert table.splitlines()[0].split() == header.split()
    starts = {line.split()[0] for line in said.splitlines()}
    assert (
        starts == {"warning", "note", "why:", "mend:"}
        and last == "Nothing is broken. 3 warnings. 1 note.\n"
    )
