"""Packages of CUDA kernels that are not installed: simulated in scripts, with worked arithmetic, PyTorch's own kernels
of the same family, and what their papers measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memsize

MiB = 1 << 20
TOKENS, WIDTH, WORDS = 4096, 1024, 32_768
LOSS = """
import json, torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
from cut_cross_entropy import linear_cross_entropy
def measured(loss, tokens, width, words, dtype=torch.bfloat16, trained=True):
    hidden = torch.empty(tokens, width, dtype=dtype, device="cuda", requires_grad=True)
    weight = torch.empty(words, width, dtype=dtype, device="cuda", requires_grad=trained)
    target = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    (weight[:8] @ hidden[:8].t()).sum().backward()  # cuBLAS takes its workspace
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = loss(hidden, weight, target)
    forward = torch.cuda.max_memory_allocated() - before
    result.backward()
    print(json.dumps([forward, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]))
def liger(hidden, weight, target):
    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, target)
"""
ATTENTION = """
import json, torch
from torch.nn.functional import scaled_dot_product_attention
from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
def native(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True).transpose(1, 2)
def measured(attention, *shapes):
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for shape in shapes]
    gradient = torch.empty_like(tensors[0] if len(tensors) > 1 else tensors[0][:, :, 0])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(*tensors)
    forward = torch.cuda.memory_allocated() - before
    out.backward(gradient)
    print(json.dumps([forward, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]))
"""
Figures = Callable[[str, str], tuple[list[int], Any]]


@pytest.fixture
def figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Figures:
    """Run a script's lines after its head, and return what it prints: bytes after the forward, at most, at the end."""

    def run(head: str, line: str) -> tuple[list[int], Any]:
        script = tmp_path / "script.py"
        script.write_text(head + line)
        answer = memsize.run(script, gpu="a100-80gb")
        lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[")]
        return json.loads(lines[-1]), answer

    return run


# -- losses ------------------------------------------------------------------------------------------------------------


def test_liger_makes_its_gradients_in_the_forward(figures: Figures) -> None:
    (forward, both, after), _ = figures(LOSS, f"measured(liger, {TOKENS}, {WIDTH}, {WORDS})")
    gradients = 2 * TOKENS * WIDTH + 2 * WORDS * WIDTH
    # 32,768 / 1,024 = 32 times as wide: 4,096 / 32 = 128 tokens have as many logits as all have hidden states.
    logits, losses, mask = 2 * 128 * WORDS, 4 * TOKENS, TOKENS
    assert forward == both == gradients + logits + losses + mask == (8 + 64 + 8) * MiB + 20_480
    assert after == gradients + 512  # and the loss


def test_liger_adds_the_product_of_float32_weights_to_their_gradient(figures: Figures) -> None:
    line = f"measured(liger, {TOKENS}, {WIDTH}, {WORDS}, torch.float32)"
    (forward, _, _), _ = figures(LOSS, line)
    assert forward == 4 * TOKENS * WIDTH + 2 * 4 * WORDS * WIDTH + 4 * 128 * WORDS + 4 * TOKENS + TOKENS


def test_liger_leaves_out_the_gradient_of_a_frozen_head(figures: Figures) -> None:
    line = f"measured(liger, {TOKENS}, {WIDTH}, {WORDS}, trained=False)"
    (_, _, after), _ = figures(LOSS, line)
    assert after == 2 * TOKENS * WIDTH + 512


def test_cut_cross_entropy_of_gemma(figures: Figures) -> None:
    """Table 1 of the paper (Wijmans et al. 2024): 1 MB for the loss, and 1,164 MB with gradients, which take 1,161."""
    (forward, both, after), _ = figures(LOSS, "measured(linear_cross_entropy, 8192, 2304, 256_000)")
    gradients = 2 * 8192 * 2304 + 2 * 256_000 * 2304
    assert gradients / MiB == 1161
    assert after - gradients in (512, 512 + MiB)  # the allocator leaves up to 1 MiB of a segment in its last block
    assert round(forward / MiB) == 1
    # Sorting by the mean logits takes some 2 MiB more, as eager PyTorch does it.
    assert abs(both / MiB - 1164) <= 1


def test_cut_cross_entropy_wants_16_bits(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOSS + "measured(linear_cross_entropy, 64, 64, 640, torch.float32)")
    with pytest.raises(memsize.MemsizeError, match="16 bits"):
        memsize.run(script, gpu="a100")


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 2])
def test_flash_attention_is_like_that_of_pytorch(figures: Figures, heads: int) -> None:
    shapes = f"(2, 1000, 8, 64), (2, 1000, {heads}, 64), (2, 1000, {heads}, 64)"
    ours, _ = figures(ATTENTION, f"measured(flash_attn_func, {shapes})")
    native, _ = figures(ATTENTION, f"measured(native, {shapes})")
    # The output, and 8 sums of 1,000 rows; a state of 16 bytes here, and two there.
    assert ours[0] == 2 * 2 * 1000 * 512 + 64_000 + 512 == native[0] - 512
    assert abs(ours[1] - native[1]) <= 512
    assert ours[2] == native[2]


