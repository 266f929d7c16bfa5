"""What the text of a host function says, gathered while it is read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cuda_ops.build.source_text import arguments_in, closing, masked
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.cxx import LAUNCH, Function, Parameter, Statement
from cuda_ops.dev.adopt.guest import Guest
from cuda_ops.dev.adopt.notes import Note, Place, UnknownError

SIZE = r"\.(?:(?P<what>size|stride)\(\s*(?P<dim>-?\d+)\s*\)|(?P<all>numel|dim)\(\))"
POINTER = r"\.(?:mutable_|const_)?data_ptr\s*<\s*(?P<element>[^<>()]+?)\s*>\s*\(\)"
ACCESSOR = (
    r"\.packed_accessor(?P<bits>32|64)?\s*<\s*(?P<item>\w+)\s*,\s*(?P<rank>\d+)\s*(?:,[^()]*)?>"
    r"\s*\(\)"
)
AFTER_LAUNCH = re.compile(
    r"cudaGetLastError|cudaPeekAtLastError|KERNEL_LAUNCH_CHECK|"
    r"cuda(?:Device|Stream|Thread)Synchronize"
)


@dataclass(frozen=True)
class Sized:
    """One size of a tensor."""

    tensor: str
    #: ``None`` for the number of elements or of dims.
    dim: int | None
    text: str


@dataclass
class Output:
    """A tensor that the function allocates."""

    name: str
    place: Place
    #: The tensor whose shape it has, or the sizes as C++.
    like: str
    shape: tuple[str, ...] = ()
    #: A DType, or the tensor whose dtype it has.
    dtype: str = ""
    dtype_of: str = ""
    zeros: bool = False


@dataclass
class Passed:
    """A parameter of the launcher."""

    type: str
    name: str
    #: What the binding passes.
    value: str


@dataclass
class TensorArgument:
    """What is known of a tensor argument."""

    name: str
    rank: int | None = None
    elements: set[str] = field(default_factory=set)
    dispatched: bool = False
    written: bool = False
    optional: bool = False
    #: Dims whose size is read or compared.
    read: set[int] = field(default_factory=set)
    pointed: bool = False

    @property
    def may_float(self) -> bool:
        """Whether it may have a gradient."""
        return not self.elements or any("Float" in dtype for dtype in self.elements)


class Facts:
    """A host function on one device."""

    def __init__(self, guest: Guest, function: Function, device: str) -> None:
        self.guest, self.function, self.device = guest, function, device
        self.notes: list[Note] = []
        #: Why there is no draft of this function; empty where there is one.
        self.problem: Note | None = None
        self.tensors: dict[str, TensorArgument] = {}
        self.outputs: dict[str, Output] = {}
        #: Tensors that the author has to make, in the order of the guest.
        self.holes: dict[str, Statement] = {}
        self.scalars: dict[str, Parameter] = {}
        #: Names of sizes, in the guest's words.
        self.sizes: dict[str, Sized] = {}
        self.size_types: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        #: Checks that stay, as C++.
        self.checks: list[str] = []
        #: Checks of shapes, which a signature line may say: whether only an elementwise one does,
        #: the condition, the message and the place.
        self.of_shapes: list[tuple[bool, str, str, Place]] = []
        #: Pairs of dims that are the same size, and dims that are a number.
        self.same: list[tuple[tuple[str, int], tuple[str, int]]] = []
        self.same_shape: list[tuple[str, str]] = []
        self.fixed: dict[tuple[str, int], int] = {}
        #: The launcher's, or the loops of a binding.
        self.lines: list[str] = []
        self.passed: dict[str, Passed] = {}
        self.dtypes: tuple[str, ...] = ()
        self.dispatch_on = ""
        self.returned: tuple[str, ...] | None = None
        #: Statements of numbers, where the CPU function is a formula.
        self.formula: list[str] = []
        self.options: dict[str, str] = {}
        #: Names of dtypes, and of options, with what they stand for.
        self.dtype_names: dict[str, str] = {}
        #: What is neither a check, an output nor a name of something.
        self.compute: list[Statement] = []
        #: Declarations of the pointers that loops use, by name.
        self.pointers: dict[str, str] = {}
        #: What the function returns before its end.
        self.early: list[str] = []
        for one in function.parameters:
            kind, _ = words.schema_type(one.type)
            if kind in ("Tensor", "Tensor?"):
                self.tensors[one.name] = TensorArgument(one.name, optional=kind == "Tensor?")
            else:
                self.scalars[one.name] = one

    @property
    def any_tensor(self) -> str:
        """A pattern of all tensors' names."""
        return "|".join(map(re.escape, self.all_tensors())) or r"(?!)"

    def all_tensors(self) -> list[str]:
        """Returns the names of arguments, outputs and what is left to make."""
        return [*self.tensors, *self.outputs, *self.holes]

    def sized(self, tensor: str, found: re.Match[str], text: str) -> Sized:
        """Notes that a size of a tensor is read."""
        dim = int(found["dim"]) if found["what"] == "size" else None
        if dim is not None and tensor in self.tensors:
            self.tensors[tensor].read.add(dim)
        return Sized(tensor, dim, text)

    def is_written(self, name: str) -> bool:
        """Says whether kernels or loops write a tensor; what is left to make may be."""
        return name not in self.tensors or self.tensors[name].written

    def point(self, name: str, element: str, place: Place) -> None:
        """Notes that a tensor is read or written as elements of a type.

        Raises:
            UnknownError: no dtype has such elements.
        """
        if element != "scalar_t" and element not in words.ELEMENTS:
            raise UnknownError(place, f"{name} is read as elements of an unknown type, {element}")
        if tensor := self.tensors.get(name):
            tensor.pointed = True
            if element in words.ELEMENTS:
                tensor.elements.add(words.ELEMENTS[element][0])
            else:
                tensor.dispatched = True


def launches_in(text: str) -> list[tuple[re.Match[str], list[str]]]:
    """Returns the launches of a statement and their arguments."""
    mask, found = masked(text), []
    for one in LAUNCH.finditer(mask):
        launch = LAUNCH.match(text, one.start())
        assert launch is not None
        found.append((launch, arguments_in(text[launch.end() : closing(mask, launch.end())])))
    return found


def indented_text(text: str) -> list[str]:
    """Splits a statement into lines and takes away what indents all but the first."""
    lines = text.strip().splitlines()
    rest = [line for line in lines[1:] if line.strip()]
    last = rest[-1] if rest else ""
    margin = len(last) - len(last.lstrip()) if last.strip().startswith(("}", ")")) else None
    if margin is None:  # continued lines, by four
        margin = min((len(one) - len(one.lstrip()) for one in rest), default=4) - 4
    return [
        lines[0].rstrip(),
        *(one[min(max(margin, 0), len(one) - len(one.lstrip())) :].rstrip() for one in rest),
    ]
