"""The tables of published measurements follow from the stored predictions, and those from today's code."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from benchmarks.published import __main__ as command, table
from benchmarks.published.environments import ENVIRONMENTS, Environment, UnbuiltError, ready
from benchmarks.published.recipes.random_networks import settings
from benchmarks.published.rows import Compared, Row, half_digit, read, rows
from benchmarks.published.sources import SOURCES
from benchmarks.published.table import Error, Group
from benchmarks.published.worker import predict
from memsize import Serving, Stack
from tests.records import Interval

ROOT = Path(__file__).parents[1]


# -- the data ----------------------------------------------------------------------------------------------------------


def test_every_figure_has_a_prediction_and_none_is_left_over() -> None:
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names) > 200
    assert set(read()) == set(names)


def test_every_source_says_where_it_is_and_what_it_ran() -> None:
    assert {row.source.name for row in rows()} == set(SOURCES)
    for source in SOURCES.values():
        assert source.where.startswith("https://")
        stack = (
            Stack(Serving(server=source.stack).rules.torch) if source.kind == "servers" else Stack.parse(source.stack)
        )
        assert stack.torch
        assert source.environment is None or source.environment in ENVIRONMENTS
        # What is inferred lowers the confidence, unless it is the release that first has what was measured.
        assert source.confidence == "high" or source.inferred


def test_a_figure_in_bytes() -> None:
    row = Row(SOURCES["litgpt/lora"], "model=phi-1_5 batch=1", "4.82")
    assert (row.measured, row.figure, row.values["batch"]) == (4_820_000_000, "allocated", "1")
    said = Compared(row, 4_796_000_000, Interval(4_700_000_000, 4_900_000_000))
    assert said.error == pytest.approx(-24 / 4820)
    assert said.outside == 0
    assert replace(said, interval=Interval(4_700_000_000, 4_771_800_000)).outside == pytest.approx(-0.01)
    # 4.82 GB are 4.815 to 4.825.
    assert row.rounding == pytest.approx(5_000_000)
    assert replace(said, interval=Interval(4_700_000_000, 4_815_000_000)).outside == 0
    assert half_digit("5.5e4") == 500


# -- the tables --------------------------------------------------------------------------------------------------------


def test_the_pages_have_the_tables_of_the_stored_predictions() -> None:
    """`python -m benchmarks.published --tables` writes them."""
    for path, text in table.written(ROOT).items():
        assert path.read_text(encoding="utf-8") == text, path


def test_a_line_of_the_tables() -> None:
    shares = [0.0, -0.02, 0.005, *[0.001] * 17]
    found = [
        Error("linear networks", "device", f"a/{i}", share, 0.0 if share == -0.02 else share)
        for i, share in enumerate(shares)
    ]
    # 20 errors: 19 of them, 95 %, are at most 0.5 %; the one that is too low is inside its interval.
    assert Group.of(found) == Group(20, 1, 0.001, 0.005, -0.02, 1, 0)


def test_the_readme_counts_the_rows_of_the_data() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    counts = [int(found) for found in re.findall(r"^\| [^|]+ \| (\d+) \| \d+ \| \d+\.\d\d % \|", text, re.M)]
    assert sum(counts) == len(table.measured()) > 400
    # Twelve kinds of workload, none of them with more than a quarter of the rows
    assert len(counts) >= 12 and max(counts) <= sum(counts) / 4


@pytest.mark.parametrize(
    ("kind", "median", "most", "worst"),
    [
        ("decoders, forward and backward", 0.001, 0.005, 0.0075),
        ("encoders, forward and backward", 0.001, 0.004, 0.01),
        ("transformers, whole steps", 0.0025, 0.01, 0.01),
        ("diffusion transformers, adapters", 0.001, 0.0015, 0.0015),
        ("gated MLPs", 1e-5, 1e-5, 1e-5),
        ("norms and rotary embeddings", 1e-4, 2e-4, 2e-4),
        ("losses of language models", 1e-5, 2e-4, 2e-3),
        ("LoRA and adapters", 0.001, 0.002, 0.002),
        ("convolutional networks", 0.001, 0.001, 0.001),
    ],
)
def test_how_near_allocated_is(kind: str, median: float, most: float, worst: float) -> None:
    found = table.grouped()[kind, "allocated"]
    assert found.median <= median
    assert found.most <= most
    assert abs(found.worst) <= worst


def test_most_figures_that_pytorch_does_not_allocate_lie_inside() -> None:
    every = table.devices().splitlines()[-1]
    count, inside, width = (int(found) for found in re.findall(r" (\d+) (?:\||MiB)", every))
    assert count > 900 and inside >= 0.95 * count and width <= 300


def test_a_figure_counts_once() -> None:
    """200 perceptrons, 785 networks, of which 39 are listed one by one too, 65 transformers, and vLLM's logs."""
    listed, transformers = (len(rows([f"gpumemnet/{name}"])) for name in ("convolutional", "transformers"))
    others = sum(row.figure in ("outside", "graphs") for row in rows())
    assert (listed, transformers) == (39, 65)
    assert f"| all | {200 + 785 + transformers + others} |" in table.devices()


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_the_settings_of_a_line_of_the_data_set() -> None:
    """Two blocks of four layers, each with 32 filters of 3 × 3 and a bias, that read all filters before them; between
    the blocks 1 × 1 kernels halve the 129 filters. That is so for every block, or the first of any number.
    """
    line = {
        "input_channels": "1", "num_classes": "9", "depth": "8", "architecture": "dense", "base_filters": "61",
        "batch": "38", "input_size": "20", "activation": "prelu", "dropout_rate": "0.10952", "dropout": "True",
        "batchnorm": "False",
    }  # fmt: skip
    first = [32 * (9 * inputs + 1) for inputs in (1, 33, 65, 97)]
    halved = 64 * (129 + 1)
    second = [32 * (9 * inputs + 1) for inputs in (64, 96, 128, 160)]
    sizes = " ".join(f"400:{size}" for size in (*first, halved, *second))
    found = settings({**line, "conv_sizes": sizes})
    assert (found["every"], found["dropout"], found["norm"]) == ("1", "0.109", "0")
    with pytest.raises(ValueError, match="no dense network has these convolutions"):
        settings({**line, "conv_sizes": sizes + " 400:7"})