def test_the_gradient_of_packed_tensors_is_one(figures: Figures) -> None:
    (forward, most, after), answer = figures(ATTENTION, "measured(flash_attn_qkvpacked_func, (2, 1024, 3, 8, 64))")
    out, sums = 2 * 2 * 1024 * 512, 4 * 2 * 8 * 1024
    assert forward == out + sums + 512
    assert after - out == 3 * out  # the output is alive
    # The sums of rows, and the query's gradient in float32.
    assert most == forward + 3 * out + sums + 2 * out
    assert any("flash_attn is not installed" in note for note in answer.trace.notes)


def test_sequences_in_one_row(figures: Figures) -> None:
    line = "measured(lambda q, k, v: flash_attn_varlen_func(q, k, v, begins, begins, 512, 512), *3 * [(2048, 8, 40)])"
    head = ATTENTION + "begins = torch.tensor([0, 512, 1024, 2048], dtype=torch.int32, device='cuda')\n"
    (forward, most, _), _ = figures(head, line)
    out, sums = 2 * 2048 * 8 * 40, 4 * 8 * 2048
    assert forward == out + sums + 512
    # Three sequences: 128 rows more for each, in heads of a multiple of 32.
    assert most == forward + 3 * out + 4 * 8 * (2048 + 3 * 128) * (1 + 64)


def test_heads_are_padded(figures: Figures) -> None:
    (forward, _, _), _ = figures(ATTENTION, "measured(flash_attn_func, *3 * [(1, 1024, 4, 36)])")
    padded = 2 * 1024 * 4 * 40
    assert forward == 4 * padded + 4 * 4 * 1024 + 512  # queries, keys, values and the output


def test_attention_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,\n"
        "                     num_key_value_heads=1, vocab_size=100)\n"
        "model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation='flash_attention_2')\n"
        "ids = torch.zeros(2, 32, dtype=torch.int64, device='cuda')\n"
        "model.cuda()(input_ids=ids, labels=ids).loss.backward()\n"
    )
    trace = memsize.run(script, gpu="a100").trace
    assert any("flash_attn is not installed" in note for note in trace.notes)
    assert not any("softmax" in storage.op and storage.shape[-1] == 32 for storage in trace.storages)


# -- optimizers, and what libraries see --------------------------------------------------------------------------------


def test_state_of_apex(figures: Figures) -> None:
    head = "import json, torch\nfrom apex.optimizers import FusedAdam, FusedSGD, FusedLAMB\n"
    line = """
sizes = []
for make in (FusedAdam, FusedLAMB, lambda p: FusedSGD(p, 0.1, momentum=0.9), lambda p: FusedSGD(p, 0.1)):
    weight = torch.nn.Parameter(torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    optimizer = make([weight])
    before = torch.cuda.memory_allocated()
    optimizer.step()
    sizes.append(torch.cuda.memory_allocated() - before)
print(json.dumps(sizes))
"""
    sizes, _ = figures(head, line)
    assert sizes == [2 * 4 * MiB, 2 * 2 * MiB, 2 * MiB, 0]


def test_libraries_find_that_a_package_is_not_there(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util, torch\n"
        "assert importlib.util.find_spec('xformers') is None\n"
        "torch.zeros(8, device='cuda')\n"
        "from xformers.ops import memory_efficient_attention\n"
        "shape = 1, 16, 2, 8\n"
        "out = memory_efficient_attention(*(torch.zeros(shape, device='cuda') for _ in range(3)))\n"
        "assert out.shape == shape\n"
    )
    trace = memsize.run(script, gpu="a100").trace
    assert any("xformers is not installed" in note for note in trace.notes)


# -- a server in the process that trains -------------------------------------------------------------------------------


def test_a_server_takes_its_share_and_gives_it_back(figures: Figures, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "vocab_size": 1000}
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(config))
    line = f"""
import json, torch
from vllm import LLM, SamplingParams
server = LLM({str(tmp_path / "policy")!r}, gpu_memory_utilization=0.25, enable_sleep_mode=True)
sizes = [torch.cuda.get_device_properties(0).total_memory, torch.cuda.memory_allocated()]
answers = server.generate(["one", "two"], SamplingParams(n=3, max_tokens=7))
assert [[len(one.token_ids) for one in answer.outputs] for answer in answers] == [[7, 7, 7]] * 2
server.sleep(2)
sizes += [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
server.wake_up(["weights"])
sizes.append(torch.cuda.memory_allocated())
server.wake_up(["kv_cache"])
sizes.append(torch.cuda.memory_allocated())
print(json.dumps(sizes))
"""
    (total, share, asleep, reserved, weights, awake), _ = figures("", line)
    assert 0 <= share - total // 4 <= 3 * MiB  # whole segments
    assert asleep == reserved == 0 and awake == share
    # Embedding and head, 7 matrices of 64 by 64, and three norms, in 16 bits and one block of 512 bytes more at most.
    assert 0 <= weights - 2 * (2 * 1000 * 64 + 7 * 64 * 64 + 3 * 64) < 512
