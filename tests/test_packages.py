"""Packages of CUDA kernels that are not installed: simulated in scripts, with worked arithmetic, PyTorch's own kernels
of the same family, and what their papers measured.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memsize
from tests.conftest import Python

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
FLASH_LAYERS = """
import json, torch
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
def made(*shape, dtype=torch.bfloat16, trained=True):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=trained)
def measured(function, *tensors):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function(*tensors)
    forward = torch.cuda.memory_allocated() - before
    out.backward(torch.empty_like(out))
    print(json.dumps([forward, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]))
"""
Figures = Callable[[str, str], tuple[list[int], Any]]


@pytest.fixture
def figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Figures:
    """Run a script's lines after its head, and return what it prints: bytes after the forward, at most, at the end."""

    def run(head: str, line: str) -> tuple[list[int], Any]:
        script = tmp_path / "script.py"
        script.write_text(head + line)
        # Older releases have a second workspace, of cuBLASLt.
        answer = memsize.run(script, gpu="a100-80gb", stack="torch=2.13")
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


def test_liger_makes_the_gradients_of_separate_losses_in_the_backward(figures: Figures) -> None:
    head = LOSS + "\ndef separate(hidden, weight, target):\n"
    head += "    return LigerFusedLinearCrossEntropyLoss(reduction='none')(weight, hidden, target).sum()\n"
    (forward, both, after), _ = figures(head, f"measured(separate, {TOKENS}, {WIDTH}, {WORDS})")
    of_hidden, of_weight, logits = 2 * TOKENS * WIDTH, 2 * WORDS * WIDTH, 2 * 128 * WORDS
    losses, mask = 4 * TOKENS, TOKENS
    assert forward == of_hidden + logits + losses + mask
    # The logits of a chunk beside their copy, scaled by the gradients of 128 losses; the loss and its gradient.
    assert both == of_hidden + of_weight + 2 * logits + losses + mask + 512 + 2 * 512
    assert after == of_hidden + of_weight + 512


def test_liger_makes_no_gradients_without_autograd(figures: Figures) -> None:
    line = f"""
with torch.no_grad():
    hidden, weight = (torch.empty(size, {WIDTH}, dtype=torch.bfloat16, device="cuda") for size in ({TOKENS}, {WORDS}))
    weight = torch.nn.Parameter(weight)
    target = torch.zeros({TOKENS}, dtype=torch.int64, device="cuda")
    weight[:8] @ hidden[:8].t()  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated()
    loss = liger(hidden, weight, target)
    print(json.dumps([torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]))
"""
    (_, most), _ = figures(LOSS, line)
    assert most == 2 * TOKENS * WIDTH + 2 * 128 * WORDS + 4 * TOKENS + TOKENS


NORM = """
import json, torch
from liger_kernel.transformers import LigerRMSNorm
norm = LigerRMSNorm({width}).to(torch.bfloat16).cuda()
x = torch.empty({tokens}, {width}, dtype=torch.bfloat16, device="cuda", requires_grad=True)
before = torch.cuda.memory_allocated()
out = norm(x)
forward = torch.cuda.memory_allocated() - before
out.sum().backward()  # the norm copies the gradient, which is a number, for each element
print(json.dumps([forward, torch.cuda.max_memory_allocated() - before]))
"""


def test_ligers_norm_writes_its_gradient_over_the_one_that_comes_in(figures: Figures) -> None:
    (forward, most), _ = figures(NORM.format(tokens=TOKENS, width=WIDTH), "")
    assert forward == 2 * TOKENS * WIDTH + 4 * TOKENS  # the output, and a number for each row
    # Beside the gradient that comes in, each of an A100's 108 multiprocessors has a sum, and their sum is float32 too.
    sums, loss = 4 * 108 * WIDTH + 4 * WIDTH + 2 * WIDTH, 2 * 512
    assert most == forward + 2 * TOKENS * WIDTH + sums + loss


LIGER = """
import json, torch
from transformers import AutoConfig, AutoModelForCausalLM
from {source} import {name}
sizes = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, vocab_size=32_000, pad_token_id=0)
config = AutoConfig.for_model("{kind}", **sizes{more})
{before}
torch.set_default_dtype(torch.bfloat16)
model = AutoModelForCausalLM.from_config(config).cuda()
{after}
optimizer, sizes = torch.optim.AdamW(model.parameters()), []
ids = torch.randint(0, 32_000, (4, 512)).cuda()
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    loss = model(input_ids=ids, labels=ids).loss
    sizes += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    loss.backward()
    sizes += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(sizes))
"""


@pytest.mark.parametrize(
    ("source", "name", "before", "after"),
    [
        ("liger_kernel.transformers", "apply_liger_kernel_to_qwen3 as apply", "apply()", ""),
        ("liger_kernel.transformers", "apply_liger_kernel_to_qwen3 as apply", "", "apply(model=model)"),
        ("transformers.integrations.liger", "apply_liger_kernel as apply", "", "apply(model, {})"),
        ("liger_kernel.transformers", "AutoLigerKernelForCausalLM as AutoModelForCausalLM", "", ""),
    ],
)
def test_ligers_patches_of_transformers(figures: Figures, source: str, name: str, before: str, after: str) -> None:
    """As with Liger-Kernel 0.8.5 itself, whose kernels were launched on the same simulated GPU."""
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    names = ("apply_rotary_pos_emb", "Qwen3RMSNorm", "Qwen3MLP")
    originals = [modeling.Qwen3ForCausalLM.forward, *(getattr(modeling, name) for name in names)]
    script = LIGER.format(source=source, name=name, before=before, after=after, kind="qwen3", more="")
    sizes, answer = figures(script, "")
    assert sizes == LIGER_SIZES
    assert [modeling.Qwen3ForCausalLM.forward, *(getattr(modeling, name) for name in names)] == originals
    assert any("liger_kernel is not installed" in note for note in answer.trace.notes)


LIGER_SIZES = [
    *(243587584, 249823744, 191010304, 258260992),
    *(427764224, 434000896, 366011904, 434000896),
]


LIGERS_MODELS = {
    # Beside what Liger took there, which read no tile from a GPU without values: two blocks of tiles in each layer.
    ("mixtral", ", num_local_experts=4", "before"): [
        *(295150592 + 3 * 1024, 301386752 + 3 * 1024, 273997312, 355969536 + 3 * 1024),
        *(560610304 + 3 * 1024, 566945280 + 3 * 1024, 530937344, 621429248 + 3 * 1024),
    ],
    ("gpt_oss", ", num_local_experts=4, num_experts_per_tok=2, sliding_window=128", "after"): [
        *(566081536, 590898176, 274193920, 591212032),
        *(831737856, 856555008, 531330560, 856868352),
    ],
    ("gemma2", "", "before"): [
        *(419830784, 432359424, 126529536, 487960064),
        *(535856128, 548385280, 232331264, 593892864),
    ],
    ("olmo2", "", "after"): [
        *(271785984, 278120448, 192586240, 286452224),
        *(455441408, 461678080, 368115200, 461678080),
    ],
}


@pytest.mark.parametrize(("kind", "more", "when"), LIGERS_MODELS)
def test_ligers_patches_of_other_models(figures: Figures, kind: str, more: str, when: str) -> None:
    """As with Liger-Kernel 0.8.5 itself on the same simulated GPU."""
    pytest.importorskip("transformers")
    patches = {"before": "apply()", "after": ""} if when == "before" else {"before": "", "after": "apply(model=model)"}
    name = f"apply_liger_kernel_to_{kind} as apply"
    script = LIGER.format(source="liger_kernel.transformers", name=name, kind=kind, more=more, **patches)
    sizes, _ = figures(script, "")
    assert sizes == LIGERS_MODELS[kind, more, when]


def test_ligers_patches_of_a_model_of_images(figures: Figures) -> None:
    """As with Liger-Kernel 0.8.5 itself, which was passed the class of outputs that transformers 5.23 has no more."""
    pytest.importorskip("transformers.models.qwen3_vl")
    name = "apply_liger_kernel_to_qwen3_vl as apply"
    options = {"source": "liger_kernel.transformers", "name": name, "kind": "qwen3_vl", "more": ""}
    script = LIGER.replace("AutoModelForCausalLM", "AutoModelForImageTextToText").format(
        before="apply()", after="", **options
    )
    vision = "depth=1, hidden_size=64, num_heads=4, intermediate_size=64, out_hidden_size=512"
    vision = f"dict({vision}, deepstack_visual_indexes=[0])"
    sizes, _ = figures(script.replace("**sizes", f"text_config=sizes, vision_config={vision}"), "")
    assert sizes == [
        *(264193024, 270429184, 194314240, 285157888),
        *(446272512, 452509184, 367874048, 458324480),
    ]


def test_a_model_without_liger_patches_here_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from liger_kernel.transformers import apply_liger_kernel_to_llava\n")
    with pytest.raises(memsize.ForwardError, match="cannot import name 'apply_liger_kernel_to_llava'"):
        memsize.run(script, gpu="t4")


QLORA = """
import json, torch, bitsandbytes as bnb
from bitsandbytes.nn import Linear4bit, Linear8bitLt
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(512, 1024)
        self.a = Linear4bit(1024, 2048, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics={nested})
        self.b = Linear8bitLt(2048, 1024, has_fp16_weights=False, threshold=6.0)
        self.c = bnb.nn.LinearFP4(1024, 768, bias=False)
        self.d = Linear8bitLt(768, 512)
    def forward(self, x):
        return self.d(self.c(self.b(torch.relu(self.a(self.head(x))))))
model = Model().to({dtype}).cuda()
sizes = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
optimizer = bnb.optim.{optimizer}(model.parameters())
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    y = model(torch.randn(4, 64, 512, device="cuda", dtype={dtype}))
    sizes += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    y.sum().backward()
    sizes += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    optimizer.step()
    sizes.append(torch.cuda.memory_allocated())
    del y
    optimizer.zero_grad()
print(json.dumps(sizes))
"""


