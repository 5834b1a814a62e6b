"""The one table of workloads, the most telling first: a run that has to end early has those.

Every network is built from code and every input from a declared shape and range, so that a prediction can be made again
anywhere. A workload's name is its identity in the files of measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

from torch import nn

from benchmarks.nets.adapted import adapted, perceptron
from benchmarks.nets.convolutional import VGG16, ConvNeXtTiny, EfficientNetB0, Toy, UNet
from benchmarks.nets.language import GPT2, Bert, T5Small, llama_tied, llama_untied, mixture
from benchmarks.nets.recurrent import Recurrent
from benchmarks.nets.residual import ResNet18, ResNet50
from benchmarks.nets.visual import SwinTiny, ViTBase
from memsize.analysis.verify.verification import Experiment
from memsize.loading.weightless import Weightless
from memsize.model.input_tensors import inputs_from_specs
from memsize.spec.inputs import parse_inputs
from memsize.spec.scenario import scenario_named
from memsize.spec.training import Training

Build = Callable[[], nn.Module]

NETS: Final[Mapping[str, tuple[Build, str]]] = {
    "perceptron": (partial(perceptron, 784, 1024, 1024, 512, 10), "784"),
    "wide-perceptron": (partial(perceptron, 4096, 8192, 8192, 1000), "4096"),
    "toy": (Toy, "3,64,64"),
    "resnet18": (ResNet18, "3,224,224"),
    "resnet50": (ResNet50, "3,224,224"),
    "vgg16": (VGG16, "3,224,224"),
    "efficientnet-b0": (EfficientNetB0, "3,224,224"),
    "convnext-tiny": (ConvNeXtTiny, "3,224,224"),
    "unet": (UNet, "3,256,256"),
    "vit-base": (ViTBase, "3,224,224"),
    "swin-tiny": (SwinTiny, "3,224,224"),
    "bert-base": (Bert, "input_ids={length}:int64:0..30521 attention_mask={length}:int64"),
    "gpt2": (GPT2, "input_ids={length}:int64:0..50256"),
    "gpt2-checkpointed": (partial(GPT2, checkpointed=True), "input_ids={length}:int64:0..50256"),
    "gpt2-adapted": (lambda: adapted(GPT2(), ("qkv", "out")), "input_ids={length}:int64:0..50256"),
    "gpt2-large": (partial(GPT2, 1280, 36, 20), "input_ids={length}:int64:0..50256"),
    "t5-small": (T5Small, "input_ids={length}:int64:0..32127 decoder_input_ids={length}:int64:0..32127"),
    "llama-1b": (llama_tied, "input_ids={length}:int64:0..128255"),
    "llama-1b-checkpointed": (partial(llama_tied, True), "input_ids={length}:int64:0..128255"),
    "llama-1b-adapted": (lambda: adapted(llama_tied(), ("query", "value")), "input_ids={length}:int64:0..128255"),
    "llama-1b-untied": (llama_untied, "input_ids={length}:int64:0..31999"),
    "mixture": (mixture, "input_ids={length}:int64:0..31999"),
    "lstm": (partial(Recurrent, "LSTM"), "input_ids={length}:int64:0..9999"),
    "gru": (partial(Recurrent, "GRU", True), "input_ids={length}:int64:0..9999"),
}
"""Each network: how it is built, and its inputs without the batch dimension."""

_TABLE: Final = """
    gpt2                   train  fp32         adamw               4   512
    gpt2                   train  amp-bf16     adamw               8   512
    perceptron             train  fp32         sgd                64
    perceptron             train  fp32         adamw              64
    resnet50               train  fp32         sgd-momentum       32
    bert-base              train  amp-fp16     adamw              16   128
    llama-1b               train  bf16         adamw               1  1024
    lstm                   train  fp32         sgd                32    35
    toy                    train  fp32         adamw               1
    vit-base               train  amp-bf16     adamw              32
    gpt2                   infer  fp16         -                   8  1024
    t5-small               train  fp32         adamw               8   128
    mixture                train  amp-bf16     adamw               8   256
    resnet50               infer  fp16         -                  64
    gpt2-checkpointed      train  amp-bf16     adamw               8   512
    llama-1b-adapted       train  bf16         adamw               2  1024
    gpt2                   train  amp-bf16     adamw/4             2   512
    gpt2                   train  apex-O2      adamw               4   512
    llama-1b-untied        train  bf16         adamw:fused         1  1024
    gpt2                   infer  int8-weight  -                   4   512
    gru                    train  fp32         adamw              32    64
    swin-tiny              train  amp-fp16     adamw              32
    convnext-tiny          train  amp-bf16     adamw              32
    vgg16                  train  fp32         sgd-momentum       16
    efficientnet-b0        train  fp32         sgd-momentum       32
    unet                   train  fp32         adamw               4

    perceptron             train  fp32         adamw:fused        64
    perceptron             train  bf16         adamw              64
    perceptron             train  amp-fp16     adamw              64
    perceptron             train  amp-bf16     sgd-momentum      512
    perceptron             train  apex-O2      adamw              64
    perceptron             train  fp32         adamw/4            64
    perceptron             infer  fp32         -                  64
    perceptron             infer  fp16         -                1024
    perceptron             infer  int8-weight  -                  64
    wide-perceptron        train  fp32         adamw             256
    wide-perceptron        train  amp-fp16     sgd-momentum     2048
    wide-perceptron        infer  bf16         -                4096

    gpt2                   train  fp32         sgd                 2   512
    gpt2                   train  bf16         adamw:fused         8   512
    gpt2                   train  amp-fp16     adamw               4   512
    gpt2                   train  amp-bf16     adamw              16   512
    gpt2                   infer  fp32         -                   2   512
    gpt2                   infer  bf16         -                   1  1024
    gpt2-adapted           train  amp-bf16     adamw               8   512
    gpt2-checkpointed      train  fp32         sgd-momentum        4   512
    gpt2-large             train  bf16         adamw               2   512
    gpt2-large             train  amp-bf16     adamw:fused         1   512
    gpt2-large             infer  fp16         -                   4   512
    bert-base              train  fp32         adamw              16   128
    bert-base              train  fp32         adamw:fused        32   128
    bert-base              train  bf16         sgd                16   256
    bert-base              infer  fp32         -                  32   128
    bert-base              infer  fp16         -                   8   512
    t5-small               train  amp-bf16     adamw               8   128
    t5-small               train  fp32         adamw:fused        16   256
    t5-small               infer  bf16         -                  16   256
    llama-1b               train  amp-bf16     adamw               1   512
    llama-1b               infer  bf16         -                   4  2048
    llama-1b               infer  int8-weight  -                   1   512
    llama-1b-checkpointed  train  bf16         adamw               2  1024
    llama-1b-untied        train  fp32         sgd                 1   512
    llama-1b-untied        infer  fp16         -                   2  1024
    mixture                train  fp32         adamw               8   256
    mixture                infer  bf16         -                  16   256
    lstm                   train  amp-fp16     adamw              32    35
    lstm                   infer  fp32         -                  64    35
    lstm                   infer  fp16         -                  64    70
    gru                    train  bf16         sgd-momentum       32    64
    gru                    infer  fp16         -                 128    64

    vit-base               train  fp32         adamw              16
    vit-base               train  amp-fp16     adamw:fused        64
    vit-base               infer  fp32         -                   8
    vit-base               infer  fp16         -                  64
    swin-tiny              train  fp32         adamw              16
    swin-tiny              infer  bf16         -                  32
    resnet18               train  fp32         sgd-momentum       32
    resnet18               train  fp32         sgd-momentum      128
    resnet18               train  amp-fp16     sgd-momentum       64
    resnet18               train  bf16         adamw              64
    resnet18               infer  fp32         -                  64
    resnet18               infer  fp16         -                  16
    resnet50               train  fp32         sgd-momentum       64
    resnet50               train  amp-fp16     sgd-momentum       64
    resnet50               train  amp-bf16     adamw              64
    resnet50               train  apex-O2      sgd-momentum       64
    resnet50               infer  fp32         -                  16
    vgg16                  train  amp-fp16     sgd-momentum       32
    vgg16                  infer  fp32         -                  16
    efficientnet-b0        train  amp-bf16     adamw              64
    efficientnet-b0        infer  fp16         -                  64
    convnext-tiny          train  fp32         adamw              16
    convnext-tiny          infer  bf16         -                  32
    unet                   train  amp-fp16     adamw               8
    unet                   infer  fp16         -                   8
    toy                    train  amp-fp16     adamw               1
    toy                    train  amp-fp16     adamw               8
    toy                    train  apex-O2      adamw               1
    toy                    infer  fp32         -                   1
    toy                    infer  fp16         -                   1
