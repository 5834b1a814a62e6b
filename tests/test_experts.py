"""Mixtures of experts: divided over GPUs, routed unevenly, and how many of their parameters one token uses."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import memsize
from memsize import InputError, Trace
from tests.known_values import BALANCED, Routing, constant_of, imbalanced, spread_choices

LAYERS, WIDTH, INNER, EXPERTS, CHOSEN, VOCABULARY = 2, 64, 128, 8, 2, 256
TOKENS = 4 * 64
OF_EXPERTS = LAYERS * EXPERTS * 3 * WIDTH * INNER
ATTENTION = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2
"""Four heads of 16, two of keys and values."""
OTHERS = LAYERS * (ATTENTION + EXPERTS * WIDTH + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": EXPERTS}
    config = tmp_path_factory.mktemp("mixtral") / "config.json"
    config.write_text(
        json.dumps({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **sizes, **heads}), "utf-8"
    )
    return f"hf:{config}"


def traced(target: str, parallel: str, imbalance: float = 1, capacity: float | None = None) -> Trace:
    routing: dict[str, Any] = {"imbalance": imbalance, "capacity_factor": capacity}
    return memsize.trace(
        target, seq_len=64, batch_size=4, optimizer="sgd", gpu="h100", parallel=parallel, **routing
    ).trace


def stored(trace: Trace) -> int:
    return sum(tensor.bytes for tensor in trace.tensors if tensor.kind == "parameter")


def widest(trace: Trace) -> int:
    """The largest tensor that experts keep for backward: the products of gates and ups."""
    return max(storage.bytes for storage in trace.storages if storage.role == "activation")


# -- divided over GPUs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "of_experts", "of_others"),
    [
        ("ep=8", 8, 8),
        ("fsdp=16,ep=8", 8, 16),  # two GPUs have the same expert, which FSDP does not cut: one holds it
        pytest.param("hsdp=2x8,ep=4", 8, 8, marks=pytest.mark.thorough),
        pytest.param("fsdp=4,tp=2,ep=8", 8, 8, marks=pytest.mark.thorough),
    ],
)
def test_a_gpu_stores_its_experts_and_its_shard_of_the_rest(
    mixtral: str, parallel: str, of_experts: int, of_others: int
) -> None:
    trace = traced(mixtral, parallel)
    whole = 4 * (OF_EXPERTS // of_experts + OTHERS // of_others)
    router = LAYERS * EXPERTS * WIDTH * 4
    if "tp" in parallel:  # norms and routers are not divided by tp
        assert stored(trace) == pytest.approx(whole, abs=router)
    else:  # 16 GPUs have a row each of a router's eight
        assert stored(trace) == whole + (router // EXPERTS - router // of_others) * (of_others > EXPERTS)
    assert any(note.startswith("ep: by the model's own ep_plan") for note in trace.notes)
    assert {entry.kind for entry in trace.collectives} >= {"all-to-all"}


@pytest.mark.parametrize(("imbalance", "busiest"), [(1, 1), (1.5, 1.5), (100, 4)])
def test_the_busiest_gpu_gets_more_tokens(mixtral: str, imbalance: float, busiest: float) -> None:
    """It gets as many as it sends if all get the same. One of 8 experts can get each token of all GPUs at most once,
    which is 8 / 2 times the mean.
    """
    trace = traced(mixtral, "ep=8", imbalance)
    assert widest(trace) == busiest * TOKENS * CHOSEN * 2 * INNER * 4
    (said,) = [text for text in trace.assumptions if "a router sends" in text]
    assert said == BALANCED if imbalance == 1 else f"busiest GPU {imbalance:g} times the mean" in said


@pytest.mark.parametrize(("imbalance", "capacity", "busiest"), [(1, 1.25, 1.25), (3, 1.25, 1.25), (1.5, 2, 1.5)])
def test_a_capacity_bounds_the_busiest_gpu(mixtral: str, imbalance: float, capacity: float, busiest: float) -> None:
    """Each GPU sends 512 choices; an expert that takes 1.25 times the mean at most gets 640."""
    trace = traced(mixtral, "ep=8", imbalance, capacity)
    assert widest(trace) == busiest * TOKENS * CHOSEN * 2 * INNER * 4


def test_experts_that_cannot_be_divided(mixtral: str) -> None:
    with pytest.raises(InputError, match=r"^8 experts cannot be divided evenly over ep=16; ep=8 works$"):
        traced(mixtral, "ep=16")
    for module, message in (
        (nn.Linear(8, 8), "Sequential has no experts to divide over ep=2"),
        (Layer(1), "no plan for"),
    ):
        with pytest.raises(InputError, match=message):
            memsize.trace(nn.Sequential(module), (8,), optimizer="sgd", gpu="h100", parallel="ep=2")


# -- routed unevenly --------------------------------------------------------------------------------------------------


@given(st.integers(1, 50), st.integers(1, 4), st.integers(5, 16), st.floats(1, 20), st.integers(0, 20))
def test_the_busiest_expert_gets_its_multiple_of_the_mean(
    rows: int, chosen: int, experts: int, imbalance: float, position: int
) -> None:
    counts = Routing(imbalance, None, position).counts(rows, chosen, experts)
    assert int(counts.sum()) == rows * chosen and int(counts.min()) >= 0 and int(counts.max()) <= rows
    busiest = min(imbalance * rows * chosen / experts, rows)
    assert int(counts[position % experts]) == pytest.approx(busiest, abs=1)
    indices = torch.empty(rows, chosen, dtype=torch.int64, device="meta")
    with imbalanced(imbalance):
        spread_choices(indices, -1, experts)
    values = constant_of(indices)
    assert values is not None and all(len(set(row)) == chosen for row in values.tolist())


# -- active parameters ------------------------------------------------------------------------------------------------


def test_a_token_uses_two_of_eight_experts(mixtral: str) -> None:
    report = memsize.report(mixtral)
    assert report.parameters == OTHERS + OF_EXPERTS
    assert report.active_parameters == OTHERS + OF_EXPERTS * CHOSEN // EXPERTS
    assert f"({report.active_parameters:,} active per token)" in str(report)
    assert json.loads(report.to_json())["parameters"]["active"] == report.active_parameters
    assert f"{report.active_parameters:,} active per token" in repr(report)


class Layer(nn.Module):
    def __init__(self, chosen: int | None) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(8))
        self.gate = nn.Linear(4, 8, bias=False)
        if chosen:
            self.top_k = chosen


@pytest.mark.parametrize(("chosen", "active"), [(2, 4 * 8 + 2 * 16), (None, None)])
def test_lists_of_experts_count_where_the_router_says_how_many_it_takes(chosen: int | None, active: int | None) -> None:
    assert memsize.report(Layer(chosen)).active_parameters == active


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [  # of their model cards
        ("mistralai/Mixtral-8x7B-v0.1", 46.7, 12.9),
        ("Qwen/Qwen3-30B-A3B", 30.5, 3.3),
        ("openai/gpt-oss-120b", 117, 5.1 + 0.58),  # the card leaves the table of embeddings out
        ("deepseek-ai/DeepSeek-V3", 671, 37),
    ],
)
def test_active_parameters_are_those_of_model_cards(name: str, billions: float, active: float) -> None:
    report = memsize.report(f"hf:{name}", scenarios="as-given")
    assert report.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert (report.active_parameters or 0) / 1e9 == pytest.approx(active, rel=0.03)


def parameter_bytes(target: str) -> int:
    """Bytes of parameters as they are stored."""
    return sum(tensor.bytes for tensor in memsize.trace(target).trace.tensors if tensor.kind == "parameter")


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "gibibytes"), [("openai/gpt-oss-20b", 12.8), ("openai/gpt-oss-120b", 60.8)])
def test_experts_in_mxfp4_take_what_the_model_card_says(name: str, gibibytes: float) -> None:
    """The checkpoints' sizes of its table 1 (arXiv 2508.10925)."""
    assert parameter_bytes(f"hf:{name}") / 2**30 == pytest.approx(gibibytes, abs=0.05)


@pytest.mark.thorough
def test_weights_of_deepseek_are_in_float8() -> None:
    """Of 671 billion parameters all but embedding, head, router and norms take a byte."""
    wide = 2 * 129_280 * 7168 + 58 * 256 * 7168
    assert parameter_bytes("hf:deepseek-ai/DeepSeek-V3") == pytest.approx(671.03e9 + wide, rel=0.001)
