"""Adapters, quantized bases and frozen parts by an option: against modules written by hand, peft, and arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memsize
from memsize.errors import InputError, MemsizeError
from memsize.records.trace import Trace
from tests.models import stored_tensors

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks behind an embedding of floats; `wrap` puts something in the place of each linear layer."""

    def __init__(self, wrap: Callable[[nn.Linear], nn.Module] = lambda linear: linear, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        for module in (self, *self.blocks):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, wrap(child))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.enter(x))  # type: ignore[no-any-return]


class Written(nn.Module):
    """LoRA of rank 8 as its paper writes it, with adapters in float32."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 8, bias=False)
        self.b = nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        dtype = result.dtype
        x = x.to(torch.float32)
        result = result + self.b(self.a(x)) * 2.0
        return result.to(dtype)  # type: ignore[no-any-return]


def traced(model: nn.Module, *, batch: int = 4, **options: Any) -> Trace:
    return memsize.trace(model, (WIDTH,), batch_size=batch, optimizer="adamw", **options).trace


def deltas(trace: Trace) -> list[int]:
    return [event.delta for event in trace.events]


def trained_bytes(trace: Trace) -> int:
    return sum(tensor.bytes for tensor in trace.tensors if tensor.trainable)


def written(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Net(lambda linear: Written(linear.to(dtype)))
    for name, module in model.named_modules():
        if not name.endswith((".a", ".b")) and not isinstance(module, Written):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
                parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize("scenario", ["as-given", "amp-bf16"])
def test_lora_makes_the_events_of_one_that_is_written(scenario: str) -> None:
    assert deltas(traced(Net(), lora="r=8", scenario=scenario)) == deltas(traced(written(), scenario=scenario))


def test_adapters_stay_float32_beside_a_base_in_half_precision() -> None:
    ours = traced(Net(), lora="r=8", scenario="bf16")
    by_hand = traced(written(torch.bfloat16), input_data=None, scenario="as-given")
    # in the hidden widths: A [8, in] and B [out, 8] of the first layer and of two in each block
    elements = 8 * (2 * WIDTH + 3 * 2 * 5 * WIDTH)
    assert trained_bytes(ours) == trained_bytes(by_hand) == 4 * elements
    assert {t.spec.dtype for t in ours.tensors if not t.trainable} == {"bfloat16"}


def test_lora_is_pefts_own() -> None:
    peft = pytest.importorskip("peft")
    for dropout in (0.0, 0.1):
        model = peft.inject_adapter_in_model(
            peft.LoraConfig(r=8, target_modules=["up", "down"], lora_dropout=dropout), Net()
        )
        ours = traced(Net(), lora=f"r=8,targets=up;down,dropout={dropout}")
        assert deltas(ours) == deltas(traced(model))


@pytest.mark.parametrize(
    ("adapter", "of_a_layer"),
    [
        ("dora:r=8", lambda outputs, inputs: 8 * (outputs + inputs) + outputs),
        ("ia3", lambda outputs, inputs: outputs),
        ("vera:r=8", lambda outputs, inputs: outputs + 8),
    ],
)
def test_other_kinds_are_made_by_peft(adapter: str, of_a_layer: Callable[[int, int], int]) -> None:
    pytest.importorskip("peft")
    trace = traced(Net(), adapter=f"{adapter}{',' if ':' in adapter else ':'}targets=up")
    assert trained_bytes(trace) == 4 * 3 * of_a_layer(4 * WIDTH, WIDTH)


def test_without_peft_the_other_kinds_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MemsizeError, match="dora adapters are made by peft: pip install peft"):
        traced(Net(), adapter="dora")


def test_the_optimizer_holds_the_adapters_alone() -> None:
    trace = traced(Net(), lora="r=4,targets=up")
    state = sum(storage.bytes for storage in trace.storages if storage.role == "optimizer state")
    elements = 3 * 4 * (WIDTH + 4 * WIDTH)
    assert trained_bytes(trace) == 4 * elements
    assert state == 2 * 4 * elements


def test_a_base_in_four_bits_composes_with_the_scenario() -> None:
    trace = traced(Net(), lora="r=8", base="nf4", scenario="bf16")
    weights = [t for t in trace.tensors if t.name.endswith("base_layer.weight")]
    elements = WIDTH * WIDTH, *[4 * WIDTH * WIDTH] * 6
    assert [t.bytes for t in weights] == [n // 2 + 4 * n // 64 + 64 for n in elements]
    rest = [t for t in trace.tensors if not t.trainable and t not in weights]
    assert {t.spec.dtype for t in rest} == {"bfloat16"}


@pytest.mark.parametrize(
    ("base", "forward", "backward"), [("nf4", 1, 1), ("int8", 0, 1), ("mxfp4", 1, 1), ("fp8", 1, 0)]
)
def test_the_weight_is_unpacked_in_forward_and_again_in_backward(base: str, forward: int, backward: int) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(128, 128, bias=False), nn.Linear(128, 384, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))  # type: ignore[no-any-return]

    trace = memsize.trace(
        Two(), (128,), batch_size=8, optimizer="sgd", lora="r=8,targets=first", base=base, steps=1
    ).trace
    made = [
        trace.phases[event.phase].partition(" ")[0]
        for event in trace.events
        if event.delta == 4 * 384 * 128 and trace.storages[event.storage].role != "parameter"
    ]
    assert (made.count("forward"), made.count("backward")) == (forward, backward)


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_bitsandbytes_converts_the_conv1d_of_transformers_too(base: str) -> None:
    """transformers puts its layers in place of `Conv1D`, with the transposed weight, as in place of `Linear`."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    plain, transposed = (
        nn.Sequential(make(64, 192), nn.ReLU(), make(192, 64)) for make in (nn.Linear, lambda k, n: conv1d(n, k))
    )
    traces = [
        memsize.trace(model, (64,), batch_size=4, optimizer="adamw", lora="r=8", base=base, scenario="bf16").trace
        for model in (plain, transposed)
    ]
    assert deltas(traces[0]) == deltas(traces[1])
    frozen = [tensor.bytes for tensor in traces[1].tensors if tensor.wrapper]
    elements = 64 * 192
    rows = (192, 64)
    four_bits = [elements // 2 + 4 * elements // 64 + 4 * 16] * 2
    assert frozen == (four_bits if base == "nf4" else [elements + 4 * outputs for outputs in rows])


def test_int8_products_keep_their_input() -> None:
    """What `MatMul8bitLt` keeps, and the int32 product that it takes."""
    net = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 256, bias=False))
    trace = memsize.trace(net, (64,), batch_size=16, optimizer="sgd", lora="r=8,targets=0", base="int8", steps=1).trace
    product = [e for e in trace.events if trace.storages[e.storage].dtype == "int32" and e.delta > 0]
    assert [event.delta for event in product] == [4 * 16 * 128, 4 * 16 * 256]
    kept = [s for s in trace.storages if s.role == "activation" and s.bytes == 4 * 16 * 128]
    assert kept


