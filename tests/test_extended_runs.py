"""Runs of deep models are those of all their layers, whether they are extended from short models or not."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import memsize
from memsize import Generation, ModelRequest, Trace, Training
from memsize.cli import run
from memsize.render import render
from tests.deep import (
    SCENARIOS,
    WIDTH,
    Block,
    Deep,
    Forward,
    GenerationSteps,
    Inference,
    NotRepeatedError,
    OnGpuWithHost,
    ParallelSteps,
    Runner,
    TrainingSteps,
    assert_law,
    assert_same,
    first_and_next,
    opened,
    parse_parallel,
    reasons_after,
    run_once,
    traced,
)
from tests.gpus import card

STEPS = TrainingSteps(Training("adamw"))
SHORT = ((3, 4), (4, 5), (5, 6))
"""The lengths that short models may have."""
IDS = torch.zeros(2, 8, dtype=torch.int64)
IMAGE = torch.zeros(2, 3, 64, 64)


# -- models of users and of libraries ---------------------------------------------------------------------------------

WORKLOADS = {
    "forward": (Forward(), "fp16"),
    "inference": (Inference(), "int8-weight"),
    "adamw": (STEPS, "as-given"),
    "sgd": (TrainingSteps(Training("sgd", gradient_accumulation_steps=2)), "amp-fp16"),
    "adafactor": (TrainingSteps(Training("adafactor", ema=True)), "as-given"),
}


class CountedLayers(Deep):
    """Goes through its layers by their number."""

    def __init__(self) -> None:
        super().__init__(16)
        self.n_layers = len(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for number in range(self.n_layers):
            x = self.layers[number](x)
        return self.head(x)


def test_a_model_that_has_its_number_of_layers() -> None:
    assert assert_law(CountedLayers(), STEPS).extended_from in SHORT


@pytest.mark.parametrize(("workload", "scenario"), WORKLOADS.values(), ids=WORKLOADS)
def test_a_model_of_ones_own(workload: Any, scenario: str) -> None:
    assert assert_law(Deep(16), workload, scenario).extended_from in SHORT


def language_model(kind: str, head: str = "AutoModelForCausalLM", **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **sizes | {"num_hidden_layers": 8} | settings)
        model: nn.Module = getattr(transformers, head).from_config(config)
    return model


def gemma3(period: int) -> nn.Module:
    """Six periods, in which all layers but the last have a window."""
    settings = {"num_hidden_layers": 6 * period, "sliding_window_pattern": period}
    return language_model("gemma3_text", head_dim=4, sliding_window=4, **settings, **LLAMA)


LLAMA = {"num_key_value_heads": 2}
TEXTS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: language_model("llama", **LLAMA),
    "gpt2": lambda: language_model("gpt2"),
    "bert": lambda: language_model("bert", "AutoModelForMaskedLM"),
    "gemma3": lambda: gemma3(period=6),
    "gemma3 by threes": lambda: gemma3(period=3),
    # Its cache has a window for each layer that the config counts.
    "mistral": lambda: language_model("mistral", sliding_window=4, **LLAMA),
    "mixtral": lambda: language_model("mixtral", num_local_experts=4, **LLAMA),
    "dense-first": lambda: language_model(
        "deepseek_v3", num_hidden_layers=16, first_k_dense_replace=2, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=8, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4, num_key_value_heads=4,
    ),
}  # fmt: skip
ENCODER_DECODERS: dict[str, Callable[[], nn.Module]] = {
    "t5": lambda: encoder_decoder("t5", num_layers=8, num_decoder_layers=8, d_model=16, d_kv=4, d_ff=24),
    "t5-10-7": lambda: encoder_decoder("t5", num_layers=10, num_decoder_layers=7, d_model=16, d_kv=4, d_ff=24),
    "bart": lambda: encoder_decoder("bart", encoder_layers=8, decoder_layers=8, d_model=16, **BART),
    "bart-9-7": lambda: encoder_decoder("bart", encoder_layers=9, decoder_layers=7, d_model=16, **BART),
}
BART = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
ALL = pytest.mark.thorough


def encoder_decoder(kind: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, vocab_size=50, num_heads=4, **settings)
        model: nn.Module = transformers.AutoModelForSeq2SeqLM.from_config(config)
    return model


@pytest.mark.parametrize(
    ("kind", "workload", "scenario"),
    [
        ("llama", Forward(), "fp16"),
        ("llama", STEPS, "amp-fp16"),
        ("gpt2", STEPS, "as-given"),
        pytest.param("mistral", STEPS, "as-given", marks=ALL),
        pytest.param("llama", Inference(), "int8-weight", marks=ALL),
        pytest.param("llama", STEPS, "nf4", marks=ALL),
        pytest.param("llama", STEPS, "apex-O2", marks=ALL),
        pytest.param("bert", STEPS, "amp-bf16", marks=ALL),
        pytest.param("gemma3", STEPS, "as-given", marks=ALL),
        pytest.param("mixtral", STEPS, "amp-fp16", marks=ALL),
        pytest.param("dense-first", STEPS, "as-given", marks=ALL),
    ],
)
def test_language_models(kind: str, workload: Any, scenario: str) -> None:
    assert assert_law(TEXTS[kind](), workload, scenario, kwargs={"input_ids": IDS}).extended_from in SHORT


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "workload", "scenario"),
    [
        ("t5", STEPS, "as-given"),
        ("bart-9-7", STEPS, "amp-fp16"),
        pytest.param("t5-10-7", STEPS, "as-given", marks=ALL),
        pytest.param("bart", Inference(), "int8-weight", marks=ALL),
    ],
)
def test_encoders_with_decoders(kind: str, workload: Any, scenario: str) -> None:
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    assert assert_law(ENCODER_DECODERS[kind](), workload, scenario, kwargs=inputs).extended_from in SHORT


class Towers(nn.Module):
    """A tower of one kind of layer, whose result layers of a second tower read. Subclasses change what is done."""

    def __init__(self, first: int = 12, second: int = 7) -> None:
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.first = nn.ModuleList(Block(number) for number in range(first))
        self.second = nn.ModuleList(Reads(number) for number in range(second))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.stem(x)
        for layer in self.first:
            y = layer(y)
        for number, layer in enumerate(self.second):
            x = self.layer(number, layer, x, y)
        return self.head(x)

    def layer(self, number: int, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Run one block of the second tower."""
        return layer(x, y)


