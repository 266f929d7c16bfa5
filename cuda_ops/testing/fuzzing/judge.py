"""Runs one call and says whether the operator treated it as it should."""

from __future__ import annotations

import ast
import inspect
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError

from cuda_ops.errors import CudaOpsError
from cuda_ops.testing.compare import check_fake
from cuda_ops.testing.fuzzing import pieces, ways
from cuda_ops.testing.fuzzing.sizes import (
    OVERFLOWED,
    address,
    bytes_of,
    foretold,
    is_large,
    is_plain,
    is_slow,
    tensors_in,
)
from cuda_ops.testing.subject import Subject

#: What a wrong call may raise, as docs/testing.md says. Subclasses count, but those of ``_BROKEN``.
_ALLOWED = (CudaOpsError, TypeError, ValueError, NotImplementedError, RuntimeError)
_BROKEN = (RecursionError, UnicodeError, torch.OutOfMemoryError)
_INTERNAL = re.compile(
    "INTERNAL ASSERT|internal error|please report a bug|can't allocate memory|not enough memory"
    "|bad_alloc",
    re.IGNORECASE,
)
#: What is said before the operator is asked: by overrides that see what its public function does,
#: and by torch of a view of freed memory, as it makes one to print an argument, of a tensor of
#: zeros that has no memory to write to, and of named dims, which torch 2.13 no longer has.
_NOT_OURS = (
    "an override of", "use an uninitialized parameter", "setStorage: sizes",
    "ZeroTensors are immutable", "Creating a new Tensor subclass",
    "Named tensors are currently unsupported",
)  # fmt: skip
_PACKAGE, _KIT = Path(__file__).parents[2], Path(__file__).parents[1]


@dataclass(frozen=True)
class Verdict:
    """What became of one call."""

    #: ``unmade``: torch makes no such argument, or the operator was not reached; ``large``: valid
    #: and too large to run.
    status: Literal["returned", "refused", "unmade", "large", "finding"]
    #: What was wrong or, of a call that was refused, the error's text.
    text: str = ""

    @property
    def form(self) -> str:
        """The text without what differs from one call to the next: numbers and lists of them."""
        number = r"(-?\d[\d.e+]*|0x[0-9a-f]+|\binf\b|\bnan\b)"
        return re.sub(rf"{number}(, {number})*", "#", self.text)


