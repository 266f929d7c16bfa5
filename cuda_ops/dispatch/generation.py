"""What one version of an operator's files decides, and how that reaches what torch calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

from cuda_ops.derive.forward_mode import ForwardMode
from cuda_ops.derive.no_gradient import NoGradient, refusal
from cuda_ops.spec import AutocastPolicy, Autograd, OpSpec


@dataclass
class Generation:
    """Everything that one version of an operator's files decides, apart from its kernels."""

    spec: OpSpec
    fake: Callable[..., Any] | None
    autograd: Autograd | None
    autocast: AutocastPolicy | None
    vmap: Callable[..., Any] | None
    sharding: Callable[..., Any] | None
    flops: Callable[..., int] | None
    public: Callable[..., Any] | None
    #: Hash of what compiled graphs depend on: schema, signature, dtypes, plugin, siblings' schemas,
    #: and the library of a composed operator.
    fingerprint: str
    #: The kernel on every device, where the operator is a guest's function.
    call: Callable[..., Any] | None = None
    #: The derivative in forward mode, if it has one.
    forward: ForwardMode | None = None
    #: The formula that torch gets: ``autograd``, or one that refuses a gradient.
    formula: Autograd = field(init=False)

    def __post_init__(self) -> None:
        self.formula = self.autograd or refusal(f"{self.spec.qualname} has no gradient")

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Positions of the arguments that have a gradient of the operator's own; a composed
        operator's gradients are those of its parts.
        """
        if self.autograd is None or isinstance(self.autograd.backward, NoGradient):
            return ()
        inputs, arguments = self.autograd.inputs, self.spec.parsed.arguments
        if inputs is None:  # all tensors, those in lists too
            inputs = tuple(i for i, a in enumerate(arguments) if "Tensor" in str(a.type))
        return tuple(sorted(inputs))


class Served(Protocol):
    """What the public functions need of an operator: its present generation, and the functions
    that forward to it.
    """

    now: Generation
    public: FunctionType
    direct: FunctionType

    @property
    def spec(self) -> OpSpec: ...

    def _setup_context(
        self, ctx: Any, inputs: tuple[Any, ...], output: Any, **keyword_only: Any
    ) -> None: ...

    def _backward(self, ctx: Any, *grads: Any) -> Any: ...

    def _vmap(self, info: Any, in_dims: Any, /, *args: Any, **kwargs: Any) -> Any: ...
