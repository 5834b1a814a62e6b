"""The GPU memory of a server inside the process that trains: its weights in 16 bits, and a KV cache beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

TAGS: Final = ("weights", "kv_cache")
"""The parts of a server's memory, by the names that servers have for them."""
_BYTES: Final = 2


class ServerMemory(nn.Module):
    """The weights and the KV cache of the model whose config `model` names, in a `share` of the GPU.

    Raises ValueError where the share is too small for the weights.
    """

    weights: nn.Parameter | None
    kv_cache: torch.Tensor | None

    def __init__(self, model: str, share: float, gpus: int, trusts: bool) -> None:
        super().__init__()
        size = int(share * torch.cuda.get_device_properties(0).total_memory)
        weights = _parameters_of(model, trusts) * _BYTES // gpus
        if weights >= size:
            raise ValueError(
                f"the server's share of the GPU, {share:g}, has no room for the KV cache: the weights of {model} take "
                f"{weights / size:.2f} of it"
            )
        self._sizes = dict(zip(TAGS, (weights, size - weights), strict=True))
        self.take(TAGS)

    def release(self, tags: Iterable[str]) -> None:
        """Free some parts. They are in pools of their own: nothing else gets their segments."""
        for tag in tags:
            if tag == "weights":
                self.weights = None
            else:
                self.kv_cache = None
        torch.cuda.empty_cache()

    def take(self, tags: Iterable[str]) -> None:
        """Take those that are free again."""
        for tag in tags:
            if getattr(self, tag, None) is None:
                memory = torch.empty(self._sizes[tag], dtype=torch.uint8, device="cuda")
                if tag == "weights":
                    self.weights = nn.Parameter(memory, requires_grad=False)
                else:
                    self.kv_cache = nn.Buffer(memory)


def _parameters_of(model: str, trusts: bool) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=trusts)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make(config, trust_remote_code=trusts).parameters())
