"""What the host function of a guest does, sorted into what a native pair has of it: checks, outputs,
the launcher's statements and its parameters, and what is left for the author.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cuda_ops.build.source_text import arguments_in, closing, masked
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.flatten import declared_in, flattened, renamed
from cuda_ops.dev.adopt.kernels import Use, is_elementwise, use_of
from cuda_ops.dev.adopt.sources import (
    LAUNCH,
    Function,
    Guest,
    Parameter,
    Place,
    Statement,
    split,
)

_GUARD = re.compile(r"\b(?:Optional)?(?:CUDA|Device)(?:Stream)?Guard\b")
_STREAM = re.compile(r"getCurrentCUDAStream|current_cuda_stream|\bcudaStream_t\b")
_AFTER_LAUNCH = re.compile(
    r"cudaGetLastError|cudaPeekAtLastError|KERNEL_LAUNCH_CHECK|cuda(?:Device|Stream|Thread)Synchronize"
)
_CHECK = re.compile(r"\s*(?:(?:STD_)?TORCH_CHECK(?:_\w+)?|TORCH_INTERNAL_ASSERT(?:_\w+)?|AT_ASSERTM?|AT_CHECK|assert)\s*\(")
_DECLARED = re.compile(
    r"\s*(?P<type>(?:const\s+|constexpr\s+|static\s+)*(?:auto|(?:unsigned\s+)?[A-Za-z_][\w:]*(?:<[^;=]*?>)?)"
    r"(?:\s*[*&]+|\s)\s*(?:const\s+)?(?:__restrict__\s+)?)(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*);\s*",
    re.DOTALL,
)
_NEW = re.compile(
    r"(?:[\w:]*::)?(?P<made>empty_like|zeros_like|empty|zeros)\s*\(|(?P<like>\w+)\.(?P<new>new_empty|new_zeros)\s*\("
    r"|(?:[\w:]*::)?(?P<stable>new_empty|new_zeros)\s*\("
)
_SIZE = r"\.(?:(?P<what>size|stride)\(\s*(?P<dim>-?\d+)\s*\)|(?P<all>numel|dim)\(\))"
_POINTER = r"\.(?:mutable_|const_)?data_ptr\s*<\s*(?P<element>[^<>()]+?)\s*>\s*\(\)"
_ACCESSOR = r"\.packed_accessor(?P<bits>32|64)?\s*<\s*(?P<item>\w+)\s*,\s*(?P<rank>\d+)\s*(?:,[^()]*)?>\s*\(\)"
_MIN_MAX = re.compile(r"\b(?:std::)?(?:min|max)\s*\(")


@dataclass(frozen=True)
class Note:
    """What is left for the author, and where in the guest it comes from."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


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
class Tensors:
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


