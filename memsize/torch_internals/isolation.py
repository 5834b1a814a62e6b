"""Leave the process as it was: one run at a time, and afterwards all that was changed for it is put back.

Not put back is what PyTorch and Python do not tell: `torch.set_flush_denormal`, the file mode mask, functions for
`atexit`, threads; nor what a process keeps once it has it, such as imported modules and registered operators.
"""

from __future__ import annotations

import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import _disable_current_modes

from memsize.processes.ctrl_c import raise_waiting
from memsize.processes.patches import assign, collector_paused
from memsize.processes.simulation import open_simulation

_SEED = 0
_COMPILER = "torch._dynamo"
_CUDA_GRAPHS = "torch._inductor.cudagraph_trees"

if not gc.isenabled():
    # In a command. What importing torch makes lasts as long as the process: no collection scans it, that at the
    # process's end included, which takes a fifth as long as the import.
    gc.freeze()


@contextmanager
def isolated() -> Iterator[None]:
    """Run the user's code, one thread at a time; afterwards the process's settings are as they were.

    Modes that are active around the call (`FakeTensorMode`, a profiler's, `torch.inference_mode`, `torch.no_grad`) are
    suspended: what a model keeps for backward is asked of the model, not of the place where the question stands.
    """
    with open_simulation(), settings_kept(), ExitStack() as suspended:
        if torch._C._len_torch_dispatch_stack():
            suspended.enter_context(_disable_current_modes())
        suspended.enter_context(torch.inference_mode(False))  # which sets the gradient mode too
        yield


_MANY = 50_000
"""New objects, a few MB of them, among which it pays to look for cycles though the model of the run is gone."""


def forget_run(model: weakref.ref[Any] | None = None) -> None:
    """Free what a run left in reference cycles, while the collector is paused. It scans all that was recorded since the
    last collection: not where the `model` that ran is gone, and nothing else of its run is in a cycle.
    """
    if model is None or model() is not None or gc.get_count()[0] > _MANY:
        gc.collect(0)


class CompilerImport:
    """Notices that PyTorch's compiler was imported during a run, and frees what that keeps alive.

    The first `torch.utils.checkpoint` of a process imports it, in the middle of the model's forward. The import leaves
    reference cycles with the frames that it runs in, and so with everything that the forwards above it hold.
    """

    def __init__(self) -> None:
        self._pending = _COMPILER not in sys.modules

    def forget(self) -> None:
        """Collect once, as soon as the import is over. To be called after every module call."""
        if self._pending and _COMPILER in sys.modules:
            self._pending = False
            gc.collect()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a model: isolated, and the same each time.

    Random numbers start from a fixed seed, so that a model with random control flow (a layer skipped now and then)
    always goes the same way, and warnings are ignored: a model's own are about real data or devices.
    """
    with isolated(), collector_paused():
        raise_waiting()
        warnings.simplefilter("ignore")
        random.seed(_SEED)
        torch.default_generator.manual_seed(_SEED)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(_SEED)
        yield


@contextmanager
def settings_kept() -> Iterator[None]:
    """Put back the process's settings and random generators afterwards, also after an error."""
    put_back = settings_read()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        put_back()


def settings_read() -> Callable[[], None]:
    """Read the process's settings and random generators; what is returned puts them back."""
    before, generators_put_back = [_read(setting) for setting in _SETTINGS], generators_read()

    def put_back() -> None:
        for setting, value in zip(_SETTINGS, before, strict=True):
            if value is not _UNREADABLE and _read(setting) != value:
                with suppress(Exception):  # such as a signal handler outside of the main thread
                    setting.write(value)
        generators_put_back()

    return put_back


def generators_read() -> Callable[[], None]:
    """Read the random generators of Python, NumPy and PyTorch; what is returned puts them back."""
    generators: list[tuple[Callable[[Any], object], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():
        generators.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if numpy := sys.modules.get("numpy.random"):
        generators.append((numpy.set_state, numpy.get_state()))

    def put_back() -> None:
        for write, state in generators:
            write(state)

    return put_back


@contextmanager
def default_device_kept() -> Iterator[None]:
    """Put back afterwards where tensors that name no device are made."""
    before = [setting.read() for setting in _DEFAULT_DEVICES]
    try:
        yield
    finally:
        dtype = torch.get_default_dtype()
        for setting, value in zip(_DEFAULT_DEVICES, before, strict=True):
            if setting.read() != value:
                setting.write(value)
        torch.set_default_dtype(dtype)


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], object]


_UNREADABLE: Final = object()


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    except Exception:  # PyTorch refuses to tell what two of its interfaces have set differently
        return _UNREADABLE


# -- one setting ------------------------------------------------------------------------------------------------------


def _attribute(owner: Any, name: str) -> _Setting:
    return _Setting(partial(getattr, owner, name), partial(assign, owner, name))


def _list(owner: Any, name: str) -> _Setting:
    """The items of a list, which stays the same object: others may refer to it."""

    def write(items: list[Any]) -> None:
        getattr(owner, name)[:] = items

    return _Setting(lambda: list(getattr(owner, name)), write)


def _mapping(mapping: Any) -> _Setting:
    """The entries of a mapping. Only those that changed are touched: other threads may be reading it."""

    def write(before: dict[Any, Any]) -> None:
        for key in set(mapping) - set(before):
            del mapping[key]
        for key, value in before.items():
            if key not in mapping or mapping[key] != value:
                mapping[key] = value

    return _Setting(lambda: dict(mapping), write)


