"""Calls that depend on other processes, where this process runs a single rank: objects and numbers that ranks send each
other, barriers, receives, stores. We assume that the others have reached the same point; a call that needs more raises.

If the sender can be run too, its objects come from its own process. If all ranks send, we assume that they send copies
of this rank's objects. Objects that only another rank has stay unchanged here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from memsize.errors import InputError
from memsize.known_values.data_dependent import ITEM_IS_ONE
from memsize.known_values.values import constant_of, is_small
from memsize.processes.patches import Patch, calling
from memsize.processes.rank_processes import RankConnection
from memsize.ranks.collectives import write
from memsize.records.world import CollectiveKind
from memsize.torch_internals.meta import is_meta
from memsize.torch_internals.pytree import arguments_in

_ALIKE: Final = "other ranks are assumed to send the objects that this rank sends"
_KEPT: Final = "objects that another rank sends to this one stay as they are here"
_NUMBERS_KEPT: Final = "numbers that another rank broadcasts to this one stay as they are here"
_Rank = int | None
Assume = Callable[[str], None]
"""A callback that gets the text of an assumption whenever it is made."""


def replacements(assume: Assume, line: RankConnection | None) -> Iterator[Patch]:
    """Patch the functions that send objects and numbers, by `line` if other ranks are run, or that wait for others."""
    from torch.distributed.algorithms.join import Join

    exchange = _Exchange(assume, line, dist.broadcast)
    names = "broadcast all_gather_object gather_object broadcast_object_list scatter_object_list"
    functions = {name: getattr(exchange, name) for name in f"{names} send_object_list recv_object_list".split()}
    functions["monitored_barrier"] = lambda *args, **options: None
    for owner in (dist, dist.distributed_c10d):
        yield from ((owner, name, function) for name, function in functions.items())

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


class _Exchange:
    """PyTorch's functions of the same names, for one rank."""

    def __init__(self, assume: Assume, line: RankConnection | None, original: Callable[..., Any]) -> None:
        self._assume = assume
        self._line = line
        self._broadcast = original

    def all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        if dist.get_world_size(group) > 1:
            self._assume(_ALIKE)
        for rank in range(len(object_list)):
            object_list[rank] = obj if rank == dist.get_rank(group) else deepcopy(obj)

    def gather_object(
        self, obj: Any, object_gather_list: Any = None, dst: _Rank = None, group: Any = None, group_dst: _Rank = None
    ) -> None:
        if dist.get_rank() == _number(dst, group_dst, group) and object_gather_list is not None:
            self.all_gather_object(object_gather_list, obj, group)

    def broadcast_object_list(
        self, object_list: list[Any], src: _Rank = None, group: Any = None, device: Any = None, group_src: _Rank = None
    ) -> None:
        if dist.get_rank(group) < 0:
            return
        source = _number(src, group_src, group)
        if source == dist.get_rank():
            self._tell(object_list, group)
        elif (received := self._received(source, group)) is not None:
            object_list[:] = received
        else:
            self._assume(_KEPT)

    def broadcast(
        self, tensor: Tensor, src: _Rank = None, group: Any = None, async_op: bool = False, group_src: _Rank = None
    ) -> Any:
        work = self._broadcast(tensor, src, group, async_op, group_src)
        # A program may act on numbers (sizes, seeds, flags), unlike on weights or activations.
        is_read = is_small(tensor) and (not is_meta(tensor) or tensor.numel() == 1 or not tensor.is_floating_point())
        if dist.get_rank(group) < 0 or not is_read:
            return work
        source = _number(src, group_src, group)
        if source == dist.get_rank():
            value = constant_of(tensor)
            self._tell([None if value is None else value.tolist()], group)
        elif (received := self._received(source, group)) is not None:
            value = None if received[0] is None else torch.tensor(received[0], dtype=tensor.dtype, device="cpu")
            write(tensor, None if value is None else value.reshape(tensor.shape), ITEM_IS_ONE, None)
        else:
            self._assume(_NUMBERS_KEPT)
        return work

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: _Rank = None,
        group: Any = None,
        group_src: _Rank = None,
    ) -> None:
        if dist.get_rank(group) < 0:
            return
        source, parts = _number(src, group_src, group), None
        if source != dist.get_rank():
            parts = self._received(source, group)
        elif scatter_object_input_list is not None:
            self._tell(scatter_object_input_list, group)
            parts = deepcopy(scatter_object_input_list)
        if parts is None:
            self._assume(_KEPT)
        else:
            scatter_object_output_list[0] = parts[dist.get_rank(group)]

    def send_object_list(
        self,
        object_list: list[Any],
        dst: _Rank = None,
        group: Any = None,
        device: Any = None,
        group_dst: _Rank = None,
        use_batch: bool = False,
    ) -> None:
        if self._line is not None:
            self._line.send(_number(dst, group_dst, group), pickle.dumps(object_list))

    def recv_object_list(
        self,
        object_list: list[Any],
        src: _Rank = None,
        group: Any = None,
        device: Any = None,
        group_src: _Rank = None,
        use_batch: bool = False,
    ) -> int:
        sender = _number(src, group_src, group)
        if self._line is None or (src is None and group_src is None):  # whoever sends first
            self._assume(_KEPT)
        elif (message := self._line.receive(sender, dist.get_rank())) is not None:
            object_list[:] = pickle.loads(message)
        else:
            raise InputError(
                f"rank {sender} ended before it sent what rank {dist.get_rank()} waits for: run it as rank {sender} to "
                "see why, in a new process where this one has used a GPU"
            )
        return sender

    def _tell(self, objects: list[Any], group: Any) -> None:
        ranks = tuple(dist.get_process_group_ranks(_of(group)))
        if self._line is not None and len(ranks) > 1:
            self._line.send(ranks, pickle.dumps(objects))

    def _received(self, source: int, group: Any) -> list[Any] | None:
        ranks = tuple(dist.get_process_group_ranks(_of(group)))
        message = None if self._line is None else self._line.receive(source, ranks)
        objects: list[Any] | None = None if message is None else pickle.loads(message)
        return objects


