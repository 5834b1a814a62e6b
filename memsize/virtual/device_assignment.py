"""The GPU of a process, and the device of each tensor: a GPU, the host, or the program's own ``meta``.

A process has the first GPU, unless it is one of several processes, each of which has one of its own. ``device="cuda"``
means cuda:0 in all of them until they choose another, as in CUDA. One process may also drive all GPUs, as
`nn.DataParallel` does. Then the memory of one GPU is recorded; of a tensor on another GPU only the number of that GPU
is noted. A large copy of a GPU's tensor on the host is a stand-in without values too: programs may ask for its memory.

Stand-ins for tensors on the GPU are `meta` tensors, and so are those that the program itself puts on
``device="meta"``, which are on no GPU. PyTorch's own C++ code makes stand-ins with ``device="meta"`` as well, so an op
that names this device makes a tensor of the program's own only while no module and no backward runs. If such a tensor
meets one on the GPU after all, PyTorch made it, and it counts as on the GPU from then on.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage

from memsize.errors import InputError
from memsize.model.tensor_storage import is_wrapper, plain_tensors
from memsize.processes.simulation import running_part
from memsize.records.world import World
from memsize.torch_internals.meta import is_meta
from memsize.tracing.named_devices import Gpus

HOST: Final = 127
"""The number that stands for the host: the last that PyTorch has for devices."""
_LARGE: Final = 2**20
"""Bytes from which a copy on the host is a stand-in."""
_aten = torch.ops.aten
_BETWEEN: Final = frozenset((_aten.copy_.default, _aten._to_copy.default, _aten._foreach_copy_.default))
"""What takes tensors of several GPUs."""
_CPU: Final = torch.device("cpu")
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class DeviceAssignment(Gpus):
    """GPU `index` of `count`, whose memory is recorded: by default that of its number on the own machine of `world`.

    `default` is the GPU of threads that choose none. `is_initialized` tells whether the process has a CUDA context.
    """

    def __init__(self, world: World | None = None, default: int = 0) -> None:
        world = world or World()
        self.index = world.local_rank
        self.count = world.local_size
        self.drives_all = world.one_process
        self.default = default
        self.is_initialized = False
        self._choosing: set[int] = set()
        """The threads that called `torch.cuda.set_device`, by their numbers."""
        self._by_default: set[int] = set()
        """Those that put a tensor on the GPU without having chosen one."""
        self._visible = os.environ.get(_VISIBLE)
        self._device = torch.device("cuda", self.index)
        self._thread = threading.local()
        self._elsewhere: dict[int, int] = {}
        """The GPU of each storage that is on another than this one, or `HOST`, by its address."""

    @property
    def current(self) -> int:
        """The GPU that this thread has chosen: at first cuda:0, or the only one that the program left visible."""
        chosen: int | None = getattr(self._thread, "current", None)
        return self._own(self.default if chosen is None else chosen)

    def _own(self, number: int) -> int:
        """The GPU of a number in the program: one that lets itself see a single GPU calls its own cuda:0."""
        return self.index if number == 0 and self._sees_one else number

    @property
    def _sees_one(self) -> bool:
        """Whether the program has hidden the GPUs of the other processes from itself."""
        visible = os.environ.get(_VISIBLE, "")
        return not self.drives_all and visible not in ("", self._visible) and "," not in visible

    @property
    def device(self) -> torch.device:
        """The GPU that ``device="cuda"`` means in this thread."""
        return torch.device("cuda", self.current)

    def choose(self, number: int) -> int:
        """Let this thread work on GPU `number` (below 0: where it is); returns the GPU that it worked on before."""
        self._check_count(number)
        before = self.current
        if number >= 0:
            self._thread.current = self._own(number)
            self.initialize()
        return before

    @contextmanager
    def on_own(self) -> Iterator[None]:
        """While open, this thread works on the GPU of the process, whichever it has chosen."""
        chosen = vars(self._thread).copy()
        self._thread.current = self.index
        try:
            yield
        finally:
            vars(self._thread).clear()
            vars(self._thread).update(chosen)

    def initialize(self) -> None:
        """Create the CUDA context."""
        self.is_initialized = True

    def set_device(self, number: int) -> int:
        """The same for good."""
        self._choosing.add(threading.get_ident())
        return self.choose(number)

    @property
    def shares_first(self) -> bool:
        """Whether this is one of several processes that put their tensors on cuda:0 because they choose no GPU."""
        return self.count > 1 and bool(self._by_default - self._choosing)

    def named(self, number: int | None) -> int:
        """The GPU that a tensor on a device of this `number` is put on. Raises as `check_index` does."""
        if number == HOST:
            return HOST
        self.initialize()
        if number is None or number < 0:
            number = self.current
            if not (hasattr(self._thread, "current") or self.default or self.drives_all or self._sees_one):
                self._by_default.add(threading.get_ident())
        self.check_index(number := self._own(number))
        return number

    def numbered(self, number: int | None) -> int:
        """The GPU of a stream on a device of this `number`, which may be that of another process."""
        if number is None or number < 0:
            return self.current
        self._check_count(number)
        return self._own(number)

    @property
    def has_others(self) -> bool:
        """Whether a stand-in may be somewhere else than on the GPU that is looked at."""
        return self.drives_all or bool(self._elsewhere)

    def number_of(self, tensor: Tensor) -> int:
        """The GPU that a stand-in is on, or `HOST`."""
        if not self._elsewhere:
            return self.index
        pieces = plain_tensors(tensor) if is_wrapper(tensor) else (tensor,)
        return next((self._elsewhere.get(_address(piece), self.index) for piece in pieces), self.index)

    def number_on_host(self, tensor: Tensor) -> int | None:
        """`HOST` where a copy of a stand-in on the host is one too."""
        if is_own_meta(tensor) or tensor.layout is not torch.strided:
            return None
        large = tensor.numel() * tensor.element_size() >= _LARGE
        return HOST if large or self.number_of(tensor) == HOST else None

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the host, with memory or as a stand-in."""
        return not is_meta(tensor) or self.number_of(tensor) == HOST

    def device_of(self, tensor: Tensor) -> torch.device:
        """The same as a device."""
        if not self._elsewhere:
            return self._device
        number = self.number_of(tensor)
        return _CPU if number == HOST else torch.device("cuda", number)

    def check_index(self, device: int) -> None:
        """Raise PyTorch's error for a device that does not exist, and `InputError` for the GPU of another process."""
        self._check_count(device)
        if device not in (self.index, -1) and not self.drives_all:
            raise InputError(
                f"cuda:{device} is the GPU of another process, this one has cuda:{self.index}: "
                "call torch.cuda.set_device(local_rank) first (--one-process gives a single process all GPUs)"
            )

    def _check_count(self, device: int) -> None:
        if device >= self.count:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")

    def put(self, tensor: Tensor, number: int) -> bool:
        """Say that a stand-in is on GPU `number`, or on the `HOST`; whether that was not known of its storage."""
        address = _address(tensor)
        is_new = number != self.index and bool(address) and address not in self._elsewhere
        if is_new:
            self._elsewhere[address] = number
            weakref.finalize(tensor.untyped_storage(), self._elsewhere.pop, address, None)
        return is_new


