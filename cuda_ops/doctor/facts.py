"""What the doctor found out: plain values, which tests can make up."""

from __future__ import annotations

from dataclasses import dataclass

#: Grows when a field of the JSON changes its meaning or goes.
FORMAT = 1


@dataclass(frozen=True)
class Gpu:
    """A GPU, by torch or by the driver."""

    name: str
    #: Its compute capability: ``"9.0"``.
    capability: str


@dataclass(frozen=True)
class Torch:
    """The torch of this Python, and what it can use."""

    #: Empty where it cannot be imported.
    version: str = ""
    #: The CUDA that it was built with; empty: none.
    cuda: str = ""
    #: The GPUs that it can use.
    gpus: tuple[Gpu, ...] = ()
    #: Why it cannot be imported, or cannot start CUDA.
    problem: str = ""
    #: Whether what tried it raised, ended its process, or gave no answer.
    fails: bool = False


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, and the GPUs of the machine."""

    version: str = ""
    #: The newest CUDA that it supports.
    cuda: str = ""
    #: The GPUs that it knows, whether or not torch may use them.
    gpus: tuple[Gpu, ...] = ()
    #: How many GPUs of NVIDIA the PCI bus has, with a driver or without.
    cards: int = 0
    #: What hides GPUs from torch: the value of ``CUDA_VISIBLE_DEVICES``.
    visible: str | None = None
    #: What nvidia-smi said in place of an answer.
    problem: str = ""


@dataclass(frozen=True)
class Toolkit:
    """The CUDA toolkit, and the nvcc on ``PATH``."""

    #: The one that builds take; empty: none.
    home: str = ""
    version: str = ""
    #: What ``CUDA_HOME`` or ``CUDA_PATH`` says.
    chosen: str = ""
    #: The nvcc on ``PATH``.
    nvcc: str = ""
    #: Whether that is a script.
    is_script: bool = False
    #: What was passed over on the way, and why.
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tool:
    """A program that builds need."""

    path: str = ""
    version: str = ""
    problem: str = ""
    #: What mends that.
    command: str = ""


@dataclass(frozen=True)
class Cache:
    """The cache of builds."""

    path: str = ""
    #: Bytes.
    size: int = 0
    #: Libraries and builds, and those of them that no present source needs.
    entries: int = 0
    stale: int = 0
    stale_size: int = 0
    #: Why files and folders are refused that others own or may write.
    foreign: tuple[str, ...] = ()
    writable: bool = True
    #: Why there can be none.
    problem: str = ""


@dataclass(frozen=True)
class Plugin:
    """An installed plugin, or that of a pair that failed."""

    name: str
    #: The entry point.
    value: str
    #: The package that has it.
    package: str = ""
    #: Why it could not be used, wholly or in part.
    problem: str = ""


@dataclass(frozen=True)
class Operator:
    """A pair, and the library that a call would load."""

    #: ``silu``, or ``my_ops::silu``.
    key: str
    #: ``native``, ``pybind11`` or ``TORCH_LIBRARY``.
    kind: str = "native"
    root: str = ""
    #: Whether the operators are in the package, so that commands need no ``--root``.
    builtin: bool = True
    has_kernel: bool = False
    #: The file that a call would load; empty: none.
    library: str = ""
    #: ``installed`` by pip, ``cached`` by a build here, or empty.
    origin: str = ""
    #: What it holds code for, ``9.0a``; unknown: ``None``.
    archs: tuple[str, ...] | None = ()
    #: Whether it was made from the present text; unknown: ``None``.
    is_current: bool | None = None
    #: Needed functions of the stable ABI that the oldest supported torch lacks.
    later_symbols: tuple[str, ...] = ()
    #: Needed functions of torch's C++ ABI.
    cpp_symbols: tuple[str, ...] = ()
    #: Other torches that the cache has its library for; a guest's fits one torch.
    other_torches: tuple[str, ...] = ()
    #: Whether its library opens and its plugin loads: ``yes``, ``no``, ``crashes``, ``hangs``, or
    #: empty where that was not tried.
    loads: str = ""
    #: Why it has no library, or that does not load.
    problem: str = ""
    #: Files that were passed over, and why: damaged, or of another user.
    ignored: tuple[str, ...] = ()
    #: What hides it, so that its name leads elsewhere.
    hidden: str = ""


@dataclass(frozen=True)
class Unusable:
    """Files or a root that form no operator."""

    name: str
    problem: str
    #: Whether something else has its name.
    hidden: bool = False


@dataclass(frozen=True)
class Failure:
    """A probe that raised."""

    probe: str
    problem: str


@dataclass(frozen=True)
class Facts:
    """Everything that was found out."""

    format: int = FORMAT
    cuda_ops: str = ""
    python: str = ""
    #: The oldest torch that libraries must load in.
    oldest_torch: str = ""
    torch: Torch = Torch()
    driver: Driver = Driver()
    toolkit: Toolkit = Toolkit()
    compiler: Tool = Tool()
    ninja: Tool = Tool()
    cache: Cache = Cache()
    plugins: tuple[Plugin, ...] = ()
    operators: tuple[Operator, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    #: Installed copies of operators that an added root has too.
    left_aside: tuple[str, ...] = ()
    failures: tuple[Failure, ...] = ()