def test_freezing_by_name() -> None:
    free = traced(Net())
    assert trained_bytes(traced(Net(), freeze="blocks.0,enter")) == trained_bytes(free) - 4 * (
        WIDTH * WIDTH + WIDTH + 2 * WIDTH + 8 * WIDTH * WIDTH + 5 * WIDTH
    )
    assert trained_bytes(traced(Net(), freeze=["*norm*", "bias"])) == 4 * (WIDTH * WIDTH + 3 * 8 * WIDTH * WIDTH)


def test_copies_of_modules_are_trained_in_full() -> None:
    entering = WIDTH * WIDTH + WIDTH
    trace = traced(Net(), lora="r=4,targets=up,train=enter")
    assert trained_bytes(trace) == 4 * (3 * 4 * 5 * WIDTH + entering)
    stored, plain = (sum(stored_bytes(t).values()) for t in (trace, traced(Net(), lora="r=4,targets=up")))
    assert stored == plain + 4 * entering  # peft keeps the original beside the copy

    every = traced(Net(), lora="r=4,train=enter")  # and puts no adapter beside either
    assert trained_bytes(every) == 4 * (3 * 4 * 2 * 5 * WIDTH + entering)
    four_bits = stored_bytes(traced(Net(), lora="r=4,train=enter", base="nf4"))
    assert four_bits["enter.trained.weight"] == four_bits["enter.original_module.weight"] == 4 * WIDTH * WIDTH


def test_trained_copies_are_pefts_own() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["enter", "up"], modules_to_save=["enter"])
    theirs = traced(peft.get_peft_model(Net(), config))
    ours = traced(Net(), lora="r=4,targets=enter;up,train=enter")
    assert deltas(ours) == deltas(theirs)
    assert sum(stored_bytes(ours).values()) == sum(stored_bytes(theirs).values())


