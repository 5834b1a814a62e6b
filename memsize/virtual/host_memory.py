"""The memory of a GPU's host: what a program copies there, and what of it is pinned, for the GPU to copy by itself.

Of pinned memory, PyTorch rounds each request to a power of two, and keeps what is given back for the next of its size:
the process holds, of each size, as many blocks as were ever in use at one time.

Source: aten/src/ATen/core/CachingHostAllocator.h (2.11 to 2.14).
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from random import Random
from types import FunctionType, ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from memsize.kernels.registry import Temporary
from memsize.model.tensor_storage import plain_tensors
from memsize.processes.patches import LatePatches, wrapping
from memsize.records.trace import HostUse
from memsize.torch_internals.pytree import tensors_in
from memsize.units import format_bytes
from memsize.virtual.device_assignment import devices

LARGE: Final = 1 << 30
"""From these bytes on, weights that a program moves to its GPU count as memory of the host."""


def pinned_block(size: int) -> int:
    """Bytes of the block of pinned memory in which PyTorch puts a tensor of `size` bytes, at least one."""
    return 1 << (size - 1).bit_length()


_OWN: Final = ("Private_Clean", "Private_Dirty")
_ANY: Final = ("Anonymous",)


def _memory_of(process: int | str, *kinds: str) -> int:
    """Bytes of a process in pages of these `kinds`; 0 where the system (not Linux) does not tell them apart."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text("utf-8").splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.partition(":")[0] in kinds)
    return 0


_PAGE: Final = 4096
_SMALL: Final = 512
"""Bytes of the largest blocks of Python's own allocator, which are multiples of 16 (Objects/obmalloc.c)."""
_TENSOR: Final = 512
"""Bytes of a tensor beside its numbers: the Python object, `TensorImpl` and `StorageImpl` (measured with 2.13)."""
_SAMPLE: Final = 100
"""Items that stand for all of a container."""
_NOT_DATA: Final = (type, ModuleType, FunctionType, nn.Module)