def _compiler(name: str) -> _Setting:
    """The values that are not the defaults in a configuration of PyTorch's compiler, which may not be imported yet."""

    def read() -> dict[str, Any]:
        config: Any = sys.modules.get(name)
        changed = () if config is None else [key for key in config._config if not config._is_default(key)]
        return {key: getattr(config, key) for key in changed}

    def write(before: dict[str, Any]) -> None:
        config: Any = sys.modules[name]
        for key in read().keys() | before.keys():
            setattr(config, key, before[key] if key in before else config._config[key].default)

    return _Setting(read, write)


def iteration_marks() -> int:
    """How often `torch.compiler.cudagraph_mark_step_begin` was called, as a negative number."""
    trees: Any = sys.modules.get(_CUDA_GRAPHS)
    return int(trees.MarkStepBox.mark_step_counter) if trees else 0


def _autocast(device: str) -> tuple[_Setting, _Setting]:
    return (
        _Setting(partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)),
        _Setting(partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)),
    )


def _fp32_precision(backend: str, op: str) -> _Setting:
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return _Setting(partial(read, backend, op), partial(write, backend, op))


def _reduced_precision(dtype: str) -> _Setting:
    write = getattr(torch._C, f"_set_cublas_allow_{dtype}_reduced_precision_reduction")
    return _Setting(
        getattr(torch._C, f"_get_cublas_allow_{dtype}_reduced_precision_reduction"), lambda mode: write(*mode)
    )


def _set_default_type(device: str) -> None:
    """``torch.set_default_tensor_type(torch.cuda.FloatTensor)`` sets a device too, below that of `torch.device`."""
    torch._C._set_default_tensor_type(torch.FloatTensor if device == "cpu" else getattr(torch, device).FloatTensor)


def _numpy() -> Any:
    return sys.modules["numpy"]


_cuda: Any = torch.backends.cuda
_backends: Any = torch.backends
_torch: Any = torch._C

_DEFAULT_DEVICES: Final = (
    _Setting(torch._C._get_default_device, _set_default_type),
    _Setting(
        lambda: getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        lambda context: torch.set_default_device(context and context.device),
    ),
)

_OF_PYTORCH: Final = (
    _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    *_DEFAULT_DEVICES,
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(torch.get_num_threads, torch.set_num_threads),
    _Setting(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    _Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda mode: torch.set_anomaly_enabled(*mode),
    ),
    _Setting(_torch._is_multithreading_enabled, _torch._set_multithreading_enabled),
    *_autocast("cpu"),
    *_autocast("cuda"),
    _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    # Some have two interfaces: the older one comes first, since it sets what the newer one tells.
    _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *(_attribute(_backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *(_attribute(_backends.mkldnn, name) for name in ("enabled", "deterministic", "allow_tf32")),
    *(_attribute(_cuda.matmul, name) for name in ("allow_tf32", "allow_fp16_accumulation")),
    *(_reduced_precision(dtype) for dtype in ("fp16", "bf16")),
    *(_fp32_precision(backend, "all") for backend in ("generic", "cuda", "mkldnn")),
    *(_fp32_precision(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")),
    _Setting(_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    _Setting(_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    _Setting(_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    _Setting(_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    _Setting(_cuda.fp16_bf16_reduction_math_sdp_allowed, _cuda.allow_fp16_bf16_reduction_math_sdp),
    _Setting(_backends.mha.get_fastpath_enabled, _backends.mha.set_fastpath_enabled),
    _mapping(vars(torch._tensor_str.PRINT_OPTS)),
    *(
        _mapping(hooks)
        for name, hooks in vars(nn_module).items()
        if name.startswith("_global_") and isinstance(hooks, dict)
    ),
    _attribute(nn_module, "_global_is_full_backward_hook"),
    *(_compiler(f"torch.{part}.config") for part in ("_dynamo", "_functorch", "_inductor")),
    _Setting(iteration_marks, lambda count: assign(sys.modules[_CUDA_GRAPHS].MarkStepBox, "mark_step_counter", count)),
    _mapping(torch_optimizer._global_optimizer_pre_hooks),
    _mapping(torch_optimizer._global_optimizer_post_hooks),
)

_SETTINGS: Final = (
    *_OF_PYTORCH,
    _Setting(lambda: _numpy().get_printoptions(), lambda options: _numpy().set_printoptions(**options)),
    _Setting(lambda: _numpy().geterr(), lambda errors: _numpy().seterr(**errors)),
    _mapping(os.environ),
    *(_attribute(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook", "displayhook", "argv")),
    *(_list(sys, name) for name in ("argv", "path")),
    _attribute(threading, "excepthook"),
    _list(logging.root, "handlers"),
    _Setting(lambda: logging.root.level, logging.root.setLevel),
    _Setting(lambda: logging.root.manager.disable, logging.disable),
    _Setting(os.getcwd, os.chdir),
    _Setting(lambda: locale.setlocale(locale.LC_ALL), lambda names: locale.setlocale(locale.LC_ALL, names)),
    *(_Setting(partial(signal.getsignal, n), partial(signal.signal, n)) for n in signal.valid_signals()),
    _Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    _Setting(sys.gettrace, sys.settrace),
    _Setting(sys.getprofile, sys.setprofile),
    _Setting(gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    _Setting(gc.get_threshold, lambda threshold: gc.set_threshold(*threshold)),
)
"""In the order in which they are put back."""
