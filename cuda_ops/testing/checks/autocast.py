"""``torch.autocast``, also with dtypes that were mixed before."""

from __future__ import annotations

import torch

from cuda_ops.dispatch.autocast import cast
from cuda_ops.testing.case import Case, called, check
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.tolerance import is_floating


@check("autocast", None, "wrong under autocast or with mixed dtypes",
       Draw(3, range(1, 513), torch.float32), quick=True)  # fmt: skip
def autocast(case: Case) -> None:
    """Checks that arguments are cast by the policy; without one, autocast must change nothing."""
    kind = case.device.partition(":")[0]
    lower = torch.bfloat16
    args, names = case.arguments(), case.subject.op.argument_names
    floating = [i for i, value in enumerate(args) if is_floating(value)]
    for lowered in [None, *(floating if len(floating) > 1 else [])]:
        mixed = tuple(v.to(lower) if k == lowered else v for k, v in enumerate(args))
        with torch.autocast(kind, dtype=lower):
            wanted, _ = cast(case.subject.autocast, kind, names, mixed, {})
        expected = called(case, wanted)
        with torch.autocast(kind, dtype=lower):
            actual = called(case, mixed)
        dtypes = ", ".join(str(mixed[i].dtype).removeprefix("torch.") for i in floating)
        assert actual is not None or lowered is not None or called(case, args) is None, (
            f"with {dtypes} it is refused under autocast, and taken outside: its policy must cast "
            "the arguments alike"
        )
        assert (actual is None) == (expected is None), (
            f"with {dtypes} it is {'refused' if actual is None else 'accepted'} under autocast, "
            "and not outside"
        )
        if actual is None or expected is None:
            continue
        inside, outside = [a.dtype for a in actual], [e.dtype for e in expected]
        assert inside == outside, f"with {dtypes} the result is {inside}, expected {outside}"
        case.same(actual, expected, f"with {dtypes} under autocast")
        if lowered is not None and case.subject.autocast is None:
            # Mixed dtypes are accepted: the same values in the wider dtype give the right result,
            # up to the rounding of the narrower one.
            rounded = tuple(v.float() if k == lowered else v for k, v in enumerate(mixed))
            narrow = [a.to(lower) if is_floating(a) else a for a in actual]
            case.same(narrow, case.call(*rounded), f"with {dtypes}")
