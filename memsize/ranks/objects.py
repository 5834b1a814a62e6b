"""Objects that ranks send each other, and numbers that a rank broadcasts, where this process runs a single rank.

If the sender can be run too, its objects come from its own process. If all ranks send, we assume that they send copies
of this rank's objects. Objects that only another rank has stay unchanged here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from memsize.errors import InputError
from memsize.known_values.assumptions import ITEM_IS_ONE
from memsize.known_values.values import constant_of, is_small
from memsize.processes.patches import Patch
from memsize.processes.rank_processes import RankConnection
from memsize.ranks.collectives import write
from memsize.torch_internals.meta import is_meta

_ALIKE: Final = "what other ranks send as objects is taken to be what this rank sends"
_KEPT: Final = "objects that another rank sends to this one stay as they are here"
_NUMBERS_KEPT: Final = "numbers that another rank broadcasts to this one stay as they are here"
Assume = Callable[[str], None]
"""A callback that gets the text of an assumption whenever it is made."""


def replacements(assume: Assume, line: RankConnection | None) -> Iterator[Patch]:
    """Patch the functions that send objects and numbers between ranks, through `line` if other ranks are run, and a
    barrier that only one backend has.
    """
    functions = {
        "broadcast": _broadcast_tensor(dist.broadcast, assume, line),
        "all_gather_object": _all_gather(assume),
        "gather_object": _gather(assume),
        "broadcast_object_list": _broadcast(assume, line),
        "scatter_object_list": _scatter(assume, line),
        "send_object_list": _send(line),
        "recv_object_list": _receive(assume, line),
        "monitored_barrier": lambda *args, **options: None,
    }
    for owner in (dist, dist.distributed_c10d):
        for name, function in functions.items():
            yield owner, name, function


def _all_gather(assume: Assume) -> Callable[..., None]:
    def gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
        _fill(object_list, obj, group, assume)

    return gather


def _gather(assume: Assume) -> Callable[..., None]:
    def gather(
        obj: Any, object_gather_list: Any = None, dst: int | None = None, group: Any = None, group_dst: Any = None
    ) -> None:
        if dist.get_rank() == _number(dst, group_dst, group) and object_gather_list is not None:
            _fill(object_gather_list, obj, group, assume)

    return gather


def _broadcast(assume: Assume, line: RankConnection | None) -> Callable[..., None]:
    def broadcast(
        object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        if dist.get_rank(group) < 0:
            return
        source = _number(src, group_src, group)
        if source == dist.get_rank():
            _tell(line, object_list, group)
        elif (received := _received(line, source, group)) is not None:
            object_list[:] = received
        else:
            assume(_KEPT)

    return broadcast


def _broadcast_tensor(original: Callable[..., Any], assume: Assume, line: RankConnection | None) -> Callable[..., Any]:
    def broadcast(
        tensor: Tensor, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
    ) -> Any:
        work = original(tensor, src, group, async_op, group_src)
        if dist.get_rank(group) < 0 or not _is_read(tensor):
            return work
        source = _number(src, group_src, group)
        if source == dist.get_rank():
            value = constant_of(tensor)
            _tell(line, [None if value is None else value.tolist()], group)
        elif (received := _received(line, source, group)) is not None:
            write(tensor, _as_tensor(received[0], tensor), ITEM_IS_ONE, None)
        else:
            assume(_NUMBERS_KEPT)
        return work

    return broadcast


def _is_read(tensor: Tensor) -> bool:
    """Whether a program may act on the numbers in `tensor` (sizes, seeds, flags), unlike on weights or activations."""
    return is_small(tensor) and (not is_meta(tensor) or tensor.numel() == 1 or not tensor.is_floating_point())


def _as_tensor(numbers: Any, tensor: Tensor) -> Tensor | None:
    """Return the sender's `numbers` in the dtype and shape of `tensor`; `None` if the sender does not know them."""
    return None if numbers is None else torch.tensor(numbers, dtype=tensor.dtype, device="cpu").reshape(tensor.shape)


def _scatter(assume: Assume, line: RankConnection | None) -> Callable[..., None]:
    def scatter(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        if dist.get_rank(group) < 0:
            return
        source, parts = _number(src, group_src, group), None
        if source != dist.get_rank():
            parts = _received(line, source, group)
        elif scatter_object_input_list is not None:
            _tell(line, scatter_object_input_list, group)
            parts = deepcopy(scatter_object_input_list)
        if parts is None:
            assume(_KEPT)
        else:
            scatter_object_output_list[0] = parts[dist.get_rank(group)]

    return scatter


def _tell(line: RankConnection | None, objects: list[Any], group: Any) -> None:
    """Send `objects` to all of `group`."""
    ranks = _ranks(group)
    if line is not None and len(ranks) > 1:
        line.send(ranks, pickle.dumps(objects))


def _received(line: RankConnection | None, source: int, group: Any) -> list[Any] | None:
    """Return the objects that `source` sends to all of `group`, or `None` if no answer comes."""
    message = None if line is None else line.receive(source, _ranks(group))
    objects: list[Any] | None = None if message is None else pickle.loads(message)
    return objects


def _send(line: RankConnection | None) -> Callable[..., None]:
    def send(
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        use_batch: bool = False,
    ) -> None:
        if line is not None:
            line.send(_number(dst, group_dst, group), pickle.dumps(object_list))

    return send


def _receive(assume: Assume, line: RankConnection | None) -> Callable[..., int]:
    def receive(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        use_batch: bool = False,
    ) -> int:
        sender = _number(src, group_src, group)
        if line is None or (src is None and group_src is None):  # whoever sends first
            assume(_KEPT)
        elif (message := line.receive(sender, dist.get_rank())) is not None:
            object_list[:] = pickle.loads(message)
        else:
            raise InputError(
                f"rank {sender} ended before it sent what rank {dist.get_rank()} waits for: run it as rank {sender} to "
                "see why, in a new process where this one has used a GPU"
            )
        return sender

    return receive


def _number(rank: int | None, group_rank: int | None, group: Any) -> int:
    """Return the global rank: `rank`, or the rank of `group_rank` in `group`; 0 if neither is given."""
    return (rank or 0) if group_rank is None else dist.get_global_rank(_of(group), group_rank)


def _fill(objects: list[Any], own: Any, group: Any, assume: Assume) -> None:
    if dist.get_world_size(group) > 1:
        assume(_ALIKE)
    for rank in range(len(objects)):
        objects[rank] = own if rank == dist.get_rank(group) else deepcopy(own)


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(_of(group)))


def _of(group: Any) -> Any:
    return dist.group.WORLD if group is None else group
