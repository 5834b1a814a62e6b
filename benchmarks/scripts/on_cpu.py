"""`python -m benchmarks.scripts.on_cpu [NAME …]`: predictions of scripts beside real runs on the CPU.

The third step is compared, allocation by allocation. The real run makes CUDA's decisions where the CPU has kernels for
them, as in `benchmarks.cpu_truth`, and so has no workspaces and none of what CUDA's kernels take inside. A script that
asks for a GPU gets the CPU, and NCCL is gloo. Left out are copies of a batch to the GPU, which a CPU does not make, and
what data loaders and `torch.tensor` make, which lies on the host of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Final

import torch
from tabulate import tabulate
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data.dataloader import _BaseDataLoaderIter

import memsize
from benchmarks.cpu_truth import kernels_of_both, no_scratch
from benchmarks.scripts.data import Maker
from benchmarks.scripts.recipe import Recipe
from benchmarks.scripts.recipes import RECIPES
from benchmarks.scripts.runner import environment, prepared
from benchmarks.truth.standin import HostApart
from memsize.analysis.verify.alignment import align
from memsize.cuda.cuda_semantics import cuda_semantics
from memsize.processes.patches import assigned
from memsize.records.aggregates import split_phase
from memsize.records.measurement import OpLocation, log_of
from memsize.records.trace import Event, Trace
from memsize.records.verification import Alignment
from memsize.tracing.run import calls_seen
from tests.gloo import sharding_patches

STEP: Final = 3
_SMALL: Final = 64
"""Bytes up to which an allocation is left out: counters and numbers, most of which lie on the host of a GPU."""
_WRAPPED: Final = "_wrap_tensor_autograd"
"""The storage of an `AsyncCollectiveTensor` is nobody's memory."""
_COPIES: Final = ("_to_copy", "copy_")
Events = list[tuple[int, int, OpLocation]]


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe and how it is started on the CPU, where its own command doesn't. `command` takes the place of the
    recipe's where that is too large.
    """

    name: str
    on_cpu: str = ""
    command: str = ""
    gpus: int = 0
    """With `gpus`, the script asks for its GPUs and gets the CPU, in so many processes."""
    data: tuple[Maker, ...] = ()
    """What only the real run needs."""


# -- one process -------------------------------------------------------------------------------------------------------


class CpuForCuda(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_cpu, args[1:]))
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return func(*args, **kwargs)


def _cpu(device: Any) -> Any:
    is_gpu = isinstance(device, (str, torch.device)) and str(device).startswith(("cuda", "cpu"))
    return torch.device("cpu") if is_gpu else device


@contextmanager
def _cpu_for_gpus(count: int) -> Iterator[None]:
    """While open, a script that asks for GPUs is answered that there are so many, and gets the CPU."""
    join, wrap = distributed.init_process_group, DistributedDataParallel.__init__

    def joined(backend: Any = None, *args: Any, **options: Any) -> None:
        join("gloo", *args, **{**options, "device_id": None})

    def wrapped(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        wrap(self, module, **options)

    answers: Mapping[Any, Mapping[str, Any]] = {
        torch.accelerator: {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "current_accelerator": lambda *_, **__: torch.device("cpu"),
            "device_index": lambda index: nullcontext(),
        },
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: count,
            "set_device": lambda device: None,
            "current_device": lambda: 0,
            "synchronize": lambda device=None: None,
        },
        nn.Module: {"cuda": lambda self, device=None: self},
        distributed: {"init_process_group": joined},
        DistributedDataParallel: {"__init__": wrapped},
    }
    with ExitStack() as stack:
        for owner, functions in answers.items():
            for name, function in functions.items():
                stack.enter_context(assigned(owner, name, function))
        stack.enter_context(CpuForCuda())
        yield


@contextmanager
def _loaders_unseen() -> Iterator[None]:
    """While open, what data loaders do in this process is not recorded."""
    following = _BaseDataLoaderIter.__next__

    def unseen(self: Any) -> Any:
        with _disable_current_modes():
            return following(self)

    with assigned(_BaseDataLoaderIter, "__next__", unseen):
        yield


def real(command: Sequence[str], gpus: int = 0) -> Events:
    """The events of the last step of a script, or of ``-m`` and a module, that runs for real."""
    ledger, ends = HostApart("cpu"), list[int]()

    def after_step(*_: Any) -> None:
        ends.append(len(ledger.events))
        if len(ends) == STEP:
            raise SystemExit

    torch.set_num_threads(1)
    is_module, script = command[0] == "-m", command[command[0] == "-m"]
    with ExitStack() as stack, suppress(SystemExit):
        for region in (kernels_of_both(False), no_scratch(), cuda_semantics(stands_for=("cpu",)), _loaders_unseen()):
            stack.enter_context(region)
        for owner in (_foreach_utils, optimizer):  # optimizers and clipping take lists of tensors, as on CUDA
            stack.enter_context(assigned(owner, "_get_foreach_kernels_supported_devices", lambda: ["cpu"]))
        if gpus:
            stack.enter_context(_cpu_for_gpus(gpus))
        stack.callback(optimizer.register_optimizer_step_post_hook(after_step).remove)
        stack.enter_context(assigned(sys, "argv", list(command[is_module:])))
        stack.enter_context(assigned(sys, "path", [str(Path.cwd() if is_module else Path(script).parent), *sys.path]))
        stack.enter_context(sharding_patches(ledger))
        stack.enter_context(calls_seen(ledger))
        stack.enter_context(ledger)
        (runpy.run_module if is_module else runpy.run_path)(script, run_name="__main__")
    wrappers = {event.storage for event in ledger.events if event.op == _WRAPPED}
    return _located(event for event in ledger.events[ends[-2] : ends[-1]] if event.storage not in wrappers)


def predicted(command: Sequence[str], gpus: int = 0) -> Events:
    """The events of the same step as memsize predicts them, without workspaces and copies of inputs."""
    is_module = command[0] == "-m"
    with kernels_of_both(False), no_scratch():
        run = memsize.run(
            command[is_module],
            command[is_module + 1 :],
            gpu="a100",
            module=is_module,
            training_only=True,
            gpus=gpus or None,
        )
    return last_step((run.runs[0] if isinstance(run, memsize.RankRuns) else run).trace)


def last_step(trace: Trace) -> Events:
    """Return the events of the third step up to the end of its update, without workspaces and copied inputs."""
    phases = [split_phase(phase) for phase in trace.phases]
    apart = {
        number
        for number, storage in enumerate(trace.storages)
        if storage.role == "workspace" or (storage.role == "input" and storage.op in _COPIES)
    }
    in_step = [number for number, event in enumerate(trace.events) if phases[event.phase][1] == STEP]
    end = max(number for number in in_step if phases[trace.events[number].phase][0] != "step") + 1
    return _located(event for event in trace.events[in_step[0] : end] if event.storage not in apart)


def _located(events: Iterable[Event]) -> Events:
    """What is not small. Storages that were there before are below 0; what one op makes, and what is freed at one
    moment, is in the order of sizes: each device has its own.
    """
    begun: set[int] = set()
    located: Events = []
    for storage, delta, _, _, op in events:
        if abs(delta) > _SMALL:
            if delta > 0:
                begun.add(storage)
            located.append((storage if storage in begun else -1 - storage, delta, OpLocation("", None, op)))
    together = groupby(located, lambda event: event[2] if event[1] > 0 else None)
    return [event for _, alike in together for event in sorted(alike, key=lambda event: event[1])]


# -- both, side by side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScriptComparison:
    """Both logs of one script's step, and its peaks above the step's start."""

    name: str
    alignment: Alignment
    predicted_peak: int
    real_peak: int

    @property
    def differences(self) -> Counter[str]:
        return Counter(
            f"{difference.kind}: {difference.place.op} ({difference.predicted or difference.real:,} B)"
            for difference in self.alignment.differences
        )


def compared(name: str, predicted: Events, real: Events) -> ScriptComparison:
    """Compare the two logs of a step."""
    peaks = [max(accumulate(delta for _, delta, _ in events), default=0) for events in (predicted, real)]
    return ScriptComparison(name, align(log_of(predicted), log_of(real)), *peaks)


def compare(case: Case, sources: Path, scratch: Path) -> ScriptComparison:
    """Run both in processes of their own, in the folder of the recipe."""
    recipe = next(recipe for recipe in RECIPES if recipe.name == case.name)
    here = prepared(recipe, sources / recipe.repository.partition("/")[2].partition("@")[0] / recipe.folder, scratch)
    for make in case.data:
        make(here)
    command = case.command or recipe.command
    logs = [here.parent / f"{kind}.json" for kind in ("predicted", "real")]
    _wait([_process("predicted", logs[0], case.gpus, command, recipe, here)])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "WORLD_SIZE": str(case.gpus)}
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(case.gpus)] or [{}]
    others = [Path(os.devnull)] * (len(ranks) - 1)
    in_cpu = case.on_cpu or command
    _wait(
        [
            _process("real", log, case.gpus, in_cpu, recipe, here, rank)
            for rank, log in zip(ranks, [logs[1], *others], strict=True)
        ]
    )
    return compared(case.name, *(_events(log) for log in logs))


def _process(
    kind: str, log: Path, gpus: int, command: str, recipe: Recipe, here: Path, more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with (here.parent / f"{kind}.txt").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--one", kind, str(log), str(gpus), *command.split()],
            cwd=here,
            env={**environment(recipe, here), "PYTHONSAFEPATH": "1", **(more or {})},
            stdout=output,
            stderr=output,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.wait():
            raise RuntimeError(f"{process.args} failed")


def _events(log: Path) -> Events:
    return [(storage, delta, OpLocation("", None, op)) for storage, delta, op in json.loads(log.read_text())]


def line(comparison: ScriptComparison) -> list[str]:
    """One row of the table."""
    seen = comparison.alignment
    differing = "; ".join(f"{count} × {text}" for text, count in comparison.differences.items())
    counts = [f"{count:,}" for count in (seen.predicted, seen.real, seen.matched)]
    peaks = [f"{comparison.real_peak:,} B", f"{comparison.predicted_peak - comparison.real_peak:+,} B"]
    return [comparison.name, *counts, *peaks, differing or "nothing"]


def _resnet(here: Path) -> None:
    """Random weights where torchvision looks for those that it has downloaded."""
    from torchvision.models import resnet50

    folder = here.parent / "torch/hub/checkpoints"
    folder.mkdir(parents=True)
    torch.save(resnet50().state_dict(), folder / "resnet50-0676ba61.pth")


_TENSOR_PARALLEL: Final = "examples/distributed/tensor_parallelism"
CASES: Final = (
    Case("examples/mnist", "main.py --no-accel"),
    Case("examples/distributed/FSDP2 example", gpus=2),
    Case(f"{_TENSOR_PARALLEL} tensor_parallel_example", gpus=2),
    Case(f"{_TENSOR_PARALLEL} sequence_parallel_example", gpus=2),
    Case("pytorch_geometric link_pred"),
    Case("pytorch_geometric autoencoder", command="autoencoder.py --epochs 5"),
    Case("cleanrl pqn", "cleanrl/pqn.py --no-cuda"),
    Case("cleanrl c51", "cleanrl/c51.py --learning-starts 200 --no-cuda"),
    Case("MONAI unet"),
    Case(
        "detr",
        "main.py --coco_path coco --batch_size 1 --num_workers 1 --device cpu",
        "main.py --coco_path coco --batch_size 1 --num_workers 1",
        data=(_resnet,),
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.partition(": ")[2])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to compare, such as 'trl *' (default: all)")
    parser.add_argument("--sources", type=Path, required=True, help="the folder with the repositories")
    parser.add_argument("--scratch", type=Path, help="where copies, data and outputs are left (default: nowhere)")
    chosen = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            if not chosen.names or any(fnmatch(case.name, name) for name in chosen.names):
                rows.append(line(compare(case, chosen.sources, chosen.scratch or Path(temporary))))
                print(*rows[-1], sep=" | ", flush=True)
    titles = (
        "script",
        "predicted allocations",
        "real ones",
        "the same",
        "peak over the start",
        "predicted",
        "what differs",
    )
    print(tabulate(rows, titles, "github", disable_numparse=True))


def one(kind: str, log: str, gpus: str, *command: str) -> None:
    """One of the two, in this process: write its events to the file `log`."""
    events = {"predicted": predicted, "real": real}[kind](command, int(gpus))
    Path(log).write_text(json.dumps([(storage, delta, place.op) for storage, delta, place in events]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(*sys.argv[2:])
    else:
        main()