class Reads(Block):
    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.read = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x) * self.read(y)


@pytest.mark.parametrize("sizes", [(8, 8), (12, 7), (6, 14)])
@pytest.mark.parametrize(("workload", "scenario"), [(Inference(), "fp16"), (STEPS, "as-given")])
def test_two_towers(sizes: tuple[int, int], workload: Any, scenario: str) -> None:
    assert assert_law(Towers(*sizes), workload, scenario).extended_from in SHORT


@pytest.mark.thorough
def test_a_transformer_of_torch() -> None:
    model = nn.Transformer(8, 2, 9, 7, dim_feedforward=12, batch_first=True)
    ends = torch.zeros(2, 5, 8)
    assert assert_law(model, STEPS, args=(ends, ends)).extended_from in SHORT


def vision(library: str, name: str, **settings: Any) -> nn.Module:
    module = pytest.importorskip(library)
    with torch.device("meta"):
        model: nn.Module = module.create_model(name, **settings) if library == "timm" else _of_torchvision(settings)
    return model


def _of_torchvision(settings: dict[str, Any]) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(num_layers=14, num_heads=2, hidden_dim=16, mlp_dim=16, num_classes=10, **settings)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("library", "name", "settings"),
    [
        ("torchvision", "vit", {"image_size": 64, "patch_size": 8}),
        ("timm", "vit_tiny_patch16_224", {"img_size": 64, "depth": 14, "drop_path_rate": 0.1}),
        pytest.param("timm", "resnet50", {"layers": (1, 1, 30, 1)}, marks=ALL),
    ],
)
@pytest.mark.parametrize(("workload", "scenario"), [(Forward(), "as-given"), (STEPS, "amp-fp16")])
def test_vision_models(library: str, name: str, settings: dict[str, Any], workload: Any, scenario: str) -> None:
    trace = assert_law(vision(library, name, **settings), workload, scenario, args=(IMAGE,))
    assert trace.extended_from in SHORT