def _number(rank: _Rank, group_rank: _Rank, group: Any) -> int:
    """Return the global rank: `rank`, or the rank of `group_rank` in `group`; 0 if neither is given."""
    return (rank or 0) if group_rank is None else dist.get_global_rank(_of(group), group_rank)


def _of(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


# -- calls that depend on other processes ------------------------------------------------------------------------------

_AT_ONCE: Final = "all ranks have the same number of batches: they leave Join together"
_FROM_NEXT: Final = "what is received from any rank is assumed to come from the next one"
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
_POLLS: Final = 1000
"""The number of identical reads in a row at which a program counts as waiting for another process."""
_Store: Any = getattr(dist, "HashStore", object)  # where PyTorch was built without torch.distributed


def later() -> dict[str, Callable[[Any], Iterator[Patch]]]:
    """Return, by module, patches that make the functions of `REACHING` raise `InputError`."""
    return {module: partial(_refused, *refusal) for module, refusal in REACHING.items()}


def check(kind: CollectiveKind, func: Any, args: Any, group: dist.ProcessGroup) -> None:
    """Raise the error that a collective would end with: of a rank outside its group, of CPU tensors where the group's
    backend does not support them, or of sparse ones that NCCL does not add up (ProcessGroupNCCL.cpp,
    `allreduce_sparse`; `DistributedDataParallel` does so with sparse gradients).
    """
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in _PEERS and not 0 <= value < group.size():
            last = group.size() - 1
            raise InputError(f"no rank {value} among {last + 1}, which {func} names: they are counted from 0 to {last}")
    devices: Any = group
    where, tensors = {device.type for device in devices._device_types}, list(arguments_in(args))
    if "cpu" not in where and any(not is_meta(tensor) and tensor.device.type == "cpu" for tensor in tensors):
        raise RuntimeError("No backend type associated with device type cpu")
    if kind == "all-reduce" and any(is_meta(tensor) and tensor.layout is not torch.strided for tensor in tensors):
        backends: Any = dist.distributed_c10d.BackendConfig(dist.get_backend(group))
        if backends.get_device_backend_map()["cuda"] == "nccl":
            raise RuntimeError(
                "NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead."
            )


def _from_somebody(
    assume: Assume,
    original: Callable[..., Any],
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Any:
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
        self._times = self._times + 1 if read == self._latest else 1
        self._latest = read
        if self._times >= _POLLS:
            raise InputError(
                f"the program waits for another process to change {read[1]!r} in the store that they share, and there "
                "is none: leave that out of this run"
            )