def devices() -> DeviceAssignment:
    """Return the assignment of the simulation that is open in this process, for any of its threads."""
    return running_part(DeviceAssignment)


def gpu_of(func: Any, args: Iterable[Any]) -> int:
    """The GPU of an op's arguments: that of the first. Raises PyTorch's error where they are on several."""
    numbers = list(dict.fromkeys(devices().number_of(tensor) for tensor in _tensors(args) if is_meta(tensor)))
    if len(numbers) > 1 and func not in _BETWEEN:
        names = " and ".join("cpu" if number == HOST else f"cuda:{number}" for number in numbers[:2])
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {names}! (when "
            f"dispatching {func})"
        )
    return numbers[0] if numbers else devices().current if devices().drives_all else devices().index


def _address(tensor: Any) -> int:
    try:
        address: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):  # sparse tensors, parameters of lazy modules
        return 0
    return address


# -- the program's own meta tensors ----------------------------------------------------------------------------------

_storages: dict[int, weakref.finalize[Any, Any]] = {}
"""The addresses of their storages; what removes each when its storage dies."""


def is_own_meta(tensor: Tensor) -> bool:
    """Whether `tensor` was put on `meta` by the program."""
    return bool(_storages) and is_meta(tensor) and _address(tensor) in _storages


def is_own_storage(storage: UntypedStorage) -> bool:
    """Whether a tensor that the program put on `meta` stores its elements in `storage`."""
    return storage._cdata in _storages


def claim(result: Any) -> Any:
    """Let the `meta` tensors of `result`, which an op returned, be the program's own; returns it."""
    for tensor in _tensors((result,)):
        address = _address(tensor)
        if is_meta(tensor) and address not in _storages:
            _storages[address] = weakref.finalize(tensor.untyped_storage(), _storages.pop, address, None)
    return result


def taken_to_gpu(args: Iterable[Any]) -> Iterator[Tensor]:
    """The arguments of an op on the GPU that were the program's own so far: they no longer are."""
    for tensor in _tensors(args) if _storages else ():
        ending = _storages.pop(_address(tensor), None)
        if ending is not None:
            ending.detach()
            yield tensor


def any_own_meta(args: Iterable[Any]) -> bool:
    """Whether any argument of an op was put on `meta` by the program."""
    return bool(_storages) and any(map(is_own_meta, _tensors(args)))


def on_gpu(args: Iterable[Any]) -> bool:
    """Whether any argument of an op is a stand-in for a tensor on the GPU."""
    for item in args:
        if isinstance(item, Tensor):
            if is_meta(item) and not is_own_meta(item):
                return True
        elif isinstance(item, (list, tuple)) and item and type(item[0]) is not int and on_gpu(item):
            return True
    return False


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for item in args:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)) and item and type(item[0]) is not int:
            yield from _tensors(item)