class _Reached:
    """Stands between the transforms and the operator; knows what came out of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.count = 0
        self.error: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        try:
            return self.function(*args, **kwargs)
        except _StopRecomputationError:  # torch's way of ending a recomputation early
            raise
        except Exception as error:
            self.error = error
            raise


class Judge:
    """Judges calls of one operator.

    ``before`` is called when its arguments are made, ``after`` when it is judged.
    """

    def __init__(
        self,
        subject: Subject,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.op = subject.op
        self.before, self.after = before, after
        space, name = re.escape(self.op.namespace), re.escape(self.op.name)
        self._call = re.compile(rf"(torch\.ops\.)?\b{space}\.{name}\b(\.default)?(?=[(),])")
        parts = (part.rpartition("::")[2] for part in self.op.calls)
        self._names = [self.op.name, *parts, *_NOT_OURS]
        self._scope = {**pieces.known(), **ways.KNOWN}

    def __call__(self, line: str) -> Verdict:
        """Runs a call as it prints, ``silu: cuda_ops.silu(None)``, and judges it.

        Raises:
            ValueError: the line is no call of the operator.
        """
        tree, name = self.parsed(line)
        if self.op.is_composite and ("freed(" in line or "shrunk(" in line):
            return Verdict("unmade", "torch's own functions read memory that is not there")
        function = self._function(name)
        scope = dict(self._scope)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                args = [self._value(node, scope) for node in tree.args]
                kwargs = {str(word.arg): self._value(word.value, scope) for word in tree.keywords}
            except Exception as error:
                return Verdict("unmade", f"{type(error).__name__}: {error}")
            if self._is_blind(function, args, kwargs):
                return Verdict("unmade", "torch takes any int for a dtype, and may crash")
            way = self._call.sub("_function", ast.unparse(tree.func) + ",")[:-1]
            self.before()
            kept = _thread_state()
            try:
                verdict = self._judged(function, way, args, kwargs)
            finally:
                self.after()
            changed = [name for name, value in _thread_state().items() if value != kept[name]]
            if changed:
                return Verdict("finding", f"it leaves torch changed: {', '.join(changed)}")
            return verdict

    def parsed(self, line: str) -> tuple[ast.Call, str]:
        """Returns the tree of a call as it prints, and what it calls the operator by.

        Raises:
            ValueError: the line is no call of the operator.
        """
        expression = line.strip().removeprefix(f"{self.op.key}: ")
        try:
            tree = ast.parse(expression, mode="eval").body
        except (SyntaxError, ValueError):  # the latter for a null byte, before Python 3.12
            tree = None
        found = self._call.search(expression)
        if found is None or not isinstance(tree, ast.Call):
            raise ValueError(f"{line!r}: expected {self.op.key}: and a call of it")
        return tree, found[0]

    def _function(self, text: str) -> Callable[..., Any]:
        function: Any = torch.ops
        if not text.startswith("torch.ops."):
            import cuda_ops

            public: Callable[..., Any] = getattr(cuda_ops, self.op.name)
            return public
        for name in text.removeprefix("torch.ops.").split("."):
            function = getattr(function, name)
        found: Callable[..., Any] = function
        return found

    @staticmethod
    def _value(node: ast.expr, scope: dict[str, Any]) -> Any:
        return eval(compile(ast.Expression(node), "<fuzz>", "eval"), scope)

    def _judged(
        self, function: Callable[..., Any], way: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Verdict:
        plain = way == "_function"
        refused_by_fake, may_be_large = False, is_large((args, kwargs))
        if may_be_large:
            said = foretold(function, args, kwargs)
            if said == "too large" or (said == "refused" and is_slow((args, kwargs))):
                return Verdict("large")
            refused_by_fake = said == "refused"
        kept = self._kept(function, args, kwargs) if plain else []
        reached = _Reached(function)
        try:
            called = eval(way, {**self._scope, "_function": reached})
            result = called(*args, **kwargs)
        except Exception as error:
            if may_be_large and _NO_MEMORY in str(error):
                return Verdict("large", str(error))
            return self._of_error(error, reached, self._is_typed(function, args, kwargs))
        is_typed = self._is_typed(function, args, kwargs)
        if refused_by_fake and plain and is_typed:
            return Verdict("finding", "the fake refuses what the kernel takes")
        for value, storage in kept:
            if not torch.equal(storage, bytes_of(value)):
                return Verdict("finding", "an argument changed that the operator does not write")
        are_plain = all(map(is_plain, tensors_in((args, kwargs))))
        if plain and are_plain and is_typed and not self.op.written:
            return self._against_fake(function, args, kwargs, result)
        return Verdict("returned")

    def _of_error(self, error: Exception, reached: _Reached, is_typed: bool) -> Verdict:
        text = f"{type(error).__name__}: {error}"
        inside = reached.error is not None
        if not inside and not _place(error):
            return Verdict("unmade" if not reached.count else "returned", text)
        judged = reached.error or error
        text = f"{type(judged).__name__}: {judged}"
        if _is_torch_own(judged):
            return Verdict("refused", text)
        allowed = isinstance(judged, _ALLOWED)
        if not allowed or isinstance(judged, _BROKEN):
            return Verdict("finding", f"an exception of the wrong type: {text}{_place(judged)}")
        if _INTERNAL.search(text):
            return Verdict("finding", f"an internal error: {text}{_place(judged)}")
        # What torch says of a tensor that it cannot make a number of is torch's own.
        if is_typed and not any(name in text for name in self._names):
            what = "an error that does not name the operator"
            return Verdict("finding", f"{what}: {text}{_place(judged)}")
        return Verdict("refused", text)

    def _kept(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the tensors that must not change, each with the bytes of its memory."""
        named = self._named(function, args, kwargs)
        written = [self.op.argument_names[i] for i in self.op.written]
        given = [(name, leaf) for name, value in named for leaf in tree_leaves(value)]
        changing = {address(value) for name, value in given if name in written}
        tensors = [value for name, value in given if name not in written]
        plain = [value for value in tensors if is_plain(value) and address(value) not in changing]
        return [(value, bytes_of(value).clone()) for value in plain]

    def _named(self, function: Callable[..., Any], args: list[Any], kwargs: Any) -> list[Any]:
        """Returns the arguments, each with its name in front."""
        if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            names = self.op.argument_names
        else:
            names = tuple(inspect.signature(function).parameters)
        return [*zip(names, args, strict=False), *kwargs.items()]

    def _is_blind(self, function: Callable[..., Any], args: list[Any], kwargs: Any) -> bool:
        """Tells whether an int stands for a dtype, which torch.ops makes an enum of unseen, as of
        torch.ops.aten.sum. The public function refuses it.
        """
        if not isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return False
        named = self._named(function, args, kwargs)
        return any(name in self.op.dtype_names and isinstance(value, int) for name, value in named)

    def _is_typed(self, function: Callable[..., Any], args: list[Any], kwargs: Any) -> bool:
        """Tells whether no tensor stands for a number, which torch takes from some of them."""
        named = self._named(function, args, kwargs)
        arguments = self.op.parsed.arguments
        lists = [argument.name for argument in arguments if "Tensor" in str(argument.type)]
        found = [(name, tensor) for name, value in named for tensor in tensors_in(value)]
        return all(name in lists for name, _ in found)

    def _against_fake(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], result: Any
    ) -> Verdict:
        def call(*values: Any) -> Any:
            by_name = zip(kwargs, values[len(args) :], strict=True)
            return function(*values[: len(args)], **dict(by_name))

        try:
            check_fake(self.op, call, [*args, *kwargs.values()], tensors_in(result))
        except AssertionError as error:
            if OVERFLOWED in str(error):  # of no elements, which a kernel may take
                return Verdict("returned")
            return Verdict("finding", f"not as the fake: {error}")
        return Verdict("returned")


