"""The region in which this process has a virtual GPU, alone or as one rank of a job.

It is process-wide, as a GPU is: threads that the program starts see it too. One region is open at a time.

A program that would run as several processes, one per GPU, runs as one of them. Its process group is PyTorch's own fake
one, which has the size of the job and no other members (`memsize.ranks`). `VirtualMachine` opens the region for code
that is imported, called or recorded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, Final, Self

import torch
import torch.cuda.nvtx
import torch.multiprocessing
import torch.utils.checkpoint
import torch.utils.data
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cuda_context import cuda_context
from memsize.errors import InputError
from memsize.kernels.semantics import Semantics, switched_on
from memsize.processes.patches import (
    MISSING,
    Execute,
    ImportHook,
    LatePatches,
    Patch,
    SuspendablePatches,
    assign,
    calling,
    wrapping,
)
from memsize.processes.rank_processes import RankConnection, connected
from memsize.processes.simulation import open_simulation, running
from memsize.ranks import collectives, group, peers, sharding
from memsize.records.gpu import Card
from memsize.records.world import World
from memsize.spec.scenario import scenario_named
from memsize.spec.stack import INSTALLED, Stack
from memsize.tracing import overrides
from memsize.tracing.ledger import Ledger, Workspaces
from memsize.tracing.named_devices import Gpus
from memsize.tracing.run import RunDevice, Setup, calls_seen, gpu_semantics
from memsize.tracing.saved_tensors import functional_transforms_allowed, saving
from memsize.virtual import data_parallel, gpu_tensors, launches, nested_tensors, torchscript
from memsize.virtual.compilation import Compilation
from memsize.virtual.device_assignment import DeviceAssignment
from memsize.virtual.driver import queries
from memsize.virtual.driver.caching_allocator import DeviceMemory
from memsize.virtual.driver.functions import Driver, Event, Stream
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.packages import finder
from memsize.virtual.program_modules import WRAPPERS

_CUDA = "12.8"
"""The CUDA version that ``torch.version.cuda`` names where PyTorch was built without."""
_CUDNN = 91501
_STASHING: Final = (2, 8)
"""The first release whose NCCL collectives hold their buffers instead of recording streams (pytorch/pytorch#150398)."""
_SHARDING = {f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "pipelining", "tensor")}
_APART = frozenset(
    {
        "torch._dynamo",
        "torch._inductor.cudagraph_trees",
        overrides.FLEX,
        launches.MODULE,
        WRAPPERS,
        *_SHARDING,
        *peers.REACHING,
        *finder.ASKING,
    }
)
"""Packages that are imported among the originals, of which they make tables, classes and TorchScript."""
_REMEMBERING = (
    "transformers.utils.import_utils",
    "accelerate.utils.imports",
    "diffusers.utils.import_utils",
    "torch.utils._triton",
)


@contextmanager
def virtual_gpu(
    driver: Driver,
    ledger: VirtualLedger,
    more: Iterable[Patch] = (),
    world: World | None = None,
    later: Mapping[str, LatePatches] = MappingProxyType({}),
    compiles: bool = True,
    measures: bool = True,
    default: int = 0,
) -> Iterator[None]:
    """While open, this process has the GPU of `driver`, and what happens on it is recorded in `ledger`; `more` is
    replaced besides, and `later` in modules by their names once they are imported. It is one of the processes of
    `world`, as a launcher would have started it; with None, it was started alone. `default` is the GPU of threads that
    choose none. Code given to `torch.compile` is compiled, or with `compiles` False runs as it is written; if it
    `measures`, what PyTorch measures to compile is part of the run, as in the first on a machine.

    Raises `InputError` when a region is open already, or when this process is in a group that `world` is not.
    """
    _refuse_second_gpu()
    with open_simulation() as simulation, ExitStack() as regions:
        _refuse_second_gpu()
        regions.callback(_forget_answers)
        ledger.alone = not group.is_joined()
        ledger.records_streams = (driver.stack.release or _STASHING) < _STASHING
        regions.enter_context(group.started(world))
        devices = ledger.devices = driver.devices = DeviceAssignment(world, default)
        for part in (driver, devices, ledger.order, collectives.RunningReduction()):
            regions.enter_context(simulation.with_part(type(part), part))
        regions.enter_context(simulation.with_part(Gpus, devices))
        _forget_answers()
        hooks = saving(ledger.saved)
        for region in (calls_seen(ledger), functional_transforms_allowed(), hooks, ledger):
            regions.enter_context(region)
        kernels = gpu_semantics(ledger, capability=driver.card.capability, release=driver.stack.release)
        semantics = regions.enter_context(kernels)
        ledger.current_stream = lambda: driver.stream
        threads = regions.enter_context(Threads(ledger, semantics))
        line = regions.enter_context(connected(world.rank)) if world is not None else None
        compilation = Compilation(ledger, driver.card.capability, compiles, measures)
        regions.callback(compilation.close)
        compile_patch: Patch = (torch, "compile", compilation.compile)
        replaced = (compile_patch, threads.replacement(), *_replacements(driver, ledger, world or World(), line), *more)
        own: dict[str, LatePatches] = {
            **launches.later(ledger, driver.properties),
            **ledger.host_memory.later(),
            overrides.FLEX: overrides.override_imported,
        }
        if torch.distributed.is_available():
            own |= {**sharding.later(ledger, ledger.aside, alone=line is None), **peers.later()}
        patches = SuspendablePatches(simulation.patches, replaced, {**own, **later})
        compilation.reach(patches, SuspendablePatches(simulation.patches, _of_driver(driver)))
        regions.enter_context(_patched(patches))
        yield


