"""The names and values of a pickle: storages, tensors, dictionaries, and the results that its calls would have.

A pickle names functions and classes and their arguments; unpickling calls them. memsize reads the instructions and
keeps them as values: nothing is imported or called, so that no name is dangerous to memsize itself. The policy decides
what the report says:

* **known** names are those that ``torch.load(weights_only=True)`` allows, and a few containers of Python. The functions
  that put tensors together have rules here, from `torch._utils`, `torch._tensor` and the classes' own ``__reduce__``.
* **opaque** names are all others: an ``argparse.Namespace``, a class of the user's. Their calls make an `Object`, whose
  arguments are kept and searched for tensors, and their names are reported, since ``weights_only`` refuses the file and
  plain ``torch.load`` would import and call them.
* **refused** names are those that a file has no honest reason to call: they run commands or code, open files or
  connections, load further code or pickles, or reach into other objects (`getattr`). A file that mentions one is not
  analysed at all, and the error names it. weights_only's own blocklist (``sys``, ``os``, ``posix``, ``nt``) is part of
  these. The list cannot be complete, and safety does not rest on it: a function that is missing from it is shown as
  opaque and runs just as little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memsize.checkpoints.source import MOST_DIMENSIONS
from memsize.records.dtypes import torch_dtype

Args = tuple[Any, ...]
_SEQUENCES = (tuple, list)
_LARGEST = 2**63

STORAGES: dict[str, str] = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4", "UntypedStorage": "uint8",
}  # fmt: skip
"""The dtype of torch's storage classes (`torch.storage._dtype_to_storage_type_map`)."""


class Global(NamedTuple):
    """A class or a function, by its dotted name."""

    path: str

    def __str__(self) -> str:
        return self.path


class Blob(NamedTuple):
    """Bytes, or a text, too long to be kept: where they stand in the pickle's file, and how many they are."""

    start: int
    length: int
    text: bool


class StorageValue(NamedTuple):
    """A storage that a pickle mentions by its key: its dtype, how many elements it claims, and from which on."""

    key: str
    dtype: str
    elements: int
    base: int = 0


@dataclass(slots=True, eq=False)
class Dict:
    """A dictionary of any kind. `flat` has a key, its value, the next key, and so on: in the order in which they were
    set, and without hashing keys, which a pickle could make collide. `of_module`: a module's state dict, or one of the
    dictionaries in which a module keeps its parameters, buffers and children.
    """

    flat: list[Any] = field(default_factory=list)
    of_module: bool = False

    def __setitem__(self, key: Any, value: Any) -> None:
        self.flat += (key, value)

    def __len__(self) -> int:
        return len(self.flat) // 2

    @property
    def pairs(self) -> Iterable[tuple[Any, Any]]:
        return zip(self.flat[::2], self.flat[1::2], strict=True)


@dataclass(slots=True, eq=False)
class Object:
    """The result of calling `callee`, and additions to it: states, list items, and `entries` of a dictionary."""

    callee: Any
    args: tuple[Any, ...] = ()
    states: list[Any] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    entries: Dict | None = None

    def append(self, item: Any) -> None:
        """Add an item, as the unpickler does to a list."""
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.entries is None:
            self.entries = Dict()
            self.states.append(self.entries)
        self.entries[key] = value


