"""What fits while tokens are generated: answers against generations of which every step was traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import memsize
from memsize import AllocatorConfig, Fit, Generation
from memsize.cli import run
from memsize.errors import InputError
from tests.fits import Footprint, Share, keep_the_last_logits
from tests.gpus import cuda_context
from tests.records import FitRow
from tests.test_generation import SMALL, generated, generator_of
from tests.workloads import Generator, Sample, Traced

transformers = pytest.importorskip("transformers")

MiB = 1 << 20
BUDGET = f"{cuda_context().high // MiB + 48}MiB"
"""48 MiB beside what the CUDA context may take; cuBLAS keeps 32 of them."""
ONE_LAYER = SMALL | {"num_hidden_layers": 1, "max_position_embeddings": 100_000}
NEW = 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(ONE_LAYER))
    return f"hf:{path}"


def fit(target: str, **options: Any) -> Fit:
    return memsize.fit(target, max_new_tokens=NEW, budget=BUDGET, scenarios="as-given", **options)


def fits(target: str, row: FitRow, generation: Generation, batch: int, scenario: str = "as-given") -> bool:
    """Whether a generation fits the budget of `row`, by a run of which every step was traced."""
    trace = generated(target, generation, batch, every=True, scenario=scenario).trace
    return Footprint(batch, trace, AllocatorConfig()).fits(row.budget)


def test_the_longest_context_fits_and_the_next_does_not(target: str) -> None:
    found = fit(target, vary="context", batch_size=3)
    (row,) = found.fit_rows
    assert row.budget == 48 * MiB
    assert row.status == "found" and row.size and row.next_size == row.size + 1
    assert fits(target, row, Generation(prompt=row.size - NEW, max_new_tokens=NEW), 3)
    assert not fits(target, row, Generation(prompt=row.next_size - NEW, max_new_tokens=NEW), 3)
    assert found.generation["new"] == NEW
    assert "put together from traced steps" in found.notes[-1]
    assert "largest context that fits   generating 20 tokens" in str(found)


@pytest.mark.thorough
def test_the_largest_batch_fits_and_the_next_does_not(target: str) -> None:
    (row,) = fit(target, prompt=300).fit_rows
    assert row.status == "found" and row.size and row.next_size == row.size + 1
    assert fits(target, row, Generation(prompt=300, max_new_tokens=NEW), row.size)
    assert not fits(target, row, Generation(prompt=300, max_new_tokens=NEW), row.next_size)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_compiled_generation_has_a_largest_batch_of_its_own(target: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 4, "budget": BUDGET, "scenarios": "as-given", "compile": True}
    eager, compiled = memsize.fit(target, prompt=300, **options).fit_rows
    assert (eager.scenario, compiled.scenario) == ("as-given", "as-given+compile")
    generation = Generation(prompt=300, max_new_tokens=4)
    assert compiled.size and eager.size and compiled.size > eager.size
    assert fits(target, compiled, generation, compiled.size, "as-given+compile")
    assert not fits(target, compiled, generation, compiled.size + 1, "as-given+compile")


def test_a_context_ends_with_the_positions_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ONE_LAYER | {"max_position_embeddings": 600}))
    found = fit(f"hf:{path}", vary="context")
    (row,) = found.fit_rows
    assert (row.status, row.size, row.next_size) == ("endless", 600, None)
    assert "the model has positions for 600 tokens: longer contexts were not tried" in found.notes


@pytest.mark.thorough
def test_the_frontier_is_the_longest_context_of_each_batch(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(ONE_LAYER | {"max_position_embeddings": 100}))
    found = fit(f"hf:{path}", vary="context,batch", batch_size=256)
    batches = [row.batch for row in found.fit_rows]
    assert batches == [256 * 2**n for n in range(len(batches))] and batches[-1] <= 1024
    sizes = [row.size or 0 for row in found.fit_rows]
    assert sizes[0] == 100 and sizes == sorted(sizes, reverse=True)
    (row,) = (row for row in found.fit_rows if row.batch == 512)
    assert row.size and row.next_size == row.size + 1
    assert fits(f"hf:{path}", row, Generation(prompt=row.size - NEW, max_new_tokens=NEW), 512)
    assert not fits(f"hf:{path}", row, Generation(prompt=row.next_size - NEW, max_new_tokens=NEW), 512)
    assert found.tables()["rows"].records()[0]["batch"] == 256
    text = str(found)
    assert "all 100" in text and f"{batches[-1]:,} sequences of {sizes[-1]:,} tokens fit" in text


@pytest.mark.thorough
def test_what_would_make_a_batch_fit(target: str) -> None:
    found = fit(target, prompt=300, batch_size=200)
    assert found.remedied is not None
    rows = {row.name: row for row in found.remedied.rows}
    assert set(rows) == {
        "bf16 parameters",
        "expandable segments",
        "int8 weights",
        "int4 weights",
        "fp8 KV cache",
        "static cache",
        "offloaded cache",
        "prefill in chunks",
        "last logits only",
        "2 GPUs",
        "batch ÷4",
        "GeForce RTX 3050 Laptop 4GB",
    }
    quarter = fit(target, prompt=300, batch_size=50, remedies=False).fit_rows[0]
    assert (rows["batch ÷4"].outcome, rows["batch ÷4"].peak) == ("fits", quarter.peak)
    (static,) = fit(target, prompt=300, batch_size=200, cache_implementation="static", remedies=False).fit_rows
    assert rows["static cache"].peak == static.peak
    larger = rows["GeForce RTX 3050 Laptop 4GB"]
    assert (larger.outcome, larger.changes) == ("fits", "hardware") and found.remedied.combination == ()
    assert rows["last logits only"].reason == ("generate already asks for the logits of the last token only")


def test_each_of_two_cards_holds_a_half(target: str) -> None:
    with generator_of(target, Share(2)) as generator:
        made = generator.run(Generation(prompt=8, max_new_tokens=4), 3)
    # 64 wide; 2 of 4 heads and 1 of 2 of keys and values, 16 wide; 64 of 128 in the MLP; half of 100 tokens, padded
    # to 128; three norms.
    attention, mlp, vocabulary = 64 * (32 + 16 + 16 + 32), 3 * 64 * 64, 2 * 64 * 64
    held = {storage.bytes for storage in made.trace.storages if storage.role == "parameter"}
    assert sum(s.bytes for s in made.trace.storages if s.role == "parameter") == 2 * (
        attention + mlp + vocabulary + 3 * 64
    )
    assert 2 * 64 * 64 in held
    assert sum(layer.bytes for layer in made.cached) == 3 * 11 * 2 * 16 * 2
    logits = [s for s in made.trace.storages if s.op == "cat" and s.shape[-1:] == (128,)]
    assert logits


@pytest.mark.thorough
def test_a_generation_that_does_not_fit_is_told_what_would(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"prompt": 300, "max_new_tokens": 2, "scenarios": "as-given", "gpu": "t4"}
    traced: list[object] = []

    def sample(generator: Generator, of: Traced) -> Sample:
        if of not in generator.samples:
            traced.append((generator.scenario, generator.edits, generator.runner.gpu.kernels, of))
        return trace(generator, of)

    trace = Generator.sample
    with monkeypatch.context() as patched:
        patched.setattr(Generator, "sample", sample)
        found = memsize.generate(target, batch_size=[1, 8192], **options)
    assert len(traced) > 2 and len(set(traced)) == len(traced)  # what is traced for the rows serves remedies too
    assert [row.fits for row in found.generation_rows] == [True, False]
    assert found.remedied is not None and (found.remedied.size, found.remedied.gpu) == (8192, "Tesla T4")
    # What it needs is what a fit of that batch says, and a quarter of the sequences need what one of theirs does.
    sizes = (8192, 4096, 2048)
    whole, half, quarter = (memsize.fit(target, batch_size=n, remedies=False, **options).fit_rows[0] for n in sizes)
    assert found.remedied.peak == whole.peak and found.remedied.budget == whole.budget
    rows = {row.name: row for row in found.remedied.rows}
    assert half.status == "exceeds" and "batch ÷2" not in rows
    assert (rows["batch ÷4"].outcome, rows["batch ÷4"].peak) == ("fits", quarter.peak)
    assert (rows["bf16 parameters"].outcome, rows["bf16 parameters"].saved) == ("no help", 0)  # they are that already
    enough = next(each for each in found.findings if each.code == "remedy-enough")
    assert "batch ÷4" in str(enough)
    assert memsize.generate(target, batch_size=1, **options).remedied is None


def test_the_last_logits_alone_are_made_of_a_model_that_makes_all(tmp_path: Path) -> None:
    class Whole(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, **given: Any) -> Any:  # as models were before they knew which logits are wanted
            return super().forward(**{name: value for name, value in given.items() if name != "logits_to_keep"})

    entries = {name: value for name, value in SMALL.items() if name not in ("architectures", "model_type")}
    model = Whole(transformers.LlamaConfig(**entries | {"vocab_size": 20_000})).eval()
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    peaks = []
    for edits in ((), (keep_the_last_logits,)):
        with generator_of(model, *edits, **inputs) as generator:
            trace = generator.run(Generation(prompt=400, max_new_tokens=4), 2).trace
        peaks.append(max(s.bytes for s in trace.storages if s.shape[-1:] == (20_000,)))
    assert peaks == [2 * 400 * 20_000 * 4, 2 * 20_000 * 4]


def test_the_command_line(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fit", target, "--prompt", "8", "--max-new-tokens", "4", "-b", "2", "--budget", BUDGET, "-s", "as-given"]
    assert run([*asked, "-f", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in data["rows"]] == ["fits"]
    assert data["generation"] == {
        "prompt": 8,
        "new": 4,
        "cache": None,
        "kv_dtype": None,
        "beams": 1,
        "begun": 0,
        "chunk": None,
        "uneven": False,
        "draft": None,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vary": "seq_len"}, "cannot vary seq_len of a generation: vary context or batch"),
        ({"vary": "context", "prompt": 8}, "a context that varies makes its own prompt"),
        ({"train": "adamw"}, "train is for training steps"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        memsize.fit("hf:llama", max_new_tokens=NEW, **options)


@pytest.mark.thorough
def test_speech_is_no_context_to_vary(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "whisper",
                "architectures": ["WhisperForConditionalGeneration"],
                "d_model": 32,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "decoder_ffn_dim": 32,
            }
        )
    )
    with pytest.raises(InputError, match="reads an input of one length, whatever the prompt: its context does not"):
        fit(f"hf:{path}", vary="context", batch_size=2)
    (row,) = fit(f"hf:{path}").fit_rows
    assert row.status == "found"
    report = memsize.generate(f"hf:{path}", max_new_tokens=NEW, scenarios="as-given")
    assert [(row.prompt, row.new) for row in report.generation_rows] == [(1, NEW)]
    assert any("the decoder begins with one token" in note for note in report.notes)
    with pytest.raises(InputError, match="lengths of a prompt cannot be compared"):
        memsize.generate(f"hf:{path}", prompt="4,8", scenarios="as-given")
