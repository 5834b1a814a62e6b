"""The ranks of a distributed program to run."""

from __future__ import annotations

from typing import get_args

from memsize.errors import InputError
from memsize.records.ranks import Which
from memsize.records.world import World


def asked_world(gpus: int | None, nodes: int, rank: int | Which, one_process: bool = False) -> World | None:
    """The process that is run, of several the first; None for a program that is started by itself.

    With `one_process` there is only one, which has all the GPUs, and `rank` is that of a GPU.

    Raises `InputError` where there is no such process.
    """
    if not isinstance(rank, int) and rank not in get_args(Which):
        raise InputError(f"no rank {rank!r}: a number from 0, all or distinct")
    if gpus is None:
        if rank != 0 or nodes != 1 or one_process:
            raise InputError("ranks and nodes are those of a program on several GPUs: say how many, as in --gpus 8")
        return None
    return World(gpus, rank if isinstance(rank, int) else 0, nodes, one_process)


def parse_rank(text: str) -> int | Which:
    """The rank called `text`: a number, ``all`` or ``distinct``."""
    if text in get_args(Which):
        return text  # type: ignore[return-value]
    if not text.isdecimal():
        raise InputError(f"no rank {text!r}: a number from 0, all or distinct")
    return int(text)