@pytest.mark.parametrize(
    ("source", "config", "size"),
    [
        # The size of the file on the Hub, less its header
        ("distilbert/train", "DistilBertConfig", 267_954_768 - 12_648),
        ("bert-base/train", "BertConfig", 440_449_768 - 24_056),
    ],
)
def test_what_a_checkpoint_puts_on_the_gpu(source: str, config: str, size: int) -> None:
    transformers = pytest.importorskip("transformers")
    from benchmarks.published.recipes import attention_tables

    with torch.device("meta"):
        tensors = attention_tables._checkpoint(getattr(transformers, config)(), source)
    assert sum(tensor.nbytes for tensor in tensors) == size


# -- predictions again -------------------------------------------------------------------------------------------------


PINNED = {"torch": "2.13.0", "transformers": "5.23.0"}
"""The releases that the stored predictions of these rows were made with (constraints.txt)."""


@pytest.mark.skipif(
    any(version(name).partition("+")[0] != pinned for name, pinned in PINNED.items()),
    reason="the installed releases are not those of the stored predictions",
)
@pytest.mark.parametrize(
    "name",
    [
        # All of a script, of which this row is the last: in the second, 190,000 ops
        pytest.param(
            "preflight/convolutional: model=resnet50 batch=32 size=224 figure=allocated", marks=pytest.mark.slow
        ),
        pytest.param("liger/experts: op=experts mode=backward E=8", marks=pytest.mark.slow),
        # On a card with a total of its own
        "server/llama-3: model=llama-3-8b gib=79.22 figure=weights",
        "liger/added-rms-norm: op=added-rms-norm H=2048",
        "liger/rotary: op=rotary T=1024",
        "liger/swiglu: op=swiglu T=1024",
        pytest.param(  # on a GPU of the size that the log has
            "server/qwen2.5-1.5b-l40s: model=qwen2.5-1.5b-fp16 gib=44.52 max_model_len=4096 figure=cache",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_row_is_predicted_as_stored(name: str) -> None:
    """Rows that need no release but the installed one."""
    predicted, interval = read()[name]
    (row,) = rows([name])
    assert predict(row) == (predicted, interval.low, interval.high)


# -- the command -------------------------------------------------------------------------------------------------------


def test_rows_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "litgpt/generate"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert command.main(["--only", "nothing"]) == 2
    assert "no row has such a name" in capsys.readouterr().out


def test_an_environment_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEMSIZE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    missing = Environment("missing", (str(tmp_path / "no-such-package.whl"),))
    with pytest.raises(UnbuiltError, match=r"missing cannot be built: .*no-such-package"):
        ready(missing)
    assert not missing.path.exists()


def test_an_environment_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSIZE_CACHE", str(tmp_path))
    built = tmp_path / "built"
    built.mkdir()
    (built / ".complete").touch()
    assert ready(Environment("built", ("anything==1",))) == built