class Host:
    """The function of one device, sorted."""

    def __init__(self, guest: Guest, function: Function, device: str) -> None:
        self.guest, self.function, self.device = guest, function, device
        self.notes: list[Note] = []
        #: Why there is no draft of this function; empty where there is one.
        self.problem: Note | None = None
        self.tensors: dict[str, Tensors] = {}
        self.outputs: dict[str, Output] = {}
        #: Tensors that the author has to make, in the order of the guest.
        self.holes: dict[str, Statement] = {}
        self.scalars: dict[str, Parameter] = {}
        #: Names of sizes, in the guest's words.
        self.sizes: dict[str, Sized] = {}
        self.size_types: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        self.checks: list[str] = []
        #: Pairs of dims that are the same size, and dims that are a number.
        self.same: list[tuple[tuple[str, int], tuple[str, int]]] = []
        self.same_shape: list[tuple[str, str]] = []
        self.fixed: dict[tuple[str, int], int] = {}
        self.lines: list[str] = []
        self.passed: dict[str, Passed] = {}
        self.dtypes: tuple[str, ...] = ()
        self.dispatch_on = ""
        self.accessors = False
        self.returned: tuple[str, ...] | None = None
        self.formula = ""
        self._options: dict[str, str] = {}
        self._dtype_names: dict[str, str] = {}
        self._compute: list[Statement] = []
        self._returns = False
        #: Functions of the guest that launch, and take the stream from here.
        self.helpers: set[str] = set()
        self.pointers: dict[str, str] = {}
        for one in function.parameters:
            kind, _ = words.schema_type(one.type)
            if kind in ("Tensor", "Tensor?"):
                self.tensors[one.name] = Tensors(one.name, optional=kind == "Tensor?")
            else:
                self.scalars[one.name] = one
        place = function.item.place
        try:
            statements = [_normalized(one) for one in flattened(guest, function, device)]
            self.place = statements[0].place if statements else place
            self._sort(statements)
            if device == "cuda":
                self._launcher()
            else:
                self._loops()
        except words.UnknownError as error:
            found = re.fullmatch(r"(.*):(\d+): (.*)", str(error), re.DOTALL)
            assert found is not None, error
            self.problem = Note(Place(_path(guest, found[1]), int(found[2])), found[3])

    # --- statements ---------------------------------------------------------------

    def _sort(self, statements: list[Statement]) -> None:
        names: dict[str, str] = {}  # what stands for another tensor or pointer
        queue = [part for one in statements for part in _declarators(one)]
        for one in queue:
            text = renamed(one.text, names).strip()
            statement = Statement(text, one.place)
            if _CHECK.match(text):
                self._check(statement)
            elif _GUARD.search(text):
                continue
            elif "<<<" not in text and _STREAM.search(text):
                if (found := _DECLARED.match(text)) and "cudaStream_t" in text + found["type"]:
                    names[found["name"]] = "stream"
                elif found:
                    names[found["name"]] = "stream"
            elif "<<<" not in text and _AFTER_LAUNCH.search(text):
                self._left_out(statement)
            elif re.match(r"return\b", text):
                self._return(statement)
            elif re.match(r"(?:AT_ERROR|throw)\b", text):
                raise words.UnknownError(f"{one.place}: nothing for {self.device} but an error")
            elif found := _DECLARED.match(text):
                self._declared(statement, found, names)
            elif same := re.fullmatch(r"(\w+)\s*=\s*\1\.contiguous\(\);", text):
                del same  # the binding does that
            else:
                self._compute.append(statement)
        if self.returned is None and self.formula == "":
            self.returned = ()

    def _left_out(self, statement: Statement) -> None:
        if found := re.search(r"cuda(Device|Stream|Thread)Synchronize", statement.text):
            self.notes.append(Note(statement.place, f"cuda{found[1]}Synchronize() is left out: a "
                                   "launcher does not wait"))  # fmt: skip

    def _declared(
        self, statement: Statement, found: re.Match[str], names: dict[str, str]
    ) -> None:
        name, value, kind = found["name"], found["value"].strip(), found["type"]
        known = "|".join(map(re.escape, self._all_tensors())) or r"(?!)"
        if alias := re.fullmatch(rf"({known})(?:\.contiguous\(\)|\.expect_contiguous\(\))?", value):
            if name != alias[1]:
                names[name] = alias[1]
        elif found_new := _new_in(value):
            self._output(name, statement, found_new)
        elif re.search(r"TensorOptions|\.options\(\)|::dtype\(", value):
            self._options[name] = value
        elif re.fullmatch(rf"(?:{known})\.(?:scalar_type|dtype|type)\(\)", value):
            self._dtype_names[name] = value
        elif re.search(r"\*\s*(?:const\s*)?(?:__restrict__\s*)?$", kind) or (
            re.match(r"(?:const\s+)?auto\b", kind) and re.fullmatch(rf"(?:{known}){_POINTER}", value)
        ):
            if re.fullmatch(rf"(?:{known}){_POINTER}", value):
                names[name] = value
            else:
                self._compute.append(statement)
        elif size := re.fullmatch(rf"({known}){_SIZE}", value):
            self.sizes[name] = self._sized(size[1], size, value)
            self.size_types[name] = " ".join(kind.replace("const", "").split())
            if size["all"] == "dim":
                del self.sizes[name]
                self._compute.append(statement)
        elif self._is_tensor(kind, value, known):
            self.holes[name] = statement
        else:
            if re.search(r"^(?:const |static |constexpr )*(?:u?int\w*|long|auto|size_t|unsigned)", kind):
                self.derived[name] = value
            self._compute.append(statement)

    def _is_tensor(self, kind: str, value: str, known: str) -> bool:
        if re.search(r"\bTensor\b", kind):
            return True
        if "auto" not in kind:
            return False
        return bool(re.search(r"\b(?:torch|at)::\w+", value) or re.search(rf"\b(?:{known})\b(?!\.(?:size|numel|stride|dim)\b)", value))

    def _all_tensors(self) -> list[str]:
        return [*self.tensors, *self.outputs, *self.holes]

    def _sized(self, tensor: str, found: re.Match[str], text: str) -> Sized:
        dim = int(found["dim"]) if found["what"] == "size" else None
        if dim is not None and tensor in self.tensors:
            self.tensors[tensor].read.add(dim)
        return Sized(tensor, dim, text)

    def _output(self, name: str, statement: Statement, found: re.Match[str]) -> None:
        inside = arguments_in(statement.text[statement.text.index(found[0]) + len(found[0]) :].rstrip(" ;")[:-1])
        made = found["made"] or found["new"] or found["stable"]
        like = found["like"] or ""
        if found["stable"] or made.endswith("_like"):
            like, inside = inside[0], inside[1:]
            if like not in self._all_tensors():
                self.holes[name] = statement
                return
        output = Output(name, statement.place, "", dtype_of=like, zeros=made.startswith(("zeros", "new_zeros")))
        if made.endswith("_like"):
            output.like = like
        else:
            shape, inside = inside[0] if inside else "", inside[1:]
            shape = re.sub(r"^(?:[\w:]*IntArrayRef|std::vector<int64_t>)\s*\(?(\{.*\})\)?$", r"\1", shape)
            if whole := re.fullmatch(r"(\w+)\.sizes\(\)(?:\.vec\(\))?", shape):
                output.like = whole[1]
            elif shape.startswith("{"):
                output.shape = tuple(arguments_in(shape[1:-1]))
            elif re.fullmatch(r"[\w.()]+", shape) and (shape in self.sizes or shape in self.scalars or re.search(_SIZE, shape)):
                output.shape = (shape,)
            else:
                self.holes[name] = statement
                return
        options = renamed(", ".join(inside), self._options)
        if dtype := words.dtype_in(options):
            output.dtype, output.dtype_of = dtype, ""
        elif of := re.search(r"(\w+)\.(?:options|scalar_type|dtype)\(\)", options):
            output.dtype_of = of[1]
        elif not output.dtype_of:
            output.dtype = "kFloat32"  # torch's default
        if output.dtype_of in self.outputs:
            first = self.outputs[output.dtype_of]
            output.dtype, output.dtype_of = first.dtype, first.dtype_of
        if output.like in self.outputs:
            first = self.outputs[output.like]
            output.like, output.shape = first.like, first.shape
        if output.like and output.like not in self.tensors and output.like not in self.holes:
            self.holes[name] = statement
            return
        self.outputs[name] = output

    def _return(self, statement: Statement) -> None:
        value = statement.text.removeprefix("return").strip().removesuffix(";").strip()
        if tuple_ := re.fullmatch(r"(?:(?:std::)?(?:make_tuple|tuple<.*?>|vector<.*?>)\s*[({]|\{)(.*)[)}]", value, re.DOTALL):
            values = arguments_in(tuple_[1].strip("{}"))
        else:
            values = [value] if value else []
        made = self._all_tensors()
        if all(one in made for one in values):
            self.returned = tuple(values)
            return
        if self.device == "cpu" and len(values) == 1 and not self._compute and not self.outputs:
            self._formula(value, statement.place)
            return
        names = []
        for number, one in enumerate(values):
            if one in made:
                names.append(one)
                continue
            name = "result" if len(values) == 1 else f"result{number}"
            self.holes[name] = Statement(f"auto {name} = {one};", statement.place)
            names.append(name)
        self.returned = tuple(names)

    # --- checks -------------------------------------------------------------------

    def _check(self, statement: Statement) -> None:
        text = statement.text
        start = _CHECK.match(text)
        assert start is not None
        given = arguments_in(text[start.end() : closing(masked(text), start.end())])
        said = " ".join(_string(one) for one in given[1:]).strip()
        for condition in re.split(r"\s*&&\s*", given[0].strip()):
            condition = condition.strip()
            while condition.startswith("(") and closing(condition, 1) == len(condition) - 1:
                condition = condition[1:-1].strip()
            if not self._understood(condition):
                self._kept(condition, said, statement.place)

    def _understood(self, text: str) -> bool:
        """Takes a check as what the binding says anyway; says whether it is."""
        known = "|".join(map(re.escape, self.tensors)) or r"(?!)"
        if "||" in text:
            return False
        if re.fullmatch(rf"({known})(?:->|\.)(?:is_contiguous|is_cuda|is_cpu|defined)\(\)", text):
            return True
        if re.search(r"\bdevice\(\)|get_device\(\)|get_device_index\(\)|\.is_cuda\(\)|layout\(\)|requires_grad", text):
            return True
        sides = re.fullmatch(r"(.*?)\s*==\s*(.*)", text)
        if sides is None:
            return False
        left, right = sides[1].strip(), sides[2].strip()
        if re.fullmatch(r"\d+", left):
            left, right = right, left
        dtype = re.fullmatch(rf"({known})\.(?:scalar_type|dtype|type)\(\)", left)
        if dtype:
            if re.fullmatch(rf"(?:{known})\.(?:scalar_type|dtype|type)\(\)", right):
                return True
            if found := words.dtype_in(right):
                self.tensors[dtype[1]].elements.add(found)
                return True
            return False
        if rank := re.fullmatch(rf"({known})\.(?:dim\(\)|sizes\(\)\.size\(\))", left):
            if re.fullmatch(r"\d+", right):
                self.tensors[rank[1]].rank = int(right)
                return True
            return False
        shapes = [re.fullmatch(rf"({known})\.(sizes|numel)\(\)", side) for side in (left, right)]
        if shapes[0] and shapes[1]:
            if shapes[0][2] == "sizes":
                self.same_shape.append((shapes[0][1], shapes[1][1]))
                return True
            return False
        dims = [self._dim_in(side, known) for side in (left, right)]
        if dims[0] and dims[1]:
            self.same.append((dims[0], dims[1]))
            return True
        if dims[0] and re.fullmatch(r"\d+", right):
            self.fixed[dims[0]] = int(right)
            return True
        return False

    def _dim_in(self, text: str, known: str) -> tuple[str, int] | None:
        if text in self.sizes:
            size = self.sizes[text]
            return (size.tensor, size.dim) if size.dim is not None else None
        found = re.fullmatch(rf"({known}){_SIZE}", text)
        if found and found["what"] == "size":
            self.tensors[found[1]].read.add(int(found["dim"]))
            return found[1], int(found["dim"])
        return None

    def _kept(self, condition: str, said: str, place: Place) -> None:
        """Keeps a check that the binding cannot declare, as C++."""
        names = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", masked(condition)))
        stripped = re.sub(_SIZE, "", condition)
        plain = names <= {*self.sizes, *self.scalars, *self.tensors} and not words.TORCH.search(stripped)
        plain = plain and not re.search(r"[.](?!\d)|->", stripped) and not re.search(
            rf"\b(?:{'|'.join(self.tensors) or '(?!)'})\b(?!\.)", condition)  # fmt: skip
        if plain:
            for one in names & self.sizes.keys():
                condition = renamed(condition, {one: self.sizes[one].text})
            text = said.replace("\\", "\\\\").replace('"', '\\"') or f"expected {condition}"
            self.checks.append(f'if (!({condition})) throw OpError("{text}");')
            self.notes.append(Note(place, f"the check {condition} is kept in the function, where "
                                   "fakes do not see it; say it with the signature line, .range or "
                                   ".at_most if they can"))  # fmt: skip
        else:
            self.notes.append(Note(place, f"the check {condition} is not kept; write it with "
                                   "refuse(argument, expected, actual)"))  # fmt: skip

    # --- the launcher ---------------------------------------------------------------

    def _launcher(self) -> None:
        launching = [i for i, one in enumerate(self._compute) if "<<<" in one.text or self._helpers_in(one.text)]
        if not launching:
            raise words.UnknownError(f"{self.place}: no kernel is launched here")
        self._find_written()
        last = launching[-1]
        for number, statement in enumerate(self._compute):
            self.lines += self._lowered(statement, number == last)
        if not self._returns:
            self.lines.append("return cudaGetLastError();")

    def _helpers_in(self, text: str) -> list[tuple[re.Match[str], Function]]:
        """Returns the calls of the guest's own functions that launch, such as a template that a
        dispatch calls.
        """
        found = []
        for one in re.finditer(r"\b(?P<kernel>[A-Za-z_]\w*)\s*(?:<[^;<>(){}]*>)?\s*\(", masked(text)):
            function = self.guest.function(one["kernel"])
            if function is not None and function.launches and not function.has_tensors:
                found.append((one, function))
        return found

    def _find_written(self) -> None:
        for statement in self._compute:
            called: list[tuple[Function, list[str]]] = []
            for launch, given in launches_in(statement.text):
                kernel = self.guest.kernel(launch["kernel"])
                if kernel is None:
                    raise words.UnknownError(f"{statement.place}: the kernel {launch['kernel']} is in none of the guest's files")
                called.append((kernel, given))
            for call, function in self._helpers_in(statement.text):
                inside = statement.text[call.end() : closing(masked(statement.text), call.end())]
                called.append((function, arguments_in(inside)))
            for kernel, given in called:
                for parameter, value in zip(kernel.parameters, given, strict=False):
                    for name in self._pointed_in(value):
                        use = use_of(parameter.name, kernel.item.body)
                        constant = re.search(r"\bconst\b[^*]*\*", parameter.type)
                        if name in self.tensors and not constant:
                            self.tensors[name].written |= use.written
                            if use.otherwise and not use.written:
                                self.notes.append(Note(kernel.item.place, (
                                    f"{kernel.name} takes a pointer {parameter.name} that is not "
                                    f"const, and is drafted as if it only read {name}; if it "
                                    f"writes, say Tensor(a!) {name} in the schema")))  # fmt: skip

    def _pointed_in(self, text: str) -> list[str]:
        known = "|".join(map(re.escape, self._all_tensors())) or r"(?!)"
        return [found[1] for found in re.finditer(rf"\b({known})(?:{_POINTER}|{_ACCESSOR.replace('?P<', '?P<a_')})", text)]

    def is_written(self, name: str) -> bool:
        return name in self.outputs or (name in self.tensors and self.tensors[name].written)

    def _lowered(self, statement: Statement, is_last: bool) -> list[str]:
        text = statement.text
        mask = masked(text)
        if words.DISPATCH.match(mask):
            return self._dispatch(statement, is_last)
        if words.DISPATCH.search(mask):
            raise words.UnknownError(f"{statement.place}: AT_DISPATCH inside of another statement; hand its launcher a DType and use visit<...>(dtype, body)")
        return indented_text(self._plain(text, statement.place))

    def _dispatched(
        self, text: str, start: re.Match[str], place: Place
    ) -> tuple[str, str, Place]:
        """Reads a call of AT_DISPATCH: the tensor whose dtype it asks for, and the body of its
        lambda.
        """
        macro = start[0].rstrip("( ")
        known = words.dispatched(macro)
        given = arguments_in(text[start.end() : closing(masked(text), start.end())])
        if known is None or len(given) < known[1] + 3:
            raise words.UnknownError(f"{place}: {macro} has no counterpart here; use visit<DType::kFloat32, ...>(dtype, body)")
        dtypes, extra, left = known
        more = [words.dtype_in(f"at::{one.rpartition('::')[2]}") for one in given[:extra]]
        narrow = [words.NARROW[one] for one in more if one in words.NARROW] + ([left] if left else [])
        if narrow and self.device == "cuda":
            self.notes.append(Note(place, (
                f"{' and '.join(narrow)} left out: in the kernel read with to_compute(x[i]), compute "
                "in compute_t<scalar_t> and store with from_compute<scalar_t>(value) of dtype.cuh, "
                "then use visit_floating and kFloating")))  # fmt: skip
        subject, body = renamed(given[extra], self._dtype_names), given[-1]
        of = re.fullmatch(r"(\w+)\.(?:scalar_type|type|dtype)\(\)", subject)
        if of is None or of[1] not in self._all_tensors():
            raise words.UnknownError(f"{place}: {macro} dispatches on {subject}, which is no tensor here")
        dtypes = (*dtypes, *(one for one in more if one and one not in words.NARROW))
        if self.dispatch_on and self.dtypes != dtypes:
            raise words.UnknownError(f"{place}: a second AT_DISPATCH with other dtypes")
        self.dtypes = dtypes
        self.dispatch_on = self.dispatch_on or of[1]
        while body.startswith("("):
            body = body[1:-1].strip()
        lambda_ = re.match(r"\[[&=]\]\s*(?:\(\s*\))?\s*(?:->\s*void\s*)?\{", body)
        if lambda_ is None:
            raise words.UnknownError(f"{place}: {macro} without a lambda")
        inside = body[lambda_.end() : -1]
        if words.DISPATCH.search(masked(inside)):
            raise words.UnknownError(f"{place}: AT_DISPATCH inside of another one; hand the launcher two DTypes and use visit twice")
        line = place.line + text.count("\n", 0, text.index(inside)) if inside else place.line
        return of[1], inside, Place(place.path, line)

    def _dispatch(self, statement: Statement, is_last: bool) -> list[str]:
        text, place = statement.text, statement.place
        start = words.DISPATCH.match(masked(text))
        assert start is not None
        of, body, body_place = self._dispatched(text, start, place)
        if "dtype" not in self.passed:
            self.passed = {"dtype": Passed("DType", "dtype", f"dtype_of({of})"), **self.passed}
        inside: list[str] = []
        for one in split(body, body_place):
            if "<<<" not in one.text and _AFTER_LAUNCH.search(one.text):
                continue
            inside += indented_text(self._plain(one.text.strip(), one.place))
        listed = ", ".join(f"DType::{one}" for one in self.dtypes)
        head = f"visit<{listed}>(dtype, [&](auto tag) {{"
        block = ["  using scalar_t = decltype(tag);", *(f"  {one}" for one in inside), "  return cudaGetLastError();"]
        if is_last:
            self._returns = True
            return [f"return {head}", *block, "});"]
        return [f"const cudaError_t error{place.line} = {head}", *block, "});",
                f"if (error{place.line} != cudaSuccess) return error{place.line};"]  # fmt: skip

    def _plain(self, text: str, place: Place) -> str:
        """Replaces what a launcher has no word for: tensors by pointers and sizes."""
        text = re.sub(r"\b(?:at|c10)::(?:cuda::)?(?:getCurrentCUDAStream)\(.*?\)(?:\.stream\(\))?", "stream", text)
        held: list[str] = []

        def hold(value: str) -> str:
            held.append(value)
            return f"\0{len(held) - 1}\0"

        for call, function in reversed(self._helpers_in(text)):
            end = closing(masked(text), call.end())
            values = [
                self._argument(value, function, number, hold)
                for number, value in enumerate(arguments_in(text[call.end() : end]))
            ]
            text = text[: call.end()] + ", ".join((*values, "stream")) + text[end:]
            self.helpers.add(function.name)
        parts, last = [], 0
        mask = masked(text)
        for found in LAUNCH.finditer(mask):
            launch = LAUNCH.match(text, found.start())
            assert launch is not None
            end = closing(mask, launch.end())
            parts.append(text[last : launch.start()])
            parts.append(self._launch(launch, text[launch.end() : end], hold, place))
            last = end + 1
        text = "".join((*parts, text[last:]))
        text = self._pointers(text, hold, lambda name: "" if self.is_written(name) else "const ")
        text = self._sizes(text, hold)
        for name, parameter in self.scalars.items():
            text = self._scalar(text, name, parameter, place)
        for name in self.sizes:
            if re.search(rf"(?<![\w.]){name}\b", text):
                self._size_parameter(name, text)
        text = re.sub(
            rf"(?<![\w.])({'|'.join(one.name for one in self.tensors.values() if one.optional) or '(?!)'})"
            r"\.has_value\(\)", lambda found: self._given(found[1], hold), text)  # fmt: skip
        known = "|".join(map(re.escape, (*self._all_tensors(), *self._options))) or r"(?!)"
        if left := re.search(rf"(?<![\w.>])(?:{known})\b", re.sub(r"\0\d+\0", " ", text)):
            raise words.UnknownError(f"{place}: {' '.join(text.split())[:80].replace(chr(0), '')}: a launcher has no tensor {left[0]}")
        while "\0" in text:
            text = re.sub(r"\0(\d+)\0", lambda m: held[int(m[1])], text)
        if words.TORCH.search(text):
            raise words.UnknownError(f"{place}: {' '.join(text.split())[:80]}: a launcher has no word of torch's")
        return text

    def _launch(self, launch: re.Match[str], inside: str, hold: object, place: Place) -> str:
        assert callable(hold)
        config = arguments_in(launch["config"])
        config = [*config, "0"][:3] if len(config) < 3 else config[:3]
        if len(config) != 3:
            raise words.UnknownError(f"{place}: a launch with {len(config)} numbers")
        kernel = self.guest.kernel(launch["kernel"])
        assert kernel is not None
        values = [
            self._argument(value, kernel, number, hold)
            for number, value in enumerate(arguments_in(inside))
        ]
        call = f"{launch['kernel']}{launch['template'] or ''}<<<{', '.join(config)}, stream>>>("
        return call + ", ".join(values) + ")"

    def _argument(self, value: str, called: Function, number: int, hold: object) -> str:
        """Replaces the pointers in an argument; one to read and write where that is what it is
        passed as.
        """
        kind = called.parameters[number].type if number < len(called.parameters) else ""
        narrow = words.base_type(kind) in ("int", "unsigned", "unsigned int", "int32_t", "uint32_t")
        if narrow and (value in self.sizes or re.fullmatch(rf"\w+{_SIZE}", value)):
            note = Note(called.item.place, f"{called.name} takes sizes as {words.base_type(kind)}, "
                        "which holds none from 2^31 on; take int64_t, and for indices too")  # fmt: skip
            self.notes += [note] if note not in self.notes else []
        takes_const = re.search(r"\bconst\b[^*]*\*", kind) or "*" not in kind
        return self._pointers(value, hold, lambda _: "" if takes_const else "mutable ")

    def _pointers(self, text: str, hold: object, wanted: object) -> str:
        assert callable(hold) and callable(wanted)
        known = "|".join(map(re.escape, self._all_tensors())) or r"(?!)"

        def pointer(name: str, element: str, const: str) -> str:
            base = words.base_type(element)
            is_written = self.is_written(name)
            shared = words.ELEMENTS.get(base, ("", "void"))[1]
            own = self.passed.get(name)
            kind = f"{shared}*" if is_written else f"const {shared}*"
            if own is not None and own.type != kind:
                own.type, shared = ("void*" if is_written else "const void*"), "void"
            elif own is None:
                self.passed[name] = Passed(kind, name, "")
            if name in self.tensors:
                self.tensors[name].pointed = True
                if base in words.ELEMENTS:
                    self.tensors[name].elements.add(words.ELEMENTS[base][0])
                else:
                    self.tensors[name].dispatched = True
            constant = "" if is_written else "const "
            real = {"Half": "__half", "half": "__half", "BFloat16": "__nv_bfloat16"}.get(base, base)
            value = name if shared != "void" else f"static_cast<{constant}{real}*>({name})"
            if const.startswith("mutable") and not is_written:
                value = f"const_cast<{real}*>({value})"
            return value

        def plain(found: re.Match[str]) -> str:
            return str(hold(pointer(found[1], found["element"], wanted(found[1]))))

        def accessor(found: re.Match[str]) -> str:
            self.accessors = True
            name, rank = found[1], int(found["rank"])
            if name in self.tensors:
                self.tensors[name].rank = rank
            index = "int64_t" if found["bits"] == "64" else "int32_t"
            pointer(name, found["item"], "")
            sizes = [self._size_of(name, dim) for dim in range(rank)]
            return str(hold(f"Accessor<{found['item']}, {rank}, {index}>({name}, {{{', '.join(sizes)}}})"))

        text = re.sub(rf"(?<![\w.])({known}){_ACCESSOR}", accessor, text)
        return re.sub(rf"(?<![\w.])({known}){_POINTER}", plain, text)

    def _size_of(self, tensor: str, dim: int) -> str:
        if tensor in self.outputs and self.outputs[tensor].like:
            tensor = self.outputs[tensor].like
        for name, size in self.sizes.items():
            if (size.tensor, size.dim) == (tensor, dim):
                self._size_parameter(name, "")
                return name
        name = f"{tensor}_size_{dim}"
        self.passed.setdefault(name, Passed("int64_t", name, f"{tensor}.size({dim})"))
        return name

    def _given(self, name: str, hold: object) -> str:
        assert callable(hold)
        self.passed.setdefault(f"has_{name}", Passed("bool", f"has_{name}", f"{name}.has_value()"))
        return str(hold(f"has_{name}"))

    def _sizes(self, text: str, hold: object) -> str:
        assert callable(hold)
        known = "|".join(map(re.escape, self._all_tensors())) or r"(?!)"

        def size(found: re.Match[str]) -> str:
            value = found[0]
            self._sized(found[1], found, value)
            for name, one in self.sizes.items():
                if one.text == value:
                    self._size_parameter(name, text)
                    return str(hold(name))
            parts = (found[1], found["what"] or found["all"], (found["dim"] or "").replace("-", "m"))
            name = "_".join(part for part in parts if part)
            self.passed.setdefault(name, Passed("int64_t", name, value))
            return str(hold(name))

        return re.sub(rf"(?<![\w.])({known}){_SIZE}", size, text)

    def _size_parameter(self, name: str, text: str) -> None:
        kind = "int64_t"
        if self.size_types.get(name) == "int":
            if any(_MIN_MAX.search(one.text) and re.search(rf"\b{name}\b", one.text) for one in self._compute):
                kind = "int"  # std::min wants both of one type
        self.passed.setdefault(name, Passed(kind, name, self.sizes[name].text))

    def _scalar(self, text: str, name: str, parameter: Parameter, place: Place) -> str:
        if not re.search(rf"(?<![\w.>]){name}\b", text):
            return text
        kind, native = words.schema_type(parameter.type)
        base = words.base_type(parameter.type)
        if kind not in ("int", "float", "bool"):
            raise words.UnknownError(f"{place}: a launcher takes no {parameter.type} {name}")
        if base == "Scalar":
            text = re.sub(rf"\b{name}\.(?:to<([\w:]+)>\(\)|toDouble\(\)|toFloat\(\)|toInt\(\)|toLong\(\))",
                          lambda m: f"static_cast<{m[1]}>({name})" if m[1] else name, text)  # fmt: skip
            base = native
        value = name if base in (native, "long", "long long") else f"static_cast<{base}>({name})"
        self.passed.setdefault(name, Passed(native if base in ("long", "long long") else base, name, value))
        return text

    # --- what follows -----------------------------------------------------------------

    @property
    def statements(self) -> list[Statement]:
        """What is computed, but for what a binding says otherwise."""
        return self._compute

    def elementwise(self) -> bool:
        """Says whether each element becomes one element, and all tensors have one shape."""
        if self.formula:
            return True
        if self.problem:
            return False
        if self.holes or not (self.outputs or any(one.written for one in self.tensors.values())):
            return False
        if any(not one.like for one in self.outputs.values()) or any(
            one.optional or one.rank is not None for one in self.tensors.values()
        ):
            return False
        if any(size.dim is not None for size in self.sizes.values()) or self.same or self.fixed:
            return False
        text = "\n".join(one.text for one in self._compute)
        if re.search(r"\.(?:size|stride|dim)\(", text) or "packed_accessor" in text:
            return False
        if not all(re.search(rf"(?<![\w.]){name}{_POINTER}", text) for name in self.tensors):
            return False
        return self._one_index()

    def _one_index(self) -> bool:
        if self.device == "cpu":
            code, uses = self.cpu_code()
            return is_elementwise(uses, code)
        found = [(one, launch, given) for one in self._compute for launch, given in launches_in(one.text)]
        if len(found) != 1:
            return False
        _, launch, given = found[0]
        kernel = self.guest.kernel(launch["kernel"])
        assert kernel is not None
        uses = {}
        for parameter, value in zip(kernel.parameters, given, strict=False):
            if "*" in parameter.type:
                if not self._pointed_in(value):
                    return False
                uses[parameter.name] = use_of(parameter.name, kernel.item.body)
        return is_elementwise(uses, kernel.item.body)

    # --- the CPU ----------------------------------------------------------------------

    def _formula(self, value: str, place: Place) -> None:
        """Reads a function made of torch's elementwise operators as one of numbers."""
        numbers = {**dict.fromkeys(self.tensors), **dict.fromkeys(self.scalars)}
        lines = []
        for name, statement in self.holes.items():
            declared = _DECLARED.match(statement.text)
            assert declared is not None
            lines.append(f"const double {name} = {words.formula(declared['value'], numbers, statement.place)};")
            numbers[name] = None
        lines.append(f"return {words.formula(value, numbers, place)};")
        if any(one.optional for one in self.tensors.values()) or not self.tensors:
            raise words.UnknownError(f"{place}: {value}: no formula of tensors alone")
        self.holes.clear()
        self.formula = " ".join(lines)

    def _loops(self) -> None:
        """Turns loops over tensors into loops of a binding."""
        if self.formula:
            return
        if any("<<<" in one.text for one in self._compute):
            raise words.UnknownError(f"{self.place}: kernels are launched here")
        if self.holes:
            first = next(iter(self.holes.values()))
            text = " ".join(first.text.split())
            raise words.UnknownError(f"{first.place}: {text}: the CPU function calls torch; write its loops")
        if not self._compute:
            raise words.UnknownError(f"{self.place}: nothing is computed here for the CPU")
        known = "|".join(map(re.escape, self._all_tensors()))
        code, uses = self.cpu_code()
        del code
        for name in self.tensors:
            use = uses.get(f"{name}_data")
            if use is not None:
                self.tensors[name].pointed = True
                self.tensors[name].written |= use.written
        for statement in self._compute:
            text, place = statement.text, statement.place
            lines: list[str] = []
            inside: dict[str, str] = {}
            start = words.DISPATCH.match(masked(text))
            if start is None:
                lines = indented_text(self._loop(text, place, known, self.pointers))
            else:
                of, body, body_place = self._dispatched(text, start, place)
                for one in split(body, body_place):
                    lines += indented_text(self._loop(one.text.strip(), one.place, known, inside))
                listed = ", ".join(f"DType::{one}" for one in self.dtypes)
                own = {k: v for k, v in inside.items() if "scalar_t" in v}
                self.pointers |= {k: v for k, v in inside.items() if k not in own}
                lines = [f"visit_cpu<{listed}>(dtype_of({of}), [&](auto tag) {{",
                         "  using scalar_t = decltype(tag);",
                         *(f"  {one}" for one in (*own.values(), *lines)), "});"]  # fmt: skip
            self.lines += lines

    def _loop(self, text: str, place: Place, known: str, pointers: dict[str, str]) -> str:
        def pointer(found: re.Match[str]) -> str:
            name, element = found[1], words.base_type(found["element"])
            if name in self.tensors:
                if element in words.ELEMENTS:
                    self.tensors[name].elements.add(words.ELEMENTS[element][0])
                else:
                    self.tensors[name].dispatched = True
                self.tensors[name].pointed = True
            element = {"Half": "torch::headeronly::Half", "BFloat16": "torch::headeronly::BFloat16"}.get(element, element)
            const, how = ("", "mutable") if self.is_written(name) else ("const ", "const")
            pointers[f"{name}_data"] = (f"{const}{element}* const {name}_data = "
                                        f"static_cast<{const}{element}*>({name}.{how}_data_ptr());")  # fmt: skip
            return f"{name}_data"

        text = re.sub(rf"(?<![\w.])({known}){_POINTER}", pointer, text)
        text = re.sub(r"\bat::parallel_for\(\s*0\s*,", "parallel_for(", text)
        text = re.sub(r"\bat::internal::GRAIN_SIZE\b", "32768", text)
        rest = re.sub(rf"(?<![\w.])(?:{known}){_SIZE}", " ", text)
        if left := re.search(rf"(?<![\w.>])(?:{known})\b", rest):
            raise words.UnknownError(f"{place}: {' '.join(text.split())[:80]}: a loop of a binding has no word for this use of {left[0]}")
        if words.TORCH.search(text):
            raise words.UnknownError(f"{place}: {' '.join(text.split())[:80]}: the CPU function calls torch; write its loops")
        return text

    def cpu_code(self) -> tuple[str, dict[str, Use]]:
        """Returns the loops with a word for each tensor in place of its pointer, and how they use
        these.
        """
        known = "|".join(map(re.escape, self._all_tensors())) or r"(?!)"
        code = "\n".join(one.text for one in self._compute)
        code = re.sub(rf"(?<![\w.])({known}){_POINTER}", lambda m: f"{m[1]}_data", code)
        names = set(re.findall(rf"\b(?:{known})_data\b", code))
        return code, {name: use_of(name, code) for name in names}


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
    if margin is None:
        margin = min((len(one) - len(one.lstrip()) for one in rest), default=4) - 4
    return [lines[0].rstrip(), *(one[min(max(margin, 0), len(one) - len(one.lstrip())) :].rstrip() for one in rest)]