#: What torch says on a CPU; a result that a fake calls small may need much on the way.
_NO_MEMORY = "can't allocate memory"


def _thread_state() -> dict[str, object]:
    """Returns the modes and transforms that torch is in, which a call must end as it began."""
    return {
        "transforms": torch._C._functorch.peek_interpreter_stack() is None,
        "dispatch keys included": str(torch._C._dispatch_tls_local_include_set()),
        "dispatch keys excluded": str(torch._C._dispatch_tls_local_exclude_set()),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    }


def _place(error: BaseException) -> str:
    """Returns where in cuda_ops an error comes from, and where in torch it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    own = [frame for frame in own if not Path(frame.filename).is_relative_to(_KIT)]
    if not own:
        return ""
    shown = own[-1:] if own[-1] is frames[-1] else [own[-1], frames[-1]]
    return f" ({', '.join(f'{Path(frame.filename).name}: {frame.name}' for frame in shown)})"


#: What torch says there, by the file that says it or its first words.
_OWN = (
    "PlumbingHelper.h", "VariableMethodStubs.cpp", "Sharding propagation failed",
    OVERFLOWED, ".tolist() is not supported for tensor subclasses",
    'core/function_schema.cpp":', 'quantized/Quantizer.cpp":',
)  # fmt: skip


def _is_torch_own(error: BaseException) -> bool:
    """Tells whether torch has refused something in its own way: its fakes, as it prints one that is
    a dual number too, its jagged tensors, its rules for shards, what sees a tensor that escaped
    from vmap before a composed operator does, and what it asserts as it prints a wrong argument.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename if frames else ""
    by_fake = isinstance(error, AssertionError) and "fake_tensor" in last
    return by_fake or "torch/nested/_internal" in last or any(said in str(error) for said in _OWN)