GENERATIONS = [
    ("llama", {}),
    ("mistral", {}),
    pytest.param("gpt2", {"num_beams": 2}, marks=ALL),
    pytest.param("mixtral", {"prefill_chunk_size": 4}, marks=ALL),
    ("llama", {"cache_implementation": "static"}),
    pytest.param("mistral", {"uneven": True}, marks=ALL),
    ("llama", {"cache_implementation": "offloaded"}),
    pytest.param("llama", {"cache_implementation": "offloaded_static"}, marks=ALL),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "options"), GENERATIONS)
def test_generations(kind: str, options: dict[str, Any]) -> None:
    model = TEXTS[kind]()
    data = {"kwargs": {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, "mode": "eval"}
    generation = Generation(prompt=8, max_new_tokens=4, **options)
    edits = (OnGpuWithHost(card("a100")),) if generation.is_offloaded else ()
    of_all, extended = (GenerationSteps(generation, edits=edits) for _ in range(2))
    whole, run = first_and_next(model, of_all, extended, **data)
    assert whole.extended_from == () and run.extended_from in SHORT
    assert_same(run, whole)
    assert extended.record.steps == of_all.record.steps


@pytest.mark.parametrize("kind", ["llama", "gemma3 by threes"])
def test_a_longer_prompt_takes_a_single_short_run(kind: str) -> None:
    """The layers of Gemma 3 keep 4 tokens, but for every third: up to a prompt of 3 tokens all of them look alike."""
    model, copies = TEXTS[kind](), []

    def counted(setup: Any) -> Any:
        copies.append(setup.model)
        return setup

    def prompt(length: int, _: Any) -> Any:
        return (), {"input_ids": torch.zeros(1, length, dtype=torch.int64)}

    with opened(ModelRequest.of(model, kwargs={"input_ids": IDS}, mode="eval")) as request:
        runner, of_all = Runner(*request.run), Runner(*request.run, whole=True)
        runs = []
        for length in (2, 8, 16):
            generation = Generation(prompt=length, max_new_tokens=2)
            steps, whole = (GenerationSteps(generation, edits=(counted,)) for _ in range(2))
            assert steps.proof is not None
            runner.short_runs.whole_runs[steps.proof.kind] = 100
            before = len(copies)
            run = runner.run(steps, SCENARIOS["as-given"], resized=partial(prompt, length))
            runs.append(len(copies) - before)
            assert run.extended_from in SHORT
            assert_same(run, of_all.run(whole, SCENARIOS["as-given"], resized=partial(prompt, length)))
            assert steps.record.steps == whole.record.steps
        assert runs[-1] == 1


# -- several GPUs -----------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """3.8 MiB of parameters: seven blocks fill a bucket of DDP, of 25 MiB."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, 200_000)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x)[..., :WIDTH]


STRATEGIES = [("fsdp=4", True), ("hsdp=2x2", True), ("ddp=4", True), ("ddp=4,views", False)]
STRATEGIES += [("pp=3,rank=0", False), ("dp=2", False)]


@pytest.mark.thorough
@pytest.mark.parametrize(("strategy", "repeats"), STRATEGIES)
@pytest.mark.parametrize("block", [Block, Wide])
def test_one_gpu_of_several(strategy: str, repeats: bool, block: type[nn.Module]) -> None:
    workload = ParallelSteps(Training("adamw"), parse_parallel(strategy), card("a100"))
    assert bool(assert_law(Deep(16, block), workload).extended_from) is repeats


class Large(nn.Module):
    """A block of 14 MiB, more than half a bucket: 2·600·3,072 float32, and a little more."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3072), nn.Linear(3072, WIDTH)
        self.between = nn.Linear(3072, 600)
        self.back = nn.Linear(600, 3072, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.back(self.between(self.up(self.norm(x)))).relu())


class LargeNormed(Large):
    """The same with running statistics, which are sent before each forward."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


@pytest.mark.parametrize(
    ("training", "scenario", "block", "repeats"),
    [
        (Training("adamw"), "as-given", Large, True),
        pytest.param(Training("sgd", gradient_accumulation_steps=2), "amp-fp16", Large, True, marks=ALL),
        pytest.param(Training("adamw"), "bf16", Large, True, marks=ALL),
        pytest.param(Training("adamw"), "as-given", LargeNormed, False, marks=ALL),
    ],
)
def test_buckets_that_end_anywhere_in_a_block(
    training: Training, scenario: str, block: type[nn.Module], repeats: bool
) -> None:
    workload = ParallelSteps(training, parse_parallel("ddp=8"), card("a100"))
    with torch.device("meta"):
        model = Deep(18, block)
    trace = assert_law(model, workload, scenario)
    assert bool(trace.extended_from) is repeats
    # 18 blocks of 3,714,660 elements, which are sent in two chunks; a bucket closes at 25 MiB or more.
    size = 2 if scenario == "bf16" else 4
    last = [one for one in trace.collectives if one.kind == "all-reduce" and one.phase == trace.collectives[-1].phase]
    total = size * sum(parameter.numel() for parameter in model.parameters())
    buckets = [one.bytes for one in last[len(last) - len(last) // training.gradient_accumulation_steps :]]
    assert sum(buckets) == total
    assert min(buckets[1:-1]) >= 25 << 20


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "scenario"), [("llama", "bf16"), ("gpt2", "amp-bf16"), ("bert", "as-given")])
def test_language_models_of_which_each_gpu_has_a_copy(kind: str, scenario: str) -> None:
    workload = ParallelSteps(Training("adamw"), parse_parallel("ddp=8"), card("a100"))
    assert assert_law(TEXTS[kind](), workload, scenario, kwargs={"input_ids": IDS}).extended_from in SHORT


# -- models that lie about their layers -------------------------------------------------------------------------------


class CountsGlobally(Block):
    """Makes more of every sixteenth call."""

    def forward(self, x: Tensor) -> Tensor:
        calls.append(1)
        return super().forward(x) + (x.exp() if len(calls) % 16 == 5 else x)


calls: list[int] = []


class CountsOnItsClass(Block):
    """Makes more of the fortieth call, which no first forward comes to."""

    count: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).count += 1
        return super().forward(x) + (x.exp() if self.count >= 40 else x)


