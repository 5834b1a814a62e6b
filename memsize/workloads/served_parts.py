"""The part of a server on one GPU: its part of a model, and what only a server keeps beside the weights."""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from memsize.errors import InputError
from memsize.loading.hubs import checkpoint_config_of
from memsize.records.gpu import Card
from memsize.spec.generation import ServerArguments
from memsize.spec.server_rules import Rules, ServedKind, StateBlocks, StateKind
from memsize.workloads.serving import text_config

_WIDTHS = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size", "shared_intermediate_size",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_STATEFUL = ("linear", "mamba", "recurrent", "conv", "hybrid")
"""Words in the names of layers that keep a state."""
_OF_STATES = (
    "linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "mamba_d_ssm", "mamba_expand",
)  # fmt: skip
"""Heads and widths of states: of gated delta nets, of Nemotron-H, and as Bamba, Falcon-H1 and Jamba name them."""
_GROUPS = ("n_groups", "mamba_n_groups")
_CHUNK = 2048
"""The tokens of a chunk of Mamba's first kind, which has none."""
_OF_VIDEOS = 4
_PADDED = 64
_ENCODER = re.compile("vision|visual")


def served_kind(model: Any, *, is_quantized: bool) -> ServedKind:
    config = text_config(model)
    architectures = getattr(model.config, "architectures", None) or [type(model).__name__]
    has_experts = any(getattr(config, name, None) for name in _EXPERTS)
    is_latent = bool(getattr(config, "kv_lora_rank", None))
    return ServedKind(architectures[0], has_experts, has_states(config), is_quantized, is_latent, state_kind(config))


