"""Hold predictions to real steps on the CPU, allocation by allocation: the nets of the suite, small enough for a CPU.

    python -m benchmarks.cpu_truth [PATTERN …]

The real step makes CUDA's decisions wherever the CPU has kernels for them: autocast's casts, dropout's boolean mask,
attention by the mathematical path. What the CPU does otherwise by design is in `BY_DESIGN` with its reason; everything
else is to agree byte for byte. It is no measurement of a GPU: cuBLAS's and cuDNN's workspaces, and what CUDA's kernels
allocate inside, are not seen; the products inside softmax's backward and the scratch memory of reductions are left out
of the prediction.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any, Final

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.nets import graphs
from benchmarks.nets.adapted import adapted
from benchmarks.nets.language import GPT2, Bert, Experts, Gated, GPT2Block, Llama
from benchmarks.nets.visual import ViTBase
from benchmarks.truth.standin import STACK, StandIn
from benchmarks.truth.suite import NETS, Build
from memsize.analysis.fit.optimized_models import OffloadActivations, Recompute, StepInBackward
from memsize.analysis.runner import Edit
from memsize.analysis.verify.alignment import align
from memsize.analysis.verify.measure import measure
from memsize.analysis.verify.verification import Experiment, predict
from memsize.cuda.autocast import autocast_region
from memsize.cuda.cuda_semantics import cuda_semantics
from memsize.device.cards import card
from memsize.kernels import rules
from memsize.kernels.cudnn.plans import Convolution, Plans
from memsize.kernels.registry import REDUCTIONS, TEMPORARIES
from memsize.loading.weightless import Weightless
from memsize.model.input_tensors import inputs_from_specs
from memsize.records.verification import Alignment, AllocationDifference
from memsize.spec.inputs import parse_inputs
from memsize.spec.scenario import scenario_named
from memsize.spec.training import Training
from memsize.tracing.run import Setup

NO_WORKSPACES: Final = replace(STACK, cublas_config=":0:0")
"""An A100 on which cuBLAS is forbidden its workspaces, which no CPU has."""


class NoPlans(Plans):
    """Convolutions that take nothing beside their tensors."""

    def workspace(self, convolution: Convolution) -> int:
        return 0


# -- the nets, made small ----------------------------------------------------------------------------------------------


def _first(build: Build, name: str, count: int) -> nn.Module:
    """The net with the first of its layers alone."""
    model = build()
    setattr(model, name, getattr(model, name)[:count])
    return model


def _llama(tied: bool = False, checkpointed: bool = False, experts: bool = False) -> Llama:
    mlp: Callable[[], nn.Module] = (lambda: Experts(128, 256, 8)) if experts else (lambda: Gated(128, 256))
    return Llama(1000, 128, 2, 8, 4, mlp, tied, checkpointed)


_TOKENS: Final = "input_ids={length}:int64:0..999"
SMALL: Final[Mapping[str, tuple[Build, str]]] = {
    **NETS,
    **{net: (NETS[net][0], "3,64,64") for net in ("resnet18", "resnet50", "unet")},
    "vit-base": (partial(_first, ViTBase, "blocks", 2), "3,224,224"),
    "bert-base": (partial(_first, Bert, "layers", 2), NETS["bert-base"][1]),
    "gpt2": (partial(GPT2, 256, 2, 4), NETS["gpt2"][1]),
    "gpt2-checkpointed": (partial(GPT2, 256, 2, 4, True), NETS["gpt2"][1]),
    "gpt2-adapted": (lambda: adapted(GPT2(256, 2, 4), ("qkv", "out")), NETS["gpt2"][1]),
    "llama-1b": (partial(_llama, True), _TOKENS),
    "llama-1b-checkpointed": (partial(_llama, True, True), _TOKENS),
    "llama-1b-untied": (_llama, _TOKENS),
    "mixture": (partial(_llama, experts=True), _TOKENS),
}
"""The suite's networks; those that are too large for a CPU with fewer layers, or narrower, of the same code."""

