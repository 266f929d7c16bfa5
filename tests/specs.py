"""Operators without a library, for tests of what is derived from schema and signature line."""

from __future__ import annotations

import torch

from cuda_ops.signature import parse_signature
from cuda_ops.spec import OpSpec

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def spec(schema, signature, dtypes=FLOATING, keys=("CPU",), saved=(), **words):
    parsed = torch._C.parse_schema(schema)
    line = parse_signature(signature) if signature else None
    return OpSpec(
        parsed.name, "pair", schema, parsed, line, dtypes, "", keys, False, saved=saved, **words
    )  # fmt: skip


def pair(*ops):
    """Makes the specs siblings of one pair; returns the first one."""
    for op in ops:
        op.siblings.update({other.name: other for other in ops})
    return ops[0]
