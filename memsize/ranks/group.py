"""The process group of one rank: PyTorch's own fake group, as large as the world, in this process alone.

A program that opens a group with any backend gets this one. Its subgroups and device meshes are PyTorch's own.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from memsize.errors import InputError
from memsize.processes.patches import Patch, assign, calling, wrapping
from memsize.ranks.peers import LonelyStore
from memsize.records.world import World

JOINED: Final = (
    "this process is in a process group already, which memsize leaves alone: ask before init_process_group, "
    "or after destroy_process_group"
)
_STARTS: Final = "_setup_world_group_and_device"
"""The method of `DeviceMesh` that each mesh of the world calls first."""
_NCCL: Final = "nccl"
OURS: Final = "memsize"
"""The backend of a group that memsize itself opened: programs see NCCL, and it also sends CPU tensors."""
_UNNAMED: Final = "undefined"
"""PyTorch's name of the backend if a program names none."""


def environment(world: World) -> dict[str, str]:
    """The variables that torchrun sets for a process, by name."""
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(world.node),
        "GROUP_WORLD_SIZE": str(world.nodes),
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def wanted(size: int, world: World) -> str:
    """Return the error message for a program that wants `size` processes on all machines but runs with `world`."""
    gpus = f"{world.size} GPUs" if world.size > 1 else "one GPU"
    run = f"memsize run --gpus {size}" + (f" --nodes {world.nodes}" if world.nodes > 1 else "")
    return f"this program wants {size} processes, one for each GPU, and it is run with {gpus}: {run} …"


def is_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def started(world: World | None) -> Iterator[None]:
    """Give this process the environment variables of its rank in `world`; on exit, restore the old ones and leave
    groups.

    Raises `InputError` for a `world` if this process is in a group already, or PyTorch has no torch.distributed.
    """
    there = is_joined()
    if world is not None and not dist.is_available():
        raise InputError("this build of PyTorch has no torch.distributed")
    if world is not None and there:
        raise InputError(JOINED)
    if world is not None:
        with warnings.catch_warnings(action="ignore"):  # of TorchScript, which compiles what is replaced next
            import torch.distributed.optim  # noqa: F401

    def forget_meshes() -> None:
        """Reset DTensor's sharding decisions and random numbers: it cannot tell the meshes of different ranks apart."""
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import _random, debug

            debug._clear_sharding_prop_cache()
            assign(_random, "_rng_tracker", None)

    before, hook = dict(os.environ), sys.excepthook
    forget_meshes()
    os.environ.update({} if world is None or world.one_process else environment(world))
    try:
        yield
    finally:
        if not there and is_joined():
            dist.destroy_process_group()
        forget_meshes()
        assign(sys, "excepthook", hook)
        os.environ.clear()
        os.environ.update(before)


class Backends:
    """The backends that a program asks for. Programs decide by them what to send, and from which device."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store: Any = None
        """The store of the group of all processes."""
        self._whole: Any = None
        self._is_ours = False
        self.parts: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def join(
        self,
        original: Callable[..., None],
        backend: str | None = None,
        method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        *_: Any,
        **more: Any,
    ) -> None:
        """Replace `init_process_group`: join the fake group, and keep the backend of the group of all processes."""
        if world_size not in (-1, self._world.size):
            raise InputError(wanted(world_size, self._world))
        if not dist.is_initialized():  # a loop of the user's own may begin with it, where the group is there
            import torch.testing._internal.distributed.fake_pg  # noqa: F401  # which registers the fake group

            self._store = LonelyStore()
            original("fake", rank=self._world.rank, world_size=self._world.size, store=self._store)
        backend = backend or (_UNNAMED if more.get("device_id") is None else _NCCL)
        self._is_ours = backend == OURS
        self._whole = dist.Backend(_NCCL if self._is_ours else backend)

    def default_store(self, original: Callable[[], Any]) -> Any:
        """Return the store of the group of all processes itself, without the prefix that the group puts around it."""
        usual = original()
        return self._store if usual and self._store else usual

    def of(self, original: Callable[..., Any], group: Any = None) -> Any:
        """Replace `get_backend`: return the requested backend. `original` checks that this rank is in the group."""
        original(group)
        return self._whole if group is None else self.parts.get(group, self._whole)

    def devices(self, original: Any, group: Any) -> list[torch.device]:
        """Return the devices that a group's backend supports: the fake backend claims all devices."""
        backend = self.parts.get(group, self._whole)
        if backend in (None, _UNNAMED) or (self._is_ours and group not in self.parts):
            devices: list[torch.device] = original.__get__(group)
            return devices
        config: Any = dist.distributed_c10d.BackendConfig(backend)
        return [torch.device(name) for name in config.get_device_backend_map()]


class _NoNCCL:
    """`ProcessGroupNCCL` in builds of PyTorch that lack it: no group is one, and its options decide nothing here."""

    class Options(SimpleNamespace):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())


def replacements(world: World) -> Iterator[Patch]:
    """Patch the functions that join this process to groups."""
    import torch.distributed.device_mesh as meshes

    group: Any = dist.distributed_c10d
    backends = Backends(world)
    open_group = calling(partial(_without_backend, backends), group.new_group)
    for owner in (dist, group, meshes):
        yield wrapping(owner, "init_process_group", backends.join)
        yield wrapping(owner, "get_backend", backends.of)
        if hasattr(owner, "new_group"):
            yield owner, "new_group", open_group
    for owner in (dist, group):
        yield owner, "split_group", calling(_split_group, open_group)
        yield owner, "is_nccl_available", lambda: True
        if not hasattr(owner, "ProcessGroupNCCL"):
            yield owner, "ProcessGroupNCCL", _NoNCCL
    waits = dist.Work.wait
    yield dist.Work, "wait", lambda work, timeout=None: waits(work)  # what is over is not waited for
    device_types = calling(backends.devices, vars(dist.ProcessGroup)["_device_types"])
    yield dist.ProcessGroup, "_device_types", property(device_types)
    yield wrapping(group, "_get_default_store", backends.default_store)
    yield wrapping(meshes.DeviceMesh, _STARTS, _within, world)


def _within(world: World, original: Callable[..., Any], mesh: Any) -> Any:
    shape = tuple(mesh.mesh.shape)
    if math.prod(shape) > world.size:
        sizes = " x ".join(map(str, shape))
        raise InputError(
            f"a mesh of {sizes} has {math.prod(shape)} processes, and the program is run with {world.size} "
            f"(memsize run --gpus {math.prod(shape)} …): the product of its sizes is the number of GPUs"
        )
    return original(mesh)


def _without_backend(backends: Backends, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    backend = options.pop("backend", next((argument for argument in args[2:3] if isinstance(argument, str)), None))
    for name in ("pg_options", "device_id"):
        options.pop(name, None)
    group = original(*args[:2], **options)
    if backend and isinstance(group, dist.ProcessGroup):  # else it has the backend of all processes
        backends.parts[group] = dist.Backend(backend)
    return group


def _split_group(
    open_group: Callable[..., Any],
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] = (),
    *_: Any,
    **options: Any,
) -> Any:
    """Replace `split_group`: open each part as a new group, since the fake group cannot be split."""
    parent = dist.get_process_group_ranks(parent_pg or dist.group.WORLD)
    parts = [[parent[index] for index in part] for part in split_ranks]
    groups = [open_group(part, backend=options.get("backend")) for part in parts]
    return next((subgroup for part, subgroup in zip(parts, groups, strict=True) if dist.get_rank() in part), None)