def _normalized(statement: Statement) -> Statement:
    text = statement.text
    text = re.sub(r"\b(\w+)\.sizes\(\)\[(-?\d+)\]", r"\1.size(\2)", text)
    text = re.sub(r"\.ndimension\(\)", ".dim()", text)
    text = re.sub(r"\.(?:template\s+)?data\s*<", ".data_ptr<", text)
    text = re.sub(r"\.template\s+", ".", text)
    text = re.sub(r"\btorch::stable::contiguous\((\w+)\)", r"\1.contiguous()", text)
    text = re.sub(r"\.sizes\(\)\.equals\((\w+)\.sizes\(\)\)", r".sizes() == \1.sizes()", text)
    text = re.sub(r"(\w+)\.(?:has_value|defined)\(\)\s*\?\s*(?:\1|\(\*\1\))(?:\.value\(\))?(?:\.|->)"
                  r"((?:\w+_)?data_ptr<[^<>()]+>\(\))\s*:\s*nullptr", r"\1.\2", text)  # fmt: skip
    pointer = r"(\w+)\.(?:mutable_|const_)?data_ptr\(\)"
    text = re.sub(rf"(?:reinterpret_cast|static_cast)<\s*(?:const\s+)?([\w: ]+?)(?:\s+const)?\s*\*\s*>\(\s*{pointer}\s*\)",
                  r"\2.data_ptr<\1>()", text)  # fmt: skip
    text = re.sub(rf"\(\s*(?:const\s+)?([\w:]+)\s*\*\s*\)\s*{pointer}", r"\2.data_ptr<\1>()", text)
    return Statement(text, statement.place)


def _declarators(statement: Statement) -> list[Statement]:
    """Splits ``int h = x.size(0), w = x.size(1);`` in two."""
    found = re.match(r"\s*((?:const\s+)?(?:unsigned\s+)?(?:int|int64_t|long|size_t|auto|float|double|unsigned)\s+)(\w+\s*=.*);\s*$",
                     statement.text, re.DOTALL)  # fmt: skip
    if found is None or declared_in(statement.text) == "":
        return [statement]
    parts = arguments_in(found[2])
    if len(parts) < 2 or not all(re.match(r"\w+\s*=", part) for part in parts):
        return [statement]
    return [Statement(f"{found[1]}{part};", statement.place) for part in parts]


def _new_in(value: str) -> re.Match[str] | None:
    found = _NEW.match(value)
    if found is None or closing(masked(value), found.end()) != len(value) - 1:
        return None
    return found


def _string(text: str) -> str:
    return "".join(re.findall(r'"((?:\\.|[^"\\])*)"', text))


def _path(guest: Guest, name: str) -> object:
    for source in (*guest.sources, *guest.included):
        if source.path.name == name:
            return source.path
    return guest.sources[0].path