class Counting(torch.autograd.Function):
    """Counts in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        backwards.append(1)
        return gradient.exp().sin() if len(backwards) % 16 == 5 else gradient.clone()


backwards: list[int] = []


class CountsInBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Counting.apply(super().forward(x))


class CountsOnItself(Deep):
    """Has a counter in the model, which a block of the second forward sees."""

    calls = 0

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return layer(x) + (x.exp() if self.calls == 20 else x)


class NamesABlock(Deep):
    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.exp() if index == 5 else x)


class NamesTheLast(Deep):
    """What the last block does is the same at any depth."""

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.exp() if index == len(self.layers) - 1 else x)


class TakesTurns(Deep):
    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x if index % 3 else x.exp())


class SharesAList(Deep):
    """Blocks write into a list of the model's, and read what the fifth one before them wrote."""

    def __init__(self) -> None:
        super().__init__(16, WritesIntoAList)
        self.outputs: list[Tensor] = []
        for layer in self.layers:
            layer.outputs = self.outputs

    def forward(self, x: Tensor) -> Tensor:
        self.outputs.clear()
        return super().forward(x)


class WritesIntoAList(Block):
    outputs: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.outputs.append(x)
        return x + self.outputs[-6] if len(self.outputs) > 5 else x


class Skips(Deep):
    """Outputs of the first half are added in the second."""

    def forward(self, x: Tensor) -> Tensor:
        self.skips: list[Tensor] = []
        return super().forward(x)

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        x = layer(x)
        if index < len(self.layers) // 2:
            self.skips.append(x)
        elif self.skips:
            x = x + self.skips.pop()
        return x


class SkipsFromTheFirst(Deep):
    """The first block's output is added behind the tenth."""

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        x = layer(x)
        if index == 0:
            self.first = x
        return x + self.first if index == 10 else x


class ReadsAConfig(Deep):
    kinds = tuple(number in (2, 3, 5, 7, 11, 13) for number in range(16))

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.exp() if self.kinds[index] else x)


class Compares(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.exp() if self.index > 8 else x)


class ComparesInInference(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.exp() if self.index > 8 and not torch.is_grad_enabled() else x)


class KnowsTheNumber(Deep):
    """A tensor as long as 64 divided by the number of layers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.new_zeros(64 // len(self.layers)).exp().sum()


class Concatenates(Deep):
    """Each block sees the mean of all outputs so far."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.stem(x)]
        for layer in self.layers:
            outputs.append(layer(torch.stack(outputs).mean(0)))
        return self.head(outputs[-1])


