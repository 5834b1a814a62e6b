"""Generation: KV caches against arithmetic and real runs, and derived steps against steps that were all traced."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import memsize
from memsize import Generation, ModelRequest
from memsize.cli import run
from memsize.errors import InputError, UnknownInputError
from tests.configs import SMALL_LLAMA
from tests.gpus import card, estimate_gpu, flow_of
from tests.models import load_loop, scenario_named
from tests.process import side_by_side
from tests.records import split_phase
from tests.workloads import (
    Curve,
    Generated,
    GenerationSteps,
    Generator,
    Polynomials,
    Runner,
    Step,
    Structure,
    generator as generators,
    model_of,
    prompts_of,
    weighted,
)

transformers = pytest.importorskip("transformers")

SMALL = SMALL_LLAMA | {"vocab_size": 100}
HEAD = 64 // 4
TOKEN = 2 * 2 * 2 * HEAD * 2
"""Bytes of one token in the cache: keys and values × layers × key-value heads × width × bytes of bfloat16."""
WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 100,
}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    def written(**entries: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(entries))
        return f"hf:{path}"

    return written


@contextmanager
def generator_of(target: Any, *edits: Any, scenario: str = "as-given", **kwargs: torch.Tensor) -> Iterator[Generator]:
    subject = ModelRequest.of(target, kwargs=kwargs or None, mode="eval")
    with model_of(subject) as loaded:
        prompts = prompts_of(subject, loaded)
        runner = Runner(loaded.name, loaded.model, prompts(8), False, gpu=card("a100"))
        yield Generator(runner, prompts, scenario_named(scenario), edits=edits)


def generated(
    target: str, generation: Generation, batch: int, every: bool = False, scenario: str = "as-given"
) -> Generated:
    """The run of a generation; with `every`, with each of its steps traced."""
    with generator_of(target, scenario=scenario) as generator:
        return traced_whole(generator, generation, batch) if every else generator.run(generation, batch)


def traced_whole(generator: Generator, generation: Generation, batch: int) -> Generated:
    if generator._is_encoder_decoder:
        generation = replace(generation, begun=1)
    return generators._generated(generator.sample((generation, batch, None)), generation)


CASES = {
    "dynamic": (SMALL, {}),
    "static": (SMALL, {"cache_implementation": "static"}),
    "fp8": (SMALL, {"kv_cache_dtype": "fp8"}),
    "in chunks": (SMALL, {"prefill_chunk_size": 5}),
    "window filled while decoding": (SMALL | WINDOW, {}),
    "window filled by the prompt": (SMALL | WINDOW | {"sliding_window": 12}, {}),
    "encoder-decoder, masks padded to 8": (T5, {}),
}


LONG = ("window filled while decoding", "encoder-decoder, masks padded to 8")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in LONG else case for case in CASES]
)
def test_derived_steps_equal_traced_ones(
    case: str, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, options = CASES[case]
    asked = Generation(prompt=16, max_new_tokens=44, **options)
    target = config(**entries)
    every = generated(target, asked, 2, every=True)
    derived = generated(target, asked, 2)
    peaks = [estimate_gpu(run.trace, card("a100")) for run in (every, derived)]
    assert peaks[0].requested == peaks[1].requested
    assert peaks[0].reserved == peaks[1].reserved
    assert len(derived.trace.events) < len(every.trace.events)
    monkeypatch.setattr(generators, "_lasting", lambda piece: None)  # leave nothing out
    derived = generated(target, asked, 2)
    assert derived.exact
    assert derived.trace.events == every.trace.events
    assert derived.trace.storages == every.trace.storages
    assert derived.trace.phases == every.trace.phases
    assert derived.cached == every.cached


@pytest.mark.slow
@pytest.mark.parametrize("new", [64, 257])
def test_derived_steps_equal_traced_ones_of_long_generations(
    new: int, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generators, "_lasting", lambda piece: None)
    for entries in (SMALL, SMALL | WINDOW | {"sliding_window": 100}):
        target = config(**entries)
        every = generated(target, Generation(prompt=40, max_new_tokens=new), 3, every=True)
        derived = generated(target, Generation(prompt=40, max_new_tokens=new), 3)
        assert derived.trace.events == every.trace.events
        assert derived.trace.storages == every.trace.storages


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("entries", "options", "laws"),
    [
        ({}, {}, [False]),
        ({}, {"cache_implementation": "static"}, [False]),
        ({"_attn_implementation": "eager"}, {}, [True]),
        (WINDOW | {"sliding_window": 50}, {}, [False]),
    ],
    ids=["dynamic", "static", "scores", "one prompt fills the window"],
)
def test_generations_between_traced_ones_equal_them(
    entries: dict[str, Any],
    options: dict[str, Any],
    laws: list[bool],
    config: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generators, "_lasting", lambda piece: None)
    asked = Generation(prompt=13, max_new_tokens=19, **options)
    with generator_of(config(**SMALL | entries)) as generator:
        generator.cover(asked, [2, 3, 6], [13, 21, 53])
        traced = set(generator.samples)
        derived = generator.derive(asked, 5)
        assert derived.exact and set(generator.samples) == traced
        every = traced_whole(generator, asked, 5)
    assert [polynomial.scores for _, polynomial in generator._polynomials] == laws
    assert derived.trace.events == every.trace.events
    assert derived.trace.storages == every.trace.storages
    assert derived.trace.phases == every.trace.phases
    assert (derived.cached, derived.before) == (every.cached, every.before)


def test_many_rows_share_what_is_traced(config: Callable[..., str]) -> None:
    """The same as each row by itself; side by side too."""
    asked: dict[str, Any] = {"max_new_tokens": 20, "scenarios": "as-given", "gpu": "a100"}
    target = config(**SMALL)
    alone = [memsize.generate(target, prompt=p, batch_size=b, **asked).generation_rows[0] for b, p in ((1, 9), (4, 30))]
    with side_by_side(2):
        both = memsize.generate(target, prompt=[9, 30], batch_size=[1, 4], **asked)
    said = [replace(row, traced=()) for row in both.generation_rows]
    assert [said[0], said[3]] == [replace(row, traced=()) for row in alone]
    assert both.trace.inputs[0].spec.shape == (4, 30)


@pytest.mark.parametrize(("batch", "prompt", "new"), [(1, 8, 4), (3, 10, 40)])
def test_a_full_cache_holds_keys_and_values_of_every_token(
    config: Callable[..., str], batch: int, prompt: int, new: int
) -> None:
    report = memsize.generate(
        config(**SMALL), prompt=prompt, max_new_tokens=new, batch_size=batch, scenarios="as-given"
    )
    (row,) = report.ran
    held = prompt + new - 1  # the last token is never read
    # transformers counts the tokens that a layer has seen in no tensor of a dynamic cache
    assert row.cache == batch * held * TOKEN
    assert row.per_token == batch * TOKEN
    assert row.per_sequence == held * TOKEN
    (kind,) = row.layers
    assert kind == ("full attention", 2, held * TOKEN, TOKEN)


def test_a_sliding_window_stops_growing(config: Callable[..., str]) -> None:
    target = config(**SMALL | WINDOW)
    report = memsize.generate(target, prompt=20, max_new_tokens=60, scenarios="as-given")
    (row,) = report.ran
    # 23 earlier tokens are kept as a view of all 24; beside them 2 layers count their tokens in an int64 each.
    assert row.layers[0].kind == "sliding window"
    assert row.cache == 24 * TOKEN + 2 * 8
    assert row.per_token == 0


def test_the_cache_is_that_of_a_real_run(config: Callable[..., str]) -> None:
    report = memsize.generate(config(**SMALL), prompt=12, max_new_tokens=9, batch_size=2, scenarios="as-given")
    torch.manual_seed(0)
    entries = {name: value for name, value in SMALL.items() if name not in ("architectures", "model_type")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**entries)).to(torch.bfloat16).eval()
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    asked = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        out = model.generate(tokens, attention_mask=tokens + 1, return_dict_in_generate=True, **asked)
    held = [tensor for layer in out.past_key_values.layers for tensor in (layer.keys, layer.values)]
    assert report.ran[0].cache == sum(tensor.untyped_storage().nbytes() for tensor in held)


def test_every_figure_is_that_of_the_run(config: Callable[..., str]) -> None:
    report = memsize.generate(
        config(**SMALL), prompt=[8, 16], max_new_tokens=20, batch_size=[1, 2], scenarios="as-given,fp32"
    )
    assert [(row.scenario, row.batch, row.prompt) for row in report.ran] == [
        (scenario, batch, prompt) for scenario in ("as-given", "fp32") for batch in (1, 2) for prompt in (8, 16)
    ]
    for row in report.ran:
        assert row.estimate is not None
        assert max(row.prefill.peak, row.decode.peak) == row.estimate.requested
        assert row.transient == row.decode.peak - row.decode.end
        assert row.prefill.end <= row.prefill.peak and row.decode.end <= row.decode.peak
    half, whole = (next(row for row in report.ran if row.scenario == name) for name in ("as-given", "fp32"))
    assert whole.cache == 2 * half.cache
    assert {split_phase(phase)[0] for phase in report.trace.phases} == {"setup", "prefill", "decode"}
    assert max(split_phase(phase)[1] for phase in report.trace.phases) == 19


def test_a_model_of_ones_own_generates(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table(ids)

        def generate(self, ids: torch.Tensor, max_new_tokens: int = 1, **_: Any) -> torch.Tensor:
            for _ in range(max_new_tokens):
                ids = torch.cat([ids, self(ids)[:, -1:, 0].to(torch.int64)], dim=1)
            return ids

    report = memsize.generate(Own(), "4:int64", prompt=6, max_new_tokens=5, scenarios="as-given")
    (row,) = report.ran
    assert row.cache == 0
    # The last of 4 steps reads 6 + 4 tokens: 8 floats of each.
    assert row.decode.peak >= 10 * 8 * 4
    assert "keeps no KV cache" in report.why()[1].text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 0}, "prompt is 0: it must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0: it must be at least 1"),
        ({"num_beams": 0}, "num_beams is 0: it must be at least 1"),
        ({"batch_size": [4, 0]}, "a batch of 0: it must be at least 1"),
        ({"batch_size": []}, "cannot read '' as batches"),
        ({"cache_implementation": "stat"}, "no cache implementation 'stat'"),
        ({"kv_cache_dtype": "int5"}, "no kv cache dtype 'int5'"),
        ({"cache_implementation": "static", "kv_cache_dtype": "fp8"}, "a static cache keeps the dtype of the model"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, UnknownInputError), match=message):
        memsize.generate("hf:llama", **options)


def test_a_model_that_does_not_generate() -> None:
    with pytest.raises(InputError, match="Linear has no generate method: it generates no tokens"):
        memsize.generate(nn.Linear(4, 4), (4, 4), prompt=4, max_new_tokens=4)


def test_a_model_of_images_that_does_not_generate() -> None:
    said = "hf:resnet .ResNetForImageClassification. has no generate method"
    with pytest.raises(InputError, match=said):
        memsize.generate("hf:resnet", arguments={"depths": [1, 1, 1, 1]})
    with pytest.raises(InputError, match=said):
        memsize.fit("hf:resnet", arguments={"depths": [1, 1, 1, 1]}, vary="context", max_new_tokens=4)


def test_more_tokens_than_positions_are_noted(config: Callable[..., str]) -> None:
    report = memsize.generate(
        config(**SMALL | {"max_position_embeddings": 16}), prompt=10, max_new_tokens=8, scenarios="as-given"
    )
    assert "the model has positions for 16 tokens: at 18 its output is meaningless" in report.notes


def test_more_tokens_than_a_table_has_positions_are_refused() -> None:
    entries = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    said = "hf:gpt2 .GPT2LMHeadModel. has a table of 16 positions, and 18 tokens are asked for: lower"
    with pytest.raises(InputError, match=said):
        memsize.generate("hf:gpt2", arguments=entries, prompt=10, max_new_tokens=8, scenarios="as-given")


def test_no_positions_are_no_limit() -> None:
    """XLNet's config has -1 of them."""
    entries = {"n_layer": 1, "d_model": 16, "n_head": 2, "d_inner": 32, "vocab_size": 50}
    found = memsize.generate("hf:xlnet", arguments=entries, prompt=6, max_new_tokens=2, scenarios="as-given")
    assert not any("positions" in note for note in found.notes)


