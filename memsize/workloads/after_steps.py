"""The rest of a program after its steps: its first evaluation and its first checkpoint.

Both may come thousands of steps later. So the epoch ends when the steps are made: the data loader that fed them has no
more batches, the `Trainer` of transformers, which counts steps, evaluates, saves and stops at once, and Lightning
validates. The next forward of training stops the program. A loader of an evaluation ends after `BATCHES`; what each of
them leaves behind shows what all would. Code of the script that waits for a later step runs at once too
(`WaitingBlocks`).

Known limit: an evaluation without a `torch.utils.data.DataLoader` sees all of its batches.
"""

from __future__ import annotations

import shutil
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import CodeType
from typing import Any, Final

import torch
import torch.utils.data
from torch import nn
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from memsize.errors import causes, first_line
from memsize.processes.patches import Patch, wrapping
from memsize.processes.simulation import Simulation, install_guard, running
from memsize.processes.user_code import users_frames
from memsize.records.aggregates import alive, live_bytes, split_phase
from memsize.records.program import AfterSteps as Record
from memsize.records.trace import Trace
from memsize.virtual.guards.file_guard import NetworkGuard
from memsize.virtual.ledger.gpu_ledger import VirtualLedger
from memsize.virtual.saved_weights import Files
from memsize.workloads.larger_batches import LargerBatches
from memsize.workloads.program_steps import ProgramSteps
from memsize.workloads.waiting_blocks import WaitingBlocks, batches_to_break

BATCHES: Final = 8
"""How many batches an evaluation sees."""
_MOST_FORWARDS: Final = 200
"""How many forwards of root modules without gradients follow the steps: images are sampled, tokens generated."""
_DECIDES: Final = {
    "transformers.trainer_callback": ("DefaultFlowCallback", "on_step_end"),
    "lightning.pytorch.loops.training_epoch_loop": ("_TrainingEpochLoop", "_should_check_val_fx"),
    "pytorch_lightning.loops.training_epoch_loop": ("_TrainingEpochLoop", "_should_check_val_fx"),
}
"""The methods of trainers that decide after a step whether to evaluate, by their modules."""
_PREFETCHING: Final = "accelerate"
"""The package whose loader holds a batch back: one more step follows the end of an epoch (`DataLoaderShard`)."""


@dataclass
class Evaluated:
    """The events before each batch of an evaluation, and how many batches there would be (None: nobody knows)."""

    marks: list[int]
    batches: int | None


class EpochOver(StopIteration):
    """Ends the iteration of a data loader before its time."""


