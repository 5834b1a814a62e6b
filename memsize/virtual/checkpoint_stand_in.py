"""A stand-in for the checkpoint that a program wants to load and that isn't there.

`torch.load` returns a dict that has every key. What is loaded from it into a model or an optimizer has the shapes of
their own state, on the device that `torch.load` was asked for, and lives as long as a real one would. Everything else
in it counts as 0: epochs, steps, the best metric.

Known limits: its tensors appear when they are loaded, not when the file is read. A program that goes through the
entries gets those of the largest model among its variables.
"""

from __future__ import annotations

import copy
import operator
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from memsize.processes.patches import Patch, wrapping
from memsize.processes.user_code import users_frames, variables
from memsize.torch_internals.pytree import map_tensors
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.saved_weights import Files

NOTE: Final = (
    "the checkpoint {} does not exist: its tensors have the shapes of the state that loads them, its numbers are 0"
)
_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".pkl")
"""How the names of checkpoints end among the arguments of a program, which may look whether they are there."""


class CheckpointStandIn(dict[Any, Any]):
    """A checkpoint, or an entry of one, whose tensors go to `device` (None: where they were saved from, the GPU)."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self._device = device

    def __missing__(self, key: Any) -> CheckpointStandIn:
        self[key] = entry = CheckpointStandIn(self._device)
        return entry

    def fill(self, state: dict[Any, Any]) -> None:
        """Take entries like those of `state`, with tensors of its own."""
        self.update(map_tensors(self._like, dict(state)))

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_cuda or tensor.dim()):  # a count of steps, which optimizers have on the CPU
            return tensor.to(self._device or "cpu", copy=True)
        return torch.empty_like(tensor, device=self._device or "cuda")

    def filled(self, state: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        """The entries, like those of `state` where there are none yet."""
        if not super().__len__():
            self.fill(state())
        return dict(super().items())

    def _of_program(self) -> CheckpointStandIn:
        """Fill this entry, unless it is filled already, with the state of the program's largest model."""
        if not super().__len__() and (model := _largest_model()) is not None:
            self.fill(model.state_dict())
        return self

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        entry = self[key]
        super().pop(key)
        return entry

    def __contains__(self, key: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return super(CheckpointStandIn, self._of_program()).__iter__()

    def keys(self) -> Any:
        return super(CheckpointStandIn, self._of_program()).keys()

    def items(self) -> Any:
        return super(CheckpointStandIn, self._of_program()).items()

    def values(self) -> Any:
        return super(CheckpointStandIn, self._of_program()).values()

    def __index__(self) -> int:
        return 0

    def __float__(self) -> float:
        return 0.0

    def __format__(self, spec: str) -> str:
        return format(0, spec)


def _number(name: str, swapped: bool) -> Callable[[Any, Any], Any]:
    function = getattr(operator, name)
    return (lambda self, other: function(other, 0)) if swapped else (lambda self, other: function(0, other))


for _name in ("add", "sub", "mul", "lt", "le", "gt", "ge"):
    setattr(CheckpointStandIn, f"__{_name}__", _number(_name, swapped=False))
for _name in ("add", "sub", "mul"):
    setattr(CheckpointStandIn, f"__r{_name}__", _number(_name, swapped=True))


def _largest_model() -> nn.Module | None:
    models = (value for frame in users_frames() for _, value in variables(frame) if isinstance(value, nn.Module))
    return max(models, key=lambda model: sum(map(torch.numel, model.parameters())), default=None)


class StandInLoading:
    """Lets a program load checkpoints that are not there: `every` one, or those that are announced."""

    def __init__(self, ledger: VirtualLedger, files: Files, every: bool) -> None:
        self._ledger = ledger
        self._files = files
        self._every = every
        self._announced = set[Path]()

    def announce_arguments(self, arguments: Sequence[str]) -> None:
        """Announce each checkpoint that a command line names and that is not there, if every one is stood in for."""
        for argument in arguments if self._every else ():
            path = Path(argument.rpartition("=")[2])
            if path.suffix in _SUFFIXES and not path.exists():
                self.announce(path)

    def announce(self, path: Path) -> None:
        """Let an empty file stand for the checkpoint `path`, which a program may look for before it loads it."""
        self._files.stand_in(path, folders=True)
        self._announced.add(path.absolute())

    def replacements(self) -> Iterator[Patch]:
        """Yield the patches of what loads a state, but for `torch.load` and optimizers, which have theirs."""
        yield wrapping(nn.Module, "load_state_dict", self._load_model)
        for owner in (torch.optim.lr_scheduler.LRScheduler, GradScaler):
            yield wrapping(owner, "load_state_dict", _unless_stand_in)

    def missing(self, file: Any, map_location: Any) -> CheckpointStandIn | None:
        """The stand-in for a file that is to be loaded; None for one that is there."""
        path = Path(file).absolute() if isinstance(file, (str, os.PathLike)) else None
        if path is None or (path not in self._announced and (path.exists() or not self._every)):
            return None
        self._ledger.evaluator.notes[NOTE.format(path.name)] = None
        if isinstance(map_location, dict):
            map_location = next(iter(map_location.values()), None)
        if map_location is None:
            return CheckpointStandIn(None)
        return CheckpointStandIn(torch.device(map_location if isinstance(map_location, (str, torch.device)) else "cpu"))

    def _load_model(self, original: Callable[..., Any], model: Any, state_dict: Any, *args: Any, **options: Any) -> Any:
        if isinstance(state_dict, CheckpointStandIn):
            state_dict = state_dict.filled(model.state_dict)
            self._files.loaded(state_dict)
        return original(model, state_dict, *args, **options)

    def optimizer_state(self, optimizer: Optimizer, state: Any) -> Any:
        """The state that is loaded into an optimizer: for a stand-in, one that its own step makes."""
        if not isinstance(state, CheckpointStandIn):
            return state
        return state.filled(lambda: _state_after_step(optimizer, self._ledger))


def _unless_stand_in(original: Callable[..., Any], owner: Any, state_dict: Any) -> Any:
    return None if isinstance(state_dict, CheckpointStandIn) else original(owner, state_dict)


def _state_after_step(optimizer: Optimizer, ledger: VirtualLedger) -> dict[str, Any]:
    """The state of an optimizer once it has made a step: that of a copy, with parameters that no ledger sees."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    step: Any = type(twin).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # it is no step of the program
    with ledger.absently():
        groups = twin.param_groups
        twin.param_groups = [{**group, "params": [*map(_with_gradient, group["params"])]} for group in groups]
        step(twin)
        return twin.state_dict()


def _with_gradient(parameter: torch.Tensor) -> torch.Tensor:
    like = torch.empty_like(parameter).requires_grad_()
    like.grad = torch.empty_like(parameter)
    return like
