"""Requests about a model: one for each command and function, put together from parts that they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from memsize.records.world import World
from memsize.spec.generation import GENERATED, SERVED, Draft, Generation, Serving
from memsize.spec.model_request import ModelRequest
from memsize.spec.options import REQUIRED, option, part
from memsize.spec.parallel import Parallel
from memsize.spec.scenario import DEFAULT, CompileMode
from memsize.spec.stack import Gpu
from memsize.spec.training import Training

if TYPE_CHECKING:
    from torch import nn, optim  # noqa: F401 - of annotations that are texts

OnExcess = Literal["warn", "raise", "ignore"]
_Path = str | os.PathLike[str]
_TRAINING: Final = {
    "when": "train",
    "purpose": "training steps: name an optimizer with {}, such as adamw",
    "optimizer": {"default": None},
}


_model: Final = partial(part, ModelRequest, keywords=ModelRequest.of)
_scenario: Final = partial(
    option, "as-given", help="How to store and run the model.", flags=("-s", "--scenario"), metavar="NAME"
)
_parallel: Final = partial(
    option,
    None,
    "Simulate training on several GPUs and show one of them: ddp=8[,views], fsdp=8[,offload], hsdp=4x8, tp=8, "
    "pp=4, ep=8, fsdp=8,tp=8,pp=4, dp=4.",
    metavar="STRATEGY",
)
_execute: Final = partial(
    option, False, "Run with real values on the CPU: for models with data-dependent control flow."
)
_compile: Final = partial(
    option,
    False,
    help="Compile the model with torch.compile, and show it next to the uncompiled model.",
    choices=get_args(CompileMode),
)
budget_option: Final = partial(
    option, None, "Memory of the device, instead of the GPU's: 15109MiB, 24GB.", metavar="SIZE"
)
margin_option: Final = partial(option, "0", "Memory to leave free: 500MiB, or 5% of the device.", metavar="SIZE")
beside_option: Final = partial(
    option, None, "A server on the same GPU, and its share of the device's memory: serve:0.3.", metavar="SERVER"
)


def _scenarios(usual: Iterable[str], help: str = "Scenarios separated by commas, or all.") -> Any:
    settings = {"flags": ("-s", "--scenario"), "kind": "list", "metavar": "NAMES"}
    return option(None, help, shown=", ".join(usual), **settings)


def gpus_option(also: str = "", **changes: Any) -> Any:
    """Declare the GPUs of a request that may name several; `also` are further names."""
    help = f"GPUs to simulate: t4, a100,h100{also} or local (this machine's)."
    several = {"annotation": "Gpu | str | Iterable[str] | None", "kind": "list", "types": ()}
    return part(Gpu, name={"help": help, "metavar": "NAMES", **several}, **changes)


_OF_TRAINING: Final = ("lora", "adapter", "base", "freeze", "imbalance", "capacity_factor")


def _trained_if_adapted(request: Any, is_trained: bool = True) -> None:
    """Train a request's model with the usual optimizer where it has adapters and nothing else was asked for."""
    if request.training is None and is_trained and request.model.mode != "eval" and request.model.trained_parts.adapter:
        object.__setattr__(request, "training", Training())


@dataclass(frozen=True, kw_only=True)
class _ModelRun:
    model: ModelRequest = _model()
    training: Training | None = part(Training, **_TRAINING)
    parallel: Parallel | str | None = _parallel()
    gpu: Gpu = part(Gpu)
    execute: bool = _execute()

    def __post_init__(self) -> None:
        _trained_if_adapted(self, getattr(self, "step", None) is None)


@dataclass(frozen=True, kw_only=True)
class ReportRequest(_ModelRun):
    """A report on each byte of a model."""

    scenarios: str | Iterable[str] | None = _scenarios(DEFAULT)
    compile: bool | str = _compile()


@dataclass(frozen=True, kw_only=True)
class DiffRequest:
    """A comparison of two models, revisions, saved runs or checkpoints."""

    before: Any = option(REQUIRED, "", positional=True)
    after: Any = option(REQUIRED, "", positional=True)
    model: ModelRequest = part(ModelRequest, keywords=partial(ModelRequest.of, ""), without=("model",))
    training: Training | None = part(Training, **_TRAINING)
    gpu: Gpu = part(Gpu)
    execute: bool = _execute()
    scenarios: str | Iterable[str] | None = _scenarios(
        ("as-given",), "Scenarios to compare, separated by commas, or all."
    )


@dataclass(frozen=True, kw_only=True)
class TimelineRequest(_ModelRun):
    """Live memory over training steps, or over one inference."""

    scenario: str = _scenario()
    compile: bool | str = _compile(help="Compile the model with torch.compile.")


@dataclass(frozen=True, kw_only=True)
class TraceRequest(TimelineRequest):
    """The same in Python, where a loop of one's own can take the place of the usual one, as one process of many."""

    training: Training | None = part(
        Training, when="optimizer", purpose=_TRAINING["purpose"], optimizer={"key": "optimizer"}
    )
    step: Callable[..., Any] | None = option(None, "A loop in place of the usual one.", written=False)
    world: World | None = option(None, "The process of a distributed job.", written=False)