class AfterSteps:
    """The rest of a program once its `steps` are made; `begun` is called when it begins, and `stop` ends the program.

    With `goes_on` false the program stops there. Its own calls are those that a call of `until` made.
    With `searches`, where batches vary in size, one more step has a large one.
    """

    def __init__(
        self,
        ledger: VirtualLedger,
        steps: ProgramSteps,
        files: Files,
        goes_on: bool,
        begun: Callable[[], None],
        stop: Callable[[], None],
        until: CodeType,
        searches: bool,
    ) -> None:
        self.failure: Exception | None = None
        """The error that ended what follows the steps."""
        self.evaluations: list[Evaluated] = []
        self.checkpoints: list[range] = []
        """The numbers of events while a state was collected for one."""
        self._ledger = ledger
        self._steps = steps
        self._files = files
        self._goes_on = goes_on
        self._begun = begun
        self._stop = stop
        self._has_begun = False
        self._followed = set[str]()
        self._patches = ExitStack()
        self._files_before = set[str]()
        self._training = weakref.WeakSet[Any]()
        """The iterators of loaders that had a batch for the steps."""
        self._evaluating = weakref.WeakKeyDictionary[Any, Evaluated]()
        self._forwards: list[int] = []
        """The events before each forward without gradients that followed the steps."""
        self._steps_to_come = 0
        self._waiting = WaitingBlocks(self._arrived, ledger.evaluator.notes.setdefault, lambda: steps.done)
        self._batches = LargerBatches(ledger.evaluator.notes.setdefault, lambda stage: steps.progress(stage))
        self._searches = searches
        if goes_on:
            steps.completed = lambda: self._waiting.watch(until)

    # -- when to stop -------------------------------------------------------------------------------------------------

    def before_forward(self, training: bool) -> bool:
        """Stop the program at the first forward of `training` after its steps, or after too many others. Return whether
        the steps are over.
        """
        if not self._steps.over:
            return False
        self._begin()
        self._forwards += [] if training else [len(self._ledger.events)]
        if not self._goes_on or (training and not self._steps_to_come) or len(self._forwards) > _MOST_FORWARDS:
            self._stop()
        return True

    def before_step(self) -> None:
        """Stop the program at the first optimizer step after all those that were asked for."""
        if self._steps.over:
            self._begin()
            if not self._steps_to_come:
                self._stop()
            self._steps_to_come -= 1

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._files_before = set(self._files.new)
            if self._goes_on and (simulation := running()) is not None:
                self._disconnect(simulation)
                self._patches.enter_context(simulation.patches.applied(self._gathering()))
            self._begun()

    def _arrived(self) -> None:
        self._begin()
        self._steps.progress("every step is made, running what waits for a later one")

    def _disconnect(self, simulation: Simulation) -> None:
        """Refuse connections to other machines: what a program uploads at its end are stand-ins here."""
        install_guard(NetworkGuard)
        self._patches.enter_context(simulation.with_part(NetworkGuard, NetworkGuard("a program after its steps")))
        hub = sys.modules.get("huggingface_hub.constants")
        if hasattr(hub, "HF_HUB_OFFLINE"):  # which also holds for connections that are open
            self._patches.enter_context(simulation.patches.applied([(hub, "HF_HUB_OFFLINE", True)]))

    def settled(self, error: BaseException) -> BaseException | None:
        """The error that ended the program; None for one after its steps, which is noted, unless memory ran out.

        What is computed from stand-ins may fail where a real GPU's numbers would not.
        """
        if not self._has_begun or not isinstance(error, Exception) or _of_memory(error):
            return error
        if not _by_end_of_epoch(error):
            self.failure = error
        return None

    def close(self) -> None:
        """Remove what was written after the steps: a real run would write it later, and might resume from it.

        Hidden folders hold caches, which are left alone.
        """
        self._waiting.close()
        self._patches.close()
        if self._files.allowed or not self._has_begun:
            return
        for path in map(Path, self._files.new - self._files_before):
            if not any(part.startswith(".") for part in path.parts):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):
                        path.unlink()

    def record(self, trace: Trace, failing_line: Callable[[BaseException], str | None]) -> Record | None:
        """The peaks of what followed the steps, and what each batch of an evaluation leaves; None where nothing did."""
        ends = self._steps.ends
        end = ends[-1] if ends else 0
        levels = live_bytes(trace.events)
        evaluating = [levels[i] for i in range(end, len(levels)) if _is_evaluation(trace, i)]
        collecting = [levels[i - 1] for numbers in self.checkpoints for i in numbers if 0 < i <= len(levels)]
        if not (evaluating or collecting or self.failure) or not end:
            return None
        graph_bytes, graph_line = _graph(trace, levels, end)
        record = Record(
            max(levels[:end]),
            max(evaluating, default=None),
            max(collecting, default=None),
            graph_bytes=graph_bytes,
            graph_line=graph_line,
        )
        if (error := self.failure) is not None:
            failure = f"{type(error).__name__}: {first_line(error)}"
            record = record._replace(failure=failure, failed_at=failing_line(error))
        by_hand = Evaluated(self._forwards, None)  # in a loop without a loader, each forward has a batch of its own
        evaluated = max(self.evaluations, key=lambda evaluated: len(evaluated.marks), default=by_hand)
        if not evaluating or (evaluated is by_hand and not _each_leaves_some(trace, levels, by_hand.marks)):
            return record
        batches = min(len(evaluated.marks), BATCHES)
        per_batch, line = _growth(trace, levels, evaluated.marks)
        return record._replace(batches=batches, of=evaluated.batches, per_batch=per_batch, line=line)

    # -- what is replaced ---------------------------------------------------------------------------------------------

    def replacements(self) -> Iterator[Patch]:
        """Yield the patches that end loaders early, and those by which a checkpoint is a phase."""
        if self._goes_on:
            yield wrapping(_BaseDataLoaderIter, "__next__", self._next_batch)
            for owner in (nn.Module, Optimizer):
                yield wrapping(owner, "state_dict", self._checkpoint)

    def _gathering(self) -> Iterator[Patch]:
        """Yield the patches of what gathers a whole state from its shards, where the program has imported it."""
        module = sys.modules.get("torch.distributed.checkpoint.state_dict")
        for name in ("_get_model_state_dict", "_get_optim_state_dict"):
            if hasattr(module, name):
                yield wrapping(module, name, self._checkpoint)

    def _next_batch(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        if not self._steps.over:
            self._training.add(iterator)
            self._follow_trainers()
            batch = original(iterator)
            self._batches.seen(iterator, batch)
            return batch
        if iterator in self._training:
            prefetches = next(users_frames(libraries=True)).f_globals.get("__package__") == _PREFETCHING
            waits = self._waiting.needs_batch()
            if self._searches and (batch := self._batches.search(original, iterator)) is not None:
                self._steps_to_come = 1 + prefetches  # with the batch that was held back
                return batch
            if waits:
                return original(iterator)
            self._begin()
            self._training.discard(iterator)
            self._steps_to_come = self._steps_to_come or int(prefetches)
            raise EpochOver
        self._count_batch(iterator)
        return original(iterator)

    def _count_batch(self, iterator: Any) -> None:
        """Note that an evaluation takes a batch; raise `EpochOver` after the last that it sees."""
        self._begin()
        if iterator not in self._evaluating:
            self._evaluating[iterator] = Evaluated([], _length(iterator))
            self.evaluations.append(self._evaluating[iterator])
        evaluated = self._evaluating[iterator]
        evaluated.marks.append(len(self._ledger.events))
        if len(evaluated.marks) > BATCHES:
            loop = next(users_frames(), None)
            more = None if loop is None else batches_to_break(loop)
            if more is not None:
                evaluated.batches = min(evaluated.batches or BATCHES + more, BATCHES + more)
            raise EpochOver
        self._steps.progress(f"every step is made, batch {len(evaluated.marks)} of what follows")

    def _follow_trainers(self) -> None:
        """Replace, of the trainers that are imported, what decides at the end of a step whether to evaluate."""
        simulation = running()
        for name, (owner, method) in _DECIDES.items():
            if name in sys.modules and name not in self._followed and simulation is not None:
                self._followed.add(name)
                ends = self._end_of_lightnings_step if "lightning" in name else self._end_of_trainers_step
                patch = wrapping(getattr(sys.modules[name], owner), method, ends)
                self._patches.enter_context(simulation.patches.applied([patch]))

    def _checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._steps.over:
            return original(*args, **kwargs)
        self._begin()
        before = len(self._ledger.events)
        with self._ledger.clock.during("checkpoint"):
            state = original(*args, **kwargs)
        self.checkpoints.append(range(before, len(self._ledger.events) + 1))
        return state

    def _end_of_trainers_step(
        self, original: Callable[..., Any], callback: Any, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Any:
        control = original(callback, args, state, control, **kwargs)
        if self._at_end():
            control.should_evaluate = control.should_evaluate or args.eval_strategy != "no"
            control.should_save = control.should_save or args.save_strategy != "no"
            control.should_training_stop = True
        return control

    def _end_of_lightnings_step(self, original: Callable[..., bool], loop: Any, *args: Any) -> bool:
        """Validate after the steps, once; the epoch that ends then is not one that Lightning validates after."""
        if original(loop, *args):
            return True
        validates = loop.trainer.enable_validation and not self._evaluating and self._at_end()
        return bool(validates)

    def _at_end(self) -> bool:
        """Whether all steps are made, and none with a larger batch is to come."""
        searches = self._searches and self._batches.vary()
        if at_end := self._steps.over and not self._steps_to_come and not searches:
            self._begin()
        return at_end


def _length(iterator: Any) -> int | None:
    """How many batches the iterator of a loader has; None where its dataset does not know."""
    with suppress(TypeError):
        return len(iterator._index_sampler)
    return None


def _of_memory(error: BaseException) -> bool:
    return any(isinstance(cause, torch.OutOfMemoryError) for cause in causes(error))


def _by_end_of_epoch(error: BaseException) -> bool:
    """Whether a loop could not do without the batches that it did not get."""
    return any(isinstance(cause, EpochOver) for cause in causes(error))


def _is_evaluation(trace: Trace, index: int) -> bool:
    return split_phase(trace.phases[trace.events[index].phase])[0] == "evaluation"


def _graph(trace: Trace, levels: Sequence[int], end: int) -> tuple[int, str | None]:
    """The activations at the peak of an evaluation after event `end`, and the line that made most of them; none where a
    backward follows, which uses them.
    """
    evaluating = [index for index in range(end, len(levels)) if _is_evaluation(trace, index)]
    phases = {trace.events[index].phase for index in range(end, len(levels))}
    if not evaluating or any(split_phase(trace.phases[phase])[0] == "backward" for phase in phases):
        return 0, None
    peak = max(evaluating, key=levels.__getitem__)
    born = {event.storage: index for index, event in enumerate(trace.events) if event.delta > 0}
    sizes = Counter[str | None]()
    for storage, size in alive(trace, peak).items():
        if trace.storages[storage].role == "activation" and born[storage] >= end:
            sizes[trace.line_of(storage)] += size
    return sizes.total(), max(sizes, key=sizes.__getitem__, default=None)


def _each_leaves_some(trace: Trace, levels: Sequence[int], marks: Sequence[int]) -> bool:
    """Whether half of the growth between any two forwards, at least, is memory that was allocated between them.

    A KV cache that is copied to a larger one for each token grows too, but only the last copy is alive.
    """
    if len(marks) < 2 or not 0 < marks[-1] <= len(levels):
        return False
    living = alive(trace, marks[-1] - 1)
    left = [0] * len(levels)
    for index, event in enumerate(trace.events):
        if event.delta > 0 and event.storage in living:
            left[index] = event.delta
    return all(
        2 * sum(left[first:second]) >= levels[second - 1] - levels[first - 1]
        for first, second in pairwise(marks[1:])
        if first > 0
    )


def _growth(trace: Trace, levels: Sequence[int], marks: Sequence[int]) -> tuple[int, str | None]:
    """The bytes that each batch of an evaluation leaves behind, from the second on, and the line that makes most."""
    at = [levels[mark - 1] for mark in marks if 0 < mark <= len(levels)][1:]
    if len(at) < 3 or any(later <= earlier for earlier, later in pairwise(at)):
        return 0, None
    born = {event.storage: index for index, event in enumerate(trace.events) if event.delta > 0}
    sizes = Counter[str | None]()
    for storage, size in alive(trace, marks[len(at)] - 1).items():
        if born[storage] >= marks[1]:
            sizes[trace.line_of(storage)] += size
    per_batch = int(median(later - earlier for earlier, later in pairwise(at)))
    return per_batch, max(sizes, key=sizes.__getitem__, default=None)
