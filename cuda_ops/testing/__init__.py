"""The test kit checks what must hold for any operator with a schema, a signature line, a reference.

    from cuda_ops.testing import check_op

    report = check_op("silu")
    assert report.passed, report

The same checks run as ``python compile_dev.py --check OP`` (most of them, in half a minute) and as
``pytest --cuda-ops OP`` (all of them). :func:`describe` prepares an operator of another library for
them. docs/testing.md says what each check finds.

Each name is imported on first use, since plugins often need the samples alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuda_ops.testing.checks import CHECKS as CHECKS
    from cuda_ops.testing.profiles import PROFILES as PROFILES
    from cuda_ops.testing.profiles import Profile as Profile
    from cuda_ops.testing.quick import quick_error as quick_error
    from cuda_ops.testing.report import CheckEntry as CheckEntry
    from cuda_ops.testing.report import CheckReport as CheckReport
    from cuda_ops.testing.runner import check_op as check_op
    from cuda_ops.testing.samples import DeviceArg as DeviceArg
    from cuda_ops.testing.samples import Sample as Sample
    from cuda_ops.testing.samples import TensorArg as TensorArg
    from cuda_ops.testing.samples import strategy as strategy
    from cuda_ops.testing.subject import Subject as Subject
    from cuda_ops.testing.subject import describe as describe
    from cuda_ops.testing.tolerance import EPSILONS as EPSILONS

_HOMES = {
    "CHECKS": "checks",
    "quick_error": "quick",
    "PROFILES": "profiles",
    "Profile": "profiles",
    "CheckEntry": "report",
    "CheckReport": "report",
    "check_op": "runner",
    "DeviceArg": "samples",
    "Sample": "samples",
    "TensorArg": "samples",
    "strategy": "samples",
    "Subject": "subject",
    "describe": "subject",
    "EPSILONS": "tolerance",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cuda_ops.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cuda_ops.testing.{_HOMES[name]}"), name)
