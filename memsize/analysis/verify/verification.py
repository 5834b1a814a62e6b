"""Compare a step's prediction with the same step on a GPU: run here, or measured before and read from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import nn

from memsize.analysis.model_setups import workspaces_of
from memsize.analysis.runner import Edit, Runner
from memsize.analysis.verify.alignment import align
from memsize.analysis.verify.cuda_memory import CudaMemory
from memsize.analysis.verify.measure import SEED, MeasurementPlan, materialized_setup, measure
from memsize.device.allocation_events import CONVOLUTIONS, dispensable, requests, variants
from memsize.device.allocator_config import AllocatorConfig
from memsize.device.cards import card
from memsize.device.cuda_context import cuda_context
from memsize.device.replay import replay_within
from memsize.errors import InputError
from memsize.kernels.cudnn.installed import installed
from memsize.kernels.cudnn.plans import Convolution, Plans
from memsize.kernels.semantics import CUDNN
from memsize.model.input_tensors import ModelInputs, input_tensors
from memsize.processes.patches import collector_paused
from memsize.records.aggregates import live_bytes, split_phase
from memsize.records.columns import distinct
from memsize.records.gpu import DEFAULT_GPU, Card, Interval
from memsize.records.measurement import (
    ConvolutionWorkspace,
    MeasuredWorkload,
    Measurement,
    OpLocation,
    Peaks,
    SoftwareStack,
    log_of,
)
from memsize.records.trace import Trace
from memsize.records.verification import Prediction, Verification, VerifiedRun
from memsize.spec.scenario import Scenario
from memsize.spec.stack import INSTALLED, Stack
from memsize.spec.training import Training
from memsize.tracing.ledger import Workspaces
from memsize.tracing.run import GpuSetup
from memsize.units import dotted_cudnn
from memsize.workloads.training import step_workload


def predict(
    trace: Trace,
    stack: SoftwareStack,
    workspaces: tuple[ConvolutionWorkspace, ...] = (),
    *,
    greediest: Trace | None = None,
) -> Prediction:
    """Predict the memory of `trace` on a GPU with the software `stack`; `workspaces` are those that cuDNN named for
    convolutions.

    `greediest` is the same run with the most that `torch.backends.cudnn.benchmark` may allocate for each convolution:
    which plan the benchmark chooses depends on timing.
    """
    config = AllocatorConfig.parse(stack.allocator)
    outside = cuda_context(_card(stack), stack_of(stack), distinct(trace.events, "op") - {""})
    optional = dispensable(trace)
    peaks: list[Peaks] = []
    for events in variants(trace) if greediest is None else [requests(trace, 0), requests(greediest)]:
        bounded = replay_within(
            events, config=config, total=stack.total, outside=outside, streams=events.streams, optional=optional
        )
        for replay in (bounded.with_least_overhead, bounded.with_most_overhead):
            peaks.append(Peaks(replay.requested.bytes, replay.allocated.bytes, replay.reserved.bytes))
    least, most = Peaks.least(peaks), Peaks.most(peaks)
    phases = [split_phase(phase) for phase in trace.phases]
    last = max((step for _, step in phases), default=0)
    # The last step, or all but the setup where there are no steps.
    is_last = [step == last if last else name != "setup" for name, step in phases]
    first = next((i for i, event in enumerate(trace.events) if is_last[event.phase]), len(trace.events))

    def events_of_last_step() -> Iterator[tuple[int, int, OpLocation]]:
        begun: set[int] = set()
        for event in trace.events[first:]:
            if event.delta > 0:
                begun.add(event.storage)
            layer = trace.layers[event.layer].path if event.layer >= 0 else None
            storage = event.storage if event.storage in begun else -1 - event.storage
            yield storage, event.delta, OpLocation(phases[event.phase][0], layer, event.op)

    return Prediction(
        least=least,
        most=most,
        device=Interval(least.reserved + outside.low, most.reserved + outside.high),
        steady=max(list(live_bytes(trace.events))[max(first - 1, 0) :], default=0),
        log=log_of(events_of_last_step()),
        convolutional=convolves(trace),
        workspaces=workspaces,
        assumptions=trace.assumptions,
        notes=trace.notes,
    )


def _card(stack: SoftwareStack) -> Card:
    return Card(stack.gpu, stack.capability, stack.total, "measured")


def stack_of(measured: SoftwareStack) -> Stack:
    """The releases of a measurement; those that are installed where their rules are not known. PyTorch writes ``LAZY``
    into its environment also where CUDA loads eagerly.
    """
    eager = (measured.module_loading or "").upper() == "EAGER"
    with suppress(InputError):
        return Stack(measured.torch, measured.cuda, "eager" if eager else None)
    return INSTALLED


def convolves(trace: Trace) -> bool:
    return any(event.op in CONVOLUTIONS for event in trace.events)


_NOT_COMPARED = ("model", "seed", "benchmark")
"""Fields of a workload that may differ between a file and the command: the target may have another path here."""


@dataclass(frozen=True)
class Experiment:
    """A run that is both predicted and measured: training steps, or one inference without `training`.

    `mode` is the model's training flag; `edits` change the model that is predicted.
    """

    name: str
    model: nn.Module
    inputs: ModelInputs
    mode: bool
    scenario: Scenario
    training: Training | None
    edits: tuple[Edit, ...] = ()

    def workload(self, benchmark: bool = False) -> MeasuredWorkload:
        """The experiment as files of measurements record it."""
        training = self.training
        optimizer = training and training.optimizer
        loss = training and training.loss
        return MeasuredWorkload(
            model=self.name,
            inputs=tuple(f"{tensor.name}={tensor.spec}" for tensor in input_tensors(self.inputs.call())),
            batch_size=self.inputs.batch_size,
            scenario=self.scenario.name,
            optimizer=getattr(optimizer, "__name__", optimizer),  # type: ignore[arg-type]
            loss=getattr(loss, "__name__", loss),  # type: ignore[arg-type]
            training=self.mode,
            steps=training.steps if training else 1,
            accumulate=training.gradient_accumulation_steps if training else 1,
            ema=bool(training and training.ema),
            seed=SEED,
            benchmark=benchmark,
        )

    def trace(self, stack: SoftwareStack, plans: Plans | None = None) -> Trace:
        """The simulated run on a GPU of `stack`; convolutions take the workspaces that `plans` give."""
        runner = self._runner(_card(stack))
        with collector_paused():
            taken = workspaces(stack, plans or Plans(stack.capability, installed))
            gpu = GpuSetup(stack.capability, taken, cudnn=stack.cudnn or CUDNN)
            on_gpu = partial(replace, gpu=gpu)
            return runner.run(step_workload(self.training), self.scenario, edits=(on_gpu, *self.edits))

    def predict(
        self, stack: SoftwareStack, *, benchmark: bool = False, recorded: Sequence[ConvolutionWorkspace] = ()
    ) -> Prediction:
        """The prediction of the experiment on a GPU of `stack`.

        `recorded` are the workspaces that cuDNN named when a measurement was made: of the first plans, or with
        `benchmark` of the greediest. Without them the cuDNN of this machine is asked, if there is one.
        """
        recorded_workspaces = {Convolution.parse(text): size for text, size in recorded}
        release = None if stack.cudnn is None else dotted_cudnn(stack.cudnn)
        plans = Plans(stack.capability, installed, recorded=recorded_workspaces, release=release, greedy=benchmark)
        trace = self.trace(stack, plans)
        if not benchmark:
            return predict(trace, stack, _queried(plans))
        return predict(self.trace(stack), stack, _queried(plans), greediest=trace)

    def plan(self, device: torch.device, *, benchmark: bool = False, track: bool = True) -> MeasurementPlan:
        """How the experiment is run for real on `device`."""
        build = partial(materialized_setup, self._runner(), self.scenario, device)
        return MeasurementPlan(self.workload(benchmark), build=build, training=self.training, track=track)

    def _runner(self, gpu: Card | None = None) -> Runner:
        return Runner(self.name, model=self.model, inputs=self.inputs, training=self.mode, gpu=gpu or card(DEFAULT_GPU))


def workspaces(stack: SoftwareStack, plans: Plans | None = None) -> Workspaces:
    """The workspaces of cuBLAS, cuBLASLt and cuDNN with the release and the settings of `stack`."""
    return workspaces_of(_card(stack), stack.torch, plans, stack.cublas_config)


def _queried(plans: Plans) -> tuple[ConvolutionWorkspace, ...]:
    return tuple(
        ConvolutionWorkspace(str(convolution), size)
        for convolution, size in plans.answers.items()
        if convolution not in plans.estimated
    )


def verify_step(experiment: Experiment, memory: CudaMemory, progress: Callable[[str], None]) -> Verification:
    """Run the experiment on the device of `memory`, with convolutions also under cuDNN's benchmark, and compare.

    Raises what `measure` raises.
    """
    progress("predicting")
    stack = memory.stack()
    usual = experiment.predict(stack)
    predictions = {False: usual}
    if usual.convolutional:
        predictions[True] = experiment.predict(stack, benchmark=True)
    runs: list[VerifiedRun] = []
    for benchmark, prediction in predictions.items():
        progress(f"running on {memory.device}{', cudnn.benchmark on' if benchmark else ''}")
        measurement = measure(experiment.plan(memory.device, benchmark=benchmark), memory)
        runs.append(VerifiedRun(replace(measurement, workspaces=prediction.workspaces), prediction))
    return verification_of(tuple(runs))


def verify_measurements(experiment: Experiment, measurements: Sequence[Measurement]) -> Verification:
    """Compare measurements with today's prediction for the GPU and software that they were made on.

    Raises `InputError` where they are of another workload.
    """
    workload = experiment.workload()
    for measurement in measurements:
        for field in fields(MeasuredWorkload):
            was, wanted = getattr(measurement.workload, field.name), getattr(workload, field.name)
            if field.name not in _NOT_COMPARED and was != wanted:
                raise InputError(
                    f"the measurement is of another run: its {field.name} is {was!r}, here it is {wanted!r}"
                )
    runs: list[VerifiedRun] = []
    for seen in measurements:
        prediction = experiment.predict(seen.stack, benchmark=seen.workload.benchmark, recorded=seen.workspaces)
        runs.append(VerifiedRun(seen, prediction))
    return verification_of(tuple(runs))


def verification_of(runs: tuple[VerifiedRun, ...]) -> Verification:
    """The verification of `runs`, with the allocations of the first one's last step aligned."""
    measured = runs[0].measurement.log
    return Verification(runs, alignment=None if measured is None else align(runs[0].prediction.log, measured))
