"""The weights by which a server drafts tokens: a head that reads the model's states (EAGLE, MTP), or a model.

A head shares the embedding of the model, EAGLE's first and MTP's the output layer too (`_maybe_share_embeddings` and
`_maybe_share_lm_head` in vLLM's v1/spec_decode/llm_base_proposer.py). It joins the embedding of a token with a state
(`fc` in model_executor/models/llama_eagle.py, `eh_proj` in deepseek_mtp.py), EAGLE-3's a state with those of three
layers, and its first layer reads embedding and state side by side (llama_eagle3.py).

Known limits: a head is in the dtype of its config; an embedding of its own counts only where it is of another width.
"""

from __future__ import annotations

from typing import Any, Final

from memsize.errors import InputError
from memsize.records.trace import Trace
from memsize.workloads.serving import text_config, text_model

_STATES: Final = 3
"""Layers whose states EAGLE-3 reads (`num_aux_hidden_states`)."""
_INDEX: Final = 8
_READS_BOTH: Final = ("q_proj", "k_proj", "v_proj")
_PREDICTED: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def aux_states(method: str, draft: Any) -> int:
    """How many states of the model stay for a draft until its step ends."""
    return int(getattr(text_config(draft), "num_aux_hidden_states", None) or _STATES) if method == "eagle3" else 0


def head_beside(method: str, draft: Any, target: Any, tp: int) -> int:
    """Bytes that a head of EAGLE has beside the layers of `draft`, a model of its config, or (less than 0) shares."""
    config, width = text_config(draft), draft.dtype.itemsize
    hidden, of_target = config.hidden_size, text_config(target).hidden_size
    embedding, head = draft.get_input_embeddings().weight, draft.get_output_embeddings().weight
    beside = -embedding.nbytes if hidden == of_target else 0
    if method == "eagle":
        shared = 0 if head is embedding else head.nbytes
        return int(beside - shared + 2 * hidden * hidden * width)
    vocabulary = getattr(config, "draft_vocab_size", None) or config.vocab_size * tp
    own = -(-vocabulary // tp) * hidden * width - (0 if head is embedding else head.nbytes)
    attention = getattr(draft.base_model.layers[0], "self_attn", None)
    if not all(hasattr(attention, name) for name in _READS_BOTH):
        raise InputError(f"{type(draft).__name__} is no head of EAGLE-3 that memsize covers: those have Llama's layers")
    rows = sum(getattr(attention, name).out_features for name in _READS_BOTH)
    joined = aux_states(method, draft) * of_target * hidden + (rows + 1) * hidden
    return int(beside + own + joined * width + vocabulary * _INDEX)


def predicted_layers(target: Any) -> int:
    """The layers of MTP in the checkpoint of a model."""
    config = text_config(target)
    return next((int(count) for name in _PREDICTED if (count := getattr(config, name, None))), 1)


def predicted_weights(target: Any, trace: Trace, name: str) -> int:
    """Bytes of the layers of MTP: as the model's last layer without a state, with the product that joins embedding and
    state, and three norms.
    """
    body, _ = text_model(target, name)
    *_, layer = (layer for layer in body.layers if not _has_state(layer))
    path = next(path for path, module in target.named_modules() if module is layer)
    stored = {tensor.name: tensor for tensor in trace.tensors if f"{tensor.layer}.".startswith(f"{path}.")}
    size = sum(sum(part.bytes for part in tensor.parts) or tensor.bytes for tensor in stored.values())
    hidden = text_config(target).hidden_size
    return predicted_layers(target) * int(size + (2 * hidden + 3) * hidden * target.dtype.itemsize)


def _has_state(layer: Any) -> bool:
    return any(hasattr(module, "conv1d") for module in layer.modules())
