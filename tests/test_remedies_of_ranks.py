"""What would make a training fit that is spread over several GPUs: each line beside that very strategy, asked about."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import memsize
from memsize import Fit, Training
from tests.fits import STEP_REMEDIES, NotApplicable, RunVariant, more_gpus, remedies_of
from tests.gpus import card, cuda_context
from tests.models import SCENARIOS
from tests.ranks import Block
from tests.workloads import parse_parallel

MiB = 1 << 20
CONTEXT = cuda_context().high
"""What the CUDA context may take of any GPU."""


def fitted(parallel: Any, budget: int = CONTEXT + 100 * MiB, **options: Any) -> Fit:
    """Four blocks of 2 x 512 x 2,048 elements, 32 MiB, of which AdamW's training takes four times as much and more."""
    model = nn.Sequential(*(Block(512) for _ in range(4)))
    options = {"batch_size": 1, "train": "adamw", "scenarios": "fp32"} | options
    return memsize.fit(model, (512,), parallel=parallel, budget=budget, **options)


def needed(parallel: str, **options: Any) -> int | None:
    return fitted(parallel, 10 * CONTEXT, **options).fit_rows[0].peak


@pytest.fixture(scope="module")
def copied() -> Fit:
    return fitted("ddp=4")


@pytest.fixture(scope="module")
def hybrid() -> Fit:
    return fitted("hsdp=2x2")


@pytest.mark.thorough
def test_shards_are_tried_in_place_of_copies(copied: Fit, hybrid: Fit) -> None:
    sharded = needed("fsdp=4")
    for fit in (copied, hybrid):
        row = remedy(fit, "fsdp")
        assert (row.outcome, row.peak) == ("saves", sharded)
    # copies are on each GPU, however many
    assert "GPUs" not in " ".join(row.name for row in copied.remedied.rows)


@pytest.mark.thorough
def test_gradients_may_lie_in_their_buckets(copied: Fit, hybrid: Fit) -> None:
    row = remedy(copied, "bucket views")
    assert (row.outcome, row.peak) == ("saves", needed("ddp=4,views"))
    # One copy of the gradients less is asked for: of four blocks of 2 x 512 x 2,048 elements, of 4 bytes each.
    model = nn.Sequential(*(Block(512) for _ in range(4)))
    plain, views = (
        memsize.trace(model, (512,), batch_size=1, optimizer="adamw", parallel=way) for way in ("ddp=4", "ddp=4,views")
    )
    assert plain.peak.requested - views.peak.requested == 4 * 2 * 512 * 2048 * 4
    assert "bucket views" not in {each.name for each in hybrid.remedied.rows}
    again = remedy(fitted("ddp=4,views"), "bucket views")
    assert (again.outcome, again.reason) == ("not here", "gradients are views of the buckets already")


def test_shards_are_offloaded_and_spread_over_more_gpus(hybrid: Fit) -> None:
    assert remedy(hybrid, "offload").peak == needed("hsdp=2x2,offload")
    more = remedy(hybrid, "16 GPUs")
    assert (more.title, more.outcome) == ("hsdp=2x8, with the same batch on each", "fits")
    assert more.peak == needed("hsdp=2x8") <= 100 * MiB < needed("hsdp=2x4")
    (enough,) = [finding.text() for finding in hybrid.findings if finding.code == "remedy-enough"]
    assert enough.endswith("LoRA, 16 GPUs.")


def test_what_means_nothing_for_ranks_is_said(copied: Fit, hybrid: Fit) -> None:
    assert remedy(hybrid, "8-bit optimizer state").reason == (
        "bitsandbytes' optimizers cannot update DTensors (bitsandbytes#1633)"
    )
    assert remedy(copied, "8-bit optimizer state").outcome == "saves"
    assert remedy(hybrid, "mixed precision").title.startswith("MixedPrecisionPolicy")
    assert "autocast" not in {row.name for row in hybrid.remedied.rows}
    assert remedy(copied, "autocast").title.startswith("torch.autocast")


@pytest.mark.thorough
def test_parts_of_a_batch_are_more_microbatches() -> None:
    """Of two stages, each batch in two parts is four microbatches of half the size."""
    fit = fitted("pp=2", CONTEXT + 90 * MiB, batch_size=2)
    assert remedy(fit, "accumulation ×2").peak == needed(
        "pp=2", batch_size=1, train=Training("adamw", gradient_accumulation_steps=4)
    )
    assert remedy(fit, "4 GPUs").peak == needed("pp=4", batch_size=2)


@pytest.mark.thorough
def test_nothing_is_tried_where_another_number_or_strategy_is_enough() -> None:
    assert fitted("fsdp", gpus="2,8").remedied is None
    short = fitted("fsdp", gpus="1,2", remedies=True).remedied
    assert short is not None and short.gpu.startswith("2 x ")
    assert short.peak == needed("fsdp=2")


def remedy(fit: Fit, name: str) -> Any:
    assert fit.remedied is not None
    return next(row for row in fit.remedied.rows if row.name == name)


# -- which are tried --------------------------------------------------------------------------------------------------


def variant(parallel: str) -> RunVariant:
    return RunVariant(SCENARIOS["fp32"], card("t4"), Training("adamw"), parallel=parse_parallel(parallel))


@pytest.mark.parametrize(
    ("parallel", "more"),
    [
        ("fsdp=256", ["fsdp=512", "fsdp=1024"]),
        ("hsdp=4x64,tp=2", ["hsdp=4x128,tp=2"]),
        ("fsdp=64,pp=4,offload", ["fsdp=128,pp=4,offload", "fsdp=256,pp=4,offload"]),
        ("ddp=8,pp=64", ["ddp=8,pp=128"]),
        ("tp=512", ["tp=1024"]),
        ("ddp=8", []),
        ("dp=8", []),
    ],
)
def test_more_gpus_are_tried_where_each_holds_less(parallel: str, more: list[str]) -> None:
    tried = [each.apply(variant(parallel)).parallel for each in more_gpus(variant(parallel).parallel)]
    assert list(map(str, tried)) == more


def test_there_is_one_table_of_optimizations_and_what_ranks_add_to_it() -> None:
    alone = RunVariant(SCENARIOS["fp32"], card("t4"), Training("adamw"))
    assert remedies_of(alone) is STEP_REMEDIES
    names = [each.name for each in STEP_REMEDIES]
    assert [each.name for each in remedies_of(variant("ddp=8"))] == ["bucket views", "fsdp", *names]
    sharded = [each.name for each in remedies_of(variant("fsdp=8"))]
    assert sharded == ["fsdp", "offload", "mixed precision", *(name for name in names if name != "autocast")]


@pytest.mark.parametrize(
    ("parallel", "name", "reason"),
    [
        ("fsdp=8", "fsdp", "no processes hold copies of the same"),
        ("dp=8", "fsdp", "no processes hold copies of the same"),
        ("fsdp=8,offload", "offload", "shards are in the host's memory already"),
        ("fsdp=8,tp=2", "LoRA", "the model's own plan divides its layers as they are"),
        ("tp=2", "chunked cross-entropy", "the model's own plan divides its layers as they are"),
        ("tp=2", "8-bit optimizer state", "bitsandbytes' optimizers cannot update DTensors"),
    ],
)
def test_what_does_not_go_with_a_strategy(parallel: str, name: str, reason: str) -> None:
    optimization = next(each for each in remedies_of(variant(parallel)) if each.name == name)
    with pytest.raises(NotApplicable, match=reason):
        optimization.apply(variant(parallel))