@dataclass(slots=True, eq=False)
class TensorValue:
    """A strided tensor of a storage: `offset` and `stride` in elements. `storage` is None when it keeps no data."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: StorageValue | None
    trainable: bool | None = None


@dataclass(slots=True, eq=False)
class Composite:
    """A tensor that is kept in others: sparse, quantized per channel, nested, or a wrapper subclass.

    `inner` may hold anything: the tensors in it are its parts. An empty `kind` is a plain tensor with attributes.
    """

    kind: str
    inner: list[tuple[str, Any]]
    trainable: bool | None = None


def meaning(callee: Any, args: Args) -> Any:
    """Return the value that calling `callee` with `args` would have. Raises ValueError for impossible arguments."""
    if not isinstance(callee, Global) or not isinstance(args, tuple):
        raise ValueError("not a call of a name")
    rule = _RULES.get(callee.path)
    return rule(args) if rule else Object(callee, args)


def dtype_of(value: Any) -> str:
    """The dtype that a ``torch.float16`` in a pickle is; raises ValueError when it is none."""
    module, _, name = value.path.rpartition(".") if isinstance(value, Global) else ("", "", "")
    dtype = torch_dtype(name) if module == "torch" else None
    if dtype is None:
        raise ValueError("not a dtype")
    return dtype


def sizes(value: Any) -> tuple[int, ...]:
    """A shape or a stride; raises ValueError when it cannot be one."""
    if not isinstance(value, _SEQUENCES) or len(value) > MOST_DIMENSIONS:
        raise ValueError("not a shape")
    for size in value:
        if type(size) is not int or not 0 <= size < _LARGEST:
            raise ValueError("not a shape")
    return tuple(value)


def _strided(
    storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None, trainable: Any = None
) -> TensorValue:
    if not isinstance(storage, StorageValue) or type(offset) is not int or not 0 <= offset < _LARGEST:
        raise ValueError("not a tensor")
    shape, steps = sizes(size), sizes(stride)
    if len(shape) != len(steps):
        raise ValueError("a shape and a stride of different lengths")
    grad = trainable if isinstance(trainable, bool) else None
    return TensorValue(dtype or storage.dtype, shape, steps, offset, storage, grad)


def _tensor(args: Args) -> TensorValue:
    """``_rebuild_tensor(storage, offset, size, stride)`` and ``_v2``, which adds requires_grad and hooks."""
    storage, offset, size, stride, *rest = args
    return _strided(storage, offset, size, stride, trainable=rest[0] if rest else None)


def _tensor_v3(args: Args) -> TensorValue:
    """``_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype)``, of an untyped storage."""
    storage, offset, size, stride, trainable, _, dtype = args[:7]
    return _strided(storage, offset, size, stride, dtype_of(dtype), trainable)


def _meta(args: Args) -> TensorValue:
    dtype, size, stride, trainable = args[:4]
    return TensorValue(dtype_of(dtype), sizes(size), sizes(stride), 0, None, bool(trainable))


def _parameter(args: Args) -> Any:
    """``_rebuild_parameter(data, requires_grad, hooks)``: the same tensor, which may be trained."""
    data = args[0]
    if isinstance(data, TensorValue):
        return TensorValue(data.dtype, data.shape, data.stride, data.offset, data.storage, args[1] is True)
    if isinstance(data, Composite):
        return Composite(data.kind, data.inner, args[1] is True)
    return data


def _parameter_with_state(args: Args) -> Any:
    parameter, state = _parameter(args[:3]), args[3]
    return Composite("", [("", parameter), ("", state)]) if _holds_more(state) else parameter


def _quantized(args: Args) -> Any:
    """Data, and for a quantizer per channel its scales and zero points, which are tensors of their own."""
    data = _strided(*args[:4])
    inner = [value for value in args[4][1:] if isinstance(value, TensorValue)]
    if not inner:
        return data
    named = zip(("scales", "zero_points"), inner, strict=False)
    return Composite("quantized per channel", [("", data), *named])


def _sparse(args: Args) -> Composite:
    layout, data = args[:2]
    if not isinstance(layout, str) or layout not in _SPARSE or not isinstance(data, tuple):
        raise ValueError("not a sparse tensor")
    return Composite(layout.removeprefix("torch."), list(zip(_SPARSE[layout], data, strict=False)))


_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE = {
    "torch.sparse_coo": ("indices", "values"),
    **dict.fromkeys(("torch.sparse_csr", "torch.sparse_bsr"), _BY_ROW),
    **dict.fromkeys(("torch.sparse_csc", "torch.sparse_bsc"), _BY_COLUMN),
}
_NESTED = ("values", "sizes", "strides", "offsets")


def _from_type(args: Args) -> Any:
    """``_rebuild_from_type_v2(function, type, its arguments, state)``: a tensor subclass, or attributes on a tensor."""
    function, kind, inner_args, state = args[:4]
    if not _path(function).startswith("torch._utils."):
        return Composite(_short(kind), [("", inner_args), ("", state)])
    inner = meaning(function, inner_args)
    if isinstance(inner, TensorValue) and not _holds_more(state):
        return inner
    trainable = getattr(inner, "trainable", None)
    return Composite(_short(kind), [("", inner), ("", state)], trainable)


def _holds_more(state: Any) -> bool:
    if isinstance(state, Dict):
        return bool(state.flat)
    return state is not None and state != ()


def _first(args: Args) -> Any:
    """The argument that is kept: of ``_rebuild_device_tensor_from_cpu_tensor(data, dtype, …)``, the source tensor."""
    return args[0] if args else ""


def _short(kind: Any) -> str:
    """``torchao Int8Tensor`` for ``torchao.quantization…Int8Tensor``."""
    root, _, rest = _path(kind).partition(".")
    return f"{root} {rest.rpartition('.')[2]}" if rest else "wrapper"


def _path(value: Any) -> str:
    """A name's text. Other values are never made texts of: a tuple of tuples of tuples may have one without end."""
    return value.path if isinstance(value, Global) else ""


