"""A model cut into the stages of a pipeline, and what one rank runs of it.

A stage runs the model's own forward, in which the blocks of other stages return what they returned before, and the last
of them before this stage what was received. What else belongs to others is done without memory: it makes what the
stage's blocks take besides, masks and tables of positions, which each rank makes for itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memsize.errors import InputError
from memsize.processes.patches import Patches
from memsize.ranks.strategies import Blocks
from memsize.spec.model_request import Call
from memsize.torch_internals.pytree import arguments_in, tensors_in
from memsize.tracing.module_calls import parameters_reached
from memsize.tracing.run import Run
from memsize.virtual.ledger.gpu_ledger import VirtualLedger


class Returned(NamedTuple):
    """The result of a block, or of the model, in the first forward, as the leaves of a pytree."""

    leaves: list[Any]
    spec: TreeSpec

    @classmethod
    def of(cls, value: Any) -> Returned:
        return cls(*tree_flatten(value))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    def detached(self) -> Returned:
        """Detach the tensors from the graph that made them."""
        detached = (tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors)
        return Returned.of(self.with_tensors(detached))

    def with_tensors(self, tensors: Iterable[Tensor]) -> Any:
        replacements = iter(tensors)
        leaves = [next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


class Line(NamedTuple):
    """The blocks of a model in the order in which its forward calls them.

    Position `k` of the forward is all that runs from the end of block ``k - 1`` to the end of block `k`. `returned` has
    the results of the blocks, and last the result of the model. `read` are the parameters, by their `id`, that are read
    at each position.
    """

    blocks: tuple[nn.Module, ...]
    returned: tuple[Returned, ...]
    read: tuple[set[int], ...]
    needs: tuple[int, ...]
    """For each position, the first one of which it uses more than the result of the block before it; else itself."""

    def starts(self, stages: int) -> tuple[int, ...]:
        """Return the first position of each stage, and the end. Raises `InputError` where the cut is impossible."""
        length, more = divmod(len(self.blocks), stages)
        if not length:
            raise InputError(f"{len(self.blocks)} blocks cannot be put on pp={stages} stages")
        starts = (0, *accumulate(length + (stage < more) for stage in range(stages)))
        for position, needed in enumerate(self.needs):
            stage = min(bisect_right(starts, position) - 1, stages - 1)
            if needed < starts[stage]:
                what = self._named(position) if position < len(self.blocks) else "what follows the last block"
                raise InputError(
                    f"pp={stages} cannot cut this model: {what} takes what was made at {self._named(needed)}, on an "
                    "earlier stage, and a stage gets what the block before it returns alone"
                )
        return starts

    def _named(self, position: int) -> str:
        return f"block {position} ({type(self.blocks[position]).__name__})"


def line_of(model: nn.Module, blocks: Blocks, call: Call) -> Line:
    """The `blocks` of `model` as one forward calls them. Raises `InputError` where it calls one more than once."""
    parameters = set(map(id, model.parameters()))
    walk = _Walk(parameters)
    forwards = [(block, "forward", partial(walk.called, block, block.forward)) for block in blocks.modules]
    with Patches().applied(forwards), walk:
        result = model(*call[0], **call[1])
        walk.ended(result)
    read = tuple(walk.reads[position] & parameters for position in range(len(walk.blocks) + 1))
    returned = (*walk.returned, Returned.of(tuple(arguments_in((result,)))).detached())
    return Line(tuple(walk.blocks), returned, read, tuple(walk.needs))


class _Walk(TorchDispatchMode):
    """Observes one forward: its blocks, what ops read between them, and, as results are detached, what each needs."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: defaultdict[int, set[int]] = defaultdict(set)
        self.blocks: list[nn.Module] = []
        self.returned: list[Returned] = []
        self.needs: list[int] = []
        self._parameters = parameters
        self._origins: dict[int, int] = {}
        """The position that returned a tensor, or was the first to read a parameter, by its `id`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads[len(self.blocks)].update(map(id, arguments_in(args)))
        return func(*args, **(kwargs or {}))

    def called(self, block: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if block in self.blocks:
            raise InputError(f"{type(block).__name__} is called more than once in a forward: no stage can have it")
        result = original(*args, **kwargs)
        self.ended(result)
        cut = Returned.of(result).detached()
        self._origins.update((id(tensor), len(self.blocks)) for tensor in cut.tensors)
        self.blocks.append(block)
        self.returned.append(cut)
        return cut.with_tensors(cut.tensors)

    def ended(self, value: Any) -> None:
        position = len(self.blocks)
        read = self.reads[position] & self._parameters
        for parameter in read:
            self._origins.setdefault(parameter, position)
        before = {id(tensor) for tensor in self.returned[-1].tensors} if self.returned else set()
        beyond = parameters_reached(arguments_in((value,))) - read - before
        self.needs.append(min((self._origins.get(parameter, position) for parameter in beyond), default=position))


class Stage(nn.Module):
    """Stage `number` of so many: takes what the one before it returns, as tensors, and returns what the next one takes.

    The first takes the tensors of the call, and the last keeps the model's `result` until it is asked for. What other
    stages have is dropped from `model`; their layers run in the precision `lower`, if it is another than that of their
    parameters.
    """

    def __init__(
        self, run: Run, call: Call, line: Line, number: int, stages: int, lower: torch.dtype | None = None
    ) -> None:
        super().__init__()
        assert isinstance(run.ledger, VirtualLedger)
        self.model, self.number = run.setup.model, number
        self.is_first, self.is_last = number == 0, number == stages - 1
        self._first, self._end = line.starts(stages)[number : number + 2]
        self._call, self._line, self._ledger, self._setup = call, line, run.ledger, run.setup
        self._lower = lower
        self._runs = False
        self._received: tuple[Tensor, ...] = ()
        self._sent: tuple[Tensor, ...] = ()
        self.result: Any = None
        self.dropped: set[str] = set()
        """The names of what the model has no more."""
        self._drop_others()
        for position, block in enumerate(line.blocks):
            vars(block)["forward"] = partial(self._block, position, block.forward)

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        return self._line.blocks[self._first : self._end]

    def cut(self) -> None:
        """End forwards with the last block from now on: after what is hooked to that by now, such as sharding."""
        if not self.is_last:
            self.blocks[-1].register_forward_hook(self._send)

    @property
    def takes(self) -> tuple[Tensor, ...]:
        """Tensors like those that it takes."""
        return tuple(tensors_in(self._call)) if self.is_first else self._line.returned[self._first - 1].tensors

    @property
    def returns(self) -> tuple[Tensor, ...]:
        """Tensors like those that its last block returns, or the model."""
        return self._line.returned[self._end if self.is_last else self._end - 1].tensors

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self._received, self._runs, self._ledger.absent = tensors, True, not self.is_first
        call = Returned.of(self._call)
        args, kwargs = call.with_tensors(tensors if self.is_first else map(self._lowered, call.tensors))
        try:
            with self._setup.precision.autocast(), self._setup.precision.forward():
                result = self.model(*args, **kwargs)
        finally:
            self._received, self._runs, self._ledger.absent = (), False, False
        if self.is_last:
            self.result = result
            return tuple(arguments_in((result,)))
        sent, self._sent = self._sent, ()
        return sent

    def _block(self, position: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._runs:  # a checkpoint runs it again
            return original(*args, **kwargs)
        if not self._first <= position < self._end:
            return self._elsewhere(position)
        for tensor in arguments_in((args, kwargs)):
            self._ledger.enter(tensor, "temporary")
        return original(*args, **kwargs)

    def _send(self, block: nn.Module, args: Any, result: Any) -> Any:
        if not self._runs:
            return result
        returned = Returned.of(result)
        self._sent, self._ledger.absent = returned.tensors, True
        cut = returned.detached()
        return cut.with_tensors(cut.tensors)

    def _elsewhere(self, position: int) -> Any:
        """Return the result of a block of another stage: the received tensors, if it is the one before this stage."""
        returned = self._line.returned[position]
        if position != self._first - 1:
            return returned.with_tensors(returned.tensors)
        self._ledger.absent = False
        return returned.with_tensors(self._received)

    def _drop_others(self) -> None:
        """Let the model have only what this stage reads; the rest can still be read, as plain attributes."""
        line, blocks = self._line, self._line.blocks
        mine = set().union(*line.read[self._first : self._end + self.is_last], _parameters(self.blocks))
        if self.is_first:  # it also has parameters that are never read
            mine |= _parameters((self.model,)) - set().union(*line.read, _parameters(blocks))
        others = {module for block in (*blocks[: self._first], *blocks[self._end :]) for module in block.modules()}
        for path, module in list(self.model.named_modules()):
            for own in (module._parameters, module._buffers if module in others else {}):
                for name, tensor in list(own.items()):
                    if tensor is not None and id(tensor) not in mine:
                        del own[name]
                        plain = tensor.detach()
                        vars(module)[name] = self._lowered(plain) if own is module._parameters else plain
                        self.dropped.add(f"{path}.{name}" if path else name)

    def _lowered(self, tensor: Tensor) -> Tensor:
        return tensor if self._lower is None or not tensor.is_floating_point() else tensor.to(self._lower)


def _parameters(modules: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}