def pages_read(value: Any, seen: set[int]) -> int:
    """Bytes of the pages that a fork copies when it reads all that `value`, the dataset of a loader, holds, but for
    what has been `seen`. Of a long container a sample stands for all.

    Python counts the users of an object in the object, so that to read one is to write to its page. The numbers of
    arrays and large tensors, and what libraries hold outside Python (tables of Arrow), stay shared.
    """
    if id(value) in seen or issubclass(type(value), _NOT_DATA):
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        storage = value.untyped_storage() if value.layout is torch.strided else None
        if storage is None or storage._cdata in seen:
            return _TENSOR
        seen.add(storage._cdata)
        return _TENSOR + min(storage.nbytes(), _PAGE)
    of_objects = type(value).__module__ == "numpy" and str(getattr(value, "dtype", "")) == "object"
    items = value.tolist() if of_objects else gc.get_referents(value)
    sample = Random(0).sample(items, _SAMPLE) if len(items) > _SAMPLE else items
    inside = sum(pages_read(item, seen) for item in sample)
    size = sys.getsizeof(value)
    if size > _SMALL and isinstance(value, (list, dict, set)):  # whose table is elsewhere
        size = type(value).__basicsize__ + 16
    return min(-(-size // 16) * 16, _PAGE) + inside * len(items) // max(len(sample), 1)


def staged_for_host(
    source: Tensor, strides: Sequence[int] | None, dtype: torch.dtype, non_blocking: bool
) -> Iterator[Temporary]:
    """Memory on the GPU that a copy of `source` to the host takes: its elements in a row, where the copy has other
    `strides` (None: the source's own, if it is dense), and in another `dtype` where the host does not wait.

    Source: aten/src/ATen/native/cuda/Copy.cu, `copy_requires_temporaries` and `copy_kernel_cuda`.
    """
    lies_alike = torch.ops.aten.is_non_overlapping_and_dense(source) and (
        strides is None
        or all(a == b for size, a, b in zip(source.shape, source.stride(), strides, strict=True) if size > 1)
    )
    if not source.numel() or (source.dtype == dtype and lies_alike):
        return
    if non_blocking and source.dtype != dtype:
        yield Temporary(tuple(source.shape), dtype)
    if not source.is_contiguous():
        yield Temporary(tuple(source.shape), dtype if non_blocking else source.dtype)


class HostMemory:
    """The host memory of a program: copies of its GPU's tensors, pinned or not, and pinned memory. Copies are
    stand-ins without memory here. A pinned tensor is either one of them, or has ordinary memory of the same size.
    """

    def __init__(self) -> None:
        self._live: Counter[int] = Counter()
        """How many blocks of each size are in use."""
        self._most: Counter[int] = Counter()
        self._addresses: dict[int, int] = {}
        """Bytes of the pinned storages by their addresses."""
        self._copies: dict[int, int] = {}
        """The same of copies that are not pinned."""
        self._bytes = Counter(pinned=0, copied=0, managed=0, pageable=0)
        self._peaks = Counter(pinned=0, copied=0, managed=0, pageable=0)
        self._batches: dict[int, int] = {}
        """Bytes that the workers of each data loader make ahead."""
        self._workers: WeakKeyDictionary[Any, tuple[int, int, int]] = WeakKeyDictionary()
        """The batches that came from each iterator of a loader, the bytes that its workers have for themselves, and
        those that they share.
        """
        self._of_workers = self._shared = 0
        self._process = 0
        self._needs = 0

    @property
    def use(self) -> HostUse:
        """The memory that was taken, by kind; that of a small process alone is left out."""
        peaks, batches = self._peaks, sum(self._batches.values())
        matters = self._of_workers or max(self._needs, self._process) >= LARGE
        return HostUse(
            peaks["pageable"],
            peaks["pinned"],
            self.pinned_bytes,
            peaks["managed"],
            batches,
            self._needs + batches,
            self._process if matters else 0,
            self._of_workers,
            self._shared,
        )

    @property
    def peak(self) -> int:
        """The most bytes that pinned tensors had at one time."""
        return self._peaks["pinned"]

    def copied(self, storage: torch.UntypedStorage, kind: str = "copied", pinned: bool = False) -> None:
        """Count the copy of a GPU's tensor in `storage`, or memory of another `kind`, until its end. One that is
        `pinned` next takes none of the pageable memory.
        """
        size, address = storage.nbytes(), storage._cdata
        self._count(kind, size)
        if kind == "copied" and not pinned:
            self._copies[address] = size
            self._count("pageable", size)
        weakref.finalize(storage, self._end, kind, address, size)

    def _end(self, kind: str, address: int, size: int) -> None:
        self._count(kind, -size)
        if kind == "copied":
            self._count("pageable", -self._copies.pop(address, 0))

    def later(self) -> dict[str, LatePatches]:
        """Patches for libraries, by the module that they are in."""
        return {
            "torch.utils.data.dataloader": lambda module: [
                wrapping(module._MultiProcessingDataLoaderIter, "_process_data", self._prefetched)
            ],
            "bitsandbytes.functional": lambda module: [
                (module, "get_paged", self._get_paged),
                *((module, name, lambda *_, **__: None) for name in ("fill", "prefetch_tensor")),
            ],
        }

    def _prefetched(self, original: Callable[..., Any], loader: Any, *data: Any) -> Any:
        """Workers make `prefetch_factor` batches ahead, each; with `pin_memory` another batch is on its way."""
        batch = original(loader, *data)
        ahead = loader._num_workers * loader._prefetch_factor * sum(tensor.nbytes for tensor in tensors_in(batch))
        self._batches[id(loader._dataset)] = max(self._batches.get(id(loader._dataset), 0), ahead)
        self._measure_workers(loader)
        return batch

    def _measure_workers(self, loader: Any) -> None:
        """Measure the workers of a `loader` after 1, 2, 4, … batches. Where they are forks, they have copied what they
        write to for each batch by then, and go on to copy the objects of the dataset as they read them.
        """
        count, own, shared = self._workers.get(loader, (0, 0, 0))
        if not count & (count + 1):
            sizes = [[_memory_of(worker.pid, *kinds) for kinds in (_OWN, _ANY)] for worker in loader._workers]
            own = sum(size for size, _ in sizes)
            read = sys.maxsize
            with suppress(RecursionError):  # of a list whose items link to one another
                read = pages_read(loader._dataset, set()) if own else 0
            shared = sum(min(max(size - own, 0), read) for own, size in sizes)
        self._workers[loader] = count + 1, own, shared
        self._of_workers = max(self._of_workers, sum(own for _, own, _ in self._workers.values()))
        self._shared = max(self._shared, sum(shared for *_, shared in self._workers.values()))

    def measure(self) -> None:
        """Measure this process: Python, its libraries, and the data that a script holds beside its GPU's."""
        self._process = max(self._process, _memory_of("self", *_ANY))

    def _get_paged(self, *shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        """Pages of an optimizer's state, which the driver moves to the GPU while there is room for them: managed
        memory, as a tensor on the CPU (bitsandbytes 0.50, `functional.get_paged`).
        """
        paged: Any = torch.empty(shape, dtype=dtype)  # which takes no memory, since nothing is written to it
        paged.is_paged, paged.page_deviceid = True, getattr(device, "index", 0)
        self.copied(paged.untyped_storage(), "managed")
        return paged  # type: ignore[no-any-return]

    def _count(self, kind: str, size: int) -> None:
        self._bytes[kind] += size
        self._peaks[kind] = max(self._peaks[kind], self._bytes[kind])
        if size > 0:
            self._needs = max(self._needs, self._bytes["pageable"] + self._bytes["managed"] + self.pinned_bytes)

    @contextmanager
    def moving(self, module: nn.Module) -> Iterator[None]:
        """Count the weights of a module that was built on the host, where all are until the first is moved."""
        every = (t for t in (*module.parameters(), *module.buffers()) if not is_lazy(t))
        pieces = chain.from_iterable(map(plain_tensors, every))
        tensors = (t for t in pieces if t.layout is torch.strided and t.is_cpu)
        storages = {storage._cdata: storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)}
        counted = self._copies.keys() | self._addresses.keys()
        size = sum(size for address, size in storages.items() if address not in counted)
        size = size if size >= LARGE else 0
        self._count("pageable", size)
        try:
            yield
        finally:
            self._count("pageable", -size)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory that the process keeps."""
        return sum(size * count for size, count in self._most.items())

    def pin(self, tensor: Tensor) -> Tensor:
        """Let the storage of `tensor`, which is on the CPU, be in pinned memory; returns it."""
        if not devices().is_on_host(tensor) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), storage._cdata
        if size and address not in self._addresses:
            block = pinned_block(size)
            self._addresses[address] = size
            self._count("pageable", -self._copies.pop(address, 0))
            self._live[block] += 1
            self._most[block] = max(self._most[block], self._live[block])
            self._count("pinned", size)
            weakref.finalize(storage, self._give, address, size, block)
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        if not self._addresses or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._addresses

    def _give(self, address: int, size: int, block: int) -> None:
        self._addresses.pop(address, None)
        self._live[block] -= 1
        self._count("pinned", -size)

    def notes(self) -> Iterator[str]:
        """Describe the host memory for the report, if the program used any."""
        if self.peak:
            yield (
                f"in addition to the GPU, at most {format_bytes(self.peak)} are in pinned memory of the host; PyTorch "
                f"keeps {format_bytes(self.pinned_bytes)} for it, in blocks of powers of two"
            )
        if managed := self._peaks["managed"]:
            yield (
                f"paged optimizers keep {format_bytes(managed)} of state in managed memory: in host memory, and on the "
                "GPU in addition to these figures while there is room"
            )
        if copied := self._peaks["copied"]:
            yield (
                f"the host holds at most {format_bytes(copied)} of copies from the GPU and of tensors computed from "
                "them, pinned or not; copies of less than 1 MiB are not counted"
            )
