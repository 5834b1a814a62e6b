"""Tokens that are proposed before each step: by arithmetic, by real runs, and derived steps against traced ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memsize
from memsize import Generation, GenerationReport, ModelRequest
from memsize.cli import run
from memsize.errors import InputError
from tests.gpus import card
from tests.known_values import set_constant, set_filled
from tests.models import scenario_named
from tests.test_generation import HEAD, SMALL, TOKEN, traced_whole
from tests.workloads import (
    Draft,
    Generator,
    Runner,
    Sample,
    assisted,
    generation,
    generator as generators,
    model_of,
    prompts_of,
)

transformers = pytest.importorskip("transformers")

PROMPT, NEW, PROPOSED = 16, 8, 2
ASSISTANT_TOKEN = 2 * 1 * 1 * HEAD * 2
"""Bytes of a token in the assistant's cache: keys and values × layers × key-value heads × width × bytes of bfloat16."""
PARTS: dict[str, Any] = {"num_hidden_layers": 1, "num_key_value_heads": 1, "hidden_size": 32, "head_dim": HEAD}


def written(folder: Path, name: str, **entries: Any) -> str:
    path = folder / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(SMALL | entries))
    return f"hf:{path.parent}"


class Own(nn.Module):
    """A model that generates in its own way."""

    def generate(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model, and one that assists it."""
    folder = tmp_path_factory.mktemp("assisted")
    return written(folder, "model"), written(folder, "assistant", **PARTS)


def built(target: str) -> Any:
    """The model of a target, which proposes few tokens."""
    config = transformers.LlamaConfig.from_pretrained(target.removeprefix("hf:"))
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.num_assistant_tokens = PROPOSED
    return model


@pytest.fixture(scope="module")
def assistant(targets: tuple[str, str]) -> Any:
    return built(targets[1])


@pytest.fixture(scope="module")
def report(targets: tuple[str, str], assistant: Any) -> GenerationReport:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_new_tokens": NEW, "assistant_model": assistant}
    return memsize.generate(targets[0], scenarios="as-given,fp32", gpu="a100", **asked)


@contextmanager
def generator_of(target: str, assistant: Any, lookup: int | None = None) -> Iterator[tuple[Generator, Draft]]:
    subject = ModelRequest.of(target, mode="eval")
    draft = Draft.of(assistant, lookup)
    with model_of(subject) as loaded, assisted(loaded, draft, assistant, lambda _: None) as found:
        prompts = prompts_of(subject, loaded)
        runner = Runner(loaded.name, loaded.model, prompts(8), False, gpu=card("a100"))
        assert found is not None
        yield Generator(runner, prompts, scenario_named("as-given")), found


def test_both_models_have_weights_and_a_cache(report: GenerationReport, targets: tuple[str, str]) -> None:
    given, single = report.ran
    # The model reads all but the last token; what it takes back is still in its memory. The assistant need not read
    # the last token that it proposes.
    read = PROMPT + NEW - 1
    assert [(kind.kind, kind.layers, kind.bytes) for kind in given.layers] == [
        ("full attention", 2, read * TOKEN),
        ("full attention of the assistant", 1, (read - 1) * ASSISTANT_TOKEN),
    ]
    assert given.per_token == TOKEN + ASSISTANT_TOKEN
    model, assistant = map(built, targets)
    stored = [sum(each.nbytes for each in module.parameters()) for module in (model, assistant)]
    assert given.assistant == stored[1] + sum(each.nbytes for each in assistant.buffers())
    # transformers keeps the rotary frequencies of a model in float32, which is cast as a whole here.
    assert given.weights - given.assistant == stored[0] + 2 * sum(each.nbytes for each in model.buffers())
    assert single.assistant == 2 * given.assistant
    assert single.cache == 2 * given.cache


def test_an_answer_says_what_is_assumed(report: GenerationReport) -> None:
    said = next(each.text() for each in report.findings if each.code == "proposed-tokens")
    assert "proposes 2 tokens before each step, and each is assumed to be rejected" in said
    assert any("every proposed token is assumed to be rejected" in each for each in report.assumptions)
    record = json.loads(report.to_json())["generations"][0]
    assert record["assistant_weights"] == report.ran[0].assistant


def test_the_caches_are_those_of_a_real_run(report: GenerationReport, targets: tuple[str, str]) -> None:
    """The step that reads furthest, of two random models that agree on nothing."""
    torch.manual_seed(0)
    model, assistant = map(built, targets)
    most = {"model": 0, "assistant": 0}

    def kept(name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            layers = output.past_key_values.layers
            held = sum(t.untyped_storage().nbytes() for layer in layers for t in (layer.keys, layer.values))
            most[name] = max(most[name], held)

        return hook

    model.register_forward_hook(kept("model"))
    assistant.register_forward_hook(kept("assistant"))
    assistant.generation_config.assistant_confidence_threshold = 0.0
    tokens = torch.randint(1, 100, (1, PROMPT))
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        model.generate(tokens, attention_mask=torch.ones_like(tokens), assistant_model=assistant, **asked)
    caches = [kind.bytes for kind in report.ran[0].layers]
    assert most == {"model": caches[0], "assistant": caches[1]}


@pytest.mark.thorough
@pytest.mark.parametrize("lookup", [None, 5])
def test_derived_steps_equal_traced_ones(
    lookup: int | None, targets: tuple[str, str], assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generators, "_lasting", lambda piece: None)
    with generator_of(targets[0], None if lookup else assistant, lookup) as (generator, draft):
        asked = Generation(prompt=33, max_new_tokens=29 + draft.tokens, draft=draft)
        derived = generator.run(asked, 1)
        traced = len(generator.samples)
        every = traced_whole(generator, asked, 1)
    assert traced == 3 and derived.exact
    assert derived.trace.events == every.trace.events
    assert derived.trace.storages == every.trace.storages
    assert derived.cached == every.cached


def all_right(tokens: torch.Tensor, value: int) -> torch.Tensor:
    """In place of tokens that the model never picks, those that it is assumed to pick: 0, 1, 2 …"""
    values = torch.full(tokens.shape, value, device="cpu")
    if value < 0:
        values[:, -PROPOSED:] = torch.arange(PROPOSED)
    return set_filled(tokens, value) if value >= 0 else set_constant(tokens, values)


@pytest.mark.parametrize("lookup", [None, PROPOSED])
def test_no_step_needs_more_where_all_tokens_are_right(
    lookup: int | None, targets: tuple[str, str], assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = []
    for steps in (NEW - 1 - PROPOSED, 1):
        with generator_of(targets[0], None if lookup else assistant, lookup) as (generator, draft):
            sample = generator.sample((Generation(prompt=PROMPT, max_new_tokens=NEW, draft=draft), 1, steps))
        samples.append(sample)
        monkeypatch.setattr(generation, "set_filled", all_right)
    none, right = samples
    # The prefill reads 2 tokens beyond the prompt and picks one more, the step after it as many again.
    assert right.steps[2].cached[0].bytes == (PROMPT + 2 * PROPOSED + 1) * TOKEN // 2
    # After 3 tokens: the first step where all are right, the third where none is.
    assert most_alive(right, 2) <= most_alive(none, 2 + PROPOSED)


def most_alive(sample: Sample, number: int) -> int:
    """The most that is alive in a step, counted with the setup and the prefill."""
    levels = [list(accumulate(step.deltas.tolist())) for step in sample.steps[: number + 1]]
    return sum(each[-1] for each in levels[:-1]) + max(levels[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "assisted generation is for one beam"),
        ({"prefill_chunk_size": 8}, "assisted generation reads the prompt at once"),
        ({"cache_implementation": "static"}, "takes tokens back, which a static cache cannot"),
        ({"kv_cache_dtype": "fp8"}, "takes tokens back, which a quantized cache cannot"),
        ({"batch_size": 2}, "assisted generation is for one sequence"),
        ({"prompt_lookup_num_tokens": 3}, "an assistant proposes tokens or they are looked up in the prompt, not both"),
        ({"step": "loop.py:generate"}, "are for the model's own generate, not for a step of yours"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], message: str, targets: tuple[str, str]) -> None:
    model, assistant = targets
    with pytest.raises(InputError, match=message):
        memsize.generate(model, assistant_model=assistant, **options)
    with pytest.raises(InputError, match="prompt_lookup_num_tokens is 0: it must be at least 1"):
        memsize.generate(model, prompt_lookup_num_tokens=0)


def test_assistants_of_another_kind(targets: tuple[str, str], tmp_path: Path) -> None:
    model, _ = targets
    with pytest.raises(InputError, match="a vocabulary of 90 tokens, the model one of 100"):
        memsize.generate(model, assistant_model=written(tmp_path, "other", vocab_size=90))
    with pytest.raises(InputError, match="Linear has no generate method: it generates no tokens"):
        memsize.generate(model, assistant_model=nn.Linear(2, 2))
    with pytest.raises(InputError, match="Own generates in its own way: only models of transformers are assisted"):
        memsize.generate(Own(), "4:int64", prompt=4, max_new_tokens=2, assistant_model=model)


def test_a_model_is_left_as_it_was(targets: tuple[str, str]) -> None:
    """Both given as modules."""
    model, assistant = map(built, targets)
    found = memsize.generate(
        model, "16:int64", prompt=8, max_new_tokens=2, assistant_model=assistant, scenarios="as-given"
    )
    assert found.ran[0].assistant > 0
    assert not hasattr(model, "assistant") and assistant.generation_config.eos_token_id is not None


def test_the_command_line(targets: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    model, assistant = targets
    assert (
        run(
            ["generate", model, "--assistant-model", assistant, "--max-new-tokens", "2", "-s", "as-given", "-f", "json"]
        )
        == 0
    )
    (row,) = json.loads(capsys.readouterr().out)["generations"]
    assert row["layers"][1]["kind"] == "full attention of the assistant"
    assert run(["generate", model, "--prompt-lookup-num-tokens", "5", "--max-new-tokens", "30", "-s", "as-given"]) == 0
    assert "5 tokens are looked up before each step" in capsys.readouterr().out
    assert run(["generate", model, "--prompt-lookup-num-tokens", "5", "--cache-implementation", "static"]) == 2
    assert capsys.readouterr().err.startswith("error: assisted generation takes tokens back")