def _refuse_second_gpu() -> None:
    """Raise `InputError` where some thread has a virtual GPU already, without waiting for it."""
    simulation = running()
    if simulation is not None and simulation.get(Driver) is not None:
        raise InputError("this process has a virtual GPU already")


def _forget_answers() -> None:
    """Let libraries ask again whether there is a GPU: they remember the answer, also that of this region."""
    for library in _REMEMBERING:
        for function in list(vars(sys.modules.get(library, object)).values()):
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def _replacements(driver: Driver, ledger: VirtualLedger, world: World, line: RankConnection | None) -> Iterator[Patch]:
    yield from _saved_by_checkpointing(ledger)
    yield from launches.replacements(ledger)
    yield from torchscript.replacements()
    yield from nested_tensors.replacements()
    yield from queries.replacements(driver)
    yield from _process_patches(world, ledger, line)
    yield from data_parallel.replacements(ledger)
    yield from gpu_tensors.replacements(ledger)
    yield from ledger.backward_queue.replacements()
    yield from _of_driver(driver)
    yield from _of_cuda(driver)
    cudnn: Any = torch.backends.cudnn.m  # type: ignore[attr-defined]  # the module behind its stand-in
    yield cudnn, "is_available", lambda: True
    yield cudnn, "_init", lambda: True
    yield cudnn, "version", lambda: _CUDNN
    # Recurrent weights that cuDNN has put into one buffer take what they take apart; its own code asks the driver.
    yield torch, "_use_cudnn_rnn_flatten_weight", lambda: False
    yield torch.backends.cuda, "is_built", lambda: True
    if torch.version.cuda is None:
        yield torch.version, "cuda", _CUDA


def _of_driver(driver: Driver) -> Iterator[Patch]:
    """Patch the functions of the driver, and the questions whether there is one."""
    cuda: Any = torch.cuda
    yield from ((torch._C, name, function) for name, function in driver.functions().items())
    yield from nested_tensors.of_driver()
    yield cuda, "_lazy_init", driver.devices.initialize
    yield cuda, "_initialized", True
    yield cuda, "_cached_device_count", None
    yield cuda, "_is_in_bad_fork", lambda: False
    yield cuda, "_get_device_properties", lambda device: driver.properties
    yield cuda, "default_generators", (driver.seed,) * driver.devices.count
    yield cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False


def _saved_by_checkpointing(ledger: VirtualLedger) -> Iterator[Patch]:
    """Record tensors that selective checkpointing keeps for the backward as saved, as autograd does."""
    module: Any = torch.utils.checkpoint
    if not hasattr(module, "_VersionWrapper"):
        return

    class Kept(module._VersionWrapper):  # type: ignore[misc]
        def __init__(self, val: Any) -> None:
            super().__init__(val)
            self.saved = ledger.saved(val) if isinstance(val, torch.Tensor) else None

    yield module, "_VersionWrapper", Kept


def _of_cuda(driver: Driver) -> Iterator[Patch]:
    cuda: Any = torch.cuda
    yield cuda, "current_device", lambda: driver.devices.current
    yield cuda, "_exchange_device", driver.functions()["_cuda_exchangeDevice"]
    yield cuda, "_maybe_exchange_device", driver.functions()["_cuda_maybeExchangeDevice"]
    yield torch.storage, "_to", calling(_storage_to, torch._utils._to)
    yield cuda.nvtx, "_nvtx", _Silent()
    for owner in (torch, cuda, cuda.streams):
        yield owner, "Stream", Stream
        yield owner, "Event", Event
    for owner in (cuda, cuda.streams):
        yield owner, "ExternalStream", lambda pointer, device=None, **options: Stream(stream_id=pointer)