def _mapping(args: Args) -> Dict:
    source = next((arg for arg in args if isinstance(arg, Dict | list)), ())
    if isinstance(source, Dict):
        return Dict(source.flat)
    return Dict([part for pair in source if isinstance(pair, list | tuple) and len(pair) == 2 for part in pair])


def _items(args: Args) -> Any:
    source = args[0] if args else []
    return source if isinstance(source, list | tuple) else []


def _reconstructed(args: Args) -> Any:
    """``copyreg._reconstructor(class, base, state)``: an object whose base class, a dict or a list, has a state."""
    kind, _, state = args[:3]
    value = meaning(_class(kind), ())
    if isinstance(value, Object) and state is not None:
        value.states.append(state)
    elif isinstance(value, Dict) and isinstance(state, Dict):
        return Dict(state.flat)
    return value


def _class(kind: Any) -> Any:
    """Return `kind`, the class of a new object. Raises ValueError for a function of copyreg, which could recurse."""
    if _path(kind).startswith("copyreg."):
        raise ValueError("not a class")
    return kind


_RULES: dict[str, Callable[[Args], Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_nested_tensor": lambda args: Composite("nested", list(zip(_NESTED, args, strict=False))),
    # The outer shell of a wrapper subclass, which keeps no data; the wrapped tensors come as its state.
    "torch._utils._rebuild_wrapper_subclass": lambda args: Composite(_short(args[0]), []),
    "torch._utils._rebuild_device_tensor_from_numpy": _first,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
    "torch._utils._rebuild_xla_tensor": _first,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    # A module that torch.fx traced, without its graph: its attributes, and imports.
    "torch.fx.graph_module.reduce_graph_module": lambda args: Object(Global("torch.fx.GraphModule"), states=[args[0]]),
    "torch.nn.parameter.Parameter": _first,
    "torch.serialization._get_layout": _first,
    "torch.Size": _items,
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": _mapping,
    "builtins.dict": _mapping,
    "builtins.list": _items,
    "builtins.tuple": _items,
    "builtins.set": _items,
    "builtins.frozenset": _items,
    "builtins.bytearray": _first,
    "_codecs.encode": _first,
    "copyreg._reconstructor": _reconstructed,
    "copyreg.__newobj__": lambda args: meaning(_class(args[0]), args[1:]),
    **{
        f"torch.jit._pickle.{name}": _first
        for name in "build_intlist build_tensorlist build_doublelist build_boollist restore_type_tag".split()
    },
}


# Names

_MODULES = frozenset(
    """
    _aix_support _ctypes _imp _osx_support _pickle _posixsubprocess _pyrepl _socket _winapi aiohttp antigravity
    asyncio bdb cPickle cProfile codeop ctypes distutils ensurepip ftplib http httpx idlelib imaplib imp
    importlib lib2to3 marshal multiprocessing nntplib nt os paramiko pdb pexpect pickle pip pkgutil poplib
    popen2 posix posixsubprocess pty py_compile pydoc requests runpy setuptools shutil smtplib socket
    socketserver subprocess sys sysconfig telnetlib timeit urllib urllib2 urllib3 venv webbrowser wsgiref xmlrpc
    zipapp zipimport
    """.split()
)
"""Modules that nothing in a checkpoint has a reason to name, and that no one calls a module of their own."""

_BUILTINS = frozenset(
    """
    __build_class__ __import__ __loader__ apply breakpoint compile delattr eval exec execfile file filter
    getattr globals input locals map open raw_input reduce reload setattr vars
    """.split()
)

_NAMES = frozenset(
    """
    _codecs.lookup _codecs.register _io.FileIO _io.open _io.open_code code.InteractiveConsole
    code.InteractiveInterpreter code.interact codecs.lookup codecs.open codecs.register commands.getoutput
    commands.getstatusoutput concurrent.futures.ProcessPoolExecutor doctest.debug doctest.debug_script
    functools.partialmethod functools.reduce io.FileIO io.open io.open_code joblib.load linecache.getlines
    logging.FileHandler logging.config.dictConfig logging.config.fileConfig logging.config.listen numpy.fromfile
    numpy.lib.npyio.load numpy.load numpy.loadtxt numpy.memmap numpy.save operator.attrgetter operator.call
    operator.methodcaller pandas.eval pandas.read_pickle platform.popen profile.Profile profile.run
    profile.runctx shelve.open sqlite3.connect tempfile.mktemp threading.Thread threading.Timer torch.compile
    torch.load torch.save torch.serialization.load torch.storage._load_from_bytes trace.Trace types.CodeType
    types.FunctionType types.LambdaType types.MethodType zipfile.PyZipFile
    """.split()
)

_PACKAGES = tuple(
    """
    numpy.ctypeslib. numpy.distutils. numpy.f2py. numpy.testing. torch._dynamo. torch._inductor.
    torch.distributed.launcher. torch.distributed.run. torch.hub. torch.jit. torch.package. torch.testing.
    torch.utils.bottleneck. torch.utils.collect_env. torch.utils.cpp_extension. torch.utils.model_zoo.
    """.split()
)
_SCRIPTED = ("torch.jit._pickle.", "__torch__.")
"""What the pickles of scripted models name; those are read by TorchScript's own loader, which imports nothing."""

_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "exceptions": "builtins", "UserDict": "collections"}
"""Modules by the names that Python 2 had for them, which protocols up to 2 still write."""