GRAPHS: Final[Mapping[str, tuple[Build, str]]] = {
    "monitored": (graphs.Monitored, "16,64"),
    "vector-quantized": (graphs.VectorQuantized, "16,64"),
    "sampled": (graphs.Sampled, "16,64"),
    "spectral": (graphs.Spectral, "16,64"),
    "linear-attention": (graphs.LinearAttention, "16,64"),
    "continuous": (graphs.Continuous, "16,64"),
    "penalized": (graphs.Penalized, "16,64"),
    "recomputed": (partial(graphs.Recomputed, False), "16,64"),
    "recomputed-reentrant": (partial(graphs.Recomputed, True), "16,64"),
    "normalized": (graphs.Normalized, "16,64"),
}
"""Networks whose autograd graphs are unusual."""

_TABLE: Final = """
    perceptron             train  fp32         adamw:foreach         8
    perceptron             train  fp32         adamw:fused           8
    perceptron             train  bf16         adamw:foreach         8
    perceptron             train  amp-fp16     adamw:foreach         8
    perceptron             train  amp-bf16     sgd-momentum:foreach  8
    perceptron             train  apex-O2      adamw:foreach         8
    perceptron             train  fp32         adamw:foreach/4       8
    perceptron             infer  fp16         -                     8
    toy                    train  fp32         adamw:foreach         1
    toy                    infer  fp32         -                     1
    resnet18               train  fp32         sgd-momentum:foreach  2
    resnet18               train  amp-bf16     sgd-momentum:foreach  2
    resnet18               infer  fp32         -                     2
    resnet50               train  fp32         sgd-momentum:foreach  2
    vgg16                  train  fp32         sgd-momentum:foreach  1
    vgg16                  infer  fp32         -                     1
    efficientnet-b0        train  fp32         sgd-momentum:foreach  2
    efficientnet-b0        infer  fp32         -                     2
    convnext-tiny          train  fp32         adamw:foreach         1
    convnext-tiny          infer  fp32         -                     1
    unet                   train  fp32         adamw:foreach         1
    unet                   infer  fp32         -                     1
    vit-base               train  fp32         adamw:foreach         1
    vit-base               train  amp-bf16     adamw:foreach         1
    vit-base               infer  fp32         -                     1
    swin-tiny              train  fp32         adamw:foreach         1
    swin-tiny              train  amp-bf16     adamw:foreach         1
    swin-tiny              infer  fp32         -                     1
    bert-base              train  fp32         adamw:foreach         2   16
    bert-base              train  amp-bf16     adamw:foreach         2   16
    bert-base              infer  fp32         -                     2   16
    gpt2                   train  fp32         adamw:foreach         2   16
    gpt2                   train  amp-bf16     adamw:foreach/4       2   16
    gpt2                   train  apex-O2      adamw:foreach         2   16
    gpt2                   infer  bf16         -                     2   16
    gpt2-checkpointed      train  amp-bf16     adamw:foreach         2   16
    gpt2-adapted           train  amp-bf16     adamw:foreach         2   16
    t5-small               train  fp32         adamw:foreach         2   16
    t5-small               train  amp-bf16     adamw:foreach         2   16
    t5-small               infer  bf16         -                     2   16
    llama-1b               train  bf16         adamw:foreach         2   16
    llama-1b               train  amp-bf16     adamw:foreach         2   16
    llama-1b-checkpointed  train  bf16         adamw:foreach         2   16
    llama-1b-untied        train  bf16         adamw:fused           2   16
    llama-1b-untied        infer  fp32         -                     2   16
    mixture                train  fp32         adamw:foreach         2   32
    mixture                train  amp-bf16     adamw:foreach         2   32
    mixture                infer  bf16         -                     2   32
    lstm                   train  fp32         sgd:foreach           2    8
    lstm                   infer  fp32         -                     2    8
    gru                    train  fp32         adamw:foreach         2    8
    gru                    infer  fp32         -                     2    8

    monitored              train  fp32         adamw:foreach         8
    monitored              train  amp-bf16     adamw:foreach         8
    vector-quantized       train  fp32         adamw:foreach         8
    sampled                train  fp32         adamw:foreach         8
    spectral               train  fp32         adamw:foreach         8
    linear-attention       train  fp32         adamw:foreach         8
    continuous             train  fp32         adamw:foreach         8
    penalized              train  fp32         adamw:foreach         8
    recomputed             train  fp32         adamw:foreach         8
    recomputed             train  amp-bf16     adamw:foreach         8
    recomputed-reentrant   train  fp32         adamw:foreach         8
    normalized             train  fp32         adamw:foreach         8

    vit-base               train  fp32         adamw:foreach         1    0 own
    vit-base               train  amp-bf16     adamw:foreach         1    0 own
    llama-1b               train  fp32         adamw:foreach         2   16 own
    llama-1b               train  bf16         adamw:foreach         2   16 own
    llama-1b-checkpointed  train  bf16         adamw:foreach         2   16 own
    gpt2                   infer  fp32         -                     2   16 own
    gpt2                   train  fp32         adamw:foreach         2   16 own

    resnet18               train  fp32         adamw:foreach         2    0 offload
    vit-base               train  amp-bf16     adamw:foreach         1    0 offload
    gpt2                   train  fp32         adamw:foreach         2   16 offload
    llama-1b               train  fp32         adamw:foreach         2   16 offload
    llama-1b               train  amp-bf16     adamw:foreach         2   16 offload
    mixture                train  fp32         adamw:foreach         2   32 offload
    resnet18               train  fp32         adamw:foreach         2    0 in-backward
    vit-base               train  amp-bf16     adamw:foreach         1    0 in-backward
    gpt2                   train  fp32         adamw:foreach         2   16 in-backward
    llama-1b               train  bf16         adamw:foreach         2   16 in-backward
    llama-1b-untied        train  bf16         adamw:fused           2   16 in-backward
    mixture                train  fp32         adamw:foreach         2   32 in-backward
    vit-base               train  amp-bf16     adamw:foreach         1    0 first-block
    gpt2                   train  fp32         adamw:foreach         2   16 first-block
    llama-1b               train  amp-bf16     adamw:foreach         2   16 first-block
    mixture                train  fp32         adamw:foreach         2   32 first-block
"""
"""Network, training or inference, scenario, optimizer (``/4``: four backwards a step), batch, length of texts.

`foreach` is CUDA's default, and has to be asked for on a CPU. With `own`, attention is left to the kernels that each
device has for it. The last are remedies of `memsize fit`: activation offload, the optimizer in backward, and
checkpointing of the fewest blocks.
"""