class ConcatenatesInside(Block):
    """Each block adds five rows, and reads the last ones."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x[-5:])])


class EndsEarly(Deep):
    """A known value says after which block."""

    def __init__(self) -> None:
        super().__init__(16)
        self.register_buffer("last", torch.tensor(9))

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) if index < int(self.last) else x


class HasAHook(Deep):
    def __init__(self) -> None:
        super().__init__(16)
        self.layers[5].register_forward_hook(lambda module, args, output: output.exp())


class HasABackwardHook(Deep):
    def __init__(self) -> None:
        super().__init__(16)
        self.layers[5].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].exp(),))


class IsTied(Deep):
    def __init__(self) -> None:
        super().__init__(16)
        self.layers[5].fc.weight = self.layers[9].fc.weight


class HasABuffer(Deep):
    def __init__(self) -> None:
        super().__init__(16)
        self.layers[5].register_buffer("scale", torch.ones(3))


class RegistersLate(Block):
    """The sixth block registers a buffer in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.index == 5 and not hasattr(self, "scale"):
            self.register_buffer("scale", x.new_zeros(WIDTH))
        return super().forward(x)


class DrawsRandomly(Deep):
    """Layers are dropped at random, as those of BART are."""

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.1 else layer(x)


class Quadratic(torch.autograd.Function):
    """Takes memory in its backward: as many bytes as layers squared, or as two numbers of layers multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, elements: int) -> Tensor:
        ctx.elements = elements
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + gradient.new_zeros(ctx.elements).exp().sum(), None


class GrowsInBackward(Deep):
    def __init__(self) -> None:
        super().__init__(40)

    def forward(self, x: Tensor) -> Tensor:
        return Quadratic.apply(super().forward(x), len(self.layers) ** 2)


class MultipliesInBackward(Towers):
    def __init__(self) -> None:
        super().__init__(60, 50)

    def forward(self, x: Tensor) -> Tensor:
        return Quadratic.apply(super().forward(x), len(self.first) * len(self.second))


class MultipliesItsTowers(Towers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.new_zeros(len(self.first) * len(self.second)).exp().sum()


class ReadsOneOfTheFirst(Towers):
    """The fifth block of the second tower runs one of the first."""

    def layer(self, number: int, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return layer(x, self.first[5](y) if number == 4 else y)


class ReadsAllOfTheFirst(Towers):
    """Each block of the second tower runs all of the first again."""

    def layer(self, number: int, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        for other in self.first:
            y = other(y)
        return layer(x, y)


class IsTiedAcross(Towers):
    def __init__(self) -> None:
        super().__init__()
        self.second[4].fc.weight = self.first[7].fc.weight


class ComparesTheTowers(Towers):
    """Short towers of equally many blocks do what these don't."""

    def layer(self, number: int, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return layer(x, y.exp() if len(self.first) > len(self.second) + 2 else y)


class TakesTurnsBetweenTowers(Towers):
    """A block of each tower in turn, as far as both reach: the first one has more."""

    def forward(self, x: Tensor) -> Tensor:
        x = y = self.stem(x)
        for number, layer in enumerate(self.first):
            y = layer(y)
            if number < len(self.second):
                x = self.second[number](x, y)
        return self.head(x + y)


class ReadsItsTwin(Towers):
    """Block for block, as a U-Net's second half reads the first, from the last on."""

    def __init__(self) -> None:
        super().__init__(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        outputs = [x := layer(x) for layer in self.first]
        for layer, y in zip(self.second, reversed(outputs), strict=True):
            x = layer(x, y)
        return self.head(x)


LIES: list[Callable[[], nn.Module]] = [
    lambda: Deep(16, CountsGlobally),
    lambda: Deep(16, CountsInBackward),
    lambda: Deep(16, CountsOnItsClass),
    SharesAList, CountsOnItself, NamesABlock, NamesTheLast, TakesTurns, Skips, SkipsFromTheFirst, ReadsAConfig,
    lambda: Deep(16, Compares),
    lambda: Deep(16, ComparesInInference),
    KnowsTheNumber, Concatenates,
    lambda: Deep(16, ConcatenatesInside),
    EndsEarly, HasAHook, HasABackwardHook, IsTied, HasABuffer,
    lambda: Deep(16, RegistersLate),
    DrawsRandomly,
    MultipliesItsTowers, ReadsOneOfTheFirst, ReadsAllOfTheFirst, IsTiedAcross, ComparesTheTowers,
    TakesTurnsBetweenTowers, ReadsItsTwin,
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("model", LIES)
@pytest.mark.parametrize("workload", [Inference(), STEPS])
def test_models_that_lie_about_their_layers(model: Callable[[], nn.Module], workload: Any) -> None:
    assert_law(model(), workload)


class HooksABlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.index == 30 and x.requires_grad:
            x.register_hook(lambda gradient: gradient.exp().sin())
        return x


class HooksEveryBlock(Block):
    """The hook is the same function for every block, and closes over the block."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.exp().sin() if self.index == 30 else gradient)
        return x


class HooksAWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.index == 30 and self.fc.weight.requires_grad:
            self.fc.weight.register_post_accumulate_grad_hook(partial(copies_gradients))
        return super().forward(x)


def copies_gradients(weight: Tensor) -> None:
    weight.grad = weight.grad.exp()  # type: ignore[union-attr]


class Numbered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: int) -> Tensor:
        ctx.index = index
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.exp().sin() if ctx.index == 30 else gradient.clone(), None


class ComparesInBackward(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Numbered.apply(super().forward(x), self.index)


class FreezesABlock(Deep):
    """From the second step on, one of the blocks is not trained."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[30].fc.weight.requires_grad_(not hasattr(self, "has_run"))
        self.has_run = True
        return super().forward(x)


class CountsInABuffer(Deep):
    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x)

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.exp() if index == 30 and self.steps.item() == 2 else x)


class SwitchesModes(Deep):
    def forward(self, x: Tensor) -> Tensor:
        self.mode = "warm" if getattr(self, "mode", "") == "cold" else "cold"
        return super().forward(x)

    def layer(self, index: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x.exp() if index == 30 and self.mode == "warm" else x)


@pytest.mark.parametrize(
    "model",
    [
        partial(Deep, 60, HooksABlock),
        partial(SwitchesModes, 60),
        *(
            pytest.param(model, marks=ALL)
            for model in (
                GrowsInBackward,
                MultipliesInBackward,
                partial(Deep, 60, HooksEveryBlock),
                partial(Deep, 60, HooksAWeight),
                partial(Deep, 60, ComparesInBackward),
                partial(FreezesABlock, 60),
                partial(CountsInABuffer, 60),
            )
        ),
    ],
)
def test_training_that_differs_where_no_first_forward_shows(model: Callable[[], nn.Module]) -> None:
    """A model so deep that a forward proves it, and not its first training step."""
    step, whole = (run_once(model(), STEPS, whole=of_all) for of_all in (False, True))
    assert_same(step, whole)


class HooksAlike(Block):
    """Has the same hook and the same function of its own in every block."""

    def forward(self, x: Tensor) -> Tensor:
        x = Doubled.apply(super().forward(x), 2)
        if x.requires_grad:
            x.register_hook(torch.exp)
        return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return factor * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None


def test_a_backward_that_is_alike_in_all_blocks_follows_from_short_models() -> None:
    step, whole = (run_once(Deep(60, HooksAlike), STEPS, whole=of_all) for of_all in (False, True))
    assert step.extended_from in SHORT
    assert_same(step, whole)


@pytest.mark.parametrize("kind", ["deep", "towers"])
def test_a_forward_proves_the_run_of_a_deep_model(kind: str) -> None:
    model = Deep(40) if kind == "deep" else Towers(60, 60)
    step, whole = (run_once(model, STEPS, whole=of_all) for of_all in (False, True))
    assert step.extended_from in SHORT
    assert_same(step, whole)


@pytest.mark.parametrize(("blocks", "reason"), [(4, "nothing repeats"), (12, "too few layers repeat")])
def test_why_a_model_is_run_whole(blocks: int, reason: str) -> None:
    # Of 12 blocks, a fourth run would be made of short models.
    assert reasons_after(3, Deep(blocks), Forward()) == (reason,)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Deep(16, CountsOnItsClass), "the model counts its calls"),
        (NamesABlock, "layers of the whole model are not those of its short models"),
    ],
)
def test_a_run_of_all_layers_notes_why(model: Callable[[], nn.Module], reason: str) -> None:
    usual, whole = (traced(model(), STEPS, whole=of_all).notes for of_all in (False, True))
    assert [*usual] == [
        *whole,
        f"16 repeated layers in layers: all were run, as they do not follow from a few ({reason})",
    ]


