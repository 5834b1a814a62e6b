"""Calls that depend on other processes (barriers, receives, stores). We assume that the others have reached the same
point; a call that needs more raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from memsize.errors import InputError
from memsize.processes.patches import Patch, calling
from memsize.torch_internals.meta import is_meta

_AT_ONCE: Final = "all ranks have equally many batches: they leave Join together"
_FROM_NEXT: Final = "what is received from any rank is taken to come from the next one"
_SHARED: Final = "memory that GPUs share (torch.distributed._symmetric_memory)"
REACHING: Final = {
    "torch.distributed.rpc": (("init_rpc",), "torch.distributed.rpc calls functions of other processes"),
    "torch.distributed._symmetric_memory": (
        ("empty", "rendezvous", "get_symm_mem_workspace", "enable_symm_mem_for_group"),
        f"{_SHARED} is that of other processes",
    ),
}
"""By module, the functions that need other processes to exist, and the reason."""
_PEERS: Final = ("dst", "src", "root_rank")
"""The argument names by which operators refer to a rank."""
Assume = Callable[[str], None]
_POLLS: Final = 1000
"""The number of identical reads in a row at which a program counts as waiting for another process."""
_Store: Any = getattr(dist, "HashStore", object)  # where PyTorch was built without torch.distributed


def replacements(assume: Assume) -> Iterator[Patch]:
    """Patch functions that let processes be at different points, or exchange addresses."""
    from torch.distributed.algorithms.join import Join

    def nobody_left(_: Any) -> int:
        assume(_AT_ONCE)
        return 0

    yield Join, "_get_num_nonjoined_procs", nobody_left
    for name in ("irecv", "recv"):
        receive = calling(partial(_from_somebody, assume), getattr(dist, name))  # the same for both: P2POp compares
        yield from ((owner, name, receive) for owner in (dist, dist.distributed_c10d))
    # Where TORCH_DIST_INIT_BARRIER is set, processes that open a group wait until the last of them has said so.
    yield dist.distributed_c10d, "_store_based_barrier", lambda *args, **options: None
    yield dist, "TCPStore", LonelyStore
    yield dist, "FileStore", LonelyStore


def later() -> dict[str, Callable[[Any], Iterator[Patch]]]:
    """Return, by module, patches that make the functions of `REACHING` raise `InputError`."""
    return {module: partial(_refused, *refusal) for module, refusal in REACHING.items()}


def check_ranks(func: Any, args: Any, size: int) -> None:
    """Raise `InputError` if the arguments of a collective name a rank outside its group of `size` ranks."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in _PEERS and not 0 <= value < size:
            last = size - 1
            raise InputError(f"no rank {value} among {size}, which {func} names: they are counted from 0 to {last}")


def check_devices(tensors: Iterable[Any], group: dist.ProcessGroup) -> None:
    """Raise PyTorch's error if a collective moves CPU tensors and the group's backend does not support the CPU."""
    devices: Any = group
    where = {device.type for device in devices._device_types}
    if "cpu" not in where and any(not is_meta(tensor) and tensor.device.type == "cpu" for tensor in tensors):
        raise RuntimeError("No backend type associated with device type cpu")


def check_layouts(tensors: Iterable[Any], group: dist.ProcessGroup) -> None:
    """Raise NCCL's error if a collective would add up sparse tensors on the GPU, unless the group's backend for CUDA is
    another one (ProcessGroupNCCL.cpp, `allreduce_sparse`). `DistributedDataParallel` does so with sparse gradients."""
    sparse = any(is_meta(tensor) and tensor.layout is not torch.strided for tensor in tensors)
    if (
        sparse
        and dist.distributed_c10d.BackendConfig(dist.get_backend(group)).get_device_backend_map()["cuda"] == "nccl"
    ):
        raise RuntimeError("NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead.")


def _from_somebody(
    assume: Assume,
    original: Callable[..., Any],
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
    """Call `original` so that a receive from any rank receives from the next rank in the group."""
    if src is None and group_src is None and dist.get_rank(group) >= 0:
        assume(_FROM_NEXT)
        group_src = (dist.get_rank(group) + 1) % dist.get_world_size(group)
    return original(tensor, src, group, tag, group_src)


def _refused(names: tuple[str, ...], why: str, module: Any) -> Iterator[Patch]:
    def refuse(*_: Any, **__: Any) -> None:
        raise InputError(f"{why}, which are not there: switch it off for this run, or use collectives instead")

    yield from ((module, name, refuse) for name in names if hasattr(module, name))


class LonelyStore(_Store):  # type: ignore[misc]
    """A store that no other process writes to. Waiting for another process's key raises instead of hanging."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.set_timeout(timedelta(milliseconds=1))
        self._latest: tuple[object, ...] = ()
        self._times = 0

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = super().get(key)
        self._check_polling("get", key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        value: int = super().add(key, amount)
        self._check_polling("add", key, value)
        return value

    def check(self, keys: list[str]) -> bool:
        exists: bool = super().check(keys)
        self._check_polling("check", *keys, exists)
        return exists

    def wait(self, keys: list[str], *_: Any) -> None:
        """Return if all `keys` are set; raise `InputError` otherwise."""
        missing = [key for key in keys if not super(LonelyStore, self).check([key])]
        if missing:
            raise InputError(
                f"the program waits for {missing[0]!r}, which another process would put into the store that they "
                "share: set it in each process, or leave that out of this run"
            )

    def _check_polling(self, *read: object) -> None:
        """Raise `InputError` after `_POLLS` identical reads in a row: the program waits for another process."""
        self._times = self._times + 1 if read == self._latest else 1
        self._latest = read
        if self._times >= _POLLS:
            raise InputError(
                f"the program waits for another process to change {read[1]!r} in the store that they share, and there "
                "is none: leave that out of this run"
            )