@pytest.mark.parametrize(
    ("entries", "options", "message"),
    [
        (
            T5,
            {"kv_cache_dtype": "fp8"},
            "quantizes no cache of an encoder-decoder: use cache_implementation dynamic or static",
        ),
        (
            SMALL | WINDOW,
            {"kv_cache_dtype": "fp8"},
            "of full attention alone, and this model has sliding_attention layers",
        ),
        (
            SMALL,
            {"cache_implementation": "quantized"},
            "a KV cache in int4 needs optimum-quanto: pip install optimum-quanto",
        ),
        (SMALL, {"kv_cache_dtype": "int2"}, "a KV cache in int2 needs optimum-quanto: pip install optimum-quanto"),
    ],
)
def test_caches_that_transformers_lacks_are_told_before(
    entries: dict[str, Any],
    options: dict[str, Any],
    message: str,
    config: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name.startswith("optimum") else find_spec(name, *more)
    )
    with pytest.raises(InputError, match=message):
        memsize.generate(config(**entries), prompt=8, max_new_tokens=4, scenarios="as-given", **options)


def test_one_sequence_is_told_as_one(config: Callable[..., str]) -> None:
    asked: dict[str, Any] = {"prompt": 16, "max_new_tokens": 4, "batch_size": 1, "scenarios": "as-given", "gpu": "t4"}
    fits = memsize.generate(config(**SMALL), **asked).findings[0]
    assert fits.text().startswith("Under as-given, 1 sequence of 16 + 4 tokens fits: ")


GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 64,
    "dtype": "float32",
}


def test_the_verdict_names_what_a_scenario_hardly_quantizes(config: Callable[..., str]) -> None:
    asked: dict[str, Any] = {"gpu": "t4", "prompt": 16, "max_new_tokens": 4, "scenarios": "fp16,int8-weight"}
    findings = {finding.code: finding for finding in memsize.generate(config(**GPT2), **asked).findings}
    embeddings, norms = (64 + 64) * 32, 5 * 2 * 32
    # Of each block: the products c_attn, attn.c_proj, c_fc and mlp.c_proj with their biases.
    products = 2 * (32 * 96 + 96 + 32 * 32 + 32 + 32 * 128 + 128 + 128 * 32 + 32)
    head = 64 * 32 + 64 * 4 + 64
    leaves = findings["quantization-leaves-most"]
    assert leaves.bytes == 4 * (embeddings + norms + products)
    assert leaves.values["stored"] == leaves.bytes + head
    assert (leaves.values["kind"], leaves.values["most"]) == ("Conv1D", 4 * products)
    both = memsize.generate(config(**GPT2), **asked | {"scenarios": "int8-weight,fp8-weight"}).findings
    (text,) = (finding.text() for finding in both if finding.code == "quantization-leaves-most")
    assert text.startswith("int8-weight and fp8-weight leave ")
    # The cache's figures are those of the verdict's scenario.
    assert findings["generation-fits"].values["scenario"] == "fp16"
    assert findings["kv-cache"].bytes == 2 * 2 * 32 * 2 * (16 + 4 - 1)
    assert "quantization-leaves-most" not in {
        finding.code for finding in memsize.generate(config(**SMALL), **asked).findings
    }