@dataclass(frozen=True)
class Run:
    """One of the runs: how its case is made, and whether attention is left to each device's own kernels."""

    name: str
    make: Callable[[], Experiment]
    own: bool
    edit: Callable[[StandIn, Setup], Setup] = lambda _, setup: setup
    """Changes the model whose step is real."""


def _on_host(memory: StandIn, setup: Setup) -> Setup:
    """Keep what the forward saves in memory of the host, and copy it from there in backward, as `save_on_cpu` does."""
    forward: Callable[..., Any] = setup.model.forward

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
        memory.leave_out([host])
        return host.copy_(tensor.detach().contiguous())  # a GPU copies elements in a row (cuda/Copy.cu)

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda host: host.to("cpu", copy=True)):
            return forward(*args, **kwargs)

    setup.model.forward = offloaded
    return setup


_REMEDIES: Final[Mapping[str, tuple[Edit, Callable[[StandIn, Setup], Setup]]]] = {
    "offload": (OffloadActivations(card("a100")), _on_host),
    "first-block": (Recompute(1), lambda _, setup: Recompute(1)(setup)),
}
"""By name, the edit of a remedy in a prediction, and in a real step."""


def _run(line: str) -> Run:
    net, kind, scenario, optimizer, batch, *more = line.split()
    optimizer_name, _, backwards = optimizer.partition("/")
    training = Training(optimizer_name, gradient_accumulation_steps=int(backwards or 1)) if kind == "train" else None
    build, inputs = {**SMALL, **GRAPHS}[net]
    own, remedy = more[1:] == ["own"], "".join(more[1:])
    edits = _REMEDIES.get(remedy, ())
    if remedy == "in-backward" and training:
        training = replace(training, optimizer=StepInBackward(optimizer_name))
    parts = [net, kind, scenario, optimizer_name if training else "", f"x{backwards}" if backwards else ""]
    name = "/".join(filter(None, [*parts, "own-attention" if own else remedy]))

    def make() -> Experiment:
        with Weightless():
            model = build()
        specs = parse_inputs(inputs.format(length=more[0] if more else "").split())
        arguments = inputs_from_specs(specs, int(batch))
        precision = scenario_named(scenario)
        return Experiment(name, model, arguments, training is not None, precision, training, edits[:1])

    return Run(name, make, own, *edits[1:])


