"""A sample of the zoo, and the script that runs all of it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from benchmarks.zoo import __main__ as script, results, table
from benchmarks.zoo.case import Attempt, Case, Outcome, decode, encode
from benchmarks.zoo.inputs import inputs
from benchmarks.zoo.runner import Limits, outcomes
from benchmarks.zoo.trial import parts
from memsize.errors import InputError
from tests.models import InputRequest, load

FEW = {"num_hidden_layers": 2}
SAMPLE = (
    # Decoders with and without experts, encoders, an image, a sound; both halves of a translator, and more images.
    *(Case("hf", name, FEW) for name in "llama gpt2 mixtral bert vit wav2vec2".split()),
    *(Case("hf", name) for name in ("t5", "resnet", "segformer")),
    *(Case("timm", name) for name in "test_vit test_resnet test_efficientnet test_convnext levit_128s".split()),
    *(Case("timm", name) for name in "mixer_s32_224 mobilenetv3_small_050 poolformer_s12".split()),
    *(Case("torchvision", name) for name in "resnet18 vit_b_16 raft_small r3d_18 lraspp_mobilenet_v3_large".split()),
    *(Case("torchvision", name) for name in "fasterrcnn_mobilenet_v3_large_320_fpn maskrcnn_resnet50_fpn".split()),
)
_PACKAGES = {"hf": "transformers"}


@pytest.mark.thorough
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.target)
def test_a_sample_of_the_zoo(case: Case) -> None:
    package = _PACKAGES.get(case.library, case.library)
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    told = dict(parts(case))
    assert {way: told[way]["reason"] for way in ("inference", "training")} == {"inference": "", "training": ""}
    assert told["ours"] == told["theirs"] > 0
    assert told["training"]["peak"] > told["inference"]["peak"] > 0


def test_what_fails_is_told_with_its_cause() -> None:
    told = dict(parts(Case("hf", "lama")))
    assert "did you mean llama" in told["inference"]["reason"] and "did you mean llama" in told["training"]["reason"]
    assert told["ours"] is None and told["theirs"] is None and "lama" in told["uncounted"]


# What memsize leaves to the user

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "vocab_size": 99}
UNUSUAL: dict[str, tuple[dict[str, Any], str, dict[str, tuple[int, ...]]]] = {
    "decision_transformer": (
        {"state_dim": 5, "act_dim": 2, "hidden_size": 16, "n_layer": 1, "n_head": 2, "n_positions": 30},
        "states, actions, rewards",
        # Each step is three tokens: 30 positions hold 10.
        {"states": (2, 10, 5), "actions": (2, 10, 2), "rewards": (2, 10, 1), "timesteps": (2, 10)},
    ),
    "bros": (
        SMALL | {"hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 20},
        "bbox",
        {"input_ids": (2, 20), "bbox": (2, 20, 8)},
    ),
    "lxmert": (
        SMALL
        | {"intermediate_size": 32, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 7}
        | {"max_position_embeddings": 20},
        "visual_feats, visual_pos",
        {"input_ids": (2, 20), "visual_feats": (2, 36, 7), "visual_pos": (2, 36, 4)},
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_model_really_takes_the_zoos_own_inputs(name: str) -> None:
    pytest.importorskip("transformers")
    entries, missing, expected = UNUSUAL[name]
    case = Case("hf", name, entries)
    loaded = load(case.target, entries)
    assert loaded.inputs is not None
    with pytest.raises(InputError, match=missing):
        loaded.inputs.make(InputRequest())
    make = inputs(case)
    assert make is not None
    given = make(2, False)
    assert {argument: tuple(given[argument].shape) for argument in expected} == expected
    real: Any = type(loaded.module)(loaded.module.config).eval()  # type: ignore[operator,arg-type]
    with torch.no_grad():
        real(**{name: torch.rand(value.shape) if value.is_meta else value for name, value in given.items()})


def test_what_is_spoken_is_known_while_a_model_trains() -> None:
    pytest.importorskip("transformers")
    make = inputs(Case("hf", "fastspeech2_conformer", {"encoder_layers": 1, "decoder_layers": 1}))
    assert make is not None
    assert set(make(2, False)) == {"input_ids", "attention_mask"}
    given = {name: tuple(value.shape) for name, value in make(2, True).items()}
    # 512 tokens of 4 frames each.
    assert given["duration_labels"] == (2, 512) and given["spectrogram_labels"] == (2, 2048, 80)
    assert given["pitch_labels"] == given["energy_labels"] == (2, 512, 1)


def test_most_inputs_are_memsizes_own() -> None:
    assert inputs(Case("hf", "llama")) is None and inputs(Case("timm", "bros")) is None


# The runner


def test_a_worker_tells_what_came_of_each_case() -> None:
    cases = (Case("hf", "resnet"), Case("hf", "lama"))
    good, bad = outcomes(cases, 1, Limits())
    assert (good.case, bad.case) == cases
    assert good.succeeded and good.ours == good.theirs
    assert not bad.succeeded and bad.inference.reason == bad.training.reason
    assert "did you mean llama" in bad.inference.reason


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limits", "part"),
    [
        (Limits(seconds=0.01), "took more than 0.01 s"),
        # Which allocation fails is chance, and Python's parser, importer and C code replace its MemoryError by errors
        # of their own: any reason will do.
        (Limits(memory=2**20), r"\S"),
    ],
)
def test_a_limit_ends_neither_the_run_nor_the_next_case(limits: Limits, part: str) -> None:
    cases = [Case("hf", "resnet"), Case("hf", "bert"), Case("hf", "vit")]
    found = list(outcomes(cases, 2, limits))
    assert sorted(each.case.name for each in found) == ["bert", "resnet", "vit"]
    for outcome in found:
        for reason in (outcome.inference.reason, outcome.training.reason, outcome.uncounted):
            assert re.search(part, reason)
        assert not outcome.succeeded
        assert not outcome.counts_agree


# The results file

ATTEMPTS = st.builds(Attempt, st.none() | st.integers(0), st.text(), st.floats(0, 1e3))
OUTCOMES = st.builds(
    Outcome,
    st.builds(Case, st.sampled_from(["hf", "timm"]), st.text(), st.dictionaries(st.text(), st.integers() | st.text())),
    ATTEMPTS,
    ATTEMPTS,
    st.none() | st.integers(0),
    st.none() | st.integers(0),
    st.text(),
    st.text(),
)


@settings(max_examples=30)
@given(OUTCOMES)
def test_an_outcome_survives_its_file(outcome: Outcome) -> None:
    assert decode(encode(outcome)) == outcome


def outcome(name: str, library: str = "timm", **changes: object) -> Outcome:
    made = Outcome(Case(library, name), Attempt(1, seconds=0.5), Attempt(2, seconds=1.5), 10, 10)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "zoo.jsonl"
    assert results.resumed(file) == []
    results.append(file, outcome("a"))
    results.append(file, outcome("b"))
    file.write_text(file.read_text()[:-3])
    assert results.resumed(file) == [outcome("a")]
    results.append(file, outcome("c"))
    assert results.resumed(file) == [outcome("a"), outcome("c")]


# The script


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A library of three models, and the names of those that were run."""
    ran: list[str] = []

    def run(cases: Iterable[Case], workers: int, limits: Limits) -> Iterator[Outcome]:
        for case in cases:
            ran.append(case.name)
            yield outcome(case.name)

    library = SimpleNamespace(
        ABOUT="three", DISTRIBUTIONS=("torch",), cases=lambda: [Case("timm", name) for name in ("ab", "ac", "b")]
    )
    for module in (script, table):
        monkeypatch.setattr(module, "source", lambda _: library)
    monkeypatch.setattr(script, "outcomes", run)
    return ran


