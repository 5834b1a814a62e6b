"""Small programs on a simulated GPU, of which any one allocation can be made to fail.

Each program is run without a limit first. Then it is run once for each of its allocations, which fails: by the size of
the card where the allocation takes memory that no earlier one had, else by the allocator's refusal. What has to hold:
PyTorch's own exception, one refused request in the answer, the roles of the first run, and a retry that succeeds.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, count
from random import Random
from threading import Thread
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memsize.analysis.model_setups import workspaces
from memsize.analysis.program import program_run
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.device.cuda_context import cuda_context
from memsize.records.aggregates import alive
from memsize.records.program import ProgramRun
from memsize.records.roles import Role
from memsize.virtual.driver.caching_allocator import DeviceMemory
from memsize.virtual.guards.child_processes import Settings
from memsize.workloads.program import Program

KEPT: Final = frozenset(("parameter", "buffer", "optimizer state", "gradient", "workspace", "input", "master weight"))
"""Roles of what may be alive once a step was given up: all else belonged to the call that failed."""
BATCH: Final = 1024
FEW: Final = 512
"""Bytes of what a GradScaler keeps."""
_T4: Final = card("t4")
Step = Callable[[int], object]
"""One training step, or one answer, with a batch of that size."""


# -- the programs ------------------------------------------------------------------------------------------------------


def _layers() -> nn.Sequential:
    with torch.device("cuda"):
        return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.LayerNorm(4096), nn.Linear(4096, 1024))


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
        optimizer.step()

    return step


def momentum() -> Step:
    """SGD with momentum and weight decay, one parameter after the other."""
    model = _layers()
    return _trained(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1, foreach=False))


def foreach() -> Step:
    """Adam over lists of tensors, as on CUDA by default."""
    model = _layers()
    return _trained(model, torch.optim.Adam(model.parameters(), amsgrad=True))


def fused() -> Step:
    """Fused AdamW, with gradient clipping."""
    model = _layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch: int) -> None:
        model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def mixed_precision() -> Step:
    """Convolutions under autocast, with a GradScaler."""
    with torch.device("cuda"):
        convolution = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()
        model = nn.Sequential(*convolution, nn.AdaptiveAvgPool2d(16), nn.Flatten(), nn.Linear(2**14, 1024))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), foreach=False), torch.amp.GradScaler("cuda")

    def step(batch: int) -> None:
        optimizer.zero_grad()
        images, classes = torch.randn(batch, 3, 32, 32, device="cuda"), torch.zeros(batch, device="cuda").long()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(images), classes)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def checkpointed() -> Step:
    """Attention layers that are recomputed in the backward."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(512, 4, 2048, batch_first=True) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=number > 0)
            return x

    with torch.device("cuda"):
        model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(batch, 8, 512, device="cuda", requires_grad=True)).mean().backward()
        optimizer.step()

    return step


def two_models() -> Step:
    """A student that learns from a frozen teacher, with gradients of two micro-batches."""
    teacher, student = _layers().requires_grad_(False), _layers()
    optimizer = torch.optim.RMSprop(student.parameters(), momentum=0.9)

    def step(batch: int) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(batch, 1024, device="cuda")
            with torch.no_grad():
                wanted = teacher(x)
            nn.functional.mse_loss(student(x), wanted).backward()
        optimizer.step()

    return step


