"""torch's own four tests of a registration."""

from __future__ import annotations

import torch

from cuda_ops.testing.arguments import split
from cuda_ops.testing.case import Case, NotRunError, check, defined
from cuda_ops.testing.checks.registration import TITLE
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.tolerance import is_floating

_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor",
          "test_aot_dispatch_dynamic")  # fmt: skip


@check("opcheck", 13, TITLE,
       Draw(3, range(1, 513)), quick=True)  # fmt: skip
def opcheck(case: Case) -> None:
    """Tests schema, autograd registration, fake, and AOT dispatch with dynamic shapes."""
    declared = case.subject.gradient == "declared"
    args = case.leaves() if declared else case.arguments()
    op = case.subject.op
    args = defined(case, args)  # which calls it: a refused sample must not count as a finding
    # Whether an argument was changed is asked by torch.allclose, which there is not for numbers of
    # eight bits; the check of mutation asks it too.
    narrow = any(is_floating(value) and value.dtype.itemsize == 1 for value in args)
    results = torch.library.opcheck(
        op.overload, *split(op, args), test_utils=_TESTS[narrow:], raise_exception=False
    )
    wrong = [f"{test}: {text}" for test, text in results.items() if text != "SUCCESS"]
    # torch's test of the schema computes with the arguments, in dtypes that it may only store.
    lacking = [text for text in wrong if '" not implemented for' in text]
    assert len(wrong) == len(lacking), "; ".join(wrong)
    if lacking:
        raise NotRunError(f"torch cannot compute in a dtype of this sample: {lacking[0]}")
