"""Caches on the host: what stays on the GPU and what is pinned, by arithmetic; derived steps against traced ones."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import memsize
from memsize import Generation
from memsize.errors import InputError
from tests.gpus import card
from tests.test_generation import HEAD, SMALL, T5, WINDOW, generator_of, traced_whole
from tests.workloads import OnGpuWithHost, generator as generators

pytest.importorskip("transformers")

LAYERS = 3
BATCH = 2
TOKEN = BATCH * 2 * HEAD * 2
"""Bytes that a token of each sequence has in the keys, or in the values, of a layer: sequences × heads × width × 2."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("offloaded") / "config.json"
    path.write_text(json.dumps(SMALL | {"num_hidden_layers": LAYERS, "max_position_embeddings": 10_000}))
    return f"hf:{path}"


@pytest.mark.thorough
@pytest.mark.parametrize("cache", ["offloaded", pytest.param("offloaded_static", marks=pytest.mark.slow)])
def test_derived_steps_equal_traced_ones(cache: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_lasting", lambda piece: None)
    asked = Generation(prompt=16, max_new_tokens=20, cache_implementation=cache)
    with generator_of(target) as generator:
        every = traced_whole(generator, asked, BATCH)
        derived = generator.run(asked, BATCH)
        generator.cover(asked, [2, 3], [16, 29])
        traced = set(generator.samples)
        between = generator.derive(asked, BATCH)
        assert set(generator.samples) == traced
    for found in (derived, between):
        assert found.exact
        assert found.trace.events == every.trace.events
        assert found.trace.storages == every.trace.storages
        assert [layer._replace(states=()) for layer in found.cached] == list(every.cached)
        assert found.pinned == every.pinned


def test_what_is_on_the_host_and_on_the_gpu(target: str) -> None:
    prompt, new = 24, 40
    found = memsize.generate(
        target,
        prompt=prompt,
        max_new_tokens=new,
        batch_size=BATCH,
        cache_implementation="offloaded",
        scenarios="as-given",
    )
    (row,) = found.ran
    held = prompt + new - 1
    assert row.cache == LAYERS * 2 * held * TOKEN
    assert row.hosted == (LAYERS - 1) * 2 * held * TOKEN  # the first layer has come back for the next step
    # Up to 32 tokens keys take a block of 4 KiB, from then on one of 8 KiB.
    assert 32 * TOKEN == 4096
    assert row.pinned == (LAYERS - 1) * 2 * (4096 + 8192)
    # While the last layer's values grow by a token: those that were, the keys and values that are; and those of the
    # first layer, which are on their way back and have the token already.
    assert most_of_the_cache(found) == ((held - 1) + 2 * held + 2 * held) * TOKEN
    said = next(each.text() for each in found.findings if each.code == "kv-cache")
    assert "31.50 KiB of it is on the host." in said and "On the host, PyTorch pins 48.00 KiB" in said
    record = json.loads(found.to_json())["generations"][0]
    assert (record["kv_on_host"], record["pinned"]) == (row.hosted, row.pinned)
    assert "the host" in str(found)


def test_a_static_cache_is_pinned_once(target: str) -> None:
    found = memsize.generate(
        target,
        prompt=24,
        max_new_tokens=40,
        batch_size=BATCH,
        cache_implementation="offloaded_static",
        scenarios="as-given",
    )
    (row,) = found.ran
    assert row.hosted == (LAYERS - 1) * 2 * 63 * TOKEN
    assert row.pinned == (LAYERS - 1) * 2 * 8192
    # Each of two layers has room for all tokens; every layer counts them in an int64.
    assert most_of_the_cache(found) == 2 * 2 * 63 * TOKEN + LAYERS * 8


def most_of_the_cache(found: Any) -> int:
    """The most that storages of the cache have on the GPU at one time during decoding."""
    trace = found.trace
    kept = [(each.phase, each.delta if trace.storages[each.storage].role == "KV cache" else 0) for each in trace.events]
    levels = accumulate(delta for _, delta in kept)
    last = {index for index, name in enumerate(trace.phases) if name.startswith("decode")}
    return max(level for (phase, _), level in zip(kept, levels, strict=True) if phase in last)


def test_copies_of_a_mebibyte_are_like_smaller_ones(target: str) -> None:
    """From there on they are stand-ins, which take no memory here."""
    with generator_of(target) as generator:
        made = generator.run(Generation(prompt=8180, max_new_tokens=30, cache_implementation="offloaded"), BATCH)
    assert 8192 * TOKEN == 2**20
    assert made.exact
    assert made.cached[1].hosted == (8209 * TOKEN,) * 2
    assert made.pinned == (LAYERS - 1) * 2 * (2**20 + 2**21)


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_host_beside_the_gpu_changes_nothing_else(cache: str | None, target: str) -> None:
    asked = Generation(prompt=20, max_new_tokens=4, cache_implementation=cache)
    here, there = (), (OnGpuWithHost(card("a100")),)
    traces = []
    for edits in (here, there):
        with generator_of(target, *edits) as generator:
            traces.append(generator.run(asked, BATCH).trace)
    plain, virtual = traces
    assert [(each.storage, each.delta, each.layer, each.op) for each in plain.events] == [
        (each.storage, each.delta, each.layer, each.op) for each in virtual.events
    ]
    assert [each._replace(line=-1) for each in plain.storages] == [each._replace(line=-1) for each in virtual.storages]


def test_what_transformers_cannot_offload_is_said(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | WINDOW))
    with pytest.raises(
        InputError, match="no static layers with a window or a state: use cache_implementation offloaded"
    ):
        memsize.generate(
            f"hf:{path}", prompt=8, max_new_tokens=4, cache_implementation="offloaded_static", scenarios="as-given"
        )


def test_caches_that_an_encoder_decoder_has_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(T5))
    with pytest.raises(InputError, match=r"without bringing it back to the GPU: use cache_implementation dynamic"):
        memsize.generate(
            f"hf:{path}", prompt=8, max_new_tokens=4, cache_implementation="offloaded", scenarios="as-given"
        )
    assert memsize.generate(
        f"hf:{path}", prompt=8, max_new_tokens=4, cache_implementation="dynamic", scenarios="as-given"
    ).ran