def cache() -> Step:
    """Tokens one by one, with the keys and values of those before in buffers."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.out = nn.Linear(512, 1536), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
            query, *new = self.project(x).chunk(3, -1)
            past[:] = [torch.cat(pair, 1) for pair in zip(past, new, strict=True)] if past else new
            return self.out(nn.functional.scaled_dot_product_attention(query, *past))  # type: ignore[no-any-return]

    model = Attention().cuda().eval()

    def step(batch: int) -> None:
        past: list[torch.Tensor] = []
        with torch.inference_mode():
            for _ in range(3):
                model(torch.randn(batch, 1, 512, device="cuda"), past)

    return step


def by_hand() -> Step:
    """Two weights of no module, updated without an optimizer."""
    weights = [torch.randn(1024, 1024, device="cuda", requires_grad=True) for _ in range(2)]

    def step(batch: int) -> None:
        x = torch.randn(batch, 1024, device="cuda")
        for weight in weights:
            x = torch.relu(x @ weight)
        x.sum().backward()
        with torch.no_grad():
            for weight in weights:
                weight -= 0.1 * weight.grad
                weight.grad = None

    return step


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
        loss = torch.zeros((), device=x.device)
        for part, gradient in zip(x.chunk(2), of_x.chunk(2), strict=True):
            scores = part @ weight.t()
            loss += scores.sum()
            gradient.copy_(scores @ weight)
            of_weight += scores.t() @ part
        ctx.save_for_backward(of_x, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *losses: torch.Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return of_x.mul_(losses[0]), of_weight.mul_(losses[0])


def fused_loss() -> Step:
    """A loss that computes the gradients of a projection in its forward."""
    model, projection = _layers(), nn.Linear(1024, 2048, bias=False).cuda()
    optimizer = torch.optim.SGD([*model.parameters(), *projection.parameters()], 0.1)

    def step(batch: int) -> None:
        optimizer.zero_grad()
        _FusedLoss.apply(model(torch.randn(batch, 1024, device="cuda")), projection.weight).backward()
        optimizer.step()

    return step


PROGRAMS: Final[dict[str, Callable[[], Step]]] = {
    program.__name__: program
    for program in (
        momentum, foreach, fused, mixed_precision, checkpointed, two_models, cache, by_hand, fused_loss,
    )
}  # fmt: skip


class Mixture:
    """A program put together from random pieces: one or two models, an optimizer, precision, threads, accumulation."""

    def __init__(self, random: Random) -> None:
        self.optimizer = random.choice(OPTIMIZERS)
        self.options = {"foreach": random.choice((None, False, True))} if random.random() < 0.8 else {"fused": True}
        if self.options.get("fused") and self.optimizer not in _FUSED:
            self.options = {}
        self.autocast = random.choice((None, torch.float16, torch.bfloat16))
        self.scaled = self.autocast is torch.float16 and random.random() < 0.7
        self.recomputed = random.random() < 0.3
        self.models = random.choice((1, 2))
        self.backwards = random.choice((1, 1, 2))
        self.in_thread = random.random() < 0.3
        self.clipped = random.random() < 0.3
        self.__name__ = " ".join(f"{name}={value}" for name, value in vars(self).items())

    def __call__(self) -> Step:
        """Make the models and their optimizers, and return a step of all of them."""
        models = [_layers() for _ in range(self.models)]
        kind: Any = getattr(torch.optim, self.optimizer)
        optimizers = [kind(model.parameters(), **self.options) for model in models]
        scaler = torch.amp.GradScaler("cuda", enabled=self.scaled)

        def step(batch: int) -> None:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                for _ in range(self.backwards):
                    _wait_for(lambda model=model: self._loss(model, batch, scaler), self.in_thread)
                if self.clipped:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
            scaler.update()

        return step

    def _loss(self, model: nn.Module, batch: int, scaler: torch.amp.GradScaler) -> None:
        x = torch.randn(batch, 1024, device="cuda")
        with torch.autocast("cuda", self.autocast, enabled=self.autocast is not None):
            y = checkpoint(model, x, use_reentrant=False) if self.recomputed else model(x)
            loss = y.float().square().mean()
        scaler.scale(loss).backward()


OPTIMIZERS: Final = (
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "NAdam",
    "RAdam",
    "Adamax",
    "ASGD",
    "Rprop",
)
_FUSED: Final = frozenset(("SGD", "Adam", "AdamW", "Adagrad"))


def _wait_for(work: Callable[[], None], in_thread: bool) -> None:
    """Do `work`, in a thread of its own if asked to; an exception there is raised here."""
    if not in_thread:
        work()
        return
    errors: list[Exception] = []

    def caught() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error.with_traceback(None))

    thread = Thread(target=caught)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


# -- their runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A program's run: its record, its roles at the end of each storage, and the error that ended it."""

    answer: ProgramRun
    error: BaseException | None
    alive_after: dict[int, Role]
    """The storages that were alive when a step had been given up, before the next."""
    retried: bool


