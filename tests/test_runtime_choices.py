"""Choices on disk: one file an operator, which processes share and damage does not break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuda_ops.runtime.tuning import choices
from cuda_ops.runtime.tuning.choices import Key, Stored

REPO = Path(__file__).resolve().parent.parent


def key(op: str = "an_op", columns: int = 3) -> Key:
    return Key(op, "text", "build", "GPU", "1.2", "float32", (1, columns))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDA_OPS_CACHE", str(tmp_path))
    return tmp_path


def test_a_choice_comes_back_as_it_was_kept(cache: Path) -> None:
    one = Stored(key(), "wide", {"width": 16}, "why", {"wide": (0.9, 0.8, 0.95)})
    choices.keep(one)
    assert choices.stored("an_op") == [one]
    assert choices.operators() == ["an_op"]
    assert (cache / "tuned" / "an_op.json").stat().st_mode & 0o022 == 0
    assert choices.forget("an_op") == 1
    assert choices.stored("an_op") == [] == choices.operators()


def test_one_key_has_one_choice_and_others_have_theirs(cache: Path) -> None:
    choices.keep(Stored(key(), "first", {}, "why"))
    changed: Any
    for field, changed in (
        ("source", "other"), ("build", "other"), ("device", "other"), ("driver", "other"),
        ("dtype", "float16"), ("bits", (1, 4)),
    ):  # fmt: skip
        choices.keep(Stored(replace(key(), **{field: changed}), "other", {}, "why"))
    choices.keep(Stored(key(), "second", {}, "why"))
    found = choices.stored("an_op")
    assert len(found) == 7
    assert [one.name for one in found if one.key == key()] == ["second"]


def test_operators_of_another_namespace_have_a_file_too(cache: Path) -> None:
    choices.keep(Stored(key("my_ops::scale"), "first", {}, "why"))
    assert choices.operators() == ["my_ops::scale"]
    assert choices.stored("scale") == []


def test_what_was_chosen_longest_ago_goes_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "_MOST", 3)
    for columns in (5, 6, 7, 5, 8):
        choices.keep(Stored(key(columns=columns), "first", {}, "why"))
    assert [one.key.bits[1] for one in choices.stored("an_op")] == [7, 5, 8]


WRITER = """
import sys
from cuda_ops.runtime.tuning.choices import Key, Stored, keep
number = int(sys.argv[1])
for i in range(12):
    bits = (number, i)
    keep(Stored(Key("an_op", "text", "build", "GPU", "1.2", "float32", bits), "n", {"a": i}, "why"))
"""


def test_processes_that_write_at_once_lose_nothing(cache: Path) -> None:
    command = [sys.executable, "-c", WRITER]
    running = [
        subprocess.Popen([*command, str(number)], cwd=REPO, env={**os.environ})
        for number in range(4)
    ]
    assert [process.wait(timeout=120) for process in running] == [0] * 4
    found = choices.stored("an_op")
    assert {one.key.bits for one in found} == {(n, i) for n in range(4) for i in range(12)}
    assert all(one.settings == {"a": one.key.bits[1]} for one in found)
    assert not list((cache / "tuned").glob(".*"))  # no half-written file is left


def _text(change: Callable[[dict[str, Any]], Any]) -> str:
    one: dict[str, Any] = {
        "key": {"op": "an_op", "source": "s", "build": "b", "device": "d", "driver": "",
                "dtype": "float32", "bits": [1, 2]},
        "name": "n", "settings": {"a": 1}, "reason": "r", "ratios": {},
    }  # fmt: skip
    whole = {"format": choices.FORMAT, "choices": [one]}
    change(whole)
    return json.dumps(whole)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        _text(lambda whole: whole.update(format=99)),
        _text(lambda whole: whole.update(choices=7)),
        _text(lambda whole: whole["choices"][0].pop("name")),
        _text(lambda whole: whole["choices"][0]["key"].update(op="another_op")),
        _text(lambda whole: whole["choices"][0]["key"].update(bits=[1, "2"])),
        _text(lambda whole: whole["choices"][0]["key"].update(more=1)),
        _text(lambda whole: whole["choices"][0].update(settings={"a": "8"})),
        _text(lambda whole: whole["choices"][0].update(ratios={"a": [1]})),
        "\x00\xff",
    ],
)
def test_a_file_that_is_none_of_ours_is_left_out_with_a_warning(cache: Path, text: str) -> None:
    assert "an_op" in _text(lambda whole: None)
    path = choices.path_of("an_op")
    path.parent.mkdir(mode=0o700)
    path.write_text(text, encoding="latin-1")
    with pytest.warns(UserWarning, match=r"an_op.json: expected choices for an_op, and left out: "):
        assert choices.stored("an_op") == []
    with pytest.warns(UserWarning, match="left out"):
        choices.keep(Stored(key(), "first", {}, "why"))
    assert [one.name for one in choices.stored("an_op")] == ["first"]


def test_a_whole_file_is_read(cache: Path) -> None:
    path = choices.path_of("an_op")
    path.parent.mkdir(mode=0o700)
    path.write_text(_text(lambda whole: None))
    assert [one.settings for one in choices.stored("an_op")] == [{"a": 1}]


def test_a_file_that_others_may_write_is_left_out(cache: Path) -> None:
    choices.keep(Stored(key(), "first", {}, "why"))
    choices.path_of("an_op").chmod(0o666)
    with pytest.warns(UserWarning, match="expected only its owner to write it"):
        assert choices.stored("an_op") == []
