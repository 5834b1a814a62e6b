"""The names in a pickle, by what a file may do with them: known, opaque, or refused. None is imported or called.

A pickle names functions and classes and their arguments; unpickling calls them. memsize reads the instructions and
keeps them as values, so that no name is dangerous to memsize itself. The policy decides what the report says:

* **known** names are those that ``torch.load(weights_only=True)`` allows, and a few containers of Python: their meaning
  is built in (`memsize.checkpoints.pickle_values`).
* **opaque** names are all others: an ``argparse.Namespace``, a class of the user's. What they were given is searched
  for tensors, and their names are reported, since ``weights_only`` refuses the file and plain ``torch.load`` would
  import and call them.
* **refused** names are those that a file has no honest reason to call: they run commands or code, open files or
  connections, load further code or pickles, or reach into other objects (`getattr`). A file that mentions one is not
  analysed at all, and the error names it. weights_only's own blocklist (``sys``, ``os``, ``posix``, ``nt``) is part of
  these.

A list of refused names cannot be complete, and safety does not rest on it: a function that is missing from it is shown
as opaque and runs just as little.
"""

from __future__ import annotations

from memsize.checkpoints.contents import STORAGES, torch_dtype

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