_ALLOWED = frozenset(
    """
    collections.OrderedDict collections.Counter torch.nn.parameter.Parameter torch.serialization._get_layout
    torch.Size torch.Tensor torch.device _codecs.encode builtins.bytearray builtins.set builtins.complex
    torch._tensor._rebuild_from_type_v2 torch.per_tensor_affine torch.per_tensor_symmetric
    torch.per_channel_affine torch.per_channel_symmetric torch.per_channel_affine_float_qparams
    torch.storage.UntypedStorage torch.storage.TypedStorage torch._utils._rebuild_parameter
    torch._utils._rebuild_parameter_with_state torch._utils._rebuild_qtensor torch._utils._rebuild_tensor
    torch._utils._rebuild_tensor_v2 torch._utils._rebuild_tensor_v3 torch._utils._rebuild_sparse_tensor
    torch._utils._rebuild_meta_tensor_no_storage torch._utils._rebuild_nested_tensor
    torch._utils._rebuild_wrapper_subclass torch._utils._rebuild_device_tensor_from_numpy
    torch._utils._rebuild_device_tensor_from_cpu_tensor
    """.split()
)
"""What ``weights_only`` allows (`torch._weights_only_unpickler._get_allowed_globals`), dtypes and storages apart."""


def canonical(module: str, name: str) -> str:
    """The dotted name that a pickle means, by the names that Python 3 has for it."""
    return f"{_RENAMED.get(module, module)}.{name}"


def is_refused(module: str, name: str) -> bool:
    """Whether a file that mentions this name is refused.

    From protocol 4 on a name may have dots itself, and is then looked up step by step: ``torch`` with ``os.system``.
    """
    path = canonical(module, name)
    root, *steps = path.split(".")
    if root in _MODULES or (root == "builtins" and steps and steps[0] in _BUILTINS):
        return True
    reached = name.split(".")
    through = any(step in _MODULES or step in ("builtins", "__builtins__") for step in reached[:-1])
    inner = any(step.startswith("__") and step.endswith("__") for step in reached)
    if path.startswith(_SCRIPTED):
        return through
    return through or (inner and path not in _DUNDERS) or path in _NAMES or f"{path}.".startswith(_PACKAGES)


_DUNDERS = ("copyreg.__newobj__", "copyreg.__newobj_ex__")


def is_allowed(path: str) -> bool:
    """Whether ``torch.load(weights_only=True)`` accepts the name without `add_safe_globals`."""
    if path in _ALLOWED or path.startswith(_SCRIPTED):
        return True
    module, _, name = path.rpartition(".")
    if module == "torch":
        return torch_dtype(name) is not None or name in STORAGES or name.endswith("Tensor")
    return module in _TENSOR_MODULES and (name in STORAGES or name.endswith("Tensor"))


_TENSOR_MODULES = ("torch.cuda", "torch.sparse", "torch.cuda.sparse", "torch.storage")