def run(build: Callable[[], Step], refuse: Callable[[DeviceMemory], None] | None, *, size: int, handled: bool) -> Run:
    """Run the program of `build` on a card of `size` bytes. A handler halves the batch and tries again, if `handled`.

    `refuse` is called with the card's memory before.
    """
    where = replace(_T4, bytes=size)
    program = Program("test", Settings(where, AllocatorConfig(), 0), workspaces(where))
    if refuse is not None:
        refuse(program.memory)
    error: BaseException | None = None
    alive_after: dict[int, Role] = {}
    retried = False
    gc.disable()
    try:
        with program.open():
            step: Step | None = None
            batch, done = BATCH, 0
            while done < 2:
                try:
                    step = step or build()
                    step(batch)
                    done += 1
                except torch.OutOfMemoryError:
                    batch //= 2
                    if not handled or not batch:
                        raise
                    retried = True
                else:
                    continue
                alive_after = alive_after or _alive(program)
                if not done or isinstance(build, Mixture):
                    step = None  # Adam's or a scaler's state is incomplete after a failure, on a real GPU too
    except BaseException as failed:
        error = failed
    finally:
        gc.enable()
    return Run(program_run(program, "test", error), error, alive_after, retried)


def _alive(program: Program) -> dict[int, Role]:
    rows = ((reference.index, program.ledger.rows[reference.index]) for reference in program.ledger.live.values())
    return {index: row.role for index, row in rows if row.bytes}


def refusing(number: int) -> Callable[[DeviceMemory], None]:
    """Let the card's memory refuse the request of that number."""

    def refuse(memory: DeviceMemory) -> None:
        take, numbers = memory._allocate, count()

        def allocate(storage: int, request: int) -> None:
            if next(numbers) == number:
                raise torch.OutOfMemoryError(memory._out_of_memory(request))
            take(storage, request)

        memory._allocate = allocate  # type: ignore[method-assign]

    return refuse


@contextmanager
def _reserved_after_each(levels: list[int]) -> Iterator[Callable[[DeviceMemory], None]]:
    def watch(memory: DeviceMemory) -> None:
        take = memory._allocate

        def allocate(storage: int, request: int) -> None:
            take(storage, request)
            memory._count_segments()
            levels.append(memory._stats["reserved_bytes", "all"].current)

        memory._allocate = allocate  # type: ignore[method-assign]

    yield watch


@dataclass(frozen=True)
class Reference:
    """A program's run without a limit, and what was reserved after each of its allocations."""

    build: Callable[[], Step]
    run: Run
    reserved: tuple[int, ...]

    @classmethod
    def of(cls, build: Callable[[], Step]) -> Reference:
        """Run a program on a whole card."""
        levels: list[int] = []
        with _reserved_after_each(levels) as watch:
            reference = run(build, watch, size=_T4.bytes, handled=False)
        assert reference.error is None, reference.error
        return cls(build, reference, tuple(levels))

    @property
    def sizes(self) -> dict[int, int]:
        """For each allocation that takes new memory from the card: the size of a card on which it fails."""
        before = (0, *accumulate(self.reserved, max))
        outside = cuda_context(_T4).low
        return {
            number: outside + level - 1
            for number, (level, most) in enumerate(zip(self.reserved, before, strict=False))
            if level > most
        }


def faults(reference: Reference, number: int, by_size: bool, handled: bool) -> list[str]:
    """Let the allocation of that number fail, and return what is wrong with the run."""
    return [*_faults(reference, number, by_size, handled)]


