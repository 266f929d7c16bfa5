"""Says what to install where there is no C++ compiler, as this distribution calls it.

Standard library only, so that ``setup.py`` can use it before torch is there.
"""

from __future__ import annotations

import os
import platform
import shutil

from cuda_ops.build import toolchain

#: The command that installs a C++ compiler, by the ID of a distribution in its os-release.
_INSTALL = {
    "debian": "apt install g++",
    "ubuntu": "apt install g++",
    "fedora": "dnf install gcc-c++",
    "rhel": "dnf install gcc-c++",
    "centos": "dnf install gcc-c++",
    "arch": "pacman -S gcc",
    "alpine": "apk add g++",
    "suse": "zypper install gcc-c++",
}


def cxx_problem() -> str:
    """Returns why no C++ file can be compiled here and what to do; empty where it can.

    Raises:
        BuildError: ``CXX`` leaves a quote open.

    Example::

        if problem := cxx_problem():  # "there is no C++ compiler 'c++'; install one (as root: ..."
            raise BuildError(problem)
    """
    compiler, *_ = toolchain.cxx()
    if shutil.which(compiler) is not None:
        return ""
    if os.environ.get("CXX"):
        return (
            f"there is no C++ compiler {compiler!r}, which CXX names; set CXX to one that is "
            f"there, or unset it and install c++ ({_how()})"
        )
    return f"there is no C++ compiler {compiler!r}; install one ({_how()}), or set CXX to one"


def _how() -> str:
    """Returns the command of this distribution, or of the one that it is made like."""
    try:
        system = platform.freedesktop_os_release()
    except OSError:  # no os-release
        system = {}
    for name in (system.get("ID", ""), *system.get("ID_LIKE", "").split()):
        if name in _INSTALL:
            return f"as root: {_INSTALL[name]}"
    return "the package of g++ or clang++ for this system"