def has_states(config: Any) -> bool:
    """Whether some layers keep a state, by their names in the config."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "block_types", None) or ()
    return any(word in str(kind) for kind in kinds for word in _STATEFUL)


def state_kind(config: Any) -> StateKind:
    """The kind of states of which vLLM caches prefixes in its own way, and which `divided` divides; empty: another."""
    kinds: dict[StateKind, Sequence[str]] = {
        "delta net": _OF_STATES[:2],
        "Mamba-2": _OF_STATES[2:4],
        "Mamba": ("mamba_dt_rank",),
    }
    named = (kind for kind, names in kinds.items() if any(getattr(config, name, None) for name in names))
    return next(named, "")


def state_blocks(model: Any, rules: Rules, card: Card) -> StateBlocks:
    """The blocks with states of a request. Where each has one, it holds whole chunks of the scan
    (`get_mamba_chunk_size` in vLLM's config/model.py).
    """
    blocks, config = rules.states(served_kind(model, is_quantized=False), card), text_config(model)
    chunk = getattr(config, "mamba_chunk_size", None) or getattr(config, "chunk_size", None) or _CHUNK
    return blocks if blocks.blocks else StateBlocks(0, math.lcm(blocks.aligned, chunk))


# -- what only a server stores -----------------------------------------------------------------------------------------


def rotary_tables(model: Any) -> int:
    """Bytes of vLLM's tables of sines and cosines, one for each kind of rotary embedding: all positions times the width
    that is turned, or of the whole head where Gemma 4 turns a part of it by zero (`gemma4_rope.py`), in the dtype of
    the model (`vllm/model_executor/layers/rotary_embedding`, `get_rope`); four times as many positions where those of
    videos have sections (mrope.py there). Granite's hybrids have one only where they name it, but rotary parameters
    always.
    """
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None)
    if not rope or getattr(config, "position_embedding_type", "rope") != "rope":
        return 0
    layers = list(getattr(config, "layer_types", None) or ())
    tables: dict[tuple[object, ...], int] = {}
    for kind, entries in ({kind: own for kind, own in rope.items() if isinstance(own, dict)} or {"": rope}).items():
        own = config
        if getattr(config, "per_layer_config", None) and kind in layers:
            own = config.per_layer_config[layers.index(kind)]
        of_head = getattr(own, "qk_rope_head_dim", None) or getattr(own, "head_dim", None)
        of_head = int(of_head or own.hidden_size // own.num_attention_heads)
        partial = 1 if entries.get("rope_type") == "proportional" else entries.get("partial_rotary_factor", 1)
        width = int(of_head * partial)
        key = *sorted((name, str(entry)) for name, entry in entries.items()), width
        tables[key] = _positions(config, entries) * width * (_OF_VIDEOS if entries.get("mrope_section") else 1)
    return sum(tables.values()) * int(model.dtype.itemsize)


def _positions(config: Any, rope: dict[str, Any]) -> int:
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1
    positions = config.max_position_embeddings
    if kind == "yarn":
        positions = rope.get("original_max_position_embeddings") or positions
    return int(positions * factor) if kind in ("yarn", "linear", "dynamic") else int(positions)


def layered_images(model: Any, served: ServerArguments) -> int:
    """Bytes of what the first layers add of an image's states to those of a step's tokens, for which vLLM has buffers
    (`deepstack_input_embeds` in `qwen3_vl.py`).
    """
    levels = getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    if served.rules.server != "vLLM":
        return 0
    return int(len(levels) * served.tokens * text_config(model).hidden_size * model.dtype.itemsize)


def latent_copies(model: Any, *, absorbed: bool, quantized: bool) -> int:
    """Bytes of what vLLM makes of the projections of latent attention beside them: their products where `absorbed`
    (`W_Q_UK`, `W_UV_O` and `W_QR` in `vllm/attention/backends/mla/utils.py`), else a copy of the second one of keys and
    values in the model's dtype where it is `quantized` (`process_weights_after_loading` of `mla/common.py`).

    Known limit: products of fp8 weights, which are fp8 again, are counted in the model's dtype.
    """
    config = text_config(model)
    rank = getattr(config, "kv_lora_rank", None)
    if not rank:
        return 0
    if absorbed:
        queries = config.q_lora_rank or config.hidden_size
        of_head = rank * (queries + config.hidden_size) + queries * config.qk_rope_head_dim
    elif quantized:
        of_head = rank * (config.qk_nope_head_dim + config.v_head_dim)
    else:
        return 0
    return int(config.num_hidden_layers * config.num_attention_heads * of_head * model.dtype.itemsize)


def vocabulary_padding(model: Any) -> int:
    """Bytes of the rows that vLLM adds to embedding and head, so that they are a multiple of 64
    (`vllm/model_executor/layers/vocab_parallel_embedding.py`).
    """
    weights = {
        id(layer.weight): layer.weight
        for layer in (model.get_input_embeddings(), model.get_output_embeddings())
        if isinstance(getattr(layer, "weight", None), torch.Tensor)
    }
    return sum(-len(weight) % _PADDED * weight[0].numel() * weight.itemsize for weight in weights.values())


def mxfp4_padding(model: Any, rules: Rules, card: Card) -> int:
    """Bytes that vLLM adds to experts in MXFP4 as it rounds up their sizes for the kernels of a GPU
    (`mxfp4_round_up_hidden_size_and_intermediate_size` in layers/fused_moe/oracle/mxfp4.py): Triton's on Hopper, which
    it has since 0.12, FlashInfer's on datacenter Blackwell since 0.11.1, else Marlin's. But for Marlin biases are in
    float32.
    """
    config = checkpoint_config_of(model)
    if rules.server != "vLLM" or not isinstance(config, dict) or config.get("quant_method") != "mxfp4":
        return 0
    is_triton = card.capability[0] == 9 and rules.version >= (0, 12)
    is_flashinfer = card.capability[0] == 10 and rules.version >= (0, 11, 1)
    of_inner = 64 if is_triton else 256 if is_flashinfer and rules.version < (0, 27) else 128
    size = 0
    for module in model.modules():
        if hasattr(module, "gate_up_proj_bias"):
            experts, *sizes = module.down_proj.shape
            inner, hidden = _rounded(sizes[0], of_inner), sizes[1] if is_triton else _rounded(sizes[1], 256)
            stored = _swizzled(inner, hidden, rules) if is_triton else 3 * inner * hidden * 17 // 32
            biases = (2 * inner + hidden) * (4 if is_triton or is_flashinfer else 2)
            before = 3 * sizes[0] * sizes[1] * 17 // 32 + (2 * sizes[0] + sizes[1]) * 2
            size += experts * (stored + biases - before)
    return size


_ADAPTED_VOCABULARY: Final = re.compile("llama|mistral|mixtral|granite|nemotron|jamba|exaone|falcon_h1|lfm2|minicpm")
"""Types of models that name their embedding and head among `embedding_modules` (vLLM's `model_executor/models`)."""
_ADAPTED_LATER: Final = re.compile("qwen3(?!_vl|_next|_omni)")
_ADAPTED_SINCE: Final = (0, 17, 0)


def adapter_slots(model: Any, served: ServerArguments) -> int:
    """Bytes of the two stacks of matrices that a server has for adapters of each linear layer, of the largest rank
    (`create_lora_weights` in vLLM's lora/layers/base_linear.py, `LoRAMemoryPool` in SGLang's lora/mem_pool.py): a
    sharded layer's second one is sharded with it. Experts have their own (fused_moe.py there), and in vLLM some models'
    embedding and head, which are whole on each GPU.

    Known limit: adapters of a router, and up to vLLM 0.11 256 tokens that an adapter may add, are not counted.
    """
    if not served.loras:
        return 0
    rules, config, width = served.rules, text_config(model), 0
    body = model.base_model
    for path, module in body.named_modules():
        if _ENCODER.search(path):
            continue
        if isinstance(module, nn.Linear):
            width += module.in_features + module.out_features
        elif rules.adapts_experts and isinstance(getattr(module, "down_proj", None), nn.Parameter):
            experts = module.down_proj.shape[0]
            inner = module.down_proj[0].numel() // config.hidden_size
            first = 1 if hasattr(module, "gate_up_proj_bias") else 2  # gpt-oss has one matrix for gate and up
            width += experts * (first * config.hidden_size + 2 * inner + inner + config.hidden_size)
    kind, vllm = str(config.model_type), rules.server == "vLLM"
    later = _ADAPTED_LATER.match(kind) and rules.version >= _ADAPTED_SINCE
    if vllm and (_ADAPTED_VOCABULARY.match(kind) or later):
        width += 2 * (config.vocab_size * served.tp + config.hidden_size)
    return int(served.loras * served.lora_rank * width * model.dtype.itemsize)


def _swizzled(inner: int, hidden: int, rules: Rules) -> int:
    """Bytes of an expert's weights and scales in Triton's order (`HopperMXValueLayout` and `HopperMXScaleLayout` in
    triton_kernels, of Triton 3.6 from vLLM 0.17 to 0.21 and else 3.5). Up to vLLM 0.24 the scales of the checkpoint
    stay beside them.
    """
    rows, packed = (64, 64) if (0, 17) <= rules.version < (0, 22) else (16, 32)
    stored = 3 * inner * hidden // 32 if rules.version < (0, 25) else 0
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        stored += _rounded(outputs, rows) * _rounded(inputs // 2, packed)
        stored += _rounded(outputs, 256) * _rounded(inputs // 32, 2)
    return stored


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# -- one GPU's part ---------------------------------------------------------------------------------------------------


def divided(model: Any, tp: int, name: str) -> dict[str, object]:
    """Compute the config entries of one GPU's part of a model of transformers, as vLLM divides it.

    Heads, the width between the layers of an MLP and the vocabulary are divided; fewer key-value heads than GPUs are
    repeated (`vllm/model_executor/models/llama.py`). So are the heads of states and, as far as there are enough, their
    groups (`MambaStateShapeCalculator` in `vllm/model_executor/layers/mamba/mamba_utils.py`). The vocabulary is first
    padded to a multiple of 64 (`vllm/model_executor/layers/vocab_parallel_embedding.py`). Of a model that reads images
    this is its language part.
    Raises `InputError` where `tp` GPUs cannot share the model.
    """
    part, text = _divided_text(model, tp, name), text_config(model)
    return part if text is model.config else {_name_of(text, model.config): text.to_dict() | part}


def part_of(model: Any, tp: int, name: str) -> nn.Module:
    """Build, on meta, the part of a model of transformers that one of `tp` GPUs stores. Raises as `divided` does."""
    entries, text = _divided_text(model, tp, name), text_config(model)
    whole = copy.deepcopy(model.config)
    config = whole if text is model.config else getattr(whole, _name_of(text, model.config))
    for entry, value in entries.items():
        setattr(config, entry, value)
    with torch.device("meta"):
        part: nn.Module = type(model)._from_config(whole, dtype=model.dtype)
    part.generation_config = model.generation_config
    return part.eval()


def encoder_elsewhere(model: Any, tp: int) -> int:
    """Bytes of an image encoder's linear layers that the other of `tp` GPUs have (`QKVParallelLinear` and others in
    vLLM's `siglip.py`, `pixtral.py`, `clip.py`, `qwen2_5_vl.py`): `part_of` leaves them whole.
    """
    layers = (layer for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and _ENCODER.search(path))
    return sum(layer.weight.nbytes for layer in layers) * (tp - 1) // tp


def _name_of(text: Any, config: Any) -> str:
    return next(str(name) for name, value in vars(config).items() if value is text)


def _divided_text(model: Any, tp: int, name: str) -> dict[str, object]:
    config = text_config(model)
    if config is None:
        raise InputError(f"{name} has no config: without it memsize cannot divide it among GPUs")
    entries = vars(config)
    missing = [entry for entry in ("num_attention_heads", "num_key_value_heads", "vocab_size") if entry not in entries]
    if missing or not (hasattr(config, "head_dim") or _reads_head_dim(model)):
        entry = (missing or ["head_dim"])[0]
        raise InputError(f"{name} has no {entry} in its config: without it memsize cannot divide it among GPUs")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    _whole(heads, tp, "attention heads", name)
    if groups % tp and tp % groups:
        raise InputError(f"{name} has {groups} heads of keys and values: {tp} GPUs can neither divide nor repeat them")
    part: dict[str, object] = {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "num_attention_heads": heads // tp,
        "num_key_value_heads": max(groups // tp, 1),
        "vocab_size": _whole(-(-config.vocab_size // _PADDED) * _PADDED, tp, "padded tokens in its vocabulary", name),
        "pad_token_id": None,  # it may be in another card's part
    }
    # Some configs name the sizes of states that no layer has.
    stateful = any(hasattr(module, "conv1d") for module in model.modules())
    names, groups_of_states = (_OF_STATES, _GROUPS) if stateful else ((), ())
    widths = {entry: entries[entry] for entry in (*_WIDTHS, *names) if entries.get(entry)}
    part |= {entry: _whole(width, tp, f"as its {entry}", name) for entry, width in widths.items()}
    # Where GPUs have fewer groups than there are GPUs, each has one (`extra_groups_for_head_shards`).
    return part | {entry: max(entries[entry] // tp, 1) for entry in groups_of_states if entries.get(entry)}


def _reads_head_dim(model: Any) -> bool:
    """Whether a model whose config has no width of heads, such as Qwen2, takes one that is set."""
    return 'self.head_dim = getattr(config, "head_dim"' in inspect.getsource(sys.modules[type(model).__module__])


def _whole(count: int, tp: int, what: str, name: str) -> int:
    if count % tp:
        raise InputError(f"{name} has {count:,} {what}: tp {tp} does not divide them")
    return count // tp