def test_a_model_that_counts_is_run_whole() -> None:
    assert traced(Deep(16, CountsOnItsClass), STEPS).extended_from == ()


def test_short_models_that_count_after_a_proof_do_not_tell() -> None:
    def counts(_: nn.Module) -> Trace:
        raise NotRepeatedError("the model counts its calls")

    with opened(ModelRequest.of(Deep(16), args=(torch.zeros(5, 3),))) as request:
        short_runs = Runner(*request.run).short_runs
        assert short_runs.extended(counts, "steps") is None
        assert short_runs.reasons == ("the model counts its calls",)


# -- answers ----------------------------------------------------------------------------------------------------------

NOTE = "40 repeated layers in layers: a few were run, the others follow by repetition (--whole runs all)"
ANSWERS: dict[str, Callable[..., Any]] = {
    "report": lambda **options: memsize.report(Deep(40), (3,), train="adamw", **options),
    "timeline": lambda **options: memsize.timeline(Deep(40), (3,), train="adamw", **options),
    "fit": lambda **options: memsize.fit(Deep(40), (3,), train="adamw", batch_size=2, scenarios="fp32", **options),
}


@pytest.mark.thorough
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_notes_how_its_runs_were_made(answer: Callable[..., Any]) -> None:
    usual, whole = answer(), answer(whole=True)
    assert NOTE in render(usual, "text") and NOTE not in render(whole, "text")
    figures, of_all = (json.loads(render(one, "json")) for one in (usual, whole))
    assert NOTE in str(figures) and NOTE not in str(of_all)
    assert without_notes(figures) == without_notes(of_all)