BITSANDBYTES = {
    ("AdamW8bit", False): [
        *(7378944, 11671040),
        *(20421632, 23545856, 33018880, 44808192, 34921472),
        *(30843904, 34363392, 34921472, 46710784, 34921472),
    ],
    ("PagedAdamW32bit", False): [
        *(7378944, 11671040),
        *(20421632, 23545856, 33018880, 44808192, 33055744),
        *(28978176, 32497664, 33055744, 44845056, 33055744),
    ],
    ("Lion8bit", False): [
        *(7378944, 11671040),
        *(20421632, 23545856, 33018880, 44808192, 33970176),
        *(29892608, 33412096, 33970176, 45759488, 33970176),
    ],
    ("AdEMAMix8bit", False): [
        *(7378944, 11671040),
        *(20421632, 23545856, 33018880, 44808192, 35871744),
        *(31794176, 35313664, 35871744, 47661056, 35871744),
    ],
    ("AdamW8bit", True): [
        *(5438464, 8435200),
        *(16519168, 20118528, 26620928, 31858688, 28523520),
        *(26941440, 30936064, 28523520, 33761280, 28523520),
    ],
    ("PagedAdamW32bit", True): [
        *(5438464, 8435200),
        *(16519168, 20118528, 26620928, 31858688, 26657792),
        *(25075712, 29070336, 26657792, 31895552, 26657792),
    ],
    ("Lion8bit", True): [
        *(5438464, 8435200),
        *(16519168, 20118528, 26620928, 31858688, 27572224),
        *(25990144, 29984768, 27572224, 32809984, 27572224),
    ],
    ("AdEMAMix8bit", True): [
        *(5438464, 8435200),
        *(16519168, 20118528, 26620928, 31858688, 29473792),
        *(27891712, 31886336, 29473792, 34711552, 29473792),
    ],
}
"""Bytes after moving and at most; of two steps, after forward and backward and at most in both, and at the end."""


@pytest.mark.parametrize(("name", "nested"), BITSANDBYTES)
def test_layers_and_optimizers_of_bitsandbytes(figures: Figures, name: str, nested: bool) -> None:
    """As with bitsandbytes 0.50.2 itself on the same simulated GPU."""
    dtype = "torch.bfloat16" if nested else "torch.float32"
    sizes, answer = figures(QLORA.format(nested=nested, dtype=dtype, optimizer=name), "")
    assert sizes == BITSANDBYTES[name, nested]
    assert any("bitsandbytes is not installed" in note for note in answer.trace.notes)


def test_a_product_in_int8_becomes_float16_first(figures: Figures) -> None:
    line = """
import json, torch, bitsandbytes as bnb
layer = bnb.nn.Linear8bitLt(1024, 4096, bias=False, has_fp16_weights=False, threshold=6.0).to(torch.bfloat16).cuda()
x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
with torch.no_grad():
    layer(x)
print(json.dumps([torch.cuda.max_memory_allocated() - before]))
"""
    (peak,), _ = figures("", line)
    # Rows in int8 with a scale each, then the product in int32, in float16 and in bfloat16 (bitsandbytes'
    # `cdequant_mm_int32_fp16`).
    assert peak == 64 * 1024 + 512 + (4 + 2 + 2) * 64 * 4096


