"""``--watch``: one line per save, whatever the save does."""

from __future__ import annotations

import io
import queue
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import ScratchOp, needs_nvcc, save
from rich.console import Console

from cuda_ops.build import discovery
from cuda_ops.dev import watch
from cuda_ops.dev.watch import Save
from cuda_ops.registry import registry

X = torch.tensor([1.0, 2.0, 3.0])


@dataclass
class Watching:
    """A watch in a thread; ``line()`` is what it prints for the next save."""

    op: ScratchOp
    checked: list[str]
    lines: queue.Queue[str]
    thread: threading.Thread

    def line(self) -> str:
        return self.lines.get(timeout=60)


class _Ready(io.StringIO):
    """Where the watch prints; it says "watching" once it has measured what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.started = threading.Event()

    def write(self, text: str) -> int:
        if text.startswith("watching"):
            self.started.set()
        return super().write(text)


@pytest.fixture
def watching(scratch_op: ScratchOp) -> Iterator[Watching]:
    scratch_op.write("v * 2", "g * 2")
    scratch_op.reload()
    lines: queue.Queue[str] = queue.Queue()
    checked: list[str] = []
    stop, out = threading.Event(), _Ready()
    console = Console(file=out, width=1000)
    thread = threading.Thread(
        target=watch.watch, args=([scratch_op.name], None, console, checked.append, stop, lines.put)
    )
    thread.start()
    try:
        assert out.started.wait(60)
        yield Watching(scratch_op, checked, lines, thread)
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    assert lines.empty(), "more lines than saves"


def test_a_save_before_the_watch_began_is_loaded_too(scratch_op: ScratchOp) -> None:
    scratch_op.write("v * 2", "g * 2")
    scratch_op.reload()
    scratch_op.write("v * 5", "g * 5")
    lines: queue.Queue[str] = queue.Queue()
    stop, console = threading.Event(), Console(file=io.StringIO(), width=1000)
    options = ([scratch_op.name], None, console, lambda key: None, stop, lines.put)
    thread = threading.Thread(target=watch.watch, args=options)
    thread.start()
    try:
        assert re.match(rf"{scratch_op.name}: .*, gradient ok, ", lines.get(timeout=60))
    finally:
        stop.set()
        thread.join(60)
    assert torch.equal(scratch_op.function(X), X * 5)


@pytest.mark.slow
def test_each_save_is_one_line_and_a_broken_one_leaves_the_old_code(watching: Watching) -> None:
    op = watching.op
    function = op.function
    op.write("v * 3", "g * 3")
    assert re.fullmatch(
        rf"{op.name}: \d+\.\d\d s, no reference, gradient ok, "
        rf"[\d.]+ us \([+-]\d+ %\), \d+ GB/s \([+-]\d+ %\)",
        watching.line(),
    )
    assert torch.equal(function(X), X * 3)
    op.write("v * 3", "g * 2")
    wrong = r"gradient WRONG: 'x': got d out\S* / d x\S* = 2, expected 3, "
    assert re.match(rf"{op.name}: \d+\.\d\d s, no reference, {wrong}[\d.]+ us", watching.line())
    op.write("v * undeclared")
    line = watching.line()
    assert re.search(rf"{op.name}.cpp:\d+:.*undeclared", line)
    assert line.endswith("; the code before it goes on serving")
    assert torch.equal(function(X), X * 3)
    op.write("v * 4", "g * 4")
    assert re.match(rf"{op.name}: .* us \([+-]\d+ %\)", watching.line())
    assert torch.equal(function(X), X * 4)
    op.write("v * 3", "g * 3")  # built before: no build
    line = watching.line()
    assert float(re.findall(r": (\d+\.\d\d) s", line)[0]) < 1
    assert torch.equal(function(X), X * 3)
    # After each save that is loaded, before the line of the next one.
    assert watching.checked[:3] == [op.name] * 3


def test_a_save_reads_each_file_once_before_and_once_after_compiling(
    scratch_op: ScratchOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch_op.root / "utils" / "scratch_save.h").write_text("// one")
    scratch_op.write(include='#include "scratch_save.h"')
    hashed, looked_at = Counter[str](), Counter[str]()
    digest, code_of = discovery._digest, discovery.code_of

    def counted(name: str, contents: bytes) -> bytes:
        hashed[name] += 1
        return digest(name, contents)

    def code(path: Path) -> str:
        looked_at[path.name] += 1
        return code_of(path)

    monkeypatch.setattr(discovery, "_digest", counted)
    monkeypatch.setattr(discovery, "code_of", code)
    pair = registry().rescan()[scratch_op.name]
    text, _ = watch._text(pair)
    assert ", no reference, gradient ok" in watch._after_save(pair, text, None, "cpu", {})
    names = (scratch_op.binding.name, "scratch_save.h", "binding.h")
    assert {name: hashed[name] for name in names} == dict.fromkeys(names, 2)
    # Once as the first file of its root, which names the namespace, and once for its own sake.
    # Other tests in this process may have added roots, whose first files are read too.
    assert looked_at[scratch_op.binding.name] == 2


@pytest.mark.slow
def test_a_plugin_that_raises_ends_neither_the_watch_nor_the_operator(watching: Watching) -> None:
    plugin = watching.op.root / "ops" / f"{watching.op.name}.py"
    text = (
        "from cuda_ops.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def cuda_ops_reference(op):\n"
        "    return {}\n"
    )
    try:
        save(plugin, text.format("lambda x: x / undeclared"))
        assert re.search(
            r"s, loaded; the kit could not compare .* NameError: .*undeclared", watching.line()
        )
        save(plugin, text.format("undeclared"))
        assert re.search(r"hook cuda_ops_reference.*NameError", watching.line())
        save(plugin, text.format("lambda x: x * 2"))
        assert re.search(r"max error 0\.0e\+00", watching.line())
    finally:
        plugin.unlink(missing_ok=True)
    assert re.match(rf"{watching.op.name}: ", watching.line())


@pytest.mark.slow
def test_a_kernel_dropped_for_this_device_is_not_timed(watching: Watching) -> None:
    if torch.cuda.is_available():
        pytest.skip("the operator has no kernel for a GPU")
    watching.op.write("v", key="cuda")
    assert re.fullmatch(
        rf"{watching.op.name}: \d+\.\d\d s, no reference: implement cuda_ops_reference, "
        "gradient not checked: no CPU kernel in this build, not timed: no CPU kernel",
        watching.line(),
    )


@needs_nvcc
@pytest.mark.slow
def test_a_kernel_added_meanwhile_is_built_too(watching: Watching) -> None:
    kernel = watching.op.root / "kernels" / f"{watching.op.name}.cu"
    save(kernel, "__global__ void unused(float* out) { *out = 1; }\n")
    assert re.search(r"\d+ registers, 0 bytes spilled", watching.line())


@pytest.mark.slow
def test_a_file_that_is_gone_is_waited_for(watching: Watching) -> None:
    text = watching.op.binding.read_text()
    watching.op.binding.unlink()
    assert re.search(rf"{watching.op.name}.cpp is gone; waiting for it", watching.line())
    save(watching.op.binding, text)
    assert re.match(rf"{watching.op.name}: \d", watching.line())


def test_a_line_shows_what_changed_since_the_save_before() -> None:
    before = Save(1.0, 1e-7, 100e-6, 1000.0, 32, 0)
    after = Save(2.5, 2e-7, 75e-6, 1500.0, 40, 8)
    assert before.line("silu", None) == (
        "silu: 1.00 s, max error 1.0e-07, 100.0 us, 1000 GB/s, 32 registers, 0 bytes spilled"
    )
    assert after.line("silu", before) == (
        "silu: 2.50 s, max error 2.0e-07, 75.0 us (-25 %), 1500 GB/s (+50 %), "
        "40 registers (+8), 8 bytes spilled (+8)"
    )
    untimed = Save(0.5, 0.0, "no CPU kernel", None, None, None)
    assert untimed.line("silu", before) == (
        "silu: 0.50 s, max error 0.0e+00, not timed: no CPU kernel"
    )