def test_the_command_line(config: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, saved = config(**SMALL), str(tmp_path / "run.memsize")
    asked = [
        "generate",
        target,
        "--prompt",
        "8,16",
        "--max-new-tokens",
        "20",
        "--batch-size",
        "2",
        "-s",
        "as-given,int8-weight",
    ]
    assert run([*asked, "--save", saved, "-f", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "memsize.generation/1"
    assert [(row["scenario"], row["prompt"], row["kv_cache"]) for row in data["generations"]] == [
        (scenario, prompt, 2 * (prompt + 19) * TOKEN) for scenario in ("as-given", "int8-weight") for prompt in (8, 16)
    ]
    assert run(["generate", saved, "-f", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == data
    assert run(["timeline", saved]) == 0
    assert {"prefill", "decode"} <= set(capsys.readouterr().out.split())
    assert run(["generate", target, "--prompt", "8,x"]) == 2
    assert capsys.readouterr().err == "error: cannot read '8,x' as prompts: write it like 1,8,32\n"


# -- curves -----------------------------------------------------------------------------------------------------------


def step(*sizes: int, kind: str = "") -> Step:
    return Step(Structure((), (), (kind,)), np.array(sizes, dtype=np.int64))


@given(
    st.lists(st.tuples(*[st.integers(-(10**6), 10**6)] * 3), min_size=1, max_size=5),
    st.integers(1, 10**5),
    st.integers(1, 300),
)
def test_polynomials_are_followed_exactly(coefficients: list[tuple[int, int, int]], start: int, count: int) -> None:
    def trace(length: int) -> Step:
        return step(*(a + b * length + c * length * length for a, b, c in coefficients))

    curve = Curve(trace, 2)
    pieces = curve.pieces(range(start, start + count))
    assert len(curve.traced) <= 4
    for piece in pieces:
        assert piece.exact
        for length in piece.lengths:
            assert (piece.at(length).sizes == trace(length).sizes).all()


@given(st.lists(st.integers(-(10**12), 10**12), min_size=6, max_size=6), st.tuples(*[st.integers(-50, 50)] * 2))
def test_a_polynomial_is_what_its_points_determine(coefficients: list[int], at: tuple[int, int]) -> None:
    terms = [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]
    points = [(0, 0), (3, 0), (7, 0), (0, 5), (2, 5), (1, 11)]

    def value(point: tuple[int, ...]) -> int:
        return sum(c * point[0] ** a * point[1] ** b for c, (a, b) in zip(coefficients, terms, strict=True))

    found = weighted(Polynomials(points, terms).weights(at), [np.array([value(point)]) for point in points])
    assert found is not None and found.tolist() == [value(at)]


def test_points_on_a_line_determine_no_plane() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        Polynomials([(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 0), (0, 1)])


@given(st.integers(1, 50), st.integers(30, 120), st.integers(0, 150))
def test_a_border_is_found(start: int, count: int, border: int) -> None:
    def trace(length: int) -> Step:
        return step(3 * length, kind="before") if length < border else step(3 * border + length, kind="after")

    check_follows(Curve(trace, 1), trace, start, count)


@given(st.integers(1, 50), st.integers(4, 30), st.integers(0, 80))
def test_every_piece_is_checked_between_its_nodes(start: int, count: int, border: int) -> None:
    """A parabola goes through three nodes of an odd number of lengths, the middle one among them."""

    def trace(length: int) -> Step:
        return step(length * length, kind="before") if length < border else step(7, length, kind="after")

    check_follows(Curve(trace, 2), trace, start, count)


@given(st.integers(1, 50), st.integers(30, 120))
def test_what_comes_back_every_eight_lengths_is_found(start: int, count: int) -> None:
    def trace(length: int) -> Step:
        return step(-(-length // 8) * 8, kind="padded" if length % 8 else "whole")

    check_follows(Curve(trace, 1), trace, start, count)


def check_follows(curve: Curve, trace: Callable[[int], Step], start: int, count: int) -> None:
    pieces = curve.pieces(range(start, start + count), period=8)
    found = {length: piece.at(length) for piece in pieces for length in piece.lengths}
    assert sorted(found) == list(range(start, start + count))
    assert all(piece.exact for piece in pieces)
    for length, made in found.items():
        assert made.structure == trace(length).structure
        assert (made.sizes == trace(length).sizes).all()


def test_a_prompt_of_many_sequences_is_known_to_be_unpadded(config: Callable[..., str]) -> None:
    with generator_of(config(**SMALL)) as generator:
        made = generator.run(Generation(prompt=40_000, max_new_tokens=2), 8)
    assert sum(layer.bytes for layer in made.cached) == 8 * (40_000 + 1) * TOKEN


def test_a_static_cache_has_room_for_the_tokens_of_images() -> None:
    text = SMALL | {"max_position_embeddings": 100}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    entries = {"text_config": text, "vision_config": vision, "image_token_index": 99, "dtype": "bfloat16"}
    for cache in (None, "static"):
        found = memsize.generate(
            "hf:llava", arguments=entries, prompt=10, max_new_tokens=5, cache_implementation=cache, scenarios="as-given"
        )
        (layers,) = found.ran[0].layers
        patches = (8 // 4) ** 2
        held = found.ran[0].cache - (2 * 8 if cache else 0)  # a static layer counts its tokens in an int64
        assert (layers.kind, held) == ("full attention", (10 + patches + 5 - 1) * TOKEN)


def test_no_token_ends_a_generation(config: Callable[..., str]) -> None:
    mamba = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 32, "state_size": 4}
    made = generated(
        config(**mamba, num_hidden_layers=1, vocab_size=50, eos_token_id=0), Generation(prompt=8, max_new_tokens=4), 1
    )
    assert {split_phase(phase) for phase in made.trace.phases} >= {("decode", 1), ("decode", 2), ("decode", 3)}
    # 64 inner channels: three inputs and one place more of a convolution, and a state of 4, in float32
    assert sum(layer.bytes for layer in made.cached) == 64 * (4 + 4) * 4


LOOP = """
import torch

def greedy(model, input_ids, max_new_tokens):
    cache, ids = None, input_ids
    for _ in range(max_new_tokens):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
    return ids

def whole(model, max_new_tokens, **inputs):
    return model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)

nothing = 3
"""


def test_a_loop_of_ones_own(config: Callable[..., str], tmp_path: Path) -> None:
    target, file = config(**SMALL), tmp_path / "loop.py"
    file.write_text(LOOP)
    options: dict[str, Any] = {"prompt": 30, "max_new_tokens": 25, "batch_size": 2, "scenarios": "as-given"}
    own = memsize.generate(target, **options)
    greedy, whole = (memsize.generate(target, step=f"{file}:{name}", **options) for name in ("greedy", "whole"))
    for report in (own, greedy, whole):
        assert report.generation_rows[0].cache == 2 * (30 + 25 - 1) * TOKEN
    assert whole.generation_rows[0].decode == own.generation_rows[0].decode
    with generator_of(target) as generator:
        generator.loop = load_loop(f"{file}:greedy")
        every = traced_whole(generator, Generation(prompt=30, max_new_tokens=25), 2)
    assert max(np.cumsum([event.delta for event in every.trace.events])) == max(
        greedy.generation_rows[0].prefill.peak, greedy.generation_rows[0].decode.peak
    )
    with pytest.raises(InputError, match="not for a step of yours"):
        memsize.generate(target, step=f"{file}:greedy", cache_implementation="static", **options)
    with pytest.raises(InputError, match="step returned without a call of the model"):
        memsize.generate(target, step=lambda model: None, **options)
    with pytest.raises(memsize.TargetError, match="nothing is not a function: name one that generates tokens"):
        memsize.generate(target, step=f"{file}:nothing", **options)


class Pairs(nn.Module):
    """A model whose cache is a pair of keys and values for each layer, as older ones have it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, ids: torch.Tensor, past_key_values: Any = None) -> Any:
        new = self.table(ids)
        pair = (new, new + 1) if past_key_values is None else tuple(torch.cat([p, new], 1) for p in past_key_values[0])
        return SimpleNamespace(past_key_values=(pair,), logits=new)


def grow(model: Pairs, ids: torch.Tensor, max_new_tokens: int) -> None:
    cache = None
    for _ in range(max_new_tokens):
        out = model(ids, past_key_values=cache)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)


def test_a_cache_of_pairs() -> None:
    found = memsize.generate(
        Pairs(), "4:int64", prompt=6, max_new_tokens=5, batch_size=3, step=grow, scenarios="as-given"
    )
    (row,) = found.ran
    assert row.cache == 2 * 3 * (6 + 5 - 1) * 8 * 4  # keys and values × sequences × tokens × width × float32
    assert [layers.kind for layers in row.layers] == ["full attention"]


OPT_350M = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "ffn_dim": 4096,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
    "_attn_implementation": "eager",
    "dtype": "float16",
}


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "megabytes"), [(1, 917.265), (4, 1653.42), (8, 2634.98)])
def test_the_published_peaks_of_a_generation(batch: int, megabytes: float, config: Callable[..., str]) -> None:
    """OPT-350m after 1,024 tokens on an L40S, from the page of OPT in transformers' documentation: max_memory_allocated
    with eager attention, whose scores make the peak. What else generate held then depends on its release.
    """
    found = memsize.generate(
        config(**OPT_350M),
        prompt=1024,
        max_new_tokens=4,
        batch_size=batch,
        scenarios="as-given",
        gpu="l40s",
        stack="torch=2.4,cuda=12.1",
    )
    peak = found.ran[0].estimate
    assert peak is not None and peak.peak_phase == "prefill"
    assert peak.allocated / 1e6 == pytest.approx(megabytes, rel=0.001)


def test_the_events_of_a_generation_are_those_of_its_record(config: Callable[..., str]) -> None:
    with generator_of(config(**SMALL)) as generator:
        made = generator.run(Generation(prompt=64, max_new_tokens=40), 3)
    trace, flow = made.trace, made.flow
    assert list(flow) == [(event.storage, event.delta) for event in trace.events]
    assert (flow.streams, flow.emptied) == (trace.streams, trace.emptied)
    assert flow.digest == flow_of(trace).digest


def test_uneven_prompts_are_masked(config: Callable[..., str]) -> None:
    target = config(**SMALL)
    options: dict[str, Any] = {"max_new_tokens": 4, "scenarios": "as-given", "batch_size": [1, 3]}
    even = memsize.generate(target, prompt=64, **options).generation_rows
    uneven = memsize.generate(target, prompt=64, uneven=True, **options).generation_rows
    assert [row.cache for row in uneven] == [row.cache for row in even] == [64 * TOKEN + 3 * TOKEN, 3 * 67 * TOKEN]
    assert uneven[0].prefill == even[0].prefill  # one prompt has nothing to be padded to
    assert uneven[1].prefill.peak > even[1].prefill.peak


def test_uneven_prompts_of_too_many_tokens(config: Callable[..., str]) -> None:
    with pytest.raises(InputError, match=r"uneven prompts of 320,000 tokens in all: masks of more than 262,144"):
        memsize.generate(
            config(**SMALL), prompt=40_000, max_new_tokens=4, batch_size=8, uneven=True, scenarios="as-given"
        )


def test_uneven_prompts_run_as_padded_ones(config: Callable[..., str]) -> None:
    target, mask = config(**SMALL), torch.ones(3, 64, dtype=torch.int64)
    mask[0, :40] = 0  # how many are padded makes no difference
    with generator_of(target) as generator:
        uneven = generator.run(Generation(prompt=64, max_new_tokens=4, uneven=True), 3).trace
        model = generator.runner.model
        inputs = {"input_ids": torch.ones(3, 64, dtype=torch.int64), "attention_mask": mask}
        with generator_of(model, **inputs) as padded:
            runner = padded.runner.with_inputs(padded.prompts(64), 3)
            given = runner.run(GenerationSteps(Generation(prompt=64, max_new_tokens=4)), scenario_named("as-given"))
    assert [event.delta for event in uneven.events if uneven.phases[event.phase] == "prefill"] == [
        event.delta for event in given.events if given.phases[event.phase] == "prefill"
    ]
