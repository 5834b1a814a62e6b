"""TorchScript on a virtual GPU: graphs that `torch.jit.trace` records, modules that move there, and their files.

A graph has the kernels that the GPU would run; `SummaryWriter.add_graph` traces too. The parameters of a scripted
module belong to C++ code, which takes new ones in their place when the module moves.

It compares classes by identity, and so the compiler gets the originals of all functions that are replaced, and of the
class that takes the place of `torch.device` on builds without CUDA, where ``torch.device(0)`` is refused.

Source: torch/csrc/Device.cpp, torch/jit/_builtins.py and annotations.py (2.11 to 2.14).

Known limit: an optimizer that was made before such a module moved keeps the parameters that it had.
"""

from __future__ import annotations

import copy
import inspect
import io
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.jit._builtins
import torch.jit.annotations
from torch import Tensor, nn

from memsize.processes.patches import Patch, calling, wrapping
from memsize.tracing.named_devices import named_gpu
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.saved_weights import Files, stand_in_bytes

_OWN_CODE = r"memsize(\.|$)"


class _DeviceClass(type):
    """The metaclass of the replaced `torch.device`: it makes devices, and recognizes them."""

    __wrapped__: Any

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and type(args[0]) is int and not options:
            return cls.__wrapped__("cuda", args[0])
        return cls.__wrapped__(*args, **options)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__wrapped__)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__wrapped__

    def __hash__(cls) -> int:
        return hash(cls.__wrapped__)


def replacements() -> Iterator[Patch]:
    """Patch the functions that compile or trace, the one that moves a scripted module, and `torch.device`."""
    try:
        means_cuda = torch.device(0).type == "cuda"
    except RuntimeError:  # no accelerator at all
        means_cuda = False
    if not means_cuda:
        # Pickles look for it by its module and name.
        yield torch, "device", _DeviceClass("device", (), {"__module__": "torch", "__wrapped__": torch.device})
    yield wrapping(torch.jit._builtins, "_find_builtin", lambda find, function: find(inspect.unwrap(function)))
    yield wrapping(
        torch.jit.annotations,
        "try_ann_to_type",
        lambda read, annotation, *where: read(torch.device if annotation == torch.device else annotation, *where),
    )
    module: Any = torch.jit._trace
    yield module, "_check_trace", lambda *args, **options: None  # it runs the model again, and compares the values
    for name in ("trace", "trace_module"):
        quiet = calling(_trace, getattr(module, name))
        for owner in (module, torch.jit):
            yield owner, name, quiet
    yield torch.jit.ScriptModule, "_apply", _moved


def _trace(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Trace without warnings of decisions by a shape, which PyTorch's kernels in C++ and those of memsize make too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=torch.jit._trace.TracerWarning, module=_OWN_CODE)
        return original(*args, **options)


def _moved(module: Any, move: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """`Module._apply`, which would put the data of another device into the tensors that are there."""
    for child in module.children() if recurse else ():
        child._apply(move)
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            moved = move(parameter)
            if moved is not parameter:
                module._parameters[name] = fresh = nn.Parameter(moved, parameter.requires_grad)
                fresh.grad = None if parameter.grad is None else move(parameter.grad)
        for name, buffer in module._buffers.items():
            module._buffers[name] = move(buffer)
    return module


# -- files ------------------------------------------------------------------------------------------------------------


class ScriptFiles:
    """Scripted modules that a program saves and loads by C++ code: a copy takes the place of a GPU's weights."""

    def __init__(self, files: Files, ledger: VirtualLedger) -> None:
        self._files = files
        self._ledger = ledger
        self._saved: dict[str | bytes, nn.Module] = {}
        """Copies that take no memory, by the path of the file, or what a buffer was given."""

    def replacements(self) -> Iterator[Patch]:
        """Patch the functions that save and load scripted modules."""
        script: Any = torch.jit._script
        for kind in (script.ScriptModule, script.RecursiveScriptModule):
            yield wrapping(kind, "save", self._save)
            yield wrapping(kind, "save_to_buffer", self._save_to_buffer)
        loading = calling(self._load, torch.jit.load)
        for owner in (torch.jit, torch.jit._serialization):
            yield owner, "load", loading

    def _keep(self, name: str | bytes, module: nn.Module) -> None:
        with self._ledger.aside(), torch.no_grad():
            self._saved[name] = copy.deepcopy(module)

    def _save(self, original: Callable[..., None], module: nn.Module, f: Any, **options: Any) -> None:
        size = stand_in_bytes(module)
        if size:
            self._keep(os.path.abspath(f), module)
            self._files.left_out(f, size)
        else:
            self._files.check_open(f)  # C++ opens it, without an audit event
            original(module, f, **options)

    def _save_to_buffer(self, original: Callable[..., bytes], module: nn.Module, *args: Any, **options: Any) -> bytes:
        contents, size = original(module, *args, **options), stand_in_bytes(module)
        if size:
            self._keep(contents, module)
            self._files.counted_in(None, size)
        return contents

    def _load(
        self, original: Callable[..., nn.Module], f: Any, map_location: Any = None, *args: Any, **options: Any
    ) -> nn.Module:
        contents = os.path.abspath(f) if isinstance(f, (str, os.PathLike)) else f.read()
        gpu = named_gpu(map_location)
        saved = self._saved.get(contents)
        if saved is not None:
            with torch.no_grad():
                module = copy.deepcopy(saved)
            return module if map_location is None else module.to(map_location)
        source = f if isinstance(contents, str) else io.BytesIO(contents)
        if gpu is None:
            return original(source, map_location, *args, **options)
        return original(source, "cpu", *args, **options).to(map_location)