def test_the_script_runs_what_is_asked_for_and_goes_on(
    few: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "zoo.jsonl", tmp_path / "zoo.md"
    script.main(["timm", "--only", "a*", "--results", str(file)])
    assert few == ["ab", "ac"]
    script.main(["timm", "--resume", "--results", str(file), "--page", str(page)])
    assert few == ["ab", "ac", "b"]
    out = capsys.readouterr().out
    assert "3 (100.0 %)" in out and f"Wrote {page}" in out
    assert "| `timm:ab`" in page.read_text()
    script.main(["timm", "--results", str(file)])
    assert few == ["ab", "ac", "b"] * 2


def test_what_fails_with_fewer_layers_is_tried_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, few: list[str]
) -> None:
    tried: list[Case] = []

    def run(cases: Iterable[Case], workers: int, limits: Limits) -> Iterator[Outcome]:
        for case in cases:
            tried.append(case)
            reason = "no" if case.arguments or case.name == "c" else ""
            yield Outcome(case, Attempt(1, reason), Attempt(1, reason), 1, 1)

    cases = [Case("timm", "a", FEW), Case("timm", "b"), Case("timm", "c", FEW)]
    monkeypatch.setattr(script.source("timm"), "cases", lambda: cases)
    monkeypatch.setattr(script, "outcomes", run)
    script.main(["timm", "--results", str(tmp_path / "zoo.jsonl")])
    # Neither what runs is tried again, nor what fails as it is.
    assert tried == [*cases, Case("timm", "a"), Case("timm", "c")]


