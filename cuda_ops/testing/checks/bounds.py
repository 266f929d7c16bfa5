"""Class 3: reads and writes outside of the tensors, on tails or at bad indices."""

from __future__ import annotations

import torch

from cuda_ops.testing.case import Case, NotRunError, check
from cuda_ops.testing.compare import same_bits, tensors, widened
from cuda_ops.testing.draw import Draw
from cuda_ops.testing.poison import POISONS, poisoned
from cuda_ops.testing.subject import Subject

#: Bytes on either side of an input; a multiple of every alignment that kernels ask for.
_GUARD = 4096
#: The CUDA caching allocator rounds up to this, and nobody owns what is between.
_ROUNDED = 512


@check("bounds", 3, "out-of-bounds access", Draw(8, range(1, 4097)), quick=True)
def bounds(case: Case) -> None:
    """Guard zones around the inputs, and behind CUDA outputs, are neither used nor changed."""
    results = []
    for byte in POISONS:
        guarded = [
            _Guarded(v, byte) if isinstance(v, torch.Tensor) else v for v in case.arguments()
        ]
        args = [v.tensor if isinstance(v, _Guarded) else v for v in guarded]
        with poisoned(case.device, byte):
            outputs = case.call(*args)
            for k, output in enumerate(outputs):
                beyond = _behind(output) if case.on_cuda else None
                assert beyond is None or bool((beyond == byte).all()), (
                    f"memory behind output {k} was written"
                )
        results.append([output.clone() for output in outputs])
        for i, value in enumerate(guarded):
            name = case.subject.op.argument_names[i]
            assert not isinstance(value, _Guarded) or value.intact(), (
                f"memory around argument '{name}' was written"
            )
    for k, (a, b) in enumerate(zip(*results, strict=True)):
        assert same_bits(a, b) or not case.subject.claims.deterministic, (
            f"output {k} changes with memory around the arguments"
        )


class _Guarded:
    """A contiguous tensor between two zones of known bytes."""

    def __init__(self, tensor: torch.Tensor, byte: int) -> None:
        # Integers and bools as small as an index may be: reading one must not lead far away.
        self._byte = byte if tensor.is_floating_point() else byte & 1
        size = tensor.nbytes + 2 * _GUARD
        self._bytes = torch.full((size,), self._byte, dtype=torch.uint8, device=tensor.device)
        inner = self._bytes[_GUARD : _GUARD + tensor.nbytes].view(tensor.dtype)
        self.tensor = inner.view(tensor.shape).copy_(tensor)
        self._end = _GUARD + tensor.nbytes

    def intact(self) -> bool:
        zones = torch.cat([self._bytes[:_GUARD], self._bytes[self._end :]])
        return bool((zones == self._byte).all())


def _behind(output: torch.Tensor) -> torch.Tensor | None:
    """What the allocator rounded an output up by."""
    nbytes = output.untyped_storage().nbytes()
    length = -nbytes % _ROUNDED
    if not nbytes or not length:
        return None

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012 - a protocol's attribute
            "shape": (length,),
            "typestr": "|u1",
            "data": (output.untyped_storage().data_ptr() + nbytes, False),
            "version": 2,
        }

    return torch.as_tensor(Memory(), device=output.device)


# --- indices ---------------------------------------------------------------------------


def _no_index(subject: Subject, device: str) -> str:
    integers = [d for d in subject.op.dtypes if not d.is_floating_point]
    if subject.op.signature is not None and not integers and subject.op.dtypes:
        return "no integer tensors"
    return ""


@check("indices", 3, "out-of-bounds access by an index", Draw(6, range(1, 4097)),
       excuse=_no_index)  # fmt: skip
def indices(case: Case) -> None:
    """Indices at the last element, all the same, and outside: a right result or an error."""
    at = [i for i, arg in enumerate(case.sample.args) if getattr(arg, "below", None) is not None]
    if not at:
        raise NotRunError("no index tensors: samples give none a TensorArg(below=...)")
    for i in at:
        arg = case.sample.args[i]
        for value, allowed in ((arg.below - 1, True), (0, True), (-1, False), (arg.below, False)):
            args = list(case.arguments())
            args[i] = torch.full_like(args[i], value)
            name = case.subject.op.argument_names[i]
            if allowed:
                expected = _reference_with(case, i, value)
                for a, e in zip(tensors(case.call(*args)), expected, strict=True):
                    torch.testing.assert_close(
                        a.cpu().to(e.dtype), e, equal_nan=True, rtol=1e-2, atol=1e-2,
                        msg=f"'{name}' filled with {value} gives a wrong result",
                    )  # fmt: skip
                continue
            guarded = [_Guarded(v, POISONS[0]) if isinstance(v, torch.Tensor) else v for v in args]
            first = _outcome(case, guarded)
            other = [_Guarded(v, POISONS[1]) if isinstance(v, torch.Tensor) else v for v in args]
            second = _outcome(case, other)
            zones = [v for v in (*guarded, *other) if isinstance(v, _Guarded)]
            assert all(v.intact() for v in zones), f"'{name}' of {value} writes out of bounds"
            assert len(first) == len(second) and all(
                same_bits(a, b) for a, b in zip(first, second, strict=True)
            ), f"'{name}' of {value}, outside of {arg.below}, reads out of bounds"


def _outcome(case: Case, guarded: list[object]) -> list[torch.Tensor]:
    """The outputs, none if the operator refuses."""
    args = [v.tensor if isinstance(v, _Guarded) else v for v in guarded]
    try:
        return tensors(case.call(*args))
    except (RuntimeError, IndexError, ValueError):
        return []


def _reference_with(case: Case, position: int, value: int) -> list[torch.Tensor]:
    wide = widened(case.sample)
    wide[position] = torch.full_like(wide[position], value)
    assert case.subject.reference is not None
    return tensors(case.subject.reference(*wide))