@pytest.mark.parametrize(("r", "blocks"), [("r=4", 4), ("oft_block_size=16", WIDTH // 16)])
def test_the_blocks_of_oft_are_counted_by_r_or_by_their_size(r: str, blocks: int) -> None:
    pytest.importorskip("peft")
    trace = traced(Net(), adapter=f"oft:{r},targets=up")
    block = WIDTH // blocks
    assert trained_bytes(trace) == 4 * 3 * blocks * block * (block - 1) // 2  # skew-symmetric


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("ia3:r=8", r"^ia3 has no option 'r': "),
        ("vera:taget=up", r"^vera has no option 'taget': did you mean targets, target_modules"),
    ],
)
def test_options_that_peft_does_not_have(adapter: str, message: str) -> None:
    pytest.importorskip("peft")
    with pytest.raises(InputError, match=message):
        traced(Net(), adapter=adapter)


def test_the_scale_does_not_matter() -> None:
    assert deltas(traced(Net(), lora="r=4,alpha=32")) == deltas(traced(Net(), lora="r=4"))


def test_the_users_model_is_left_alone() -> None:
    model = Net()
    before = stored_tensors(model), [p.requires_grad for p in model.parameters()]
    traced(model, lora="r=8", base="nf4", freeze="enter")
    assert (stored_tensors(model), [p.requires_grad for p in model.parameters()]) == before


def test_adapters_are_trained_unless_evaluated() -> None:
    assert "optimizer" in str(memsize.timeline(Net(), (WIDTH,), lora="r=4"))
    assert "training with adamw" in str(memsize.fit(Net(), (WIDTH,), lora="r=4", budget="2GB", scenarios="fp32"))
    assert "optimizer" not in str(memsize.timeline(Net(), (WIDTH,), lora="r=4", mode="eval"))


def test_deep_models_are_extended_to_the_same() -> None:
    options: dict[str, Any] = {"lora": "r=4", "base": "nf4", "scenario": "bf16"}
    extended, whole = (traced(Net(blocks=40), whole=whole, **options) for whole in (False, True))
    assert any("repeated" in note for note in extended.notes)
    assert deltas(extended) == deltas(whole)
    assert stored_bytes(extended) == stored_bytes(whole)


def stored_bytes(trace: Trace) -> dict[str, int]:
    return {tensor.name: tensor.bytes for tensor in trace.tensors}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": "r=4,targets=upp"}, r"^no layer is called 'upp': did you mean up\?$"),
        ({"lora": "r=65,targets=down"}, r"^rank 65 is larger than blocks.0.down: the largest is 64$"),
        ({"lora": "rank=4"}, r"^lora has no option 'rank': did you mean r\?$"),
        ({"lora": "target_modules=up"}, r"^lora has no option 'target_modules': did you mean targets\?$"),
        ({"lora": "r=0"}, r"^r is 0: it should be a whole number from 1$"),
        ({"lora": "r"}, r"^cannot read the option 'r' of lora: write it like r=16,targets=q_proj;v_proj$"),
        ({"lora": "dropout=2"}, r"^dropout is 2: "),
        ({"lora": "train=*"}, r"^lora has no layer to stand beside: train=\* takes them all$"),
        ({"freeze": "block.0"}, r"^freeze: nothing is called 'block.0': did you mean blocks.0"),
        ({"lora": "train=head"}, r"^no module is called 'head': "),
        ({"adapter": "lore"}, r"^no adapter 'lore': did you mean lora, dora\?$"),
        ({"lora": "r=4", "adapter": "dora"}, r"^lora and adapter are both given: leave one of them out$"),
        ({"base": "nf5"}, r"^no base 'nf5': did you mean nf4, nvfp4\?$"),
        ({"base": "4-bit"}, r"^no base '4-bit': did you mean nf4\?$"),
        ({"base": "8bit"}, r"^no base '8bit': did you mean int8\?$"),
        ({"freeze": "block.*.up"}, r"^freeze: nothing is called 'block.\*.up': did you mean blocks.\*.up, "),
        ({"freeze": "block"}, r"^freeze: nothing is called 'block': did you mean blocks\?$"),
    ],
)
def test_what_cannot_be_meant_is_one_line(options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        traced(Net(), **options)


def test_a_base_that_no_layer_takes_names_those_that_it_takes() -> None:
    odd = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 8))
    with pytest.raises(InputError, match=r"^no layer of the model can be stored as mxfp4: choose from nf4, .*, fp8$"):
        memsize.trace(odd, (40,), base="mxfp4")
    with pytest.raises(InputError, match="no other format is for its layers either"):
        memsize.trace(nn.Conv2d(3, 8, 3), (3, 8, 8), base="nf4")