RUNS: Final[Mapping[str, Run]] = {run.name: run for run in map(_run, filter(str.strip, _TABLE.splitlines()))}


# -- the real step -----------------------------------------------------------------------------------------------------


class EvenChoices(TorchDispatchMode):
    """Lets a router's choices fall evenly, which is what a prediction assumes of them: row r takes the r·k-th to the
    (r·k + k - 1)-th of its choices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            indices = result[1]
            indices.copy_(torch.arange(indices.numel()).view(indices.shape) % args[0].shape[-1])
        return result


@contextmanager
def kernels_of_both(own: bool) -> Iterator[None]:
    """While open, no kernel computes that only a CPU has: oneDNN's, and unless `own` its flash attention."""
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with nullcontext() if own else sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)


@contextmanager
def no_scratch() -> Iterator[None]:
    """While open, kernels take nothing inside that a CPU's do not: it forms the products of softmax's backward one by
    one, and no blocks of threads share a sum."""
    op = torch.ops.aten._softmax_backward_data.default
    rules()  # fills the tables
    products, reductions = TEMPORARIES.pop(op), dict(REDUCTIONS)
    REDUCTIONS.clear()
    try:
        yield
    finally:
        TEMPORARIES[op] = products
        REDUCTIONS.update(reductions)


def compare_on_cpu(run: Run) -> CpuComparison:
    """The run's step, real on the CPU, beside its prediction for a GPU without workspaces."""
    case = run.make()
    with kernels_of_both(run.own), no_scratch(), EvenChoices(), StandIn(NO_WORKSPACES) as memory:
        said = predict(case.trace(NO_WORKSPACES, NoPlans(STACK.capability)), NO_WORKSPACES)
        plan = case.plan(memory.device, track=False)
        build = partial(_with_cuda_casts, plan.build, case.scenario.autocast)
        with cuda_semantics(stands_for=("cpu",)):
            seen = measure(replace(plan, build=lambda: run.edit(memory, build())), memory)
    assert seen.log is not None and seen.peaks is not None
    alignment = align(said.log, seen.log)
    kinds = {name: type(module) for name, module in case.model.named_modules()}
    reasons = tuple(_reason(difference, kinds) for difference in alignment.differences)
    return CpuComparison(run.name, alignment, reasons, said.most.requested - seen.peaks.requested)


def _with_cuda_casts(build: Callable[[], Setup], autocast: str | None) -> Setup:
    """The real step's setup, under CUDA's casts where it is under the CPU's."""
    setup = build()
    if not autocast:
        return setup
    region = partial(autocast_region, getattr(torch, autocast))
    return replace(setup, precision=replace(setup.precision, autocast=region))


