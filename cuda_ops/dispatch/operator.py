"""One operator in the dispatcher, and the generations of code behind it.

What torch holds is registered once and only forwards: C++ trampolines to
slots, Python functions to the present :class:`Generation`. So a reload swaps
pointers, and no table of the dispatcher changes while another thread reads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nested._internal.nested_tensor import NestedTensor

from cuda_ops.build.advice import dev_command
from cuda_ops.build.toolchain import INSTALL_NVCC
from cuda_ops.derive import arguments, checks
from cuda_ops.derive.forward_mode import forward_mode, refuse_tangent
from cuda_ops.dispatch import (
    autocast,
    by_torch,
    compile_tag,
    deterministic,
    dtensor,
    flops,
    on_import,
    placed,
    public,
    taken_over,
    written,
)
from cuda_ops.dispatch.described import Call
from cuda_ops.dispatch.generation import Generation
from cuda_ops.dispatch.library import Kernel, Library
from cuda_ops.dispatch.lists import has_lists
from cuda_ops.dispatch.naming import named, raise_named
from cuda_ops.errors import ManifestError, PluginError
from cuda_ops.plugins import Plugins
from cuda_ops.spec import OpSpec, functions

#: The keys of tensors whose elements do not lie at strides. Without a kernel for them the
#: dispatcher's error lists every key that has one, and names no argument.
_WITHOUT_STRIDES = (
    "SparseCPU",
    "SparseCUDA",
    "SparseCsrCPU",
    "SparseCsrCUDA",
    "MkldnnCPU",
    "NestedTensorCPU",
    "NestedTensorCUDA",
    "QuantizedCPU",
    "QuantizedCUDA",
)


class _Library(torch.library.Library):
    """A torch Library that adds to two of torch's kernels: to that of autograd the derivatives of
    dual numbers, to that of vmap a check for a batch after its end.
    """

    def __init__(self, operator: Operator) -> None:
        # torch gives its methods no types.
        super().__init__(operator.spec.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._operator = operator

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        if dispatch_key == "Autograd":  # by register_autograd
            fn = self._operator._with_tangents(fn)
        if dispatch_key == "FuncTorchBatched":  # by register_vmap
            fn = self._operator._refusing_escaped(fn)
        # Without types in torch, as above.
        super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]


class Operator:
    """``<namespace>::<name>`` for the life of the process."""

    def __init__(self, generation: Generation) -> None:
        self.now = generation
        self.generation = 0
        self._slots: dict[str, int] = {}
        self._is_taken_over = False
        self._autocast_registered = self._alerts = False
        op = generation.spec
        if (slots := taken_over.slots_of(op)) is not None:
            self._slots, self._is_taken_over = slots, True
        try:
            self._define()
        except Exception as error:  # torch raises whatever its registrations raise
            self.forget()
            raise ManifestError(
                f"{op.qualname}: schema {op.schema!r} cannot be registered: {error}"
            ) from error
        try:
            #: ``cuda_ops.<op>``, and what formulas call: the same unless a plugin wraps it.
            self.public, self.direct = public.make(self)
        except Exception as error:
            self.forget()
            raise PluginError(
                f"{op.qualname}: hook cuda_ops_public: {type(error).__name__}: {error}"
            ) from error
        functions[generation.spec.key] = self.direct

    @property
    def spec(self) -> OpSpec:
        return self.now.spec

    @staticmethod
    def prepare(
        op: OpSpec, plugins: Plugins, plugin_text: str, library: Path, call: Call | None = None
    ) -> Generation:
        """Asks the plugins everything about an operator; registers nothing yet. ``call`` is its
        kernel where it is a guest's function.

        Raises:
            PluginError, ManifestError: from the hooks.
        """
        vmap = plugins.ask("cuda_ops_vmap", op)
        if vmap is not None and op.is_composite:
            raise ManifestError(
                f"{op.qualname}: cuda_ops_vmap: a composed operator has no batching rule, what it "
                "calls has one; remove it"
            )
        schemas = [sibling.schema + str(sibling.signature) for sibling in op.siblings.values()]
        declared = op.dtypes, op.dtypes_of, op.ranges, op.float_ranges, op.limits, op.dim_limits
        words = op.constants, op.hidden, op.no_gradient, op.linear, op.tags, op.nondeterministic
        checked = [str(v) for v in (op.signature, *declared, op.results, op.choices, op.random)]
        text = [op.schema, *checked, str(words), str(op.is_composite), plugin_text]
        if op.is_composite:  # graphs hold what it calls
            text.append(str(library))
        autograd = plugins.ask("cuda_ops_autograd", op)
        fake = plugins.ask("cuda_ops_fake", op)
        return Generation(
            spec=op,
            fake=call.fake(fake) if call is not None and fake is not None else fake,
            call=call,
            autograd=autograd,
            forward=forward_mode(op, autograd),
            autocast=plugins.ask("cuda_ops_autocast", op),
            vmap=vmap,
            sharding=plugins.ask("cuda_ops_sharding", op),
            flops=plugins.ask("cuda_ops_flops", op),
            public=plugins.ask("cuda_ops_public", op),
            fingerprint=hashlib.sha256("\0".join(text + schemas).encode()).hexdigest(),
        )

    # --- reload --------------------------------------------------------------------

    def must_redefine(self, new: Generation) -> bool:
        """Says whether the schema or the tags in the dispatcher have to change."""
        if self.spec.is_composite != new.spec.is_composite and self._slots:
            raise ManifestError(
                f"{self.spec.qualname} changed between composed and per-device kernels; "
                "restart the process to use it"
            )
        if (self.now.call is None) != (new.call is None):
            raise ManifestError(
                f"{self.spec.qualname} changed between a guest's function and a kernel of its own; "
                "restart the process to use it"
            )

        def registered(one: Generation) -> tuple[Any, ...]:
            return one.spec.schema, one.spec.tags, one.spec.keys if one.call is not None else ()

        changed = registered(self.now) != registered(new)
        if changed and self._is_taken_over:
            raise ManifestError(
                f"{self.spec.qualname}: its schema or its tags changed, and a library for C++ has "
                "registered those before in this process; restart it to use the new ones"
            )
        return changed

    def become(self, new: Generation) -> bool:
        """Takes the new generation; returns whether compiled graphs must be traced again."""
        redefine = self.must_redefine(new)
        changed = self.now.fingerprint != new.fingerprint
        documented = self.spec.doc != new.spec.doc
        self.now = new
        self.generation += 1
        if redefine:
            self._define_again()
        elif changed:
            self._register_autocast()
            self._register_alert()
            self._register_flops()
        if changed or documented:
            public.renew(self)
        return changed

    def point_at(self, library: Library, kernel: Kernel) -> None:
        """Serves calls of one dispatch key with a kernel of ``library`` from now on."""
        slot = self._slots.get(kernel.key, kernel.slot)
        by_torch.point(self, library, kernel, slot)
        if kernel.key not in self._slots:
            library.register(kernel)
            self._slots[kernel.key] = slot

    def drop_keys(self, library: Library, present: set[str]) -> None:
        """Makes the use of kernels that the new library no longer has an error."""
        for key, slot in self._slots.items():
            if key not in present:
                by_torch.clear(self, library, key, slot)

    # --- registration ----------------------------------------------------------------

    def _define(self) -> None:
        op = self.spec
        lib: torch.library.Library = _Library(self)
        self._library = lib
        named = (getattr(torch.Tag, tag) for tag in op.tags)
        if not self._is_taken_over:
            lib.define(op.schema, tags=(torch.Tag.pt2_compliant_tag, *named))
        self._autocast_registered = self._alerts = False
        if not op.written and op.device_position is None:
            transformed = self._decomposed if op.is_composite else public.transformed(self)
            lib.impl(op.name, transformed, "FuncTorchDynamicLayerFrontMode")
        if op.is_composite:
            return
        torch.library.register_fake(op.qualname, self._fake, lib=lib)
        if op.has_cuda and "CUDA" not in {*op.keys, *self._slots}:
            lib.impl(op.name, self._without_cuda, "CUDA")
        if self.now.call is not None:
            for key in op.keys:
                lib.impl(op.name, self._call, key)
        self._register_flops()
        if op.device_position is not None:  # neither mapped, nor cast, nor differentiated
            placed.register(lib, self)
            return
        if op.written:
            written.register(lib, self)
        else:
            torch.library.register_vmap(op.qualname, self._vmap, lib=lib)
            torch.library.register_autograd(
                op.qualname, self._backward, setup_context=self._setup_context, lib=lib
            )
        for key in _WITHOUT_STRIDES:
            lib.impl(op.name, self._without_strides, key)
        torch.library.register_torch_dispatch(
            op.qualname, NestedTensor, self._with_jagged_tensor, lib=lib
        )
        self._register_autocast()
        self._register_alert()
        dtensor.register(op, self._sharding)

    def forget(self) -> None:
        """Takes an operator that has never served a call out of the process."""
        self._undefine()
        on_import.forget(self.spec.key)
        functions.pop(self.spec.key, None)

    def _undefine(self) -> None:
        self._library._destroy()
        vars(getattr(torch.ops, self.spec.namespace)).pop(self.spec.name, None)

    def _register_autocast(self) -> None:
        if self.now.autocast is not None and not self._autocast_registered:
            autocast.register(self._library, self)
            self._autocast_registered = True

    def _register_alert(self) -> None:
        op = self.spec
        # Without a tensor argument the kernel that chooses asks.
        if op.nondeterministic and op.device_position is None and not self._alerts:
            deterministic.register(self._library, self.spec.name, lambda: self.now.spec)
            self._alerts = True

    def _register_flops(self) -> None:
        if self.now.flops is not None:
            flops.register(self.spec, self._flops)

    def _define_again(self) -> None:
        """Defines the operator with another schema. The dispatcher goes on handing tracers the
        overload that they saw first, and they read the schema there: it becomes the new one.
        """
        namespace, name = getattr(torch.ops, self.spec.namespace), self.spec.name
        overload = getattr(namespace, name).default
        self._undefine()
        self._define()
        packet = getattr(namespace, name)
        vars(overload).update(vars(packet.default))
        packet.default = overload
        # Composed ones are asked for by the overload itself.
        if not self.spec.is_composite and self.spec.device_position is None:
            dtensor.register(self.spec, self._sharding)
        # Kept by name, in a private table that not every torch has.
        known = getattr(torch.fx.operator_schemas, "_SCHEMA_TO_SIGNATURE_CACHE", {})
        known.pop((self.spec.qualname, ""), None)

    # --- what torch calls: forward to the present generation ---------------------------

    def _underived(self, what: str, hook: str) -> NotImplementedError:
        return NotImplementedError(
            f"{self.spec.qualname} has no rule for {what}: no signature line to derive it "
            f"from, and none from {hook} of a plugin"
        )

    def _decomposed(self, /, *args: Any, **kwargs: Any) -> Any:
        # Here the outermost transform sees it, so that its parts meet all transforms. Further in
        # they would pass for plain functions, and lose their tangents for instance.
        return self.now.spec.overload.decompose(*args, **kwargs)

    def _fake(self, /, *args: Any, **kwargs: Any) -> Any:
        compile_tag.renew()  # in the thread that compiles
        if self.now.fake is None:
            raise self._underived("its output shape", "cuda_ops_fake")
        op = self.now.spec  # whose plugin need not repeat what the binding says
        checks.check_arguments(op, arguments.bind(op, args, kwargs))
        return self.now.fake(*args, **kwargs)

    def _call(self, /, *args: Any, **kwargs: Any) -> Any:
        assert self.now.call is not None
        return self.now.call(*args, **kwargs)

    def _setup_context(
        self, ctx: Any, inputs: tuple[Any, ...], output: Any, **keyword_only: Any
    ) -> None:
        self.now.formula.setup_context(ctx, inputs, output, **keyword_only)

    def _backward(self, ctx: Any, *grads: Any) -> Any:
        with public.dispatched_if_batched():
            return self.now.formula.backward(ctx, *grads)

    def _with_tangents(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Differentiates dual numbers, or refuses them: torch's kernel drops the tangent where no
        gradient is wanted.
        """
        takes_lists = has_lists(self.now.spec)

        def checked(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            if forward_ad._current_level >= 0 and public.may_have_tangents():
                values = arguments.bind(self.now.spec, args, kwargs)
                tangents = public.tangents_of(values)
                if any(tangent is not None for tangent in tangents):
                    return self._dual(values, tangents)
            if takes_lists and torch.is_grad_enabled() and not torch._C._any_requires_grad(*args):
                self._refuse_hidden(args)
            try:
                return kernel(keyset, *args, **kwargs)
            except RuntimeError as error:
                raise_named(self.now.spec, error)

        return checked

    def _refuse_hidden(self, args: Sequence[Any]) -> None:
        """Refuses a tensor that requires a gradient in a list with ``None``, where torch does not
        look for one: its kernel would go on without.
        """
        for name, value in zip(self.now.spec.argument_names, args, strict=False):
            if not isinstance(value, (list, tuple)):
                continue
            if any(isinstance(one, torch.Tensor) and one.requires_grad for one in value):
                checks.refuse(
                    self.now.spec,
                    name,
                    "tensors alone where one requires a gradient, which torch would lose beside "
                    "None; pass an empty tensor in place of None",
                    f"None at [{next(i for i, one in enumerate(value) if one is None)}]",
                )

    def _dual(self, values: list[Any], tangents: list[Any]) -> Any:
        op, forward = self.now.spec, self.now.forward
        if forward is None:
            refuse_tangent(op, next(i for i, t in enumerate(tangents) if t is not None))
        primals = [
            value if tangent is None else forward_ad.unpack_dual(value).primal
            for value, tangent in zip(values, tangents, strict=True)
        ]
        positional, keywords = arguments.split(op, primals)
        found = op.overload(*positional, **keywords)
        outputs = found if isinstance(found, tuple) else (found,)
        pairs = zip(outputs, forward.tangents(op, primals, outputs, tangents), strict=True)
        duals = tuple(
            output if tangent is None else forward_ad.make_dual(output, tangent)
            for output, tangent in pairs
        )
        return duals if isinstance(found, tuple) else duals[0]

    def _refusing_escaped(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def checked(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
            if torch._C._functorch.peek_interpreter_stack() is None:
                op = self.now.spec
                public.refuse_escaped(op, arguments.bind(op, args, kwargs))
            return kernel(keyset, *args, **kwargs)

        return checked

    def _vmap(self, info: Any, in_dims: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.now.vmap is None:
            raise self._underived("batching", "cuda_ops_vmap")
        self._without_strides(*args, **kwargs)
        with named(self.now.spec):
            return self.now.vmap(info, in_dims, *args, **kwargs)

    def _sharding(self, /, *args: Any, **kwargs: Any) -> Any:
        if self.now.sharding is None:
            raise self._underived("sharding", "cuda_ops_sharding")
        return self.now.sharding(*args, **kwargs)

    def _flops(self, /, *args: Any, **kwargs: Any) -> int:
        return 0 if self.now.flops is None else self.now.flops(*args, **kwargs)

    def _without_strides(self, /, *args: Any, **kwargs: Any) -> Any:
        op = self.now.spec
        for name, value in zip(op.argument_names, arguments.bind(op, args, kwargs), strict=True):
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(tensor, torch.Tensor):
                    continue
                if tensor.is_nested:  # one of this kind calls itself strided
                    checks.refuse(op, name, "a strided tensor", "a nested one")
                if tensor.is_quantized:
                    checks.refuse(op, name, "a strided tensor", "a quantized one")
                if tensor.layout is not torch.strided:
                    checks.refuse(op, name, "a strided tensor", f"layout {tensor.layout}")

    def _with_jagged_tensor(
        self, mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._without_strides(*args, **(kwargs or {}))

    def _without_cuda(self, /, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self.spec.qualname}: argument on cuda, but this build has no CUDA kernel "
            f"(no nvcc when it was built); install a CUDA toolkit, or run {INSTALL_NVCC}, and then "
            + dev_command()
        )


@contextlib.contextmanager
def redefining(operators: list[Operator]) -> Iterator[None]:
    """Lets schemas change while other threads may be calling.

    A call parses its arguments under the interpreter's lock and reads the
    schema once more within microseconds of letting go of it. So: keep the lock
    (no thread switch, and a sleep that does not release it) long enough for
    such calls to have passed, then change everything before giving it back.
    """
    if not operators:
        yield
        return
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(20_000))
        yield
    finally:
        sys.setswitchinterval(interval)
        time.sleep(0)
