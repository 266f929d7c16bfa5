"""The statements of a host function, sorted into what a native pair has of them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from cuda_ops.build.source_text import arguments_in, closing, masked
from cuda_ops.dev.adopt import words
from cuda_ops.dev.adopt.checks import CHECK, Checks
from cuda_ops.dev.adopt.cxx import Function, Statement
from cuda_ops.dev.adopt.facts import AFTER_LAUNCH, POINTER, SIZE, Output
from cuda_ops.dev.adopt.flatten import declared_in, flattened, renamed
from cuda_ops.dev.adopt.guest import Guest
from cuda_ops.dev.adopt.notes import Note, Place, UnknownError

#: What makes a device current: the binding's launch() does that.
_GUARD = re.compile(
    r"\b(?:Optional)?(?:CUDA|Device)(?:Stream)?Guard\b|\bcudaSetDevice\s*\("
    r"|=\s*\w+\.(?:get_device(?:_index)?\(\)|device\(\)\.index\(\));"
)
_STREAM = re.compile(r"getCurrentCUDAStream|current_cuda_stream|\bcudaStream_t\b")
_EARLY = re.compile(
    r"if\s*\((?P<asked>[^{};]*)\)\s*(?P<braces>\{\s*)?return\b\s*(?P<value>[^;]*);\s*(?(braces)\})",
    re.DOTALL,
)
DECLARED = re.compile(
    r"\s*(?P<type>(?:const\s+|constexpr\s+|static\s+)*(?:auto|(?:unsigned\s+)?[A-Za-z_][\w:]*(?:<[^;=]*?>)?)"
    r"(?:\s*[*&]+|\s)\s*(?:const\s+)?(?:__restrict__\s+)?)(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*);\s*",
    re.DOTALL,
)
_NEW = re.compile(
    r"(?:[\w:]*::)?(?P<made>empty_like|zeros_like|empty|zeros)\s*\(|(?P<like>\w+)\.(?P<new>new_empty|new_zeros)\s*\("
    r"|(?:[\w:]*::)?(?P<stable>new_empty|new_zeros)\s*\("
)
#: What a function does for a device that it does not serve.
_REFUSES = re.compile(rf"(?:AT_ERROR|throw)\b|{CHECK.pattern}\s*false\b")
#: The pointer of a tensor that may be missing.
_OPTIONAL = re.compile(
    r"(\w+)\.(?:has_value|defined)\(\)\s*\?\s*(?:\1|\(\*\1\))(?:\.value\(\))?(?:\.|->)"
    r"((?:\w+_)?data_ptr<[^<>()]+>\(\))\s*:\s*nullptr"
)
_UNTYPED = r"(\w+)\.(?:mutable_|const_)?data_ptr\(\)"
_CASTS = (
    re.compile(
        r"(?:reinterpret_cast|static_cast)<\s*(?:const\s+)?([\w: ]+?)(?:\s+const)?\s*\*\s*>"
        rf"\(\s*{_UNTYPED}\s*\)"
    ),
    re.compile(rf"\(\s*(?:const\s+)?([\w:]+)\s*\*\s*\)\s*{_UNTYPED}"),
)
_DECLARATORS = re.compile(
    r"\s*((?:const\s+)?(?:unsigned\s+)?(?:int|int64_t|long|size_t|auto|float|double|unsigned)\s+)"
    r"(\w+\s*=.*);\s*",
    re.DOTALL,
)


class Host(Checks, ABC):
    """A function of one device; what computes is read by :class:`Launcher` and :class:`Loops`."""

    def __init__(self, guest: Guest, function: Function, device: str) -> None:
        super().__init__(guest, function, device)
        self.place = function.item.place
        #: Whether it is one for CUDA, as far as it could be read.
        self.launches = True
        try:
            statements = flattened(guest, function, device)
            self.launches = any("<<<" in one.text for one in statements)
            self.place = statements[0].place if statements else self.place
            self._sort(statements)
            self.lower()
        except UnknownError as error:
            self.problem = error.note

    @abstractmethod
    def lower(self) -> None:
        """Turns what computes into lines of the draft."""

    @abstractmethod
    def one_index(self) -> bool:
        """Says whether what computes reads and writes all tensors at one index."""

    def take_formula(self, value: str, place: Place) -> bool:
        """Takes a function that returns one expression; says whether it did."""
        return False

    def _sort(self, statements: list[Statement]) -> None:
        names: dict[str, str] = {}  # what stands for another tensor or pointer
        queue = [part for one in statements for part in _declarators(one)]
        for one in queue:
            statement = _normalized(Statement(renamed(one.text, names).strip(), one.place))
            text = statement.text
            if CHECK.match(text) and not _REFUSES.match(text):
                self.take_check(statement)
            elif "<<<" not in text and _GUARD.search(text):
                continue
            elif "<<<" not in text and _STREAM.search(text):
                if found := DECLARED.match(text):
                    names[found["name"]] = "stream"
            elif "<<<" not in text and AFTER_LAUNCH.search(text):
                self._left_out(statement)
            elif re.match(r"return\b", text):
                self._return(statement)
            elif _REFUSES.match(text):
                self.launches = self.device == "cpu"  # it is not for this device at all
                raise UnknownError(one.place, f"nothing for {self.device} but an error")
            elif self.guest.checks_launches(text):
                continue
            elif found := DECLARED.match(text):
                self._declared(statement, found, names)
            elif re.fullmatch(r"(\w+)\s*=\s*\1\.contiguous\(\);", text):
                continue  # the binding does that
            elif (zeroed := re.fullmatch(r"(\w+)\.zero_\(\);", text)) and zeroed[1] in self.outputs:
                self.outputs[zeroed[1]].zeros = True
            elif early := _EARLY.fullmatch(text):
                self.early.append("".join(early["value"].split()))
                self.compute.append(Statement(f"if ({early['asked']}) return;", one.place))
            else:
                self.compute.append(statement)
        if self.returned is None:
            self.returned = ()

    def _left_out(self, statement: Statement) -> None:
        if found := re.search(r"cuda(Device|Stream|Thread)Synchronize", statement.text):
            self.notes.append(Note(statement.place, f"cuda{found[1]}Synchronize() is left out: a "
                                   "launcher does not wait"))  # fmt: skip

    def _declared(self, statement: Statement, found: re.Match[str], names: dict[str, str]) -> None:
        name, value, kind = found["name"], found["value"].strip(), found["type"]
        known = self.any_tensor
        if alias := re.fullmatch(rf"({known})(?:\.contiguous\(\)|\.expect_contiguous\(\))?", value):
            if name != alias[1]:
                names[name] = alias[1]
        elif found_new := _new_in(value):
            self._output(name, statement, found_new)
        elif re.fullmatch(rf"(?:{known})\.sizes\(\)", value):
            names[name] = value
        elif re.search(r"TensorOptions|\.options\(\)|::dtype\(|\.device\(\)$", value):
            self.options[name] = value
        elif re.fullmatch(rf"(?:{known})\.(?:scalar_type|dtype|type)\(\)", value):
            self.dtype_names[name] = value
        elif re.search(r"\*\s*(?:const\s*)?(?:__restrict__\s*)?$", kind) or (
            re.match(r"(?:const\s+)?auto\b", kind) and re.fullmatch(rf"(?:{known}){POINTER}", value)
        ):
            if re.fullmatch(rf"(?:{known}){POINTER}", value):
                names[name] = value
            else:
                self.compute.append(statement)
        elif size := re.fullmatch(rf"({known}){SIZE}", value):
            self.sizes[name] = self.sized(size[1], size, value)
            self.size_types[name] = " ".join(kind.replace("const", "").split())
            if size["all"] == "dim":
                del self.sizes[name]
                self.compute.append(statement)
        elif self._is_tensor(kind, value, known):
            self.holes[name] = statement
        else:
            if re.search(
                r"^(?:const |static |constexpr )*(?:u?int\w*|long|auto|size_t|unsigned)", kind
            ):
                self.derived[name] = value
            self.compute.append(statement)

    def _is_tensor(self, kind: str, value: str, known: str) -> bool:
        if re.search(r"\bTensor\b", kind):
            return True
        if "auto" not in kind:
            return False
        return bool(
            re.search(r"\b(?:torch|at)::\w+", value)
            or re.search(rf"\b(?:{known})\b(?!\.(?:size|numel|stride|dim)\b)", value)
        )

    def _output(self, name: str, statement: Statement, found: re.Match[str]) -> None:
        inside = arguments_in(
            statement.text[statement.text.index(found[0]) + len(found[0]) :].rstrip(" ;")[:-1]
        )
        made = found["made"] or found["new"] or found["stable"]
        like = found["like"] or ""
        if found["stable"] or made.endswith("_like"):
            like, inside = inside[0] if inside else "", inside[1:]
            if like not in self.all_tensors():
                self.holes[name] = statement
                return
        output = Output(
            name, statement.place, "", dtype_of=like, zeros=made.startswith(("zeros", "new_zeros"))
        )
        if made.endswith("_like"):
            output.like = like
        else:
            shape, inside = inside[0] if inside else "", inside[1:]
            shape = re.sub(
                r"^(?:[\w:]*IntArrayRef|std::vector<int64_t>)\s*\(?(\{.*\})\)?$", r"\1", shape
            )
            if whole := re.fullmatch(r"(\w+)\.sizes\(\)(?:\.vec\(\))?", shape):
                output.like = whole[1]
            elif shape.startswith("{"):
                output.shape = tuple(arguments_in(shape[1:-1]))
            elif re.fullmatch(r"[\w.()]+", shape) and (
                shape.isdigit()
                or shape in self.sizes
                or shape in self.scalars
                or re.search(SIZE, shape)
            ):
                output.shape = (shape,)
            else:
                self.holes[name] = statement
                return
        options = renamed(", ".join(inside), self.options)
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
        if any(one != "".join(value.split()) for one in self.early):
            raise UnknownError(statement.place, f"returns {value}, and something else before")
        if tuple_ := re.fullmatch(
            r"(?:(?:std::)?(?:make_tuple|tuple<.*?>|vector<.*?>)\s*[({]|\{)(.*)[)}]",
            value,
            re.DOTALL,
        ):
            values = arguments_in(tuple_[1].strip("{}"))
        else:
            values = [value] if value else []
        made = self.all_tensors()
        if all(one in made for one in values):
            self.returned = tuple(values)
            return
        if len(values) == 1 and self.take_formula(value, statement.place):
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

    def dispatched(self, text: str, start: re.Match[str], place: Place) -> tuple[str, str, Place]:
        """Reads a call of AT_DISPATCH: the tensor whose dtype it asks for, and the body of its
        lambda.
        """
        macro = start[0].rstrip("( ")
        known = words.dispatched(macro)
        given = arguments_in(text[start.end() : closing(masked(text), start.end())])
        if known is None or len(given) < known[1] + 3:
            raise UnknownError(
                place,
                f"{macro} has no counterpart here; use visit<DType::kFloat32, ...>(dtype, body)",
            )
        dtypes, extra, left = known
        more = [words.dtype_in(f"at::{one.rpartition('::')[2]}") for one in given[:extra]]
        narrow = [words.NARROW[one] for one in more if one in words.NARROW] + (
            [left] if left else []
        )
        if narrow and self.device == "cuda":
            self.notes.append(Note(place, (
                f"{' and '.join(narrow)} left out: in the kernel read with to_compute(x[i]), "
                "compute in compute_t<scalar_t> and store with from_compute<scalar_t>(value) of "
                "dtype.cuh, then use visit_floating and kFloating")))  # fmt: skip
        subject, body = renamed(given[extra], self.dtype_names), given[-1]
        of = re.fullmatch(r"(\w+)\.(?:scalar_type|type|dtype)\(\)", subject)
        if of is None or of[1] not in self.all_tensors():
            raise UnknownError(place, f"{macro} dispatches on {subject}, which is no tensor here")
        dtypes = (*dtypes, *(one for one in more if one and one not in words.NARROW))
        if self.dispatch_on and self.dtypes != dtypes:
            raise UnknownError(place, "a second AT_DISPATCH with other dtypes")
        self.dtypes = dtypes
        self.dispatch_on = self.dispatch_on or of[1]
        while body.startswith("("):
            body = body[1:-1].strip()
        lambda_ = re.match(r"\[[&=]\]\s*(?:\(\s*\))?\s*(?:->\s*void\s*)?\{", body)
        if lambda_ is None:
            raise UnknownError(place, f"{macro} without a lambda")
        inside = body[lambda_.end() : -1]
        if words.DISPATCH.search(masked(inside)):
            raise UnknownError(
                place,
                "AT_DISPATCH inside of another one; hand the launcher two DTypes, use visit twice",
            )
        line = place.line + text.count("\n", 0, text.index(inside)) if inside else place.line
        return of[1], inside, Place(place.path, line)

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
        text = "\n".join(one.text for one in self.compute)
        if re.search(r"\.(?:size|stride|dim)\(", text) or "packed_accessor" in text:
            return False
        if not all(re.search(rf"(?<![\w.]){name}{POINTER}", text) for name in self.tensors):
            return False
        return self.one_index()


def _normalized(statement: Statement) -> Statement:
    text = statement.text
    text = _thrown(text)
    text = re.sub(r"\b(\w+)\.options\(\)\.dtype\(\)", r"\1.dtype()", text)
    text = re.sub(r"\b(\w+)\.contiguous\(\)\.", r"\1.", text)  # the binding has it so
    text = re.sub(r"\b(\w+)\.sizes\(\)\[(-?\d+)\]", r"\1.size(\2)", text)
    text = re.sub(r"\.ndimension\(\)", ".dim()", text)
    text = text.replace(".type().is_cuda()", ".is_cuda()")
    text = re.sub(r"\.(?:template\s+)?data\s*<", ".data_ptr<", text)
    text = re.sub(r"\.template\s+", ".", text)
    text = re.sub(r"\btorch::stable::contiguous\((\w+)\)", r"\1.contiguous()", text)
    text = re.sub(r"\.sizes\(\)\.equals\((\w+)\.sizes\(\)\)", r".sizes() == \1.sizes()", text)
    text = _OPTIONAL.sub(r"\1.\2", text)
    for cast in _CASTS:
        text = cast.sub(r"\2.data_ptr<\1>()", text)
    return Statement(text, statement.place)


def _thrown(text: str) -> str:
    """Returns ``if (x.dim() != 2) throw std::runtime_error("...");`` as the check that it is."""
    mask = masked(text)
    start = re.match(r"if\s*\(", mask)
    if start is None:
        return text
    end = closing(mask, start.end())
    rest = mask[end + 1 :].strip()
    throws = re.search(r"\b(?:throw|AT_ERROR)\b[^;]*;\s*\}?$", rest)
    if throws is None or re.search(r"\belse\b|<<<|[^=!<>]=[^=]", rest):
        return text
    asked = re.sub(r"(?<![\w>])\(([\w:]+)\)", r"\1", text[start.end() : end]).strip()
    while asked.startswith("(") and closing(asked, 1) == len(asked) - 1:
        asked = asked[1:-1].strip()
    said = re.findall(r'"(?:\\.|[^"\\])*"', text[end:])
    checks = " && ".join(map(_negated, re.split(r"\s*\|\|\s*", asked)))
    return f"TORCH_CHECK({checks}, {' '.join(said) or chr(34) * 2});"


_OPPOSITES = (("!=", "=="), ("==", "!="), ("<=", ">"), (">=", "<"), ("<", ">="), (">", "<="))


def _negated(text: str) -> str:
    for one, other in (
        ("!=", "=="),
        ("==", "!="),
        ("<=", ">"),
        (">=", "<"),
        ("<", ">="),
        (">", "<="),
    ):
        if text.count(one) == 1 and "&&" not in text:
            return text.replace(one, other)
    return text[1:] if re.fullmatch(r"!\s*[\w.()]+", text) else f"!({text})"


def _declarators(statement: Statement) -> list[Statement]:
    """Splits ``int h = x.size(0), w = x.size(1);`` in two."""
    found = _DECLARATORS.fullmatch(statement.text)
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