def without_notes(data: Any) -> Any:
    """The data of an answer without its notes."""
    if isinstance(data, dict):
        return {name: without_notes(value) for name, value in data.items() if name not in ("notes", "extended_from")}
    return [without_notes(value) for value in data] if isinstance(data, list) else data


@pytest.mark.thorough
def test_a_generation_notes_how_its_runs_were_made(tmp_path: Path) -> None:
    language_model("llama", num_hidden_layers=40, **LLAMA).config.to_json_file(tmp_path / "llama.json")
    usual, whole = (
        memsize.generate(f"hf:{tmp_path}/llama.json", prompt=8, max_new_tokens=4, scenarios="fp16", whole=of_all)
        for of_all in (False, True)
    )
    assert ["40 repeated layers in model.layers" in str(one.notes) for one in (usual, whole)] == [True, False]
    assert usual.generation_rows == whole.generation_rows


def test_sweeps_and_checks_take_it(tmp_path: Path) -> None:
    grid = {"target": "tests.deep:Deeper", "input": "3", "train": "adamw"}
    usual, whole = (
        memsize.sweep(grid | {"whole": of_all}, jobs=1, results=tmp_path / f"{of_all}.jsonl")
        for of_all in (False, True)
    )
    assert [NOTE in str(json.loads(render(one, "json"))) for one in (usual, whole)] == [True, False]


def test_points_of_a_sweep_share_what_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: deque[int] = deque()
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda block, x: (calls.append(1), forward(block, x))[1])
    grid = {"target": "tests.deep:Deeper", "input": "3", "train": "adamw", "batch_size": [2, 3, 4]}
    rows = []
    for whole in (False, True):
        calls.clear()
        answer = memsize.sweep(grid | {"whole": whole}, jobs=1, results=tmp_path / f"{whole}.jsonl")
        rows.append([(row.roles, row.allocated, row.reserved, row.device) for row in answer.sweep_rows])
        # Two of three steps are run. The proof is a forward, with two short ones. The first point runs steps with 3
        # and 4 layers; each further point runs 3.
        assert len(calls) == (3 * 2 * 40 if whole else 40 + (3 + 4) + 2 * (3 + 4) + 2 * 2 * 3)
    assert rows[0] == rows[1]


def test_the_command_line_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["timeline", "tests.deep:Deeper", "--input", "3", "--train", "adamw", "--full"]
    for options, has_note in (([], True), (["--whole"], False)):
        assert run([*command, *options]) == 0
        assert ("repeated layers in layers" in " ".join(capsys.readouterr().out.split())) is has_note