def _faults(reference: Reference, number: int, by_size: bool, handled: bool) -> Iterator[str]:
    size = reference.sizes[number] if by_size else _T4.bytes
    failed = run(reference.build, None if by_size else refusing(number), size=size, handled=handled)
    answer = failed.answer
    if by_size and not answer.refused and failed.error is None and not failed.retried:
        return  # the allocator made room by giving back what was cached
    if handled and not by_size and (failed.error is not None or not failed.retried):
        yield f"the retry ends in {failed.error!r}"
    if failed.error is not None and type(failed.error) is not torch.OutOfMemoryError:
        yield f"{failed.error!r} in place of torch.OutOfMemoryError"
    if not handled and not str(failed.error).startswith("CUDA out of memory. Tried to allocate "):
        yield f"the message is {failed.error}"
    if not answer.refused or answer.findings[0].code != "run-out-of-memory":
        yield f"the verdict is {answer.findings[0].text()}"
    if answer.ran_out != (failed.error is not None):
        yield f"ran_out is {answer.ran_out} after {failed.error!r}"
    if sum(answer.peak.roles.values()) != answer.peak.requested:
        yield "the roles don't add up"
    yield from _role_faults(reference.run.answer, answer, _event_of(reference.run.answer, number))
    storages = answer.trace.storages
    left = {i: role for i, role in failed.alive_after.items() if role not in KEPT and storages[i].bytes > FEW}
    if left:
        yield f"alive after the step was given up: {left}"


def _event_of(answer: ProgramRun, number: int) -> int:
    """The event of the allocation of that number."""
    return [position for position, event in enumerate(answer.trace.events) if event.delta > 0][number]


_LASTING: Final = frozenset(("parameter", "optimizer state", "gradient", "workspace"))
"""Roles that are known as soon as memory has them. Others depend on what happens to it: whether autograd saves it."""


def _role_faults(reference: ProgramRun, failed: ProgramRun, event: int) -> Iterator[str]:
    """Compare the roles at the moment of failure with those of the run that went on.

    The newest storages may be on their way to the node of autograd that makes them gradients.
    """
    before, after = reference.trace.storages, failed.trace.storages
    live = alive(reference.trace, event - 1) if event else {}
    newest = _newest(reference, event)
    for index, size in live.items():
        expected, role = before[index].role, after[index].role
        undecided = expected not in _LASTING or (expected == "gradient" and index in newest)
        if expected != role and not (undecided and role == "temporary"):
            yield f"storage {index} of {size} bytes, by {before[index].op}, is {role} in place of {expected}"


def _newest(answer: ProgramRun, event: int) -> frozenset[int]:
    made = [entry.storage for entry in answer.trace.events[:event] if entry.delta > 0]
    return frozenset(made[-NEWEST:])


NEWEST: Final = 3
"""How many storages an op of the backward makes before autograd keeps the first as a gradient."""


def trials(reference: Reference) -> Sequence[tuple[int, bool, bool]]:
    """Every allocation, refused with and without a handler, and by the size of the card where that is possible."""
    numbers = range(len(reference.reserved))
    by_size = [(number, True, handled) for number in reference.sizes for handled in (False, True)]
    return [*((number, False, handled) for number in numbers for handled in (False, True)), *by_size]


def main(arguments: Sequence[str] | None = None) -> int:
    """Let every allocation of every program fail, and then some of random ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz.out_of_memory", description=main.__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60, help="how long to go on with random programs (default: 60)"
    )
    parser.add_argument("--seed", default="0", help="where random programs begin")
    parser.add_argument("--only-random", action="store_true", help="leave the others out")
    chosen = parser.parse_args(arguments)
    wrong = 0
    for build in () if chosen.only_random else PROGRAMS.values():
        reference = Reference.of(build)
        wrong += sum(_tell(reference, trial) for trial in trials(reference))
    end = time.monotonic() + chosen.seconds
    for number in count():
        if time.monotonic() > end:
            print(f"{number} random programs")
            return 1 if wrong else 0
        random = Random(f"{chosen.seed}:{number}")
        reference = Reference.of(Mixture(random))
        wrong += sum(
            _tell(reference, trial, f"{chosen.seed}:{number}") for trial in random.sample(trials(reference), 12)
        )
    raise AssertionError


def _tell(reference: Reference, trial: tuple[int, bool, bool], seed: str = "") -> int:
    """Print the faults of a trial, and return how many there are."""
    faulty = faults(reference, *trial)
    for fault in faulty:
        number, by_size, handled = trial
        how = f"{' by size' * by_size}{' handled' * handled}"
        print(f"{seed} {reference.build.__name__}, allocation {number}{how}: {fault}", flush=True)
    return len(faulty)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        raise SystemExit(main())