# -- what differs, and why ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reason:
    """Something that a CPU does otherwise by design: in which operations, or in whatever modules of `within` do.

    `lends`: what it is given lives for as long as it keeps it, so that other allocations end at other moments.
    """

    what: str
    why: str
    operations: frozenset[str] = frozenset()
    within: tuple[type[nn.Module], ...] = ()
    lends: bool = False


BY_DESIGN: Final = (
    Reason(
        "recurrent layers",
        "cuDNN runs all steps in one call and keeps one reserve space; a CPU runs, and keeps, every step",
        within=(nn.RNNBase,),
        lends=True,
    ),
    Reason(
        "statistics of a layer norm of half-precision inputs",
        "float32 on CUDA (cuda/layer_norm_kernel.cu), the input's dtype on a CPU (layer_norm.cpp)",
        frozenset({"native_layer_norm"}),
    ),
    Reason(
        "attention's own kernels",
        "CUDA's keep sums for whole blocks of rows, or none in inference, and the state of flash attention's random "
        "numbers, and take memory in backward (cuda/attention.cu, attention_backward.cu); the CPU's keep a sum a row",
        frozenset(
            f"_scaled_dot_product_{name}{end}"
            for name in ("flash_attention", "efficient_attention", "flash_attention_for_cpu")
            for end in ("", "_backward")
        ),
    ),
    Reason(
        "attention with dropout",
        "CUDA's fused kernels draw it themselves (cuda/attention.cu); a CPU's flash attention refuses it "
        "(transformers/sdp_utils_cpp.cpp, `check_for_dropout`), and keeps the scores, their softmax and the mask",
        within=(GPT2Block,),
        lends=True,
    ),
)
"""What is not to agree."""


@dataclass(frozen=True)
class CpuComparison:
    """What came of one run: the two logs side by side, why each difference is there (None: nobody knows), and by how
    many bytes the predicted peak of what tensors ask for is above the real one."""

    name: str
    alignment: Alignment
    reasons: tuple[Reason | None, ...]
    peak: int

    @property
    def unexplained(self) -> tuple[AllocationDifference, ...]:
        """The differences that no reason covers."""
        both = zip(self.alignment.differences, self.reasons, strict=True)
        return tuple(difference for difference, reason in both if reason is None)


def _reason(difference: AllocationDifference, kinds: Mapping[str, type[nn.Module]]) -> Reason | None:
    """Why a difference is there; `kinds` are the types of the model's modules by path."""
    kind = kinds.get(difference.place.layer or "", nn.Module)
    for reason in BY_DESIGN:
        if difference.place.op in reason.operations or issubclass(kind, reason.within):
            return reason
    lenders = (
        r for r in BY_DESIGN if r.lends and any(issubclass(module_type, r.within) for module_type in kinds.values())
    )
    return next(lenders, None) if difference.kind in ("freed later", "freed earlier") else None


def line(comparison: CpuComparison) -> list[str]:
    """One row of the table."""
    counts = Counter("unexplained" if reason is None else reason.what for reason in comparison.reasons)
    seen = comparison.alignment
    differing = ", ".join(f"{count} {what}" for what, count in counts.items())
    return [comparison.name, f"{seen.predicted:,}", f"{seen.matched:,}", differing or "none", f"{comparison.peak:,} B"]


def main(patterns: Sequence[str]) -> int:
    """Print the table; the exit status is 1 where something differs that nobody has explained."""
    wanted = [run for name, run in RUNS.items() if not patterns or any(fnmatch(name, pattern) for pattern in patterns)]
    rows = []
    unexplained = 0
    for run in wanted:
        comparison = compare_on_cpu(run)
        unexplained += len(comparison.unexplained)
        rows.append(line(comparison))
        for difference in comparison.unexplained:
            print(f"{comparison.name}: {difference}")
    titles = ("step", "predicted allocations", "as in the real step", "differ", "peak off by")
    print(tabulate(rows, titles, "github", disable_numparse=True, colalign=("left", "right", "right", "left", "right")))
    print(f"\ntorch {torch.__version__}; {len(rows)} steps, {unexplained} differences unexplained")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
