"""An experiment: a model, its input, scenario and training, from which both the prediction and the real run come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from memsize.analysis.runner import Runner
from memsize.analysis.verify.materialized import realized
from memsize.analysis.verify.prediction import predicted
from memsize.analysis.verify.running import SEED, Plan
from memsize.cuda.convolution import Convolutions
from memsize.cuda.cudnn.convolution import Convolution
from memsize.cuda.cudnn.library import installed
from memsize.cuda.cudnn.plans import Plans
from memsize.cuda.semantics import CUDNN
from memsize.device.workspace import cublas_workspace, cublaslt_workspace
from memsize.internals.isolation import collector_paused
from memsize.model.inputs import ModelInputs, input_tensors
from memsize.records.gpu import Card
from memsize.records.measurement import MeasuredWorkload, Stack, Workspace
from memsize.records.trace import Trace
from memsize.records.verification import Prediction
from memsize.spec.scenario import Scenario
from memsize.spec.training import Training
from memsize.tracing.ledger import Workspaces
from memsize.tracing.run import gpu_semantics
from memsize.units import dotted_cudnn
from memsize.workloads.training import step_workload


@dataclass(frozen=True)
class Experiment:
    """What is predicted and run. `mode` is the training flag of the model; without a `training` it is one inference."""

    name: str
    model: nn.Module
    inputs: ModelInputs
    mode: bool
    scenario: Scenario
    training: Training | None

    def workload(self, benchmark: bool = False) -> MeasuredWorkload:
        """The experiment as a measurement's file has it."""
        training = self.training
        optimizer = training and training.optimizer
        loss = training and training.loss
        return MeasuredWorkload(
            model=self.name,
            inputs=tuple(f"{each.name}={each.spec}" for each in input_tensors(self.inputs.call())),
            batch_size=self.inputs.batch_size,
            scenario=self.scenario.name,
            optimizer=getattr(optimizer, "__name__", optimizer),  # type: ignore[arg-type]
            loss=getattr(loss, "__name__", loss),  # type: ignore[arg-type]
            training=self.mode,
            steps=training.steps if training else 1,
            accumulate=training.accumulate if training else 1,
            ema=bool(training and training.ema),
            seed=SEED,
            benchmark=benchmark,
        )

    def trace(self, stack: Stack, plans: Plans | None = None) -> Trace:
        """The run on tensors without values, as a GPU of `stack` would do it; convolutions take what `plans` say."""
        where = Card(stack.gpu, stack.capability, stack.total, "measured")
        runner = self._runner(where)
        with collector_paused():
            setup = replace(
                runner.setup(self.scenario),
                semantics=partial(gpu_semantics, capability=stack.capability, cudnn=stack.cudnn or CUDNN),
                workspaces=workspaces(stack, plans or Plans(stack.capability, installed)),
            )
            return step_workload(self.training).run(setup)

    def predicted(self, stack: Stack, *, benchmark: bool = False, recorded: Sequence[Workspace] = ()) -> Prediction:
        """What memsize says of the experiment on a GPU of `stack`.

        `recorded` are cuDNN's answers of the day of a measurement: of the first plans, or with `benchmark` of the
        greediest. Without them the cuDNN of this machine is asked, if there is one.
        """
        known = {Convolution.parse(text): size for text, size in recorded}
        release = None if stack.cudnn is None else dotted_cudnn(stack.cudnn)
        plans = Plans(stack.capability, installed, recorded=known, release=release, greedy=benchmark)
        trace = self.trace(stack, plans)
        if not benchmark:
            return predicted(trace, stack, _asked(plans))
        return predicted(self.trace(stack), stack, _asked(plans), greediest=trace)

    def plan(self, device: torch.device, *, benchmark: bool = False, track: bool = True) -> Plan:
        """How the experiment is really run on `device`."""
        build = partial(realized, self._runner(), self.scenario, device)
        return Plan(self.workload(benchmark), build, self.training, track)

    def _runner(self, gpu: Card | None = None) -> Runner:
        return Runner(self.name, self.model, self.inputs, self.mode, gpu=gpu)


def workspaces(stack: Stack, plans: Plans | None = None) -> Workspaces:
    """What cuBLAS, cuBLASLt and cuDNN take with the release and the settings of `stack`."""
    blas = cublas_workspace(stack.capability, config=stack.cublas_config, torch_version=stack.torch)
    lt = cublaslt_workspace(torch_version=stack.torch)
    return Workspaces(blas, lt, Convolutions.on(plans) if plans else None)


def _asked(plans: Plans) -> tuple[Workspace, ...]:
    """The answers of cuDNN itself, in the order of the first call."""
    return tuple(
        Workspace(str(convolution), size)
        for convolution, size in plans.answers.items()
        if convolution not in plans.estimated
    )