@dataclass(frozen=True, kw_only=True)
class GuardRequest:
    """The peak of a training loop of one's own, before its first step."""

    model: nn.Module = option(REQUIRED, "", positional=True)
    training: Training | None = part(
        Training,
        when="optimizer",
        purpose=_TRAINING["purpose"],
        without=("steps", "ema", "set_to_none", "scaler"),
        optimizer={"annotation": "optim.Optimizer | None", "key": "optimizer", "default": None}
        | {"positional": True, "required": True},
    )
    batch: Any = option(REQUIRED, "", positional=True)
    budget: str | int | None = option(None, "What PyTorch may reserve.", written=False)
    on_excess: OnExcess = option("warn", "What to do where it is not enough.", choices=get_args(OnExcess))
    scenario: str = _scenario()
    gpu: Gpu = part(Gpu, without=("stack", "allocator"))


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """A prediction compared with a real GPU."""

    model: ModelRequest = _model(without=("whole", *_OF_TRAINING))
    training: Training | None = part(Training, **_TRAINING)
    scenario: str = _scenario()
    device: int = option(0, "CUDA device to run on.", least=0)
    against: _Path | None = option(
        None, "Compare with a saved measurement of the same step instead, without a GPU.", kind="path", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """The effect of channels last on a model."""

    model: ModelRequest = _model(without=("whole", *_OF_TRAINING))
    scenario: str = _scenario()


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """The largest batch, length or number of sequences that fits."""

    model: ModelRequest = _model(
        batch_size={
            "help": "Check whether this batch fits, and what would make it fit. With --vary: the fixed batch size.",
            "shown": None,
        },
        mode={"shown": "train with --train, else eval"},
    )
    vary: str = option(
        "batch",
        "What to vary: batch, context, both as context,batch, seq_len, image, or dimensions such as 0:1 or "
        "input_ids:1 (0 is the batch).",
        metavar="WHAT",
    )
    prompt: int | None = option(None, "Generate after a prompt of N tokens.", shown="512", least=1)
    generation: Generation | None = part(Generation, when="any")
    gpu: Gpu = gpus_option(", all (the smallest that fits)")
    budget: str | int | None = budget_option()
    margin: str | int = margin_option()
    beside: str | None = beside_option()
    scenarios: str | Iterable[str] | None = _scenarios(DEFAULT)
    compile: bool | str = _compile()
    training: Training | None = part(Training, without=("steps",), **_TRAINING)
    parallel: str | Iterable[str] | None = option(
        None,
        "Train on several GPUs: ddp=8[,views], fsdp=8[,offload] …, as for memsize timeline. Give several to "
        "compare them.",
        kind="texts",
        metavar="STRATEGY",
    )
    gpus: int | str | Iterable[int] | None = option(
        None,
        "Numbers of GPUs to compare, for --parallel fsdp, ddp or hsdp=x8: 1..128 (doubling), or 6,12.",
        kind="list",
        metavar="NUMBERS",
    )
    remedies: bool | None = option(
        None,
        "Try what would make it fit.",
        flags=("--remedies/--no-remedies",),
        shown="if the batch in --batch-size doesn't fit",
    )

    def __post_init__(self) -> None:
        _trained_if_adapted(self, self.generation is None and self.prompt is None)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """The memory of a language model while it generates."""

    model: ModelRequest = _model(without=("source", "seq_len", "batch_size", "mode", "freeze"))
    prompt: int | str | Iterable[int] = option(
        512, "Tokens of the prompt; lengths separated by commas.", kind="list", metavar="N,…"
    )
    generation: Generation = part(Generation)
    assistant_model: nn.Module | str | None = option(
        None,
        "A smaller model, which proposes tokens before each step.",
        metavar="TARGET",
    )
    prompt_lookup_num_tokens: int | None = option(None, "N tokens before each step, looked up in the prompt.", least=1)
    batch_size: int | str | Iterable[int] = option(
        1,
        "Batch sizes, separated by commas.",
        flags=("-b", "--batch", "--batch-size"),
        kind="list",
        metavar="N,…",
    )
    step: Callable[..., Any] | str | None = option(
        None, "A loop in place of generate: file.py:function.", metavar="FUNCTION"
    )
    scenarios: str | Iterable[str] | None = _scenarios(GENERATED)
    compile: bool | str = _compile()
    gpu: Gpu = part(Gpu)

    @property
    def draft(self) -> Draft | None:
        """The source of the tokens that are proposed before each step."""
        return Draft.of(self.assistant_model, self.prompt_lookup_num_tokens)


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """The memory of a paged server."""

    model: ModelRequest = _model(without=("source", "seq_len", "batch_size", "mode", *_OF_TRAINING))
    serving: Serving = part(Serving)
    scenarios: str | Iterable[str] | None = _scenarios(SERVED)
    gpu: Gpu = part(Gpu)


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """The first section of a project."""

    model: ModelRequest = _model()
    training: Training | None = part(Training, without=("steps",), **_TRAINING)
    gpu: Gpu = part(Gpu, without=("stack", "allocator"))
    scenario: str = _scenario(help="How to store and run it.")
    folder: _Path = option(".", "", positional=True, kind="path")