"""
"""Network, training or inference, scenario, optimizer (``/4``: four backwards a step), batch, length of texts."""


@dataclass(frozen=True)
class Entry:
    """One workload of the suite."""

    name: str
    net: str
    scenario: str
    training: Training | None
    batch: int
    inputs: tuple[str, ...]

    @cached_property
    def case(self) -> Experiment:
        """The workload, built without its weights."""
        build, _ = NETS[self.net]
        with Weightless():
            model = build()
        inputs = inputs_from_specs(parse_inputs(self.inputs), self.batch)
        trains = self.training is not None
        return Experiment(self.name, model, inputs, trains, scenario_named(self.scenario), self.training)


def _entry(line: str) -> Entry:
    net, kind, scenario, optimizer, batch, *length = line.split()
    optimizer, _, backwards = optimizer.partition("/")
    training = Training(optimizer, gradient_accumulation_steps=int(backwards or 1)) if kind == "train" else None
    parts = [net, kind, scenario, *([optimizer] if training else []), f"b{batch}", *(f"s{size}" for size in length)]
    parts += [f"x{backwards}"] if backwards else []
    inputs = NETS[net][1].format(length=length[0] if length else "")
    return Entry("/".join(parts), net, scenario, training, int(batch), tuple(inputs.split()))


def _entries() -> Iterator[Entry]:
    yield from (_entry(line) for line in _TABLE.splitlines() if line.strip())


SUITE: Final[Mapping[str, Entry]] = {entry.name: entry for entry in _entries()}