def test_layers_of_each_kind_are_left() -> None:
    transformers = pytest.importorskip("transformers")
    huggingface = importlib.import_module("benchmarks.zoo.huggingface")
    llama = transformers.LlamaConfig(num_hidden_layers=7)
    assert huggingface.reduced(llama) == {"num_hidden_layers": 2}
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    gemma = transformers.Gemma3TextConfig(num_hidden_layers=8, layer_types=kinds * 2)
    assert huggingface.reduced(gemma) == {"num_hidden_layers": 4, "layer_types": kinds}
    both = huggingface.reduced(transformers.LlavaConfig())
    assert both["vision_config"]["num_hidden_layers"] == both["text_config"]["num_hidden_layers"] == 2
    # Layers of a backbone are taken by their places.
    assert huggingface.reduced(transformers.Dinov2Config()) == {}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("autoformer", "`prediction_length` config needs to be specified"),
        ("sam_mask_decoder", "no model for the type"),
        ("bark", "has no forward"),
        ("deepseek_v2", "how many experts"),
        ("vits", ""),
    ],
)
def test_what_transformers_itself_refuses(name: str, part: str) -> None:
    pytest.importorskip("transformers")
    refusal = importlib.import_module("benchmarks.zoo.huggingface").refusal
    said = refusal(Case("hf", name, {"num_hidden_layers": 1} if name == "deepseek_v2" else {}))
    assert part in said if part else not said


def test_an_unknown_library(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["tim"])
    assert "choose from timm, torchvision, hf" in capsys.readouterr().err


def test_a_library_that_is_not_there(
    few: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> Iterator[Case]:
        raise ModuleNotFoundError(name="timm")

    file = tmp_path / "zoo.jsonl"
    results.append(file, outcome("a"))
    monkeypatch.setattr(script.source("timm"), "cases", missing)
    with pytest.raises(SystemExit):
        script.main(["timm", "--results", str(file)])
    assert "timm is not installed" in capsys.readouterr().err
    assert results.resumed(file) == [outcome("a")]


def test_the_page(few: list[str]) -> None:
    found = [
        outcome("a"),
        outcome("b", training=Attempt(reason="no <way> | out"), ours=11),
        outcome("c", inference=Attempt(reason="died"), training=Attempt(reason="died"), theirs=None, uncounted="died"),
        outcome("d", theirs=None, uncounted="no count"),
        outcome("e", inference=Attempt(reason="odd"), training=Attempt(reason="odd"), refused="it has <no> forward"),
    ]
    assert list(table.failures(found)) == [
        ("timm:b", "training", "no <way> | out"),
        ("timm:b", "parameter count", "11, theirs is 10"),
        ("timm:c", "inference, training", "died"),
        ("timm:d", "parameter count", "no count"),
    ]
    page = table.page(found)
    # Of four models three run in inference, two in training, and one of the counts agrees.
    row = next(line for line in page.splitlines() if line.startswith("| torch "))
    assert [cell.strip() for cell in row.split("|")[2:6]] == ["4", "3 (75.0 %)", "2 (50.0 %)", "1 (25.0 %)"]
    assert r"no &lt;way> \| out" in page
    assert "    python -m benchmarks.zoo timm --page benchmarks/zoo/results.md\n" in page
    # The fifth is refused by its own library, which the last column counts.
    assert row.split("|")[6].strip() == "1"
    told = next(line for line in page.splitlines() if "timm:e" in line and "forward" in line)
    assert [cell.strip() for cell in told.split("|")[1:3]] == ["`timm:e`", "it has &lt;no> forward"]
    assert table.page([outcome("a")]).count("Nothing.") == table.page([outcome("a")]).count("None.") == 1


def test_a_target_is_written_as_a_user_types_it() -> None:
    assert table.written(Case("hf", "bert", FEW)) == "hf:bert?num_hidden_layers=2"
    assert table.written(Case("timm", "resnet18")) == "timm:resnet18"