def test_weights_and_states_of_bitsandbytes(figures: Figures) -> None:
    line = """
import json, torch, bitsandbytes as bnb
layer = bnb.nn.LinearNF4(1024, 2048, bias=False).cuda()
sizes = [torch.cuda.memory_allocated()]
head = torch.nn.Linear(512, 512, bias=False, device="cuda")
head.weight.grad = torch.zeros_like(head.weight)
before = torch.cuda.memory_allocated()
optimizers = [getattr(bnb.optim, name)(head.parameters()) for name in ("AdamW8bit", "PagedAdamW8bit", "Lion32bit")]
for optimizer in optimizers:
    optimizer.step()
    sizes.append(torch.cuda.memory_allocated() - before)
    before = torch.cuda.memory_allocated()
print(json.dumps(sizes + [optimizers[1].state[head.weight]["state2"].is_cuda]))
"""
    (weight, adamw, paged, lion, is_cuda), answer = figures("", line)
    # Half a byte a weight; a byte for each 64 and a float32 for each 64 · 256; the mean, 16 values, two maps of 256.
    blocks = 1024 * 2048 // 64
    assert weight == 1024 * 2048 // 2 + blocks + 4 * blocks // 256 + 512 + 512 + 2 * 1024
    # Two states of a byte, a float32 for each 256 of both, and their maps; pages are the host's.
    scales = 2 * (4 * 512 * 512 // 256 + 1024)
    assert adamw == 2 * 512 * 512 + scales and paged == scales and lion == 4 * 512 * 512
    assert not is_cuda and answer.trace.host is not None


QUANTIZED = """
import importlib.util, json, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.utils import is_bitsandbytes_available
assert importlib.util.find_spec("bitsandbytes") and is_bitsandbytes_available()
folder = str(Path(__file__).with_name("tiny"))
sizes = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4, vocab_size=3200)
LlamaConfig(num_hidden_layers=2, **sizes).save_pretrained(folder)
quantization = BitsAndBytesConfig({options})
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.bfloat16, device_map={{"": 0}}, quantization_config=quantization
)
figures = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
model.get_input_embeddings().requires_grad_()
for _ in range(2):
    torch.cuda.reset_peak_memory_stats()
    ids = torch.zeros(2, 128, dtype=torch.int64, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    figures += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
print(json.dumps(figures))
"""
WEIGHTS = 2 * [(512, 512), (256, 512), (256, 512), (512, 512), (1408, 512), (1408, 512), (512, 1408)]
REST = 2 * 2 * 3200 * 512 + 5 * 2 * 512 + 2 * 512
"""Embedding and head, norms, and two buffers of the rotary embedding that take a block."""


def blocks(*sizes: int) -> int:
    """Bytes of tensors, each in blocks of 512."""
    return sum(-(-size // 512) * 512 for size in sizes)


CONFIGS = {
    # Half a byte a weight; a float32 for each 64, or a byte and a float32 for each 64 · 256; values, a mean, and maps.
    "load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16": (
        sum(blocks(n * k // 2, 4 * (n * k // 64), 4 * 16) for n, k in WEIGHTS),
        [10880000, 33484800, 42449920, 33484800, 54448128],
    ),
    "load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16": (
        sum(blocks(n * k // 2, n * k // 64, 4 * -(-n * k // (64 * 256)), 4 * 16, 4) + 1024 for n, k in WEIGHTS) + 1024,
        [10750976, 33238016, 42203136, 33238016, 54201344],
    ),
    "load_in_8bit=True": (
        sum(blocks(n * k, 4 * n) for n, k in WEIGHTS),
        [14584832, 36097024, 47552512, 36097024, 58567680],
    ),
}
"""Bytes of the linear layers; at most while they are loaded, and of two steps after and at most."""


@pytest.mark.parametrize("options", CONFIGS)
def test_a_config_of_bitsandbytes_without_the_package(figures: Figures, options: str) -> None:
    """As with bitsandbytes 0.50.2 itself on the same simulated GPU."""
    transformers = pytest.importorskip("transformers.utils")
    before = transformers.is_bitsandbytes_available()
    (weights, *sizes), answer = figures(QUANTIZED.format(options=options), "")
    layers, expected = CONFIGS[options]
    assert weights == layers + REST
    assert sizes == expected
    assert any("bitsandbytes is not installed" in note for note in answer.trace.notes) is not before
    assert transformers.is_bitsandbytes_available() is before


def test_embeddings_keep_states_of_32_bits_where_a_trainer_asks_for_them(figures: Figures) -> None:
    line = """
import json, torch, bitsandbytes as bnb
embedding, head = torch.nn.Embedding(1024, 64, device="cuda"), torch.nn.Linear(64, 1024, bias=False, device="cuda")
bnb.optim.GlobalOptimManager.get_instance().register_module_override(embedding, "weight", {"optim_bits": 32})
head(embedding(torch.zeros(8, dtype=torch.int64, device="cuda"))).sum().backward()
optimizer = bnb.optim.AdamW([embedding.weight, head.weight], optim_bits=8)
before = torch.cuda.memory_allocated()
optimizer.step()
print(json.dumps([torch.cuda.memory_allocated() - before]))
"""
    # Two states of 4 bytes; two of a byte, a float32 for each 256 elements of both, and their maps.
    (states,), _ = figures("", line)
    assert states == 2 * 4 * 1024 * 64 + 2 * (1024 * 64 + 4 * 1024 * 64 // 256 + 1024)


def test_a_package_that_libraries_import_and_nobody_uses_is_not_noted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.metadata, importlib.util, torch\n"
        "if importlib.util.find_spec('bitsandbytes') and importlib.metadata.version('bitsandbytes'):\n"
        "    import bitsandbytes as bnb\n"
        "assert not isinstance(torch.nn.Linear(8, 8, device='cuda'), bnb.nn.Linear4bit)\n"
    )
    assert not any("bitsandbytes" in note for note in memsize.run(script, gpu="a100").trace.notes)


def test_cut_cross_entropy_of_gemma(figures: Figures) -> None:
    """Table 1 of the paper (Wijmans et al. 2024): 1 MB for the loss, and 1,164 MB with gradients, which take 1,161."""
    (forward, both, after), _ = figures(LOSS, "measured(linear_cross_entropy, 8192, 2304, 256_000)")
    gradients = 2 * 8192 * 2304 + 2 * 256_000 * 2304
    assert gradients / MiB == 1161
    assert after - gradients in (512, 512 + MiB)  # the allocator leaves up to 1 MiB of a segment in its last block
    assert round(forward / MiB) == 1
    # Sorting by the mean logits takes some 2 MiB more, as eager PyTorch does it.
    assert abs(both / MiB - 1164) <= 1


CUT = {
    "": [147968, 164352, 75497984, 75924992],
    "shift=1": [180736, 197120, 75530752, 75957760],
    "reduction='none'": [163840, 163840, 75513856, 75957248],
    "softcap=30.0": [147968, 180224, 75497984, 75924992],
    "filter_eps=None": [16896, 49152, 75497984, 75662848],
}


def test_options_of_cut_cross_entropy(figures: Figures) -> None:
    """As with cut-cross-entropy 25.1.1 itself on the same simulated GPU: bytes beside two sequences of 2,048 tokens."""
    line = """
import json, torch
from cut_cross_entropy import linear_cross_entropy
def measured(**options):
    hidden, weight = (
        torch.empty(*shape, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for shape in [(2, 2048), (32_768,)]
    )
    target = torch.zeros(2, 2048, dtype=torch.int64, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, target, **options)
    sizes = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    loss.sum().backward()
    sizes += [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
    return [size - before for size in sizes]
"""
    calls = ", ".join(f"measured({options})" for options in CUT)
    sizes, _ = figures(line, f"print(json.dumps([{calls}]))")
    assert dict(zip(CUT, sizes, strict=True)) == CUT


def test_cut_cross_entropy_wants_16_bits(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOSS + "measured(linear_cross_entropy, 64, 64, 640, torch.float32)")
    with pytest.raises(memsize.MemsizeError, match="16-bit hidden states"):
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


@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_embeddings_of_flash_attn(figures: Figures, inplace: bool) -> None:
    """Heads of 2 MiB, rotated after a product; its result and the gradients of both are as large."""
    head = FLASH_LAYERS + "cos, sin = (made(1024, 32, trained=False) for _ in range(2))\n"
    line = f"measured(lambda x: apply_rotary_emb(x * 2, cos, sin, inplace={inplace}), made(2, 1024, 8, 64))"
    (forward, most, after), _ = figures(head, line)
    heads = 2 * 2 * 1024 * 8 * 64
    assert forward == (1 if inplace else 2) * heads - (0 if inplace else heads)  # the product is not kept
    # The result and its gradient, and that of the product before the next; in place, the gradient is rotated as it is.
    assert most == forward + (2 if inplace else 3) * heads
    assert after == forward + heads


@pytest.mark.parametrize(
    ("options", "call", "tables"),
    [
        ("", "layer(x * 2)", 2),
        ("scale_base=512, ", "layer(x * 2)", 4),
        ("", "layer(x[:, :, 0], x[:, :, 1:] * 2)[1]", 2),
    ],
)
def test_rotary_layers_of_flash_attn(figures: Figures, options: str, call: str, tables: int) -> None:
    """Queries, keys and values of 2 MiB each are rotated where the product is, and so are their gradients.

    The layer has tables of 1,024 × 32 numbers, which backward needs: sines and cosines, and those of keys if scaled.
    """
    head = FLASH_LAYERS + "from flash_attn.layers.rotary import RotaryEmbedding\n"
    head += f"layer = RotaryEmbedding(64, {options}device='cuda')\n"
    (forward, _, after), _ = figures(head, f"measured(lambda x: {call}, made(2, 1024, 3, 8, 64))")
    heads = 2 * 2 * 1024 * 8 * 64
    rotated = (2 if "x[:" in call else 3) * heads
    assert forward == rotated + tables * 2 * 1024 * 32
    assert after == forward + 3 * heads


@pytest.mark.parametrize(("norm", "bias"), [("rms_norm_fn", "None"), ("layer_norm_fn", "made(4096)")])
def test_norms_of_flash_attn_keep_the_sum(figures: Figures, norm: str, bias: str) -> None:
    """2,048 rows of 4,096: 16 MiB in bfloat16, and the sum with the residual, 32 MiB in float32."""
    tensors = f"made(2048, 4096), made(4096), {bias}, made(2048, 4096, dtype=torch.float32)"
    (forward, most, after), _ = figures(FLASH_LAYERS, f"measured(lambda *t: {norm}(*t, prenorm=True)[0], {tensors})")
    is_rms = bias == "None"
    rows, numbers = 2 * 2048 * 4096, (1 if is_rms else 2) * 4 * 2048  # of each row its scale, and the mean
    assert forward == rows + 2 * rows + numbers
    # The gradients of the result, zeros for that of the sum, those of x and of the residual; 8 parts of the weight's
    # for each of 108 multiprocessors, and of the bias's.
    parts = (1 if is_rms else 2) * 14 * MiB  # 4 × 8 × 108 × 4096 bytes, 13.5 MiB
    sums = most - (forward + rows + 2 * rows + rows + 2 * rows + parts)
    assert 4 * 4096 <= sums <= 3 * 4 * 4096  # in float32, one of which is turned into bfloat16
    # The result, and the gradients of x, of the residual and of the weights.
    assert after == rows + rows + 2 * rows + (1 if is_rms else 2) * 2 * 4096


@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy_of_flash_attn(figures: Figures, inplace: bool) -> None:
    """Logits of 2,048 × 32,768, 128 MiB, of a head: their gradient is new, or takes their place. A leaf that is its own
    gradient would be copied (accumulate_grad.h).
    """
    head = FLASH_LAYERS + "target = torch.zeros(2048, dtype=torch.int64, device='cuda')\n"
    loss = f"CrossEntropyLoss(reduction='none', inplace_backward={inplace})"
    (forward, most, after), _ = figures(head, f"measured(lambda x: {loss}(x.view_as(x), target), made(2048, 32768))")
    row, logits = 4 * 2048, 2 * 2048 * 32768
    assert forward == 2 * row  # the losses, and a sum of each row
    assert most == 4 * row + (0 if inplace else logits)  # their gradient, and zeros for that of the second result
    assert after == row + (0 if inplace else logits)


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


def test_older_transformers_ask_for_flash_attn_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 4.57, whose `from_pretrained` is replaced besides."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    asking = "def is_flash_attn_2_available(): return False\n"
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers/__init__.py").write_text("")
    (tmp_path / "transformers/modeling_flash_attention_utils.py").write_text(asking)
    (tmp_path / "transformers/modeling_utils.py").write_text(
        f"{asking}\nclass PreTrainedModel:\n    @classmethod\n    def from_pretrained(cls): ...\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "from transformers import modeling_flash_attention_utils, modeling_utils\n"
        "assert modeling_flash_attention_utils.is_flash_attn_2_available()\n"
        "assert modeling_utils.is_flash_attn_2_available()\n"
        "assert 'memsize' in modeling_utils.PreTrainedModel.from_pretrained.__func__.__code__.co_filename\n"
    )
    assert memsize.run(script, gpu="a100").failure is None


def test_transformers_before_4_56_get_the_functions_of_flash_attn(warm_python: Python, tmp_path: Path) -> None:
    """As 4.52, which imports them where they are, and asks one for its options."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modeling_flash_attention_utils.py").write_text(
        "def is_flash_attn_2_available(): return False\n"
        "flash_attn_func = None\n"
        "if is_flash_attn_2_available():\n    from flash_attn import flash_attn_func\n"
        "if flash_attn_func:\n    _flash_supports_window_size = 1\n"
        "def attend(x):\n    return flash_attn_func(x, x, x) if _flash_supports_window_size else None\n"
        "def unpad(*args):\n    return unpad_input(*args)\n"
    )
    code = """
import memsize, sys, torch
sys.path.insert(0, "")
with memsize.virtual_gpu("a100"):
    from transformers.modeling_flash_attention_utils import attend, unpad
    x = torch.empty(2, 16, 4, 64, dtype=torch.bfloat16, device="cuda")
    print(attend(x).shape == x.shape, len(unpad(x, torch.ones(2, 16, dtype=torch.int64, device="cuda"))))
"""
    assert warm_python("-c", code).stdout.split() == ["True", "5"]


@pytest.mark.parametrize("module", ["trl.generation.vllm_generation", "trl.trainer.grpo_trainer"])
def test_trainers_of_trl_get_a_server(tmp_path: Path, module: str) -> None:
    """Before 0.26, the trainers' own modules import vLLM where it is installed."""
    *packages, name = module.split(".")
    folder = tmp_path
    for package in packages:
        folder /= package
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (folder / f"{name}.py").write_text(
        "def is_vllm_available(): return False\n"
        "def generate(model):\n"
        "    assert is_vllm_available()\n"
        "    options = SamplingParams(max_tokens=7, guided_decoding=GuidedDecodingParams(backend='outlines'))\n"
        "    return LLM(model, gpu_memory_utilization=0.5).generate(['a b'], options)[0].outputs[0].token_ids\n"
    )
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 1000}
    config |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    script = tmp_path / "script.py"
    script.write_text(f"from {module} import generate\nassert generate({str(tmp_path / 'tiny')!r}) == [0] * 7\n")
    run = memsize.run(script, gpu="t4")
    assert run.failure is None and any("vllm is not installed" in note for note in run.trace.notes)


HOPPER = """
from flash_attn_interface import flash_attn_func as third, flash_attn_qkvpacked_func, flash_attn_varlen_func
"""


def test_flash_attn_gathers_parts_and_has_functions_of_einops(tmp_path: Path) -> None:
    """As OpenRLHF imports them."""
    (tmp_path / "einops.py").write_text("def rearrange(tensor, pattern):\n    return tensor.t()\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from flash_attn.bert_padding import rearrange\n"
        "from flash_attn.utils.distributed import all_gather\n"
        "torch.distributed.init_process_group('nccl')\n"
        "part = torch.empty(16, 8, device='cuda', requires_grad=True)\n"
        "whole = all_gather(part, torch.distributed.group.WORLD)\n"
        "whole.sum().backward()\n"
        "assert whole.shape == (32, 8) and part.grad.shape == (16, 8)\n"
        "assert rearrange(part, 'a b -> b a').shape == (8, 16)\n"
    )
    trace = memsize.run(script, gpu="a100", gpus=2).trace
    assert {collective.kind for collective in trace.collectives} == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("heads", [8, 2])
def test_the_third_flash_attention_sums_shared_heads_in_float32(figures: Figures, heads: int) -> None:
    shapes = f"(2, 1000, 8, 64), (2, 1000, {heads}, 64), (2, 1000, {heads}, 64)"
    ours, answer = figures(ATTENTION + HOPPER, f"measured(third, {shapes})")
    native, _ = figures(ATTENTION, f"measured(native, {shapes})")
    out, sums, rows = 2 * 2 * 1000 * 512, 4 * 2 * 8 * 1000, 1024  # blocks of 128 rows
    assert ours[0] == out + sums == native[0] - 2 * 512  # the state of random numbers, twice
    assert ours[2] == native[2]
    gradients = 2 * 2 * 1000 * 64 * (8 + 2 * heads)
    shared = 0 if heads == 8 else 2 * 4 * 2 * heads * 1024 * 64
    scratch = 2 * 4 * 2 * 8 * rows + 4 * 2 * 8 * rows * 64 + shared
    assert 0 <= ours[1] - (ours[0] + gradients + scratch) < MiB  # a block's rest of less stays with it
    assert any("flash_attn_interface is not installed" in note for note in answer.trace.notes)


def test_the_third_flash_attention_takes_packed_heads_and_rows_of_sequences(figures: Figures) -> None:
    (forward, _, after), _ = figures(ATTENTION + HOPPER, "measured(flash_attn_qkvpacked_func, (2, 1024, 3, 8, 64))")
    out = 2 * 2 * 1024 * 512
    assert forward == out + 4 * 2 * 8 * 1024
    assert after == 4 * out  # the output and the gradient
    line = "measured(lambda q, k, v: flash_attn_varlen_func(q, k, v, begins, begins, 512, 512), *3 * [(2048, 8, 96)])"
    head = ATTENTION + HOPPER + "begins = torch.tensor([0, 512, 1024, 2048], dtype=torch.int32, device='cuda')\n"
    (forward, most, _), _ = figures(head, line)
    out = 2 * 2048 * 8 * 96
    assert forward == out + 4 * 8 * 2048
    assert most == forward + 3 * out + 4 * 8 * (2048 + 3 * 64) * (2 + 96)  # blocks of 64 rows for wide heads


COMPILED = """
import json, torch
from flash_attn import flash_attn_func as second
from flash_attn_interface import flash_attn_func as third
class Layer(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.parts = torch.nn.Linear(256, 768, bias=False, device="cuda", dtype=torch.bfloat16)
        self.attention = attention
    def forward(self, x):
        parts = self.parts(torch.nn.functional.rms_norm(x, (256,))).view(2, 1024, 3, 4, 64)
        return x + self.attention(*parts.unbind(2), causal=True).flatten(2).relu().square()
def native(q, k, v, causal):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
figures = []
for attention in native, second, third:
    layer = torch.compile(Layer(attention), fullgraph=True)
    x = torch.empty(2, 1024, 256, device="cuda", dtype=torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        for _ in range(2):
            layer.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = layer(x).sum()
            after = torch.cuda.memory_allocated() - before
            loss.backward()
    figures += [after, torch.cuda.max_memory_allocated() - before]
    del layer, loss
print(json.dumps(figures))
"""


@pytest.mark.thorough
def test_compiled_flash_attention_is_like_that_of_pytorch(figures: Figures) -> None:
    """One graph, as `fullgraph` wants it, in which the kernels of forward and backward are operators."""
    (kept, most, kept_by_second, most_by_second, kept_by_third, most_by_third), _ = figures(COMPILED, "")
    states, sums = 1024, 4 * 2 * 4 * 1024  # of random numbers; the third has another sum of each row
    assert kept - states <= kept_by_third <= kept_by_second <= kept
    assert abs(most_by_second - most) <= states
    assert abs(most_by_third - (most + sums)) <= states


# -- kernels of the Hub ------------------------------------------------------------------------------------------------

KERNELS = """
def get_kernel(repo_id, *, revision=None, version=None, **options):
    raise FileNotFoundError(f"{repo_id} cannot be reached\\nmore")
def has_kernel(repo_id, **options):
    raise FileNotFoundError(repo_id)
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package `kernels`, to which the Hub cannot be reached."""
    package = tmp_path / "site"
    (package / "kernels").mkdir(parents=True)
    (package / "kernels" / "__init__.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    yield lambda: importlib.import_module("kernels")
    sys.modules.pop("kernels", None)


@pytest.mark.usefixtures("kernels")
def test_attention_of_the_hub_is_that_of_its_package(figures: Figures) -> None:
    shapes = "(2, 1024, 8, 64), (2, 1024, 2, 64), (2, 1024, 2, 64)"
    hub = """
from kernels import get_kernel, has_kernel
assert has_kernel("kernels-community/flash-attn3", version=1)
third = get_kernel("varunneal/flash-attention-3").flash_attn_interface.flash_attn_func
second = get_kernel("kernels-community/flash-attn2", version=1).flash_attn_func
"""
    for name, package in (("third", HOPPER), ("second", "second = flash_attn_func\n")):
        expected, _ = figures(ATTENTION + package, f"measured({name}, {shapes})")
        of_hub, answer = figures(ATTENTION + hub, f"measured({name}, {shapes})")
        assert of_hub == expected
        assert any("kernels-community/flash-attn2" in note and "simulated" in note for note in answer.trace.notes)


def test_a_kernel_of_the_hub_that_cannot_be_loaded_is_named(tmp_path: Path, kernels: Any) -> None:
    package = kernels()
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, kernels\n"
        "torch.ones(8, device='cuda')\n"
        "assert not kernels.has_kernel('kernels-community/flash-attn3')\n"
        "try:\n    kernels.get_kernel('me/mine', version=1)\nexcept FileNotFoundError:\n    pass\n"
        "for name in 'kernels-community/flash-attn2', 'kernels-community/causal-conv1d':\n"
        "    try:\n        kernels.get_kernel(name)\n        print('there is', name)\n"
        "    except RuntimeError as error:\n        print(error)\n"
    )
    notes = memsize.run(script, gpu="t4").trace.notes
    failed = next(note for note in notes if "me/mine" in note)
    assert "FileNotFoundError: me/mine cannot be reached" in failed
    assert "more" not in failed
    assert any("kernels-community/causal-conv1d" in note for note in notes)
    assert not any("flash-attn2" in note for note in notes)  # no kernel for a T4
    with pytest.raises(FileNotFoundError):  # outside of the run, the package is its own
        package.get_kernel("kernels-community/flash-attn2")


# -- state spaces ------------------------------------------------------------------------------------------------------

SCAN = """
import importlib.util, json, torch
def measured(function, *tensors):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function(*tensors)
    forward = torch.cuda.memory_allocated() - before
    out.backward(torch.empty_like(out))
    for tensor in tensors:
        assert tensor is None or tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype
    print(json.dumps([forward, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]))
def new(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)
"""


def test_a_causal_convolution_keeps_its_input(figures: Figures) -> None:
    line = (
        "from causal_conv1d import causal_conv1d_fn\nmeasured(causal_conv1d_fn, new(2, 64, 1024), new(64, 4), new(64))"
    )
    (forward, most, after), _ = figures(SCAN, line)
    out, filters, bias = 2 * 2 * 64 * 1024, 2 * 64 * 4, 512
    assert forward == out
    assert after == 2 * out + filters + bias
    assert most == 3 * out + 2 * filters + bias + filters  # sums of float32, of which the first becomes 16 bits


@pytest.mark.parametrize("gated", [False, True])
def test_a_selective_scan_keeps_its_states(figures: Figures, gated: bool) -> None:
    line = f"""
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
f = torch.float32
measured(selective_scan_fn, new(2, 64, 5000), new(2, 64, 5000), new(64, 16, dtype=f), new(2, 16, 5000),
         new(2, 16, 5000), new(64, dtype=f), {"new(2, 64, 5000)" if gated else None}, new(64, dtype=f))
"""
    (forward, most, after), _ = figures(SCAN, line)
    row, states = 2 * 2 * 64 * 5000, 4 * 2 * 64 * 3 * 32  # after each of three chunks of 2,048 tokens
    assert forward == (2 if gated else 1) * row + states
    selective = 2 * 2 * 16 * 5000
    gradients = (3 if gated else 2) * row + 4 * 64 * 16 + 2 * selective + 2 * 512
    assert after - gradients == row  # the output
    assert most == forward + row + gradients + 2 * 2 * selective  # B and C collect theirs in float32


def test_mamba_computes_its_convolution_again(figures: Figures) -> None:
    line = """
from mamba_ssm import Mamba
layer = Mamba(256, device="cuda", dtype=torch.bfloat16)
layer(new(1, 8, 256))  # cuBLAS takes its workspace
measured(layer, new(2, 2048, 256))
"""
    (forward, _, _), _ = figures(SCAN, line)
    tokens, inner, states = 2 * 2048, 512, 16
    outer, parts = 2 * tokens * 2 * inner, 2 * tokens * (16 + 2 * states)
    out, scanned, kept = 2 * tokens * 256, 2 * tokens * inner, 4 * 2 * inner * 1 * 2 * states
    # B and C lie state by state. A is computed from its logarithm, and the bias of the steps is in float32.
    small = 2 * 4 * inner * states + 4 * inner
    assert forward == out + outer + scanned + parts + 2 * 2 * tokens * states + kept + small


MAMBA2 = """
import json, torch
from mamba_ssm import Mamba2
from mamba_ssm.modules.mamba2 import Mamba2 as same
assert Mamba2 is same
stats = torch.cuda.memory_stats
layer = Mamba2(256, device="cuda", dtype=torch.bfloat16, **options)
x = torch.empty((2, 1000, 256), device="cuda", dtype=torch.bfloat16, requires_grad=True)
for _ in range(2):  # the first makes the gradients
    out = None
    torch.cuda.reset_peak_memory_stats()
    before = stats()["requested_bytes.all.current"]
    out = layer(x)
    forward = stats()["requested_bytes.all.current"] - before
    torch.cuda.reset_peak_memory_stats()
    out.backward(torch.empty_like(out))
    most = stats()["requested_bytes.all.peak"] - before
for tensor in (x, *layer.parameters()):
    assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype
print(json.dumps([forward, most]))
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The input product of 1,288 columns, the scan's output, a number for each row, the output, and two of A's size.
        ({}, [2 * 2000 * (1288 + 512 + 256) + 4 * 2000 + 2 * 4 * 8, 52_698_016]),
        ({"rmsnorm": False}, [2 * 2000 * (1288 + 512 + 256) + 2 * 4 * 8, 54_737_024]),
        # Convolution, scan and norm by themselves: also what is convolved, the decay by chunks, and the norm's output.
        (
            {"use_mem_eff_path": False},
            [
                2 * 2000 * (1288 + 768 + 2 * 512 + 256) + 4 * 2 * 8 * 4 * 256 + 4 * 2000 + 2 * 4 * 8,
                45_586_528,
            ],
        ),
        ({"ngroups": 2, "D_has_hdim": True, "d_ssm": 256}, [8_224_032, 49_037_472]),
    ],
)
def test_mamba2_takes_what_its_own_code_takes(figures: Figures, options: dict[str, Any], expected: list[int]) -> None:
    """The most of a step is that of mamba_ssm 2.3.2's Python code with its Triton kernels, run on the same GPU."""
    measured, answer = figures(f"options = {options!r}\n", MAMBA2)
    assert measured == expected
    assert any("mamba_ssm is not installed" in note for note in answer.trace.notes)


def test_kernels_are_there_for_a_package_without_them(figures: Figures) -> None:
    line = """
assert importlib.util.find_spec("selective_scan_cuda") is None
import causal_conv1d_cuda, selective_scan_cuda
x = new(1, 8, 4096)
b = new(1, 1, 4, 4096)
out, states = selective_scan_cuda.fwd(x, x, new(8, 4, dtype=torch.float32), b, b, None, None, None, True)
assert out.shape == x.shape and states.shape == (1, 8, 2, 8) and states.dtype == torch.float32
assert causal_conv1d_cuda.causal_conv1d_fwd(x, None, None, None, None, out, None, True) is None
print(json.dumps([0]))
"""
    _, answer = figures(SCAN, line)
    assert any("selective_scan_cuda is not installed" in note for note in answer.trace.notes)


def test_mmcv_is_there_without_its_operators(figures: Figures, tmp_path: Path) -> None:
    """Two images' 100 queries in 4 heads of 16 channels give 2 · 100 · 64 values, in float32."""
    (tmp_path / "mmcv").mkdir()
    (tmp_path / "mmcv" / "__init__.py").write_text("")
    line = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
operators = importlib.import_module("mmcv._ext")
value = new(2, 340, 4, 16, dtype=torch.float32)
locations = new(2, 100, 4, 2, 4, 2, dtype=torch.float32)
out = operators.ms_deform_attn_forward(value, None, None, locations, locations[..., 0], im2col_step=64)
assert out.is_cuda and out.dtype == torch.float32
assert not hasattr(operators, "__path_of_nothing__")
try:
    operators.nms(value, value)
except NotImplementedError as error:
    assert "mmcv's compiled operator nms" in str(error)
    print(json.dumps(list(out.shape)))
"""
    shape, answer = figures(SCAN, line)
    assert shape == [2, 100, 64]
    assert any("mmcv._ext is not installed" in note for note in answer.trace.notes)


# -- linear attention --------------------------------------------------------------------------------------------------

LINEAR = """
import json, torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.simple_gla import chunk_simple_gla
half, single = torch.bfloat16, torch.float32
def new(*shape, dtype=half):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)
def heads(count, width=(128,), dtype=half):
    return new(2, 2048, count, *width, dtype=dtype)
def measured(function, *tensors, **options):
    gradient = torch.empty_like(tensors[2])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, state = function(*tensors, **options)
    figures = [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]
    torch.cuda.reset_peak_memory_stats()
    out.backward(gradient)
    print(json.dumps([*figures, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]))
"""
ROWS = 2 * 2048


def test_the_gated_delta_rule_keeps_a_system_for_each_chunk(figures: Figures) -> None:
    """The last two are those of fla 0.6.0's own code, as are all figures here."""
    line = "heads(8), heads(8), heads(16), heads(16, (), single), heads(16, ())"
    (kept, forward, backward, after), _ = figures(LINEAR, f"measured(chunk_gated_delta_rule, {line})")
    out, gate, system = 2 * ROWS * 16 * 128, 4 * ROWS * 16, 2 * ROWS * 16 * 64
    assert kept == out + gate + system
    # Keys, values, new values, and a state of 128 × 128 for each of 2 · 32 chunks and 16 heads.
    assert forward == kept + 3 * out + 2 * 2 * 32 * 16 * 128 * 128
    assert (backward, after) == (235_798_528, 50_724_864)


def test_the_gated_delta_rule_with_normalized_keys_and_its_last_state(figures: Figures) -> None:
    line = "heads(8), heads(8), heads(16), heads(16, (), single), heads(16, ())"
    options = "use_qk_l2norm_in_kernel=True, output_final_state=True"
    answer, _ = figures(LINEAR, f"measured(chunk_gated_delta_rule, {line}, {options})")
    # Both normalized, the norms of 2 · 8 heads, and 2 · 16 states in float32.
    assert answer[0] == 25_427_968 + 2 * 2 * ROWS * 8 * 128 + 2 * 4 * ROWS * 8 + 4 * 2 * 16 * 128 * 128
    assert answer[1:] == [128_450_560, 257_032_192, 52_822_016]


def test_a_gate_of_16_bits_is_summed_again_in_backward(figures: Figures) -> None:
    line = "measured(chunk_gla, heads(8), heads(8), heads(8), heads(8, dtype={}))"
    answers = [figures(LINEAR, line.format(dtype))[0] for dtype in ("half", "single")]
    within, out, gate = 4 * ROWS * 8 * 64, 2 * ROWS * 8 * 128, 4 * ROWS * 8 * 128
    assert [answer[0] for answer in answers] == [within + out, within + out + gate]
    assert answers[0][1:] == [50_331_648, 201_326_592, 41_943_040]


def test_simple_gla_keeps_its_gate(figures: Figures) -> None:
    answer, run = figures(LINEAR, "measured(chunk_simple_gla, heads(8), heads(8), heads(8), heads(8, ()))")
    assert answer == [4 * ROWS * 8 + 2 * ROWS * 8 * 128, 25_296_896, 100_925_440, 33_619_968]
    assert any("fla is not installed" in note for note in run.trace.notes)


def test_what_fla_is_not_simulated_with_is_named(figures: Figures) -> None:
    line = "measured(chunk_simple_gla, heads(8), heads(8), heads(8), g_gamma=new(8))"
    with pytest.raises(memsize.MemsizeError, match="g_gamma of SimpleGated in fla is not simulated: install"):
        figures(LINEAR, line)


# -- Transformer Engine ------------------------------------------------------------------------------------------------

ENGINE = """
import json, torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import *
def measured(layer, recipe=None, dtype=torch.bfloat16, halves=False):
    layer(torch.empty(16, layer.width, dtype=dtype, device="cuda")).sum().backward()  # cuBLAS takes its workspaces
    layer.zero_grad()
    x = torch.empty(4096, layer.width, dtype=dtype, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe), torch.autocast("cuda", torch.bfloat16, halves):
        out = layer(x)
    forward = torch.cuda.memory_allocated() - before
    out.backward(torch.empty_like(out))
    print(json.dumps([forward, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]))
def linear(cls=te.Linear, dtype=torch.bfloat16, **options):
    layer = cls(1024, 4096, bias=False, params_dtype=dtype, **options)
    layer.width = 1024
    return layer
class Torch(torch.nn.Linear):
    def __init__(self, *sizes, params_dtype, bias):
        super().__init__(*sizes, bias=bias, dtype=params_dtype, device="cuda")
"""
TOKEN_BYTES = 4096 * 1024
OUT = 2 * 4096 * 4096


@pytest.fixture
def on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[str, str], list[int]]:
    """Run lines after `ENGINE` on a GPU, and return what they print."""

    def run(gpu: str, line: str) -> list[int]:
        script = tmp_path / "script.py"
        script.write_text(ENGINE + line)
        memsize.run(script, gpu=gpu)
        return list(json.loads([line for line in capfd.readouterr().out.splitlines() if line.startswith("[")][-1]))

    return run


On = Callable[[str, str], list[int]]


@pytest.mark.parametrize("options", ["dtype=torch.bfloat16", "dtype=torch.float32"])
def test_a_layer_of_16_bits_keeps_what_that_of_pytorch_keeps(on: On, options: str) -> None:
    ours, native = (on("h100", f"measured(linear({cls}{options}), {options})") for cls in ("", "Torch, "))
    assert ours == native


def test_autocast_of_float32_weights_is_kept(on: On) -> None:
    line = "measured(linear(dtype=torch.float32), dtype=torch.float32, halves=True)"
    # The input and the weight in 16 bits are kept; nothing caches the copy of the weight.
    assert on("h100", line)[0] == OUT + 2 * TOKEN_BYTES + 2 * TOKEN_BYTES


def test_float8_keeps_a_transposed_input_and_both_weights(on: On) -> None:
    forward, most, after = on("h100", "measured(linear(), DelayedScaling(amax_history_len=1024))")
    scale = 512
    history = 4 * 1024 * (3 + 2) + 2 * scale
    kept = 3 * (TOKEN_BYTES + scale)  # 4,096 · 1,024 is the size of the input and of the weight
    assert forward == OUT + kept + history
    gradients = 2 * 2 * TOKEN_BYTES
    assert after == OUT + history + gradients
    assert most == forward + OUT + 2 * (OUT // 2 + scale) + gradients  # the gradient of the output, twice in float8


def test_blackwell_reads_float8_along_any_dimension(on: On) -> None:
    forward, _, _ = on("b200", "measured(linear(), Float8CurrentScaling())")
    assert forward == OUT + 2 * (TOKEN_BYTES + 512)


def test_blocks_of_32_have_a_scale_of_one_byte(on: On) -> None:
    forward, _, _ = on("b200", "measured(linear(), MXFP8BlockScaling())")
    assert forward == OUT + 3 * (TOKEN_BYTES + TOKEN_BYTES // 32)


def test_blocks_of_128_have_a_scale_of_float32(on: On) -> None:
    forward, _, _ = on("h100", "measured(linear(), Float8BlockScaling())")
    of_input, of_weight = 4 * 4096 * 1024 // 128, 4 * 32 * 8
    assert forward == OUT + 3 * TOKEN_BYTES + of_input + 2 * of_weight


def test_an_mlp_keeps_its_norm_and_its_activation(on: On) -> None:
    mlp = "layer = te.LayerNormMLP(1024, 4096, params_dtype=torch.bfloat16)\nlayer.width = 1024\n"
    statistics, inner = 2 * 4 * 4096, 2 * 4096 * 4096
    out = 2 * TOKEN_BYTES
    forward, _, _ = on("h100", mlp + "measured(layer)")
    # The norm's output, the first product and its activation.
    assert forward == out + statistics + 2 * TOKEN_BYTES + 2 * inner
    forward, _, _ = on("h100", mlp + "measured(layer, Float8CurrentScaling())")
    weights = 2 * 2 * (TOKEN_BYTES + 512)
    assert forward == out + statistics + (TOKEN_BYTES + 512) + inner + (inner // 2 + 512) + weights


def test_micro_batches_share_a_float8_weight(on: On) -> None:
    line = """
layer = linear()
x = torch.empty(4096, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
sizes = []
with te.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
    for first in (True, False):
        before = torch.cuda.memory_allocated()
        out = layer(x, is_first_microbatch=first)
        sizes.append(torch.cuda.memory_allocated() - before)
        del out
print(json.dumps(sizes))
"""
    first, second = on("h100", line)
    workspace = (32 << 20) + 1024
    assert first - second == workspace + 2 * (TOKEN_BYTES + 512)


def test_a_transformer_layer_trains(on: On) -> None:
    line = """
layer = te.TransformerLayer(1024, 4096, 16, num_gqa_groups=4, params_dtype=torch.bfloat16)
x = torch.empty(512, 8, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
with te.fp8_autocast():
    out = layer(x)
out.sum().backward()
assert out.shape == x.shape == x.grad.shape
print(json.dumps([sum(parameter.numel() for parameter in layer.parameters())]))
"""
    qkv, projection, mlp = 1024 * (16 + 2 * 4) * 64 + 1536, 1024 * 1024 + 1024, 2 * 1024 * 4096 + 4096 + 1024
    assert on("h100", line) == [qkv + projection + mlp + 2 * 2 * 1024]


PARAMETERS = """
with te.quantized_model_init(enabled=True, recipe={recipe}):
    layer = linear()
print(json.dumps([torch.cuda.memory_allocated(), layer.weight.dtype == torch.bfloat16]))
"""


@pytest.mark.parametrize(
    ("gpu", "recipe", "expected"),
    [
        # Data and a transposed copy, each with its scale, in a block of 512 bytes.
        ("h100", "DelayedScaling()", 2 * TOKEN_BYTES + 2 * 512),
        # A Blackwell multiplies by one copy.
        ("b200", "Float8CurrentScaling()", TOKEN_BYTES + 512),
        # 32 values in either direction share a byte.
        ("b200", "MXFP8BlockScaling()", 2 * (TOKEN_BYTES + TOKEN_BYTES // 32)),
        # 128 × 128 values share a float32: 8 × 32 and 32 × 8 of them.
        ("h100", "Float8BlockScaling()", 2 * (TOKEN_BYTES + 4 * 8 * 32)),
    ],
)
def test_parameters_in_float8(on: On, gpu: str, recipe: str, expected: int) -> None:
    assert on(gpu, PARAMETERS.format(recipe=recipe)) == [expected, True]


def test_parameters_in_float8_are_multiplied_as_they_are(on: On) -> None:
    line = "with te.fp8_model_init(recipe=DelayedScaling()):\n    layer = linear()\nmeasured(layer, DelayedScaling())"
    forward, most, after = on("h100", line)
    copied, copied_most, copied_after = on("h100", "measured(linear(), DelayedScaling())")
    weights = 2 * (TOKEN_BYTES + 512)
    assert (forward, most, after) == (copied - weights, copied_most - weights, copied_after)


def test_an_optimizer_dequantizes_parameters_in_float8(on: On) -> None:
    text = """
with te.fp8_model_init(recipe=DelayedScaling()):
    layer = linear()
optimizer = torch.optim.AdamW(layer.parameters())
layer.weight.grad = torch.empty(4096, 1024, dtype=torch.bfloat16, device="cuda")
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
optimizer.step()
print(json.dumps([torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]))
"""
    after, most = on("h100", text)
    half = 2 * TOKEN_BYTES
    assert after == 2 * half
    # The root of the second moment and its quotient; later that, and the weight in 16 bits.
    assert most == after + 2 * half


ADAM = """
from transformer_engine.pytorch.optimizers import FusedAdam
weights = [torch.nn.Parameter(torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda")) for _ in range(2)]
optimizer = FusedAdam(weights, {options})
for weight in weights:
    weight.grad = torch.empty_like(weight)
before = torch.cuda.memory_allocated()
optimizer.step()
after = torch.cuda.memory_allocated() - before
torch.cuda.reset_peak_memory_stats()
optimizer.step()
print(json.dumps([after, torch.cuda.max_memory_allocated() - before - after]))
"""


@pytest.mark.parametrize(
    ("options", "state", "temporary"),
    [
        ("", 4 + 4, 0),
        ("master_weights=True", 4 + 4 + 4, 0),
        ("master_weights=True, store_param_remainders=True", 4 + 4 + 2, 0),
        # The kernel reads both moments in bfloat16, but not one of them.
        ("exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16", 2 + 2, 0),
        ("exp_avg_dtype=torch.bfloat16", 2 + 4, 4),
        ("exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.uint8", 1 + 1, 4 + 4),
    ],
)
def test_state_of_transformer_engines_adam(on: On, options: str, state: int, temporary: int) -> None:
    """Bytes for each of 2 · 1,024 · 1,024 values; each state in fewer bits has a scale, in 512 bytes."""
    scales = sum(options.count(dtype) for dtype in ("=torch.bfloat16", "=torch.uint8")) * 2 * 512
    assert on("h100", ADAM.format(options=options)) == [2 * MiB * state + scales, 2 * MiB * temporary]


def test_gradients_are_added_to_those_in_float32(on: On) -> None:
    """The example of TransformerEngine's repository in short: weights in float8, gradients in `main_grad`."""
    line = """
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor
with te.quantized_model_init(enabled=True):
    layer = linear(fuse_wgrad_accumulation=True)
assert isinstance(layer.weight, QuantizedTensor)
layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")
optimizer = te.optimizers.FusedAdam(layer.parameters(), master_weights=True, use_decoupled_grad=True)
sizes = []
for _ in range(2):
    optimizer.zero_grad()
    with te.autocast():
        layer(torch.empty(4096, 1024, dtype=torch.bfloat16, device="cuda")).sum().backward()
    assert layer.weight.grad is None
    layer.weight.decoupled_grad = layer.weight.main_grad
    before = torch.cuda.memory_allocated()
    optimizer.step()
    sizes.append(torch.cuda.memory_allocated() - before)
print(json.dumps(sizes))
"""
    assert on("h100", line) == [3 * 4 * TOKEN_BYTES, 0]


GROUPED = """
class Experts(te.GroupedLinear):
    width = 1024
    def forward(self, x):
        return super().forward(x, [len(x) // 4] * 4)
"""


def test_experts_of_one_product_keep_nothing_but_their_input(on: On) -> None:
    line = "measured(Experts(4, 1024, 4096, bias=False, params_dtype=torch.bfloat16))"
    gradients = 2 * TOKEN_BYTES + 4 * 2 * 1024 * 4096  # of the input, and of four weights
    assert on("h100", GROUPED + line) == [OUT, OUT + OUT + gradients, OUT + gradients]


def test_experts_in_float8_keep_one_copy_of_their_input_and_two_of_each_weight(on: On) -> None:
    line = "measured(Experts(4, 1024, 4096, bias=False, params_dtype=torch.bfloat16), Float8CurrentScaling())"
    assert on("h100", GROUPED + line)[0] == OUT + (TOKEN_BYTES + 512) + 4 * 2 * (1024 * 4096 + 512)


def test_megatron_gets_a_gradient_that_all_weights_of_a_shape_share(on: On) -> None:
    line = """
layers = [linear(fuse_wgrad_accumulation=True) for _ in range(2)]
for layer in layers:
    layer.weight.main_grad = torch.zeros(layer.weight.shape, device="cuda")
    layer.weight.grad_added_to_main_grad = False
x = torch.empty(16, 1024, dtype=torch.bfloat16, device="cuda")
layers[0](x).sum().backward()
before = torch.cuda.memory_allocated()
layers[1](x).sum().backward()
assert all(layer.weight.grad_added_to_main_grad and layer.weight.grad is not None for layer in layers)
print(json.dumps([torch.cuda.memory_allocated() - before]))
"""
    assert on("h100", line) == [0]


TENSOR_PARALLEL = """
import torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(0)
def shared(layer, tokens, width):
    layer(torch.empty(16, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)).sum().backward()
    layer.zero_grad()
    x = torch.empty(tokens, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    sizes = [layer.weight.numel()]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = layer(x)
    sizes += [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, len(out)]
    out.backward(torch.empty_like(out))
    print(json.dumps(sizes))
options = {"bias": False, "params_dtype": torch.bfloat16, "tp_group": dist.group.WORLD, "tp_size": 2}
"""


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        # Half of the 4,096 outputs; with sequence parallelism, the tokens of both ranks while the product runs.
        (
            'te.Linear(1024, 4096, parallel_mode="column", **options), 4096, 1024',
            [2048 * 1024, OUT // 2, OUT // 2, 4096],
        ),
        (
            'te.Linear(1024, 4096, parallel_mode="column", sequence_parallel=True, **options), 2048, 1024',
            [2048 * 1024, OUT // 2, OUT // 2 + 2 * TOKEN_BYTES, 4096],
        ),
        # Half of the inputs: the sum over ranks stands where the product stood, or each rank gets half of its tokens.
        (
            'te.Linear(4096, 1024, parallel_mode="row", **options), 4096, 2048',
            [1024 * 2048, 2 * TOKEN_BYTES, 2 * TOKEN_BYTES, 4096],
        ),
        (
            'te.Linear(4096, 1024, parallel_mode="row", sequence_parallel=True, **options), 4096, 2048',
            [1024 * 2048, TOKEN_BYTES, 3 * TOKEN_BYTES, 2048],
        ),
    ],
)
def test_ranks_share_a_layer(
    layer: str, expected: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENGINE + TENSOR_PARALLEL + f"shared({layer})")
    memsize.run(script, gpu="h100", gpus=2)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("[")]
    assert json.loads(lines[-1])[: len(expected)] == expected


def test_what_megatron_imports_of_transformer_engine(on: On) -> None:
    """Its `extensions/transformer_engine.py`, `fp8_utils.py` and `tensor_parallel/random.py`, as far as they insist."""
    line = """
import transformer_engine
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.distributed import activation_recompute_forward
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast, fp8_model_init
from transformer_engine.pytorch.router import fused_moe_aux_loss
class Tracker(transformer_engine.pytorch.distributed.CudaRNGStatesTracker): pass
class Scaling(transformer_engine.common.recipe.DelayedScaling): pass
def made() -> transformer_engine.pytorch.ops.Sequential: pass
with fp8_autocast(), activation_recompute_forward(activation_recompute=True):
    assert FP8GlobalStateManager.is_fp8_enabled()
tracker = Tracker()
tracker.add("experts", 1)
with tracker.fork("experts"):
    assert tracker.is_initialized() and not FP8GlobalStateManager.is_fp8_enabled()
assert te.RMSNorm(1024, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16
try:
    fused_moe_aux_loss()
except RuntimeError as error:
    assert "not simulated" in str(error)
x = torch.empty(64, 2, 8, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
frequencies = torch.empty(64, 1, 1, 128, device="cuda")
before = torch.cuda.memory_allocated()
out = apply_rotary_pos_emb(x, frequencies, tensor_format="sbhd", fused=True)
out.sum().backward()
print(json.dumps([torch.cuda.memory_allocated() - before]))
"""
    assert on("h100", line) == [2 * 2 * 64 * 2 * 8 * 128]  # the rotated tensor and the gradient


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


def test_the_kernels_of_deepspeeds_optimizers_need_not_be_built(figures: Figures, tmp_path: Path) -> None:
    """As its FusedAdam loads them and calls them: state in the dtype of the parameter, updated in place."""
    package = tmp_path / "deepspeed" / "ops" / "op_builder"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").write_text("")
    (package / "builder.py").write_text(
        "class OpBuilder:\n"
        "    def __init__(self, name):\n        self.name = name\n"
        "    def load(self, verbose=False):\n        raise RuntimeError(f'no compiler for {self.name}')\n"
    )
    line = f"""
sys.path.insert(0, {str(tmp_path)!r})
builder = importlib.import_module("deepspeed.ops.op_builder.builder")
weight = torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda")
state = [torch.zeros_like(weight) for _ in range(2)]
before = torch.cuda.memory_allocated()
kernels = builder.OpBuilder("fused_adam").load()
kernels.multi_tensor_adam(65536, torch.zeros(1), [[weight], [weight], *([moment] for moment in state)], 1e-3)
builder.OpBuilder("cpu_adam").load(verbose=True).create_adam(0, 1e-3)
try:
    builder.OpBuilder("transformer").load()
except RuntimeError as error:
    print(json.dumps([str(error), torch.cuda.memory_allocated() - before]))
"""
    answer, _ = figures("import importlib, json, sys, torch\n", line)
    assert answer == ["no compiler for transformer", 0]


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


def test_selective_checkpointing_keeps_the_output_of_xformers(figures: Figures) -> None:
    head = """
import json, torch, xformers.profiler
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts as contexts
from xformers.ops import AttentionBias, fmha
mask = fmha.attn_bias.LowerTriangularMask()
assert isinstance(mask, AttentionBias)
assert fmha.flash.FwOp.OPERATOR == torch.ops.xformers_flash.flash_fwd
x = torch.zeros(1, 1024, 16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
def attend(x):
    return fmha.memory_efficient_attention(x, x, x, attn_bias=mask).relu()
def grown(policy):
    before = torch.cuda.memory_allocated()
    out = checkpoint(attend, x, use_reentrant=False, context_fn=lambda: contexts(policy))
    after = torch.cuda.memory_allocated()
    out.sum().backward()
    return after - before
"""
    line = "print([grown([]), grown([torch.ops.xformers_flash.flash_fwd.default])])\n"
    (plain, keeping), _ = figures(head, f"with xformers.profiler.profile():\n    {line}")
    # The result of relu, 2 bytes for each of 1,024 × 16 × 64; beside it the output, a sum of 4 bytes for each row of
    # each head, and the state of the random numbers, which takes a block of 512 bytes.
    assert plain == 2 * MiB
    assert keeping == plain + 2 * MiB + 4 * 1024 * 16 + 512 == 4_260_352


# -- a server in the process that trains -------------------------------------------------------------------------------


def small_policy(folder: Path) -> str:
    """A config without weights."""
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "vocab_size": 1000}
    (folder / "policy").mkdir()
    (folder / "policy" / "config.json").write_text(json.dumps(config))
    return str(folder / "policy")


def test_sglang_takes_its_share_and_gives_it_back(figures: Figures, tmp_path: Path) -> None:
    line = f"""
import json, torch
import sglang as sgl
total = torch.cuda.get_device_properties(0).total_memory
engine = sgl.Engine(model_path={small_policy(tmp_path)!r}, mem_fraction_static=0.25, enable_memory_saver=True)
sizes = [total, torch.cuda.memory_allocated()]
answers = engine.generate(["one", "two"], {{"max_new_tokens": 7, "n": 2}})
assert [len(answer["output_ids"]) for answer in answers] == [7] * 4
assert len(engine.generate(input_ids=[1, 2, 3])["output_ids"]) == 128
engine.release_memory_occupation(tags=["kv_cache"])
sizes.append(torch.cuda.memory_allocated())
engine.release_memory_occupation(tags=["weights"])
sizes.append(torch.cuda.memory_reserved())
engine.resume_memory_occupation()
sizes.append(torch.cuda.memory_allocated())
engine.shutdown()
engine = sgl.Engine(model_path={str(tmp_path / "policy")!r})
sizes.append(torch.cuda.memory_allocated())
print(json.dumps(sizes))
"""
    (total, share, weights, asleep, awake, default), answer = figures("", line)
    assert 0 <= share - total // 4 <= 3 * MiB and awake == share and asleep == 0
    # Embedding and head, 7 matrices of 64 by 64, and three norms, in 16 bits and one block of 512 bytes more at most.
    assert 0 <= weights - 2 * (2 * 1000 * 64 + 7 * 64 * 64 + 3 * 64) < 512
    # 0.5.9 leaves 512 MiB, 1.5 per token of 8,192, 2 per sequence of 256 in an 80 GiB card's graphs, and 128.
    left = (512 + 1.5 * 8192 + 2 * 256 + 128) * MiB
    assert default == pytest.approx(total - left, rel=0.001)
    assert any("sglang is not installed" in note for note in answer.trace.notes)


def test_a_server_takes_its_share_and_gives_it_back(figures: Figures, tmp_path: Path) -> None:
    policy = small_policy(tmp_path)
    line = f"""
import json, torch
from vllm import LLM, SamplingParams
server = LLM({policy!r}, gpu_memory_utilization=0.25, enable_sleep_mode=True)
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


def test_functions_of_bitsandbytes_pack_a_weight(figures: Figures) -> None:
    """As Unsloth calls them: 2²⁰ weights in 4 bits, 512 KiB, and a maximum of 4 bytes for each block of them.

    Under double quantization the maxima are bytes, with a float32 for 256 of them, 256 values, a mean and 16 values.
    """
    head = """
import json, torch
from bitsandbytes.functional import dequantize_4bit, get_ptr, lib, quantize_4bit, quantize_nf4
weight = torch.empty(1024, 1024, dtype=torch.bfloat16, device="cuda")
quantize_4bit(weight, compress_statistics=True)  # which makes the values of 8-bit codes, once
def size(**options):
    before = torch.cuda.memory_allocated()
    packed, state = quantize_4bit(weight, **options)
    lib.cdequantize_blockwise_fp32(get_ptr(packed))
    assert dequantize_4bit(packed, state).shape == weight.shape
    return torch.cuda.memory_allocated() - before
"""
    line = "print(json.dumps([size(), size(blocksize=128), size(compress_statistics=True, quant_type='nf4')]))"
    sizes, _ = figures(head, line)
    packed, blocks = 2**20 // 2, 2**20 // 64
    assert sizes == [
        packed + 4 * blocks + 512,
        packed + 4 * blocks // 2 + 512,
        packed + blocks + 512 + 1024 + 512 + 512,
    ]


def test_a_transformers_without_a_table_of_flash_attentions_is_left_alone(warm_python: Python, tmp_path: Path) -> None:
    """As 4.50 is, whose models could not be imported."""
    (tmp_path / "transformers").mkdir()
    for name in ("__init__.py", "modeling_flash_attention_utils.py"):
        (tmp_path / "transformers" / name).write_text("")
    code = """
import memsize, sys
sys.path.insert(0, "")
with memsize.virtual_gpu("t4"):
    import transformers.modeling_flash_attention_utils as module
print(module.__file__)
"""
    expected = tmp_path / "transformers" / "modeling_flash_attention_utils.py"
    assert Path(warm_python("-c", code).stdout.strip()).resolve() == expected


def _package_of_ray(folder: Path) -> None:
    (folder / "ray" / "util").mkdir(parents=True)
    (folder / "ray" / "__init__.py").write_text(
        "import ray.cloudpickle, ray.util\ndef init(**options):\n    while True: pass\n"
    )
    (folder / "ray" / "cloudpickle.py").write_text("from cloudpickle import dumps, loads\n")
    (folder / "ray" / "util" / "__init__.py").write_text("from ray.util import placement_group as _\n")
    (folder / "ray" / "util" / "placement_group.py").write_text("def placement_group(bundles): raise SystemError\n")


WORKERS = """
import asyncio, os
import ray, torch
from ray.util.placement_group import placement_group

@ray.remote
class Server:
    def __init__(self):
        self.waiting = asyncio.Event()
        self.cache = torch.empty(2**20, device="cuda")
    async def open(self):
        self.waiting.set()
        return torch.cuda.memory_allocated()
    async def answer(self, tokens, worker):
        await self.waiting.wait()
        return tokens + [len(tokens)], await worker.double.remote(4)

class Worker:
    def __init__(self, width, server):
        assert os.environ["RANK"] == "0"
        self.weights, self.server = torch.empty(width, 2**18, device="cuda"), server
    def double(self, number):
        return 2 * number
    def take(self, rows):
        rows.append(1)
        return sum(rows)

assert not ray.is_initialized()
ray.init(num_cpus=8)
assert ray.is_initialized() and ray.nodes()[0]["Resources"]["GPU"] == 1
group = placement_group([{"GPU": 1, "CPU": 2}])
assert ray.get(group.ready()).bundle_count == 1
server = Server.options(name="server").remote()
actors = ray.remote(num_gpus=1)(Worker)
assert actors.__ray_actor_class__ is Worker
worker = actors.options(runtime_env={"env_vars": {"RANK": 0, "WORLD_SIZE": 1}}).remote(2, ray.get_actor("server"))
rows = [1, 2]
assert ray.get([worker.take.remote(rows), worker.double.remote(ray.put(8))]) == [4, 16] and rows == [1, 2]
answer = server.answer.remote([5, 6], worker)
ready, open_ = ray.wait([answer], timeout=0.01)
assert ready == [] and open_ == [answer]
assert ray.get(server.open.remote()) == (4 + 2) * 2**20
assert ray.get(answer) == ([5, 6, 2], 8)
assert ray.get(worker.__ray_call__.remote(lambda self, more: len(self.weights) + more, 3)) == 5
assert asyncio.run(asyncio.wait_for(worker.double.remote(1), 60)) == 2
try:
    ray.get(worker.take.remote(None))
except AttributeError as error:
    print(error)
else:
    raise AssertionError
"""


def test_actors_of_ray_run_in_this_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A server of 4 MiB and a worker of 2 × 2¹⁸ numbers, 2 MiB, share the GPU; what is sent to one is a copy."""
    _package_of_ray(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    run = memsize.run(script, gpu="t4")
    assert run.failure is None and "no attribute 'append'" in capfd.readouterr().out
    assert any("actors and tasks run in this process" in note for note in run.trace.notes)
    assert sum(storage.bytes for storage in run.trace.storages) == 6 * MiB


def test_an_actor_of_another_rank_is_refused(tmp_path: Path) -> None:
    _package_of_ray(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import ray\nray.init()\n"
        "class Worker: pass\n"
        "ray.remote(Worker).options(runtime_env={'env_vars': {'RANK': '1', 'WORLD_SIZE': '2'}}).remote()\n"
    )
    with pytest.raises(memsize.ForwardError, match="rank 1 of 2, but memsize runs"):
        memsize.run(script, gpu="t4")


SERVED = """
import asyncio, sys, torch
import vllm, vllm.entrypoints.cli.serve
from importlib.metadata import version
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
assert version("vllm") == vllm.__version__ and CompilationConfig(level=3).level == 3
try:
    import vllm.model_executor.models.mixtral
except ImportError:
    pass
class Extension:
    def count(self, more):
        return self.model_runner.model.load_weights([("a", 1)]), more
async def main(options):
    parser = FlexibleArgumentParser()
    for command in vllm.entrypoints.cli.serve.cmd_init():
        command.subparser_init(parser.add_subparsers()).set_defaults(dispatch=command.cmd)
    args = parser.parse_args(["serve", *options])
    args.model = args.model_tag
    engine = AsyncLLM.from_vllm_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    sizes = [torch.cuda.memory_allocated()]
    assert await engine.collective_rpc("count", args=(5,)) == [({"a"}, 5)]
    await engine.collective_rpc("sleep", kwargs={"level": 2})
    sizes.append(torch.cuda.memory_allocated())
    await engine.collective_rpc("wake_up", kwargs={"tags": ["weights"]})
    sizes.append(torch.cuda.memory_allocated())
    prompt, options = TokensPrompt(prompt_token_ids=[1, 2, 3]), vllm.SamplingParams(max_tokens=9)
    async for answer in engine.generate(prompt=prompt, sampling_params=options, request_id="0"):
        assert len(answer.outputs[0].token_ids) == 9 and len(answer.prompt_token_ids) == 3
    print(sizes)
asyncio.run(main(sys.argv[1:]))
"""


def test_the_asynchronous_engine_of_vllm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A quarter of the GPU, with an extension of its worker: asleep it holds nothing, and then its weights alone."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 1000}
    config |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    script = tmp_path / "script.py"
    script.write_text(SERVED)
    options = ["--gpu_memory_utilization", "0.25", "--worker_extension_cls", "__main__.Extension", "--enforce_eager"]
    run = memsize.run(script, (str(tmp_path / "tiny"), *options), gpu="t4")
    assert run.failure is None
    share, asleep, weights = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert 0 <= share - run.card.bytes // 4 <= 3 * MiB and asleep == 0
    assert 0 <= weights - 2 * (2 * 1000 * 64 + 7 * 64 * 64 + 3 * 64) < 512