def _storage_to(original: Any, storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """`torch.load` moves storages, from which it then makes tensors."""
    if device.type == "cuda":
        return torch.UntypedStorage(storage.nbytes(), device="meta")
    return original(storage, device, non_blocking)


class _Silent:
    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


@contextmanager
def _patched(patches: SuspendablePatches) -> Iterator[None]:
    # Parts of PyTorch are imported among the originals; importing them ahead would cost each region a second.
    def execute(original: Execute, module: ModuleType) -> None:
        with ExitStack() as regions:
            if module.__name__ in _APART:
                regions.enter_context(patches.suspended())
                regions.enter_context(overrides.suspended_overrides())  # the last to be applied is restored first
            original(module)
        if patches.awaits(module.__name__):
            patches.imported(module)

    hook = ImportHook(lambda name: name in _APART or patches.awaits(name), execute)
    sys.meta_path.insert(0, hook)
    try:
        patches.apply()
        yield
    finally:
        sys.meta_path.remove(hook)
        patches.restore()


# -- one rank of a job -------------------------------------------------------------------------------------------------


def _process_patches(world: World, ledger: VirtualLedger, line: RankConnection | None) -> Iterator[Patch]:
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        yield owner, "spawn", partial(_spawn, world)
    if torch.distributed.is_available():
        yield from group.replacements(world)
        yield from _own_gpu_patches(ledger.devices)
        yield from peers.replacements(ledger.evaluator.rely_on, line)
        yield from collectives.replacements()
        yield from sharding.replacements(ledger.in_pytorch)


def _own_gpu_patches(devices: DeviceAssignment) -> Iterator[Patch]:
    """Let a mesh choose the GPU of this rank where the program has no CUDA context yet, and a barrier use that GPU
    (`ProcessGroupNCCL::guessDeviceForRank`).
    """
    import torch.distributed.device_mesh as meshes

    def handle(original: Callable[..., Any], kind: str = "cuda") -> Any:
        module = original(kind)
        if module is not torch.cuda:
            return module
        members = vars(module) | {"is_initialized": lambda: devices.is_initialized}
        return SimpleNamespace(**members)

    def barrier(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with devices.on_own():
            return original(*args, **options)

    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        yield wrapping(owner, "barrier", barrier)
    if hasattr(meshes, "_get_device_handle"):  # not in builds without torch.distributed
        yield wrapping(meshes, "_get_device_handle", handle)


def _spawn(world: World, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, **options: Any) -> Any:
    """``mp.spawn`` of as many processes as there are GPUs runs here what it would run as this rank."""
    if nprocs != world.local_size:
        raise InputError(group.wanted(nprocs * world.nodes, world))
    fn(world.local_rank, *args)
    return None if join else _Over()


class _Over:
    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


# -- a GPU for a run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VirtualMachine(RunDevice):
    """The GPU `card` of a process, perhaps one of `world`; what is larger than its memory is there all the same."""

    card: Card
    world: World | None = None

    def ledger(self, setup: Setup) -> VirtualLedger:
        return VirtualLedger(setup.gpu.workspaces)

    def regions(self, setup: Setup, ledger: Ledger) -> Iterable[AbstractContextManager[Any]]:
        assert isinstance(ledger, VirtualLedger)
        # The figures of other scenarios are eager, also where transformers would compile a step of its own accord.
        compiles = scenario_named(setup.scenario).compile is not None
        return (self._gpu(ledger, setup.gpu.stack, compiles),)

    def _gpu(
        self, ledger: VirtualLedger, stack: Stack = INSTALLED, compiles: bool = False
    ) -> AbstractContextManager[None]:
        memory = DeviceMemory(
            self.card.bytes, cuda_context(self.card).low, AllocatorConfig, ledger.events, ledger.streams, bounded=False
        )
        # Where memsize puts the model.
        own = self.world.local_rank if self.world and not self.world.one_process else 0
        driver = Driver(self.card, memory, stack=stack)
        return virtual_gpu(driver, ledger, world=self.world, compiles=compiles, measures=False, default=own)


@contextmanager
def machine_with(card: Card) -> Iterator[None]:
    """While open, this process has that GPU; a model that is larger than its memory is built all the same."""
    with VirtualMachine(card)._gpu(VirtualLedger(Workspaces(), lambda: None)):
        yield


# -- threads that a program starts -------------------------------------------------------------------------------------


class Threads:
    """The threads that are started while this is open, to fetch data ahead or to serve requests. They follow the
    `semantics` of the thread that opened it: dispatch modes, hooks for saved tensors and the dispatch key of CUDA's
    semantics belong to one thread. A thread that outlives this is left with a mode that does nothing.
    """

    def __init__(self, ledger: VirtualLedger, semantics: Semantics) -> None:
        self.ledger = ledger
        self.is_open = False
        self._semantics = semantics

    def __enter__(self) -> Self:
        self.is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_open = False

    def replacement(self) -> Patch:
        """Patch `threading.Thread.start`."""
        original: Any = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            assign(thread, "run", partial(copy_context().run, self._follow, thread, thread.run))
            original(thread)

        return threading.Thread, "start", start

    def _follow(self, thread: threading.Thread, run: Callable[[], None]) -> None:
        ledger = self.ledger
        try:
            with ledger.in_thread(), saving(ledger.saved), _InThread(self), switched_on(self._semantics):
                run()
        except BaseException:
            if self.is_open:
                raise  # else the program is over, and its GPU is gone
        finally:
            assign(thread, "run", MISSING)  # a cycle, which would keep what the thread holds


class _InThread(TorchDispatchMode):
    def __init__(self, threads: Threads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threads = threads

    def __enter__(self) -> Self:
        # A mode's own way also sets flags of the whole process, which threads that overlap would leave set.
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        _pop_mode()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `MetaDispatchMode`

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._threads.is_open:
            return self._threads.ledger.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))
