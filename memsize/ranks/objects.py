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
from memsize.known_values.data_dependent import ITEM_IS_ONE
from memsize.known_values.values import constant_of, is_small
from memsize.processes.patches import Patch
from memsize.processes.rank_processes import RankConnection
from memsize.ranks.collectives import write
from memsize.torch_internals.meta import is_meta

_ALIKE: Final = "what other ranks send as objects is taken to be what this rank sends"
_KEPT: Final = "objects that another rank sends to this one stay as they are here"
_NUMBERS_KEPT: Final = "numbers that another rank broadcasts to this one stay as they are here"
_Rank = int | None
Assume = Callable[[str], None]
"""A callback that gets the text of an assumption whenever it is made."""


def replacements(assume: Assume, line: RankConnection | None) -> Iterator[Patch]:
    """Patch the functions that send objects and numbers (by `line` if other ranks are run), and a rare barrier."""
    exchange = _Exchange(assume, line, dist.broadcast)
    names = "broadcast all_gather_object gather_object broadcast_object_list scatter_object_list"
    functions = {name: getattr(exchange, name) for name in f"{names} send_object_list recv_object_list".split()}
    functions["monitored_barrier"] = lambda *args, **options: None
    for owner in (dist, dist.distributed_c10d):
        yield from ((owner, name, function) for name, function in functions.items())


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
        """Return the objects that `source` sends to all of `group`, or `None` if no answer comes."""
        ranks = tuple(dist.get_process_group_ranks(_of(group)))
        message = None if self._line is None else self._line.receive(source, ranks)
        objects: list[Any] | None = None if message is None else pickle.loads(message)
        return objects


def _number(rank: _Rank, group_rank: _Rank, group: Any) -> int:
    """Return the global rank: `rank`, or the rank of `group_rank` in `group`; 0 if neither is given."""
    return (rank or 0) if group_rank is None else dist.get_global_rank(_of(group), group_rank)


def _of(group: Any) -> Any:
    return dist.group.WORLD if group is None else group