def test_a_base_is_quantized_once() -> None:
    report = memsize.report(Net(), (WIDTH,), base="nf4", scenarios="fp32,int8-weight")
    assert "the base is stored as nf4 already" in str(report)


def test_a_report_names_the_base_that_leaves_layers() -> None:
    report = memsize.report(Net(), (WIDTH,), base="nf4", lora="r=4", scenarios="bf16")
    (finding,) = (finding for finding in report.why() if finding.code == "quantization-leaves-layers")
    assert finding.text().startswith("nf4 under bf16 does not convert blocks.0.norm, ")
    assert finding.bytes == 2 * 3 * 2 * WIDTH  # the norms in bfloat16, no adapter


def test_adapters_are_no_part_that_was_not_converted() -> None:
    """A model in bfloat16 is whole, though peft has its adapters in float32."""
    reports = [memsize.report(Net().bfloat16(), (WIDTH,), lora="r=4", scenarios="bf16", base=b) for b in (None, "nf4")]
    assert not any(finding.code == "mixed-dtypes" for report in reports for finding in report.why())


def test_no_base_takes_the_head_of_a_language_model() -> None:
    """As transformers loads it: torchao's fp8 leaves heads alone there too, and a tied one stays tied."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.quantizers.base import get_keys_to_not_convert

    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert "lm_head" in get_keys_to_not_convert(model)
    trace = memsize.report(model, "input_ids=8:int64", base="fp8", scenarios="bf16").trace
    # Four products of attention and three of the MLP, a byte an element and four a row; embedding and norms in float32.
    products = 4 * 64 * 64 + 3 * 64 * 96 + 4 * (4 * 64 + 2 * 96 + 64)
    assert sum(t.bytes for t in trace.tensors if t.kind == "parameter" and not t.tied_to) == products + 4 * (
        1000 * 64 + 3 * 64
    )
    assert next(t for t in trace.tensors if t.name == "lm_head.weight").tied_to == "model.embed_tokens.weight"


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up[0]


def test_a_base_that_leaves_the_experts_says_so() -> None:
    def notes(base: str) -> list[str]:
        report = memsize.report(nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts()), (WIDTH,), base=base)
        return [note for note in report.notes if "experts" in note]

    (note,) = notes("nf4")
    assert note.startswith(f"nf4 converts linear layers only: the experts' weights, {4 * WIDTH * WIDTH:,} parameters,")
    assert not notes("mxfp4")


def test_an_imbalance_without_experts_says_so() -> None:
    (note,) = (note for note in memsize.report(Net(), (WIDTH,), imbalance=1.5).notes if "imbalance" in note)
    assert note.startswith("no experts were recognized in the model")
    mixture = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts())
    (note,) = (note for note in memsize.report(mixture, (WIDTH,), imbalance=1.5).notes if "imbalance" in note)
    assert note.startswith("all experts of a layer share one weight: an imbalance matters to loops over them")


def test_a_report_says_when_adapters_cannot_help() -> None:
    def codes(batch: int) -> set[str]:
        report = memsize.report(Net(), (WIDTH,), batch_size=batch, lora="r=4", scenarios="fp32", gpu="t4")
        return {finding.code for finding in report.why()}

    assert "adapters-leave-activations" in codes(65_536)
    assert "adapters-leave-activations" not in codes(1)
    plain = memsize.report(Net(), (WIDTH,), batch_size=65_536, train="adamw", scenarios="fp32", gpu="t4")
    assert "adapters-leave-activations" not in {finding.code for finding in plain.why()}


def test_a_fit_says_when_adapters_cannot_help() -> None:
    fit = memsize.fit(Net(), (WIDTH,), lora="r=4", budget="2GB", scenarios="fp32")
    (finding,) = (finding for finding in fit.why() if finding.code == "fit-adapters")
    assert ("so gradients and optimizer state take" in finding.text()) == bool(finding.values["states"])


def test_a_sweep_varies_the_base(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))\n"
    )
    grid = {
        "target": f"{tmp_path}/net.py:net",
        "input": "64",
        "train": "adamw",
        "lora": "r=8",
        "base": ["nf4", "int8"],
        "freeze": "0",
    }
    stored = [row.stored for row in memsize.sweep(grid, jobs=1).sweep_rows]
    n, rest = 64 * 64, 3 * (4 * 64 + 4 * 8 * 128)
    assert stored == [rest + 3 * (n // 2 + 4 * n // 64 + 64), rest + 3 * (n + 4 * 64)]
